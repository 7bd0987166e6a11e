"""Made from book/envs.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "EVALUATION_ENVS",
    "MAKERS",
    "ActionReward",
    "CheckShapes",
    "ConstantReward",
    "Evaluation",
    "KeepLast",
    "MaskedCartPole",
    "Mistake",
    "ObservationReward",
    "OneStep",
    "Policy",
    "Probe",
    "TMaze",
    "TwoStep",
    "close_vector_env",
    "copier",
    "derive_seed",
    "draw_maze",
    "evaluate",
    "find_maker",
    "keep_maker",
    "make_env",
    "make_vector_env",
    "mean_interval",
    "missing_module",
    "name_env",
    "nearest",
    "one_number",
    "register_env",
    "same_constants",
    "true_next_obs",
    "try_env",
    "what_is_meant",
]

# %% book/envs.py · Environments
import copy
import difflib
import functools
import hashlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv


# %% book/envs.py · Making an environment
def nearest(name: str, known: Sequence[str], before: str = "") -> str:
    """Return a space and a hint like `Did you mean 'CartPole-v1'?`, or nothing if none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {before + close[0]!r}?" if close else ""


MAKERS: dict[str, Callable[..., gym.Env]] = {}  # those of this process that nobody can import


def find_maker(env_id: str) -> Callable[..., gym.Env]:
    """Return what makes an environment: a function or class of a module, or Gymnasium's `make`."""
    if env_id in MAKERS:
        return MAKERS[env_id]
    module, _, name = env_id.rpartition(":")
    if module and module != "local":
        found = getattr(importlib.import_module(module), name, None)
        if callable(found):
            return found
    if module in ("local", "__main__"):
        raise ValueError(
            f"Environment {env_id!r} was defined inside another program: move what makes it to a "
            f"module of its own, and name it `module:{name}`."
        )
    return functools.partial(gym.make, name)


def what_is_meant(env_id: str) -> str:
    """Say what is missing for an id that nobody knows, and name the nearest one."""
    module, colon, name = env_id.rpartition(":")
    if module and name.isidentifier():  # a function or a class: an id ends in a version
        inside = vars(importlib.import_module(module))
        hint = nearest(name, [key for key in inside if callable(inside[key])], module + colon)
        return f" The module {module!r} has no function {name!r}.{hint}"
    listed = " `gymnasium.pprint_registry()` lists the known ones."
    return nearest(name, list(gym.registry), module + colon) or listed


def missing_module(error: ModuleNotFoundError) -> str:
    """Say which module is missing, and how to make it known."""
    return (
        f"needs the module {error.name!r}, which is not installed or not on the path: install it, "
        "or start from the folder that holds it, or add that folder to PYTHONPATH."
    )


def make_env(
    env_id: str, env_kwargs: dict[str, Any] | None = None, render_mode: str | None = None
) -> gym.Env:
    """Make one environment: `Name-v0`, `module:Name-v0`, or `module:function` that makes it."""
    kwargs = dict(env_kwargs or {})
    if render_mode is not None:  # an environment without rendering need not know the keyword
        kwargs["render_mode"] = render_mode
    try:
        env = find_maker(env_id)(**kwargs)
    except ModuleNotFoundError as error:
        raise ValueError(f"Environment {env_id!r} {missing_module(error)}") from error
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ValueError(f"Environment {env_id!r} cannot be made here: {error}") from error
    except gym.error.Error as error:
        raise ValueError(f"There is no environment {env_id!r}.{what_is_meant(env_id)}") from error
    except ValueError:
        raise  # the environment explains its own mistake
    except Exception as error:
        reason = str(error).partition(" was raised from the environment creator")[0]
        what = f"cannot be made: {type(error).__name__}: {reason}"
        if kwargs:
            what = f"does not take the env_kwargs {kwargs}: {reason}"
        raise ValueError(f"Environment {env_id!r} {what}.") from error
    if not isinstance(env, gym.Env):
        raise ValueError(f"{env_id!r} made a {type(env).__name__}, which is no gymnasium.Env.")
    for space in ("observation_space", "action_space"):
        if not isinstance(getattr(env, space, None), gym.Space):
            raise ValueError(f"{env_id!r} has no {space}: set self.{space} in its __init__.")
    return env


