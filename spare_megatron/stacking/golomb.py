"""Offsets for cyclic placements: modular Golomb rulers that mix well.

r offsets are a modular Golomb ruler mod N if all their r(r - 1) differences are distinct and not 0 mod N, which needs
N >= r(r - 1) + 1. Among rulers, the search prefers the least second singular value of the placement, max over k != 0 of
|sum_o exp(2 pi i k o / N)|. With failure domains of d consecutive groups, few hosts per domain take precedence. The
argument is in docs/protocol_dealing.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

import numpy as np
import numpy.typing as npt

_EXHAUSTIVE_LIMIT = 2_000_000
"""Up to this number of offset sets times N the search is exhaustive; above it, constructed and bounded."""
_NUM_SCATTERED = 64
_SCATTER_DRAWS = 20_000
_NUM_WINDOWS = 400
_SEARCH_WORK = 10_000_000

_SHORTEST_RULERS = (
    "0",
    "0 1",
    "0 1 3",
    "0 1 4 6",
    "0 1 4 9 11",
    "0 1 4 10 12 17",
    "0 1 4 10 18 23 25",
    "0 1 4 9 15 22 32 34",
    "0 1 5 12 25 27 35 41 44",
    "0 1 6 10 23 26 34 41 53 55",
    "0 1 4 13 28 33 47 54 64 70 72",
    "0 2 6 24 29 40 43 55 68 75 76 85",
    "0 2 5 25 37 43 59 70 85 89 98 99 106",
    "0 4 6 20 35 52 59 77 78 86 89 99 122 127",
    "0 4 20 30 57 59 62 76 100 111 123 136 144 145 151",
    "0 1 4 11 26 32 56 68 76 115 117 134 150 163 168 177",
    "0 5 7 17 52 56 67 80 81 100 122 138 159 165 168 191 199",
    "0 2 10 22 53 56 82 83 89 98 130 148 153 167 188 192 205 216",
    "0 1 6 25 32 72 100 108 120 130 153 169 187 190 204 231 233 242 246",
    "0 1 8 11 68 77 94 116 121 156 158 179 194 208 212 228 240 253 259 283",
    "0 2 24 56 77 82 83 95 129 144 179 186 195 255 265 285 293 296 310 329 333",
    "0 1 9 14 43 70 106 122 124 128 159 179 204 223 253 263 270 291 330 341 353 356",
    "0 3 7 17 61 66 91 99 114 159 171 199 200 226 235 246 277 316 329 348 350 366 372",
    "0 9 33 37 38 97 122 129 140 142 152 191 205 208 252 278 286 326 332 353 368 384 403 425",
)
"""Shortest ruler of each number of marks (en.wikipedia.org/wiki/Golomb_ruler). Length L: a ruler mod any N > 2L."""

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
_SINGER_OF_PRIME_POWERS = {
    21: "0 1 4 14 16",
    73: "0 1 3 7 15 31 36 54 63",
    91: "0 1 3 9 27 49 56 61 77 81",
    273: "1 2 4 8 16 32 64 91 117 128 137 182 195 205 234 239 256",
}
"""Difference sets of the projective planes of order 4, 8, 9 and 16 (Singer 1938); those of prime order are computed."""


def check_redundancy(num_groups: int, redundancy: int) -> None:
    """Raises ValueError unless 1 <= redundancy <= num_groups."""
    if redundancy < 1:
        raise ValueError(f"spare.redundancy={redundancy} is below 1; set it to 1 (no spare hosts) or more")
    if redundancy > num_groups:
        raise ValueError(
            f"spare.redundancy={redundancy} exceeds the {num_groups} data-parallel groups; "
            f"lower it or raise the data-parallel size"
        )


def check_groups_per_domain(groups_per_domain: int) -> None:
    """Raises ValueError if a domain has less than one group."""
    if groups_per_domain < 1:
        raise ValueError(
            f"spare.groups_per_domain={groups_per_domain} is below 1; set it to 1 (groups are lost one by one) or more"
        )


@dataclass(frozen=True, slots=True)
class _Domains:
    """Limit on offsets: at most `most` of them in any window of `size` consecutive numbers mod n."""

    n: int
    size: int
    most: int

    def allow(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each set of offsets, ascending along the last axis, meets the limit; its subsets then do, too."""
        num_marks = offsets.shape[-1]
        if self.size == 1 or num_marks <= self.most:
            return np.ones(offsets.shape[:-1], dtype=np.bool_)
        around = np.concatenate((offsets, offsets + self.n), axis=-1)
        return np.asarray((around[..., self.most : self.most + num_marks] - offsets >= self.size).all(axis=-1))

    def allows(self, marks: Iterable[int]) -> bool:
        return self.size == 1 or bool(self.allow(np.array(sorted(marks), dtype=np.int64)))


