"""Studies: training runs over arms x games x seeds, from a small list in TOML; studies/laptop.toml explains its keys.

    python benchmark/study.py run benchmark/studies/laptop.toml --jobs 2      on this machine, two runs at a time
    python benchmark/study.py status benchmark/studies/laptop.toml            how far each cell is
    python benchmark/study.py gather benchmark/studies/laptop.toml            scores.csv, curves.csv of finished cells

A cell is one arm, game and seed; <directory>/<arm>/<game>/<seed>/ holds its run directory and log.txt. Whatever stops a
study (Ctrl-C, a crash, a power cut), the same command goes on with it: finished cells are left alone, interrupted ones
resumed. A cell that was begun with other flags than the study has now is refused. In a study that says where its
`results` go, a cell that is there counts as finished: it may take several machines that share nothing else.
A cell is locked while a run is at work in it, so that several of these may share a study, on machines that share a
disk; there, one cell per command:

    python benchmark/study.py print STUDY | xargs -d '\\n' -P 2 -I CELL sh -c CELL
    sbatch --array 0-35 --wrap 'python benchmark/study.py cell STUDY $SLURM_ARRAY_TASK_ID'
"""

import contextlib
import csv
import fcntl
import functools
import importlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple, NoReturn

import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent  # where runs work, and where relative scripts and directories begin
OURS = {"env_id", "seed", "runs_dir", "resume", "evaluate", "checkpoint"}  # flags that are not for a study to give
StudyFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY", help="TOML file")]


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a study."""

    arm: str
    script: str
    game: str
    seed: int
    directory: Path  # relative to ROOT, or absolute
    flags: list[str]
    args: object  # the script's Args
    free: str  # names of those that a resumed run may change
    results: Path | None  # directory of scores.csv and curves.csv, absolute; None: beside the runs
    gathered: dict | None = None  # this cell's line there

    def __str__(self) -> str:
        return f"{self.arm}/{self.game}/{self.seed}"

    @property
    def log(self) -> Path:
        return ROOT / self.directory / "log.txt"


class State(NamedTuple):
    word: str  # not started, running, interrupted, finished or refused
    step: int = 0  # of the checkpoint; while it is running, of metrics.csv
    run_dir: Path | None = None  # None for a finished cell: it ran elsewhere, and has been gathered
    detail: str = ""  # why it is refused, or the flags that a resumed run must change


def refuse(message: str) -> NoReturn:
    """Ends the program as a wrong command line does: one line on stderr, exit code 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def say(text: str) -> None:
    """Prints a line, if there is still someone to read it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def spelt(name: str, value) -> str:
    """A flag as it stands on a script's command line."""
    dashed = name.replace("_", "-")
    return f"--{dashed} {value}" if not isinstance(value, bool) else f"--{dashed}" if value else f"--no-{dashed}"


def check_keys(table: dict, needed: str, optional: str, where: str) -> None:
    """Refuses keys that are missing, unknown or of the wrong type."""
    for key in [*set(needed.split()) - table.keys(), *table.keys() - set(f"{needed} {optional}".split())]:
        refuse(f"{where}: {key} is {'unknown' if key in table else 'missing'}; keys are: {needed} {optional}")
    lists = {"arms": dict, "games": str, "seeds": int}  # and what they hold; the rest is text
    for key, value in table.items():
        values = value if key in lists else [value]
        if not isinstance(values, list) or {type(one) for one in values} != {lists.get(key, str)}:
            refuse(f"{where}: {key} = {value!r}: compare benchmark/studies/laptop.toml")


@functools.cache
def script_module(script: str) -> ModuleType:
    """A training script as a module. It has this project's Args, parse_flags and FREE."""
    path = ROOT / script
    if not path.is_file():
        refuse(f"script {script}: there is no such file")
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if not path.samefile(module.__file__):
        refuse(f"script {script}: there is another module of that name, {module.__file__}")
    if not all(hasattr(module, name) for name in ("Args", "parse_flags", "FREE")):
        refuse(f"script {script}: has no Args, parse_flags and FREE, as the training scripts have")
    return module


