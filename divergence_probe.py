# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "numpy==2.4.6",
#     "gymnasium==1.4.0",
#     "ale-py==0.12.1",
#     "envpool==1.2.5",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
#     "matplotlib==3.11.2",
#     "pillow==13.0.0",
# ]
# ///
"""The instrument beside Adaptive Batch Scaling (ABS): how, when and why the policy shifts while PQN learns Atari.

ABS (Park, ICML 2026, arXiv 2605.21557) rests on three claims that can be measured: the policy changes less and less as
training goes on; from one and the same point, learning on a larger batch changes it less; and its measure of change,
Behavioral Divergence, is real. This script trains PQN with a constant batch (pqn_fixed_atari.py, bit for bit) and
measures on the way, on copies, with environments and random numbers of its own, so that the training never notices:

    divergence  of two policies, on the rollout's states and on a fixed set of states from random play:
                churn, the share of states with another greedy action (Park 2026, eq. 3);
                total variation of the epsilon-greedy policies; Jensen-Shannon distance of softmax policies;
                value gap, mean of max_a Q_after(s, a) - Q_after(s, a_before), in standard deviations of Q.
                Between the policies before and after one update; K iterations ago and now; an early one and each.
    branches    from one point, learn on the first L steps of one long rollout, for several L, with the minibatches and
                epochs that ABS would use there; divergence and TD error on states that none of them has learnt from.
    noise       gradient noise scale B = tr(S) / |G|^2, S the covariance of one row's gradient, G their mean
                (McCandlish et al. 2018, arXiv 1812.06162, appendix A), beside the batch that ABS would choose.
    twins       actions that do the same: ale-py's emulator tries every action at a state and compares the screens after
                the step and 16 no-op frames later. Flips between twins change nothing; "effective churn" leaves them
                out.

Shapes: T steps per rollout, N environments, A actions, B = T * N rows, M measured states.
A "step" is one agent decision, a "frame" one emulator frame; 1 step = 4 frames.

Departures from the public code carry the mark DEVIATION below and stand in the README.

    python divergence_probe.py --env-id Pong-v5
    python divergence_probe.py --checkpoint benchmark/results/pong_two_hours/model.pt  one point, without training

Measured on Pong: benchmark/results/probe/, and "What the probe shows" in the README.
"""

import contextlib
import copy
import csv
import ctypes
import difflib
import errno
import fcntl
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import zipfile
import zlib
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import envpool
import matplotlib
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py import Action, ALEInterface, LoggerMode, roms
from PIL import Image, ImageDraw, ImageFont
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
    """E, epochs over each rollout; in the adaptive script up to the base rollout length, and more above it (eq. 10)"""
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

    # --- Batch of the training
    num_steps: int = 32
    """T, rollout length [steps per environment]; the batch is T x N"""

    # --- Probe
    checkpoint: str = ""
    """a run directory, checkpoint.pt or model.pt to measure around, without training"""
    probe_interval: int = 50
    """iterations from one series of measurements to the next"""
    probe_window: int = 50
    """K, iterations of the longer divergence; after the first K the early policy is frozen (paper: 50)"""
    probe_states: int = 512
    """M, most states of each set: of the rollout, of random play, and held out from the branches"""
    opening_steps: int = 512
    """steps that the probe's own games are played at random before they count [steps per environment]"""
    branch_interval: int = 200
    """iterations from one set of branches and twins to the next; a multiple of the probe interval"""
    probe_lengths: tuple[int, ...] = (16, 32, 64, 128)
    """rollout lengths to branch into [steps per environment]"""
    noise_parts: int = 16
    """most parts of the rollout, each of whole environments, whose gradients give the noise scale"""
    noise_ema: float = 0.9
    """weight of the old estimate in the smoothed numerator and denominator of the noise scale"""
    twin_states: int = 200
    """about so many states, of 4 games, in which the emulator tries every action; 0 tries none"""

    # --- The batch that ABS would choose from the same divergence, measured every probe interval
    num_steps_min: int = 16
    """T_min, shortest rollout, and the first one [steps per environment] (paper: 16)"""
    num_steps_max: int = 0
    """T_max, longest rollout [steps per environment]; 0 is the paper's: 64 for base, 128 for large and xlarge"""
    base_num_steps: int = 32
    """rollout length from which epochs grow in proportion [steps per environment] (eq. 10)"""
    divergence_low: float = 0.05
    """divergence at which the rollout is longest (eq. 4)"""
    divergence_high: float = 0.95
    """divergence at which the rollout is shortest (eq. 4)"""
    divergence_warmup: int = 10
    """measurements before the rollout first adapts (release: 10)"""
    batch_ema: float = 0.9
    """weight of the old rollout length in its moving average (eq. 9)"""
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
    bf16: bool = False
    """the network's features in bfloat16, its Q values and all else in float32; for processors made for it"""
    torch_threads: int = 0
    """torch's CPU threads; 0 leaves torch's own choice"""
    micro_batch_size: int = 0
    """most rows to learn from at once: a minibatch's gradient is summed over such parts; 0 is 128, on a GPU 4096"""
    eval_episodes: int = 100
    """full games of the final evaluation, shared out equally over 10 environments; 0 skips it"""
    eval_epsilon: float = 0.0
    """share of random actions in the evaluation"""
    capture_video: bool = False
    """film the first evaluation game, replayed in ale-py's emulator and compared with it at every step"""
    evaluate: str = ""
    """a run directory, checkpoint.pt or model.pt to evaluate, without training"""
    checkpoint_interval: int = 100_000
    """most steps that a crash can cost (whole rollouts); 0: a checkpoint only when the run ends or is stopped"""
    resume: str = ""
    """a run directory or its checkpoint.pt to go on with, with its own flags; --total-timesteps may be raised"""
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


def environment_seeds(
    seed: int, num_envs: int, purpose: Literal["training", "evaluation", "probe"], first_step: int = 0
) -> list[int]:
    """One seed per environment, unrelated between run seeds, between training and evaluation, and after a resume.

    envpool gives environment i the seed s + i where it gets an integer s, so that the runs of neighbouring seeds
    would share all environments but one.
    """
    # DEVIATION: lists of unrelated seeds; public PQN scripts pass one integer, and their seeds 1 and 2 share games.
    key = ["training", "evaluation", "probe"].index(purpose)
    sequence = np.random.SeedSequence(entropy=[seed, first_step], spawn_key=(key,))
    return [int(word) for word in sequence.generate_state(num_envs) >> 1]  # 31 bits: envpool's seeds are signed


def make_envs(args: Args, seeds: list[int]):
    """Atari environments in one envpool, one per seed; 84 x 84 grey frames, the last 4 stacked, 4 frames per step.

    It resets by itself, one step late: the row after every done ignores its action and returns reward 0 with the next
    game's (or life's) first observation. Such a reset row is no transition; whoever steps must leave it out.
    Full games: at most 27,000 steps, up to 30 no-ops and FIRE at the start, as in the old NoFrameskip-v4 protocol.
    What stands here and not in the call is envpool's default.
    """
    return envpool.make(
        args.env_id,
        env_type="gymnasium",
        num_envs=len(seeds),
        seed=seeds,
        num_threads=min(args.env_threads or cores_per_rank(), len(seeds)),
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
        self.score, self.lives = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self.length = np.zeros(num_envs, dtype=np.int64)  # [steps]

    def step(self, raw_reward, reset_row, game_over, truncated, lives) -> list[tuple[int, float, int]]:
        self.score += raw_reward
        self.length += ~reset_row
        # A game may end in the no-ops after a lost life. envpool begins the next one without a word, but lives rise.
        unseen = reset_row & (lives > self.lives) & (self.length > 0)
        self.lives = lives.copy()
        ends = np.flatnonzero(game_over | truncated | unseen)
        finished = [(int(i), float(self.score[i]), int(self.length[i])) for i in ends]
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
                orthogonal(nn.Linear(width, width)), nn.LayerNorm(width), nn.ReLU(inplace=True),
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

    def __init__(self, num_actions: int, network: Literal["base", "large", "xlarge"] = "base", bf16: bool = False):
        super().__init__()
        self.num_actions, self.bf16 = num_actions, bf16
        c1, c2, c3 = (32, 64, 64) if network == "base" else (64, 128, 128)
        self.features = nn.Sequential(
            orthogonal(nn.Conv2d(4, c1, 8, stride=4)), nn.LayerNorm([c1, 20, 20]), nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(c1, c2, 4, stride=2)), nn.LayerNorm([c2, 9, 9]), nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(c2, c3, 3, stride=1)), nn.LayerNorm([c3, 7, 7]), nn.ReLU(inplace=True),
            nn.Flatten(),
            orthogonal(nn.Linear(c3 * 7 * 7, 512)), nn.LayerNorm(512),
        )  # fmt: skip
        self.trunk = nn.ReLU(inplace=True) if network == "base" else ResidualTrunk({"large": 5, "xlarge": 10}[network])
        # DEVIATION: no LayerNorm on the Q outputs, which the release has in its larger networks: outputs of fixed mean
        # and spread cannot say that all actions are equally good, nor how good the state is.
        self.q_values = orthogonal(nn.Linear(512, num_actions))
        self.to(memory_format=torch.channels_last)  # faster to train on a CPU

    def forward(self, obs):
        obs = obs.to(memory_format=torch.channels_last) / 255.0
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.trunk(self.features(obs))
        return self.q_values(features.float())  # 8 bits of bfloat16 would tell too few actions apart


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
        following = torch.lerp(next_values[t], target, trace[t])  # (1 - trace) * V + trace * G
        target = rewards[t] + discount[t] * following
        targets[t] = target
    return targets


def minibatches(num_rows: int, epochs: int, num_minibatches: int, generator: torch.Generator):
    """Row indices of every minibatch of every epoch: shuffled anew each epoch, sizes equal or one row apart."""
    for _ in range(epochs):
        order = torch.randperm(num_rows, generator=generator, device=generator.device)
        yield from order.tensor_split(num_minibatches)


def micro_batches(rows, largest: int):
    """A minibatch's rows in parts of at most `largest` rows, sizes equal or one apart; 0 is 128, on a GPU 4096.

    Its gradient is the sum of theirs. All rows at once cost memory, 0.8 MB each with the base network, and on a CPU
    time, since its caches are small.
    """
    largest = largest or (4096 if rows.is_cuda else 128)
    return rows.tensor_split(math.ceil(len(rows) / largest))


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


def rollout_length_target(
    divergence: float, length_min: int, length_max: int, divergence_low: float, divergence_high: float
) -> float:
    """Rollout length that suits a divergence: longest at divergence_low and below, logarithmic to the shortest at
    divergence_high and above [steps per environment] (Park 2026, eqs. 4 and 5)."""
    clipped = min(max(divergence, divergence_low), divergence_high)
    alpha = math.log(clipped / divergence_low) / math.log(divergence_high / divergence_low)
    return length_max - alpha * (length_max - length_min)


def adapt_rollout_length(length: float, target: float, ema: float, length_min: int, length_max: int) -> float:
    """Next rollout length, a moving average towards the target [steps per environment] (Park 2026, eq. 9)."""
    # DEVIATION: the length stays a float between updates; cut to an integer, as in the release, it sticks at 55 of 64.
    return min(max(ema * length + (1 - ema) * target, length_min), length_max)


