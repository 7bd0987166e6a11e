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
# # What the network sees
#
# An environment reports what it has: the number of a square, a picture, a speed in millimetres per
# second. A network learns best from numbers of about the size of 1. **Observation preprocessing**
# turns the one into the other, and this chapter builds it. At the end you have two settings:
#
# - `normalize_observations`, for all algorithms that take vectors, standardises each entry of an
#   observation by its mean and standard deviation so far;
# - `normalize_rewards`, for all algorithms, divides rewards by the standard deviation of the
#   discounted return so far.
#
# Here is what the first one is good for: CartPole, with the cart measured in millimetres and the
# pole in degrees. The physics is the same, and only the units differ. (The shipped settings for
# CartPole scale its entries by hand; `observation_scale=()` turns that off.)
#
# | | |
# |---|---|
# | Builds on | [Environments](envs.ipynb), [Settings](settings.ipynb) |
# | New here | running statistics; numbers and pictures as networks want them |
# | Same as elsewhere | the idea of Gymnasium's `NormalizeObservation` and `NormalizeReward` |
# | Different from elsewhere | they belong to the agent, so they are saved and copied with it |

# %% tags=["hide-input"]
#| export
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from rlbook.settings import Config

# %% tags=["hide-input"]
from matplotlib import pyplot as plt

from rlbook.dqn import DQN
from rlbook.envs import make_env
from rlbook.figures import COLORS, use_style

use_style()


# %%
class OtherUnits(gym.ObservationWrapper):
    """CartPole in millimetres and degrees."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.factors = np.array([1000, 1000, 180 / np.pi, 180 / np.pi], np.float32)
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float32)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        """Change the units."""
        return obs * self.factors


gym.register("CartPoleUnits-v0", lambda **kwargs: OtherUnits(gym.make("CartPole-v1", **kwargs)))

curves: dict[bool, list[np.ndarray]] = {False: [], True: []}
settings = {"total_steps": 5_000, "observation_scale": (), "eval_every": 1_000, "eval_episodes": 5}
for normalized, found in curves.items():
    settings |= {"env_id": "CartPoleUnits-v0", "normalize_observations": normalized}
    for seed in range(3):
        agent = DQN.from_config("cartpole", seed=seed, **settings)
        steps, values = agent.learn(5_000, progress=False).curve("eval_return_mean")
        found.append(values)

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6.5, 3))
for normalized, label, color in (
    (True, "normalised", COLORS["dqn"]),
    (False, "as they come", COLORS["reference"]),
):
    for i, values in enumerate(curves[normalized]):
        ax.plot(steps, values, color=color, label=label if i == 0 else None)
ax.set(xlabel="environment steps", ylabel="return of greedy episodes")
ax.set_title("DQN on CartPole in millimetres and degrees, 3 seeds each")
ax.legend()
plt.show()
means = {normalized: float(np.mean(found)) for normalized, found in curves.items()}
print(f"mean over the run: {means[True]:.0f} normalised, {means[False]:.0f} as they come")
assert means[True] > means[False]

# %% [markdown]
# ## Running statistics
#
# The mean and variance of all values so far can be updated without keeping the values. Suppose
# that $n$ values have the mean $\mu$ and the variance $\sigma^2$, and that $m$ more arrive with
# $\mu'$ and $\sigma'^2$. With $\delta = \mu' - \mu$, all $n + m$ of them have the mean and the
# variance
#
# $$\mu + \delta\,\frac{m}{n+m} \qquad\text{and}\qquad
#   \frac{1}{n+m}\Bigl(n\,\sigma^2 + m\,\sigma'^2 + \delta^2\,\frac{n\,m}{n+m}\Bigr).$$
#
# By hand: 1 and 3 have the mean 2 and the variance 1. Then 8 arrives, so $\delta = 6$. The mean is
# $2 + 6/3 = 4$, and the variance $(2 \cdot 1 + 0 + 36 \cdot 2/3)/3 = 26/3$.
#
# A standardised value is clipped to ±10, since the first few observations say little about the
# standard deviation (the *deviation*, from here on).

# %%
#| export
CLIP = 10.0  # largest size of a number that was standardised
EPSILON = 1e-8  # added to a variance, which may be 0


class RunningStatistics:
    """Mean and variance of all arrays of one shape that were seen so far."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.variance = np.zeros(shape), np.ones(shape)  # in 64 bits
        self.count = 0

    def update(self, batch: np.ndarray) -> None:
        """Count some more values, (batch, ...)."""
        batch = batch.astype(np.float64)
        old, new = self.count, len(batch)
        delta = batch.mean(axis=0) - self.mean
        between = delta**2 * (old * new / (old + new))
        self.variance = (old * self.variance + new * batch.var(axis=0) + between) / (old + new)
        self.mean = self.mean + delta * (new / (old + new))
        self.count = old + new

    def scale(self, values: np.ndarray) -> np.ndarray:
        """Divide values by the deviation."""
        scaled = values / np.sqrt(self.variance + EPSILON)
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean and divide by the deviation."""
        return self.scale(values - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        tensors = {"mean": torch.as_tensor(self.mean), "variance": torch.as_tensor(self.variance)}
        return {**tensors, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored statistics."""
        mean, variance = state["mean"].cpu().numpy(), state["variance"].cpu().numpy()
        if mean.shape != np.shape(self.mean):
            raise ValueError(f"Statistics of {mean.shape} were stored, not {np.shape(self.mean)}.")
        self.mean, self.variance, self.count = mean, variance, state["count"]

