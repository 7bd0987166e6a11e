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
# # SAC
#
# An arm has no list of actions to choose from: it turns a joint by 0.31 or by 0.32. In this
# chapter you build *soft actor-critic*, which learns such actions: a network proposes a whole
# distribution over them, two critics judge what it proposes, and a thermostat keeps it as random
# as it can afford to be. At the end it swings up a pendulum, and the library gains `SAC`, its loss
# and its settings.
#
# | | |
# |---|---|
# | papers | Haarnoja et al. 2018, *Soft Actor-Critic* and *… Algorithms and Applications* |
# | observations | vectors |
# | actions | a box of real numbers, any finite bounds |
# | kind | off-policy: it learns from a replay buffer |
# | same as [DQN](dqn.ipynb) | replay, bootstrapped targets, target networks that follow slowly |
# | different from DQN | an actor instead of `argmax`; the smaller of two critics; entropy |
#
# This is where we are going: five seeds of the code below, with the command that made them.

# %%
#| export
import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.dqn import MLP, check_shapes, polyak_update
from rlbook.envs import derive_seed
from rlbook.replay import Batch, ReplayBuffer, make_rows, to_batch, transition_dtype
from rlbook.run import RunResult, train
from rlbook.settings import Config, setting

# %% [markdown]
# The cells that are not part of the library need a little more.

# %%
import time
from pathlib import Path

import matplotlib.pyplot as plt

from rlbook.dqn import DQN
from rlbook.envs import make_env
from rlbook.figures import (
    COLORS,
    filmstrip,
    load_result,
    pick_frames,
    plot_band,
    plot_heatmap,
    plot_result,
    use_style,
)

use_style()
RESULTS = Path("results")

# %%
stored = load_result(RESULTS / "sac_pendulum.json")
fig, ax = plt.subplots()
plot_result(ax, stored)
ax.axhline(-157, color=COLORS["reference"], linestyle="--", linewidth=1)
ax.annotate("RL Zoo, one run, 20,000 steps", (10_000, -157), (0, 5), ha="right",
            textcoords="offset points")
print(stored["command"])
print("return at the end, seed by seed:", [round(x) for x in stored["runs"]["SAC"]["final"]])

# %% [markdown]
# ## The problem
#
# DQN gives each action an output, and acts by looking for the largest. With a continuous action
# there is nothing to look through, and DQN says so:

# %%
try:
    DQN("Pendulum-v1")
except ValueError as error:
    print(error)

# %% [markdown]
# The way out is to chop each joint into a few levels. For one joint that works. For $d$ joints of
# five levels it takes $5^d$ outputs, and each of them has to be tried. `Aim` is the smallest
# environment that shows it: you see a point, and the reward says how far your action was from it,
# $r = -\operatorname{mean}_i (a_i - x_i)^2$. Playing at random scores $-\tfrac23$, since a
# difference of two uniform numbers in $[-1, 1]$ has the variance $\tfrac13 + \tfrac13$.

# %%
class Aim(gym.Env[np.ndarray, Any]):
    """One step: answer a point with the same point; `levels` chops each joint."""

    def __init__(self, joints: int, levels: int = 0) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (joints,))
        whole, chopped = gym.spaces.Box(-1, 1, (joints,)), gym.spaces.Discrete(levels**joints or 1)
        self.joints, self.levels = joints, levels
        self.action_space = chopped if levels else whole

    def reset(self, **keywords: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=keywords.get("seed"))
        self.goal = self.np_random.uniform(-1, 1, self.joints).astype(np.float32)
        return self.goal, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.levels:
            digits = np.unravel_index(action, (self.levels,) * self.joints)
            action = np.linspace(-1, 1, self.levels)[list(digits)]
        return self.goal, -float(np.mean((action - self.goal) ** 2)), True, False, {}


gym.register("Aim-v0", lambda **keywords: Aim(**keywords), disable_env_checker=True)

# %%
JOINTS, AIM_STEPS = (1, 3, 5), 1_000
AIM: dict[str, Any] = {"hidden": (64, 64), "lr": 1e-3, "batch_size": 64, "warmup_steps": 100,
                       "gamma": 0.0, "eval_every": 0}


def aim_with_dqn(joints: int, seed: int = 0) -> float:
    """Return what DQN scores with five levels for each joint."""
    chopped = {"joints": joints, "levels": 5}
    agent = DQN("Aim-v0", env_kwargs=chopped, seed=seed, update_every=1, epsilon_steps=500, **AIM)
    agent.learn(AIM_STEPS, progress=False)
    return agent.evaluate(episodes=200).mean


dqn_scores = [aim_with_dqn(joints) for joints in JOINTS]
for joints, score in zip(JOINTS, dqn_scores, strict=True):
    print(f"DQN, {joints} joints, {5**joints:5,} actions: {score:.3f}")

# %% [markdown]
# @@TO CHECK AGAINST THE CELL ABOVE: DQN good with one joint, worse with three, near chance with
# five.@@ A robot has ten joints and more. Keep these numbers: SAC gets the same steps below.

