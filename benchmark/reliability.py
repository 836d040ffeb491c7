"""Long checks of the training scripts, too long for the tests: kills, memory over hours, and the referee.

    python benchmark/reliability.py kills --out benchmark/results/reliability/kills.json
    python benchmark/reliability.py memory --out benchmark/results/reliability/memory.csv
    python benchmark/reliability.py referee --out benchmark/results/reliability/referee.json
    python benchmark/reliability.py openings --out benchmark/results/reliability/openings.json
    python benchmark/reliability.py unseen --out benchmark/results/reliability/unseen.json

kills    100 times: start or resume a run of Pong, SIGKILL it at a random moment or in the middle of a write, and see
         what it has left. Some 20 minutes.
memory   resident memory of one training run over two hours, from minute ten on; `steadiness` is its second half alone.
referee  whole games of several titles, played by an untrained network and at random, replayed in ale-py's own emulator.
openings the first 200 steps of every title that envpool has, eight times each, replayed in the same way.
unseen   titles in which a game may end in the no-ops after a lost life, where envpool does not show it.

Each prints what it finds, and ends with an error where something is not as it should be. Run from the repository root.
"""

import contextlib
import csv
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pqn_abs_atari
import pqn_fixed_atari


def write(out: Path | None, result: dict) -> None:
    """Adds command and versions, prints the result, and writes it where asked."""
    versions = {name: __import__(name).__version__ for name in ("torch", "envpool")}
    result = {"command": shlex.join(["python", *sys.argv]), "python": platform.python_version(), **versions, **result}
    print(json.dumps(result, indent=1))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def steps_in(run_dir: Path) -> list[int]:
    """Steps of the whole lines of metrics.csv."""
    lines = (run_dir / "metrics.csv").read_bytes().splitlines(keepends=True)[1:]
    return [int(line.split(b",")[0]) for line in lines if line.endswith(b"\n")]