def name_env(env: Any) -> str:
    """Return the `env_id` of an environment that is given as a class, a function or an instance."""
    if isinstance(env, gym.Env):
        spec = env.spec
        if spec is not None and spec.id in gym.registry and spec == gym.spec(spec.id):
            fresh = gym.make(spec.id)
            fresh.close()
            if same_constants(env, fresh):
                return spec.id
        return keep_maker(type(env.unwrapped).__name__, copier(env))
    if not callable(env):
        raise ValueError(
            "An environment is a Gymnasium id, an instance, or a class or function that makes one, "
            f"not {env!r}."
        )
    module, name = getattr(env, "__module__", ""), getattr(env, "__qualname__", "maker")
    if getattr(sys.modules.get(module), name, None) is env:
        return f"{module}:{name}"
    return keep_maker(name, env)


def same_constants(env: gym.Env, fresh: gym.Env) -> bool:
    """Say whether numbers, texts and arrays in an environment are still those of a new one."""
    found, made, kinds = vars(env.unwrapped), vars(fresh.unwrapped), int | float | str | np.ndarray
    constants = [name for name, value in made.items() if isinstance(value, kinds)]
    return all(k in found and np.array_equal(found[k], made[k]) for k in constants)


def keep_maker(name: str, maker: Callable[..., gym.Env]) -> str:
    """Keep a maker that nobody can import under a name that is free in this process."""
    same = (f"local:{name}" + (f"-{i}" if i else "") for i in range(len(MAKERS) + 1))
    env_id = next(free for free in same if MAKERS.get(free, maker) is maker)
    MAKERS[env_id] = maker
    return env_id


def copier(env: gym.Env) -> Callable[[], gym.Env]:
    """Return a function that makes environments like this one, by copying or from its spec."""
    makers: list[Callable[[], gym.Env]] = []
    with suppress(Exception):  # what a simulator raises when it is copied is anybody's guess
        kept = copy.deepcopy(env)  # as it is now: its owner may change it later
        makers.append(functools.partial(copy.deepcopy, kept))
    if env.spec is not None:
        makers.append(functools.partial(gym.make, env.spec))
    for maker in makers:
        with suppress(Exception):
            made = maker()
            made.close()
            if not same_constants(env, made):
                what = f"Copies of {env} are without what was changed in it"
                warnings.warn(f"{what}: give a function that makes one.", stacklevel=2)
            return maker
    raise ValueError(
        f"{env} cannot be copied, and an agent needs several: give a function that makes one."
    )


# %% book/envs.py · Seeds
def derive_seed(seed: int, *path: int | str) -> int:
    """Return an independent 32-bit seed for each purpose and step of a run."""
    name = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


# %% book/envs.py · Environments with known values
def register_env(name: str, max_episode_steps: int | None = None) -> None:
    """Make the class `name` of this module known to Gymnasium as `rlbook/name-v0`, once."""
    env_id = f"rlbook/{name}-v0"
    if env_id not in gym.registry:
        gym.register(env_id, f"rlbook.envs:{name}", max_episode_steps=max_episode_steps)


class Probe(gym.Env[np.ndarray, Any]):
    """One number to see, one choice, and known values; the probes below fill it in."""

    horizon: float = 1  # steps until the episode terminates
    limit: float = np.inf  # steps until it is truncated

    def __init__(self, continuous: bool = False) -> None:
        self.observation_space = Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)

    def observe(self) -> float:
        """Return what the agent sees."""
        return 1.0

    def reward(self, action: Any) -> float:
        """Return what this step pays."""
        return 1.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode and sample its sign, -1 or 1."""
        super().reset(seed=seed)
        self.steps, self.sign = 0, float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.observe()], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Pay the reward and count the step."""
        reward = self.reward(action)
        self.steps += 1
        obs = np.array([self.observe()], np.float32)
        return obs, reward, self.steps >= self.horizon, self.steps >= self.limit, {}