def update_epochs_for(length: int, base_epochs: int, base_length: int) -> int:
    """Epochs over a rollout: from base_length on in proportion to it, rounded down, so that optimiser steps per
    environment step stay about constant (Park 2026, eq. 10)."""
    return max(base_epochs, base_epochs * length // base_length)


# ======================================================================================================================
# Divergence
# ======================================================================================================================


def total_variation(flipped, epsilon_before: float, epsilon_after: float, num_actions: int):
    """Total variation distance of the two epsilon-greedy policies, in each state.

    flipped (M,) bool, whether the greedy action differs -> (M,) float in [0, 1]. With A actions and one epsilon it is
    1 - epsilon where the greedy action has changed, and 0 elsewhere: its mean is (1 - epsilon) * churn. If epsilon has
    changed too, by d = |epsilon_before - epsilon_after|, it is

        d * (A - 1) / A                                              where the greedy action is the same
        1 - (epsilon_before + epsilon_after) / 2 + d * (A - 2) / (2 * A)    where it is another
    """
    d = abs(epsilon_before - epsilon_after)
    same = d * (num_actions - 1) / num_actions
    other = 1 - (epsilon_before + epsilon_after) / 2 + d * (num_actions - 2) / (2 * num_actions)
    return torch.where(flipped, other, same)


def jensen_shannon_distance(logits_before, logits_after):
    """Jensen-Shannon distance of two softmax policies, in each state: (M, A) twice -> (M,) in [0, 1].

    The square root of the divergence in bits (Endres and Schindelin 2003): a metric, 0 for equal policies, 1 for
    policies without an action in common.
    """
    log_p, log_q = (F.log_softmax(logits, dim=1) for logits in (logits_before, logits_after))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    divergence = ((log_p.exp() * (log_p - log_m)).sum(1) + (log_q.exp() * (log_q - log_m)).sum(1)) / 2
    return (divergence / math.log(2)).clamp(0, 1).sqrt()


def action_spread(q_values) -> float:
    """Standard deviation of Q over the actions of a state, root mean square over the states: (M, A) -> float.

    What the choice of an action is worth, whatever the value of the state.
    """
    return q_values.var(dim=1, correction=0).mean().sqrt().item()


def divergences(q_before, q_after, epsilon_before: float, epsilon_after: float) -> dict[str, float]:
    """All definitions of the distance between two policies, means over M states; q_before, q_after (M, A) float.

    churn            share of states with another greedy action (Park 2026, eq. 3)
    total_variation  of the epsilon-greedy policies
    js_distance      of softmax policies, each at the spread of its own Q as temperature: it knows how close a flip
                     was, and nothing of the scale of Q
    value_gap        max_a Q_after(s, a) - Q_after(s, a_before) over the spread of Q after: what it would cost, in the
                     eyes of the network after, to play on as before; 0 where the greedy action is the same
    """
    a_before, a_after = q_before.argmax(dim=1), q_after.argmax(dim=1)
    flipped = a_before != a_after
    # A state's value is no preference: advantages, in double precision, or equal policies come out 0.0003 apart.
    before, after = (q.double() - q.double().max(dim=1, keepdim=True).values for q in (q_before, q_after))
    gap = -after.gather(1, a_before.unsqueeze(1)).squeeze(1)
    spread_before, spread_after = (max(action_spread(q), 1e-30) for q in (before, after))  # 0: all actions alike
    return {
        "churn": behavioral_divergence(a_before, a_after),
        "total_variation": total_variation(flipped, epsilon_before, epsilon_after, q_after.shape[1]).mean().item(),
        "js_distance": jensen_shannon_distance(before / spread_before, after / spread_after).mean().item(),
        "value_gap": gap.mean().item() / spread_after,
    }


# ======================================================================================================================
# Gradient noise scale
# ======================================================================================================================


def gradient_noise(loss_of, parameters: list, parts: list) -> tuple[float, float]:
    """Unbiased estimates of tr(S) and |G|^2 (McCandlish et al. 2018, arXiv 1812.06162, eqs. A.2 and A.3).

    S is the covariance of one row's gradient, G the mean gradient: tr(S) / |G|^2 is the batch [rows] at which noise and
    signal are equal. From the gradients of parts of b rows each (on average), and of all B rows together:

        |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)          tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

    with |G_b|^2 the mean over the parts. loss_of(rows) is the mean loss of the rows of a part. The parts must be
    independent of each other: rows drawn at random from a rollout are not, and make B too small; whole environments
    are. A ratio of unbiased estimates is biased: smooth the two apart. Leaves the parameters' .grad alone.
    """
    B, n = sum(len(rows) for rows in parts), len(parts)
    b = B / n
    total, squares = 0.0, 0.0
    for rows in parts:
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(rows), parameters)])
        squares += gradient.square().sum()
        total = total + gradient
    small, big = (squares / n).item(), (total / n).square().sum().item()
    return (small - big) / (1 / b - 1 / B), (B * big - b * small) / (B - b)


# ======================================================================================================================
# Twins
# ======================================================================================================================


def effects(emulator: "Emulator", settle_frames: int = 16):
    """Classes of actions that do the same in the emulator's present state: (A,) int64, equal numbers for equal effects.

    The effect of an action is the screen after its step together with the screen after `settle_frames` more no-op
    frames: RAM is too strict (it holds the buttons pressed), the first screen alone too lax (a shot may begin later).
    The emulator is left as it was.
    """
    start, classes = emulator.ale.cloneState(), {}
    numbers = []
    for action in range(len(emulator.buttons)):
        emulator.act(action)
        screen = emulator.ale.getScreen().tobytes()
        for _ in range(settle_frames):
            emulator.ale.act(Action.NOOP)
        numbers.append(classes.setdefault((screen, emulator.ale.getScreen().tobytes()), len(classes)))
        emulator.ale.restoreState(start)
    return torch.tensor(numbers)


def effective_churn(actions_before, actions_after, classes) -> float:
    """Share of states whose greedy action now has another effect: (M,) int64 twice, classes (M, A) int64 -> [0, 1]."""
    before, after = (classes.gather(1, actions.unsqueeze(1)) for actions in (actions_before, actions_after))
    return (before != after).float().mean().item()


# ======================================================================================================================
# Probe
# ======================================================================================================================

# Pairs of policies: before and after one iteration's update; `past`, K iterations ago; `early`, after the first K.
PAIRS = {
    "update": ("before", "after"),
    "window": ("past", "after"),
    "early_past": ("early", "past"),
    "early_before": ("early", "before"),
    "early_after": ("early", "after"),
}


class Rollout(NamedTuple):
    """B = T * N rows, time first."""

    obs: torch.Tensor  # (B, 4, 84, 84) uint8
    actions: torch.Tensor  # (B,) int64
    targets: torch.Tensor  # (B,) float32, Q(lambda)
    valid: torch.Tensor  # (B,) float32, 0 for reset rows: they are no transitions

    def rows(self, keep) -> "Rollout":
        return Rollout(*(x.index_select(0, keep) for x in self))


class Collector:
    """Environments and the storage of one rollout of up to `longest` steps: phases 1 and 2 of PQN.

    watch, if set, is called after each row with (t, actions, reset_row, info, done, game_ended), all (N,), and then
    finds the observation that the row returned in obs[t + 1].
    """

    def __init__(self, args: Args, envs, num_envs: int, longest: int, device: torch.device):
        self.args, self.envs, self.N, self.device, self.watch = args, envs, num_envs, device, None
        N = num_envs
        self.num_actions = int(envs.action_space.n)
        # Allocated once at the longest rollout. What the network reads lives on its device, what the environments write
        # on the host. Row T of obs and values is the observation that the last step returned.
        self.obs = torch.zeros((longest + 1, N, 4, 84, 84), dtype=torch.uint8, device=device)  # (T+1, N, 4, 84, 84)
        self.actions = torch.zeros((longest, N), dtype=torch.int64, device=device)  # (T, N) int64
        self.values = torch.zeros((longest + 1, N), device=device)  # (T+1, N) float32, max_a Q(s, a)
        self.rewards = torch.zeros((longest, N))  # (T, N) float32
        self.flags = torch.zeros((3, longest, N), dtype=torch.bool)  # (3, T, N) terminal, truncated, reset row
        self.episodes, self.done = EpisodeTracker(N), np.zeros(N, dtype=bool)
        first, self.first_info = envs.reset()
        self.obs[0] = torch.from_numpy(first)
        self.T = 0  # of the rollout in storage

    def collect(self, q_network: nn.Module, T: int, epsilon_after, rng: torch.Generator) -> tuple[Rollout, list]:
        """T steps with fixed parameters, epsilon-greedy; epsilon_after(t) is epsilon t steps into the rollout.

        Returns the rollout, valid until the next call, and the games that ended in it, as EpisodeTracker tells them.
        """
        obs, actions, values, rewards = self.obs, self.actions, self.values, self.rewards
        terminal, truncated, reset_row = self.flags
        obs[0] = obs[self.T]
        self.T = T
        finished = []
        for t in range(T):
            epsilon = epsilon_after(t)
            with torch.no_grad():
                values[t], greedy = q_network(obs[t]).max(dim=1)
            explore = torch.rand(self.N, generator=rng, device=self.device) < epsilon
            random_actions = torch.randint(self.num_actions, (self.N,), generator=rng, device=self.device)
            actions[t] = torch.where(explore, random_actions, greedy)
            played = actions[t].cpu().numpy()
            next_obs, reward, terminated, cut, info = self.envs.step(played)

            game_over = info["terminated"].astype(bool)  # not a lost life; also on the step of the time limit
            obs[t + 1] = torch.from_numpy(next_obs)
            rewards[t] = torch.from_numpy(reward)
            terminal[t] = torch.from_numpy(terminated | game_over)
            truncated[t] = torch.from_numpy(cut)
            reset_row[t] = torch.from_numpy(self.done)
            finished += self.episodes.step(info["reward"], self.done, game_over, cut, info["lives"])
            if self.watch is not None:
                self.watch(t, played, self.done, info, terminated | cut, game_over | cut)
            self.done = terminated | cut

        with torch.no_grad():
            values[T] = q_network(obs[T]).max(dim=1).values
        targets = self.targets(T, values)
        valid = (~reset_row[:T]).float().flatten().to(self.device)
        return Rollout(obs[:T].flatten(0, 1), actions[:T].flatten(), targets.flatten(), valid), finished

    def targets(self, T: int, values):
        """Q(lambda) targets of the first T rows of the rollout in storage: (T, N)."""
        terminal, truncated, _ = self.flags
        return q_lambda_targets(
            *(x[:T].to(self.device) for x in (self.rewards, values[1:], terminal, truncated)),
            self.args.gamma,
            self.args.q_lambda,
        )


def learn(args: Args, q_network, optimizer, rollout: Rollout, epochs: int, rng):
    """Phase 3 of PQN: epochs of minibatches over a rollout; returns the sums of loss and mean Q over them."""
    loss_sum, q_sum = torch.zeros(2, device=rollout.targets.device)  # stay there: the loop reads nothing back
    for rows in minibatches(len(rollout.targets), epochs, args.num_minibatches, rng):
        optimizer.zero_grad()
        num_valid = rollout.valid[rows].sum().clamp(min=1.0)
        loss, mean_q = torch.zeros(2, device=rows.device)
        for part in micro_batches(rows, args.micro_batch_size):  # gradients add up to that of all rows
            obs, actions, targets, valid = rollout.rows(part)
            part_loss, part_q = td_loss(q_network(obs), actions, targets, valid)
            share = valid.sum() / num_valid
            (share * part_loss).backward()
            loss, mean_q = loss + share * part_loss.detach(), mean_q + share * part_q
        nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
        optimizer.step()
        loss_sum, q_sum = loss_sum + loss, q_sum + mean_q
    return loss_sum, q_sum