def load(path: Path) -> list[Cell]:
    """The cells of a study; refuses what cannot work, flags that its scripts refuse included."""
    try:
        study = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse(f"{path}: cannot be read: {error}")
    check_keys(study, "name games seeds arms", "directory results flags", str(path))
    root = study.get("directory", f"runs/{study['name']}")
    results = ROOT / study["results"] if "results" in study else None
    gathered = {cell_of(line): line for line in read_table(results / "scores.csv")} if results else {}
    ranked = []  # the first seed of every arm and game comes before the second of any
    for arm in study["arms"]:
        check_keys(arm, "name script", "flags games seeds", f"{path}: an arm")
        name, script = arm["name"], arm["script"]
        module, flags = script_module(script), shlex.split(f"{study.get('flags', '')} {arm.get('flags', '')}")
        for flag in flags:
            if flag.startswith("--") and flag[2:].partition("=")[0].replace("-", "_") in OURS:
                refuse(f"{path}: {name}: {flag} is not for a study to give")
        # --cuda, the default, is refused where there is no GPU: on a login node, say.
        args = module.parse_flags([flag for flag in flags if flag != "--cuda"], module.Args())
        for game in arm.get("games", study["games"]):
            for rank, seed in enumerate(arm.get("seeds", study["seeds"])):
                args, directory = replace(args, env_id=game, seed=seed), Path(root, name, game, str(seed))
                cell = Cell(name, script, game, seed, directory, flags, args, module.FREE["resume"], results)
                ranked.append((rank, replace(cell, gathered=gathered.get(str(cell)))))
    cells = [cell for _, cell in sorted(ranked, key=lambda pair: pair[0])]
    for name, count in Counter(map(str, cells)).items():
        if count > 1 or not re.fullmatch(r"[\w.+-]+/[\w.+-]+/\d+", name):
            refuse(f"{path}: {name}: is there twice, or has signs other than letters, digits and . + - _")
    return cells


def read_table(path: Path) -> list[dict]:
    """Lines of a CSV file, as strings; none without the file."""
    with contextlib.suppress(FileNotFoundError), path.open(newline="") as file:
        return list(csv.DictReader(file))
    return []


def cell_of(line: dict) -> str:
    """The name of the cell that a line of scores.csv or curves.csv belongs to."""
    return "{arm}/{game}/{seed}".format(**line)


def lock(file, kind: int) -> bool:
    """Locks an open file; False where another process has it. A file system without locks refuses nobody."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def locked(path: Path) -> bool:
    """Whether a process is at work that holds this file's lock."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return not lock(file, fcntl.LOCK_SH)
    return False


