"""How close training comes to the bound that its parts set: 1 / (1/e + 1/f + E/t).

e is raw envpool [steps/s], f the network's forward pass [observations/s], t its forward and backward pass
[observations/s], E the epochs; all at the sizes that the script uses, measured in turn with the scripts so that a
drifting machine favours neither side. Needs an otherwise idle machine.

    python benchmark/speed.py --out benchmark/results/speed.json
"""

import csv
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Args:
    env_id: str = "Pong-v5"
    """game, an envpool id"""
    num_envs: int = 128
    """N"""
    num_steps: int = 32
    """T [steps per environment]; the adaptive script is held at it"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 2
    """E"""
    iterations: int = 4
    """iterations per run, of which the first is the warm-up"""
    rounds: int = 3
    """rounds of parts, fixed script, parts, adaptive script"""
    out: Path | None = None
    """JSON to write"""


def per_second(work, amount: int, seconds: float = 4.0) -> float:
    """Units of work per second: one call to warm up, then calls for some seconds."""
    work()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        work()
        calls += 1
    return amount * calls / (time.perf_counter() - start)


def measure_parts(args: Args, envs, q_network) -> dict:
    """e, f and t, each at the batch size that the script has there."""
    random = np.random.default_rng(0)
    rows = args.num_envs * args.num_steps // args.num_minibatches
    obs = torch.randint(0, 256, (max(rows, args.num_envs), 4, 84, 84), dtype=torch.uint8)

    def forward():
        with torch.no_grad():
            q_network(obs[: args.num_envs])

    def forward_backward():
        q_network.zero_grad()
        q_network(obs[:rows]).square().mean().backward()

    return {
        "e": per_second(lambda: envs.step(random.integers(envs.action_space.n, size=args.num_envs)), args.num_envs),
        "f": per_second(forward, args.num_envs),
        "t": per_second(forward_backward, rows),
    }


def run_script(args: Args, script: str, runs_dir: str) -> dict:
    """Steps per second after the first iteration, and the peak resident memory, of one run in a process of its own."""
    lengths = {
        "pqn_fixed_atari": ["--num-steps", str(args.num_steps)],
        "pqn_abs_atari": ["--num-steps-min", str(args.num_steps), "--num-steps-max", str(args.num_steps)],
    }[script]
    command = [sys.executable, str(ROOT / f"{script}.py"), "--env-id", args.env_id, *lengths]
    for name in ("num_envs", "num_minibatches", "update_epochs"):
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    total = args.num_envs * args.num_steps * args.iterations
    command += ["--total-timesteps", str(total), "--eval-episodes", "0", "--no-cuda", "--runs-dir", runs_dir]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    newest = max(Path(runs_dir).iterdir(), key=lambda path: path.stat().st_mtime)
    with open(newest / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps, seconds = (float(rows[-1][k]) - float(rows[0][k]) for k in ("global_step", "charts/wall_clock"))
    return {"sps": steps / seconds, "peak_mib": usage.ru_maxrss / 1024}


def main(args: Args) -> None:
    torch.manual_seed(0)
    script = importlib.import_module("pqn_fixed_atari")
    envs = script.make_envs(script.Args(env_id=args.env_id), list(range(args.num_envs)))
    envs.reset()
    q_network = script.QNetwork(int(envs.action_space.n))
    results = []
    with tempfile.TemporaryDirectory() as runs_dir:
        for _ in range(args.rounds):
            for script in ("pqn_fixed_atari", "pqn_abs_atari"):
                before = measure_parts(args, envs, q_network)
                run = run_script(args, script, runs_dir)
                after = measure_parts(args, envs, q_network)
                parts = {name: (before[name] + after[name]) / 2 for name in before}
                bound = 1 / (1 / parts["e"] + 1 / parts["f"] + args.update_epochs / parts["t"])
                results.append({"script": script, **parts, "bound": bound, **run, "share": run["sps"] / bound})
                print(json.dumps(results[-1]), flush=True)
    print("\n| script | e | f | t | bound | steps/s | share of the bound (each run) | peak memory |\n|" + "---|" * 8)
    for script in ("pqn_fixed_atari", "pqn_abs_atari"):
        runs = [result for result in results if result["script"] == script]
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name != "script"}
        shares = ", ".join(f"{run['share']:.0%}" for run in runs)
        print(
            f"| {script} | {median['e']:,.0f} | {median['f']:,.0f} | {median['t']:,.0f} | {median['bound']:,.0f} "
            f"| {median['sps']:,.0f} | {median['share']:.0%} ({shares}) | {median['peak_mib']:,.0f} MiB |"
        )
    if args.out:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        settings = {name: value for name, value in asdict(args).items() if name != "out"}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"settings": settings, "machine": machine, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
