"""How fast training is, how close to the bound that its parts set, what memory it takes, and how both grow.

    python benchmark/speed.py table --out benchmark/results/speed.json
    python benchmark/speed.py table --cuda --out benchmark/results/speed_gpu.json
    python benchmark/speed.py memory --out benchmark/results/memory_float32.json
    python benchmark/speed.py grow --out benchmark/results/grow.json
    python benchmark/speed.py pair --against "python other.py --flags" --ours "pqn_fixed_atari.py --flags"
    python benchmark/speed.py learning --out benchmark/results/learning_bf16.json

table    steps per second of both scripts, against the bound 1 / (1/e + 1/f + E/t): e is raw envpool [steps/s], f the
         network's forward pass on N observations and t its forward and backward pass on a minibatch [obs/s], E the
         epochs. Learning has more to do than t (loss, clipping, RAdam), so nothing can exceed the bound, but for drift
         of the machine. Against drift all runs of a setting stand side by side, each in a process of its own, and take
         turns: one iteration of training while the others wait, and at once, in the same process, its parts. The
         first setting also with divergence measured in every iteration, and with --bf16. With --cuda also every setting
         with --compile, and with both, in under 8 minutes.
memory   peak memory against that of the same script with its frames kept as float32.
grow     time and memory against N, T and size of the network; a picture goes beside the JSON, and `draw` renews it.
pair     ours and another script in turn, A B A B: any command that prints its steps per second, such as "SPS: 471".
learning what the levers that change the arithmetic do to learning on Catch: --bf16 and --micro-batch-size, which are
         flags, and channels_last and RAdam's foreach, which are always on, by doing without.

All but `memory` and `learning` need a machine that does nothing else.
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import envpool
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FIXED, ADAPTIVE = "pqn_fixed_atari", "pqn_abs_atari"
SWITCHES = ["compile", "bf16"]  # turned on one after the other
PROTOCOL = 20_000_000  # steps
BLUE, RED = "#0072B2", "#D55E00"  # Okabe and Ito


@dataclass(frozen=True)
class Common:
    env_id: str = "Pong-v5"
    """game, an envpool id"""
    cuda: bool = False
    """measure on the GPU"""
    torch_threads: int = 0
    """torch's CPU threads; 0 leaves torch's own choice"""
    env_threads: int = 0
    """envpool's threads; 0 is one per core"""
    out: Path | None = None
    """JSON to write"""


Flags = Annotated[Common, tyro.conf.arg(name="")]

# --- The process of a run


