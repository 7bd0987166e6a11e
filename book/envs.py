# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Environments

# %%
#| export
import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scipy.special import stdtrit

# %% [markdown]
# ## Making an environment

# %%
#| export
def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint such as ` Did you mean 'CartPole-v1'?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


# %%
#| export
def make_env(env_id: str, env_kwargs: dict[str, Any] | None = None, render_mode: str | None = None) -> gym.Env:
    """Make one environment from a Gymnasium id (`module:Name-v0` imports the module first)."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gym.make(name, render_mode=render_mode, **(env_kwargs or {}))
    except ModuleNotFoundError as error:
        raise ValueError(f"Environment {env_id!r} needs the module {error.name!r}, which is not installed or not on the path.") from error
    except gym.error.DependencyNotInstalled as error:
        raise ValueError(f"Environment {env_id!r} needs a package that is not installed: {error}") from error
    except gym.error.Error as error:
        hint = nearest(name, list(gym.registry)) or " `gymnasium.pprint_registry()` lists the known ones."
        raise ValueError(f"There is no environment {env_id!r}.{hint}") from error
    except TypeError as error:
        raise ValueError(f"Environment {env_id!r} does not take these env_kwargs: {error}.") from error


# %% [markdown]
# ## Seeding

# %%
#| export
def derive_seed(seed: int, *path: int | str) -> int:
    """Return an independent 32-bit seed for each purpose and step of a run."""
    words = [part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in path]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0])


# %% [markdown]
# ## Vector environments

# %%
#| export
def make_vector_env(env_id: str, num_envs: int, env_kwargs: dict[str, Any] | None = None) -> SyncVectorEnv:
    """Make `num_envs` copies that step together and reset within the step that ends an episode."""
    makers = [lambda: make_env(env_id, env_kwargs)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


# %%
#| export
def true_next_obs(next_obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
    """Put the last observation of each ended episode back where the autoreset wrote the next first one."""
    if "final_obs" not in infos:
        return next_obs
    restored = next_obs.copy()
    for i in np.flatnonzero(infos["_final_obs"]):
        restored[i] = infos["final_obs"][i]
    return restored


# %% [markdown]
# ## Evaluation

# %%
#| export
def mean_interval(values: np.ndarray, axis: int = 0, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean and the two ends of its Student-t interval along `axis`."""
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[axis]
    mean = values.mean(axis)
    if count < 2:  # one value has no spread to estimate
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    half = stdtrit(count - 1, 0.5 + confidence / 2) * values.std(axis, ddof=1) / np.sqrt(count)
    return mean, mean - half, mean + half


# %%
#| export
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
        """The 95 % Student-t interval of the mean."""
        _, low, high = mean_interval(self.returns)
        return float(low), float(high)


# %%
#| export
Policy = Callable[[np.ndarray, Any, np.ndarray], tuple[np.ndarray, Any]]


def evaluate(policy: Policy, envs: Sequence[gym.Env], seed: int) -> Evaluation:
    """Play one episode in each environment, all observations in one batch, and return what they scored."""
    obs = np.stack([env.reset(seed=derive_seed(seed, i))[0] for i, env in enumerate(envs)])
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), dtype=np.int64)
    running = np.ones(len(envs), dtype=bool)
    episode_start, state = running.copy(), None
    while running.any():
        actions, state = policy(obs, state, episode_start)
        episode_start = np.zeros(len(envs), dtype=bool)
        for i in np.flatnonzero(running):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += float(reward)
            lengths[i] += 1
            running[i] = not (terminated or truncated)
    return Evaluation(returns, lengths)
