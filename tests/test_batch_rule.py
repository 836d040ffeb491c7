"""Behavioral Divergence (Park 2026, eq. 3), the batch rule (eqs. 4, 5, 9), epochs (eq. 10) and the epsilon schedule."""

import functools
import math

import numpy as np
import pytest
import torch

LENGTH_MIN, LOW, HIGH = 16, 0.05, 0.95
EMA = 0.9  # weight of the old rollout length

# Eqs. 4 and 5 worked by hand, rounded to 0.1: mean divergence, then the target for 16..64 and for 16..128.
TABLE = [
    (0.05, 64, 128),
    (0.1, 52.7, 101.6),
    (0.2, 41.4, 75.3),
    (0.3, 34.8, 59.8),
    (0.5, 26.5, 40.4),
    (0.95, 16, 16),
]


def actions(*values):
    return torch.tensor(values, dtype=torch.int64)


def apply_times(step, length, times):
    """The rollout length after that many adaptations."""
    for _ in range(times):
        length = step(length)
    return length


# ---- Eq. 3: divergence ----


def test_divergence_is_the_share_of_states_whose_greedy_action_changed(script):
    before = actions(0, 1, 2, 3, 4, 5, 0, 1)
    assert script.behavioral_divergence(before, before.clone()) == 0.0
    assert script.behavioral_divergence(before, (before + 1) % 6) == 1.0
    assert script.behavioral_divergence(before, actions(0, 1, 2, 3, 4, 5, 0, 17)) == 1 / 8
    assert script.behavioral_divergence(before, actions(5, 1, 2, 0, 4, 5, 3, 1)) == 3 / 8
    assert isinstance(script.behavioral_divergence(before, before), float)


def test_divergence_of_random_flips(script):
    """Flip k of M states: k / M, whatever the actions are, in whatever order, and in either direction."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_actions, num_states = int(rng.integers(2, 19)), int(rng.integers(1, 2049))
        num_flips = int(rng.integers(0, num_states + 1))
        before = rng.integers(0, num_actions, num_states)
        after = before.copy()
        flipped = rng.permutation(num_states)[:num_flips]
        after[flipped] = (before[flipped] + rng.integers(1, num_actions, num_flips)) % num_actions
        divergence = script.behavioral_divergence(torch.from_numpy(before), torch.from_numpy(after))
        assert divergence == pytest.approx(num_flips / num_states, abs=1e-6)
        assert 0.0 <= divergence <= 1.0
        assert divergence == script.behavioral_divergence(torch.from_numpy(after), torch.from_numpy(before))


# ---- Eqs. 4 and 5: target length ----


@pytest.mark.parametrize("divergence, up_to_64, up_to_128", TABLE)
def test_target_table(abs_script, divergence, up_to_64, up_to_128):
    for length_max, expected in ((64, up_to_64), (128, up_to_128)):
        target = abs_script.rollout_length_target(divergence, LENGTH_MIN, length_max, LOW, HIGH)
        assert isinstance(target, float)
        assert target == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("length_max", [64, 128])
def test_target_is_exact_at_the_end_points_and_clipped_outside(abs_script, length_max):
    """Alpha is 0 at the low end and 1 at the high end to the last bit; a divergence of 0 has no logarithm."""
    for divergence in (0.0, 1e-9, 0.049, LOW):
        assert abs_script.rollout_length_target(divergence, LENGTH_MIN, length_max, LOW, HIGH) == length_max
    for divergence in (HIGH, 0.951, 1.0):
        assert abs_script.rollout_length_target(divergence, LENGTH_MIN, length_max, LOW, HIGH) == LENGTH_MIN


def test_target_inverts_the_log_scale(abs_script):
    """At divergence = low * (high / low)^alpha the target is alpha of the way down from the largest length."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        low, high = np.sort(rng.uniform(0.01, 0.99, 2))
        length_min = int(rng.integers(1, 65))
        length_max = length_min + int(rng.integers(0, 129))
        alpha = rng.random()
        target = abs_script.rollout_length_target(low * (high / low) ** alpha, length_min, length_max, low, high)
        assert target == pytest.approx(length_max - alpha * (length_max - length_min), abs=1e-6)


def test_target_falls_as_divergence_rises(abs_script):
    """Strictly inside [low, high], flat outside, and never out of [length_min, length_max]."""
    divergences = np.linspace(0.0, 1.0, 1001).tolist()
    targets = [abs_script.rollout_length_target(d, LENGTH_MIN, 64, LOW, HIGH) for d in divergences]
    for divergence, target, following in zip(divergences[:-1], targets[:-1], targets[1:], strict=True):
        assert LENGTH_MIN <= following <= target <= 64
        if LOW + 1e-9 < divergence < HIGH - 1e-9:
            assert following < target


# ---- Eq. 9: moving average ----


def test_ema_weighs_the_old_length(abs_script):
    assert abs_script.adapt_rollout_length(16.0, 64.0, 0.9, 16, 64) == pytest.approx(20.8)
    assert abs_script.adapt_rollout_length(20.0, 50.0, 1.0, 16, 64) == 20.0
    assert abs_script.adapt_rollout_length(20.0, 50.0, 0.0, 16, 64) == 50.0


def test_length_stays_a_float(abs_script):
    """A tenth of a step is progress; the released code rounds it away at every adaptation."""
    length = abs_script.adapt_rollout_length(16.0, 17.0, EMA, 16, 64)
    assert isinstance(length, float)
    assert length == pytest.approx(16.1)


