"""Random faults: a function of the seed, distributed as asked for, and always such that redundancy can mask them."""

import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import spare_megatron
from spare_megatron.config.checks.validate_faults import rate_problems, survivable_kinds
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.failure_detector import SHORT_STOP_S
from spare_megatron.driver.planned_faults import FIRST_STEP, LLAMA3_INTERRUPTIONS, draw_faults, groups_hit, kind_weights
from spare_megatron.faults.points import (
    PHASES_BETWEEN_STEPS,
    PHASES_OF_A_BUCKET,
    PHASES_OF_AN_EVALUATION,
    PHASES_WITH_PARTITIONS,
    Fault,
    FaultPoint,
)
from spare_megatron.stacking.layout import GroupId

EVER = 10**6
HARMLESS = "faults.kinds=['slow', 'disk_full', 'clock_jump', 'stop_store']"


def configured(*overrides: str) -> RunConfig:
    base = ["layout.num_groups=6", "layout.pipeline_parallel=2", "spare.redundancy=4", "train.steps=4000"]
    base.append(f"spare.rejoins={EVER}")
    config = load_run_config(None, [*base, "faults.mean_steps=25", "spare.microbatches_per_shard=4", *overrides]).config
    assert list(rate_problems(config)) == []
    return config


def at_risk(config: RunConfig, fault: Fault) -> frozenset[GroupId]:
    """What the fault may cost, as opposed to what it spares: everything that lasts, corruptions, and drains."""
    if fault.kind in ("bit_flip", "param_flip", "drain"):
        return frozenset({fault.group})
    return groups_hit(config, fault)


# ---------------------------------------------------------------------------------------------------- what is drawn


def test_without_a_rate_none_is_drawn() -> None:
    assert draw_faults(RunConfig()) == ()


def test_the_same_configuration_gives_the_same_faults_and_another_seed_others() -> None:
    assert draw_faults(configured()) == draw_faults(configured())
    assert len({draw_faults(configured(f"faults.seed={seed}")) for seed in range(20)}) == 20


def test_a_longer_run_begins_with_the_same_faults() -> None:
    short, long = (draw_faults(configured(f"train.steps={steps}")) for steps in (2000, 4000))
    assert long[: len(short)] == short
    assert len(long) > len(short) > 40


def test_all_kinds_that_a_run_can_survive_are_drawn_with_every_phase_group_and_rank() -> None:
    settings = ("layout.max_groups=13", "data.access=shared", "cluster.num_nodes=13", "cluster.isolate_nodes=true")
    config = configured("layout.num_groups=12", *settings)
    faults = [fault for seed in range(20) for fault in draw_faults(with_seed(config, seed))]
    assert {fault.kind for fault in faults} == set(survivable_kinds(config))
    assert "kill_store" not in survivable_kinds(config)
    assert {fault.phase for fault in faults} == (
        set(FaultPoint) - PHASES_BETWEEN_STEPS - PHASES_OF_AN_EVALUATION - PHASES_WITH_PARTITIONS - PHASES_OF_A_BUCKET
    )
    assert {fault.group for fault in faults} == set(range(12))
    assert {fault.rank for fault in faults} == {0, 1}
    assert {fault.ordinal for fault in faults if fault.phase is FaultPoint.BACKWARD} == {1, 2, 3, 4}
    assert {fault.bit for fault in faults if fault.kind == "bit_flip"} <= set(range(32))


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, faults=replace(config.faults, seed=seed))


def test_one_rank_a_group_has_no_rank_to_send_to() -> None:
    phases = {fault.phase for fault in draw_faults(configured("layout.pipeline_parallel=1"))}
    assert not phases & {FaultPoint.SEND, FaultPoint.RECEIVE}
    assert len(phases) > 4


IN_RECOVERY = (FaultPoint.PATCH, FaultPoint.REBUILD)


BEFORE_THE_SUM = {
    FaultPoint.FORWARD,
    FaultPoint.SEND,
    FaultPoint.RECEIVE,
    FaultPoint.BACKWARD,
    FaultPoint.BEFORE_REDUCE,
}


