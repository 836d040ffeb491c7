# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "numpy==2.4.6",
#     "gymnasium==1.4.0",
#     "envpool==1.2.5",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
# ]
# ///
"""PQN on Atari with a constant batch: the control of Adaptive Batch Scaling (ABS).

PQN (Gallici et al., ICLR 2025, arXiv 2407.04811) is Q-learning with many parallel environments, no replay buffer and
no target network; LayerNorm keeps it stable. ABS (Park, ICML 2026, arXiv 2605.21557) observes that the policy, and with
it the data, changes fast early in training and slowly later: small batches early, for plasticity; large ones late,
for precision. Its measure of change is Behavioral Divergence, and its batch is the rollout, N environments x T steps.

One iteration, with N parallel environments and rollouts of T steps:

    1 collect  T x N transitions, epsilon-greedy, with fixed parameters
    2 targets  G_t = r_t + gamma * (lambda * G_{t+1} + (1 - lambda) * max_a Q(s_{t+1}, a))     Q(lambda), backwards;
               without the G_{t+1} at a truncation and in the last row; G_t = r_t at a terminal
    3 learn    E epochs of minibatches: minimise the mean of (Q(s_t, a_t) - G_t)^2             RAdam, clipped gradient
    4 measure  delta = share of M rollout states whose greedy action phase 3 has changed       eq. 3, each K iterations
    5 adapt    not here: T and E stay

Shapes: T steps per rollout (the paper's L), N environments, A actions, B = T * N rows, M measured states.
A "step" is one agent decision, a "frame" one emulator frame; 1 step = 4 frames.

Departures from the paper, and from the public code around it, carry the mark DEVIATION below and stand in the README.
This is the control of pqn_abs_atari.py: `diff pqn_fixed_atari.py pqn_abs_atari.py` is the contribution of the paper.

    python pqn_fixed_atari.py --env-id Pong-v5

Measured on Pong, one CPU core, 0.7 M steps, seed 1 (benchmark/results/): -17.3 in the last 20 games, -18.3 greedy.
The paper's protocol (20 M steps, GPU): not yet measured.
"""

import contextlib
import csv
import difflib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import sys
import time
import zlib
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, NoReturn

import envpool
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ======================================================================================================================
# Arguments
# ======================================================================================================================


@dataclass(frozen=True)
class Args:
    # --- Algorithm (defaults: the public ABS release, daisophila/ABS, which follows the paper's protocol)
    env_id: str = "Pong-v5"
    """Atari game, an envpool id"""
    network: Literal["base", "large", "xlarge"] = "base"
    """PQN, PQN-L or PQN-XL: 1.7, 6.2 or 8.9 million parameters"""
    total_timesteps: int = 20_000_000
    """training length [steps, over all environments]; 4 frames each; no rollout is begun that would exceed it"""
    learning_rate: float = 2.5e-4
    """RAdam's learning rate, constant"""
    num_envs: int = 128
    """N, parallel environments"""
    num_minibatches: int = 4
    """minibatches per epoch; their size grows with the rollout"""
    update_epochs: int = 2
    """E, epochs over each rollout; where the batch adapts: at the base rollout length and below"""
    gamma: float = 0.99
    """discount per step"""
    q_lambda: float = 0.65
    """lambda of the Q(lambda) targets: 0 is one-step Q-learning"""
    start_e: float = 1.0
    """epsilon of the behaviour policy at step 0"""
    end_e: float = 0.001
    """epsilon after the decay"""
    exploration_fraction: float = 0.1
    """share of the total steps over which epsilon decays linearly"""
    max_grad_norm: float = 10.0
    """largest gradient norm; longer gradients are scaled down to it"""

    # --- Batch: Behavioral Divergence and what follows from it
    num_steps: int = 32
    """T, rollout length [steps per environment]; the batch is T x N"""
    divergence_interval: int = 50
    """K, iterations from one divergence measurement to the next (paper: 50)"""
    divergence_states: int = 2048
    """M, most states per measurement, drawn from the rollout without replacement (paper: 2048)"""
    divergence_window: int = 20
    """measurements in the running mean of the divergence (release: 20)"""

    # --- Environment
    episodic_life: bool = True
    """in training and evaluation, a lost life ends the return (the score is of full games all the same)"""
    reward_clip: bool = True
    """train on the sign of the reward (the score is raw all the same)"""
    repeat_action_probability: float = 0.0
    """probability that the emulator repeats the last action instead (0.25 is usual for "sticky actions")"""
    full_action_space: bool = False
    """all 18 actions instead of those that the game uses"""
    env_threads: int = 0
    """envpool's threads; 0 is one per core, at most N"""

    # --- The rest
    seed: int = 1
    """seed of everything random: network, exploration, shuffling, environments"""
    cuda: bool = True
    """use a GPU where there is one"""
    torch_threads: int = 0
    """torch's CPU threads; 0 leaves torch's own choice"""
    eval_episodes: int = 100
    """full games of the final evaluation, shared out equally over 10 environments; 0 skips it"""
    eval_epsilon: float = 0.0
    """share of random actions in the evaluation"""
    runs_dir: str = "runs"
    """where the run's directory is made"""
    track: bool = False
    """send the metrics to Weights & Biases too (needs `pip install wandb`)"""

    def rollout_lengths(self) -> tuple[int, int]:
        """Shortest and longest rollout of the run [steps per environment]; it begins with the shortest."""
        return self.num_steps, self.num_steps