class Probe:
    """All measurements, on copies, with environments and random numbers of their own: the training never notices.

    Its N + H environments play on from branch to branch. The branches learn from the first N; on the states of the
    other H, which none has learnt from, they are compared. Beside four of them runs an emulator, for the twins.
    What a resumed run needs is in `state`.
    """

    def __init__(self, args: Args, q_network: nn.Module, saved: dict):
        self.args, self.device = args, next(q_network.parameters()).device
        self.state = saved.get("probe") or {
            "early": None, "early_epsilon": 0.0,  # parameters and epsilon after the first K iterations
            "past": {},  # iteration -> parameters and epsilon at its end, if a later measurement will look back to it
            "noise": [0.0, 0.0], "churns": [], "length": float(args.num_steps_min), "branched": False, "seconds": 0.0,
        }  # fmt: skip
        self.policies, self.states, self.noise, self.twins, self.candidates = {}, None, None, None, None
        with self.timed():
            self.rng = torch.Generator(self.device).manual_seed(args.seed)
            self.scratch = copy.deepcopy(q_network)  # whatever policy is to be looked at
            num_envs = args.num_envs + max(2, args.num_envs // 4)
            say(f"building {num_envs} more for the probe ...")
            with on_signals(signal.SIG_DFL):
                envs = make_envs(args, environment_seeds(args.seed, num_envs, "probe"))
            self.collector = Collector(args, envs, num_envs, max(128, *args.probe_lengths), self.device)
            self.emulators = []
            if args.twin_states and not args.repeat_action_probability:
                rom = envs.spec.config.task
                self.emulators = [Emulator(rom, args.full_action_space) for _ in range(min(4, num_envs))]
                for i, emulator in enumerate(self.emulators):
                    emulator.follow(0, True, 0.0, self.collector.first_info["ram"][i], False)
                self.collector.watch = self.follow

            # The reference states are those of random play with this seed, also in a resumed run. Random play goes on
            # from there, so that the games come apart from each other.
            random_play, _ = self.collector.collect(self.scratch, 128, lambda t: 1.0, self.rng)
            self.reference = random_play.obs[self.sample(random_play.valid)]  # (M, 4, 84, 84) uint8
            self.play_on(args.opening_steps, 1.0)
            self.rng.manual_seed(args.seed + saved.get("global_step", 0))

    def play_on(self, steps: int, epsilon: float) -> None:
        """Lets the probe's games go on with the policy in `scratch`."""
        for done in range(0, steps, 128):
            self.collector.collect(self.scratch, min(128, steps - done), lambda t: epsilon, self.rng)

    def follow(self, t, actions, reset_row, info, done, game_ended) -> None:
        """Keeps the emulators beside their environments, and tries all actions where twins are being looked for."""
        every = max(1, max(self.args.probe_lengths) * len(self.emulators) // self.args.twin_states)
        try:
            for i, emulator in enumerate(self.emulators):
                emulator.follow(actions[i], reset_row[i], info["reward"][i], info["ram"][i], game_ended[i])
                if self.candidates is not None and t % every == 0 and not done[i]:
                    self.candidates.append((self.collector.obs[t + 1, i].clone(), effects(emulator)))
        except ReplayError as error:
            say(f"twins are not looked for any more: {error}")
            self.emulators, self.candidates, self.collector.watch = [], None, None

    def sample(self, valid):
        """At most M valid rows, without replacement; reset rows are no states to act in, as in the other scripts."""
        rows = valid.nonzero().squeeze(1)
        return rows[torch.randperm(len(rows), generator=self.rng, device=self.device)][: self.args.probe_states]

    @torch.no_grad()
    def q_values(self, parameters: dict, obs):
        """Q of a policy that is given by its parameters: (M, A)."""
        self.scratch.load_state_dict(parameters)
        return torch.cat([self.scratch(part) for part in obs.split(512)])

    @contextlib.contextmanager
    def timed(self):
        """Adds the seconds of the block to those that measuring has taken."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.state["seconds"] += time.monotonic() - start

    def before(self, q_network: nn.Module, rollout: Rollout) -> None:
        """Between the phases 2 and 3 of an iteration that is measured: what the update will change."""
        with self.timed():
            self.policies = {"before": copy.deepcopy(q_network.state_dict())}
            rows = self.sample(rollout.valid)
            self.states = rollout.obs[rows]  # (M, 4, 84, 84) uint8

            def loss_of(rows):
                part = rollout.rows(rows)
                return td_loss(q_network(part.obs), part.actions, part.targets, part.valid)[0]

            N = self.args.num_envs
            by_env = torch.arange(len(rollout.valid), device=self.device).view(-1, N).t()  # (N, T) rows
            by_env = by_env[torch.randperm(N, generator=self.rng, device=self.device)]
            parts = [part.flatten() for part in by_env.tensor_split(min(self.args.noise_parts, N))]
            parts = [part[rollout.valid[part] > 0] for part in parts]
            self.noise = gradient_noise(loss_of, list(q_network.parameters()), [part for part in parts if len(part)])

    def after(self, iteration: int, q_network: nn.Module, optimizer: torch.optim.Optimizer, epsilon: float) -> dict:
        """After phase 3 of an iteration that is measured: all its metrics. Epsilon is that of the iteration's end."""
        with self.timed():
            args, measured = self.args, {}
            branching = (iteration - args.probe_interval) % args.branch_interval == 0 or not self.state["branched"]
            if branching:
                measured |= self.branches(q_network, optimizer, epsilon)
                self.state["branched"] = True

            self.policies["after"] = copy.deepcopy(q_network.state_dict())
            epsilons = dict.fromkeys(("before", "after"), epsilon)
            if iteration - args.probe_window in self.state["past"]:
                self.policies["past"], epsilons["past"] = self.state["past"].pop(iteration - args.probe_window)
            if self.state["early"] is not None:
                self.policies["early"], epsilons["early"] = self.state["early"], self.state["early_epsilon"]
            for place, states in ("rollout", self.states), ("reference", self.reference):
                q = {name: self.q_values(parameters, states) for name, parameters in self.policies.items()}
                for pair, (first, second) in PAIRS.items():
                    if first in q and second in q:
                        found = divergences(q[first], q[second], epsilons[first], epsilons[second])
                        measured |= {f"{place}/{pair}/{name}": value for name, value in found.items()}

            if self.twins is not None:
                states, classes = self.twins
                greedy = [self.q_values(self.policies[name], states).argmax(dim=1) for name in ("before", "after")]
                if branching:
                    measured["twins/distinct_effects"] = (classes.max(dim=1).values + 1).float().mean().item()
                measured["twins/churn"] = behavioral_divergence(*greedy)
                measured["twins/effective_churn"] = effective_churn(*greedy, classes)
            measured |= self.noise_scale() | self.batch_of_abs(measured["rollout/update/churn"])
        return measured

    def remember(self, iteration: int, q_network: nn.Module, epsilon: float) -> None:
        """At an iteration's end: keeps the policy if a later measurement looks back to it, or if it is the early."""
        with self.timed():
            if iteration == self.args.probe_window:
                self.state["early"] = copy.deepcopy(q_network.state_dict())
                self.state["early_epsilon"] = epsilon
            if (iteration + self.args.probe_window) % self.args.probe_interval == 0:
                self.state["past"][iteration] = (copy.deepcopy(q_network.state_dict()), epsilon)

    def branches(self, q_network: nn.Module, optimizer: torch.optim.Optimizer, epsilon: float) -> dict:
        """From the present parameters and optimiser state, one update for each rollout length.

        The TD error is the mean squared error to the held-out rows' Q(lambda) targets, which are those of the present
        parameters; it is also given before any update.
        """
        args, N, longest = self.args, self.args.num_envs, max(self.args.probe_lengths)
        # The games stand where an older policy had left them: play on for a while before it counts.
        self.scratch.load_state_dict(q_network.state_dict())
        self.play_on(128, epsilon)
        self.candidates = [] if self.emulators else None
        rollout, _ = self.collector.collect(q_network, longest, lambda t: epsilon, self.rng)
        if self.candidates:
            self.twins = tuple(torch.stack(column).to(self.device) for column in zip(*self.candidates))
        self.candidates = None
        grid = Rollout(*(x.unflatten(0, (longest, -1)) for x in rollout))  # (T, N + H, ...)
        held_out = Rollout(*(x[:, N:].flatten(0, 1) for x in grid))
        held_out = held_out.rows(self.sample(held_out.valid))

        def td_error(q_values) -> float:
            return td_loss(q_values, held_out.actions, held_out.targets, held_out.valid)[0].item()

        start, optimizer_start = q_network.state_dict(), optimizer.state_dict()
        q_before = self.q_values(start, held_out.obs)
        measured = {"branch/td_error_before": td_error(q_before)}
        for length in args.probe_lengths:
            part = grid._replace(targets=self.collector.targets(length, self.collector.values))
            part = Rollout(*(x[:length, :N].flatten(0, 1) for x in part))
            self.scratch.load_state_dict(start)
            branch = torch.optim.RAdam(self.scratch.parameters(), lr=args.learning_rate, foreach=True)
            branch.load_state_dict(copy.deepcopy(optimizer_start))  # it would share its moments with the training's
            epochs = update_epochs_for(length, args.update_epochs, args.base_num_steps)
            learn(args, self.scratch, branch, part, epochs, self.rng)
            with torch.no_grad():
                q_after = torch.cat([self.scratch(states) for states in held_out.obs.split(512)])
            found = divergences(q_before, q_after, epsilon, epsilon) | {"td_error": td_error(q_after)}
            measured |= {f"branch/{length}/{name}": value for name, value in found.items()}
        return measured

    def noise_scale(self) -> dict:
        """Smoothed numerator over smoothed denominator [rows]; nothing while the denominator is not above 0."""
        ema = self.args.noise_ema  # both begin at 0: that weighs on both alike, and not on the ratio
        trace, square = (ema * old + (1 - ema) * new for old, new in zip(self.state["noise"], self.noise))
        self.state["noise"] = [trace, square]
        measured = {"noise/trace": self.noise[0], "noise/square": self.noise[1]}
        return measured | ({"noise/scale": trace / square} if square > 0 else {})

    def batch_of_abs(self, churn: float) -> dict:
        """The rollout length and batch that ABS would have come to by now, had it seen these divergences."""
        args = self.args
        shortest, longest = args.num_steps_min, args.num_steps_max or (64 if args.network == "base" else 128)
        churns = self.state["churns"] = [*self.state["churns"], churn][-args.divergence_window :]
        if len(churns) >= args.divergence_warmup:
            target = rollout_length_target(
                sum(churns) / len(churns), shortest, longest, args.divergence_low, args.divergence_high
            )
            self.state["length"] = adapt_rollout_length(self.state["length"], target, args.batch_ema, shortest, longest)
        T = round(self.state["length"])
        return {"probe/abs_rollout_length": T, "probe/abs_batch_size": T * args.num_envs}


def probe_metrics(args: Args) -> list[str]:
    """Names of all that may be measured: columns of metrics.csv, and tags of TensorBoard."""
    kinds = ("churn", "total_variation", "js_distance", "value_gap")
    return [
        *(f"{place}/{pair}/{kind}" for place in ("rollout", "reference") for pair in PAIRS for kind in kinds),
        "branch/td_error_before",
        *(f"branch/{length}/{kind}" for length in args.probe_lengths for kind in (*kinds, "td_error")),
        *("noise/trace", "noise/square", "noise/scale", "probe/abs_rollout_length", "probe/abs_batch_size"),
        *("twins/distinct_effects", "twins/churn", "twins/effective_churn", "probe/share_of_time"),
    ]


# ======================================================================================================================
# Training
# ======================================================================================================================


def train(args: Args) -> dict:
    """Trains as pqn_fixed_atari.py does, measuring on the way; or, with `args.checkpoint`, measures once.

    Returns run_dir, global_step [steps], gradient_steps, rollout_length [steps per environment], episodic_return
    (mean raw score of the last 100 full games; nan before the first) and eval_return (nan without evaluation).
    """
    device = set_up_torch(args)
    torch.manual_seed(args.seed)
    rng = torch.Generator(device).manual_seed(args.seed)  # exploration and shuffling
    announce(args, device)

    N, T = args.num_envs, args.num_steps
    saved = load_saved("resume", args.resume)[1] if args.resume else {}  # the checkpoint to go on with
    model = load_saved("checkpoint", args.checkpoint)[1] if args.checkpoint else {}  # the model to measure around
    with on_signals(signal.SIG_DFL):  # envpool builds for seconds without letting Python hear Ctrl-C: die at once
        envs = make_envs(args, environment_seeds(args.seed, N, "training", saved.get("global_step", 0)))
    with contextlib.closing(envs), RunLog(args, saved) as log:
        q_network = QNetwork(int(envs.action_space.n), args.network, args.bf16).to(device)
        # foreach: at minibatches of 32, the CPU's default loop over parameters takes as long as the gradient itself.
        optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate, foreach=True)
        iteration, global_step, gradient_steps, num_games = (
            saved.get(name, 0) for name in ("iteration", "global_step", "gradient_steps", "num_games")
        )
        recent_scores = deque(saved.get("recent_scores", ()), maxlen=100)
        if saved:
            restore(saved, q_network, optimizer, rng)
        if model:
            load_network(q_network, model)
            global_step = model["global_step"]
        collector = Collector(args, envs, N, T, device)
        probe = Probe(args, q_network, saved)
        decay_steps = args.exploration_fraction * args.total_timesteps

        def epsilon_after(t: int) -> float:
            return epsilon_at(global_step + t * N, args.start_e, args.end_e, decay_steps)

        if model:
            settle(q_network, optimizer, model, collector, args, epsilon_after(0), rng)
            say(f"measuring: one update, and one for each rollout length of {args.probe_lengths} ...")
        last = global_step + T * N if model else args.total_timesteps  # around a model: one iteration
        while global_step + T * N <= last:
            iteration += 1

            # 1 collect and 2 targets
            rollout, finished = collector.collect(q_network, T, epsilon_after, rng)
            epsilon = epsilon_after(T - 1)
            global_step += T * N

            # 3 learn
            measure = iteration % args.probe_interval == 0 or bool(model)
            if measure:
                probe.before(q_network, rollout)
            epochs = args.update_epochs
            loss_sum, q_sum = learn(args, q_network, optimizer, rollout, epochs, rng)
            updates = epochs * args.num_minibatches
            gradient_steps += updates
            loss = loss_sum.item() / updates
            if not math.isfinite(loss):  # once per iteration: what is saved is the state before it
                raise FloatingPointError(f"the loss became {loss} in iteration {iteration}, up to step {global_step:,}")

            # 4 measure
            measured = dict.fromkeys(probe_metrics(args))
            if measure:
                measured |= probe.after(iteration, q_network, optimizer, epsilon)
            probe.remember(iteration, q_network, epsilon)
            measured["probe/share_of_time"] = probe.state["seconds"] / (time.monotonic() - log.start)
            churns = probe.state["churns"]

            # 5 log, and keep what a resumed run needs
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
                    "losses/td_loss": loss,
                    "losses/q_values": q_sum.item() / updates,
                    "abs/behavioral_divergence": churns[-1] if measure else None,
                    "abs/divergence_mean": sum(churns) / len(churns) if churns else None,
                    "abs/rollout_length": T,
                    "abs/batch_size": T * N,
                    "abs/minibatch_size": T * N / args.num_minibatches,
                    "abs/update_epochs": epochs,
                    **measured,
                },
                recent_return=np.mean(recent_scores) if recent_scores else math.nan,
            )
            log.keep(
                {
                    "iteration": iteration,
                    "global_step": global_step,
                    "gradient_steps": gradient_steps,
                    "num_games": num_games,
                    "recent_scores": list(recent_scores),
                    "probe": probe.state,
                    **snapshot(q_network, optimizer, rng),
                }
            )

        if not model:
            log.save_final()
        with (log.run_dir / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        draw(rows, args, log.run_dir / "probe.png")
        for line in summary(rows, args):
            say(line)
        say(f"picture: {log.run_dir / 'probe.png'}")
        report = {"mean": math.nan}
        if args.eval_episodes and not model:
            report = evaluate_and_save(q_network, args, log.run_dir, global_step)
            log.write_evaluation(report["mean"])
    return {
        "run_dir": str(log.run_dir),
        "global_step": global_step,
        "gradient_steps": gradient_steps,
        "rollout_length": T,
        "episodic_return": float(np.mean(recent_scores)) if recent_scores else math.nan,
        "eval_return": report["mean"],
    }


def settle(q_network, optimizer, model: dict, collector: Collector, args: Args, epsilon: float, rng) -> None:
    """Before a saved model is measured: games in full swing, and an optimiser as in the middle of a run.

    checkpoint.pt has the optimiser's state. model.pt has not, and with a fresh one RAdam would hardly move for its
    first hundreds of steps: so its moments are gathered at a learning rate of 0, and count as those of a long run.
    """
    say(f"playing {args.opening_steps} steps in each environment, so that games are in full swing ...")
    for _ in range(math.ceil(args.opening_steps / args.num_steps)):
        rollout, _ = collector.collect(q_network, args.num_steps, lambda t: epsilon, rng)
    if "optimizer" in model:
        optimizer.load_state_dict(model["optimizer"])
    else:
        say("model.pt has no optimiser state: gathering one at a learning rate of 0 (checkpoint.pt has it)")
        rollouts, group = 32, optimizer.param_groups[0]
        group["lr"] = 0.0
        for _ in tqdm(range(rollouts), "gathering", unit="rollout", disable=not sys.stderr.isatty()):
            rollout, _ = collector.collect(q_network, args.num_steps, lambda t: epsilon, rng)
            learn(args, q_network, optimizer, rollout, args.update_epochs, rng)
        updates = rollouts * args.update_epochs * args.num_minibatches
        for moments in optimizer.state.values():
            for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"]):
                moments[name] /= 1 - beta**updates
            moments["step"].fill_(10**5)
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate


# ======================================================================================================================
# Picture and summary
# ======================================================================================================================


def column(rows: list[dict], *names: str) -> list[tuple[float, ...]]:
    """(global_step, values...) of the rows of metrics.csv in which all the named cells are filled."""
    return [
        tuple(float(row[name]) for name in ("global_step", *names)) for row in rows if all(row[name] for name in names)
    ]


BLUE, RED, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe and Ito: for all eyes, and in grey


def bars(axis, groups: dict[str, dict[str, float]], number: str = "%.3g") -> None:
    """One group of bars on an axis for each name, and in it one bar for each of its values by label (two at most)."""
    series = list(dict.fromkeys(label for bars_of in groups.values() for label in bars_of))
    width = 0.8 / max(1, len(series))
    for i, (label, colour) in enumerate(zip(series, (BLUE, RED))):
        places = [place + (i - (len(series) - 1) / 2) * width for place in range(len(groups))]
        heights = [bars_of.get(label, math.nan) for bars_of in groups.values()]
        drawn = axis.bar(places, heights, 0.9 * width, color=colour, label=label if len(series) > 1 else None)
        axis.bar_label(drawn, ["-" if math.isnan(height) else number % height for height in heights])
    axis.set_xticks(range(len(groups)), list(groups))
    axis.margins(y=0.15)


def draw(rows: list[dict], args: Args, path: Path) -> None:
    """Four panels: divergence and return, divergence against batch size, noise scale and batch, churn and twins.

    Curves over a run; bars where one iteration was measured, around a saved model.
    """
    N = args.num_envs
    figure, ((time_axis, batch_axis), (noise_axis, twin_axis)) = plt.subplots(2, 2, figsize=(11, 8))
    figure.set_layout_engine("constrained")

    def curve(axis, name, label, colour, scale=1.0, over=5, style="-"):
        """Dots are measurements, the line the mean of the last five of them."""
        steps, values = np.array(column(rows, name)).reshape(-1, 2).T
        means = [scale * values[max(0, i + 1 - over) : i + 1].mean() for i in range(len(values))]
        if not means:
            return
        axis.plot(steps, scale * values, "o", markersize=3, alpha=0.4, color=colour)
        axis.plot(steps, means, style, color=colour, label=label)

    def measured(name) -> float:
        """The one value of a probe around a saved model."""
        return float(rows[-1][name] or math.nan)

    returns = column(rows, "charts/episodic_return")
    if args.checkpoint:
        kinds = {"churn": "churn", "total_variation": "total\nvariation", "js_distance": "JS distance",
                 "value_gap": "value gap\n[std of Q]"}  # fmt: skip
        states = {"rollout": "states of this rollout", "reference": "states of random play"}
        bars(time_axis, {shown: {label: measured(f"{place}/update/{kind}") for place, label in states.items()}
                         for kind, shown in kinds.items()})  # fmt: skip
        time_axis.set(ylabel="divergence", title="How far one update moves the policy")
    else:
        curve(time_axis, "rollout/update/churn", "churn, one update", BLUE)
        curve(time_axis, "rollout/window/churn", f"churn, {args.probe_window} iterations", RED)
        curve(time_axis, "rollout/early_after/churn", "churn since the early policy", GREEN)
        curve(time_axis, "rollout/update/value_gap", "value gap, one update [std of Q]", PINK)
        time_axis.set(ylabel="divergence (rollout states)", title="How far the policy moves", ylim=(0, None))
    if returns and not args.checkpoint:
        steps, scores = zip(*returns)
        smooth = [np.mean(scores[max(0, i - 19) : i + 1]) for i in range(len(scores))]
        right = time_axis.twinx()
        time_axis.set_zorder(1)  # so that its legend covers the dots
        time_axis.patch.set_visible(False)
        right.plot(steps, smooth, color="black", linestyle=":", label="return")
        right.set_ylabel("raw score, mean of 20 (dotted)")

    branches = column(rows, *(f"branch/{length}/churn" for length in args.probe_lengths))
    lengths = args.probe_lengths
    named = {0, len(branches) // 2, len(branches) - 1}
    for i, (step, *churns) in enumerate(branches):
        label = f"at {step / 1000:,.0f} k steps" if i in named else None
        colour = plt.cm.viridis(0.9 * i / max(1, len(branches) - 1))
        batch_axis.plot([length * N for length in lengths], churns, "o-", color=colour, label=label)
    steps_of = [args.num_minibatches * update_epochs_for(L, args.update_epochs, args.base_num_steps) for L in lengths]
    batch_axis.set_xscale("log", base=2)
    batch_axis.set_xticks([length * N for length in lengths], [f"{L * N:,}\n({n})" for L, n in zip(lengths, steps_of)])
    batch_axis.minorticks_off()
    batch_axis.set(xlabel="batch, T x N [rows] (and gradient steps, with the epochs of ABS)",
                   ylabel="churn on held-out states", title="One iteration's learning from the same point",
                   ylim=(0, None))  # fmt: skip

    minibatch = args.num_steps * N / args.num_minibatches
    noise_axis.set(ylabel="[rows per gradient step]")
    if args.checkpoint:
        scale = measured("noise/scale")
        bars(noise_axis, {"gradient noise scale" + " (not resolved)" * math.isnan(scale): {"": scale},
                          "minibatch here": {"": minibatch}}, "%.0f")  # fmt: skip
        noise_axis.set(title="Noise scale, and the minibatch")
        bars(twin_axis, {"churn": {"": measured("twins/churn")},
                         "effective churn:\nother effects only": {"": measured("twins/effective_churn")}})  # fmt: skip
    else:
        curve(noise_axis, "noise/scale", "gradient noise scale", BLUE, over=1)
        curve(noise_axis, "probe/abs_batch_size", "minibatch of ABS", RED, scale=1 / args.num_minibatches, over=1)
        noise_axis.axhline(minibatch, color="grey", linestyle="--", label="minibatch of this run")
        noise_axis.set_yscale("log")
        noise_axis.set(title="Noise scale, and the minibatch by divergence")
        curve(twin_axis, "twins/churn", "churn", BLUE)
        curve(twin_axis, "twins/effective_churn", "effective churn: other effects only", RED)
    effects_seen = [value for _, value in column(rows, "twins/distinct_effects")]
    of_all = f": {np.mean(effects_seen):.1f} distinct effects a state" if effects_seen else ": not looked for"
    twin_axis.set(ylabel="share of states, one update", title="Twins" + of_all, ylim=(0, None))

    for axis in () if args.checkpoint else (time_axis, noise_axis, twin_axis):
        axis.set_xlabel("steps (1 step = 4 frames)")
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:,.0f} k")
    for axis in (time_axis, batch_axis, noise_axis, twin_axis):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(framealpha=0.8, edgecolor="none", fontsize=8)
    last = int(rows[-1]["global_step"])
    below = f"around {args.checkpoint}" if args.checkpoint else "dots: measurements; lines: means of five"
    figure.suptitle(f"{args.env_id}, {args.network} network, seed {args.seed}, {last:,} steps, {N} environments x "
                    f"{args.num_steps} steps, {args.num_minibatches} minibatches\n{below}", fontsize=11)  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def summary(rows: list[dict], args: Args) -> list[str]:
    """The answers in words, with their numbers; each line is of the measurements in metrics.csv alone."""

    def of(name: str) -> np.ndarray:
        return np.array([value for _, value in column(rows, name)])

    lines = []
    churns, gaps = of("rollout/update/churn"), of("rollout/update/value_gap")
    if len(churns) >= 6:
        n = max(3, len(churns) // 5)
        first, last = churns[:n], churns[-n:]
        error = math.sqrt((first.var() + last.var()) / (n - 1))  # standard error of the difference of the means
        change = last.mean() - first.mean()
        verdict = "fades" if change < -2 * error else "grows" if change > 2 * error else "hardly changes"
        lines.append(
            f"Non-stationarity {verdict}: from the first {n} measurements to the last {n}, the churn of one update "
            f"goes from {first.mean():.2f} to {last.mean():.2f}, its value gap from {gaps[:n].mean():.3f} to "
            f"{gaps[-n:].mean():.3f} standard deviations of Q."
        )
    lengths = args.probe_lengths
    branches = column(rows, *(f"branch/{length}/churn" for length in lengths))
    if branches and len(lengths) > 1:
        smallest, largest = lengths.index(min(lengths)), lengths.index(max(lengths))
        less = sum(at[largest] < at[smallest] for _, *at in branches)
        means = np.mean([at for _, *at in branches], axis=0)
        by_length = ", ".join(f"{mean:.2f} at T = {length}" for mean, length in zip(means, lengths))
        lines.append(
            f"From the same point, learning on T = {max(lengths)} moves the policy less than on T = {min(lengths)} in "
            f"{less} of {len(branches)} points; mean churn on held-out states: {by_length}."
        )
    scales, estimates = of("noise/scale"), len(of("noise/trace"))
    if estimates:
        text = f"Gradient noise scale: {scales[-1]:,.0f} rows" if len(scales) else "Gradient noise scale: not resolved"
        if len(scales) > 1:
            text += f" at last, {scales[0]:,.0f} at first"
        if 0 < len(scales) < estimates:
            text += f" (not resolved in {estimates - len(scales)} of {estimates} measurements)"
        text += f"; a gradient step of this run has {args.num_steps * args.num_envs / args.num_minibatches:,.0f}"
        if len(churns) >= args.divergence_warmup:
            chosen = of("probe/abs_batch_size")[-1] / args.num_minibatches
            text += f", by divergence ABS would have come to {chosen:,.0f}"
        lines.append(text + ".")
    flips, effective = of("twins/churn"), of("twins/effective_churn")
    if len(flips):
        part = f"{1 - effective.mean() / flips.mean():.0%}" if flips.any() else "none"
        lines.append(
            f"Twins: {of('twins/distinct_effects').mean():.1f} distinct effects a state; of a mean churn of "
            f"{flips.mean():.3f} there, {flips.mean() - effective.mean():.3f} ({part}) is between actions that do the "
            "same."
        )
    if not args.checkpoint:
        lines.append(f"Measuring took {of('probe/share_of_time')[-1]:.0%} of the time.")
    return lines


# ######################################################################################################################
# Part two: plumbing. Nothing below is needed to understand the algorithm, and it is the same text in every script.
# ######################################################################################################################

# ======================================================================================================================
# Several processes
# ======================================================================================================================

# torchrun --nproc-per-node=4 SCRIPT FLAGS. Without torchrun there is one process, and all this does nothing.
# Each rank has its share of the environments and learns from its own rows; parameters start equal and stay equal.
# Rank 0 alone logs, saves and evaluates.
RANKS = dist.is_torchelastic_launched()  # a mere RANK in the environment may be another launcher's
RANK = int(os.environ["RANK"]) if RANKS else 0
NUM_RANKS = int(os.environ["WORLD_SIZE"]) if RANKS else 1
LOCAL_RANK = int(os.environ["LOCAL_RANK"]) if RANKS else 0
LOCAL_RANKS = int(os.environ["LOCAL_WORLD_SIZE"]) if RANKS else 1  # on this machine


class RankLost(Exception):
    """Another rank has ended, or cannot be reached."""


@contextlib.contextmanager
def talking():
    """Between ranks: what fails there becomes RankLost."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).split(". ")[0]  # without gloo's line and advice
        raise RankLost(f"another rank has ended, or cannot be reached, says rank {RANK}: {reason}") from error


def cores_per_rank() -> int:
    """CPU cores for each process of this machine."""
    return max((os.cpu_count() or 1) // LOCAL_RANKS, 1)


def join_ranks(device: torch.device) -> None:
    """Waits until all ranks are there; nccl between GPUs, gloo between CPUs."""
    if NUM_RANKS > 1:
        with talking():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def leave_ranks() -> None:
    """When training has ended."""
    if NUM_RANKS > 1:
        dist.destroy_process_group()


def average_over_ranks(weights, tensors) -> None:
    """Replaces tensors by their mean over all ranks, weighted by the sum of each one's weights, in place.

    With a minibatch's valid rows as weights, gradients become those of the union of the minibatches, and the same bits
    on every rank. DistributedDataParallel would count all ranks alike, however many reset rows they have, and hide the
    one line that matters.
    """
    if NUM_RANKS == 1:
        return
    weight = weights.sum().reshape(1)
    flat = torch.cat([weight, *(weight * tensor.flatten() for tensor in tensors)])
    with talking():
        dist.all_reduce(flat)
    means = flat[1:] / flat[0].clamp(min=1.0)
    for tensor, mean in zip(tensors, means.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view_as(tensor))


def mean_over_ranks(value: float, weight: int, device: torch.device) -> float:
    """Weighted mean of one number of each rank: equal on all of them."""
    mean = torch.tensor([value], dtype=torch.float64, device=device)
    average_over_ranks(torch.tensor([weight], dtype=torch.float64, device=device), [mean])
    return mean.item()


def gather_over_ranks(items: list) -> list:
    """The lists of all ranks, one after the other."""
    if NUM_RANKS == 1:
        return items
    lists = [None] * NUM_RANKS
    with talking():
        dist.all_gather_object(lists, items)
    return [item for of_rank in lists for item in of_rank]


# ======================================================================================================================
# Evaluation and film
# ======================================================================================================================


@torch.no_grad()
def evaluate(
    q_network: nn.Module,
    envs,
    num_envs: int,
    games_per_env: int,
    epsilon: float,
    seed: int,
    recording: list | None = None,
) -> list[dict]:
    """Plays the same number of full games in each environment, greedily up to a share epsilon of random actions.

    Equal numbers, because the first games to finish over many environments are the short ones. Returns a dictionary per
    game: environment, score (raw), length [steps] and fingerprint, a checksum of its frames: equal games, equal prints.
    Appends to `recording`, if given, the rows of environment 0's first game, for `Emulator.follow`.
    """
    device = next(q_network.parameters()).device
    num_actions = int(envs.action_space.n)
    random = np.random.default_rng(seed)
    tracker, games, fingerprints = EpisodeTracker(num_envs), [], [0] * num_envs
    games_left = np.full(num_envs, games_per_env)
    (obs, info), done = envs.reset(), np.zeros(num_envs, dtype=bool)
    recording_on, last_line = recording is not None, time.monotonic()
    if recording_on:
        recording.append((0, True, 0.0, info["ram"][0].copy(), False))
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
            game_over = info["terminated"].astype(bool)
            finished = tracker.step(info["reward"], done, game_over, truncated, info["lives"])
            if recording_on:
                recording_on = 0 not in [i for i, _, _ in finished]
                if recording_on or not done[0]:  # else the game had ended before this row, unseen
                    row = (actions[0], done[0], info["reward"][0], info["ram"][0].copy(), not recording_on)
                    recording.append(row)
            for i, score, length in finished:
                if games_left[i]:
                    games.append({"environment": i, "score": score, "length": length, "fingerprint": fingerprints[i]})
                    games_left[i] -= 1
                    bar.update()
                fingerprints[i] = 0
            if bar.disable and time.monotonic() - last_line >= 10:
                last_line = time.monotonic()
                say(f"{len(games)} of {num_envs * games_per_env} games; the longest of the others is at step "
                    f"{tracker.length[games_left > 0].max(initial=0):,}, of 27,000 at most")  # fmt: skip
            done = terminated | truncated
    return games


def bootstrap_interval(scores, groups, draws: int = 10_000) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean score, resampling whole groups of equal games.

    Without sticky actions greedy games repeat (of one life there are at most 30 openings), and repeats are no new
    evidence. None for fewer than five groups: of two games it would be the two scores themselves.
    """
    _, groups = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(groups, scores), np.bincount(groups)
    if len(sums) < 5:
        return None
    random, means = np.random.default_rng(0), np.empty(draws)
    for draw in range(draws):
        picks = random.integers(len(sums), size=len(sums))
        means[draw] = sums[picks].sum() / counts[picks].sum()
    return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]


def human_normalized(env_id: str, score: float) -> float | None:
    """(score - random) / (human - random): 0 is random play, 1 a human; None for games without these figures."""
    if env_id not in RANDOM_AND_HUMAN:
        return None
    random, human = RANDOM_AND_HUMAN[env_id]
    return (score - random) / (human - random)


def evaluate_and_save(q_network: nn.Module, args, run_dir: Path, training_steps: int) -> dict:
    """`eval_episodes` games under training's options, on seeds of their own; writes eval.json and, if asked, the film.

    Returns what eval.json holds. Errors: ReplayError where the film's game is not the one that ale-py plays.
    """
    # DEVIATION: equal games per environment; the release averages the first 100 to finish, a bias to short games.
    num_envs = min(10, args.eval_episodes)
    seeds = environment_seeds(args.seed, num_envs, "evaluation")
    say(f"evaluating: {args.eval_episodes} full games, {num_envs} environments, epsilon {args.eval_epsilon:g} ...")
    recording = [] if args.capture_video else None
    with contextlib.closing(make_envs(args, seeds)) as envs:
        games_each = args.eval_episodes // num_envs
        games = evaluate(q_network, envs, num_envs, games_each, args.eval_epsilon, args.seed, recording)
        rom = envs.spec.config.task if args.capture_video else ""
    scores, prints = [game["score"] for game in games], [game["fingerprint"] for game in games]
    report = {
        "env_id": args.env_id,
        "num_games": len(games),
        "distinct_games": len(set(prints)),
        "mean": float(np.mean(scores)),
        "median": float(np.median(scores)),
        "std": float(np.std(scores)),
        "interval_95": bootstrap_interval(scores, prints),
        "human_normalized": human_normalized(args.env_id, float(np.mean(scores))),
        "protocol": {
            "training_steps": training_steps,
            "epsilon": args.eval_epsilon,
            "episodic_life": args.episodic_life,
            "longest_game_steps": 27_000,
            "environments": num_envs,
            "games_per_environment": games_each,
            "repeat_action_probability": args.repeat_action_probability,
            "full_action_space": args.full_action_space,
            "interval": "percentile bootstrap of the mean over distinct games",
        },
        "seeds": seeds,
        "games": games,
    }
    replace_file(run_dir / "eval.json", json.dumps(report, indent=1).encode() + b"\n")
    interval = "none, fewer than five games being different"
    if report["interval_95"] is not None:
        interval = "{:.1f} to {:.1f}".format(*report["interval_95"])
    normalized = report["human_normalized"]
    say(
        f"evaluation: mean raw score {report['mean']:.1f}, 95 % interval {interval}; "
        + ("" if normalized is None else f"human-normalised {normalized:.0%}; ")
        + f"{report['distinct_games']} of {len(games)} games are distinct"
    )
    if recording:
        film(run_dir / "film.gif", recording, rom, args.full_action_space)
    return report


class ReplayError(Exception):
    """A game and its replay differ."""


class Emulator:
    """ale-py's own emulator. It plays again what envpool plays, as its referee: RAM and raw reward agree at every row.

    Sticky actions cannot be followed: they are random.
    """

    def __init__(self, rom: str, full_action_space: bool):
        ALEInterface.setLoggerMode(LoggerMode.Error)  # before the first emulator, or it prints a banner
        self.ale = ALEInterface()
        self.ale.setInt("random_seed", 0)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(rom))
        self.buttons = self.ale.getLegalActionSet() if full_action_space else self.ale.getMinimalActionSet()
        self.game_ended, self.score, self.steps = True, 0.0, 0  # raw score and steps of the game so far
        self.openings, self.rows = [], []  # states in which the game or life may have begun; what was played since

    def act(self, action: int) -> int:
        """One step, 4 frames or fewer at the game's end; returns the raw reward."""
        gained = 0
        for _ in range(4):
            gained += self.ale.act(self.buttons[action])
            if self.ale.game_over():
                break
        return gained

    def find_openings(self, ram) -> list:
        """States that have a RAM after the no-ops, of a number that envpool keeps to itself, and the FIRE with which a
        game or life begins. There may be several: the console's state is more than its RAM."""
        found, without_fire = [], []
        for _ in range(32):
            here = self.ale.cloneState()
            if np.array_equal(self.ale.getRAM(), ram):
                without_fire.append(here)
            if Action.FIRE in self.buttons:
                self.ale.act(Action.FIRE)
                if np.array_equal(self.ale.getRAM(), ram):
                    found.append(self.ale.cloneState())
                self.ale.restoreState(here)
            self.ale.act(Action.NOOP)
            if self.ale.game_over():  # envpool then begins the next game, and goes on with the no-ops
                self.ale.reset_game()
        return found + without_fire

    def play(self, action: int, raw_reward: float, ram) -> str:
        """One step; returns in what it differs from envpool's, if in anything."""
        gained = self.act(action)
        if not np.array_equal(self.ale.getRAM(), ram):
            return "their RAM"
        return "" if gained == raw_reward else f"raw reward {raw_reward:g} and {gained}"

    def follow(self, action: int, reset_row: bool, raw_reward: float, ram, game_ended: bool) -> None:
        """Plays one row of an environment; the first is that of its reset, a reset row with any action.

        ram (128,) uint8 after the row; game_ended: the game was over or cut there. Errors: ReplayError if they differ.
        """
        if reset_row:
            if self.game_ended:
                self.ale.reset_game()
                self.score, self.steps = 0.0, 0
            lives = self.ale.lives()
            self.openings, self.rows = self.find_openings(ram), []
            difference = "" if self.openings else "their RAM"
            if self.openings:
                self.ale.restoreState(self.openings.pop(0))
                if self.ale.lives() > lives:  # the game has ended in the no-ops
                    self.score, self.steps = 0.0, 0
        else:
            self.steps += 1
            self.rows.append((action, raw_reward, ram.copy()))
            difference = self.play(*self.rows[-1])
            while difference and self.openings:  # then another opening may be the right one
                self.ale.restoreState(self.openings.pop(0))
                if not any(self.play(*row) for row in self.rows):
                    difference = ""
        if difference:
            at = f"the opening before step {self.steps + 1}" if reset_row else f"step {self.steps}"
            raise ReplayError(f"envpool and ale-py differ in {difference} at {at} of a game")
        self.game_ended = game_ended
        self.score += raw_reward


