"""The probe: every metric against enumeration or a closed form, the training untouched, the twins that are known.

M states, A actions, T steps per rollout, N environments.
"""

import copy
import csv
import importlib
import itertools
import math
from pathlib import Path

import envpool
import numpy as np
import pytest
import torch
from fake_envpool import Catch, CueGame, fake_make
from PIL import Image
from torch import nn

import divergence_probe as probe
import pqn_fixed_atari

SMALL = (
    "--num-envs 2 --num-minibatches 2 --total-timesteps 960 --eval-episodes 0 --torch-threads 1 --env-threads 1".split()
)
MEASURE = (
    "--probe-interval 2 --probe-window 4 --branch-interval 4 --probe-lengths 4 8 --probe-states 24 --noise-parts 4 "
    "--opening-steps 8 --twin-states 0"
).split()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(module, *flags, game=...): what main returns, on a fake game."""

    def run(module, *flags, game=CueGame):
        monkeypatch.setattr(envpool, "make", fake_make(game))
        resumed = "--resume" in flags
        return module.main([*([] if resumed else [*SMALL, "--runs-dir", str(tmp_path)]), *flags])

    return run


def rows_of(run_dir):
    with open(f"{run_dir}/metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def model_of(run_dir):
    return torch.load(f"{run_dir}/model.pt", weights_only=True)["q_network"]


def same_parameters(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ----------------------------------------------------------------------------------------------------------------------
# Divergence
# ----------------------------------------------------------------------------------------------------------------------


def epsilon_greedy(action, epsilon, num_actions):
    """The policy as a list of probabilities."""
    return [epsilon / num_actions + (1 - epsilon) * (a == action) for a in range(num_actions)]


@pytest.mark.parametrize("num_actions", [2, 3, 6, 18])
def test_total_variation_by_enumeration(num_actions):
    """Half the sum of absolute differences of the two policies, for every pair of actions and of epsilons."""
    epsilons = (0.0, 0.001, 0.3, 0.9, 1.0)
    for first, second, before, after in itertools.product(range(2), range(num_actions), epsilons, epsilons):
        p, q = epsilon_greedy(first, before, num_actions), epsilon_greedy(second, after, num_actions)
        expected = sum(abs(a - b) for a, b in zip(p, q)) / 2
        got = probe.total_variation(torch.tensor([first != second]), before, after, num_actions).item()
        assert got == pytest.approx(expected, abs=1e-6)


def test_total_variation_at_one_epsilon_is_churn_up_to_the_random_share():
    generator = torch.Generator().manual_seed(0)
    q_before, q_after = torch.randn(2, 200, 6, generator=generator)
    found = probe.divergences(q_before, q_after, 0.3, 0.3)
    assert found["total_variation"] == pytest.approx(0.7 * found["churn"])
    assert 0 < found["churn"] < 1


def softmax(q):
    weights = [math.exp(value - max(q)) for value in q]
    return [weight / sum(weights) for weight in weights]


def test_jensen_shannon_distance_by_enumeration():
    """From its definition by entropies: H((p + q) / 2) - (H(p) + H(q)) / 2, in bits, and its root."""

    def entropy(p):
        return -sum(x * math.log2(x) for x in p if x > 0)

    generator = torch.Generator().manual_seed(1)
    q_before, q_after = 2 * torch.randn(2, 50, 5, generator=generator, dtype=torch.float64)
    got = probe.jensen_shannon_distance(q_before, q_after)
    for before, after, distance in zip(q_before.tolist(), q_after.tolist(), got.tolist()):
        p, q = softmax(before), softmax(after)
        mixture = [(a + b) / 2 for a, b in zip(p, q)]
        assert distance**2 == pytest.approx(entropy(mixture) - (entropy(p) + entropy(q)) / 2, abs=1e-12)
    # In `divergences` each policy is at the spread of its own Q.
    logits = [q / probe.action_spread(q) for q in (q_before, q_after)]
    expected = probe.jensen_shannon_distance(*logits).mean().item()
    assert probe.divergences(q_before, q_after, 0.1, 0.1)["js_distance"] == pytest.approx(expected)
    assert probe.divergences(q_before, 10 * q_before, 0.1, 0.1)["js_distance"] == pytest.approx(0, abs=1e-6)


def test_jensen_shannon_distance_is_a_metric_between_0_and_1():
    generator = torch.Generator().manual_seed(2)
    a, b, c = 3 * torch.randn(3, 100, 4, generator=generator, dtype=torch.float64)

    def distance(x, y):
        return probe.jensen_shannon_distance(x, y)

    assert torch.allclose(distance(a, a), torch.zeros(100, dtype=torch.float64), atol=1e-7)
    assert torch.allclose(distance(a, b), distance(b, a))
    assert (distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9).all()
    apart = torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.0, 1000.0]])
    assert distance(*apart).item() == pytest.approx(1.0)


def test_the_value_gap_by_hand():
    """Three states: no flip, a flip between equals, a flip that matters; the spread is of Q after, over the actions."""
    q_before = torch.tensor([[1.0, 0.0], [0.1, 0.0], [1.0, 0.0]])
    q_after = torch.tensor([[2.0, 0.0], [0.0, 0.0 + 1e-6], [0.0, 4.0]])
    found = probe.divergences(q_before, q_after, 0.0, 0.0)
    spread = math.sqrt((1.0 + 0.0 + 4.0) / 3)  # root mean square of the states' standard deviations 1, 0 and 2
    assert found["churn"] == pytest.approx(2 / 3)
    assert found["value_gap"] == pytest.approx((0 + 0 + 4) / 3 / spread, rel=1e-4)
    assert probe.action_spread(q_after) == pytest.approx(spread, rel=1e-4)


def test_scale_and_offset_of_q_change_nothing():
    """Multiplied by ten, or with another value per state, Q is the same policy and the same distance."""
    generator = torch.Generator().manual_seed(3)
    q_before, q_after = torch.randn(2, 100, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(100, 1, generator=generator, dtype=torch.float64)
    found = probe.divergences(q_before, q_after, 0.1, 0.1)
    assert probe.divergences(10 * q_before, 10 * q_after, 0.1, 0.1) == pytest.approx(found)
    assert probe.divergences(q_before + values, q_after + values, 0.1, 0.1) == pytest.approx(found)


def test_equal_policies_and_a_network_without_preferences():
    q_values = torch.randn(10, 4, generator=torch.Generator().manual_seed(4))
    assert probe.divergences(q_values, q_values, 0.1, 0.1) == pytest.approx(
        {"churn": 0, "total_variation": 0, "js_distance": 0, "value_gap": 0}, abs=1e-7
    )
    for value in (0.0, 0.5, -1e6):
        flat = probe.divergences(torch.full((10, 4), value), torch.zeros(10, 4), 0.1, 0.1)
        assert all(distance == 0 for distance in flat.values()), value


# ----------------------------------------------------------------------------------------------------------------------
# Gradient noise scale
# ----------------------------------------------------------------------------------------------------------------------


def test_gradient_noise_scale_in_closed_form():
    """Loss |theta - x|^2 / 2 with x normal around mu: G = theta - mu, S = sigma^2 I, so B = d sigma^2 / |theta - mu|^2.

    Over many rollouts the two estimates must have these means; a biased one would be off by ten standard errors.
    """
    dimension, sigma, rows, parts = 5, 2.0, 32, 8
    theta = nn.Parameter(torch.full((dimension,), 0.5))
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(4000):
        x = sigma * torch.randn(rows, dimension, generator=generator)  # mu = 0

        def loss_of(batch, x=x):
            return (theta - x[batch]).square().sum(dim=1).mean() / 2

        split = torch.arange(rows).tensor_split(parts)  # the rows are independent already
        estimates.append(probe.gradient_noise(loss_of, [theta], split))
    traces, squares = np.array(estimates).T
    for found, expected in ((traces, dimension * sigma**2), (squares, dimension * 0.25)):
        assert found.mean() == pytest.approx(expected, abs=4 * found.std() / math.sqrt(len(found)))
    assert traces.mean() / squares.mean() == pytest.approx(dimension * sigma**2 / (dimension * 0.25), rel=0.1)
    # The naive denominator, the square of the whole rollout's gradient, is biased: this test would notice.
    naive = squares + traces / rows
    assert abs(naive.mean() - dimension * 0.25) > 10 * naive.std() / math.sqrt(len(naive))
    assert theta.grad is None


def test_gradient_noise_by_brute_force():
    """On a network, from gradients that torch computes part by part."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(20, 3), torch.randn(20, 1)

    def loss_of(rows):
        return ((network(x[rows]) - y[rows]) ** 2).mean()

    order = torch.randperm(20).view(4, 5)
    trace, square = probe.gradient_noise(loss_of, list(network.parameters()), list(order))

    def gradient(rows):
        network.zero_grad()
        loss_of(rows).backward()
        return torch.cat([p.grad.flatten() for p in network.parameters()]).double()

    small = np.mean([gradient(rows).square().sum().item() for rows in order])
    big = gradient(order.flatten()).square().sum().item()
    assert trace == pytest.approx((small - big) / (1 / 5 - 1 / 20), rel=1e-4)
    assert square == pytest.approx((20 * big - 5 * small) / 15, rel=1e-4, abs=1e-6)


