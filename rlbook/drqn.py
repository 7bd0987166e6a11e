"""Made from book/drqn.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "DRQN",
    "METRICS",
    "ChunkCollector",
    "Chunks",
    "DRQNConfig",
    "DrawnChunks",
    "Encoder",
    "EpisodicLSTM",
    "KnownSlope",
    "LSTMQNetwork",
    "OpenChunks",
    "RecurrentQAgent",
    "RecurrentReplayBuffer",
    "SequenceQNetwork",
    "SequenceTrace",
    "Sight",
    "State",
    "best_values",
    "bootstrapped",
    "check_steps",
    "chunk_dtype",
    "drqn_loss",
    "has_starts_within",
    "n_step_chunks",
    "reset_state",
    "reward_weights",
    "sequence_loss",
    "sequence_slope",
    "train_drqn",
]

# %% book/drqn.py · DRQN: an agent that remembers
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.dqn import (
    MLP,
    Adam,
    DQNConfig,
    apply_gradients,
    epsilon_greedy,
    flatten_parameters,
    step_loss,
    step_slope,
)
from rlbook.envs import derive_seed
from rlbook.replay import ReplayBuffer
from rlbook.run import RunResult, train
from rlbook.settings import Config, setting

# %% book/drqn.py · The model
State = tuple[Tensor, ...]  # what is remembered: tensors of (batch, units), zero at the start


class EpisodicLSTM(nn.LSTM):
    """An LSTM that forgets everything where an episode starts."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.stack = tuple(self.all_weights[0])  # quicker to reach

    def initial_state(self, batch: int) -> State:
        """Return the memory of `batch` episodes that have seen nothing yet."""
        zeros = self.stack[0].new_zeros(batch, self.hidden_size)
        return zeros, zeros

    def unroll(self, x: Tensor, state: State, episode_start: Tensor | None) -> tuple[Tensor, State]:
        """Run over (time, batch, inputs); return the outputs and the memory, (1, batch, units)."""
        hidden, cell = state
        state = hidden.unsqueeze(0), cell.unsqueeze(0)  # `torch.lstm` could have several layers
        if episode_start is None:  # no episode starts in it
            return self.read(x, state)
        starts = episode_start.any(dim=1).nonzero().flatten().tolist()
        outputs = []
        for first, last in pairwise(sorted({0, *starts, len(x)})):
            if first in starts:
                state = reset_state(state, episode_start[first])
            output, state = self.read(x[first:last], state)
            outputs.append(output)
        return torch.cat(outputs), state

    def read(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run over a piece of one episode (time, batch, inputs) in one call."""
        learning = torch.is_grad_enabled()
        kind = True, 1, 0.0, learning, False, False  # biases, one layer, no dropout, one direction
        outputs, hidden, cell = torch.lstm(x, state, self.stack, *kind)
        return outputs, (hidden, cell)

    def step(self, x: Tensor, state: State) -> State:
        """Take one step from (batch, inputs): quicker than a sequence of length one."""
        return torch.lstm_cell(x, state, *self.stack)


def reset_state(state: State, episode_start: Tensor) -> State:
    """Forget everything where an episode starts."""
    return tuple(part.masked_fill(episode_start.unsqueeze(1), 0.0) for part in state)


class Encoder(MLP):
    """The layers of DQN, with a ReLU after the last, too; without layers it changes nothing."""

    def trace(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Map (..., inputs) to (..., units); return what all layers saw, and the output."""
        out, inputs = super().trace(x.flatten(0, -2))
        out = out.relu_() if inputs else out
        return out.unflatten(0, x.shape[:-1]), [*inputs, out]

    @torch.no_grad()
    def backward(self, inputs: list[Tensor], slope: Tensor) -> None:
        """Write the gradient of all weights over the old one, given that of the output."""
        *inputs, out = inputs
        if inputs:  # the last ReLU is shut where the output is 0
            slope = slope.flatten(0, -2)
            torch.ops.aten.threshold_backward.grad_input(slope, out, 0, grad_input=slope)
            super().backward(inputs, slope)


class SequenceQNetwork(nn.Module):
    """From the observations of an episode so far to the value of each action."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...], units: int) -> None:
        super().__init__()
        self.encoder = Encoder((inputs, *hidden))
        self.lstm = EpisodicLSTM((inputs, *hidden)[-1], units)
        self.head = nn.Linear(units, actions)

    def initial_state(self, batch: int) -> State:
        """Return the memory of `batch` episodes that have seen nothing yet."""
        return self.lstm.initial_state(batch)

    def reset_state(self, state: State, episode_start: Tensor) -> State:
        """Forget everything where an episode starts."""
        return reset_state(state, episode_start)

    def unroll(
        self, obs: Tensor, state: State, episode_start: Tensor | None
    ) -> tuple[Tensor, State]:
        """Run over observations (time, batch, inputs); return outputs and the memory at the end."""
        outputs, (hidden, cell) = self.lstm.unroll(self.encoder(obs), state, episode_start)
        return outputs, (hidden.squeeze(0), cell.squeeze(0))

    def values(self, outputs: Tensor) -> Tensor:
        """Return the values (..., actions) that follow from what the LSTM says (..., units)."""
        rows, weight = outputs.flatten(0, -2), self.head.weight.t()
        return torch.addmm(self.head.bias, rows, weight).unflatten(0, outputs.shape[:-1])

    def q_values_sequence(
        self, obs: Tensor, state: State, episode_start: Tensor | None
    ) -> Tensor:
        """Return the values (time, batch, actions) along (time, batch, inputs)."""
        return self.values(self.lstm.unroll(self.encoder(obs), state, episode_start)[0])

    def act(
        self, obs: Tensor, state: State, episode_start: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Take one step: return the values (batch, actions) and the memory after it."""
        state = state if episode_start is None else self.reset_state(state, episode_start)
        state = self.lstm.step(self.encoder(obs), state)
        return self.head(state[0]), state


class SequenceTrace(NamedTuple):
    """What the way back through a network needs."""

    layers: list[Tensor]  # what the encoder's layers saw
    encoded: Tensor  # (time, batch, inputs of the LSTM)
    outputs: Tensor  # (time, batch, units), from where autograd knows the way to `encoded`


class LSTMQNetwork(SequenceQNetwork):
    """The same network, which goes back by hand where that is quicker."""

    @torch.inference_mode(False)  # autograd is to go back through the LSTM
    @torch.no_grad()
    def trace(
        self, obs: Tensor, state: State, episode_start: Tensor | None
    ) -> tuple[Tensor, SequenceTrace]:
        """Return the values as `q_values_sequence` does, and what `backward` needs."""
        encoded, layers = self.encoder.trace(obs)
        with torch.enable_grad():
            encoded = encoded.detach().requires_grad_()
            outputs, _ = self.lstm.unroll(encoded, state, episode_start)
        return self.values(outputs), SequenceTrace(layers, encoded, outputs)

    @torch.no_grad()
    def backward(self, trace: SequenceTrace, slope: Tensor) -> None:
        """Write the gradient of all weights over the old one, given that of the values."""
        said, rows = trace.outputs.flatten(0, 1), slope.flatten(0, 1)
        torch.mm(rows.t(), said, out=self.head.weight.grad)
        torch.sum(rows, dim=0, out=self.head.bias.grad)
        heard = rows.mm(self.head.weight).view_as(trace.outputs)  # the slope at the outputs
        weights = self.lstm.stack
        seen, *found = torch.autograd.grad(trace.outputs, [trace.encoded, *weights], heard)
        torch._foreach_copy_([weight.grad for weight in weights if weight.grad is not None], found)
        self.encoder.backward(trace.layers, seen)


# %% book/drqn.py · The buffer
def chunk_dtype(inputs: int, units: int, length: int) -> np.dtype:
    """Describe a chunk of `length` steps of one episode as one row of bytes."""
    fields = [
        ("obs", np.float32, (length + 1, inputs)),  # and the successor of the last step
        ("action", np.int64, (length,)),
        ("reward", np.float32, (length,)),
        ("discount", np.float32, (length,)),  # gamma ** (steps taken), as in DQN's rows
        ("bootstrap", np.int64, (length,)),  # the place in obs whose value has that discount
        ("terminated", np.bool_, (length,)),
        ("episode_start", np.bool_, (length + 1,)),
        ("mask", np.bool_, (length,)),  # False where a short chunk is padded
        ("hidden", np.float32, (units,)),  # the memory before the first step
        ("cell", np.float32, (units,)),
    ]
    return np.dtype(fields, align=True)


@functools.cache
def reward_weights(length: int, n: int, gamma: float) -> np.ndarray:
    """Return a square matrix: how much the reward of each row counts in each column's return."""
    later = np.subtract.outer(np.arange(length), np.arange(length))  # steps from column to row
    return np.where((later >= 0) & (later < n), gamma ** np.maximum(later, 0), 0.0)


def n_step_chunks(rows: np.ndarray, n: int, gamma: float) -> np.ndarray:
    """Return chunks whose rewards are n-step returns, cut short where the chunk's steps end."""
    rows, mask = rows.copy(), rows["mask"]
    time = np.arange(mask.shape[1])
    end = (mask * (time + 1)).max(axis=1, keepdims=True)  # one past the last step
    bootstrap = np.maximum(np.minimum(time + n, end), time)  # at most n steps on, (chunks, time)
    last = np.maximum(bootstrap - 1, 0)  # the step that leads to the observation of the bootstrap
    rows["terminated"] = np.take_along_axis(rows["terminated"], last, axis=1) & mask
    rows["reward"] = (rows["reward"] * mask) @ reward_weights(len(time), n, gamma)
    rows["discount"], rows["bootstrap"] = gamma ** (bootstrap - time), bootstrap
    return rows


def has_starts_within(rows: np.ndarray) -> bool:
    """Say whether an episode starts anywhere in chunks but at their first steps."""
    return bool(np.count_nonzero(rows["episode_start"][:, 1:]))


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
    state: State  # (batch, units), twice
    starts_within: bool  # whether an episode starts anywhere but at the first step

    @classmethod
    def from_rows(cls, rows: np.ndarray, **more: Any) -> Self:
        """Turn rows, the batch first, into tensors with time first; take what else there is."""
        parts = {name: rows[name] for name in rows.dtype.names or ()}
        starts_within = has_starts_within(rows)
        state = torch.from_numpy(parts.pop("hidden")), torch.from_numpy(parts.pop("cell"))
        tensors = {name: torch.from_numpy(x.swapaxes(0, 1).copy()) for name, x in parts.items()}
        return cls(**tensors, state=state, starts_within=starts_within, **more)

    def starts(self, first: int, last: int) -> Tensor | None:
        """Return where episodes start in a piece of time; None if none starts within the chunks."""
        return self.episode_start[first:last] if self.starts_within else None

    def forget_each_step(self) -> Self:
        """Let the memory start anew at each step, as if it were an episode of its own."""
        self.episode_start.fill_(True)
        self.starts_within = True
        return self

    def to(self, device: torch.device) -> Self:
        """Move all tensors to a device."""
        if self.obs.device == device:
            return self
        moved: dict[str, Any] = {"state": tuple(part.to(device) for part in self.state)}
        moved |= {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)


class DrawnChunks:
    """Memory for chunks: `rows` as they are drawn, and the tensors that they become."""

    def __init__(self, batch_size: int, dtype: np.dtype) -> None:
        self.rows = np.zeros(batch_size, dtype)
        self.chunks = Chunks.from_rows(self.rows)
        names = [n for n in dtype.names or () if n not in ("hidden", "cell")]  # those are views
        self.columns = [
            (getattr(self.chunks, name).numpy(), self.rows[name].swapaxes(0, 1)) for name in names
        ]

    def to_time_first(self) -> Chunks:
        """Copy the rows into the tensors, time first."""
        for column, rows in self.columns:
            column[:] = rows
        self.chunks.starts_within = has_starts_within(self.rows)
        return self.chunks


class OpenChunks:
    """For each environment one chunk that is still being filled."""

    def __init__(self, num_envs: int, dtype: np.dtype) -> None:
        self.rows = np.zeros(num_envs, dtype)
        self.filled = np.zeros(num_envs, dtype=np.int64)  # where the next step of each goes
        self.envs, self.length = np.arange(num_envs), self.rows["action"].shape[1]
        self.fields = {name: self.rows[name] for name in dtype.names or ()}  # views

    def begin(self, episode_start: np.ndarray, state: tuple[np.ndarray, np.ndarray]) -> None:
        """Keep the memory that a new chunk starts from."""
        if np.count_nonzero(self.filled) < len(self.filled):  # quicker than `all`
            empty = np.flatnonzero(self.filled == 0)
            self.rows["hidden"][empty], self.rows["cell"][empty] = state[0][empty], state[1][empty]

    def write(self, next_obs: np.ndarray, **step: np.ndarray) -> None:
        """Add one step of each environment."""
        for name, part in step.items():
            if part.dtype.kind != "b" or np.count_nonzero(part):  # what is not written is False
                self.fields[name][self.envs, self.filled] = part
        self.fields["mask"][self.envs, self.filled] = True
        self.filled += 1
        self.fields["obs"][self.envs, self.filled] = next_obs

    def take(self, envs: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Hand out the chunks of these environments and begin new ones."""
        rows = self.rows[envs]
        self.rows[envs] = np.zeros((), rows.dtype)
        self.filled[envs] = 0
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the chunks and how full each is."""
        rows, filled = self.rows.view(np.uint8), self.filled
        return {"open": torch.from_numpy(rows), "filled": torch.from_numpy(filled)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored chunks."""
        self.rows[:] = state["open"].numpy().view(self.rows.dtype)
        self.filled[:] = state["filled"].numpy()


class RecurrentReplayBuffer:
    """A ring of chunks, and for each environment one open chunk that is still being filled."""

    def __init__(
        self, capacity: int, dtype: np.dtype, num_envs: int, n: int, gamma: float, seed: int
    ) -> None:
        self.ring = ReplayBuffer(capacity, dtype, seed)
        self.open = OpenChunks(num_envs, dtype)
        self.n, self.gamma = n, gamma

    def __len__(self) -> int:
        return len(self.ring)

    def append(
        self,
        *,
        truncated: np.ndarray,  # (num_envs,)
        state: tuple[np.ndarray, np.ndarray],  # (num_envs, units), zero at a start; may be kept
        **step: np.ndarray,  # obs, action, reward, next_obs, terminated, episode_start
    ) -> None:
        """Store one step of each environment; a chunk closes when full or when its episode ends."""
        start, ended = step["episode_start"], step["terminated"] | truncated
        if np.count_nonzero(start):  # an episode that `learn`, called again, has left is cut off
            self.close(np.flatnonzero(start & (self.open.filled > 0)), start)
        self.open.begin(start, state)
        self.open.write(**step)
        self.close(np.flatnonzero(ended | (self.open.filled == self.open.length)), ended)

    def close(self, envs: np.ndarray, ended: np.ndarray) -> None:
        """Move the open chunks of these environments into the ring."""
        if len(envs):
            self.store(n_step_chunks(self.open.take(envs, ended[envs]), self.n, self.gamma))

    def store(self, rows: np.ndarray) -> None:
        """Put closed chunks into the ring."""
        self.ring.add(rows)

    def sample(self, batch_size: int, *, out: DrawnChunks | None = None) -> Chunks:
        """Draw closed chunks uniformly, as (time, batch, ...), into `out` if it is given."""
        if out is None:
            return Chunks.from_rows(self.ring.sample(batch_size))
        self.ring.sample(batch_size, out=out.rows)
        return out.to_time_first()

    def state_dict(self) -> dict[str, Any]:
        """Return the ring and the open chunks."""
        return {"ring": self.ring.state_dict(), **self.open.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored ring and stored open chunks."""
        self.ring.load_state_dict(state["ring"])
        self.open.load_state_dict(state)


# %% book/drqn.py · The loss
def check_steps(shape: torch.Size, **steps: Tensor) -> None:
    """Raise unless each tensor is (time, batch), one number a step."""
    for name, part in steps.items():
        if part.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)}, not {tuple(part.shape)}.")


METRICS = ("loss", "q_mean", "target_mean", "td_error_abs")


def sequence_slope(
    q: Tensor,  # (time, batch, actions), and maybe more times, whose values are not trained
    action: Tensor,  # (time, batch)
    target: Tensor,  # (time, batch)
    mask: Tensor,  # (time, batch)
    weights: Tensor | None = None,  # (batch,), of each chunk
    huber: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slope of the loss at q, METRICS as one tensor, and the TD errors (time, batch)."""
    share, taken = mask / mask.sum(), action.unsqueeze(2)  # a padded step has no share
    chosen = q.gather(2, taken).squeeze(2)
    error = chosen - target
    each, slope = step_loss(error, huber), step_slope(error, huber)
    if weights is not None:
        each, slope = each * weights, slope * weights
    gradient = torch.zeros_like(q).scatter_(2, taken, (slope * share).unsqueeze(2))
    means = torch.stack([each, chosen, target, error.abs()]).flatten(1).mv(share.flatten())
    return gradient, means, error


class KnownSlope(torch.autograd.Function):
    """A number whose slope in `x` is known already, so that autograd need not retrace it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        """Return the value."""
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the slope."""
        return grad * ctx.saved_tensors[0], None, None


def sequence_loss(
    q: Tensor,
    action: Tensor,
    target: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    huber: bool = False,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the weighted mean over true steps, with its gradient in q, metrics and TD errors."""
    check_steps(q.shape[:2], action=action, target=target, mask=mask)
    padded = ~mask
    action, target = action.masked_fill(padded, 0), target.masked_fill(padded, 0.0)
    values = q.detach().masked_fill(padded.unsqueeze(2), 0.0)
    slope, means, error = sequence_slope(values, action, target, mask, weights, huber)
    metrics = dict(zip(METRICS, means, strict=True))
    return KnownSlope.apply(q, metrics["loss"], slope), metrics, error


def best_values(q_target: Tensor, q_online: Tensor | None) -> Tensor:
    """Return the target network's values (...) of the best actions, from values (..., actions)."""
    if q_online is None:
        return q_target.amax(dim=-1)
    choice = q_online.argmax(dim=-1, keepdim=True)  # Double: the online network chooses
    return q_target.gather(-1, choice).squeeze(-1)


def bootstrapped(
    reward: Tensor, discount: Tensor, terminated: Tensor, next_value: Tensor
) -> Tensor:
    """Return the reward plus the discounted value of the successor, if there is one."""
    return torch.addcmul(reward, discount, next_value.masked_fill(terminated, 0.0))


def drqn_loss(
    q: Tensor,  # (time, batch, actions), with gradient
    action: Tensor,  # (time, batch)
    reward: Tensor,  # (time, batch)
    discount: Tensor,  # (time, batch)
    terminated: Tensor,  # (time, batch)
    mask: Tensor,  # (time, batch), False at padded steps
    next_q_target: Tensor,  # (time, batch, actions)
    next_q_online: Tensor | None = None,  # (time, batch, actions) for Double
    huber: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean squared (or Huber) TD error over the steps that exist, and named metrics."""
    check_steps(q.shape[:2], reward=reward, discount=discount, terminated=terminated)
    with torch.no_grad():
        next_value = best_values(next_q_target, next_q_online)
        target = bootstrapped(reward, discount, terminated, next_value)
    loss, metrics, _ = sequence_loss(q, action, target, mask, huber=huber)
    return loss, metrics


# %% book/drqn.py · The settings
@dataclass(kw_only=True)
class DRQNConfig(DQNConfig):
    """The settings of DRQN: those of DQN, and those of its memory."""

    hidden: tuple[int, ...] = setting((64,), "Units of each layer of the encoder.", low=1)
    units: int = setting(64, "Units of the LSTM.", low=1)
    memory: bool = setting(True, "Whether the LSTM remembers what it saw in the steps before.")
    previous_action: bool = setting(True, "Whether the network sees the action before, too.")
    chunk_length: int = setting(16, "Steps of a chunk, as far as the gradient reaches.", low=1)
    start_state: Literal["stored", "zero"] = setting("stored", "Memory that a chunk starts from.")
    batch_size: int = setting(32, "Chunks of one update.", low=1)
    buffer_size: int = setting(5_000, "Chunks that the replay buffer holds.", low=1)
    reward_scale: float = setting(1.0, "Factor of the rewards that are learned from.", above=0)

    def check(self) -> None:
        """Raise where settings contradict each other."""
        super().check()
        if self.n_step > self.chunk_length:
            raise ValueError(
                f"Setting 'n_step' ({self.n_step}) must not exceed 'chunk_length' "
                f"({self.chunk_length}): a return cannot look beyond its chunk."
            )


# %% book/drqn.py · What the network sees
class Sight:
    """Turns observations, and the action before each, into what the network sees."""

    def __init__(self, scale: tuple[float, ...], choices: int, previous_action: bool) -> None:
        self.action_inputs = choices if previous_action else 0
        self.scale = np.array([*scale, *[1.0] * self.action_inputs], dtype=np.float32)
        self.one_hots = np.eye(choices, self.action_inputs, dtype=np.float32)
        self.inputs = len(self.scale)

    def one_hot(self, actions: np.ndarray) -> np.ndarray:
        """Return actions (batch,) as (batch, actions) of zeros and ones, or as nothing."""
        return self.one_hots[actions]

    def see(self, obs: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """Return (batch, inputs) for observations (batch, entries) and one-hot actions."""
        return np.concatenate((obs, previous), axis=1, dtype=np.float32) * self.scale


# %% book/drqn.py · The agent
class RecurrentQAgent(Agent):
    """Acts by all that it has seen of an episode: greedily, but for a little chance."""

    config: DRQNConfig
    action_space: gym.spaces.Discrete

    def build(self) -> None:
        """Make the network that learns and its target."""
        config, observations = self.config, int(np.prod(self.observation_space.shape or ()))
        scale = config.observation_scale or (1.0,) * observations
        if len(scale) != observations:
            wanted = f"needs {observations} factors, not {len(scale)}"
            raise ValueError(f"Setting 'observation_scale' {wanted}.")
        self.choices = int(self.action_space.n)
        self.sight = Sight(scale, self.choices, config.previous_action)
        self.online, self.target = self.make_network(), self.make_network()
        self.target.load_state_dict(self.online.state_dict())
        self.weights, self.target_weights = map(flatten_parameters, (self.online, self.target))

    def make_network(self) -> LSTMQNetwork:
        """Make a network of the right size."""
        config = self.config
        network = LSTMQNetwork(self.sight.inputs, self.choices, config.hidden, config.units)
        return network.to(self.device)

    def remember(self, state: State | None, episode_start: np.ndarray) -> State:
        """Return hidden state, cell and last action, forgotten where an episode starts."""
        if state is None:
            count = len(episode_start)
            no_action = torch.zeros(count, self.sight.action_inputs, device=self.device)
            return *self.online.initial_state(count), no_action
        state = tuple(part.to(self.device) for part in state)  # it may come from a file
        if not np.count_nonzero(episode_start):
            return state
        return self.online.reset_state(state, torch.from_numpy(episode_start).to(self.device))

    @torch.inference_mode()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the best action or, with probability epsilon, any; remember either way."""
        hidden, cell, previous = self.remember(state, episode_start)
        if not self.config.memory:
            hidden, cell = self.online.initial_state(len(obs))
        seen = torch.from_numpy(self.sight.see(obs, previous.cpu().numpy())).to(self.device)
        q, (hidden, cell) = self.online.act(seen, (hidden, cell))
        actions = q.argmax(dim=1).cpu().numpy()
        if explore:
            epsilon = self.config.epsilon(self.global_step)
            actions = epsilon_greedy(actions, self.choices, epsilon, self.generator)
        played = torch.from_numpy(self.sight.one_hot(actions)).to(self.device)
        return actions + self.action_space.start, (hidden, cell, played)


class ChunkCollector(RecurrentQAgent):
    """Keeps what it sees as chunks of episodes, and draws from them."""

    replay: RecurrentReplayBuffer
    drawn: DrawnChunks

    def make_replay(self) -> RecurrentReplayBuffer:
        """Make the buffer."""
        config = self.config
        dtype = chunk_dtype(self.sight.inputs, config.units, config.chunk_length)
        steps = (config.num_envs, config.n_step, config.gamma)
        return RecurrentReplayBuffer(config.buffer_size, dtype, *steps, self.replay_seed())

    def replay_seed(self) -> int:
        """Return the seed of the buffer's own generator."""
        return derive_seed(self.config.seed, "replay")

    def observe(self, transition: Transition) -> None:
        """Append the step to the open chunks."""
        start, state = transition.episode_start, transition.state
        state = self.remember(None, start) if state is None else state
        hidden, cell, previous = (part.cpu().numpy() for part in state)
        if np.count_nonzero(start):  # what was before an episode is forgotten, as in `act`
            hidden, cell, previous = (x * ~start[:, None] for x in (hidden, cell, previous))
        action = transition.action - self.action_space.start
        self.replay.append(
            obs=self.sight.see(transition.obs, previous),
            action=action,
            reward=transition.reward * self.config.reward_scale,
            next_obs=self.sight.see(transition.next_obs, self.sight.one_hot(action)),
            terminated=transition.terminated,
            truncated=transition.truncated,
            episode_start=start,
            state=(hidden, cell),
        )

    def draw(self, out: DrawnChunks | None) -> Chunks:
        """Draw a batch from the replay buffer, into `out` or into new memory."""
        chunks = self.replay.sample(self.config.batch_size, out=out).to(self.device)
        return chunks if self.config.memory else chunks.forget_each_step()

    def sample(self) -> Chunks:
        """Draw a batch to keep."""
        return self.draw(None)

    def batches(self, count: int) -> Iterator[Chunks]:
        """Draw for `count` updates, each when it is its turn, over the one before."""
        for _ in range(count):
            yield self.draw(self.drawn)


class DRQN(ChunkCollector):
    """DQN with an LSTM: it learns from chunks of episodes."""

    name: ClassVar[str] = "drqn"
    config_class: ClassVar[type[Config]] = DRQNConfig
    parts: ClassVar[tuple[str, ...]] = ("online", "target", "optimizer", "replay")
    compiled: ClassVar[tuple[str, ...]] = ("target.q_values_sequence",)

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        super().build()
        self.optimizer = Adam([self.weights], lr=self.config.lr)
        self.replay = self.make_replay()
        self.drawn = DrawnChunks(self.config.batch_size, self.replay.ring.rows.dtype)

    def updates_due(self) -> int:
        """Say how many updates the last step made due, once the buffer holds a batch."""
        enough = len(self.replay) >= self.config.batch_size
        return self.config.updates_due(self.global_step) if enough else 0

    @torch.inference_mode(False)  # autograd is to go back to it
    def start(self, chunks: Chunks) -> State:
        """Return the memory that chunks start from."""
        stored = self.config.start_state == "stored"
        return chunks.state if stored else self.online.initial_state(chunks.mask.shape[1])

    @torch.inference_mode()  # the network knows the way back by itself
    def update(self, batch: Chunks) -> UpdateResult:
        """Make one gradient step on the TD errors of a batch of chunks."""
        config, start, starts = self.config, self.start(batch), batch.starts(0, len(batch.obs))
        q, trace = self.online.trace(batch.obs, start, starts)
        q_target = self.target.q_values_sequence(batch.obs, start, starts)  # a memory of its own
        values = best_values(q_target, q if config.double else None)  # (time + 1, batch)
        next_value = values.gather(0, batch.bootstrap)
        y = bootstrapped(batch.reward, batch.discount, batch.terminated, next_value)
        slope, metrics, _ = sequence_slope(q, batch.action, y, batch.mask, huber=config.huber)
        return self.descend(trace, slope, metrics)

    def descend(self, trace: SequenceTrace, slope: Tensor, metrics: Tensor) -> UpdateResult:
        """Make the gradient step, then move the target network if it is time."""
        config = self.config
        self.online.backward(trace, slope)
        apply_gradients(self.optimizer, config.lr_now(self.global_step), config.max_grad_norm)
        if (self.updates + 1) % config.target_every == 0:
            self.target_weights.data.lerp_(self.weights.data, config.tau)  # all weights at once
        return UpdateResult(lambda: dict(zip(METRICS, metrics.tolist(), strict=True)))


def train_drqn(config: DRQNConfig, progress: bool = True) -> RunResult:
    """Train DRQN with these settings."""
    return train(DRQN(config=config), progress)