def reached(cell: Cell) -> int:
    """Step of the last whole line of the cell's metrics.csv, or of the run that was gathered; 0 without either."""
    steps = [int(cell.gathered["steps"]) if cell.gathered else 0]
    for path in cell.log.parent.glob("*/metrics.csv"):
        with contextlib.suppress(OSError, ValueError, IndexError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            steps.append(int(file.read().split(b"\n")[-2].partition(b",")[0]))
    return max(steps)


def saved(path: Path) -> dict:
    """What torch.save wrote, tensors not yet read; empty if there is no such file, or it is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # an error of another kind for each kind of damage
        return {}


def evaluated(run_dir: Path, step: int, args) -> bool:
    """Whether eval.json is of the network of that step, and as `args` want it; True if they want none."""
    if not args.eval_episodes:
        return True
    with contextlib.suppress(OSError, ValueError, KeyError):
        report = json.loads((run_dir / "eval.json").read_text())
        found = (report["protocol"]["training_steps"], report["num_games"], report["protocol"]["epsilon"])
        return found == (step, args.eval_episodes, args.eval_epsilon)
    return False


def look(cell: Cell, ours: bool = False) -> State:
    """The state of a cell, from what is on the disk; with `ours`, the lock of its log is this process's."""
    run_dirs = [path.parent for path in cell.log.parent.glob("*/metrics.csv")]
    if (not ours and locked(cell.log)) or any(locked(run_dir / "metrics.csv") for run_dir in run_dirs):
        return State("running", reached(cell))
    run_dirs = [run_dir for run_dir in run_dirs if any(run_dir.glob("*.pt"))]  # the rest died before a checkpoint
    if not run_dirs and cell.gathered:
        if (was := cell.gathered["flags"]) != shlex.join(cell.flags):
            return State(
                "refused", detail=f"in {cell.results / 'scores.csv'} are its results with {was}; take them out"
            )
        return State("finished", int(cell.gathered["steps"]))
    if not run_dirs:
        return State("not started")
    if len(run_dirs) > 1:
        return State("refused", detail=f"there are {len(run_dirs)} runs in {cell.directory}; leave one there")
    (run_dir,) = run_dirs
    files = map(saved, (run_dir / name for name in ("checkpoint.pt", "checkpoint_previous.pt", "model.pt")))
    kept = next(filter(None, files), None)
    if kept is None:
        return State("refused", detail=f"neither checkpoint.pt nor model.pt can be read in {run_dir}")
    if kept["script"] != type(cell.args).__module__:
        return State("refused", detail=f"begun with {kept['script']}.py, and the study has {cell.script}")
    # A flag that a later version of the script has brought had its default.
    begun, wanted = asdict(type(cell.args)()) | kept["args"], asdict(cell.args)
    changed = {name: wanted[name] for name in wanted if wanted[name] != begun[name] and name not in OURS}
    lowered = wanted["total_timesteps"] < begun["total_timesteps"]
    if no := [name for name in changed if name not in cell.free.split() or (name == "total_timesteps" and lowered)]:
        differ = ", ".join(f"{spelt(name, begun[name])}, and the study has {spelt(name, changed[name])}" for name in no)
        return State("refused", detail=f"begun with {differ}; undo that, or give the study another directory")
    model = saved(run_dir / "model.pt")  # written when a run has come to its end, with the flags that it then had
    ended = model and model["args"]["total_timesteps"] == wanted["total_timesteps"]
    if ended and evaluated(run_dir, model["global_step"], cell.args):
        return State("finished", model["global_step"], run_dir)
    return State("interrupted", kept["global_step"], run_dir, " ".join(spelt(*flag) for flag in changed.items()))


def start(cell: Cell) -> State | subprocess.Popen:
    """Begins a cell, or goes on with it; a State where there is nothing to do. Errors: OSError.

    The log is the cell's lock, and the run inherits it: held as long as this process or the run has it open.
    """
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with cell.log.open("a") as log:
        # Several tries: it may be a process that only looks.
        if not any(lock(log, fcntl.LOCK_EX) or time.sleep(0.05) for _ in range(20)):
            return State("running")
        state = look(cell, ours=True)
        command = [sys.executable, cell.script]
        if state.word == "not started":
            for path in cell.log.parent.glob("*/metrics.csv"):
                shutil.rmtree(path.parent)  # it died before its first checkpoint
            command += [*cell.flags, "--env-id", cell.game, "--seed", str(cell.seed), "--runs-dir", str(cell.directory)]
        elif state.word == "interrupted":
            command += ["--resume", str(cell.directory / state.run_dir.name), *state.detail.split()]
        else:
            return state
        print(f"$ {shlex.join(command)}", file=log, flush=True)
        # In a session of its own, a terminal's Ctrl-C reaches it through this process alone.
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)


