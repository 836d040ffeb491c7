"""Evaluation: equal games per environment, raw scores of full games, distinct games, and what is written down."""

import contextlib
import json

import envpool
import numpy as np
import pytest
import torch
from fake_envpool import Catch, CueGame, Row, ScriptedGame, fake_make


def scripted(*tables, **options):
    return fake_make(ScriptedGame, scripts=tables)(
        "Pong-v5", env_type="gymnasium", num_envs=len(tables), seed=list(range(len(tables))), **options
    )


@pytest.fixture
def q_network(script):
    torch.manual_seed(0)
    return script.QNetwork(4)


def test_short_and_long_games_count_equally(script, q_network):
    """One environment with games of length 1, one with games of length 100: as many games of each."""
    short = [Row(1, lives=0, terminated=True)]
    long = [Row(0)] * 99 + [Row(5, lives=0, terminated=True)]
    games = script.evaluate(q_network, scripted(short, long), 2, games_per_env=2, epsilon=0.0, seed=1)
    assert sorted((game["environment"], game["score"], game["length"]) for game in games) == [
        (0, 1, 1), (0, 1, 1), (1, 5, 100), (1, 5, 100),
    ]  # fmt: skip


def test_a_game_goes_through_lost_lives_and_is_scored_raw(script, q_network):
    table = [Row(20, lives=2), Row(0, lives=1), Row(30, lives=0, terminated=True), Row(7, truncated=True)]
    envs = scripted(table, episodic_life=True, reward_clip=True)
    games = script.evaluate(q_network, envs, 1, games_per_env=2, epsilon=0.0, seed=1)
    assert [(game["score"], game["length"]) for game in games] == [(50, 3), (7, 1)]


def test_actions_are_greedy_at_epsilon_zero_and_random_at_one(script, q_network):
    """Greedy: the network's argmax in every playing environment, reset rows apart. Random: every action equally."""

    class Recorder:
        def __init__(self, envs):
            self.envs, self.action_space, self.pairs = envs, envs.action_space, []

        def reset(self):
            self.obs, info = self.envs.reset()
            return self.obs, info

        def step(self, actions):
            with torch.no_grad():
                self.pairs.append((q_network(torch.from_numpy(self.obs)).argmax(1).numpy(), actions.copy()))
            self.obs, *rest = self.envs.step(actions)
            return self.obs, *rest

    def cue_games():
        return Recorder(fake_make(CueGame)("Pong-v5", env_type="gymnasium", num_envs=2, seed=[1, 2]))

    greedy = cue_games()
    script.evaluate(q_network, greedy, 2, games_per_env=1, epsilon=0.0, seed=1)
    assert len(greedy.pairs) == 24
    assert all(np.array_equal(best, played) for best, played in greedy.pairs)

    random = cue_games()
    script.evaluate(q_network, random, 2, games_per_env=4, epsilon=1.0, seed=1)
    counts = np.bincount(np.concatenate([played for _, played in random.pairs]), minlength=4)
    assert counts.sum() > 150 and abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.sum() * 3 / 16)


def test_fingerprints_tell_equal_games_from_different_ones(script, q_network):
    """The same game in two environments and twice in one has one fingerprint; a different game has another."""

    def fingerprints(seeds):
        envs = fake_make(Catch)("Pong-v5", env_type="gymnasium", num_envs=len(seeds), seed=seeds)
        games = script.evaluate(q_network, envs, len(seeds), games_per_env=1, epsilon=0.0, seed=1)
        return [game["fingerprint"] for game in sorted(games, key=lambda game: game["environment"])]

    a, b, c = fingerprints([5, 6, 5])
    assert a == c != b
    assert fingerprints([6]) == [b]

    class Looping(Catch):
        def _begin_games(self, new_game):  # every game is the first one again
            self._random_state[new_game] = 5
            super()._begin_games(new_game)

    envs = fake_make(Looping)("Pong-v5", env_type="gymnasium", num_envs=1, seed=[9])
    games = script.evaluate(q_network, envs, 1, games_per_env=3, epsilon=0.0, seed=1)
    assert len({game["fingerprint"] for game in games}) == 1


