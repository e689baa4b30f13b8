"""A global batch that grows: sizes of steps, what the controller deals, terms, sizes and figures."""

import re
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as calculators

from spare_megatron.config.loader import ConfigError, dump_run_config, load_run_config
from spare_megatron.config.schema import RunConfig, TrainConfig
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import differences, sequences_before, terms_of
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import ComputeStep
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.tools.plan.show_command import every_setting
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.voting.log_follower import controller_setup

RAMP = "RampupBatchsizeNumMicroBatchesCalculator"
SIZES = [1, 1, 2, 2, 3, 3, 3, 3]
"""Microbatches of a shard in the steps of `CONFIG`."""


def configured(*overrides: str) -> RunConfig:
    ramp = ["ramp_start=1", "ramp_steps=4", "microbatches_per_shard=3"]
    return load_run_config(None, [*(f"spare.{setting}" for setting in ramp), "train.steps=8", *overrides]).config


CONFIG = configured()


@given(start=st.integers(1, 5), increment=st.integers(1, 4), increases=st.integers(0, 6), steps=st.integers(0, 30))
def test_increases_are_equally_far_apart_and_sums_are_those_of_the_steps(
    start: int, increment: int, increases: int, steps: int
) -> None:
    ramp = BatchRamp(largest=start + increment * increases, start=start, increment=increment, steps=steps)
    sizes = [ramp.at(step) for step in range(40)]
    assert [ramp.before(step) for step in range(41)] == [0, *accumulate(sizes)]
    first = [Fraction(k * steps, increases) for k in range(1, increases + 1)]
    assert sizes == [start + increment * sum(step >= when for when in first) for step in range(40)]


def test_a_constant_batch_is_a_ramp_without_steps() -> None:
    assert RunConfig().spare.ramp == BatchRamp.constant(4)
    assert [BatchRamp.constant(4).at(step) for step in (0, 1, 10**9)] == [4, 4, 4]
    assert BatchRamp.constant(4).before(10**9) == 4 * 10**9


@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_every_step_deals_its_own_batch_also_after_losses_and_restarts(granularity: str) -> None:
    controller = Controller(
        controller_setup(configured(f"spare.granularity={granularity}", "checkpoint.max_restarts=1"))
    )
    controller.handle(RunStarted(), now_s=0.0)
    entries: list[Entry] = [Commit(step=step, attempt=step) for step in range(3)]
    fences = [Fence(group=GroupId(group), incarnation=0, reason="") for group in range(4)]
    back = tuple(Member(GroupId(group), 1) for group in range(4))
    entries += [fences[2], Commit(step=3, attempt=3), *fences[:2], fences[3], Restart(step=1, members=back)]
    entries += [Commit(step=step, attempt=4 + step) for step in range(1, 7)]
    found = []
    for entry in entries:
        for action in controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0):
            if isinstance(action, ComputeStep):
                owners = action.plan.work.owners
                assert (owners >= 0).all()
                assert set(np.unique(owners).tolist()) == {int(group) for group in controller.members}
                found.append((action.plan.step, owners.shape))
    assert found == [(step, (4, SIZES[step])) for step in (1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7)]


def test_sizes_count_the_sequences_of_the_ramp() -> None:
    sizes = run_sizes(CONFIG)
    assert (sizes.sequences_per_step, sizes.tokens_per_step) == (4 * 3 * 2, 4 * 3 * 2 * 64)
    assert sizes.tokens == 4 * sum(SIZES) * 2 * 64
    assert differences(terms_of(CONFIG), configured("spare.ramp_steps=5")) == []


def run_record(config: RunConfig) -> RunRecord:
    return RunRecord(**terms_of_run(config), faults=[])


def test_figures_of_a_run_are_those_of_each_steps_batch() -> None:
    run = run_record(CONFIG)
    assert [run.microbatches_of_a_shard(step) for step in range(8)] == SIZES
    assert [sequences_before(CONFIG, step) for step in range(9)] == [0, *accumulate(4 * 2 * size for size in SIZES)]
    assert [run.size_of_step(step) for step in (0, 2, 7)] == [1 / 3, 2 / 3, 1.0]
    constant = run_record(RunConfig())
    assert constant.size_of_step(5) == 1.0


