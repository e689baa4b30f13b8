"""What a GPU computes, on one of them, and the same on the CPU."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.machine.gpus import visible_gpus
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.gpu import one_device
from tests.gpu.one_device import DEVICES, GPU, run_on, run_ranks_on
from tests.integration import mcore_group
from tests.integration.mcore_group import run_group, work_of
from tests.integration.reference import relative_distance
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(600)

IMPLEMENTATIONS = [
    pytest.param("cpu", "local", id="cpu"),
    pytest.param(GPU, "local", id="gpu", marks=pytest.mark.gpu),
    pytest.param(GPU, "transformer_engine", id="gpu-te", marks=pytest.mark.gpu),
]
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(text_corpus: Path) -> MakeConfig:
    def make(*, mode: str = "fast", megatron: dict[str, Any] | None = None, **model: Any) -> RunConfig:
        shape = {"hidden_size": 64, "num_attention_heads": 2, "seq_length": 64, **model}
        config = tiny_config(text_corpus, LayoutConfig(num_groups=2), mode=mode, **shape)
        config = replace(config, megatron=megatron or {})
        prepare_index(config)
        return config

    return make


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 0.02)])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_the_full_model_in_fp32_on_the_cpu(
    make_config: MakeConfig, device: str, precision: str, limit: float
) -> None:
    config = make_config(precision=precision, transformer_impl="local")
    values, gradients = run_on(device, one_device.values_and_gradients, config)
    alone = make_config(transformer_impl="local")
    ((_, expected),) = run_group(mcore_group.reference_sums, alone, values, mcore_group.all_work(alone))
    assert relative_distance(gradients, expected) < limit


@pytest.mark.parametrize(("device", "implementation"), IMPLEMENTATIONS)
def test_reproducible_sums_depend_on_what_is_computed_alone(
    make_config: MakeConfig, device: str, implementation: str
) -> None:
    """Not on the order, and not on the calls: dropout follows each microbatch, and kernels repeat themselves."""
    config = make_config(
        mode="reproducible", precision=precision_of(device), transformer_impl=implementation, **DROPOUT
    )
    work = work_of((0, 0), (0, 1), (1, 0), (1, 1))
    ways = [[work], [work[::-1]], [work[2:], work[:1], work[1:2]]]
    first, *others = run_on(device, one_device.sums_of, config, *ways)
    assert np.abs(first).max() > 0
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
@pytest.mark.parametrize("device", DEVICES)
def test_buckets_are_judged_and_staged_without_waiting(make_config: MakeConfig, device: str, mode: str) -> None:
    config = make_config(mode=mode, precision=precision_of(device), transformer_impl="local")
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.05))
    found, norms = run_on(device, one_device.unsound_buckets, config)
    middle = len(found) // 2
    assert middle > 1
    assert found == [int(not math.isfinite(norms[bucket])) for bucket in range(len(found))]
    # Fixed point keeps one largest magnitude for all buckets.
    assert found == [int(bucket == middle or (bucket > middle and mode != "fast")) for bucket in range(len(found))]
    assert all(norm > 0.0 for norm in list(norms.values())[:middle])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "precision"), [("local", "bf16"), ("local", "fp32"), ("transformer_engine", "bf16")]
)
def test_reproducible_sums_of_long_sequences_repeat_themselves(
    make_config: MakeConfig, implementation: str, precision: str
) -> None:
    """With many keys per query, attention's usual backward pass adds in any order."""
    shape = {"seq_length": 4096, "hidden_size": 256, "num_attention_heads": 4, **DROPOUT}
    config = make_config(mode="reproducible", precision=precision, transformer_impl=implementation, **shape)
    ways = [[work_of((0, 0), (1, 1))]] * 6
    first, *others = run_on(GPU, one_device.sums_of, config, *ways)
    assert np.abs(first).max() > 0
    for other in others:
        np.testing.assert_array_equal(first, other)


FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


