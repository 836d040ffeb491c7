"""The fake environment keeps envpool's contract: the same checks run on real envpool games and on the fake ones."""

import time
from itertools import pairwise

import envpool
import numpy as np
import pytest
from fake_envpool import Catch, CueGame, Row, ScriptedGame, fake_make

GAMES = [CueGame, Catch]


def make_real(task_id="Breakout-v5", **options):
    return envpool.make(task_id, env_type="gymnasium", num_threads=1, **options)


def make_fake(game_class, **options):
    return fake_make(game_class)("Breakout-v5", env_type="gymnasium", num_threads=1, **options)


def record(env, num_steps, policy):
    """Play from a reset -> dict of arrays with one leading row per step, row 0 being the reset.

    policy(env) -> (N,) actions, chosen before each step.
    """
    nothing = np.zeros(env.num_envs)
    obs, info = env.reset()
    rows = [(obs, nothing, nothing > 0, nothing > 0, info)]
    for _ in range(num_steps):
        rows.append(env.step(policy(env)))
    obs, reward, terminated, truncated, infos = zip(*rows, strict=True)
    return {
        "obs": np.stack(obs),  # (T+1, N, 4, 84, 84)
        "reward": np.stack(reward),  # (T+1, N), and so are the rest
        "terminated": np.stack(terminated),
        "truncated": np.stack(truncated),
        "raw_reward": np.stack([info["reward"] for info in infos]),
        "game_over": np.stack([info["terminated"] for info in infos]) == 1,
        "lives": np.stack([info["lives"] for info in infos]),
        "elapsed": np.stack([info["elapsed_step"] for info in infos]),
    }


def random_player(seed):
    rng = np.random.default_rng(seed)
    return lambda env: rng.integers(0, env.action_space.n, env.num_envs)


def oracle(env):
    """The best actions in CueGame and Catch, read from the game's state."""
    if isinstance(env, CueGame):
        return env.cue
    right, left, stay = 2, 3, 0
    return np.select([env.ball_column >= env.paddle + env.width, env.ball_column < env.paddle], [right, left], stay)


def check_rows(log, *, full_lives, episodic_life, reward_clip, max_episode_steps):
    """Hold every row of a recording to the table of envpool's autoreset rows; return how many there were of a kind."""
    now = {name: values[1:] for name, values in log.items()}
    before = {name: values[:-1] for name, values in log.items()}
    reset_row = before["terminated"] | before["truncated"]
    new_game = reset_row & (before["game_over"] | before["truncated"])
    resumed = reset_row & ~new_game
    played = ~reset_row

    game_over = now["game_over"]
    life_lost = now["lives"] < before["lives"]
    at_limit = played & (now["elapsed"] == max_episode_steps)

    quiet = (now["reward"] == 0) & (now["raw_reward"] == 0) & ~now["terminated"] & ~now["truncated"] & ~game_over
    assert quiet[reset_row].all()
    assert (now["elapsed"][new_game] == 0).all()
    assert (now["lives"][new_game] == full_lives).all()
    assert (now["elapsed"][resumed] == before["elapsed"][resumed]).all()
    assert (now["lives"][resumed] == before["lives"][resumed]).all()

    assert (now["elapsed"][played] == before["elapsed"][played] + 1).all()
    assert (now["elapsed"] <= max_episode_steps).all()
    # A game over exactly at the time limit is flagged as truncated too; only info["terminated"] tells.
    assert (now["truncated"] == at_limit).all()
    ended = game_over | life_lost if episodic_life else game_over
    assert (now["terminated"] == (ended & ~at_limit)).all()
    assert (now["lives"][game_over] == 0).all()
    assert (now["lives"][played & ~life_lost] == before["lives"][played & ~life_lost]).all()
    expected_reward = np.sign(now["raw_reward"]) if reward_clip else now["raw_reward"]
    assert (now["reward"] == expected_reward).all()

    # The frame stack moves by one screen on every row but a new game's first, which is four times the same screen.
    assert (now["obs"][~new_game][:, :-1] == before["obs"][~new_game][:, 1:]).all()
    for first in (log["obs"][0], now["obs"][new_game]):
        assert (first == first[:, -1:]).all()
        assert (first.mean(axis=(1, 2, 3)) > 0).all()

    return {
        "game over": int(game_over.sum()),
        "life lost": int((life_lost & ~game_over).sum()),
        "time limit": int((at_limit & ~game_over).sum()),
        "game over at the limit": int((game_over & at_limit).sum()),
        "life lost at the limit": int((life_lost & at_limit & ~game_over).sum()),
        "new game": int(new_game.sum()),
        "resumed": int(resumed.sum()),
    }


