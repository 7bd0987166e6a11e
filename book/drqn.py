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
# # DRQN: an agent that remembers
#
# A Q-network sees one observation at a time. If one observation does not tell everything, a case of
# partial observability, no amount of training helps it. In this chapter you turn DQN into a *Deep
# Recurrent Q-Network* (DRQN): you put an LSTM between the observations and the Q-values, keep
# pieces of episodes in the replay buffer instead of single steps, and compute the loss over
# sequences. At the end an agent that sees neither the velocity of the cart nor that of the pole
# keeps the pole up.
#
# This is where we are going, on CartPole with both velocities hidden. Each curve is the mean of
# five seeds with its 95 % interval; the commands that made them are printed with the figure. DQN had
# 100,000 steps and DRQN 200,000.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from rlbook.dqn import DQN
from rlbook.envs import evaluate, make_env
from rlbook.figures import (
    COLORS,
    PALETTE,
    draw_parts,
    filmstrip,
    label_curves,
    load_result,
    made_by,
    pick_frames,
    plot_band,
    plot_result,
    use_style,
)

use_style()

figure, ax = plt.subplots()
for algo, file in (("dqn", "drqn_masked_cartpole_dqn"), ("drqn", "drqn_masked_cartpole")):
    result = load_result(f"results/{file}.json")
    run = result["runs"][algo]
    plot_band(ax, run["steps"], run["returns"], algo.upper(), COLORS[algo])
    print(made_by(result))
label_curves(ax, result["env_id"])
ax.set_ylim(0, 520)
ax.legend()
print("DRQN, best evaluation of each seed:", [round(max(curve)) for curve in run["returns"]])
print("DRQN, last evaluation of each seed:", [round(last) for last in run["final"]])
assert min(max(curve) for curve in run["returns"]) > 475
plt.show()

# %% [markdown]
# DQN, with the settings of its own chapter, stays near 40: what it sees does not tell where the
# pole is going. (The two differ in more than the LSTM: in discount, scale of rewards, schedules
# and the size of updates. The *ablations* below, runs with one part taken away, remove the
# recurrence alone: that agent ends above DQN and far below DRQN.) Every seed of DRQN balances at
# some point, but may fall back later, so look at the curve of a run before you use its last
# network.
#
# | | |
# |---|---|
# | paper | Hausknecht & Stone, *Deep Recurrent Q-Learning for Partially Observable MDPs*, 2015 |
# | observations | vectors that need not tell everything |
# | actions | discrete |
# | on- or off-policy | off-policy: it learns from replay |
# | same as [DQN](dqn.ipynb) | ε-greedy exploration, target network, Double, n-step returns, loss of a step |
# | different from DQN | an LSTM in the network, chunks of episodes in the buffer |

# %% tags=["hide-input"]
#| export
import copy
import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rlbook.agent import Agent, Metrics, Transition, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import (
    MLP,
    DQNConfig,
    dqn_target,
    epsilon_greedy,
    polyak_update,
    scale_factors,
    set_learning_rate,
)
from rlbook.envs import derive_seed
from rlbook.replay import ReplayBuffer
from rlbook.run import RunResult, train
from rlbook.settings import Config

# %% [markdown]
# ## The problem
#
# The *T-maze* is the smallest environment that cannot be solved without looking back. You stand at
# the start of a corridor. A cue, −1 for left or 1 for right, is visible there and nowhere else. At
# the far end you turn left or right; the turn that the cue named pays 1, the other 0. The chapter
# on [environments](envs.ipynb) builds it.

# %%
env = make_env("rlbook/TMaze-v0", {"length": 3})
obs, _ = env.reset(seed=0)
print("start   ", obs)
for place in ("corridor", "corridor", "junction"):
    obs, reward, terminated, truncated, _ = env.step(0)  # in the corridor any action moves on
    print(place, obs)

# %% [markdown]
# At the junction the observation is the same after both cues. A policy that sees only this turns
# with the same probabilities whichever the cue was, and both cues are equally likely:
#
# $$P(\text{success}) = \tfrac12\, P(\text{left}) + \tfrac12\, P(\text{right}) = \tfrac12.$$
#
# Training cannot change this. Let DQN learn, then test it with each cue: a greedy policy gets exactly
# one of the two right.

# %%
class FixedCue(gym.Wrapper[np.ndarray, Any, np.ndarray, Any]):
    """A T-maze whose cue is chosen by hand."""

    def __init__(self, length: int, cue: int) -> None:
        super().__init__(make_env("rlbook/TMaze-v0", {"length": length}))
        self.chosen = cue

    def reset(self, **keywords: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with the chosen cue."""
        self.env.reset(**keywords)
        maze: Any = self.env.unwrapped
        maze.cue = self.chosen
        return maze.observe(), {}


def success(agent: Agent, length: int = 10) -> float:
    """Return the share of the two cues after which the greedy agent turns the right way."""
    return evaluate(agent.greedy, [FixedCue(length, cue) for cue in (-1, 1)], seed=0).mean


budget = {"total_steps": 16_000, "gamma": 0.98, "final_epsilon": 0.05, "epsilon_decay_steps": 6_400}
maze = {"env_id": "rlbook/TMaze-v0", "env_kwargs": {"length": 10}, "observation_scale": ()}
reactive = DQN.from_config("cartpole", **maze, **budget, n_step=1, lr_decay_from=1.0)
reactive.learn(16_000)
print(f"DQN turns the right way in {success(reactive):.0%} of the two cases")
assert success(reactive) == 0.5

# %% [markdown]
# ## The model
#
# An LSTM carries two vectors from step to step: the *cell state* $c_t$ and the *hidden state* $h_t$,
# which is also its output. Three gates between 0 and 1 decide what is kept, what is written and what
# is put out:
#
# $$\begin{aligned}
#   z^f, z^i, z^o &= \sigma(W x_t + U h_{t-1} + b), \\
#   c_t &= z^f \odot c_{t-1} + z^i \odot \tanh(W_c x_t + U_c h_{t-1} + b_c), \\
#   h_t &= z^o \odot \tanh c_t.
# \end{aligned}$$
#
# Here $x_t$ is the input of the LSTM, $\sigma$ the logistic function, which maps any number to one
# between 0 and 1, and $\odot$ the product entry by entry; each gate has a $W$, $U$ and $b$ of its own.
# $h$ and $c$ together are the network's *recurrent state*; where no confusion is possible we call the
# pair the hidden state, too.
#
# At the start of an episode the hidden state must be zero, even if the episode starts *inside* a
# sequence. A sequence of DRQN holds steps of one episode, so this chapter needs the rule only to
# switch recurrence off, with a reset at every step. In R2D2, the next chapter, a sequence may begin
# with padding, and its episode starts later.

# %%
#| export
State = tuple[Tensor, ...]  # the hidden state of a network: tensors of (batch, units)


def reset_state(state: State, episode_start: Tensor) -> State:
    """Zero the hidden state where an episode starts."""
    if len(state[0]) != len(episode_start):  # one of the two would be repeated without a word
        given = f"{len(state[0])}, and there are {len(episode_start)} observations"
        raise ValueError(f"The hidden state is of a batch of {given}.")
    return tuple(part.masked_fill(episode_start.unsqueeze(1), 0.0) for part in state)


# %% [markdown]
# The network is an encoder (the layers of DQN), an `nn.LSTM`, and a linear head that turns $h_t$
# into the value of each action. `forward` takes a batch of sequences. `nn.LSTM` knows nothing of
# episodes, so `forward` stops at each step where an episode starts in any of the sequences, and
# zeroes the hidden state of these sequences alone.

# %%
#| export
class LSTMQNetwork(nn.Module):
    """From the observations of an episode so far to the value of each action."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...], units: int) -> None:
        super().__init__()
        layers = MLP((inputs, *hidden)), nn.ReLU()
        self.encoder = nn.Sequential(*layers) if hidden else nn.Identity()
        self.lstm = nn.LSTM((inputs, *hidden)[-1], units)
        self.head = nn.Linear(units, actions)

    def initial_state(self, batch: int) -> State:
        """Return the hidden state at the start of `batch` episodes: zeros."""
        zeros = self.head.weight.new_zeros(batch, self.lstm.hidden_size)
        return zeros, zeros

    def forward(self, obs: Tensor, state: State, episode_start: Tensor) -> tuple[Tensor, State]:
        """Unroll over (time, batch, inputs); return Q-values and the last hidden state."""
        x = self.encoder(obs)
        starts = (1 + episode_start[1:].any(dim=1).nonzero().flatten()).tolist()
        outputs = []
        for first, last in pairwise([0, *starts, len(x)]):  # cut where an episode starts
            hidden, cell = reset_state(state, episode_start[first])
            h_c = hidden.unsqueeze(0), cell.unsqueeze(0)  # (layers, batch, units)
            output, (hidden, cell) = self.lstm(x[first:last], h_c)
            state = hidden.squeeze(0), cell.squeeze(0)
            outputs.append(output)
        return self.head(torch.cat(outputs)), state  # (time, batch, actions)


# %% [markdown]
# By hand: an LSTM of one unit that keeps a cue. Its input is 1 when a cue shows and else 0. The
# input gate is open only with a cue, $z^i = \sigma(20x - 10)$; it then writes
# $\tanh(9x) \approx 1$; the forget gate keeps everything, $z^f = \sigma(10) \approx 1$; and the
# output gate is open too. So from the cue on the cell state is 1 and the hidden state
# $\tanh 1 = 0.76$, until the episode ends. (The head passes the output on unchanged.)

# %%
latch = LSTMQNetwork(inputs=1, actions=1, hidden=(), units=1)
with torch.no_grad():
    for parameter in latch.parameters():
        parameter.zero_()
    latch.lstm.weight_ih_l0[:, 0] = torch.tensor([20.0, 0.0, 9.0, 0.0])  # i, f, what to write, o
    latch.lstm.bias_ih_l0[:] = torch.tensor([-10.0, 10.0, 0.0, 10.0])
    latch.head.weight.fill_(1.0)

cue = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]).view(6, 1, 1)  # (time, batch, inputs)
starts = torch.tensor([True, False, False, False, True, False]).view(6, 1)
with torch.no_grad():
    output, _ = latch(cue, latch.initial_state(1), starts)
