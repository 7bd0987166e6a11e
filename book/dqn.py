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
# In this chapter you build DQN, the algorithm that learned to play Atari games from the screen in 2015
# and made deep reinforcement learning widely known. At the end you have a network that estimates how
# good each action is, a loss that corrects it, a training loop of thirty lines, and an agent that
# learns to balance a pole on a laptop: 20,000 steps take less than a minute. The figure shows ten runs
# of 50,000.
#
# | | |
# |---|---|
# | Papers | Mnih et al. 2015 (DQN); van Hasselt et al. 2016 (Double); Sutton 1988 (n-step returns) |
# | Observations | vectors |
# | Actions | discrete |
# | Learns | off-policy, from replay |
# | Same as tabular Q-learning | the target: reward plus the discounted value of the best next action |
# | Different from tabular Q-learning | a network in place of the table, a replay buffer, a second network for the targets |

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

from rlbook.agent import Agent, Metrics, Transition, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.envs import derive_seed
from rlbook.replay import (
    Batch,
    NStepAccumulator,
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
import random
from collections import defaultdict, deque

from matplotlib import pyplot as plt

from rlbook.envs import make_env
from rlbook.figures import (
    COLORS,
    area_difference,
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
# random; an episode is cut off at 500. All ten seeds end at 500.
#
# ## The problem: a table does not scale
#
# Recall Q-learning from [Basics](basics.ipynb): a table holds the value $Q(s, a)$ of each state and
# action, and after each step one entry moves towards the target:
#
# $$Q(s, a) \leftarrow Q(s, a) + \alpha \bigl(r + \gamma\,(1 - \texttt{terminated}) \max_{a'} Q(s', a')
#   - Q(s, a)\bigr)$$
#
# The state of CartPole is four real numbers, so for a table each must be cut into bins. With 8
# bins for each number there are $8^4 = 4096$ states, with 32 there are over a million. Few bins
# cannot tell a pole that falls from one that rights itself. With many bins most are never seen,
# and what the agent learns in one bin says nothing about the next. The next cell measures this,
# with 20,000 steps and two seeds for each number of bins.


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
    (right, 1, "fraction of the table ever seen"),
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
# No number of bins comes near 500. With 32 bins the table has more than a million states, of which
# the agent has seen less than one in a hundred.
#
# A network needs no bins: it takes the four numbers as they are, and what it learns about one
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

# %%
#| export
class MLP(nn.Sequential):
    """Linear layers of the given sizes with ReLU between them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])  # none after the last layer

# %%
tiny = MLP((2, 2, 1))
for layer in (tiny[0], tiny[2]):
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
assert tiny(torch.tensor([[2.0, -1.0], [-2.0, 1.0]])).tolist() == [[2.0], [0.0]]

# %% [markdown]
# Networks learn best when all inputs have a similar range. In CartPole the cart's position and both
# velocities vary by about 1, but the pole's angle, which matters most, stays within ±0.21. So the
# network can multiply its inputs by fixed factors, the setting `observation_scale`. It is off by
# default, since it is knowledge about the task; the settings for CartPole multiply the angle by 8.

# %%
#| export
def scale_factors(observation_scale: tuple[float, ...], inputs: int) -> Tensor:
    """Return a factor for each entry of an observation, 1 where none are given."""
    given = len(observation_scale)
    if given not in (0, inputs):
        raise ValueError(f"Setting 'observation_scale' needs {inputs} factors, not {given}.")
    return torch.tensor(observation_scale or (1.0,) * inputs)


class QNetwork(nn.Module):
    """From an observation to the value of each action."""

    scale: Tensor  # what each entry of the observation is multiplied by

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: tuple[int, ...],
        observation_scale: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        scale = scale_factors(observation_scale, inputs)
        self.register_buffer("scale", scale, persistent=False)  # not learned, not saved
        self.layers = MLP((inputs, *hidden, actions))

    def forward(self, obs: Tensor) -> Tensor:
        """Map observations (batch, inputs) to values (batch, actions)."""
        return self.layers(obs.float() * self.scale)

# %%
scaled = QNetwork(inputs=4, actions=2, hidden=(8,), observation_scale=(1, 1, 8, 1))
plain = QNetwork(inputs=4, actions=2, hidden=(8,))
plain.load_state_dict(scaled.state_dict())
obs = torch.tensor([[0.1, 0.2, 0.05, -0.3]])
assert torch.equal(scaled(obs), plain(obs * torch.tensor([1.0, 1.0, 8.0, 1.0])))

# %% [markdown]
# ## The target
#
# The target for the action that was taken is what the table used: the reward, plus the discounted
# value of the best next action unless the step terminated:
#
# $$y = r + \gamma\,(1 - \texttt{terminated}) \max_{a'} Q^-(s', a')$$
#
# $Q^-$ is the *target network*, an older copy of the network that you train; the section after the loss
# explains it. Two improvements fit into the same formula.
#
# **n-step returns.** [Replay](replay.ipynb) can sum up to $n$ rewards before the target bootstraps. Then
# `reward` is that sum, `discount` is $\gamma^k$ for the $k \le n$ steps that were taken, and $s'$ is the
# state after them. With $n = 1$ it is the formula above.
#
# **Double DQN.** The maximum is optimistic. Say that both true values are 0, and that each guess
# is +1 or −1 by chance. In three cases of four the maximum is +1, so it is 0.5 on average, too
# high. This is called overestimation, and bootstrapping passes it on: the target of one state is
# made from the value of the next. Double DQN splits the work in two: the Q-network chooses
# the action, the target network says what it is worth. The two networks differ, since one is
# older, so a value that is too high by chance in one is often less so in the other. This reduces
# the overestimation; it does not remove it.
#
# By hand: reward 1, discount 0.9, values (5, 2) of the target network and (0, 3) of the Q-network. Plain
# DQN takes the maximum 5, so $y = 1 + 0.9 \cdot 5 = 5.5$. Double DQN chooses the second action, because 3
# is more than 0, and the target network values it at 2, so $y = 1 + 0.9 \cdot 2 = 2.8$. If the step
# terminated, both are 1.

# %%
#| export
def dqn_target(
    reward: Tensor,
    discount: Tensor,
    terminated: Tensor,
    next_q_target: Tensor,
    next_q: Tensor | None = None,
) -> Tensor:
    """Return the reward plus the discounted value of the next state, if there is one."""
    if next_q is None:
        next_value = next_q_target.amax(dim=-1)
    else:  # Double: the Q-network chooses, the target network values
        choice = next_q.argmax(dim=-1, keepdim=True)
        next_value = next_q_target.gather(-1, choice).squeeze(-1)
    return reward + discount * ~terminated * next_value

# %%
reward, discount = torch.tensor([1.0, 1.0]), torch.tensor([0.9, 0.9])
terminated = torch.tensor([False, True])
next_q_target = torch.tensor([[5.0, 2.0], [5.0, 2.0]])
next_q = torch.tensor([[0.0, 3.0], [0.0, 3.0]])
plain_target = dqn_target(reward, discount, terminated, next_q_target)
double_target = dqn_target(reward, discount, terminated, next_q_target, next_q)
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
# where $y$ is treated as a constant: no gradient flows through it. Otherwise a network that makes
# its own targets could lower the loss by moving the target to the prediction, and only the
# prediction should move. The loss is a pure function of tensors: no network, no agent, nothing
# that you cannot type by hand. It also checks shapes, because one bug is common and costly. If
# one vector has the shape (batch, 1) and another (batch,), PyTorch broadcasts their difference to
# (batch, batch), and the mean of that is a number that looks like a loss. (With `huber=True` an error
# $e$ costs $e^2/2$ up to $|e| = 1$ and $|e| - 0.5$ beyond, so that a few huge errors cannot dominate a
# batch.) The broadcast:

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


def dqn_loss(
    q: Tensor,  # (batch, actions), with gradient
    action: Tensor,  # (batch,)
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q_target: Tensor,  # (batch, actions), of the target network
    next_q: Tensor | None = None,  # (batch, actions), of the Q-network, for Double DQN
    huber: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the mean squared (or Huber) TD error and named metrics."""
    vectors = {"action": action, "reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(q), **vectors)
    with torch.no_grad():
        y = dqn_target(reward, discount, terminated, next_q_target, next_q)
    chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)  # (batch,), of the actions taken
    check_shapes(len(q), chosen=chosen, y=y)
    loss = nn.functional.huber_loss(chosen, y) if huber else nn.functional.mse_loss(chosen, y)
    values = chosen.detach()
    metrics = {
        "loss": loss.detach(),
        "q_mean": values.mean(),
        "target_mean": y.mean(),
        "td_error_abs": (values - y).abs().mean(),
    }
    return loss, metrics

# %% [markdown]
# By hand, with the two targets 5.5 and 1 from above: the first step took action 0 with value 4.5,
# the second took action 1 with value 3. The TD errors $y - Q$ are 1 and −2, the loss is
# $(1 + 4) / 2 = 2.5$, and the mean absolute error is 1.5. With Huber's loss the terms
# are 0.5 and $2 - 0.5 = 1.5$, and their mean is 1.

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
# ## The target network
#
# If the network that you train also makes its own targets, every update moves the targets too.
# Say that $Q(s, a) = 5$ has the target 6. The update lifts $Q(s, a)$ towards 6, and with it the
# values of similar states, $s'$ among them. Now the target may be 7: it moves away as fast as you
# approach it. So the targets come from a copy that follows slowly. Every `target_update_interval`
# updates, it moves the fraction $\tau$ of the way to the network:
#
# $$\theta^- \leftarrow (1 - \tau)\,\theta^- + \tau\,\theta$$
#
# With $\tau = 1$ and a large interval this copies the network now and then, as in the paper. With a
# small $\tau$ at every update the target network follows slowly, which is called Polyak averaging.
#
# By hand: target parameter 0, parameter 1, $\tau = 0.1$: after one step 0.1, after two
# $0.9 \cdot 0.1 + 0.1 = 0.19$.

# %%
#| export
@torch.no_grad()
def polyak_update(target_network: nn.Module, network: nn.Module, tau: float) -> None:
    """Move a target network the fraction `tau` of the way to the network; 1 copies it."""
    for slow, fast in zip(target_network.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, tau)  # slow += tau * (fast - slow)

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
# final value while it learns. The steps $t$ are environment steps, of all environments together:
#
# $$\varepsilon_t = \max\Bigl(\varepsilon_{\min},\; 1 - (1 - \varepsilon_{\min})\,\tfrac{t}{T_\varepsilon}\Bigr)$$
#
# where $T_\varepsilon$ is the setting `epsilon_decay_steps`. By hand: with a final value of 0.1 reached
# after 100 steps, step 50 is halfway, so $\varepsilon = 0.55$.

# %%
#| export
def linear_epsilon(step: int, decay_steps: int, final: float) -> float:
    """Fall linearly from 1 to `final` over `decay_steps`, then stay there."""
    return max(final, 1 - (1 - final) * step / decay_steps)


def epsilon_greedy(
    actions: np.ndarray,
    choices: int,
    epsilon: float | np.ndarray,  # one for all actions, or one for each
    generator: np.random.Generator,
) -> np.ndarray:
    """Replace each action, with probability `epsilon`, by a random one of the `choices`."""
    explores = generator.random(len(actions)) < epsilon
    return np.where(explores, generator.integers(choices, size=len(actions)), actions)

# %%
assert abs(linear_epsilon(50, 100, 0.1) - 0.55) < 1e-12
assert linear_epsilon(10_000, 100, 0.1) == 0.1

# %%
dice = np.random.default_rng(0)
drawn = epsilon_greedy(np.zeros(100_000, dtype=int), choices=2, epsilon=0.5, generator=dice)
fraction = drawn.mean()
print("fraction of action 1 (half of the actions are random, half of those are 1):", fraction)
assert abs(fraction - 0.25) < 0.01  # seven standard deviations

# %% [markdown]
# ## The whole algorithm in one cell
#
# These are all the parts. Put together they are a training loop of some thirty lines: an environment, a
# buffer, two networks, an optimiser. It is all of DQN: with the functions above you could paste it into
# a script of your own. It uses 1-step targets, Double DQN, and a target network that moves a hundredth
# of the way at each update. Its buffer is a `deque`, from which `random.sample` draws a batch.


# %%
def train_cartpole(
    seed: int, steps: int = 12_000, gamma: float = 0.99
) -> tuple[nn.Module, list[float]]:
    """Train DQN on CartPole; return the Q-network and the return of each episode."""
    random.seed(seed)
    torch.manual_seed(seed)
    env = gym.make("CartPole-v1")
    q_network = MLP((4, 64, 64, 2))
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    buffer, returns, total = deque(maxlen=10_000), [], 0.0
    obs, _ = env.reset(seed=seed)
    for step in range(steps):
        if random.random() < linear_epsilon(step, decay_steps=6_000, final=0.05):
            action = random.randrange(2)
        else:
            with torch.no_grad():
                action = int(q_network(torch.as_tensor(obs)).argmax())
        next_obs, reward, terminated, truncated, _ = env.step(action)
        buffer.append((obs, action, float(reward), next_obs, terminated))
        obs, total = next_obs, total + float(reward)
        if terminated or truncated:
            returns.append(total)
            obs, total = env.reset()[0], 0.0
        if step >= 500 and step % 2 == 0:
            s, a, r, s_next, end = zip(*random.sample(buffer, 64), strict=True)  # five tuples
            s, s_next = torch.tensor(np.array(s)), torch.tensor(np.array(s_next))
            a, r, end = torch.tensor(a), torch.tensor(r), torch.tensor(end)
            with torch.no_grad():
                next_q_target, next_q = target_network(s_next), q_network(s_next)
            discount = torch.full((64,), gamma)
            loss, _ = dqn_loss(q_network(s), a, r, discount, end, next_q_target, next_q)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            polyak_update(target_network, q_network, tau=0.01)
    return q_network, returns


q_network, returns = train_cartpole(seed=0)

# %% [markdown]
# Does it learn? Random play gets about 22. The live run below adds n-step returns and the scaled angle,
# and gets further. Here are twenty greedy episodes, and then the returns while it explored:


# %%
def play_greedily(q_network: nn.Module, episodes: int = 20) -> float:
    """Return the mean return of greedy episodes."""
    env, total = gym.make("CartPole-v1"), 0.0
    for episode in range(episodes):
        (obs, _), ended = env.reset(seed=1_000 + episode), False
        while not ended:
            with torch.no_grad():
                action = int(q_network(torch.as_tensor(obs)).argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
    return total / episodes


greedy_mean = play_greedily(q_network)
print(f"mean return of 20 greedy episodes: {greedy_mean:.0f}; random play gets about 22")
assert greedy_mean >= 150

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 3))
ends = np.cumsum(returns)  # each step pays 1, so a return is a length too
ax.plot(ends, returns, ".", color=COLORS["dqn"], markersize=3)
label_curves(ax, "the loop above", "return of each episode, exploring")
plt.show()

# %% [markdown]
# The loop lacks everything around the algorithm: evaluations, several environments, and
# checkpoints, the files from which a stopped run is resumed. The library has one loop with all
# that for every algorithm ([The run](run.ipynb)). To use it, DQN becomes a class that the loop can
# call, an [agent](agent.ipynb). `agent.learn` runs this loop. Without checkpoints and evaluations,
# it is:
#
# ```python
# agent.build()                                      # when the agent is made
# obs, _ = envs.reset(seed=seeds)
# episode_start = np.ones(num_envs, dtype=bool)
# while agent.global_step < total_steps:
#     action, _ = agent.act(obs, None, episode_start, explore=True)
#     new_obs, reward, terminated, truncated, infos = envs.step(action)
#     next_obs = true_next_obs(new_obs, infos)       # the last of an episode, not the first of the next
#     agent.observe(Transition(obs, action, reward, next_obs, terminated, truncated, episode_start, None))
#     agent.global_step += num_envs                  # one step of each environment
#     for batch in agent.batches():                  # `sample`, as often as an update is due
#         agent.update(batch)
#         agent.updates += 1
#     obs, episode_start = new_obs, terminated | truncated
# ```
#
# `None` is the hidden state, which DQN does not have. `batches` yields `sample()` as often as `updates_due`
# says ([Replay](replay.ipynb)), once the buffer holds a whole batch.
#
# ## Settings
#
# First come the settings. Each is one line, and from there it becomes a keyword, a key in a file and a
# flag in the shell ([Settings](settings.ipynb)). Batch size, buffer size and when to learn come from
# `ReplayConfig` ([Replay](replay.ipynb)).
#
# The learning rate may fall towards the end of a run, so that the noise of the last batches moves the
# final parameters less. By hand: $10^{-3}$ for the first half, then linearly to 0, is $5 \cdot 10^{-4}$
# after three quarters.

# %%
#| export
def decayed(initial: float, progress: float, decay_from: float) -> float:
    """Keep `initial` up to the fraction `decay_from` of a run, then fall linearly to 0."""
    if progress <= decay_from or decay_from == 1:
        return initial
    return initial * max(0.0, (1 - progress) / (1 - decay_from))  # the last step may overshoot


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = lr

# %%
assert decayed(1e-3, progress=0.3, decay_from=0.5) == 1e-3
assert abs(decayed(1e-3, progress=0.75, decay_from=0.5) - 5e-4) < 1e-12
assert decayed(1e-3, progress=1.0, decay_from=1.0) == 1e-3  # never falls

# %%
#| export
class DQNConfig(ReplayConfig):
    """The settings of DQN."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each hidden layer."
    )
    observation_scale: tuple[float, ...] = Field(
        default=(), description="Factor for each entry of the observation."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    lr_decay_from: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the run after which lr falls to 0."
    )
    n_step: int = Field(default=1, ge=1, description="Rewards summed before the target bootstraps.")
    double: bool = Field(default=True, description="Whether the Q-network chooses the next action.")
    huber: bool = Field(default=False, description="Huber loss instead of squared error.")
    tau: float = Field(
        default=1.0, gt=0, le=1, description="Fraction that a target update moves; 1 copies."
    )
    target_update_interval: int = Field(
        default=500, ge=1, description="Updates between two moves of the target network."
    )
    final_epsilon: float = Field(
        default=0.05, ge=0, le=1, description="Probability of a random action at the end."
    )
    epsilon_decay_steps: int = Field(
        default=10_000, ge=1, description="Environment steps until epsilon has fallen from 1."
    )
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="Longer gradients are shortened to this norm."
    )

    def epsilon(self, step: int) -> float:
        """Return the probability of a random action at a step."""
        return linear_epsilon(step, self.epsilon_decay_steps, self.final_epsilon)

    def lr_now(self, step: int) -> float:
        """Return the learning rate at a step."""
        return decayed(self.lr, step / self.total_steps, self.lr_decay_from)

# %%
config = DQNConfig(final_epsilon=0.1, epsilon_decay_steps=100, total_steps=1_000, lr_decay_from=0.5)
assert abs(config.epsilon(50) - 0.55) < 1e-12 and abs(config.lr_now(750) - 5e-4) < 1e-12

# %% [markdown]
# ## The agent
#
# Now the class. It inherits from `Agent` the settings (`config`), the `device` of the networks,
# the two counters of the loop (`global_step`, `updates`), a random `generator` of its own, and the
# methods that you call: `learn` trains it, `evaluate` plays greedy episodes, `predict` acts for
# one observation or several. `parts` names what a checkpoint saves.
#
# `observe` turns steps into n-step transitions and adds them to the buffer. `update` is the update
# of `train_cartpole` with three additions: the gradient may be clipped, the learning rate may
# fall, and the target network moves only at every `target_update_interval`-th update.
#
# | equation | code |
# |---|---|
# | $Q^-(s', \cdot)$, and $Q_\theta(s', \cdot)$ for Double | `next_q_target`, `next_q` |
# | $y = r + \gamma^k (1 - \texttt{terminated}) \max_{a'} Q^-(s', a')$ | `dqn_target`, inside `dqn_loss` |
# | $L(\theta)$ and its gradient | `dqn_loss`, `loss.backward()` |
# | $\theta \leftarrow$ a step of Adam | `optimizer.step()` |
# | $\theta^- \leftarrow (1 - \tau)\,\theta^- + \tau\,\theta$ | `polyak_update` |
#
# Forward pass, loss and backward pass have a method of their own, `compute_gradients`, so that
# `torch.compile` can speed it up if you set `compile`. `self.n_step` is the accumulator,
# `config.n_step` the number $n$. (Gymnasium may count actions from another number than 0; that is
# `action_space.start`.)

# %%
#| export
class DQN(Agent):
    """A Q-network that learns from replay."""

    name: ClassVar[str] = "dqn"
    config_class: ClassVar[type[Config]] = DQNConfig
    parts: ClassVar[tuple[str, ...]] = (
        "q_network", "target_network", "optimizer", "n_step", "replay"
    )
    compiled: ClassVar[tuple[str, ...]] = ("compute_gradients",)
    config: DQNConfig
    action_space: gym.spaces.Discrete

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        config = self.config
        self.q_network = self.make_network().to(self.device)
        self.target_network = copy.deepcopy(self.q_network)
        self.optimizer = torch.optim.Adam(self.q_network.parameters(), lr=config.lr, fused=True)
        dtype = transition_dtype(self.observation_space, self.action_space)
        self.replay = ReplayBuffer(config.buffer_size, dtype, derive_seed(config.seed, "replay"))
        self.n_step = NStepAccumulator(config.n_step, config.gamma, config.num_envs, dtype)

    def make_network(self) -> nn.Module:
        """Make a network from observations (batch, inputs) to values (batch, actions)."""
        inputs, actions = math.prod(self.observation_space.shape or ()), int(self.action_space.n)
        return QNetwork(inputs, actions, self.config.hidden, self.config.observation_scale)

    @torch.no_grad()
    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Return values (batch, actions) of observations (batch, inputs), as `act` gets them."""
        seen = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        return self.q_network(seen).cpu().numpy()

    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the best action, or with probability epsilon any."""
        actions = self.q_values(obs).argmax(axis=1)
        if explore:
            epsilon = self.config.epsilon(self.global_step)
            actions = epsilon_greedy(actions, int(self.action_space.n), epsilon, self.generator)
        return actions + self.action_space.start, state

    def observe(self, transition: Transition) -> None:
        """Store the n-step transitions that this step completes."""
        step = make_transitions(
            self.replay.storage.dtype,
            obs=transition.obs,
            action=transition.action - self.action_space.start,
            reward=transition.reward,
            next_obs=transition.next_obs,
            terminated=transition.terminated,
            discount=self.config.gamma,
        )
        self.n_step.drop(transition.episode_start)  # `learn` may start new episodes
        self.replay.add(self.n_step.add(step, transition.truncated))

    def sample(self) -> Batch:
        """Draw a batch from the replay buffer."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def compute_gradients(self, batch: Batch) -> Metrics:
        """Backpropagate the loss of a batch, and clip the gradient if it is asked for."""
        with torch.no_grad():
            next_q_target = self.target_network(batch.next_obs)
            next_q = self.q_network(batch.next_obs) if self.config.double else None
        q = self.q_network(batch.obs)
        loss, metrics = dqn_loss(
            q,
            batch.action,
            batch.reward,
            batch.discount,
            batch.terminated,
            next_q_target,
            next_q,
            huber=self.config.huber,
        )
        loss.backward()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.q_network.parameters(), self.config.max_grad_norm)
        return metrics

    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step on the TD error, then move the target network if it is time."""
        config = self.config
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        if (self.updates + 1) % config.target_update_interval == 0:
            polyak_update(self.target_network, self.q_network, config.tau)
        return UpdateResult(metrics)

# %%
#| export
def train_dqn(config: DQNConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train DQN with these settings."""
    return train(DQN(config=config), progress, callbacks)

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
#
# With `final_epsilon=1` every action is random, so both actions are seen; Q-learning is off-policy, so the
# values are still those of the best policy. `eval_every=0` means no evaluations.