def full_returns(log):
    """Raw returns of the finished games of a recording, environment by environment."""
    ends = log["game_over"] | log["truncated"]
    totals = np.cumsum(log["raw_reward"], axis=0)
    return [
        float(after - before)
        for env in range(ends.shape[1])
        for before, after in pairwise(np.concatenate(([0.0], totals[ends[:, env], env])))
    ]


# ---- shapes, dtypes, names ----


@pytest.mark.parametrize("game_class", [*GAMES, ScriptedGame])
def test_returns_have_the_real_types(game_class):
    options = {"num_envs": 2, "seed": [3, 4], "episodic_life": True, "reward_clip": True}
    kwargs = {"scripts": [[Row(1)]]} if game_class is ScriptedGame else {}
    real = make_real(**options)
    fake = fake_make(game_class, **kwargs)("Breakout-v5", env_type="gymnasium", **options)

    def layout(value):
        if isinstance(value, dict):
            return {name: layout(item) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(layout(item) for item in value)
        return value.dtype, value.shape, value.flags.writeable

    assert layout(fake.reset()) == layout(real.reset())
    for _ in range(3):
        assert layout(fake.step(np.array([1, 1]))) == layout(real.step(np.array([1, 1])))
    assert fake.observation_space == real.observation_space
    assert type(fake.action_space) is type(real.action_space)
    assert fake.num_envs == real.num_envs == 2


def test_properties_cannot_be_assigned():
    for env in (make_real(num_envs=1), make_fake(CueGame)):
        for name in ("num_envs", "action_space", "observation_space"):
            with pytest.raises(AttributeError):
                setattr(env, name, getattr(env, name))


def test_returned_arrays_stay_as_they_were_and_may_be_overwritten():
    kept, spoilt = make_fake(Catch, num_envs=2), make_fake(Catch, num_envs=2)
    play = random_player(0)
    kept_rows, copies = [], []
    spoilt.reset()
    kept.reset()
    for _ in range(50):
        action = play(kept)
        kept_rows.append(kept.step(action))
        copies.append([array.copy() for array in kept_rows[-1][:4]])
        obs, reward, terminated, truncated, info = spoilt.step(action)
        for array in (obs, reward, terminated, truncated, info["lives"], info["elapsed_step"], info["reward"]):
            array[:] = 1
    for row, copy in zip(kept_rows, copies, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(row[:4], copy, strict=True))
    assert np.array_equal(kept.step(action)[0], spoilt.step(action)[0])


# ---- the rows around a done ----


def test_real_breakout_with_episodic_life_and_its_time_limits():
    """Real play, then cut short at the step of the first lost life, and of the first game over, of environment 0."""
    options = {"num_envs": 2, "seed": [3, 4], "episodic_life": True, "reward_clip": True}
    rules = {"full_lives": 5, "episodic_life": True, "reward_clip": True}
    free = record(make_real(**options), 400, random_player(0))
    kinds = check_rows(free, max_episode_steps=27_000, **rules)
    assert kinds["game over"] > 0 and kinds["life lost"] > 0 and kinds["new game"] > 0 and kinds["resumed"] > 0
    assert kinds["time limit"] == 0

    for event, kind in (("terminated", "life lost at the limit"), ("game_over", "game over at the limit")):
        row = free[event][:, 0].argmax()
        limit = int(free["elapsed"][row, 0])
        cut = record(make_real(max_episode_steps=limit, **options), row + 3, random_player(0))
        assert check_rows(cut, max_episode_steps=limit, **rules)[kind] > 0


def test_real_breakout_without_episodic_life():
    options = {"num_envs": 2, "seed": [3, 4], "max_episode_steps": 60}
    log = record(make_real(**options), 200, random_player(0))
    kinds = check_rows(log, full_lives=5, episodic_life=False, reward_clip=False, max_episode_steps=60)
    assert kinds["time limit"] > 0 and kinds["life lost"] > 0 and kinds["resumed"] == 0


def test_real_qbert_clips_rewards():
    log = record(make_real("Qbert-v5", num_envs=1, reward_clip=True), 100, random_player(0))
    check_rows(log, full_lives=4, episodic_life=False, reward_clip=True, max_episode_steps=27_000)
    assert log["raw_reward"].max() > 1 and log["reward"].max() == 1


@pytest.mark.parametrize("episodic_life", [True, False])
@pytest.mark.parametrize("max_episode_steps", [27_000, 10, 1])
@pytest.mark.parametrize("game_class", GAMES)
def test_fake_games(game_class, episodic_life, max_episode_steps):
    rules = {"episodic_life": episodic_life, "max_episode_steps": max_episode_steps}
    env = make_fake(game_class, num_envs=4, seed=[5, 6, 7, 8], **rules)
    log = record(env, 400, random_player(0))
    kinds = check_rows(log, full_lives=game_class.full_lives, reward_clip=False, **rules)
    assert (kinds["time limit"] > 0) == (max_episode_steps < 27_000)
    assert (kinds["game over"] > 0) == (max_episode_steps == 27_000)
    assert (kinds["life lost"] > 0) == (max_episode_steps > 1)
    assert (kinds["resumed"] > 0) == (max_episode_steps > 1 and episodic_life)


def test_game_over_or_a_lost_life_exactly_at_the_time_limit():
    cue = {"full_lives": CueGame.full_lives, "episodic_life": True, "reward_clip": False}
    for limit, kind in ((24, "game over at the limit"), (16, "life lost at the limit")):
        env = make_fake(CueGame, num_envs=2, seed=[1, 2], episodic_life=True, max_episode_steps=limit)
        kinds = check_rows(record(env, 100, oracle), max_episode_steps=limit, **cue)
        assert kinds[kind] > 0
        assert (kinds["game over"] > 0) == (limit == 24)
        assert (kinds["time limit"] > 0) == (limit == 16)


@pytest.mark.parametrize("game_class", GAMES)
def test_the_game_has_moved_on_after_a_lost_life(game_class):
    log = record(make_fake(game_class, num_envs=4, episodic_life=True), 200, random_player(0))
    lost = (log["terminated"] & ~log["game_over"])[:-1]
    before, after = log["obs"][:-1][lost][:, -1], log["obs"][1:][lost][:, -1]
    assert (before != after).any(axis=(1, 2)).sum() > 10


@pytest.mark.parametrize("num_steps", [20, None], ids=["in mid-game", "with a reset row due"])
@pytest.mark.parametrize("make_env", [make_real, lambda **options: make_fake(CueGame, **options)])
def test_reset_starts_a_new_game_at_any_time(make_env, num_steps):
    env = make_env(num_envs=2, seed=[3, 4], episodic_life=True)
    _, first = env.reset()
    play = random_player(0)
    terminated, count = np.zeros(2, bool), 0
    while count < num_steps if num_steps else not terminated.any():
        _, _, terminated, _, info = env.step(play(env))
        count += 1
    assert (info["elapsed_step"] > 0).all()
    obs, info = env.reset()
    assert (info["lives"] == first["lives"]).all()
    assert (info["elapsed_step"] == 0).all()
    assert (obs == obs[:, -1:]).all()
    *_, terminated, truncated, info = env.step(np.array([1, 1]))
    assert (info["elapsed_step"] == 1).all()
    assert not (terminated | truncated).any()


# ---- seeds ----


@pytest.mark.parametrize("game_class", GAMES)
def test_an_environment_depends_on_its_own_seed_only(game_class):
    def frames(seed):
        env = make_fake(game_class, num_envs=len(seed), seed=seed, episodic_life=True)
        return record(env, 100, lambda env: np.zeros(env.num_envs, np.int64))["obs"][:, :, -1]  # (T+1, N, 84, 84)

    one = frames([11, 12, 13])
    assert np.array_equal(one, frames([11, 12, 13]))
    assert np.array_equal(one[:, [2, 0, 1]], frames([13, 11, 12]))
    assert np.array_equal(one[:, 1:2], frames([12]))
    assert not np.array_equal(one[:, 0], one[:, 1])


def test_an_integer_seed_counts_up_as_in_envpool():
    for make_env in (make_real, lambda **options: make_fake(CueGame, **options)):
        counted, listed = (make_env(num_envs=2, seed=seed).reset()[0] for seed in (6, [6, 7]))
        assert np.array_equal(counted, listed)


def test_another_game_follows_a_reset():
    env = make_fake(CueGame, num_envs=4)
    games = [record(env, 23, oracle)["obs"] for _ in range(2)]
    assert not np.array_equal(*games)


# ---- misuse ----


@pytest.mark.parametrize(
    "action",
    [
        np.array([0, 4]),
        np.array([-1, 0]),
        np.array([0]),
        np.array([0, 0, 0]),
        np.array([[0], [0]]),
        np.array(0),
        np.array([0.0, 0.0]),
        [0, 0],
    ],
    ids=str,
)
def test_bad_actions_are_rejected(action):
    env = make_fake(CueGame, num_envs=2)
    env.reset()
    env.step(np.array([0, 3]))
    with pytest.raises(AssertionError, match="actions must"):
        env.step(action)


def test_steps_outside_of_reset_and_close_are_rejected():
    env = make_fake(CueGame)
    with pytest.raises(AssertionError, match="before the first reset"):
        env.step(np.array([0]))
    env.reset()
    env.close()
    assert env.closed
    with pytest.raises(AssertionError, match="after close"):
        env.step(np.array([0]))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_envs": 2, "seed": [1]}, AssertionError),
        ({"num_envs": 2, "seed": [1, 2**31]}, AssertionError),
        ({"num_envs": 0}, AssertionError),
        ({"no_such_option": 1}, TypeError),
    ],
    ids=str,
)
def test_make_rejects_what_the_real_one_rejects(options, error):
    for make in (make_real, lambda **options: make_fake(CueGame, **options)):
        with pytest.raises(error):
            make(**options)


