"""Fields of `[megatron]` that need a GPU, most of them transformer-engine, too: each changes what is trained."""

from importlib.util import find_spec

import pytest

from spare_megatron.config.megatron_fields import HONOURED
from tests.gpu.one_device import GPU, run_ranks_on
from tests.integration.field_effects import FP8, ON_GPUS, configured, effects_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HAS_APEX = find_spec("fused_weight_gradient_mlp_cuda") is not None


def needs_transformer_engine(name: str) -> bool:
    of_fp8 = set(FP8) <= set(ON_GPUS[name].settings)
    return HONOURED[name].where in ("norms", "te") or of_fp8


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=f"{name}-gpu{'-te' if needs_transformer_engine(name) else ''}")
        for name in sorted(ON_GPUS)
        if name != "gradient_accumulation_fusion" or HAS_APEX
    ],
)
def test_an_honoured_field_changes_what_is_trained_on_gpus(name: str) -> None:
    case = ON_GPUS[name]
    configs = [
        configured(case.settings, {name: value} if value is not None else {}, device="gpu")
        for value in (None, *case.values)
    ]
    num_ranks = configs[0].parallel.ranks_per_group
    before, *found = zip(*run_ranks_on(num_ranks, GPU, effects_on, configs[0], configs), strict=True)
    for value, effects in zip(case.values, found, strict=True):
        changed = [kind for kind in before[0] if [one[kind] for one in before] != [one[kind] for one in effects]]
        assert case.changes in changed, (value, changed)