def test_faults_in_a_recovery_strike_beside_one_that_is_sure_to_bring_a_patch() -> None:
    found: Counter[tuple[FaultPoint, str]] = Counter()
    for seed in range(10):
        config = configured(f"faults.seed={seed}", "layout.num_groups=12", "spare.redundancy=6", "faults.mean_steps=15")
        faults = draw_faults(config)
        for index, fault in enumerate(faults):
            if fault.phase not in IN_RECOVERY:
                continue
            before = [other for other in faults[:index] if other.step == fault.step and other.phase in BEFORE_THE_SUM]
            lost = frozenset[GroupId]().union(*(groups_hit(config, other) for other in before))
            assert lost
            assert fault.group not in lost
            found[fault.phase, fault.kind] += 1
    assert found.total() > 100
    assert {kind for _, kind in found} == set(survivable_kinds(config))
    assert not any(phase is FaultPoint.REBUILD and kind in ("nan", "bit_flip") for phase, kind in found)


def test_without_a_kind_that_brings_a_patch_no_recovery_is_hit() -> None:
    phases = {fault.phase for fault in draw_faults(configured(HARMLESS))}
    assert len(phases) > 5
    assert not phases & {*IN_RECOVERY}


@pytest.mark.parametrize("num_nodes", [6, 8], ids=["whole_groups", "across"])  # of 4 and of 3 ranks, groups of 2
def test_a_node_that_was_away_for_a_while_comes_back(num_nodes: int) -> None:
    """Also for long enough that its groups are lost: they are started again, with their ranks on other nodes."""
    settings = ("layout.num_groups=12", "faults.kinds=['stop_node']", "faults.max_seconds=20")
    config = configured(*settings, f"cluster.num_nodes={num_nodes}")
    assert len([fault for fault in draw_faults(config) if fault.seconds and groups_hit(config, fault)]) > 20


@pytest.mark.parametrize("seed", range(5))
def test_what_is_lost_for_good_leaves_room_for_one_more_loss(seed: int) -> None:
    config = configured(f"faults.seed={seed}", "cluster.num_nodes=6", "faults.kinds=['kill_supervisor', 'kill']")
    faults = draw_faults(config)
    for_good = {fault.group for fault in faults if fault.kind == "kill_supervisor"}
    left = {GroupId(group) for group in range(6)} - for_good
    placement = config.placement
    assert 0 < len(for_good) <= 3
    assert all(placement.uncovered(frozenset(left - {group})) == () for group in left)
    assert [fault.kind for fault in faults[-20:]] == ["kill"] * 20


