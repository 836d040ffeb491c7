"""benchmark/study.py: a study that is interrupted, in any way, ends as one that was not.

The runs are real ones of both scripts, in processes of their own, on a game whose every new start is alike: each game
is one step, and rollouts end with its reset row, so that a resumed run finds the emulators where it had left them.
"""

import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
import study as launcher  # noqa: E402

# A training script on that game, with something in envpool's place, which takes a second to import. Imported by these
# tests it changes nothing. $CONTROL holds orders, for one run each: a file <script>-<seed> with the environments that
# obey (0 for training's, 1 for the evaluation's), the step, and what to do there.
WRAPPER = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [{root!r}, {tests!r}]
if "pytest" not in sys.modules:
    games = {{"Pong-v5": ("envpool.atari",)}}
    sys.modules["envpool"] = SimpleNamespace(registration=SimpleNamespace(registry=SimpleNamespace(specs=games)))
if __name__ == "__main__":
    import envpool
    import numpy as np
    from fake_envpool import HONOURED_OPTIONS, FakeEnvPool, screen_of_blocks

    made = []
    seed = sys.argv[sys.argv.index("--seed") + 1] if "--seed" in sys.argv else "resumed"
    order = Path(os.environ["CONTROL"], Path(__file__).stem + "-" + seed)

    class OneStep(FakeEnvPool):
        num_actions, full_lives, calls = 4, 1, 0

        def _new_game(self, who):
            pass

        def _play(self, who, action):
            return (action == who % 4).astype(np.float32), np.ones(len(who), bool)

        def _draw(self):
            bars = np.full((self.num_envs, 1, 4), 40, np.uint8)
            bars[np.arange(self.num_envs), 0, np.arange(self.num_envs) % 4] = 255
            return screen_of_blocks(bars)

        def step(self, action):
            self.calls += 1
            if order.exists() and order.read_text().split()[:2] == [str(made.index(self)), str(self.calls)]:
                what = order.read_text().split()[2]
                order.write_text(str(os.getpid()))
                order.rename(order.with_suffix(".obeyed"))
                if what == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "raise":
                    raise RuntimeError("by the test")
                time.sleep(600)
            return super().step(action)

    def make(task, env_type, **options):
        made.append(OneStep(**{{name: options[name] for name in HONOURED_OPTIONS if name in options}}))
        return made[-1]

    envpool.make = make

import {script}
from {script} import FREE, Args, parse_flags

if __name__ == "__main__":
    {script}.main()
