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
# # DQN: learning values with a network
#
# In this chapter you build DQN, the algorithm that learned to play Atari games from the screen in
# 2015, and with which deep reinforcement learning began. At the end you have a network that
# estimates how good each action is, a loss that corrects it, and an agent that balances a pole
# after ten to twenty thousand steps, on a laptop, in less than a minute. The figure shows ten runs of
# it.
#
# | | |
# |---|---|
# | Papers | Mnih et al. 2015 (DQN); van Hasselt et al. 2016 (Double); Sutton 1988 (n-step returns) |
# | Observations | vectors |
# | Actions | discrete |
# | Learns | off-policy, from replay |
# | Same as tabular Q-learning | the target: reward plus the discounted value of the best next action |
# | Different from tabular Q-learning | a network for the table, a replay buffer, a second network for the targets |

# %%
#| export
import copy
import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.envs import derive_seed
from rlbook.replay import (
    Batch,
    DrawnBatches,
    NStepAccumulator,
    ReplayBuffer,
    make_rows,
    to_batch,
    transition_dtype,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config, setting

# %%
import os
from collections import defaultdict

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
    use_style,
)

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()

# %% tags=["hide-input"]
promise = load_result("results/dqn_cartpole.json")  # drawn with the 95 % interval of the mean
figure, ax = plt.subplots(figsize=(6, 3.2))
plot_result(ax, promise)
label_curves(ax, "CartPole-v1 with the shipped settings", "return of 20 greedy episodes")
figure.savefig("_static/dqn_cartpole.png")  # the README shows it
plt.show()
print(made_by(promise))
finals = promise["runs"][next(iter(promise["runs"]))]["final"]
print(f"last evaluation of each of {len(finals)} seeds:", *finals)
assert min(finals) >= 475

# %% [markdown]
# The task is CartPole: a cart carries a pole, you push it to the left or to the right, and each step
# pays 1 until the pole falls or the cart leaves the track. That takes about 22 steps if you push at
# random; an episode is cut off at 500. Every one of the ten seeds ends at 475 or more.
#
# ## The problem: a table does not scale
#
# Q-learning (Watkins 1989) keeps a table: for each state $s$ and action $a$ the value $Q(s, a)$, the
# discounted sum of the rewards that follow if you take $a$ now and act well afterwards. It is also
# called the Q-value. After each step the table moves one entry towards what it has just seen:
#
# $$Q(s, a) \leftarrow Q(s, a) + \alpha \bigl(r + \gamma \max_{a'} Q(s', a') - Q(s, a)\bigr)$$
#
# Here $r$ is the reward of the step, $s'$ the state that it led to, and $a'$ runs over the actions there.
# The discount $\gamma$, a little below 1, says how much less a reward counts one step later. The
# learning rate $\alpha$ says how far the entry moves.
#
# The state of CartPole is four real numbers, so for a table each must be cut into bins. With 8 bins
# for each number there are $8^4 = 4096$ states, with 32 there are over a million. Few bins cannot tell
# a pole that falls from one that rights itself. Many bins are mostly never seen: what the agent learns
# in one bin says nothing about the bin next to it. Let us measure this, 20,000 steps each.


# %%
def tabular_q_learning(bins: int, steps: int, seed: int) -> tuple[float, float]:
    """Learn CartPole with a table; return the mean of the last 20 returns and the share seen."""
    low, high = np.array([-2.4, -3, -0.21, -3]), np.array([2.4, 3, 0.21, 3])
    table, seen = defaultdict[Any, list[float]](lambda: [0.0, 0.0]), set()
    generator = np.random.default_rng(seed)
    env, returns, total = make_env("CartPole-v1"), [], 0.0

    def cell(obs: np.ndarray) -> tuple[int, ...]:
        place = (obs - low) / (high - low) * bins
        return tuple(min(max(int(number), 0), bins - 1) for number in place.tolist())

    s = cell(env.reset(seed=seed)[0])
    for step in range(steps):
        epsilon = max(0.05, 1 - step / (steps / 2))
        q = table[s]  # the values of both actions
        a = int(generator.integers(2)) if generator.random() < epsilon else int(q[1] > q[0])
        obs, r, terminated, truncated, _ = env.step(a)
        s_next = cell(obs)
        q[a] += 0.1 * (r + (0 if terminated else 0.99 * max(table[s_next])) - q[a])
        seen.add(s)
        s, total = s_next, total + r
        if terminated or truncated:
            returns.append(total)
            s, total = cell(env.reset()[0]), 0.0
    return float(np.mean(returns[-20:])), len(seen) / bins**4


sizes, repeats = (2, 4, 8, 16, 32), 2
table_results = np.array(
    [[tabular_q_learning(bins, 20_000, seed) for bins in sizes] for seed in range(repeats)]
)  # (repeats, sizes, 2)

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for ax, column, ylabel in (
    (left, 0, "return, last 20 episodes"),
    (right, 1, "share of the table ever seen"),
):
    ax.plot(sizes, table_results[:, :, column].T, ".", color=COLORS["reference"], alpha=0.6)
    ax.plot(sizes, table_results[:, :, column].mean(0), color=COLORS["reference"])
    ax.set(xscale="log", xlabel="bins per number", ylabel=ylabel, xticks=sizes, xticklabels=sizes)
    ax.minorticks_off()
right.set(yscale="log")
plt.show()
assert table_results[:, :, 0].mean(0).max() < 300  # the best size, far from 500
assert table_results[:, -1, 1].max() < 0.01  # what is seen of the finest table

# %% [markdown]
# Both ends fail, and the middle is far from 500. With 32 bins the table has more than a million
# states, of which the agent has seen less than one in a hundred.
#
# A network answers both at once: it takes the four numbers as they are, and what it learns about one
# state changes its answer for those nearby. That is also where the trouble starts: an update for
# one state moves the values of all others, the targets included. The rest of DQN is about keeping
# that stable.