class OneStep(Probe):
    """One step that pays 1: Q = 1."""


class TwoStep(Probe):
    """The observation is -1, then 0, and only the second step pays 1: Q = gamma, then 1."""

    horizon = 2

    def observe(self) -> float:
        return self.steps - 1.0  # 1 at the end

    def reward(self, action: Any) -> float:
        return float(self.steps == 1)


class ObservationReward(Probe):
    """The observation is -1 or 1, and one step pays just that: Q = observation."""

    def observe(self) -> float:
        return self.sign

    def reward(self, action: Any) -> float:
        return self.sign


class ActionReward(Probe):
    """At the observation -1 action 0 is correct, at 1 action 1: Q = 1 if correct, else -1.

    A continuous action a pays 1 - (a - observation / 2)², so observation / 2 is best and pays 1.
    """

    def observe(self) -> float:
        return self.sign

    def reward(self, action: Any) -> float:
        if isinstance(self.action_space, Discrete):
            return 1.0 if (action == 1) == (self.sign > 0) else -1.0
        return 1.0 - (float(action[0]) - self.sign / 2) ** 2


class ConstantReward(Probe):
    """Each step pays 1 for ever, but you watch only `limit` steps: Q = 1 / (1 - gamma)."""

    horizon = np.inf

    def __init__(self, limit: int = 10, continuous: bool = False) -> None:
        super().__init__(continuous)
        self.limit = limit


for _probe in (OneStep, TwoStep, ObservationReward, ActionReward, ConstantReward):
    register_env(_probe.__name__)


# %% book/envs.py · Vector environments
class KeepLast(gym.Wrapper[Any, Any, Any, Any]):
    """Copies the last observation of an episode, which the reset might overwrite."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, info


class Mistake(ValueError):
    """What an environment or an algorithm of one's own does wrong, in a sentence."""


def one_number(reward: Any) -> float:
    """Return a reward as a float, or say that it is none."""
    value = np.asarray(reward)
    if value.size != 1 or value.dtype.kind not in "fiub":
        what = f"the reward {reward!r}, which is not one number"
        raise Mistake(f"The environment returned {what}.")
    return float(value.item())


