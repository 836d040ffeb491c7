"""What the runs of a study say: learning curves, final scores, and aggregates with intervals.

    pip install -r benchmark/requirements.txt
    python benchmark/analyse.py benchmark/results/laptop

From the scores.csv and curves.csv there, as `study.py gather` writes them, come beside them

    curves.png     for each game: raw score, Behavioral Divergence and rollout length against steps, means over seeds
    aggregate.png  interquartile mean of the human-normalised scores over games and seeds, and the probability that one
                   arm's run is better than another's
    summary.md     the tables

All intervals are 95 % bootstrap intervals of rliable (Agarwal et al. 2021, arXiv 2108.13264), over seeds and stratified
by game: they say how far other seeds could move the numbers, not other games. Three seeds make them rough.
"""

import csv
import itertools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pqn_fixed_atari

# Okabe and Ito: distinct to colour-blind eyes; dashes tell the lines apart in print.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 3))]
PANELS = {
    "return": "raw score",
    "divergence_mean": "Behavioral Divergence\n(mean of last 20)",
    "rollout_length": "rollout length T\n[steps per env.]",
}
KINDS = {"training_normalized": "training", "human_normalized": "greedy"}  # what is aggregated
LABELS = {"arm", "script", "game", "flags"}  # columns that are no numbers


@dataclass(frozen=True)
class Args:
    study: Annotated[Path, tyro.conf.Positional]
    """directory with scores.csv and curves.csv; the results go there, too"""
    also: tuple[Path, ...] = ()
    """directories of other studies, whose arms are compared with these"""
    arms: tuple[str, ...] = ()
    """which arms, in this order; if none is named, `improved` and then all others"""
    improved: str = "adaptive"
    """arm whose probability of improvement over each other one is computed"""
    title: str = ""
    """of the pictures: protocol, seeds"""
    prefix: str = ""
    """put before the names of the files that are written"""
    window: int = 10
    """bins of steps over which the curves of the raw score are averaged"""
    reps: int = 2000
    """bootstrap replications"""


def read(path: Path) -> list[dict]:
    """Lines of a CSV file as dicts of strings. Errors: exit code 2 if there is none."""
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        print(f"analyse.py: error: {path}: {error.strerror}; study.py gather writes it", file=sys.stderr)
        raise SystemExit(2) from None


def number(text: str) -> float:
    """nan for an empty cell."""
    return float(text) if text else math.nan


def normalise(scores: list[dict]) -> None:
    """Adds training_normalized, (score - random) / (human - random); empty for a game without a human's score."""
    for row in scores:
        value = pqn_fixed_atari.human_normalized(row["game"], number(row["training_score"]))
        row["training_normalized"] = "" if value is None else str(value)


def by_arm(scores: list[dict], column: str, arms: list[str], games: list[str]) -> dict[str, np.ndarray]:
    """Scores of each arm as (seeds, games), over the seeds that all these arms have in all these games."""
    cells = {(row["arm"], row["game"], int(row["seed"])): number(row[column]) for row in scores}
    seeds = set.intersection(*({s for a, g, s in cells if (a, g) == pair} for pair in itertools.product(arms, games)))
    return {arm: np.array([[cells[arm, game, seed] for game in games] for seed in sorted(seeds)]) for arm in arms}


def smoothed(returns: np.ndarray, games: np.ndarray, window: int) -> np.ndarray:
    """Mean raw score of the games that ended in the last `window` bins, at each bin: (bins,); before the first game
    nan, where none has ended of late the value before."""
    summed, count = np.cumsum(np.where(games > 0, np.nan_to_num(returns) * games, 0.0)), np.cumsum(games)
    before = np.maximum(np.arange(len(games)) - window, -1)  # -1: nothing
    ended = count - np.where(before >= 0, count[before], 0)
    means = (summed - np.where(before >= 0, summed[before], 0)) / np.where(ended > 0, ended, np.nan)
    for i in range(1, len(means)):
        if math.isnan(means[i]):
            means[i] = means[i - 1]
    return means


def runs_of(curves: list[dict], window: int) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """For each arm and game: steps (bins,) and, for each panel, its runs (seeds, bins)."""
    lines = defaultdict(lambda: defaultdict(list))
    for row in curves:
        lines[row["arm"], row["game"]][int(row["seed"])].append(row)
    found = {}
    for key, seeds in lines.items():
        columns = {name: np.array([[number(row[name]) for row in rows] for rows in seeds.values()])
                   for name in (*PANELS, "games", "global_step")}  # fmt: skip
        pairs = zip(columns["return"], columns["games"])
        columns["return"] = np.array([smoothed(returns, games, window) for returns, games in pairs])
        found[key] = columns | {"global_step": columns["global_step"][0]}
    return found