def film(path: Path, recording: list[tuple], rom: str, full_action_space: bool, most_frames: int = 2000) -> None:
    """Draws a recorded game in colour, twice the emulator's size, under its score and step; a GIF at the game's speed.

    `Emulator` referees every row; of a long game only every second, third, ... is drawn. Errors: ReplayError.
    """
    every = math.ceil(len(recording) / most_frames)
    emulator, frames, font = Emulator(rom, full_action_space), [], ImageFont.load_default(16)
    for number, row in enumerate(recording, start=1):
        emulator.follow(*row)
        if number % every == 0 or number == len(recording):
            screen = Image.fromarray(emulator.ale.getScreenRGB())
            frame = Image.new("RGB", (2 * screen.width, 24 + 2 * screen.height))
            frame.paste(screen.resize((2 * screen.width, 2 * screen.height), Image.Resampling.NEAREST), (0, 24))
            text = f"score {emulator.score:g}   step {emulator.steps:,}"
            ImageDraw.Draw(frame).text((6, 2), text, font=font, fill="white")
            frames.append(frame.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))
    file = io.BytesIO()
    milliseconds = round(1000 * 4 / 60 * every, -1)  # 4 frames of a 60th of a second; GIF counts in hundredths
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    replace_file(path, file.getvalue())
    say(f"film: {path}, {emulator.steps:,} steps and {emulator.score:g} points, "
        "equal in envpool and ale-py at every step")  # fmt: skip