def test_costs_are_not_measured_by_a_run_whose_batch_grows() -> None:
    journal = Journal(lines=(Line(source="driver", at_s=0.0, record=run_record(CONFIG)),))
    with pytest.raises(ValueError, match="grew from 1 to 3 microbatches per shard, and the simulator has one batch"):
        calibrate(journal)


# ------------------------------------------------------------------------------------------------- batches in samples


def message_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, overrides)
    return str(caught.value)


@given(groups=st.integers(1, 9), micro=st.integers(1, 5), samples=st.integers(-3, 400))
def test_a_batch_in_samples_is_one_in_microbatches_or_names_the_nearest_that_is(
    groups: int, micro: int, samples: int
) -> None:
    own = (f"layout.num_groups={groups}", f"train.micro_batch_size={micro}")
    given_in_samples = (*own, f"train.global_batch_size={samples}")
    possible = {m * groups * micro for m in range(1, 500)}
    if samples in possible:
        loaded = load_run_config(None, given_in_samples)
        m = samples // (groups * micro)
        assert loaded.config == load_run_config(None, [*own, f"spare.microbatches_per_shard={m}"]).config
        assert dict(every_setting(loaded.config))["train.global_batch_size"] == samples
        origin = loaded.provenance["spare.microbatches_per_shard"]
        assert origin == f"train.global_batch_size, --set train.global_batch_size={samples}"
    else:
        text = message_of(*given_in_samples)
        (named,) = re.findall(r"set it to ([\d or]+),", text)
        below = max((one for one in possible if one < samples), default=None)
        above = min(one for one in possible if one > samples)
        assert [int(one) for one in named.split(" or ")] == ([] if below is None else [below]) + [above]
        assert f"train.global_batch_size={samples} is no multiple of {groups * micro}" in text


def test_a_batch_that_is_given_twice_has_to_be_the_same() -> None:
    twice = ("train.global_batch_size=64", "spare.microbatches_per_shard=8")  # 4 groups x 2 sequences
    assert load_run_config(None, twice).config == load_run_config(None, twice[1:]).config
    text = message_of("train.global_batch_size=64", "spare.microbatches_per_shard=4")
    assert "=64 means spare.microbatches_per_shard=8, but spare.microbatches_per_shard=4; remove one of them" in text
    assert text.endswith("or set the latter to that (set by --set train.global_batch_size=64)")
    ramp = ("train.global_batch_size=64", "train.rampup_batch_size=[16,16,400]", "spare.ramp_start=3")
    assert "=[16, 16, 400] means spare.ramp_start=2, but spare.ramp_start=3; remove one of them" in message_of(*ramp)


def test_of_a_batch_in_two_units_the_later_source_wins(tmp_path: Path) -> None:
    """All shipped presets of runs have microbatches."""
    demo = Path("demo_cpu")  # 4 groups x 2 sequences, 4 microbatches per shard
    in_samples = ["train.global_batch_size=64", "train.rampup_batch_size=[16,16,400]"]
    loaded = load_run_config(demo, in_samples)
    assert loaded.config.spare.ramp == BatchRamp(largest=8, start=2, increment=2, steps=13)
    assert loaded.provenance["spare.microbatches_per_shard"] == f"train.global_batch_size, --set {in_samples[0]}"
    own = tmp_path / "own.toml"
    own.write_text('include = ["demo_cpu"]\n[train]\nglobal_batch_size = 64\n')
    assert load_run_config(own).config.spare.microbatches_per_shard == 8
    back = load_run_config(own, ["spare.microbatches_per_shard=3"])
    assert back.config.spare.microbatches_per_shard == 3
    assert "train.global_batch_size" not in back.provenance
    with pytest.raises(ConfigError, match=r"means spare.microbatches_per_shard=8, but spare.microbatches_per_shard=3"):
        load_run_config(demo, ["train.global_batch_size=64", "spare.microbatches_per_shard=3"])


def test_a_mistyped_batch_is_one_problem_and_not_two() -> None:
    assert message_of("train.global_batch_size=64", "spare.microbatches_per_shard=x").count("\n") == 0
    assert message_of("train.global_batch_size=x").count("\n") == 0
    assert message_of("train.rampup_batch_size=[8,x,8]").count("\n") == 0