print(output.flatten().numpy().round(2))
assert np.allclose(output.flatten(), [0, 0.76, 0.76, 0.76, 0, 0], atol=0.01)

# %% [markdown]
# While it acts, the agent feeds one step at a time and carries the hidden state along. Both ways
# must give the same values, wherever episodes start:

# %%
network = LSTMQNetwork(inputs=3, actions=2, hidden=(8,), units=4)
obs, starts = torch.randn(20, 5, 3), torch.rand(20, 5) < 0.1
with torch.no_grad():
    whole, _ = network(obs, network.initial_state(5), starts)  # (20, 5, 2)
    state, steps = network.initial_state(5), []
    for x, start in zip(obs, starts, strict=True):
        q, state = network(x.unsqueeze(0), state, start.unsqueeze(0))  # a sequence of length one
        steps.append(q)
assert torch.allclose(whole, torch.cat(steps), atol=1e-6)

# %% [markdown]
# ## The buffer
#
# A single transition is not enough to learn from any more: the value of its observation depends on
# what came before. So the buffer keeps *chunks*, pieces of at most `length` steps of one episode.
# A chunk is one element of a structured array, as a transition is in [replay](replay.ipynb). The
# observation after a step is the one before the next, so a chunk has one observation more than it
# has steps. The hidden state before its first step is stored with it, as the Q-network of that
# time computed it.

# %%
#| export
def chunk_dtype(inputs: int, state_size: int, length: int) -> np.dtype:
    """Describe a chunk of `length` steps of one episode as one element of a structured array."""
    fields = [
        ("obs", np.float32, (length + 1, inputs)),  # and the successor of the last step
        ("action", np.int64, (length,)),
        ("reward", np.float32, (length,)),
        ("discount", np.float32, (length,)),  # gamma ** (steps of the return)
        ("bootstrap", np.int64, (length,)),  # index of the observation to bootstrap from
        ("terminated", np.bool_, (length,)),  # at that observation
        ("episode_start", np.bool_, (length + 1,)),
        ("mask", np.bool_, (length,)),  # True at valid steps, False at padded ones
        ("state", np.float32, (state_size,)),  # the hidden state before the first step
    ]
    return np.dtype(fields, align=True)


# %% [markdown]
# A chunk never crosses the end of an episode: it closes when it is full or when its episode ends,
# whichever comes first. A short episode is kept; what is missing is *padded* with zeros, and a mask
# tells *valid* steps from padded ones.
#
# n-step returns fit in as well. A chunk of $\ell$ valid steps ends with the observation $o_\ell$,
# so the return of step $t$ looks $k = \min(n, \ell - t)$ steps ahead:
#
# $$G_t = \sum_{j=0}^{k-1} \gamma^j r_{t+j}, \qquad
#   y_t = G_t + \gamma^k \,(1 - \texttt{terminated}) \max_{a'} Q^-(o_{\le t+k}, a').$$
#
# $o_{\le t}$ is all that was seen up to step $t$: the hidden state makes the value depend on it. With
# Double, $a'$ is the Q-network's choice instead of the maximum. Near the end of the chunk the return is
# shorter: it bootstraps at $o_\ell$ with the discount of the steps actually taken, and only an episode
# that *terminated* at $o_{t+k}$ has no value there. The buffer computes this once, when a chunk closes.

# %%
#| export
def n_step_chunks(chunks: np.ndarray, n: int, gamma: float) -> np.ndarray:
    """Return chunks whose rewards are n-step returns, cut short where the chunk's steps end."""
    mask, length = chunks["mask"], chunks["mask"].shape[1]  # (chunks, time)
    time = np.arange(length)
    end = (mask * (time + 1)).max(axis=1, keepdims=True)  # one past the last step
    # At most n steps on; at a padded step its own index, so that the discount is 1.
    bootstrap = np.maximum(np.minimum(time + n, end), time)
    reward, returns = chunks["reward"] * mask, np.zeros(mask.shape, np.float32)
    for k in range(min(n, length)):
        returns[:, : length - k] += gamma**k * reward[:, k:]
    # The step that leads to the observation of the bootstrap; what a padded one finds is masked.
    last = np.maximum(bootstrap - 1, 0)
    result = np.zeros(len(chunks), chunks.dtype)
    result[:] = chunks
    result["terminated"] = np.take_along_axis(chunks["terminated"], last, axis=1) & mask
    result["reward"], result["bootstrap"] = returns, bootstrap
    result["discount"] = gamma ** (bootstrap - time)
    return result


# %% [markdown]
# By hand: three steps that pay 1 each, $n = 2$ and $\gamma = 0.5$. Steps 0 and 1 sum two rewards,
# $1 + 0.5 = 1.5$, and bootstrap two observations later with $0.25$. Step 2 has one reward left, and
# bootstraps at the last observation with $0.5$. If the episode terminated there, steps 1 and 2 have
# no value to bootstrap from.

# %%
chunks = np.zeros(1, chunk_dtype(inputs=1, state_size=1, length=4))
chunks["mask"][0, :3], chunks["reward"][0, :3], chunks["terminated"][0, 2] = True, 1.0, True
chunk = n_step_chunks(chunks, n=2, gamma=0.5)[0]
assert chunk["reward"][:3].tolist() == [1.5, 1.5, 1.0]
assert chunk["discount"][:3].tolist() == [0.25, 0.25, 0.5]
assert chunk["bootstrap"][:3].tolist() == [2, 3, 3]
assert chunk["terminated"][:3].tolist() == [False, True, True]

