"""`train` as a whole, on small fake games whose every row is known.

The functions that it calls are wrapped to see what they are given; nothing of it is replaced by something simpler.
T steps per rollout, N environments.
"""

import copy
import csv
import importlib
import json
import math
import sys

import envpool
import numpy as np
import pytest
import torch
from fake_envpool import Catch, CueGame, Row, ScriptedGame, fake_make

SMALL = "--num-envs 2 --num-minibatches 2 --eval-episodes 0 --torch-threads 1 --env-threads 1".split()
SPEED = {"charts/SPS", "charts/wall_clock"}  # columns that measure time: never the same twice


def length_flags(script, steps):
    """The flags that hold a script's rollout at so many steps."""
    if script.__name__ == "pqn_fixed_atari":
        return ["--num-steps", str(steps)]
    return ["--num-steps-min", str(steps), "--num-steps-max", str(steps)]


def metrics(run_dir):
    """metrics.csv without the columns that measure time."""
    with open(f"{run_dir}/metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in SPEED} for row in csv.DictReader(file)]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(script, game, *flags, **game options) -> what train returns, on a fake game."""

    def run(script, game, *flags, **game_options):
        make = fake_make(game, **game_options)
        monkeypatch.setattr(envpool, "make", make)
        result = script.main([*SMALL, "--runs-dir", str(tmp_path), *flags])
        result["make"] = make
        return result

    return run


@pytest.fixture
def rollouts(script, monkeypatch):
    """All arguments of every call of q_lambda_targets, the arguments of its losses added: what each rollout held."""
    seen = []
    targets_of, loss_of = script.q_lambda_targets, script.td_loss

    def q_lambda_targets(rewards, next_values, terminal, truncated, gamma, q_lambda):
        seen.append(
            {
                "rewards": rewards.clone(),
                "next_values": next_values.clone(),
                "terminal": terminal.clone(),
                "truncated": truncated.clone(),
                "losses": [],
            }
        )
        return targets_of(rewards, next_values, terminal, truncated, gamma, q_lambda)

    def td_loss(q_values, actions, targets, valid):
        seen[-1]["losses"].append((actions.clone(), targets.clone(), valid.clone()))
        return loss_of(q_values, actions, targets, valid)

    monkeypatch.setattr(script, "q_lambda_targets", q_lambda_targets)
    monkeypatch.setattr(script, "td_loss", td_loss)
    return seen


def in_order(monkeypatch, script):
    """One minibatch per epoch, rows unshuffled, so that a minibatch can be read as a rollout."""
    monkeypatch.setattr(
        script, "minibatches", lambda num_rows, epochs, num_minibatches, generator: [torch.arange(num_rows)] * epochs
    )


def valid_of(rollout, num_envs):
    """(T, N) 0 or 1, as the loss was given it in the first epoch."""
    return rollout["losses"][0][2].reshape(-1, num_envs)


# ----------------------------------------------------------------------------------------------------------------------
# Reset rows
# ----------------------------------------------------------------------------------------------------------------------


def test_the_row_after_a_done_is_left_out(script, run, rollouts, monkeypatch):
    """Done stream F, T, F, F: row 2 is the reset row, and only that one."""
    in_order(monkeypatch, script)
    game = [Row(1), Row(1, lives=0, terminated=True), Row(1), Row(1)]
    flags = [*length_flags(script, 4), "--total-timesteps", "8"]
    run(script, ScriptedGame, *flags, scripts=[game], full_lives=3)
    assert valid_of(rollouts[0], 2).T.tolist() == [[1, 1, 0, 1]] * 2
    assert rollouts[0]["terminal"].T.tolist() == [[False, True, False, False]] * 2
    assert rollouts[0]["rewards"].T.tolist() == [[1, 1, 0, 1]] * 2


def test_a_reset_row_is_carried_into_the_next_rollout(script, run, rollouts, monkeypatch):
    """The done stands in the last row, so the first row of the next rollout is the reset row."""
    in_order(monkeypatch, script)
    game = [Row(1), Row(1), Row(1, lives=0, terminated=True)]
    run(script, ScriptedGame, *length_flags(script, 3), "--total-timesteps", "12", scripts=[game])
    assert [valid_of(rollout, 2).T.tolist()[0] for rollout in rollouts] == [[1, 1, 1], [0, 1, 1]]


def test_a_lost_life_and_a_time_limit_make_reset_rows_too(script, run, rollouts, monkeypatch):
    in_order(monkeypatch, script)
    game = [Row(1, lives=2), Row(1, lives=2, truncated=True), Row(1, lives=3)]
    run(script, ScriptedGame, *length_flags(script, 6), "--total-timesteps", "12", scripts=[game], full_lives=3)
    (rollout,) = rollouts
    # life lost, reset row, cut by the limit, reset row (a new game, 3 lives), step, life lost
    assert rollout["terminal"].T.tolist()[0] == [True, False, False, False, False, True]
    assert rollout["truncated"].T.tolist()[0] == [False, False, True, False, False, False]
    assert valid_of(rollout, 2).T.tolist()[0] == [1, 0, 1, 0, 1, 1]


def test_reset_rows_do_not_move_the_network(script, run, monkeypatch):
    """Whatever stands in a reset row, the parameters after training are the same."""
    in_order(monkeypatch, script)
    game = [Row(1), Row(0, lives=0, terminated=True), Row(1), Row(0)]
    states = []
    targets_of = script.q_lambda_targets
    for poison in (0.0, 1e6):

        def poisoned(rewards, *rest, poison=poison):
            targets = targets_of(rewards, *rest)
            targets[2] += poison  # row 2 is the reset row
            return targets

        monkeypatch.setattr(script, "q_lambda_targets", poisoned)
        result = run(script, ScriptedGame, *length_flags(script, 4), "--total-timesteps", "8", scripts=[game])
        states.append(torch.load(f"{result['run_dir']}/model.pt", weights_only=True)["q_network"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_minibatch_without_a_valid_row_is_harmless(script):
    q_values = torch.randn(3, 4, requires_grad=True)
    loss, _ = script.td_loss(q_values, torch.zeros(3, dtype=torch.int64), torch.full((3,), 7.0), torch.zeros(3))
    loss.backward()
    assert loss.item() == 0 and torch.equal(q_values.grad, torch.zeros(3, 4))


def test_the_loss_is_the_mean_over_valid_rows(script):
    q_values = torch.tensor([[1.0, 9.0], [9.0, 2.0], [5.0, 9.0]])
    loss, mean_q = script.td_loss(
        q_values, torch.tensor([0, 1, 0]), torch.tensor([0.0, 0.0, 99.0]), torch.tensor([1.0, 1.0, 0.0])
    )
    assert loss.item() == (1**2 + 2**2) / 2
    assert mean_q.item() == (1 + 2) / 2


# ----------------------------------------------------------------------------------------------------------------------
# What the targets are made of
# ----------------------------------------------------------------------------------------------------------------------


def test_the_bootstrap_is_the_maximum_even_where_all_actions_are_random(script, run, rollouts, monkeypatch):
    """epsilon 1: V_{t+1} is max_a Q(s_{t+1}, a), of the observation that step t returned, under fixed parameters."""
    networks, truth = [], []
    build, targets_of = script.QNetwork, script.q_lambda_targets
    monkeypatch.setattr(script, "QNetwork", lambda *args: networks.append(build(*args)) or networks[-1])
    observed = []
    draw = CueGame._observe
    monkeypatch.setattr(CueGame, "_observe", lambda *args: observed.append(draw(*args)) or observed[-1])

    def check(rewards, next_values, *rest):
        with torch.no_grad():
            truth.append(torch.stack([networks[0](torch.from_numpy(obs)).amax(1) for obs in observed[-len(rewards) :]]))
        return targets_of(rewards, next_values, *rest)

    monkeypatch.setattr(script, "q_lambda_targets", check)
    flags = ["--start-e", "1", "--end-e", "1", "--total-timesteps", "60"]
    run(script, CueGame, *length_flags(script, 10), *flags)
    assert len(rollouts) == len(truth) == 3
    for rollout, expected in zip(rollouts, truth):
        torch.testing.assert_close(rollout["next_values"], expected)
        assert rollout["next_values"].std() > 0


def test_game_over_on_the_step_of_the_time_limit_is_a_terminal(script, run, rollouts):
    game = [Row(1), Row(1, lives=0, terminated=True, truncated=True), Row(1)]
    run(script, ScriptedGame, *length_flags(script, 4), "--total-timesteps", "8", scripts=[game])
    assert rollouts[0]["terminal"].T.tolist()[0] == [False, True, False, False]


def test_trained_on_the_clipped_reward_and_logged_raw(script, run, rollouts):
    """One +20 event, as in Seaquest: 1 in the rollout, 20 in the log."""
    game = [Row(20), Row(0, lives=0, terminated=True)]
    result = run(script, ScriptedGame, *length_flags(script, 4), "--total-timesteps", "8", scripts=[game])
    assert rollouts[0]["rewards"].max() == 1
    assert result["episodic_return"] == 20
    run(script, ScriptedGame, *length_flags(script, 4), "--total-timesteps", "8", "--no-reward-clip", scripts=[game])
    assert rollouts[1]["rewards"].max() == 20


def test_actions_in_the_loss_are_those_that_were_played(script, run, rollouts, monkeypatch):
    in_order(monkeypatch, script)
    played = []
    play = CueGame.step
    monkeypatch.setattr(CueGame, "step", lambda self, action: played.append(action.copy()) or play(self, action))
    run(script, CueGame, *length_flags(script, 5), "--total-timesteps", "20")
    learnt = torch.cat([rollout["losses"][0][0] for rollout in rollouts])
    assert learnt.tolist() == np.concatenate(played).tolist()


def test_epsilon_greedy_at_both_ends(script, run, rollouts, monkeypatch):
    """epsilon 0 plays the greedy action of the collecting network always; epsilon 1 each action equally often."""
    in_order(monkeypatch, script)
    flags = [*length_flags(script, 100), "--num-envs", "4", "--total-timesteps", "400", "--update-epochs", "1"]
    flags += ["--micro-batch-size", "400"]
    run(script, CueGame, *flags, "--start-e", "1", "--end-e", "1")
    counts = torch.bincount(rollouts[0]["losses"][0][0], minlength=4)
    assert counts.sum() == 400 and (counts - 100).abs().max() < 44  # five standard deviations
    greedy = []
    build = script.QNetwork

    def spied(*args):
        network = build(*args)
        network.register_forward_hook(lambda _, inputs, output: greedy.append(output.argmax(1)))
        return network

    monkeypatch.setattr(script, "QNetwork", spied)
    run(script, CueGame, *flags, "--start-e", "0", "--end-e", "0")
    assert torch.equal(rollouts[1]["losses"][0][0], torch.cat(greedy[:100]))


# ----------------------------------------------------------------------------------------------------------------------
# Episodes
# ----------------------------------------------------------------------------------------------------------------------


def test_two_games_cut_by_the_time_limit_count_apart(script, run):
    """10 points each, lives left: 10 and 10, not 10 and 20, and both are logged."""
    game = [Row(5), Row(5, truncated=True), Row(4), Row(6, truncated=True)]
    flags = [*length_flags(script, 6), "--num-envs", "1", "--total-timesteps", "6"]
    result = run(script, ScriptedGame, *flags, scripts=[game])
    (row,) = metrics(result["run_dir"])
    assert row["charts/games"] == "2"
    assert float(row["charts/episodic_return"]) == 10 and result["episodic_return"] == 10
    assert float(row["charts/episodic_length"]) == 2  # steps: reset rows do not count


def test_a_game_of_three_lives_is_one_episode(script, run):
    game = [Row(7, lives=2), Row(2, lives=1), Row(1, lives=0, terminated=True)]
    flags = [*length_flags(script, 6), "--num-envs", "1", "--total-timesteps", "6"]
    result = run(script, ScriptedGame, *flags, scripts=[game], full_lives=3)
    (row,) = metrics(result["run_dir"])
    assert row["charts/games"] == "1" and result["episodic_return"] == 10
    assert float(row["charts/episodic_length"]) == 3


def test_episode_tracker_by_hand(script):
    """Two environments; the second ends twice, the first is cut once."""
    tracker = script.EpisodeTracker(2)
    no, yes, lives = np.array([False, False]), np.array([True, True]), np.array([3, 3])
    assert tracker.step(np.array([1.0, 2.0]), no, no, no, lives) == []
    assert tracker.step(np.array([1.0, 3.0]), no, np.array([False, True]), no, np.array([2, 0])) == [(1, 5.0, 2)]
    cut, began = np.array([True, False]), np.array([False, True])
    assert tracker.step(np.array([1.0, 0.0]), began, no, cut, np.array([2, 3])) == [(0, 3.0, 3)]
    assert tracker.step(np.array([0.0, 4.0]), cut, no, no, lives) == []
    assert tracker.step(np.array([2.0, 0.0]), no, yes, no, np.array([0, 0])) == [(0, 2.0, 1), (1, 4.0, 2)]


def test_a_game_that_ends_unseen(script, run):
    """In the no-ops after a lost life: envpool's next row is of a new game, and nothing but its lives says so."""

    class EndsUnseen(ScriptedGame):
        def _resume(self, who):
            self.lives[who] = np.where(self.lives[who] == 1, self.full_lives, self.lives[who])

    game = [Row(4, lives=2), Row(3, lives=1), Row(2, lives=3), Row(1, lives=0, terminated=True)]
    flags = [*length_flags(script, 7), "--num-envs", "1", "--total-timesteps", "7"]
    result = run(script, EndsUnseen, *flags, scripts=[game], full_lives=3)
    (row,) = metrics(result["run_dir"])
    assert row["charts/games"] == "2" and float(row["charts/episodic_length"]) == 2
    assert result["episodic_return"] == 5  # the mean of 4 + 3 and 2 + 1; an extra life in play is no new game


# ----------------------------------------------------------------------------------------------------------------------
# Minibatches and storage
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "parts"), [(15, 4), (16, 4), (128, 32), (4096, 4), (4096, 32), (17, 8), (7, 3)])
def test_minibatches_hold_every_row_once_an_epoch(script, num_rows, parts):
    generator = torch.Generator().manual_seed(0)
    batches = list(script.minibatches(num_rows, 3, parts, generator))
    assert len(batches) == 3 * parts
    epochs = [torch.cat(batches[i * parts : (i + 1) * parts]) for i in range(3)]
    for epoch in epochs:
        assert epoch.sort().values.tolist() == list(range(num_rows))
    assert not torch.equal(epochs[0], epochs[1])
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) > 1


