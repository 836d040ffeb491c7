"""Small games behind envpool's exact contract, so that tests of the training scripts need no emulator.

    monkeypatch.setattr(envpool, "make", fake_make(CueGame))

Shapes, dtypes, info keys and the rows around a done are those of envpool 1.2 in its NEXT_STEP autoreset mode;
test_fake_envpool.py holds real envpool games and these to the same checks. Where the real library crashes the
process, or quietly accepts nonsense (actions out of range, of the wrong number or type; noop_max=0; a step before
the first reset), the fake raises AssertionError instead.

Games:
    CueGame       the right action is shown on screen in every state
    Catch         move a paddle under a falling ball; the reward comes late and many actions tie
    ScriptedGame  plays back a given table of rewards, lives and game ends, whatever the actions

Shapes: N environments; K of them are concerned by a call of a game's hook, and `who` (K,) holds their indices.
"""

import functools
from typing import NamedTuple

import envpool
import gymnasium
import numpy as np

SCREEN = 84  # pixels, height and width
FRAMES = 4  # frames stacked in one observation, oldest first
INT32 = np.iinfo(np.int32)

# envpool's other Atari options are accepted and change nothing; an unknown one is a TypeError, as in envpool.
HONOURED_OPTIONS = ("num_envs", "seed", "max_episode_steps", "episodic_life", "reward_clip")


