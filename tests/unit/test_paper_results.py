"""The paper's presets give the results they always gave, to the last bit: costs that are not set cost nothing.

Whoever changes plans or the order of the simulator's additions on purpose writes the digests anew.
"""

import hashlib
from dataclasses import replace

import pytest

from spare_megatron.simulator.engine import simulate
from spare_megatron.simulator.presets import load_scenario
from spare_megatron.simulator.sweep import VARIANTS, Variant, variant_name

PRESETS = ("paper_n200", "paper_n600", "paper_n1000")
DIGESTS = {
    "checkpoint-only": "5c1d54f379387697d05bbc913dfe814f432fcb9d571bf8c3ad893991c9ed60aa",
    "replication": "208a8ae2da8823909a5291eb6d553366e5d0f69a234af05fde830672619f4a6d",
    "spare, stack": "39e84dad03c776cebe8e806bd413aa996a50fa23fbff8b60a1ae042dd518a972",
    "spare, microbatch": "dafc0c9e4edb372bdb574594b82c8fe34049eb2af7eeb46188c92ae24a5bc6e4",
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
            times = [result.end_s, result.failure_free_s, result.mean_down, *result.terms.values()]
            counts = [result.restarts, result.losses, result.saves, result.max_down]
            digest.update(f"{[time_s.hex() for time_s in times]} {counts}".encode())
    return digest.hexdigest()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant_name(variant.policy, variant.granularity))
def test_results_of_the_paper_presets_do_not_change(variant: Variant) -> None:
    assert digest_of(variant) == DIGESTS[variant_name(variant.policy, variant.granularity)]