"""
FLAGS = (
    "--num-envs 2 --num-minibatches 2 --divergence-interval 2 --checkpoint-interval 64 --total-timesteps 192 "
    "--eval-episodes 2 --torch-threads 1 --env-threads 1"
)


class Sandbox:
    """A study of three cells, in this order: seed 1 of both scripts and seed 2 of the fixed one."""

    def __init__(self, place: Path, scripts: Path):
        self.scripts, self.file = scripts, place / "small.toml"
        self.control, self.runs = place / "control", place / "runs"
        self.control.mkdir()
        self.write()

    def write(self, flags=FLAGS, fixed="--num-steps 16"):
        self.file.write_text(f"""
            name = "small"
            directory = "{self.runs}"
            flags = "{flags}"
            games = ["Pong-v5"]
            seeds = [1, 2]
            [[arms]]
            name = "fixed"
            script = "{self.scripts}/one_step_fixed.py"
            flags = "{fixed}"
            [[arms]]
            name = "adaptive"
            script = "{self.scripts}/one_step_adaptive.py"
            flags = "--num-steps-min 16 --num-steps-max 16"
            seeds = [1]
        """)

    def cells(self):
        return launcher.load(self.file)

    def words(self):
        return [launcher.look(cell).word for cell in self.cells()]

    def work(self, jobs=1):
        return launcher.work(self.cells(), jobs)

    def run_dir(self, cell):
        (run_dir,) = [path for path in (self.runs / cell).iterdir() if path.is_dir()]
        return run_dir

    def results(self):
        """scores.csv and curves.csv, without what measures time."""
        launcher.gather(self.file)
        tables = []
        for name in ("scores", "curves"):
            with (self.runs / f"{name}.csv").open(newline="") as file:
                tables.append([row | {"wall_clock": None} for row in csv.DictReader(file)])
        return tables

    def launch(self, *arguments):
        """The command line, in a process and a session of its own, from another directory."""
        command = [sys.executable, str(ROOT / "benchmark" / "study.py"), *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CONTROL": str(self.control)}
        streams = {"stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.control, env=environment, start_new_session=True, **streams)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    place = tmp_path_factory.mktemp("scripts")
    for short, script in (("fixed", "pqn_fixed_atari"), ("adaptive", "pqn_abs_atari")):
        text = WRAPPER.format(root=str(ROOT), tests=str(ROOT / "tests"), script=script)
        (place / f"one_step_{short}.py").write_text(text)
    return place


@pytest.fixture
def sandbox(tmp_path, scripts, monkeypatch):
    sandbox = Sandbox(tmp_path, scripts)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CONTROL", str(sandbox.control))
    return sandbox


@pytest.fixture(scope="module")
def whole_study(tmp_path_factory, scripts):
    """A study that was never interrupted, what it printed, and its results."""
    sandbox, told = Sandbox(tmp_path_factory.mktemp("whole"), scripts), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CONTROL", str(sandbox.control))
        assert launcher.run(sandbox.file) == 0, told.getvalue()
    return sandbox, told.getvalue(), sandbox.results()


@pytest.fixture
def finished(sandbox):
    """The least that makes three finished cells, written by hand."""
    for cell, script in zip(sandbox.cells(), ["pqn_fixed_atari", "pqn_abs_atari", "pqn_fixed_atari"]):
        run_dir = cell.log.parent / "run"
        run_dir.mkdir(parents=True)
        cell.log.touch()
        (run_dir / "metrics.csv").write_text("global_step,\n192,\n")
        for name in ("checkpoint.pt", "model.pt"):
            torch.save({"script": script, "args": dataclasses.asdict(cell.args), "global_step": 192}, run_dir / name)
        protocol = {"training_steps": 192, "epsilon": 0.0}
        (run_dir / "eval.json").write_text(json.dumps({"num_games": 2, "protocol": protocol}))
    return sandbox


@pytest.fixture
def whole(whole_study, sandbox):
    """A copy of it to change."""
    shutil.copytree(whole_study[0].runs, sandbox.runs)
    return sandbox


def mtimes(place):
    return {path: path.stat().st_mtime_ns for path in place.rglob("*")}


# ----------------------------------------------------------------------------------------------------------------------
# Interrupted or not
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_is_worked_through_and_told_line_by_line(whole_study):
    sandbox, told, (scores, curves) = whole_study
    assert sandbox.words() == ["finished"] * 3
    lines = told.splitlines()
    assert lines[0] == "0/3 cells are finished"
    assert [line.partition(" at ")[0] for line in lines if " started " in line] == [
        "0/3 started fixed/Pong-v5/1", "1/3 started adaptive/Pong-v5/1", "2/3 started fixed/Pong-v5/2"
    ]  # fmt: skip
    assert [line.partition(" in ")[0] for line in lines if " finished " in line] == [
        "1/3 finished fixed/Pong-v5/1", "2/3 finished adaptive/Pong-v5/1", "3/3 finished fixed/Pong-v5/2"
    ]  # fmt: skip
    assert "left" in lines[2] and "left" not in lines[-1]
    args = json.loads((sandbox.run_dir("fixed/Pong-v5/2") / "args.json").read_text())
    assert (args["env_id"], args["seed"], args["num_steps"], args["total_timesteps"]) == ("Pong-v5", 2, 16, 192)
    assert [(row["arm"], row["seed"], row["steps"]) for row in scores] == [
        ("fixed", "1", "192"), ("adaptive", "1", "192"), ("fixed", "2", "192")
    ]  # fmt: skip
    assert len(curves) == 3 * 200


def test_what_is_finished_is_left_alone(finished, capfd):
    before = mtimes(finished.runs)
    assert finished.work() == 0
    assert [launcher.one_cell(finished.file, index) for index in range(3)] == [0] * 3
    assert launcher.status(finished.file) == 0
    assert mtimes(finished.runs) == before
    assert "3 finished" in capfd.readouterr().out


@pytest.mark.slow
def test_a_study_stopped_by_a_signal_goes_on(whole_study, whole):
    """SIGTERM to the launcher's process group, as a terminal would: the runs have it from the launcher alone."""
    for arm in ("fixed", "adaptive"):
        shutil.rmtree(whole.run_dir(f"{arm}/Pong-v5/1"))
        (whole.control / f"one_step_{arm}-1").write_text("0 90 wait")  # 160 steps, the last checkpoint at 128
    with whole.launch("run", whole.file, "--jobs", "2") as process:
        while len(list(whole.control.glob("*.obeyed"))) < 2:
            time.sleep(0.05)
            assert process.poll() is None
        assert whole.words() == ["running", "running", "finished"]
        runs = [int(path.read_text()) for path in whole.control.glob("*.obeyed")]
        assert [os.getsid(run) for run in runs] == runs  # sessions of their own
        os.killpg(process.pid, signal.SIGTERM)
        told = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 143
    for run in runs:
        with pytest.raises(ProcessLookupError):
            os.kill(run, 0)
    assert told[-1] == f"stopped by SIGTERM; to go on: python {shlex.join(process.args[1:])}"
    assert {"fixed/Pong-v5/1 is interrupted, step 160", "adaptive/Pong-v5/1 is interrupted, step 160"} <= set(told)
    assert whole.words() == ["interrupted", "interrupted", "finished"]
    assert whole.work(jobs=2) == 0
    assert whole.results() == whole_study[2]