# %%
def learned_values(env_id: str, states: list[list[float]], **settings: Any) -> np.ndarray:
    """Train on a tiny environment and return the greedy values of some of its states."""
    agent = DQN(env_id, gamma=0.9, lr=3e-3, hidden=(32,), learning_starts=64, tau=0.1,
                target_update_interval=1, final_epsilon=1.0, eval_every=0, seed=0, **settings)
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
# Now CartPole. The library comes with settings for it, named `cartpole`. This run has 20,000
# steps, as many as the tables had, and batches twice as large, to learn more from each step. These
# settings differ:

# %%
settings = {"total_steps": 20_000, "epsilon_decay_steps": 10_000, "batch_size": 128}
agent = DQN.from_config("cartpole", **settings)
default, shipped = DQNConfig(), DQN.from_config("cartpole").config
print(f"{'setting':24}{'default':>14}{'cartpole':>18}{'this run':>18}")
for name, value in agent.config:
    shown = [str(v).replace(".0,", ",").replace(".0)", ")")
             for v in (getattr(default, name), getattr(shipped, name), value)]
    if len(set(shown)) > 1:
        print(f"{name:24}{shown[0]:>14}{shown[1]:>18}{shown[2]:>18}")

# %%
result = train(agent)  # up to its `total_steps`; `agent.learn(1_000)` goes on for 1,000 more

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
# The curve of a run need not rise all the way, and one that has reached 500 need not stay there. An
# update that improves the values of some states can spoil those of others; the first figure of the
# chapter has such dips as well. There they become rare after 25,000 steps, when ε has reached its final value
# and the learning rate begins to fall.
#
# ## Watch it
#
# Here is the greedy agent in an episode that it has not seen: one picture every 25 steps, for the first
# 200 steps.

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
# What values has the network learned? For a cart in the middle, at rest, the colours show the
# value of the better action over the pole's angle and its speed, and the white line through the
# middle shows where the agent changes from pushing left to pushing right. The black dots are the
# angles and speeds of the episode above: the agent keeps the pole upright and slow. In two corners
# the pole leans to one side and is falling to that side; there the values are low, because the
# episode will soon end. Towards the edges, where training saw few states, the values and any
# further lines are guesses.

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
# 30,000 steps instead of 50,000, four environments instead of five, an update every third step
# instead of every second, and an ε that falls for 15,000 steps instead of 25,000. (Training again
# with one part taken away is called an *ablation*.) *No target network* copies the parameters at
# every update. *No replay* keeps only the last 64 transitions, one batch. *No exploring* plays
# greedily from the second step on, and the *learning rate that stays* does not fall to zero in the
# second half.
#
# Blue is the whole algorithm, black the one without the part: the line is the mean, the band its 95 %
# interval. Below, each dot is the last evaluation of a seed, the diamond the mean of the middle three of
# five (the interquartile mean, IQM), and the bar its 95 % interval, found by resampling the seeds.
# [Sweeps](sweep.ipynb) explains both.