def test_what_a_run_keeps_of_a_batch_in_samples_is_read_by_earlier_versions(tmp_path: Path) -> None:
    config = configured_in_samples(64, 16, 16, 400)
    assert config.train == TrainConfig(steps=9)
    text = dump_run_config(config)
    assert "global_batch_size" not in text
    assert "rampup_batch_size" not in text
    (tmp_path / "config.toml").write_text(text)
    assert load_run_config(tmp_path / "config.toml").config == config
    overridden = load_run_config(tmp_path / "config.toml", ["spare.microbatches_per_shard=10"])
    assert overridden.config.spare.microbatches_per_shard == 10


def configured_in_samples(batch: int, *ramp: int) -> RunConfig:
    return load_run_config(
        None, [f"train.global_batch_size={batch}", f"train.rampup_batch_size={list(ramp)}", "train.steps=9"]
    ).config


@pytest.mark.parametrize(
    ("ramp", "reason"),
    [
        ("[8]", "must be three numbers above 0"),
        ("[8,8,0]", "must be three numbers above 0"),
        ("[12,8,100]", "does not lead from 12 to the global batch of 64 samples by steps of 8, in multiples of 8"),
        ("[8,4,100]", "in multiples of 8"),
        ("[64,8,100]", "does not lead from 64 to the global batch of 64"),
        ("[16,32,100]", "by steps of 32"),
    ],
)
def test_a_ramp_in_samples_that_cannot_be_had_says_why(ramp: str, reason: str) -> None:
    assert reason in message_of("train.global_batch_size=64", f"train.rampup_batch_size={ramp}")


sizes_of_ramps = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 900))


@given(drawn=sizes_of_ramps)
def test_a_ramp_in_samples_reads_them_to_within_the_batch_of_a_step(drawn: tuple[int, int, int, int]) -> None:
    start, increment, increases, samples = drawn
    largest = start + increment * increases
    config = configured_in_samples(8 * largest, 8 * start, 8 * increment, samples)

    def read_by(steps: int) -> int:
        ramp = BatchRamp(largest=largest, start=start, increment=increment, steps=steps)
        return 8 * sum(ramp.at(step) for step in range(steps))

    shortest = next(steps for steps in range(increases, 999) if read_by(steps) >= samples)
    assert config.spare.ramp_steps in (shortest, max(shortest - 1, increases))
    read = read_by(config.spare.ramp_steps)
    assert abs(read - samples) < 8 * largest or config.spare.ramp_steps == increases
    in_samples = dict(every_setting(config))
    assert in_samples["train.rampup_batch_size"] == [8 * start, 8 * increment, read]
    assert (
        configured_in_samples(in_samples["train.global_batch_size"], *in_samples["train.rampup_batch_size"]) == config
    )


@pytest.mark.skipif(not hasattr(calculators, RAMP), reason="megatron-core 0.19 has no ramp in samples any more")
@given(drawn=sizes_of_ramps)
def test_megatron_has_the_same_sizes_and_stands_at_the_same_place_after_the_ramp(
    drawn: tuple[int, int, int, int],
) -> None:
    start, increment, increases, samples = drawn
    largest = start + increment * increases
    ours = configured_in_samples(8 * largest, 8 * start, 8 * increment, samples).spare.ramp
    theirs = getattr(calculators, RAMP)(8 * largest, 2, 4, False, 1, 8 * start, 8 * increment, samples)
    sizes: list[int] = []
    consumed = 0
    while (size := theirs.get_current_global_batch_size()) < 8 * largest:
        sizes.append(size)
        consumed += size
        theirs.update(consumed, True)
    assert samples <= consumed < samples + 8 * largest
    assert abs(8 * ours.before(ours.steps) - consumed) < 16 * largest or ours.steps == increases
    assert {8 * ours.at(step) for step in range(ours.steps)} >= set(sizes)
    stages = range(8 * start, 8 * largest, 8 * increment)
    assert len(sizes) == pytest.approx(sum(samples / increases / size for size in stages), abs=increases)
