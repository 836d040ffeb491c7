"""One picture of some runs: return, Behavioral Divergence and rollout length against steps.

    python benchmark/plot_runs.py --runs fixed=A/metrics.csv adaptive=B/metrics.csv --title Pong --out pong.png

Also prints, for each run, the mean raw score of its last 20 training games at some points of training.
"""

import csv
import itertools
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]  # Okabe and Ito: distinct to colour-blind eyes and in grey


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...]
    """runs to draw, each LABEL=PATH of a metrics.csv"""
    title: str
    """title: game, protocol, seeds"""
    out: Path
    """PNG to write"""
    games: int = 20
    """window of the return [games]"""


def column(rows: list[dict], tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it is present."""
    present = [(int(row["global_step"]), float(row[tag])) for row in rows if row[tag] != ""]
    return [step for step, _ in present], [value for _, value in present]


def running_return(rows: list[dict], games: int) -> tuple[list[int], list[float]]:
    """Mean raw score of the last `games` full games, at each iteration that ended one.

    A row holds the mean of the games that its iteration ended; charts/games tells how many those were.
    """
    steps, means, recent, before = [], [], deque(maxlen=games), 0
    for row in rows:
        ended = int(row["charts/games"]) - before
        before += ended
        if ended:
            recent.extend([float(row["charts/episodic_return"])] * ended)
            steps.append(int(row["global_step"]))
            means.append(sum(recent) / len(recent))
    return steps, means


def main(args: Args) -> None:
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(7, 7.5), sharex=True, layout="constrained")
    for run, colour in zip(args.runs, itertools.cycle(COLOURS)):
        label, _, path = run.rpartition("=")
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        steps, means = running_return(rows, args.games)
        top.plot(steps, means, color=colour, label=label)
        middle.plot(*column(rows, "abs/behavioral_divergence"), ".", color=colour, alpha=0.35, markersize=4)
        middle.plot(*column(rows, "abs/divergence_mean"), color=colour, label=label)
        bottom.plot(*column(rows, "abs/rollout_length"), color=colour, label=label)
        last = int(rows[-1]["global_step"])
        print(f"{label}: mean raw score of the last {args.games} games")
        for step in (*range(100_000, last, 100_000), last):
            reached = [mean for at, mean in zip(steps, means) if at <= step]
            print(f"  {step:>9,} steps  {reached[-1] if reached else float('nan'):.2f}")
    top.set_ylabel(f"raw score,\nmean of last {args.games} games")
    middle.set_ylabel("Behavioral Divergence\n(dots: measured; line: mean of 20)")
    middle.set_ylim(-0.02, 1.05)
    bottom.set_ylabel("rollout length T\n[steps per environment]")
    bottom.set_xlabel("steps (1 step = 4 frames)")
    bottom.set_ylim(bottom=0)
    bottom.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:,.0f} k")
    top.set_title(args.title, fontsize=10)
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0], args=sys.argv[1:]))