# %% tags=["hide-input"]
ablations = load_result("results/dqn_ablations.json")
draw_parts(plt.figure(), ablations)
plt.show()
print(made_by(ablations))

# %% [markdown]
# **Exploring, replay, n-step returns and the scaled angle** all help; many of their intervals
# overlap, so five seeds cannot rank them all. Without **exploring** the mean of the middle seeds is
# lowest: one seed stays at a return of 10, and the best ends at 214. Without **replay** every seed
# reaches 500 at some point, and two of five end below 170. Without **n-step returns** one seed ends
# at 134 and another at 402. Without **the scaled angle** only one of five ends at 500.
#
# Taking **the target network** away costs almost nothing here: all five seeds end above 490. A
# likely reason: with 10-step returns an error in the values enters the next target with the weight
# $\gamma^{10} \approx 0.90$, against 0.99 with 1-step returns, so it dies out ten times faster.
# Exercise 1 takes it away with 1-step returns. **Double and the
# falling learning rate make no difference that can be seen here**: without them every seed still
# ends at 498 or more. This is what ablations are for: a part that is known to be important need
# not be important in your task.
#
# ## Beside Stable-Baselines3
#
# Does another implementation, at the same settings, learn as fast? `bench/parity.py` trains ours
# and that of Stable-Baselines3, a library that many people use, at the settings of the RL Zoo, a
# public collection of trained agents: 1-step targets, no Double, 128 updates after every 256
# steps. Both have ten seeds and play the same evaluation episodes at the same steps.
#
# Two tests compare more closely. One gives both the same weights and batches: their parameters agree
# to rounding after each update. The other lets both explore, sample and copy the target network by
# the same random numbers, through 1,200 steps with truncated episodes and a buffer that is full:
# every observation, every $\varepsilon$ and every action is the same.

