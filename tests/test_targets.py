"""Q(lambda) targets (Gallici et al. 2025): a forward-view oracle, cases worked by hand, and the well-known faults.

The oracle never looks one target ahead: it averages explicit n-step returns, so it shares no step with a recursion.
T rows (time first), N environments.
"""

import inspect

import numpy as np
import pytest
import torch

DRAWS = 300
DEVICES = ["cpu", "meta"] + (["cuda"] if torch.cuda.is_available() else [])


def forward_view(rewards, next_values, terminal, truncated, gamma, q_lambda):
    """Mix the n-step returns of every row with weights (1 - lambda) * lambda^(n-1); float64, (T, N).

    The longest return ends at the first done or at the last row, and takes all the remaining weight.
    """
    num_rows, num_envs = rewards.shape
    done = terminal | truncated
    targets = np.empty((num_rows, num_envs))
    for t, env in np.ndindex(num_rows, num_envs):
        last = t
        while last < num_rows - 1 and not done[last, env]:
            last += 1
        longest = last - t + 1
        targets[t, env] = 0.0
        for n in range(1, longest + 1):
            n_step_return = sum(gamma**i * rewards[t + i, env] for i in range(n))
            if not terminal[t + n - 1, env]:
                n_step_return += gamma**n * next_values[t + n - 1, env]
            weight = q_lambda ** (n - 1) * (1.0 if n == longest else 1.0 - q_lambda)
            targets[t, env] += weight * n_step_return
    return targets


def random_rollout(rng):
    """Draw rewards and next values (T, N) float32, then terminal and truncated (T, N) bool, which may coincide."""
    shape = (rng.integers(1, 13), rng.integers(1, 6))
    rewards, next_values = (rng.normal(scale=3.0, size=shape).astype(np.float32) for _ in range(2))
    terminal, truncated = (rng.random(shape) < rng.choice([0.0, 0.15, 0.5]) for _ in range(2))
    return rewards, next_values, terminal, truncated


def random_weight(rng):
    """Draw a gamma or lambda: 0, 1 or anything between."""
    return float(rng.choice([0.0, 1.0, rng.random()]))


def script_targets(script, rollout, gamma, q_lambda):
    """Call the script on numpy arrays; the answer is a tensor."""
    return script.q_lambda_targets(*(torch.from_numpy(array) for array in rollout), gamma, q_lambda)


def one_env(script, rewards, next_values, gamma, q_lambda, terminal_rows=(), truncated_rows=()):
    """Targets of a single environment as a list; flags are given as the rows that carry them."""
    rows = torch.arange(len(rewards)).unsqueeze(1)  # (T, 1)
    return (
        script.q_lambda_targets(
            rewards=torch.tensor(rewards, dtype=torch.float32).unsqueeze(1),
            next_values=torch.tensor(next_values, dtype=torch.float32).unsqueeze(1),
            terminal=torch.isin(rows, torch.tensor(terminal_rows, dtype=torch.int64)),
            truncated=torch.isin(rows, torch.tensor(truncated_rows, dtype=torch.int64)),
            gamma=gamma,
            q_lambda=q_lambda,
        )
        .squeeze(1)
        .tolist()
    )


# ---- oracle ----


def test_random_rollouts_match_the_forward_view(script):
    rng = np.random.default_rng(0)
    for draw in range(DRAWS):
        rollout = random_rollout(rng)
        gamma, q_lambda = random_weight(rng), random_weight(rng)
        rewards, next_values, terminal, truncated = rollout
        expected = forward_view(rewards.astype(float), next_values.astype(float), terminal, truncated, gamma, q_lambda)
        actual = script_targets(script, rollout, gamma, q_lambda).numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4, err_msg=f"draw {draw}")


# ---- Small cases from public reports of faults in scripts of this kind ----


def test_case_1_three_rows_by_hand(script):
    assert one_env(script, [0, 0, 0], [1, 2, 4], gamma=1.0, q_lambda=0.5) == [2.0, 3.0, 4.0]


def test_case_2_nothing_after_a_terminal_reaches_it(script):
    first, second, _ = one_env(script, [0, 1, 0], [2, 1000, 1000], gamma=0.99, q_lambda=0.65, terminal_rows=[1])
    assert second == 1.0
    assert first == pytest.approx(0.99 * (0.65 * 1.0 + 0.35 * 2.0))
    other = one_env(script, [0, 1, 77], [2, -500, 3], gamma=0.99, q_lambda=0.65, terminal_rows=[1])
    assert other[:2] == [first, second]


def test_case_3_truncation_bootstraps_from_the_true_last_observation(script):
    targets = one_env(script, [0, 1, 0, 0], [3, 5, 1000, 1000], gamma=0.9, q_lambda=0.65, truncated_rows=[1])
    assert targets[1] == pytest.approx(1.0 + 4.5)
    assert targets[0] == pytest.approx(0.9 * (0.65 * 5.5 + 0.35 * 3.0))


def test_case_4_game_over_on_the_step_of_the_time_limit_is_a_terminal(script):
    targets = one_env(script, [0, 3, 0], [2, 1000, 1000], 0.9, 0.5, terminal_rows=[1], truncated_rows=[1])
    assert targets[1] == 3.0
    assert targets[0] == pytest.approx(0.9 * (0.5 * 3.0 + 0.5 * 2.0))


def test_case_5_terminal_on_the_last_row(script):
    targets = one_env(script, [1, 2], [6, 1000], gamma=0.5, q_lambda=0.5, terminal_rows=[1])
    assert targets == [1.0 + 0.5 * (0.5 * 2.0 + 0.5 * 6.0), 2.0]


