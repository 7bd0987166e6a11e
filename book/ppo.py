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
# # PPO: more from each rollout
#
# A2C makes one gradient step from a rollout and throws the rollout away. In this chapter you build *proximal
# policy optimisation* (PPO), which makes forty. To do that without harm it needs one idea, a loss that is flat
# where the policy has moved far enough. PPO is the algorithm that most people try first, from robots to language
# models, and it takes discrete and continuous actions alike. The figure shows ten runs on CartPole and five on
# Pendulum.
#
# | | |
# |---|---|
# | Paper | Schulman et al. 2017, *Proximal Policy Optimization Algorithms* |
# | Observations | vectors |
# | Actions | discrete or continuous |
# | Learns | on-policy, from rollouts of several environments |
# | Same as [A2C](policy_gradient.ipynb) | policies, value network, rollout buffer, GAE |
# | Different from A2C | a clipped loss of the probability ratio; several epochs of minibatches |

# %% tags=["hide-input"]
#| export
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlbook.agent import Metrics, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import check_shapes, decayed, set_learning_rate
from rlbook.policy_gradient import (
    A2C,
    A2CConfig,
    RolloutBatch,
    clip_gradients,
    explained_variance,
    normalize,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config

# %% tags=["hide-input"]
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from matplotlib import pyplot as plt

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
from rlbook.preprocess import RunningStatistics
from rlbook.run import Collector

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()

# %% tags=["hide-input"]
cartpole, pendulum = load_result("results/ppo_cartpole.json"), load_result("results/ppo_pendulum.json")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
plot_result(left, cartpole)
plot_result(right, pendulum)
right.axhline(-172, color=COLORS["reference"], linestyle="--", linewidth=1)
right.annotate("RL Zoo, 100,000 steps", (60_000, -172), (0, 5), ha="right", textcoords="offset points")
plt.show()
for result in (cartpole, pendulum):
    print(made_by(result))
    print("last evaluation of each seed:", *(round(score) for score in result["runs"]["ppo"]["final"]))
assert min(cartpole["runs"]["ppo"]["final"]) >= 475
assert np.mean(pendulum["runs"]["ppo"]["final"]) >= -220

# %% [markdown]
# Every one of the ten seeds balances the pole after 50,000 steps, and the mean of the five on
# Pendulum is better than −220 after 60,000. The dashed line is the score of one run in the RL Zoo,
# a public collection of trained agents.
#
# ## The problem: a second step on the same data
#
# Data is expensive, so why not make several gradient steps on a rollout? Try it with A2C and
# rollouts of 1,024 steps. An *epoch* is a pass over all steps of a rollout, in random order and
# in *minibatches*. Ten epochs of four minibatches make forty gradient steps.

# %%
class ReusingA2C(A2C):
    """A2C that makes forty gradient steps from each rollout in place of one."""

    def batches(self) -> Iterator[RolloutBatch]:
        """Yield minibatches of a full rollout, ten times over."""
        if self.rollout.full:
            rollout = self.finish_rollout()
            for _ in range(10):
                for indices in self.generator.permutation(len(rollout)).reshape(4, -1):
                    yield rollout[torch.from_numpy(indices)]
            self.rollout.clear()


SAME: dict[str, Any] = {"num_steps": 128, "lr": 1e-3, "lr_decay_from": 1.0, "total_steps": 20_000}
OFTEN: dict[str, Any] = {"eval_every": 2_000, "log_every": 1_024}
reusing = train(ReusingA2C.from_config("cartpole", **SAME, **OFTEN, seed=0))
once = train(A2C.from_config("cartpole", **SAME, **OFTEN, seed=0))
entropy = reusing.curve("entropy")[1]
print(f"forty steps a rollout: entropy {entropy[0]:.2f} at first, {entropy[-1]:.3f} at the end")
assert entropy[-1] < 0.3 < once.curve("entropy")[1][-1]

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, color, result in (
    ("forty steps a rollout", "#111111", reusing), ("one step a rollout", COLORS["a2c"], once)
):
    left.plot(*result.curve("eval_return_mean"), color=color, marker="o", label=name)
    right.plot(*result.curve("entropy"), color=color)
label_curves(left, "CartPole-v1, one seed each")
left.legend()
label_curves(right, ylabel="entropy (nats)")
right.set(ylim=(0, 0.72))
plt.show()

# %% [markdown]
# It learns fast at first, and then it breaks: its entropy falls close to 0. The policy is certain of what it does,
# right or wrong, and hardly tries anything else. The return jumps up and down.
#
# Look closer at one rollout to see why. Take an A2C agent that has learned a little, collect one
# rollout, and make 40 steps on it. Watch the loss, and how far the policy has moved from the one
# that collected the rollout. The *KL divergence* measures that. It is 0 if both policies are
# equal and positive otherwise: $\operatorname{mean}\bigl[\sum_a \pi_{\text{old}}(a \mid s) \log
# \frac{\pi_{\text{old}}(a \mid s)}{\pi_\theta(a \mid s)}\bigr]$ over the states of the rollout.

# %%
STEPS = 40
student = A2C.from_config("cartpole", seed=2, num_steps=128, lr_decay_from=1.0, eval_every=0)
student.learn(10_000, progress=False)
student.rollout.clear()
collector = Collector(student)
while not student.rollout.full:
    collector.step()
collector.envs.close()
batch = student.finish_rollout()  # 1,024 steps


def a2c_policy_loss(agent: A2C) -> float:
    """Return the loss of A2C's policy on the rollout."""
    with torch.no_grad():
        log_prob = agent.policy(batch.obs).log_prob(batch.action)
    return -(log_prob * normalize(batch.advantage)).mean().item()


def distance(agent: A2C) -> float:
    """Return the KL divergence of the policy from the one that collected the rollout."""
    with torch.no_grad():
        old, new = student.policy(batch.obs), agent.policy(batch.obs)
    return torch.distributions.kl_divergence(old, new).mean().item()


def steps_on_one_rollout(agent: A2C) -> tuple[list[float], list[float]]:
    """Make the steps, and return loss and distance before each of them and after the last."""
    losses, distances = [a2c_policy_loss(agent)], [distance(agent)]
    for _ in range(STEPS):
        agent.update(batch)
        losses.append(a2c_policy_loss(agent))
        distances.append(distance(agent))
    return losses, distances


losses, distances = steps_on_one_rollout(copy.deepcopy(student))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, KL divergence 0 to {distances[-1]:.2f}")
assert losses[-1] < losses[0] - 0.5 and distances[-1] > 1

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8))
for ax, ys, label in (
    (axes[0], losses, "A2C's policy loss"), (axes[1], distances, "KL divergence (nats)")
):
    ax.plot(range(STEPS + 1), ys, color=COLORS["a2c"])
    ax.set(xlabel="gradient steps on one rollout", ylabel=label)
