"""The real envpool: ale-py referees its emulation, and the facts that the training scripts rely on are held here.

envpool and ale-py are two builds of the same emulator, so an ale-py emulator that is fed the same actions must agree
with envpool at every step: the 128 bytes of RAM, the raw score, the lives, the end of the game. The referee knows
nothing of envpool's options (no-op starts, FIRE on reset, episodic life, reward clipping); the tests spell them out in
frames. A "step" is an agent decision, a "frame" an emulator frame, and a "reset row" the row after a done row: it holds
the first observation of what comes next, and its action was ignored.

Shapes: T rows, N environments. Every stream is fixed by its seeds, so a failure repeats.
"""

from dataclasses import dataclass

import envpool
import numpy as np
import pytest
from ale_py import Action, ALEInterface, LoggerMode, roms

FRAMES_PER_STEP = 4

# Every new game opens with exactly one no-op frame, so the referee can open it without looking at envpool.
PLAIN = {"noop_max": 1, "use_fire_reset": False}
PLAIN_NOOPS = range(1, 2)

# What the training scripts ask for (use_fire_reset stays at its default, True). The number of opening no-ops is
# envpool's secret, drawn anew for every game and every life: the referee has to find it.
TRAINING = {"episodic_life": True, "reward_clip": True, "noop_max": 30, "max_episode_steps": 27_000}
TRAINING_NOOPS = range(32)


def make(game, seeds, **options):
    """Build one environment of `game` ("Pong", "MsPacman", ...) per entry of the list `seeds`."""
    return envpool.make(f"{game}-v5", env_type="gymnasium", num_envs=len(seeds), seed=seeds, **options)


def random_actions(envs, num_rows, seed=4):
    """Draw uniform actions, (T,): one per row, for a single environment or for all environments alike."""
    return np.random.default_rng(seed).integers(envs.single_action_space.n, size=num_rows)


# --- The referee ------------------------------------------------------------------------------------------------------


class Referee:
    """ale-py's own emulator running one ROM, frame by frame, without sticky actions."""

    def __init__(self, rom):
        ALEInterface.setLoggerMode(LoggerMode.Error)  # before the first emulator, or it prints a banner
        self.ale = ALEInterface()
        self.ale.setInt("random_seed", 0)  # the default is the time of day
        self.ale.setFloat("repeat_action_probability", 0.0)  # ale-py's default is 0.25
        self.ale.loadROM(roms.get_rom_path(rom))
        self.buttons = self.ale.getMinimalActionSet()

    def step(self, action):
        """Hold one action for four frames, or until the game is over, and return the raw score of these frames."""
        score = 0
        for _ in range(FRAMES_PER_STEP):
            score += self.ale.act(self.buttons[action])
            if self.ale.game_over():
                break
        return score

    def press_opening(self, ram, noops, fire):
        """Press the opening that leads to `ram`: k no-op frames, then FIRE if `fire`; the first k of `noops` that fits.

        Returns k and stands at `ram`, or returns None and stands where it stood.
        """
        start = self.ale.cloneState()
        for k in noops:
            for _ in range(k):
                self.ale.act(Action.NOOP)
            if fire:
                self.ale.act(Action.FIRE)
            if np.array_equal(self.ale.getRAM(), ram):
                return k
            self.ale.restoreState(start)
        return None

    def agrees(self, info):
        """Compare RAM, lives and game over with the only row of envpool's `info`."""
        return (
            np.array_equal(self.ale.getRAM(), info["ram"][0])
            and self.ale.lives() == info["lives"][0]
            and self.ale.game_over() == info["terminated"][0]
        )


@dataclass
class Verdict:
    """What the referee saw until the last row or the first mismatch."""

    mismatch: int | None = None  # row (from 0) at which envpool and ale-py first differ; -1 is the row of reset()
    steps: int = 0  # rows that are transitions, that is, not reset rows
    scoring_steps: int = 0  # steps with a raw score other than 0
    games: int = 1  # games begun
    life_openings: tuple[int, ...] = ()  # no-ops found at the reset row of each lost life


