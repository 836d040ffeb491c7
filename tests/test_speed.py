"""benchmark/speed.py: its arithmetic, what it reads and draws, and its runs on a fake game. No speed is tested here."""

import contextlib
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import envpool
import pytest
import torch
from fake_envpool import Catch, fake_make
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("speed", ROOT / "benchmark" / "speed.py")
speed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(speed)

COMMON = speed.Common(torch_threads=1, env_threads=1)
FIXED, ADAPTIVE = speed.FIXED, speed.ADAPTIVE


def result(**more):
    """One run of `table`, made up."""
    iterations = [
        {"seconds": 10.0, "measuring": m, "sps": sps, "e": 4000, "f": 5000, "t": 1500, "bound": 560, "share": share}
        for m, sps, share in ((1.0, 400.0, 0.8), (1.0, 500.0, 0.9), (1.5, 460.0, 1.1))
    ]
    return {"setting": "128,32,4,2,base", "script": FIXED, "on": [], "interval": 50, "resident_mib": 1234.5,
            "device_mib": None, "parameters": 1_730_470, "machine": {}, "iterations": iterations, **more}  # fmt: skip


# --- Arithmetic and table ---------------------------------------------------------------------------------------------


def test_the_bound_is_that_of_a_step_that_takes_each_part_in_turn():
    """The seconds of 1000 steps, added up: 1/4 to play, 1/5 to act, and 2 epochs of 1/2 s to learn."""
    assert speed.bound(e=4000, f=5000, t=2000, epochs=2) == pytest.approx(1000 / (1 / 4 + 1 / 5 + 2 / 2))
    assert speed.bound(e=300, f=float("inf"), t=float("inf"), epochs=2) == pytest.approx(300)


def test_units_per_second(monkeypatch):
    """Calls of 1/4 s, ten units each, measured for one second; the first, of a whole second, is the warm-up."""
    now, calls = 0.0, 0

    def work():
        nonlocal now, calls
        now, calls = now + (0.25 if calls else 1.0), calls + 1

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)
    assert speed.per_second(work, 10, 1.0) == pytest.approx(40)
    assert calls == 1 + 4
    assert speed.per_second(work, 10, 0.0) == pytest.approx(40), "one call at least"


def test_the_share_of_measuring():
    """Medians: 1 s of measuring, 9 s of all else."""
    iterations = result()["iterations"]
    assert speed.measuring_share(iterations, 1) == pytest.approx(1 / 10)
    assert speed.measuring_share(iterations, 50) == pytest.approx(1 / (1 + 50 * 9))


def test_hours_of_the_protocol():
    assert speed.protocol_hours(result()) == f"{20e6 / 460 / 3600:.1f}"
    # T = 64 has 4 epochs instead of 2: a step takes 1/460 s and two rows of 1/1500 s more.
    longest = 20e6 * (1 / 460 + 2 / 1500) / 3600
    assert speed.protocol_hours(result(script=ADAPTIVE)) == f"{20e6 / 460 / 3600:.1f} (T = 64: {longest:.1f})"


def test_the_table():
    results = [result(), result(script=ADAPTIVE, interval=1), result(on=["compile"], device_mib=99.6)]
    head, rule, plain, measuring, compiled, *notes = speed.markdown(results).splitlines()
    cells = [cell.strip() for cell in plain.strip("|").split("|")]
    assert cells == ["128 x 32, 4, 2, base", FIXED, "4,000", "5,000", "1,500", "560", "460 (400 to 500)",
                     "90% (80% to 110%)", "1,234", f"{20e6 / 460 / 3600:.1f}"]  # fmt: skip
    assert {line.count("|") for line in (head, rule, plain, measuring, compiled)} == {len(cells) + 1}
    assert f"| {ADAPTIVE} --divergence-interval 1 |" in measuring
    assert f"| {FIXED} --compile |" in compiled and "GPU 100" in compiled
    assert "10.0%" in notes[-1] and "0.22%" in notes[-1] and len(notes) == 3


def test_the_json_names_command_and_machine_but_no_place(monkeypatch, tmp_path):
    place = "/" + "home/someone/other"
    monkeypatch.setattr(sys, "argv", ["speed.py", "pair", "--against", f"{place}/bin/python {place}/a.py --x 1/2"])
    out = tmp_path / "new" / "speed.json"
    speed.write(out, [result(machine={"cores": 2}, resident_mib=1 / 3)])
    written = json.loads(out.read_text())
    assert written["command"] == "python benchmark/speed.py pair --against 'python a.py --x 1/2'"
    assert written["machine"] == {"cores": 2} and written["results"][0]["resident_mib"] == 0.33333


