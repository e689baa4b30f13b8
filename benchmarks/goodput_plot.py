"""Goodput drawn: useful steps over time in the first run of each way, and the goodput of every run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.outcomes import Commit


def plot_goodput(
    file: Path,
    curves: Mapping[str, Sequence[Commit]],
    goodputs: Mapping[str, Sequence[float]],
    quiet_s: float,
    title: str,
) -> None:
    """Writes the drawing.

    Args:
        file: Its suffix says the format.
        curves: The commits of one run of each way, all under the same trace.
        goodputs: Of each run of each way, from 0 to 1.
        quiet_s: Time of a quiet step.
        title: Where the figures come from.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(2, 1), layout="constrained")
    for way, commits in curves.items():
        sums, times_s = [0.0], [0.0]
        for commit in commits[1:]:
            sums.append(sums[-1] + commit.share)
            times_s.append(commit.at_s - commits[0].at_s)
        left.plot(times_s, sums, label=way)
    most = max(len(commits) - 1 for commits in curves.values())
    left.plot([0.0, most * quiet_s], [0.0, most], color="black", linestyle=":", label="quiet")
    left.set(xlabel="seconds since the first commit", ylabel="whole steps in committed sums")
    left.legend()
    for place, way in enumerate(goodputs):
        right.plot([place] * len(goodputs[way]), [100 * value for value in goodputs[way]], "o", alpha=0.6)
    right.set_xticks(range(len(goodputs)), list(goodputs), rotation=30, ha="right")
    right.set(ylabel="goodput, % (measured)", ylim=(0, 105))
    figure.suptitle(title, fontsize=9)
    figure.savefig(file)
    plt.close(figure)