def test_numerator_and_denominator_are_smoothed_apart():
    """A ratio of smoothed estimates, not a smoothed ratio; nothing while the denominator is not above 0."""
    it = probe.Probe.__new__(probe.Probe)
    it.args, it.state = probe.Args(noise_ema=0.5), {"noise": [0.0, 0.0]}
    found = []
    for it.noise in ((8.0, 1.0), (4.0, -3.0), (4.0, 5.0)):
        found.append(it.noise_scale())
    assert found[0]["noise/scale"] == 8.0
    assert "noise/scale" not in found[1]  # 1 / 4 - 3 / 2 < 0
    assert found[2]["noise/scale"] == pytest.approx((8 / 8 + 4 / 4 + 4 / 2) / (1 / 8 - 3 / 4 + 5 / 2))
    assert (found[2]["noise/trace"], found[2]["noise/square"]) == (4.0, 5.0)


# ----------------------------------------------------------------------------------------------------------------------
# The training is untouched
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "micro_batch_size"), [(CueGame, "0"), pytest.param(Catch, "3", marks=pytest.mark.slow)]
)
def test_the_training_is_that_of_the_fixed_script_bit_for_bit(run, game, micro_batch_size):
    """All that both log is equal to the last digit, and so is the network."""
    parts = ["--micro-batch-size", micro_batch_size]
    plain = run(pqn_fixed_atari, *parts, game=game)
    probed = run(probe, *parts, *MEASURE, game=game)
    assert same_parameters(model_of(plain["run_dir"]), model_of(probed["run_dir"]))
    ours, theirs = rows_of(probed["run_dir"]), rows_of(plain["run_dir"])
    shared = (ours[0].keys() & theirs[0].keys()) - {
        "charts/SPS", "charts/wall_clock", "abs/behavioral_divergence", "abs/divergence_mean",
    }  # fmt: skip
    assert len(shared) >= 12
    assert [{name: row[name] for name in shared} for row in ours] == [
        {name: row[name] for name in shared} for row in theirs
    ]
    assert sum(bool(row["branch/4/churn"]) for row in ours) >= 3  # it did measure