@pytest.mark.slow
def test_runs_that_are_killed_or_fail_are_reported_and_resumed_or_started_anew(whole_study, sandbox, capfd):
    """One dies between two checkpoints, one before its first, the third finishes; the same command mends it all."""
    (sandbox.control / "one_step_fixed-1").write_text("0 60 die")  # checkpoint of step 64, metrics up to 96
    (sandbox.control / "one_step_fixed-2").write_text("0 3 raise")
    assert sandbox.work() == 1
    told = capfd.readouterr().out.splitlines()
    assert told[-3] == "2 of 3 cells failed:"
    assert told[-2].startswith("fixed/Pong-v5/1 FAILED: SIGKILL, interrupted at step 64: ")
    assert told[-1].startswith(
        "fixed/Pong-v5/2 FAILED: exit code 1, not started at step 0: RuntimeError: by the test ("
    )
    assert sandbox.words() == ["interrupted", "finished", "not started"]
    died = [sandbox.run_dir(f"fixed/Pong-v5/{seed}") for seed in (1, 2)]
    assert sandbox.work() == 0
    assert sandbox.run_dir("fixed/Pong-v5/1") == died[0]
    assert sandbox.run_dir("fixed/Pong-v5/2") != died[1]  # nothing of it was worth keeping
    assert sandbox.results() == whole_study[2]


@pytest.mark.slow
def test_printed_commands_do_the_same(whole_study, whole, capfd):
    """One cell begins, one has ended but for its evaluation, one is finished."""
    shutil.rmtree(whole.run_dir("fixed/Pong-v5/1"))
    (whole.run_dir("adaptive/Pong-v5/1") / "eval.json").unlink()
    assert whole.words() == ["not started", "interrupted", "finished"]
    launcher.print_commands(whole.file)
    commands = capfd.readouterr().out.splitlines()
    assert [shlex.split(command)[-3:] for command in commands] == [["cell", str(whole.file), i] for i in "012"]
    for command, words in zip(commands, (["finished", "interrupted", "finished"], ["finished"] * 3)):
        subprocess.run(command, shell=True, cwd="/", check=True)
        assert whole.words() == words
    assert whole.results() == whole_study[2]
    reports = [(study.run_dir("adaptive/Pong-v5/1") / "eval.json").read_text() for study in (whole, whole_study[0])]
    assert reports[0] == reports[1]