def test_length_is_clipped(abs_script):
    assert abs_script.adapt_rollout_length(80.0, 64.0, EMA, 16, 64) == 64.0
    assert abs_script.adapt_rollout_length(8.0, 16.0, EMA, 16, 64) == 16.0


def test_length_moves_a_tenth_of_the_way(abs_script):
    rng = np.random.default_rng(2)
    for _ in range(300):
        length, target = rng.uniform(16, 64, 2).tolist()
        adapted = abs_script.adapt_rollout_length(length, target, EMA, 16, 64)
        assert adapted - length == pytest.approx((target - length) / 10, abs=1e-9)
        assert 16 <= adapted <= 64


@pytest.mark.parametrize("length_max, adaptations, released_sticks_at", [(64, 44, 55), (128, 52, 119)])
def test_low_divergence_reaches_the_largest_length_and_high_divergence_the_smallest(
    abs_script, length_max, adaptations, released_sticks_at
):
    """The gap shrinks by 0.9 per adaptation, so it is first below half a step after ln(2 * range) / -ln(0.9) of them.

    The released code truncates inside the average; it is run beside ours to show that this test can fail.
    """
    assert adaptations == math.ceil(math.log(2 * (length_max - LENGTH_MIN)) / -math.log(EMA))

    def ours(divergence):
        target = abs_script.rollout_length_target(divergence, LENGTH_MIN, length_max, LOW, HIGH)
        return lambda length: abs_script.adapt_rollout_length(length, target, EMA, LENGTH_MIN, length_max)

    def released(length):
        return int(EMA * length + (1 - EMA) * length_max)

    assert round(apply_times(ours(0.02), float(LENGTH_MIN), adaptations - 1)) < length_max
    assert round(apply_times(ours(0.02), float(LENGTH_MIN), adaptations)) == length_max
    assert apply_times(released, LENGTH_MIN, 1000) == released_sticks_at

    grown = apply_times(ours(0.02), float(LENGTH_MIN), 1000)
    assert grown == pytest.approx(length_max, abs=1e-9)
    assert round(apply_times(ours(0.98), grown, adaptations)) == LENGTH_MIN
    assert apply_times(ours(0.98), grown, 1000) == pytest.approx(LENGTH_MIN, abs=1e-9)


def test_length_settles_on_the_target(abs_script):
    """From either end, at any constant divergence, the length ends at the target and not near it."""
    rng = np.random.default_rng(3)
    for divergence in rng.random(50).tolist():
        target = abs_script.rollout_length_target(divergence, LENGTH_MIN, 128, LOW, HIGH)
        adapt = functools.partial(
            abs_script.adapt_rollout_length, target=target, ema=EMA, length_min=LENGTH_MIN, length_max=128
        )
        assert apply_times(adapt, 16.0, 400) == pytest.approx(target, abs=1e-6)
        assert apply_times(adapt, 128.0, 400) == pytest.approx(target, abs=1e-6)


# ---- Eq. 10: epochs ----


@pytest.mark.parametrize(
    "length, epochs", [(16, 2), (17, 2), (31, 2), (32, 2), (47, 2), (48, 3), (63, 3), (64, 4), (128, 8)]
)
def test_epochs_table(abs_script, length, epochs):
    result = abs_script.update_epochs_for(length, base_epochs=2, base_length=32)
    assert isinstance(result, int)
    assert result == epochs


def test_epochs_keep_gradient_steps_per_environment_step(abs_script):
    """The largest count with epochs / length <= base_epochs / base_length, but at least base_epochs."""
    rng = np.random.default_rng(4)
    for length, base_epochs, base_length in rng.integers(1, [257, 9, 129], (300, 3)).tolist():
        epochs = abs_script.update_epochs_for(length, base_epochs, base_length)
        assert epochs >= base_epochs
        assert (epochs + 1) * base_length > base_epochs * length
        assert epochs == base_epochs or epochs * base_length <= base_epochs * length


# ---- Epsilon ----


def test_epsilon_at_the_points_that_matter(script):
    def epsilon(step):
        return script.epsilon_at(step, start_e=1.0, end_e=0.001, duration=2_000_000)

    assert epsilon(0) == 1.0
    assert epsilon(1_000_000) == pytest.approx(0.5005)
    assert epsilon(2_000_000) == pytest.approx(0.001)
    assert epsilon(2_000_001) == epsilon(20_000_000) == pytest.approx(0.001)


@pytest.mark.parametrize("duration", [1, 0.5, 1e-9])
def test_epsilon_of_a_tiny_duration(script, duration):
    assert script.epsilon_at(0, 1.0, 0.001, duration) == 1.0
    assert script.epsilon_at(1, 1.0, 0.001, duration) == pytest.approx(0.001)
    assert script.epsilon_at(10_000_000, 1.0, 0.001, duration) == pytest.approx(0.001)


def test_epsilon_is_a_straight_line_then_flat(script):
    rng = np.random.default_rng(5)
    for _ in range(300):
        end_e, start_e = np.sort(rng.random(2)).tolist()
        duration = int(rng.integers(1, 1_000_000))
        step = int(rng.integers(0, 2 * duration + 1))
        epsilon = script.epsilon_at(step, start_e, end_e, duration)
        assert isinstance(epsilon, float)
        assert epsilon == pytest.approx(np.interp(step, [0, duration], [start_e, end_e]), abs=1e-9)