def test_make_rejects_what_crashes_the_real_one():
    with pytest.raises(AssertionError, match="noop_max"):
        make_fake(CueGame, noop_max=0)


def test_make_remembers_calls_and_environments(monkeypatch):
    monkeypatch.setattr(envpool, "make", fake_make(ScriptedGame, scripts=[[Row()]], num_actions=9))
    options = {"num_envs": 2, "seed": [8, 9], "num_threads": 3, "full_action_space": False, "reward_clip": True}
    env = envpool.make("Pong-v5", env_type="gymnasium", **options)
    assert envpool.make.calls == [{"task_id": "Pong-v5", "env_type": "gymnasium", **options}]
    assert envpool.make.envs == [env]
    assert env.action_space.n == 9


# ---- the games ----


@pytest.mark.parametrize("episodic_life", [True, False])
@pytest.mark.parametrize("game_class", GAMES)
def test_oracle_player_gets_the_best_return(game_class, episodic_life):
    env = make_fake(game_class, num_envs=4, episodic_life=episodic_life)
    returns = full_returns(record(env, 200, oracle))
    assert len(returns) >= 4 * 5
    assert set(returns) == {game_class.best_return}


def catch_random_return():
    """The ball's column is uniform whatever the paddle does, so a random player catches it with p = 3/7.

    A game is B balls, 3 to 5 of them, each worth 2p - 1 on average; by Wald's identity E[return] = E[B] (2p - 1).
    """
    p, q = 3 / 7, 4 / 7
    three_balls, four_balls = q**3, 3 * p * q**3
    return (3 * three_balls + 4 * four_balls + 5 * (1 - three_balls - four_balls)) * (2 * p - 1)


