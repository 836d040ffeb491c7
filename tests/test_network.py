"""The three Q-networks against a plain re-computation from their weights, and greedy_actions.

B observations, A actions, M states. Layers are found by kind and order, never by name.
"""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

NUM_ACTIONS = 6
NETWORKS = ["base", "large", "xlarge"]
CHANNELS = {"base": (32, 64, 64), "large": (64, 128, 128), "xlarge": (64, 128, 128)}
NUM_BLOCKS = {"base": 0, "large": 5, "xlarge": 10}


@functools.cache
def pristine(script, network):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return script.QNetwork(NUM_ACTIONS, network)


def fresh(script, network):
    """A network as its constructor leaves it, for the caller to change at will."""
    return copy.deepcopy(pristine(script, network))


def stirred(script, network):
    """A network whose biases and LayerNorm weights are no longer 0 and 1, so that leaving one out shows."""
    q_network = fresh(script, network)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in q_network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return q_network


def observations(count, seed=0):
    """(B, 4, 84, 84) uint8: noise, from bright to dark images so that the outputs differ."""
    rng = np.random.default_rng(seed)
    brightest = [[[[255 // 4 ** (i % 4)]]] for i in range(count)]
    return torch.from_numpy(rng.integers(0, brightest, (count, 4, 84, 84), dtype=np.uint8, endpoint=True))


def layers(q_network, kind):
    return [module for module in q_network.modules() if isinstance(module, kind)]


def head(q_network):
    (found,) = [linear for linear in layers(q_network, nn.Linear) if linear.out_features == NUM_ACTIONS]
    return found


def layer_norm(x, norm):
    """Normalise everything but the batch axis, by the biased variance, with the default epsilon of 1e-5."""
    axes = tuple(range(1, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def recompute(q_network, network, obs):
    """The layers written out in float64: (B, 4, 84, 84) uint8 -> (B, A)."""
    double = copy.deepcopy(q_network).double()
    norms = iter(layers(double, nn.LayerNorm))
    linears = iter([linear for linear in layers(double, nn.Linear) if linear.out_features != NUM_ACTIONS])

    def normalised_linear(x):
        linear = next(linears)
        return layer_norm(x @ linear.weight.T + linear.bias, next(norms))

    x = obs.double() / 255
    for conv, stride in zip(layers(double, nn.Conv2d), (4, 2, 1), strict=True):
        x = layer_norm(F.conv2d(x, conv.weight, conv.bias, stride=stride), next(norms)).relu()
    x = normalised_linear(x.reshape(len(x), -1))
    if network == "base":
        x = x.relu()
    trunk_input = x
    for _ in range(NUM_BLOCKS[network]):
        x = (x + normalised_linear(normalised_linear(x).relu())).relu() + trunk_input
    assert not list(norms) and not list(linears), "a layer that nobody asked for"
    return x @ head(double).weight.T + head(double).bias


# ---- Architecture ----


@pytest.mark.parametrize("network", NETWORKS)
def test_forward_matches_the_plain_recomputation(script, network):
    q_network, obs = stirred(script, network), observations(8)
    with torch.no_grad():
        actual, expected = q_network(obs), recompute(q_network, network, obs)
    assert actual.shape == (8, NUM_ACTIONS)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("network", NETWORKS)
def test_layers(script, network):
    """Shapes in order; LayerNorm's epsilon is read, since it hardly shows in the output."""
    q_network = pristine(script, network)
    first, second, third = CHANNELS[network]
    flat = third * 7 * 7
    assert [tuple(conv.weight.shape) for conv in layers(q_network, nn.Conv2d)] == [
        (first, 4, 8, 8), (second, first, 4, 4), (third, second, 3, 3),
    ]  # fmt: skip
    assert [norm.normalized_shape for norm in layers(q_network, nn.LayerNorm)] == [
        (first, 20, 20), (second, 9, 9), (third, 7, 7), (512,),
    ] + [(512,)] * 2 * NUM_BLOCKS[network]  # fmt: skip
    assert all(norm.eps == 1e-5 for norm in layers(q_network, nn.LayerNorm))
    hidden = [linear.in_features for linear in layers(q_network, nn.Linear) if linear is not head(q_network)]
    assert hidden == [flat] + [512] * 2 * NUM_BLOCKS[network]


@pytest.mark.parametrize("network, below_the_head", [("base", 1_727_392), ("large", 6_229_312), ("xlarge", 8_866_112)])
def test_parameter_count(script, network, below_the_head):
    """About 1.7, 6.2 and 8.9 million; exactly, weights + bias of each layer and twice the size of its LayerNorm."""
    if network == "base":
        convs = (32 * 4 * 64 + 32) + (64 * 32 * 16 + 64) + (64 * 64 * 9 + 64)
        conv_norms = 2 * (32 * 20 * 20 + 64 * 9 * 9 + 64 * 7 * 7)
        flat_layer = 3136 * 512 + 512
    else:
        convs = (64 * 4 * 64 + 64) + (128 * 64 * 16 + 128) + (128 * 128 * 9 + 128)
        conv_norms = 2 * (64 * 20 * 20 + 128 * 9 * 9 + 128 * 7 * 7)
        flat_layer = 6272 * 512 + 512
    blocks = NUM_BLOCKS[network] * 2 * (512 * 512 + 512 + 2 * 512)
    assert convs + conv_norms + flat_layer + 2 * 512 + blocks == below_the_head

    q_network = pristine(script, network)
    assert sum(p.numel() for p in q_network.parameters()) == below_the_head + (512 + 1) * NUM_ACTIONS


@pytest.mark.parametrize("num_actions", [3, 18])
def test_one_output_per_action(script, num_actions):
    assert script.QNetwork(num_actions, "base")(observations(2)).shape == (2, num_actions)


# ---- Initialisation ----


@pytest.mark.parametrize("network", NETWORKS)
def test_weights_start_orthogonal_with_gain_sqrt_2_and_biases_at_zero(script, network):
    q_network = pristine(script, network)
    for layer in layers(q_network, (nn.Conv2d, nn.Linear)):
        weight = layer.weight.detach().double().flatten(1)  # (out, in)
        gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, 2 * torch.eye(len(gram), dtype=gram.dtype), rtol=0, atol=1e-4)
        assert not layer.bias.any()
    for norm in layers(q_network, nn.LayerNorm):
        assert (norm.weight == 1).all() and not norm.bias.any()


# ---- Q outputs ----


@pytest.mark.parametrize("network", NETWORKS)
def test_outputs_are_not_normalised(script, network):
    """A LayerNorm on the outputs would hold their mean over actions at 0: Q could not carry the value of a state."""
    q_network, obs = fresh(script, network), observations(8)
    with torch.no_grad():
        before = q_network(obs)
        head(q_network).bias += 3.0
        shifted = q_network(obs)
        head(q_network).bias[2] += 5.0
        raised = q_network(obs)
    assert before.mean(dim=1).std() > 1e-2
    assert before.std(dim=1).std() > 1e-3
    torch.testing.assert_close(shifted, before + 3.0)
    torch.testing.assert_close(raised, shifted + torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("network", NETWORKS)
def test_every_parameter_receives_gradient(script, network):
    q_network = fresh(script, network)
    q_network(observations(4)).square().sum().backward()
    for name, parameter in q_network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


# ---- greedy_actions ----


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("num_states", [1, 37])
def test_greedy_actions_are_the_best_of_the_forward_pass(script, network, num_states):
    q_network, obs = stirred(script, network), observations(num_states, seed=2)
    greedy = script.greedy_actions(q_network, obs)
    assert greedy.shape == (num_states,)
    assert greedy.dtype == torch.int64
    with torch.no_grad():
        expected = [max(range(NUM_ACTIONS), key=row.__getitem__) for row in q_network(obs).tolist()]
    assert greedy.tolist() == expected


@pytest.mark.parametrize("training", [True, False])
def test_greedy_actions_leave_no_trace(script, training):
    """Measuring must not disturb training: mode, weights, gradients and every random generator stay as they were."""
    q_network, obs = fresh(script, "base").train(training), observations(5)
    weights = copy.deepcopy(q_network.state_dict())
    torch_state, numpy_state, python_state = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    script.greedy_actions(q_network, obs)
    assert all(module.training is training for module in q_network.modules())
    assert all(torch.equal(value, weights[name]) for name, value in q_network.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in q_network.parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert repr(np.random.get_state()) == numpy_state
    assert random.getstate() == python_state
    assert torch.is_grad_enabled()


def test_greedy_actions_record_no_gradient(script):
    """A graph over thousands of states would hold every activation in memory."""

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4, NUM_ACTIONS))
            self.recorded = []

        def forward(self, obs):
            q_values = obs.float().mean((2, 3)) @ self.weight
            self.recorded.append(q_values.requires_grad)
            return q_values

    q_network = Watched()
    script.greedy_actions(q_network, observations(5))
    assert q_network.recorded and not any(q_network.recorded)


# ---- bf16 ----


@pytest.mark.parametrize("network", ["base", "large"])
def test_bf16_keeps_q_and_gradients_in_float32(script, network):
    """Features within bfloat16's two to three digits of float32's; the weights themselves are float32's."""
    torch.manual_seed(0)
    exact = script.QNetwork(4, network)
    rough = script.QNetwork(4, network, bf16=True)
    rough.load_state_dict(exact.state_dict())
    obs = observations(32)
    seen = []
    rough.q_values.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].dtype))
    rough.trunk.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    ours, theirs = rough(obs), exact(obs)
    assert ours.dtype == torch.float32 and torch.bfloat16 in seen and seen[-1] == torch.float32
    spread = theirs.std()
    assert 0 < (ours - theirs).abs().max() < 0.2 * spread
    ours.square().mean().backward()
    assert {parameter.grad.dtype for parameter in rough.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in rough.parameters())