# %% [markdown]
# ## The Q-network
#
# The network maps an observation to one value per action, so that one forward pass gives the
# maximum over actions. Here it is linear layers with
# [ReLU](https://en.wikipedia.org/wiki/Rectifier_(neural_networks)) between them:
# $x \mapsto W_2 \max(0, W_1 x + b_1) + b_2$.
#
# By hand: let the weights of both layers be all 1 and the biases 0, with two inputs, two hidden
# units and one output. The input (2, −1) gives 1 in both hidden units, and 2 in the end. The input
# (−2, 1) gives −1, which ReLU makes 0, and 0 in the end.
#
# The way back, from the slope of a loss in the output to its slope in the weights, is the chain rule
# layer by layer. If $g$ is the slope of the loss in the output of a layer $x \mapsto W x + b$, then the
# slopes are $g x^\top$ in $W$, $g$ in $b$ and $W^\top g$ in $x$; a ReLU lets a slope pass where its input
# was above 0, where it is *open*, and no slope elsewhere. PyTorch can do all that by itself, and most
# later chapters leave it to PyTorch. At the size of this network, though, the bookkeeping costs more
# than the arithmetic, and the rule is a few lines: `trace` keeps what each layer saw, `backward` walks
# back. (`threshold_backward` is what PyTorch itself calls for ReLU.)
#
# By hand: with the slope 1 in the output for (2, −1), the second layer has the slopes (1, 1), which
# its inputs were; each hidden unit has 1, so each row of the first layer has the slopes (2, −1). For
# (−2, 1) both units were shut, and only the last bias hears of it.

# %%
#| export
class MLP(nn.Module):
    """Linear layers of the given sizes with ReLU between them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        self.stack = [(layer.weight, layer.bias) for layer in layers]  # quicker to reach

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, first size) to (batch, last size)."""
        return self.trace(x)[0]

    def trace(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output and the inputs of all layers, which `backward` needs."""
        inputs: list[Tensor] = []
        for weight, bias in self.stack:
            inputs.append(x.relu_() if inputs else x)
            x = nn.functional.linear(inputs[-1], weight, bias)
        return x, inputs

    @torch.no_grad()
    def backward(self, inputs: list[Tensor], slope: Tensor) -> None:
        """Write the gradient of all weights over the old one, a `.grad` that must exist."""
        for (weight, bias), x in zip(reversed(self.stack), reversed(inputs), strict=True):
            torch.mm(slope.t(), x, out=weight.grad)
            torch.sum(slope, dim=0, out=bias.grad)
            if x is not inputs[0]:  # on through the layer and the ReLU, which is shut where x is 0
                slope = slope.mm(weight)
                torch.ops.aten.threshold_backward.grad_input(slope, x, 0, grad_input=slope)

# %%
tiny = MLP((2, 2, 1))
for layer in tiny.layers:
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
with torch.no_grad():
    out, layer_inputs = tiny.trace(torch.tensor([[2.0, -1.0], [-2.0, 1.0]]))
assert out.tolist() == [[2.0], [0.0]]

# %% [markdown]
# And the way back:

# %%
for parameter in tiny.parameters():
    parameter.grad = torch.zeros_like(parameter)  # `backward` writes into these
tiny.backward(layer_inputs, slope=torch.ones(2, 1))
first, second = tiny.layers
assert first.weight.grad.tolist() == [[2.0, -1.0], [2.0, -1.0]] and first.bias.grad.tolist() == [1, 1]
assert second.weight.grad.tolist() == [[1.0, 1.0]] and second.bias.grad.tolist() == [2.0]

# %% [markdown]
# One thing helps a network more than one would think: inputs of one size. In CartPole the cart's
# position and both velocities vary by about 1, but the pole's angle stays within ±0.21, and it is the
# angle that matters. So the network can multiply its inputs by fixed factors, the setting
# `observation_scale`; the shipped configuration multiplies the angle by 8. It is knowledge about
# the task that you put in, so it is a setting that you can see, and it is off by default. What it
# buys stands with the other parts below.

# %%
#| export
class QNetwork(MLP):
    """From an observation to the value of each action."""

    scale: Tensor | None  # what each entry of the observation is multiplied by

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: tuple[int, ...],
        observation_scale: tuple[float, ...] = (),
    ) -> None:
        super().__init__((inputs, *hidden, actions))
        scale = torch.tensor(observation_scale) if observation_scale else None
        self.register_buffer("scale", scale, persistent=False)

    def trace(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Map observations (batch, inputs) to values (batch, actions), scaling them first."""
        x = x.float()  # a byte is an observation, too
        return super().trace(x if self.scale is None else x * self.scale)

# %%
scaled = QNetwork(inputs=4, actions=2, hidden=(8,), observation_scale=(1, 1, 8, 1))
plain = QNetwork(inputs=4, actions=2, hidden=(8,))
plain.load_state_dict(scaled.state_dict())
obs = torch.tensor([[0.1, 0.2, 0.05, -0.3]])
with torch.no_grad():
    assert torch.equal(scaled(obs), plain(obs * torch.tensor([1.0, 1.0, 8.0, 1.0])))

# %% [markdown]
# ## The target
#
# The target for the chosen action is what the table used, with the discount spelled out for a return
# of $n$ steps ([Replay](replay.ipynb) builds those):
#
# $$y = \underbrace{r_t + \gamma r_{t+1} + \dots + \gamma^{n-1} r_{t+n-1}}_{\texttt{reward}}
#   + \underbrace{\gamma^n}_{\texttt{discount}} (1 - \texttt{terminated}) \max_{a'} Q^-(s_{t+n}, a')$$
#
# $Q^-$ is the *target network*, an older copy of the network that you train; its section comes soon.
#
# The maximum is optimistic: if the values are noisy, it picks the noise that points up, which is
# called overestimation. **Double DQN** splits the work in two: the online network chooses the
# action, the target network says what it is worth. A value that is too high by chance in one
# network is rarely so in the other.
#
# By hand: reward 1, discount 0.9, target values (5, 2), online values (0, 3). Plain DQN takes the
# maximum 5, so $y = 1 + 0.9 \cdot 5 = 5.5$. Double DQN chooses the second action, because online 3 is
# more than 0, and its target value is 2, so $y = 1 + 0.9 \cdot 2 = 2.8$. If the step terminated, both
# are 1.

# %%
#| export
def dqn_target(
    reward: Tensor,
    discount: Tensor,
    terminated: Tensor,
    next_q_target: Tensor,
    next_q_online: Tensor | None = None,
) -> Tensor:
    """Return the reward plus the discounted value of the successor, if there is one."""
    if next_q_online is None:
        next_value = next_q_target.amax(dim=-1)
    else:  # Double: the online network chooses, the target network values
        choice = next_q_online.argmax(dim=-1, keepdim=True)
        next_value = next_q_target.gather(-1, choice).squeeze(-1)
    return reward + discount * ~terminated * next_value

# %%
reward, discount = torch.tensor([1.0, 1.0]), torch.tensor([0.9, 0.9])
terminated = torch.tensor([False, True])
next_q_target = torch.tensor([[5.0, 2.0], [5.0, 2.0]])
next_q_online = torch.tensor([[0.0, 3.0], [0.0, 3.0]])
plain_target = dqn_target(reward, discount, terminated, next_q_target)
double_target = dqn_target(reward, discount, terminated, next_q_target, next_q_online)
print("plain:", plain_target.tolist(), " Double:", [round(y, 6) for y in double_target.tolist()])
assert torch.allclose(plain_target, torch.tensor([5.5, 1.0]))
assert torch.allclose(double_target, torch.tensor([2.8, 1.0]))

# %% [markdown]
# ## The loss
#
# The loss is the mean squared distance between the value of the action that was taken and its target,
#
# $$L(\theta) = \frac{1}{B} \sum_{i=1}^{B} \bigl(Q_\theta(s_i, a_i) - y_i\bigr)^2,$$
#
# where $y$ counts as a given number: no gradient flows through it. The loss is a pure function of
# tensors: no network, no agent, nothing that you cannot type by hand. It also guards against the
# most expensive bug of this field. If one vector has the shape (batch, 1) and another (batch,),
# PyTorch broadcasts their difference to (batch, batch), and the mean of that is a number that looks
# like a loss:

# %%
q_column, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 3.0])
print("true loss 0.0, broadcast loss", (q_column - y).square().mean().item())