@pytest.mark.parametrize(("num_rows", "largest", "parts"), [(16, 5, 4), (16, 16, 1), (16, 99, 1), (7, 1, 7), (9, 8, 2)])
def test_micro_batches_hold_every_row_once(script, num_rows, largest, parts):
    rows = torch.randperm(1000)[:num_rows]
    found = script.micro_batches(rows, largest)
    assert torch.equal(torch.cat(found), rows)
    sizes = [len(part) for part in found]
    assert len(sizes) == parts and max(sizes) <= largest and max(sizes) - min(sizes) <= 1


def test_micro_batches_by_default_on_a_cpu(script):
    assert [len(part) for part in script.micro_batches(torch.arange(1024), 0)] == [128] * 8


def test_the_gradient_of_a_minibatch_is_that_of_its_micro_batches(script, run, monkeypatch):
    """Reset rows are shared out unequally over micro-batches of 1 to 3 rows, some of which have nothing else."""
    game = [Row(1), Row(1, lives=0, terminated=True), Row(0, lives=0, terminated=True), Row(1)]
    gradients, clip = [], torch.nn.utils.clip_grad_norm_

    def clip_grad_norm_(parameters, largest):
        parameters = list(parameters)
        gradients[-1].append([parameter.grad.clone() for parameter in parameters])
        return clip(parameters, largest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)
    flags, logged = [*length_flags(script, 8), "--total-timesteps", "16", "--update-epochs", "1"], []
    for size in ("0", "3", "1"):
        gradients.append([])
        result = run(script, ScriptedGame, *flags, "--micro-batch-size", size, scripts=[game], full_lives=3)
        (row,) = metrics(result["run_dir"])
        logged.append([float(row[name]) for name in ("losses/td_loss", "losses/q_values")])
    assert len(gradients[0]) == 2  # minibatches; the second starts from parameters that the first has moved
    assert max(values.abs().max().item() for values in gradients[0][0]) > 0.1
    for found in gradients[1:]:
        for minibatch, whole in zip(found, gradients[0]):
            torch.testing.assert_close(minibatch, whole, rtol=1e-3, atol=1e-5)
    assert logged[1:] == [pytest.approx(logged[0], rel=1e-5)] * 2