def test_a_run_is_finished_when_its_evaluation_is(finished):
    """The final checkpoint and model.pt are there, and eval.json is of an earlier end of the run, or missing."""
    path = finished.run_dir("fixed/Pong-v5/1") / "eval.json"
    path.write_text(path.read_text().replace('"training_steps": 192', '"training_steps": 160'))
    assert finished.words() == ["interrupted", "finished", "finished"]
    path.unlink()
    assert finished.words() == ["interrupted", "finished", "finished"]
    finished.write(flags=FLAGS.replace("--eval-episodes 2", "--eval-episodes 0"))
    assert finished.words() == ["finished"] * 3
    (path.parent / "model.pt").unlink()
    assert finished.words() == ["interrupted", "finished", "finished"]


# ----------------------------------------------------------------------------------------------------------------------
# Changed studies, other processes, mistakes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"fixed": "--num-steps 8"}, "--num-steps 16, and the study has --num-steps 8"),
        (
            {"flags": FLAGS + " --learning-rate 1e-3"},
            "--learning-rate 0.00025, and the study has --learning-rate 0.001",
        ),
        ({"flags": FLAGS.replace("--num-envs 2", "")}, "--num-envs 2, and the study has --num-envs 128"),
        ({"flags": FLAGS + " --no-reward-clip"}, "--reward-clip, and the study has --no-reward-clip"),
        ({"flags": FLAGS.replace("192", "128")}, "--total-timesteps 192, and the study has --total-timesteps 128"),
    ],
)
def test_changed_flags_are_refused(finished, change, differs, capfd):
    finished.write(**change)
    assert finished.words() == ["refused", "finished" if "fixed" in change else "refused", "refused"]
    before = mtimes(finished.runs)
    assert finished.work() == 1
    told = capfd.readouterr().out
    assert f"fixed/Pong-v5/1 is refused: begun with {differs}; undo that" in told
    assert f"{2 if 'fixed' in change else 3} of 3 cells failed" in told
    # Opened, and nothing more: a log's time is that of its last line.
    assert mtimes(finished.runs) == before


def test_another_script_is_refused(finished):
    text = finished.file.read_text().replace("one_step_adaptive", "one_step_fixed")
    finished.file.write_text(text.replace("--num-steps-min 16 --num-steps-max 16", ""))
    _, state, _ = [launcher.look(cell) for cell in finished.cells()]
    assert state.word == "refused" and state.detail.startswith("begun with pqn_abs_atari.py, and the study has ")


def test_flags_of_evaluation_and_threads_may_change(finished):
    finished.write(flags=FLAGS + " --eval-epsilon 0.5 --torch-threads 2 --no-cuda")
    assert finished.words() == ["interrupted"] * 3  # to be evaluated again
    changes = "--no-cuda --torch-threads 2 --eval-epsilon 0.5"
    assert launcher.look(finished.cells()[0]).detail == changes
    finished.write(flags=FLAGS + " --torch-threads 2 --no-cuda")
    assert finished.words() == ["finished"] * 3


@pytest.mark.slow
def test_a_finished_study_may_be_given_more_steps(whole):
    whole.write(flags=FLAGS.replace("192", "320"))
    assert whole.words() == ["interrupted"] * 3
    assert launcher.one_cell(whole.file, 1) == 0
    state = launcher.look(whole.cells()[1])
    assert (state.word, state.step) == ("finished", 320)
    assert json.loads((state.run_dir / "eval.json").read_text())["protocol"]["training_steps"] == 320