def test_machines_are_lost_for_good_until_groups_are_re_formed_and_those_are_hit_again() -> None:
    """8 groups of 2 machines, of which broken ones give theirs to the lowest; counted anew from the whole list."""
    num_again = 0
    for seed in range(6):
        re_formed: set[GroupId] = set()
        settings = ("layout.num_groups=8", "cluster.num_nodes=16", "spare.redundancy=6", "faults.mean_steps=10")
        config = configured(*settings, f"faults.seed={seed}", "faults.kinds=['kill_supervisor', 'kill', 'kill']")
        placement = config.placement
        missing: dict[GroupId, int] = {}
        back_at: dict[GroupId, int] = {}
        faults = draw_faults(config)
        for fault in faults:
            assert fault.group not in missing
            assert fault.step >= back_at.get(fault.group, 0)
            num_again += fault.group in re_formed
            back_at[fault.group] = fault.step + config.faults.recovery_steps
            if fault.kind == "kill_supervisor":
                missing[fault.group] = 1
                if len(alone := sorted(group for group, number in missing.items() if number == 1)) == 2:
                    del missing[alone[0]]
                    missing[alone[1]] = 2
                    re_formed.add(alone[0])
                    back_at[alone[0]] = fault.step + config.faults.recovery_steps
            away = {group for group, step in back_at.items() if fault.step < step} | set(missing)
            assert placement.uncovered(frozenset(map(GroupId, range(8))) - away) == ()
        num_for_good = sum(fault.kind == "kill_supervisor" for fault in faults)
        assert num_for_good > 4
        assert len(missing) == -(-num_for_good // 2)
    assert num_again > 20


def test_a_group_that_goes_on_with_fewer_stages_is_hit_again() -> None:
    """That is, before another loses a machine; a group that waits for that is not. Six groups of four machines."""
    settings = ("layout.pipeline_parallel=4", "model.num_layers=16", "cluster.num_nodes=24")
    # With fewer microbatches the five others would be as fast alone.
    settings += ("spare.microbatches_per_shard=16", "faults.kinds=['kill_supervisor', 'kill', 'kill']")
    num_again = {3: 0, 4: 0}
    for seed, least in product(range(4), num_again):
        shorter = (f"layout.least_pipeline_parallel={least}",) if least < 4 else ()
        faults = draw_faults(configured(*settings, *shorter, f"faults.seed={seed}"))
        assert least == 4 or {fault.rank for fault in faults} == {0, 1, 2}, "the last stage may be gone"
        first, second, *_ = (index for index, fault in enumerate(faults) if fault.kind == "kill_supervisor")
        num_again[least] += sum(fault.group == faults[first].group for fault in faults[first + 1 : second])
    assert num_again[4] == 0
    assert num_again[3] > 0


def test_faults_that_pass_last_no_longer_than_allowed() -> None:
    faults = draw_faults(configured("faults.max_seconds=0.25"))
    lasting = {"kill", "raise", "nan", "bit_flip", "param_flip", "hang", "stop"}
    assert all(fault.kind in lasting for fault in faults if fault.seconds is None)
    times = [abs(fault.seconds) for fault in faults if fault.seconds is not None]
    assert 0.2 < max(times) <= 0.25
    assert min(times) > 0.0
    assert {fault.seconds is None for fault in faults if fault.kind == "hang"} == {True, False}
    assert min(fault.seconds or 0.0 for fault in faults if fault.kind == "clock_jump") < 0.0


# ----------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("setting", "distribution"),
    [
        ("faults.distribution=exponential", stats.expon(scale=500.0)),
        ("faults.distribution=weibull", stats.weibull_min(0.78, scale=500.0 / math.gamma(1 + 1 / 0.78))),
    ],
)
def test_gaps_follow_the_distribution(setting: str, distribution: stats.rv_continuous) -> None:
    config = configured("faults.mean_steps=500", "train.steps=1000000", "faults.recovery_steps=11", setting, HARMLESS)
    steps = [fault.step for fault in draw_faults(config)]
    assert len(steps) > 1500
    assert stats.kstest(np.diff(steps), distribution.cdf).pvalue > 0.01
    other = stats.weibull_min(0.6, scale=500.0 / math.gamma(1 + 1 / 0.6))
    assert stats.kstest(np.diff(steps), other.cdf).pvalue < 1e-6


def test_a_kind_named_twice_is_drawn_twice_as_often() -> None:
    assert kind_weights(configured("faults.kinds=['kill', 'slow', 'kill']")) == {"kill": 2 / 3, "slow": 1 / 3}


def test_the_mix_of_llama3_draws_kinds_as_often_as_their_causes_struck() -> None:
    everywhere = ("cluster.num_nodes=12", "cluster.isolate_nodes=true", "layout.num_groups=12")
    weights = kind_weights(configured("faults.mix=llama3", *everywhere))
    total = sum(count for count, _ in LLAMA3_INTERRUPTIONS.values())
    assert total == 419
    assert sum(weights.values()) == pytest.approx(1.0)
    assert weights["slow"] == pytest.approx(6 / total)  # thermal
    assert weights["disk_full"] == pytest.approx(3 / 2 / total)  # half of the SSDs'
    assert weights["bit_flip"] == pytest.approx(6 / 2 / total)  # half of the silent data corruption
    alone = kind_weights(configured("faults.mix=llama3", "faults.kinds=['slow', 'disk_full']"))
    assert alone == pytest.approx({"slow": 6 / 9, "disk_full": 3 / 9})