def referee_game(game, options, noops, num_rows, seed=7, altered_row=None):
    """Play the same random actions in envpool and in ale-py, and compare them after every row.

    Game over restarts the referee's emulator; a lost life (with episodic_life) only presses the opening again. At row
    `altered_row` the referee is given another action than envpool: the comparison must notice.
    """
    envs = make(game, [seed], **options)
    referee = Referee(envs.spec.config.task)
    fire = options.get("use_fire_reset", True) and Action.FIRE in referee.buttons
    verdict = Verdict()
    _, info = envs.reset()
    referee.ale.reset_game()
    if referee.press_opening(info["ram"][0], noops, fire) is None:
        verdict.mismatch = -1
        return verdict

    reset_row = False
    game_over = False
    for row, action in enumerate(random_actions(envs, num_rows)):
        _, _, terminated, truncated, info = envs.step(np.array([action]))
        if reset_row:
            if game_over:
                referee.ale.reset_game()
                verdict.games += 1
            k = referee.press_opening(info["ram"][0], noops, fire)
            if k is not None and not game_over:
                verdict.life_openings += (k,)
            score = 0  # points made during an opening belong to no step
        else:
            if row == altered_row:
                action = (action + 1) % len(referee.buttons)
            score = referee.step(action)
            verdict.steps += 1
            verdict.scoring_steps += score != 0
        if score != info["reward"][0] or not referee.agrees(info):
            verdict.mismatch = row
            return verdict
        reset_row = terminated[0] or truncated[0]
        game_over = info["terminated"][0] == 1
    return verdict


@pytest.mark.parametrize(
    "game",
    [
        "Breakout",  # the others are slow only because there are many of them
        "Pong",
        pytest.param("MsPacman", marks=pytest.mark.slow),
        pytest.param("SpaceInvaders", marks=pytest.mark.slow),
        pytest.param("Qbert", marks=pytest.mark.slow),
        pytest.param("Seaquest", marks=pytest.mark.slow),
        pytest.param("Boxing", marks=pytest.mark.slow),
        pytest.param("KungFuMaster", marks=pytest.mark.slow),
    ],
)
def test_envpool_equals_ale_py(game):
    """RAM, lives and raw score are equal over more than 300 steps, across the end of a game where one ends."""
    verdict = referee_game(game, PLAIN, PLAIN_NOOPS, num_rows=320)
    assert verdict.mismatch is None
    assert verdict.steps >= 300
    assert verdict.scoring_steps > 0  # else the scores compared were all 0


@pytest.mark.parametrize(
    ("game", "num_rows"),
    [
        ("Breakout", 220),
        pytest.param("MsPacman", 520, marks=pytest.mark.slow),
        pytest.param("SpaceInvaders", 720, marks=pytest.mark.slow),
        pytest.param("Qbert", 350, marks=pytest.mark.slow),
        pytest.param("Seaquest", 850, marks=pytest.mark.slow),
    ],
)
def test_envpool_equals_ale_py_under_the_training_options(game, num_rows):
    """Still equal with no-op starts, FIRE, episodic life and clipping, through lost lives and into the next game."""
    verdict = referee_game(game, TRAINING, TRAINING_NOOPS, num_rows)
    assert verdict.mismatch is None
    assert verdict.games >= 2
    assert len(set(verdict.life_openings)) >= 2  # lives were lost, and their openings differ in length
    assert verdict.scoring_steps > 0


@pytest.mark.parametrize(
    ("game", "options", "noops"), [("Pong", PLAIN, PLAIN_NOOPS), ("Seaquest", TRAINING, TRAINING_NOOPS)]
)
def test_referee_notices_one_altered_action(game, options, noops):
    """One different action is a mismatch at its very step, and not before: the referee does not just agree."""
    assert referee_game(game, options, noops, num_rows=80, altered_row=60).mismatch == 60


def test_referee_notices_a_wrong_opening():
    """The search for an opening does not fit just anything: one that leaves out the no-ops fails at the first row."""
    verdict = referee_game("Breakout", TRAINING, range(1), num_rows=1)
    assert verdict.mismatch == -1


# --- Rewards, seeds and threads ---------------------------------------------------------------------------------------


