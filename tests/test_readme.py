"""The README's worked changes, applied to the script and trained; and the functions that its list of details names."""

import csv
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import envpool
import pytest
import torch
from fake_envpool import Catch, fake_make

import pqn_abs_atari

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
import readme_change  # noqa: E402

README = (ROOT / "README.md").read_text()
FLAGS = (
    "--num-envs 2 --num-minibatches 2 --eval-episodes 0 --torch-threads 1 --env-threads 1 --divergence-interval 1 "
    "--num-steps-min 8 --num-steps-max 24 --total-timesteps 400"
).split()


def section(title):
    return re.search(rf"(?s)\n## {title}\n(.*?)\n## ", README)[1]


def changed(title, tmp_path):
    """The adaptive script as a module, with the README's change of that title."""
    path = tmp_path / f"{title.split()[-1]}.py"
    readme_change.main([title, str(path)])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(script, *flags) -> what train returns, and the rows of metrics.csv, on Catch."""

    def run(script, *flags):
        monkeypatch.setattr(envpool, "make", fake_make(Catch))
        result = script.main([*FLAGS, "--runs-dir", str(tmp_path), *flags])
        with open(f"{result['run_dir']}/metrics.csv", newline="") as file:
            return result, list(csv.DictReader(file))

    return run


def test_there_are_three_changes(tmp_path):
    assert section("How to change it").count("```diff") == len(readme_change.changes()) == 3
    (tmp_path / "mine.py").write_text("work of hours")
    for argv in (["Another network"], ["Another game", "x.py"], ["Another network", str(tmp_path / "mine.py")]):
        with pytest.raises(SystemExit, match="error: "):
            readme_change.main(argv)
    assert (tmp_path / "mine.py").read_text() == "work of hours"


def test_a_change_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(readme_change, "changes", lambda: {"Mine": "-no such line\n+another\n"})
    with pytest.raises(ValueError, match="0 times"):
        readme_change.changed("Mine")


def test_another_divergence(run, tmp_path):
    """The same training, in which a flip between actions of nearly equal value no longer counts."""
    held = ["--num-steps-max", "8"]
    (_, ours), (_, theirs) = run(changed("Another divergence", tmp_path), *held), run(pqn_abs_atari, *held)
    assert [row["losses/td_loss"] for row in ours] == [row["losses/td_loss"] for row in theirs]
    ours, theirs = ([float(row["abs/behavioral_divergence"]) for row in rows] for rows in (ours, theirs))
    assert all(a <= b for a, b in zip(ours, theirs)) and ours != theirs and sum(ours) > 0


def test_another_batch_rule(run, tmp_path):
    _, rows = run(changed("Another batch rule", tmp_path))
    assert len(rows) > 10
    for before, row in itertools.pairwise(rows):
        assert int(row["abs/rollout_length"]) == round(8 + 16 * int(before["global_step"]) / 400)


def test_another_network(run, tmp_path):
    script = changed("Another network", tmp_path)
    result, rows = run(script)
    parameters = torch.load(f"{result['run_dir']}/model.pt", weights_only=True)["q_network"]
    assert {"value.weight", "advantages.weight"} <= parameters.keys() and "q_values.weight" not in parameters
    network = script.QNetwork(6)
    obs = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        value = network.value(network.trunk(network.features(obs / 255)))
        torch.testing.assert_close(network(obs).mean(dim=1, keepdim=True), value)
    assert float(rows[-1]["losses/td_loss"]) > 0


def test_the_functions_of_the_details_exist():
    lines = re.findall(r"(?m)^(\d+)\. (.*)$", section("Implementation details"))
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1)) and len(lines) >= 10
    for number, text in lines:
        name = re.match(r"`(\w+)`: ", text)
        assert name, f"detail {number} does not begin with a function"
        assert callable(getattr(pqn_abs_atari, name[1], None)), name[1]
    for name in re.findall(r"`(\w+)`", section("Implementation details")):
        assert hasattr(pqn_abs_atari, name), name