# %% tags=["hide-input"]
show_parity("results/parity_dqn.json")

# %% [markdown]
# The interval in the title, which [Figures](figures.ipynb) explains, holds 0: ten seeds show no
# difference. At these settings both learn late, and at the end four of our seeds and six of theirs
# are below 475. The shipped settings, in the first figure, are steadier.
#
# A harder task is LunarLander, where the agent lands a rocket with three engines (200 is a good
# landing). Here are twenty seeds for each side, 100,000 steps at the settings of the RL Zoo:

# %% tags=["hide-input"]
show_parity("results/parity_dqn_lunarlander.json")

# %% [markdown]
# Again the interval holds 0. It is wide, since seeds differ far more than the two sides do: at the last
# evaluation ours go from −461 to 280 and theirs from −350 to 276; six of ours and two of theirs are
# below 80. A few seeds mislead here. The first ten alone give −48, with an interval that barely holds 0,
# and with three seeds either side may look far better.
#
# Do Double and the squared error, the defaults of this book, explain such a gap? The first ten seeds
# again, with Double, and with Double and the squared error without clipping:

# %% tags=["hide-input"]
variants = load_result("results/parity_dqn_lunarlander_variants.json")
show_parity("results/parity_dqn_lunarlander_variants.json")

# %% tags=["hide-input"]
runs = variants["runs"]
steps, plain = runs["rlbook"]["steps"], runs["rlbook"]["returns"]
for name in ("rlbook, Double", "rlbook, Double, squared error"):
    gain, low, high = area_difference(steps, runs[name]["returns"], plain)
    print(f"{name}, against ours without: {gain:+.0f}, 95 % interval {low:+.0f} to {high:+.0f}")