class CheckShapes(gym.Wrapper[Any, Any, Any, Any]):
    """Raises a `Mistake` when an environment does not return what Gymnasium asks for."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.space = env.observation_space
        self.shape = self.space.shape  # looked up once: each step is checked

    def check(self, returned: Any, what: str) -> None:
        """Compare what a method returned with `what` it should return, and with the space."""
        if not isinstance(returned, tuple) or len(returned) != len(what.split(", ")):
            raise Mistake(
                f"The environment returned something else than `{what}`, which Gymnasium asks for."
            )
        found = np.shape(returned[0])
        if self.shape is not None and found != self.shape:
            raise Mistake(
                f"The environment returned an observation of the shape {found}, but its space says "
                f"{self.shape}."
            )
        if isinstance(self.space, Discrete) and not self.space.contains(returned[0]):
            raise Mistake(
                f"The environment returned the observation {returned[0]}, but its space is "
                f"{self.space}."
            )

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        try:
            returned = self.env.reset(**options)
        except TypeError as error:
            if "unexpected keyword argument 'seed'" not in str(error):
                raise
            how = "write `def reset(self, *, seed=None, options=None)`"
            raise Mistake(f"The environment's `reset` takes no seed: {how}.") from error
        self.check(returned, "obs, info")
        return returned

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        returned = self.env.step(action)
        self.check(returned, "obs, reward, terminated, truncated, info")
        obs, reward, terminated, truncated, info = returned
        return obs, one_number(reward), terminated, truncated, info


def try_env(env: gym.Env) -> None:
    """Reset an environment and take a step, so that a mistake is told before a run begins."""
    space = copy.deepcopy(env.action_space)  # which has a generator of its own
    space.seed(0)
    checked = CheckShapes(env)
    try:
        checked.reset(seed=0)
        checked.step(space.sample())
    except Mistake:
        raise
    except Exception as error:
        if env.unwrapped is not env:
            try_env(env.unwrapped)  # a wrapper may have stumbled over what this one returns
        error.add_note("The environment raised this when it was tried.")
        raise


def make_vector_env(
    env_id: str,
    num_envs: int,
    env_kwargs: dict[str, Any] | None = None,
    vectorize: Literal["sync", "async"] = "sync",
) -> SyncVectorEnv | AsyncVectorEnv:
    """Make `num_envs` copies that step together and reset within the step that ends an episode."""
    learner, maker = os.getpid(), MAKERS.get(env_id)

    def make() -> gym.Env:
        if os.getpid() != learner:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that learns decides
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            MAKERS.update({env_id: maker} if maker else {})
        return KeepLast(CheckShapes(make_env(env_id, env_kwargs)))

    kind: Any = SyncVectorEnv if vectorize == "sync" else AsyncVectorEnv
    return kind([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def close_vector_env(envs: SyncVectorEnv | AsyncVectorEnv) -> None:
    """Close all environments, and end their processes if one of them is gone already."""
    try:
        envs.close(timeout=5)  # an answer that was read already never comes again
    except (EOFError, ConnectionError):
        assert isinstance(envs, AsyncVectorEnv)
        envs.closed = True
        for process in envs.processes:
            process.terminate()
            process.join()


def true_next_obs(next_obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
    """Replace the first observation of a new episode by the last one of the episode before it."""
    if "final_obs" not in infos:
        return next_obs
    restored = next_obs.copy()
    for i in np.flatnonzero(infos["_final_obs"]):
        restored[i] = infos["final_obs"][i]
    return restored


# %% book/envs.py · A mean and its interval
def mean_interval(
    values: np.ndarray, axis: int = 0, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean and the two ends of its bootstrap interval along `axis`."""
    values = np.moveaxis(np.asarray(values, dtype=np.float64), axis, 0)
    count, mean = len(values), values.mean(axis=0)
    if count < 2:  # one value has no spread to estimate
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    counts = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=2_000)
    means = np.tensordot(counts / count, values, axes=1)  # (resamples, ...)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    return mean, low, high


@dataclass(frozen=True)
class Evaluation:
    """The undiscounted returns and the lengths of some episodes."""

    returns: np.ndarray  # (episodes,)
    lengths: np.ndarray  # (episodes,)

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """The standard deviation of the returns between episodes."""
        return float(self.returns.std())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the mean."""
        _, low, high = mean_interval(self.returns)
        return float(low), float(high)


# %% book/envs.py · Which episodes count
Policy = Callable[[np.ndarray, Any, np.ndarray], tuple[np.ndarray, Any]]


EVALUATION_ENVS = 20  # no more than so many play at once, however many episodes there are


def evaluate(
    policy: Policy,
    envs: Sequence[gym.Env],
    seed: int,
    episodes: int | None = None,
    max_steps: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play episodes side by side, with one call of the policy for all environments at each step."""
    episodes = len(envs) if episodes is None else episodes
    if not envs or episodes < 1:
        raise ValueError("An evaluation needs at least one episode.")
    count, space = min(len(envs), episodes), envs[0].observation_space
    envs = [CheckShapes(env) for env in envs]  # as in training
    obs = np.zeros((count, *(space.shape or ())), space.dtype)
    for i in range(count):
        obs[i], _ = envs[i].reset(seed=derive_seed(seed, i))
    returns, lengths, cut = np.zeros(episodes), np.zeros(episodes, dtype=np.int64), 0
    playing = list(range(count))  # the episode in each environment
    waiting = iter(range(count, episodes))
    running, episode_start, state = np.ones(count, dtype=bool), np.ones(count, dtype=bool), None
    while running.any():
        if stop():
            raise KeyboardInterrupt
        actions, state = policy(obs, state, episode_start)
        obs, episode_start = obs.copy(), np.zeros(count, dtype=bool)  # the policy may keep the old
        for i in np.flatnonzero(running).tolist():
            episode = playing[i]
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[episode] += float(reward)
            lengths[episode] += 1
            too_long = lengths[episode] == max_steps and not (terminated or truncated)
            cut += too_long
            if terminated or truncated or too_long:
                playing[i] = next(waiting, episodes)
                running[i] = episode_start[i] = playing[i] < episodes
                if running[i]:
                    obs[i], _ = envs[i].reset(seed=derive_seed(seed, playing[i]))
    if cut:
        warnings.warn(
            f"{cut} of {episodes} episodes of an evaluation had not ended after {max_steps:,} "
            "steps and were cut there: 'eval_max_steps' is the limit.",
            stacklevel=2,
        )
    return Evaluation(returns, lengths)