# %% [markdown]
# `nn.LSTM` wants time as the first dimension and the batch as the second, so chunks are transposed
# when they become tensors.

# %%
#| export
@dataclass
class Chunks:
    """A batch of chunks as tensors, time first."""

    obs: Tensor  # (time + 1, batch, inputs)
    action: Tensor  # (time, batch)
    reward: Tensor  # (time, batch)
    discount: Tensor  # (time, batch)
    bootstrap: Tensor  # (time, batch)
    terminated: Tensor  # (time, batch)
    episode_start: Tensor  # (time + 1, batch)
    mask: Tensor  # (time, batch)
    state: Tensor  # (batch, state_size)

    def to(self, device: torch.device) -> Self:
        """Move all tensors to a device."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **tensors)


def to_chunks(stored: np.ndarray) -> Chunks:
    """Turn stored chunks (batch,) into tensors."""
    tensors = {name: torch.from_numpy(stored[name]) for name in stored.dtype.names or ()}
    state = tensors.pop("state")
    time_first = {name: x.transpose(0, 1).contiguous() for name, x in tensors.items()}
    return Chunks(**time_first, state=state)


# %% [markdown]
# The buffer holds a ring of closed chunks and, for each environment, one *open* chunk that is still
# being filled. `append` takes one step of all environments; chunks that are full, or whose episode is
# over, move into the ring. (`begin` and `close` have arguments that are not used yet: R2D2's buffer
# overrides both.)

# %%
#| export
class RecurrentReplayBuffer:
    """A ring of chunks, and for each environment one open chunk that is still being filled."""

    def __init__(
        self, capacity: int, dtype: np.dtype, num_envs: int, n: int, gamma: float, seed: int
    ) -> None:
        self.ring = ReplayBuffer(capacity, dtype, seed)
        self.open = np.zeros(num_envs, dtype)
        self.filled = np.zeros(num_envs, dtype=np.int64)  # steps of each open chunk so far
        self.length = self.open["action"].shape[1]
        self.n, self.gamma = n, gamma

    def __len__(self) -> int:
        return len(self.ring)

    def append(
        self,
        *,
        truncated: np.ndarray,  # (num_envs,)
        state: np.ndarray,  # (num_envs, state_size), before the step; zero at an episode's start
        next_obs: np.ndarray,  # (num_envs, inputs)
        **step: np.ndarray,  # obs, action, reward, terminated, episode_start
    ) -> None:
        """Store one step of each environment; a chunk closes when full or when its episode ends."""
        start, ended = step["episode_start"], step["terminated"] | truncated
        self.close(start & (self.filled > 0), start)  # `learn` was called again in mid-episode
        self.begin(start, state)
        envs = np.arange(len(self.open))
        for name, values in step.items():
            self.open[name][envs, self.filled] = values
        self.open["mask"][envs, self.filled] = True
        self.filled += 1
        self.open["obs"][envs, self.filled] = next_obs
        self.close(ended | (self.filled == self.length), ended)

    def begin(self, episode_start: np.ndarray, state: np.ndarray) -> None:
        """Give each new chunk the hidden state before its first step."""
        new = self.filled == 0
        self.open["state"][new] = state[new]

    def close(self, closed: np.ndarray, ended: np.ndarray) -> None:
        """Store the open chunks of some environments, and open empty ones in their place."""
        if closed.any():
            self.store(n_step_chunks(self.open[closed], self.n, self.gamma))
            self.open[closed] = np.zeros((), self.open.dtype)
            self.filled[closed] = 0

    def store(self, chunks: np.ndarray) -> None:
        """Put closed chunks into the ring."""
        self.ring.add(chunks)

    def sample(self, batch_size: int) -> Chunks:
        """Sample closed chunks uniformly."""
        return to_chunks(self.ring.sample(batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Return the ring and the open chunks."""
        open_chunks = torch.from_numpy(self.open.view(np.uint8))
        filled = torch.from_numpy(self.filled)
        return {"ring": self.ring.state_dict(), "open": open_chunks, "filled": filled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored ring and stored open chunks."""
        self.ring.load_state_dict(state["ring"])
        self.open[:] = state["open"].numpy().view(self.open.dtype)
        self.filled[:] = state["filled"].numpy()


# %% [markdown]
# By hand: chunks of three steps, and an episode of four. It becomes one full chunk and one with a
# single step and two padded ones; then the next episode opens a new chunk.

# %%
def one_step(buffer: Any, number: int, start: bool, end: bool) -> None:
    """Append a step whose observation, reward and hidden state are its number."""
    seen = np.full((1, 1), number, np.float32)
    buffer.append(
        obs=seen,
        action=np.zeros(1, np.int64),
        reward=np.full(1, number, np.float32),
        next_obs=seen + 1,
        terminated=np.array([end]),
        truncated=np.array([False]),
        episode_start=np.array([start]),
        state=seen,
    )


buffer = RecurrentReplayBuffer(10, chunk_dtype(1, 1, 3), num_envs=1, n=1, gamma=0.9, seed=0)
for number in range(5):
    one_step(buffer, number, start=number in (0, 4), end=number == 3)
assert len(buffer) == 2 and buffer.filled.tolist() == [1]  # two closed, one step in the open one
closed = buffer.ring.storage[:2]
assert closed["mask"].tolist() == [[True, True, True], [True, False, False]]
assert closed["obs"][0, :, 0].tolist() == [0, 1, 2, 3]
assert closed["state"].tolist() == [[0], [3]]  # the hidden state before steps 0 and 3

# %% [markdown]
# What does the buffer look like after a while? Below, one environment has played random episodes
# with chunks of 16 steps. Each line is a chunk, each colour an episode, and a black edge marks the
# first step of an episode; grey is padding. The last chunk is still open.

# %% tags=["hide-input"]
rng = np.random.default_rng(3)
buffer = RecurrentReplayBuffer(30, chunk_dtype(1, 1, 16), num_envs=1, n=1, gamma=0.9, seed=0)
number, owner = 0, {}
for episode, length in enumerate(rng.integers(5, 45, size=9)):
    for t in range(length):
        owner[number] = episode
        last = t == length - 1 and episode < 8
        one_step(buffer, number, start=t == 0, end=last)
        number += 1
pieces = np.concatenate((buffer.ring.storage[: len(buffer)], buffer.open))
image = np.full((*pieces["mask"].shape, 3), 0.85)
figure, ax = plt.subplots(figsize=(7, 4))
for i, piece in enumerate(pieces):
    for t in np.flatnonzero(piece["mask"]):
        color = PALETTE[owner[int(piece["obs"][t, 0])] % len(PALETTE)]
        image[i, t] = plt.matplotlib.colors.to_rgb(color)
        if piece["episode_start"][t]:
            ax.add_patch(plt.Rectangle((t - 0.5, i - 0.5), 1, 1, fill=False, lw=2))
ax.imshow(image, aspect="auto", alpha=0.75)
ax.set(xlabel="step within the chunk", ylabel="chunk", xticks=range(0, 16, 3))
ax.set_yticks(range(len(pieces)), [*map(str, range(len(buffer))), "open"])
ax.grid(False)
padded = 1 - buffer.ring.storage[: len(buffer)]["mask"].mean()
ax.set_title(f"storage of one environment: {padded:.0%} of the closed chunks is padding")
plt.show()

# %% [markdown]
# ## The loss
#
# The target of a step is that of DQN, so `dqn_target` is imported. The loss is DQN's as well,
# averaged over the valid steps of a batch of chunks. With the mask $m_{t,b}$, 1 for a valid step
# and 0 for padding,
#
# $$L = \frac{\sum_{t,b} m_{t,b}\,\bigl(Q(o_{\le t}, a_t) - y_t\bigr)^2}{\sum_{t,b} m_{t,b}}.$$
#
# The value and the target of a padded step must not matter, even if they are NaN. Multiplying by
# the mask would not do, since 0 × NaN is NaN; `masked_fill` writes 0 over both, and the gradient
# there is 0, too. (Padded observations do pass through the network: they are zeros, and come after
# the valid steps.) A wrong shape would be broadcast into a wrong loss, so shapes are checked
# first. The argument `weights` is for R2D2, in the next chapter.

# %%
#| export
def check_steps(shape: torch.Size, **steps: Tensor) -> None:
    """Raise unless each tensor is (time, batch), one number a step."""
    for name, part in steps.items():
        if part.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)}, not {tuple(part.shape)}.")


def sequence_loss(
    q: Tensor,  # (time, batch, actions), with gradient
    action: Tensor,  # (time, batch)
    target: Tensor,  # (time, batch)
    mask: Tensor,  # (time, batch)
    weights: Tensor | float = 1.0,  # (batch,), of each chunk
    huber: bool = False,
) -> tuple[Tensor, Metrics, Tensor]:
    """Return the weighted mean over the valid steps, metrics, and TD errors (time, batch)."""
    check_steps(q.shape[:2], action=action, target=target, mask=mask)
    padded, steps = ~mask, mask.sum()
    taken = action.masked_fill(padded, 0).unsqueeze(2)
    chosen = q.gather(2, taken).squeeze(2).masked_fill(padded, 0.0)  # (time, batch)
    target = target.masked_fill(padded, 0.0)
    distance = nn.functional.huber_loss if huber else nn.functional.mse_loss
    loss = (weights * distance(chosen, target, reduction="none")).sum() / steps
    values = chosen.detach()
    td_error = values - target
    metrics = {
        "loss": loss.detach(),
        "q_mean": values.sum() / steps,
        "target_mean": target.sum() / steps,
        "td_error_abs": td_error.abs().sum() / steps,
    }
    return loss, metrics, td_error


# %%
#| export
def drqn_loss(
    q: Tensor,  # (time, batch, actions), with gradient
    action: Tensor,  # (time, batch)
    reward: Tensor,  # (time, batch)
    discount: Tensor,  # (time, batch)
    terminated: Tensor,  # (time, batch)
    mask: Tensor,  # (time, batch), False at padded steps
    next_q_target: Tensor,  # (time, batch, actions)
    next_q: Tensor | None = None,  # (time, batch, actions) for Double
    huber: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the mean squared (or Huber) TD error over the valid steps, and named metrics."""
    check_steps(q.shape[:2], reward=reward, discount=discount, terminated=terminated)
    with torch.no_grad():
        target = dqn_target(reward, discount, terminated, next_q_target, next_q)
    loss, metrics, _ = sequence_loss(q, action, target, mask, huber=huber)
    return loss, metrics


# %% [markdown]
# By hand: one chunk of two steps, the second padded. Action 1 has the value 2; the reward is 1, the
# discount 0.5 and the best next value 4, so $y = 1 + 0.5 \cdot 4 = 3$ and the loss is
# $(2 - 3)^2 = 1$. The padded step holds nonsense, and changes nothing.

# %%
nonsense = float("nan")
loss, metrics = drqn_loss(
    q=torch.tensor([[[0.0, 2.0]], [[nonsense, nonsense]]]),  # (time 2, batch 1, actions 2)
    action=torch.tensor([[1], [7]]),
    reward=torch.tensor([[1.0], [nonsense]]),
    discount=torch.tensor([[0.5], [0.5]]),
    terminated=torch.tensor([[False], [False]]),
    mask=torch.tensor([[True], [False]]),
    next_q_target=torch.tensor([[[4.0, 3.0]], [[nonsense, nonsense]]]),
)
assert loss == 1.0 and metrics["target_mean"] == 3.0

# %% [markdown]
# In an update one pass over a chunk gives the values at all its observations, and `bootstrap` says
# which of them each step needs.

# %%
#| export
def values_at(q: Tensor, steps: Tensor) -> Tensor:
    """Pick from values (time + 1, batch, actions) those at the given steps (time, batch)."""
    return q.gather(0, steps.unsqueeze(2).expand(-1, -1, q.shape[2]))


# %% [markdown]
# By hand: a chunk of three steps with two-step returns and one action, whose value at each
# observation is its number.

# %%
q = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(4, 1, 1)  # (time 4, batch 1, actions 1)
picked = values_at(q, torch.tensor([[2], [3], [3]]))  # two steps on, or at the chunk's end
assert picked.flatten().tolist() == [2, 3, 3]

# %% [markdown]
# ## The settings
#
# All settings of DQN apply; a few say what a chunk is. `chunk_length` is how far the gradient
# reaches back in time (*truncated backpropagation through time*). `start_state` says whether a
# chunk starts from the hidden state stored with it or from zero, as in the paper: you will compare
# the two below. `previous_action` adds the previous action to the input of the network. Switch off
# `carry_state` to see what recurrence is worth: the same network then starts from zero at every
# step, in acting and in learning. `reward_scale` multiplies rewards on their way into the buffer,
# so that values stay small where every step pays 1.

# %%
#| export
class DRQNConfig(DQNConfig):
    """The settings of DRQN: those of DQN, and those of its LSTM and its chunks."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64,), description="Units of each layer of the encoder."
    )
    lstm_units: int = Field(default=64, ge=1, description="Units of the LSTM.")
    carry_state: bool = Field(
        default=True, description="Whether a step starts from the last hidden state."
    )
    previous_action: bool = Field(
        default=True, description="Whether the action before is an input, too."
    )
    chunk_length: int = Field(
        default=16, ge=1, description="Steps of a chunk, as far as gradients reach."
    )
    start_state: Literal["stored", "zero"] = Field(
        default="stored", description="Hidden state that a chunk starts from."
    )
    batch_size: int = Field(default=32, ge=1, description="Chunks of one update.")
    buffer_size: int = Field(
        default=5_000, ge=1, description="Chunks that the replay buffer holds."
    )
    reward_scale: float = Field(
        default=1.0, gt=0, description="Factor of the rewards in the buffer."
    )

    @model_validator(mode="after")
    def check_returns_fit(self) -> Self:
        """Raise where no return in a chunk could have n steps."""
        if self.n_step > self.chunk_length:
            raise ValueError(
                f"Setting 'n_step' ({self.n_step}) must not exceed 'chunk_length' "
                f"({self.chunk_length}): no return in a chunk could have so many steps."
            )
        return self


# %% [markdown]
# ## Observation preprocessing
#
# The input of the network is the observation, each entry multiplied by its factor in
# `observation_scale`, and the previous action as a one-hot vector: what the agent did explains a
# part of what it sees. At the start of an episode there was no action, and that part is all zeros.

# %%
#| export
class ObservationPreprocessor:
    """Scales observations and appends the previous action, one-hot."""

    def __init__(self, scale: np.ndarray, actions: int, previous_action: bool) -> None:
        self.scale = scale
        self.action_inputs = actions if previous_action else 0
        self.one_hots = np.eye(actions, self.action_inputs, dtype=np.float32)
        self.inputs = len(scale) + self.action_inputs

    def one_hot(self, actions: np.ndarray) -> np.ndarray:
        """Return actions (batch,) as (batch, actions) of zeros and ones, or as (batch, 0)."""
        return self.one_hots[actions]

    def __call__(self, obs: np.ndarray, previous_action: np.ndarray) -> np.ndarray:
        """Return (batch, inputs) for observations (batch, entries) and one-hot actions."""
        return np.concatenate((obs * self.scale, previous_action), axis=1, dtype=np.float32)


# %%
preprocess = ObservationPreprocessor(np.array([1.0, 8.0]), actions=3, previous_action=True)
inputs = preprocess(np.array([[0.5, 0.25]]), preprocess.one_hot(np.array([2])))
print(inputs)
assert inputs.tolist() == [[0.5, 2, 0, 0, 1]]

# %% [markdown]
# ## The agent
#
# From step to step the agent carries the network's hidden state and the previous action, both
# zeroed where an episode starts. `act` advances the hidden state whichever action is played: a
# random action is a part of the past, too. `observe` stores the hidden state from *before* the
# step. `compute_gradients` starts both networks from that stored state, which an earlier Q-network
# computed, and each goes on with its own parameters. (The next chapter measures how wrong that
# start is.) `update` does the same as DQN's, with chunks.

# %%
#| export
class DRQN(Agent):
    """DQN with an LSTM: it learns from chunks of episodes."""

    name: ClassVar[str] = "drqn"
    config_class: ClassVar[type[Config]] = DRQNConfig
    parts: ClassVar[tuple[str, ...]] = ("q_network", "target_network", "optimizer", "replay")
    compiled: ClassVar[tuple[str, ...]] = ()  # PyTorch cannot compile an LSTM as a whole
    config: DRQNConfig
    action_space: gym.spaces.Discrete
    replay: RecurrentReplayBuffer
    q_network: Any  # a module with the methods of `LSTMQNetwork`
    target_network: Any

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        config, actions = self.config, int(self.action_space.n)
        entries = int(np.prod(self.observation_space.shape or ()))
        scale = scale_factors(config.observation_scale, entries).numpy()
        self.preprocess = ObservationPreprocessor(scale, actions, config.previous_action)
        self.q_network = self.make_network().to(self.device)
        self.target_network = copy.deepcopy(self.q_network)
        self.optimizer = torch.optim.Adam(self.q_network.parameters(), lr=config.lr, fused=True)
        self.state_sizes = [part.shape[1] for part in self.q_network.initial_state(1)]
        self.replay = self.make_replay()

    def make_network(self) -> nn.Module:
        """Make the Q-network: any module with `initial_state` and `forward` of `LSTMQNetwork`."""
        config, actions = self.config, int(self.action_space.n)
        return LSTMQNetwork(self.preprocess.inputs, actions, config.hidden, config.lstm_units)

    def make_replay(self) -> RecurrentReplayBuffer:
        """Make the buffer of chunks."""
        config, seed = self.config, derive_seed(self.config.seed, "replay")
        dtype = chunk_dtype(self.preprocess.inputs, sum(self.state_sizes), config.chunk_length)
        returns = config.n_step, config.gamma
        return RecurrentReplayBuffer(config.buffer_size, dtype, config.num_envs, *returns, seed)

    def carried_state(self, state: State | None, episode_start: np.ndarray) -> State:
        """Return hidden state and previous action, zeroed where an episode starts."""
        if state is None:
            count = len(episode_start)
            no_action = torch.zeros(count, self.preprocess.action_inputs, device=self.device)
            return *self.q_network.initial_state(count), no_action
        start = torch.from_numpy(episode_start).to(self.device)
        return reset_state(tuple(part.to(self.device) for part in state), start)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Act ε-greedily; the hidden state advances whichever action is taken."""
        *hidden, previous_action = self.carried_state(state, episode_start)
        inputs = self.preprocess(obs, previous_action.cpu().numpy())
        x = torch.from_numpy(inputs).to(self.device).unsqueeze(0)  # a sequence of length one
        start = torch.full((1, len(obs)), not self.config.carry_state, device=self.device)
        q, hidden = self.q_network(x, tuple(hidden), start)  # (1, batch, actions)
        actions = q.squeeze(0).argmax(dim=1).cpu().numpy()
        if explore:
            epsilon = self.epsilon(len(actions))
            actions = epsilon_greedy(actions, int(self.action_space.n), epsilon, self.generator)
        played = torch.from_numpy(self.preprocess.one_hot(actions)).to(self.device)
        return actions + self.action_space.start, (*hidden, played)

    def epsilon(self, count: int) -> float | np.ndarray:
        """Return the probability of a random action in each of `count` environments now."""
        return self.config.epsilon(self.global_step)  # the same in all

    def observe(self, transition: Transition) -> None:
        """Append the step to the open chunks, with the hidden state before it."""
        state = self.carried_state(transition.state, transition.episode_start)
        *hidden, previous_action = (part.cpu().numpy() for part in state)
        action = transition.action - self.action_space.start
        self.replay.append(
            obs=self.preprocess(transition.obs, previous_action),
            action=action,
            reward=transition.reward * self.config.reward_scale,
            next_obs=self.preprocess(transition.next_obs, self.preprocess.one_hot(action)),
            terminated=transition.terminated,
            truncated=transition.truncated,
            episode_start=transition.episode_start,
            state=np.concatenate(hidden, axis=1),
        )

    def sample(self) -> Chunks:
        """Sample a batch of chunks."""
        return self.replay.sample(self.config.batch_size).to(self.device)

    def chunk_state(self, batch: Chunks) -> State:
        """Return the hidden state that chunks start from."""
        if self.config.start_state == "zero":
            return self.q_network.initial_state(len(batch.state))
        return batch.state.split(self.state_sizes, dim=1)

    def compute_gradients(self, batch: Chunks) -> Metrics:
        """Backpropagate the loss of a batch of chunks."""
        config, state, episode_start = self.config, self.chunk_state(batch), batch.episode_start
        if not config.carry_state:
            episode_start = torch.ones_like(episode_start)  # every step starts from zero
        q, _ = self.q_network(batch.obs, state, episode_start)  # (time + 1, batch, actions)
        with torch.no_grad():  # from the same state on with its own parameters
            q_target, _ = self.target_network(batch.obs, state, episode_start)
        loss, metrics = drqn_loss(
            q[:-1],
            batch.action,
            batch.reward,
            batch.discount,
            batch.terminated,
            batch.mask,
            values_at(q_target, batch.bootstrap),
            values_at(q.detach(), batch.bootstrap) if config.double else None,
            huber=config.huber,
        )
        loss.backward()
        return metrics

    def update(self, batch: Chunks) -> UpdateResult:
        """Make one gradient step on the TD errors, then move the target network if it is time."""
        config = self.config
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch)
        if config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.q_network.parameters(), config.max_grad_norm)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        if (self.updates + 1) % config.target_update_interval == 0:
            polyak_update(self.target_network, self.q_network, config.tau)
        return UpdateResult(metrics)


