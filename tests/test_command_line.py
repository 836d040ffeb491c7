"""What the command line accepts and refuses.

A refusal is exit code 2 and one or two lines that name the flag, the value and what is allowed; it comes before envpool
is called, which crashes the process on some of these values.
"""

import dataclasses
import importlib.util
import itertools
import os
import random
import sys
import types

import ale_py.roms
import envpool
import pytest
import torch


@pytest.fixture
def refusal(script, monkeypatch, capsys, tmp_path):
    """refusal(*flags) -> the lines that a refused command line prints."""

    def never(*args, **kwargs):
        raise AssertionError("envpool was called")

    monkeypatch.setattr(envpool, "make", never)

    def refusal(*flags):
        with pytest.raises(SystemExit) as stop:
            script.main(["--runs-dir", str(tmp_path), *flags])
        out, err = capsys.readouterr()
        assert stop.value.code == 2
        assert out == "" and "Traceback" not in err and 1 <= len(err.splitlines()) <= 2
        return err

    return refusal


@pytest.fixture
def accepted(script, tmp_path):
    """accepted(*flags) -> the Args of a command line that is fine."""

    def accepted(*flags):
        args = script.parse_args(["--runs-dir", str(tmp_path), *flags])
        script.check_args(args)
        return args

    return accepted


def steps_flag(script):
    return "--num-steps" if script.__name__ == "pqn_fixed_atari" else "--num-steps-min"


@pytest.mark.parametrize(
    ("flag", "values", "allowed"),
    [
        ("--total-timesteps", ["0", "-5", "1000000000001"], "1 to 1e12"),
        ("--num-envs", ["0", "-1", "1000001"], "1 to 1000000"),
        ("--num-minibatches", ["0", "-4", "1000001"], "1 to 1000000"),
        ("--update-epochs", ["0", "1000001"], "1 to 1000000"),
        ("--divergence-interval", ["0", "1000001"], "1 to 1000000"),
        ("--divergence-states", ["0", "1000001"], "1 to 1000000"),
        ("--divergence-window", ["0", "1000001"], "1 to 1000000"),
        ("--env-threads", ["-1", "1025"], "0 to 1024"),  # envpool aborts on -1
        ("--torch-threads", ["-1", "2147483648"], "0 to 1024"),
        ("--eval-episodes", ["-10", "1000010"], "0 to 1000000"),
        ("--seed", ["-1", "4294967296"], "0 to 4294967295"),
        ("--learning-rate", ["0", "-1", "nan", "inf"], "above 0"),
        ("--max-grad-norm", ["0", "nan", "inf"], "above 0"),
        ("--gamma", ["-0.1", "1.1", "nan"], "0 to 1"),
        ("--q-lambda", ["-0.1", "1.1", "nan"], "0 to 1"),
        ("--start-e", ["-0.1", "1.1", "nan"], "0 to 1"),
        ("--end-e", ["-0.1", "1.1", "nan"], "0 to 1"),
        ("--eval-epsilon", ["-0.1", "1.1", "nan"], "0 to 1"),
        ("--repeat-action-probability", ["-0.1", "2", "nan"], "0 to 1"),  # envpool takes 2.0 silently
        ("--exploration-fraction", ["0", "1.1", "nan"], "above 0"),
        ("--eval-episodes", ["15", "101"], "multiples of 10"),
    ],
)
def test_numbers_out_of_range(refusal, flag, values, allowed):
    for value in values:
        line = refusal(flag, value)
        assert flag in line and allowed in line
        assert value in line or str(float(value)) in line