def golomb_offsets(num_groups: int, redundancy: int, groups_per_domain: int = 1) -> tuple[int, ...]:
    """The r offsets, ascending from 0, with as few repeated differences mod N as the search finds; d groups per domain.

    At most ceil(r min(d, N) / N) lie among any d consecutive numbers mod N, the least that any placement reaches. For
    d = 1 they are a modular Golomb ruler if N > 2L, L the length of the shortest ruler of r <= 24 marks, if N =
    r(r - 1) + 1 with r - 1 a prime up to 23 or 4, 8, 9 or 16, or if a ruler exists and there are at most 2,000,000 / N
    candidate sets: these small cases are optimal, by the multiplicity of the commonest difference, then the sum of
    squared ones. Ties go to the better mixing, then to the first found. Work is bounded by counts: under 0.5 s up to
    N = 10,000, r = 24. More than N/2 offsets are the complement of a small set, with the same repeats up to a constant.

    >>> golomb_offsets(7, 3)
    (0, 1, 3)
    >>> golomb_offsets(4, 4)
    (0, 1, 2, 3)
    >>> golomb_offsets(16, 3, groups_per_domain=4)
    (0, 4, 9)
    """
    check_redundancy(num_groups, redundancy)
    check_groups_per_domain(groups_per_domain)
    n, r, size = num_groups, redundancy, min(groups_per_domain, num_groups)
    if r == n:
        return tuple(range(n))
    domains = _Domains(n, size, -(-r * size // n))
    if 2 * r > n:
        left_out = set(golomb_offsets(n, n - r))
        offsets = _from_zero(n, [x for x in range(n) if x not in left_out])
        if domains.allows(offsets):
            return offsets
    if comb(n - 1, r - 1) * n <= _EXHAUSTIVE_LIMIT:
        return _exhaustive(n, r, domains)
    if r * (r - 1) < n:
        rulers = list(_scattered(n, r, domains)) or list(filter(domains.allows, _constructed(n, r)))
        if rulers:
            return min(rulers, key=lambda ruler: _mixing(n, ruler))
    return _fewest_repeats(n, r, domains)


def difference_counts(num_groups: int, offsets: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """`counts[d]`: number of ordered pairs of different offsets that differ by d mod N, for d from 0 to N - 1.

    >>> difference_counts(7, (0, 1, 3)).tolist()
    [0, 1, 1, 1, 1, 1, 1]
    """
    marks = np.array(offsets, dtype=np.int64)
    counts = np.bincount(((marks[:, None] - marks) % num_groups).ravel(), minlength=num_groups)
    counts[0] -= len(marks)
    return counts.astype(np.int64)


def _is_ruler(n: int, offsets: tuple[int, ...]) -> bool:
    return len(set(offsets)) == len(offsets) and int(difference_counts(n, offsets).max()) <= 1


def _mixing(n: int, offsets: tuple[int, ...]) -> float:
    """Second singular value of the placement, rounded so that floating-point noise breaks no ties."""
    indicator = np.zeros(n)
    indicator[list(offsets)] = 1.0
    return round(float(np.abs(np.fft.rfft(indicator))[1:].max(initial=0.0)), 6)


def _from_zero(n: int, marks: list[int]) -> tuple[int, ...]:
    return tuple(sorted((mark - marks[0]) % n for mark in marks))


def _exhaustive(n: int, r: int, domains: _Domains) -> tuple[int, ...]:
    """The best of all sets that contain 0: fewest repeats, then best mixing, then lexicographic order."""
    sets = np.array([(0, *rest) for rest in combinations(range(1, n), r - 1)], dtype=np.int64)
    sets = sets[domains.allow(sets)]
    differences = (sets[:, :, None] - sets[:, None, :]) % n
    rows = np.broadcast_to(np.arange(len(sets))[:, None, None] * n, differences.shape)
    counts = np.bincount((rows + differences).ravel(), minlength=len(sets) * n).reshape(-1, n)[:, 1:]
    key = counts.max(axis=1, initial=0) * (n * n * n) + (counts**2).sum(axis=1)
    best = sets[key == key.min()]
    return min((tuple(row) for row in best.tolist()), key=lambda offsets: _mixing(n, offsets))


def _scattered(n: int, r: int, domains: _Domains) -> Iterator[tuple[int, ...]]:
    """Rulers grown from a fixed pseudo-random sequence."""
    state, num_found = 1, 0
    marks, used = [0], {0}
    for _ in range(_SCATTER_DRAWS):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX congruence
        mark = (state >> 33) % n
        if all((mark - other) % n not in used for other in marks):
            new = {(mark - other) % n for other in marks} | {(other - mark) % n for other in marks}
            if len(new) == 2 * len(marks) and domains.allows([*marks, mark]):
                marks.append(mark)
                used |= new
        if len(marks) == r:
            yield tuple(sorted(marks))
            num_found += 1
            marks, used = [0], {0}
        elif state % (16 * r) == 0:
            marks, used = [0], {0}  # abandon a start that seems to admit no further mark
        if num_found == _NUM_SCATTERED:
            return


def _constructed(n: int, r: int) -> Iterator[tuple[int, ...]]:
    """Rulers mod N: the shortest known ruler and windows of r marks of the algebraic ones."""
    if r <= len(_SHORTEST_RULERS):
        shortest = tuple(map(int, _SHORTEST_RULERS[r - 1].split()))
        if shortest[-1] < n and _is_ruler(n, shortest):
            yield shortest
    for modulus, marks in _algebraic(n, r):
        if modulus == n:
            yield _from_zero(n, marks[:r])
        yield from _windows(n, r, modulus, marks)


def _windows(n: int, r: int, modulus: int, marks: list[int]) -> Iterator[tuple[int, ...]]:
    """Rulers mod N among windows of r consecutive marks, over all multiples of a ruler mod `modulus`, by length."""
    units = np.array([u for u in range(1, modulus) if np.gcd(u, modulus) == 1])
    multiples = np.sort(units[:, None] * np.array(marks) % modulus, axis=1)
    around = np.concatenate((multiples, multiples + modulus), axis=1)
    length = around[:, r - 1 : r - 1 + len(marks)] - multiples
    for index in np.argsort(length, axis=None, kind="stable")[:_NUM_WINDOWS]:
        row, first = divmod(int(index), len(marks))
        window = tuple(int(mark - around[row, first]) for mark in around[row, first : first + r])
        if window[-1] < n and _is_ruler(n, window):
            yield window


def _algebraic(n: int, r: int) -> Iterator[tuple[int, list[int]]]:
    """Rulers with at least r marks and a modulus of up to about 2 N, as (modulus, marks)."""
    for modulus, marks in _SINGER_OF_PRIME_POWERS.items():
        if len(marks.split()) >= r and modulus <= 2 * n:
            yield modulus, list(map(int, marks.split()))
    for p in _PRIMES:
        if p + 1 >= r and p * p <= 2 * n:
            yield p * p + p + 1, _powers_in_plane(p, 3, p * p + p + 1)
        if p >= r and p * p <= 2 * n:
            yield p * p - 1, _powers_in_plane(p, 2, p * p - 1)


def _powers_in_plane(p: int, degree: int, modulus: int) -> list[int]:
    """Singer's (degree 3, mod p^2 + p + 1) or Bose's (degree 2, mod p^2 - 1) ruler for a prime p.

    The marks are the exponents of those powers of a generator t of GF(p^degree) whose leading coefficient is 0 (Singer:
    the points of a line) or 1 (Bose: t + a for a in GF(p)). Tries generators until the result is a ruler.
    """
    wanted, num_wanted = (0, p + 1) if degree == 3 else (1, p)
    for coefficients in product(range(1, p), *[range(p)] * (degree - 1)):
        # Scalar arithmetic is fast enough to not delay a placement; for degree 2 the first coefficient is 0.
        first, second, third = coefficients if degree == 3 else (0, *coefficients)
        low, middle, lead = (1, 0, 0) if degree == 3 else (0, 1, 0)
        marks = []
        for exponent in range(modulus):
            if lead == wanted:
                marks.append(exponent)
                if len(marks) > num_wanted:
                    break
            low, middle, lead = lead * first % p, (low + lead * second) % p, (middle + lead * third) % p
        if len(marks) == num_wanted and _is_ruler(modulus, tuple(marks)):
            return marks
    raise AssertionError(f"no generator of GF({p}^{degree})")


def _fewest_repeats(n: int, r: int, domains: _Domains) -> tuple[int, ...]:
    """Moves one offset at a time to where it repeats least. Cost: N r per move, `_SEARCH_WORK` from each start."""
    starts = [] if domains.size > 1 and n * r * r > 2 * _SEARCH_WORK else [_grown(n, r, domains)]
    if domains.size > 1:
        starts += [[i * n // r for i in range(r)]]
    found = [_descended(n, start, domains) for start in starts if len(start) == r]
    return min(found, key=lambda offsets: _repeats(n, offsets))


def _grown(n: int, r: int, domains: _Domains) -> list[int]:
    """Offsets chosen greedily one by one; fewer than r if the domains allow no further one."""
    offsets = [0]
    while len(offsets) < r and (mark := _best_mark(n, offsets, domains)) is not None:
        offsets.append(mark)
    return offsets


def _descended(n: int, offsets: list[int], domains: _Domains) -> tuple[int, ...]:
    r = len(offsets)
    best, work, is_better = _repeats(n, offsets), 0, True
    while is_better and work < _SEARCH_WORK:
        is_better = False
        for position in range(1, r):
            trial = offsets[:position] + offsets[position + 1 :]
            mark = _best_mark(n, trial, domains)
            assert mark is not None, "the mark that was taken out can always come back"
            trial.insert(position, mark)
            work += n * r
            if _repeats(n, trial) < best:
                offsets, best, is_better = trial, _repeats(n, trial), True
            if work >= _SEARCH_WORK:
                break
    return tuple(sorted(offsets))


def _best_mark(n: int, offsets: list[int], domains: _Domains) -> int | None:
    """The mark whose differences are rarest among those of the offsets, lowest on ties; None if none is allowed."""
    counts = difference_counts(n, tuple(offsets))
    marks = np.arange(n)[:, None]
    ahead = np.sort((marks - np.array(offsets)) % n, axis=1)
    # A mark halfway between two offsets (or opposite to one) makes the same difference twice by itself.
    own_repeats = (np.sort(-ahead % n, axis=1) == ahead).sum(axis=1)
    cost = 2 * (counts**2)[ahead].sum(axis=1) + own_repeats
    cost[offsets] = np.iinfo(np.int64).max
    if domains.size > 1:
        others = np.broadcast_to(np.array(offsets), ahead.shape)
        cost[~domains.allow(np.sort(np.concatenate((others, marks), axis=1), axis=1))] = np.iinfo(np.int64).max
    mark = int(cost.argmin())
    return mark if cost[mark] < np.iinfo(np.int64).max else None


def _repeats(n: int, offsets: Sequence[int]) -> tuple[int, int]:
    counts = difference_counts(n, tuple(offsets))
    return int(counts.max(initial=0)), int((counts**2).sum())