@pytest.mark.slow
def test_the_training_is_untouched_with_envpool_and_twins_too(tmp_path):
    flags = [*SMALL, "--runs-dir", str(tmp_path)]
    measure = [*MEASURE[:-1], "8"]  # --twin-states
    plain, probed = pqn_fixed_atari.main(flags), probe.main([*flags, *measure])
    assert same_parameters(model_of(plain["run_dir"]), model_of(probed["run_dir"]))
    seen = [float(row["twins/distinct_effects"]) for row in rows_of(probed["run_dir"]) if row["twins/distinct_effects"]]
    assert seen and all(1 <= value <= 6 for value in seen)


def test_measuring_changes_neither_network_nor_optimiser(run, monkeypatch):
    """Parameters, gradients and moments, around `before`, which takes gradients, and `after`, where branches learn."""
    checked = []

    def watched(name):
        original = getattr(probe.Probe, name)

        def method(self, *args):
            q_network = next(arg for arg in args if isinstance(arg, nn.Module))
            optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]

            def state():
                gradients = {str(i): p.grad for i, p in enumerate(q_network.parameters()) if p.grad is not None}
                moments = [s for optimizer in optimizers for s in optimizer.state_dict()["state"].values()]
                return [q_network.state_dict(), gradients, *moments]

            before = copy.deepcopy(state())
            result = original(self, *args)
            after = state()
            assert len(before) == len(after) and all(map(same_parameters, before, after))
            checked.append((name, len(after), result))
            return result

        monkeypatch.setattr(probe.Probe, name, method)

    watched("before"), watched("after")
    run(probe, *MEASURE)
    assert sum(name == "after" and size > 10 and "branch/8/churn" in result for name, size, result in checked) >= 3
    assert sum(name == "before" for name, _, _ in checked) >= 6


