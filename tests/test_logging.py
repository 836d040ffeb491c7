"""The run directory, TensorBoard, Weights & Biases, and what is shown on screen."""

import csv
import itertools
import json
import re
import sys
import time
import types
from pathlib import Path

import envpool
import pytest
from fake_envpool import CueGame, fake_make
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FLAGS = "--num-envs 2 --num-minibatches 2 --total-timesteps 256 --divergence-interval 2 --torch-threads 1".split()


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    def run(*flags):
        monkeypatch.setattr(envpool, "make", fake_make(CueGame))
        return script.main([*FLAGS, "--runs-dir", str(tmp_path), *flags])

    return run


@pytest.fixture
def clock(script, monkeypatch):
    """clock(read): the script, and it alone, sees the time that read() gives."""

    def clock(read):
        fake = types.SimpleNamespace(monotonic=read, strftime=time.strftime)
        monkeypatch.setattr(script, "time", fake)

    return clock


def csv_rows(run_dir):
    with open(f"{run_dir}/metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_run_directory_is_complete(script, run):
    run_dir = Path(run("--eval-episodes", "2", "--seed", "7")["run_dir"])
    files = sorted(path.name for path in run_dir.iterdir())
    assert files.pop(3).startswith("events.out.tfevents")
    assert files == ["args.json", "checkpoint.pt", "eval.json", "metrics.csv", "model.pt"]
    env_id, name, seed, stamp = run_dir.name.split("__")
    assert (env_id, name, seed) == ("Pong-v5", script.__name__, "7") and len(stamp.split("-")) == 3
    saved = json.loads((run_dir / "args.json").read_text())
    assert script.Args(**saved) == script.parse_args([*FLAGS, "--runs-dir", str(run_dir.parent), "--seed", "7",
                                                      "--eval-episodes", "2"])  # fmt: skip


def test_two_runs_at_once_never_share_a_directory(run):
    assert run("--eval-episodes", "0")["run_dir"] != run("--eval-episodes", "0")["run_dir"]


def test_tensorboard_and_csv_say_the_same(run):
    """Every cell of metrics.csv is a TensorBoard point at that step, and the other way round."""
    result = run("--eval-episodes", "2")
    events = EventAccumulator(result["run_dir"])
    events.Reload()
    points = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    evaluation = points.pop(("eval/return", result["global_step"]))
    assert evaluation == pytest.approx(result["eval_return"])
    cells = {
        (tag, int(row["global_step"])): float(value)
        for row in csv_rows(result["run_dir"])
        for tag, value in row.items()
        if tag != "global_step" and value != ""
    }
    assert points.keys() == cells.keys()
    assert all(points[key] == pytest.approx(cells[key], rel=1e-6) for key in points)


def test_one_line_per_iteration_and_where_cells_are_empty(run):
    rows = csv_rows(run("--eval-episodes", "0")["run_dir"])
    steps = [int(row["global_step"]) for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] <= 256
    assert rows[0]["charts/SPS"] == "" and all(float(row["charts/SPS"]) > 0 for row in rows[1:])
    assert [row["abs/behavioral_divergence"] != "" for row in rows] == [i % 2 == 1 for i in range(len(rows))]
    assert rows[0]["abs/divergence_mean"] == "" and all(row["abs/divergence_mean"] for row in rows[1:])


def test_the_logged_loss_is_the_mean_over_all_minibatches(script, run, monkeypatch):
    """Not the last minibatch's."""
    losses = []
    loss_of = script.td_loss

    def td_loss(*args):
        result = loss_of(*args)
        losses.append((result[0].item(), result[1].item()))
        return result

    monkeypatch.setattr(script, "td_loss", td_loss)
    rows = csv_rows(run("--eval-episodes", "0")["run_dir"])
    per_iteration = [losses[i : i + 4] for i in range(0, len(losses), 4)]  # 2 epochs x 2 minibatches
    assert len(per_iteration) == len(rows)
    for row, part in zip(rows, per_iteration):
        assert float(row["losses/td_loss"]) == pytest.approx(sum(loss for loss, _ in part) / 4, rel=1e-5)
        assert float(row["losses/q_values"]) == pytest.approx(sum(q for _, q in part) / 4, rel=1e-5, abs=1e-6)


def test_speed_leaves_out_construction_warm_up_and_evaluation(script, run, clock, monkeypatch):
    """A clock that says when the environments were built, and which iteration was slow: only later ones count."""
    now = [0.0]
    clock(lambda: now[0])
    build, targets_of = script.make_envs, script.q_lambda_targets

    def slow_build(*args):
        now[0] += 1000.0
        return build(*args)

    iterations = []

    def timed(rewards, *rest):
        iterations.append(rewards.numel())
        now[0] += 50.0 if len(iterations) == 1 else 2.0  # the first iteration warms up
        return targets_of(rewards, *rest)

    monkeypatch.setattr(script, "make_envs", slow_build)
    monkeypatch.setattr(script, "q_lambda_targets", timed)
    result = run("--eval-episodes", "2")
    rows = csv_rows(result["run_dir"])
    assert [float(row["charts/SPS"]) for row in rows[1:]] == [iterations[0] / 2] * (len(rows) - 1)
    assert [float(row["charts/wall_clock"]) for row in rows] == [50 + 2 * i for i in range(len(rows))]


def test_plain_lines_where_no_terminal_is(run, clock, capsys):
    """One line every ten seconds or so, with everything a person waits for."""
    clock(itertools.count(0, 3).__next__)  # every look at the clock is three seconds later
    run("--eval-episodes", "0", "--total-timesteps", "640")
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "/640 steps" in line]
    assert "building 2 environments" in err and "run directory:" in err
    assert 2 <= len(lines) <= 8
    assert all(word in lines[-1] for word in ("return ", "divergence ", "T ", "SPS ", "left "))