# %% [markdown]
# Neither interval leaves out 0: ten seeds show no gain and no loss.
#
# ## Honest edges
#
# What differs from the paper, and why:
#
# | Mnih et al. 2015 | here | why |
# |---|---|---|
# | screens, a convolutional network | vectors, two hidden layers | a laptop without a GPU |
# | 1-step targets, plain maximum | 10-step targets and Double in the shipped settings | with these settings 1-step targets learn CartPole and then forget it, at least for a while |
# | copies the target every 10,000 updates | Polyak averaging, $\tau = 0.02$ | smoother; the interval is a setting |
# | RMSProp, errors clipped to ±1 | Adam, squared error | today's default; Huber is a setting |
# | a constant learning rate | constant for half of the run, then falling to 0 | meant to steady the last parameters; no difference measured above |
# | batches of 32, an update every 4 steps, 1,000,000 transitions | batches of 64, an update every 2 steps, 50,000 | a short run |
# | ε from 1 to 0.1 in 1,000,000 frames | 1 to 0.1 in 25,000 steps | a smaller task |
# | one environment | five | fewer, larger operations |
# | inputs as they are | the angle times 8 | knowledge of the task; measured above |
#
# - n-step returns with replay are not corrected for the actions of an older policy. In theory that
#   is biased; in practice it helps, here as in Rainbow (Hessel et al. 2018), a DQN with six
#   extensions.
# - The paper's numbers are for 49 Atari games with 200 million frames each; nothing here claims to
#   reproduce them. For comparison on CartPole: the tuned DQN of the RL Zoo reports 500 in one run.
# - The settings were found on CartPole. On another task expect to search again.
#
# ## Exercises
#
# **Exercise 1.** In the live run the target network moves at every update. With `tau=1.0` it becomes a
# copy of the Q-network at each of them, so there is no target network any more. Train that way, and
# print `q_mean` along the history, with 10-step returns and with 1-step returns. In CartPole the
# discounted return cannot exceed $1/(1-\gamma) = 100$. What do you see?
#
# <details>
# <summary>Solution</summary>
#
# ```python
# short = {"total_steps": 2_000}  # leave it out for the whole run
# for change in ({}, {"tau": 1.0}, {"n_step": 1}, {"n_step": 1, "tau": 1.0}):
#     changed = train(DQN.from_config("cartpole", **(settings | change | short)))
#     print(change, [round(line["q_mean"]) for line in changed.history if "q_mean" in line])
# ```
#
# Look for values of `q_mean` above 100, most of all with 1-step returns and no target network. They
# cannot be true: they are errors that the network has learned from its own targets. The agent may
# balance all the same: acting greedily needs the right order of the actions, not the right values.
#
# </details>

