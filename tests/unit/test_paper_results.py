"""The paper's presets give the results they always gave, to the last bit: costs that are not set cost nothing.

A deliberate change of plans or of the order of the simulator's additions updates the digests.
"""

import hashlib
from dataclasses import replace

import pytest

from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.scenario_presets import load_scenario
from spare_megatron.tools.simulate.sweep import VARIANTS, Variant, variant_name

PRESETS = ("paper_n200", "paper_n600", "paper_n1000")
DIGESTS = {
    "checkpoint-only": "a80f271c80281efa3f2b41d76c17ea1dab0dd4d8c000e00084de87ea17109da7",
    "replication": "e6b0f2f08839f416ab46b105601614da2db02e027cfc5e020e10b58024aaa526",
    "spare, stack": "e07d608719d69b5daee588da4d8c77183922bd4aaa9d9e048a230889485b8aa2",
    "spare, microbatch": "3f26752934e9a1574dc9884211c65ea5749e6cb4ff9bb9ba0ebb034e64467892",
}


def digest_of(variant: Variant) -> str:
    """SHA-256 of times, counts and terms of 150 steps of every preset, lost groups gone for good or for 10 minutes."""
    digest = hashlib.sha256()
    for preset in PRESETS:
        base = load_scenario(preset, {"num_steps": 150, "costs.join_s": 30.0})
        for repair_s in (None, 600.0):
            scenario = replace(base, policy=variant.policy, granularity=variant.granularity, repair_s=repair_s)
            result = simulate(scenario, seed=3)
            assert result.losses > 10
            terms = [spent_s for cause, spent_s in result.terms.items() if cause != "pause" or spent_s]
            times = [result.end_s, result.failure_free_s, result.mean_down, *terms]
            counts = [result.restarts, result.losses, result.saves, result.max_down]
            digest.update(f"{[time_s.hex() for time_s in times]} {counts}".encode())
    return digest.hexdigest()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant_name(variant.policy, variant.granularity))
def test_results_of_the_paper_presets_do_not_change(variant: Variant) -> None:
    assert digest_of(variant) == DIGESTS[variant_name(variant.policy, variant.granularity)]
