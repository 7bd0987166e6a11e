"""Made from book/recurrent_ppo.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "LSTMNetwork",
    "RecurrentPPO",
    "RecurrentPPOConfig",
    "RecurrentRolloutBuffer",
    "SequenceBatch",
    "pad_sequences",
    "sequence_mask",
    "train_recurrent_ppo",
    "where_sequences_begin",
]

# %% book/recurrent_ppo.py · Recurrent PPO: a policy that remembers
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributions import Distribution

from rlbook.agent import Transition
from rlbook.callbacks import Callbacks
from rlbook.dqn import scale_factors
from rlbook.drqn import State, reset_state
from rlbook.policy_gradient import (
    CategoricalPolicy,
    GaussianPolicy,
    RolloutBatch,
    RolloutBuffer,
    ValueNetwork,
)
from rlbook.ppo import PPO, PPOConfig
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/recurrent_ppo.py · Sequences and their mask
def sequence_mask(first: Tensor) -> Tensor:
    """Return (sequences, time) for steps (batch,): True at a step, False where it is padded."""
    starts = first.nonzero().flatten()
    lengths = torch.diff(starts, append=starts.new_tensor([len(first)]))
    return torch.arange(int(lengths.max()), device=first.device) < lengths.unsqueeze(1)


def pad_sequences(steps: Tensor, mask: Tensor) -> Tensor:
    """Lay steps (batch, ...) out as (sequences, time, ...), with zeros where there is none."""
    padded = steps.new_zeros(*mask.shape, *steps.shape[1:])
    padded[mask] = steps
    return padded


# %% book/recurrent_ppo.py · The model
class LSTMNetwork(nn.Module):
    """An LSTM, and a network that reads its output in place of the observation."""

    scale: Tensor  # what each entry of the observation is multiplied by

    def __init__(
        self,
        inputs: int,
        units: int,
        head: nn.Module,
        observation_scale: tuple[float, ...] = (),
        forget_bias: float = 0.0,
    ) -> None:
        super().__init__()
        scale = scale_factors(observation_scale, inputs)
        self.register_buffer("scale", scale, persistent=False)
        self.lstm = nn.LSTM(inputs, units, batch_first=True)
        with torch.no_grad():  # of the four gates the second forgets
            self.lstm.get_parameter("bias_ih_l0")[units : 2 * units] += forget_bias
        self.head = head

    def initial_state(self, batch: int) -> State:
        """Return the hidden state at the start of `batch` episodes: zeros."""
        zeros = self.scale.new_zeros(batch, self.lstm.hidden_size)
        return zeros, zeros

    def step(self, obs: Tensor, state: State) -> tuple[Any, State]:
        """Read one step (batch, inputs); return what the head says, and the next hidden state."""
        hidden, cell = (part.unsqueeze(0) for part in state)  # (layers, batch, units)
        x = (obs.float() * self.scale).unsqueeze(1)  # sequences of one step
        output, (hidden, cell) = self.lstm(x, (hidden, cell))
        return self.head(output.squeeze(1)), (hidden.squeeze(0), cell.squeeze(0))

    def forward(
        self, obs: Tensor, state: State | None = None, first: Tensor | None = None
    ) -> Any:
        """Read steps (batch, inputs) as the sequences that begin where `first` says."""
        if state is None or first is None:  # then each step begins an episode
            return self.step(obs, self.initial_state(len(obs)))[0]
        mask = sequence_mask(first)
        padded = pad_sequences(obs.float() * self.scale, mask)
        hidden, cell = (part[first].unsqueeze(0) for part in state)  # before each sequence
        output, _ = self.lstm(padded, (hidden, cell))
        return self.head(output[mask])  # valid steps alone, in the order that they came in


# %% book/recurrent_ppo.py · The rollout
class RecurrentRolloutBuffer(RolloutBuffer):
    """A rollout that also has the hidden state before each step."""

    arrays = (*RolloutBuffer.arrays, "state")

    def __init__(self, num_steps: int, num_envs: int, *spaces: gym.Space, state_size: int) -> None:
        super().__init__(num_steps, num_envs, *spaces)
        self.state = np.zeros((num_steps, num_envs, state_size), np.float32)


@dataclass
class SequenceBatch(RolloutBatch):
    """Steps of a rollout; those of a sequence stand one after another."""

    state: Tensor  # (batch, state_size), the hidden state before the step
    first: Tensor  # (batch,), whether a sequence begins here


def where_sequences_begin(ended: Tensor, length: int) -> Tensor:
    """Return (time, envs): a sequence begins every `length` steps and after an episode's end."""
    first = torch.zeros_like(ended)
    first[::length] = True
    first[1:] |= ended[:-1]
    return first