# ======================================================================================================================
# Environment
# ======================================================================================================================


def environment_seeds(seed: int, num_envs: int, purpose: Literal["training", "evaluation"]) -> list[int]:
    """One seed per environment, unrelated between run seeds and between training and evaluation.

    envpool gives environment i the seed s + i where it gets an integer s, so that the runs of neighbouring seeds
    would share all environments but one.
    """
    # DEVIATION: lists of unrelated seeds; public PQN scripts pass one integer, and their seeds 1 and 2 share games.
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(["training", "evaluation"].index(purpose),))
    return [int(word) for word in sequence.generate_state(num_envs) >> 1]  # 31 bits: envpool's seeds are signed


def make_envs(args: Args, seeds: list[int]):
    """Atari environments in one envpool, one per seed; 84 x 84 grey frames, the last 4 stacked, 4 frames per step.

    It resets by itself, one step late: the row after every done ignores its action and returns reward 0 with the next
    game's (or life's) first observation. Such a reset row is no transition; whoever steps must leave it out.
    Full games: at most 27,000 steps, up to 30 no-ops and FIRE at the start, as in the old NoFrameskip-v4 protocol.
    """
    return envpool.make(
        args.env_id,
        env_type="gymnasium",
        num_envs=len(seeds),
        seed=seeds,
        num_threads=min(args.env_threads or os.cpu_count() or 1, len(seeds)),
        episodic_life=args.episodic_life,
        reward_clip=args.reward_clip,
        repeat_action_probability=args.repeat_action_probability,
        full_action_space=args.full_action_space,
    )


class EpisodeTracker:
    """Raw score and length of full games, whatever the learner sees (lives as ends, clipped rewards).

    `step` takes one step's arrays, all (N,), and returns the games that it ended as (environment, score, length).
    gymnasium's RecordEpisodeStatistics would count lives as games and clipped rewards as scores.
    """

    def __init__(self, num_envs: int):
        self.score = np.zeros(num_envs)
        self.length = np.zeros(num_envs, dtype=np.int64)  # [steps]

    def step(self, raw_reward, reset_row, game_over, truncated) -> list[tuple[int, float, int]]:
        self.score += raw_reward
        self.length += ~reset_row
        finished = [(int(i), float(self.score[i]), int(self.length[i])) for i in np.flatnonzero(game_over | truncated)]
        for i, _, _ in finished:
            self.score[i], self.length[i] = 0.0, 0
        return finished


# ======================================================================================================================
# Network
# ======================================================================================================================


def orthogonal(layer):
    """The layer itself, weights orthogonal with gain sqrt(2), bias zero."""
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    nn.init.zeros_(layer.bias)
    return layer


class ResidualTrunk(nn.Module):
    """Blocks x <- ReLU(x + LN(W2 ReLU(LN(W1 x)))) + g from x = g: every block sees the features g again.

    Multi-skip residual trunk of Castanyer et al. 2025, arXiv 2506.15544. (B, 512) -> (B, 512)
    """

    def __init__(self, num_blocks: int, width: int = 512):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                orthogonal(nn.Linear(width, width)), nn.LayerNorm(width), nn.ReLU(),
                orthogonal(nn.Linear(width, width)), nn.LayerNorm(width),
            )
            for _ in range(num_blocks)
        )  # fmt: skip

    def forward(self, g):
        x = g
        for block in self.blocks:
            x = F.relu(x + block(x)) + g
        return x