def test_this_machine():
    machine = speed.facts(cuda=False)
    assert 50 < machine["resident_mib"] < 100_000 and machine["device_mib"] is None
    assert machine["machine"]["processor"] and machine["machine"]["torch"] == torch.__version__


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def follow(monkeypatch, tmp_path):
    """follow(job, iterations) -> what a job hands over, in this process and on a fake game."""

    def follow(job, iterations):
        monkeypatch.setattr(envpool, "make", fake_make(Catch))
        monkeypatch.setattr(speed, "facts", lambda cuda: {"facts": True})
        flags = job["flags"]
        steps = iterations * flags["num_envs"] * (flags.get("num_steps") or flags["num_steps_min"])
        handed_over = []
        job["flags"] |= {"total_timesteps": steps, "runs_dir": str(tmp_path)}
        speed.follow(job, handed_over.append)
        return handed_over

    return follow


def metrics(tmp_path):
    """The only run's metrics.csv, column by column, without those of time."""
    (path,) = tmp_path.glob("*/metrics.csv")
    names, *rows = (line.split(",") for line in path.read_text().splitlines())
    return {name: cells for name, *cells in zip(names, *rows) if name not in ("charts/SPS", "charts/wall_clock")}


@pytest.fixture
def forward_passes(monkeypatch):
    """What networks have been given so far: (observations, dtype, whether a gradient was wanted)."""
    script, seen = importlib.import_module(FIXED), []
    forward = script.QNetwork.forward

    def watched(self, obs):
        seen.append((len(obs), obs.dtype, torch.is_grad_enabled()))
        return forward(self, obs)

    monkeypatch.setattr(script.QNetwork, "forward", watched)
    return seen


@pytest.mark.parametrize("script", [FIXED, ADAPTIVE])
def test_what_a_run_hands_over(script, follow, tmp_path):
    job = speed.job_for(script, "2,48,2,3,base", COMMON, seconds=1e-3, warm_up=1)
    ready, *iterations = follow(job, 3)
    assert ready["facts"] and round(ready["parameters"] / 1e6, 1) == 1.7
    assert len(iterations) == 2
    for found in iterations:
        assert found["sps"] == pytest.approx(2 * 48 / found["seconds"])
        assert found["measuring"] == 0.0
        assert min(found[part] for part in "eft") > 0
        assert found["bound"] == pytest.approx(speed.bound(found["e"], found["f"], found["t"], 3))
        assert found["share"] == pytest.approx(found["sps"] / found["bound"])
    written = metrics(tmp_path)
    for name, value in (("abs/rollout_length", 48), ("abs/update_epochs", 3), ("abs/minibatch_size", 48)):
        assert {float(cell) for cell in written[name]} == {value}, "the adaptive script is not held at these sizes"


def test_parts_are_measured_at_the_sizes_of_training(follow, forward_passes):
    follow(speed.job_for(FIXED, "2,8,2,1,base", COMMON, seconds=0.0), 4)
    of_training = set(forward_passes)
    assert of_training == {(2, torch.uint8, False), (8, torch.uint8, True)}
    number = len(forward_passes)
    follow(speed.job_for(FIXED, "2,8,2,1,base", COMMON, seconds=1e-3), 4)
    assert set(forward_passes) == of_training and len(forward_passes) > 2 * number


def test_the_time_of_measuring_is_part_of_the_iteration(follow, monkeypatch):
    """The clock stands still but in the comparison of actions: 7 s, every iteration."""
    script, now = importlib.import_module(ADAPTIVE), 100.0
    compare = script.behavioral_divergence

    def slow(*actions):
        nonlocal now
        now += 7.0
        return compare(*actions)

    monkeypatch.setattr(script, "behavioral_divergence", slow)
    monkeypatch.setattr(speed, "clock", lambda cuda: now)
    # Where nothing was measured the clock would say that no time has passed: an iteration shall take 1 s.
    draw = script.minibatches

    def drawn(*of):
        nonlocal now
        now += 1.0
        yield from draw(*of)

    monkeypatch.setattr(script, "minibatches", drawn)
    for interval, expected in ((1, [(8.0, 7.0)] * 3), (2, [(8.0, 7.0), (1.0, 0.0), (8.0, 7.0)])):
        job = speed.job_for(ADAPTIVE, "2,8,2,1,base", COMMON, interval=interval, warm_up=1)
        assert [(found["seconds"], found["measuring"]) for found in follow(job, 4)[1:]] == expected


