"""Checkpoints, resuming, and every way in which a run can end before its end.

A run is stopped in the middle by what a test puts into the game, then resumed from what is on disk. All this is
plumbing, the same text in every script (test_project.py): one script stands for all, but where the loop has a part in
it. T steps per rollout, N = 2 environments.
"""

import contextlib
import copy
import csv
import dataclasses
import errno
import fcntl
import importlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import envpool
import numpy as np
import pytest
import torch
from fake_envpool import Catch, CueGame, Row, ScriptedGame, fake_make
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--num-envs 2 --num-minibatches 2 --eval-episodes 0 --torch-threads 1 --divergence-interval 2 --total-timesteps 320"
).split()
both_scripts = pytest.mark.parametrize("script", ["pqn_fixed_atari", "pqn_abs_atari"], indirect=True)
SPEED = {"charts/SPS", "charts/wall_clock"}  # columns that measure time: never the same twice


def rows_of(run_dir, names=None):
    """metrics.csv without the columns that measure time; of some columns alone, as numbers."""
    with open(f"{run_dir}/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if names:
        return [tuple(float(row[name]) if row[name] else None for name in names) for row in rows]
    return [{name: value for name, value in row.items() if name not in SPEED} for row in rows]


def steps_of(run_dir):
    return [int(step) for (step,) in rows_of(run_dir, ["global_step"])]


def load(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    """Equal structures of dictionaries, lists, numbers and tensors, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Stop(Exception):
    """What a test throws to end a run."""


@pytest.fixture(params=["pqn_abs_atari"])
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    """run(*flags, game=..., **game options): a new run under tmp_path, or with --resume an old one."""

    def run(*flags, game=CueGame, **options):
        make = fake_make(game, **options)
        monkeypatch.setattr(envpool, "make", make)
        resumed = any(flag == "--resume" for flag in flags)
        return script.main([*([] if resumed else [*SMALL, "--runs-dir", str(tmp_path)]), *flags])

    return run


@pytest.fixture
def stopped(script, run, monkeypatch, tmp_path):
    """stopped(at, *flags, by=...): a run directory whose run was ended at the given call of the game's step.

    by: an exception to throw there, or a signal to send. With rescued=False nothing is saved at the end, as if the
    process had been killed.
    """

    def stopped(at, *flags, by=Stop, game=CueGame, rescued=True, **options):
        calls = [0]

        class Stopping(game):
            def step(self, action):
                calls[0] += 1
                if calls[0] == at:
                    if isinstance(by, signal.Signals):
                        os.kill(os.getpid(), by)
                    else:
                        raise by("by the test")
                return super().step(action)

        known = set(tmp_path.iterdir())
        with monkeypatch.context() as patch:
            if not rescued:
                patch.setattr(script.RunLog, "rescue", lambda self, error: None)
            with pytest.raises(SystemExit if isinstance(by, signal.Signals) else by):
                run(*flags, game=Stopping, **options)
        (run_dir,) = set(tmp_path.iterdir()) - known
        return run_dir

    return stopped


def refusal(script, capsys, *flags):
    """The lines with which a command line is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main(list(flags))
    err = capsys.readouterr().err
    assert stop.value.code == 2, err
    assert "Traceback" not in err
    return err


# ----------------------------------------------------------------------------------------------------------------------
# A resumed run is the run that was never stopped
# ----------------------------------------------------------------------------------------------------------------------


class Endless(CueGame):
    """A cue game without an end, so that a run can be cut at any row without losing a game."""

    steps_per_life = 10**6


FLAGS = "--total-timesteps 640 --divergence-interval 1 --exploration-fraction 0.7 --checkpoint-interval 0".split()


@both_scripts
@pytest.mark.parametrize("stops", [(40,), pytest.param((150, 75, 80), marks=pytest.mark.slow)])
def test_a_resumed_run_agrees_bit_for_bit_with_one_that_was_never_stopped(script, monkeypatch, tmp_path, stops):
    """Stopped in the middle of learning and resumed, the emulator going on from where the last iteration had left it.

    stops: steps of the emulator after which the run is stopped, and those after which the resumed one is stopped again.
    """
    adapting = ["--divergence-warmup", "2"] if script.__name__ == "pqn_abs_atari" else []
    emulators = {}  # at the end of the last iteration
    keep = script.RunLog.keep

    def keep_emulator_too(self, state):
        emulators["kept"] = copy.deepcopy(emulators["now"])
        keep(self, state)

    def main(*flags, envs, fail_at=None):
        emulators["now"] = envs
        steps, updates = [0], [0]
        step, loss_of = type(envs).step, script.td_loss

        def counting(self, action):
            steps[0] += 1
            return step(self, action)

        def failing(*args):
            updates[0] += fail_at is not None and steps[0] >= fail_at
            if updates[0] == 3:
                raise Stop
            return loss_of(*args)

        with monkeypatch.context() as patch:
            patch.setattr(envpool, "make", lambda *args, **kwargs: envs)
            patch.setattr(script.RunLog, "keep", keep_emulator_too)
            patch.setattr(Endless, "step", counting)
            patch.setattr(script, "td_loss", failing)
            return script.main(list(flags))

    new = [*SMALL, *FLAGS, *adapting, "--runs-dir", str(tmp_path)]
    whole = main(*new, envs=Endless(num_envs=2, seed=[1, 2]))
    with pytest.raises(Stop):
        main(*new, envs=Endless(num_envs=2, seed=[1, 2]), fail_at=stops[0])
    (run_dir,) = [path for path in tmp_path.iterdir() if str(path) != whole["run_dir"]]
    for fail_at in (*stops[1:], None):
        assert 0 < load(run_dir / "checkpoint.pt")["global_step"] < whole["global_step"]
        envs = emulators["kept"]
        with monkeypatch.context() as patch, contextlib.nullcontext() if fail_at is None else pytest.raises(Stop):
            patch.setattr(Endless, "reset", lambda self: (self._obs.copy(), {}))  # it goes on where it was
            resumed = main("--resume", str(run_dir), envs=envs, fail_at=fail_at)

    assert resumed["run_dir"] == str(run_dir)
    assert {**resumed, "run_dir": ""} == pytest.approx({**whole, "run_dir": ""}, nan_ok=True)
    assert rows_of(run_dir) == rows_of(whole["run_dir"])
    ends = [load(Path(path) / "checkpoint.pt") for path in (whole["run_dir"], run_dir)]
    ends = [{name: value for name, value in end.items() if name not in ("args", "wall_clock")} for end in ends]
    assert same(*ends)
    if adapting:
        assert len({length for (length,) in rows_of(run_dir, ["abs/rollout_length"])}) > 3  # it did adapt


@pytest.mark.parametrize(
    ("script", "game"), [("pqn_fixed_atari", CueGame), ("pqn_abs_atari", Catch)], indirect=["script"]
)
def test_a_run_of_x_raised_to_2x_has_the_schedules_of_2x(script, run, game):
    """Epsilon, learning rate, measurements, gradient steps and the rollout's rule go on; the emulators begin anew."""
    flags = ["--divergence-interval", "3", "--exploration-fraction", "0.9", "--total-timesteps"]
    first = run(*flags, "960", game=game)
    at_half = first["global_step"]
    resumed = run("--resume", first["run_dir"], "--total-timesteps", "1920", game=game)

    assert resumed["run_dir"] == first["run_dir"] and resumed["global_step"] > 2 * at_half - 64
    measured = [delta is not None for (delta,) in rows_of(resumed["run_dir"], ["abs/behavioral_divergence"])]
    assert measured == [i % 3 == 2 for i in range(len(measured))]

    # Every row follows from the rows before it, across the seam.
    names = ["global_step", "charts/epsilon", "abs/behavioral_divergence", "abs/divergence_mean", "abs/rollout_length",
             "abs/update_epochs", "charts/gradient_steps"]  # fmt: skip
    deltas, length, before, updates = [], None, 0, 0
    for step, epsilon, delta, mean, T, epochs, gradient_steps in rows_of(resumed["run_dir"], names):
        total = 960 if step <= at_half else 1920
        assert epsilon == pytest.approx(max(1 - 0.999 * (step - 2) / (0.9 * total), 0.001))
        assert step - before == T * 2
        updates += epochs * 2
        assert gradient_steps == updates
        length = T if length is None else length
        assert round(length) == T
        if delta is not None:
            deltas.append(delta)
            assert mean == pytest.approx(np.mean(deltas[-20:]))
            if script.__name__ == "pqn_abs_atari" and len(deltas) >= 10:
                d = min(max(mean, 0.05), 0.95)
                target = 64 - 48 * math.log(d / 0.05) / math.log(19)
                length = min(max(0.9 * length + 0.1 * target, 16), 64)
        before = step


@both_scripts
def test_the_emulators_restart_with_the_reset_flags_cleared(script, run, stopped, monkeypatch):
    """Stopped after a rollout whose last row was a done: the resumed run's first row is a transition all the same."""
    T = 32 if script.__name__ == "pqn_fixed_atari" else 16
    game = [Row(1, lives=3)] * (T - 1) + [Row(1, lives=0, terminated=True)]
    run_dir = stopped(T + 1, game=ScriptedGame, scripts=[game])
    masks = []
    loss_of = script.td_loss
    monkeypatch.setattr(script, "td_loss", lambda q, a, g, valid: masks.append(valid) or loss_of(q, a, g, valid))
    monkeypatch.setattr(script, "minibatches", lambda rows, *_: [torch.arange(rows)])
    run("--resume", str(run_dir), game=ScriptedGame, scripts=[game])
    assert masks[0].reshape(T, 2).T.tolist() == [[1.0] * T] * 2
    assert masks[1].reshape(T, 2).T.tolist() == [[0.0] + [1.0] * (T - 1)] * 2  # then they are carried over again


def test_a_resumed_run_has_environments_of_its_own(script, run, stopped):
    """Their seeds are unrelated to the first ones: the openings are not played again."""
    run_dir = stopped(100)
    first = envpool.make.calls[-1]["seed"]
    run("--resume", str(run_dir))
    second = envpool.make.calls[-1]["seed"]
    assert not set(first) & set(second)
    assert script.environment_seeds(1, 2, "training") == first
    assert script.environment_seeds(1, 2, "training", load(run_dir / "checkpoint.pt")["global_step"]) != second
    assert len({tuple(script.environment_seeds(1, 2, "training", step)) for step in (0, 1, 64, 2**32, 2**33)}) == 5


def test_metrics_go_on_without_gap_or_double(script, run, stopped):
    """Killed well after its last checkpoint, with half a line at the end of metrics.csv."""
    run_dir = stopped(135, "--checkpoint-interval", "200", "--divergence-interval", "1", rescued=False)
    last = load(run_dir / "checkpoint.pt")["global_step"]
    assert steps_of(run_dir)[-1] > last
    with (run_dir / "metrics.csv").open("a") as file:
        file.write("1")
    result = run("--resume", str(run_dir))
    rows = rows_of(run_dir, ["global_step", "abs/batch_size", "charts/games", "charts/wall_clock"])
    assert [step for step, *_ in rows] == list(np.cumsum([size for _, size, *_ in rows]))
    assert rows[-1][0] == result["global_step"] > last
    assert all(b[2] >= a[2] and b[3] > a[3] for a, b in itertools.pairwise(rows))  # games and seconds only grow
    events = EventAccumulator(str(run_dir))
    events.Reload()
    for tag in ("losses/td_loss", "abs/behavioral_divergence"):
        cells = {int(step): value for step, value in rows_of(run_dir, ["global_step", tag])}
        assert {event.step: event.value for event in events.Scalars(tag)} == pytest.approx(cells, rel=1e-6)
        assert len(events.Scalars(tag)) == len(cells)


def test_a_raised_total_is_kept_whenever_the_run_ends(script, run, monkeypatch):
    """Stopped before its first new checkpoint, the resumed run still knows what it was asked for."""
    run_dir = Path(run()["run_dir"])
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(CueGame, "step", lambda self, action: (_ for _ in ()).throw(Stop))
        run("--resume", str(run_dir), "--total-timesteps", "640")
    assert run("--resume", str(run_dir))["global_step"] > 560


def test_going_on_from_the_checkpoint_before(script, run, stopped, monkeypatch):
    """It takes the newest one's place at once: no gap if the run dies before it writes one, and none unreadable."""
    run_dir = stopped(130, "--checkpoint-interval", "64")
    step = load(run_dir / "checkpoint_previous.pt")["global_step"]
    assert step < load(run_dir / "checkpoint.pt")["global_step"]
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(CueGame, "step", lambda self, action: (_ for _ in ()).throw(Stop))
        run("--resume", str(run_dir / "checkpoint_previous.pt"))
    assert load(run_dir / "checkpoint.pt")["global_step"] == steps_of(run_dir)[-1] == step
    damage(run_dir / "checkpoint.pt", "cut")
    replace, calls = os.replace, []

    def dying(source, target):  # in the moment in which there is no checkpoint.pt
        calls.append(Path(target).name)
        if calls[-2:] == ["checkpoint_previous.pt", "checkpoint.pt"]:
            raise Stop
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(os, "replace", dying)
        patch.setattr(script.RunLog, "rescue", lambda self, error: None)
        run("--resume", str(run_dir))
    assert not (run_dir / "checkpoint.pt").exists()
    assert run("--resume", str(run_dir))["global_step"] == 320
    rows = rows_of(run_dir, ["global_step", "abs/batch_size"])
    assert [step for step, _ in rows] == list(np.cumsum([size for _, size in rows]))


def test_cut_metrics(script, tmp_path):
    path = tmp_path / "metrics.csv"
    for content, kept in (
        ("global_step,a\n10,x\n20,y\n30,z\n", "global_step,a\n10,x\n20,y\n"),
        ("global_step,a\n10,x\n20,y", "global_step,a\n10,x\n"),
        ("global_step,a\n10,x\n\0\0\0\n15,y\n", "global_step,a\n10,x\n"),
        ("global_step,a\n", "global_step,a\n"),
        ("", ""),
    ):
        path.write_text(content)
        script.cut_metrics(path, 20)
        assert path.read_text() == kept


def test_counters_never_go_back_by_more_than_the_interval(script, run, monkeypatch):
    """At every step, the newest checkpoint is at most the interval behind, rollouts being shorter than that."""
    written = [0]
    keep, behind = script.RunLog.keep, []

    def watch(self, state):
        behind.append(state["global_step"] - written[-1])
        keep(self, state)
        written.append(self.saved_step)

    monkeypatch.setattr(script.RunLog, "keep", watch)
    run("--checkpoint-interval", "150")
    assert max(behind) <= 150 and len(set(written)) >= 3
    behind.clear(), written.append(0)
    run("--checkpoint-interval", "0")
    assert set(written[-len(behind) :]) == {0}


def test_a_finished_run_can_be_raised_or_evaluated_again(script, run):
    result = run("--eval-episodes", "2")
    run_dir = Path(result["run_dir"])
    again = run("--resume", str(run_dir))
    assert again == result and json.loads((run_dir / "eval.json").read_text())["mean"] == result["eval_return"]
    more = run("--resume", str(run_dir / "checkpoint.pt"), "--total-timesteps", "640")
    assert more["global_step"] == steps_of(run_dir)[-1] > 560
    assert load(run_dir / "model.pt")["global_step"] == more["global_step"]
    assert json.loads((run_dir / "args.json").read_text())["total_timesteps"] == 640
    events = EventAccumulator(str(run_dir))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/return")] == [320, more["global_step"]]  # once each


def test_a_checkpoint_holds_all_that_the_design_names(script, run):
    saved = load(Path(run()["run_dir"]) / "checkpoint.pt")
    assert saved.keys() == {
        "script", "args", "wall_clock", "iteration", "global_step", "gradient_steps", "num_games", "length",
        "divergences", "recent_scores", "q_network", "num_actions", "optimizer", "generators", "device",
    }  # fmt: skip
    assert len(saved["optimizer"]["state"]) == len(saved["q_network"])
    assert [state.dtype for state in saved["generators"]] == [torch.uint8] * 2


def test_the_state_that_is_kept_is_a_copy_in_the_memory_of_an_earlier_one(script):
    """Equal to what it was taken from, apart from it, and at most two sets of tensors however long the run is."""
    q_network = script.QNetwork(4)
    optimizer = torch.optim.RAdam(q_network.parameters(), foreach=True)
    rng = torch.Generator().manual_seed(1)
    kept = spare = None
    places = []
    for i in range(6):
        q_network(torch.full((2, 4, 84, 84), i, dtype=torch.uint8)).sum().backward()
        optimizer.step()
        state = script.snapshot(q_network, optimizer, rng) | {"scores": list(range(i)), "pair": (torch.ones(i), 0.5)}
        kept, spare = script.copied(state, spare), kept
        expected = copy.deepcopy(state)
        assert same(kept, expected) and kept["pair"][1] == 0.5
        optimizer.step()
        assert same(kept, expected) and not same(kept["q_network"], q_network.state_dict())
        places.append(kept["q_network"]["q_values.weight"].data_ptr())
    assert len(set(places)) == 2 and places[0] == places[2]


def test_between_devices_the_generators_are_seeded_anew(script):
    """A GPU's generator state means nothing to a CPU's; everything else goes over."""
    q_network = script.QNetwork(4)
    optimizer = torch.optim.RAdam(q_network.parameters(), foreach=True)
    q_network(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).sum().backward()
    optimizer.step()
    rng = torch.Generator().manual_seed(1)
    saved = copy.deepcopy(script.snapshot(q_network, optimizer, rng)) | {"global_step": 640}
    expected = torch.rand(3, generator=rng)

    other, random = script.QNetwork(4), torch.Generator().manual_seed(1)
    other_optimizer = torch.optim.RAdam(other.parameters(), foreach=True)
    torch.rand(100, generator=random)
    script.restore(saved, other, other_optimizer, random)
    assert same(other.state_dict(), q_network.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert torch.equal(torch.rand(3, generator=random), expected)
    script.restore(saved | {"device": "cuda", "generators": [torch.zeros(16, dtype=torch.uint8)]},
                   other, other_optimizer, random)  # fmt: skip
    assert random.initial_seed() == 641


# ----------------------------------------------------------------------------------------------------------------------
# What may go wrong
# ----------------------------------------------------------------------------------------------------------------------

PHASES = ["rollout", "targets", "learning", "logging", "checkpointing", "evaluation"]
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(
    ("phase", "number"),
    [*itertools.product(PHASES, SIGNALS), ("learning", signal.SIGHUP)],
    ids=lambda value: getattr(value, "name", value),
)
def test_signals_in_every_phase(script, run, monkeypatch, capsys, tmp_path, phase, number):
    """The signal comes in the middle of the phase: a line that says how to go on, a code, and a run that goes on."""
    owner, name = {
        "rollout": (CueGame, "step"),
        "targets": (script, "q_lambda_targets"),
        "learning": (script, "td_loss"),
        "logging": (script.RunLog, "show_progress"),
        "checkpointing": (script.os, "fsync"),
        "evaluation": (script.EpisodeTracker, "step"),
    }[phase]
    original, calls = getattr(owner, name), [0]

    def interrupted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == (161 if phase == "evaluation" else 7):  # training's 320 steps are 160 calls
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    start = time.monotonic()
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(owner, name, interrupted)
        run("--checkpoint-interval", "64", "--eval-episodes", "2")
    assert time.monotonic() - start < 10
    assert stop.value.code == 128 + number
    err = capsys.readouterr().err
    (run_dir,) = tmp_path.iterdir()
    assert f"stopped by {number.name}" in err
    if phase == "rollout":  # in the first iteration
        assert "there is nothing to go on with" in err
        return
    assert f"--resume {run_dir}" in err
    step = load(run_dir / "checkpoint.pt")["global_step"]
    assert f"checkpoint of step {step:,}" in err and 0 < step <= 320
    assert not list(run_dir.glob("*.tmp"))
    assert (phase == "evaluation") == (step == 320)
    result = run("--resume", str(run_dir))
    assert f"resumed at step {step:,}" in capsys.readouterr().err
    assert result["global_step"] == 320 and not math.isnan(result["eval_return"])


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signals_while_the_environments_are_built(script, tmp_path, number):
    """envpool builds for seconds without letting Python hear a signal: the process ends at once all the same."""
    command = [sys.executable, ROOT / f"{script.__name__}.py", "--num-envs", "600", "--runs-dir", tmp_path]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("building"):
                break
        time.sleep(0.5)
        process.send_signal(number)
        start = time.monotonic()
        assert process.wait() == -number
        assert time.monotonic() - start < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_real_process_is_killed_and_resumed(script, tmp_path, number):
    """With envpool, as from a shell. benchmark/reliability.py does it a hundred times."""
    command = [sys.executable, ROOT / f"{script.__name__}.py"]
    flags = "--num-envs 4 --num-minibatches 2 --checkpoint-interval 64 --eval-episodes 0 --torch-threads 1".split()
    with subprocess.Popen([*command, *flags, "--runs-dir", tmp_path], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/checkpoint_previous.pt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        start = time.monotonic()
        code = process.wait()
        assert time.monotonic() - start < 10
        assert code == {signal.SIGKILL: -9}.get(number, 128 + number)
        err = process.stderr.read()
    (run_dir,) = tmp_path.iterdir()
    assert number == signal.SIGKILL or f"--resume {run_dir}" in err
    reached, (_, saved) = steps_of(run_dir)[-1], script.load_saved("resume", str(run_dir))
    assert reached - saved["global_step"] <= 64 * 4
    with subprocess.Popen([*command, "--resume", run_dir], stderr=subprocess.PIPE, text=True) as process:
        assert any(f"resumed at step {saved['global_step']:,}" in line for line in process.stderr)
        process.terminate()


CALLS = ["Path.open", "os.fsync", "os.replace", "os.replace again"]


@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_survives_a_crash_at_any_moment_of_the_next_ones_writing(script, tmp_path, monkeypatch, call):
    """Whatever call is the last one before the end, a whole checkpoint can be loaded: the old or the new one."""
    content = {"script": "", "args": {}, "q_network": {}, "global_step": 0, "optimizer": {}}
    path, previous = tmp_path / "checkpoint.pt", tmp_path / "checkpoint_previous.pt"
    for step in (1, 2):
        script.save_file(path, content | {"global_step": step}, previous)

    class Crash(BaseException):
        pass

    seen = [0]

    def crash(original):
        def crashing(*args, **kwargs):
            seen[0] += 1
            if seen[0] == 2 or not call.endswith("again"):
                raise Crash
            return original(*args, **kwargs)

        return crashing

    with monkeypatch.context() as patch, pytest.raises(Crash):
        owner, name = (Path, "open") if call == "Path.open" else (os, call.split()[0].removeprefix("os."))
        patch.setattr(owner, name, crash(getattr(owner, name)))
        script.save_file(path, content | {"global_step": 3}, previous)
    assert script.load_saved("resume", str(tmp_path))[1]["global_step"] == 2
    script.save_file(path, content | {"global_step": 3}, previous)
    assert load(path)["global_step"] == 3
    assert load(previous)["global_step"] in (1, 2)


def test_a_full_disk(script, run, monkeypatch, capsys, tmp_path):
    """The second checkpoint does not fit: a line, code 1, the first one as it was."""
    fsync, calls = os.fsync, [0]

    def full(descriptor):
        if (Path(f"/proc/self/fd/{descriptor}")).resolve().name == "checkpoint.pt.tmp":
            calls[0] += 1
            if calls[0] >= 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(os, "fsync", full)
        run("--checkpoint-interval", "128")
    err = capsys.readouterr().err
    (run_dir,) = tmp_path.iterdir()
    assert stop.value.code == 1
    assert "No space left on device" in err.splitlines()[-1] and "could not be saved" in err
    assert not list(run_dir.glob("*.tmp"))
    step = load(run_dir / "checkpoint.pt")["global_step"]
    assert f"checkpoint of step {step:,}" in err and step > 0
    assert run("--resume", str(run_dir))["global_step"] == 320


def test_a_file_size_limit_of_the_system(script, tmp_path):
    """The same from the operating system itself: no file above 10 MB, and a checkpoint has 20."""
    child = (
        "import envpool, sys; from fake_envpool import CueGame, fake_make; envpool.make = fake_make(CueGame);"
        f"import {script.__name__} as script; script.main(sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", child, *SMALL, "--checkpoint-interval", "64", "--runs-dir", tmp_path],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, 10**7)),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "File too large" in result.stderr.splitlines()[-1]
    (run_dir,) = tmp_path.iterdir()
    assert not list(run_dir.glob("checkpoint*")) and len(steps_of(run_dir)) == 1


@both_scripts
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(script, run, monkeypatch, capsys, tmp_path, value):
    """The run ends with where it happened; the state before that iteration is kept, and finite."""
    loss_of, calls = script.td_loss, [0]

    def td_loss(*args):
        calls[0] += 1
        loss, q = loss_of(*args)
        return (loss * value if calls[0] == 14 else loss), q  # in the fourth iteration of 4 updates each

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(script, "td_loss", td_loss)
        run("--checkpoint-interval", "0")
    assert stop.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "loss" in last and "iteration 4" in last
    (run_dir,) = tmp_path.iterdir()
    saved = load(run_dir / "checkpoint.pt")
    assert saved["iteration"] == len(steps_of(run_dir)) == 3
    assert all(values.isfinite().all() for values in saved["q_network"].values())
    assert run("--resume", str(run_dir))["global_step"] == 320


def test_a_network_that_is_not_finite_is_never_saved(script, run, stopped, monkeypatch, capsys):
    """Weights that overflow with the last update of an iteration, the loss still finite."""
    run_dir = stopped(150, "--checkpoint-interval", "0")
    before = load(run_dir / "checkpoint.pt")
    snapshot = script.snapshot

    def broken(q_network, *rest):
        state = snapshot(q_network, *rest)
        state["q_network"] = {name: values * math.inf for name, values in state["q_network"].items()}
        return state

    monkeypatch.setattr(script, "snapshot", broken)
    with pytest.raises(SystemExit) as stop:
        run("--resume", str(run_dir), "--checkpoint-interval", "64")
    assert stop.value.code == 1
    assert "not finite" in capsys.readouterr().err.splitlines()[-1]
    after = load(run_dir / "checkpoint.pt")
    assert after["global_step"] == before["global_step"] and same(after["q_network"], before["q_network"])


def test_an_exception_in_the_environment(script, run, stopped, capsys):
    """It is shown as it is, for whoever wrote the environment; what was learnt is kept."""
    run_dir = stopped(101)
    err = capsys.readouterr().err
    assert "stopped by Stop: by the test" in err and f"--resume {run_dir}" in err
    assert load(run_dir / "checkpoint.pt")["global_step"] == steps_of(run_dir)[-1]
    assert run("--resume", str(run_dir))["global_step"] == 320


@pytest.mark.parametrize("code", [None, 2, "enough"])
def test_sys_exit_in_the_environment(script, run, monkeypatch, capsys, tmp_path, code):
    step, calls = CueGame.step, [0]

    def exiting(self, action):
        calls[0] += 1
        if calls[0] == 100:
            sys.exit(code)
        return step(self, action)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(CueGame, "step", exiting)
        run()
    assert stop.value.code == code and "stopped by SystemExit" in capsys.readouterr().err
    (run_dir,) = tmp_path.iterdir()
    assert load(run_dir / "checkpoint.pt")["global_step"] == steps_of(run_dir)[-1]


def test_a_second_signal_does_not_spoil_the_rescue(script, run, monkeypatch, tmp_path):
    """An impatient user, or a launcher that sends SIGTERM to what Ctrl-C has already reached."""
    fsync, step, calls = os.fsync, CueGame.step, [0]

    def first(self, action):
        calls[0] += 1
        if calls[0] == 100:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, action)

    def second(descriptor):
        if calls[0] >= 100:
            os.kill(os.getpid(), signal.SIGTERM)
        fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(CueGame, "step", first)
        patch.setattr(os, "fsync", second)
        run("--checkpoint-interval", "0")
    assert stop.value.code == 130
    (run_dir,) = tmp_path.iterdir()
    assert load(run_dir / "checkpoint.pt")["global_step"] == steps_of(run_dir)[-1]


def test_a_broken_event_file_does_not_cost_the_checkpoint(script, run, stopped, monkeypatch):
    def broken(self):
        raise OSError(errno.ENOSPC, "full for a moment")

    monkeypatch.setattr(script.SummaryWriter, "flush", broken)
    run_dir = stopped(100, "--checkpoint-interval", "0")
    assert load(run_dir / "checkpoint.pt")["global_step"] == steps_of(run_dir)[-1]


def test_where_nothing_could_be_saved_no_checkpoint_is_promised(script, run, stopped, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(script, "save_file", full)
    run_dir = stopped(100, "--checkpoint-interval", "0")
    err = capsys.readouterr().err
    assert "could not be saved" in err and "nothing to go on with" in err and "--resume" not in err
    assert not list(run_dir.glob("*.pt"))


def test_a_reader_that_goes_away(script):
    """Ctrl-C in `... 2>&1 | tee log` ends tee too: the script's own code and checkpoint are not lost for that."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        script.say("no one hears this")
        patch.undo()
        with pytest.raises(BrokenPipeError):
            closed.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


def test_a_failing_writer_leaves_none_open(script, run, monkeypatch, capsys):
    """The event file cannot be closed: the CSV and the environments are all the same, and the state is saved."""
    closed = []
    monkeypatch.setattr(
        script.SummaryWriter, "close", lambda self: closed.append(self) or (_ for _ in ()).throw(OSError(28, "full"))
    )
    logs = []
    start = script.RunLog.__init__
    monkeypatch.setattr(script.RunLog, "__init__", lambda self, *args: logs.append(self) or start(self, *args))
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 1 and closed and logs[0].csv_file.closed and envpool.make.envs[0].closed
    assert "full" in capsys.readouterr().err.splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# What --resume refuses
# ----------------------------------------------------------------------------------------------------------------------


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": bytes(content[: len(content) // 2]), "empty": b"", "text": b"hello"}.get(how, content))


@pytest.mark.parametrize("how", ["a bit", "cut", "empty", "text"])
def test_a_damaged_checkpoint(script, run, stopped, capsys, how):
    """Of a run directory the one before it is taken, with a line; where both are, or a file is named: refused."""
    run_dir = stopped(130, "--checkpoint-interval", "64")
    previous = load(run_dir / "checkpoint_previous.pt")["global_step"]
    damage(run_dir / "checkpoint.pt", how)
    assert "damaged" in refusal(script, capsys, "--resume", str(run_dir / "checkpoint.pt"))
    shutil.copytree(run_dir, run_dir.parent / "copy")
    assert run("--resume", str(run_dir))["global_step"] == 320
    err = capsys.readouterr().err
    assert "checkpoint.pt: damaged" in err and f"resumed at step {previous:,}" in err
    damage(run_dir.parent / "copy" / "checkpoint_previous.pt", how)
    assert "checkpoint_previous.pt" in refusal(script, capsys, "--resume", str(run_dir.parent / "copy"))


@both_scripts
def test_foreign_files(script, run, capsys, tmp_path):
    run_dir = Path(run()["run_dir"])
    other = {"pqn_abs_atari": "pqn_fixed_atari", "pqn_fixed_atari": "pqn_abs_atari"}[script.__name__]
    saved = load(run_dir / "checkpoint.pt")
    for content, words in (
        (saved["q_network"], "no file of these scripts"),
        (torch.zeros(3), "no file of these scripts"),
        (saved | {"script": other}, f"go on with python {other}.py"),
        (saved | {"args": saved["args"] | {"more": 1}}, "another version"),
    ):
        torch.save(content, tmp_path / "foreign.pt")
        assert words in refusal(script, capsys, "--resume", str(tmp_path / "foreign.pt"))
    assert "holds the network alone" in refusal(script, capsys, "--resume", str(run_dir / "model.pt"))


def test_a_checkpoint_in_a_directory_that_is_no_run(script, run, capsys, tmp_path):
    """Nothing there is touched: a metrics.csv of someone else's, or none."""
    run_dir = Path(run()["run_dir"])
    backup = tmp_path / "backup"
    backup.mkdir()
    shutil.copy(run_dir / "checkpoint.pt", backup / "pong.pt")
    assert "is no run directory" in refusal(script, capsys, "--resume", str(backup / "pong.pt"))
    (backup / "metrics.csv").write_text("epoch,loss\nrun A,1\n")
    assert "is no run directory" in refusal(script, capsys, "--resume", str(backup / "pong.pt"))
    assert (backup / "metrics.csv").read_text() == "epoch,loss\nrun A,1\n"
    assert sorted(path.name for path in backup.iterdir()) == ["metrics.csv", "pong.pt"]
    (backup / "metrics.csv").unlink()
    (backup / "metrics.csv").mkdir()
    assert "is no run directory" in refusal(script, capsys, "--resume", str(backup / "pong.pt"))


def test_another_network_than_the_saved_one(script, run, capsys):
    """The script was changed in between: a line, not torch's page of keys."""
    run_dir = Path(run()["run_dir"])
    saved = load(run_dir / "model.pt")
    saved["q_network"].pop("q_values.weight")
    torch.save(saved, run_dir / "other.pt")
    err = refusal(script, capsys, "--evaluate", str(run_dir / "other.pt"), "--runs-dir", str(run_dir.parent))
    assert "not the one that was saved" in err


def test_names_that_are_none(script, capsys):
    """An empty shell variable must not begin a run of 20 million steps."""
    for flags in (["--resume", ""], ["--resume="], ["--evaluate", ""], ["--evaluate="]):
        assert f"{flags[0].rstrip('=')}: the name that follows is empty" in refusal(script, capsys, *flags)
    assert "--resume" in refusal(script, capsys, "--resume", "x" * 300)


def test_places_without_a_checkpoint(script, run, capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no checkpoint in it" in refusal(script, capsys, "--resume", str(empty))
    assert "does not exist" in refusal(script, capsys, "--resume", str(tmp_path / "nothing"))
    run_dir = run()["run_dir"]
    others = tmp_path / "Pong-v5__another_script__1__20260101-000000-abcdef"  # newer, and not for this script
    others.mkdir()
    (others / "checkpoint.pt").touch()
    assert f"the newest run there that can be: {run_dir}" in refusal(script, capsys, "--resume", run_dir + "x")
    assert f"the newest run there that can be: {run_dir}" in refusal(script, capsys, "--resume", str(tmp_path))


def test_a_run_directory_in_use(script, run, capsys, monkeypatch):
    """By a process that holds its lock; the refusal comes before the environments are built and changes nothing."""
    run_dir = Path(run()["run_dir"])
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    monkeypatch.setattr(envpool, "make", None)
    with (run_dir / "metrics.csv").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        err = refusal(script, capsys, "--resume", str(run_dir), "--total-timesteps", "1280")
    assert "another process" in err and str(run_dir) in err
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


def test_a_running_run_holds_its_directory(script, run, monkeypatch):
    step = CueGame.step
    held = []

    def look(self, action):
        if not held:
            (path,) = Path(envpool.make.runs).glob("*/metrics.csv")
            with path.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(path)
        return step(self, action)

    monkeypatch.setattr(CueGame, "step", look)
    original = script.make_envs

    def make_envs(args, seeds):
        envpool.make.runs = args.runs_dir
        return original(args, seeds)

    monkeypatch.setattr(script, "make_envs", make_envs)
    run()
    assert held


@both_scripts
def test_flags_that_may_not_change(script, run, capsys):
    """Every flag but those that are free, each by itself: refused by name, with what the run has."""
    run_dir = run()["run_dir"]
    free = set(script.FREE["resume"].split())
    changed = {
        "env_id": "Breakout-v5", "network": "large", "num_steps_max": 32, "runs_dir": run_dir, "evaluate": "",
        "divergence_low": 0.1, "divergence_high": 0.9, "total_timesteps": 160, "num_minibatches": 3, "resume": "",
        "repeat_action_probability": 0.25,
    }  # fmt: skip
    for field in dataclasses.fields(script.Args):
        name, old = field.name, load(f"{run_dir}/checkpoint.pt")["args"][field.name]
        if (name in free and name != "total_timesteps") or name == "evaluate":
            continue
        if isinstance(old, bool):
            flags = [script.flag(f"no_{name}" if old else name)]
        else:
            flags = [script.flag(name), str(changed[name] if name in changed else old / 2 if old < 1 else old + 1)]
        err = refusal(script, capsys, "--resume", run_dir, *flags)
        assert flags[0] in err and (str(old) in err or name == "runs_dir"), err
        assert len(err.splitlines()) <= 2
    assert "one or the other" in refusal(script, capsys, "--resume", run_dir, "--evaluate", run_dir)


def test_flags_that_may(script, run):
    """And one that is given again, unchanged."""
    run_dir = run()["run_dir"]
    flags = "--total-timesteps 1280 --checkpoint-interval 7 --eval-epsilon 0.5 --env-threads 2 --num-envs 2".split()
    args = script.parse_args(["--resume", run_dir, *flags])
    assert (args.total_timesteps, args.checkpoint_interval, args.eval_epsilon, args.env_threads) == (1280, 7, 0.5, 2)
    assert args.num_minibatches == 2 and args.divergence_interval == 2  # the run's own, not the defaults


def test_a_moved_run_directory_can_be_resumed(script, run, stopped, tmp_path):
    run_dir = stopped(100)
    (tmp_path / "elsewhere").mkdir()
    moved = run_dir.rename(tmp_path / "elsewhere" / "a name of mine")
    assert run("--resume", str(moved))["run_dir"] == str(moved)
    assert steps_of(moved)[-1] == 320 and not run_dir.exists()


# ----------------------------------------------------------------------------------------------------------------------
# --evaluate
# ----------------------------------------------------------------------------------------------------------------------


def test_evaluating_a_saved_model_gives_what_training_gave(script, run, monkeypatch, tmp_path):
    """From the run directory, its checkpoint or model.pt: the same games, in a directory of their own."""
    result = run("--eval-episodes", "4", "--seed", "5", "--no-episodic-life")
    run_dir = Path(result["run_dir"])
    trained = json.loads((run_dir / "eval.json").read_text())
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    for number, place in enumerate((run_dir, run_dir / "checkpoint.pt", run_dir / "model.pt")):
        make = fake_make(CueGame)
        monkeypatch.setattr(envpool, "make", make)
        runs_dir = tmp_path / f"evaluations{number}"
        report = script.main(["--evaluate", str(place), "--eval-episodes", "4", "--runs-dir", str(runs_dir)])
        assert report == trained
        assert make.calls[0]["episodic_life"] is False and make.calls[0]["num_envs"] == 4
        (directory,) = runs_dir.iterdir()
        assert [path.name for path in directory.iterdir()] == ["eval.json"]
        assert json.loads((directory / "eval.json").read_text()) == trained
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


@pytest.mark.parametrize("script", ["pqn_fixed_atari"], indirect=True)
def test_either_script_evaluates_the_others_model(script, abs_script, run, tmp_path):
    result = run("--eval-episodes", "2")
    report = abs_script.main(["--evaluate", result["run_dir"], "--eval-episodes", "2", "--runs-dir", str(tmp_path)])
    assert report["mean"] == result["eval_return"]


def test_what_evaluate_refuses(script, run, capsys):
    run_dir = run()["run_dir"]
    for flags, words in (
        ("--env-id Breakout-v5", ["--env-id Breakout-v5", "Pong-v5", "that stays"]),
        ("--network large", ["--network large", "base"]),
        ("--full-action-space", ["--full-action-space"]),
        ("--learning-rate 0.1", ["--learning-rate 0.1", "no effect"]),
        ("--eval-episodes 0", ["--eval-episodes 0"]),
        ("--eval-episodes 15", ["multiples of 10"]),
    ):
        err = refusal(script, capsys, "--evaluate", run_dir, *flags.split())
        assert all(word in err for word in words), err
    assert "does not exist" in refusal(script, capsys, "--evaluate", run_dir + "/nothing")