class QNetwork(nn.Module):
    """Q(s, .) of the last 4 frames: (B, 4, 84, 84) uint8 -> (B, A) float32.

    base: three convolutions and a hidden layer of 512. large, xlarge: twice the channels, and 5 or 10 residual blocks
    behind the hidden layer. LayerNorm before every ReLU (over C x H x W on the maps) takes the target network's place.
    """

    def __init__(self, num_actions: int, network: Literal["base", "large", "xlarge"] = "base"):
        super().__init__()
        c1, c2, c3 = (32, 64, 64) if network == "base" else (64, 128, 128)
        self.features = nn.Sequential(
            orthogonal(nn.Conv2d(4, c1, 8, stride=4)), nn.LayerNorm([c1, 20, 20]), nn.ReLU(),
            orthogonal(nn.Conv2d(c1, c2, 4, stride=2)), nn.LayerNorm([c2, 9, 9]), nn.ReLU(),
            orthogonal(nn.Conv2d(c2, c3, 3, stride=1)), nn.LayerNorm([c3, 7, 7]), nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(c3 * 7 * 7, 512)), nn.LayerNorm(512),
        )  # fmt: skip
        self.trunk = nn.ReLU() if network == "base" else ResidualTrunk({"large": 5, "xlarge": 10}[network])
        # DEVIATION: no LayerNorm on the Q outputs, which the release has in its larger networks: outputs of fixed mean
        # and spread cannot say that all actions are equally good, nor how good the state is.
        self.q_values = orthogonal(nn.Linear(512, num_actions))
        self.to(memory_format=torch.channels_last)  # faster to train on a CPU

    def forward(self, obs):
        obs = obs.to(memory_format=torch.channels_last) / 255.0
        return self.q_values(self.trunk(self.features(obs)))


# ======================================================================================================================
# PQN
# ======================================================================================================================


def epsilon_at(step: int, start_e: float, end_e: float, duration: float) -> float:
    """Exploration rate at a step: linear from start_e to end_e over `duration` steps, then constant."""
    return start_e + (end_e - start_e) * min(step / duration, 1.0)


def q_lambda_targets(rewards, next_values, terminal, truncated, gamma: float, q_lambda: float):
    """Regression targets G of a rollout, computed backwards (Gallici et al. 2025; Peng's Q(lambda)).

        G_t = r_t                                                         if step t ended the game or a life
        G_t = r_t + gamma * V_{t+1}                                       if the time limit cut it, or in the last row
        G_t = r_t + gamma * (lambda * G_{t+1} + (1 - lambda) * V_{t+1})   otherwise

    rewards      (T, N) float
    next_values  (T, N) float, V_{t+1} = max_a Q of the observation that step t returned (at an end: the true last one)
    terminal     (T, N) bool; wins where truncated is set too
    truncated    (T, N) bool
    returns      (T, N) float. Rows after an end start afresh: nothing leaks back across it.

    Exploratory actions do not cut the trace. Compare mttga/purejaxql purejaxql/pqn_atari.py.
    """
    # DEVIATION: bootstraps where the time limit cut a game; scripts for gym's old single `done` see a game over.
    discount = gamma * ~terminal  # (T, N)
    trace = torch.zeros_like(rewards)  # (T, N) weight of G_{t+1}; V_{t+1} has the rest
    trace[:-1] = q_lambda * ~(terminal | truncated)[:-1]
    targets = torch.empty_like(rewards)
    target = next_values[-1]  # of no weight: there is no row after the last
    for t in reversed(range(len(rewards))):
        target = rewards[t] + discount[t] * torch.lerp(next_values[t], target, trace[t])
        targets[t] = target
    return targets


def minibatches(num_rows: int, epochs: int, num_minibatches: int, generator: torch.Generator):
    """Row indices of every minibatch of every epoch: shuffled anew each epoch, sizes equal or one row apart."""
    for _ in range(epochs):
        order = torch.randperm(num_rows, generator=generator, device=generator.device)
        yield from order.tensor_split(num_minibatches)


def td_loss(q_values, actions, targets, valid):
    """Mean squared error of Q(s, a) to its target over the valid rows, and their mean Q(s, a); 0 where none is valid.

    q_values (B, A) float, actions (B,) int64, targets (B,) float, valid (B,) float, 0 or 1 -> two scalars
    """
    # DEVIATION: reset rows weigh nothing; in public PQN scripts they are learnt from like transitions.
    q_taken = q_values.gather(1, actions.unsqueeze(1)).squeeze(1)
    num_valid = valid.sum().clamp(min=1.0)
    loss = (valid * (q_taken - targets) ** 2).sum() / num_valid
    return loss, (valid * q_taken.detach()).sum() / num_valid


# ======================================================================================================================
# Batch
# ======================================================================================================================


@torch.no_grad()
def greedy_actions(q_network: nn.Module, obs):
    """argmax_a Q(s, a) of M states: (M, 4, 84, 84) uint8 -> (M,) int64."""
    return q_network(obs).argmax(dim=1)


def behavioral_divergence(actions_before, actions_after) -> float:
    """delta, the share of states whose greedy action an update has changed, in [0, 1] (Park 2026, eq. 3).

    actions_before, actions_after: (M,) int64, greedy actions of the same states. Known as policy churn since
    Schaul et al. 2022, arXiv 2206.00730. Compare daisophila/ABS algos/pqn_atari_envpool_ours.py.
    """
    return (actions_before != actions_after).float().mean().item()


# ======================================================================================================================
# Training
# ======================================================================================================================