plt.show()

# %% [markdown]
# The loss falls without end, and it means less and less. The advantages say how good the actions
# were *for the old policy, in the states that it visits*. The further the new policy moves, the
# less they say about it. But nothing in $-\hat A \log \pi_\theta(a \mid s)$ knows that: an action
# that turned out well once is pushed towards probability 1, and one that turned out badly towards
# 0, where the logarithm has no lower bound.
#
# ## The ratio
#
# The first repair is to say what you want. The data comes from the old policy; what would the mean advantage be
# under the new one? Weigh each action by how much more likely it has become, the **probability ratio**
#
# $$\rho_t = \frac{\pi_\theta(a_t \mid s_t)}{\pi_{\text{old}}(a_t \mid s_t)}$$
#
# and maximise $\operatorname{mean}[\rho_t \hat A_t]$. At first $\rho = 1$, and the gradient is exactly that of A2C,
# because $\nabla \rho = \rho\, \nabla \log \pi_\theta$. By hand: two actions with probability 1/2 each, and the first
# had the advantage 1. The derivative of $\log \pi$ with respect to its logit is $1 - \pi = 0.5$, and so is that of
# $\rho$. In code the ratio is $e^{\log \pi_\theta - \log \pi_{\text{old}}}$, since log-probabilities are what you have.

# %%
logits = torch.zeros(2, requires_grad=True)
log_prob = torch.distributions.Categorical(logits=logits).log_prob(torch.tensor(0))
old_log_prob = torch.tensor(0.5).log()
by_log = torch.autograd.grad(log_prob * 1.0, logits, retain_graph=True)[0]
by_ratio = torch.autograd.grad((log_prob - old_log_prob).exp() * 1.0, logits)[0]
assert torch.allclose(by_log, torch.tensor([0.5, -0.5])) and torch.allclose(by_ratio, by_log)

# %% [markdown]
# ## The clipped objective
#
# The ratio alone sets no limit: for a good action the objective grows with $\rho$, up to
# $\rho = 1 / \pi_{\text{old}}$. PPO takes away the gain outside the range from $1 - \varepsilon$
# to $1 + \varepsilon$. The *clip range* $\varepsilon$ (not the ε of ε-greedy) is usually 0.2:
#
# $$L^{\text{clip}} = \operatorname{mean}\Bigl[\min\bigl(\rho_t \hat A_t,\;
#   \operatorname{clip}(\rho_t, 1 - \varepsilon, 1 + \varepsilon)\, \hat A_t\bigr)\Bigr]$$
#
# The minimum makes the objective pessimistic. Gains are capped: for a good action ($\hat A > 0$)
# it is no larger than at $\rho = 1 + \varepsilon$, and for a bad one no larger than at
# $\rho = 1 - \varepsilon$. Losses are not capped: if the ratio went the wrong way, the gradient
# pulls it back. By hand, with $\varepsilon = 0.2$:
#
# | $\rho$ | $\hat A$ | $\rho \hat A$ | clipped | the smaller | gradient with respect to $\rho$ |
# |---|---|---|---|---|---|
# | 1.5 | 1 | 1.5 | 1.2 | 1.2 | 0: far enough |
# | 0.5 | 1 | 0.5 | 0.8 | 0.5 | 1: the wrong way, so back |
# | 1.5 | −1 | −1.5 | −1.2 | −1.5 | −1: the wrong way, so back |
# | 0.5 | −1 | −0.5 | −0.8 | −0.8 | 0: far enough |

# %%
#| export
def clipped_objective(ratio: Tensor, advantage: Tensor, clip_range: Tensor | float) -> Tensor:
    """Return what PPO maximises, for each step: no gain from a ratio beyond the clip range."""
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)  # type: ignore[arg-type]
    return torch.minimum(ratio * advantage, clipped * advantage)

# %%
ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], requires_grad=True)
advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
objective = clipped_objective(ratio, advantage, clip_range=0.2)
objective.sum().backward()
torch.testing.assert_close(objective, torch.tensor([1.2, 0.5, -1.5, -0.8]))
assert ratio.grad.tolist() == [0, 1, -1, 0]

