"""Made from book/drqn.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "DRQN",
    "Chunks",
    "DRQNConfig",
    "LSTMQNetwork",
    "ObservationPreprocessor",
    "RecurrentReplayBuffer",
    "State",
    "check_steps",
    "chunk_dtype",
    "drqn_loss",
    "n_step_chunks",
    "reset_state",
    "sequence_loss",
    "to_chunks",
    "train_drqn",
    "values_at",
]

# %% book/drqn.py · DRQN: an agent that remembers
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

# %% book/drqn.py · The model
State = tuple[Tensor, ...]  # the hidden state of a network: tensors of (batch, units)


def reset_state(state: State, episode_start: Tensor) -> State:
    """Zero the hidden state where an episode starts."""
    if len(state[0]) != len(episode_start):  # one of the two would be repeated without a word
        given = f"{len(state[0])}, and there are {len(episode_start)} observations"
        raise ValueError(f"The hidden state is of a batch of {given}.")
    return tuple(part.masked_fill(episode_start.unsqueeze(1), 0.0) for part in state)


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


# %% book/drqn.py · The buffer
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


# %% book/drqn.py · The loss
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


def values_at(q: Tensor, steps: Tensor) -> Tensor:
    """Pick from values (time + 1, batch, actions) those at the given steps (time, batch)."""
    return q.gather(0, steps.unsqueeze(2).expand(-1, -1, q.shape[2]))


# %% book/drqn.py · The settings
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


# %% book/drqn.py · Observation preprocessing
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


# %% book/drqn.py · The agent
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


def train_drqn(config: DRQNConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train DRQN with these settings."""
    return train(DRQN(config=config), progress, callbacks)