# %%
#| export
def check_shapes(batch_size: int, **vectors: Tensor) -> None:
    """Raise unless each tensor is (batch,): (batch, 1) would broadcast into a wrong loss."""
    for name, vector in vectors.items():
        if vector.shape != (batch_size,):
            shape = tuple(vector.shape)
            raise ValueError(f"{name} must have the shape ({batch_size},), not {shape}.")


def td_loss(
    q: Tensor, action: Tensor, target: Tensor, huber: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean squared (or Huber) distance of values from targets, and named metrics."""
    check_shapes(len(q), action=action, target=target)
    chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)  # (batch,)
    distance = nn.functional.huber_loss if huber else nn.functional.mse_loss
    loss, values = distance(chosen, target), chosen.detach()
    metrics = {
        "loss": loss.detach(),
        "q_mean": values.mean(),
        "target_mean": target.mean(),
        "td_error_abs": (values - target).abs().mean(),
    }
    return loss, metrics


def dqn_loss(
    q: Tensor,  # (batch, actions), with gradient
    action: Tensor,  # (batch,)
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q_target: Tensor,  # (batch, actions)
    next_q_online: Tensor | None = None,  # (batch, actions) for Double DQN
    huber: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean squared (or Huber) TD error and named metrics."""
    vectors = {"action": action, "reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(q), **vectors)
    with torch.no_grad():
        target = dqn_target(reward, discount, terminated, next_q_target, next_q_online)
    return td_loss(q, action, target, huber)

# %% [markdown]
# By hand, with the two targets 5.5 and 1 from above: the first step took action 0 with value 4.5, the
# second took action 1 with value 3. The errors are −1 and 2, the loss is $(1 + 4) / 2 = 2.5$, the
# mean absolute error is 1.5. Huber's loss grows linearly beyond 1, so its second term is
# $2 - 0.5 = 1.5$ and its first 0.5: together 1.

# %%
q = torch.tensor([[4.5, 0.0], [0.0, 3.0]], requires_grad=True)
action = torch.tensor([0, 1])
loss, metrics = dqn_loss(q, action, reward, discount, terminated, next_q_target)
loss.backward()
print({name: value.item() for name, value in metrics.items()})
assert loss.item() == 2.5 and metrics["td_error_abs"].item() == 1.5
assert q.grad.tolist() == [[-1.0, 0.0], [0.0, 2.0]]  # only the actions taken are corrected
huber, _ = dqn_loss(q, action, reward, discount, terminated, next_q_target, huber=True)
assert huber.item() == 1.0

# %% [markdown]
# The gradient of this loss needs no machinery. Where action $a_i$ was taken, the slope of the loss in
# $Q_\theta(s_i, a_i)$ is $2 \delta_i / B$ with the error $\delta_i = Q_\theta(s_i, a_i) - y_i$; Huber's is
# $\delta_i$ clipped to ±1, over $B$; and the values of all other actions have the slope 0. The asserts
# above had it from autograd: (−1, 0) and (0, 2). The loss itself can be had from the slope $\rho$ of one
# step: $\rho\,(\delta - \rho / 2)$ is $\delta^2 / 2$ within ±1 and $|\delta| - 1/2$ beyond, Huber's loss.

# %%
#| export
def step_slope(td_error: Tensor, huber: bool) -> Tensor:
    """Return the slope of each step's loss at its TD error."""
    return td_error.clamp(-1, 1) if huber else 2 * td_error


def step_loss(td_error: Tensor, huber: bool) -> Tensor:
    """Return the squared (or Huber) loss of each TD error."""
    if not huber:
        return td_error.square()
    slope = step_slope(td_error, huber)
    return slope * (td_error - slope / 2)


class TDErrors(NamedTuple):
    """What the metrics of an update are made of, each (batch,)."""

    q: Tensor  # of the actions taken
    target: Tensor
    td_error: Tensor
    huber: bool

    def loss(self) -> dict[str, float]:
        """Return the loss of `td_loss`, by name."""
        error = self.td_error
        total = step_loss(error, True).sum() if self.huber else error.dot(error)  # one quick call
        return {"loss": float(total) / error.numel()}

    def details(self) -> dict[str, float]:
        """Return the other metrics of `td_loss`."""
        means = torch.stack([self.q, self.target, self.td_error.abs()]).mean(dim=1).tolist()
        return dict(zip(("q_mean", "target_mean", "td_error_abs"), means, strict=True))


@torch.no_grad()
def td_slope(
    q: Tensor, action: Tensor, target: Tensor, huber: bool = False
) -> tuple[Tensor, TDErrors]:
    """Return the gradient (batch, actions) of `td_loss` in the values, and what it is made of."""
    taken = action.unsqueeze(1)
    chosen = q.gather(1, taken).squeeze(1)  # (batch,)
    td_error = chosen - target
    slope = step_slope(td_error, huber).div_(len(q))
    gradient = torch.zeros_like(q).scatter_(1, taken, slope.unsqueeze(1))
    return gradient, TDErrors(chosen, target, td_error, huber)

# %%
y = dqn_target(reward, discount, terminated, next_q_target)
gradient, errors = td_slope(q, action, y)
assert gradient.tolist() == [[-1.0, 0.0], [0.0, 2.0]] and errors.loss() == {"loss": 2.5}
gradient, errors = td_slope(q, action, y, huber=True)
assert gradient.tolist() == [[-0.5, 0.0], [0.0, 0.5]] and errors.loss() == {"loss": 1.0}

# %% [markdown]
# ## The target network
#
# If the network that you train also makes its own targets, every update moves the targets too, and
# errors can chase themselves upwards. So the targets come from a copy that follows slowly. Two ways
# are common, and one formula serves both:
#
# $$\theta^- \leftarrow (1 - \tau)\,\theta^- + \tau\,\theta$$
#
# at every `target_every`-th update. With $\tau = 1$ and a large interval it is a copy now and then, as
# in the paper. With a small $\tau$ at every update the target network trails behind, which is called
# Polyak averaging.
#
# By hand: target weights 0, online weights 1, $\tau = 0.1$: after one step 0.1, after two
# $0.9 \cdot 0.1 + 0.1 = 0.19$.

# %%
#| export
@torch.no_grad()
def polyak_update(target: nn.Module, online: nn.Module, tau: float) -> None:
    """Move the target network the fraction `tau` of the way to the online one; 1 copies it."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, tau)

# %%
slow, fast = nn.Linear(1, 1), nn.Linear(1, 1)
nn.init.zeros_(slow.weight), nn.init.ones_(fast.weight)
for expected in (0.1, 0.19):
    polyak_update(slow, fast, tau=0.1)
    assert abs(slow.weight.item() - expected) < 1e-6
polyak_update(slow, fast, tau=1.0)
assert slow.weight.item() == 1.0

# %% [markdown]
# ## Exploring
#
# A greedy agent only learns about the actions that it already likes. So with probability
# $\varepsilon$ it plays at random, which is called epsilon-greedy, and $\varepsilon$ falls from 1 to a
# floor while it learns. The steps $t$ are environment steps, of all environments together:
#
# $$\varepsilon_t = \max\Bigl(\varepsilon_{\min},\; 1 - (1 - \varepsilon_{\min})\,\tfrac{t}{T_\varepsilon}\Bigr)$$
#
# where $T_\varepsilon$ is the setting `epsilon_steps`. By hand: with a floor of 0.1 reached after 100
# steps, step 50 is halfway, so $\varepsilon = 0.55$.

# %%
#| export
def linear_epsilon(step: int, decay_steps: int, floor: float) -> float:
    """Fall linearly from 1 to `floor` over `decay_steps`, then stay there."""
    return max(floor, 1 - (1 - floor) * step / decay_steps)


def epsilon_greedy(
    actions: np.ndarray, choices: int, epsilon: float, generator: np.random.Generator
) -> np.ndarray:
    """Replace each action, with probability `epsilon`, by a random one of the `choices`."""
    whether, which = generator.random((2, len(actions)))
    random = whether < epsilon
    if not np.count_nonzero(random):
        return actions
    return np.where(random, (which * choices).astype(np.int64), actions)

# %%
assert abs(linear_epsilon(50, 100, 0.1) - 0.55) < 1e-12
assert linear_epsilon(10_000, 100, 0.1) == 0.1

# %%
dice = np.random.default_rng(0)
drawn = epsilon_greedy(np.zeros(100_000, dtype=int), choices=2, epsilon=0.5, generator=dice)
share = drawn.mean()
print("share of action 1 (half of the actions are random, half of those are 1):", share)
assert abs(share - 0.25) < 0.01  # seven standard deviations

# %% [markdown]
# ## A gradient step
#
# The learning rate may fall towards the end of a run, so that the last weights are not those of the
# last noisy batch. By hand: $10^{-3}$ for the first half, then linearly to 0, is $5 \cdot 10^{-4}$
# after three quarters.

# %%
#| export
def decayed(initial: float, progress: float, decay_from: float) -> float:
    """Keep `initial` up to the fraction `decay_from` of a run, then fall linearly to 0."""
    if progress <= decay_from or decay_from == 1:  # the last step may overshoot the end
        return initial
    return initial * max(0.0, (1 - progress) / (1 - decay_from))

# %%
assert decayed(1e-3, progress=0.3, decay_from=0.5) == 1e-3
assert abs(decayed(1e-3, progress=0.75, decay_from=0.5) - 5e-4) < 1e-12
assert decayed(1e-3, progress=1.0, decay_from=1.0) == 1e-3  # never falls

# %% [markdown]
# Two of the functions below are about speed. On a CPU a small network is ruled by the number of
# operations, not by their size: an Adam step over six small tensors takes longer than over one long
# one. So the weights of the network are laid side by side in one vector, of which the layers become
# views: the $\theta$ of the equations is then one tensor in the code as well. The gradient of that
# vector can be clipped with two operations.
#
# `Adam` is the optimiser of PyTorch with its own `step`: the same fused operation on the same state,
# without what PyTorch prepares and checks around it each time, which takes almost as long as the
# operation itself. (`torch._fused_adam_` has no public name; the tests compare every bit with the original.)
#
# By hand: the gradient (3, 4) has the norm 5; clipped to 1 it is (0.6, 0.8).

# %%
#| export
def flatten_parameters(network: nn.Module) -> nn.Parameter:
    """Lay all weights of a network side by side in one tensor, of which its layers become views."""
    parts = list(network.parameters())
    flat = nn.Parameter(torch.cat([part.detach().flatten() for part in parts]))
    flat.grad = torch.zeros_like(flat)
    sizes = [part.numel() for part in parts]
    for part, weights, gradient in zip(
        parts, flat.detach().split(sizes), flat.grad.split(sizes), strict=True
    ):
        part.data, part.grad = weights.view_as(part), gradient.view_as(part)
    return flat

# %%
#| export
class Adam(torch.optim.Adam):
    """Adam (Kingma & Ba 2015) in one fused operation a step; weights without gradient stay."""

    # To keep its compiler off these, PyTorch would import it, for two seconds. No need.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, lr=lr, fused=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a copy of a state: PyTorch would share its tensors with whoever gave it."""
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, copy.deepcopy(state_dict))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the weights against the running mean of their gradients, each by its own scale."""
        for group in self.param_groups:
            parts = [part for part in group["params"] if part.grad is not None]
            states = [self.state[part] or self.begin(part) for part in parts]
            means, squares, steps = (
                [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
            )
            if not parts:
                continue
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parts,
                [part.grad for part in parts],
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
            )

    step.hooked = True  # type: ignore[attr-defined]  # hooks would take as long as the step

    @torch.inference_mode(False)  # it outlives the update that makes it
    def begin(self, part: Tensor) -> dict[str, Tensor]:
        """Make the state of a tensor, as it is before the first step."""
        zeros, step = torch.zeros_like(part), torch.zeros((), device=part.device)
        self.state[part] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        return self.state[part]

# %%
#| export
@torch.no_grad()
def clip_gradients(gradients: list[Tensor], max_norm: float) -> None:
    """Shorten the gradient, taken as one vector, to `max_norm` where it is longer."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients))
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)

