"""Evidence about paces: soon enough for large factors, patient with small ones, and silent in quiet."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from spare_megatron.stacking import pace_evidence
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.pace_evidence import PROBE_STEPS, REST_STEPS, PaceEvidence, PaceException, exceptions

Noise = Callable[[np.random.Generator, int], np.ndarray]

QUIET_STEPS = 24


def heavy(scale: float, freedom: float) -> Noise:
    return lambda rng, num_groups: scale * rng.standard_t(freedom, num_groups)


def spiky(share: float) -> Noise:
    """Now and then some group takes twice as long."""
    return lambda rng, num_groups: (
        0.02 * rng.standard_normal(num_groups) + (rng.random(num_groups) < share) * rng.exponential(0.7, num_groups)
    )


NOISES = {
    "little": heavy(0.03, 3),
    "much": heavy(0.15, 3),
    "heavier tails than assumed": heavy(0.05, 2),
    "spikes": spiky(0.02),
    "many spikes": spiky(0.1),
}


class Run:
    """Steps of groups whose paces are exp(noise) x factor."""

    def __init__(self, num_groups: int, noise: Noise = NOISES["little"], seed: int = 0) -> None:
        self.groups = tuple(map(GroupId, range(num_groups)))
        self.evidence = PaceEvidence()
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def step(self, factors: Mapping[int, float] | None = None, idle: tuple[int, ...] = ()) -> bool:
        logs = self._noise(self._rng, len(self.groups)) + [
            math.log((factors or {}).get(group, 1.0)) for group in self.groups
        ]
        idle = tuple(map(GroupId, idle))
        measured = {g: int(1e6 * math.exp(log)) for g, log in zip(self.groups, logs, strict=True) if g not in idle}
        return self.evidence.fold(exceptions(measured, self.evidence.dealt), self.groups, idle)

    def until_change(self, factors: Mapping[int, float], most: int) -> int | None:
        return next((number for number in range(1, most + 1) if self.step(factors)), None)


def test_evidence_is_that_of_students_t() -> None:
    tail = stats.t(3).sf(np.arange(len(pace_evidence._EVIDENCE[0])) / 2)
    for found, share in zip(pace_evidence._EVIDENCE, (0.25, 0.6), strict=True):
        expected = 1000 * (math.log(share) + (share - 1) * np.log(tail))
        assert found == tuple(np.floor(expected).astype(int))
    assert tuple(math.floor(1000 * math.log(share)) for share in (0.25, 0.6)) == pace_evidence._NONE


def test_the_likelihood_ratio_has_mean_one_in_quiet() -> None:
    """So that each sum exceeds h once in e^h steps at most."""
    for share in (0.25, 0.6):
        u = (np.arange(10**6) + 0.5) / 10**6
        assert np.mean(share * u ** (share - 1)) <= 1.0
    for num_groups in (2, 5, 8, 64, 1000):
        assert 4 * num_groups * math.exp(-pace_evidence._threshold(num_groups) / 1000) <= 1e-4


@pytest.mark.parametrize("num_groups", [2, 3, 8])
@pytest.mark.parametrize("noise", NOISES)
def test_quiet_changes_paces_less_than_once_in_ten_thousand_steps(noise: str, num_groups: int) -> None:
    run = Run(num_groups, NOISES[noise], seed=7)
    assert sum(run.step() for _ in range(10_000)) <= 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_groups", [4, 8])
def test_a_group_at_half_speed_is_known_after_three_slow_steps(num_groups: int, seed: int) -> None:
    run = Run(num_groups, heavy(0.02, 3), seed)
    assert not any(run.step() for _ in range(QUIET_STEPS))
    assert run.until_change({1: 2.0}, 10) == 3
    assert list(run.evidence.dealt) == [1]
    assert run.evidence.dealt[GroupId(1)] == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize(("factor", "most"), [(1.4, 12), (1.2, 30), (1.12, 100)])
@pytest.mark.parametrize("seed", range(5))
def test_smaller_factors_take_more_steps(factor: float, most: int, seed: int) -> None:
    run = Run(8, seed=seed)
    for _ in range(QUIET_STEPS):
        run.step()
    found = run.until_change({5: factor}, most)
    assert found is not None
    assert found > 3
    assert run.evidence.dealt == {5: pytest.approx(1000 * factor, rel=0.08)}


def test_two_groups_share_the_difference() -> None:
    run = Run(2, seed=3)
    for _ in range(QUIET_STEPS):
        run.step()
    assert run.until_change({0: 2.0}, 10) is not None
    slow, fast = (run.evidence.dealt[group] for group in run.groups)
    assert slow / fast == pytest.approx(2.0, rel=0.1)


def test_two_slow_steps_alone_change_nothing() -> None:
    run = Run(8)
    for _ in range(50):
        assert not run.step({3: 3.0})
        assert not run.step({3: 3.0})
        assert not any(run.step() for _ in range(10))


def test_a_group_that_recovers_is_dealt_work_as_before() -> None:
    run = Run(8, seed=2)
    for _ in range(QUIET_STEPS):
        run.step()
    run.until_change({3: 2.0}, 10)
    assert not any(run.step({3: 2.0}) for _ in range(20))
    assert run.until_change({}, 10) is not None
    assert run.evidence.dealt == {}


def test_a_change_refreshes_all_paces_that_are_nearly_certain() -> None:
    run = Run(8, heavy(0.01, 3), seed=4)
    for _ in range(QUIET_STEPS):
        run.step()
    slow = {1: 2.0, 2: 1.45, 6: 1.1}
    changes = [step for step in range(60) if run.step(slow)]
    assert changes[0] == 2
    assert len(changes) <= 3
    assert run.evidence.dealt == {group: pytest.approx(1000 * factor, rel=0.05) for group, factor in slow.items()}


def test_a_group_that_goes_to_and_fro_changes_its_pace_at_a_limited_rate() -> None:
    run = Run(8, heavy(0.01, 3), seed=4)
    for _ in range(QUIET_STEPS):
        run.step()
    changes = [step for step in range(80) if run.step({1: 2.0} if step // 4 % 2 else {})]
    assert len(changes) > 2
    assert all(later - earlier >= REST_STEPS for earlier, later in pairwise(changes))


def test_a_group_without_work_is_probed_and_comes_back() -> None:
    run = Run(8, heavy(0.01, 3))
    for _ in range(QUIET_STEPS):
        run.step()
    assert run.until_change({4: 40.0}, 10) == 3
    for _ in range(PROBE_STEPS - 1):
        run.step(idle=(4,))
        assert run.evidence.probe is None
    run.step(idle=(4,))
    probes = 0
    while run.evidence.dealt:  # it is as fast as the others now
        is_probe = run.evidence.probe == 4
        probes += is_probe
        run.step(idle=() if is_probe else (4,))
    assert 3 <= probes <= 3 + REST_STEPS
    assert run.evidence.probe is None


def test_what_is_known_of_groups_that_leave_is_forgotten() -> None:
    evidence = PaceEvidence()
    groups = tuple(map(GroupId, range(5)))
    for _ in range(30):
        evidence.fold([PaceException(GroupId(2), 3000), PaceException(GroupId(3), 2000)], groups, ())
    assert evidence.dealt == {2: 3000, 3: 2000}
    evidence.keep([GroupId(0), GroupId(3)])
    assert evidence.dealt == {3: 2000}
    evidence.start_over()
    assert evidence.dealt == {}


def test_a_lone_group_has_no_like() -> None:
    assert exceptions({GroupId(0): 5}, {}) == ()
    assert exceptions({}, {}) == ()


def test_where_machines_change_their_mood_more_evidence_is_needed() -> None:
    """Slow for a dozen steps, again and again: the first times are followed, later ones hardly."""
    run = Run(8, heavy(0.02, 3), seed=9)
    for _ in range(QUIET_STEPS):
        run.step()
    moods = [sum(run.step({3: 1.6} if step < 12 else {}) for step in range(100)) for _ in range(20)]
    assert sum(moods[:2]) >= 2
    assert sum(moods[-10:]) <= sum(moods[:10]) // 2
    assert run.until_change({5: 3.0}, 40) is not None, "what lasts is found all the same"


@pytest.mark.parametrize("num_groups", [3, 4, 8])
def test_paces_stay_those_over_their_like(num_groups: int) -> None:
    """Groups that were slow by turns ended with paces of 1.4, all of them."""
    run, rng = Run(num_groups, heavy(0.02, 3), seed=5), np.random.default_rng(6)
    num_changes = 0
    for _ in range(150):
        factors = {group: rng.uniform(1.2, 2.2) for group in run.groups if rng.random() < 0.4}
        num_changes += sum(run.step(factors) for _ in range(int(rng.integers(4, 40))))
        paces = sorted(run.evidence.dealt.get(group, 1000) for group in run.groups)
        assert stats.gmean(paces[(num_groups - 1) // 2 : num_groups // 2 + 1]) == pytest.approx(1000, rel=0.06)
    assert num_changes > 50
