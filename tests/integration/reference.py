"""What a run applied in a step, against one process that holds the full model and the whole global batch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.journal.records import UpdateRecord
from tests.integration.mcore_group import Arrays, all_work, reference_sums, run_group
from tests.integration.watched_rank import dump_file, read_dump
from tests.integration.whole_run import Run


def assert_exact(run: Run, steps: Sequence[int], tolerance: float = 1e-6) -> None:
    """The mean gradients applied in the steps, and their losses, are those of plain autograd on the full model."""
    applied = {step: applied_in(run, step) for step in steps}
    given = [(step, values) for step, (values, _) in applied.items()]
    config = replace(run.config, layout=LayoutConfig(num_groups=run.config.layout.num_groups))
    expected = run_group(mean_gradients, config, given)[0]
    losses = {record.step: record.loss for record in run.journal.of(UpdateRecord)}
    for step, (loss, gradients) in zip(steps, expected, strict=True):
        distance = relative_distance(applied[step][1], gradients)
        assert distance < tolerance, f"step {step}: gradients are {distance:.2e} from those of the full model"
        assert abs(losses[step] - loss) < max(tolerance, 1e-6) * abs(loss)


def mean_gradients(config: RunConfig, given: Sequence[tuple[int, Arrays]]) -> list[tuple[float, Arrays]]:
    """Mean loss and gradients of the full model for each step, with the parameters the step began with."""
    answers = []
    for step, parameters in given:
        work = all_work(config, step)
        num_tokens = len(work) * config.train.micro_batch_size * config.model.seq_length
        loss_sum, sums = reference_sums(config, parameters, work, step)
        answers.append((loss_sum / num_tokens, {name: total / num_tokens for name, total in sums.items()}))
    return answers


def applied_in(run: Run, step: int) -> tuple[Arrays, Arrays]:
    """Values before a step and the mean gradients it applied, of the whole model; equal bits in all groups."""
    groups = sorted({record.group for record in run.journal.of(UpdateRecord) if record.step == step})
    assert groups
    first, *others = [_whole_model(run, step, group) for group in groups]
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    return first


def _whole_model(run: Run, step: int, group: int) -> tuple[Arrays, Arrays]:
    values: Arrays = {}
    gradients: Arrays = {}
    layout = run.config.layout
    width = layout.tensor_parallel
    for stage in range(layout.pipeline_parallel):
        ranks = range(stage * width, (stage + 1) * width)
        parts = [read_dump(dump_file(run.run_dir, step, group, rank)) for rank in ranks]
        for name, (value, gradient, dim) in parts[0].items():
            is_whole = dim is None
            values[name] = value if is_whole else np.concatenate([part[name][0] for part in parts], axis=dim)
            gradients[name] = gradient if is_whole else np.concatenate([part[name][1] for part in parts], axis=dim)
    if run.config.model.tie_embeddings and layout.pipeline_parallel > 1:
        for arrays in (values, gradients):
            np.testing.assert_array_equal(arrays.pop("output_layer.weight"), arrays["embedding.word_embeddings.weight"])
    return values, gradients


def relative_distance(one: Arrays, other: Arrays) -> float:
    """L2 norm of the difference over that of the second."""
    assert one.keys() == other.keys()
    apart = sum(float(np.sum((one[name].astype(np.float64) - other[name]) ** 2)) for name in one)
    size = sum(float(np.sum(other[name].astype(np.float64) ** 2)) for name in other)
    return float(np.sqrt(apart / size))
