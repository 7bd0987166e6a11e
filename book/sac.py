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
# # SAC: continuous actions
#
# A motor has no list of actions to choose from: it can push with 0.31 or with 0.32. In this chapter
# you build *soft actor-critic* (SAC), which learns such actions. One network, the actor, outputs a
# whole distribution over actions. Two others, the critics, estimate what an action is worth. A
# learned coefficient keeps the policy as random as you ask. At the end the agent swings up a
# pendulum and holds it there. The figure shows the mean of five runs with its 95 % interval, and
# the score of one run in the RL Zoo, a public collection of trained agents.

# %% tags=["hide-input"]
#| export
import copy
import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Adam

from rlbook.agent import Agent, Metrics, Transition, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import MLP, check_shapes, polyak_update
from rlbook.envs import derive_seed
from rlbook.replay import (
    Batch,
    ReplayBuffer,
    ReplayConfig,
    make_transitions,
    to_batch,
    transition_dtype,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config

# %% tags=["hide-input"]
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt

from rlbook.dqn import DQN
from rlbook.envs import make_env
from rlbook.figures import (
    COLORS,
    draw_parts,
    filmstrip,
    label_curves,
    load_result,
    made_by,
    plot_band,
    plot_heatmap,
    plot_result,
    show_parity,
    use_style,
)

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()
RESULTS = Path("results")

# %% tags=["hide-input"]
stored = load_result(RESULTS / "sac_pendulum.json")
fig, ax = plt.subplots()
plot_result(ax, stored)
ax.axhline(-157, color=COLORS["reference"], linestyle="--", linewidth=1)
ax.annotate("RL Zoo, one run, 20,000 steps", (10_000, -157), (0, 5), ha="right",
            textcoords="offset points")
plt.show()
print(made_by(stored))
final = np.array(stored["runs"]["SAC"]["final"])
print("last evaluation of each of five seeds:", *final.round().astype(int))
assert final.min() >= -300  # random torques score about -1200

# %% [markdown]
# At the end every seed swings the pole up and holds it there, with half of the steps of the RL
# Zoo's run.
#
# | | |
# |---|---|
# | Papers | Haarnoja et al. 2018, *Soft Actor-Critic* and *Soft Actor-Critic Algorithms and Applications* |
# | Observations | vectors |
# | Actions | continuous, with finite bounds |
# | Learns | off-policy, from replay |
# | Same as [DQN](dqn.ipynb) | replay, bootstrapped targets, target networks |
# | Different from DQN | an actor in place of `argmax`; the smaller of two critics; a bonus for staying random, in place of ε |
#
# Advantage actor-critic ([A2C](policy_gradient.ipynb)) has an actor and a learned value as well. It
# multiplies the gradient of the log-probability by the advantage, which says how much better than
# expected the action was. SAC learns from old steps, and its actor's gradient comes through a critic
# that takes the action as an input.
#
# ## The problem
#
# DQN has one output for each action, and acts by looking for the largest. With continuous actions
# there is no list to search, and DQN says so:

# %%
try:
    DQN("Pendulum-v1")
except ValueError as error:
    print(error)

# %% [markdown]
# One way out is to cut each action dimension into a few levels. For one dimension that works. For
# $d$ dimensions of five levels it takes $5^d$ outputs, and the agent has to try each of them. `Aim`
# is the smallest environment that shows this. You see a point $x$, and the reward says how far your
# action was from it: $r = -\operatorname{mean}_i (a_i - x_i)^2$. Random actions score $-\tfrac23$,
# since the difference of two uniform numbers in $[-1, 1]$ has the variance $\tfrac13 + \tfrac13$.
# (With five levels it is $-\tfrac56$, since those have the variance $\tfrac12$.)

# %%
class Aim(gym.Env[np.ndarray, Any]):
    """One step: answer a point with the same point; `levels` cuts each dimension into a few."""

    def __init__(self, dimensions: int, levels: int = 0) -> None:
        self.dimensions, self.levels = dimensions, levels
        self.observation_space = gym.spaces.Box(-1, 1, (dimensions,))
        self.action_space = gym.spaces.Box(-1, 1, (dimensions,))
        if levels:
            self.action_space = gym.spaces.Discrete(levels**dimensions)

    def reset(self, **keywords: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=keywords.get("seed"))
        self.goal = self.np_random.uniform(-1, 1, self.dimensions).astype(np.float32)
        return self.goal, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.levels:
            digits = np.unravel_index(action, (self.levels,) * self.dimensions)
            action = np.linspace(-1, 1, self.levels)[list(digits)]
        return self.goal, -float(np.mean((action - self.goal) ** 2)), True, False, {}


gym.register("Aim-v0", lambda **keywords: Aim(**keywords), disable_env_checker=True)

# %%
DIMENSIONS, AIM_STEPS = (1, 5), 1_000
AIM: dict[str, Any] = {"hidden": (64, 64), "lr": 1e-3, "batch_size": 64, "learning_starts": 100,
                       "eval_every": 0, "gamma": 0.0}  # an episode has one step, so nothing follows


def aim_with_dqn(dimensions: int, seed: int = 0) -> float:
    """Return what DQN scores with five levels for each dimension."""
    agent = DQN("Aim-v0", env_kwargs={"dimensions": dimensions, "levels": 5}, seed=seed,
                train_frequency=1, epsilon_decay_steps=500, **AIM)
    agent.learn(AIM_STEPS, progress=False)
    return agent.evaluate(episodes=200).mean


dqn_scores = [aim_with_dqn(dimensions) for dimensions in DIMENSIONS]
for dimensions, score in zip(DIMENSIONS, dqn_scores, strict=True):
    print(f"DQN, action dimensions: {dimensions}, actions: {5**dimensions:5,}, score: {score:.3f}")
assert dqn_scores[0] > -0.1 and dqn_scores[-1] < -0.5

# %% [markdown]
# With one dimension DQN is about as good as five levels can be: the nearest level is off by at most a
# quarter, which scores $-\tfrac1{48} \approx -0.02$ on average. With five dimensions there are
# 3,125 actions and 1,000 steps to try them. All rewards are negative, so the values of the actions
# that were tried are pushed below zero, while the others stay near it. The largest value then
# belongs to an action that was tried rarely or never, which is no better than chance. Many robots
# have ten action dimensions or more. Remember these scores: SAC gets the same number of steps
# below.

# %% [markdown]
# ## The actor: a squashed Gaussian
#
# The actor is the policy $\pi(a \mid s)$: it maps an observation to a distribution over actions. It
# starts from a Gaussian, with a mean $\mu$ and a standard deviation $\sigma$ for each action dimension.
# To sample an action, take standard normal noise $\epsilon$ (not DQN's $\varepsilon$, a probability),
# shift and scale it, $u = \mu + \sigma\epsilon$, and squash it into $(-1, 1)$: $a = \tanh u$. Because
# the noise comes from outside, the action is a differentiable function of $\mu$ and $\sigma$, so a
# gradient with respect to the action can flow back into the network. This is the *reparameterisation
# trick*.
#
# For the entropy below, SAC also needs the log-probability of the sampled action (strictly, the log
# of its density). Where tanh is flat it crowds many $u$ into few $a$, so the density of $a$ is that
# of $u$ divided by the derivative of tanh, $1 - \tanh^2 u$. In logs that is a difference, summed
# over the dimensions; the term that is subtracted is called the *log-det of tanh*:
#
# $$\log \pi(a \mid s) = \sum_i \Bigl[-\tfrac12 \epsilon_i^2 - \log \sigma_i - \tfrac12 \log 2\pi
# - \log\bigl(1 - \tanh^2 u_i\bigr)\Bigr]$$
#
# Computed as written, the last term breaks. In 32 bits $\tanh(10)$ is exactly 1, and $\log(1 - 1)$
# is $-\infty$. But $1 - \tanh^2 u = 4 / (e^u + e^{-u})^2$, whose log is
# $2\,(\log 2 - u - \operatorname{softplus}(-2u))$ with $\operatorname{softplus}(x) = \log(1 + e^x)$: the
# same number, and nothing cancels.
#
# By hand: with $\mu = 0$, $\sigma = 1$ and $\epsilon = 1$, $u = 1$ and $a = 0.7616$. The Gaussian gives
# $-0.5 - 0.9189 = -1.4189$, the log-det is $\log(1 - 0.5800) = -0.8676$, and
# $\log \pi = -1.4189 + 0.8676 = -0.5513$.

# %%
#| export
def log_det_tanh(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), also where tanh(u) rounds to 1."""
    return 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Turn standard normal noise into actions in (-1, 1) and their log-probabilities (batch,)."""
    u = mean + log_std.exp() * noise  # (batch, action dimensions)
    log_gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    return u.tanh(), (log_gaussian - log_det_tanh(u)).sum(dim=1)

# %%
zero, one = torch.zeros(1, 1), torch.ones(1, 1)
action, log_prob = squashed_sample(mean=zero, log_std=zero, noise=one)
assert abs(action.item() - 0.7616) < 1e-4
assert abs(log_prob.item() - -0.5513) < 1e-4

far = torch.tensor([10.0])
textbook = torch.log(1 - far.tanh() ** 2)
print(f"log(1 - tanh(10)²): textbook {textbook.item()}, ours {log_det_tanh(far).item():.4f}")

# %% [markdown]
# Here is a Gaussian before and after squashing, for $\mu = 0.3$ and three values of $\sigma$: samples
# as a histogram, the formula as a line. Look at the last one: a wide Gaussian is squashed into a policy
# that prefers the two extremes.

# %% tags=["hide-input"]
def densities(std: float, points: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Return actions and the density that the formula gives them, for the mean 0.3."""
    u = torch.linspace(-6, 6, points).unsqueeze(1)
    mean, log_std = torch.full_like(u, 0.3), torch.full_like(u, math.log(std))
    action, log_prob = squashed_sample(mean, log_std, (u - mean) / std)
    return action.squeeze(1).numpy(), log_prob.exp().numpy()


fig, axes = plt.subplots(2, 3, figsize=(9, 4.4))
noise = np.random.default_rng(0).standard_normal(50_000)
for column, std in enumerate((0.3, 0.8, 2.0)):
    u = 0.3 + std * noise
    line = np.linspace(-5, 5, 400)
    axes[0, column].hist(u, bins=80, range=(-5, 5), density=True, color="#BBBBBB")
    bell = np.exp(-0.5 * ((line - 0.3) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    axes[0, column].plot(line, bell, color=COLORS["sac"])
    axes[0, column].set(title=f"σ = {std}", xlabel="u, before squashing")
    axes[1, column].hist(np.tanh(u), bins=80, range=(-1, 1), density=True, color="#BBBBBB")
    axes[1, column].plot(*densities(std), color=COLORS["sac"])
    axes[1, column].set(xlabel="a = tanh u", ylim=(0, 3 if std > 1 else None))
for row in axes:
    row[0].set_ylabel("density")

# %% [markdown]
# The network itself is DQN's `MLP` with two outputs for each action dimension, $\mu$ and
# $\log\sigma$. It outputs the log because $\sigma$ must be positive, and the log is clamped between
# −20 and 2. Below −20, $\sigma$ would be at most $2 \cdot 10^{-9}$ and would be lost when it is
# added to $\mu$ in 32 bits; above 2, most actions would be at the bounds.
#
# By hand: if the last layer puts out 0.3 and 5 for one action dimension, then $\mu = 0.3$ and
# $\log\sigma = 2$.

# %%
#| export
LOG_STD = -20.0, 2.0  # the limits of the log standard deviation


class Actor(nn.Module):
    """From observations to the mean and log standard deviation of a Gaussian over actions."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.mlp = MLP((inputs, *hidden, 2 * actions))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation, each (batch, action dimensions)."""
        mean, log_std = self.mlp(obs.float()).chunk(2, dim=1)
        return mean, log_std.clamp(*LOG_STD)

# %%
actor = Actor(inputs=3, actions=1, hidden=(8, 8))
with torch.no_grad():
    for parameter in actor.parameters():
        parameter.zero_()
    list(actor.parameters())[-1].copy_(torch.tensor([0.3, 5.0]))  # the last bias
mean, log_std = actor(torch.randn(4, 3))
assert mean.shape == log_std.shape == (4, 1)
assert torch.equal(mean, torch.full((4, 1), 0.3)) and torch.equal(log_std, torch.full((4, 1), 2.0))

# %% [markdown]
# ## The critics
#
# A critic is a network from an observation *and* an action to one number, $Q(s, a)$. An actor that
# maximises a critic finds its errors: it moves to where the critic is too high, and the next target
# takes over that error. So SAC trains two critics from different initial weights and uses the smaller
# value. If they say 3.0 and 2.4, SAC uses 2.4.
#
# Two critics, or the ten of the [next chapter](redq.ipynb), are one module here. A layer has a weight
# of shape `(critics, inputs, outputs)`, and `torch.baddbmm` multiplies the batch by all of them at once
# and adds the biases. The weights start as those of `nn.Linear`, uniformly within
# $\pm 1/\sqrt{\text{inputs}}$. (`chosen` is for the next chapter.)

# %%
#| export
class Critics(nn.Module):
    """An ensemble of Q-functions of an observation and an action, computed together."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], num_critics: int
    ) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n, outputs in pairwise((inputs + actions, *hidden, 1)):
            bound = 1 / math.sqrt(n)  # as in nn.Linear
            # a ParameterList turns the tensors that it is given into parameters
            self.weights.append(torch.empty(num_critics, n, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(num_critics, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the values (batch, critics) of all critics, or of the chosen ones alone."""
        x = torch.cat([obs.float(), action], dim=1).unsqueeze(0)  # (1, batch, inputs + actions)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if chosen is not None:
                weight, bias = weight[chosen], bias[chosen]
            # the first layer gives all critics the same input, later ones have an input for each
            x = x.relu() if i > 0 else x.expand(len(weight), -1, -1)
            x = torch.baddbmm(bias, x, weight)  # (critics, batch, outputs)
        return x.squeeze(2).t()

# %% [markdown]
# By hand: two critics with one hidden unit each. Both add observation and action,
# $0.5 + 0.25 = 0.75$; the first multiplies the result by 1, the second by 2.

# %%
critics = Critics(inputs=1, actions=1, hidden=(1,), num_critics=2)
with torch.no_grad():
    critics.weights[0].fill_(1.0)  # (critics, observation and action, hidden)
    critics.weights[1].copy_(torch.tensor([[[1.0]], [[2.0]]]))
    for bias in critics.biases:
        bias.zero_()
obs, action = torch.tensor([[0.5]]), torch.tensor([[0.25]])
assert critics(obs, action).tolist() == [[0.75, 1.5]]  # (batch, critics)

# %% [markdown]
# ## The buffer, and actions within bounds
#
# SAC learns from the [replay buffer](replay.ipynb) of DQN. Only the actions need care. The policy
# has actions in $(-1, 1)$; Pendulum wants a torque in $[-2, 2]$, another environment a valve in
# $[0, 10]$. A small class converts in both directions. The buffer holds the policy's actions,
# before the scaling, and log-probabilities are of these, too. By hand: in $[0, 10]$ the action 0.5
# is $5 + 5 \cdot 0.5 = 7.5$. An action space without finite bounds cannot be scaled, and is refused
# when the agent is made.

# %%
#| export
def check_bounds(env_id: str, space: gym.spaces.Box) -> None:
    """Raise unless each action dimension has a lower and a higher bound, both finite."""
    if not space.is_bounded("both"):
        raise ValueError(
            f"{env_id!r} has actions without finite bounds on both sides ({space}): give it such "
            "bounds, for example with gymnasium.wrappers.TransformAction."
        )
    if not (space.low < space.high).all() or np.dtype(space.dtype).kind != "f":
        raise ValueError(f"{env_id!r} has actions that cannot vary between real bounds ({space}).")


class ActionScale:
    """Between the actions [-1, 1] of the policy and those of the environment."""

    def __init__(self, space: gym.spaces.Box) -> None:
        self.low, self.high, self.dtype = space.low, space.high, space.dtype
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self.center, self.half = low / 2 + high / 2, high / 2 - low / 2

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Map [-1, 1] to the bounds, and never a rounding error beyond them."""
        scaled = (self.center + self.half * action).astype(self.dtype)
        return np.clip(scaled, self.low, self.high)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        """Map the bounds to [-1, 1]."""
        return (action - self.center) / self.half

# %%
valve = ActionScale(gym.spaces.Box(0, 10, (1,)))
assert valve.to_env(np.array([0.5])) == 7.5
assert valve.from_env(np.array([7.5])) == 0.5
try:
    check_bounds("Rocket-v0", gym.spaces.Box(0, np.inf, (1,)))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Entropy
#
# The *entropy* of a policy is the mean of $-\log \pi(a \mid s)$ over its own actions: large if they are
# spread, small if they are nearly certain. Since $\pi$ is a density, its entropy can be negative. A
# uniform density over all of $[-1, 1]$ has the entropy $\log 2 = 0.69$, and one of width
# $e^{-1} = 0.37$ has −1.
#
# SAC maximises reward *plus entropy*,
# $\sum_t \gamma^t \bigl(r_t - \alpha \log \pi(a_t \mid s_t)\bigr)$. The *entropy coefficient* $\alpha$
# (papers also say temperature) is how much reward one unit of entropy is worth, and values with this
# bonus are called *soft*. The bonus takes the place of DQN's $\varepsilon$: the policy explores by
# itself, most where the critics see little difference between actions, and is less likely to settle
# on an early mistake of theirs.
#
# ## The critics' loss
#
# The target of a step is
#
# $$y = r + \gamma\,(1 - \texttt{terminated})\,
# \bigl(\min_i Q^-_i(s', a') - \alpha \log \pi(a' \mid s')\bigr),
# \qquad a' \sim \pi(\cdot \mid s'),$$
#
# with the target critics $Q^-_i$ and $\gamma$ from the batch, where it is called `discount`. There is a
# bonus for $a'$ and none for $a$, because $Q(s, a)$ starts after $a$ has been chosen. And $a'$ is a new
# action, sampled from the policy as it is now. The action that followed when the transition was stored
# does not matter. That is why SAC is off-policy: it can learn from old transitions.
#
# By hand: $r = 1$, $\gamma = 0.9$, the target critics say 3.0 and 2.4, $\log \pi = -0.5$ and
# $\alpha = 0.2$. The soft value is $2.4 + 0.1 = 2.5$ and $y = 1 + 0.9 \cdot 2.5 = 3.25$. If the
# step terminated, $y = 1$.

# %%
#| export
def sac_target(
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, critics), of the target critics
    next_log_prob: Tensor,  # (batch,)
    alpha: Tensor | float,
) -> Tensor:
    """Return the reward plus the discounted soft value of the next state, (batch,)."""
    vectors = {"reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(next_q), **vectors, next_log_prob=next_log_prob)
    if next_q.ndim != 2:
        raise ValueError(f"next_q must be (batch, critics), not {tuple(next_q.shape)}.")
    next_value = next_q.amin(dim=1) - alpha * next_log_prob
    return reward + discount * ~terminated * next_value

# %%
step = {
    "reward": torch.tensor([1.0]),
    "discount": torch.tensor([0.9]),
    "next_q": torch.tensor([[3.0, 2.4]]),
    "next_log_prob": torch.tensor([-0.5]),
    "alpha": 0.2,
}
target = sac_target(terminated=torch.tensor([False]), **step)
torch.testing.assert_close(target, torch.tensor([3.25]))
torch.testing.assert_close(sac_target(terminated=torch.tensor([True]), **step), torch.tensor([1.0]))

# %% [markdown]
# The loss is the squared TD error, averaged over the batch and summed over the critics:
#
# $$L_Q = \sum_i \operatorname{mean}\bigl[(Q_i(s, a) - y)^2\bigr]$$
#
# By hand: if the critics said 3.25 and 3.0 where $y = 3.25$, it is $0 + 0.25^2 = 0.0625$. As in the DQN
# chapter, a column `(batch, 1)` where `(batch,)` belongs would broadcast into a wrong loss, so the
# shapes are checked.

# %%
#| export
def critic_loss(q: Tensor, target: Tensor) -> tuple[Tensor, Metrics]:
    """Return the squared TD error of q (batch, critics), summed over the critics, and metrics."""
    check_shapes(len(q), target=target)
    if q.ndim != 2:
        raise ValueError(f"q must be (batch, critics), not {tuple(q.shape)}.")
    td_error = q - target.unsqueeze(1)  # (batch, critics)
    loss = td_error.square().mean(dim=0).sum()
    return loss, {
        "loss": loss.detach(),
        "q_mean": q.detach().mean(),
        "q_std": q.detach().std(dim=1, correction=0).mean(),  # how much the critics disagree
        "target_mean": target.mean(),
        "td_error_abs": td_error.detach().abs().mean(),
    }

# %%
q = torch.tensor([[3.25, 3.0]])
loss, metrics = critic_loss(q, target)
torch.testing.assert_close(loss, torch.tensor(0.0625))
{name: round(value.item(), 4) for name, value in metrics.items()}

# %% [markdown]
# ## The actor's loss
#
# The actor should choose actions that the critics value highly, and stay random:
#
# $$L_\pi = \operatorname{mean}\bigl[\alpha \log \pi(a \mid s) - \min_i Q_i(s, a)\bigr],
# \qquad a = \tanh(\mu + \sigma\epsilon)$$
#
# The gradient goes from $Q$ into the action $a$, and from there through $\mu$ and $\sigma$ into the
# actor. The critics are only a path for it: their own weights do not move in this step. The policy
# gradient of [Basics](basics.ipynb) and A2C cannot do this, since no critic of theirs takes the
# action as an input. They multiply the gradient of $\log\pi$ by a reward or an advantage instead.
#
# By hand: with a value of 2.4, $\log \pi = -0.5$ and $\alpha = 0.2$ it is $-0.1 - 2.4 = -2.5$.

# %%
#| export
def actor_loss(value: Tensor, log_prob: Tensor, alpha: Tensor | float) -> tuple[Tensor, Metrics]:
    """Return the mean of alpha log pi - Q, from value and log_prob (batch,), and metrics."""
    check_shapes(len(value), value=value, log_prob=log_prob)
    loss = (alpha * log_prob - value).mean()
    return loss, {"actor_loss": loss.detach(), "entropy": -log_prob.detach().mean()}

# %%
loss, metrics = actor_loss(value=torch.tensor([2.4]), log_prob=torch.tensor([-0.5]), alpha=0.2)
torch.testing.assert_close(loss, torch.tensor(-2.5))
torch.testing.assert_close(metrics["entropy"], torch.tensor(0.5))

# %% [markdown]
# Which way does it push? Take $\mu = 0$, $\sigma = 1$, no noise, so $a = 0$, and a critic that rises by
# 3 for each unit of action, $Q = 3a$. Through tanh, whose derivative at 0 is 1, the mean gets the
# gradient $-3$: a step against it moves the mean up. And $\log\pi$ contains $-\log\sigma$, so
# $\log\sigma$ gets the gradient $-\alpha = -0.2$: the step widens the policy. (The log-det adds nothing
# here: its derivative, $-2\tanh u$, is 0 at $u = 0$.)

# %%
mean, log_std = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
action, log_prob = squashed_sample(mean, log_std, noise=zero)
loss, _ = actor_loss(value=3 * action.squeeze(1), log_prob=log_prob, alpha=0.2)
loss.backward()
torch.testing.assert_close((mean.grad, log_std.grad), (-3 * one, -0.2 * one))

# %% [markdown]
# ## The entropy coefficient
#
# How much is entropy worth? Nobody knows beforehand, and it changes as the agent learns. So you name a
# target entropy $\bar{\mathcal H}$ instead, and let $\alpha$ follow. By default it is minus the
# number of action dimensions, a rule of thumb of the authors. In each dimension that is the entropy
# of the uniform density of width 0.37 above.
#
# $$L_\alpha = -\log\alpha \cdot \operatorname{mean}\bigl[\log\pi(a \mid s) + \bar{\mathcal H}\bigr]$$
#
# Its gradient with respect to $\log\alpha$ is the entropy of the batch minus the target. While the
# policy is more random than asked, $\alpha$ falls, and entropy counts for less; while it is too
# certain, $\alpha$ rises.
#
# By hand: $\log\pi = -0.5$ is an entropy of 0.5, and the target is −1. With $\alpha = 0.2$,
# $L_\alpha = 1.609 \cdot (-0.5 - 1) = -2.414$, and the gradient is $0.5 - (-1) = 1.5$: $\alpha$ falls.

# %%
#| export
class Temperature(nn.Module):
    """The entropy coefficient, learned through its logarithm so that it stays positive."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))

    def forward(self) -> Tensor:
        """Return alpha."""
        return self.log_alpha.exp()


def alpha_loss(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: float
) -> tuple[Tensor, Metrics]:
    """Return the loss that lowers alpha while the entropy is above its target, and metrics."""
    check_shapes(len(log_prob), log_prob=log_prob)
    loss = -(log_alpha * (log_prob.detach() + target_entropy)).mean()
    return loss, {"alpha": log_alpha.detach().exp()}

# %%
temperature = Temperature(alpha=0.2)
loss, metrics = alpha_loss(temperature.log_alpha, torch.tensor([-0.5]), target_entropy=-1.0)
loss.backward()
assert abs(loss.item() - -2.414) < 1e-3
torch.testing.assert_close(temperature.log_alpha.grad, torch.tensor(1.5))
torch.testing.assert_close(temperature(), torch.tensor(0.2))

# %% [markdown]
# ## Settings
#
# The settings of [replay](replay.ipynb) are inherited, among them `gradient_steps`: with a
# `train_frequency` of 1 it is the number of updates after each environment step, here one. The next
# chapter changes it, and two more: `num_critics`, and `policy_delay`, the number of critic updates for
# each update of the actor.

# %%
#| export
class SACConfig(ReplayConfig):
    """The settings of SAC."""

    env_id: str = Field(
        default="Pendulum-v1",
        description="Gymnasium id, `module:Name-v0`, or `module:function` that makes one.",
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(256, 256), description="Units of each hidden layer."
    )
    lr: float = Field(default=3e-4, gt=0, description="Learning rate of Adam, for all networks.")
    batch_size: int = Field(default=256, ge=1, description="Transitions of one update.")
    buffer_size: int = Field(
        default=100_000, ge=1, description="Transitions that the buffer holds."
    )
    learning_starts: int = Field(
        default=1_000, ge=0, description="Random steps before the first update."
    )
    train_frequency: int = Field(default=1, ge=1, description="Environment steps between updates.")
    num_critics: int = Field(default=2, ge=1, description="Critics in the ensemble (N).")
    policy_delay: int = Field(
        default=1, ge=1, description="Critic updates per update of the actor."
    )
    tau: float = Field(
        default=0.005, gt=0, le=1, description="Fraction that the target critics move per update."
    )
    initial_alpha: float = Field(default=1.0, gt=0, description="Entropy coefficient at the start.")
    learn_alpha: bool = Field(
        default=True, description="Whether the entropy coefficient is learned."
    )
    target_entropy: float | None = Field(
        default=None,
        description="Entropy to hold; by default minus the number of action dimensions.",
    )

# %% [markdown]
# ## The agent
#
# Everything is there. `build` makes networks, optimisers and buffer; `act` samples from the policy, or
# takes $\tanh\mu$, the median of each dimension, when it should not explore; `observe` stores a step;
# and one update is
#
# | step | equation | in the code |
# |---|---|---|
# | | a batch of transitions $(s, a, r, s', \texttt{terminated})$ | `sample` |
# | 1 | $a' = \tanh(\mu(s') + \sigma(s')\,\epsilon')$ | `self.actor`, `squashed_sample` |
# | 2 | $y = r + \gamma(1 - \texttt{terminated})(\min_i Q_i^-(s', a') - \alpha\log\pi(a' \mid s'))$ | `sac_target` |
# | 3 | a gradient step of the critics on $L_Q$ | `critic_loss`, `critic_optimizer.step()` |
# | 4 | $a = \tanh(\mu(s) + \sigma(s)\,\epsilon)$ | `self.actor`, `squashed_sample` |
# | 5 | a gradient step of the actor on $L_\pi$, with the critics of step 3 | `actor_loss`, `actor_optimizer.step()` |
# | 6 | a gradient step of $\log\alpha$ on $L_\alpha$ | `alpha_loss`, `alpha_optimizer.step()` |
# | 7 | $\theta^- \leftarrow \theta^- + \tau\,(\theta - \theta^-)$ | `polyak_update` |
#
# The forward passes, losses and backward passes are in two methods, `critic_gradients` and
# `actor_gradients` (which the setting `compile` compiles); `update` has the optimisers around them.
# Steps 5 and 6 share one backward pass, of the sum of their losses: neither loss has a gradient for
# what the other trains, so it is the same as two. Two one-line methods, `choose_critics` and
# `actor_value`, are all that the next chapter replaces. The rest belongs to the
# [loop](dqn.ipynb#the-whole-algorithm-in-one-cell) that DQN has, too: it counts `updates`, saves the
# `parts` in checkpoints, and passes `state` and `episode_start` to `act` for
# agents with a hidden state. SAC has none. The first `learning_starts` steps are random,
# uniform within the bounds, and only fill the buffer; the first update comes after the next step.

# %%
#| export
class SAC(Agent):
    """An actor that maximises what its critics say, and its entropy."""

    name: ClassVar[str] = "sac"
    config_class: ClassVar[type[Config]] = SACConfig
    actions: ClassVar[str] = "continuous"
    parts: ClassVar[tuple[str, ...]] = (
        "actor",
        "critics",
        "target_critics",
        "temperature",
        "actor_optimizer",
        "critic_optimizer",
        "alpha_optimizer",
        "replay",
    )
    compiled: ClassVar[tuple[str, ...]] = ("critic_gradients", "actor_gradients")
    config: SACConfig
    observation_space: gym.spaces.Box
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make networks, optimisers and buffer."""
        config, (dimensions,) = self.config, self.action_space.shape
        check_bounds(config.env_id, self.action_space)
        self.scale = ActionScale(self.action_space)
        self.actor = self.make_actor().to(self.device)
        self.critics = self.make_critics().to(self.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = Temperature(config.initial_alpha).to(self.device)
        self.actor_optimizer = Adam(self.actor.parameters(), lr=config.lr, fused=True)
        self.critic_optimizer = Adam(self.critics.parameters(), lr=config.lr, fused=True)
        self.alpha_optimizer = Adam(self.temperature.parameters(), lr=config.lr, fused=True)
        entropy = config.target_entropy
        self.target_entropy = -float(dimensions) if entropy is None else entropy
        dtype = transition_dtype(self.observation_space, gym.spaces.Box(-1, 1, (dimensions,)))
        self.replay = ReplayBuffer(config.buffer_size, dtype, derive_seed(config.seed, "replay"))

    def make_actor(self) -> nn.Module:
        """Make the actor; any module with the inputs and outputs of `Actor` will do."""
        (inputs,), (actions,) = self.observation_space.shape, self.action_space.shape
        return Actor(inputs, actions, self.config.hidden)

    def make_critics(self) -> nn.Module:
        """Make the critics; any module with the inputs and outputs of `Critics` will do."""
        (inputs,), (actions,) = self.observation_space.shape, self.action_space.shape
        return Critics(inputs, actions, self.config.hidden, self.config.num_critics)

    def sample_noise(self, count: int) -> Tensor:
        """Sample standard normal noise (count, action dimensions) from the agent's generator."""
        shape = (count, *self.action_space.shape)
        noise = self.generator.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(noise).to(self.device)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Sample from the policy, or take its median; at first act at random within the bounds."""
        if explore and self.global_step < self.config.learning_starts:
            action = self.generator.uniform(-1, 1, (len(obs), *self.action_space.shape))
        else:
            tensor = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
            mean, log_std = self.actor(tensor)
            u = mean + log_std.exp() * self.sample_noise(len(obs)) if explore else mean
            action = u.tanh().cpu().numpy()
        return self.scale.to_env(action), state

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, with actions in [-1, 1]."""
        self.replay.add(
            make_transitions(
                self.replay.storage.dtype,
                obs=transition.obs,
                action=self.scale.from_env(transition.action),
                reward=transition.reward,
                next_obs=transition.next_obs,
                terminated=transition.terminated,
                discount=self.config.gamma,
            )
        )

    def sample(self) -> Batch:
        """Sample the transitions of one update."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def choose_critics(self) -> Tensor | None:
        """Choose the target critics whose minimum is in the target; None means all of them."""
        return None

    def actor_value(self, q: Tensor) -> Tensor:
        """Return what the actor maximises (batch,): the smallest value of q (batch, critics)."""
        return q.amin(dim=1)

    def critic_gradients(self, batch: Batch, next_noise: Tensor, chosen: Tensor | None) -> Metrics:
        """Backpropagate the critics' loss of a batch."""
        with torch.no_grad():
            mean, log_std = self.actor(batch.next_obs)
            next_action, next_log_prob = squashed_sample(mean, log_std, next_noise)
            next_q = self.target_critics(batch.next_obs, next_action, chosen)
            alpha = self.temperature()
            target = sac_target(
                batch.reward, batch.discount, batch.terminated, next_q, next_log_prob, alpha
            )
        loss, metrics = critic_loss(self.critics(batch.obs, batch.action), target)
        loss.backward()
        return metrics

    def actor_gradients(self, obs: Tensor, noise: Tensor) -> Metrics:
        """Backpropagate the losses of the actor and of the entropy coefficient."""
        mean, log_std = self.actor(obs)
        action, log_prob = squashed_sample(mean, log_std, noise)
        value = self.actor_value(self.critics(obs, action))
        loss, metrics = actor_loss(value, log_prob, self.temperature().detach())
        entropy_loss, more_metrics = alpha_loss(
            self.temperature.log_alpha, log_prob, self.target_entropy
        )
        # Neither loss has a gradient for what the other trains, and the critics get none at all.
        trained = [*self.actor.parameters(), *self.temperature.parameters()]
        (loss + entropy_loss).backward(inputs=trained)
        return metrics | more_metrics

    def update(self, batch: Batch) -> UpdateResult:
        """Update the critics and, when it is due, the actor and the entropy coefficient."""
        self.critic_optimizer.zero_grad()
        next_noise = self.sample_noise(len(batch.reward))
        metrics = self.critic_gradients(batch, next_noise, self.choose_critics())
        self.critic_optimizer.step()

        if (self.updates + 1) % self.config.policy_delay == 0:
            self.actor_optimizer.zero_grad()
            self.alpha_optimizer.zero_grad()
            metrics |= self.actor_gradients(batch.obs, self.sample_noise(len(batch.reward)))
            self.actor_optimizer.step()
            if self.config.learn_alpha:
                self.alpha_optimizer.step()

        polyak_update(self.target_critics, self.critics, self.config.tau)
        return UpdateResult(metrics)

    @torch.no_grad()
    def q_values(self, obs: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
        """Return each critic's value (batch, critics) of actions, or of the policy's own.

        Observations are as `act` gets them.
        """
        if action is None:
            action, _ = self.act(obs, None, np.ones(len(obs), dtype=bool), explore=False)
        action = self.scale.from_env(action)
        pair = (torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in (obs, action))
        return self.critics(*pair).cpu().numpy()

# %%
#| export
def train_sac(config: SACConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train SAC with these settings."""
    return train(SAC(config=config), progress, callbacks)

# %% [markdown]
# ## A live run
#
# First the aiming from above, with the same number of steps and updates:

# %%
def aim_with_sac(dimensions: int, seed: int = 0) -> float:
    """Return what SAC scores."""
    agent = SAC("Aim-v0", env_kwargs={"dimensions": dimensions}, seed=seed, **AIM)
    agent.learn(AIM_STEPS, progress=False)
    return agent.evaluate(episodes=200).mean


sac_scores = [aim_with_sac(dimensions) for dimensions in DIMENSIONS]
for dimensions, dqn_score, sac_score in zip(DIMENSIONS, dqn_scores, sac_scores, strict=True):
    print(f"action dimensions: {dimensions}, DQN: {dqn_score:.3f}, SAC: {sac_score:.3f}")
assert sac_scores[-1] > -0.3

# %% [markdown]
# Now Pendulum-v1. A torque of at most 2 is too weak to lift the pole, so it has to be swung. An
# episode has 200 steps; random torques score about −1200, and a policy that swings up at once and stays
# there about −150. For comparison DQN gets five torques, and the same 5,000 steps, network, batch
# and number of updates.

# %%
class FiveTorques(gym.ActionWrapper[np.ndarray, int, np.ndarray]):
    """Pendulum for DQN: five torques to choose from."""

    def __init__(self, env: gym.Env[np.ndarray, np.ndarray]) -> None:
        super().__init__(env)
        self.action_space = gym.spaces.Discrete(5)

    def action(self, action: int) -> np.ndarray:
        return np.linspace(-2, 2, 5, dtype=np.float32)[[action]]


def five_torques(**keywords: Any) -> gym.Env[np.ndarray, int]:
    """Make Pendulum with five torques."""
    return FiveTorques(gym.make("Pendulum-v1", **keywords))


gym.register("FiveTorques-v0", five_torques, disable_env_checker=True)
PENDULUM: dict[str, Any] = {"hidden": (64, 64), "lr": 1e-3, "batch_size": 128,
                            "learning_starts": 250, "tau": 0.01, "eval_every": 500,
                            "eval_episodes": 10, "log_every": 100}

# %%
began = time.process_time()
agent = SAC("Pendulum-v1", seed=1, **PENDULUM)
run = agent.learn(5_000)
own = {"train_frequency": 1, "target_update_interval": 1, "epsilon_decay_steps": 2_000}
rival = DQN("FiveTorques-v0", seed=1, **own, **PENDULUM)
rival_run = rival.learn(5_000)
print(f"{time.process_time() - began:.0f} seconds of processor time for both")

# %%
fig, ax = plt.subplots()
plot_band(ax, *run.curve("eval_return_mean"), "SAC", COLORS["sac"])
plot_band(ax, *rival_run.curve("eval_return_mean"), "DQN, five torques", COLORS["dqn"])
label_curves(ax, "Pendulum-v1")
ax.legend()
for name, trained, history in (("SAC", agent, run), ("DQN", rival, rival_run)):
    final, best = trained.evaluate(episodes=20), history.curve("eval_return_mean")[1].max()
    low, high = final.interval
    print(f"{name} after 5,000 steps: {final.mean:.0f}, 95 % interval {low:.0f} to {high:.0f}; "
          f"best evaluation on the way {best:.0f}")
    assert best > -600  # it swings up, whatever comes after

# %% [markdown]
# DQN with five torques swings up, too: for one action dimension you do not need an actor. What SAC adds
# is that the same code works in five dimensions, where DQN scored −0.84 and SAC −0.15. This is one seed,
# and an agent that has learned may fall back for a while, so the assert asks for the best evaluation,
# not for the last.
#
# The next figure shows the entropy coefficient at work. The entropy, in *nats* since its logarithm is
# the natural one, starts near that of a uniform choice, 0.69. It falls as the policy becomes certain,
# and is then held near its target of −1. Meanwhile $\alpha$ falls, because the policy is more
# random than asked, towards the value at which two forces balance: the bonus, which widens the
# policy, and the critics, which narrow it.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
left.plot(*run.curve("entropy"), color=COLORS["sac"])
left.axhline(-1, color=COLORS["reference"], linestyle="--", linewidth=1)
label_curves(left, ylabel="entropy of the policy (nats)")
left.annotate("target", (400, -1), (0, 5), textcoords="offset points")
right.semilogy(*run.curve("alpha"), color=COLORS["sac"])
label_curves(right, ylabel="entropy coefficient α (reward per nat)")
steps, entropy = run.curve("entropy")
assert entropy[-5:].mean() < entropy[0]

# %% [markdown]
# ## Watch it
#
# The first three and a half seconds of one greedy episode, from left to right:

# %%
env = make_env("Pendulum-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=3)
frames, times_shown = [], []
for moment in range(71):
    if moment % 10 == 0:
        frames.append(env.render())
        times_shown.append(f"{0.05 * moment:.1f} s")
    obs, *_ = env.step(agent.predict(obs)[0])
env.close()
filmstrip(frames, times_shown)

# %% [markdown]
# And a look inside: the smaller Q-value for a pole at rest, over angle and torque. Black dots mark what
# the policy would do. The value is highest at the top, and near it the policy pushes the pole towards
# the top from either side. The torque can lift a pole at rest only within 0.41 rad of the top, where
# gravity is weaker. Far out, beyond 1.2 to 1.6 rad, the policy pushes the other way, to gain speed. The
# colours hardly change from bottom to top: one torque lasts 0.05 s and matters little beside where the
# pole is, and the actor follows these small differences.

# %%
angles, torque = np.linspace(-np.pi, np.pi, 73), np.linspace(-2, 2, 41)
grid_angle, grid_torque = np.meshgrid(angles, torque)  # (41, 73)


def still(angle: np.ndarray) -> np.ndarray:
    """Return the observations of a pole at rest."""
    return np.stack([np.cos(angle), np.sin(angle), np.zeros_like(angle)], axis=-1)


values = agent.q_values(still(grid_angle.ravel()), grid_torque.reshape(-1, 1)).min(axis=1)
fig, ax = plt.subplots()
extent = (-np.pi, np.pi, -2.0, 2.0)
labels = ("angle (rad), 0 is up", "torque (N m)", "smaller Q-value")
plot_heatmap(ax, values.reshape(grid_angle.shape), extent, *labels)
ax.plot(angles, agent.predict(still(angles))[0], ".", color="black", markersize=3)
best = grid_angle.ravel()[values.argmax()]
assert abs(best) < 1  # the value is highest near the top

# %% [markdown]
# ## What each part buys
#
# The first 6,000 steps with one part taken away, five seeds each: SAC in orange, the variant in
# black, mean and 95 % interval. *No entropy* holds the entropy coefficient at nearly zero, *fixed
# temperature* holds it at 0.2. *One critic* has no minimum to take. *No target critics* copies the
# critics after every update (`tau: 1`). *No replay* has a buffer of 128 transitions, one batch.
# Below are the last evaluations of the seeds, their interquartile mean (IQM, the mean of the
# middle half) and its interval, as [sweeps](sweep.ipynb) explains them.

# %%
ablations = load_result(RESULTS / "sac_ablations.json")
draw_parts(plt.figure(), ablations, columns=5)
print(made_by(ablations))

# %% [markdown]
# - **Target critics** matter. Without them the values chase themselves: the IQM is −1351, that of
#   SAC −146, and the best evaluation of any seed at any time was −845.
# - **Replay** matters, too. With a buffer of 128, less than one episode, the IQM is −794: the seeds
#   learn slowly and unsteadily, and end between −1190 and −245. The intervals of these two overlap,
#   so five seeds cannot rank them.
# - **Entropy, the learned coefficient and the second critic make no difference here that five seeds
#   could show**: −147 without entropy, −147 with a fixed coefficient, −186 with one critic, within
#   intervals that overlap. Without the bonus the policy still samples its actions and starts wide,
#   so it explores at first. A coefficient of 0.2 works as well as a learned one, but you have to
#   know it beforehand.
#
# By 6,000 steps most variants have solved Pendulum. For each seed, all variants are evaluated on
# the same twenty starts, so the dots of these variants are at nearly the same places.
#
# ## Beside Stable-Baselines3
#
# Does another implementation, at the same settings, learn as fast? `bench/parity.py` trains ours
# and that of Stable-Baselines3 for 5,000 steps of Pendulum, with two layers of 64 units, batches of
# 128 and one update for each step. Both have ten seeds and play the same evaluation episodes at the
# same steps. A test gives both the same weights and the same batches, and takes the noise
# away: their parameters after the updates agree to rounding.

# %% tags=["hide-input"]
show_parity(RESULTS / "parity_sac.json")

# %% [markdown]
# The interval in the title, which [Figures](figures.ipynb) explains, holds 0: ten seeds show no
# difference. All twenty runs end above −230.
#
# ## Honest edges
#
# What differs from the papers, and why:
#
# - **Two papers in one.** The first paper has a network for the value of a state besides the critics,
#   and a fixed entropy coefficient. The second drops that network and learns the coefficient, and so
#   do we.
# - **Losses.** $L_\alpha$ has $\log\alpha$ where the paper's equation has $\alpha$; the authors' code
#   has it, too. With respect to $\log\alpha$, the paper's gradient is ours times $\alpha$. The paper's
#   $L_Q$ has a factor ½, ours has none.
# - **Sizes.** The defaults are the papers' two layers of 256, batch 256, learning rate 3·10⁻⁴ and τ =
#   0.005, but a buffer of 100,000 transitions and not a million. The config for Pendulum has 64 units,
#   batch 128, 10⁻³ and τ = 0.01: smaller, so that a chapter can run it. These were found on Pendulum
#   itself, with no record of the trials. On another task expect to search again.
#
# The papers do not test on Pendulum. The RL Zoo reports −157 for SAC at 20,000 steps from one run; the
# first figure shows ours at 10,000, for five. The papers' own tasks, robots simulated with MuJoCo
# for a million steps and more, are not tried here. The next chapter compares SAC with REDQ on one
# of them, Hopper, for 15,000 steps.

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** A policy has σ so small that it is nearly certain. What is its entropy, roughly, and
# what happens to α? Why can an entropy be negative at all?
#
# <details>
# <summary>Solution</summary>
#
# The entropy of a Gaussian is $\log\sigma + \tfrac12\log 2\pi e$, which goes to $-\infty$ as
# $\sigma \to 0$: a density may be larger than 1, so its log may be positive. It is below any target, so
# α rises until entropy pays again.
#
# ```python
# noise = torch.randn(50_000, 1)
# narrow = torch.full_like(noise, math.log(0.01))
# _, log_prob = squashed_sample(torch.zeros_like(noise), narrow, noise)
# assert abs(-log_prob.mean().item() - (math.log(0.01) + 1.419)) < 0.02
# log_alpha = torch.zeros((), requires_grad=True)
# alpha_loss(log_alpha, log_prob, target_entropy=-1.0)[0].backward()
# assert log_alpha.grad < 0  # a step against it raises log α
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** In the target the next action is sampled from the policy as it is now, not taken from
# the buffer. What would SAC learn if it used the stored next action?
#
# <details>
# <summary>Solution</summary>
#
# The value of the mixture of old policies that filled the buffer, as
# [SARSA](basics.ipynb#on-policy-and-off-policy) learns that of the policy that acts. With the new
# action, the stored step supplies only $r$ and $s'$, which do not depend on the policy. Say there are
# two next actions, worth 0 and 1. The old policies took the better one in 10 % of the cases, the new
# one takes it in 90 %. A critic learns the mean of its targets: 0.1 with the stored actions, 0.9 with
# the new ones.
#
# ```python
# worth = torch.tensor([0.0, 1.0])
# old, new = torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9])  # how often each is taken
# torch.testing.assert_close(torch.stack([old @ worth, new @ worth]), torch.tensor([0.1, 0.9]))
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Take the log-det of tanh out of `squashed_sample` and hold α fixed. Where does σ go,
# and where do the actions go? What does the metric `entropy` say?
#
# <details>
# <summary>Solution</summary>
#
# Without it the entropy is that of the Gaussian before squashing, and each unit of $\log\sigma$ pays α,
# with no end. So σ grows, the actions pile up at the bounds, where tanh is flat, and the metric says
# that the policy is very random. With the log-det, a σ that is too large is made smaller. (A learned α
# hides the bug: it holds the wrong entropy on target, and the true one is lower.)
#
# ```python
# noise = torch.randn(50_000, 1)
# log_std = torch.tensor(2.0, requires_grad=True)  # at its limit
# wide = log_std.expand_as(noise)
# action, log_prob = squashed_sample(torch.zeros_like(noise), wide, noise)
# without = (-0.5 * noise.square() - wide - 0.5 * math.log(2 * math.pi)).sum(dim=1)
# (pushed,) = torch.autograd.grad(log_prob.mean(), log_std)
# (pushed_without,) = torch.autograd.grad(without.mean(), log_std)
# assert pushed > 1 and pushed_without < -0.99  # a step against it: narrower, and wider still
# assert -without.mean() > 3 and -log_prob.mean() < -5  # "very random", and truly not
# assert (action.abs() > 0.99).float().mean() > 0.7
# ```
#
# </details>

# %% [markdown]
# **Exercise 4 (a planted bug).** This target passes every check of shapes and trains without a
# complaint. For the step worked by hand above, once going on and once terminated, it should give 3.25
# and 1. What is wrong, and where would it do harm?

# %%
def my_target(
    reward: Tensor, discount: Tensor, terminated: Tensor, next_q: Tensor, next_log_prob: Tensor,
    alpha: float,
) -> Tensor:
    return reward + discount * ~terminated * next_q.amin(dim=1) - alpha * next_log_prob


two = {name: torch.cat([x, x]) if isinstance(x, Tensor) else x for name, x in step.items()}
my_target(terminated=torch.tensor([False, True]), **two)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The bonus is outside the brackets: it is not discounted, and a step that terminated gets it, too, for
# an action that nobody takes. On Pendulum, which never terminates, you would hardly notice. Where a
# fall ends the episode, the value of falling is wrong by the bonus.
#
# ```python
# def my_target(
#     reward: Tensor, discount: Tensor, terminated: Tensor, next_q: Tensor, next_log_prob: Tensor,
#     alpha: float,
# ) -> Tensor:
#     next_value = next_q.amin(dim=1) - alpha * next_log_prob
#     return reward + discount * ~terminated * next_value
#
# targets = my_target(terminated=torch.tensor([False, True]), **two)
# assert torch.allclose(targets, torch.tensor([3.25, 1.0]))
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Close the chapter and write the update of SAC from memory, with nothing but PyTorch.
# Then copy an agent, update the original with `update` and the copy with your code, and compare the
# weights. (Take the noise from the copy's generator, first for the next actions, then for the actions.)
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def sample_action(actor: nn.Module, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
#     mean, log_std = actor(obs)
#     u = mean + log_std.exp() * noise
#     log_gaussian = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
#     log_det = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
#     return u.tanh(), (log_gaussian - log_det).sum(dim=1)
#
#
# def my_update(agent: SAC, batch: Batch) -> None:
#     alpha = agent.temperature.log_alpha.exp().detach()
#     with torch.no_grad():
#         noise = agent.sample_noise(len(batch.reward))
#         next_action, next_log_prob = sample_action(agent.actor, batch.next_obs, noise)
#         next_q = agent.target_critics(batch.next_obs, next_action).min(dim=1).values
#         next_value = next_q - alpha * next_log_prob
#         y = batch.reward + batch.discount * (1 - batch.terminated.float()) * next_value
#     q = agent.critics(batch.obs, batch.action)
#     loss = sum(nn.functional.mse_loss(q_i, y) for q_i in q.unbind(dim=1))
#     agent.critic_optimizer.zero_grad()
#     loss.backward()
#     agent.critic_optimizer.step()
#
#     noise = agent.sample_noise(len(batch.reward))
#     action, log_prob = sample_action(agent.actor, batch.obs, noise)
#     q = agent.critics(batch.obs, action).min(dim=1).values
#     loss = (alpha * log_prob - q).mean()
#     agent.actor_optimizer.zero_grad()
#     loss.backward()
#     agent.actor_optimizer.step()
#
#     loss = -agent.temperature.log_alpha * (log_prob.detach() + agent.target_entropy).mean()
#     agent.alpha_optimizer.zero_grad()
#     loss.backward()
#     agent.alpha_optimizer.step()
#
#     with torch.no_grad():
#         pairs = zip(agent.target_critics.parameters(), agent.critics.parameters())
#         for slow, fast in pairs:
#             slow += agent.config.tau * (fast - slow)
#
#
# original = SAC("Pendulum-v1", hidden=(32, 32), batch_size=64, learning_starts=64)
# original.learn(64, progress=False)
# mine = copy.deepcopy(original)
# for _ in range(5):
#     batch = original.sample()
#     original.update(batch)
#     my_update(mine, batch)
# for name in ("actor", "critics", "target_critics", "temperature"):
#     parameters = (getattr(agent, name).parameters() for agent in (original, mine))
#     for expected, found in zip(*parameters, strict=True):
#         torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook import SAC
#
# agent = SAC.from_config("pendulum")
# agent.learn(10_000)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train sac --config pendulum --seed 1 --run-dir runs/sac
# rlbook evaluate runs/sac --episodes 20
# rlbook watch runs/sac --out pendulum.gif
# ```
#
# The example `examples/sac_pendulum.py` is a script of this kind.
#
# ## References
#
# - T. Haarnoja, A. Zhou, P. Abbeel, S. Levine. *Soft Actor-Critic: Off-Policy Maximum Entropy Deep
#   Reinforcement Learning with a Stochastic Actor.* ICML 2018. arXiv:1801.01290.
# - T. Haarnoja et al. *Soft Actor-Critic Algorithms and Applications.* 2018. arXiv:1812.05905.
# - S. Fujimoto, H. van Hoof, D. Meger. *Addressing Function Approximation Error in Actor-Critic
#   Methods.* ICML 2018. arXiv:1802.09477 (the smaller of two critics).
# - A. Raffin et al. RL Baselines3 Zoo, table of benchmarks (the number for Pendulum).