@pytest.mark.parametrize(
    ("game_class", "expected"), [(CueGame, CueGame.best_return / 4), (Catch, catch_random_return())]
)
def test_random_player_gets_the_expected_return(game_class, expected):
    returns = []
    for seed in range(8):
        log = record(make_fake(game_class, num_envs=8, seed=1000 * seed), 180, random_player(seed))
        for env in range(8):
            # Every environment counts its first 5 games: taking all those that end in time would favour short ones.
            games = full_returns({name: values[:, [env]] for name, values in log.items()})
            assert len(games) >= 5
            returns += games[:5]
    standard_error = np.std(returns) / len(returns) ** 0.5
    assert abs(np.mean(returns) - expected) < 4 * standard_error < 0.15 * game_class.best_return


def test_cue_is_on_screen_and_unique():
    env = make_fake(CueGame, num_envs=8)
    obs, _ = env.reset()
    seen = {}
    for _ in range(60):
        bars = obs[:, -1].reshape(8, 84, 4, 21).mean(axis=(1, 3))  # (N, 4)
        assert ((bars == 255).sum(axis=1) == 1).all()
        shown = bars.argmax(axis=1)
        for cue in shown:
            seen[int(cue)] = seen.get(int(cue), 0) + 1
        obs, reward, *_ = env.step(shown)
        assert (reward == (env.elapsed > 0)).all()  # elapsed is 0 on reset rows only
    assert sorted(seen) == [0, 1, 2, 3]
    assert min(seen.values()) > 60  # 120 expected