# ----------------------------------------------------------------------------------------------------------------------
# What is compared with what
# ----------------------------------------------------------------------------------------------------------------------


def test_the_policies_compared_are_those_of_their_iterations(run, monkeypatch):
    """`before` and `after` an update, `past` K = 4 iterations ago, `early` after the first 4."""
    ends, seen = {}, []
    remember, after = probe.Probe.remember, probe.Probe.after

    def remember_too(self, iteration, q_network, epsilon):
        ends[iteration] = copy.deepcopy(q_network.state_dict())
        remember(self, iteration, q_network, epsilon)

    def after_too(self, iteration, *rest):
        result = after(self, iteration, *rest)
        seen.append((iteration, dict(self.policies), result))
        return result

    monkeypatch.setattr(probe.Probe, "remember", remember_too)
    monkeypatch.setattr(probe.Probe, "after", after_too)
    run(probe, *MEASURE)
    assert [iteration for iteration, _, _ in seen] == list(range(2, 16, 2))
    for iteration, policies, result in seen:
        assert same_parameters(policies["after"], ends[iteration])
        assert same_parameters(policies["before"], ends[iteration - 1])
        assert ("past" in policies) == (iteration >= 6)  # a policy that has ended an iteration
        assert ("early" in policies) == (iteration > 4)
        if "past" in policies:
            assert same_parameters(policies["past"], ends[iteration - 4])
            assert same_parameters(policies["early"], ends[4])
        assert ("rollout/window/churn" in result) == ("past" in policies)
        assert ("reference/early_after/churn" in result) == ("early" in policies)
        if iteration == 8:  # past and early are one policy
            assert result["rollout/early_past/churn"] == 0
            assert result["rollout/early_after/churn"] == result["rollout/window/churn"]


class Numbered(CueGame):
    """A cue game whose screen has the number of its environment in a corner."""

    def _draw(self):
        screen = super()._draw()
        screen[:, 0, 0] = np.arange(self.num_envs)
        return screen


def test_branches_learn_from_the_first_steps_and_are_compared_on_other_states(run, monkeypatch):
    """L steps of the first N environments, targets cut at L, from one point; compared on the others' states alone."""
    calls, rollouts, looked_at = [], [], []
    learn, collect, q_values, branches = (
        probe.learn, probe.Collector.collect, probe.Probe.q_values, probe.Probe.branches,
    )  # fmt: skip
    inside, start = [False], []

    def branches_too(self, q_network, optimizer, epsilon):
        inside[0] = True
        start.append(copy.deepcopy((q_network.state_dict(), optimizer.state_dict()["state"])))
        result = branches(self, q_network, optimizer, epsilon)
        inside[0] = False
        return result

    def learn_too(args, q_network, optimizer, rollout, epochs, rng):
        if inside[0]:
            state = copy.deepcopy((q_network.state_dict(), optimizer.state_dict()["state"]))
            calls.append(([x.clone() for x in rollout], epochs, args.num_minibatches, state))
        return learn(args, q_network, optimizer, rollout, epochs, rng)

    def collect_too(self, q_network, T, *rest):
        result = collect(self, q_network, T, *rest)
        if inside[0]:
            rollouts.append((T, [x.clone() for x in (self.rewards, self.values, *self.flags[:2], self.obs)]))
        return result

    def q_values_too(self, parameters, obs):
        if inside[0]:
            looked_at.append(obs.clone())
        return q_values(self, parameters, obs)

    monkeypatch.setattr(probe.Probe, "branches", branches_too)
    monkeypatch.setattr(probe, "learn", learn_too)
    monkeypatch.setattr(probe.Collector, "collect", collect_too)
    monkeypatch.setattr(probe.Probe, "q_values", q_values_too)
    run(probe, *MEASURE, "--probe-lengths", "4", "8", "64", "--total-timesteps", "128", game=Numbered)
    assert [len(call[0][1]) for call in calls] == [4 * 2, 8 * 2, 64 * 2]  # rows: L x N
    assert [call[1:3] for call in calls] == [(2, 2), (2, 2), (4, 2)]  # epochs of eq. 10, minibatches
    ((parameters, moments),) = start
    assert moments
    for _, _, _, (own_parameters, own_moments) in calls:  # from the same point
        assert same_parameters(own_parameters, parameters)
        assert all(same_parameters(own_moments[index], moments[index]) for index in moments)
    *_, (T, (rewards, values, terminal, truncated, obs)) = rollouts
    assert T == 64 and obs.shape[1] == 2 + 2  # N learn, H = 2 are held out
    for (rows, actions, targets, valid), *_ in calls:
        length = len(actions) // 2
        assert torch.equal(rows, obs[:length, :2].flatten(0, 1)) and len(valid) == 2 * length
        expected = probe.q_lambda_targets(
            rewards[:length], values[1 : length + 1], terminal[:length], truncated[:length], 0.99, 0.65
        )
        assert torch.equal(targets, expected[:, :2].flatten())
    (held_out,) = looked_at
    assert len(held_out) == 24 and set(held_out[:, -1, 0, 0].tolist()) == {2, 3}  # environments that none learnt from