def test_float32_frames_are_float32_and_all_else_is_the_same(follow, forward_passes, tmp_path):
    for float32, dtype in ((False, torch.uint8), (True, torch.float32)):
        forward_passes.clear()
        follow(speed.job_for(FIXED, "2,8,2,1,base", COMMON, interval=1, float32=float32), 4)
        assert {kind for _, kind, _ in forward_passes} == {dtype}
    first, second = (metrics(path) for path in each_run_alone(tmp_path))
    assert first == second
    assert torch.zeros(1, dtype=torch.uint8).dtype == torch.uint8, "the patch has been left behind"


def each_run_alone(tmp_path):
    """Two directories, each with one of the two runs."""
    for number, run in enumerate(sorted(tmp_path.glob("Pong*"))):
        (tmp_path / str(number)).mkdir()
        run.rename(tmp_path / str(number) / run.name)
    return [tmp_path / "0", tmp_path / "1"]


def test_a_float32_comparison_of_equals_is_noticed():
    with pytest.raises(AssertionError, match="both sides"), speed.float32_frames():
        torch.zeros(3)


def test_switches_are_turned_on_in_the_job():
    flags = [speed.job_for(FIXED, "2,8,2,1,base", COMMON, on)["flags"] for on in ([], ["bf16"], ["compile", "bf16"])]
    assert [(given["compile"], given["bf16"]) for given in flags] == [(False, False), (False, True), (True, True)]


@pytest.fixture
def turns(monkeypatch):
    """Runs in name only; lists the turns that they take."""
    taken = []

    @contextlib.contextmanager
    def started(job):
        def ask(go_on=True):
            if not go_on:
                return {"machine": {}, "resident_mib": 1.0, "device_mib": None, "parameters": 1}
            taken.append((job["flags"]["num_envs"], job["script"], job["flags"]["divergence_interval"]))
            return result()["iterations"][0]

        yield ask

    monkeypatch.setattr(speed, "started", started)
    return taken


def test_the_scripts_take_turns(turns, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["speed.py", "table"])
    out = tmp_path / "speed.json"
    speed.table(speed.Common(out=out), settings=("2,8,2,1,base", "4,8,2,1,base"), rounds=3)
    first = [(2, FIXED, 50), (2, ADAPTIVE, 50), (2, ADAPTIVE, 1), (2, FIXED, 50)]  # the last with --bf16
    second = [(4, FIXED, 50), (4, ADAPTIVE, 50)]
    assert turns == first * 3 + second * 3
    assert capsys.readouterr().out.count("| pqn_") == 6
    assert [len(run["iterations"]) for run in json.loads(out.read_text())["results"]] == [3] * 6


def test_little_time_means_fewer_rounds_and_settings(turns, monkeypatch, capsys):
    """Of six seconds a look at the clock takes four: two rounds, the fewest, of one setting, none of the next."""
    ticks = iter(range(0, 1000, 4))
    monkeypatch.setattr(speed.time, "monotonic", lambda: float(next(ticks)))
    speed.table(settings=("2,8,2,1,base", "4,8,2,1,base"), rounds=9, minutes=0.1)
    assert [turn[0] for turn in turns] == [2] * 8
    assert "no time is left for 4,8,2,1,base" in capsys.readouterr().err


def test_a_run_in_a_process_of_its_own():
    """On the real game: its memory and its parts come back."""
    job = speed.job_for(FIXED, "2,4,2,1,base", COMMON, seconds=1e-3, warm_up=1)
    (found,) = speed.alternate([job], 2)
    assert found["resident_mib"] > 100 and found["machine"]["torch_threads"] == 1
    assert len(found["iterations"]) == 2 and all(one["bound"] > 0 for one in found["iterations"])


def test_a_run_that_ends_by_itself_says_why(monkeypatch, tmp_path):
    """Before its warm-up is over, and in the middle."""
    monkeypatch.setattr(speed, "__file__", str(tmp_path / "run.py"))
    for first in ("", "print('{}', flush=True); input(); "):
        (tmp_path / "run.py").write_text(f"{first}raise MemoryError('all gone')")
        with pytest.raises(SystemExit, match=r"(?s)ended by itself.*MemoryError: all gone"):
            speed.alternate([{}], 1)