def train(args: Args) -> dict:
    """Trains, evaluates and saves one agent in a new run directory.

    Returns run_dir, global_step [steps], gradient_steps, rollout_length [steps per environment], episodic_return
    (mean raw score of the last 100 full games; nan before the first) and eval_return (nan without evaluation).
    """
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = torch.Generator(device).manual_seed(args.seed)  # exploration and shuffling
    measuring_rng = torch.Generator(device).manual_seed(args.seed)  # of its own: measuring never changes the training
    announce(args, device)

    N = args.num_envs
    shortest, longest = args.rollout_lengths()
    with (
        contextlib.closing(make_envs(args, environment_seeds(args.seed, N, "training"))) as envs,
        RunLog(args, Path(__file__).stem) as log,
    ):
        num_actions = int(envs.action_space.n)
        q_network = QNetwork(num_actions, args.network).to(device)
        # foreach: at minibatches of 32, the CPU's default loop over parameters takes as long as the gradient itself.
        optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate, foreach=True)

        # Storage, allocated once at the longest rollout. What the network reads lives on its device, what the
        # environments write on the host. Row T of obs and values is the observation that the last step returned.
        obs = torch.zeros((longest + 1, N, 4, 84, 84), dtype=torch.uint8, device=device)  # (T+1, N, 4, 84, 84) uint8
        actions = torch.zeros((longest, N), dtype=torch.int64, device=device)  # (T, N) int64
        values = torch.zeros((longest + 1, N), device=device)  # (T+1, N) float32, max_a Q(s, a)
        rewards = torch.zeros((longest, N))  # (T, N) float32
        terminal, truncated, reset_row = (torch.zeros((longest, N), dtype=torch.bool) for _ in range(3))  # (T, N) bool

        length = float(shortest)
        divergences = deque(maxlen=args.divergence_window)
        episodes, recent_scores, num_games = EpisodeTracker(N), deque(maxlen=100), 0
        global_step = gradient_steps = 0
        decay_steps = args.exploration_fraction * args.total_timesteps
        done = np.zeros(N, dtype=bool)
        obs[0] = torch.from_numpy(envs.reset()[0])

        for iteration in itertools.count(1):
            T = round(length)
            if global_step + T * N > args.total_timesteps:
                break

            # 1 collect: epsilon-greedy, with fixed parameters; one transfer each way per step
            finished = []  # (environment, raw score, length) of the games that end in this rollout
            for t in range(T):
                epsilon = epsilon_at(global_step, args.start_e, args.end_e, decay_steps)
                with torch.no_grad():
                    values[t], greedy = q_network(obs[t]).max(dim=1)
                explore = torch.rand(N, generator=rng, device=device) < epsilon
                random_actions = torch.randint(num_actions, (N,), generator=rng, device=device)
                actions[t] = torch.where(explore, random_actions, greedy)
                next_obs, reward, terminated, cut, info = envs.step(actions[t].cpu().numpy())

                game_over = info["terminated"].astype(bool)  # also on the very step of the time limit
                obs[t + 1] = torch.from_numpy(next_obs)
                rewards[t] = torch.from_numpy(reward)
                terminal[t] = torch.from_numpy(terminated | game_over)
                truncated[t] = torch.from_numpy(cut)
                reset_row[t] = torch.from_numpy(done)
                finished += episodes.step(info["reward"], done, game_over, cut)
                done = terminated | cut
                global_step += N

            # 2 targets: once per rollout; V_{t+1} is in place already, but for the last row
            with torch.no_grad():
                values[T] = q_network(obs[T]).max(dim=1).values
            targets = q_lambda_targets(
                *(x[:T].to(device) for x in (rewards, values[1:], terminal, truncated)), args.gamma, args.q_lambda
            )
            flat_obs, flat_actions, flat_targets = obs[:T].flatten(0, 1), actions[:T].flatten(), targets.flatten()
            valid = (~reset_row[:T]).float().flatten().to(device)  # (B,) 0 for reset rows: they are no transitions

            # 3 learn, remembering the greedy actions on some states of the rollout if divergence is to be measured
            measure = iteration % args.divergence_interval == 0
            if measure:
                # DEVIATION: states of valid rows only; a reset row shows a game that has ended, where no action counts.
                states = valid.nonzero().squeeze(1)
                states = states[torch.randperm(len(states), generator=measuring_rng, device=device)]
                states = states[: args.divergence_states]  # (M,) rows, without replacement
                actions_before = greedy_actions(q_network, flat_obs[states])
            epochs = args.update_epochs
            loss_sum, q_sum = torch.zeros(2, device=device)  # stay there: the loop reads nothing back from the device
            for rows in minibatches(T * N, epochs, args.num_minibatches, rng):
                q_values = q_network(flat_obs[rows])
                loss, mean_q = td_loss(q_values, flat_actions[rows], flat_targets[rows], valid[rows])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
                optimizer.step()
                loss_sum, q_sum = loss_sum + loss.detach(), q_sum + mean_q
            updates = epochs * args.num_minibatches
            gradient_steps += updates

            # 4 measure and adapt
            if measure:
                actions_after = greedy_actions(q_network, flat_obs[states])
                divergences.append(behavioral_divergence(actions_before, actions_after))
            divergence_mean = sum(divergences) / len(divergences) if divergences else None

            # 5 log, and carry the last observation over into the next rollout
            recent_scores.extend(score for _, score, _ in finished)
            num_games += len(finished)
            log.write(
                global_step,
                {
                    "charts/episodic_return": np.mean([score for _, score, _ in finished]) if finished else None,
                    "charts/episodic_length": np.mean([steps for _, _, steps in finished]) if finished else None,
                    "charts/games": num_games,
                    "charts/epsilon": epsilon,
                    "charts/learning_rate": optimizer.param_groups[0]["lr"],
                    "charts/gradient_steps": gradient_steps,
                    "losses/td_loss": loss_sum.item() / updates,
                    "losses/q_values": q_sum.item() / updates,
                    "abs/behavioral_divergence": divergences[-1] if measure else None,
                    "abs/divergence_mean": divergence_mean,
                    "abs/rollout_length": T,
                    "abs/batch_size": T * N,
                    "abs/minibatch_size": T * N / args.num_minibatches,
                    "abs/update_epochs": epochs,
                },
                recent_return=np.mean(recent_scores) if recent_scores else math.nan,
            )
            obs[0] = obs[T]

        # Checkpoints, resuming and signals will have their place in this loop.
        save_model(log.run_dir / "model.pt", q_network, args)
        report = evaluate_and_save(q_network, args, log) if args.eval_episodes else {"mean": math.nan}
    return {
        "run_dir": str(log.run_dir),
        "global_step": global_step,
        "gradient_steps": gradient_steps,
        "rollout_length": length,
        "episodic_return": float(np.mean(recent_scores)) if recent_scores else math.nan,
        "eval_return": report["mean"],
    }