def test_the_batch_that_abs_would_choose(run):
    """The adaptive script's rule on the divergences that the probe has logged."""
    rows = rows_of(run(probe, *MEASURE, "--divergence-warmup", "2", "--divergence-window", "3")["run_dir"])
    rule = importlib.import_module("pqn_abs_atari")
    length, churns = 16.0, []
    for row in rows:
        if row["rollout/update/churn"]:
            assert row["rollout/update/churn"] == row["abs/behavioral_divergence"]
            churns.append(float(row["rollout/update/churn"]))
            if len(churns) >= 2:
                mean = np.mean(churns[-3:])
                target = rule.rollout_length_target(mean, 16, 64, 0.05, 0.95)
                length = rule.adapt_rollout_length(length, target, 0.9, 16, 64)
            assert float(row["probe/abs_rollout_length"]) == round(length)
            assert float(row["probe/abs_batch_size"]) == 2 * round(length)
    assert length > 18


# ----------------------------------------------------------------------------------------------------------------------
# Twins
# ----------------------------------------------------------------------------------------------------------------------


def effects_of(game, steps, every, seed=3):
    """Classes of actions at every so many steps of random play, (S, A), by envpool's own games; and those by RAM."""
    envs = envpool.make(f"{game}-v5", env_type="gymnasium", num_envs=1, seed=[seed], episodic_life=True)
    emulator = probe.Emulator(envs.spec.config.task, False)
    random, done = np.random.default_rng(seed), False
    emulator.follow(0, True, 0.0, envs.reset()[1]["ram"][0], False)
    found, by_ram = [], []
    for step in range(steps):
        action = int(random.integers(len(emulator.buttons)))
        _, _, terminated, truncated, info = envs.step(np.array([action]))
        ended = bool(info["terminated"][0] or truncated[0])
        emulator.follow(action, done, info["reward"][0], info["ram"][0], ended)
        done = bool(terminated[0] or truncated[0])
        if step % every == 0 and not done:
            ram = emulator.ale.getRAM().copy()
            found.append(probe.effects(emulator))
            assert np.array_equal(emulator.ale.getRAM(), ram)  # left as it was; the next `follow` agrees, too
            rams, start = set(), emulator.ale.cloneState()
            for button in range(len(emulator.buttons)):
                emulator.act(button)
                rams.add(emulator.ale.getRAM().tobytes())
                emulator.ale.restoreState(start)
            by_ram.append(len(rams))
    return torch.stack(found), np.mean(by_ram)


def test_pongs_twins():
    """NOOP and FIRE, RIGHT and RIGHTFIRE, LEFT and LEFTFIRE are twins but where FIRE serves; RAM does not know it."""
    classes, by_ram = effects_of("Pong", 600, 10)
    names = [button.name for button in probe.Emulator("pong", False).buttons]
    for one, other in (("NOOP", "FIRE"), ("RIGHT", "RIGHTFIRE"), ("LEFT", "LEFTFIRE")):
        assert (classes[:, names.index(one)] == classes[:, names.index(other)]).float().mean() > 0.9
    assert (classes[:, names.index("RIGHT")] != classes[:, names.index("LEFT")]).float().mean() > 0.5
    distinct = (classes.max(dim=1).values + 1).float().mean().item()
    assert 2.4 < distinct <= 3.0  # some 2.9 under random play; less before the ball is in play
    assert by_ram > 5