# %% [markdown]
# **Exercise 2.** Why does `dqn_target` multiply by `~terminated` and not by `~(terminated |
# truncated)`? Which of the tests above would notice?
#
# <details>
# <summary>Solution</summary>
#
# After a truncated step the episode could have gone on, so the next state has a value. With the wrong
# mask the environment that pays 1 for ever would be worth what its time limit allows, less than 10, and
# the assert on `forever` would fail.
#
# ```python
# pays_for_ever = torch.tensor([[10.0]])  # the value of one reward a step, at a discount of 0.9
# for ends, y in ((False, 10.0), (True, 1.0)):
#     target = dqn_target(torch.ones(1), torch.tensor([0.9]), torch.tensor([ends]), pays_for_ever)
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
# `NStepAccumulator` writes the discount of the steps that were really taken into each transition. If
# the loss used $\gamma^n$ everywhere, a return that a time limit cut after two steps would bootstrap
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
# **Exercise 4, a planted bug.** This loss of Double DQN runs, and its value falls. Where is the mistake?
# Compare it with numbers by hand.


# %%
def loss_with_a_bug(q, action, reward, discount, terminated, next_q_target, next_q):
    """As `dqn_loss`, with a bug."""
    choice = next_q_target.argmax(dim=1, keepdim=True)
    next_value = next_q.gather(1, choice).squeeze(1)
    target = reward + discount * ~terminated * next_value
    chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)
    return (chosen - target).square().mean()


# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The networks have changed places: the target network chooses, and the network that is trained
# says what the choice is worth. So each update moves its own targets, and the target network no
# longer slows them down. With the values of the hand example, (5, 2) of the target network and (0,
# 3) of the Q-network, the target is $1 + 0.9 \cdot 0 = 1$ in place of 2.8. Then the loss of 4.5
# and 3 is $(3.5^2 + 2^2)/2 = 8.125$ in place of $(1.7^2 + 2^2)/2 = 3.445$, as the cell below
# shows. No check of shapes can find this: only a number by hand does. (That `no_grad` is missing
# is no second bug: the loop computes both `next_q_target` and `next_q` without gradients.)
#
# ```python
# def loss_with_a_bug(q, action, reward, discount, terminated, next_q_target, next_q):
#     """As `dqn_loss`, without the bug."""
#     choice = next_q.argmax(dim=1, keepdim=True)
#     next_value = next_q_target.gather(1, choice).squeeze(1)
#     target = reward + discount * ~terminated * next_value
#     chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)
#     return (chosen - target).square().mean()
#
# q, action = torch.tensor([[4.5, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
# terminated, discount = torch.tensor([False, True]), torch.full((2,), 0.9)
# next_values = torch.tensor([[5.0, 2.0], [5.0, 2.0]]), torch.tensor([[0.0, 3.0], [0.0, 3.0]])
# loss = loss_with_a_bug(q, action, torch.ones(2), discount, terminated, *next_values)
# assert abs(loss.item() - 3.445) < 1e-5
# ```
#
# </details>