def test_rollout_length_out_of_range(script, refusal):
    for value in ("0", "-16", "1", "1000001"):
        line = refusal(steps_flag(script), value)
        assert f"{steps_flag(script)} {value}" in line and "2 to 1000000" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--num-steps-min 65", ["--num-steps-min 65", "64", "--num-steps-max"]),
        ("--num-steps-min 40 --num-steps-max 39", ["--num-steps-min 40", "39"]),
        ("--divergence-low 0.9 --divergence-high 0.1", ["--divergence-low 0.9", "--divergence-high 0.1"]),
        ("--divergence-low 0.5 --divergence-high 0.5", ["--divergence-low 0.5", "--divergence-high 0.5"]),
        ("--divergence-low 0", ["--divergence-low 0", "between 0 and 1"]),
        ("--divergence-high 1", ["--divergence-high 1", "between 0 and 1"]),
        ("--divergence-warmup 21", ["--divergence-warmup 21", "--divergence-window 20"]),
        ("--divergence-warmup 0", ["--divergence-warmup 0", "1 to 1000000"]),
        ("--batch-ema 1.5", ["--batch-ema 1.5", "0 to 1"]),
        ("--num-steps-max 1e9", ["--num-steps-max 1000000000", "0 to 1000000"]),
        ("--num-steps-max 1e6", ["--num-envs 128", "GiB"]),
        ("--num-steps 32", ["--num-steps", "--num-steps-min", "--num-steps-max"]),  # the other script's flag
        ("--base-num-steps 0", ["--base-num-steps 0", "1 to 1000000"]),
    ],
)
@pytest.mark.parametrize("script", ["pqn_abs_atari"], indirect=True)
def test_batch_rules_that_cannot_work(refusal, flags, named):
    line = refusal(*flags.split())
    assert all(text in line for text in named)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("ALE/Pong-v5", "did you mean Pong-v5?"),
        ("PongNoFrameskip-v4", "did you mean Pong-v5?"),
        ("pong-v5", "did you mean Pong-v5?"),
        ("Pong", "did you mean Pong-v5?"),
        ("Breakot-v5", "did you mean Breakout-v5?"),
        ("MsPacmanDeterministic-v4", "did you mean MsPacman-v5"),
        ("Seaquest-ram-v5", "did you mean Seaquest-v5?"),
        ("CartPole-v1", "allowed are envpool's Atari games"),
        ("Ant-v5", "allowed are envpool's Atari games"),  # an envpool id that ends in -v5 and is no Atari game
        ("", "allowed are envpool's Atari games"),
    ],
)
def test_ids_of_other_kinds(refusal, env_id, hint):
    assert f"--env-id {env_id}: {hint}" in refusal("--env-id", env_id)


def test_every_atari_game_of_envpool_is_accepted(script, tmp_path):
    """All ROMs of ale-py under their envpool names, but for the four that envpool has not."""
    roms = set(ale_py.roms.get_all_rom_ids()) - {"combat", "joust", "maze_craze", "warlords"}
    games = ["".join(part.capitalize() for part in rom.split("_")) + "-v5" for rom in sorted(roms)]
    assert len(games) == 104
    for game in games:
        script.check_args(script.Args(env_id=game, runs_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--cuda False", ["--cuda False", "--no-cuda"]),
        ("--track True", ["--track True", "--no-track"]),
        ("--episodic-life 0", ["--episodic-life 0", "--no-episodic-life"]),
        ("--cuda=False", ["--cuda=False", "--no-cuda"]),
        ("--no-cuda=True", ["--no-cuda=True", "--no-cuda"]),
        ("--no-cuda False", ["--no-cuda False", "--cuda"]),
        ("--episodic_life False", ["--episodic_life False", "--no-episodic-life"]),
        ("--seed 2 --track true", ["--track true", "--no-track"]),
        ("--batch-size 4096", ["--batch-size"]),  # computed at run time: cannot be passed
        ("--minibatch-size 1024", ["--minibatch-size"]),
        ("--learning-rat 1", ["--learning-rat", "--learning-rate"]),
        ("--network huge", ["--network", "huge", "base", "large", "xlarge"]),
        ("--num-envs 2.5", ["--num-envs", "2.5", "whole"]),
        ("--num-envs many", ["--num-envs", "many"]),
        ("--num-envs inf", ["--num-envs", "inf"]),
        ("--gamma high", ["--gamma", "high"]),
        ("--num-envs", ["--num-envs"]),
        ("Pong-v5", ["Pong-v5"]),
        ("--num-envs 1 --num-minibatches 40", ["--num-minibatches 40", "two rows"]),
        ("--total-timesteps 500", ["--total-timesteps 500", "less than one rollout"]),
    ],
)
def test_other_mistakes(refusal, flags, named):
    line = refusal(*flags.split())
    assert all(text in line for text in named)


def test_minibatches_that_would_leave_one_row(script, refusal, accepted):
    """3 environments x 5 steps are 15 rows: 7 minibatches of two or three rows, but not 8."""
    flags = ["--num-envs", "3", steps_flag(script), "5", "--total-timesteps", "15", "--num-minibatches"]
    assert "allowed is up to 7" in refusal(*flags, "8")
    assert accepted(*flags, "7").num_minibatches == 7
    assert accepted(*flags, "4").num_minibatches == 4


