"""Evaluation: equal games per environment, raw scores of full games, distinct games, what is written down, the film."""

import contextlib
import importlib
import json
import types

import envpool
import numpy as np
import pytest
import torch
from ale_py import Action
from fake_envpool import Catch, CueGame, Row, ScriptedGame, fake_make
from PIL import Image


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
    assert script.bootstrap_interval(scores[:8], np.arange(8) % 4) is None  # too few to say anything
    assert script.bootstrap_interval(scores[:5], np.arange(5)) is not None


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
    assert report["human_normalized"] == pytest.approx((report["mean"] + 20.7) / 35.3)  # Pong
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
    assert (saved["args"]["env_id"], saved["args"]["network"], saved["num_actions"]) == ("Pong-v5", "base", 4)
    assert (saved["script"], saved["global_step"]) == (script.__name__, result["global_step"])
    q_network = script.QNetwork(saved["num_actions"], saved["args"]["network"])
    q_network.load_state_dict(saved["q_network"])
    seeds = script.environment_seeds(1, 4, "evaluation")
    with contextlib.closing(script.make_envs(script.Args(), seeds)) as envs:
        games = script.evaluate(q_network, envs, 4, games_per_env=1, epsilon=0.0, seed=1)
    assert np.mean([game["score"] for game in games]) == result["eval_return"]


# ----------------------------------------------------------------------------------------------------------------------
# Human-normalised scores
# ----------------------------------------------------------------------------------------------------------------------


def test_human_normalised_scores(script):
    """0 at random play, 1 at the human's score, below 0 below; figures of three games as they were published."""
    for env_id, random, human in (
        ("Pong-v5", -20.7, 14.6), ("Breakout-v5", 1.7, 30.5), ("Skiing-v5", -17098.1, -4336.9),
    ):  # fmt: skip
        assert script.human_normalized(env_id, random) == 0
        assert script.human_normalized(env_id, human) == 1
        assert script.human_normalized(env_id, (random + human) / 2) == pytest.approx(0.5)
        assert script.human_normalized(env_id, random - 1) < 0
    assert script.human_normalized("Adventure-v5", 1.0) is None


def test_the_table_is_of_the_57_games(script):
    assert len(script.RANDOM_AND_HUMAN) == 57
    atari = {name for name, spec in envpool.registration.registry.specs.items() if spec[0] == "envpool.atari"}
    assert script.RANDOM_AND_HUMAN.keys() <= atari
    assert all(human > random for random, human in script.RANDOM_AND_HUMAN.values())


# ----------------------------------------------------------------------------------------------------------------------
# Referee and film, on the real emulator
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """recorded(game, full_action_space) -> recording, what evaluate says of the game, and the ROM; one random game."""
    games = {}

    def recorded(game, full_action_space=False):
        script = importlib.import_module("pqn_abs_atari")
        if (game, full_action_space) not in games:
            args = script.Args(env_id=f"{game}-v5", full_action_space=full_action_space)
            with contextlib.closing(script.make_envs(args, [11, 12])) as envs:
                q_network = script.QNetwork(int(envs.action_space.n))
                recording = []
                played = script.evaluate(q_network, envs, 2, 2, 1.0, 3, recording)
                first = next(g for g in played if g["environment"] == 0)
                games[game, full_action_space] = recording, first, envs.spec.config.task
        return games[game, full_action_space]

    return recorded


def replay(script, recording, rom, full_action_space):
    """Screen, score and steps after each row."""
    emulator = script.Emulator(rom, full_action_space)
    for row in recording:
        emulator.follow(*row)
        yield emulator.ale.getScreenRGB(), emulator.score, emulator.steps


@pytest.mark.parametrize(
    ("game", "full_action_space"),
    [
        ("Breakout", False),
        pytest.param("SpaceInvaders", False, marks=pytest.mark.slow),
        pytest.param("SpaceInvaders", True, marks=pytest.mark.slow),
        pytest.param("MsPacman", True, marks=pytest.mark.slow),  # FIRE exists in the full set only
    ],
)
def test_the_referee_agrees_with_envpool_over_a_whole_game(abs_script, recorded, game, full_action_space):
    """Lives lost, their openings included; score and length are those that the evaluation reports."""
    recording, first, rom = recorded(game, full_action_space)
    seen = list(replay(abs_script, recording, rom, full_action_space))
    assert len(seen) == len(recording) == first["length"] + sum(reset_row for _, reset_row, *_ in recording)
    assert seen[-1][1:] == (first["score"], first["length"])
    assert sum(reset_row for _, reset_row, *_ in recording) >= 3  # the first opening, and those of lost lives
    assert first["score"] > 0
    assert {screen.shape for screen, _, _ in seen} == {(210, 160, 3)}