def test_a_stop_of_half_a_second_may_cost_its_group_however_long_heartbeats_are() -> None:
    """Its supervisor sees it, where a hang shows by silence alone."""
    lasting = configured("control.heartbeat_interval_s=10", "faults.max_seconds=2", "spare.rejoins=0")
    for kind, is_risky in (("stop", True), ("hang", False)):
        faults = draw_faults(replace(lasting, faults=replace(lasting.faults, kinds=(kind,))))
        longer = [fault for fault in faults if fault.seconds is not None and fault.seconds > SHORT_STOP_S]
        assert (len(longer) < 6) == is_risky, "no group comes back"
        assert len([fault for fault in faults if fault.seconds is not None]) > 20


def test_a_mix_without_any_of_the_listed_kinds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has none of faults\.kinds=clock_jump"):
        kind_weights(configured("faults.mix=llama3", "faults.kinds=['clock_jump']"))


def test_the_interruptions_of_llama3_are_those_of_the_simulators_preset() -> None:
    preset = Path(spare_megatron.__file__).parent / "tools" / "simulate" / "presets" / "llama3_16k.toml"
    mix = tomllib.loads(preset.read_text())["failures"]["mix"]
    assert {cause: values["weight"] for cause, values in mix.items()} == {
        cause: count for cause, (count, _) in LLAMA3_INTERRUPTIONS.items()
    }


# ------------------------------------------------------------------------------------------------------ survivability


def lost_when(config: RunConfig, faults: Sequence[Fault], step: int, num_rejoins: int) -> frozenset[GroupId]:
    """The groups that may be lost just after this step, counted anew from the whole list."""
    lost: set[GroupId] = set()
    times: Counter[GroupId] = Counter()
    of_node = ("cut", "stop_node", "kill_supervisor")
    for fault in faults:
        if fault.step > step:
            break
        for group in at_risk(config, fault):
            times[group] += fault.kind != "drain"
            for_good = times[group] > num_rejoins or fault.kind in of_node
            if for_good or step < fault.step + config.faults.recovery_steps:
                lost.add(group)
    return frozenset(lost)


@pytest.mark.parametrize("num_rejoins", [0, 1, EVER])
@pytest.mark.parametrize("settings", [(), ("spare.groups_per_domain=2", "faults.domain_share=0.5")])
@pytest.mark.parametrize("nodes", [1, 6])
def test_at_any_time_every_shard_has_a_host_and_a_majority_is_right(
    num_rejoins: int, settings: tuple[str, ...], nodes: int
) -> None:
    num_lost: Counter[int] = Counter()
    for seed in range(6):
        config = configured(
            *settings,
            f"faults.seed={seed}",
            f"cluster.num_nodes={nodes}",
            "faults.mean_steps=8",
            f"spare.rejoins={num_rejoins}",
        )
        placement = config.placement
        faults = draw_faults(config)
        for fault in faults:
            lost = lost_when(config, faults, fault.step, num_rejoins)
            left = frozenset(map(GroupId, range(6))) - lost
            assert placement.uncovered(left) == ()
            gone = lost_when(config, [f for f in faults if f.step <= fault.step - 50], EVER, num_rejoins)
            assert 2 * len(left) > 6 - len(gone)
            num_lost[len(lost)] += 1
    assert set(num_lost) >= {0, 1, 2}
    # It goes to the limit: half of 6, until some are gone for good and have no say any more.
    assert max(num_lost) == 2 if (num_rejoins, nodes) == (EVER, 1) else max(num_lost) > 2


@pytest.mark.parametrize("num_rejoins", [0, EVER])
def test_no_group_is_hit_while_it_may_be_away(num_rejoins: int) -> None:
    for seed in range(6):
        config = configured(
            f"faults.seed={seed}",
            "faults.mean_steps=8",
            "cluster.num_nodes=3",
            "train.steps=1500",
            f"spare.rejoins={num_rejoins}",
        )
        faults = draw_faults(config)
        assert len(faults) > 20
        for index, fault in enumerate(faults):
            for earlier in faults[:index]:
                risk = at_risk(config, earlier)
                is_gone = num_rejoins == 0 and fault.group in risk
                assert not is_gone
                if fault.group in risk | {earlier.group}:
                    assert fault.step >= earlier.step + config.faults.recovery_steps