# ######################################################################################################################
# Part two: plumbing. Nothing below is needed to understand the algorithm, and it is the same text in every script.
# ######################################################################################################################

# ======================================================================================================================
# Evaluation
# ======================================================================================================================


@torch.no_grad()
def evaluate(q_network: nn.Module, envs, num_envs: int, games_per_env: int, epsilon: float, seed: int) -> list[dict]:
    """Plays the same number of full games in each environment, greedily up to a share epsilon of random actions.

    Equal numbers, because the first games to finish over many environments are the short ones. Returns a dictionary per
    game: environment, score (raw), length [steps] and fingerprint, a checksum of its frames: equal games, equal prints.
    """
    device = next(q_network.parameters()).device
    num_actions = int(envs.action_space.n)
    random = np.random.default_rng(seed)
    tracker, games, fingerprints = EpisodeTracker(num_envs), [], [0] * num_envs
    games_left = np.full(num_envs, games_per_env)
    obs, done = envs.reset()[0], np.zeros(num_envs, dtype=bool)
    bar = tqdm(total=num_envs * games_per_env, desc="evaluation", unit="game", disable=not sys.stderr.isatty())
    with bar:
        while games_left.any():
            playing = np.flatnonzero(games_left)
            for i in playing[~done[playing]]:
                fingerprints[i] = zlib.crc32(obs[i, -1], fingerprints[i])
            actions = np.zeros(num_envs, dtype=np.int64)
            actions[playing] = greedy_actions(q_network, torch.from_numpy(obs[playing]).to(device)).cpu().numpy()
            explore = random.random(num_envs) < epsilon
            actions[explore] = random.integers(num_actions, size=explore.sum())
            obs, _, terminated, truncated, info = envs.step(actions)
            for i, score, length in tracker.step(info["reward"], done, info["terminated"].astype(bool), truncated):
                if games_left[i]:
                    games.append({"environment": i, "score": score, "length": length, "fingerprint": fingerprints[i]})
                    games_left[i] -= 1
                    bar.update()
                    if bar.disable and len(games) % 10 == 0:
                        print(f"{len(games)} of {num_envs * games_per_env} games", file=sys.stderr)
                fingerprints[i] = 0
            done = terminated | truncated
    return games