def stream(envs, num_rows):
    """Play the same random actions in all environments; return RAM, raw score and a digest of each frame by row.

    Returns (T, N, 128 + 1 + 1) int64; equal streams mean equal emulators, and equal observations but for a collision.
    """
    rows = []
    obs, info = envs.reset()
    for action in random_actions(envs, num_rows):
        digest = np.array([hash(frames.tobytes()) for frames in obs])
        rows.append(np.column_stack([info["ram"], info["reward"], digest]).astype(np.int64))
        obs, _, _, _, info = envs.step(np.full(len(envs), action))
    return np.stack(rows)


def test_reward_is_clipped_and_info_keeps_the_raw_score():
    """In Seaquest a kill is worth 20 points: `reward` says 1, info["reward"] says 20."""
    envs = make("Seaquest", [1], **TRAINING)
    envs.reset()
    raw_scores = set()
    for action in random_actions(envs, 210):
        _, reward, _, _, info = envs.step(np.array([action]))
        np.testing.assert_array_equal(reward, np.clip(info["reward"], -1, 1))
        raw_scores.update(info["reward"].tolist())
    assert raw_scores == {0.0, 20.0}


def test_seed_list_seeds_each_environment_by_itself():
    """The same seed in two positions of the list gives the same stream; another seed gives another one."""
    streams = stream(make("SpaceInvaders", [11, 14, 11], **TRAINING), 60)
    np.testing.assert_array_equal(streams[:, 0], streams[:, 2])
    assert not np.array_equal(streams[:, 0], streams[:, 1])


def test_integer_seeds_overlap_between_runs():
    """The trap that seed lists avoid: an integer seed s means s, s+1, ..., so runs with s and s+1 share streams."""
    first = stream(envpool.make("Breakout-v5", "gymnasium", num_envs=2, seed=1, **TRAINING), 60)
    second = stream(envpool.make("Breakout-v5", "gymnasium", num_envs=2, seed=2, **TRAINING), 60)
    np.testing.assert_array_equal(first[:, 1], second[:, 0])
    assert not np.array_equal(first[:, 0], second[:, 0])


@pytest.mark.slow
def test_result_does_not_depend_on_the_number_of_threads():
    """One worker thread and three give the same three streams."""
    one = stream(make("Breakout", [1, 2, 3], num_threads=1, **TRAINING), 60)
    three = stream(make("Breakout", [1, 2, 3], num_threads=3, **TRAINING), 60)
    np.testing.assert_array_equal(one, three)


# --- Observations and reset rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_first_observation_shows_the_game(game):
    """The observation of reset() is a picture, not blank, and its four frames are the same one."""
    obs, _ = make(game, [1], **TRAINING).reset()
    assert obs.shape == (1, 4, 84, 84)
    assert obs.dtype == np.uint8
    assert obs.mean() > 0
    assert obs.max() > obs.min()
    assert (obs == obs[:, :1]).all()


def test_returned_arrays_are_never_reused():
    """Arrays of an earlier step keep their values while they are held, so the last observation needs no copy."""
    envs = make("Breakout", [1], **TRAINING)
    envs.reset()
    held = []
    for action in random_actions(envs, 50):
        obs, reward, _, _, info = envs.step(np.array([action]))
        held.extend((array, array.copy()) for array in (obs, reward, info["reward"], info["lives"], info["ram"]))
    assert all(np.array_equal(array, copy) for array, copy in held)


def check_reset_row(before, after):
    """Check one environment's reset row `after` against the done row `before`, and return what ended there.

    Both are dicts of the environment's own row: obs (4, 84, 84), reward, done, truncated, and the entries of info.
    """
    assert after["reward"] == 0
    assert after["raw_score"] == 0
    assert not after["done"]
    assert after["game_over"] == 0
    if before["game_over"] or before["truncated"]:
        assert after["lives"] == 5  # a new game, also where the time limit cut one with lives left
        assert after["elapsed_step"] == 0
        assert (after["obs"] == after["obs"][0]).all()
        return "time limit" if before["truncated"] else "game over"
    assert after["lives"] == before["lives"]
    assert after["elapsed_step"] == before["elapsed_step"]  # neither 0 nor one more
    np.testing.assert_array_equal(after["obs"][:3], before["obs"][1:])  # the stack slides on: old frames stay in it
    return "life lost"