# %%
#| export
def train_drqn(config: DRQNConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train DRQN with these settings."""
    return train(DRQN(config=config), progress, callbacks)


# %% [markdown]
# ### The whole algorithm at a glance
#
# | equation | code |
# |---|---|
# | $Q(o_{\le t}, \cdot)$ for $t = 0 \ldots \ell$, from the stored $(h, c)$ | `q, _ = self.q_network(batch.obs, state, episode_start)` |
# | $Q^-(o_{\le t}, \cdot)$ from the same $(h, c)$, no gradient | `q_target, _ = self.target_network(batch.obs, state, episode_start)` |
# | $Q^-(o_{\le t+k}, \cdot)$ where the return of step $t$ ends | `values_at(q_target, batch.bootstrap)` |
# | $a^* = \arg\max_a Q(o_{\le t+k}, a)$ (Double) | `values_at(q.detach(), batch.bootstrap)` |
# | $y_t = G_t + \gamma^k (1 - \texttt{terminated})\, Q^-(o_{\le t+k}, a^*)$ | `dqn_target`, in `drqn_loss` |
# | $L = \sum m\,(Q(o_{\le t}, a_t) - y_t)^2 / \sum m$ | `sequence_loss`, in `drqn_loss` |
# | Adam on $\nabla_\theta L$ | `zero_grad()`, `loss.backward()`, `optimizer.step()` |
# | $\theta^- \leftarrow \theta^- + \tau\,(\theta - \theta^-)$ | `polyak_update` |
#
# In order, one update:
#
# ```
# sample a batch of chunks, each with its stored hidden state
# unroll the Q-network and, without gradient, the target network from that state
# compute targets, masked loss and gradients; with max_grad_norm, clip the gradients
# set the current learning rate; make a step of Adam
# every target_update_interval updates, move the target network
# ```
#
# Two promises to check. With ε = 1 all actions are random, and the hidden state still advances as
# it does with greedy ones. And where an episode starts the hidden state is reset, while the other
# environments keep theirs:

# %%
agent = DRQN("CartPole-v1", num_envs=3)
obs = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
first = np.ones(3, dtype=bool)
_, greedy = agent.act(obs[0], None, first, explore=False)
_, random = agent.act(obs[0], None, first, explore=True)  # epsilon is 1 at step 0
assert torch.equal(greedy[0], random[0]) and greedy[0].any()

starts = np.array([True, False, False])
_, mixed = agent.act(obs[1], greedy, starts, explore=False)
_, fresh = agent.act(obs[1], None, first, explore=False)
assert torch.allclose(mixed[0][0], fresh[0][0]) and not torch.allclose(mixed[0][1], fresh[0][1])

# %% [markdown]
# ## A live run: the T-maze
#
# The library comes with settings for the T-maze and for CartPole without velocities. This is how they
# differ from the defaults:

# %% tags=["hide-input"]
presets = [DRQN.from_config(name).config for name in ("tmaze", "masked_cartpole")]
print(f"{'setting':24}{'default':>12}{'tmaze':>18}{'masked_cartpole':>28}")
for name, value in DRQNConfig():
    ours = [getattr(preset, name) for preset in presets]
    if ours != [value, value]:
        print(f"{name:24}{value!s:>12}{ours[0]!s:>18}{ours[1]!s:>28}")

# %% [markdown]
# The same maze and the same number of steps that DQN had:

# %%
recurrent = DRQN.from_config("tmaze", **budget)
result = recurrent.learn(16_000)
print(f"DRQN turns the right way in {success(recurrent):.0%} of the two cases")
assert success(recurrent) == 1.0

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 2.8))
curve = [line for line in result.history if "eval_return_mean" in line]
ax.plot(
    [line["global_step"] for line in curve],
    [line["eval_return_mean"] for line in curve],
    color=COLORS["drqn"],
    label="DRQN",
)
ax.axhline(0.5, color=COLORS["reference"], linestyle="--", linewidth=1, label="without recurrence: ½")
title = "T-maze of length 10: 40 greedy episodes with fresh cues, one seed"
label_curves(ax, title, "success (share)")
ax.set_ylim(-0.05, 1.1)
ax.legend()
plt.show()

# %% [markdown]
# Watch it: the cue is drawn orange while it is seen, the goal green, the agent blue.

# %%
def watch(agent: Agent, cue: int) -> list[np.ndarray]:
    """Return the frames of one greedy episode with a chosen cue."""
    env = make_env("rlbook/TMaze-v0", {"length": 10}, render_mode="rgb_array")
    env.reset(seed=0)
    maze: Any = env.unwrapped
    maze.cue = cue
    obs, state, over, frames = maze.observe(), None, False, [maze.render()]
    while not over:
        action, state = agent.predict(obs, state)
        obs, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        frames.append(maze.render())
    return frames


strips = [pick_frames(watch(recurrent, cue), 4) for cue in (-1, 1)]
filmstrip([*strips[0], *strips[1]], columns=4)

# %% [markdown]
# ## A live run: CartPole without velocities
#
# Now a harder task: `rlbook/MaskedCartPole-v0` shows the cart's position and the pole's angle, and
# neither velocity. The angle alone does not tell whether the pole is falling or rising.

# %%
balance = {"total_steps": 24_000, "epsilon_decay_steps": 8_000, "eval_every": 4_000}
masked = {"env_id": "rlbook/MaskedCartPole-v0", "observation_scale": [1, 8]}
blind = DQN.from_config("cartpole", **masked, **balance)
blind_result = blind.learn(24_000)

# %%
balancing = DRQN.from_config("masked_cartpole", **balance)
balancing_result = balancing.learn(24_000)

# %% tags=["hide-input"]
figure, ax = plt.subplots()
for name, result in (("dqn", blind_result), ("drqn", balancing_result)):
    curve = [line for line in result.history if "eval_return_mean" in line]
    steps = [line["global_step"] for line in curve]
    returns = [line["eval_return_mean"] for line in curve]
    ax.plot(steps, returns, "o-", color=COLORS[name], label=name.upper())
label_curves(ax, "CartPole without velocities: mean of 20 greedy episodes, one seed")
ax.set_ylim(0, 520)
ax.legend()
plt.show()

# %%
dqn_return, drqn_return = blind.evaluate(20).mean, balancing.evaluate(20).mean
print(f"DQN {dqn_return:.0f}, DRQN {drqn_return:.0f}")
assert dqn_return < 80 and drqn_return > 2 * dqn_return

# %% [markdown]
# (A single seed rises and falls a lot in so few steps. It may even balance early and forget it again: the
# mean in the first figure falls from 10,000 to 30,000 steps, too, and is above 350 from 50,000 on.)
#
# ## A look inside: where are the velocities?
#
# If the agent balances, its recurrent state should tell the velocities. Let it play, with a fifth
# of the actions random, and record the true velocities and its state (64 numbers of $h$ and 64 of
# $c$). Then fit the velocities as a *linear* function of the state. The fit uses some episodes and
# is judged on others; $R^2$ is 1 for a perfect fit and 0 for one that always predicts the mean.
# For comparison, fit them on the same episodes from the current observation alone, and from the
# state of an *untrained* DRQN that reads the same inputs.

# %%
def record(agent: DRQN, untrained: DRQN, episodes: int) -> list[dict[str, np.ndarray]]:
    """Play episodes, a fifth of the actions random; record states, observations and velocities."""
    rng, records = np.random.default_rng(0), []
    for episode in range(episodes):
        env = make_env("rlbook/MaskedCartPole-v0")
        obs, _ = env.reset(seed=episode)
        state: Any = None
        other: Any = None
        names = "state", "untrained", "observation", "velocity"
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for t in range(200):
            actions, state = agent.act(obs[None], state, np.array([t == 0]), explore=False)
            _, other = untrained.act(obs[None], other, np.array([t == 0]), explore=False)
            cart: Any = env.unwrapped
            parts["velocity"].append([cart.state[1], cart.state[3]])
            parts["state"].append(torch.cat(state[:2], dim=1)[0].numpy())
            parts["untrained"].append(torch.cat(other[:2], dim=1)[0].numpy())
            parts["observation"].append(obs)
            action = rng.integers(2) if rng.random() < 0.2 else actions[0]
            played = torch.from_numpy(agent.preprocess.one_hot(np.array([action])))
            state, other = (*state[:2], played), (*other[:2], played)  # what was really played
            obs, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
        records.append({name: np.array(part) for name, part in parts.items()})
    return records


def linear_fit(train_on: list[Any], test_on: list[Any], name: str) -> tuple[np.ndarray, Any]:
    """Fit velocities linearly from one record; return R² on other episodes, and the fit."""

    def design(records: list[Any]) -> np.ndarray:
        inputs = np.concatenate([record[name] for record in records])
        return np.column_stack((inputs, np.ones(len(inputs))))

    truth = [np.concatenate([r["velocity"] for r in part]) for part in (train_on, test_on)]
    weights = np.linalg.lstsq(design(train_on), truth[0], rcond=1e-4)[0]
    error = design(test_on) @ weights - truth[1]
    return 1 - (error**2).mean(axis=0) / truth[1].var(axis=0), lambda r: design([r]) @ weights


records = record(balancing, DRQN.from_config("masked_cartpole"), episodes=30)
train_on, test_on = records[:20], records[20:]
from_state, read = linear_fit(train_on, test_on, "state")
from_untrained, _ = linear_fit(train_on, test_on, "untrained")
from_observation, guess = linear_fit(train_on, test_on, "observation")
fits = {"state": from_state, "untrained state": from_untrained, "observation": from_observation}
for name, fit in fits.items():
    print(f"R² from the {name:16s}: cart velocity {fit[0]:.2f}, angular velocity {fit[1]:.2f}")
assert min(from_state[1], from_untrained[1]) > 0.7 > from_observation[1]

# %% tags=["hide-input"]
episode = max(test_on, key=lambda r: len(r["velocity"]))
figure, axes = plt.subplots(2, 1, figsize=(7, 4.8), sharex=True)
seconds = np.arange(len(episode["velocity"])) * 0.02
for i, (ax, name) in enumerate(zip(axes, ("cart (m/s)", "pole (rad/s)"), strict=True)):
    ax.plot(seconds, episode["velocity"][:, i], color="black", label="true velocity, not shown")
    ax.plot(seconds, read(episode)[:, i], color=COLORS["drqn"], label="from the LSTM")
    ax.plot(
        seconds, guess(episode)[:, i], color=COLORS["random"], lw=1, label="from the observation"
    )
    ax.set_ylabel(name)
axes[0].legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.3))
axes[1].set_xlabel("time (s)")
plt.show()

# %% [markdown]
# Both velocities can be read from the state of the trained agent, and from that of the untrained
# one as well: an LSTM with random parameters also keeps a mixture of the last observations, and a
# linear fit unmixes it. So finding the velocities in the state does not show that training put
# them there. From a single observation, in contrast, the fit learns nothing about the velocity of the pole.
# What training has to add is a network that turns the velocities into Q-values.

# %% [markdown]
# ## What each part buys
#
# **How long must a chunk be?** In the T-maze of length 10 the turn is ten steps after the cue, so
# a chunk must hold eleven steps. All agents below store the hidden state at the start of each
# chunk, so in principle a short chunk could use what an earlier one put there. But nothing would
# train the earlier one to put it there: the gradient of the turn ends at the start of its chunk,
# after the cue.

# %% tags=["hide-input"]
result = load_result("results/drqn_tmaze.json")
figure, ax = plt.subplots()
plot_result(ax, result)
ax.axhline(0.5, color=COLORS["reference"], linestyle="--", linewidth=1)
label_curves(ax, "T-maze of length 10: mean of six seeds, 95 % interval", "success (share)")
ax.set_ylim(0, 1.05)
ax.legend()
print(made_by(result))
plt.show()

# %% [markdown]
# A chunk of 16 holds cue and turn, and every seed learns. With chunks of 8 and of 4 most
# evaluations are near one half, to the end. Single ones reach 1, or 0, and are lost again: the
# hidden state may carry the cue by accident, but nothing trains the agent to keep it.
#
# Now a T-maze of length 40, with chunks of 64 steps, and for comparison DQN at length 10: mean and
# 95 % interval of five seeds.

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 3))
for algo, file in (("dqn", "drqn_tmaze_dqn"), ("drqn", "drqn_tmaze_40")):
    result = load_result(f"results/{file}.json")
    run = result["runs"][algo]
    last = np.mean(run["final"])
    length = run["settings"]["env_kwargs"]["length"]
    plot_band(ax, run["steps"], run["returns"], f"{algo.upper()}, length {length}", COLORS[algo])
    print(made_by(result))
    print(f"{algo}, length {length}: {last:.2f} at the end, seeds {np.round(run['final'], 2)}")
ax.axhline(0.5, color=COLORS["reference"], linestyle="--", linewidth=1)
label_curves(ax, "T-maze", "success (share)")
ax.set_ylim(0, 1.05)
ax.legend()
plt.show()

# %% [markdown]
# With longer chunks, longer returns and more steps all five seeds solve the longer corridor at the
# end, one of them only in the last two evaluations. DQN can only guess.
#
# **Zero or stored?** The paper starts each chunk from a hidden state of zeros. Storing it costs
# 512 bytes a chunk. On CartPole without velocities, with chunks of 32 and of 8 steps (mean and 95 %
# interval of five seeds):

# %% tags=["hide-input"]
result = load_result("results/drqn_start_state.json")
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for ax, steps in zip(axes, (32, 8), strict=True):
    for start, color in (("stored", COLORS["drqn"]), ("zero", "black")):
        run = result["runs"][f"{steps} steps, {start}"]
        plot_band(ax, run["steps"], run["returns"], start, color)
    label_curves(ax, f"{result['env_id']}, chunks of {steps} steps")
    ax.set_ylim(0, 520)
    ax.legend()
axes[1].set_ylabel("")
print(made_by(result))
for name, run in result["runs"].items():
    iqm, low, high = run["iqm"]
    print(f"{name:18}interquartile mean {iqm:3.0f}, 95 % interval {low:.0f} to {high:.0f}")
plt.show()

# %% [markdown]
# (The *interquartile mean*, IQM, is the mean of the middle half of the seeds.) At each length the
# intervals of stored and zero overlap: neither difference is clear.
#
# **And the rest?** The same task and budget, chunks of 32 steps, with one part taken away at a
# time: the recurrence (the hidden state starts from zero at each step), the previous action as an
# input, the target network, Double, the 8-step returns (the shipped settings have 10), and the
# factor of 0.1 on the rewards. DRQN is orange and the variant black: mean and 95 % interval of
# five seeds. Below are the last evaluations. A difference is called clear where the intervals of
# the two IQMs do not overlap.

# %% tags=["hide-input"]
result = load_result("results/drqn_parts.json")
print(made_by(result))
whole = result["runs"]["all parts"]["iqm"]
print(f"\n{'':22}{'IQM':>5}{'95 % interval':>16}{'after 3,000 steps':>20}  clear?")
clear = {}
for name, run in result["runs"].items():
    iqm, low, high = run["iqm"]
    early = sorted(round(curve[0]) for curve in run["returns"])
    clear[name] = low > whole[2] or high < whole[1]
    span, start = f"{low:.0f} to {high:.0f}", f"{early[0]} to {early[-1]}"
    print(f"{name:22}{iqm:5.0f}{span:>16}{start:>20}  {'yes' if clear[name] else ''}")
assert clear["no recurrence"] and clear["rewards as they are"]
draw_parts(plt.figure(), result, columns=3)
plt.show()

# %% [markdown]
# **Recurrence** is what DRQN was built for, and here it alone is taken away: network, settings and
# previous action are the same. **The scale of the rewards** matters as much: without the factor,
# discounted returns are up to 200, and the values have far to climb.
#
# At the end no other part helps beyond doubt. At the start two do: without **the previous action** or
# with **1-step returns** the agent learns more slowly, as the column for 3,000 steps shows. It is a
# finding about 24,000 steps of one task, and the settings were not changed after it.
#
# ## Honest edges
#
# | | the paper | here |
# |---|---|---|
# | observations | Atari frames, one a step, some of them blanked | vectors |
# | network | three convolutions, LSTM of 512 units | one layer, LSTM of 32 or 64 units |
# | replay | 10 steps from a random point of an episode, from zero | chunks, stored or zero |
# | optimiser | ADADELTA, gradient clipped at 10 | Adam, clipping as a setting |
# | targets | 1-step, no Double | n-step inside the chunk, Double, both settings |
# | exploration | ε to 0.1 | ε to 0.05 |
# | input | the frame alone | the previous action as well; observations scaled |
#
# On masked CartPole rewards are also multiplied by 0.1, the discount is 0.995, the learning rate falls to 0 from
# the first step on, and the target network moves by 1 % at each update.
#
# The paper's numbers are from Atari games, some of them with half of the frames blanked, and
# cannot be compared with ours.
#
# In the T-maze every action moves on and the previous action is an input, so the agent may also
# carry the cue in its actions. The runs above do not separate this from the hidden state.
#
# Not covered: images, continuous actions, and learning what to carry over more steps than a chunk
# has, as the T-maze above shows.
#
# ## Exercises
#
# **Exercise 1.** With `env_kwargs={"length": 10, "walk": True}` only a third action moves on. The
# shortest way still takes 11 steps. Is a chunk of 11 enough while the agent explores? What if
# `final_epsilon` is 0.3?
#
# <details>
# <summary>Solution</summary>
#
# A chunk must hold cue and turn, so the episode must not take a step more than 11. Two of three
# actions do not move on, so a step of the corridor fails with probability $\tfrac23 \varepsilon$;
# at the junction one of three, the third action, does not turn. The episode fits with probability
# $(1 - \tfrac23 \varepsilon)^{10} (1 - \tfrac13 \varepsilon)$: 70 % with ε = 0.05, and 10 % with
# 0.3. Early in training, with ε near 1, hardly any episode fits.
#
# ```python
# from rlbook.envs import make_env
#
# def episode_length(epsilon: float, seed: int) -> int:
#     """Walk through the maze, with random actions in between, and count the steps."""
#     env = make_env("rlbook/TMaze-v0", {"length": 10, "walk": True})
#     rng = np.random.default_rng(seed)
#     obs, _ = env.reset(seed=seed)
#     for count in range(1, 1_000):
#         action = rng.integers(3) if rng.random() < epsilon else (0 if obs[1] else 2)
#         obs, _, terminated, truncated, _ = env.step(int(action))
#         if terminated or truncated:
#             return count
#     raise AssertionError
#
# for epsilon, share in ((0.05, 0.70), (0.3, 0.10)):
#     fits = np.mean([episode_length(epsilon, seed) == 11 for seed in range(1_000)])
#     print(f"with a random action in {epsilon:.0%} of the steps, {fits:.0%} fit into 11 steps")
#     assert abs(fits - share) < 0.05
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Replace the LSTM by a GRU, which has no cell state. Write the network, and an agent
# that uses it; neither the buffer nor `update` needs to change.
#
# <details>
# <summary>Solution</summary>
#
# The agent asks a network for two things: `initial_state` and `forward`. A hidden state is a tuple of
# tensors, and a tuple of one will do.
#
# ```python
# class GRUQNetwork(nn.Module):
#     """A Q-network with a GRU in place of the LSTM."""
#
#     def __init__(self, inputs: int, actions: int, units: int) -> None:
#         super().__init__()
#         self.gru, self.head = nn.GRUCell(inputs, units), nn.Linear(units, actions)
#
#     def initial_state(self, batch: int) -> State:
#         return (self.head.weight.new_zeros(batch, self.gru.hidden_size),)
#
#     def forward(self, obs: Tensor, state: State, episode_start: Tensor) -> tuple[Tensor, State]:
#         outputs = []
#         for x, start in zip(obs, episode_start, strict=True):
#             state = (self.gru(x, reset_state(state, start)[0]),)
#             outputs.append(state[0])
#         return self.head(torch.stack(outputs)), state
#
# class GRUAgent(DRQN):
#     def make_network(self) -> nn.Module:
#         return GRUQNetwork(self.preprocess.inputs, int(self.action_space.n), units=32)
#
# agent = GRUAgent("rlbook/MaskedCartPole-v0", learning_starts=200, chunk_length=8)
# before = agent.q_network.gru.weight_hh.detach().clone()
# agent.learn(500)
# assert agent.updates > 0 and not torch.equal(agent.q_network.gru.weight_hh, before)
# assert agent.replay.open["state"].shape == (1, 32)  # one tensor of 32 units
# ```
#
# </details>

# %% [markdown]
# **Exercise 3: find the bug.** A colleague unrolls sequences that contain several episodes, and
# has written this. Below, two batches differ only in their *first* episode. Which of the printed
# values should be equal? And are the ones that are equal correct?

# %%
def unroll_sequence(network: Any, obs: Tensor, state: Any, episode_start: Tensor) -> Tensor:
    """Return values along (time, batch, inputs), for sequences with several episodes."""
    values = []
    for x, start in zip(obs, episode_start, strict=True):
        before = tuple(part.unsqueeze(0) for part in state)
        output, after = network.lstm(network.encoder(x).unsqueeze(0), before)
        values.append(network.head(output.squeeze(0)))
        state = reset_state(tuple(part.squeeze(0) for part in after), start)
    return torch.stack(values)


torch.manual_seed(0)
network = LSTMQNetwork(inputs=3, actions=2, hidden=(8,), units=16)
for weight in network.lstm.parameters():
    weight.data *= 4  # as if it had learned to carry something
one, start = torch.randn(6, 1, 3), torch.zeros(6, 1, dtype=torch.bool)
start[0] = start[3] = True
other = one.clone()
other[:3] = torch.randn(3, 1, 3)  # another first episode, the same second one
with torch.no_grad():
    empty = network.initial_state(1)
    values = [unroll_sequence(network, obs, empty, start) for obs in (one, other)]
print("second episode, after one first episode:     ", values[0][3:, 0, 0].numpy().round(3))
print("second episode, after another first episode: ", values[1][3:, 0, 0].numpy().round(3))
assert not torch.allclose(values[0][3:], values[1][3:], atol=0.01)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# All of them should be equal: what happened in an episode that is over must not matter. The first is
# not, because the reset comes a step late: `start` belongs to the observation `x`, so the hidden state
# must be zeroed before the LSTM reads `x`. The others are equal and wrong all the same: the late reset
# throws away what the first observation of the episode left.
#
# ```python
# def unroll_sequence(network: Any, obs: Tensor, state: Any, episode_start: Tensor) -> Tensor:
#     """Return values along (time, batch, inputs), for sequences with several episodes."""
#     values = []
#     for x, start in zip(obs, episode_start, strict=True):
#         before = tuple(part.unsqueeze(0) for part in reset_state(state, start))
#         output, after = network.lstm(network.encoder(x).unsqueeze(0), before)
#         values.append(network.head(output.squeeze(0)))
#         state = tuple(part.squeeze(0) for part in after)
#     return torch.stack(values)
#
# with torch.no_grad():
#     right = [unroll_sequence(network, obs, empty, start) for obs in (one, other)]
#     forward = [network(obs, empty, start)[0] for obs in (one, other)]
# assert torch.equal(right[0][3:], right[1][3:])
# assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(right, forward))
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** The LSTM must learn to take the difference of two angles. What would you feed to
# plain DQN so that it needs no recurrence on this task, and would the same trick solve the T-maze?
#
# <details>
# <summary>Solution</summary>
#
# The last two observations side by side: their difference is the velocity of the step before
# (times 0.02 s). Atari agents do this with four frames. It works whenever a fixed, short past is
# enough. In a T-maze of length 10 you would need the last eleven, and with `walk` an agent that
# explores needs more: a window has an end, while a recurrent network learns what to keep.
#
# ```python
# from rlbook.envs import make_env
#
# env = make_env("CartPole-v1")
# before, _ = env.reset(seed=0)
# after, *_ = env.step(1)
# assert abs((after[2] - before[2]) / 0.02 - before[3]) < 1e-4  # the velocity one step before
# ```
#
# </details>
#
# ## Use it
#
# ```python
# from rlbook import DRQN
#
# agent = DRQN.from_config("masked_cartpole", seed=1)
# agent.learn(200_000)
# action, state = agent.predict([0.0, 0.1])           # at an episode's start
# action, state = agent.predict([0.0, 0.1], state)    # and on
# ```
#
# ```
# rlbook train drqn --config masked_cartpole --run-dir runs/drqn
# rlbook evaluate runs/drqn --episodes 20
# ```
#
# ## References
#
# - M. Hausknecht and P. Stone, *Deep Recurrent Q-Learning for Partially Observable MDPs*, 2015
#   ([arXiv:1507.06527](https://arxiv.org/abs/1507.06527)).
# - S. Hochreiter and J. Schmidhuber, *Long Short-Term Memory*, Neural Computation 9, 1997.
# - B. Bakker, *Reinforcement Learning with Long Short-Term Memory*, NIPS 2001: the T-maze.