def bootstrap_interval(scores, groups, draws: int = 10_000) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean score, resampling whole groups of equal games; None for one group.

    Without sticky actions at most 30 openings exist, so that greedy games repeat, and repeats are no new evidence.
    """
    _, groups = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(groups, scores), np.bincount(groups)
    if len(sums) < 2:
        return None
    random, means = np.random.default_rng(0), np.empty(draws)
    for draw in range(draws):
        picks = random.integers(len(sums), size=len(sums))
        means[draw] = sums[picks].sum() / counts[picks].sum()
    return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]


def evaluate_and_save(q_network: nn.Module, args, log: "RunLog") -> dict:
    """The final evaluation: `eval_episodes` games under training's options, on seeds of their own; writes eval.json."""
    # DEVIATION: equal games per environment; the release averages the first 100 to finish, a bias to short games.
    num_envs = min(10, args.eval_episodes)
    seeds = environment_seeds(args.seed, num_envs, "evaluation")
    log.say(f"evaluating: {args.eval_episodes} full games, {num_envs} environments, epsilon {args.eval_epsilon:g} ...")
    with contextlib.closing(make_envs(args, seeds)) as envs:
        games = evaluate(q_network, envs, num_envs, args.eval_episodes // num_envs, args.eval_epsilon, args.seed)
    scores, prints = [game["score"] for game in games], [game["fingerprint"] for game in games]
    report = {
        "env_id": args.env_id,
        "num_games": len(games),
        "distinct_games": len(set(prints)),
        "mean": float(np.mean(scores)),
        "median": float(np.median(scores)),
        "std": float(np.std(scores)),
        "interval_95": bootstrap_interval(scores, prints),
        "protocol": {
            "training_steps": log.step,
            "epsilon": args.eval_epsilon,
            "episodic_life": args.episodic_life,
            "longest_game_steps": 27_000,
            "environments": num_envs,
            "games_per_environment": args.eval_episodes // num_envs,
            "repeat_action_probability": args.repeat_action_probability,
            "full_action_space": args.full_action_space,
            "interval": "percentile bootstrap of the mean over distinct games",
        },
        "seeds": seeds,
        "games": games,
    }
    (log.run_dir / "eval.json").write_text(json.dumps(report, indent=1) + "\n")
    log.write_evaluation(report["mean"])
    interval = "none" if report["interval_95"] is None else "{:.1f} to {:.1f}".format(*report["interval_95"])
    log.say(
        f"evaluation: mean raw score {report['mean']:.1f}, 95 % interval {interval}; "
        f"{report['distinct_games']} of {len(games)} games are distinct"
    )
    return report


# ======================================================================================================================
# Checkpoint
# ======================================================================================================================


def save_model(path: Path, q_network: nn.Module, args) -> None:
    """Writes the network and what is needed to rebuild it; torch.load(path, weights_only=True) reads it.

    Written beside its place and renamed, so that a crash leaves the whole file or none.
    """
    model = {
        "env_id": args.env_id,
        "network": args.network,
        "num_actions": q_network.q_values.out_features,
        "state_dict": q_network.state_dict(),
    }
    torch.save(model, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


# ======================================================================================================================
# Logging and progress
# ======================================================================================================================


class RunLog:
    """A run directory and all that is written there or shown: args.json, metrics.csv, TensorBoard, W&B, progress.

    A bar on a terminal; elsewhere a plain line every ten seconds. A context manager: every exit path closes the files.
    """

    def __init__(self, args, script: str):
        name = f"{args.env_id}__{script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
        self.run_dir = Path(args.runs_dir) / name
        self.run_dir.mkdir(parents=True)
        (self.run_dir / "args.json").write_text(json.dumps(asdict(args), indent=1) + "\n")
        self.wandb = None
        if args.track:
            import wandb

            self.wandb = wandb.init(project="adaptive-batch-scaling", name=name, config=asdict(args))
        self.total, self.step = args.total_timesteps, 0
        self.csv_file = (self.run_dir / "metrics.csv").open("w", newline="")
        self.csv = None  # begins with the first line, whose keys are the columns
        self.events = SummaryWriter(str(self.run_dir))
        self.on_cpu = not (args.cuda and torch.cuda.is_available())
        self.bar = tqdm(total=self.total, unit="step", unit_scale=True, smoothing=0.02) if sys.stderr.isatty() else None
        self.say(f"run directory: {self.run_dir}")
        self.start = self.last_line = time.monotonic()
        self.marks = deque(maxlen=21)  # (time, step) at the ends of iterations; the first iteration is the warm-up

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.bar is not None:
            self.bar.close()
        self.csv_file.close()
        self.events.close()
        if self.wandb is not None:
            self.wandb.finish()

    def say(self, text: str) -> None:
        """Prints a line without tearing the progress bar."""
        tqdm.write(text, file=sys.stderr)

    def write(self, step: int, metrics: dict, recent_return: float) -> None:
        """Writes one iteration's metrics everywhere, None as an empty cell or not at all; adds speed and wall-clock."""
        now = time.monotonic()
        self.marks.append((now, step))
        (then, earlier), speed = self.marks[0], None
        if len(self.marks) > 1:
            speed = (step - earlier) / (now - then)
        metrics = {**metrics, "charts/SPS": speed, "charts/wall_clock": now - self.start}
        if self.csv is None:
            self.csv = csv.DictWriter(self.csv_file, ["global_step", *metrics])
            self.csv.writeheader()
        self.csv.writerow({"global_step": step, **metrics})
        self.csv_file.flush()
        present = {tag: value for tag, value in metrics.items() if value is not None}
        for tag, value in present.items():
            self.events.add_scalar(tag, value, step)
        if self.wandb is not None:
            self.wandb.log(present, step=step)
        self.show_progress(step, metrics, recent_return, speed, now)

    def show_progress(self, step, metrics, recent_return, speed, now) -> None:
        """Moves the bar, or prints a line if the last is ten seconds old; says early on how long a CPU will take."""
        if speed and len(self.marks) == 2 and self.on_cpu and (self.total / speed) > 7200:
            self.say(
                f"no GPU in use: at {speed:.0f} steps/s this run takes about {self.total / speed / 3600:.0f} hours; "
                'the README has a command of laptop size under "On a laptop"'
            )
        divergence = metrics["abs/divergence_mean"]
        state = {
            "return": "-" if math.isnan(recent_return) else f"{recent_return:.1f}",
            "divergence": "-" if divergence is None else f"{divergence:.2f}",
            "T": metrics["abs/rollout_length"],
            "SPS": f"{speed or 0:.0f}",
        }
        if self.bar is not None:
            self.bar.set_postfix(state, refresh=False)
            self.bar.update(step - self.step)
        elif now - self.last_line >= 10 and speed:
            self.last_line = now
            left = tqdm.format_interval((self.total - step) / speed)
            shown = "  ".join(f"{key} {value}" for key, value in state.items())
            self.say(f"{step:,}/{self.total:,} steps ({step / self.total:.0%})  {shown}  left {left}")
        self.step = step

    def write_evaluation(self, mean: float) -> None:
        """Adds the evaluation's mean raw score to TensorBoard and W&B at the last step."""
        self.events.add_scalar("eval/return", mean, self.step)
        if self.wandb is not None:
            self.wandb.log({"eval/return": mean}, step=self.step)


def announce(args, device: torch.device) -> None:
    """Start-up lines: what runs where, and what the next seconds are spent on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{args.env_id}, {args.network} network, seed {args.seed}, {args.total_timesteps:,} steps on {where}\n"
        f"building {args.num_envs} environments, about 0.1 s each ...",
        file=sys.stderr,
        flush=True,
    )


# ======================================================================================================================
# Checking the command line
# ======================================================================================================================

LIMITS = (  # (flags, what is allowed, test); flags that a script lacks are passed over
    (
        "num_envs base_num_steps num_minibatches update_epochs divergence_interval divergence_states "
        "divergence_window divergence_warmup",
        "1 to 1000000",
        lambda x: 1 <= x <= 10**6,
    ),
    # 2 or more: a rollout of one step may hold nothing but reset rows, and then no state to measure divergence on.
    ("num_steps num_steps_min", "2 to 1000000", lambda x: 2 <= x <= 10**6),
    ("num_steps_max eval_episodes", "0 to 1000000", lambda x: 0 <= x <= 10**6),
    ("env_threads torch_threads", "0 to 1024", lambda x: 0 <= x <= 1024),
    ("total_timesteps", "1 to 1e12", lambda x: 1 <= x <= 10**12),
    ("seed", "0 to 4294967295", lambda x: 0 <= x < 2**32),
    ("learning_rate max_grad_norm", "a finite number above 0", lambda x: 0 < x < math.inf),
    ("gamma q_lambda start_e end_e eval_epsilon repeat_action_probability batch_ema", "0 to 1", lambda x: 0 <= x <= 1),
    ("exploration_fraction", "above 0, at most 1", lambda x: 0 < x <= 1),
    ("divergence_low divergence_high", "between 0 and 1, both excluded", lambda x: 0 < x < 1),
)


def refuse(message: str) -> NoReturn:
    """Ends the program as a wrong command line does: one line on stderr, exit code 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def flag(name: str) -> str:
    """The command line's spelling of a field of Args."""
    return "--" + name.replace("_", "-")


def whole_number(text: str) -> int:
    """20000000, 20_000_000 or 2e7."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is not a whole number") from None
        return int(number)


def parse_args(argv: list[str] | None):
    """Args from the command line; what tyro refuses ends with its message on one line and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    switches = {field.name for field in fields(Args) if field.type is bool}
    for this, following in itertools.pairwise([*argv, "-"]):
        given, has_value = this.partition("=")[:2]
        name = given.replace("_", "-").removeprefix("--no-").removeprefix("--").replace("-", "_")
        if given.startswith("--") and name in switches and (has_value or not following.startswith("-")):
            shown = this if has_value else f"{this} {following}"
            refuse(f"{shown}: a switch takes no value; write {flag(name)} or {flag('no_' + name)}")
    if "--cuda" in argv and not torch.cuda.is_available():
        refuse("--cuda: torch finds no GPU here; leave the flag away to run on the CPU")

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(type_info: tyro.constructors.PrimitiveTypeInfo):
        if type_info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda texts: whole_number(texts[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    box = io.StringIO()  # tyro draws its errors as a box of many lines
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(Args, args=argv, registry=registry, description=__doc__.splitlines()[0])
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        lines = [re.sub("[│╭╮╰╯─]|-{4,}", "", line).strip() for line in box.getvalue().splitlines()]
        below_title = itertools.dropwhile(lambda line: not line, lines[1:])
        message = " ".join(itertools.takewhile(bool, below_title))
        near = [line.split()[0] for line in lines if line.startswith("--")] if "Unrecognized" in message else []
        refuse(message + (f"; did you mean {' or '.join(near)}?" if near else "") + " (--help lists all flags)")


def check_args(args) -> None:
    """Refuses values and combinations that cannot work, before envpool (which may crash on them) sees any."""
    for names, allowed, test in LIMITS:
        for name in names.split():
            if hasattr(args, name) and not test(getattr(args, name)):
                refuse(f"{flag(name)} {getattr(args, name)}: allowed is {allowed}")

    games = [name for name, (module, *_) in envpool.registration.registry.specs.items() if module == "envpool.atari"]
    if args.env_id not in games:
        plain = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-ram)?(-v\d+)?$", "", args.env_id).lower()
        by_name = {game.removesuffix("-v5").lower(): game for game in games}
        near = [by_name[name] for name in difflib.get_close_matches(plain, by_name, n=3, cutoff=0.7)]
        hint = f"did you mean {' or '.join(near)}?" if near else "allowed are envpool's Atari games, such as Pong-v5"
        refuse(f"--env-id {args.env_id}: {hint}")

    shortest, longest = args.rollout_lengths()
    if shortest > longest:
        refuse(f"--num-steps-min {shortest}: more than the longest rollout, {longest} steps (--num-steps-max)")
    rows = shortest * args.num_envs
    if rows < 2 * args.num_minibatches:
        refuse(f"--num-minibatches {args.num_minibatches}: each needs two rows or more, and the shortest rollout has "
               f"{rows} ({shortest} steps x {args.num_envs} environments); allowed is up to {rows // 2}")  # fmt: skip
    if args.total_timesteps < rows:
        refuse(f"--total-timesteps {args.total_timesteps}: less than one rollout, which is {rows} steps "
               f"({shortest} x {args.num_envs} environments)")  # fmt: skip
    if hasattr(args, "divergence_low") and args.divergence_low >= args.divergence_high:
        refuse(f"--divergence-low {args.divergence_low}: must be below --divergence-high {args.divergence_high}")
    if hasattr(args, "divergence_warmup") and args.divergence_warmup > args.divergence_window:
        refuse(f"--divergence-warmup {args.divergence_warmup}: the batch would never adapt; "
               f"allowed is up to --divergence-window {args.divergence_window}")  # fmt: skip
    if args.eval_episodes > 10 and args.eval_episodes % 10:
        refuse(f"--eval-episodes {args.eval_episodes}: games are shared out equally over 10 environments; "
               f"allowed are 0 to 10 and multiples of 10, such as {args.eval_episodes // 10 * 10}")  # fmt: skip
    wandb = importlib.util.find_spec("wandb")
    if args.track and (wandb is None or wandb.origin is None):  # no origin: a mere folder of that name
        refuse("--track: Weights & Biases is not installed; pip install wandb, or leave the flag away")
    needed = (longest + 1) * args.num_envs * 4 * 84 * 84 / 2**30  # [GiB]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if args.cuda and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if needed > memory:
        refuse(f"--num-envs {args.num_envs}: rollouts of up to {longest} steps take {needed:,.0f} GiB, and there are "
               f"{memory:,.0f}; take fewer environments or shorter rollouts")  # fmt: skip
    if not args.runs_dir:
        refuse("--runs-dir: allowed is the name of a directory, not an empty one")
    try:
        Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--runs-dir {args.runs_dir}: cannot be made: {error.strerror}")
    if not os.access(args.runs_dir, os.W_OK | os.X_OK):
        refuse(f"--runs-dir {args.runs_dir}: cannot be written to; choose a directory of yours")


# ======================================================================================================================
# Main
# ======================================================================================================================


def main(argv: list[str] | None = None) -> dict:
    """Runs the script for a command line (sys.argv by default); returns what `train` returns."""
    args = parse_args(argv)
    check_args(args)
    try:
        result = train(args)
    except KeyboardInterrupt:
        print(f"\nstopped; the metrics up to here are kept under {args.runs_dir}", file=sys.stderr)
        raise SystemExit(130) from None
    print(
        f"{result['global_step']:,} steps, {result['gradient_steps']:,} gradient steps; mean raw score of the last 100 "
        f"training games {result['episodic_return']:.1f}, of the evaluation {result['eval_return']:.1f}\n"
        f"tensorboard --logdir {args.runs_dir}",
        file=sys.stderr,
    )
    return result


if __name__ == "__main__":
    main()
