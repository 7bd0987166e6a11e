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
# # Policy gradient: REINFORCE to A2C
#
# So far you have learned values and then acted on them. In this chapter you train the policy
# itself: a network outputs the probability of each action, and you change its parameters so that
# good actions become more likely. You derive the gradient of a return, see how noisy it is, and
# reduce the noise in three steps: the reward-to-go, a value network as baseline, and generalised
# advantage estimation (GAE). The result is *advantage actor-critic* (A2C), for discrete and for
# continuous actions. The figure shows five runs of it.
#
# | | |
# |---|---|
# | Papers | Williams 1992 (REINFORCE); Schulman et al. 2016 (GAE); Mnih et al. 2016 (A3C, of which A2C is the synchronous form) |
# | Observations | vectors |
# | Actions | discrete or continuous |
# | Learns | on-policy, from short rollouts of several environments |
# | Same as [DQN](dqn.ipynb) | a network that learns values by bootstrapping |
# | Different from DQN | the policy is a network of its own; no replay, no ε, no target network |

# %% tags=["hide-input"]
#| export
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from rlbook.agent import Agent, Metrics, Transition, UpdateResult, seeded_torch
from rlbook.callbacks import Callbacks
from rlbook.dqn import check_shapes, decayed, set_learning_rate
from rlbook.envs import Mistake
from rlbook.replay import storage_dtype
from rlbook.run import RunResult, train
from rlbook.settings import Config

# %% tags=["hide-input"]
import copy
import os
import time

from matplotlib import pyplot as plt

from rlbook.dqn import DQN
from rlbook.envs import make_env
from rlbook.figures import (
    COLORS,
    draw_parts,
    filmstrip,
    label_curves,
    load_result,
    made_by,
    plot_heatmap,
    plot_result,
    show_parity,
    use_style,
)

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()

# %% tags=["hide-input"]
promise = load_result("results/a2c_cartpole.json")
figure, ax = plt.subplots(figsize=(6, 3.2))
plot_result(ax, promise)
label_curves(ax, "CartPole-v1 with the shipped settings", "return of 20 greedy episodes")
plt.show()
print(made_by(promise))
finals = promise["runs"]["a2c"]["final"]
print(f"last evaluation of each of {len(finals)} seeds:", *finals)

# %% [markdown]
# ## The problem: the best policy may be random
#
# A value-based agent such as DQN has a value for each action and takes the largest. What if the best
# policy is a mixture? Sutton and Barto have a tiny example, their short corridor. There are three squares and
# a goal at the right end. Each step costs 1, and every square looks the same. In the middle square the two
# actions are swapped: *right* leads to the left.

# %%
class Corridor(gym.Env[np.ndarray, int]):
    """Three squares that look the same; in the middle one left and right are swapped."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (1,))
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, **keywords: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=keywords.get("seed"))
        self.square = 0
        return np.ones(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        forward = (action == 1) != (self.square == 1)
        self.square = self.square + 1 if forward else max(0, self.square - 1)
        return np.ones(1, np.float32), -1.0, self.square == 3, False, {}


gym.register("Corridor-v0", Corridor, max_episode_steps=100, disable_env_checker=True)

agent = DQN("Corridor-v0", seed=0, eval_every=0)
agent.learn(4_000, progress=False)
print(f"DQN, greedy: {agent.evaluate(episodes=5).mean:.0f}")
assert agent.evaluate(episodes=5).mean == -100  # cut off after 100 steps: it never arrives

# %% [markdown]
# *Always right* goes back and forth between the first two squares, *always left* stays in the first. No
# greedy policy arrives, whatever its values are. A policy that goes right with probability $p$ does, and its
# mean return follows from three linear equations, one for each square:

# %%
def corridor_return(p: float) -> float:
    """Return the mean return from the first square, if one goes right with probability p."""
    q = 1 - p
    moves = np.array([[q, p, 0], [p, 0, q], [0, q, 0]])  # from a square to a square
    return float(np.linalg.solve(np.eye(3) - moves, -np.ones(3))[0])


ps = np.linspace(0.05, 0.95, 91)
best_p = ps[np.argmax([corridor_return(p) for p in ps])]
figure, ax = plt.subplots(figsize=(5, 2.6))
ax.plot(ps, [corridor_return(p) for p in ps], color=COLORS["a2c"])
ax.plot(best_p, corridor_return(best_p), "o", color=COLORS["a2c"])
ax.set(xlabel="probability of going right", ylabel="mean return", ylim=(-70, 0))
plt.show()
print(f"best: {best_p:.2f}, with a mean return of {corridor_return(best_p):.1f}")
assert abs(best_p - 0.59) < 0.011 and abs(corridor_return(best_p) + 11.66) < 0.01

# %% [markdown]
# The curve is smooth. So give the policy a parameter, and follow the gradient uphill.
#
# ## The gradient of a return
#
# Let $\pi_\theta(a \mid s)$ be the probability of an action, with parameters $\theta$. An episode
# $s_0, a_0, r_0, s_1, a_1, \dots$ has the return $G$, and you want its mean $J(\theta)$ to rise. The
# probability of a whole episode is a product of what the policy does and what the environment does:
#
# $$P_\theta = P(s_0) \prod_t \pi_\theta(a_t \mid s_t)\, P(s_{t+1} \mid s_t, a_t)$$
#
# The mean return is a sum over all episodes, $J = \sum P_\theta\, G$. As in [Basics](basics.ipynb), the
# derivative of a probability is the probability times the derivative of its logarithm,
# $\nabla P_\theta = P_\theta \nabla \log P_\theta$. And the logarithm of the product is a sum, in which
# the environment does not depend on $\theta$ and disappears:
#
# $$\nabla J = \sum P_\theta\, G\, \nabla \log P_\theta
#   = \text{mean}\Bigl[\,G \sum_t \nabla \log \pi_\theta(a_t \mid s_t)\Bigr]$$
#
# So you can estimate the gradient from episodes alone, without knowing how the environment works. One more step
# is free. An action cannot change the rewards before it, and the mean of
# $\nabla \log \pi_\theta$ over the actions is 0, because their probabilities always add up to 1.
# So earlier rewards times $\nabla \log \pi_\theta$ add only noise, and you can replace $G$ by the
# sum of the rewards from $t$ on, the *reward-to-go* $G_t = r_t + \gamma r_{t+1} + \gamma^2 r_{t+2} + \dots$:
#
# $$\nabla J = \text{mean}\Bigl[\sum_t G_t\, \nabla \log \pi_\theta(a_t \mid s_t)\Bigr]$$
#
# (With $\gamma < 1$ this is not quite the gradient of the discounted return, which would have another factor
# $\gamma^t$ in each term. People leave it out, because it would make the late steps count for almost nothing.)
#
# PyTorch can do this if you give it a loss whose gradient it is, $-\sum_t G_t \log \pi_\theta(a_t \mid s_t)$.
# By hand, with the two doors of *Basics*, which pay 2 and 10: at $\theta = 0$ both have the probability 1/2. The
# derivative of $\log \pi$ is $-1/2$ for the left door and $+1/2$ for the right one, so the samples are
# $2 \cdot (-1/2) = -1$ and $10 \cdot 1/2 = 5$, and their mean is 2.

# %%
theta = torch.zeros((), requires_grad=True)
samples = []
for door, pay in ((0, 2.0), (1, 10.0)):
    policy = Categorical(logits=torch.stack([torch.zeros(()), theta]))  # left, right
    loss = -pay * policy.log_prob(torch.tensor(door))
    samples.append(-torch.autograd.grad(loss, theta)[0].item())
print("samples of the gradient:", samples)
assert samples == [-1.0, 5.0] and np.mean(samples) == 2.0

# %% [markdown]
# ## The policy
#
# The policy is a network from an observation to a distribution over actions. The distribution is an object of
# `torch.distributions`, with `log_prob`, `entropy` and `mode`. `validate_args=False` switches off its checks of
# the arguments, a third of the time that all this takes for a batch of 256 with four actions.
#
# - For discrete actions it is *categorical*. The network outputs a number $z_a$, a *logit*, for each action, and
#   $\pi(a \mid s) = e^{z_a} / \sum_i e^{z_i}$.
# - For continuous actions it is a *Gaussian*. The network outputs the mean $\mu$ of each action dimension; the
#   standard deviation $\sigma$ is a parameter of its own, the same in every state. Dimensions are independent,
#   so their log-probabilities add up:
#   $\log \pi(a \mid s) = \sum_i \bigl[-\tfrac12 \bigl(\tfrac{a_i - \mu_i}{\sigma_i}\bigr)^2 - \log \sigma_i
#   - \tfrac12 \log 2\pi\bigr]$. (The $\pi$ in the last term is the number, not the policy.)
#
# The hidden layers have tanh between them. Their weights start *orthogonal*: each matrix with at least as many
# outputs as inputs keeps the length of its input, times a factor, the *gain*. The gain of the last layer of the
# policy is 0.01, so all actions start with nearly the same probability and the first data is diverse.
#
# To sample from a categorical distribution, add *Gumbel* noise to each logit, $-\log(-\log u)$
# with $u$ uniform between 0 and 1, and take the largest. Each action is then the largest with
# exactly the probability of the formula. The distribution's own `sample` would do the same, but
# from PyTorch's global generator. This way the noise comes from a generator that belongs to the
# agent, so a run can be repeated.

# %%
#| export
class TanhMLP(nn.Sequential):
    """Linear layers with tanh between them, initialised orthogonally unless told otherwise."""

    def __init__(self, sizes: tuple[int, ...], last_gain: float, orthogonal: bool = True) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        super().__init__(*layers[:-1])  # none after the last layer
        if orthogonal:
            linear = [layer for layer in self if isinstance(layer, nn.Linear)]
            for layer in linear:
                nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else 2**0.5)
                nn.init.zeros_(layer.bias)


class CategoricalPolicy(nn.Module):
    """From observations to a probability for each of a few actions."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], orthogonal: bool = True
    ) -> None:
        super().__init__()
        self.mlp = TanhMLP((inputs, *hidden, actions), 0.01, orthogonal)

    def forward(self, obs: Tensor) -> Distribution:
        """Return a distribution over actions (batch,) for observations (batch, inputs)."""
        return Categorical(logits=self.mlp(obs.float()), validate_args=False)