@pytest.mark.parametrize("name", ["log.txt", "metrics.csv"])
def test_a_cell_that_another_process_is_at_work_in_is_passed_over(finished, name, capfd):
    run_dir = finished.run_dir("fixed/Pong-v5/1")
    (run_dir / "model.pt").unlink()
    with ((run_dir if name == "metrics.csv" else run_dir.parent) / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert finished.words() == ["running", "finished", "finished"]
        assert launcher.status(finished.file) == 0
        assert "fixed/Pong-v5/1                       running              192 of 192 steps" in capfd.readouterr().out
        assert finished.work() == 0
        assert "2/3 fixed/Pong-v5/1 is running, by another process" in capfd.readouterr().out
    assert finished.words() == ["interrupted", "finished", "finished"]


def test_nothing_with_a_checkpoint_is_ever_deleted(sandbox, monkeypatch):
    """Before a start anew, what died before its first checkpoint goes; whatever else is there stays."""
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda command, **_: command)
    place = sandbox.runs / "fixed" / "Pong-v5" / "1"
    for name, files in {
        "dead": "metrics.csv args.json checkpoint.pt.tmp",
        "evaluation": "eval.json",
        "mine": "",
    }.items():
        (place / name).mkdir(parents=True)
        for file in files.split():
            (place / name / file).touch()
    cell = sandbox.cells()[0]
    command = launcher.start(cell)
    assert command[2:] == [*f"{FLAGS} --num-steps 16 --env-id Pong-v5 --seed 1 --runs-dir".split(), str(place)]
    assert sorted(path.name for path in place.iterdir()) == ["evaluation", "log.txt", "mine"]
    for name in ("checkpoint_previous.pt", "model.pt"):
        (place / "kept").mkdir()
        (place / "kept" / "metrics.csv").touch()
        (place / "kept" / name).write_bytes(b"damaged")
        assert launcher.start(cell).word == "refused"
        assert (place / "kept" / name).exists()
        shutil.rmtree(place / "kept")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("seeds = [1, 2]", "", "seeds is missing"),
        ("seeds = [1, 2]", "seeds = 1", "seeds = 1: compare"),
        ("seeds = [1, 2]", "seeds = [1, '2']", "seeds = [1, '2']: compare"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "fixed/Pong-v5/1: is there twice"),
        ("seeds = [1, 2]", "seeds = [1, 2]\nflag = ''", "flag is unknown"),
        ("Pong-v5", "../Pong-v5", "is there twice, or has signs"),
        ("--num-steps 16", "--num-stepz 16", "num-stepz"),
        ("--num-steps 16", "--seed 3", "fixed: --seed is not for a study to give"),
        ("one_step_fixed.py", "nowhere.py", "nowhere.py: there is no such file"),
        ("[[arms]]", "[[arms]", "cannot be read"),
    ],
)
def test_mistakes_in_a_study_are_named_before_anything_starts(sandbox, before, after, message, capfd):
    sandbox.file.write_text(sandbox.file.read_text().replace(before, after))
    with pytest.raises(SystemExit) as stop:
        launcher.run(sandbox.file)
    assert stop.value.code == 2
    error = capfd.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not sandbox.runs.exists()


def test_the_example_is_a_study():
    cells = launcher.load(ROOT / "benchmark" / "studies" / "laptop.toml")
    assert len({str(cell) for cell in cells}) == len(cells) == 38
    assert {cell.seed for cell in cells[:14]} == {1}  # all arms and games once, before any for the second time
    assert {cell.arm: cell.args.rollout_lengths() for cell in cells} == {
        "adaptive": (16, 64), "fixed16": (16, 16), "fixed32": (32, 32), "fixed64": (64, 64),
        "large_fixed32": (32, 32), "large_adaptive": (16, 128),
    }  # fmt: skip
    assert {(cell.game, cell.args.total_timesteps) for cell in cells} == {
        ("KungFuMaster-v5", 200_000), ("RoadRunner-v5", 200_000), ("Pong-v5", 300_000)
    }  # fmt: skip