@pytest.mark.slow
def test_games_at_both_ends():
    """In Freeway all 3 actions differ in most states, in Qbert they hardly ever do."""
    freeway, _ = effects_of("Freeway", 300, 10)
    counts = freeway.max(dim=1).values + 1
    assert (counts == 3).any() and counts.float().mean() > 2
    qbert, _ = effects_of("Qbert", 300, 10)
    assert (qbert.max(dim=1).values + 1).float().mean() < 1.4


def test_effective_churn_by_enumeration():
    """Every pair of actions under every grouping of three: a flip counts if and only if the classes differ."""
    for classes in ([0, 0, 0], [0, 1, 1], [0, 1, 0], [0, 0, 1], [0, 1, 2]):
        for before, after in itertools.product(range(3), repeat=2):
            got = probe.effective_churn(torch.tensor([before]), torch.tensor([after]), torch.tensor([classes]))
            assert got == float(classes[before] != classes[after])
    got = probe.effective_churn(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([[0, 0, 1], [0, 0, 1]]))
    assert got == 0.5


# ----------------------------------------------------------------------------------------------------------------------
# What comes out
# ----------------------------------------------------------------------------------------------------------------------


def test_columns_picture_and_share(run, capsys):
    result = run(probe, *MEASURE)
    rows = rows_of(result["run_dir"])
    args = probe.parse_args([*SMALL, *MEASURE])
    assert set(probe.probe_metrics(args)) <= rows[0].keys()
    filled = {name for row in rows for name, value in row.items() if value}
    assert {name for name in probe.probe_metrics(args) if not name.startswith("twins")} <= filled
    assert all(0 < float(row["probe/share_of_time"]) < 1 for row in rows)
    err = capsys.readouterr().err
    assert "Non-stationarity" in err and "From the same point" in err and "Measuring took" in err
    assert "Twins" not in err  # not looked for
    with Image.open(Path(result["run_dir"]) / "probe.png") as picture:
        assert picture.width > 1000


def test_every_panel_of_the_picture_has_its_curves(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(probe.plt, "close", figures.append)
    rows = made_up([0.9, 0.5, 0.2] * 4, [0.1] * 12, (0.4, 0.3))
    for row in rows:
        row |= {"rollout/window/churn": "0.5", "rollout/early_after/churn": "0.6", "charts/episodic_return": "1"}
    probe.draw(rows, probe.Args(probe_lengths=(16, 64), num_envs=2), tmp_path / "probe.png")
    time_axis, batch_axis, noise_axis, twin_axis, return_axis = figures[0].axes
    labels = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figures[0].axes[:4]]
    assert [len(names) for names in labels] == [4, 3, 3, 2]
    assert len(batch_axis.lines) == 12 and len(return_axis.lines) == 1
    for axis in (time_axis, noise_axis, twin_axis):
        assert axis.get_xlabel() and axis.get_ylabel() and all(len(line.get_xdata()) for line in axis.lines)
    assert [tick.get_text() for tick in batch_axis.get_xticklabels()] == ["32\n(8)", "128\n(16)"]
    title = figures[0].get_suptitle()
    assert all(word in title for word in ("Pong-v5", "seed 1", "1,100 steps", "dots: measurements"))