def evaluate_saved(args) -> dict:
    """Evaluates the model in `args.evaluate` without training; eval.json and film go into a directory of their own."""
    path, saved = load_saved("evaluate", args.evaluate)
    device = set_up_torch(args)
    q_network = QNetwork(saved["num_actions"], args.network, args.bf16).to(device)
    load_network(q_network, saved)
    run_dir = new_run_dir(args, "evaluation")
    say(f"{path}: {args.env_id}, {args.network} network, {saved['global_step']:,} steps of training\n"
        f"evaluation directory: {run_dir}")  # fmt: skip
    return evaluate_and_save(q_network, args, run_dir, saved["global_step"])


# (random play, human) raw scores of the 57 games, Mnih et al. 2015 and Wang et al. 2016
RANDOM_AND_HUMAN = {
    "Alien-v5": (227.8, 7127.7), "Amidar-v5": (5.8, 1719.5), "Assault-v5": (222.4, 742), "Asterix-v5": (210, 8503.3),
    "Asteroids-v5": (719.1, 47388.7), "Atlantis-v5": (12850, 29028.1), "BankHeist-v5": (14.2, 753.1),
    "BattleZone-v5": (2360, 37187.5), "BeamRider-v5": (363.9, 16926.5), "Berzerk-v5": (123.7, 2630.4),
    "Bowling-v5": (23.1, 160.7), "Boxing-v5": (0.1, 12.1), "Breakout-v5": (1.7, 30.5), "Centipede-v5": (2090.9, 12017),
    "ChopperCommand-v5": (811, 7387.8), "CrazyClimber-v5": (10780.5, 35829.4), "Defender-v5": (2874.5, 18688.9),
    "DemonAttack-v5": (152.1, 1971), "DoubleDunk-v5": (-18.6, -16.4), "Enduro-v5": (0, 860.5),
    "FishingDerby-v5": (-91.7, -38.7), "Freeway-v5": (0, 29.6), "Frostbite-v5": (65.2, 4334.7),
    "Gopher-v5": (257.6, 2412.5), "Gravitar-v5": (173, 3351.4), "Hero-v5": (1027, 30826.4),
    "IceHockey-v5": (-11.2, 0.9), "Jamesbond-v5": (29, 302.8), "Kangaroo-v5": (52, 3035), "Krull-v5": (1598, 2665.5),
    "KungFuMaster-v5": (258.5, 22736.3), "MontezumaRevenge-v5": (0, 4753.3), "MsPacman-v5": (307.3, 6951.6),
    "NameThisGame-v5": (2292.3, 8049), "Phoenix-v5": (761.4, 7242.6), "Pitfall-v5": (-229.4, 6463.7),
    "Pong-v5": (-20.7, 14.6), "PrivateEye-v5": (24.9, 69571.3), "Qbert-v5": (163.9, 13455),
    "Riverraid-v5": (1338.5, 17118), "RoadRunner-v5": (11.5, 7845), "Robotank-v5": (2.2, 11.9),
    "Seaquest-v5": (68.4, 42054.7), "Skiing-v5": (-17098.1, -4336.9), "Solaris-v5": (1236.3, 12326.7),
    "SpaceInvaders-v5": (148, 1668.7), "StarGunner-v5": (664, 10250), "Surround-v5": (-10, 6.5),
    "Tennis-v5": (-23.8, -8.3), "TimePilot-v5": (3568, 5229.2), "Tutankham-v5": (11.4, 167.6),
    "UpNDown-v5": (533.4, 11693.2), "Venture-v5": (0, 1187.5), "VideoPinball-v5": (16256.9, 17667.9),
    "WizardOfWor-v5": (563.5, 4756.5), "YarsRevenge-v5": (3092.9, 54576.9), "Zaxxon-v5": (32.5, 9173.3),
}  # fmt: skip