def test_case_5_truncation_on_the_last_row(script):
    targets = one_env(script, [1, 2], [6, 8], gamma=0.5, q_lambda=0.5, truncated_rows=[1])
    assert targets == [1.0 + 0.5 * (0.5 * 6.0 + 0.5 * 6.0), 2.0 + 0.5 * 8.0]


def test_case_6_actions_play_no_part_in_the_bootstrap(script):
    """Values come in as maxima over actions and the function is given nothing else to bootstrap from."""
    names = list(inspect.signature(script.q_lambda_targets).parameters)
    assert names == ["rewards", "next_values", "terminal", "truncated", "gamma", "q_lambda"]
    q_values = torch.tensor([[7.0, -7.0], [-3.0, 5.0], [2.0, 1.0]])  # (T, A); suppose that action 0 is always taken
    best = q_values.max(dim=1).values.tolist()
    assert one_env(script, [1, 1, 1], best, gamma=1.0, q_lambda=0.0) == [8.0, 6.0, 3.0]
    assert one_env(script, [1, 1, 1], best, gamma=1.0, q_lambda=1.0) == [5.0, 4.0, 3.0]  # traces are not cut either


# ---- Well-known faults ----


@pytest.mark.parametrize("kind", ["terminal_rows", "truncated_rows"])
@pytest.mark.parametrize("done_row", range(5))
def test_return_does_not_leak_across_a_done(script, kind, done_row):
    """Other rewards and values after the done leave all targets up to it as they were, and change those after it."""
    rewards, values = [1.0, -2.0, 3.0, -4.0, 5.0, -6.0], [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    kept = done_row + 1
    other_rewards = rewards[:kept] + [1e6] * (6 - kept)
    other_values = values[:kept] + [-2e6] * (6 - kept)
    before = one_env(script, rewards, values, 0.99, 0.65, **{kind: [done_row]})
    after = one_env(script, other_rewards, other_values, 0.99, 0.65, **{kind: [done_row]})
    assert after[:kept] == before[:kept]
    assert all(x != y for x, y in zip(after[kept:], before[kept:], strict=True))


def test_done_mask_sits_on_its_own_row(script):
    """With gamma = lambda = 1 and powers of two, a target spells out which rewards and which value it holds."""
    rewards, values = [1, 2, 4, 8, 16], [32, 64, 128, 256, 512]
    assert one_env(script, rewards, values, 1.0, 1.0, terminal_rows=[2]) == [7, 6, 4, 8 + 16 + 512, 16 + 512]
    assert one_env(script, rewards, values, 1.0, 1.0, truncated_rows=[2]) == [
        7 + 128, 6 + 128, 4 + 128, 8 + 16 + 512, 16 + 512,
    ]  # fmt: skip


def test_every_next_value_enters_with_its_own_weight(script):
    """Entry [t][s] is the share of next_values[s] in target t; a common scan gets the second-to-last row wrong."""
    shares = [one_env(script, [0, 0, 0], unit_values, gamma=0.5, q_lambda=0.5) for unit_values in torch.eye(3).tolist()]
    assert [list(row) for row in zip(*shares, strict=True)] == [
        [0.25, 0.0625, 0.03125],
        [0.0, 0.25, 0.125],
        [0.0, 0.0, 0.5],
    ]


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_value_of_the_done_row_counts_only_when_truncated(script, q_lambda):
    def last_target(value, **done):
        return one_env(script, [0, 1, 0], [2, value, 3], 0.5, q_lambda, **done)[1]

    assert last_target(1000, terminal_rows=[1]) == last_target(-4, terminal_rows=[1]) == 1.0
    assert last_target(1000, truncated_rows=[1]) == 501.0
    assert last_target(-4, truncated_rows=[1]) == -1.0


# ---- Properties ----


def test_targets_are_linear_in_rewards_and_values(script):
    rng = np.random.default_rng(1)
    for _ in range(50):
        rewards, values, terminal, truncated = random_rollout(rng)
        other_rewards, other_values = (rng.normal(size=rewards.shape).astype(np.float32) for _ in range(2))
        first = script_targets(script, (rewards, values, terminal, truncated), 0.99, 0.65)
        second = script_targets(script, (other_rewards, other_values, terminal, truncated), 0.99, 0.65)
        mixed_rollout = (2 * rewards - 3 * other_rewards, 2 * values - 3 * other_values, terminal, truncated)
        mixed = script_targets(script, mixed_rollout, 0.99, 0.65)
        torch.testing.assert_close(mixed, 2 * first - 3 * second, rtol=1e-4, atol=1e-4)


def test_environments_do_not_mix(script):
    rng = np.random.default_rng(2)
    for _ in range(50):
        rollout = random_rollout(rng)
        together = script_targets(script, rollout, 0.99, 0.65)
        for env in range(together.shape[1]):
            alone = script_targets(script, tuple(array[:, env : env + 1] for array in rollout), 0.99, 0.65)
            torch.testing.assert_close(together[:, env : env + 1], alone)


def test_inputs_are_left_as_they_were(script):
    """The buffers are the rollout itself: writing targets into them would spoil the loss and the log."""
    tensors = [torch.from_numpy(array) for array in random_rollout(np.random.default_rng(3))]
    copies = [tensor.clone() for tensor in tensors]
    targets = script.q_lambda_targets(*tensors, 0.99, 0.65)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert targets.data_ptr() not in [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
def test_dtype_shape_and_device_are_kept(script, device):
    """On the meta device a tensor made elsewhere, or one read on the host, is an error: it stands in for a GPU."""
    values = torch.zeros(7, 3, device=device)
    flags = torch.zeros(7, 3, dtype=torch.bool, device=device)
    targets = script.q_lambda_targets(values, values.clone(), flags, flags.clone(), 0.99, 0.65)
    assert targets.shape == (7, 3)
    assert targets.dtype == torch.float32
    assert targets.device.type == device
