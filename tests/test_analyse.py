"""benchmark/analyse.py: the numbers. What needs rliable is left out where there is none."""

import csv
import importlib
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
analyse = importlib.import_module("analyse")

COLUMNS = (
    "arm script game seed steps training_score eval_mean eval_low eval_high human_normalized distinct_games "
    "rollout_length gradient_steps wall_clock flags"
).split()
GAMES = {"Pong-v5": (-20.7, 14.6), "Breakout-v5": (1.7, 30.5)}  # game -> random play, human: Wang et al. 2016
ARMS = {"fixed16": 0.2, "fixed64": 0.5, "adaptive": 0.7}  # arm -> human-normalised score


def cells(arms=ARMS, seeds=(1, 2, 3)):
    """Lines of scores.csv: in training the arm's score, greedy a tenth more, apart from 0.01 per seed."""
    for arm, score in arms.items():
        for game, (low, high) in GAMES.items():
            for seed in seeds:
                normalised = score + 0.01 * seed
                raw, greedy = (low + share * (high - low) for share in (normalised, normalised + 0.1))
                yield dict(zip(COLUMNS, map(str, [
                    arm, "x.py", game, seed, 1000, raw, greedy, greedy, greedy, normalised + 0.1, 30, 32, 500, 1800,
                    "--num-envs 8",
                ])))  # fmt: skip


@pytest.fixture
def study(tmp_path):
    """A directory with scores.csv and curves.csv: each run's score rises in a line, divergence falls."""
    with (tmp_path / "scores.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(cells())
    with (tmp_path / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("arm game seed global_step return games divergence_mean rollout_length".split())
        for row in cells():
            for i in range(1, 21):
                ended = i % 3 == 0
                score = float(row["training_score"]) * i / 20 if ended else ""
                head = [row["arm"], row["game"], row["seed"], 50 * i]
                writer.writerow([*head, score, int(ended), 1 - i / 40 if i > 2 else "", 16])
    return tmp_path


@pytest.mark.parametrize("window", [1, 3, 50])
def test_the_smoothed_curve_is_the_mean_over_the_games_of_the_window(window):
    random = np.random.default_rng(0)
    games = random.integers(0, 3, size=40) * (random.random(40) < 0.5)
    games[:3] = 0
    returns = np.where(games > 0, random.normal(size=40), np.nan)
    last = math.nan
    for i, found in enumerate(analyse.smoothed(returns, games, window)):
        scores = [returns[j] for j in range(max(0, i - window + 1), i + 1) for _ in range(games[j])]
        last = sum(scores) / len(scores) if scores else last
        assert found == pytest.approx(last, nan_ok=True)


def test_scores_are_laid_out_by_seed_and_game():
    """Only the seeds that every arm has in every game."""
    rows = [row for row in cells() if (row["arm"], row["game"], row["seed"]) != ("fixed64", "Pong-v5", "2")]
    found = analyse.by_arm(rows, "human_normalized", ["fixed16", "fixed64"], list(GAMES))
    assert found.keys() == {"fixed16", "fixed64"}
    np.testing.assert_allclose(found["fixed64"], [[0.61, 0.61], [0.63, 0.63]])


def test_training_scores_are_normalised_too():
    rows = list(cells())
    analyse.normalise(rows)
    assert [float(row["training_normalized"]) for row in rows] == pytest.approx(
        [ARMS[row["arm"]] + 0.01 * int(row["seed"]) for row in rows]
    )


def test_what_is_missing_is_named(study, capsys):
    for args, words in (
        (analyse.Args(study=study / "none"), "scores.csv"),
        (analyse.Args(study=study, arms=("fixed8",)), "--arms fixed8: there are fixed16 fixed64 adaptive"),
    ):
        with pytest.raises(SystemExit) as stop:
            analyse.main(args)
        assert stop.value.code == 2
        assert words in capsys.readouterr().err


def test_tables_and_pictures(study, capsys):
    pytest.importorskip("rliable")
    analyse.main(analyse.Args(study=study, reps=200, title="made up"))
    lines = (study / "summary.md").read_text().splitlines()
    assert "\n".join(lines) in capsys.readouterr().out
    # The mean of 0.71, 0.72 and 0.73, and greedy a tenth more, on Pong's scale.
    (pong,) = [line for line in lines if line.startswith("| Pong | adaptive | 3 |")]
    assert re.search(r"4\.7 \(4\.[45] to 5\.[01]\) \| 8\.2 .* \| 82% .81% to 83%. \| 32 \| 500 \| 0\.50 \|$", pong)
    (aggregate,) = [line for line in lines if line.startswith("| fixed64 |")]
    assert "| 52% (51% to 53%) | 62% (61% to 63%) | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in aggregate
    assert "Over Pong, Breakout, 3 seeds each:" in lines
    assert lines[-1] == "Of all arms: 18 runs, 18,000 steps, 9.0 hours of one core (training alone)."
    for name in ("curves.png", "aggregate.png"):
        with Image.open(study / name) as picture:
            colours = {colour for _, colour in picture.convert("RGB").getcolors(picture.width * picture.height)}
        assert {tuple(bytes.fromhex(colour[1:])) for colour in analyse.COLOURS[:3]} <= colours


def test_two_studies_side_by_side(study, tmp_path_factory, capsys):
    """The arms of one directory, moved to another, make the same tables."""
    pytest.importorskip("rliable")
    analyse.main(analyse.Args(study=study, reps=50))
    expected, other = capsys.readouterr().out, tmp_path_factory.mktemp("other")
    for name in ("scores.csv", "curves.csv"):
        head, *lines = (study / name).read_text().splitlines(keepends=True)
        for place, moved in ((study, False), (other, True)):
            (place / name).write_text(head + "".join(line for line in lines if line.startswith("fixed64") == moved))
    analyse.main(analyse.Args(study=study, also=(other,), arms=("adaptive", "fixed16", "fixed64"), reps=50))
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(expected.splitlines())


def test_an_unfinished_study(study, capsys):
    """Aggregates are over the games in which all arms have most seeds; with one seed each there are none."""
    pytest.importorskip("rliable")
    lines = (study / "scores.csv").read_text().splitlines(keepends=True)
    (study / "scores.csv").write_text("".join(line for line in lines if "x.py,Pong-v5,3" not in line))
    analyse.main(analyse.Args(study=study, reps=50))
    assert "Over Breakout, 3 seeds each:" in capsys.readouterr().out
    (study / "scores.csv").write_text(
        "".join(line for line in lines if re.search("x.py,[a-zA-Z0-9-]+,[23],", line) is None)
    )
    analyse.main(analyse.Args(study=study, reps=50))
    assert "No aggregates" in capsys.readouterr().out