# %%
#| export
def apply_gradients(
    optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float | None
) -> None:
    """Move the weights of an optimiser against their gradients, clipped if asked."""
    parts: list[Tensor] = []
    for group in optimizer.param_groups:
        group["lr"] = lr
        parts += group["params"]
    if max_grad_norm is not None:  # all groups are one vector
        clip_gradients([part.grad for part in parts if part.grad is not None], max_grad_norm)
    optimizer.step()


def gradient_step(
    loss: Tensor, optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float | None
) -> None:
    """Move the weights of an optimiser against the gradient of the loss, clipped if asked."""
    for group in optimizer.param_groups:
        for part in group["params"]:
            if part.grad is not None:  # in place: a layer's gradient may be a view of this one
                part.grad.zero_()
    loss.backward()
    apply_gradients(optimizer, lr, max_grad_norm)

# %%
gradient = torch.tensor([3.0, 4.0])
clip_gradients([gradient], max_norm=1.0)
assert torch.allclose(gradient, torch.tensor([0.6, 0.8]))

# %% [markdown]
# And a whole step by hand: a line that is 0 everywhere is to give 1 at 1. The slope of the squared
# error is $2 \cdot (0 - 1) = -2$ in the weight and in the bias, so a learning rate of 0.1 moves
# both to 0.2.