# %% [markdown]
# This is the first figure of the paper, drawn with this function. The dot at $\rho = 1$ is where
# the updates on a rollout start.

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(7, 2.6))
ratios = torch.linspace(0, 2, 201)
for ax, a in zip(axes, (1.0, -1.0), strict=True):
    signs = torch.full_like(ratios, a)
    ax.plot(ratios, ratios * signs, "--", color=COLORS["reference"], linewidth=1, label="ρ · A")
    ax.plot(ratios, clipped_objective(ratios, signs, 0.2), color=COLORS["ppo"], label="clipped")
    ax.plot(1, a, "o", color=COLORS["ppo"])
    ax.axvline(1 + 0.2 * a, color="#999999", linestyle=":")
    ax.set(xlabel="probability ratio ρ", title=f"advantage {a:+.0f}".replace("-", "−"))
axes[0].set_ylabel("objective")
axes[0].legend()
plt.show()

# %% [markdown]
# ## The loss
#
# The rest of the loss is that of A2C: the squared error of the values and an entropy bonus. Some
# implementations clip the values as well. Then a value may not gain from moving further than $\varepsilon$ from
# $V_{\text{old}}$, its value when the rollout was collected:
# $\max\bigl((V - y)^2,\, (V_{\text{old}} + \operatorname{clip}(V - V_{\text{old}}, -\varepsilon, \varepsilon) - y)^2\bigr)$.
# It is a setting, off by default, and measured below.
#
# Two new metrics say how far the policy has moved. The *clip fraction* is the share of steps whose ratio is out of
# range. The *approximate KL* is $\operatorname{mean}[\rho - 1 - \log\rho]$, an estimate of the KL divergence from
# samples of the old policy that is never negative.
#
# By hand: one step with $\log \pi = \log 0.75$, $\log \pi_{\text{old}} = \log 0.5$, advantage 1, value 3, old value
# 2, return 4, entropy 0.5, $c_V = 0.5$ and $c_H = 0.1$. The ratio is 1.5, so the policy loss is $-1.2$. The value loss is
# $1$, or with clipping $(2 + 0.2 - 4)^2 = 3.24$. The loss is $-1.2 + 0.5 - 0.05 = -0.75$, and the approximate KL
# $1.5 - 1 - 0.405 = 0.095$.

# %%
#| export
def approximate_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Estimate from actions of the old policy how far the new one is from it: never below 0."""
    log_ratio = log_prob - old_log_prob
    return (log_ratio.exp() - 1 - log_ratio).mean()


def ppo_loss(
    log_prob: Tensor,  # (batch,), of the actions that were taken, with gradient
    old_log_prob: Tensor,  # (batch,), when they were taken
    entropy: Tensor,  # (batch,), of the policy, with gradient
    value: Tensor,  # (batch,), with gradient
    old_value: Tensor,  # (batch,), when the actions were taken
    advantage: Tensor,  # (batch,)
    returns: Tensor,  # (batch,)
    clip_range: Tensor | float,
    value_coefficient: float,
    entropy_coefficient: float,
    clip_value_loss: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the clipped loss of policy and value network together, and metrics."""
    check_shapes(
        len(log_prob),
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        entropy=entropy,
        value=value,
        old_value=old_value,
        advantage=advantage,
        returns=returns,
    )
    ratio = (log_prob - old_log_prob).exp()
    policy_loss = -clipped_objective(ratio, advantage, clip_range).mean()
    squared_error = (value - returns).square()
    if clip_value_loss:
        near = value.clamp(old_value - clip_range, old_value + clip_range)
        squared_error = torch.maximum(squared_error, (near - returns).square())
    value_loss = squared_error.mean()
    loss = policy_loss + value_coefficient * value_loss - entropy_coefficient * entropy.mean()
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach().mean(),
            "approximate_kl": approximate_kl(log_prob, old_log_prob),
            "clip_fraction": ((ratio - 1).abs() > clip_range).float().mean(),
            "explained_variance": explained_variance(old_value, returns),
        }
    return loss, metrics

# %%
one = {
    "log_prob": torch.tensor([0.75]).log(), "old_log_prob": torch.tensor([0.5]).log(),
    "entropy": torch.tensor([0.5]), "value": torch.tensor([3.0]), "old_value": torch.tensor([2.0]),
    "advantage": torch.tensor([1.0]), "returns": torch.tensor([4.0]),
    "clip_range": 0.2, "value_coefficient": 0.5, "entropy_coefficient": 0.1,
}
loss, metrics = ppo_loss(**one)
torch.testing.assert_close(loss, torch.tensor(-0.75))
assert abs(metrics["approximate_kl"].item() - 0.095) < 1e-3 and metrics["clip_fraction"] == 1
assert abs(ppo_loss(**one, clip_value_loss=True)[1]["value_loss"].item() - 3.24) < 1e-5
{name: round(value.item(), 3) for name, value in metrics.items()}

# %% [markdown]
# ## Settings
#
# PPO adds to the settings of A2C: it makes `epochs` passes over each rollout, in random
# minibatches of `minibatch_size` steps. A rollout must divide into minibatches. Advantages are
# normalised in each minibatch. Learning rate and clip range may be *annealed*: `lr_decay_from: 0`
# and `clip_range_decay_from: 0` let them fall linearly to 0 over the run, so that the last
# updates are small. `target_kl` is a second brake, off by default: when the approximate KL over
# the rollout exceeds it after an epoch, the remaining epochs are left out.