class FakeEnvPool:
    """N copies of a game, stepped together, with envpool's rows around every done.

    A game over, a time limit or (with episodic_life) a lost life is reported by the row on which it happens, with
    the true last observation. The row after it ignores the action, has reward 0 and no flag, and shows the first
    observation of the new game, or of the same game after a lost life.

    num_envs: N.
    seed: N int32 seeds, or one from which they count up. Environment i depends on its own seed and actions only.
    max_episode_steps: played steps after which a game is cut off (truncated).
    episodic_life: report a lost life as terminated.
    reward_clip: return the sign of the reward; info["reward"] stays raw.

    A game sets num_actions, full_lives and, where it is known, best_return (raw, of one full game), and implements
    _new_game, _play and _draw. Its hooks may read `elapsed`, the steps played in the current game with the one
    being played counted in, and they keep `lives` up to date.
    """

    num_actions: int
    full_lives: int
    best_return: float

    def __init__(self, *, num_envs=1, seed=42, max_episode_steps=27_000, episodic_life=False, reward_clip=False):
        assert num_envs >= 1, f"num_envs must be at least 1, got {num_envs}"
        seeds = seed + np.arange(num_envs) if np.ndim(seed) == 0 else np.asarray(seed)
        assert seeds.shape == (num_envs,), f"{num_envs} environments need as many seeds, got {seeds.shape}"
        assert np.issubdtype(seeds.dtype, np.integer), f"seeds must be integers, got {seeds.dtype}"
        assert (seeds >= INT32.min).all() and (seeds <= INT32.max).all(), f"seeds must be int32, got {seeds}"
        self.max_episode_steps = max_episode_steps
        self.episodic_life = episodic_life
        self.reward_clip = reward_clip
        self.closed = False
        self.lives = np.zeros(num_envs, np.int32)  # (N,)
        self.elapsed = np.zeros(num_envs, np.int32)  # (N,)
        self._obs = None  # (N, 4, 84, 84) uint8 once reset
        self._random_state = seeds.astype(np.uint64)  # (N,)
        self._done = np.zeros(num_envs, bool)  # (N,) the next row is a reset row
        self._game_ended = np.zeros(num_envs, bool)  # (N,) and that reset row starts a new game

    # Like envpool's, these are properties: assigning to them is an error.

    @property
    def num_envs(self):
        return len(self.lives)

    @property
    def action_space(self):
        return gymnasium.spaces.Discrete(self.num_actions)

    @property
    def observation_space(self):
        return gymnasium.spaces.Box(0, 255, (FRAMES, SCREEN, SCREEN), np.uint8)

    def reset(self):
        """Start a new game in every environment -> obs, info. The random streams go on; they are not rewound."""
        assert not self.closed, "reset after close"
        everyone = np.ones(self.num_envs, bool)
        self._done = ~everyone
        self._begin_games(everyone)
        self._obs = np.zeros((self.num_envs, FRAMES, SCREEN, SCREEN), np.uint8)
        return self._observe(everyone), self._info(np.zeros(self.num_envs), np.zeros(self.num_envs, bool))

    def step(self, action):
        """Play one step, or the reset row that is due, in every environment.

        action: (N,) integers from 0 to num_actions - 1, those of reset rows too.
        Returns obs (N, 4, 84, 84) uint8, reward (N,) float32, terminated (N,) bool, truncated (N,) bool, and info;
        all arrays are new ones, free for the caller to keep or overwrite.
        """
        assert self._obs is not None, "step before the first reset"
        assert not self.closed, "step after close"
        self._check_action(action)
        playing = ~self._done
        new_game = self._done & self._game_ended
        resumed = self._done & ~self._game_ended

        lives_before = self.lives.copy()
        raw_reward = np.zeros(self.num_envs, np.float32)
        game_over = np.zeros(self.num_envs, bool)
        self.elapsed[playing] += 1
        who = np.flatnonzero(playing)
        raw_reward[who], game_over[who] = self._play(who, action[who])

        # Whatever else happens on the time limit's step, envpool reports it as truncated and never as terminated:
        # a game over there is to be seen in info["terminated"] alone.
        truncated = playing & self._out_of_time()
        life_lost = self.lives < lives_before
        terminated = (game_over | (life_lost & self.episodic_life)) & ~truncated

        self._begin_games(new_game)
        self._resume(np.flatnonzero(resumed))
        self._done = terminated | truncated
        self._game_ended = game_over | truncated
        reward = np.sign(raw_reward) if self.reward_clip else raw_reward.copy()
        return self._observe(new_game), reward, terminated, truncated, self._info(raw_reward, game_over)

    def close(self):
        self.closed = True

    def _check_action(self, action):
        assert isinstance(action, np.ndarray), f"actions must be a numpy array, got {type(action)}"
        assert np.issubdtype(action.dtype, np.integer), f"actions must be integers, got {action.dtype}"
        assert action.shape == (self.num_envs,), f"actions must have shape ({self.num_envs},), got {action.shape}"
        in_range = (action >= 0) & (action < self.num_actions)
        assert in_range.all(), f"actions must be from 0 to {self.num_actions - 1}, got {action}"

    def _begin_games(self, new_game):
        """new_game: (N,) bool."""
        self.elapsed[new_game] = 0
        self.lives[new_game] = self.full_lives
        self._new_game(np.flatnonzero(new_game))

    def _observe(self, new_game):
        """Push each screen on its frame stack; the first screen of a new game fills the stack. new_game: (N,) bool."""
        screen = self._draw()[:, None]  # (N, 1, 84, 84)
        self._obs = np.concatenate((self._obs[:, 1:], screen), axis=1)
        self._obs[new_game] = screen[new_game]
        return self._obs.copy()

    def _info(self, raw_reward, game_over):
        env_id = np.arange(self.num_envs, dtype=np.int32)
        return {
            "env_id": env_id,
            "players": {"env_id": env_id.copy()},
            "lives": self.lives.copy(),
            "reward": raw_reward.astype(np.float32),
            "terminated": game_over.astype(np.int32),
            "ram": np.zeros((self.num_envs, 128), np.uint8),
            "elapsed_step": self.elapsed.copy(),
        }

    def _random(self, who, high):
        """The next draw of each environment in `who` from its own stream (SplitMix64) -> (K,) int64 in [0, high)."""
        self._random_state[who] += np.uint64(0x9E3779B97F4A7C15)
        z = self._random_state[who]
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) % np.uint64(high)).astype(np.int64)

    # What a game implements.

    def _new_game(self, who):
        """Put the environments in `who` at the start of a game; `elapsed` and `lives` are set already."""
        raise NotImplementedError

    def _play(self, who, action):
        """Play action (K,) in the environments in `who` -> raw reward (K,) float, game over (K,) bool."""
        raise NotImplementedError

    def _draw(self):
        """-> the current screens, (N, 84, 84) uint8."""
        raise NotImplementedError

    def _resume(self, who):
        """What passes unseen between a lost life and the next observation (envpool's no-ops): by default nothing."""

    def _out_of_time(self):
        return self.elapsed >= self.max_episode_steps