def test_the_bootstrap_resamples_distinct_games(script):
    """Ten copies of a game are one piece of evidence: the interval is that of the distinct games."""
    rng = np.random.default_rng(0)
    scores = rng.normal(10, 2, size=50)
    low, high = script.bootstrap_interval(scores, np.arange(50))
    half_width = 1.96 * scores.std() / np.sqrt(50)  # the normal approximation of the same interval
    assert low == pytest.approx(scores.mean() - half_width, abs=0.1)
    assert high == pytest.approx(scores.mean() + half_width, abs=0.1)
    repeated = script.bootstrap_interval(np.repeat(scores, 10), np.repeat(np.arange(50), 10))
    assert repeated == pytest.approx([low, high])
    assert script.bootstrap_interval(np.full(100, 21.0), np.zeros(100, dtype=int)) is None


def test_the_interval_covers_the_true_mean(script):
    """Of 200 samples of 30 games, about 95 % have the true mean in their interval."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        low, high = script.bootstrap_interval(rng.normal(size=30), np.arange(30), draws=300)
        inside += low <= 0 <= high
    assert 0.89 <= inside / 200 <= 0.99


def test_eval_json(script, monkeypatch, tmp_path):
    """The file holds every game, and its figures follow from them."""
    make = fake_make(CueGame)
    monkeypatch.setattr(envpool, "make", make)
    result = script.main(
        ["--runs-dir", str(tmp_path), "--num-envs", "2", "--num-minibatches", "2", "--total-timesteps", "64",
         "--eval-episodes", "20", "--eval-epsilon", "0.5", "--torch-threads", "1"]
    )  # fmt: skip
    with open(f"{result['run_dir']}/eval.json") as file:
        report = json.load(file)
    scores = [game["score"] for game in report["games"]]
    assert len(scores) == report["num_games"] == 20
    counts = np.bincount([game["environment"] for game in report["games"]])
    assert counts.tolist() == [2] * 10
    assert report["mean"] == result["eval_return"] == pytest.approx(np.mean(scores))
    assert report["median"] == np.median(scores) and report["std"] == pytest.approx(np.std(scores))
    low, high = report["interval_95"]
    assert low < report["mean"] < high
    assert report["distinct_games"] == 20
    assert report["protocol"]["epsilon"] == 0.5
    assert report["seeds"] == make.calls[1]["seed"]
    training, evaluation = ({k: v for k, v in call.items() if k not in ("seed", "num_envs")} for call in make.calls)
    training.pop("num_threads"), evaluation.pop("num_threads")
    assert training == evaluation  # the same options as in training


def test_the_saved_model_plays_as_the_trained_one(script, monkeypatch, tmp_path):
    """model.pt holds what is needed to rebuild the network, and loads with weights_only."""
    monkeypatch.setattr(envpool, "make", fake_make(CueGame))
    result = script.main(
        ["--runs-dir", str(tmp_path), "--num-envs", "2", "--num-minibatches", "2", "--total-timesteps", "640",
         "--eval-episodes", "4", "--torch-threads", "1"]
    )  # fmt: skip
    saved = torch.load(f"{result['run_dir']}/model.pt", weights_only=True)
    assert (saved["env_id"], saved["network"], saved["num_actions"]) == ("Pong-v5", "base", 4)
    q_network = script.QNetwork(saved["num_actions"], saved["network"])
    q_network.load_state_dict(saved["state_dict"])
    seeds = script.environment_seeds(1, 4, "evaluation")
    with contextlib.closing(script.make_envs(script.Args(), seeds)) as envs:
        games = script.evaluate(q_network, envs, 4, games_per_env=1, epsilon=0.0, seed=1)
    assert np.mean([game["score"] for game in games]) == result["eval_return"]
