"""How close training comes to the bound that its parts set: 1 / (1/e + 1/f + E/t).

e is raw envpool [steps/s], f the network's forward pass [observations/s], t its forward and backward pass
[observations/s], E the epochs. All three are measured again after every iteration of a real training run, at the sizes
that it uses: so a machine that drifts slows both sides alike. Needs an otherwise idle machine.

    python benchmark/speed.py --out benchmark/results/speed.json
"""

import contextlib
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


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
    iterations: int = 9
    """iterations per script; the first is the warm-up and is not counted"""
    seconds: float = 1.0
    """how long each part is measured after each iteration [s]"""
    out: Path | None = None
    """JSON to write"""


def per_second(work, amount: int, seconds: float) -> float:
    """Units of work per second: one call to warm up, then calls for some seconds."""
    work()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        work()
        calls += 1
    return amount * calls / (time.perf_counter() - start)


class Parts:
    """What training is made of, each at the batch size that the script has there."""

    def __init__(self, args: Args, script):
        self.args, self.random = args, np.random.default_rng(0)
        self.envs = script.make_envs(script.Args(env_id=args.env_id), list(range(args.num_envs)))
        self.envs.reset()
        self.num_actions = int(self.envs.action_space.n)
        self.q_network = script.QNetwork(self.num_actions)
        self.rows = args.num_envs * args.num_steps // args.num_minibatches
        self.obs = torch.randint(0, 256, (max(self.rows, args.num_envs), 4, 84, 84), dtype=torch.uint8)

    def step(self):
        self.envs.step(self.random.integers(self.num_actions, size=self.args.num_envs))

    def forward(self):
        with torch.no_grad():
            self.q_network(self.obs[: self.args.num_envs])

    def forward_backward(self):
        self.q_network.zero_grad()
        self.q_network(self.obs[: self.rows]).square().mean().backward()

    def measure(self) -> dict:
        seconds = self.args.seconds
        return {
            "e": per_second(self.step, self.args.num_envs, seconds),
            "f": per_second(self.forward, self.args.num_envs, seconds),
            "t": per_second(self.forward_backward, self.rows, seconds),
        }


def measure_script(args: Args, name: str) -> list[dict]:
    """e, f, t, their bound, and the steps per second of each iteration of a training run but the first."""
    script = importlib.import_module(name)
    parts = Parts(args, script)
    lengths = {"num_steps": args.num_steps}
    if name == "pqn_abs_atari":
        lengths = {"num_steps_min": args.num_steps, "num_steps_max": args.num_steps}
    results, resumed = [], None

    class Paused(script.RunLog):
        """Holds training after each iteration for as long as the parts are measured."""

        def write(self, *metrics, **more):
            nonlocal resumed
            super().write(*metrics, **more)
            elapsed = None if resumed is None else time.perf_counter() - resumed
            measured = parts.measure()
            if elapsed is not None:
                bound = 1 / (1 / measured["e"] + 1 / measured["f"] + args.update_epochs / measured["t"])
                sps = args.num_envs * args.num_steps / elapsed
                results.append({"script": name, **measured, "bound": bound, "sps": sps, "share": sps / bound})
            resumed = time.perf_counter()

    original, script.RunLog = script.RunLog, Paused
    try:
        with tempfile.TemporaryDirectory() as runs_dir:
            script.train(
                script.Args(
                    env_id=args.env_id, num_envs=args.num_envs, num_minibatches=args.num_minibatches,
                    update_epochs=args.update_epochs, eval_episodes=0, cuda=False, runs_dir=runs_dir,
                    total_timesteps=args.num_envs * args.num_steps * args.iterations, **lengths,
                )
            )  # fmt: skip
    finally:
        script.RunLog = original
    return results


def main(args: Args) -> None:
    torch.manual_seed(0)
    results = {name: measure_script(args, name) for name in ("pqn_fixed_atari", "pqn_abs_atari")}
    print("\n| script | e | f | t | bound | steps/s | share of the bound: median (lowest to highest) |\n|" + "---|" * 7)
    for name, runs in results.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "script"}
        numbers = " | ".join(f"{median[key]:,.0f}" for key in ("e", "f", "t", "bound", "sps"))
        shares = sorted(run["share"] for run in runs)
        print(f"| {name} | {numbers} | {median['share']:.0%} ({shares[0]:.0%} to {shares[-1]:.0%}) |")
    if args.out:
        report = {
            "settings": {key: value for key, value in asdict(args).items() if key != "out"},
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "torch_threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
            "iterations": [run for runs in results.values() for run in runs],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(tyro.cli(Args, description=__doc__.splitlines()[0]))