def clock(cuda: bool) -> float:
    """Seconds, once the GPU has done all that it was told to."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def per_second(work, amount: int, seconds: float, cuda: bool = False) -> float:
    """Units of work per second: one call to warm up, then calls for some seconds, one at least."""
    work()
    start, calls = clock(cuda), 0
    while calls == 0 or time.perf_counter() - start < seconds:
        work()
        calls += 1
    return amount * calls / (clock(cuda) - start)


class Parts:
    """What training is made of, each part at its size there, on environments and weights of its own."""

    def __init__(self, script, args, rows: int, cuda: bool):
        self.num_envs, self.rows, self.cuda, self.random = args.num_envs, rows, cuda, np.random.default_rng(0)
        self.envs = script.make_envs(args, script.environment_seeds(args.seed, self.num_envs, "probe"))
        self.envs.reset()
        self.num_actions, device = int(self.envs.action_space.n), "cuda" if cuda else "cpu"
        self.q_network = script.QNetwork(self.num_actions, args.network, args.bf16).to(device)
        self.act = self.learn = self.q_network
        if args.compile:
            self.act = torch.compile(self.q_network, dynamic=False, mode="reduce-overhead")
            self.learn = torch.compile(self.q_network, dynamic=True)
        self.obs = torch.randint(0, 256, (max(rows, self.num_envs), 4, 84, 84), dtype=torch.uint8, device=device)
        parts = script.micro_batches(torch.arange(rows, device=device), args.micro_batch_size)
        self.parts = self.obs[:rows].split([len(part) for part in parts])

    def step(self) -> None:
        self.envs.step(self.random.integers(self.num_actions, size=self.num_envs))

    def forward(self) -> None:
        with torch.no_grad():
            self.act(self.obs[: self.num_envs])
        clock(self.cuda)  # in training, too, the environments wait for it

    def forward_backward(self) -> None:
        self.q_network.zero_grad()
        for part in self.parts:
            self.learn(part).square().mean().backward()

    def measure(self, seconds: float) -> dict:
        return {
            "e": per_second(self.step, self.num_envs, seconds),
            "f": per_second(self.forward, self.num_envs, seconds, self.cuda),
            "t": per_second(self.forward_backward, self.rows, seconds, self.cuda),
        }


def bound(e: float, f: float, t: float, epochs: int) -> float:
    """Most steps per second of a training whose parts have these speeds."""
    return 1 / (1 / e + 1 / f + epochs / t)


@contextlib.contextmanager
def float32_frames():
    """Within the block, frames are kept as float32, as in many other scripts: what torch.zeros would make of uint8."""
    zeros, made = torch.zeros, []

    def wider(*size, dtype=None, **more):
        if dtype == torch.uint8:
            made.append(dtype := torch.float32)
        return zeros(*size, dtype=dtype, **more)

    with mock.patch.object(torch, "zeros", wider):
        yield
    assert made, "no frames were allocated by torch.zeros: both sides were the same"


def facts(cuda: bool) -> dict:
    """Peak memory of this process so far [MiB], and the machine."""
    status, processors = (Path("/proc", name) for name in ("self/status", "cpuinfo"))
    # Not ru_maxrss where there is something better: on Linux a process begins with the peak of its parent.
    peak = re.search(r"(?m)^VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    model = re.search(r"(?m)^model name\s*: (.+)$", processors.read_text() if processors.exists() else "")
    return {
        "resident_mib": int(peak[1] if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**10,
        "device_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
        "machine": {
            "processor": model[1] if model else platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "python": platform.python_version(), "torch": torch.__version__, "envpool": envpool.__version__,
        },
    }  # fmt: skip


def follow(job: dict, hand_over) -> None:
    """Trains, and hands over what is known after each iteration; the run stands still until hand_over returns.

    job         script, flags (its Args), warm_up [iterations], seconds (for each part; 0: no parts), float32
    hand_over   gets, after the warm-up, `facts` and the number of parameters; after each later iteration: seconds,
                measuring (those of them in which divergence was measured), sps, and e, f, t, bound, share
    """
    script = importlib.import_module(job["script"])
    args = script.Args(**job["flags"])
    cuda = args.cuda and torch.cuda.is_available()
    minibatches, behavioral_divergence = script.minibatches, script.behavioral_divergence
    iteration, resumed, learnt, measuring, parts = 0, 0.0, 0.0, 0.0, None

    def timed_minibatches(*of):
        nonlocal learnt
        yield from minibatches(*of)
        learnt = clock(cuda)

    def timed_divergence(*of):
        nonlocal measuring
        delta = behavioral_divergence(*of)
        measuring = clock(cuda) - learnt
        return delta

    class Paused(script.RunLog):
        def write(self, step, metrics, **more):
            nonlocal iteration, resumed, measuring, parts
            super().write(step, metrics, **more)
            seconds, iteration, rows = clock(cuda) - resumed, iteration + 1, metrics["abs/batch_size"]
            found = {"seconds": seconds, "measuring": measuring, "sps": rows / seconds}
            if iteration == job["warm_up"]:
                found = facts(cuda)  # before the parts take any memory
                found["parameters"] = sum(values.numel() for values in script.QNetwork(6, args.network).parameters())
                if job["seconds"]:
                    parts = Parts(script, args, rows // args.num_minibatches, cuda)
                    parts.measure(0.0)
            elif parts and iteration > job["warm_up"]:
                speeds = parts.measure(job["seconds"])
                highest = bound(**speeds, epochs=metrics["abs/update_epochs"])
                found |= speeds | {"bound": highest, "share": found["sps"] / highest}
            if iteration >= job["warm_up"]:
                hand_over(found)
            measuring, resumed = 0.0, clock(cuda)

    patches = {"RunLog": Paused, "minibatches": timed_minibatches, "behavioral_divergence": timed_divergence}
    with mock.patch.multiple(script, **patches), float32_frames() if job["float32"] else contextlib.nullcontext():
        script.train(args)


def serve(job: str) -> None:
    """A run's process: prints what `follow` hands over, and goes on at each line on stdin."""

    def hand_over(found: dict) -> None:
        print(json.dumps(found), flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # no one asks for more

    follow(json.loads(job), hand_over)


# --- The process that asks


def job_for(script, setting: str, common: Common, on=(), interval=50, seconds=0.0, warm_up=3, float32=False) -> dict:
    """The job for `follow`. setting: "N,T,minibatches,epochs,network"; the adaptive script is held at that T and E."""
    n, length, num_minibatches, epochs = map(int, setting.split(",")[:4])
    lengths = {"num_steps": length}
    if script == ADAPTIVE:
        lengths = {"num_steps_min": length, "num_steps_max": length, "base_num_steps": length}
    flags = {"env_id": common.env_id, "network": setting.split(",")[4], "num_envs": n, **lengths, "eval_episodes": 0,
             "num_minibatches": num_minibatches, "update_epochs": epochs, "divergence_interval": interval,
             "total_timesteps": PROTOCOL, "cuda": common.cuda, "torch_threads": common.torch_threads,
             "env_threads": common.env_threads, **{name: name in on for name in SWITCHES}}  # fmt: skip
    return {"script": script, "flags": flags, "seconds": seconds, "warm_up": warm_up, "float32": float32}


@contextlib.contextmanager
def started(job: dict):
    """A job in a process of its own, in a directory of its own: gives a function that returns what it hands over next.

    With `go_on` the run is first told to do so; what it hands over after the warm-up needs no telling.
    """

    def ask(go_on: bool = True) -> dict:
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last words follow
            os.write(process.stdin.fileno(), b"\n" * go_on)
        if line := process.stdout.readline():
            return json.loads(line)
        sys.exit("a run ended by itself:\n" + errors.read_text()[-3000:])

    with tempfile.TemporaryDirectory() as directory:
        command, errors = [sys.executable, __file__, "serve", json.dumps(job)], Path(directory, "stderr")
        with errors.open("w") as file:
            process = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
        with process:
            try:
                yield ask
            finally:
                process.kill()


def alternate(jobs: list[dict], rounds: int, deadline: float = math.inf) -> list[dict]:
    """Runs side by side, one iteration of each in turn; warm-ups overlap. After a deadline no third round begins."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(started(job)) for job in jobs]
        results = [ask(go_on=False) | {"iterations": []} for ask in runs]
        for done in range(rounds):
            if done < 2 or time.monotonic() < deadline:
                for ask, result in zip(runs, results):
                    result["iterations"].append(ask())
    return results


def write(out: Path | None, results: list[dict], **more) -> None:
    """Writes the JSON where asked: machine and command, without directories of this one; numbers of five digits."""
    machine = [result.pop("machine") for result in results]
    command = re.sub(r"(?<![\w.])/([^\s/'\"]+/)+", "", shlex.join(sys.argv[1:]))
    result = {"command": f"python benchmark/speed.py {command}", "machine": machine[0], **more, "results": results}
    result = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.5g}"))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def median(iterations: list[dict], key: str) -> float:
    """Of one number of each iteration."""
    return statistics.median(found[key] for found in iterations)


def spread(iterations: list[dict], key: str, form: str = ",.0f") -> str:
    """Median (lowest to highest)."""
    values = [found[key] for found in iterations]
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# --- table


def measuring_share(iterations: list[dict], interval: int) -> float:
    """Share of the time that measuring divergence takes at an interval, where each of these iterations measured it."""
    training = statistics.median(found["seconds"] - found["measuring"] for found in iterations)
    return median(iterations, "measuring") / (median(iterations, "measuring") + interval * training)


def protocol_hours(result: dict) -> str:
    """Training time of 20 M steps [h]; of the adaptive script also as if T, and with it E, were largest throughout."""
    sps, script = median(result["iterations"], "sps"), importlib.import_module(result["script"])
    hours = f"{PROTOCOL / sps / 3600:.1f}"
    length, epochs, network = (result["setting"].split(",")[i] for i in (1, 3, 4))
    if script.__name__ == ADAPTIVE and int(length) == script.Args().base_num_steps:
        longest = script.Args(network=network).rollout_lengths()[1]
        more = script.update_epochs_for(longest, int(epochs), int(length)) - int(epochs)
        hours += f" (T = {longest}: {PROTOCOL * (1 / sps + more / median(result['iterations'], 't')) / 3600:.1f})"
    return hours


def markdown(results: list[dict]) -> str:
    """The README's table, and what measuring divergence takes where it was measured in every iteration."""
    lines = ["| N x T, minibatches, epochs, network | script | e [steps/s] | f [obs/s] | t [obs/s] | bound | steps/s | "
             "share of the bound | peak memory [MiB] | 20 M steps [h] |", "|" + "---|" * 10]  # fmt: skip
    notes = ["", "Medians over the iterations (lowest to highest)."]
    for result in results:
        found, (n, length, *rest) = result["iterations"], result["setting"].split(",")
        name = " ".join([result["script"], *(f"--{name}" for name in result["on"])])
        if result["interval"] == 1:
            name += " --divergence-interval 1"
            every, default = measuring_share(found, 1), measuring_share(found, 50)
            notes.append(f"Measuring divergence takes {every:.1%} of the time in every iteration, and {default:.2%} at "
                         f"the default interval of 50 ({n} x {length}, {', '.join(rest)}).")  # fmt: skip
        peak = f"{result['resident_mib']:,.0f}"
        if result["device_mib"] is not None:
            peak += f", GPU {result['device_mib']:,.0f}"
        cells = [f"{n} x {length}, {', '.join(rest)}", name]
        cells += [f"{median(found, key):,.0f}" for key in ("e", "f", "t", "bound")]
        cells += [spread(found, "sps"), spread(found, "share", ".0%"), peak, protocol_hours(result)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines + notes)


def table(
    common: Flags = Common(),
    settings: tuple[str, ...] = ("128,32,4,2,base", "128,32,32,2,base", "8,128,4,4,base", "128,32,4,2,large"),
    rounds: int = 7,
    seconds: float = 0.0,
    minutes: float = 0.0,
    bf16: bool = True,
) -> None:
    """Steps per second of both scripts in turn, their parts, bound and memory, and the cost of measuring divergence.

    Args:
        settings: each N,T,minibatches,epochs,network
        rounds: timed iterations of each run, after three to warm up
        seconds: how long each part is measured after each iteration [s]; 0 is 1, with --cuda 0.3
        minutes: time for all of it; where it runs short, rounds become fewer, and the last settings are left out; 0 is
            7 with --cuda, and no limit without
        bf16: the first setting on a CPU also with --bf16, which takes minutes on one without instructions for it
    """
    seconds = seconds or (0.3 if common.cuda else 1.0)
    begin, limit = time.monotonic(), 60 * (minutes or (7.0 if common.cuda else math.inf))
    results, longest = [], 0.0
    switches = [[], ["compile"], SWITCHES] if common.cuda else [[]]
    arms = [(script, on, 50) for on in switches for script in (FIXED, ADAPTIVE)]
    first = [(ADAPTIVE, [], 1), *([(FIXED, ["bf16"], 50)] if bf16 and not common.cuda else [])]
    for number, setting in enumerate(settings):
        elapsed = time.monotonic() - begin
        if elapsed + longest > limit:
            print(f"no time is left for {setting}", file=sys.stderr)
            continue
        chosen = arms if number else [*arms, *first]
        print(f"{setting}: {len(chosen)} runs side by side ...", file=sys.stderr, flush=True)
        jobs = [job_for(script, setting, common, on, interval, seconds) for script, on, interval in chosen]
        deadline = begin + elapsed + (limit - elapsed) / (len(settings) - number)
        for (script, on, interval), result in zip(chosen, alternate(jobs, rounds, deadline)):
            results.append({"setting": setting, "script": script, "on": on, "interval": interval, **result})
        longest = max(longest, time.monotonic() - begin - elapsed)
    print(markdown(results))
    write(common.out, results, minutes=(time.monotonic() - begin) / 60)


# --- memory, grow, pair


def memory(
    common: Flags = Common(),
    num_envs: int = 128,
    num_steps: int = 128,
    num_minibatches: tuple[int, ...] = (4, 32),
) -> None:
    """Peak memory of training with frames as uint8 and as float32, each in a process of its own.

    Args:
        num_envs: N
        num_steps: T
        num_minibatches: minibatches per epoch, one comparison for each
    """
    kind, results = "device_mib" if common.cuda else "resident_mib", []
    print(f"| N, T, minibatches, epochs, network | uint8 [{kind}] | float32 | ratio |\n|---|---|---|---|")
    for count in num_minibatches:
        setting = f"{num_envs},{num_steps},{count},1,base"  # more epochs leave the peak as it is
        jobs = [job_for(FIXED, setting, common, warm_up=2, float32=float32) for float32 in (False, True)]
        (ours,), (other,) = (alternate([job], 0) for job in jobs)
        found = {"setting": setting, "uint8": ours[kind], "float32": other[kind], "ratio": ours[kind] / other[kind]}
        results.append(found | {"machine": ours["machine"]})
        print("| {setting} | {uint8:,.0f} | {float32:,.0f} | {ratio:.2f} |".format(**found), flush=True)
    write(common.out, results)


def grow(
    common: Flags = Common(),
    envs: tuple[int, ...] = (8, 16, 32, 64, 128, 256),
    steps: tuple[int, ...] = (16, 32, 64, 128),
    networks: tuple[str, ...] = ("base", "large", "xlarge"),
    rounds: int = 2,
    repeats: int = 2,
) -> None:
    """Time and peak memory of pqn_fixed_atari against N, T and the network, the others at 32, 32 and base.

    Args:
        envs: N
        steps: T
        networks: sizes of the network
        rounds: timed iterations of each run, after two to warm up
        repeats: how often all of it is done, one after the other, so that drift of the machine shows
    """
    sweeps = {"N": [f"{n},32,4,2,base" for n in envs], "T": [f"32,{length},4,2,base" for length in steps],
              "network": [f"32,32,4,2,{name}" for name in networks]}  # fmt: skip
    results = [{"sweep": sweep, "setting": setting, "iterations": []} for sweep in sweeps for setting in sweeps[sweep]]
    for _ in range(repeats):
        for result in results:
            (found,) = alternate([job_for(FIXED, result["setting"], common, warm_up=2)], rounds)
            result |= found | {"iterations": result["iterations"] + found["iterations"]}
            print(f"{result['setting']}: {spread(result['iterations'], 'sps')} steps/s, "
                  f"{result['resident_mib']:,.0f} MiB", flush=True)  # fmt: skip
    write(common.out, results)
    if common.out:
        draw(common.out)


def draw(source: Path) -> None:
    """The picture of `grow`, beside its JSON: time of an iteration, labelled with steps/s, and peak memory.

    Args:
        source: that JSON
    """
    from matplotlib.figure import Figure  # not above: the runs' memory shall not have it

    results, figure = json.loads(source.read_text())["results"], Figure(figsize=(8.3, 5), layout="constrained")
    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    titles = {"N": "environments N", "T": "rollout length T [steps]", "network": "parameters [millions]"}
    for (above, below), (sweep, title) in zip(axes.T, titles.items()):
        points = [result for result in results if result["sweep"] == sweep]
        sizes = [point["setting"].split(",") for point in points]
        x = [int(size[sweep == "T"]) for size in sizes]
        if sweep == "network":
            x = [point["parameters"] / 1e6 for point in points]
        seconds = [median(point["iterations"], "seconds") for point in points]
        above.plot(x, seconds, "o-", color=BLUE, label="measured")
        above.plot(x, [seconds[-1] * value / x[-1] for value in x], "k--", lw=0.8, label="slope 1")
        for at, point, size in zip(zip(x, seconds), points, sizes):
            label = f"{median(point['iterations'], 'sps'):,.0f}/s" + (f"\n{size[4]}" if sweep == "network" else "")
            above.annotate(label, at, (0, 6), textcoords="offset points", ha="center", fontsize=7.5)
        kind = "resident_mib" if points[0]["device_mib"] is None else "device_mib"
        below.plot(x, [point[kind] for point in points], "o-", color=RED, label="measured")
        if sweep != "network":
            frames = [int(n) * int(length) * 4 * 84 * 84 / 2**20 for n, length, *_ in sizes]
            below.plot(x, frames, "k--", lw=0.8, label="the rollout's frames: slope 1")
        for axis in (above, below):
            axis.set(xscale="log", yscale="log")
            axis.grid(alpha=0.3)
            axis.margins(x=0.15, y=0.2)
        below.set_xlabel(title)
        below.set_xticks(x, [f"{value:.3g}" for value in x])
        below.minorticks_off()
    for axis, label in zip(axes[:, 0], ("iteration [s], and steps/s", "peak memory [MiB]")):
        axis.set_ylabel(label)
        axis.legend(frameon=False, fontsize=7.5, loc="lower right")
    figure.savefig(source.with_suffix(".png"), dpi=150)


def read_sps(text: str) -> float:
    """The last number in a program's output that looks like steps per second: "SPS: 471", "1,471.2 steps/s", ..."""
    number, unit = r"(\d(?:[\d,_]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?)", r"steps(?:/|_per_| per )s(?:ec(?:onds?)?)?\b"
    forms = (rf"\bSPS[^\w\n,]{{1,5}}{number}", rf"{number} ?SPS\b(?![^\w\n,]{{1,5}}\d)", rf"{number} ?{unit}",
             rf"\b{unit}[\"']? *[:=|] *{number}")  # fmt: skip
    found = re.findall("(?i)" + "|".join(forms), text)
    if not found:
        sys.exit("the other script has not printed its steps per second, such as SPS: 471, but\n" + text[-2000:])
    return float("".join(found[-1]).replace(",", "").replace("_", ""))


def our_sps(command: str) -> float:
    """Steps per second of a run of ours from the moment its environments stand, as other scripts count, too."""
    script, *flags = shlex.split(command)
    with tempfile.TemporaryDirectory() as directory:
        flags += ["--eval-episodes", "0", "--runs-dir", directory]
        subprocess.run([sys.executable, str(ROOT / script), *flags], check=True)
        (metrics,) = Path(directory).glob("*/metrics.csv")
        names, *_, last = (line.split(",") for line in metrics.read_text().splitlines())
    return float(last[names.index("global_step")]) / float(last[names.index("charts/wall_clock")])


def pair(
    against: str, ours: str = "pqn_fixed_atari.py --total-timesteps 100_000", pairs: int = 3, out: Path | None = None
) -> None:
    """Ours and another script in turn, A B A B, each as a whole run, and the ratio of each pair.

    Args:
        against: the other's command; it prints its steps per second, and had best have as many steps to do
        ours: which of ours, and its flags
        pairs: how often
        out: JSON to write
    """
    results = []
    for _ in range(pairs):
        mine = our_sps(ours)
        other = subprocess.run(shlex.split(against), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        found = {"ours": mine, "theirs": read_sps(other.stdout)}
        results.append(
            found | {"ratio": mine / found["theirs"], "machine": facts(torch.cuda.is_available())["machine"]}
        )
        print("ours {ours:,.1f} steps/s, theirs {theirs:,.1f}, ratio {ratio:.2f}".format(**results[-1]), flush=True)
    print("ratio, median (lowest to highest): " + spread(results, "ratio", ".2f"))
    write(out, results)


# --- learning


RADAM = torch.optim.RAdam


def plain_radam(parameters, foreach: bool, **more) -> torch.optim.Optimizer:
    """RAdam with a loop over the parameters, whatever is asked for."""
    return RADAM(parameters, foreach=False, **more)


LEVERS = {
    "none": {}, "bf16": {"bf16": True}, "micro_batch_size": {"micro_batch_size": 8},
    "no_channels_last": (torch, "channels_last", torch.contiguous_format),
    "no_foreach": (torch.optim, "RAdam", plain_radam),
}  # fmt: skip


def learning(
    seeds: tuple[int, ...] = (1, 2, 3),
    levers: tuple[str, ...] = tuple(LEVERS),
    torch_threads: int = 1,
    out: Path | None = None,
) -> None:
    """What a lever that changes the arithmetic does to learning: both scripts on Catch, without and with each lever.

    Args:
        seeds: of the runs
        levers: which of none, bf16, micro_batch_size (8 rows at once instead of all), no_channels_last and no_foreach
        torch_threads: torch's CPU threads; 0 leaves torch's own choice
        out: JSON to write
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from fake_envpool import Catch, fake_make

    flags = {"num_envs": 8, "gamma": 0.9, "total_timesteps": 10_000, "divergence_interval": 2, "eval_episodes": 50}
    results = []
    print(f"| script | lever | seed | greedy return, best {Catch.best_return} | divergence, mean of the last 20 |")
    print("|" + "---|" * 5)
    for name, seed, lever in itertools.product((FIXED, ADAPTIVE), seeds, levers):
        script = importlib.import_module(name)
        more, patch = LEVERS[lever], contextlib.nullcontext()
        if isinstance(more, tuple):
            more, patch = {}, mock.patch.object(*more)
        with tempfile.TemporaryDirectory() as directory, mock.patch.object(envpool, "make", fake_make(Catch)), patch:
            args = script.Args(**flags, **more, seed=seed, torch_threads=torch_threads, runs_dir=directory)
            result = script.train(args)
            (metrics,) = Path(directory).glob("*/metrics.csv")
            names, *_, last = (line.split(",") for line in metrics.read_text().splitlines())
        found = {"script": name, "seed": seed, "lever": lever, "eval_return": result["eval_return"],
                 "divergence_mean": float(last[names.index("abs/divergence_mean")])}  # fmt: skip
        results.append(found | {"machine": facts(False)["machine"]})
        print("| {script} | {lever} | {seed} | {eval_return:.2f} | {divergence_mean:.2f} |".format(**found), flush=True)
    write(out, results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        with contextlib.suppress(KeyboardInterrupt):
            tyro.extras.subcommand_cli_from_dict({f.__name__: f for f in (table, memory, grow, draw, pair, learning)})