def test_an_adapted_odd_rollout_still_splits_evenly(abs_script, run, monkeypatch):
    """3 environments, rollouts from 5 to 9 steps, 4 minibatches: no empty part, no one-row tail, at any length."""
    sizes = {}
    loss_of = abs_script.td_loss

    def td_loss(q_values, *rest):
        sizes.setdefault(lengths[-1], []).append(len(q_values))
        return loss_of(q_values, *rest)

    lengths = []
    targets_of = abs_script.q_lambda_targets

    def q_lambda_targets(rewards, *rest):
        lengths.append(len(rewards))
        return targets_of(rewards, *rest)

    monkeypatch.setattr(abs_script, "td_loss", td_loss)
    monkeypatch.setattr(abs_script, "q_lambda_targets", q_lambda_targets)
    monkeypatch.setattr(abs_script, "behavioral_divergence", lambda before, after: 0.0)
    flags = "--num-envs 3 --num-minibatches 4 --num-steps-min 5 --num-steps-max 9 --divergence-interval 1"
    more = "--divergence-warmup 1 --batch-ema 0.5 --total-timesteps 200"
    run(abs_script, CueGame, *flags.split(), *more.split())
    assert set(lengths) == {5, 7, 8, 9}  # 5, then half of the way to 9 each time: 7, 8, 8.5, 8.75, ...
    for length, batches in sizes.items():
        assert sum(batches[:4]) == 3 * length and max(batches) - min(batches) <= 1