def test_reset_rows_keep_their_contract():
    """Every row of Breakout is a transition (elapsed_step one more) or a reset row that keeps its contract.

    At the end of a game, elapsed_step is the number of its transitions: reset rows and lost lives do not count.
    """
    num_envs = 2
    envs = make("Breakout", [1, 2], **TRAINING | {"max_episode_steps": 130})
    rng = np.random.default_rng(5)  # actions that end games in both ways within these rows
    envs.reset()
    last = [None] * num_envs
    transitions = np.zeros(num_envs, dtype=int)
    endings = []
    for _ in range(280):
        obs, reward, terminated, truncated, info = envs.step(rng.integers(4, size=num_envs))
        np.testing.assert_array_equal(info["env_id"], np.arange(num_envs))
        for n in range(num_envs):
            row = {
                "obs": obs[n],
                "reward": reward[n],
                "done": terminated[n] or truncated[n],
                "truncated": truncated[n],
                "raw_score": info["reward"][n],
                "game_over": info["terminated"][n],
                "lives": info["lives"][n],
                "elapsed_step": info["elapsed_step"][n],
            }
            if last[n] is not None and last[n]["done"]:
                ending = check_reset_row(last[n], row)
                endings.append(ending)
                if ending != "life lost":
                    transitions[n] = 0
            else:
                transitions[n] += 1
            assert row["elapsed_step"] == transitions[n]
            last[n] = row
    assert set(endings) == {"life lost", "game over", "time limit"}


def test_action_of_a_reset_row_is_ignored():
    """Two environments with one seed stay identical though their actions differ at every reset row, and only there."""
    envs = make("Breakout", [3, 3], **TRAINING)
    envs.reset()
    reset_row = False
    num_reset_rows = 0
    for action in random_actions(envs, 200):
        actions = np.array([action, (action + 2) % 4]) if reset_row else np.array([action, action])
        obs, _, terminated, truncated, info = envs.step(actions)
        num_reset_rows += reset_row
        np.testing.assert_array_equal(obs[0], obs[1])
        np.testing.assert_array_equal(info["ram"][0], info["ram"][1])
        reset_row = terminated[0] or truncated[0]
    assert num_reset_rows > 3
    assert not reset_row
    _, _, _, _, info = envs.step(np.array([2, 3]))  # right and left, in a step that counts
    assert not np.array_equal(info["ram"][0], info["ram"][1])


# --- The time limit ---------------------------------------------------------------------------------------------------


def play_one_game(max_episode_steps):
    """Play one Breakout game with fixed actions under a time limit, and one row beyond it.

    Returns a list with one tuple per row: (terminated, truncated, info["terminated"], lives, elapsed_step).
    """
    envs = make("Breakout", [5], **TRAINING | {"max_episode_steps": max_episode_steps})
    envs.reset()
    rows = []
    game_ended = False
    for action in random_actions(envs, 500):
        _, _, terminated, truncated, info = envs.step(np.array([action]))
        rows.append(
            (terminated[0], truncated[0], info["terminated"][0], info["lives"][0], info["elapsed_step"][0]),
        )
        if game_ended:
            return rows
        game_ended = truncated[0] or info["terminated"][0] == 1
    raise AssertionError("no game ended")


@pytest.mark.slow
def test_time_limit_hides_what_else_happened_on_its_step():
    """On the step of the limit only `truncated` is reported; info["terminated"] alone tells a real game over.

    The game is played without a limit first, to learn the step of its first lost life and its length; then again with
    the limit exactly at the one and at the other. A new game follows in every case.
    """
    free = play_one_game(max_episode_steps=27_000)
    first_lost_life = next(elapsed for terminated, _, _, _, elapsed in free if terminated)
    length = free[-2][4]
    assert free[-2] == (True, False, 1, 0, length)
    assert first_lost_life < length
    new_game = (False, False, 0, 5, 0)
    assert free[-1] == new_game

    assert play_one_game(first_lost_life)[-2:] == [(False, True, 0, 4, first_lost_life), new_game]
    assert play_one_game(length)[-2:] == [(False, True, 1, 0, length), new_game]