def kills(count: int = 100, script: str = "pqn_abs_atari", seed: int = 0, out: Path | None = None) -> None:
    """SIGKILL a small run again and again; every other time in the middle of a write.

    Args:
        count: kills
        script: which script
        seed: of the moments
        out: JSON to write
    """
    interval = 128  # [steps]; rollouts are 64 to 128 of them, so that a good part of the time goes into writing
    moments = random.Random(seed)
    found = {"script": script, "kills": 0, "during_writes": 0, "unreadable": 0, "largest_step_back": 0,
             "checkpoint_interval": interval}  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--total-timesteps", "100000000", "--num-envs", "4", "--num-minibatches", "2", "--num-steps-max", "32",
                 "--divergence-interval", "1", "--checkpoint-interval", str(interval), "--eval-episodes", "0",
                 "--torch-threads", "1", "--env-threads", "1", "--runs-dir", directory]  # fmt: skip
        run_dir, reached, step = None, 0, 0
        while found["kills"] < count:
            for left in Path(directory).glob("*/*.tmp"):
                left.unlink()  # of the last kill: what is found at the next one shall be its own
            command = [sys.executable, f"{script}.py", *(flags if run_dir is None else ["--resume", str(run_dir)])]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
                lines = []
                for line in process.stderr:
                    lines.append(line)
                    if line.startswith("run directory:"):
                        break
                else:
                    sys.exit("a start failed:\n" + "".join(lines))
                if run_dir is None:
                    (run_dir,) = Path(directory).iterdir()
                elif f"resumed at step {step:,}" not in lines[-1]:
                    sys.exit(f"resumed elsewhere than at step {step:,}: {lines[-1]}")
                temporary = run_dir / "checkpoint.pt.tmp"
                end = time.monotonic() + moments.uniform(0.0, 8.0)
                aim_at_write = found["kills"] % 2 == 1
                # The first run must get as far as a checkpoint: before it there is nothing to resume.
                while time.monotonic() < end or not (run_dir / "checkpoint.pt").exists():
                    time.sleep(0.01)
                while aim_at_write and not temporary.exists():
                    time.sleep(0.001)
                time.sleep(moments.uniform(0.0, 0.02) if aim_at_write else 0.0)
                process.kill()
                process.wait()
            found["kills"] += 1
            found["during_writes"] += temporary.exists()
            logged = steps_in(run_dir)
            reached = logged[-1] if logged else reached
            for name in ("checkpoint.pt", "checkpoint_previous.pt"):
                if (run_dir / name).exists():
                    try:
                        with contextlib.redirect_stderr(None):
                            pqn_abs_atari.load_saved("resume", str(run_dir / name))
                    except SystemExit:
                        found["unreadable"] += 1
            step = pqn_abs_atari.load_saved("resume", str(run_dir))[1]["global_step"]
            found["largest_step_back"] = max(found["largest_step_back"], reached - step)
            print(f"{found['kills']}: step {reached:,} reached, {step:,} kept", file=sys.stderr, flush=True)
        # The whole run, from its first line to its last, must read as if nothing had happened.
        with (run_dir / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        steps = [int(row["global_step"]) for row in rows]
        sizes = [int(row["abs/batch_size"]) for row in rows]
        assert all(b - a == size for a, b, size in zip(steps, steps[1:], sizes[1:])), "metrics.csv has a gap or doubles"
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
        events.Reload()
        seen = [event.step for event in events.Scalars("losses/td_loss")]
        assert seen == steps[: len(seen)] and seen[-1] >= step, "TensorBoard has a gap or doubles"
    found["rows"] = len(steps)
    write(out, found)
    assert found["unreadable"] == 0 and found["largest_step_back"] <= interval


def resident(pid: int) -> float:
    """Resident memory of a process [MiB]."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(
    hours: float = 2.02,
    out: Path = Path("memory.csv"),
    flags: str = "--total-timesteps 100_000_000 --num-envs 16 --num-minibatches 16 --num-steps-min 32 "
    "--num-steps-max 32",
) -> None:
    """Sample the resident memory of a training run every five seconds, of constant size by default; then `steadiness`.

    Args:
        hours: how long
        out: CSV to write; a JSON of the same name goes beside it
        flags: of pqn_abs_atari.py
    """
    command = f"pqn_abs_atari.py {flags}"
    process = subprocess.Popen([sys.executable, *shlex.split(command)])
    start = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("w") as file:
            print("seconds,mib", file=file)
            while time.monotonic() - start < hours * 3600 and process.poll() is None:
                print(f"{time.monotonic() - start:.0f},{resident(process.pid):.1f}", file=file, flush=True)
                time.sleep(5)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    assert code == 143, f"the run ended by itself, with code {code}"
    steadiness(out, out.with_suffix(".json"))


def steadiness(samples: Path, out: Path | None = None, window: float = 30.0) -> None:
    """Compare the first and the last part of `memory`'s samples, the first ten minutes left out.

    Memory is a sawtooth with a period of some five minutes: protobuf, by which TensorBoard writes, now and then makes
    the C library hand back what is free. Hence lowest, mean and highest over parts much longer than that.

    Args:
        samples: CSV
        out: JSON to write
        window: length of either part [min]
    """
    with samples.open(newline="") as file:
        seconds, mib = np.array([[float(row["seconds"]), float(row["mib"])] for row in csv.DictReader(file)]).T
    parts = {
        "first": mib[(seconds >= 600) & (seconds < 600 + 60 * window)],
        "last": mib[seconds >= seconds[-1] - 60 * window],
    }
    statistics = {"lowest": np.min, "mean": np.mean, "highest": np.max}
    found = {part: {name: round(float(of(x)), 1) for name, of in statistics.items()} for part, x in parts.items()}
    growth = {name: round(100 * (found["last"][name] / found["first"][name] - 1), 2) for name in statistics}
    write(out, {
        "minutes": round(seconds[-1] / 60, 1),
        "window_minutes": window,
        "mib_in_the_first_window_after_ten_minutes": found["first"],
        "mib_in_the_last_window": found["last"],
        "growth_percent": growth,
    })  # fmt: skip
    assert growth["highest"] < 1


def referee(
    games: tuple[str, ...] = ("Pong-v5", "Breakout-v5", "MsPacman-v5", "Seaquest-v5", "KungFuMaster-v5"),
    each: int = 2,
    out: Path | None = None,
) -> None:
    """Replay whole games in ale-py's emulator: RAM and raw reward at every step.

    Args:
        games: envpool ids
        each: games of each, the first all random, the others by an untrained network with epsilon 0.1
        out: JSON to write
    """
    played, mismatches = [], 0
    for env_id in games:
        for number in range(each):
            args = pqn_fixed_atari.Args(env_id=env_id)
            torch.manual_seed(number)
            seeds = pqn_fixed_atari.environment_seeds(number, 1, "evaluation")
            with contextlib.closing(pqn_fixed_atari.make_envs(args, seeds)) as envs:
                q_network = pqn_fixed_atari.QNetwork(int(envs.action_space.n))
                recording = []
                epsilon = 1.0 if number == 0 else 0.1
                (game,) = pqn_fixed_atari.evaluate(q_network, envs, 1, 1, epsilon, number, recording)
                rom = envs.spec.config.task
            emulator = pqn_fixed_atari.Emulator(rom, False)
            try:
                for row in recording:
                    emulator.follow(*row)
            except pqn_fixed_atari.ReplayError as error:
                mismatches += 1
                print(f"{env_id}: {error}", file=sys.stderr)
                continue
            assert (emulator.score, emulator.steps) == (game["score"], game["length"])
            openings = sum(bool(row[1]) for row in recording)
            played.append({"env_id": env_id, "epsilon": epsilon, "steps": emulator.steps, "openings": openings,
                           "score": emulator.score})  # fmt: skip
            print(played[-1], file=sys.stderr, flush=True)
    write(out, {
        "games": len(played), "titles": len(games), "steps": sum(game["steps"] for game in played),
        "openings": sum(game["openings"] for game in played), "mismatches": mismatches, "played": played,
    })  # fmt: skip
    assert mismatches == 0


def openings(num_envs: int = 8, steps: int = 200, out: Path | None = None) -> None:
    """Replay the beginning of every Atari game that envpool has, as `referee` does whole games of a few.

    Args:
        num_envs: games of each title, played at random, each with a seed and no-ops of its own
        steps: of each
        out: JSON to write
    """
    registry = pqn_fixed_atari.envpool.registration.registry.specs
    titles = sorted(name for name, (module, *_) in registry.items() if module == "envpool.atari")
    random_actions, begun, mismatches = np.random.default_rng(0), 0, {}
    for env_id in titles:
        args = pqn_fixed_atari.Args(env_id=env_id)
        seeds = pqn_fixed_atari.environment_seeds(0, num_envs, "evaluation")
        with contextlib.closing(pqn_fixed_atari.make_envs(args, seeds)) as envs:
            num_actions, (_, info) = int(envs.action_space.n), envs.reset()
            emulators = [pqn_fixed_atari.Emulator(envs.spec.config.task, False) for _ in seeds]
            done, rows = np.zeros(num_envs, dtype=bool), [(0, True, 0.0, ram, False) for ram in info["ram"]]
            try:
                for _ in range(steps):
                    for emulator, row in zip(emulators, rows):
                        emulator.follow(*row)
                        begun += bool(row[1])
                    actions = random_actions.integers(num_actions, size=num_envs)
                    _, _, terminated, cut, info = envs.step(actions)
                    ended = info["terminated"].astype(bool) | cut
                    rows = list(zip(actions, done, info["reward"], info["ram"], ended))
                    done = terminated | cut
            except pqn_fixed_atari.ReplayError as error:
                mismatches[env_id] = str(error)
        print(f"{env_id}: {mismatches.get(env_id, 'equal')}", file=sys.stderr, flush=True)
    write(out, {"titles": len(titles), "games_of_each": num_envs, "steps_of_each": steps,
                "openings": begun, "mismatches": mismatches})  # fmt: skip
    assert not mismatches


def unseen(games: int = 5, frames: int = 20_000, out: Path | None = None) -> None:
    """Titles in which a game may end in the no-ops after a lost life, which envpool does not show; random, in ale-py.

    Args:
        games: of each title, at most
        frames: of each title, at most
        out: JSON to write
    """
    registry = pqn_fixed_atari.envpool.registration.registry.specs
    titles = sorted(name for name, (module, *_) in registry.items() if module == "envpool.atari")
    random_actions, found, lives_lost, finished = np.random.default_rng(0), {}, 0, 0
    for env_id in titles:
        emulator = pqn_fixed_atari.Emulator(pqn_fixed_atari.envpool.make_spec(env_id).config.task, False)
        ale, ended, ends = emulator.ale, 0, []  # ends: after how many no-ops the game was over
        while ended < games and ale.getFrameNumber() < frames:
            ale.reset_game()
            while not ale.game_over() and ale.getFrameNumber() < frames:
                lives = ale.lives()
                emulator.act(random_actions.integers(len(emulator.buttons)))
                if ale.lives() < lives and not ale.game_over():
                    lives_lost, here = lives_lost + 1, ale.cloneState()
                    for number in range(1, 31):
                        ale.act(pqn_fixed_atari.Action.NOOP)
                        if ale.game_over():
                            ends.append(number)
                            break
                    ale.restoreState(here)
            ended += ale.game_over()
        finished += ended
        if ends:
            found[env_id] = ends
        print(f"{env_id}: {ended} games, {ends or 'none'}", file=sys.stderr, flush=True)
    write(out, {"titles": len(titles), "games": finished, "lives_lost": lives_lost, "over_after_no_ops": found})


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"kills": kills, "memory": memory, "steadiness": steadiness, "referee": referee, "openings": openings,
         "unseen": unseen}
    )  # fmt: skip