# --- Pictures and other scripts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_mib", [None, 50.0])
def test_the_picture_of_growth(device_mib, tmp_path):
    settings = {"N": ["8,32,4,2,base", "64,32,4,2,base"], "T": ["32,16,4,2,base", "32,128,4,2,base"],
                "network": ["32,32,4,2,base", "32,32,4,2,large"]}  # fmt: skip
    results = [
        result(sweep=sweep, setting=setting, device_mib=device_mib, parameters=1e6 * (1 + i))
        for sweep in settings
        for i, setting in enumerate(settings[sweep])
    ]
    source = tmp_path / "grow.json"
    source.write_text(json.dumps({"results": results}))
    speed.draw(source)
    with Image.open(tmp_path / "grow.png") as picture:
        assert picture.width >= 830, "narrower than the README's column"
        seen = {colour for _, colour in picture.convert("RGB").getcolors(picture.width * picture.height)}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in (speed.BLUE, speed.RED)} <= seen


@pytest.mark.parametrize(
    "text",
    [
        "SPS: 12\nglobal_step=500, SPS: 471",
        "500 SPS 471",
        "step 500  return 1.5  T 32  SPS 471  left 00:12",
        "{'charts/SPS': 471.0, 'loss': 3}",
        '"steps_per_second": 4.71e2, "games": 3',
        "trained 1,000 steps at 471 steps/s, 12 games",
        "speed | 471 steps per second |\n100 steps left",
        "at 471 SPS, 32 environments",
        "sps=4_71",
    ],
)
def test_steps_per_second_are_found_in_what_others_print(text):
    assert speed.read_sps(text) == 471


def test_an_other_script_that_prints_none_is_refused_with_its_last_words():
    with pytest.raises(SystemExit, match="No module named other"):
        speed.read_sps("100 steps\nNo module named other")
    assert speed.read_sps("1,471.25 steps/sec") == 1471.25


def test_pairs_alternate(monkeypatch, tmp_path, capsys):
    """Against a program that prints 100 steps per second, while ours makes 150 and then 250."""
    monkeypatch.setattr(sys, "argv", ["speed.py", "pair"])
    ran, ours, run = [], iter([150.0, 250.0]), subprocess.run
    monkeypatch.setattr(speed, "our_sps", lambda command: ran.append(command) or next(ours))
    monkeypatch.setattr(speed.subprocess, "run", lambda command, **more: ran.append("other") or run(command, **more))
    other = shlex.join([sys.executable, "-c", "print('SPS: 9'); print('SPS: 100')"])
    speed.pair(other, ours="script.py --flag", pairs=2, out=tmp_path / "pair.json")
    assert ran == ["script.py --flag", "other"] * 2
    written = json.loads((tmp_path / "pair.json").read_text())["results"]
    assert [one["ratio"] for one in written] == [1.5, 2.5]
    assert "2.00 (1.50 to 2.50)" in capsys.readouterr().out


def test_our_speed_counts_from_the_moment_the_environments_stand(monkeypatch):
    def run(command, check):
        assert command[1:4] == [str(ROOT / "script.py"), "--flag", "1"] and check
        run_dir = Path(command[command.index("--runs-dir") + 1]) / "run"
        run_dir.mkdir()
        (run_dir / "metrics.csv").write_text("global_step,charts/SPS,charts/wall_clock\n100,,2.0\n600,200.0,4.0\n")

    monkeypatch.setattr(speed.subprocess, "run", run)
    assert speed.our_sps("script.py --flag 1") == 150


# --- learning ---------------------------------------------------------------------------------------------------------


def test_levers_that_are_always_on_can_be_done_without(script):
    weights = script.QNetwork(6, "base", False).parameters
    assert any(w.dim() == 4 and not w.is_contiguous() for w in weights())
    with mock.patch.object(*speed.LEVERS["no_channels_last"]):
        weights = script.QNetwork(6, "base", False).parameters
        assert all(w.is_contiguous() for w in weights())
    with mock.patch.object(*speed.LEVERS["no_foreach"]):
        optimizer = torch.optim.RAdam(weights(), lr=0.5, foreach=True)
        assert (optimizer.defaults["foreach"], optimizer.defaults["lr"]) == (False, 0.5)
    assert torch.optim.RAdam(weights(), foreach=True).defaults["foreach"]