# %% book/recurrent_ppo.py · Settings
class RecurrentPPOConfig(PPOConfig):
    """The settings of recurrent PPO."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64,), description="Units of each layer after the LSTM, of both networks."
    )
    lstm_units: int = Field(default=64, ge=1, description="Units of each LSTM.")
    forget_bias: float = Field(
        default=0.0, description="Added to the initial bias of the LSTMs' forget gates."
    )
    sequence_length: int = Field(
        default=32, ge=1, description="Steps of a sequence, as far as gradients reach."
    )
    start_state: Literal["stored", "zero"] = Field(
        default="stored", description="Hidden state that a sequence starts from."
    )
    observation_scale: tuple[float, ...] = Field(
        default=(), description="Factor of each entry of an observation; empty for 1."
    )

    @model_validator(mode="after")
    def check_sequences(self) -> Self:
        """Raise unless rollouts and minibatches divide into sequences."""
        for name in ("num_steps", "minibatch_size"):
            if getattr(self, name) % self.sequence_length:
                raise ValueError(
                    f"Setting 'sequence_length' ({self.sequence_length}) must divide '{name}' "
                    f"({getattr(self, name)})."
                )
        return self


# %% book/recurrent_ppo.py · The agent
class RecurrentPPO(PPO):
    """PPO with LSTMs: it learns from sequences of steps."""

    name: ClassVar[str] = "recurrent_ppo"
    config_class: ClassVar[type[Config]] = RecurrentPPOConfig
    compiled: ClassVar[tuple[str, ...]] = ()  # PyTorch cannot compile an LSTM as a whole
    config: RecurrentPPOConfig
    rollout: RecurrentRolloutBuffer
    policy: Any  # modules with the methods of `LSTMNetwork`
    value_network: Any

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        super().build()
        config = self.config
        nothing = self.carried_state(None, np.ones(1, dtype=bool))
        self.state_sizes = [part.shape[1] for part in nothing]
        self.rollout = RecurrentRolloutBuffer(
            config.num_steps,
            config.num_envs,
            self.observation_space,
            self.action_space,
            state_size=sum(self.state_sizes),
        )

    def make_policy(self) -> nn.Module:
        """Make a network with the methods of `LSTMNetwork`, whose head is a policy of PPO."""
        config, space, (inputs,) = self.config, self.action_space, self.observation_space.shape
        units, hidden, orthogonal = config.lstm_units, config.hidden, config.orthogonal_init
        head: nn.Module
        if isinstance(space, gym.spaces.Discrete):
            head = CategoricalPolicy(units, int(space.n), hidden, orthogonal)
        else:
            head = GaussianPolicy(units, space.shape[0], hidden, orthogonal, config.initial_std)
        return LSTMNetwork(inputs, units, head, config.observation_scale, config.forget_bias)

    def make_value_network(self) -> nn.Module:
        """Make a network with the methods of `LSTMNetwork`, whose head is PPO's value network."""
        config, (inputs,), units = self.config, self.observation_space.shape, self.config.lstm_units
        head = ValueNetwork(units, config.hidden, config.orthogonal_init)
        return LSTMNetwork(inputs, units, head, config.observation_scale, config.forget_bias)

    def carried_state(self, state: State | None, episode_start: np.ndarray) -> State:
        """Return hidden and cell state of policy and value network, zeroed at episode starts."""
        if state is None:
            networks, count = (self.policy, self.value_network), len(episode_start)
            return tuple(part for network in networks for part in network.initial_state(count))
        start = torch.from_numpy(episode_start).to(self.device)
        return reset_state(tuple(part.to(self.device) for part in state), start)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Sample from the policy, or take the likeliest action; both hidden states go on."""
        state, x = self.carried_state(state, episode_start), torch.as_tensor(obs).to(self.device)
        distribution, policy_state = self.policy.step(x, state[:2])
        _, value_state = self.value_network.step(x, state[2:])
        return self.choose(distribution, explore), (*policy_state, *value_state)

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, with the hidden state before it."""
        state = self.carried_state(transition.state, transition.episode_start)
        action, reward = self.as_sampled(transition.action), transition.reward
        self.rollout.add(transition, action, reward * self.config.reward_scale)
        self.rollout.state[self.rollout.size - 1] = torch.cat(state, dim=1).cpu().numpy()

    @torch.no_grad()
    def finish_rollout(self) -> SequenceBatch:
        """Compute advantages and returns of the rollout, each step from its stored state."""
        steps = self.rollout.tensors(self.device)
        flat = {name: part.flatten(0, 1) for name, part in steps.items()}  # (batch, ...)
        state = flat["state"].split(self.state_sizes, dim=1)
        distribution, _ = self.policy.step(flat["obs"], state[:2])
        value, next_state = self.value_network.step(flat["obs"], state[2:])
        next_value, _ = self.value_network.step(flat["next_obs"], next_state)
        advantage = self.advantages(steps, value, next_value)
        batch = SequenceBatch(
            flat["obs"],
            flat["action"],
            advantage,
            advantage + value,
            distribution.log_prob(flat["action"]),
            value,
            flat["state"] * (self.config.start_state == "stored"),
            where_sequences_begin(steps["ended"], self.config.sequence_length).flatten(),
        )
        one_env_at_a_time = torch.arange(len(batch)).view_as(steps["ended"]).T.flatten()
        return batch[one_env_at_a_time.to(self.device)]

    def shuffled(self, count: int) -> Tensor:
        """Return the indices of `count` steps: pieces in random order, their steps in theirs."""
        pieces = torch.arange(count, device=self.device).view(-1, self.config.sequence_length)
        return pieces[super().shuffled(len(pieces))].flatten()

    def forward(self, batch: SequenceBatch) -> tuple[Distribution, Tensor]:  # type: ignore[override]
        """Return the policy and the values (batch,) at the steps of the sequences of a batch."""
        state = batch.state.split(self.state_sizes, dim=1)
        distribution = self.policy(batch.obs, state[:2], batch.first)
        return distribution, self.value_network(batch.obs, state[2:], batch.first)


def train_recurrent_ppo(
    config: RecurrentPPOConfig, progress: bool = True, callbacks: Callbacks = ()
) -> RunResult:
    """Train recurrent PPO with these settings."""
    return train(RecurrentPPO(config=config), progress, callbacks)