class GaussianPolicy(nn.Module):
    """From observations to a Gaussian over actions, whose spread is the same everywhere."""

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: tuple[int, ...],
        orthogonal: bool = True,
        initial_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.mlp = TanhMLP((inputs, *hidden, actions), 0.01, orthogonal)
        self.log_std = nn.Parameter(torch.full((actions,), math.log(initial_std)))

    def forward(self, obs: Tensor) -> Distribution:
        """Return a distribution over actions (batch, dimensions)."""
        mean = self.mlp(obs.float())
        gaussian = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        return Independent(gaussian, 1, validate_args=False)  # log_prob sums over the dimensions


def sample_action(distribution: Distribution, generator: np.random.Generator) -> Tensor:
    """Sample an action for each observation, with the randomness of `generator`."""
    if isinstance(distribution, Categorical):
        logits = distribution.logits
        noise = generator.gumbel(size=logits.shape).astype(np.float32)
        return (logits + torch.from_numpy(noise).to(logits.device)).argmax(dim=-1)
    parts = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(parts, Normal):
        mean = parts.mean
        noise = generator.standard_normal(mean.shape, dtype=np.float32)
        return mean + parts.stddev * torch.from_numpy(noise).to(mean.device)
    with seeded_torch(int(generator.integers(2**32))):  # of another kind, in a policy of your own
        return distribution.sample()

# %% [markdown]
# By hand: the logits $0$ and $\log 3$ are the probabilities $1/4$ and $3/4$. A Gaussian with mean 0 and
# $\sigma = 2$ in two dimensions gives the action $(0, 2)$ the log-probability
# $-\tfrac12 - 2 \log 2 - \log 2\pi = -3.724$. And the gains: a first layer of four inputs with the gain
# $\sqrt 2$ makes each input $\sqrt 2$ times as long.

# %%
distribution = Categorical(logits=torch.tensor([[0.0, math.log(3)]]))
assert torch.allclose(distribution.probs, torch.tensor([[0.25, 0.75]]))
many = Categorical(logits=distribution.logits.expand(10_000, 2))
share = sample_action(many, np.random.default_rng(0)).float().mean()
print(f"sampled action 1 in {share:.1%} of 10,000")
assert abs(share - 0.75) < 0.02

gaussian = GaussianPolicy(inputs=3, actions=2, hidden=(8,), initial_std=2.0)
nn.init.zeros_(gaussian.mlp[-1].weight)  # so that the mean is 0
log_prob = gaussian(torch.randn(1, 3)).log_prob(torch.tensor([[0.0, 2.0]]))
assert log_prob.shape == (1,) and abs(log_prob.item() + 3.724) < 1e-3

policy = CategoricalPolicy(inputs=4, actions=2, hidden=(64, 64))
obs = torch.randn(5, 4)
torch.testing.assert_close((obs @ policy.mlp[0].weight.t()).norm(dim=1), 2**0.5 * obs.norm(dim=1))
assert (policy(obs).probs - 0.5).abs().max() < 0.05  # undecided

# %% [markdown]
# ## REINFORCE, the whole algorithm
#
# Play an episode, compute the reward-to-go of each step, make a gradient step, and forget the episode: the next
# one comes from another policy. That is REINFORCE (Williams 1992).

# %%
def rewards_to_go(rewards: list[float], gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each step on."""
    sums = torch.tensor(rewards)
    for t in reversed(range(len(rewards) - 1)):
        sums[t] += gamma * sums[t + 1]
    return sums


assert rewards_to_go([1.0, 1.0, 4.0], gamma=0.5).tolist() == [2.5, 3.0, 4.0]


def play(env: gym.Env, policy: nn.Module, generator: np.random.Generator) -> tuple[Tensor, Tensor, list]:
    """Play one episode; return observations, actions and rewards."""
    observations, actions, rewards = [], [], []
    (obs, _), ended = env.reset(), False
    while not ended:
        with torch.no_grad():
            action = int(sample_action(policy(torch.from_numpy(obs)), generator))
        observations.append(obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        rewards.append(float(reward))
        ended = terminated or truncated
    return torch.from_numpy(np.array(observations)), torch.tensor(actions), rewards


def reinforce(
    env_id: str, policy: nn.Module, steps: int, gamma: float, lr: float, seed: int = 0
) -> list[list]:
    """Train a policy for some steps; return the rewards of each episode."""
    env, generator, history = make_env(env_id), np.random.default_rng(seed), []
    env.reset(seed=seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    while sum(map(len, history)) < steps:
        obs, action, rewards = play(env, policy, generator)
        loss = -(policy(obs).log_prob(action) * rewards_to_go(rewards, gamma)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(rewards)
    return history

# %% [markdown]
# First the corridor, where no greedy policy arrives. The policy has one input that never changes, so it is one
# number, the probability of going right. Start it far from the best, at about 0.18:

# %%
torch.manual_seed(0)
lost = CategoricalPolicy(inputs=1, actions=2, hidden=())
nn.init.constant_(lost.mlp[-1].bias[1], -1.5)  # 1 / (1 + e^1.5) = 0.18
p_before = lost(torch.ones(1, 1)).probs[0, 1].item()
history = reinforce("Corridor-v0", lost, steps=12_000, gamma=1.0, lr=0.01)
p = lost(torch.ones(1, 1)).probs[0, 1].item()
for when, x in (("before", p_before), ("after", p)):
    print(f"{when:>6}: right with probability {x:.2f}, mean return {corridor_return(x):.1f}")
assert corridor_return(p_before) < -20 and corridor_return(p) > -15

# %% [markdown]
# It climbs nearly to the top. It need not stop exactly at 0.59, because the curve is flat there:
# a policy that is a little off loses almost nothing, and its gradient is small.
#
# Then CartPole, with two hidden layers and 50,000 steps:

# %%
torch.manual_seed(1)
policy = CategoricalPolicy(inputs=4, actions=2, hidden=(64, 64))
beginner = copy.deepcopy(policy)
history = reinforce("CartPole-v1", policy, steps=50_000, gamma=0.98, lr=1e-3)
reinforce_returns = [sum(rewards) for rewards in history]
print(f"{len(history)} episodes; mean return of the last 20: {np.mean(reinforce_returns[-20:]):.0f}")
assert np.mean(reinforce_returns[-20:]) > 40  # random play gets about 22

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 2.8))
ax.plot(np.cumsum(reinforce_returns), reinforce_returns, ".", color=COLORS["reference"], markersize=3)
label_curves(ax, "REINFORCE on CartPole", "return of each episode")
plt.show()

# %% [markdown]
# It learns, and then it falls back from a mean of over 300 to about 100. One likely reason is
# noise: each step follows the gradient of a single episode.
#
# ## How noisy is it?
#
# Take one policy that has learned a little, and do not change it. Play 150 episodes, and compute the gradient
# from each of them alone. Every one of these is a fair sample of the same gradient, so you would like them to
# agree.
#
# A **baseline** makes them agree more. [Basics](basics.ipynb) has shown it for two doors: subtract a number
# that does not depend on the action, and the mean stays the same, because the mean of $\nabla \log \pi$ is 0. A good
# baseline is the return that you expect from this state whatever you do next: its value. So learn $V(s)$, a
# second network, by regression on the rewards-to-go, and weigh each action by its **advantage**: how much better
# did it turn out than expected?
#
# $$A_t = G_t - V(s_t)$$

# %%
#| export
class ValueNetwork(nn.Module):
    """From observations to the value of the state."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], orthogonal: bool = True) -> None:
        super().__init__()
        self.mlp = TanhMLP((inputs, *hidden, 1), 1.0, orthogonal)

    def forward(self, obs: Tensor) -> Tensor:
        """Return values (batch,) of observations (batch, inputs)."""
        return self.mlp(obs.float()).squeeze(-1)

# %%
def fit_values(obs: Tensor, returns: Tensor, steps: int = 300) -> nn.Module:
    """Train a value network on rewards-to-go."""
    network = ValueNetwork(inputs=obs.shape[1], hidden=(64, 64))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = (network(obs) - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def gradient(policy: nn.Module, obs: Tensor, action: Tensor, weight: Tensor) -> np.ndarray:
    """Return the gradient of one episode as a vector."""
    loss = -(policy(obs).log_prob(action) * weight).sum()
    return -torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.parameters())]).numpy()