def altered(recording, row, **changes):
    """The recording with one field of a row changed."""
    fields = dict(zip(("action", "reset_row", "reward", "ram", "game_ended"), recording[row])) | changes
    return [*recording[:row], tuple(fields.values()), *recording[row + 1 :]]


def test_the_referee_stops_where_they_differ(abs_script, recorded):
    """One action, one byte of RAM, one point: named by its step, after all the rows before it."""
    recording, _, rom = recorded("Breakout")
    step = 0
    steps = [step := step + (not reset_row) for _, reset_row, *_ in recording]  # steps up to each row
    life = next(i for i, row in enumerate(recording) if row[1] and i)  # the opening after the first lost life
    ram = recording[20][3].copy()
    ram[5] ^= 1
    other = recording[life][3].copy()
    other[5] ^= 1
    for row, changes, words in (
        (20, {"ram": ram}, f"their RAM at step {steps[20]}"),
        (20, {"action": (recording[20][0] + 1) % 4}, f"their RAM at step {steps[20]}"),
        (20, {"reward": 7.0}, f"raw reward 7 and 0 at step {steps[20]}"),
        (life, {"ram": other}, f"at the opening before step {steps[life] + 1}"),
        (0, {"ram": ram}, "at the opening before step 1"),
    ):
        seen = 0
        with pytest.raises(abs_script.ReplayError, match=words):
            for _ in replay(abs_script, altered(recording, row, **changes), rom, False):
                seen += 1
        assert seen == row


@pytest.mark.slow
def test_the_referee_follows_from_game_to_game(abs_script):
    """Also past a game that the time limit has cut, which is not over in the emulator."""
    envs = envpool.make("Breakout-v5", env_type="gymnasium", num_envs=1, seed=[3], episodic_life=True,
                        max_episode_steps=60)  # fmt: skip
    emulator = abs_script.Emulator(envs.spec.config.task, False)
    random, done, ends = np.random.default_rng(0), True, []
    emulator.follow(0, True, 0.0, envs.reset()[1]["ram"][0], False)
    done = False
    for _ in range(400):
        action = int(random.integers(4))
        _, _, terminated, truncated, info = envs.step(np.array([action]))
        ended = bool(info["terminated"][0] or truncated[0])
        emulator.follow(action, done, info["reward"][0], info["ram"][0], ended)
        if ended:
            ends.append(bool(truncated[0]))
            assert emulator.steps == info["elapsed_step"][0]
        done = bool(terminated[0] or truncated[0])
    assert ends.count(True) >= 3


def test_a_game_that_ends_in_the_no_ops_after_a_lost_life(abs_script):
    """RoadRunner's last life: the game is over some 24 frames after it is lost, and envpool may not show that row."""
    q_network, recording = abs_script.QNetwork(18), []
    with contextlib.closing(abs_script.make_envs(abs_script.Args(env_id="RoadRunner-v5"), [8])) as envs:
        (first,) = abs_script.evaluate(q_network, envs, 1, 1, 1.0, 3, recording)
        rom = envs.spec.config.task
    assert first["length"] == 131 and not recording[-1][4]
    assert len(recording) == first["length"] + sum(reset_row for _, reset_row, *_ in recording)
    emulator = abs_script.Emulator(rom, False)
    for row in recording:
        emulator.follow(*row)
    assert (emulator.score, emulator.steps) == (first["score"], first["length"])
    assert not emulator.ale.game_over()
    for _ in range(30):
        emulator.ale.act(Action.NOOP)
    assert emulator.ale.game_over()
    # The referee finds the opening of the next game behind the no-ops that ended this one.
    with contextlib.closing(abs_script.make_envs(abs_script.Args(env_id="RoadRunner-v5"), [8])) as envs:
        emulator, random = abs_script.Emulator(rom, False), np.random.default_rng(0)
        emulator.follow(0, True, 0.0, envs.reset()[1]["ram"][0], False)
        done, over, begun = False, False, []
        for _ in range(90):
            action = int(random.integers(18))
            _, _, terminated, _, info = envs.step(np.array([action]))
            lives = emulator.ale.lives()
            emulator.follow(action, done, info["reward"][0], info["ram"][0], bool(info["terminated"][0]))
            if done and not over and emulator.ale.lives() > lives:
                begun.append(emulator.steps)
            done, over = bool(terminated[0]), bool(info["terminated"][0])
    assert begun == [0] and 0 < emulator.steps < 90