# %%
#| export
def check_minibatches(rollout_size: int, minibatch_size: int) -> None:
    """Raise unless a rollout divides into minibatches."""
    if rollout_size % minibatch_size:
        raise ValueError(
            f"Setting 'minibatch_size' ({minibatch_size}) must divide a rollout, "
            f"'num_steps' times 'num_envs' ({rollout_size})."
        )


class PPOConfig(A2CConfig):
    """The settings of PPO."""

    num_steps: int = Field(default=128, ge=1, description="Steps of each environment in a rollout.")
    epochs: int = Field(default=10, ge=1, description="How often each rollout is learned from.")
    minibatch_size: int = Field(default=256, ge=1, description="Steps of one update.")
    lr: float = Field(default=3e-4, gt=0, description="Learning rate of Adam.")
    clip_range: float = Field(
        default=0.2, gt=0, description="How far a probability ratio may move from 1."
    )
    clip_range_decay_from: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the run after which clip_range falls."
    )
    clip_value_loss: bool = Field(
        default=False, description="Clip how far values move, too, by the same range."
    )
    target_kl: float | None = Field(
        default=None, gt=0, description="Leave a rollout when the approximate KL exceeds this."
    )
    normalize_advantages: bool = Field(
        default=True, description="Give the advantages of a minibatch mean 0 and deviation 1."
    )

    @model_validator(mode="after")
    def check_division(self) -> Self:
        """Raise unless a rollout divides into minibatches that can be normalised."""
        check_minibatches(self.rollout_size, self.minibatch_size)
        if self.normalize_advantages and self.minibatch_size == 1:
            raise ValueError(
                "Setting 'normalize_advantages' needs a 'minibatch_size' of at least two steps."
            )
        return self

    def clip_range_now(self, step: int) -> float:
        """Return the clip range at a step."""
        return decayed(self.clip_range, step / self.total_steps, self.clip_range_decay_from)

# %%
config = PPOConfig(clip_range_decay_from=0.0, total_steps=1_000)
assert config.rollout_size == 1_024 and config.clip_range_now(500) == 0.1
try:
    PPOConfig(minibatch_size=100)
except ValueError as error:
    print(error)

# %% [markdown]
# ## The agent
#
# What changes from A2C: `batches` yields a rollout many times, in minibatches, and may stop early; the loss is the
# clipped one. Everything else is inherited: networks, `act`, `observe`, `forward` and `finish_rollout`, which computes
# advantages, log-probabilities and values with the networks that collected the rollout, once, before the first of the
# updates. Those are the *old* ones, and they stay as they are through all epochs.
#
# | step | equation | in the code |
# |---|---|---|
# | 1 | collect a rollout with $\pi_{\text{old}}$ | `act`, `observe` |
# | 2 | $\hat A$, $y$, $\log \pi_{\text{old}}$, $V_{\text{old}}$ | `finish_rollout` |
# | 3 | for each epoch, each minibatch: $\rho = e^{\log \pi_\theta - \log \pi_{\text{old}}}$ | `batches`, `shuffled`, `compute_gradients` |
# | 4 | $L = -L^{\text{clip}} + c_V \operatorname{mean}[(V - y)^2] - c_H \operatorname{mean}[H]$ and its gradient | `ppo_loss`, `loss.backward()` |
# | 5 | $\theta \leftarrow$ a step of Adam | `update` |
#
# The clip range falls while the agent learns, so it is given to `compute_gradients` as a tensor: a compiled method
# would be compiled again for each new Python number.

# %%
#| export
class PPO(A2C):
    """A policy that learns from each rollout for several epochs of clipped steps."""

    name: ClassVar[str] = "ppo"
    config_class: ClassVar[type[Config]] = PPOConfig
    config: PPOConfig

    def batches(self) -> Iterator[RolloutBatch]:
        """Yield minibatches of a full rollout, for several epochs."""
        if not self.rollout.full:
            return
        config, rollout = self.config, self.finish_rollout()
        for _ in range(config.epochs):
            for indices in self.shuffled(len(rollout)).split(config.minibatch_size):
                yield rollout[indices]
            if config.target_kl is not None and self.kl_from(rollout) > config.target_kl:
                break  # the policy has moved far enough from the one that collected the rollout
        self.rollout.clear()

    def shuffled(self, count: int) -> Tensor:
        """Return the indices of `count` steps in random order."""
        return torch.from_numpy(self.generator.permutation(count)).to(self.device)

    @torch.no_grad()
    def kl_from(self, rollout: RolloutBatch) -> Tensor:
        """Estimate how far the policy is from the one that collected a rollout."""
        distribution, _ = self.forward(rollout)
        return approximate_kl(distribution.log_prob(rollout.action), rollout.log_prob)

    def compute_gradients(
        self, batch: RolloutBatch, clip_range: Tensor | float = torch.inf
    ) -> Metrics:
        """Backpropagate the loss of a minibatch, clipped if there is a clip range."""
        config, advantage = self.config, batch.advantage
        if config.normalize_advantages:
            advantage = normalize(advantage)
        distribution, value = self.forward(batch)
        loss, metrics = ppo_loss(
            distribution.log_prob(batch.action),
            batch.log_prob,
            distribution.entropy(),
            value,
            batch.value,
            advantage,
            batch.returns,
            clip_range,
            config.value_coefficient,
            config.entropy_coefficient,
            config.clip_value_loss,
        )
        loss.backward()
        return metrics

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Make one gradient step of both networks."""
        config = self.config
        clip_range = torch.tensor(config.clip_range_now(self.global_step), device=self.device)
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch, clip_range)
        clip_gradients(self.optimizer, config.max_grad_norm)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        return UpdateResult(metrics)


def train_ppo(config: PPOConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train PPO with these settings."""
    return train(PPO(config=config), progress, callbacks)