# ======================================================================================================================
# Checkpoint and resume
# ======================================================================================================================


def replace_file(path: Path, content, previous: Path | None = None) -> None:
    """Writes bytes beside their place, flushes them to the disk and renames: a crash leaves the old file or the new.

    The old one is kept as `previous` if that is given. Errors: OSError, and then the old one is untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if previous is not None and path.exists():
        os.replace(path, previous)
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)  # or a power cut may undo the renames
    os.close(directory)


SAVING = io.BytesIO()  # one for all, so that saving takes no new memory; on a full disk torch.save to a file is unclear


def save_file(path: Path, content: dict, previous: Path | None = None) -> None:
    """torch.save by way of `replace_file`; torch.load(path, weights_only=True) reads it."""
    SAVING.seek(0)
    torch.save(content, SAVING)
    with SAVING.getbuffer()[: SAVING.tell()] as written:
        replace_file(path, written, previous)


def snapshot(q_network: nn.Module, optimizer: torch.optim.Optimizer, *generators: torch.Generator) -> dict:
    """The state of all that learns or is random, not copied."""
    return {
        "q_network": q_network.state_dict(),
        "num_actions": q_network.num_actions,
        "optimizer": optimizer.state_dict(),
        "generators": [generator.get_state() for generator in generators],
        "device": generators[0].device.type,
    }


def copied(state, earlier=None):
    """A copy of nested dictionaries, lists and tuples of tensors, written into the tensors of an earlier copy if given.

    New tensors every iteration, tens of MB, would fragment the heap: the process grows for hours.
    """
    if isinstance(state, torch.Tensor):
        kind = (state.shape, state.dtype, state.device)
        fits = isinstance(earlier, torch.Tensor) and (earlier.shape, earlier.dtype, earlier.device) == kind
        return earlier.copy_(state) if fits else state.clone()
    if isinstance(state, dict):
        earlier = earlier if isinstance(earlier, dict) else {}
        return {name: copied(value, earlier.get(name)) for name, value in state.items()}
    if isinstance(state, list | tuple):
        earlier = earlier if isinstance(earlier, list | tuple) and len(earlier) == len(state) else [None] * len(state)
        return type(state)(copied(value, old) for value, old in zip(state, earlier))
    return state


def restore(saved: dict, q_network: nn.Module, optimizer: torch.optim.Optimizer, *generators: torch.Generator) -> None:
    """Undoes `snapshot`. Between a GPU and a CPU, and on ranks other than 0, generators are seeded anew."""
    load_network(q_network, saved)
    optimizer.load_state_dict(copied(saved["optimizer"]))  # it keeps the very tensors
    for generator, state in zip(generators, saved["generators"]):
        if generator.device.type == saved["device"] and RANK == 0:
            generator.set_state(state)
        else:
            generator.manual_seed(generator.initial_seed() + saved["global_step"])


def load_network(q_network: nn.Module, saved: dict) -> None:
    """Gives a network its saved parameters; refuses those of another network."""
    try:
        q_network.load_state_dict(saved["q_network"])
    except RuntimeError:
        refuse("the network in this script is not the one that was saved: layers or shapes differ")


def load_saved(option: Literal["resume", "evaluate", "checkpoint"], place: str) -> tuple[Path, dict]:
    """The file that a flag names, and what it holds, on the CPU; refuses what is none.

    Of a run directory it takes checkpoint.pt; if that is damaged the one before it; failing both, and not to resume,
    model.pt.
    """
    path = Path(place)
    candidates = [path]
    if os.path.isdir(path):
        names = ["checkpoint.pt", "checkpoint_previous.pt", "model.pt"]
        candidates = [path / name for name in names if os.path.exists(path / name)]
    for candidate in candidates:
        try:
            with zipfile.ZipFile(candidate) as archive:
                if archive.testzip():  # torch does not compare the checksums
                    raise ValueError("its checksum is wrong")
            saved = torch.load(candidate, map_location="cpu", weights_only=True)
            needed = {"script", "args", "q_network", "global_step"}
            if not isinstance(saved, dict) or not needed <= saved.keys() or not isinstance(saved["args"], dict):
                raise ValueError("it is no file of these scripts")
        except FileNotFoundError:
            continue
        except OSError as error:
            refuse(f"{flag(option)} {candidate}: cannot be read: {error.strerror}")
        except Exception:  # torch.load has an error of another kind for each kind of damage
            problem = "damaged, or no file of these scripts"
        else:
            if option != "resume" or "optimizer" in saved:
                return candidate, saved
            problem = "holds the network alone; --resume needs checkpoint.pt, and --evaluate takes this"
        if candidate == candidates[-1]:
            refuse(f"{flag(option)} {candidate}: {problem}")
        say(f"{candidate}: {problem}; trying {candidates[candidates.index(candidate) + 1].name}")
    exists = os.path.exists(path)
    runs = f"*__{Path(__file__).stem}__*" if option == "resume" else "*"  # a run is resumed by the script that began it
    found = sorted((path if exists else path.parent).glob(f"{runs}/checkpoint.pt"), key=os.path.getmtime)
    hint = f"; the newest run there that can be: {found[-1].parent}" if found else ""
    refuse(f"{flag(option)} {place}: {'no checkpoint in it' if exists else 'does not exist'}{hint}")


def resumed_dir(place: str) -> Path:
    """The run directory that `--resume` means: the one named, or the one that holds the file named."""
    return Path(place) if os.path.isdir(place) else Path(place).parent


def cut_metrics(path: Path, step: int) -> None:
    """Cuts the lines after a step off metrics.csv, and an unfinished last one: the resumed run writes them again."""
    with path.open("rb+") as file:
        end = len(file.readline())  # the names of the columns
        for line in file:
            first = line.partition(b",")[0]
            if not line.endswith(b"\n") or not first.isdigit() or int(first) > step:
                break
            end += len(line)
        file.truncate(end)


def lock(file, run_dir: Path) -> None:
    """Holds a run directory for this process, as long as the file is open; refuses where another one holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"--resume {run_dir}: another process is at work in this run directory")
    except OSError:
        pass  # a file system without locks


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def on_signals(handler):
    """Sets what SIGINT (Ctrl-C), SIGTERM and SIGHUP do within the block; what was ignored before stays ignored."""
    main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
    before = {number: signal.getsignal(number) for number in STOPPING if main_thread}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# ======================================================================================================================
