"""Both scripts learn, from pixels, behind envpool's exact contract: lives, terminals, reset rows and all.

The best possible return of each game is known. Evaluation is greedy, on seeds that training never saw.
"""

import csv

import envpool
import pytest
from fake_envpool import Catch, CueGame, fake_make

pytestmark = pytest.mark.slow


@pytest.fixture
def learn(script, monkeypatch, tmp_path):
    """learn(game, *flags) -> what train returns, and the lines of metrics.csv."""

    def learn(game, flags):
        monkeypatch.setattr(envpool, "make", fake_make(game))
        result = script.main([*flags.split(), "--runs-dir", str(tmp_path), "--torch-threads", "1"])
        with open(f"{result['run_dir']}/metrics.csv", newline="") as file:
            return result, list(csv.DictReader(file))

    return learn


def test_cue_game(script, learn):
    """A best action that is unique in every state: it is learnt, and divergence has no floor.

    The adaptive script's rollout grows from its minimum to its maximum, because the divergence falls below 0.05. (The
    smoothing is quicker than the paper's, so that a short run suffices.)
    """
    flags = "--num-envs 4 --gamma 0.5 --total-timesteps 8000 --divergence-interval 1 --eval-episodes 20"
    if script.__name__ == "pqn_abs_atari":
        flags += " --batch-ema 0.8"
    result, rows = learn(CueGame, flags)
    assert result["eval_return"] >= 0.9 * CueGame.best_return
    if script.__name__ == "pqn_abs_atari":
        lengths = [int(row["abs/rollout_length"]) for row in rows]
        assert lengths[0] == 16 and max(lengths) == 64
        assert min(float(row["abs/divergence_mean"]) for row in rows) < 0.05


def test_catch(learn):
    """A reward that comes steps later, and actions of which several always do the same."""
    flags = "--num-envs 8 --gamma 0.9 --total-timesteps 10_000 --divergence-interval 2 --eval-episodes 50"
    result, _ = learn(Catch, flags)
    assert result["eval_return"] >= 0.9 * Catch.best_return