@pytest.mark.parametrize(
    ("device", "model", "megatron"),
    [
        pytest.param("cpu", {"transformer_impl": "local"}, {}, id="cpu"),
        pytest.param(GPU, {"precision": "bf16", **DROPOUT}, FP8, id="gpu-te-fp8", marks=pytest.mark.gpu),
    ],
)
def test_training_continues_bit_for_bit_from_a_copy_of_the_state(
    make_config: MakeConfig, device: str, model: dict[str, Any], megatron: dict[str, Any]
) -> None:
    """In fp8 too: no scale is kept from one step to the next."""
    config = make_config(mode="reproducible", megatron=megatron, **model)
    through, from_memory, from_file = run_on(device, one_device.continued, config)
    assert from_memory == through
    assert from_file == through


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_recomputed_activations_drop_what_the_first_pass_dropped(make_config: MakeConfig, implementation: str) -> None:
    model = {"mode": "reproducible", "precision": "bf16", "transformer_impl": implementation, **DROPOUT}
    work = work_of((0, 0), (1, 1))
    (kept,) = run_on(GPU, one_device.sums_of, make_config(**model), [work])
    (recomputed,) = run_on(GPU, one_device.sums_of, make_config(megatron=RECOMPUTE, **model), [work])
    np.testing.assert_array_equal(kept, recomputed)


@pytest.mark.parametrize(("device", "implementation"), IMPLEMENTATIONS)
def test_training_begins_at_the_entropy_of_guessing_and_learns(
    make_config: MakeConfig, device: str, implementation: str
) -> None:
    config = make_config(precision=precision_of(device), transformer_impl=implementation)
    losses = run_on(device, one_device.losses_of_steps, config, 4)
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("device", "implementation"), IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "ranks"), [(None, 1), (5, 1), (None, 2)])
def test_documents_are_kept_apart_by_all_layers(
    make_config: MakeConfig, device: str, implementation: str, window: int | None, ranks: int
) -> None:
    """Also where ranks that share the device split each sequence."""
    config = make_config(precision=precision_of(device), transformer_impl=implementation, sliding_window=window)
    config = replace(config, layout=replace(config.layout, context_parallel=ranks))
    config = replace(
        config,
        data=replace(config.data, reset_attention_mask=True, end_of_document=ord(" ")),
        train=replace(config.train, micro_batch_size=3),
    )
    limit = 0.02 if device == GPU else 1e-5
    for found, expected, unmasked in run_ranks_on(ranks, device, one_device.attention_within_documents, config):
        for name, values in expected.items():
            assert relative_distance({name: found[name]}, {name: values}) < limit
            assert relative_distance({name: unmasked[name]}, {name: values}) > 0.1


@pytest.mark.gpu
def test_devices_are_counted_as_torch_numbers_them() -> None:
    script = "import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert [gpu.name for gpu in visible_gpus()] == done.stdout.splitlines()


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_made_beside_training_is_the_state_before_it(make_config: MakeConfig, device: str) -> None:
    config = make_config(precision=precision_of(device), transformer_impl="local", hidden_size=256)
    for is_registered in (False, device == GPU):
        before, beside, after = run_on(device, one_device.copied_beside_training, config, is_registered)
        assert beside == before
        assert after != before


@pytest.mark.parametrize("device", DEVICES)
def test_a_newcomer_gets_all_bytes_of_a_donor_that_computes(make_config: MakeConfig, device: str) -> None:
    """Some 10 MB, of many tensors that are smaller than a piece and some that are larger."""
    config = make_config(precision=precision_of(device), transformer_impl="local", mode="reproducible", hidden_size=256)
    before, taken, (params, rest, *others) = run_on(device, one_device.joined_beside_training, config)
    assert taken == before
    assert [params, rest] == others


@pytest.mark.parametrize("device", DEVICES)
def test_partitions_that_are_copied_beside_training_are_those_of_the_last_update(
    make_config: MakeConfig, device: str
) -> None:
    config = make_config(precision=precision_of(device), transformer_impl="local", hidden_size=256)
    config = replace(config, optimizer=replace(config.optimizer, sharding="stacked"))
    before, copied = run_on(device, one_device.partitions_copied_beside_training, config)
    assert len(before) == config.layout.num_groups
    assert copied == before


@pytest.mark.parametrize("device", DEVICES)
def test_digests_are_those_of_the_same_bytes_on_the_cpu(make_config: MakeConfig, device: str) -> None:
    config = make_config(precision=precision_of(device), transformer_impl="local")
    there, here = run_on(device, one_device.digests_of_copies, config)
    assert there == here
    assert len(set(there)) == 3


def precision_of(device: str) -> str:
    return "bf16" if device == GPU else "fp32"