# %% [markdown]
# ## The squashed Gaussian
#
# The actor answers an observation with a bell curve: a mean and a standard deviation for each
# joint. To act, draw standard normal noise $\epsilon$ and shift and stretch it,
# $u = \mu + \sigma\epsilon$. Bounds are kept by squashing, $a = \tanh u$, which lies between −1
# and 1. And because noise comes in from outside, the action is a smooth function of $\mu$ and
# $\sigma$: a gradient with respect to the action can go on into the network. (This is the
# *reparameterisation trick*.)
#
# SAC also needs the density of what it drew. Squashing moves probability closer together by the
# slope of tanh, so the density is divided by that slope, and its log is
#
# $$\log \pi(a) = \sum_i \Bigl[-\tfrac12 \epsilon_i^2 - \log \sigma_i - \tfrac12 \log 2\pi
# - \log\bigl(1 - \tanh^2 u_i\bigr)\Bigr].$$
#
# The last term is where implementations break. In 32 bits $\tanh(10)$ is exactly 1, and
# $\log(1 - 1)$ is $-\infty$. But $1 - \tanh^2 u = 4 / (e^u + e^{-u})^2$, whose log is
# $2\,(\log 2 - u - \operatorname{softplus}(-2u))$: the same number, with nothing to cancel.
#
# By hand: with $\mu = 0$, $\sigma = 1$ and $\epsilon = 1$, $u = 1$ and $a = 0.7616$. The normal
# part is $-0.5 - 0.9189 = -1.4189$, the log of the slope $\log(1 - 0.5800) = -0.8676$, and
# $\log \pi = -1.4189 + 0.8676 = -0.5513$.

# %%
#| export
def log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), and exactly so where tanh(u) rounds to 1."""
    return 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Turn standard normal noise into actions in (-1, 1) and the logs (batch,) of their density."""
    u = mean + log_std.exp() * noise  # (batch, actions), before squashing
    normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    return u.tanh(), (normal - log_slope(u)).sum(dim=1)

# %%
zero, one = torch.zeros(1, 1), torch.ones(1, 1)
action, log_prob = squashed_sample(zero, zero, one)
assert abs(action.item() - 0.7616) < 1e-4
assert abs(log_prob.item() - -0.5513) < 1e-4

far = torch.tensor([10.0])
textbook = torch.log(1 - far.tanh() ** 2)
print(f"log(1 - tanh(10)²): textbook {textbook.item()}, ours {log_slope(far).item():.4f}")

# %% [markdown]
# The same Gaussian before and after squashing, three times: draws as a histogram, the formula as a
# line. Notice the last: a wide bell is squashed into a policy that prefers the two extremes.

# %%
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
    axes[1, column].set(xlabel="a = tanh u")
for row in axes:
    row[0].set_ylabel("density")

# %% [markdown]
# ## The critics
#
# A critic is a network from observation *and* action to one number, $Q(s, a)$. A policy that
# climbs a critic finds its mistakes: where the critic errs upwards, the policy goes, and the
# target that it feeds grows. So SAC trains two critics from different starts and believes the
# smaller. Say they claim 3.0 and 2.4: SAC uses 2.4.
#
# Two networks could be two objects. Here they are one: a matrix with one row per member, in which
# lie all its weights. Views of it are the layers, `(members, inputs, outputs)`, and one batched
# product serves all members. Adam then has one tensor to move, the target critics follow in one
# operation, and a few members are a few rows. The next chapter takes ten of them.
#
# By hand: layers of 2 → 1 and 1 → 1 have $2 + 1 + 1 + 1 = 5$ numbers, so two members are a matrix
# of 2 × 5.

# %%
#| export
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer


def unpack(weights: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """View rows of weights, one a member, as (members, inputs, outputs) and bias of each layer."""
    layers, start = [], 0
    for inputs, outputs in sizes:
        middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
        weight = weights[:, start:middle].unflatten(1, (inputs, outputs))
        layers.append((weight, weights[:, middle:end].unsqueeze(1)))
        start = end
    return layers

# %% [markdown]
# ### Forward and backward by hand
#
# On a CPU a batched product is no faster than a loop over networks: the arithmetic is the same.
# What can be saved is all the rest, and an autograd function of our own saves it. ReLU works in
# place, forward and backward. The last layer has one output, and a row times a matrix is several
# times as fast as a matrix times a column. And when the critics only judge, while the policy
# learns, the gradients of their weights are never computed: a third of the work. The backward pass
# is the chain rule, layer by layer: with $\delta$ the gradient at a layer's output and $h$ its
# input, the gradient of the weights is $h^\top\delta$, of the bias the sum of $\delta$, and of the
# input $\delta W^\top$, cut to zero where ReLU was.

# %%
#| export
class EnsembleForward(torch.autograd.Function):
    """ReLU networks side by side with one output each: (batch, inputs) to (members, batch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, sizes: Sizes) -> Tensor:
        """Run all members on the same inputs."""
        *hidden, (weight, bias) = unpack(weights, sizes)
        kept = [x.expand(len(weights), *x.shape)]  # (members, batch, inputs), not copied
        for hidden_weight, hidden_bias in hidden:
            kept.append(torch.baddbmm(hidden_bias, kept[-1], hidden_weight).relu_())
        ctx.save_for_backward(weights, *kept)
        ctx.sizes = sizes
        # One output: a row times a matrix is several times faster than a matrix times a column.
        return torch.bmm(weight.mT, kept[-1].mT).squeeze(1) + bias.squeeze(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and weights, but for those that nobody wants."""
        weights, *kept = ctx.saved_tensors
        layers, (wants_x, wants_weights, _) = unpack(weights, ctx.sizes), ctx.needs_input_grad
        grads = torch.empty_like(weights) if wants_weights else None
        slots = unpack(grads, ctx.sizes) if grads is not None else []
        delta = grad.unsqueeze(2)  # (members, batch, outputs)
        for i in reversed(range(len(layers))):
            last, weight = i == len(layers) - 1, layers[i][0]
            if slots:
                slot, bias_slot = slots[i]
                if last:
                    torch.bmm(delta.mT, kept[i], out=slot.mT)
                else:
                    torch.bmm(kept[i].mT, delta, out=slot)
                torch.sum(delta, dim=1, keepdim=True, out=bias_slot)
            if i or wants_x:
                delta = delta * weight.mT if last else torch.bmm(delta, weight.mT)
            if i:  # where ReLU was shut, nothing passes
                shut = torch.ops.aten.threshold_backward.grad_input
                shut(delta, kept[i], 0, grad_input=delta)
        return (delta.sum(dim=0) if wants_x else None), grads, None

# %%
#| export
class Critics(nn.Module):
    """An ensemble of Q-functions of one observation and one action."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...], members: int) -> None:
        super().__init__()
        self.sizes: Sizes = tuple(itertools.pairwise((inputs + actions, *hidden, 1)))
        bounds = [(1 / math.sqrt(n), (n + 1) * m) for n, m in self.sizes]  # as nn.Linear starts
        rows = [torch.empty(members, count).uniform_(-bound, bound) for bound, count in bounds]
        self.weights = nn.Parameter(torch.cat(rows, dim=1))  # (members, weights of one)

    def forward(
        self, obs: Tensor, action: Tensor, chosen: Tensor | None = None, learn: bool = True
    ) -> Tensor:
        """Return the values (batch, members) that all members, or the chosen ones, see."""
        weights = self.weights if learn else self.weights.detach()
        weights = weights if chosen is None else weights[chosen]
        x = torch.cat([obs, action], dim=1)
        return EnsembleForward.apply(x, weights, self.sizes).t()

# %% [markdown]
# By hand: two members with one hidden unit each, all weights 1 but for the second member's output
# weight, 2, and all biases 0. For the observation 0.5 and the action 0.25 the hidden unit is 0.75,
# so the members say 0.75 and 1.5. The slope with respect to the action is 1 and 2, and an action
# of −1 leaves ReLU shut: 0.

# %%
critics = Critics(inputs=1, actions=1, hidden=(1,), members=2)
assert critics.weights.shape == (2, 5)
critics.weights.data = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 2.0, 0.0]])

obs, action = torch.tensor([[0.5], [0.5]]), torch.tensor([[0.25], [-1.0]], requires_grad=True)
q = critics(obs, action)  # (batch, members)
q.sum().backward()
assert q.tolist() == [[0.75, 1.5], [0.0, 0.0]]
assert action.grad.tolist() == [[3.0], [0.0]]  # 1 + 2, and shut

# %% [markdown]
# That the backward pass is right for any sizes is checked against finite differences:

# %%
wide = Critics(inputs=3, actions=2, hidden=(7, 5), members=4).double()
x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(EnsembleForward.apply, (x, wide.weights, wide.sizes))

# %% [markdown]
# ## The model
#
# Actor and critics together. The actor is the [MLP of the DQN chapter](dqn.ipynb) with two outputs
# per joint. Its log σ is held between −20 and 2: below, the density overflows; above, the policy
# is all extremes. `value` is what the policy climbs: the smaller critic, whose weights only judge.

# %%
#| export
class SACModel(nn.Module):
    """An actor that proposes actions in (-1, 1), and critics that value them."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], num_critics: int = 2
    ) -> None:
        super().__init__()
        self.actor = MLP((inputs, *hidden, 2 * actions))
        self.critics = Critics(inputs, actions, hidden, num_critics)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation (batch, actions) of the Gaussian."""
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        return mean, log_std.clamp(-20, 2)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (batch, actions) and the logs (batch,) of their densities."""
        return squashed_sample(*self.policy(obs), noise)

    def value(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return what the policy maximises (batch,): the smallest of the critics' values."""
        return self.critics(obs, action, learn=False).amin(dim=1)

# %%
model = SACModel(inputs=3, actions=2, hidden=(8, 8))
obs = torch.zeros(5, 3)
action, log_prob = model.sample(obs, torch.randn(5, 2))
assert action.shape == (5, 2) and log_prob.shape == (5,)
assert torch.equal(model.value(obs, action), model.critics(obs, action).min(dim=1).values)

# %% [markdown]
# ## The loss of the critics
#
# SAC maximises reward *plus entropy*: to the value of a state it adds a bonus $-\alpha \log \pi$
# for each action that was not certain to come. The temperature $\alpha$ is the price of chance in
# units of reward. The target of a step is then
#
# $$y = r + \gamma\,(1 - \text{terminated})\,
# \bigl(\min_i Q'_i(s', a') - \alpha \log \pi(a' \mid s')\bigr),
# \qquad a' \sim \pi(\cdot \mid s'),$$
#
# with the target critics $Q'$ and a fresh action $a'$ from the policy as it is now: what the old
# policy did next does not matter. That is why old transitions may be used.
#
# By hand: $r = 1$, $\gamma = 0.9$, the target critics say 3.0 and 2.4, $\log \pi = -0.5$ and
# $\alpha = 0.2$. The soft value is $2.4 + 0.1 = 2.5$ and $y = 1 + 0.9 \cdot 2.5 = 3.25$. If the
# step terminated, $y = 1$.

# %%
#| export
def sac_target(
    reward: Tensor,
    discount: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
) -> Tensor:
    """Return reward plus discounted soft value: the smallest Q-value plus the bonus for entropy."""
    next_value = next_q.amin(dim=1) - alpha * next_log_prob
    return reward + discount * ~terminated * next_value

# %% [markdown]
# The loss is the squared distance to that target, averaged over the batch and summed over the
# critics. If they said 3.25 and 3.0 above, it is $0 + 0.25^2 = 0.0625$. As in the DQN chapter, a
# column `(batch, 1)` where `(batch,)` belongs would broadcast into a wrong loss, so shapes are
# checked.

# %%
#| export
def sac_loss(
    q: Tensor,  # (batch, critics), with gradient
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, any number of critics), of the target critics
    next_log_prob: Tensor,  # (batch,)
    alpha: Tensor,  # ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean squared TD error, summed over the critics, and named metrics."""
    vectors = {"reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(q), **vectors, next_log_prob=next_log_prob)
    if next_q.ndim != 2 or len(next_q) != len(q):
        raise ValueError(f"next_q must be ({len(q)}, critics), not {tuple(next_q.shape)}.")
    with torch.no_grad():
        target = sac_target(reward, discount, terminated, next_q, next_log_prob, alpha)
    td_error = q - target.unsqueeze(1)  # (batch, critics)
    loss = td_error.square().mean(dim=0).sum()
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "q_mean": q.mean(),
            "target_mean": target.mean(),
            "td_error_abs": td_error.abs().mean(),
        }
    return loss, metrics

# %%
step = {
    "reward": torch.tensor([1.0]),
    "discount": torch.tensor([0.9]),
    "next_q": torch.tensor([[3.0, 2.4]]),
    "next_log_prob": torch.tensor([-0.5]),
    "alpha": torch.tensor(0.2),
}
on, over = torch.tensor([False]), torch.tensor([True])
torch.testing.assert_close(sac_target(terminated=on, **step), torch.tensor([3.25]))
torch.testing.assert_close(sac_target(terminated=over, **step), torch.tensor([1.0]))
loss, metrics = sac_loss(q=torch.tensor([[3.25, 3.0]]), terminated=on, **step)
torch.testing.assert_close(loss, torch.tensor(0.0625))
{name: round(value.item(), 4) for name, value in metrics.items()}

# %% [markdown]
# ## The loss of the policy, and the temperature
#
# The policy is to propose what the critics like, and to stay uncertain:
#
# $$J(\pi) = \operatorname{mean}\bigl[\alpha \log \pi(a \mid s) - \min_i Q_i(s, a)\bigr].$$
#
# With a value of 2.4, $\log \pi = -0.5$ and $\alpha = 0.2$ that is $-0.1 - 2.4 = -2.5$.
#
# How dear should chance be? Nobody knows beforehand, so a thermostat finds out. You name an
# entropy $\bar{\mathcal H}$ to hold, by default minus the number of joints, and $\alpha$ moves
# against
#
# $$J(\alpha) = -\log\alpha \cdot \operatorname{mean}
# \bigl[\log \pi(a \mid s) + \bar{\mathcal H}\bigr].$$
#
# By hand: $\log\pi = -0.5$ is an entropy of 0.5, and the target is −1. The slope with respect to
# $\log\alpha$ is $-(-0.5 - 1) = 1.5$: a gradient step lowers $\alpha$, because the policy is more
# random than it need be.

# %%
#| export
def policy_loss(value: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """Return the mean of the entropy's price minus the value, both (batch,)."""
    check_shapes(len(value), value=value, log_prob=log_prob)
    return (alpha * log_prob - value).mean()


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return a loss that raises the temperature while the entropy is below its target."""
    return -log_alpha * (log_prob.detach() + target_entropy).mean()

# %%
log_alpha = torch.tensor(math.log(0.2), requires_grad=True)
value, log_prob = torch.tensor([2.4]), torch.tensor([-0.5])
torch.testing.assert_close(policy_loss(value, log_prob, log_alpha.exp()), torch.tensor(-2.5))
temperature_loss(log_alpha, log_prob, target_entropy=-1.0).backward()
torch.testing.assert_close(log_alpha.grad, torch.tensor(1.5))

# %% [markdown]
# ## Bounds
#
# The policy thinks in $(-1, 1)$; Pendulum wants a torque in $[-2, 2]$, another environment a valve
# in $[0, 10]$. One small class goes there and back, and the density is taken before the
# stretching, so that the target entropy means the same everywhere. By hand: in $[0, 10]$ the
# action 0.5 is $5 + 5 \cdot 0.5 = 7.5$. A space without finite bounds has no such map, and is
# refused when the agent is made.

# %%
#| export
def check_bounds(env_id: str, space: gym.spaces.Box) -> None:
    """Raise unless each action has a lower and a higher bound, both finite."""
    if not space.is_bounded("both"):
        raise ValueError(
            f"{env_id!r} has actions without finite bounds on both sides ({space}): give it such "
            "bounds, for example with gymnasium.wrappers.TransformAction."
        )
    if not (space.low < space.high).all() or np.dtype(space.dtype).kind != "f":
        raise ValueError(f"{env_id!r} has actions that cannot vary between real bounds ({space}).")


class ActionScale:
    """Between the actions (-1, 1) of the policy and those of the environment."""

    def __init__(self, space: gym.spaces.Box) -> None:
        self.low, self.high = space.low, space.high
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self.center, self.half = low / 2 + high / 2, high / 2 - low / 2

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Map (-1, 1) to the bounds, and never a rounding error beyond them."""
        scaled = (self.center + self.half * action).astype(self.low.dtype)
        return np.clip(scaled, self.low, self.high)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        """Map the bounds to (-1, 1)."""
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
# ## Settings
#
# Each is a flag, a key in YAML and a keyword at once, as [settings](settings.ipynb) has it. Two of
# them are only of use in the next chapter: how many updates follow each step, and how many of them
# pass before the policy moves.

# %%
#| export
@dataclass(kw_only=True)
class SACConfig(Config):
    """The settings of SAC."""

    env_id: str = setting("Pendulum-v1", "Gymnasium id; `module:Name-v0` imports the module first.")
    hidden: tuple[int, ...] = setting((256, 256), "Units of each hidden layer.", low=1)
    lr: float = setting(3e-4, "Learning rate of Adam, for actor, critics and temperature.", above=0)
    batch_size: int = setting(256, "Transitions of one update.", low=1)
    buffer_size: int = setting(100_000, "Transitions that the replay buffer holds.", low=1)
    warmup_steps: int = setting(1_000, "Steps of random actions, without updates.", low=0)
    updates_per_step: int = setting(1, "Updates per environment step (UTD).", low=1)
    policy_delay: int = setting(1, "Updates of the critics per update of the policy.", low=1)
    gamma: float = setting(0.99, "Discount of a reward one step later.", low=0, high=1)
    tau: float = setting(0.005, "Fraction that the targets move per update.", above=0, high=1)
    initial_alpha: float = setting(1.0, "Temperature at the start.", above=0)
    learn_alpha: bool = setting(True, "Whether the temperature follows the entropy.")
    target_entropy: float | None = setting(None, "Entropy to hold; by default -dim(actions).")

    def check(self) -> None:
        """Raise where settings contradict each other."""
        if self.batch_size > self.buffer_size:
            raise ValueError(
                f"Setting 'batch_size' ({self.batch_size}) must not exceed 'buffer_size' "
                f"({self.buffer_size})."
            )

# %% [markdown]
# ## The agent
#
# The buffer is [the ring of the replay chapter](replay.ipynb), with actions stored in $(-1, 1)$.
# What is new stands in `update`. It has one surprise: the three losses are added, and one backward
# pass and one step of Adam serve them all. That is exact, because none has a gradient in the
# weights of another: the target is made without gradients, the critics that judge the policy are
# frozen, and the temperature sees $\log\pi$ as a number.
#
# Chance has owners: a NumPy generator for acting, a torch generator for the noise of updates. Both
# are part of the agent's state, so that a resumed run draws what the uninterrupted one would have
# drawn.

# %%
#| export
class SAC(Agent):
    """An actor that learns what twin critics value, and to stay as random as it can afford."""

    name: ClassVar[str] = "sac"
    config_class: ClassVar[type[Config]] = SACConfig
    actions: ClassVar[str] = "continuous"
    parts: ClassVar[tuple[str, ...]] = ("model", "target", "optimizer", "replay")
    loss = staticmethod(sac_loss)
    config: SACConfig
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make model, target critics, optimisers and buffer."""
        config, space = self.config, self.action_space
        check_bounds(config.env_id, space)
        self.scale = ActionScale(space)
        self.model = self.make_model(math.prod(self.observation_space.shape or ()), space.shape[0])
        self.model.to(self.device)
        self.target = copy.deepcopy(self.model.critics)
        self.log_alpha = torch.tensor(math.log(config.initial_alpha), device=self.device)
        self.log_alpha.requires_grad_(config.learn_alpha)
        entropy = config.target_entropy
        self.target_entropy = -float(space.shape[0]) if entropy is None else entropy
        self.parameters: list[Tensor] = [*self.model.parameters()]
        if config.learn_alpha:
            self.parameters.append(self.log_alpha)
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lr, fused=True)
        normalised = gym.spaces.Box(-1, 1, space.shape)
        dtype = transition_dtype(self.observation_space, normalised)
        self.replay = ReplayBuffer(config.buffer_size, dtype, derive_seed(config.seed, "replay"))
        self.noise = torch.Generator(self.device).manual_seed(derive_seed(config.seed, "noise"))

    def make_model(self, inputs: int, actions: int) -> SACModel:
        """Make actor and critics."""
        return SACModel(inputs, actions, self.config.hidden)

    @torch.inference_mode()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Draw an action from the policy, or take its middle; at first any within the bounds."""
        shape = (len(obs), *self.action_space.shape)
        if explore and self.global_step < self.config.warmup_steps:
            return self.scale.to_env(self.generator.uniform(-1, 1, shape)), state
        tensor = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        u, log_std = self.model.policy(tensor)
        if explore:
            noise = torch.from_numpy(self.generator.standard_normal(shape, dtype=np.float32))
            u = u + log_std.exp() * noise.to(self.device)
        return self.scale.to_env(u.tanh().cpu().numpy()), state

    @torch.inference_mode()
    def q_values(self, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Return what each critic (batch, critics) thinks of actions of the environment."""
        pair = (obs, self.scale.from_env(action))
        tensors = [torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in pair]
        return self.model.critics(*tensors).cpu().numpy()

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, actions scaled to (-1, 1)."""
        self.replay.add(
            make_rows(
                self.replay.rows.dtype,
                obs=transition.obs,
                action=self.scale.from_env(transition.action),
                reward=transition.reward,
                next_obs=transition.next_obs,
                terminated=transition.terminated,
                discount=self.config.gamma,
            )
        )

    def updates_due(self) -> int:
        """Count the updates that the last steps call for, once the warm-up is over."""
        config = self.config
        if self.global_step <= config.warmup_steps or len(self.replay) < config.batch_size:
            return 0
        return config.num_envs * config.updates_per_step

    def sample(self) -> Batch:
        """Draw a batch from the replay buffer."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def choose_critics(self) -> Tensor | None:
        """Say which target critics judge the next action; None is all of them."""
        return None

    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step of the critics and, when it is due, one of the policy."""
        shape = (2, *batch.action.shape)
        noise, next_noise = torch.randn(shape, generator=self.noise, device=self.device)
        obs, alpha = batch.obs.float(), self.log_alpha.detach().exp()
        loss, metrics = self.judge(obs, batch, next_noise, alpha)
        total = loss
        if (self.updates + 1) % self.config.policy_delay == 0:
            policy, policy_metrics = self.improve(obs, noise, alpha)
            total, metrics = total + policy, metrics | policy_metrics
        for parameter in self.parameters:
            parameter.grad = None
        total.backward()  # no loss has a gradient in the weights of another
        self.optimizer.step()
        polyak_update(self.target, self.model.critics, self.config.tau)
        values = {name: float(value) for name, value in metrics.items()}
        return UpdateResult(values["loss"], values)

    def judge(
        self, obs: Tensor, batch: Batch, noise: Tensor, alpha: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics, whose target is reward plus discounted soft value."""
        with torch.no_grad():
            next_obs = batch.next_obs.float()
            next_action, next_log_prob = self.model.sample(next_obs, noise)
            next_q = self.target(next_obs, next_action, self.choose_critics())
        q = self.model.critics(obs, batch.action)
        reward, discount, terminated = batch.reward, batch.discount, batch.terminated
        return self.loss(q, reward, discount, terminated, next_q, next_log_prob, alpha)

    def improve(
        self, obs: Tensor, noise: Tensor, alpha: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the policy and of the temperature."""
        action, log_prob = self.model.sample(obs, noise)
        loss = policy_loss(self.model.value(obs, action), log_prob, alpha)
        entropy = -log_prob.detach().mean()
        metrics = {"policy_loss": loss.detach(), "entropy": entropy, "alpha": alpha}
        if self.config.learn_alpha:
            loss = loss + temperature_loss(self.log_alpha, log_prob, self.target_entropy)
        return loss, metrics

    def state_dict(self) -> dict[str, Any]:
        """Return all that learning depends on, the temperature and the noise included."""
        own = {"log_alpha": self.log_alpha.detach().clone(), "noise": self.noise.get_state()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state)
        self.log_alpha.data.copy_(state["log_alpha"])
        self.noise.set_state(state["noise"].cpu())

# %%
#| export
def train_sac(config: SACConfig, progress: bool = True) -> RunResult:
    """Train SAC with these settings."""
    return train(SAC(config=config), progress)

# %% [markdown]
# ## A live run
#
# First the aiming from above, with the same number of steps and updates:

# %%
def aim_with_sac(joints: int, seed: int = 0) -> float:
    """Return what SAC scores."""
    agent = SAC("Aim-v0", env_kwargs={"joints": joints}, seed=seed, **AIM)
    agent.learn(AIM_STEPS, progress=False)
    return agent.evaluate(episodes=200).mean


sac_scores = [aim_with_sac(joints) for joints in JOINTS]
for joints, dqn_score, sac_score in zip(JOINTS, dqn_scores, sac_scores, strict=True):
    print(f"{joints} joints: DQN {dqn_score:.3f}, SAC {sac_score:.3f}")
assert sac_scores[-1] > dqn_scores[-1] + 0.2

# %% [markdown]
# Now Pendulum-v1: a torque of at most 2 is too weak to lift the pole, so it has to be swung. An
# episode is 200 steps, a return of −1200 is hanging about, and −150 is swinging up at once and
# staying. DQN gets its best chance, five torques and the same 5,000 steps, network, batch and
# number of updates.

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
PENDULUM: dict[str, Any] = {"hidden": (64, 64), "lr": 1e-3, "batch_size": 128, "warmup_steps": 250,
                            "tau": 0.01, "eval_every": 500, "eval_episodes": 20, "log_every": 100}

# %%
began = time.perf_counter()
agent = SAC("Pendulum-v1", seed=1, **PENDULUM)
run = agent.learn(5_000)
own = {"update_every": 1, "target_every": 1, "epsilon_steps": 2_500}
rival = DQN("FiveTorques-v0", seed=1, **own, **PENDULUM)
rival_run = rival.learn(5_000)
print(f"{time.perf_counter() - began:.0f} seconds for both")

# %%
def curve(result: RunResult, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of one metric."""
    lines = [line for line in result.history if name in line]
    steps, values = ([line[key] for line in lines] for key in ("global_step", name))
    return np.array(steps), np.array(values)


fig, ax = plt.subplots()
plot_band(ax, *curve(run, "eval_return_mean"), "SAC", COLORS["sac"])
plot_band(ax, *curve(rival_run, "eval_return_mean"), "DQN, five torques", COLORS["dqn"])
ax.set(xlabel="environment steps", ylabel="undiscounted return", title="Pendulum-v1")
ax.legend()
final = agent.evaluate(episodes=20)
low, high = final.interval
print(f"SAC after 5,000 steps: {final.mean:.0f}, 95 % interval {low:.0f} to {high:.0f}")
assert final.mean > -400

# %% [markdown]
# @@TO CHECK: how DQN with five torques fared. What SAC has gained is that the same code aims five
# joints at once.@@
#
# The thermostat at work. @@TO CHECK: the entropy starts high, falls as the policy grows sure, and
# settles near its target of −1; the temperature falls with it.@@

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
left.plot(*curve(run, "entropy"), color=COLORS["sac"])
left.axhline(-1, color=COLORS["reference"], linestyle="--", linewidth=1)
left.set(xlabel="environment steps", ylabel="entropy of the policy (nats)")
left.annotate("target", (4_900, -1), (0, 5), ha="right", textcoords="offset points")
right.semilogy(*curve(run, "alpha"), color=COLORS["sac"])
right.set(xlabel="environment steps", ylabel="temperature α (reward per nat)")
steps, entropy = curve(run, "entropy")
assert entropy[-5:].mean() < entropy[0]

# %% [markdown]
# ## Watch it
#
# One greedy episode, its first four seconds from left to right:

# %%
env = make_env("Pendulum-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=3)
frames, torques = [env.render()], []
for _ in range(80):
    action, _ = agent.predict(obs)
    torques.append(float(action[0]))
    obs, *_ = env.step(action)
    frames.append(env.render())
env.close()
times_shown = [f"{0.05 * step:.1f} s" for step in np.linspace(0, 80, 8).round()]
filmstrip(pick_frames(frames, 8), times_shown)

# %% [markdown]
# And a look inside. For a pole at rest, the smaller critic over angle and torque: black marks what
# the policy would do. @@TO CHECK: highest at the top (angle 0), where the best torque crosses
# zero.@@

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
assert values.max() > values.min()

# %% [markdown]
# ## What each part buys
#
# The same 5,000 steps with one part taken away, five seeds each, mean and 95 % interval.

# %%
ablations = load_result(RESULTS / "sac_ablations.json")
fig, ax = plt.subplots(figsize=(7, 4))
plot_result(ax, ablations)
print(ablations["command"])
for name, row in ablations["runs"].items():
    mean, worst = np.mean(row["final"]), min(row["final"])
    print(f"{name:>24}: {mean:6.0f} at the end, worst seed {worst:6.0f}")

# %% [markdown]
# @@ABLATION_TEXT@@

# %% [markdown]
# ## Honest edges
#
# What differs from the papers, and why:
#
# - **Both papers in one.** Twin critics and the learned temperature are from the second; the
#   separate value network of the first is gone, as in the second.
# - **One step for all.** Adam moves critics, policy and temperature together, so the policy climbs
#   the critics as they were before the step. The papers move the critics first.
# - **The temperature's loss** has $\log\alpha$ where the paper's equation has $\alpha$; the
#   authors' code has it too. The sign of the gradient is the same.
# - **Sizes.** `rlbook.sac` starts from the papers' two layers of 256, batch 256, 3·10⁻⁴ and τ =
#   0.005. The config for Pendulum has 64 units, batch 128, 10⁻³ and τ = 0.01: smaller, so that a
#   chapter can run it.
# - **Warm-up** is by random actions within the bounds, with no updates meanwhile.
#
# The papers have no Pendulum. RL Zoo reports −157 for SAC at 20,000 steps from one run; the cell
# prints ours at 10,000, for five. What this chapter does not claim: scores on MuJoCo at the
# papers' million steps. The next chapter runs SAC on Hopper for 15,000, as a rival.

# %%
final = np.array(stored["runs"]["SAC"]["final"])
last = stored["runs"]["SAC"]["steps"][-1]
print(f"ours at {last:,} steps: mean {final.mean():.0f}, worst seed {final.min():.0f}")
assert final.min() >= -200

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** A policy has σ so small that it is nearly certain. What is its entropy, roughly,
# and what does the thermostat do? Why can an entropy be negative at all?
#
# <details>
# <summary>Solution</summary>
#
# The entropy of a Gaussian is $\log\sigma + \tfrac12\log 2\pi e$, which goes to $-\infty$ as
# $\sigma \to 0$: a density may be larger than 1, so its log may be positive. It is below any
# target, so α rises until chance pays again. The target of −1 for one joint is a policy that is
# spread like a uniform density of width $e^{-1} \approx 0.37$ out of 2.
#
# </details>

# %% [markdown]
# **Exercise 2.** In `sac_target` the next action is drawn from the policy as it is now, not taken
# from the buffer. What would SAC learn if it used the stored next action?
#
# <details>
# <summary>Solution</summary>
#
# The value of the mixture of old policies that filled the buffer, as SARSA would: the critics
# would lag behind the policy by half a buffer. With the fresh action the transition only has to
# tell what the *environment* does.
#
# </details>

# %% [markdown]
# **Exercise 3.** Estimate by simulation how far the smaller of two critics is below the truth when
# each errs by a standard normal number, and how far the larger is above. Which would you rather
# climb?
#
# <details>
# <summary>Solution</summary>
#
# ```python
# errors = np.random.default_rng(0).standard_normal((100_000, 2))
# errors.min(axis=1).mean(), errors.max(axis=1).mean()  # -0.56 and 0.56
# ```
#
# Exactly it is $\mp 1/\sqrt\pi = \mp 0.564$. An error upwards attracts the policy and feeds itself
# through the target; an error downwards is only a place that is visited less.
#
# </details>

# %% [markdown]
# **Exercise 4 (a planted bug).** This loss trains without a complaint and learns badly. Its value
# is off even on one step worked by hand. What is wrong?

# %%
def buggy_target(
    reward: Tensor, discount: Tensor, terminated: Tensor, next_q: Tensor, next_log_prob: Tensor,
    alpha: Tensor,
) -> Tensor:
    next_value = next_q.amin(dim=1, keepdim=True) - alpha * next_log_prob
    return reward + discount * ~terminated * next_value


two = {name: torch.cat([x, x]) if x.ndim else x for name, x in step.items()}
buggy_target(terminated=torch.tensor([False, True]), **two)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `keepdim=True` makes the values `(batch, 1)`, and minus a `(batch,)` gives `(batch, batch)`: each
# row has the targets of all steps, and the mean over them pulls every value to the average. The
# target has to be `(batch,)`; `sac_loss` would have refused it:
#
# ```python
# assert buggy_target(terminated=torch.tensor([False, True]), **two).shape == (2, 2)
# assert sac_target(terminated=torch.tensor([False, True]), **two).shape == (2,)
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Take the correction for squashing out of `squashed_sample` and train Pendulum.
# What does the entropy's curve show, and where do the actions go?
#
# <details>
# <summary>Solution</summary>
#
# Without it the entropy is that of the Gaussian before squashing. It can be had for nothing by
# growing σ: all actions pile up at the bounds, where tanh is flat, while the thermostat believes
# that the policy is as random as asked. The density plot above, at σ = 2, is such a policy.
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.sac import SAC
#
# agent = SAC("Pendulum-v1", hidden=(64, 64), lr=1e-3, batch_size=128, warmup_steps=250, tau=0.01)
# agent.learn(5_000)
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