# Logging and progress
# ======================================================================================================================


def say(text: str, rank: int = 0) -> None:
    """Prints a line on stderr without tearing a progress bar, on one of several ranks alone."""
    if rank != RANK:
        return
    with contextlib.suppress(BrokenPipeError):  # no one reads it: no reason to stop
        tqdm.write(text, file=sys.stderr)


def new_run_dir(args, what: str) -> Path:
    """A new directory under --runs-dir, of a name that no other process takes."""
    name = f"{args.env_id}__{what}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    run_dir = Path(args.runs_dir) / name
    run_dir.mkdir(parents=True)
    return run_dir


class RunLog:
    """A run directory and all that is written there or shown: args.json, metrics.csv, TensorBoard, W&B, checkpoints,
    progress. In `saved` is the checkpoint that the run goes on from, if any.

    A bar on a terminal; elsewhere a plain line every ten seconds. A context manager: every exit path closes the files,
    and where an error or a signal ends the run, the state at the end of its last iteration is saved.
    """

    def __init__(self, args, saved: dict):
        self.args = args
        self.run_dir = resumed_dir(args.resume) if saved else new_run_dir(args, Path(__file__).stem)
        self.step = self.saved_step = saved.get("global_step", 0)
        self.kept = saved and saved | {"args": asdict(args)}  # the state to save, whatever may happen
        self.spare = None  # the copy before it, whose memory the next one takes
        self.csv_file = (self.run_dir / "metrics.csv").open("a", newline="")
        lock(self.csv_file, self.run_dir)
        if saved:
            # First of all the disk holds this state, with the flags of now, and metrics.csv no more than belongs to it.
            save_file(self.run_dir / "checkpoint.pt", self.kept)
            cut_metrics(self.run_dir / "metrics.csv", self.step)
        self.csv = None  # begins with the first line, whose keys are the columns
        replace_file(self.run_dir / "args.json", json.dumps(asdict(args), indent=1).encode() + b"\n")
        self.evaluated_step = None  # of an evaluation that is in TensorBoard already
        with contextlib.suppress(OSError, ValueError):
            report = json.loads((self.run_dir / "eval.json").read_text())
            self.evaluated_step = report["protocol"]["training_steps"]
        self.events = SummaryWriter(str(self.run_dir), purge_step=self.step + 1 if saved else None)
        self.wandb = None
        if args.track:
            import wandb

            name = self.run_dir.resolve().name
            self.wandb = wandb.init(
                project="adaptive-batch-scaling", name=name, id=name, resume="allow", config=asdict(args)
            )
        self.total = args.total_timesteps
        self.on_cpu = not (args.cuda and torch.cuda.is_available())
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, initial=self.step, unit="step", unit_scale=True, smoothing=0.02)
        say(f"run directory: {self.run_dir}" + (f", resumed at step {self.step:,}" if saved else ""))
        self.last_line = time.monotonic()
        self.start = self.last_line - saved.get("wall_clock", 0.0)
        self.marks = deque(maxlen=21)  # (time, step) at the ends of iterations; the first iteration is the warm-up

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        with contextlib.ExitStack() as all_of_these:  # the last one first, and each whatever becomes of the others
            if self.wandb is not None:
                all_of_these.callback(self.wandb.finish)
            all_of_these.callback(self.events.close)
            all_of_these.callback(self.csv_file.close)
            if error is not None:
                all_of_these.callback(self.rescue, error)
            if self.bar is not None:
                all_of_these.callback(self.bar.close)

    def keep(self, state: dict) -> None:
        """Takes the state at an iteration's end: a copy for whatever may end the run, and now and then a checkpoint.

        Errors: OSError; FloatingPointError for a parameter that is not finite, and then the state before it stays.
        """
        if not torch.stack([values.isfinite().all() for values in state["q_network"].values()]).all():
            raise FloatingPointError(f"a parameter of the network is not finite at step {self.step:,}")
        about = {"script": Path(__file__).stem, "args": asdict(self.args), "wall_clock": self.marks[-1][0] - self.start}
        # Into the copy before the last one: a signal in the middle of this leaves the last one whole.
        self.kept, self.spare = copied(state | about, self.spare), self.kept
        next_step = self.step + self.args.rollout_lengths()[1] * self.args.num_envs  # at most
        if self.args.checkpoint_interval and next_step > self.saved_step + self.args.checkpoint_interval:
            self.save()

    def save(self) -> None:
        """Writes the state that was kept last as checkpoint.pt, after its metrics, and keeps the one before it."""
        if self.kept["global_step"] == self.saved_step:
            return
        with contextlib.suppress(Exception):  # a broken event file is no reason to lose the checkpoint
            self.events.flush()
        os.fsync(self.csv_file.fileno())
        save_file(self.run_dir / "checkpoint.pt", self.kept, self.run_dir / "checkpoint_previous.pt")
        self.saved_step = self.kept["global_step"]

    def save_final(self) -> None:
        """Writes the last checkpoint, and of it as model.pt what playing needs."""
        self.save()
        model = {name: self.kept[name] for name in ("script", "args", "global_step", "num_actions", "q_network")}
        save_file(self.run_dir / "model.pt", model)

    def rescue(self, error: BaseException) -> None:
        """Saves what was kept, when something has ended the run before its end, and says how to go on."""
        names = {128 + number: number.name for number in STOPPING}
        cause = names.get(error.code) if isinstance(error, SystemExit) else None
        cause = cause or f"{type(error).__name__}: {error}"
        with on_signals(signal.SIG_IGN):
            if not self.kept:
                say(f"stopped by {cause}, before the first iteration's end: there is nothing to go on with")
                return
            try:
                self.save()
            except Exception as failure:
                say(f"step {self.kept['global_step']:,} could not be saved in {self.run_dir}: {failure}")
            if self.saved_step == 0:
                say(f"stopped by {cause}; no checkpoint has been written: there is nothing to go on with")
                return
            command = ["python", os.path.relpath(__file__), "--resume", str(self.run_dir)]
            say(f"stopped by {cause}; checkpoint of step {self.saved_step:,}; go on with\n  {shlex.join(command)}")

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
            if self.csv_file.tell() == 0:
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
        if speed and len(self.marks) == 2 and self.on_cpu and (hours := (self.total - step) / speed / 3600) > 2:
            say(
                f"no GPU in use: at {speed:.0f} steps/s this run takes about {hours:.0f} hours; "
                'the README has a smaller one, under "Half an hour on two cores"'
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
            say(f"{step:,}/{self.total:,} steps ({step / self.total:.0%})  {shown}  left {left}")
        self.step = step

    def write_evaluation(self, mean: float) -> None:
        """Adds the evaluation's mean raw score to TensorBoard and W&B at the last step, unless it is there already."""
        if self.step == self.evaluated_step:
            return
        self.events.add_scalar("eval/return", mean, self.step)
        if self.wandb is not None:
            self.wandb.log({"eval/return": mean}, step=self.step)


def set_up_torch(args) -> torch.device:
    """The device to use; before that, torch's threads and the C library's memory, for the whole process."""
    if args.torch_threads or NUM_RANKS > 1:  # torchrun allows one, whatever the cores
        torch.set_num_threads(args.torch_threads or cores_per_rank())
    with contextlib.suppress(AttributeError):  # glibc alone has it
        # Let freed memory wait for its next use. By default glibc hands large blocks back, each activation of a large
        # minibatch among them, and the page faults on the next one take up to two fifths of a CPU's training time.
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink
    if not (args.cuda and torch.cuda.is_available()):
        return torch.device("cpu")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


class SilentLog(contextlib.nullcontext):
    """What the other ranks have in place of rank 0's RunLog."""

    run_dir = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # torchrun ends the others by SIGTERM, often before they miss the lost one.
        if isinstance(error, SystemExit) and error.code in [128 + number for number in STOPPING]:
            say(f"rank {RANK}: stopped by {signal.Signals(error.code - 128).name}", RANK)

    def ignore(self, *args, **kwargs) -> None:
        pass

    write = keep = save_final = write_evaluation = ignore


def announce(args, device: torch.device) -> None:
    """Start-up lines: what runs where, and what the next seconds are spent on."""
    threads = torch.get_num_threads()
    where = f"CPU, {threads} thread{'s' * (threads > 1)}"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    what = f"around {args.checkpoint}" if getattr(args, "checkpoint", "") else f"{args.total_timesteps:,} steps"
    say(
        f"{args.env_id}, {args.network} network, seed {args.seed}, {what} on {where}\n"
        f"building {args.num_envs} environments{f' in {NUM_RANKS} processes' if NUM_RANKS > 1 else ''}, "
        "about 0.1 s each (Ctrl-C ends this at once) ..."
    )


# ======================================================================================================================
# Checking the command line
# ======================================================================================================================

LIMITS = (  # (flags, what is allowed, test); flags that a script lacks are passed over
    (
        "num_envs base_num_steps num_minibatches update_epochs divergence_interval divergence_states "
        "divergence_window divergence_warmup probe_interval probe_window probe_states branch_interval",
        "1 to 1000000",
        lambda x: 1 <= x <= 10**6,
    ),
    # 2 or more: a rollout of one step may hold nothing but reset rows, and then no state to measure divergence on.
    ("num_steps num_steps_min noise_parts", "2 to 1000000", lambda x: 2 <= x <= 10**6),
    ("num_steps_max eval_episodes twin_states opening_steps", "0 to 1000000", lambda x: 0 <= x <= 10**6),
    ("env_threads torch_threads", "0 to 1024", lambda x: 0 <= x <= 1024),
    ("micro_batch_size", "0 to 1e12", lambda x: 0 <= x <= 10**12),
    ("total_timesteps", "1 to 1e12", lambda x: 1 <= x <= 10**12),
    ("checkpoint_interval", "0 to 1e12", lambda x: 0 <= x <= 10**12),
    ("seed", "0 to 4294967295", lambda x: 0 <= x < 2**32),
    ("learning_rate max_grad_norm", "a finite number above 0", lambda x: 0 < x < math.inf),
    (
        "gamma q_lambda start_e end_e eval_epsilon repeat_action_probability batch_ema",
        "0 to 1",
        lambda x: 0 <= x <= 1,
    ),
    ("noise_ema", "0 to below 1", lambda x: 0 <= x < 1),
    ("exploration_fraction", "above 0, at most 1", lambda x: 0 < x <= 1),
    ("divergence_low divergence_high", "between 0 and 1, both excluded", lambda x: 0 < x < 1),
)


# Flags that are taken from the saved run, and flags that may differ from it (with --resume all others are taken).
TAKEN = {
    "evaluate": "env_id network bf16 seed episodic_life repeat_action_probability full_action_space",
    "checkpoint": "env_id network seed total_timesteps learning_rate num_envs num_steps num_minibatches update_epochs "
    "gamma q_lambda start_e end_e exploration_fraction max_grad_norm episodic_life reward_clip "
    "repeat_action_probability full_action_space bf16",
}
FREE = {
    "resume": "resume total_timesteps checkpoint_interval eval_episodes eval_epsilon capture_video track cuda "
    "compile env_threads torch_threads micro_batch_size",
    "evaluate": "evaluate eval_episodes eval_epsilon capture_video cuda env_threads torch_threads seed runs_dir "
    "episodic_life repeat_action_probability",
    "checkpoint": "checkpoint num_steps num_envs num_minibatches update_epochs learning_rate seed runs_dir cuda "
    "torch_threads env_threads micro_batch_size probe_states probe_lengths noise_parts twin_states opening_steps",
}


DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


def refuse(message: str) -> NoReturn:
    """Ends the program as a wrong command line does: one line on stderr, exit code 2."""
    if RANK == 0:
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
    """Args from the command line; with --resume or --evaluate, from those of the saved run and the command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse_flags(argv, Args())
    options = [name for name in ("resume", "evaluate", "checkpoint") if getattr(args, name, "")]
    if len(options) > 1:
        refuse(f"{flag(options[0])} and {flag(options[1])}: one or the other")
    if not options:
        return args
    (option,) = options
    path, saved = load_saved(option, getattr(args, option))
    script, known = saved["script"], {field.name for field in fields(Args)}
    taken = known if option == "resume" else set(TAKEN[option].split())
    if option == "resume" and script != Path(__file__).stem:
        refuse(f"--resume {path}: made by {script}.py; go on with python {script}.py")
    if option == "checkpoint":
        taken -= {"num_steps"} - saved["args"].keys()  # an adaptive run has none
    if not {"env_id", "network"} <= saved["args"].keys() or (option == "resume" and not saved["args"].keys() <= known):
        refuse(f"{flag(option)} {path}: made by another version of {script}.py, with other flags")
    run = {name: saved["args"][name] for name in taken & saved["args"].keys()}  # newer flags: at their defaults
    if option == "resume":
        run |= {"resume": "", "runs_dir": str(resumed_dir(args.resume).parent)}
    run = Args(**run)
    args = parse_flags(argv, run)
    for name in sorted(known - set(FREE[option].split())):
        new, old = getattr(args, name), getattr(run, name)
        if new != old:
            shown = (flag(name) if new else flag("no_" + name)) if isinstance(new, bool) else f"{flag(name)} {new}"
            if name == "runs_dir":
                refuse(f"{shown}: a resumed run stays in its directory, {resumed_dir(args.resume)}")
            why = f"{path} was made with {old}, and that stays" if name in taken else "it would have no effect"
            free = " ".join(flag(free) for free in FREE[option].split()[1:])
            refuse(f"{shown}: {why}; --{option} allows to change {free}")
    if option == "resume" and args.total_timesteps < run.total_timesteps:
        refuse(f"--total-timesteps {args.total_timesteps}: --resume may raise it, not lower it; "
               f"the run has {run.total_timesteps}")  # fmt: skip
    return args


def parse_flags(argv: list[str], defaults):
    """Args from flags alone; what tyro refuses ends with its message on one line and exit code 2."""
    for this, following in itertools.pairwise([*argv, "-"]):
        if this.rstrip("=") in ("--resume", "--evaluate", "--checkpoint") and ("=" in this or not following):
            refuse(f"{this.rstrip('=')}: the name that follows is empty")
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
            return tyro.cli(Args, args=argv, default=defaults, registry=registry, description=__doc__.splitlines()[0])
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

    if NUM_RANKS > 1 and (args.evaluate or hasattr(args, "probe_interval")):
        refuse("torchrun: for training alone; start this with python, as one process")
    if args.num_envs % NUM_RANKS or getattr(args, "divergence_states", NUM_RANKS) < NUM_RANKS:
        refuse(f"--num-envs {args.num_envs}, --divergence-states {args.divergence_states}: torchrun's {NUM_RANKS} "
               "processes must share them out, the environments equally")  # fmt: skip
    if args.cuda and 0 < torch.cuda.device_count() < LOCAL_RANKS:
        refuse(f"torchrun: {LOCAL_RANKS} processes need as many GPUs, and there are {torch.cuda.device_count()}")
    shortest, longest = args.rollout_lengths()
    if shortest > longest:
        refuse(f"--num-steps-min {shortest}: more than the longest rollout, {longest} steps (--num-steps-max)")
    rows = shortest * (args.num_envs // NUM_RANKS)  # of each process
    if rows < 2 * args.num_minibatches:
        refuse(f"--num-minibatches {args.num_minibatches}: each needs two rows or more, and the shortest rollout has "
               f"{rows} ({shortest} steps x {args.num_envs // NUM_RANKS} environments); "
               f"allowed is up to {rows // 2}")  # fmt: skip
    if args.total_timesteps < rows * NUM_RANKS:
        refuse(f"--total-timesteps {args.total_timesteps}: less than one rollout, which is {rows * NUM_RANKS} steps "
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
    needed = (longest + 1) * args.num_envs // NUM_RANKS * LOCAL_RANKS * 4 * 84 * 84 / 2**30  # [GiB]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if args.cuda and torch.cuda.is_available():
        memory = LOCAL_RANKS * torch.cuda.get_device_properties(0).total_memory / 2**30
    if needed > memory:
        refuse(f"--num-envs {args.num_envs}: rollouts of up to {longest} steps take {needed:,.0f} GiB, and there are "
               f"{memory:,.0f}; take fewer environments or shorter rollouts")  # fmt: skip
    if args.capture_video and not args.eval_episodes:
        refuse("--capture-video: films the first evaluation game, and --eval-episodes 0 asks for none")
    if args.capture_video and args.repeat_action_probability:
        refuse(f"--capture-video: the referee cannot replay random repeats of actions "
               f"(--repeat-action-probability {args.repeat_action_probability})")  # fmt: skip
    if args.evaluate and not args.eval_episodes:
        refuse("--eval-episodes 0: --evaluate needs one or more")
    if not args.runs_dir:
        refuse("--runs-dir: allowed is the name of a directory, not an empty one")
    if RANK:
        return  # rank 0 alone writes
    name, place = ("resume", resumed_dir(args.resume)) if args.resume else ("runs_dir", Path(args.runs_dir))
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{flag(name)} {place}: cannot be made: {error.strerror}")
    if not os.access(place, os.W_OK | os.X_OK):
        refuse(f"{flag(name)} {place}: cannot be written to; choose a directory of yours")
    if args.resume:
        try:
            with (place / "metrics.csv").open("r+") as file:
                lock(file, place)
                if not file.readline().startswith("global_step,"):
                    raise OSError(0, "its first line does not begin with global_step")
        except OSError as error:
            refuse(f"--resume {place}: is no run directory to go on in: metrics.csv: {error.strerror}")


# ======================================================================================================================
# Main
# ======================================================================================================================


def check_probe_args(args: Args) -> None:
    """Refuses measurements that cannot be made."""
    if args.branch_interval % args.probe_interval:
        refuse(f"--branch-interval {args.branch_interval}: must be a multiple of --probe-interval, "
               f"{args.probe_interval}")  # fmt: skip
    if not args.probe_lengths or len(set(args.probe_lengths)) < len(args.probe_lengths):
        refuse(f"--probe-lengths {' '.join(map(str, args.probe_lengths))}: name one or more, each once")
    for length in args.probe_lengths:
        if not 2 <= length <= 4096 or length * args.num_envs < 2 * args.num_minibatches:
            refuse(f"--probe-lengths {length}: allowed is 2 to 4096, and two rows or more for each of "
                   f"{args.num_minibatches} minibatches")  # fmt: skip
    if args.num_envs < 2:
        refuse("--num-envs 1: the noise scale needs two or more environments")
    rows = (max(128, *args.probe_lengths) + 1) * (args.num_envs + max(2, args.num_envs // 4))
    rows += max(args.probe_lengths) * args.num_envs  # copied for a branch
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if rows * 4 * 84 * 84 / 2**30 > memory:
        refuse(f"--probe-lengths {max(args.probe_lengths)}: the probe's rollouts take "
               f"{rows * 4 * 84 * 84 / 2**30:,.0f} GiB, and there are {memory:,.0f}")  # fmt: skip
    longest = args.num_steps_max or (64 if args.network == "base" else 128)
    if args.num_steps_min > longest:
        refuse(f"--num-steps-min {args.num_steps_min}: more than --num-steps-max, {longest} steps")


def main(argv: list[str] | None = None) -> dict:
    """Runs the script for a command line (sys.argv by default); returns what `train` returns, or the evaluation.

    Exit codes: 2 for a command line that is refused, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, else 1 for
    what went wrong.
    """
    with on_signals(signal.SIG_DFL):
        args = parse_args(argv)
        check_args(args)
        check_probe_args(args)

    def stop(number, frame):
        raise SystemExit(128 + number)

    try:
        with on_signals(stop):
            result = evaluate_saved(args) if args.evaluate else train(args)
    except (OSError, FloatingPointError, ReplayError, RankLost) as error:
        if isinstance(error, OSError) and error.errno not in DISK_ERRORS:
            raise
        say(f"{Path(__file__).name}: error: {error}", RANK if isinstance(error, RankLost) else 0)
        raise SystemExit(1) from None
    if args.evaluate or args.checkpoint:
        return result
    text = f"{result['global_step']:,} steps, {result['gradient_steps']:,} gradient steps"
    if not math.isnan(result["episodic_return"]):
        text += f"; mean raw score {result['episodic_return']:.1f} in training (the last 100 games, or fewer)"
    if not math.isnan(result["eval_return"]):
        text += f"; {result['eval_return']:.1f} in the evaluation"
    say(f"{text}\ntensorboard --logdir {shlex.quote(args.runs_dir)}")
    return result


if __name__ == "__main__":
    main()