# %%
statistics = RunningStatistics(())
statistics.update(np.array([1.0, 3.0]))
assert statistics.mean == 2 and statistics.variance == 1
statistics.update(np.array([8.0]))
assert statistics.mean == 4 and abs(statistics.variance - 26 / 3) < 1e-12
assert abs(statistics.standardize(np.array([8.0]))[0] - 4 / np.sqrt(26 / 3)) < 1e-6

many = np.random.default_rng(0).normal(5, 2, (1_000, 3))
statistics = RunningStatistics((3,))
for batch in np.array_split(many, 90):  # of 11 or 12 each
    statistics.update(batch)
assert np.allclose(statistics.mean, many.mean(axis=0))
assert np.allclose(statistics.variance, many.var(axis=0))

# %% [markdown]
# ## Rewards
#
# Why not standardise rewards in the same way? Because their mean matters: with a reward of 1 a
# step it is good to go on, and with −1 it is good to end. And why not divide by the deviation of
# the rewards? Because networks learn values, which are sums of many rewards, and values should be
# of the size of 1. So we keep a discounted sum of the rewards of each environment since its
# episode began,
#
# $$R_t = \gamma R_{t-1} + r_t,$$
#
# and divide each reward by the deviation of all $R_t$ so far. (A return discounts the future, and
# this sum discounts the past. It has the same size, and it is known at step $t$.) What comes out
# is clipped to ±10, as observations are. By hand: rewards of 1, 1, 1 with $\gamma = 0.5$ give
# $R = 1$, $1.5$ and $1.75$. Their variance is $0.097$ and the deviation $0.312$, so the third
# reward counts as $1 / 0.312 = 3.2$.

# %%
statistics, discounted = RunningStatistics(()), np.zeros(1)
for reward in (np.ones(1),) * 3:
    discounted = 0.5 * discounted + reward
    statistics.update(discounted)
assert discounted == 1.75
assert abs(statistics.scale(reward)[0] - 1 / np.std([1, 1.5, 1.75])) < 1e-4

# %% [markdown]
# ## Numbers and pictures
#
# Two kinds of observation need a change without statistics. The square of a board comes as one
# number (`Discrete`). The squares 3 and 4 need not have anything in common, so a network gets a
# **one-hot** vector: one entry for each square, all 0 except for a single 1. And most environments
# give pictures as (height, width, channels), while PyTorch's convolutions want the channels first.
# The observation space alone says which change is needed: where the last of three axes is the
# shortest, it holds the channels.

# %%
#| export
def has_channels_last(space: gym.Space) -> bool:
    """Say whether observations are pictures of (height, width, channels)."""
    shape = space.shape or ()
    return isinstance(space, Box) and len(shape) == 3 and shape[2] < min(shape[:2])


def prepared_space(space: gym.Space) -> gym.Space:
    """Return the space of prepared observations."""
    if isinstance(space, Discrete):
        return Box(0.0, 1.0, (int(space.n),), np.float32)
    if has_channels_last(space):
        assert isinstance(space, Box)
        low, high = space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1)
        return Box(low, high, dtype=space.dtype.type)
    return space


def prepare(obs: np.ndarray, space: gym.Space) -> np.ndarray:
    """Turn observations (batch, ...) of a space into what networks take."""
    if isinstance(space, Discrete):
        numbers = np.arange(int(space.n)) + space.start
        return (np.asarray(obs)[:, None] == numbers).astype(np.float32)
    return obs.transpose(0, 3, 1, 2) if has_channels_last(space) else obs