def test_storage_is_allocated_once_and_small(script, run, monkeypatch):
    """At most a tenth above N x T x (28,224 + 32) bytes: observations as uint8, once."""
    sizes = []
    zeros = torch.zeros

    def counted(*args, **kwargs):
        tensor = zeros(*args, **kwargs)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "zeros", counted)
    run(script, CueGame, *length_flags(script, 32), "--num-envs", "4", "--total-timesteps", "256")
    storage = [size for size in sizes if size >= 4 * 32]
    assert 32 * 4 * 28_224 <= sum(storage) <= 1.1 * 32 * 4 * (28_224 + 32)


def test_nothing_is_read_back_inside_the_learning_loop(script, run, monkeypatch):
    """The number of reads that the script itself makes does not grow with the number of minibatches."""
    counts = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        read = getattr(torch.Tensor, name)

        def counted(tensor, read=read):
            counts[-1] += sys._getframe(1).f_code.co_filename == script.__file__
            return read(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for parts in ("2", "8"):
        counts.append(0)
        flags = ["--num-minibatches", parts, "--total-timesteps", "64", "--divergence-interval", "100"]
        run(script, CueGame, *length_flags(script, 16), *flags)
    assert counts[0] == counts[1] > 0


# ----------------------------------------------------------------------------------------------------------------------
# The same run
# ----------------------------------------------------------------------------------------------------------------------


def same_model(a, b):
    first, second = (torch.load(f"{result['run_dir']}/model.pt", weights_only=True)["q_network"] for result in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("micro_batch_size", ["0", "9"])
@pytest.mark.parametrize("game", [CueGame, pytest.param(Catch, marks=pytest.mark.slow)])
def test_the_adaptive_script_held_at_32_steps_is_the_fixed_one(run, game, micro_batch_size):
    """Bit for bit: parameters, and every metric that is not a time."""
    flags = "--num-envs 4 --num-minibatches 4 --total-timesteps 640 --divergence-interval 2 --micro-batch-size".split()
    flags.append(micro_batch_size)
    fixed = run(importlib.import_module("pqn_fixed_atari"), game, *flags)
    held = "--num-steps-min 32 --num-steps-max 32 --divergence-warmup 1".split()
    adaptive = run(importlib.import_module("pqn_abs_atari"), game, *flags, *held)
    assert len(metrics(fixed["run_dir"])) == 5
    assert metrics(fixed["run_dir"]) == metrics(adaptive["run_dir"])
    assert same_model(fixed, adaptive)


def test_measuring_does_not_change_the_training(script, run):
    """Parameters are the same whether divergence is measured in every iteration or never."""
    flags = [*length_flags(script, 16), "--total-timesteps", "320"]
    often, never = (run(script, CueGame, *flags, "--divergence-interval", k) for k in ("1", "1000"))
    assert same_model(often, never)
    assert sum(row["abs/behavioral_divergence"] != "" for row in metrics(often["run_dir"])) == 10
    assert sum(row["abs/behavioral_divergence"] != "" for row in metrics(never["run_dir"])) == 0


@pytest.mark.slow
def test_same_seed_same_run_on_the_fake_game(script, run):
    flags = [*length_flags(script, 16), "--total-timesteps", "320", "--divergence-interval", "2"]
    first, second, other = (run(script, Catch, *flags, "--seed", seed) for seed in ("3", "3", "4"))
    assert metrics(first["run_dir"]) == metrics(second["run_dir"]) and same_model(first, second)
    assert metrics(first["run_dir"]) != metrics(other["run_dir"]) and not same_model(first, other)


@pytest.mark.slow
def test_same_seed_same_run_on_real_envpool(script, tmp_path):
    """Identical metrics for the same seed and thread counts; another seed differs."""
    flags = [*SMALL, "--runs-dir", str(tmp_path), "--env-id", "Breakout-v5", *length_flags(script, 16)]
    flags += ["--total-timesteps", "640", "--divergence-interval", "5"]
    first, second, other = (script.main([*flags, "--seed", seed]) for seed in ("1", "1", "2"))
    assert len(metrics(first["run_dir"])) == 20
    assert metrics(first["run_dir"]) == metrics(second["run_dir"]) and same_model(first, second)
    assert metrics(first["run_dir"]) != metrics(other["run_dir"])


def test_seeds_share_no_environment(script, run):
    """Not between run seeds, and not between training and evaluation."""
    used = [
        seed
        for run_seed in range(40)
        for purpose in ("training", "evaluation")
        for seed in script.environment_seeds(run_seed, 128, purpose)
    ]
    assert len(set(used)) == len(used)
    assert all(0 <= seed < 2**31 for seed in used)
    result = run(script, CueGame, *length_flags(script, 16), "--total-timesteps", "64", "--eval-episodes", "4")
    training, evaluation = (call["seed"] for call in result["make"].calls)
    assert training == script.environment_seeds(1, 2, "training")
    assert evaluation == script.environment_seeds(1, 4, "evaluation")


# ----------------------------------------------------------------------------------------------------------------------
# Divergence and the batch, in the loop
# ----------------------------------------------------------------------------------------------------------------------


def measured(script, monkeypatch):
    """The pairs of greedy actions that behavioral_divergence is given."""
    pairs = []
    divergence_of = script.behavioral_divergence

    def behavioral_divergence(before, after):
        pairs.append((before.clone(), after.clone()))
        return divergence_of(before, after)

    monkeypatch.setattr(script, "behavioral_divergence", behavioral_divergence)
    return pairs


def test_divergence_is_zero_without_an_update(script, run, monkeypatch):
    pairs = measured(script, monkeypatch)
    monkeypatch.setattr(torch.optim.RAdam, "step", lambda self: None)
    result = run(script, CueGame, *length_flags(script, 16), "--total-timesteps", "128", "--divergence-interval", "1")
    assert len(pairs) == 4
    assert {row["abs/behavioral_divergence"] for row in metrics(result["run_dir"])} == {"0.0"}


def test_divergence_is_one_when_every_greedy_action_flips(script, run, monkeypatch):
    """An optimiser step that negates Q: the worst action becomes the greedy one."""
    networks = []
    build = script.QNetwork
    monkeypatch.setattr(script, "QNetwork", lambda *args: networks.append(build(*args)) or networks[-1])

    def negate(self):
        with torch.no_grad():
            for parameter in networks[-1].q_values.parameters():
                parameter.neg_()

    monkeypatch.setattr(script, "minibatches", lambda rows, *_: [torch.arange(rows)])  # one step per iteration
    monkeypatch.setattr(torch.optim.RAdam, "step", negate)
    result = run(script, CueGame, *length_flags(script, 16), "--total-timesteps", "128", "--divergence-interval", "1")
    assert {row["abs/behavioral_divergence"] for row in metrics(result["run_dir"])} == {"1.0"}


def test_divergence_is_measured_on_valid_states_without_replacement(script, run, monkeypatch):
    """Every 2nd iteration, on at most M rows of that rollout, never on a reset row."""
    seen = []
    greedy_of = script.greedy_actions
    monkeypatch.setattr(script, "greedy_actions", lambda net, obs: seen.append(obs.clone()) or greedy_of(net, obs))
    game = [Row(1), Row(1, lives=0, terminated=True)]  # rows: step, game over, reset row, step, game over, reset row
    flags = [*length_flags(script, 12), "--num-envs", "1", "--total-timesteps", "48"]
    run(script, ScriptedGame, *flags, "--divergence-interval", "2", scripts=[game])
    assert {len(obs) for obs in seen} == {1}  # as many at a time as there are environments
    for obs in (torch.cat(seen[:8]), torch.cat(seen[8:])):  # in iterations 2 and 4
        greys = obs[:, -1, 0, 0].tolist()  # the screen's grey tells which row an observation came from
        assert len(greys) == len(set(greys)) == 8  # 12 rows, 4 of them reset rows
        # Observation number k (grey k + 1) is acted upon in row k; rows 2, 5, 8, ... are reset rows.
        assert all((grey - 1) % 3 != 2 for grey in greys)
    seen.clear()
    run(script, ScriptedGame, *flags, "--divergence-interval", "2", "--divergence-states", "5", scripts=[game])
    assert len(seen) == 2 * 5


def test_divergence_compares_the_network_before_learning_with_that_after(script, run, monkeypatch):
    """Oracle: both networks, asked again about the same states."""
    networks, before, checked = [], [], []
    build, shuffle, greedy_of = script.QNetwork, script.minibatches, script.greedy_actions
    monkeypatch.setattr(script, "QNetwork", lambda *args: networks.append(build(*args)) or networks[-1])
    monkeypatch.setattr(
        script, "minibatches", lambda *args: before.append(copy.deepcopy(networks[-1])) or shuffle(*args)
    )
    monkeypatch.setattr(script, "greedy_actions", lambda net, obs: (checked.append(obs), greedy_of(net, obs))[1])

    def compare(actions_before, actions_after):
        states = torch.cat(checked)
        checked.clear()
        assert len(states) == len(actions_before) > 12
        assert torch.equal(actions_before, greedy_of(before[-1], states))
        assert torch.equal(actions_after, greedy_of(networks[-1], states))
        return 0.25

    monkeypatch.setattr(script, "behavioral_divergence", compare)
    flags = [*length_flags(script, 12), "--total-timesteps", "288", "--divergence-states", "40"]
    result = run(script, CueGame, *flags, "--divergence-interval", "2", "--learning-rate", "0.01")
    measured = [row["abs/behavioral_divergence"] for row in metrics(result["run_dir"])]
    assert measured == ["", "0.25"] * (len(measured) // 2) and len(measured) >= 4


def test_warm_up_interval_and_window(abs_script, run, monkeypatch):
    """No adaptation before 3 measurements exist; then by the mean of the last 4."""
    values = iter([0.9, 0.5, 0.1, 0.2, 0.6, 0.05, 0.05, 0.05])
    monkeypatch.setattr(abs_script, "behavioral_divergence", lambda before, after: next(values))
    flags = "--num-steps-min 8 --num-steps-max 64 --divergence-interval 2 --divergence-window 4 --divergence-warmup 3"
    result = run(abs_script, CueGame, *flags.split(), "--total-timesteps", "304")
    rows = metrics(result["run_dir"])
    means = [float(row["abs/divergence_mean"]) for row in rows[1::2]]
    expected = [0.9, 0.7, 0.5, 0.425, 0.35, 0.2375, 0.225, 0.1875]
    assert means == pytest.approx(expected[: len(means)])
    length, lengths = 8.0, []
    for i, _ in enumerate(rows):
        lengths.append(round(length))
        if i % 2 and i // 2 >= 2:
            alpha = math.log(expected[i // 2] / 0.05) / math.log(0.95 / 0.05)
            length = 0.9 * length + 0.1 * (64 - alpha * 56)
    assert [int(row["abs/rollout_length"]) for row in rows] == lengths
    assert lengths[:6] == [8] * 6 and lengths[6] > 8


def test_rollout_reaches_its_maximum_and_comes_back(abs_script, run, monkeypatch):
    """L_max exactly when divergence stays low, L_min again when it rises; epochs follow eq. 10 on the way.

    (With the paper's smoothing it takes 44 measurements: test_batch_rule.py.)
    """
    level = [0.0]
    monkeypatch.setattr(abs_script, "behavioral_divergence", lambda before, after: level[0])
    write = abs_script.RunLog.write

    def switch(self, step, logged, **kwargs):
        if logged["abs/rollout_length"] == 64:
            level[0] = 1.0
        write(self, step, logged, **kwargs)

    monkeypatch.setattr(abs_script.RunLog, "write", switch)
    flags = "--divergence-interval 1 --divergence-window 1 --divergence-warmup 1 --batch-ema 0.5 --num-envs 1"
    result = run(abs_script, CueGame, *flags.split(), "--total-timesteps", "1000")
    rows = [(int(row["abs/rollout_length"]), int(row["abs/update_epochs"])) for row in metrics(result["run_dir"])]
    lengths = [length for length, _ in rows]
    peak = lengths.index(64)
    assert lengths[0] == 16 and lengths[:peak] == sorted(lengths[:peak])
    assert lengths[-1] == 16 and lengths[peak:] == sorted(lengths[peak:], reverse=True)
    assert all(epochs == max(2, 2 * length // 32) for length, epochs in rows)


@pytest.mark.parametrize("network", ["base", "large", "xlarge"])
def test_every_network_is_measured_and_adapts(abs_script, run, network):
    """The release's switch crashes at its first measurement, and copies the wrong class for its larger networks."""
    flags = "--num-steps-min 8 --num-steps-max 16 --divergence-interval 1 --divergence-warmup 1 --batch-ema 0"
    result = run(abs_script, CueGame, *flags.split(), "--network", network, "--total-timesteps", "48")
    rows = metrics(result["run_dir"])
    assert len(rows) >= 2 and all(0 <= float(row["abs/behavioral_divergence"]) <= 1 for row in rows)
    alpha = math.log(min(max(float(rows[0]["abs/behavioral_divergence"]), 0.05), 0.95) / 0.05) / math.log(0.95 / 0.05)
    assert int(rows[1]["abs/rollout_length"]) == round(16 - alpha * 8)
    saved = torch.load(f"{result['run_dir']}/model.pt", weights_only=True)
    abs_script.QNetwork(4, network).load_state_dict(saved["q_network"])


def test_the_longest_rollout_follows_the_network(abs_script):
    assert abs_script.Args().rollout_lengths() == (16, 64)
    for network in ("large", "xlarge"):
        assert abs_script.Args(network=network).rollout_lengths() == (16, 128)
    assert abs_script.Args(network="large", num_steps_max=40).rollout_lengths() == (16, 40)


# ----------------------------------------------------------------------------------------------------------------------
# Budget and result
# ----------------------------------------------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded(script, run):
    """100 steps, rollouts of 2 x 16: three of them."""
    result = run(script, CueGame, *length_flags(script, 16), "--total-timesteps", "100")
    assert result["global_step"] == 96
    assert result["gradient_steps"] == 3 * 2 * 2
    assert result["rollout_length"] == 16


def test_the_schedule_in_the_log(script, run):
    """epsilon falls linearly over a tenth of the steps; the learning rate stays."""
    flags = [*length_flags(script, 10), "--num-envs", "4", "--total-timesteps", "1000", "--update-epochs", "1"]
    result = run(script, CueGame, *flags)
    for row in metrics(result["run_dir"]):
        step = int(row["global_step"]) - 4  # at which the last actions of the rollout were chosen
        assert float(row["charts/epsilon"]) == pytest.approx(1 - 0.999 * min(step / 100, 1))
        assert float(row["charts/learning_rate"]) == 2.5e-4


def test_what_train_returns(script, run):
    result = run(script, CueGame, *length_flags(script, 16), "--total-timesteps", "320", "--eval-episodes", "10")
    assert set(result) - {"make"} == {
        "run_dir", "global_step", "gradient_steps", "rollout_length", "episodic_return", "eval_return",
    }  # fmt: skip
    with open(f"{result['run_dir']}/eval.json") as file:
        assert json.load(file)["mean"] == result["eval_return"]
    without = run(script, CueGame, *length_flags(script, 16), "--total-timesteps", "32")
    assert math.isnan(without["eval_return"]) and math.isnan(without["episodic_return"])


# ----------------------------------------------------------------------------------------------------------------------
# --compile and --bf16
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_graphs_are_few_and_compute_the_same(abs_script, run, monkeypatch):
    """Two graphs and no more while T goes through a dozen values (traced, but not translated to machine code)."""
    compile_model, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def traced(model, *, dynamic, mode=None):
        return compile_model(model, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    flags = "--num-steps-min 8 --num-steps-max 24 --base-num-steps 8 --divergence-interval 1 --divergence-warmup 1"
    flags = [*flags.split(), "--batch-ema", "0.8", "--total-timesteps", "1_000", "--eval-episodes", "2"]
    compiled = run(abs_script, Catch, *flags, "--compile")
    plain = run(abs_script, Catch, *flags)
    rows = metrics(compiled["run_dir"])
    assert len({row["abs/rollout_length"] for row in rows}) > 4
    assert 2 <= len(graphs) <= 3
    assert rows == metrics(plain["run_dir"]) and compiled["eval_return"] == plain["eval_return"]


def test_bf16_is_another_computation(script, run):
    """And what is saved, and evaluated from the file, is of that computation."""
    flags = [*length_flags(script, 8), "--total-timesteps", "64"]
    rough, exact = (run(script, CueGame, *flags, *more) for more in (["--bf16"], []))
    ours, theirs = (metrics(result["run_dir"]) for result in (rough, exact))
    assert ours[0]["losses/q_values"] != theirs[0]["losses/q_values"]
    assert float(ours[0]["losses/q_values"]) == pytest.approx(float(theirs[0]["losses/q_values"]), abs=0.1)
    built = []
    build = script.QNetwork
    script_main = script.main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "QNetwork", lambda *args: built.append(build(*args)) or built[-1])
        patch.setattr(envpool, "make", fake_make(CueGame))
        script_main(["--evaluate", rough["run_dir"], "--eval-episodes", "2", "--runs-dir", f"{rough['run_dir']}/eval"])
    assert built[0].bf16