# %%
line = nn.Linear(1, 1)
nn.init.zeros_(line.weight), nn.init.zeros_(line.bias)
theta = flatten_parameters(line)  # weight and bias, as one vector
descent = torch.optim.SGD([theta], lr=1.0)
gradient_step((line(torch.ones(1, 1)) - 1).square().sum(), descent, lr=0.1, max_grad_norm=None)
assert torch.allclose(theta, torch.tensor([0.2, 0.2]))
assert torch.allclose(line.weight, torch.tensor([[0.2]]))  # the layer sees it: it is a view

# %% [markdown]
# ## Settings
#
# Each setting is one line, and from there it becomes a keyword, a key in a file and a flag in the
# shell ([Settings](settings.ipynb)). The three methods answer questions that the agent asks at every
# step.

# %%
#| export
def check_batch_fits(batch_size: int, buffer_size: int) -> None:
    """Raise unless the replay buffer has room for one batch."""
    if batch_size > buffer_size:
        raise ValueError(
            f"Setting 'batch_size' ({batch_size}) must not exceed 'buffer_size' ({buffer_size})."
        )


@dataclass(kw_only=True)
class DQNConfig(Config):
    """The settings of DQN."""

    hidden: tuple[int, ...] = setting((64, 64), "Units of each hidden layer.", low=1)
    observation_scale: tuple[float, ...] = setting((), "Factors of the observation's entries.")
    lr: float = setting(1e-3, "Learning rate of Adam.", above=0)
    lr_decay_from: float = setting(1.0, "Part of the run before lr falls to 0.", low=0, high=1)
    batch_size: int = setting(64, "Transitions of one update.", low=1)
    buffer_size: int = setting(50_000, "Transitions that the replay buffer holds.", low=1)
    warmup_steps: int = setting(1_000, "Environment steps before the first update.", low=0)
    update_every: int = setting(4, "Environment steps between rounds of updates.", low=1)
    updates_per_round: int = setting(1, "Updates of one round.", low=1)
    gamma: float = setting(0.99, "Discount of a reward one step later.", low=0, high=1)
    n_step: int = setting(1, "Rewards summed before the target bootstraps.", low=1)
    double: bool = setting(True, "Whether the online network chooses the next action.")
    huber: bool = setting(False, "Huber loss instead of squared error.")
    tau: float = setting(1.0, "Fraction that a target update moves; 1 copies.", above=0, high=1)
    target_every: int = setting(500, "Updates between target updates.", low=1)
    epsilon_floor: float = setting(0.05, "Lowest probability of a random action.", low=0, high=1)
    epsilon_steps: int = setting(10_000, "Environment steps in which it falls from 1.", low=1)
    max_grad_norm: float | None = setting(None, "Clip the gradient to this norm.", above=0)

    def check(self) -> None:
        """Raise where settings contradict each other."""
        check_batch_fits(self.batch_size, self.buffer_size)

    def epsilon(self, step: int) -> float:
        """Return the probability of a random action at a step."""
        return linear_epsilon(step, self.epsilon_steps, self.epsilon_floor)

    def lr_now(self, step: int) -> float:
        """Return the learning rate at a step."""
        return decayed(self.lr, step / self.total_steps, self.lr_decay_from)

    def updates_due(self, step: int) -> int:
        """Count the updates of the rounds that a step of all environments completed."""
        if step <= self.warmup_steps:
            return 0
        before = (step - self.num_envs) // self.update_every
        return (step // self.update_every - before) * self.updates_per_round

# %%
config = DQNConfig(num_envs=4, update_every=3, warmup_steps=100)
due = [config.updates_due(step) for step in range(104, 125, 4)]
print("updates after 104, 108, ... steps:", due)
assert sum(due) == len(range(102, 125, 3))  # one for every third step after the warm-up

# %% [markdown]
# ## The agent
#
# Everything is in place; the agent only ties it together, in three steps. The first is what is asked
# of the networks: the values of actions, and the best of them with a little chance.

# %%
#| export
class QAgent(Agent):
    """Acts by a Q-network: greedily, but for a little chance."""

    config: DQNConfig
    action_space: gym.spaces.Discrete

    def build(self) -> None:
        """Make the network that learns and its target."""
        self.online, self.target = self.make_network(), self.make_network()
        self.target.load_state_dict(self.online.state_dict())
        self.weights, self.target_weights = map(flatten_parameters, (self.online, self.target))

    def make_network(self) -> QNetwork:
        """Make a Q-network of the right size."""
        inputs, scale = math.prod(self.observation_space.shape or ()), self.config.observation_scale
        if scale and len(scale) != inputs:
            raise ValueError(
                f"Setting 'observation_scale' needs {inputs} factors, not {len(scale)}."
            )
        actions = int(self.action_space.n)
        return QNetwork(inputs, actions, self.config.hidden, scale).to(self.device)

    @torch.inference_mode()
    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Return the values (batch, actions) of observations (batch, inputs)."""
        return self.online.trace(torch.from_numpy(obs).to(self.device))[0].cpu().numpy()

    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the best action, or with probability epsilon any."""
        actions = self.q_values(obs).argmax(axis=1)
        if explore:
            epsilon = self.config.epsilon(self.global_step)
            actions = epsilon_greedy(actions, int(self.action_space.n), epsilon, self.generator)
        return actions + self.action_space.start, state


# %% [markdown]
# The second is learning. Compare `update` with the equations: target values, slope of the loss,
# gradient step, target network. It uses `td_slope`, the gradient of `dqn_loss` in closed form;
# `dqn_loss` is what you and the tests call with numbers made by hand. Since no gradient is left to
# autograd, all of it runs in PyTorch's inference mode, where operations keep no record of themselves
# and cost a little less. Where many updates follow one another, the target network may have valued
# the successors already: then the batch brings their values along.

# %%
#| export
@dataclass
class ValuedBatch(Batch):
    """Transitions with what the target network, while it rests, says of them."""

    next_q: Tensor  # (batch, actions), the values of the successors
    y: Tensor | None = None  # (batch,), the targets, unless the online network chooses in them

# %%
#| export
class QLearner(QAgent):
    """Teaches the Q-network from batches of transitions."""

    def build(self) -> None:
        """Make networks and optimiser."""
        super().build()
        self.optimizer = Adam([self.weights], lr=self.config.lr)

    def td_target(self, batch: Batch, next_q: Tensor | None = None) -> Tensor:
        """Return the targets of a batch, whose successors may have been valued already."""
        next_q = self.target(batch.next_obs) if next_q is None else next_q
        next_q_online = self.online(batch.next_obs) if self.config.double else None
        return dqn_target(batch.reward, batch.discount, batch.terminated, next_q, next_q_online)

    @torch.no_grad()
    def valued(self, batches: list[Batch], whole: Batch) -> list[ValuedBatch]:
        """Add to batches what the target network says of them now, from the whole of them."""
        size, next_q = self.config.batch_size, self.target(whole.next_obs)
        values = [next_q.split(size)]
        if not self.config.double:
            values.append(self.td_target(whole, next_q).split(size))
        return [ValuedBatch(*vars(b).values(), *v) for b, *v in zip(batches, *values, strict=True)]

    @torch.inference_mode()
    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step on the TD error of a batch, then move the target if it is time."""
        config = self.config
        next_q, y = (batch.next_q, batch.y) if isinstance(batch, ValuedBatch) else (None, None)
        y = self.td_target(batch, next_q) if y is None else y
        q, inputs = self.online.trace(batch.obs)
        slope, errors = td_slope(q, batch.action, y, config.huber)
        self.online.backward(inputs, slope)
        apply_gradients(self.optimizer, config.lr_now(self.global_step), config.max_grad_norm)
        if (self.updates + 1) % config.target_every == 0:
            self.target_weights.data.lerp_(self.weights.data, config.tau)  # all weights at once
        return UpdateResult(errors.loss, errors.details)

# %% [markdown]
# The third is what lies between the loop and learning: `observe` turns steps into n-step rows,
# `updates_due` says when it is time, and `sample` draws a batch.

# %%
#| export
class TransitionCollector(QLearner):
    """Stores what it sees, and says when to learn from it."""

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        super().build()
        config = self.config
        dtype = transition_dtype(self.observation_space, self.action_space)
        seed = derive_seed(config.seed, "replay")
        self.replay = ReplayBuffer(config.buffer_size, dtype, seed)
        self.n_step = NStepAccumulator(config.n_step, config.gamma, config.num_envs, dtype)

    def observe(self, transition: Transition) -> None:
        """Store the n-step transitions that this step completes."""
        first = self.action_space.start  # most often 0, and then nothing is to do
        rows = make_rows(
            self.replay.rows.dtype,
            obs=transition.obs,
            action=transition.action - first if first else transition.action,
            reward=transition.reward,
            next_obs=transition.next_obs,
            terminated=transition.terminated,
            discount=self.config.gamma,
        )
        self.n_step.forget(transition.episode_start)  # `learn` called again starts new episodes
        self.replay.add(self.n_step.add(rows, transition.truncated))

    def updates_due(self) -> int:
        """Say how many updates the last step made due, once the buffer holds a batch."""
        enough = len(self.replay) >= self.config.batch_size
        return self.config.updates_due(self.global_step) if enough else 0

    def sample(self) -> Batch:
        """Draw a batch from the replay buffer."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

# %% [markdown]
# With that the agent is complete but for its name, and for one thing that is there for speed. Where
# several updates follow one another, `batches` draws for all of them together and hands the batches
# out one by one. And where the target network rests between them, as in the settings for CartPole of
# the RL Zoo, a collection of tuned agents (128 updates after every 256 steps), it values the
# successors of all these batches in one pass. The result is that of one batch at a time, but for
# rounding.

# %%
#| export
class DQN(TransitionCollector):
    """A Q-network that learns from replay."""

    name: ClassVar[str] = "dqn"
    config_class: ClassVar[type[Config]] = DQNConfig
    parts: ClassVar[tuple[str, ...]] = ("online", "target", "optimizer", "n_step", "replay")
    compiled: ClassVar[tuple[str, ...]] = ("online.trace", "target.trace")

    def build(self) -> None:
        """Make networks, optimiser, buffer and room for batches."""
        super().build()
        dtype, size = self.replay.rows.dtype, self.config.batch_size
        most = 16  # more would not fit the cache
        self.drawn = DrawnBatches(dtype, size, most, self.device)

    def batches(self, count: int) -> Iterator[Batch]:
        """Draw several batches at once, and value their successors while the target rests."""
        every = self.config.target_every
        for batches in self.drawn.draw_all(self.replay, count):
            first = len(batches) if every == 1 else 0  # the target never rests
            yield from batches[:first]
            while first < len(batches):
                rest = every - self.updates % every  # updates until the target moves
                last = min(first + rest, len(batches))
                alike = batches[first:last]
                if len(alike) > 1:
                    yield from self.valued(alike, self.drawn.whole(first, last))
                else:
                    yield from alike
                first = last

# %%
#| export
def train_dqn(config: DQNConfig, progress: bool = True) -> RunResult:
    """Train DQN with these settings."""
    return train(DQN(config=config), progress)

# %% [markdown]
# ## Does it compute the right values?
#
# A learning curve that goes up proves little. Before you train on anything hard, check the values
# themselves, in environments where you know them ([Environments](envs.ipynb) makes them):
#
# - one step with reward 1: $Q = 1$;
# - two steps, with a reward of 1 at the end: $\gamma$ in the first state, 1 in the second;
# - a reward of 1 at every step, for ever, though a time limit cuts the episodes:
#   $1 + \gamma + \gamma^2 + \dots = 1/(1-\gamma)$, which is 10 for $\gamma = 0.9$.


# %%
def learned_values(env_id: str, states: list[list[float]], **settings: Any) -> np.ndarray:
    """Train on a tiny environment and return the greedy values of some of its states."""
    agent = DQN(env_id, gamma=0.9, lr=3e-3, hidden=(32,), warmup_steps=64, tau=0.1, target_every=1,
                epsilon_floor=1.0, eval_every=0, seed=0, **settings)
    agent.learn(2500, progress=False)
    return agent.q_values(np.array(states, dtype=np.float32)).max(axis=1)


one = learned_values("rlbook/OneStep-v0", [[1.0]])
two = learned_values("rlbook/TwoStep-v0", [[-1.0], [0.0]])
forever = learned_values("rlbook/ConstantReward-v0", [[1.0]])
three_steps = learned_values("rlbook/ConstantReward-v0", [[1.0]], n_step=3)
print("one step:", one.round(3), " two steps:", two.round(3))
print("for ever, cut off every 10 steps:", forever.round(2), " n = 3:", three_steps.round(2))
assert np.allclose(one, [1.0], atol=0.02)
assert np.allclose(two, [0.9, 1.0], atol=0.03)
assert np.allclose([forever, three_steps], 10.0, atol=0.5)

# %% [markdown]
# ## A live run
#
# Now CartPole, with the settings that are shipped as `dqn/cartpole.yaml`, but in 20,000 steps, the
# budget that the tables had. To make more of these steps, the batches are twice as large.

# %%
from rlbook.settings import find_config, make_config, read_settings

settings = read_settings(find_config("cartpole", "dqn"))
settings.pop("algo")
settings |= {"total_steps": 20_000, "epsilon_steps": 10_000, "batch_size": 128}
result = train_dqn(make_config(DQNConfig, settings))

# %%
final = result.agent.evaluate(episodes=20)
low, high = final.interval
print(f"return of 20 new greedy episodes: {final.mean:.1f}, 95 % interval {low:.1f} to {high:.1f}")
assert final.mean >= 300  # more than any table

# %% tags=["hide-input"]
lines = [line for line in result.history if "eval_return_mean" in line]
steps = [line["global_step"] for line in lines]
returns = [line["eval_return_mean"] for line in lines]
figure, ax = plt.subplots(figsize=(6, 3))
ax.plot(steps, returns, color=COLORS["dqn"], marker="o", label="DQN, one seed")
best = table_results[:, :, 0].mean(0).max()
ax.axhline(best, color=COLORS["reference"], ls="--", label="best table after 20,000 steps")
label_curves(ax, "20,000 steps, live", "return of greedy episodes")
ax.legend()
plt.show()

# %% [markdown]
# ## Watch it
#
# The agent, greedy, in an episode that it has not seen; every 25 steps a frame of its first 200:

# %%
env = make_env("CartPole-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=123)
frames, observations = [], [obs]
for step in range(200):
    if step % 25 == 0:
        frames.append(env.render())
    action, _ = result.agent.predict(obs)
    obs, _, terminated, truncated, _ = env.step(int(action))
    observations.append(obs)
    if terminated or truncated:
        break
env.close()
filmstrip(frames)

# %% [markdown]
# And a look inside: what does the network believe? For a cart in the middle, at rest, the colours
# show the value of the better action over the pole's angle and its speed, and the line shows where
# the agent changes from pushing left to pushing right. The black dots are the states of the episode
# above. The agent stays where the values are high; where the pole leans and falls further the same
# way, in two of the corners, the network knows that little is left to come.

# %% tags=["hide-input"]
angles, speeds = np.linspace(-0.21, 0.21, 61), np.linspace(-2.5, 2.5, 61)
grid = np.zeros((61, 61, 4), dtype=np.float32)
grid[..., 2], grid[..., 3] = angles[None, :], speeds[:, None]
q = result.agent.q_values(grid.reshape(-1, 4)).reshape(61, 61, 2)
figure, ax = plt.subplots(figsize=(5.5, 4))
extent = (angles[0], angles[-1], speeds[0], speeds[-1])
plot_heatmap(ax, q.max(-1), extent, "angle of the pole [rad]", "speed of the pole [rad/s]", "value")
ax.contour(angles, speeds, q[..., 1] - q[..., 0], levels=[0], colors="white")
visited = np.array(observations)
ax.plot(visited[:, 2], visited[:, 3], ".", color="black", markersize=3)
ax.text(-0.1, -1.0, "pushes left", color="white")
ax.text(0.19, 1.6, "pushes right", color="white", ha="right")
plt.show()

# %% [markdown]
# ## What each part buys
#
# One run says little, so here are five seeds each on CartPole, with one part taken away at a time:
# 30,000 steps, four environments and an update every third step, a little less than the shipped
# settings. *No target network* copies the weights at every update. *No replay* keeps only the last 64 transitions, one
# batch. *No exploring* plays greedily from the second step on, and the *learning rate that stays* does
# not fall to zero in the second half.
#
# In each panel the whole is blue and what is left without the part is black, mean and 95 % interval.
# Below, each dot is the last evaluation of a seed, the diamond the mean of the middle three of five
# (the interquartile mean, IQM), and the bar its 95 % bootstrap interval. [Sweeps](sweep.ipynb)
# explains both.

# %% tags=["hide-input"]
ablations = load_result("results/dqn_ablations.json")
draw_parts(plt.figure(), ablations)
plt.show()
print(made_by(ablations))

# %% [markdown]
# **Exploring** buys the most: without it one seed never leaves 10, and the best ends at 198. **n-step
# returns** come next: without them every seed reaches 450 at some point, and four of five end below
# 340. **The scaled angle** is worth
# some 75 points and, what matters more, reliability. Without **replay** the agent learns more slowly
# and less steadily, though all seeds arrive. Without **the target network** one seed of five ends at
# 320 and the others where the whole does: with five seeds that may be chance. A likely reason why it
# matters so little: with 10-step returns an error in the values shrinks to $\gamma^{10} \approx 0.90$ of
# itself from one target to the next, with 1-step returns only to 0.99, so errors that chase themselves
# die out sooner. With 1-step returns it is another story, as you will see in Exercise 1. And **Double
# and the falling learning rate buy nothing that could be seen here**: with and without them four or
# five seeds of five end at 500, the most there is. This is what ablations are for: a part that is known
# to be important need not be important in your task.
#
# ## Honest edges
#
# What differs from the paper, and why:
#
# | Mnih et al. 2015 | here | why |
# |---|---|---|
# | screens, a convolutional network | vectors, two hidden layers | a laptop without a GPU |
# | 1-step targets, plain maximum | 10-step targets and Double in the shipped settings | with these settings 1-step targets learn CartPole and then forget it |
# | copies the target every 10,000 updates | Polyak averaging, $\tau = 0.02$ | smoother; the interval is a setting |
# | RMSProp, errors clipped to ±1 | Adam, squared error | today's default; Huber is a setting |
# | ε from 1 to 0.1 in 1,000,000 frames | 1 to 0.1 in 25,000 steps | a smaller task |
# | one environment | five | fewer, larger operations |
# | inputs as they are | the angle times 8 | knowledge of the task; measured above |
#
# - n-step returns with replay are not corrected for the actions of an older policy. In theory that
#   is biased; in practice, here as in Rainbow (Hessel et al. 2018), it helps.
# - The paper's numbers are for 49 Atari games with 200 million frames each; nothing here claims to
#   reproduce them. The anchor that we know for CartPole is the RL Zoo's tuned DQN: 500 from one run.
# - The settings were found on CartPole. On another task expect to search again.
#
# ## Exercises
#
# **Exercise 1.** Take the target network away in the live run (`tau=1.0, target_every=1`) and print
# `q_mean` along the history, with 10-step returns and with 1-step returns. No return of CartPole
# can exceed $1/(1-\gamma) = 100$ discounted. What do you see?
#
# <details>
# <summary>Solution</summary>
#
# ```python
# short = {"total_steps": 2_000}  # leave it out for the whole run
# for change in ({}, {"tau": 1.0}, {"n_step": 1}, {"n_step": 1, "tau": 1.0}):
#     changed = train_dqn(make_config(DQNConfig, settings | change | short))
#     print(change, [round(line["q_mean"]) for line in changed.history if "q_mean" in line])
# ```
#
# With 10-step returns you see little difference. With 1-step returns and no target network the whole
# run climbs far above 100. Values above 100 cannot be true: they are errors that the network has taught
# itself.
#
# </details>

# %% [markdown]
# **Exercise 2.** Why does `dqn_target` multiply by `~terminated` and not by `~(terminated |
# truncated)`? Which of the tests above would notice?
#
# <details>
# <summary>Solution</summary>
#
# A truncated state has a future; only nobody looks. With the wrong mask the environment that pays 1
# for ever would be worth what its time limit allows, less than 10, and the assert on `forever`
# would fail.
#
# ```python
# pays_for_ever = torch.tensor([[10.0]])  # the value of one reward a step, at a discount of 0.9
# reward, discount = torch.ones(1), torch.tensor([0.9])
# for ended, y in ((False, 10.0), (True, 1.0)):
#     target = dqn_target(reward, discount, torch.tensor([ended]), pays_for_ever)
#     assert abs(target.item() - y) < 1e-5
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** With $n$-step returns the discount of the target is $\gamma^n$, but near the end of
# an episode it is not. Which code takes care of that, and what would happen if it did not?
#
# <details>
# <summary>Solution</summary>
#
# `NStepAccumulator` writes the discount of the steps that were really taken into each row. If the
# loss used $\gamma^n$ everywhere, a return that a time limit cut after two steps would bootstrap
# with the weight of ten, and values near the limit would be too low: the case `three_steps` above
# has a limit every 10 steps and would come out below 10.
#
# ```python
# rewards, value, goes_on = torch.tensor([1.9]), torch.tensor([[10.0]]), torch.tensor([False])
# right = dqn_target(rewards, torch.tensor([0.9**2]), goes_on, value)  # two steps were taken
# wrong = dqn_target(rewards, torch.tensor([0.9**10]), goes_on, value)
# assert abs(right.item() - 10) < 1e-5 and wrong.item() < 6
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** This loss runs, its value falls, and the agent learns slowly or not at
# all. Where is the mistake? Compare it with numbers by hand.


# %%
def loss_with_a_bug(q, action, reward, discount, terminated, next_q_target):
    """As `dqn_loss`, with a bug."""
    target = reward + discount * ~terminated * next_q_target.amax(dim=1)
    chosen = q.gather(1, action.unsqueeze(1))
    return (chosen - target).square().mean()


# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `chosen` has the shape (batch, 1) and `target` (batch,), so their difference is (batch, batch):
# every value is pulled towards the mean of all targets. A batch of one hides it. With the numbers of
# the hand example, 4.5 and 3 against 5.5 and 1, it gives
# $(1^2 + 3.5^2 + 2.5^2 + 2^2)/4 = 5.875$ in place of 2.5, as the cell below shows. The repair is
# `.squeeze(1)`, and `check_shapes` is there so that it cannot happen again.
#
# ```python
# def loss_with_a_bug(q, action, reward, discount, terminated, next_q_target):
#     """As `dqn_loss`, without the bug."""
#     target = reward + discount * ~terminated * next_q_target.amax(dim=1)
#     chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)
#     return (chosen - target).square().mean()
#
# q, next_q = torch.tensor([[4.5, 0.0], [0.0, 3.0]]), torch.tensor([[5.0, 2.0], [5.0, 2.0]])
# action, terminated = torch.tensor([0, 1]), torch.tensor([False, True])
# loss = loss_with_a_bug(q, action, torch.ones(2), torch.full((2,), 0.9), terminated, next_q)
# assert abs(loss.item() - 2.5) < 1e-5
# ```
#
# </details>

# %%
ends = torch.tensor([False, True])
hand = torch.tensor([[4.5, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), reward, discount, ends
print("with the bug:", loss_with_a_bug(*hand, next_q_target).item())
print("repaired:", dqn_loss(*hand, next_q_target)[0].item())
assert loss_with_a_bug(*hand, next_q_target).item() == 5.875
assert dqn_loss(*hand, next_q_target)[0].item() == 2.5

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook.dqn import DQN
#
# agent = DQN("CartPole-v1", num_envs=4, n_step=10, tau=0.02, target_every=1, seed=1)
# agent.learn(20_000)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train dqn --config cartpole --run-dir runs/a
# rlbook watch runs/a --out agent.gif
# ```
#
# ## References
#
# - C. Watkins (1989). *Learning from Delayed Rewards*. PhD thesis, Cambridge.
# - R. Sutton (1988). *Learning to Predict by the Methods of Temporal Differences*. Machine Learning 3.
# - V. Mnih et al. (2015). *Human-level control through deep reinforcement learning*. Nature 518.
# - H. van Hasselt, A. Guez, D. Silver (2016). *Deep Reinforcement Learning with Double Q-learning*.
#   AAAI.
# - M. Hessel et al. (2018). *Rainbow: Combining Improvements in Deep Reinforcement Learning*. AAAI.
# - A. Raffin (2020). *RL Baselines3 Zoo*: the tuned settings for CartPole.