# %% [markdown]
# By hand: 2 environments and 8 steps of each give a rollout of 16. With minibatches of 4 an epoch
# has 4 updates, and three epochs have 12. Each epoch has every step once, in an order of its own.

# %%
small = PPO("CartPole-v1", num_envs=2, num_steps=8, minibatch_size=4, epochs=3)
collector = Collector(small)
while not small.rollout.full:
    collector.step()
collector.envs.close()
minibatches = list(small.batches())
assert len(minibatches) == 12
epochs = [torch.cat([m.returns for m in minibatches[i : i + 4]]) for i in (0, 4, 8)]
assert torch.equal(epochs[0].sort().values, epochs[2].sort().values)  # the same steps
assert not torch.equal(epochs[0], epochs[2])  # in another order

# %% [markdown]
# ## The second step again
#
# The same student, the same rollout, and 40 gradient steps with PPO's loss next to those with A2C's.
# A clip range that is never reached shows what the ratio does alone:

# %%
curves = {"A2C": (losses, distances)}
for name, clip_range in (("the ratio alone", 1e6), ("PPO", 0.2)):
    careful = PPO.from_config("cartpole", clip_range=clip_range, clip_range_decay_from=1.0,
                              lr=student.config.lr, lr_decay_from=1.0)
    for part in ("policy", "value_network", "optimizer"):
        getattr(careful, part).load_state_dict(copy.deepcopy(getattr(student, part).state_dict()))
    curves[name] = steps_on_one_rollout(careful)
moved = {name: curve[-1] for name, (_, curve) in curves.items()}
print(f"KL divergence after {STEPS} steps:", {name: round(kl, 4) for name, kl in moved.items()})
assert moved["PPO"] < moved["the ratio alone"] / 50 and moved["the ratio alone"] < moved["A2C"]

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8))
styles = {"A2C": (COLORS["a2c"], "-"), "the ratio alone": (COLORS["ppo"], ":"), "PPO": (COLORS["ppo"], "-")}
for name, (loss_curve, kl_curve) in curves.items():
    color, style = styles[name]
    axes[0].plot(range(STEPS + 1), loss_curve, style, color=color, label=name)
    axes[1].semilogy(range(1, STEPS + 1), kl_curve[1:], style, color=color, label=name)
for ax, label in zip(axes, ("A2C's policy loss", "KL divergence (nats)"), strict=True):
    ax.set(xlabel="gradient steps on one rollout", ylabel=label)
axes[0].legend()
plt.show()

# %% [markdown]
# With the ratio alone the policy still moves far, though less than with A2C's loss: a bad action
# that has become unlikely has a small ratio, so it is hardly pushed down any further. Clipping
# makes the difference. It does not hold the policy in a fixed range: an action whose own gradient
# is zero still becomes more or less likely when the gradients of other actions change the
# network. But the
# objective gains nothing from going on, so the policy moves far less than with A2C's loss.
#
# ## Does it compute the right values?
#
# The probes of the last chapter, with several epochs: the values of two steps, and of a reward for ever that is cut
# off every 10 steps. A third agent takes each cut for the end, and is wrong by more than half:

# %%
PROBE: dict[str, Any] = {"hidden": (16,), "num_steps": 16, "minibatch_size": 32, "epochs": 4, "lr": 5e-3,
                         "gamma": 0.9, "eval_every": 0}
two, forever = PPO("rlbook/TwoStep-v0", **PROBE), PPO("rlbook/ConstantReward-v0", **PROBE)
two.learn(4_000, progress=False)
forever.learn(8_000, progress=False)
found = two.values(np.array([[-1.0], [0.0]], np.float32)), forever.values(np.ones((1, 1), np.float32))
short_sighted = PPO("rlbook/ConstantReward-v0", **PROBE, bootstrap_truncated=False)
short_sighted.learn(4_000, progress=False)
wrong = short_sighted.values(np.ones((1, 1), np.float32))
print("two steps:", found[0].round(2), " for ever:", found[1].round(1), " cuts as ends:", wrong.round(1))
assert np.allclose(found[0], [0.9, 1.0], atol=0.05) and np.allclose(found[1], 10, atol=0.5) and wrong < 5

# %% [markdown]
# ## A live run
#
# CartPole with the shipped settings for 30,000 steps, and A2C with its own for the same number:

# %%
began = time.process_time()
agent = PPO.from_config("cartpole", total_steps=30_000, seed=0)
run = train(agent)
rival = train(A2C.from_config("cartpole", total_steps=30_000, seed=0))
print(f"{time.process_time() - began:.0f} seconds of processor time for both")
steps, returns = run.curve("eval_return_mean")
assert returns.max() > 300  # whatever comes after