def test_around_a_model_the_picture_has_bars_instead(monkeypatch, tmp_path):
    """One measurement is no curve: each bar is one cell of the one row, and a cell that is empty is said to be."""
    figures = []
    monkeypatch.setattr(probe.plt, "close", figures.append)
    row = made_up([0.9], [0.1], (0.4, 0.3))[0] | {"charts/episodic_return": "1"}
    for i, kind in enumerate(("churn", "total_variation", "js_distance", "value_gap")):
        row |= {f"rollout/update/{kind}": f"{i / 8}", f"reference/update/{kind}": f"{i / 4}"}
    args = probe.Args(probe_lengths=(16, 64), num_envs=2, checkpoint="a/model.pt")
    probe.draw([row], args, tmp_path / "probe.png")
    probe.draw(
        [row | {"noise/scale": "", "twins/churn": "", "twins/effective_churn": ""}], args, tmp_path / "probe.png"
    )
    heights = [[[bar.get_height() for bar in axis.patches] for axis in figure.axes] for figure in figures]
    moved, branches, noise, twins = heights[0]
    assert moved == [0, 1 / 8, 2 / 8, 3 / 8, 0, 1 / 4, 2 / 4, 3 / 4] and branches == []
    assert noise == [float(row["noise/scale"]), 2 * 32 / 4]
    assert twins == [float(row["twins/churn"]), float(row["twins/effective_churn"])]
    assert math.isnan(heights[1][2][0]) and all(math.isnan(height) for height in heights[1][3])
    assert "not resolved" in figures[1].axes[2].get_xticklabels()[0].get_text()
    assert "around a/model.pt" in figures[0].get_suptitle() and len(figures[0].axes) == 4  # no axis for the return
    assert not any("Measuring took" in line for line in probe.summary([row], args))


def made_up(churns, gaps, by_length, twins=(3.0, 0.4, 0.1)):
    """Rows of metrics.csv with the cells that the summary reads."""
    return [
        {
            "global_step": str(100 * i), "rollout/update/churn": str(churn), "rollout/update/value_gap": str(gap),
            "branch/16/churn": str(by_length[0]), "branch/64/churn": str(by_length[1]),
            "noise/scale": str(10 * (i + 1)), "noise/trace": "1",
            "probe/abs_batch_size": "64", "twins/distinct_effects": str(twins[0]), "twins/churn": str(twins[1]),
            "twins/effective_churn": str(twins[2]), "probe/share_of_time": "0.123",
        }
        for i, (churn, gap) in enumerate(zip(churns, gaps))
    ]  # fmt: skip


def test_the_summary_says_what_the_numbers_say():
    args = probe.Args(probe_lengths=(16, 64), num_envs=2)
    text = "\n".join(probe.summary(made_up([0.9] * 3 + [0.5] * 4 + [0.2] * 3, [0.5] * 5 + [0.1] * 5, (0.4, 0.3)), args))
    assert "Non-stationarity fades" in text and "from 0.90 to 0.20" in text and "from 0.500 to 0.100" in text
    assert "in 10 of 10 points" in text and "0.40 at T = 16, 0.30 at T = 64" in text
    assert "noise scale: 100 rows at last, 10 at first" in text and "of this run has 16," in text
    assert "ABS would have come to 16." in text
    assert "3.0 distinct effects" in text and "0.300 (75%)" in text and "Measuring took 12%" in text
    text = "\n".join(probe.summary(made_up([0.2] * 5 + [0.9] * 4, [0.1] * 9, (0.3, 0.4)), args))
    assert "Non-stationarity grows" in text and "in 0 of 9 points" in text and "ABS" not in text  # before its warm-up
    text = "\n".join(probe.summary(made_up([0.5, 0.3, 0.1] * 3, [0.1] * 9, (0.3, 0.4)), args))
    assert "Non-stationarity hardly changes" in text
    rows = made_up([0.5], [0.1], (0.3, 0.4))
    rows[0]["noise/trace"], rows[0]["noise/scale"] = "1", ""
    text = "\n".join(probe.summary(rows, args))
    assert "Non-stationarity" not in text and "not resolved" in text and "in 0 of 1 points" in text