fixed = copy.deepcopy(beginner)
reinforce("CartPole-v1", fixed, steps=5_000, gamma=0.98, lr=1e-3)
env, generator = make_env("CartPole-v1"), np.random.default_rng(1)
env.reset(seed=1)
episodes = [play(env, fixed, generator) for _ in range(150)]
to_go = [rewards_to_go(rewards, 0.98) for _, _, rewards in episodes]
value = fit_values(torch.cat([obs for obs, _, _ in episodes]), torch.cat(to_go))
weights = {
    "whole return": [sums[0].expand(len(sums)) for sums in to_go],
    "reward-to-go": to_go,
    "advantage": [
        sums - value(obs).detach() for (obs, _, _), sums in zip(episodes, to_go, strict=True)
    ],
}
gradients = {
    name: np.array([gradient(fixed, obs, a, w) for (obs, a, _), w in zip(episodes, rows, strict=True)])
    for name, rows in weights.items()
}  # (episodes, parameters) each

# %% tags=["hide-input"]
mean = gradients["advantage"].mean(axis=0)
along = mean / np.linalg.norm(mean)
rest = gradients["whole return"] - np.outer(gradients["whole return"] @ along, along)
across = np.linalg.svd(rest - rest.mean(axis=0), full_matrices=False)[2][0]
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharex=True, sharey=True)
noise = {}
for ax, (name, rows) in zip(axes, gradients.items(), strict=True):
    noise[name] = np.sqrt(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean())
    ax.plot(rows @ across, rows @ along, ".", color=COLORS["a2c"], alpha=0.6, markersize=4)
    ax.annotate("", (0, 5 * mean @ along), (0, 0), arrowprops={"arrowstyle": "-|>", "lw": 2.5, "color": COLORS["drqn"]})
    ax.set(title=f"{name}: spread {noise[name]:.0f}", xlabel="across (main direction of noise)")
axes[0].set_ylabel("along the mean gradient")
plt.show()
print(f"length of the mean gradient (the arrow is five times as long): {np.linalg.norm(mean):.1f}")
assert noise["whole return"] > noise["reward-to-go"] > noise["advantage"]

# %% [markdown]
# Each dot is the gradient of one episode, seen in two of its several thousand dimensions; the orange
# arrow is five times the mean of the advantage gradients, the same in all panels. The spread, the
# root mean squared distance from the mean over all dimensions, is in the titles. With the whole
# return, an episode's gradient has little to do with the mean. The reward-to-go helps, and the
# advantage helps more.
#
# ## Generalised advantage estimation
#
# The advantage $G_t - V(s_t)$ still adds up the noise of all rewards to the end of the episode. Bootstrapping
# cuts that short: the TD error
#
# $$\delta_t = r_t + \gamma\,(1 - \texttt{terminated}_t)\,V(s_{t+1}) - V(s_t)$$
#
# is an estimate of the advantage from one step. It has little noise, and it is wrong wherever $V$ is wrong.
# Between the two there is a whole family. Generalised advantage estimation (Schulman et al. 2016) sums the
# TD errors from $t$ on, with weights that shrink by the factor $\gamma\lambda$ at each step:
#
# $$\hat A_t = \delta_t + \gamma\lambda\, \delta_{t+1} + (\gamma\lambda)^2\, \delta_{t+2} + \dots$$
#
# With $\lambda = 0$ it is the TD error. With $\lambda = 1$ the values in the middle cancel, and it is the
# reward-to-go minus the value.
#
# The sum stops in three cases. If the step **terminated**, nothing follows, and $\delta_t$ has no
# next value. If the episode was **truncated**, it would have gone on: $\delta_t$ contains the
# value of the true last observation. (A time limit truncates, and so does a checkpoint, which
# resets all environments.) If the **rollout**, the fixed number of steps that the agent learns
# from at a time, is full, the last step counts like a truncated one.
#
# By hand: $\gamma = 1$, $\lambda = 0.5$, the rewards 1, 1, 3 and the values 2, 3, 1. If the last step
# terminated, the TD errors are $1 + 3 - 2 = 2$, $1 + 1 - 3 = -1$ and $3 - 1 = 2$. From the back:
# $\hat A_2 = 2$, $\hat A_1 = -1 + 0.5 \cdot 2 = 0$, $\hat A_0 = 2 + 0.5 \cdot 0 = 2$. If it was truncated at an
# observation with the value 4, the last TD error is $3 + 4 - 1 = 6$, and the advantages are 3, 2 and 6.