def test_the_change_runs_under_the_same_protocol():
    """near_free.toml is the adaptive arms of laptop.toml, with another script."""
    laptop, change = (
        tomllib.loads((ROOT / "benchmark" / "studies" / name).read_text()) for name in ("laptop.toml", "near_free.toml")
    )
    same = {"name": "near_free", "script": "runs/near_free.py"}
    assert change["arms"] == [arm | same for arm in laptop["arms"] if arm["name"] == "adaptive"]
    assert all(change[key] == laptop[key] for key in ("games", "seeds")) and "directory" not in change
    assert change["flags"].split() == laptop["flags"].split()


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


def rows_of(*lines):
    """Lines of metrics.csv as csv reads them: step, games so far, mean score, divergence, rollout length."""
    names = "global_step charts/games charts/episodic_return abs/divergence_mean abs/rollout_length".split()
    return [dict(zip(names, map(str, line))) for line in lines]


def test_training_score_is_the_mean_of_the_last_hundred_games():
    assert launcher.training_score(rows_of((10, 0, ""))) is None
    assert launcher.training_score(rows_of((10, 1, 4.0), (20, 1, ""), (30, 4, 8.0))) == (4 + 3 * 8) / 4
    # 60 games of 1, 50 of 3, 30 of 6: the last hundred are 20 of the first, and all of the others.
    lines = (10, 60, 1.0), (20, 60, ""), (30, 110, 3.0), (40, 140, 6.0), (50, 140, "")
    assert launcher.training_score(rows_of(*lines)) == pytest.approx((20 * 1 + 50 * 3 + 30 * 6) / 100)


def test_a_curve_bins_games_by_the_step_of_their_iteration():
    lines = (20, 1, 5.0, "", 16), (25, 4, 1.0, 0.5, 16), (26, 4, "", 0.4, 17), (90, 5, 7.0, 0.3, 20)
    points = list(launcher.curve(rows_of(*lines), total=100, bins=4))
    assert [tuple(point.values()) for point in points] == [
        (25, (5 + 3 * 1) / 4, 4, "0.5", "16"), (50, None, 0, "0.4", "17"), (75, None, 0, "0.4", "17"),
        (100, 7.0, 1, "0.3", "20"),
    ]  # fmt: skip
    assert list(points[0]) == ["global_step", "return", "games", "divergence_mean", "rollout_length"]


def test_gather_writes_what_is_in_the_files(finished, capfd):
    """Against handmade files: one cell has no games and no interval of its evaluation, one is not finished."""
    cells = finished.cells()
    head = "global_step,charts/games,charts/episodic_return,charts/gradient_steps,abs/divergence_mean," + (
        "abs/rollout_length,charts/wall_clock\n"
    )
    made = {
        0: (head + "32,0,,4,,16,1.5\n180,3,2.0,8,0.25,16,2.5\n192,4,6.0,12,0.25,17,3.5\n", [1.0, 9.0], 0.75),
        2: (head + "32,0,,4,,16,1.5\n", None, None),
    }
    for index, (metrics, interval, normalized) in made.items():
        run_dir = cells[index].log.parent / "run"
        (run_dir / "metrics.csv").write_text(metrics)
        report = {
            "mean": 5.0,
            "interval_95": interval,
            "human_normalized": normalized,
            "distinct_games": 2 - index // 2,
        }
        (run_dir / "eval.json").write_text(json.dumps(json.loads((run_dir / "eval.json").read_text()) | report))
    (cells[1].log.parent / "run" / "model.pt").unlink()
    finished.file.write_text(f'results = "{finished.control}/results"\n' + finished.file.read_text())
    assert launcher.gather(finished.file) == 0
    assert "left out: adaptive/Pong-v5/1 is interrupted" in capfd.readouterr().out
    scores, curves = [
        list(csv.reader((finished.control / "results" / f"{name}.csv").open())) for name in ("scores", "curves")
    ]
    assert scores == [
        "arm script game seed steps training_score eval_mean eval_low eval_high human_normalized distinct_games "
        "rollout_length gradient_steps wall_clock flags".split(),
        ["fixed", cells[0].script, "Pong-v5", "1", "192", "3.0", "5.0", "1.0", "9.0", "0.75", "2", "17", "12", "3.5",
         f"{FLAGS} --num-steps 16"],
        ["fixed", cells[0].script, "Pong-v5", "2", "192", "", "5.0", "", "", "", "1", "16", "4", "1.5",
         f"{FLAGS} --num-steps 16"],
    ]  # fmt: skip
    assert curves[0] == "arm game seed global_step return games divergence_mean rollout_length".split()
    assert len(curves) == 1 + 2 * 200
    # Bins of 0.96 steps: the iterations end in the 34th, 188th and 200th.
    assert [row[:3] for row in (curves[1], curves[201])] == [["fixed", "Pong-v5", "1"], ["fixed", "Pong-v5", "2"]]
    assert {number: curves[number][3:] for number in (1, 33, 34, 187, 188, 189, 200)} == {
        1: ["1", "", "0", "", ""], 33: ["32", "", "0", "", ""], 34: ["33", "", "0", "", "16"],
        187: ["180", "", "0", "", "16"], 188: ["180", "2.0", "3", "0.25", "16"], 189: ["181", "", "0", "0.25", "16"],
        200: ["192", "6.0", "1", "0.25", "17"],
    }  # fmt: skip