def work(cells: list[Cell], jobs: int) -> int:
    """Runs the cells that are not finished, `jobs` at a time. Returns the exit code: 0; 1 if a cell failed; 128 + its
    number after a signal, which is passed on to the runs as SIGTERM, and they save their state."""
    states = {cell: look(cell) for cell in cells}
    waiting = deque(cell for cell in cells if states[cell].word != "finished")
    running: dict[Cell, tuple[subprocess.Popen, float]] = {}
    finished, failed, signals = len(cells) - len(waiting), [], []
    since, steps_before = time.monotonic(), sum(map(reached, cells))

    def tell(text: str) -> None:
        left = sum(cell.args.total_timesteps - reached(cell) for cell in (*waiting, *running))
        done = sum(map(reached, cells)) - steps_before
        seconds = (time.monotonic() - since) * left / done if done > 0 else 0
        say(f"{finished}/{len(cells)} {text}" + (f"; about {tqdm.format_interval(seconds)} left" if seconds else ""))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in (number for number, handler in handlers.items() if handler is not signal.SIG_IGN):
        signal.signal(number, lambda number, _: signals.append(number))
    tell("cells are finished")
    try:
        while (waiting or running) and not signals:
            if waiting and len(running) < jobs:
                cell = waiting.popleft()
                try:
                    outcome = start(cell)
                except OSError as error:
                    outcome = State("refused", detail=str(error))
                if isinstance(outcome, subprocess.Popen):
                    running[cell] = outcome, time.monotonic()
                    tell(f"started {cell} at step {states[cell].step:,}")
                elif outcome.word == "refused":
                    failed.append(f"{cell} is refused: {outcome.detail}")
                    tell(failed[-1])
                else:
                    finished += outcome.word == "finished"
                    tell(f"{cell} is {outcome.word}, by another process")
            for cell, (process, begun) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[cell]
                state, code = look(cell, ours=True), process.returncode
                if code == 0 and state.word == "finished":
                    finished += 1
                    tell(f"finished {cell} in {tqdm.format_interval(time.monotonic() - begun)}")
                else:
                    last = cell.log.read_text(errors="replace").split("\n$ ")[-1].rstrip().rpartition("\n")[2].strip()
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    failed.append(f"{cell} FAILED: {how}, {state.word} at step {state.step:,}: {last} ({cell.log})")
                    tell(failed[-1])
            time.sleep(0.1)
    finally:
        for process, _ in running.values():
            process.terminate()
        for cell, (process, _) in running.items():
            say(f"waiting for {cell} to save its state ...")
            process.wait()
            state = look(cell)
            say(f"{cell} is {state.word}, step {state.step:,}")
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if failed:
        say("\n".join([f"{len(failed)} of {len(cells)} cells failed:", *failed]))
    if signals:
        say(f"stopped by {signal.Signals(signals[0]).name}; to go on: {shlex.join(['python', *sys.argv])}")
        return 128 + signals[0]
    return 1 if failed else 0


def run(study: StudyFile, jobs: Annotated[int, tyro.conf.arg(help="runs at a time")] = 1) -> int:
    """Work through a study on this machine."""
    if jobs < 1:
        refuse(f"--jobs {jobs}: allowed is 1 or more")
    return work(load(study), jobs)


def print_commands(study: StudyFile) -> int:
    """Print one shell command a line, each for one cell, whatever its state."""
    for index in range(len(load(study))):
        say(shlex.join([sys.executable, str(Path(__file__).resolve()), "cell", str(study.resolve()), str(index)]))
    return 0


def one_cell(
    study: StudyFile,
    index: Annotated[
        int, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX", help="0, 1, ..., as `print` and `status` count")
    ],
) -> int:
    """Start or resume one cell; does nothing where it is finished."""
    cells = load(study)
    if not 0 <= index < len(cells):
        refuse(f"cell {index}: allowed is 0 to {len(cells) - 1}")
    return work([cells[index]], 1)


def status(study: StudyFile) -> int:
    """Show how far each cell is."""
    cells = load(study)
    states = [look(cell) for cell in cells]
    for index, (cell, (word, step, _, detail)) in enumerate(zip(cells, states)):
        why = f"  {detail}" if word == "refused" else ""
        say(f"{index:>4}  {cell!s:<36}  {word:<11}  {step:>11,} of {cell.args.total_timesteps:,} steps{why}")
    say(", ".join(f"{count} {word}" for word, count in Counter(state.word for state in states).items()))
    return 0


def games_ended(rows: list[dict]) -> list[tuple[int, float]]:
    """For each line of metrics.csv: the games that ended in that iteration, and their mean raw score (0 for none)."""
    counts = [0, *(int(row["charts/games"]) for row in rows)]
    return [(b - a, float(row["charts/episodic_return"] or 0)) for a, b, row in zip(counts, counts[1:], rows)]