# %%
assert prepare(np.array([3]), Discrete(5)).tolist() == [[0, 0, 0, 1, 0]]
assert prepare(np.array([-1, 1]), Discrete(3, start=-1)).tolist() == [[1, 0, 0], [0, 0, 1]]
picture = Box(0, 255, (64, 48, 3), np.uint8)
assert prepared_space(picture).shape == (3, 64, 48)
assert prepare(np.stack([picture.sample()] * 2), picture).shape == (2, 3, 64, 48)

# %% [markdown]
# ## All of it
#
# An agent owns one `Preprocessing`. The [training loop](run.ipynb) calls `update` with the
# observations of the environments, and gives the agent prepared observations and scaled rewards.
# `predict` and evaluations only call `prepare`, so they do not change the statistics. An
# evaluation reports the rewards of the environment, not the scaled ones.

# %%
#| export
class Preprocessing:
    """What happens to observations and rewards between the environments and the agent."""

    def __init__(self, env_space: gym.Space, config: Config) -> None:
        self.env_space = env_space  # of the environment's observations
        self.space = prepared_space(env_space)  # of what the agent gets
        self.gamma = float(getattr(config, "gamma", 0.99))
        self.statistics: dict[str, RunningStatistics] = {}
        if config.normalize_observations:
            shape = self.space.shape or ()
            if len(shape) != 1:
                raise ValueError(
                    "Setting 'normalize_observations' is for vectors, and the observations of "
                    f"{config.env_id!r} are {' '.join(str(env_space).split())}: leave it out."
                )
            self.statistics["observations"] = RunningStatistics(shape)
            self.space = Box(-CLIP, CLIP, shape, np.float32)
        if config.normalize_rewards:
            self.statistics["returns"] = RunningStatistics(())

    def update(self, obs: np.ndarray) -> None:
        """Count observations of the environments, (num_envs, ...)."""
        if "observations" in self.statistics:
            self.statistics["observations"].update(prepare(obs, self.env_space))

    def prepare(self, obs: np.ndarray) -> np.ndarray:
        """Return observations as the agent gets them."""
        obs = prepare(obs, self.env_space)
        if "observations" in self.statistics:
            return self.statistics["observations"].standardize(obs)
        return obs

    def scale_reward(self, reward: np.ndarray, discounted: np.ndarray) -> np.ndarray:
        """Return rewards as the agent gets them, after counting the discounted returns so far."""
        if "returns" not in self.statistics:
            return reward
        self.statistics["returns"].update(discounted)
        return self.statistics["returns"].scale(reward)

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics."""
        return {name: part.state_dict() for name, part in self.statistics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored statistics."""
        for name, part in self.statistics.items():
            part.load_state_dict(state[name])

# %% [markdown]
# The last agent from the top of the chapter has statistics. Here they are, with an observation
# before and after. The deviation of the cart's speed is hundreds of millimetres per second.

# %%
counted = agent.preprocessing.statistics["observations"]
print("observations counted:", counted.count)
print("mean     ", counted.mean.round(1))
print("deviation", np.sqrt(counted.variance).round(1))
obs, _ = make_env("CartPoleUnits-v0").reset(seed=1)
print("an observation", obs.round(1), "becomes", agent.preprocessing.prepare(obs[None])[0].round(2))
assert counted.count == agent.global_step == 5_000
before = counted.count
agent.evaluate(episodes=1)
assert counted.count == before  # frozen