def test_what_has_been_gathered_is_finished_wherever_it_ran(finished, capfd):
    """Two machines that share only the results: the first has two of the cells, the second the third."""
    results = finished.control / "results"
    finished.file.write_text(f'results = "{results}"\n' + finished.file.read_text())
    (finished.cells()[2].log.parent / "run").rename(finished.control / "third")
    head = "global_step,charts/games,charts/episodic_return,charts/wall_clock\n"
    (finished.control / "third" / "metrics.csv").write_text(head + "192,0,,3.5\n")
    for cell in finished.cells()[:2]:
        (cell.log.parent / "run" / "metrics.csv").write_text(head + "192,0,,2.5\n")
    assert launcher.gather(finished.file) == 0
    shutil.rmtree(finished.runs)
    assert finished.words() == ["finished", "finished", "not started"]
    assert [launcher.reached(cell) for cell in finished.cells()] == [192, 192, 0]

    place = finished.cells()[2].log.parent
    place.mkdir(parents=True)
    (finished.control / "third").rename(place / "run")
    assert launcher.gather(finished.file) == 0
    both = {name: (results / name).read_bytes() for name in ("scores.csv", "curves.csv")}
    with (results / "scores.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["arm"], line["seed"], line["wall_clock"]) for line in lines] == [
        ("fixed", "1", "2.5"), ("adaptive", "1", "2.5"), ("fixed", "2", "3.5")
    ]  # fmt: skip
    assert [line["flags"] for line in lines][:2] == [
        f"{FLAGS} --num-steps 16", f"{FLAGS} --num-steps-min 16 --num-steps-max 16"
    ]  # fmt: skip
    shutil.rmtree(finished.runs)
    assert finished.work() == 0 and not finished.runs.exists()
    assert launcher.gather(finished.file) == 0
    assert {name: (results / name).read_bytes() for name in both} == both

    # With other flags these are the results of something else: they neither count nor get lost.
    finished.file.write_text(finished.file.read_text().replace('"--num-steps 16"', '"--num-steps 17"'))
    assert finished.words() == ["refused", "finished", "refused"]
    capfd.readouterr()
    with pytest.raises(SystemExit):
        launcher.gather(finished.file)
    assert "would overwrite, of fixed/Pong-v5/1, fixed/Pong-v5/2" in capfd.readouterr().err
    finished.file.write_text(finished.file.read_text().replace("--num-steps 17", "--num-steps 16"))
    finished.file.write_text(finished.file.read_text().replace('name = "fixed"', 'name = "renamed"'))
    with pytest.raises(SystemExit):
        launcher.gather(finished.file)
    assert "would overwrite, of fixed/Pong-v5/1, fixed/Pong-v5/2" in capfd.readouterr().err
    assert {name: (results / name).read_bytes() for name in both} == both