def training_score(rows: list[dict], games: int = 100) -> float | None:
    """Mean raw score of the last 100 games, or of all of fewer; None for none. Of an iteration that ended more
    than are still wanted, these get the mean of all."""
    summed, left = 0.0, games
    for count, mean in reversed(games_ended(rows)):
        taken = min(count, left)
        summed, left = summed + taken * mean, left - taken
    return summed / (games - left) if left < games else None


def curve(rows: list[dict], total: int, bins: int = 200) -> Iterator[dict]:
    """A run in equal bins of steps: mean raw score of the games that ended in each (None without), their number, and
    divergence and rollout length [steps per environment] at its end, which is global_step."""
    lines, last = deque(zip(rows, games_ended(rows))), {}
    for number in range(1, bins + 1):
        games, summed = 0, 0.0
        while lines and int(lines[0][0]["global_step"]) * bins <= number * total:
            last, (count, mean) = lines.popleft()
            games, summed = games + count, summed + count * mean
        yield {"global_step": round(number * total / bins), "return": summed / games if games else None, "games": games,
               "divergence_mean": last.get("abs/divergence_mean"),
               "rollout_length": last.get("abs/rollout_length")}  # fmt: skip


def gather(study: StudyFile) -> int:
    """Write scores.csv and curves.csv of the finished cells, into the study's `results`; the others are named."""
    cells, scores, curves = load(study), [], []
    out, before, lost = cells[0].log.parents[3], defaultdict(list), set()
    if cells[0].results:
        out = cells[0].results
        for line in read_table(out / "curves.csv"):
            before[cell_of(line)].append(line)
        lost = {cell_of(line) for line in read_table(out / "scores.csv")} - {str(cell) for cell in cells}
    for cell in cells:
        state = look(cell)
        if state.word != "finished":
            lost |= {str(cell)} if cell.gathered and not any(cell.log.parent.glob("*/metrics.csv")) else set()
            say(f"left out: {cell} is {state.word}" + (f": {state.detail}" if state.word == "refused" else ""))
            continue
        if state.run_dir is None:
            scores.append(cell.gathered)
            curves += before[str(cell)]
            continue
        rows = read_table(state.run_dir / "metrics.csv")
        report = json.loads((state.run_dir / "eval.json").read_text()) if cell.args.eval_episodes else {}
        low, high = report.get("interval_95") or (None, None)
        scores.append({
            "arm": cell.arm, "script": cell.script, "game": cell.game, "seed": cell.seed, "steps": state.step,
            "training_score": training_score(rows), "eval_mean": report.get("mean"), "eval_low": low, "eval_high": high,
            "human_normalized": report.get("human_normalized"), "distinct_games": report.get("distinct_games"),
            "rollout_length": rows[-1].get("abs/rollout_length"),
            "gradient_steps": rows[-1].get("charts/gradient_steps"), "wall_clock": rows[-1]["charts/wall_clock"],
            "flags": shlex.join(cell.flags),
        })  # fmt: skip
        name = {"arm": cell.arm, "game": cell.game, "seed": cell.seed}
        curves += [name | point for point in curve(rows, cell.args.total_timesteps)]
    if lost:
        refuse(f"in {out} are results that this would overwrite, of {', '.join(sorted(lost))}; move the files away")
    if not scores:
        refuse("no cell is finished: there is nothing to gather")
    out.mkdir(parents=True, exist_ok=True)
    for name, table in (("scores.csv", scores), ("curves.csv", curves)):
        with (out / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)  # None is an empty cell
    say(f"{len(scores)} of {len(cells)} cells: {out / 'scores.csv'}, {out / 'curves.csv'}")
    return 0


if __name__ == "__main__":
    commands = {"run": run, "print": print_commands, "cell": one_cell, "status": status, "gather": gather}
    sys.exit(tyro.extras.subcommand_cli_from_dict(commands, description=__doc__.splitlines()[0]))