# %% [markdown]
# ## Honest edges
#
# - The replay buffer keeps observations as they were standardised when they arrived. Early ones
#   were standardised with other statistics than late ones. An observation moves the statistics by
#   about $1/n$, so this fades, but the first observations in the buffer are on another scale. The
#   same holds for rewards.
# - `next_obs` is standardised before it is itself counted, with the statistics of the step that
#   led to it.
# - Statistics follow the policy: an agent that reaches a new part of the world late gets values
#   far from the mean there. They are clipped to ±10.
# - With `normalize_rewards` the values and losses in the metrics are in units of the running
#   deviation. Returns are always those of the environment.
# - The first observation of an episode is counted, and the last one (after which no action is
#   chosen) is not.

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** By mistake, a loop counts each observation twice. What happens to the mean and
# the variance?
#
# <details>
# <summary>Solution</summary>
#
# Nothing: the mean and the variance of a list do not change if each entry is in it twice. Only the
# count doubles.
#
# ```python
# once, twice = RunningStatistics((3,)), RunningStatistics((3,))
# once.update(many)
# twice.update(many)
# twice.update(many)
# assert np.allclose(once.mean, twice.mean) and np.allclose(once.variance, twice.variance)
# assert twice.count == 2 * once.count
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** An entry of the observation is constant while an agent learns. Which number does
# the network get for it? And what if the entry changes once the agent is in use?
#
# <details>
# <summary>Solution</summary>
#
# The variance is 0 and the entry equals its mean, so the network gets 0. A change of as little as
# 0.001 is divided by $\sqrt{10^{-8}}$ and becomes 10, the largest value there is. The network was
# never trained on that and may do anything.
#
# ```python
# constant = RunningStatistics((1,))
# constant.update(np.full((100, 1), 5.0))
# assert constant.standardize(np.array([[5.0]])) == 0
# assert abs(constant.standardize(np.array([[5.001]]))[0, 0] - 10) < 1e-3
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** These statistics keep sums instead of means, which is shorter.
# They agree with NumPy on most data. Find data where they do not.


# %%
class Sums:
    """Mean and variance from the sums of values and squares, with a bug."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, np.float32(0), np.float32(0)

    def update(self, value: float) -> None:
        """Count one value."""
        self.count += 1
        self.sum += np.float32(value)
        self.squares += np.float32(value) ** 2

    def variance(self) -> float:
        """Return the mean square minus the squared mean."""
        return float(self.squares / self.count - (self.sum / self.count) ** 2)


sums = Sums()
for value in (1, 3, 8):
    sums.update(value)
print(f"variance of 1, 3, 8: {sums.variance():.4f}, as it should be: {26 / 3:.4f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# If the mean is much larger than the deviation, two large numbers that are almost equal are
# subtracted, and 32 bits are too few for their difference. For 10,001, 10,003 and 10,008 the
# variance is 8 instead of 8.67, and for 20,001, 20,003 and 20,008 it is −32. Keep the sum of
# squared distances from the mean instead (Welford's method), in 64 bits:
#
# ```python
# class Sums:
#     """Mean and variance, without a difference of large numbers."""
#
#     def __init__(self) -> None:
#         self.count, self.mean, self.distances = 0, 0.0, 0.0
#
#     def update(self, value: float) -> None:
#         """Count one value."""
#         self.count += 1
#         delta = value - self.mean
#         self.mean += delta / self.count
#         self.distances += delta * (value - self.mean)
#
#     def variance(self) -> float:
#         """Return the mean squared distance from the mean."""
#         return self.distances / self.count
#
# shifted = Sums()
# for value in (10_001, 10_003, 10_008):
#     shifted.update(value)
# assert abs(shifted.variance() - 26 / 3) < 1e-6
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Why do we divide rewards, and not clip them to ±1 as the paper on DQN does?
#
# <details>
# <summary>Solution</summary>
#
# Clipping changes the task: a reward of 100 and a reward of 1 become the same. Dividing all
# rewards by one number divides all returns by it, so the best policy stays the best, as long as
# the number does not move and no scaled reward is beyond ±10, where we clip, too.
#
# ```python
# small, large = np.array([1.0]), np.array([100.0])
# assert np.clip(small, -1, 1) == np.clip(large, -1, 1)
# returns = RunningStatistics(())
# returns.update(np.array([0.0, 100.0]))
# assert abs(returns.scale(large) - 100 * returns.scale(small)) < 1e-5
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook import SAC
#
# agent = SAC("Pendulum-v1", normalize_observations=True, normalize_rewards=True)
# ```
#
# ```
# rlbook train sac --env-id Pendulum-v1 --normalize-observations --normalize-rewards
# ```
#
# ## References
#
# - T. F. Chan, G. H. Golub, R. J. LeVeque (1983). Algorithms for computing the sample variance:
#   analysis and recommendations. *The American Statistician* 37. The formula for two groups.
# - M. Andrychowicz et al. (2021). What matters for on-policy deep actor-critic methods? A
#   large-scale study, *ICLR*, [arXiv:2006.05990](https://arxiv.org/abs/2006.05990). It finds that
#   normalising observations matters on almost all of its environments.
# - M. Towers et al. (2024). *Gymnasium*, [arXiv:2407.17032](https://arxiv.org/abs/2407.17032). Its
#   wrappers `NormalizeObservation` and `NormalizeReward` do nearly the same; they treat the ends of
#   episodes differently, and do not clip.