def test_measuring_around_a_saved_model(run, capsys, monkeypatch):
    """One row, one picture, no training: the model on disk is as it was, and its options are taken."""
    trained = Path(run(pqn_fixed_atari, "--seed", "7", "--no-episodic-life")["run_dir"])
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    for place in (trained / "model.pt", trained):
        make = fake_make(CueGame)
        monkeypatch.setattr(envpool, "make", make)
        flags = "--probe-lengths 4 8 --probe-states 24 --noise-parts 4 --twin-states 0 --opening-steps 8".split()
        seen = []
        before_update = probe.Probe.before

        def look(self, q_network, rollout, before_update=before_update, seen=seen):
            seen.append(copy.deepcopy(q_network.state_dict()))
            before_update(self, q_network, rollout)

        after_update = probe.Probe.after

        def look_after(self, iteration, q_network, optimizer, epsilon, after_update=after_update, seen=seen):
            seen.append({float(state["step"]) for state in optimizer.state.values()})
            seen.append(optimizer.param_groups[0]["lr"])
            return after_update(self, iteration, q_network, optimizer, epsilon)

        with monkeypatch.context() as patch:
            patch.setattr(probe.Probe, "before", look)
            patch.setattr(probe.Probe, "after", look_after)
            result = probe.main(
                ["--checkpoint", str(place), *flags, "--runs-dir", str(trained.parent / "around"),
                 "--learning-rate", "0.001"]
            )  # fmt: skip
        parameters, (step,), rate = seen
        assert same_parameters(parameters, model_of(trained)) and rate == 0.001
        assert step == (60 + 4 if place == trained else 10**5 + 4)  # of the training, or as of a long run
        make_call = make.calls[0]
        assert make_call["episodic_life"] is False and make_call["num_envs"] == 2
        (row,) = rows_of(result["run_dir"])
        assert all(row[name] for name in ("branch/4/churn", "branch/8/td_error", "noise/trace", "rollout/update/churn"))
        assert (Path(result["run_dir"]) / "probe.png").exists()
        assert not list(Path(result["run_dir"]).glob("*.pt"))
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    assert "From the same point" in capsys.readouterr().err


def test_a_stopped_probe_goes_on(run, monkeypatch, tmp_path):
    """All that it knew of the run, and the reference states, are restored; metrics.csv has no gap and no double."""
    probes = []
    start, remember = probe.Probe.__init__, probe.Probe.remember
    monkeypatch.setattr(probe.Probe, "__init__", lambda self, *args: probes.append(self) or start(self, *args))

    def failing(self, iteration, *args):
        if iteration == 8:
            raise RuntimeError("by the test")
        remember(self, iteration, *args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="by the test"):
        patch.setattr(probe.Probe, "remember", failing)
        run(probe, *MEASURE)
    (run_dir,) = tmp_path.iterdir()
    saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)["probe"]
    assert saved["early"] is not None and saved["churns"] and saved["noise"] and saved["seconds"] > 0
    run(probe, "--resume", str(run_dir))
    first, resumed = probes
    assert torch.equal(first.reference, resumed.reference)
    assert same_parameters(resumed.state["early"], saved["early"])
    rows = rows_of(run_dir)
    assert [bool(row["rollout/window/churn"]) for row in rows] == [i % 2 == 1 and i >= 5 for i in range(15)]
    assert [bool(row["branch/4/churn"]) for row in rows] == [i % 4 == 1 for i in range(15)]
    seconds = [float(row["probe/share_of_time"]) * float(row["charts/wall_clock"]) for row in rows]
    assert all(b > a - 0.2 for a, b in itertools.pairwise(seconds))
    assert [int(row["global_step"]) for row in rows] == [64 * i for i in range(1, 16)]
    assert [bool(row["rollout/update/churn"]) for row in rows] == [i % 2 == 1 for i in range(15)]
    assert (run_dir / "probe.png").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--branch-interval 60 --probe-interval 50", ["--branch-interval 60", "multiple", "50"]),
        ("--probe-lengths 16 1", ["--probe-lengths 1"]),
        ("--probe-lengths 16 16", ["--probe-lengths 16 16", "once"]),
        ("--num-envs 1", ["--num-envs 1", "two or more"]),
        ("--probe-lengths 4096 --num-envs 2000", ["--probe-lengths 4096", "GiB"]),
        ("--probe-interval 0", ["--probe-interval 0"]),
        ("--noise-ema 1.0", ["--noise-ema 1.0", "below 1"]),
        ("--twin-states -1", ["--twin-states -1"]),
        ("--checkpoint nowhere", ["--checkpoint nowhere", "does not exist"]),
        ("--checkpoint nowhere --resume there", ["--resume", "--checkpoint", "one or the other"]),
        ("--num-steps-min 70", ["--num-steps-min 70"]),
    ],
)
def test_what_the_probe_refuses(flags, words, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        probe.main(["--runs-dir", str(tmp_path), *flags.split()])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and len(err.splitlines()) <= 2 and all(word in err for word in words), err