def intervals(scores: dict, statistic, reps: int) -> tuple[dict, dict]:
    """Point estimates, and intervals (2, ...), of rliable's stratified bootstrap; the same at every call."""
    from rliable import library

    np.random.seed(0)  # rliable 1.2.0 draws from numpy's global generator, whatever random_state it is given
    return library.get_interval_estimates(scores, statistic, reps=reps)


def mean_of_runs(runs: np.ndarray, reps: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds and its interval: (seeds, X) -> (X,), (2, X)."""
    point, interval = intervals({"": runs[:, None]}, lambda sample: sample.mean(axis=(0, 1)), reps)
    return point[""], interval[""]


def draw_curves(args: Args, curves: list[dict], arms: list[str], games: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(8.3, 3.2 + 1.8 * len(games)), 6.4), layout="constrained")
    axes = figure.subplots(len(PANELS), len(games), sharex="col", squeeze=False)
    runs = runs_of(curves, args.window)
    for (row, (name, label)), (column, game) in itertools.product(enumerate(PANELS.items()), enumerate(games)):
        axis = axes[row, column]
        if name == "return":
            seeds = sorted({len(runs[arm, game]["games"]) for arm in arms if (arm, game) in runs})
            n = " to ".join(map(str, sorted({seeds[0], seeds[-1]})))
            axis.set_title(f"{game.removesuffix('-v5')} (n = {n})", fontsize=10)
        for arm, colour, dashes in zip(arms, itertools.cycle(COLOURS), itertools.cycle(DASHES)):
            found = runs.get((arm, game))
            if found is None:
                continue
            there = ~np.isnan(found[name]).any(axis=0)
            mean, (low, high) = mean_of_runs(found[name][:, there], args.reps)
            steps = found["global_step"][there] / 1000
            axis.plot(steps, mean, color=colour, linestyle=dashes, lw=1.5, label=arm)
            axis.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        if column == 0:
            axis.set_ylabel(label, fontsize=9)
        if name == "divergence_mean":
            axis.set_ylim(0, 1)
        if name == "rollout_length":
            axis.set_ylim(bottom=0)
            axis.set_xlabel("thousand steps (1 step = 4 frames)", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False,
                  fontsize=9)  # fmt: skip
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    figure.savefig(args.study / f"{args.prefix}curves.png", dpi=150)


def score_table(args: Args, scores: list[dict], arms: list[str], games: list[str]) -> list[str]:
    """Markdown, a line for each game and arm: means over seeds, with intervals."""
    columns = ["training_score", "eval_mean", "human_normalized"]
    lines = ["| game | arm | seeds | last 100 training games | greedy evaluation | human-normalised, greedy | "
             "T at the end | gradient steps | hours of one core |", "|" + "---|" * 9]  # fmt: skip
    for game, arm in itertools.product(games, arms):
        rows = [row for row in scores if (row["game"], row["arm"]) == (game, arm)]
        if not rows:
            continue
        values = {name: np.array([number(row[name]) for row in rows]) for name in rows[0] if name not in LABELS}
        cells = [game.removesuffix("-v5"), arm, str(len(rows))]
        for name, form in zip(columns, (".1f", ".1f", ".0%")):
            (mean,), ((low,), (high,)) = mean_of_runs(values[name][:, None], args.reps)
            cells.append(f"{mean:{form}}" + (f" ({low:{form}} to {high:{form}})" if len(rows) > 1 else ""))
        cells += [f"{values['rollout_length'].mean():.0f}", f"{values['gradient_steps'].mean():,.0f}"]
        lines.append("| " + " | ".join([*cells, f"{values['wall_clock'].mean() / 3600:.2f}"]) + " |")
    return lines


def aggregates(args: Args, scores: list[dict], arms: list[str], games: list[str]) -> tuple[dict, dict]:
    """Interquartile means {kind: {arm: (point, low, high)}} and probabilities of improvement {kind: {other: (...)}}.

    Training scores are normalised as the evaluation's are, by (score - random) / (human - random).
    """
    from rliable import metrics

    iqm, better = {}, {}
    for kind, label in KINDS.items():
        matrices = by_arm(scores, kind, arms, games)
        point, interval = intervals(matrices, lambda sample: np.array([metrics.aggregate_iqm(sample)]), args.reps)
        iqm[label] = {arm: (point[arm][0], *interval[arm][:, 0]) for arm in arms}
        others = [arm for arm in arms if arm != args.improved] if args.improved in arms else []
        pairs = {other: (matrices[args.improved], matrices[other]) for other in others}
        point, interval = intervals(pairs, metrics.probability_of_improvement, args.reps)
        better[label] = {other: (float(point[other]), *interval[other].ravel()) for other in others}
    return iqm, better


def draw_aggregates(args: Args, iqm: dict, better: dict, arms: list[str], seeds: int, games: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.3, 1.2 + 0.35 * len(arms)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    for axis, found, title in (
        (left, iqm, "interquartile mean, human-normalised"),
        (right, better, f"P({args.improved} is better than ...)"),
    ):
        names = [arm for arm in arms if any(arm in values for values in found.values())]
        for offset, (label, marker), values in zip((-0.15, 0.15), zip(found, "os"), found.values()):
            for place, arm in enumerate(names):
                point, low, high = values[arm]
                colour = COLOURS[arms.index(arm) % len(COLOURS)]
                axis.plot([low, high], [place + offset] * 2, color=colour, lw=2, alpha=0.6)
                axis.plot(point, place + offset, marker, color=colour, ms=6,
                          label=label if place == 0 else None)  # fmt: skip
        axis.set_yticks(range(len(names)), names, fontsize=9)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", alpha=0.3)
    left.legend(frameon=False, fontsize=8)
    right.axvline(0.5, color="black", lw=0.8, ls="--")
    right.set_xlim(-0.03, 1.03)
    shown = ", ".join(game.removesuffix("-v5") for game in games)
    figure.supxlabel(f"{shown}; n = {seeds}; 95 % bootstrap intervals", fontsize=8)
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    figure.savefig(args.study / f"{args.prefix}aggregate.png", dpi=150)


def aggregate_table(args: Args, iqm: dict, better: dict, arms: list[str], seeds: int, games: list[str]) -> list[str]:
    """Markdown, a line for each arm."""
    shown = ", ".join(game.removesuffix("-v5") for game in games)
    lines = ["", f"Over {shown}, {seeds} seeds each:", "",
             "| arm | " + " | ".join(f"interquartile mean, human-normalised, {label}" for label in iqm) + " | "
             + " | ".join(f"P({args.improved} is better), {label}" for label in better) + " |",
             "|" + "---|" * (1 + len(iqm) + len(better))]  # fmt: skip
    for arm in arms:
        cells = [arm]
        cells += ["{:.0%} ({:.0%} to {:.0%})".format(*values[arm]) for values in iqm.values()]
        cells += [
            "{:.2f} ({:.2f} to {:.2f})".format(*values[arm]) if arm in values else "" for values in better.values()
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(args: Args) -> None:
    scores, curves = (
        [row for study in (args.study, *args.also) for row in read(study / name)]
        for name in ("scores.csv", "curves.csv")
    )
    present = list(dict.fromkeys(row["arm"] for row in scores))
    arms = list(args.arms) or sorted(present, key=lambda arm: arm != args.improved)
    if unknown := set(arms) - set(present):
        print(f"analyse.py: error: --arms {' '.join(sorted(unknown))}: there are {' '.join(present)}", file=sys.stderr)
        raise SystemExit(2)
    runs, hours = len(scores), sum(number(row["wall_clock"]) for row in scores) / 3600
    steps = sum(int(row["steps"]) for row in scores)
    scores = [row for row in scores if row["arm"] in arms]
    games = list(dict.fromkeys(row["game"] for row in scores))
    normalise(scores)
    lines = score_table(args, scores, arms, games)
    # Of an unfinished study, the games in which all arms have the most seeds in common.
    common = {game: len(by_arm(scores, "eval_mean", arms, [game])[arms[0]]) for game in games}
    seeds = max(common.values())
    complete = [game for game in games if common[game] == seeds]
    if seeds > 1:
        iqm, better = aggregates(args, scores, arms, complete)
        lines += aggregate_table(args, iqm, better, arms, seeds, complete)
        draw_aggregates(args, iqm, better, arms, seeds, complete)
    else:  # of one seed there is no interval
        lines += ["", "No aggregates: in no game have all of these arms two seeds in common (--arms names fewer)."]
    lines += ["", f"Of all arms: {runs} runs, {steps:,} steps, {hours:.1f} hours of one core (training alone)."]
    (args.study / f"{args.prefix}summary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw_curves(args, curves, arms, games)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0], args=sys.argv[1:]))