def test_cuda_asked_for_where_none_is(refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--cuda" in refusal("--cuda")


@pytest.mark.parametrize("found", [None, types.SimpleNamespace(origin=None)])  # nothing; a folder called wandb
def test_tracking_without_wandb(refusal, monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    line = refusal("--track")
    assert "--track" in line and "pip install wandb" in line


def test_a_runs_directory_that_cannot_be_made(script, refusal, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refusal("--runs-dir", str(tmp_path / "file" / "runs"))
    assert "--runs-dir" in refusal("--runs-dir", "")
    assert "--runs-dir" in refusal("--runs-dir=")


def test_a_runs_directory_that_cannot_be_written_to(refusal, monkeypatch, tmp_path):
    """As root every directory can be, so os.access is asked to say what it says to others."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written to" in refusal("--runs-dir", str(tmp_path))


# Per flag what is fine, with the other flags' fine values too, and what is not; independent of the scripts' own table.
WORDS = ["", "many", "nan", "inf", "-inf", "1e400", "0x10", "1,000", "1 0", "--", "None"]
COUNTS = ["0", "-1", "1.5", "1e-3", "1000001", *WORDS]
SHARES = ["-0.1", "1.1", "-1e-300", *WORDS]
VALUES = {
    "--env-id": (["Pong-v5", "Breakout-v5"], ["", "pong", "Pong-v6", "CartPole-v1", "../Pong-v5", "Ant-v5"]),
    "--network": (["base", "large"], ["", "BASE", "huge", "0"]),
    "--total-timesteps": (["20000000", "2e7"], [*COUNTS[:4], "1e13", *WORDS]),
    "--learning-rate": (["2.5e-4", "1"], ["0", "-1e-4", *WORDS]),
    "--num-envs": (["128", "64"], COUNTS),
    "--num-minibatches": (["4", "16"], COUNTS),
    "--update-epochs": (["2", "1"], COUNTS),
    "--gamma": (["0.99", "0", "1"], SHARES),
    "--q-lambda": (["0.65", "0", "1"], SHARES),
    "--start-e": (["1.0", "0.5"], SHARES),
    "--end-e": (["0.001", "0"], SHARES),
    "--exploration-fraction": (["0.1", "1"], ["0", *SHARES]),
    "--max-grad-norm": (["10", "0.5"], ["0", "-10", *WORDS]),
    "--divergence-interval": (["50", "1"], COUNTS),
    "--divergence-states": (["2048", "1"], COUNTS),
    "--repeat-action-probability": (["0", "0.25"], SHARES),
    "--env-threads": (["0", "3"], ["-1", "1025", "0.5", *WORDS]),
    "--torch-threads": (["0", "3"], ["-1", "1025", "0.5", *WORDS]),
    "--micro-batch-size": (["0", "256"], ["-1", "0.5", "1e13", *WORDS]),
    "--seed": (["0", "4294967295"], ["-1", "4294967296", "0.5", *WORDS]),
    "--eval-episodes": (["0", "7", "30"], ["-1", "11", "99", "1.5", *WORDS]),
    "--eval-epsilon": (["0", "0.01"], SHARES),
    "--checkpoint-interval": (["0", "1e5"], ["-1", "0.5", "1e13", *WORDS]),
    "--resume": ([], ["nowhere", "/", "/dev/null", "\0"]),
    "--evaluate": ([], ["nowhere", "/", "/dev/null"]),
}


def test_every_bad_value_is_refused_and_every_good_one_taken_as_it_is(script, refusal, accepted):
    """Each alone: a refusal names its flag. (Some 280 values; the combinations are in the next test.)"""
    names = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(script.Args) if field.type is not bool}
    of_one_script = {"--num-steps", "--num-steps-min", "--num-steps-max", "--base-num-steps", "--batch-ema"}
    of_one_script |= {"--divergence-low", "--divergence-high", "--divergence-warmup", "--divergence-window"}
    assert names - of_one_script - {"--runs-dir"} == VALUES.keys()
    assert sum(len(bad) for _, bad in VALUES.values()) >= 150
    for name, (good, bad) in VALUES.items():
        for value in bad:
            assert name in refusal(f"{name}={value}"), (name, value)
        for value in good:
            taken = getattr(accepted(name, value), name[2:].replace("-", "_"))
            assert taken == (value if isinstance(taken, str) else float(value)), (name, value)


def test_combinations_of_good_and_bad_values(refusal, accepted):
    """200 random command lines of up to 6 flags: refused if and only if one of the values is bad, none ever changed."""
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        chosen = {}
        for name in rng.sample(sorted(VALUES), rng.randint(2, 6)):
            good, bad = VALUES[name]
            chosen[name] = rng.choice(bad if not good or rng.random() < 0.15 else good)
        if any(value in VALUES[name][1] for name, value in chosen.items()):
            refusal(*(f"{name}={value}" for name, value in chosen.items()))
            refused += 1
            continue
        args = accepted(*(f"{name}={value}" for name, value in chosen.items()))
        for name, value in chosen.items():
            taken = getattr(args, name[2:].replace("-", "_"))
            assert taken == (value if isinstance(taken, str) else float(value))
    assert 60 < refused < 180


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--capture-video --eval-episodes 0", ["--capture-video", "--eval-episodes 0"]),
        ("--capture-video --repeat-action-probability 0.25", ["--capture-video", "0.25"]),
    ],
)
def test_films_that_cannot_be_made(refusal, flags, named):
    line = refusal(*flags.split())
    assert all(text in line for text in named)


def test_whole_numbers_in_every_spelling(accepted):
    for text in ("20000000", "20_000_000", "2e7", "2.0E7"):
        assert accepted("--total-timesteps", text).total_timesteps == 20_000_000
    assert accepted("--seed", "0").seed == 0


def test_defaults_are_the_papers_protocol(script, accepted):
    args = accepted()
    expected = {
        "env_id": "Pong-v5", "network": "base", "total_timesteps": 20_000_000, "learning_rate": 2.5e-4,
        "num_envs": 128, "num_minibatches": 4, "update_epochs": 2, "gamma": 0.99, "q_lambda": 0.65, "start_e": 1.0,
        "end_e": 0.001, "exploration_fraction": 0.1, "max_grad_norm": 10.0, "divergence_interval": 50,
        "divergence_states": 2048, "divergence_window": 20, "episodic_life": True, "reward_clip": True,
        "repeat_action_probability": 0.0, "full_action_space": False, "eval_episodes": 100, "eval_epsilon": 0.0,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected
    if script.__name__ == "pqn_fixed_atari":
        assert args.num_steps == 32
    else:
        assert (args.divergence_low, args.divergence_high, args.divergence_warmup) == (0.05, 0.95, 10)
        assert (args.batch_ema, args.base_num_steps) == (0.9, 32)


def test_flags_reach_the_environment(script, accepted, monkeypatch):
    """What is asked for is what envpool gets."""
    calls = []
    monkeypatch.setattr(envpool, "make", lambda *args, **kwargs: calls.append((args, kwargs)))
    args = accepted(
        *"--env-id Breakout-v5 --num-envs 5 --no-episodic-life --no-reward-clip --env-threads 3".split(),
        *"--repeat-action-probability 0.25 --full-action-space --num-minibatches 2".split(),
    )
    script.make_envs(args, [7, 8, 9, 10, 11])
    ((positional, options),) = calls
    assert positional == ("Breakout-v5",)
    assert options == {
        "env_type": "gymnasium", "num_envs": 5, "seed": [7, 8, 9, 10, 11], "num_threads": 3, "episodic_life": False,
        "reward_clip": False, "repeat_action_probability": 0.25, "full_action_space": True,
    }  # fmt: skip


def test_help_names_every_flag_and_unit(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for field in dataclasses.fields(script.Args):
        assert "--" + field.name.replace("_", "-") in text
    assert "--no-cuda" in text and "[steps" in text


def test_limits_cover_every_number(script):
    """Every numeric flag has a rule, and no rule is for a flag that no script has."""
    ruled = list(itertools.chain.from_iterable(names.split() for names, _, _ in script.LIMITS))
    assert len(ruled) == len(set(ruled))
    numeric = {f.name for f in dataclasses.fields(script.Args) if f.type in (int, float)}
    assert numeric <= set(ruled)
    names = ("pqn_fixed_atari", "pqn_abs_atari", "divergence_probe")
    modules = [importlib.import_module(name) for name in names]
    assert set(ruled) <= {field.name for module in modules for field in dataclasses.fields(module.Args)}


def test_main_reads_sys_argv(script, refusal, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--num-envs", "0"])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 2 and "--num-envs 0" in capsys.readouterr().err