# %% book/envs.py · Seeing less: masked CartPole
class MaskedCartPole(CartPoleEnv):
    """CartPole-v1 that shows where cart and pole are, but not how fast they move."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert isinstance(self.observation_space, Box)
        high = self.observation_space.high[[0, 2]]  # position and angle
        self.observation_space = Box(-high, high, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        obs, info = super().reset(seed=seed, options=options)
        return obs[[0, 2]], info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push the cart to the left (0) or right (1)."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs[[0, 2]], reward, terminated, truncated, info


register_env("MaskedCartPole", max_episode_steps=500)


# %% book/envs.py · Remembering longer: the T-maze
def draw_maze(length: int, cue: int, position: int, turn: int) -> np.ndarray:
    """Draw a T-maze from above: agent blue, goal green, cue orange while it is seen."""
    cells = np.full((5, length + 3, 3), 200, np.uint8)  # walls
    cells[2, 1:-1] = cells[1:4, -2] = 255  # corridor and arms
    cells[2 + cue, -2] = (0, 158, 115)  # facing east, left is up
    if position == 0:
        cells[2 + cue, 1] = (230, 159, 0)
    image = cells.repeat(16, axis=0).repeat(16, axis=1)
    y, x = 16 * (2 + turn) + 3, 16 * (1 + position) + 3
    image[y : y + 10, x : x + 10] = (0, 114, 178)
    return image


class TMaze(gym.Env[np.ndarray, Any]):
    """A corridor of `length` steps; the cue at its start says which turn at its end pays 1.

    Action 0 turns left and 1 turns right at the junction; in the corridor both move forward. With
    `walk` only action 2 does. Observation: the cue (at the start), and whether you may turn.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012 (as in gym.Env)

    def __init__(
        self, length: int = 10, walk: bool = False, render_mode: str | None = None
    ) -> None:
        if not isinstance(length, int | np.integer) or length < 1:
            raise ValueError(f"TMaze needs a whole length of at least 1, not {length!r}.")
        self.length, self.walk, self.render_mode = length, walk, render_mode
        self.limit = 6 * length + 10  # with `walk`, a random policy takes 3 * length + 1.5
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = Discrete(3 if walk else 2)

    def observe(self) -> np.ndarray:
        """Return the cue, -1 for left and 1 for right, at the start alone; 1 at the junction."""
        cue = self.cue if self.position == 0 else 0
        return np.array([cue, self.position == self.length], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Go to the start and sample a cue."""
        super().reset(seed=seed)
        self.cue = int(self.np_random.choice([-1, 1]))
        self.position = self.steps = self.turn = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Go on in the corridor, or turn at the junction."""
        self.steps += 1
        if self.position < self.length:
            self.position += int(action == 2 or not self.walk)
        else:
            self.turn = (-1, 1, 0)[action]
        reward = float(self.turn == self.cue)
        return self.observe(), reward, self.turn != 0, self.steps >= self.limit, {}

    def render(self) -> np.ndarray:
        """Draw the maze, for people."""
        return draw_maze(self.length, self.cue, self.position, self.turn)


register_env("TMaze")