def test_catch_rewards_only_at_the_bottom_and_shows_the_outcome():
    env = make_fake(Catch, num_envs=8)
    log = record(env, 300, random_player(0))
    cells = log["obs"][1:, :, -1, ::12, ::12]  # (T, N, 7, 7)
    reward = log["reward"][1:]
    ball_landed = (cells[:, :, -1] == 255).any(axis=-1)
    paddle_cells = (cells[:, :, -1] == 120).sum(axis=-1)
    assert ((cells == 255).sum(axis=(2, 3)) == 1).all()
    assert (paddle_cells == np.where(reward > 0, 2, 3)).all()  # a caught ball hides one of the paddle's three
    assert (reward == np.where(ball_landed, np.where(paddle_cells == 2, 1, -1), 0)).all()
    assert (reward > 0).any() and (reward < 0).any()


def test_catch_environments_fall_out_of_step():
    env = make_fake(Catch, num_envs=8)
    log = record(env, 100, oracle)
    assert len(set(env.ball_row.tolist())) > 1
    some_done = log["terminated"].any(axis=1) & ~log["terminated"].all(axis=1)
    assert some_done.any()


def test_catch_actions_of_one_effect_tie():
    def frames(actions_of_effect):
        rng = np.random.default_rng(0)
        return record(make_fake(Catch, num_envs=4), 60, lambda env: actions_of_effect[rng.integers(0, 3, 4)])["obs"]

    assert np.array_equal(frames(np.array([0, 2, 3])), frames(np.array([1, 4, 5])))


def scripted(scripts, num_steps, **options):
    options = {"num_envs": len(scripts), **options}
    env = fake_make(ScriptedGame, scripts=scripts)("Breakout-v5", env_type="gymnasium", **options)
    return record(env, num_steps, random_player(0))


def test_script_of_two_games_cut_by_the_time_limit():
    log = scripted([[Row(4), Row(6, truncated=True)]], 6)
    assert log["truncated"][1:, 0].tolist() == [False, True, False, False, True, False]
    assert log["elapsed"][1:, 0].tolist() == [1, 2, 0, 1, 2, 0]
    assert (log["lives"] == 3).all() and not log["terminated"].any()
    assert full_returns(log) == [10.0, 10.0]


def test_script_of_a_game_that_loses_its_lives():
    script = [Row(1, 3), Row(2, 2), Row(0, 1), Row(20, 0, terminated=True)]
    log = scripted([script], 8, episodic_life=True, reward_clip=True)
    assert log["lives"][1:, 0].tolist() == [3, 2, 2, 1, 1, 0, 3, 3]
    assert log["terminated"][1:, 0].tolist() == [False, True, False, True, False, True, False, False]
    assert log["reward"][1:, 0].tolist() == [1, 1, 0, 0, 0, 1, 0, 1]
    assert full_returns(log) == [23.0]
    check_rows(log, full_lives=3, episodic_life=True, reward_clip=True, max_episode_steps=27_000)


def test_script_with_a_game_over_exactly_at_the_time_limit():
    for log in (
        scripted([[Row(1), Row(5, 0, terminated=True, truncated=True)]], 3),
        scripted([[Row(1), Row(5, 0, terminated=True)]], 3, max_episode_steps=2),
    ):
        assert log["truncated"][1:, 0].tolist() == [False, True, False]
        assert log["game_over"][1:, 0].tolist() == [False, True, False]
        assert not log["terminated"].any()


def test_scripts_of_different_length_and_more_environments_than_scripts():
    short, long = [Row(1, 0, terminated=True)], [Row(0)] * 99 + [Row(7, 0, terminated=True)]
    log = scripted([short, long], 202, num_envs=3)
    assert log["game_over"].sum(axis=0).tolist() == [101, 2, 101]
    assert full_returns(log) == [1.0] * 101 + [7.0] * 2 + [1.0] * 101


def test_script_screens_tell_the_row():
    log = scripted([[Row(1), Row(1, 0, terminated=True)]], 4)
    assert (log["obs"][:, 0, -1] == np.arange(1, 6)[:, None, None]).all()
    check_rows(log, full_lives=3, episodic_life=False, reward_clip=False, max_episode_steps=27_000)


@pytest.mark.parametrize("game_class", GAMES)
def test_thousands_of_steps_a_second(game_class):
    env = make_fake(game_class, num_envs=8, episodic_life=True)
    env.reset()
    action = np.zeros(8, np.int64)
    start = time.process_time()  # processor time: other processes do not count
    for _ in range(500):
        env.step(action)
    assert 500 * 8 / (time.process_time() - start) > 5_000