def test_only_one_corruption_is_open_at_a_time() -> None:
    config = configured("faults.kinds=['nan', 'bit_flip', 'param_flip']", "faults.mean_steps=5")
    steps = [fault.step for fault in draw_faults(config)]
    assert len(steps) > 50
    assert min(np.diff(steps)) >= config.faults.recovery_steps


def test_a_domain_is_hit_as_a_whole() -> None:
    config = configured("spare.groups_per_domain=2", "faults.domain_share=1.0", "faults.kinds=['kill']")
    faults = draw_faults(config)
    pairs = list(zip(faults[::2], faults[1::2], strict=True))
    assert len(pairs) > 30
    assert all(first.group % 2 == 0 and second.group == first.group + 1 for first, second in pairs)
    assert all((first.step, first.phase) == (second.step, second.phase) for first, second in pairs)
    assert {fault.group for fault in faults} == set(range(6))


def test_what_cannot_be_survived_waits_or_is_left_out_and_the_rest_goes_on() -> None:
    overrides = ("layout.num_groups=2", "spare.redundancy=2", "faults.kinds=['kill', 'slow']")
    faults = draw_faults(configured(*overrides, "spare.rejoins=0"))
    assert [fault.kind for fault in faults].count("kill") == 1
    assert [fault.kind for fault in faults].count("slow") > 20
    coming_back = [fault for fault in draw_faults(configured(*overrides)) if fault.kind == "kill"]
    assert len(coming_back) > 20
    assert min(np.diff([fault.step for fault in coming_back])) >= 50


def test_where_all_groups_read_all_data_hosts_of_a_shard_do_not_limit_the_losses() -> None:
    settings = ("spare.redundancy=1", "spare.rejoins=0", "faults.kinds=['kill']")
    assert draw_faults(configured(*settings)) == ()
    lost = {fault.group for fault in draw_faults(configured(*settings, "data.access=shared"))}
    assert len(lost) == 5, "one is left of 6"


def test_beginning_and_end_of_the_run_are_spared() -> None:
    for seed in range(20):
        config = configured(f"faults.seed={seed}", "faults.mean_steps=1", "train.steps=300")
        steps = [fault.step for fault in draw_faults(config)]
        assert FIRST_STEP <= min(steps) <= max(steps) < 300 - config.faults.recovery_steps


# --------------------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("faults.trace=[{phase='forward'}]",), "remove one of them"),
        (("faults.mean_steps=1e-9",), "faults.mean_steps=1e-09 must be at least 0.1; raise it"),
        (("faults.shape=0.001",), "faults.shape=0.001 must be at least 0.1; raise it"),
        (("faults.domain_share=1.5",), "lies outside 0 to 1"),
        (("faults.kinds=['kill_store']",), "has kill_store, which ends the run"),
        (("faults.kinds=['moment_flip']",), "has moment_flip, which is never drawn"),
        (("faults.kinds=['cut']",), "has cut, which needs a network"),
        (("faults.kinds=['stop_node']",), "which hits the only node"),
        (("faults.kinds=['stop_store']", "control.store=etcd"), "needs the embedded control store"),
        (("faults.max_seconds=60",), "must be below control.store_timeout_s=60"),
        (("faults.recovery_steps=4000",), "leaves no room for faults in train.steps=4000"),
        (("optimizer.sharding=stacked", "optimizer.redundancy=1"), "raise that to at least 2"),
        (("optimizer.sharding=stacked", "faults.kinds=['param_flip']"), "raise that to at least 3"),
        (("faults.recovery_steps=10",), "must be above train.params_check_every_steps=10"),
    ],
)
def test_rates_that_make_no_sense_are_refused(overrides: tuple[str, ...], text: str) -> None:
    base = ["train.steps=4000", "faults.mean_steps=25"]
    found = list(rate_problems(load_run_config(None, [*base, *overrides]).config))
    assert any(text in problem for problem in found), found