# %%
ends = torch.tensor([False, True])
hand = torch.tensor([[4.5, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), reward, discount, ends
hand += torch.tensor([[5.0, 2.0], [5.0, 2.0]]), torch.tensor([[0.0, 3.0], [0.0, 3.0]])
print("with the bug:", loss_with_a_bug(*hand).item())
print("repaired:", dqn_loss(*hand)[0].item())
assert loss_with_a_bug(*hand).item() == 8.125
assert abs(dqn_loss(*hand)[0].item() - 3.445) < 1e-5

# %% [markdown]
# **Exercise 5.** A dueling network (Wang et al. 2016) splits $Q(s, a)$ into the value $V(s)$ and the
# advantage $A(s, a)$ of each action over the mean: $Q(s, a) = V(s) + A(s, a) - \operatorname{mean}_{a'}
# A(s, a')$. Write it, and train DQN with it. Any `nn.Module` that maps observations (batch, inputs) to
# values (batch, actions) may be returned by `make_network`. Where the observations are whole numbers,
# as bytes are, it must begin with `obs.float()`, as `QNetwork` does. Only layers that work differently
# when they train, such as dropout and batch normalisation, are not for it: the library never switches
# them to evaluation.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# class DuelingNetwork(nn.Module):
#     """A Q-network with one head for the value and one for the advantages."""
#
#     def __init__(self, inputs: int, actions: int) -> None:
#         super().__init__()
#         self.body = nn.Sequential(nn.Linear(inputs, 64), nn.LayerNorm(64), nn.ReLU())
#         self.value, self.advantage = nn.Linear(64, 1), nn.Linear(64, actions)
#
#     def forward(self, obs: Tensor) -> Tensor:
#         """Map observations (batch, inputs) to values (batch, actions)."""
#         features = self.body(obs)
#         advantage = self.advantage(features)
#         return self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)
#
#
# class DuelingDQN(DQN):
#     """DQN with a dueling network."""
#
#     def make_network(self) -> nn.Module:
#         """Make the dueling network."""
#         return DuelingNetwork(self.observation_space.shape[0], int(self.action_space.n))
#
# dueling = DuelingDQN.from_config("cartpole", seed=0, learning_starts=200, eval_every=0)
# before = copy.deepcopy(dueling.q_network.state_dict())
# dueling.learn(500, progress=False)
# moved = [not torch.equal(before[k], v) for k, v in dueling.q_network.state_dict().items()]
# assert all(moved)  # both heads, the body and the LayerNorm learn
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.dqn import DQN
#
# agent = DQN.from_config("cartpole", total_steps=20_000, epsilon_decay_steps=10_000, batch_size=128)
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
# - Z. Wang et al. (2016). *Dueling Network Architectures for Deep Reinforcement Learning*. ICML.
# - M. Hessel et al. (2018). *Rainbow: Combining Improvements in Deep Reinforcement Learning*. AAAI.
# - A. Raffin (2020). *RL Baselines3 Zoo*: the tuned settings for CartPole.
