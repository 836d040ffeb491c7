"""torchrun: several processes learn what one would, stay equal, write one run, and end together.

Each test starts real processes, on Catch, whose environments are out of step: so ranks have different numbers of reset
rows, and a mean that counted ranks instead of rows would show.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--num-envs 4 --eval-episodes 0 --torch-threads 1 --env-threads 1 --divergence-interval 1".split()

WORKER = """
import importlib, sys
import envpool, torch
sys.path[:0] = [{root!r}, {tests!r}]
from fake_envpool import Catch, fake_make

envpool.make = fake_make(Catch)
name, out, *flags = sys.argv[1:]
script = importlib.import_module(name)
build, networks = script.QNetwork, []
script.QNetwork = lambda *args: networks.append(build(*args)) or networks[-1]
weights = set()
average = script.average_over_ranks
script.average_over_ranks = lambda valid, of: (len(of) > 1 and weights.add(float(valid.sum())), average(valid, of))[1]
result = script.main(flags)
torch.save({{"parameters": networks[0].state_dict(), "weights": sorted(weights), "result": result}},
           f"{{out}}/rank{{script.RANK}}.pt")
"""


@pytest.fixture
def start(tmp_path):
    """start(script, ranks, *flags) -> a process in a session of its own; its ranks leave their results in `out`."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    started = []

    def start(script, ranks, *flags, out=tmp_path):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        process = subprocess.Popen(
            [sys.executable, *launcher, str(worker), script, str(out), *SMALL, *flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def finish(process):
    """What it said; it must have ended well."""
    error = process.communicate(timeout=180)[1]
    assert process.returncode == 0, error
    return error


def only_run(runs_dir):
    (run_dir,) = Path(runs_dir).iterdir()
    return run_dir


def rows_of(run_dir):
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_ranks_learn_what_one_process_learns(start, tmp_path):
    """The same four environments, no exploration, one minibatch: neither random actions nor shuffling can differ."""
    flags = "--start-e 0 --end-e 0 --num-minibatches 1 --update-epochs 1 --gamma 0.9 --total-timesteps 1_900".split()
    flags += "--num-steps-min 8 --num-steps-max 24 --divergence-warmup 2 --batch-ema 0.5".split()
    outs = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        out.mkdir()
        finish(start("pqn_abs_atari", ranks, *flags, "--runs-dir", str(out / "runs"), out=out))
        outs.append(out)
    one = torch.load(outs[0] / "rank0.pt")
    two = [torch.load(outs[1] / f"rank{rank}.pt") for rank in (0, 1)]
    assert set(two[0]["weights"]) != set(two[1]["weights"])  # of valid rows, which the ranks have different numbers of
    for name, values in one["parameters"].items():
        assert torch.equal(two[0]["parameters"][name], two[1]["parameters"][name])
        torch.testing.assert_close(two[0]["parameters"][name], values, rtol=0, atol=1e-5)
    rows = [rows_of(only_run(out / "runs")) for out in outs]
    assert len(rows[0]) == len(rows[1]) >= 20
    same = ("global_step", "charts/games", "charts/episodic_return", "abs/rollout_length", "abs/batch_size",
            "abs/update_epochs", "charts/gradient_steps")  # fmt: skip
    for ours, theirs in zip(*rows):
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
        for name in ("abs/behavioral_divergence", "losses/td_loss", "losses/q_values"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), abs=1e-5)
    assert len({row["abs/rollout_length"] for row in rows[0]}) > 2


def test_ranks_stay_equal_in_ordinary_settings(start, tmp_path):
    """Exploring and shuffling differently; one log, one run directory, one evaluation, games of all ranks."""
    flags = "--total-timesteps 3_000 --num-minibatches 2 --eval-episodes 4 --gamma 0.9".split()
    said = finish(start("pqn_abs_atari", 2, *flags, "--runs-dir", str(tmp_path / "runs")))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for name, values in ranks[0]["parameters"].items():
        assert torch.equal(values, ranks[1]["parameters"][name])
    run_dir = only_run(tmp_path / "runs")
    assert said.count("run directory:") == said.count("evaluation: mean") == 1
    assert len(list(run_dir.glob("events.*"))) == 1
    report = json.loads((run_dir / "eval.json").read_text())
    assert len(report["games"]) == 4 and ranks[0]["result"]["eval_return"] == report["mean"]
    rows = rows_of(run_dir)
    steps = [int(row["global_step"]) for row in rows]
    assert steps == sorted(set(steps)) and ranks[1]["result"]["global_step"] == steps[-1]
    assert ranks[1]["result"]["episodic_return"] == ranks[0]["result"]["episodic_return"]
    assert int(rows[-1]["charts/games"]) > 3_000 / 4 / 40 * 3  # of one rank alone there would be about half


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_job(victim, start, tmp_path):
    """Within a minute, with a clear line from the other one; the checkpoint stands, and one process goes on with it."""
    runs = tmp_path / "runs"
    flags = ["--runs-dir", str(runs), "--num-minibatches", "2", "--checkpoint-interval", "500"]
    process = start("pqn_abs_atari", 2, *flags, "--total-timesteps", "100_000_000")
    deadline = time.monotonic() + 120
    while not (list(runs.glob("*/checkpoint.pt")) if runs.exists() else []):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(pid_of_rank(process.pid, victim), signal.SIGKILL)
    killed = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert process.returncode != 0 and time.monotonic() - killed < 60
    survivor = 1 - victim
    lost = f"another rank has ended, or cannot be reached, says rank {survivor}"
    stopped = "stopped by SIGTERM" if survivor == 0 else "rank 1: stopped by SIGTERM"  # torchrun was quicker
    assert lost in said or stopped in said, said
    assert f"rank      : {victim} (local_rank: {victim})" in said and "SIGKILL" in said  # torchrun's own report
    run_dir = only_run(runs)
    step = torch.load(run_dir / "checkpoint.pt", weights_only=True)["global_step"]
    rows = [int(row["global_step"]) for row in rows_of(run_dir) if row["abs/update_epochs"]]
    assert rows[-1] - step <= (500 if victim == 0 else 0) + 64 * 4
    resumed = start("pqn_abs_atari", 1, "--resume", str(run_dir), "--torch-threads", "1")
    line = ""
    while "resumed at step" not in line:
        line = resumed.stderr.readline()
        assert line
    assert f"resumed at step {step:,}" in line
    time.sleep(2)
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate(timeout=60)
    assert resumed.returncode == 143


def pid_of_rank(launcher, rank):
    """The process that torchrun has started for a rank: RANK is in its environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == launcher and f"RANK={rank}".encode() in environment:
                return int(entry.name)
    raise AssertionError("no such rank")


def test_what_cannot_be_shared_out_is_refused_once(start):
    process = start("pqn_abs_atari", 2, "--num-envs", "5")
    said = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    assert said.count("error: --num-envs 5") == 1 and "torchrun's 2 processes" in said