def test_evaluation_gives_signs_of_life(run, clock, capsys):
    """Its games may take minutes, and the first of them end late."""
    clock(itertools.count(0, 3).__next__)
    run("--eval-episodes", "4")
    found = re.findall(
        r"(\d) of 4 games; the longest of the others is at step (\d+), of 27,000", capsys.readouterr().err
    )
    assert found and all(0 < int(step) < 27_000 for _, step in found)


def test_the_last_line_says_what_there_is(script, run, capsys):
    result = run("--eval-episodes", "2")
    last = capsys.readouterr().err.splitlines()[-2]
    assert last.startswith(f"{result['global_step']:,} steps, {result['gradient_steps']:,} gradient steps; ")
    assert f"score {result['episodic_return']:.1f} in training" in last
    assert f" {result['eval_return']:.1f} in the evaluation" in last
    run("--eval-episodes", "0", "--total-timesteps", "64")
    last = capsys.readouterr().err.splitlines()[-2]
    assert "gradient steps" in last and "nan" not in last and "evaluation" not in last


def test_a_bar_on_a_terminal(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run("--eval-episodes", "2")
    err = capsys.readouterr().err
    assert all(word in err for word in ("100%", "divergence=", "return=", "T=", "SPS=", "evaluation:", "game"))


def test_a_slow_machine_is_told_how_long_it_will_take(run, clock, capsys):
    """Said when the first speed is known, if it is hours, with the way out."""
    clock(itertools.count(0, 40).__next__)
    run("--eval-episodes", "0")
    assert "Half an hour" not in capsys.readouterr().err  # minutes
    clock(itertools.count(0, 10_000).__next__)
    run("--eval-episodes", "0")
    err = capsys.readouterr().err
    assert err.count("Half an hour") == 1 and "hours" in err
    heading = re.search('under "(.+)"', err)[1]
    assert f"\n## {heading}\n" in (Path(__file__).parent.parent / "README.md").read_text()


def test_weights_and_biases_gets_the_same(script, run, monkeypatch):
    """A stand-in for wandb sees the configuration and every metric that the CSV holds, and is told of the end."""
    logged, calls = [], []

    class Run:
        def log(self, metrics, step):
            logged.append((step, metrics))

        def finish(self):
            calls.append("finish")

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = types.SimpleNamespace(name="wandb", origin="here")
    wandb.init = lambda **kwargs: calls.append(kwargs) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    result = run("--track", "--eval-episodes", "2")
    configuration, end = calls
    assert end == "finish" and configuration["config"]["num_envs"] == 2
    assert configuration["name"] == Path(result["run_dir"]).name
    rows = csv_rows(result["run_dir"])
    assert [step for step, _ in logged[:-1]] == [int(row["global_step"]) for row in rows]
    for (_, seen), row in zip(logged, rows):
        assert seen == {tag: pytest.approx(float(v)) for tag, v in row.items() if v != "" and tag != "global_step"}
    assert logged[-1] == (result["global_step"], {"eval/return": result["eval_return"]})


def test_nothing_is_left_open_when_training_fails(script, run, monkeypatch, tmp_path):
    """An exception in the environment: it is passed on, the metrics so far are on disk, the environments closed."""
    steps = [0]
    step = CueGame.step

    def failing(self, action):
        steps[0] += 1
        if steps[0] == 100:
            raise RuntimeError("emulator on fire")
        return step(self, action)

    monkeypatch.setattr(CueGame, "step", failing)
    with pytest.raises(RuntimeError, match="on fire"):
        run("--total-timesteps", "2560")
    (run_dir,) = tmp_path.iterdir()
    assert len(csv_rows(run_dir)) == (99 // 32 if script.__name__ == "pqn_fixed_atari" else 99 // 16)
    assert envpool.make.envs[0].closed