@pytest.mark.parametrize(("game", "seed"), [("Qbert-v5", 1), ("Klax-v5", 0)])
def test_openings_that_ram_does_not_tell_apart(abs_script, game, seed):
    """Qbert has begun without FIRE here; in Klax several openings have one RAM, and part ways later."""
    seeds = abs_script.environment_seeds(seed, 1, "evaluation")
    with contextlib.closing(abs_script.make_envs(abs_script.Args(env_id=game), seeds)) as envs:
        emulator = abs_script.Emulator(envs.spec.config.task, False)
        ram = envs.reset()[1]["ram"][0]
        assert len(abs_script.Emulator(envs.spec.config.task, False).find_openings(ram)) > 1
        emulator.follow(0, True, 0.0, ram, False)
        random = np.random.default_rng(seed)
        for _ in range(30):
            action = int(random.integers(len(emulator.buttons)))
            _, _, _, _, info = envs.step(np.array([action]))
            emulator.follow(action, False, info["reward"][0], info["ram"][0], False)
        assert emulator.steps == 30
        with pytest.raises(abs_script.ReplayError, match="their RAM at step 31"):
            emulator.follow(0, False, 0.0, info["ram"][0] ^ 1, False)


def test_the_film(abs_script, recorded, tmp_path, capsys):
    """A colour GIF, one frame a row at the game's speed; the picture is the emulator's, under a line of text."""
    recording, first, rom = recorded("Breakout")
    abs_script.film(tmp_path / "film.gif", recording, rom, False)
    err = capsys.readouterr().err
    assert f"{first['length']:,} steps and {first['score']:g} points" in err
    screens = [screen for screen, _, _ in replay(abs_script, recording, rom, False)]
    with Image.open(tmp_path / "film.gif") as gif:
        assert gif.size == (320, 444)
        times, last = 0, None
        for number in range(gif.n_frames):
            gif.seek(number)
            times += gif.info["duration"]
            last = np.asarray(gif.convert("RGB")).astype(int)
    assert times == len(recording) * 70  # [ms]; equal neighbours may have been merged
    assert abs(last[24::2, ::2] - screens[-1]).max() <= 24  # at most 64 colours
    assert last[:24].max() > 200  # the text
    assert len(np.unique(last.reshape(-1, 3), axis=0)) > 5


def test_a_long_film_is_thinned_out_and_refereed_all_the_same(abs_script, recorded, tmp_path):
    recording, _, rom = recorded("Breakout")
    abs_script.film(tmp_path / "film.gif", recording, rom, False, most_frames=40)
    every = -(-len(recording) // 40)
    with Image.open(tmp_path / "film.gif") as gif:
        assert gif.n_frames <= 41
        assert gif.info["duration"] == pytest.approx(every * 66.7, abs=10)
    ram = recording[-2][3].copy()  # of a row that is not drawn
    ram[0] ^= 1
    with pytest.raises(abs_script.ReplayError):
        abs_script.film(tmp_path / "other.gif", altered(recording, -2 + len(recording), ram=ram), rom, False, 40)
    assert not (tmp_path / "other.gif").exists()


@pytest.mark.slow
def test_capture_video_from_the_command_line(script, tmp_path, capsys):
    """Train a little, evaluate, film; then the same from the saved model."""
    flags = "--env-id Breakout-v5 --num-envs 2 --num-minibatches 2 --total-timesteps 64 --eval-episodes 2".split()
    flags += ["--eval-epsilon", "1", "--torch-threads", "1", "--capture-video", "--runs-dir", str(tmp_path / "runs")]
    result = script.main(flags)
    assert "equal in envpool and ale-py at every step" in capsys.readouterr().err
    script.main(["--evaluate", result["run_dir"], "--eval-episodes", "2", "--eval-epsilon", "1", "--capture-video",
                 "--runs-dir", str(tmp_path / "evaluations")])  # fmt: skip
    films = [path.read_bytes() for path in tmp_path.glob("*/*/film.gif")]
    assert len(films) == 2 and films[0] == films[1]
    assert result["eval_return"] == json.loads(next(tmp_path.glob("evaluations/*/eval.json")).read_text())["mean"]


def test_a_mismatch_ends_the_run_with_a_line_and_keeps_the_scores(script, monkeypatch, capsys, tmp_path):
    """Scores are written before the film is drawn."""
    monkeypatch.setattr(envpool, "make", fake_make(CueGame))
    monkeypatch.setattr(
        CueGame, "spec", types.SimpleNamespace(config=types.SimpleNamespace(task="pong")), raising=False
    )
    with pytest.raises(SystemExit) as stop:
        script.main(
            ["--runs-dir", str(tmp_path), "--num-envs", "2", "--num-minibatches", "2", "--total-timesteps", "64",
             "--eval-episodes", "2", "--capture-video", "--torch-threads", "1"]
        )  # fmt: skip
    assert stop.value.code == 1
    assert "differ in their RAM at the opening before step 1" in capsys.readouterr().err.splitlines()[-1]
    assert len(list(tmp_path.glob("*/eval.json"))) == 1 and not list(tmp_path.glob("*/film.gif"))