# %% tags=["hide-input"]
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3.2))
left.plot(steps, returns, color=COLORS["ppo"], marker="o", label="PPO, one seed")
left.plot(*rival.curve("eval_return_mean"), color=COLORS["a2c"], marker="o", label="A2C, one seed")
label_curves(left, "CartPole-v1")
left.legend()
middle.semilogy(*run.curve("approximate_kl"), color=COLORS["ppo"])
label_curves(middle, "PPO", "approximate KL (nats)")
right.plot(*run.curve("clip_fraction"), color=COLORS["ppo"])
label_curves(right, "PPO", "clip fraction")
right.set_ylim(bottom=0)
plt.show()

# %% [markdown]
# PPO balances the pole for nearly 500 steps after half of the run; A2C is at about 100 at the
# end. The approximate KL falls together with the learning rate and the clip range. The clip
# fraction, which jumps because it is that of single minibatches, does not fall with them: the steps
# become smaller, but so does the range.
#
# Then Pendulum, whose actions are real numbers. The class is the same, with a Gaussian in place
# of the categorical policy; the settings are named `pendulum`.

# %%
swinger, default = PPO.from_config("pendulum", seed=0, eval_every=0), PPOConfig()
print({name: value for name, value in swinger.config if value != getattr(default, name)})
before = swinger.evaluate(episodes=20).mean
swing = train(swinger)
after = swinger.evaluate(episodes=20).mean
print(f"Pendulum-v1: return {before:.0f} before and {after:.0f} after {swinger.global_step:,} steps")
assert after > before + 300

# %% [markdown]
# ## Watch it
#
# The first five seconds of one greedy episode, from left to right:

# %%
env = make_env("Pendulum-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=3)
frames, times_shown = [], []
for moment in range(106):
    if moment % 15 == 0:
        frames.append(env.render())
        times_shown.append(f"{0.05 * moment:.1f} s")
    obs, *_ = env.step(swinger.predict(obs)[0])
env.close()
filmstrip(frames, times_shown)

# %% [markdown]
# And a look inside: the torque that the policy would choose, and the value of the state, over the
# angle of the pole and its speed. The value is highest where the pole is near the top or swings
# towards it. Values are much smaller than returns: rewards count a tenth here, and with $\gamma = 0.9$ only
# some ten steps matter.

# %% tags=["hide-input"]
angles, speeds = np.linspace(-np.pi, np.pi, 61), np.linspace(-8, 8, 61)
angle, speed = (grid.ravel() for grid in np.meshgrid(angles, speeds))
obs = np.stack([np.cos(angle), np.sin(angle), speed], axis=1).astype(np.float32)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
extent = (-np.pi, np.pi, -8.0, 8.0)
labels = ("angle (rad), 0 is up", "speed (rad/s)")
plot_heatmap(left, swinger.predict(obs)[0].reshape(61, 61), extent, *labels, "torque (N m)")
values = swinger.values(obs)
plot_heatmap(right, values.reshape(61, 61), extent, *labels, "value")
plt.show()
assert abs(angle[values.argmax()]) < 1.2  # the value is highest near the top

# %% [markdown]
# ## Observations of different sizes
#
# Orthogonal weights and tanh expect inputs of about the size of 1. The setting `normalize_observations` standardises
# each entry of an observation by its running mean and deviation:
#
# $$\tilde s = \operatorname{clip}\Bigl(\frac{s - \mu}{\sigma},\, -10,\, 10\Bigr)$$
#
# By hand: a position with the mean 200 mm and the deviation 400 mm that is now at 800 mm becomes
# $(800 - 200) / 400 = 1.5$. [What the network sees](preprocess.ipynb) builds it and its companion
# `normalize_rewards`. The statistics belong to the agent: they are in its checkpoint, `predict` applies them, and
# evaluations leave them as they are.

# %%
statistics = RunningStatistics((1,))
statistics.update(np.array([[-200.0], [600.0]]))  # mean 200, deviation 400
assert abs(statistics.standardize(np.array([800.0]))[0] - 1.5) < 1e-6

# %% [markdown]
# PPO often copes with entries that are not of this size, because Adam's steps do not depend on the
# size of a gradient. But a large entry that is not centred breaks it. Give CartPole a barometer,
# which says nothing about the pole and reads 101,325 pascal, give or take 100. Two seeds each,
# 15,000 steps, with and without it:

# %%
class Barometer(gym.ObservationWrapper):
    """CartPole with a fifth entry: the pressure of the air."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        """Add the pressure."""
        return np.append(obs, self.np_random.normal(101_325, 100)).astype(np.float32)


gym.register("CartPoleWithBarometer-v0", lambda **kwargs: Barometer(gym.make("CartPole-v1", **kwargs)))
finals: dict[tuple[str, bool], list[float]] = {}
for env_id in ("CartPole-v1", "CartPoleWithBarometer-v0"):
    for normalized in (False, True):
        for seed in range(2):
            sailor = PPO.from_config(
                "cartpole", env_id=env_id, normalize_observations=normalized,
                total_steps=15_000, eval_every=0, seed=seed,
            )
            train(sailor, progress=False)
            score = sailor.evaluate(episodes=20).mean
            finals.setdefault((env_id, normalized), []).append(score)
for (env_id, normalized), scores in finals.items():
    how = "normalised" if normalized else "as they come"
    print(f"{env_id:26}{how:14}" + "".join(f"{x:5.0f}" for x in scores))
assert max(finals["CartPoleWithBarometer-v0", False]) < 50 < min(finals["CartPoleWithBarometer-v0", True])

# %% [markdown]
# Without normalisation, the pressure drives the hidden units to −1 or 1, where tanh is flat. No
# gradient reaches the other four entries, and the cart is pushed to the same side for ever. With
# it, the barometer is only one more entry of noise. But compare the runs without a barometer: on CartPole
# itself, whose entries have about the right size, normalising costs some of the first 15,000 steps. It is
# for observations that need it.

# %% [markdown]
# ## Details that matter
#
# PPO is known for details that papers hardly mention. Here are five seeds each on CartPole, with one detail taken
# away at a time. Indigo is the whole algorithm, black the variant: the line is the mean, the band its 95 % interval.
# Below, each dot is the last evaluation of a seed, the diamond their interquartile mean (IQM), and the bar its 95 %
# interval, as [Sweeps](sweep.ipynb) explains them. *One epoch* learns from each rollout once. *Truncated counts as
# terminated* bootstraps with nothing where the time limit cuts an episode off.

# %% tags=["hide-input"]
details = load_result("results/ppo_details.json")
draw_parts(plt.figure(), details)
plt.show()
print(made_by(details))

# %% [markdown]
# **Epochs** matter most here: with one pass over each rollout the IQM is 101, with ten it is 477.
# For the other details, five seeds on so easy a task show little, because the seeds differ more
# than the variants do. Without clipping the IQM is 441, not clearly worse: on this task the ratio
# alone, with a learning rate that falls, seems to be enough. Without normalised advantages it is
# 369, with two seeds below 200 in place of one. Initialisation, value clipping and
# truncation make no difference that five seeds could show; CartPole cuts an episode off only
# after 500 steps, and the probe above shows where truncation does count. **Annealing** seems to do
# harm here: without it, all five seeds end above 490. A run as short as this one has no time for
# small steps at the end. With 50,000 steps, in the first figure, annealed runs stay at 500.
#
# ## Beside Stable-Baselines3
#
# Does another implementation, at the same settings, learn as fast? Both train at the settings of the RL Zoo for
# CartPole, ten seeds each, and play the same evaluation episodes. [Figures](figures.ipynb) explains the title.

# %% tags=["hide-input"]
show_parity("results/parity_ppo.json")

# %% [markdown]
# The interval holds 0: ten seeds show no difference. At these settings, which are not the shipped ones, runs of both
# swing widely before they settle; at the end one of our ten is at 411, and all others of both are at 500.
#
# The same on Hopper, a leg of four parts that has to hop forward without falling
# (`pip install 'rlbook[mujoco]'`), with continuous actions and 100,000 steps, at the default
# settings of Stable-Baselines3, except that the 2,048 steps of a rollout come from eight
# environments, 256 from each:

# %% tags=["hide-input"]
for who, run in load_result("results/parity_ppo_hopper.json")["runs"].items():
    print(f"{who}: last evaluation of each seed", *(round(score) for score in run["final"]))
show_parity("results/parity_ppo_hopper.json")

# %% [markdown]
# The interval holds 0: ten seeds of each show no difference. The first five did, −289 with an
# interval from −465 to −114, so we looked for a cause and found none: a test gives both sides the
# same weights and the same rollout with continuous actions, and their parameters after the updates
# agree. Five more seeds gave the answer. Some runs learn to hop and get beyond 1,500, and most do
# not yet after 100,000 steps, so the seeds differ far more than the two sides do.
#
# ## How fast is it?
#
# All train at the settings of the RL Zoo for CartPole, where 20 updates follow each rollout of
# 256 steps. They take turns on one thread, and what counts is processor time. `compile: true`
# compiles `compute_gradients`; the collecting, the clipping of the gradients and Adam stay as
# they are. *Eager* is without it, and SBX has the same algorithm in JAX. The factor is the median of the ratios
# within each turn, not the ratio of the medians. [Speed](speed.ipynb) says how it was measured.

# %%
speed = json.loads(Path("results/speed.json").read_text())
print(made_by(speed))
contest = speed["peers"]["ppo"]
for who, took in contest["works"].items():
    print(f"{who:20}{took['ms'][0]:.3f} ms a step, {took['speedup'][0]:.2f} times as fast as Stable-Baselines3")

# %% [markdown]
# ## Honest edges
#
# | paper | here | why |
# |---|---|---|
# | MuJoCo: clip 0.2 and lr 3·10⁻⁴, fixed; Atari: clip 0.1 and lr 2.5·10⁻⁴, annealed | annealed in the settings for CartPole; the learning rate alone for Pendulum | the last updates become small |
# | 1 million steps of MuJoCo, 40 million frames of Atari | CartPole, Pendulum, and 100,000 steps of Hopper | two cores and no GPU |
# | σ of a Gaussian independent of the state | the same | |
# | one network with two heads on Atari | two networks | vectors are cheap |
#
# - **Observations are not normalised by default**, nor are rewards. For robots most implementations do both:
#   `normalize_observations` and `normalize_rewards` are settings here.
# - **`target_kl`** is checked after each epoch, on the whole rollout. Stable-Baselines3 checks each minibatch, and
#   allows 1.5 times the target.
# - **The metrics** in a log line are those of the last minibatch of each rollout, averaged over the rollouts since
#   the line before. Stable-Baselines3 averages over all minibatches.
# - Clipping bounds the gain, not the policy. There is no guarantee that an update does no harm;
#   [TRPO](trpo.ipynb), which PPO simplifies, has one in theory.
# - RL Zoo reports 500 on CartPole at 100,000 steps and −172 on Pendulum at 100,000, each from one run.
#
# ## Exercises
#
# **Exercise 1.** With one epoch and one minibatch PPO makes a single step per rollout. Which algorithm is it then?
# Check it on a rollout.
#
# <details>
# <summary>Solution</summary>
#
# A2C with normalised advantages: the ratio is 1, nothing is clipped, and the gradient of $\rho$ is that of
# $\log \pi$.
#
# ```python
# agent = PPO("CartPole-v1", num_envs=2, num_steps=8, minibatch_size=16, epochs=1, eval_every=0)
# obs, action = torch.randn(16, 4), torch.randint(2, (16,))
# with torch.no_grad():
#     log_prob, value = agent.policy(obs).log_prob(action), agent.value_network(obs)
# batch = RolloutBatch(obs, action, torch.randn(16), torch.randn(16), log_prob, value)
# agent.compute_gradients(batch, torch.tensor(0.2))
# mine = [p.grad.clone() for p in agent.policy.parameters()]
# agent.optimizer.zero_grad()
# A2C.compute_gradients(agent, batch)
# for one, other in zip(mine, agent.policy.parameters(), strict=True):
#     torch.testing.assert_close(one, other.grad, atol=1e-6, rtol=1e-4)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Two actions have the probability 1/2 each, the first had the advantage 1, and you maximise the
# clipped objective by gradient ascent on the logits. Where does the probability stop? And with the ratio alone?
#
# <details>
# <summary>Solution</summary>
#
# The gradient vanishes as soon as $\rho > 1.2$, so at a probability just above 0.6. The ratio alone goes on to 1.
#
# ```python
# def climb(clip_range: float) -> float:
#     logits = torch.zeros(2, requires_grad=True)
#     for _ in range(2_000):
#         ratio = logits.softmax(dim=0)[:1] / 0.5
#         gain = clipped_objective(ratio, torch.ones(1), clip_range).sum()
#         with torch.no_grad():
#             logits += 0.05 * torch.autograd.grad(gain, logits)[0]
#     return logits.softmax(dim=0)[0].item()
#
# assert 0.6 <= climb(0.2) < 0.62 and climb(1e6) > 0.95
# ```
#
# </details>

# %% [markdown]
# **Exercise 3 (a planted bug).** This loss trains without a complaint and learns badly: policies that have moved the
# wrong way stay there. What is wrong? Compare it with the table above.

# %%
def objective_with_a_bug(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """As `clipped_objective`, with a bug."""
    return ratio.clamp(1 - clip_range, 1 + clip_range) * advantage


wrong_way = torch.tensor([0.5, 1.5]), torch.tensor([1.0, -1.0])
print("with the bug:", objective_with_a_bug(*wrong_way, 0.2).tolist(), " by hand: [0.5, -1.5]")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The minimum is missing. Clipping alone is flat on both sides, so a good action that has become unlikely gets no
# gradient that would bring it back.
#
# ```python
# def objective_with_a_bug(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
#     """As `clipped_objective`, without the bug."""
#     clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantage
#     return torch.minimum(ratio * advantage, clipped)
#
# assert objective_with_a_bug(*wrong_way, 0.2).tolist() == [0.5, -1.5]
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Why is the approximate KL $\operatorname{mean}[\rho - 1 - \log \rho]$ and not
# $\operatorname{mean}[-\log \rho]$, which has the same mean? Compare both with the exact KL divergence of two
# categorical policies.
#
# <details>
# <summary>Solution</summary>
#
# The mean of $\rho - 1$ under the old policy is 0, so adding it changes nothing on average. But $\rho - 1 \ge \log\rho$
# makes every term non-negative, and the errors of the two parts cancel, so it is far less noisy.
#
# ```python
# old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.45, 0.33, 0.22])
# exact = (old * (old / new).log()).sum()
# action = torch.multinomial(old, 200_000, replacement=True)
# ratio = (new / old)[action]
# plain, better = -ratio.log(), ratio - 1 - ratio.log()
# assert abs(better.mean() - exact) < 1e-3 and abs(plain.mean() - exact) < 2e-3
# assert better.min() >= 0 and better.std() < plain.std() / 5
# ```
#
# </details>

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook import PPO
#
# agent = PPO.from_config("cartpole")
# agent.learn(50_000)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train ppo --config pendulum --run-dir runs/ppo
# rlbook evaluate runs/ppo --episodes 20
# rlbook watch runs/ppo --out pendulum.gif
# ```
#
# The example `examples/ppo_cartpole.py` is a script of this kind.
#
# ## References
#
# - J. Schulman, F. Wolski, P. Dhariwal, A. Radford, O. Klimov (2017). *Proximal Policy Optimization Algorithms.*
#   arXiv:1707.06347.
# - J. Schulman, S. Levine, P. Moritz, M. Jordan, P. Abbeel (2015). *Trust Region Policy Optimization.* ICML.
# - L. Engstrom et al. (2020). *Implementation Matters in Deep Policy Gradients: A Case Study on PPO and TRPO.* ICLR.
# - S. Huang et al. (2022). *The 37 Implementation Details of Proximal Policy Optimization.* ICLR Blog Track.
# - J. Schulman (2020). *Approximating KL Divergence*: the estimate of exercise 4.
# - A. Raffin (2020). *RL Baselines3 Zoo*: the numbers for CartPole and Pendulum.