def screen_of_blocks(brightness):
    """Scale a coarse image (N, rows, columns) up to (N, 84, 84); rows and columns must divide 84."""
    _, rows, columns = brightness.shape
    return brightness.repeat(SCREEN // rows, axis=1).repeat(SCREEN // columns, axis=2)


class CueGame(FakeEnvPool):
    """One of four vertical bars is lit: reward 1 for the action of its number, 0 for the others; then the next cue.

    The next cue is random whatever the action, so the best action is the cue's, and only that one, in every state.
    A life goes by every 8 steps, and the game is over with the third, on step 24; so all environments have their
    dones on the same rows, which those of Catch do not.
    """

    num_actions = 4
    full_lives = 3
    steps_per_life = 8
    best_return = 24.0  # a reward of 1 on every step

    def __init__(self, **options):
        super().__init__(**options)
        self.cue = np.zeros(self.num_envs, np.int64)  # (N,)

    def _new_game(self, who):
        self.cue[who] = self._random(who, self.num_actions)

    _resume = _new_game

    def _play(self, who, action):
        reward = (action == self.cue[who]).astype(np.float32)
        self.cue[who] = self._random(who, self.num_actions)
        self.lives[who] = self.full_lives - self.elapsed[who] // self.steps_per_life
        return reward, self.lives[who] == 0

    def _draw(self):
        bars = np.full((self.num_envs, 1, self.num_actions), 40, np.uint8)
        bars[np.arange(self.num_envs), 0, self.cue] = 255
        return screen_of_blocks(bars)


class Catch(FakeEnvPool):
    """A ball falls through a 7 x 7 grid, one row a step; a paddle 3 columns wide moves one column a step below it.

    The reward comes when the ball reaches the bottom row: +1 on the paddle, else -1 and a life. The step after that
    drops the next ball, in a random column. As in Pong, 6 actions have 3 effects. A game is 5 balls, or 3 misses.
    The first ball of a game, and the one after a lost life with episodic_life, is first seen 0 to 2 rows down: that
    stands for envpool's random no-ops, and keeps the environments out of step.
    """

    num_actions = 6
    full_lives = 3
    best_return = 5.0  # every ball can be caught: it is at most 4 columns off the paddle, with 4 rows or more to fall
    size = 7
    width = 3
    balls = 5
    moves = np.array([0, 0, 1, -1, 1, -1])  # stay, stay, right, left, right, left

    def __init__(self, **options):
        super().__init__(**options)
        self.paddle = np.zeros(self.num_envs, np.int64)  # (N,) its leftmost column
        self.ball_row = np.zeros(self.num_envs, np.int64)  # (N,) 0 at the top
        self.ball_column = np.zeros(self.num_envs, np.int64)  # (N,)
        self.balls_left = np.zeros(self.num_envs, np.int64)  # (N,) the falling one included

    def _new_game(self, who):
        self.paddle[who] = (self.size - self.width) // 2
        self.balls_left[who] = self.balls
        self._resume(who)

    def _resume(self, who):
        self._drop_ball(who)
        self.ball_row[who] = self._random(who, 3)

    def _drop_ball(self, who):
        self.ball_row[who] = 0
        self.ball_column[who] = self._random(who, self.size)

    def _play(self, who, action):
        self.paddle[who] = np.clip(self.paddle[who] + self.moves[action], 0, self.size - self.width)
        bottom = self.size - 1
        falling = self.ball_row[who] < bottom
        self.ball_row[who[falling]] += 1
        self._drop_ball(who[~falling])

        landed = self.ball_row[who] == bottom
        offset = self.ball_column[who] - self.paddle[who]
        caught = landed & (offset >= 0) & (offset < self.width)
        missed = landed & ~caught
        self.balls_left[who] -= landed
        self.lives[who] -= missed
        game_over = (self.balls_left[who] == 0) | (self.lives[who] == 0)
        self.lives[who[game_over]] = 0
        return caught.astype(np.float32) - missed, game_over

    def _draw(self):
        grid = np.zeros((self.num_envs, self.size, self.size), np.uint8)
        everyone = np.arange(self.num_envs)
        for offset in range(self.width):
            grid[everyone, -1, self.paddle + offset] = 120
        grid[everyone, self.ball_row, self.ball_column] = 255
        return screen_of_blocks(grid)


class Row(NamedTuple):
    """One played step of a ScriptedGame. With both flags set, the game is over exactly at the time limit: as in envpool
    the step then returns truncated alone, and info["terminated"] is 1."""

    reward: float = 0.0  # raw
    lives: int = 3  # left after the step; with episodic_life a drop is a done
    terminated: bool = False  # game over
    truncated: bool = False  # cut off by the time limit here, besides where max_episode_steps cuts


class ScriptedGame(FakeEnvPool):
    """Plays back a table of Rows per environment; actions have no effect.

    scripts: tables, each a non-empty sequence of Rows or of tuples in their order; environment i plays table
        i % len(scripts). A table runs on from game to game, and starts over after its last row. Reset rows are not
        written in it: they are put in after every done. For example two games of length 2, one cut, one lost:
        [Row(1), Row(1, truncated=True), Row(1), Row(5, lives=0, terminated=True)].
    full_lives: lives at the start of a game.
    num_actions: A.

    Screens are plain grey, 1 + the number of rows this environment has returned (modulo 255), so a test can tell
    which row an observation came from.
    """

    def __init__(self, *, scripts, full_lives=3, num_actions=4, **options):
        super().__init__(**options)
        self.full_lives = full_lives
        self.num_actions = num_actions
        tables = [[Row(*row) for row in scripts[i % len(scripts)]] for i in range(self.num_envs)]
        self._length = np.array([len(table) for table in tables])  # (N,) rows
        longest = self._length.max()
        self._table = np.zeros((self.num_envs, longest, len(Row._fields)))  # (N, longest, 4), zeros past the end
        for i, table in enumerate(tables):
            self._table[i, : len(table)] = table
        self._position = np.zeros(self.num_envs, np.int64)  # (N,) next row of the table
        self._cut = np.zeros(self.num_envs, bool)  # (N,) the row just played says truncated
        self._rows_returned = 0

    def _new_game(self, who):
        pass

    def _play(self, who, action):
        reward, lives, terminated, truncated = self._table[who, self._position[who]].T  # (K,) each
        self._position[who] = (self._position[who] + 1) % self._length[who]
        self.lives[who] = lives
        self._cut[who] = truncated
        return reward, terminated.astype(bool)

    def _out_of_time(self):
        return super()._out_of_time() | self._cut

    def _draw(self):
        grey = 1 + self._rows_returned % 255
        self._rows_returned += 1
        return np.full((self.num_envs, SCREEN, SCREEN), grey, np.uint8)


@functools.cache
def real_option_names():
    return frozenset(envpool.make_spec("Breakout-v5").config._fields)


def fake_make(game_class, **game_kwargs):
    """A stand-in for envpool.make that builds `game_class`, whatever the task id.

    game_kwargs go to the game besides the caller's options. The function returned remembers what it did:
    `.calls` lists one dict of task_id, env_type and options per call, `.envs` what was built.
    """

    def make(task_id, env_type, **options):
        make.calls.append({"task_id": task_id, "env_type": env_type, **options})
        assert env_type == "gymnasium", f"env_type must be 'gymnasium', got {env_type!r}"
        assert options.get("noop_max", 1) >= 1, "noop_max below 1 crashes the real library"
        if unknown := options.keys() - real_option_names():
            raise TypeError(f"envpool has no option {sorted(unknown)}")
        honoured = {name: options[name] for name in HONOURED_OPTIONS if name in options}
        make.envs.append(game_class(**game_kwargs, **honoured))
        return make.envs[-1]

    make.calls = []
    make.envs = []
    return make