# %%
#| export
def gae(
    reward: Tensor,  # (time, envs), and so are all others
    value: Tensor,  # of the observation
    next_value: Tensor,  # of the true next observation, also where the episode was cut off
    terminated: Tensor,
    ended: Tensor,  # terminated or cut off: what follows belongs to another episode
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Return the advantages (time, envs): TD errors, summed with the weights (gamma lambda)^k."""
    arguments = {"value": value, "next_value": next_value, "terminated": terminated, "ended": ended}
    for name, tensor in arguments.items():
        if tensor.shape != reward.shape or reward.ndim != 2:
            shapes = f"{tuple(tensor.shape)} and {tuple(reward.shape)}"
            raise ValueError(f"{name} and reward must both be (time, envs), not {shapes}.")
    td_error = reward + gamma * next_value * ~terminated - value
    advantage = torch.zeros_like(td_error)
    following = torch.zeros_like(td_error[0])  # the advantage one step later
    for t in reversed(range(len(td_error))):
        following = td_error[t] + gamma * gae_lambda * following * ~ended[t]
        advantage[t] = following
    return advantage

# %%
def column(*numbers: float) -> Tensor:
    """Return numbers as (time, 1)."""
    return torch.tensor(numbers).unsqueeze(1)


steps_by_hand = {"reward": column(1, 1, 3), "value": column(2, 3, 1), "next_value": column(3, 1, 4)}
no, last = column(0, 0, 0).bool(), column(0, 0, 1).bool()
terminates = gae(**steps_by_hand, terminated=last, ended=last, gamma=1.0, gae_lambda=0.5)
truncates = gae(**steps_by_hand, terminated=no, ended=last, gamma=1.0, gae_lambda=0.5)
print("terminated:", terminates.flatten().tolist(), " truncated:", truncates.flatten().tolist())
assert terminates.flatten().tolist() == [2, 0, 2] and truncates.flatten().tolist() == [3, 2, 6]

# %% [markdown]
# Which $\lambda$? Try it where the truth is known. A walker on seven squares steps left or right at random;
# beyond the right end it gets 1, beyond the left end 0. The value of square $k$ is $k/8$. In the middle a step
# to the right leads from $4/8$ to $5/8$, so its advantage is $1/8$. Now let the value network be half trained: its
# value is correct for the middle square, but every difference from there is only half as large as it should be.
# Take 4,000 walks that begin with a step to the right, and estimate that advantage.

# %%
def random_walks(count: int, length: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the middle, first to the right; return squares, next squares and ends."""
    rng = np.random.default_rng(0)
    steps = rng.choice([-1, 1], size=(length, count))
    steps[0] = 1
    after = 4 + np.cumsum(steps, axis=0)  # as if there were no ends
    before = after - steps
    over = (after <= 0) | (after >= 8)
    return tuple(torch.from_numpy(x) for x in (before, after, over))


before, after, over = random_walks(4_000)
half_trained = {"value": 0.5 + 0.5 * (before / 8 - 0.5), "next_value": 0.5 + 0.5 * (after / 8 - 0.5)}
paid = (after == 8).double() * over
lambdas = np.linspace(0, 1, 21)
estimates = np.array([
    gae(paid, **half_trained, terminated=over, ended=over, gamma=1.0, gae_lambda=lam)[0].numpy()
    for lam in lambdas
])  # (lambdas, walks)
bias, variance = estimates.mean(axis=1) - 1 / 8, estimates.var(axis=1)

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(lambdas, bias**2, "--", color=COLORS["sac"], label="bias²")
ax.plot(lambdas, variance / 50, ":", color=COLORS["dqn"], label="variance of a mean of 50")
error = bias**2 + variance / 50
ax.plot(lambdas, error, color=COLORS["reference"], label="sum: mean squared error")
ax.plot(lambdas[error.argmin()], error.min(), "o", color=COLORS["reference"])
ax.set(xlabel="λ", ylabel="squared error of the advantage")
ax.legend()
plt.show()
print(f"λ = 0: bias {bias[0]:+.3f}; λ = 1: bias {bias[-1]:+.3f}; best λ here: {lambdas[error.argmin()]:.2f}")
assert abs(bias[0] + 1 / 16) < 1e-6 and abs(bias[-1]) < 0.03 and 0 < error.argmin() < 20

# %% [markdown]
# At $\lambda = 0$ the estimate is $1/16$, half of the truth, with no noise at all. At
# $\lambda = 1$ it is right on average, but a single estimate is off by about a half. With a small
# batch of 50 samples the best $\lambda$ is in between. A better value network makes it smaller, a
# larger batch makes it larger. In practice people use 0.9 to 0.98.
#
# ## The rollout buffer
#
# A replay buffer is of no use here, since old steps come from an old policy. So the agent collects a *rollout*,
# `num_steps` steps of each of `num_envs` environments, learns from it, and throws it away. The environments are
# at different points of their episodes, which makes a batch diverse.
#
# The buffer is a set of arrays of the shape (time, envs, …). It stores the action *as it was
# sampled*: a Gaussian may sample a torque of 2.7 where the environment allows 2. The environment
# gets 2, but the log-probability has to be that of 2.7, because this is what the policy did. It
# stores both `terminated` and `ended`, as `gae` needs them. One case is easy to overlook: if you
# change the environment between two calls of `learn`, the second call starts new episodes, and the
# last step of the old ones was never marked as an end. The buffer sees it in the next step, which is
# marked as the first of its episode.

# %%
#| export
class RolloutBuffer:
    """The steps of all environments since the last update, in their order."""

    arrays: tuple[str, ...] = ("obs", "next_obs", "action", "reward", "terminated", "ended")

    def __init__(
        self, num_steps: int, num_envs: int, observation_space: gym.Space, action_space: gym.Space
    ) -> None:
        def zeros(dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
            return np.zeros((num_steps, num_envs, *shape), dtype)

        self.obs = zeros(*storage_dtype(observation_space))
        self.next_obs = zeros(*storage_dtype(observation_space))
        self.action = zeros(*storage_dtype(action_space))
        self.reward = zeros(np.float32)
        self.terminated, self.ended = zeros(np.bool_), zeros(np.bool_)
        self.size = 0  # steps of each environment so far

    @property
    def full(self) -> bool:
        """Whether it is time to learn."""
        return self.size == len(self.reward)

    def add(self, transition: Transition, action: np.ndarray, reward: np.ndarray) -> None:
        """Store one step of all environments, with the action as it was sampled."""
        if self.full:
            raise ValueError("The rollout is full: learn from it and clear it before you go on.")
        t = self.size
        if t > 0:  # `learn` may start new episodes without an end of the old ones
            self.ended[t - 1] |= transition.episode_start
        self.obs[t], self.next_obs[t] = transition.obs, transition.next_obs
        self.action[t], self.reward[t] = action, reward
        self.terminated[t] = transition.terminated
        self.ended[t] = transition.terminated | transition.truncated
        self.size += 1

    def clear(self) -> None:
        """Drop the steps: they were chosen by a policy that has changed since."""
        self.size = 0

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return all arrays (time, envs, ...) by name as tensors of their own."""
        return {name: torch.tensor(getattr(self, name), device=device) for name in self.arrays}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far."""
        stored = {name: torch.from_numpy(getattr(self, name)) for name in self.arrays}
        return {**stored, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the stored steps."""
        for name in self.arrays:
            here, stored = getattr(self, name), state[name].cpu().numpy()
            if here.shape != stored.shape:
                raise ValueError(f"A rollout of {stored.shape} was stored, not {here.shape}.")
            here[:] = stored
        self.size = state["size"]


@dataclass
class RolloutBatch:
    """Steps of a rollout as tensors, with what they turned out to be worth."""

    obs: Tensor  # (batch, ...)
    action: Tensor  # (batch,) or (batch, dimensions), as sampled
    advantage: Tensor  # (batch,)
    returns: Tensor  # (batch,), what the value network is trained towards
    log_prob: Tensor  # (batch,), when the action was taken
    value: Tensor  # (batch,), when the action was taken

    def __getitem__(self, indices: Tensor | slice) -> Self:
        """Choose some of the steps."""
        return type(self)(*(getattr(self, name)[indices] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.advantage)

# %% [markdown]
# By hand: two environments and three steps. In the first environment the episode terminates at the second
# step; in the second one a new episode begins at the third step, although no end was reported.

# %%
rollout = RolloutBuffer(3, 2, gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2))
quiet = np.zeros(2, bool)
starts, terminations = (quiet, quiet, np.array([True, True])), (quiet, np.array([True, False]), quiet)
for t, (start, terminated) in enumerate(zip(starts, terminations, strict=True)):
    obs = np.full((2, 1), t)
    step = Transition(obs=obs, action=quiet, reward=np.ones(2), next_obs=obs + 1, terminated=terminated,
                      truncated=quiet, episode_start=start, state=None)
    rollout.add(step, action=np.array([0, 1]), reward=step.reward)
print("terminated:", rollout.terminated.tolist(), " ended:", rollout.ended.tolist())
assert rollout.full and rollout.obs.shape == (3, 2, 1)
assert rollout.ended.tolist() == [[False, False], [True, True], [False, False]]

# %% [markdown]
# ## The loss
#
# The policy, also called the *actor*, and the value network, the *critic*, learn together from a
# rollout, with one loss:
#
# $$L = \underbrace{-\operatorname{mean}\bigl[\hat A \log \pi_\theta(a \mid s)\bigr]}_{\text{policy loss}}
#  + c_V \underbrace{\operatorname{mean}\bigl[(V(s) - y)^2\bigr]}_{\text{value loss}}
#  - c_H \underbrace{\operatorname{mean}\bigl[H(\pi_\theta(\cdot \mid s))\bigr]}_{\text{entropy}}$$
#
# The value network is trained towards $y = \hat A + V(s)$, with the $V$ from before the update, a bootstrapped
# estimate of the return. The *entropy* $H = -\sum_a \pi(a \mid s) \log \pi(a \mid s)$ says how undecided the policy
# is: $\log 2 = 0.69$ for two equally likely actions, 0 for a certain one. (The unit is the *nat*, since the logarithm
# is the natural one.) A small bonus for it keeps the policy from deciding too soon. Advantages may be *normalised*,
# so that a batch has the mean 0 and the standard deviation 1, and the size of the gradient does not depend on the
# size of the rewards.
#
# One number is there to watch: the *explained variance*
# $1 - \operatorname{var}(y - V) / \operatorname{var}(y)$. It is 1 if the values predict the returns, and 0 if they
# do no better than a constant.
#
# By hand: two steps with $\log \pi = -1$ and $-2$, advantages 1 and $-1$, values 2 and 4, returns 3 and 3. The
# policy loss is $-(-1 + 2)/2 = -0.5$, the value loss $(1 + 1)/2 = 1$. With an entropy of 0.6, $c_V = 0.5$ and
# $c_H = 0.1$ the loss is $-0.5 + 0.5 - 0.06 = -0.06$. And the advantages 1, 2, 3, 6 have the mean 3 and the
# standard deviation $\sqrt{(4 + 1 + 0 + 9)/4} = 1.871$.

# %%
#| export
def normalize(advantage: Tensor) -> Tensor:
    """Shift and scale advantages (batch,) to mean 0 and standard deviation 1."""
    return (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """Say how much of the returns the values explain: 1 for all, 0 for no more than their mean."""
    unexplained = (returns - value).var(correction=0)
    return 1 - unexplained / returns.var(correction=0).clamp(min=1e-8)


def a2c_loss(
    log_prob: Tensor,  # (batch,), of the actions that were taken, with gradient
    entropy: Tensor,  # (batch,), of the policy, with gradient
    value: Tensor,  # (batch,), with gradient
    advantage: Tensor,  # (batch,)
    returns: Tensor,  # (batch,)
    value_coefficient: float,
    entropy_coefficient: float,
) -> tuple[Tensor, Metrics]:
    """Return the loss of policy and value network together, and metrics."""
    vectors = {"entropy": entropy, "value": value, "advantage": advantage, "returns": returns}
    check_shapes(len(log_prob), log_prob=log_prob, **vectors)
    policy_loss = -(log_prob * advantage).mean()
    value_loss = (value - returns).square().mean()
    loss = policy_loss + value_coefficient * value_loss - entropy_coefficient * entropy.mean()
    return loss, {
        "loss": loss.detach(),
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach().mean(),
        "explained_variance": explained_variance(value.detach(), returns),
    }

# %%
loss, metrics = a2c_loss(
    log_prob=torch.tensor([-1.0, -2.0]), entropy=torch.tensor([0.6, 0.6]),
    value=torch.tensor([2.0, 4.0]), advantage=torch.tensor([1.0, -1.0]), returns=torch.tensor([3.0, 3.0]),
    value_coefficient=0.5, entropy_coefficient=0.1,
)
torch.testing.assert_close(loss, torch.tensor(-0.06))
assert metrics["policy_loss"] == -0.5 and metrics["value_loss"] == 1
assert torch.allclose(normalize(torch.tensor([1.0, 2.0, 3.0, 6.0])), (torch.tensor([-2.0, -1, 0, 3])) / 1.871, atol=1e-3)
assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])) == 0.75

# %% [markdown]
# One bad batch should not throw the policy far away. So a gradient that is longer than `max_grad_norm` is shortened
# to it, and keeps its direction. By hand: the gradient $(3, 4)$ has the norm 5; with a limit of 0.5 it becomes
# $(0.3, 0.4)$. One norm is taken over all parameters of the optimiser together.

# %%
#| export
def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    """Shorten the gradient of all parameters together to `max_norm`, if it is longer."""
    if max_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)

# %%
weight = nn.Parameter(torch.zeros(2))
weight.grad = torch.tensor([3.0, 4.0])
clip_gradients(torch.optim.Adam([weight]), max_norm=0.5)
torch.testing.assert_close(weight.grad, torch.tensor([0.3, 0.4]))

# %% [markdown]
# ## Settings
#
# [Settings](settings.ipynb) says how each becomes a keyword, a key in YAML and a flag. All agents
# that learn from rollouts share the first class; the second adds what the loss of A2C needs.
# `bootstrap_truncated` is a setting only so that you can measure what it is worth; leave it on.

# %%
#| export
class RolloutConfig(Config):
    """The settings of agents that learn from rollouts."""

    num_envs: int = Field(default=8, ge=1, description="Environments that step side by side.")
    num_steps: int = Field(default=16, ge=1, description="Steps of each environment in a rollout.")
    gamma: float = Field(
        default=0.99, ge=0, le=1, description="Discount of a reward one step later."
    )
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="Weight of later TD errors in an advantage."
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each hidden layer, of both networks."
    )
    orthogonal_init: bool = Field(
        default=True, description="Orthogonal initial weights, small in the policy's last layer."
    )
    initial_std: float = Field(
        default=1.0, gt=0, description="Standard deviation of continuous actions at the start."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    lr_decay_from: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the run after which lr falls to 0."
    )
    normalize_advantages: bool = Field(
        default=False, description="Give the advantages of a batch mean 0 and deviation 1."
    )
    reward_scale: float = Field(default=1.0, gt=0, description="Factor of each reward.")
    bootstrap_truncated: bool = Field(
        default=True, description="Whether an episode that was cut off still has a future."
    )

    @property
    def rollout_size(self) -> int:
        """The steps of all environments in a rollout."""
        return self.num_steps * self.num_envs

    @model_validator(mode="after")
    def check_rollout(self) -> Self:
        """Raise where normalised advantages would all be 0."""
        if self.normalize_advantages and self.rollout_size == 1:
            raise ValueError(
                "Setting 'normalize_advantages' needs a rollout of at least two steps: raise "
                "'num_steps' or 'num_envs'."
            )
        return self

    def lr_now(self, step: int) -> float:
        """Return the learning rate at a step."""
        return decayed(self.lr, step / self.total_steps, self.lr_decay_from)


class A2CConfig(RolloutConfig):
    """The settings of A2C."""

    value_coefficient: float = Field(default=0.5, ge=0, description="Weight of the value loss.")
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the entropy bonus."
    )
    max_grad_norm: float | None = Field(
        default=0.5, gt=0, description="Longer gradients are shortened to this norm."
    )

# %% [markdown]
# ## The agent
#
# All pieces are there. `act` samples from the policy and keeps the sample for `observe`;
# without exploring, which is what *greedy* means here, it takes the likeliest action. `observe`
# fills the rollout. `batches` yields nothing until the rollout is full, and
# then all of it once. The networks do not change while a rollout is collected, so `finish_rollout` can compute
# values and log-probabilities of all its steps in one forward pass at the end.
#
# | step | equation | in the code |
# |---|---|---|
# | 1 | $a_t \sim \pi_\theta(\cdot \mid s_t)$, for `num_steps` steps of all environments | `act`, `observe` |
# | 2 | $\delta_t$, $\hat A_t$ and $y_t = \hat A_t + V(s_t)$ | `finish_rollout`, `gae` |
# | 3 | $L$ and its gradient | `compute_gradients`: `forward`, `a2c_loss`, `loss.backward()` |
# | 4 | $\theta \leftarrow$ a step of Adam, with a gradient of at most `max_grad_norm` | `update` |
#
# The setting `compile` compiles `compute_gradients`. `RolloutBatch` also carries the log-probabilities and
# values of collection time. A2C does not need them for its one step, but algorithms that reuse a rollout do.

# %%
#| export
def warn_of_bounds(env_id: Any, space: gym.spaces.Box, std: float) -> None:
    """Say so if a Gaussian at 0 with this deviation hardly ever falls within the bounds."""
    if (space.low > 3 * std).any() or (space.high < -3 * std).any():
        advice = "wrap it in gymnasium.wrappers.RescaleAction(env, -1, 1)"
        warnings.warn(
            f"{env_id!r} has actions in {space}, and the policy starts around 0: {advice}.",
            stacklevel=2,
        )


class A2C(Agent):
    """A policy that learns from the advantages of its own actions."""

    name: ClassVar[str] = "a2c"
    config_class: ClassVar[type[Config]] = A2CConfig
    actions: ClassVar[str] = "discrete or continuous"
    parts: ClassVar[tuple[str, ...]] = ("policy", "value_network", "optimizer", "rollout")
    compiled: ClassVar[tuple[str, ...]] = ("compute_gradients",)
    config: A2CConfig
    observation_space: gym.spaces.Box
    action_space: gym.spaces.Discrete | gym.spaces.Box
    sampled: np.ndarray = np.empty(0)  # the last actions in a Box, before they were clipped
    clipped: np.ndarray = np.empty(0)  # and as the environments got them

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        config, space = self.config, self.action_space
        if isinstance(space, gym.spaces.Box) and np.dtype(space.dtype).kind != "f":
            raise ValueError(f"{config.env_id!r} has actions that are not real numbers ({space}).")
        if isinstance(space, gym.spaces.Box):
            warn_of_bounds(config.env_id, space, config.initial_std)
        self.policy = self.make_policy().to(self.device)
        self.value_network = self.make_value_network().to(self.device)
        parameters = [*self.policy.parameters(), *self.value_network.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=1e-5, fused=True)
        self.rollout = RolloutBuffer(
            config.num_steps, config.num_envs, self.observation_space, space
        )

    def make_policy(self) -> nn.Module:
        """Make a network from observations (batch, inputs) to a distribution over actions."""
        config, space, (inputs,) = self.config, self.action_space, self.observation_space.shape
        if isinstance(space, gym.spaces.Discrete):
            return CategoricalPolicy(inputs, int(space.n), config.hidden, config.orthogonal_init)
        (actions,), std = space.shape, config.initial_std
        return GaussianPolicy(inputs, actions, config.hidden, config.orthogonal_init, std)

    def make_value_network(self) -> nn.Module:
        """Make a network from observations (batch, inputs) to values (batch,)."""
        (inputs,) = self.observation_space.shape
        return ValueNetwork(inputs, self.config.hidden, self.config.orthogonal_init)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Sample from the policy, or take the likeliest action."""
        distribution = self.policy(torch.as_tensor(obs, device=self.device))
        return self.choose(distribution, explore), state

    def choose(self, distribution: Distribution, explore: bool) -> np.ndarray:
        """Return actions as the environments want them, and remember them as they were sampled."""
        action = sample_action(distribution, self.generator) if explore else distribution.mode
        chosen = action.cpu().numpy()
        if isinstance(self.action_space, gym.spaces.Discrete):
            return chosen + self.action_space.start
        low, high, dtype = self.action_space.low, self.action_space.high, self.action_space.dtype
        clipped = np.clip(chosen, low, high).astype(dtype)
        if explore:
            self.sampled, self.clipped = chosen, clipped
        return clipped

    def as_sampled(self, action: np.ndarray) -> np.ndarray:
        """Return the actions of the environments as they were sampled from the policy."""
        if isinstance(self.action_space, gym.spaces.Discrete):
            return action - self.action_space.start
        if not np.array_equal(action, self.clipped, equal_nan=True):  # `update` finds a NaN
            raise Mistake(
                f"The actions that {self.name} observes are not those that it sampled last: "
                "let a `copy.deepcopy` of it play elsewhere while it learns."
            )
        return self.sampled

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments."""
        action, reward = self.as_sampled(transition.action), transition.reward
        self.rollout.add(transition, action, reward * self.config.reward_scale)

    @torch.no_grad()
    def finish_rollout(self) -> RolloutBatch:
        """Compute advantages and returns of the rollout, with the networks that collected it."""
        steps = self.rollout.tensors(self.device)
        obs, next_obs, action = (steps[n].flatten(0, 1) for n in ("obs", "next_obs", "action"))
        value, next_value = self.value_network(obs), self.value_network(next_obs)  # (batch,)
        advantage = self.advantages(steps, value, next_value)
        log_prob = self.policy(obs).log_prob(action)
        return RolloutBatch(obs, action, advantage, advantage + value, log_prob, value)

    def advantages(self, steps: dict[str, Tensor], value: Tensor, next_value: Tensor) -> Tensor:
        """Return the advantages (batch,) of a rollout from the values (batch,) of its steps."""
        config, terminated, ended = self.config, steps["terminated"], steps["ended"]
        if not config.bootstrap_truncated:
            terminated = ended  # as if nothing could follow
        return gae(
            steps["reward"],
            value.view_as(ended),
            next_value.view_as(ended),
            terminated,
            ended,
            config.gamma,
            config.gae_lambda,
        ).flatten()

    def batches(self) -> Iterator[RolloutBatch]:
        """Yield each rollout once, when it is full."""
        if self.rollout.full:
            yield self.finish_rollout()
            self.rollout.clear()

    def forward(self, batch: RolloutBatch) -> tuple[Distribution, Tensor]:
        """Return the policy and the values (batch,) at the steps of a batch."""
        return self.policy(batch.obs), self.value_network(batch.obs)

    def compute_gradients(self, batch: RolloutBatch) -> Metrics:
        """Backpropagate the loss of a batch."""
        config, advantage = self.config, batch.advantage
        if config.normalize_advantages:
            advantage = normalize(advantage)
        distribution, value = self.forward(batch)
        loss, metrics = a2c_loss(
            distribution.log_prob(batch.action),
            distribution.entropy(),
            value,
            advantage,
            batch.returns,
            config.value_coefficient,
            config.entropy_coefficient,
        )
        loss.backward()
        return metrics

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Make one gradient step of both networks."""
        config = self.config
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch)
        clip_gradients(self.optimizer, config.max_grad_norm)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        return UpdateResult(metrics)

    @torch.no_grad()
    def values(self, obs: np.ndarray) -> np.ndarray:
        """Return the values (batch,) of observations (batch, inputs), as `act` gets them."""
        return self.value_network(torch.as_tensor(obs, device=self.device)).cpu().numpy()

    @torch.no_grad()
    def probabilities(self, obs: np.ndarray) -> np.ndarray:
        """Return the probability of each action (batch, actions), given what `act` gets."""
        distribution = self.policy(torch.as_tensor(obs, device=self.device))
        if not isinstance(distribution, Categorical):
            raise ValueError("Continuous actions have a density, not a list of probabilities.")
        return distribution.probs.cpu().numpy()


def train_a2c(config: A2CConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train A2C with these settings."""
    return train(A2C(config=config), progress, callbacks)

# %% [markdown]
# ## Does it compute the right values?
#
# The tiny environments with known values, as in [DQN](dqn.ipynb): two steps with a reward at the end are worth
# $\gamma$ and 1; a reward of 1 for ever, cut off every 10 steps, is worth $1/(1-\gamma) = 10$ for $\gamma = 0.9$.
# The second would fail if a truncated step counted as terminated. In the third, with continuous actions, the best
# action is known: at the observation $x$ the action $x/2$ pays most.

# %%
PROBE: dict[str, Any] = {"hidden": (16,), "num_steps": 8, "lr": 1e-2, "gamma": 0.9, "eval_every": 0}


def learned(env_id: str, steps: int, **settings: Any) -> A2C:
    """Train A2C on a tiny environment."""
    agent = A2C(env_id, **{**PROBE, **settings})
    agent.learn(steps, progress=False)
    return agent


two = learned("rlbook/TwoStep-v0", 6_000).values(np.array([[-1.0], [0.0]], np.float32))
forever = learned("rlbook/ConstantReward-v0", 16_000).values(np.ones((1, 1), np.float32))
real = learned("rlbook/ActionReward-v0", 8_000, env_kwargs={"continuous": True}, initial_std=0.5)
best = real.predict(np.array([[-1.0], [1.0]]))[0].flatten()
print("two steps:", two.round(2), " for ever:", forever.round(1), " best actions:", best.round(2))
assert np.allclose(two, [0.9, 1.0], atol=0.05) and np.allclose(forever, 10, atol=0.5)
assert np.allclose(best, [-0.5, 0.5], atol=0.15)

# %% [markdown]
# ## A live run
#
# CartPole with the shipped settings, but only the 50,000 steps that REINFORCE had above. This is how they differ
# from the defaults; with `lr_decay_from` 0 the learning rate falls to 0 over the whole run:

# %%
agent = A2C.from_config("cartpole", total_steps=50_000, seed=0)
default = A2CConfig()
print(f"{'setting':24}{'default':>10}{'this run':>10}")
for name, setting in agent.config:
    if setting != getattr(default, name):
        print(f"{name:24}{getattr(default, name)!s:>10}{setting!s:>10}")

# %%
began = time.process_time()
result = train(agent)
print(f"{time.process_time() - began:.0f} seconds of processor time, {agent.updates} updates")
steps, returns = result.curve("eval_return_mean")
assert returns.max() > 100  # whatever comes after

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.plot(steps, returns, color=COLORS["a2c"], marker="o", label="A2C, greedy")
ends, window = np.cumsum(reinforce_returns), 20
smooth = np.convolve(reinforce_returns, np.ones(window) / window, mode="valid")
left.plot(ends[window - 1 :], smooth, color=COLORS["reference"], label="REINFORCE, mean of 20 episodes")
label_curves(left, "CartPole-v1, one seed each")
left.set(ylim=(0, 660))
left.legend(loc="upper left")
right.plot(*result.curve("explained_variance"), color=COLORS["a2c"], label="explained variance")
right.plot(*result.curve("entropy"), "--", color=COLORS["a2c"], label="entropy (nats)")
label_curves(right, ylabel="")
right.set(ylim=(-0.2, 1.05))
right.legend()
plt.show()

# %% [markdown]
# One seed each, with the same number of steps and the same policy network; A2C is evaluated
# greedily, REINFORCE as it explored. REINFORCE rises as fast for 15,000 steps and collapses at
# about 32,000. It made 405 gradient steps, one after each episode. A2C made 97, each from a
# rollout of 512 steps, 64 of each environment. On the right, the policy becomes more certain as
# it learns. But the explained variance stays near 0: after 97 updates the value network is little
# better than a constant. Its values are also far too low. A state with 100 steps to go is worth
# $(1 - 0.98^{100})/0.02 = 43$, and the network says about 19. Adam moves a weight by about its
# learning rate at each update, and 97 such steps do not take a network from 0 to 43.
#
# What does such a value network contribute? Its level. If $V$ is 19 everywhere, a step that goes
# on has the TD error $1 + 0.98 \cdot 19 - 19 = 0.62$, and a fall has $1 - 19 = -18$. With $V = 0$
# both would be 1. With $\lambda = 0.95$ the $-18$ also counts for the actions before the fall,
# with weights that shrink by $\gamma\lambda = 0.93$ at each step. So the policy learns
# nevertheless.
#
# Smaller values are easier to reach. Multiply the rewards by 0.05, and train once more:

# %%
scaled = A2C.from_config("cartpole", total_steps=50_000, seed=0, reward_scale=0.05)
scaled_result = train(scaled)
late = {}
for name, run in (("rewards of 1", result), ("rewards of 0.05", scaled_result)):
    late[name] = run.curve("explained_variance")[1][-10:].mean()
    scores = run.curve("eval_return_mean")[1]
    print(f"{name:>15}: explained variance {late[name]:.2f}, return {scores[-1]:.0f}, best {scores.max():.0f}")
assert late["rewards of 0.05"] > late["rewards of 1"]

# %% [markdown]
# Now the values explain most of what there is to explain. The return is another matter: this seed
# reaches 500 and falls back to 136, another seed may not. Better values alone do not keep a
# policy good.
#
# ## Watch it
#
# The agent, greedy, in an episode that it has not seen; every 25 steps a frame of its first 200:

# %%
env = make_env("CartPole-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=123)
frames = []
for step in range(200):
    if step % 25 == 0:
        frames.append(env.render())
    obs, _, terminated, truncated, _ = env.step(int(agent.predict(obs)[0]))
    if terminated or truncated:
        break
env.close()
filmstrip(frames)

# %% [markdown]
# And a look inside. DQN had a value for each action and a sharp line between left and right. Here each network
# answers one question. On the left, how likely is a push to the right, for a cart at rest in the middle? There is a
# narrow band in which the policy is undecided. In the middle, what is this state worth? The network says 17 to 19.3
# everywhere. On the right is the value network that was trained with small rewards, divided by their scale: its
# values range from 17 to 52 and are lowest where the pole turns fast to the right. Fast turns to the left still
# look safe to it.

# %% tags=["hide-input"]
angles, speeds = np.linspace(-0.21, 0.21, 61), np.linspace(-2.5, 2.5, 61)
grid = np.zeros((61, 61, 4), dtype=np.float32)
grid[..., 2], grid[..., 3] = angles[None, :], speeds[:, None]
grid = grid.reshape(-1, 4)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.2))
extent = (angles[0], angles[-1], speeds[0], speeds[-1])
labels = ("angle of the pole [rad]", "speed of the pole [rad/s]")
chance = agent.probabilities(grid)[:, 1].reshape(61, 61)
plot_heatmap(left, chance, extent, *labels, "probability of pushing right", (0, 1))
plot_heatmap(middle, agent.values(grid).reshape(61, 61), extent, *labels, "value")
plot_heatmap(right, scaled.values(grid).reshape(61, 61) / 0.05, extent, *labels, "value, small rewards / 0.05")
plt.show()
falls_left, falls_right = agent.probabilities(np.array([[0, 0, -0.1, -1], [0, 0, 0.1, 1]], np.float32))[:, 1]
assert falls_left < 0.5 < falls_right  # it pushes the cart under the pole

# %% [markdown]
# ## What each part buys
#
# One run says little, so here are five seeds each on CartPole, 30,000 steps, with one part changed at a time.
# Brown is the whole algorithm, black the variant: the line is the mean, the band its 95 % interval. Below, each dot
# is the last evaluation of a seed, the diamond their interquartile mean (IQM), and the bar its 95 % interval, as
# [Sweeps](sweep.ipynb) explains them.

# %% tags=["hide-input"]
parts = load_result("results/a2c_parts.json")
draw_parts(plt.figure(), parts)
plt.show()
print(made_by(parts))

# %% [markdown]
# **λ** matters most here. With $\lambda = 0$ every seed ends below 10, the return of a policy
# that always pushes to the same side. A likely reason: the TD errors of an untrained value
# network say little, normalising makes them as large as good ones, and the policy becomes certain
# before the values are right. With $\lambda = 1$ all seeds learn, slowly, and none ends
# above 250. Here, too, the values are a likely reason. If $V$ is the same everywhere and the pole
# does not fall, the action $k$ steps before the end of a rollout gets the advantage
# $(1 - \gamma^k)(50 - V)$, where $50 = 1/(1 - \gamma)$. While $V$ is too low, this says where the
# rollout was cut, not what the action was worth. With $\lambda = 0.95$ mostly the last 14 of the
# 64 steps suffer from it, since $1/(1 - \gamma\lambda) = 14.5$.
#
# With $\lambda = 0.95$, the whole algorithm ends at an IQM of 398, but the seeds differ widely, from
# 97 to 482: 30,000 steps are too few, and the first figure shows what 100,000 bring. **Several
# environments** made no difference to the return that five seeds could show. One environment, with
# rollouts of the same 512 steps, ends no worse, but each of its steps is a forward pass of its own.
#
# ## Beside Stable-Baselines3
#
# Does A2C of another library learn equally well? `bench/parity.py` trains ours and that of Stable-Baselines3
# 2.9.2 at its default settings: rollouts of 5 steps, here of 8 environments, $\gamma = 0.99$, $\lambda = 1$, learning
# rate $7 \cdot 10^{-4}$. One setting is another: theirs has RMSProp by default, and here Adam, like ours. Both have
# thirty seeds and play the same ten evaluation episodes at the same steps. A test gives both the same weights
# and the same rollout: their parameters after the update agree to rounding.

# %% tags=["hide-input"]
show_parity("results/parity_a2c.json")

# %% [markdown]
# The interval in the title, which [Figures](figures.ipynb) explains, holds 0: thirty seeds show no
# difference. The first ten did show one, −48 with an interval from −94 to −4, and we found no cause
# for it: the test also cuts episodes off, and both sides still come to the same parameters. Twenty
# more seeds gave the answer. A bootstrap interval of ten seeds is too narrow (Student's t-test, which
# allows for that, gave p = 0.06), and seeds differ much more than the two sides do, with mean heights
# (of a seed's curve over all its steps) from 158 to 395 for ours and from 197 to 415 for theirs. Both
# sides are unsteady: at a constant learning rate, a policy that balances for 500 steps is often lost
# again, which is why the settings above let the rate fall.
#
# ## Honest edges
#
# What differs from the papers, and why:
#
# | papers | here | why |
# |---|---|---|
# | A3C: many threads, each with its own copy of the networks | several environments that step together (A2C) | no threads, and all data is from the current policy; a common simplification |
# | RMSProp | Adam, with ε = 10⁻⁵ as in common implementations | one optimiser for the whole book |
# | one network with two heads, for images | two networks | vectors are cheap, and the two losses do not compete |
# | 5-step returns | GAE | with λ = 1 and `num_steps: 5` these are returns of up to 5 steps |
#
# - The papers' scores are for Atari and robots; nothing here claims to reproduce them.
# - A checkpoint resets all environments, as everywhere in this book. It counts as a truncation: `gae`
#   bootstraps there with the value of the true last observation.
# - Continuous actions are clipped at the bounds, not squashed as in [SAC](sac.ipynb). A mean far outside the
#   bounds gets no feedback from the environment. The Gaussian starts at 0, in the units of the environment: where
#   the bounds are far from 0, as from 100 to 200, wrap it in Gymnasium's `RescaleAction`. The agent warns you.
# - Observations are not normalised unless you ask for it. Where their sizes differ much, set
#   `normalize_observations` ([What the network sees](preprocess.ipynb)).
# - A2C makes one gradient step from each rollout and throws it away. [PPO](ppo.ipynb) makes more of it.
#
# ## Exercises
#
# **Exercise 1.** Why may a baseline depend on the state but not on the action? Check both with the two doors: a
# baseline of 6 for each, and one of 2 for the left door and 10 for the right.
#
# <details>
# <summary>Solution</summary>
#
# The mean of $\nabla \log \pi$ over the actions is 0, so a number that multiplies all of them equally adds
# nothing. A baseline that knows the action can take the reward away altogether, and the gradient with it:
#
# ```python
# def mean_gradient(baseline: list[float]) -> float:
#     theta, total = torch.zeros((), requires_grad=True), 0.0
#     for door, pay in ((0, 2.0), (1, 10.0)):
#         policy = Categorical(logits=torch.stack([torch.zeros(()), theta]))
#         log_prob = policy.log_prob(torch.tensor(door))
#         total += 0.5 * (pay - baseline[door]) * torch.autograd.grad(log_prob, theta)[0].item()
#     return total
#
# assert mean_gradient([0.0, 0.0]) == mean_gradient([6.0, 6.0]) == 2.0
# assert mean_gradient([2.0, 10.0]) == 0.0
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Show that GAE with $\lambda = 1$ is the reward-to-go minus the value, for an episode that
# terminates. Check it with random numbers.
#
# <details>
# <summary>Solution</summary>
#
# In $\delta_t + \gamma \delta_{t+1} + \gamma^2 \delta_{t+2} + \dots$ each $\gamma^{k+1} V(s_{t+k+1})$
# comes once with a plus and once with a minus. Only the rewards and $-V(s_t)$ remain.
#
# ```python
# reward, value = torch.rand(20, 1), torch.rand(20, 1)
# next_value = torch.cat([value[1:], torch.zeros(1, 1)])
# over = torch.zeros(20, 1, dtype=torch.bool)
# over[-1] = True
# advantage = gae(reward, value, next_value, over, over, gamma=0.9, gae_lambda=1.0)
# expected = rewards_to_go(reward.flatten().tolist(), 0.9) - value.flatten()
# torch.testing.assert_close(advantage.flatten(), expected)
# ```
#
# </details>

# %% [markdown]
# **Exercise 3 (a planted bug).** A colleague writes GAE in fewer words.
# Look at the hand example with a truncated last step, and at an episode that ends in the middle of a rollout.

# %%
def gae_with_a_bug(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, ended: Tensor,
    gamma: float, gae_lambda: float,
) -> Tensor:
    """As `gae`, with a bug."""
    td_error = reward + gamma * next_value * ~ended - value
    advantage, following = torch.zeros_like(td_error), torch.zeros_like(td_error[0])
    for t in reversed(range(len(td_error))):
        following = td_error[t] + gamma * gae_lambda * following * ~terminated[t]
        advantage[t] = following
    return advantage


shown = gae_with_a_bug(**steps_by_hand, terminated=no, ended=last, gamma=1.0, gae_lambda=0.5)
print("truncated, with the bug:", shown.flatten().tolist(), " by hand: [3, 2, 6]")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The two masks are swapped. The next value must vanish only where the step *terminated*; the sum must stop
# wherever the episode *ended*. With the bug, a truncated episode is worth nothing afterwards, and its advantages
# go on into the next episode.
#
# ```python
# def gae_with_a_bug(
#     reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, ended: Tensor,
#     gamma: float, gae_lambda: float,
# ) -> Tensor:
#     """As `gae`, without the bug."""
#     td_error = reward + gamma * next_value * ~terminated - value
#     advantage, following = torch.zeros_like(td_error), torch.zeros_like(td_error[0])
#     for t in reversed(range(len(td_error))):
#         following = td_error[t] + gamma * gae_lambda * following * ~ended[t]
#         advantage[t] = following
#     return advantage
#
# mended = gae_with_a_bug(**steps_by_hand, terminated=no, ended=last, gamma=1.0, gae_lambda=0.5)
# assert mended.flatten().tolist() == [3, 2, 6]
# middle = column(0, 1, 0).bool()  # an episode is cut off after the second step
# numbers = {**steps_by_hand, "terminated": no, "ended": middle, "gamma": 1.0, "gae_lambda": 0.5}
# assert torch.equal(gae_with_a_bug(**numbers), gae(**numbers))
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Close the chapter and write the update of A2C from memory, with nothing but PyTorch. Then copy
# an agent, update the original with `update` and the copy with your code, and compare the weights.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_update(agent: A2C, batch: RolloutBatch) -> None:
#     logits = agent.policy.mlp(batch.obs)
#     log = logits - logits.logsumexp(dim=1, keepdim=True)
#     log_prob = log[torch.arange(len(batch)), batch.action]
#     a = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std(correction=0) + 1e-8)
#     value_loss = nn.functional.mse_loss(agent.value_network(batch.obs), batch.returns)
#     loss = -(log_prob * a).mean() + 0.5 * value_loss
#     agent.optimizer.zero_grad()
#     loss.backward()
#     parameters = [*agent.policy.parameters(), *agent.value_network.parameters()]
#     nn.utils.clip_grad_norm_(parameters, 0.5)
#     agent.optimizer.step()
#
#
# original = A2C("CartPole-v1", num_envs=2, num_steps=8, normalize_advantages=True, eval_every=0)
# original.learn(30, progress=False)  # 14 of 16 steps of the second rollout
# mine = copy.deepcopy(original)
# obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
# numbers = torch.randn(4, 16)
# batch = RolloutBatch(torch.from_numpy(obs), torch.randint(2, (16,)), *numbers)
# for _ in range(3):
#     original.update(batch)
#     my_update(mine, batch)
# for name in ("policy", "value_network"):
#     ours, theirs = (getattr(agent, name).parameters() for agent in (original, mine))
#     for one, other in zip(ours, theirs, strict=True):
#         torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Give the policy and the value network a common body, as for images, by overriding
# `make_value_network`. What has to be true of the optimiser?
#
# <details>
# <summary>Solution</summary>
#
# Each parameter must be in the optimiser once. `build` lists the parameters of both networks, so keep the body in
# one of them and let the other only use it.
#
# ```python
# class Head(nn.Module):
#     """A value head on the body of a policy, which owns the body."""
#
#     def __init__(self, body: nn.Module, units: int) -> None:
#         super().__init__()
#         self.body = [body]  # in a list, so that its parameters are not counted twice
#         self.linear = nn.Linear(units, 1)
#
#     def forward(self, obs: Tensor) -> Tensor:
#         return self.linear(self.body[0](obs.float())).squeeze(-1)
#
#
# class SharedA2C(A2C):
#     name = "shared_a2c"
#
#     def make_value_network(self) -> nn.Module:
#         body = nn.Sequential(*list(self.policy.mlp)[:-1])
#         return Head(body, self.config.hidden[-1])
#
#
# agent = SharedA2C("CartPole-v1", eval_every=0)
# agent.learn(500, progress=False)
# count = sum(p.numel() for p in agent.optimizer.param_groups[0]["params"])
# assert count == sum(p.numel() for p in agent.policy.parameters()) + 65 and agent.updates > 0
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook import A2C
#
# agent = A2C.from_config("cartpole")
# agent.learn(100_000)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train a2c --config cartpole --run-dir runs/a2c
# rlbook evaluate runs/a2c --episodes 20
# rlbook watch runs/a2c --out cartpole.gif
# ```
#
# The example `examples/a2c_cartpole.py` is a script of this kind.
#
# ## References
#
# - R. Williams (1992). *Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
#   Learning*. Machine Learning 8.
# - R. Sutton, D. McAllester, S. Singh, Y. Mansour (1999). *Policy Gradient Methods for Reinforcement Learning
#   with Function Approximation*. NIPS.
# - V. Mnih et al. (2016). *Asynchronous Methods for Deep Reinforcement Learning*. ICML.
# - J. Schulman, P. Moritz, S. Levine, M. Jordan, P. Abbeel (2016). *High-Dimensional Continuous Control Using
#   Generalized Advantage Estimation*. ICLR.
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition. MIT Press: chapter
#   13; the corridor is their example 13.1.
