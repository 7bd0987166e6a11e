"""Made from book/r2d2.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "R2D2",
    "RESCALE_EPSILON",
    "PrioritizedChunks",
    "PrioritizedRecurrentReplayBuffer",
    "R2D2Config",
    "SumTree",
    "importance_weights",
    "r2d2_loss",
    "rescale",
    "rescale_inverse",
    "sequence_priorities",
    "spread_epsilon",
    "train_r2d2",
]

# %% book/r2d2.py · R2D2: replaying what surprised you
import dataclasses
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rlbook.agent import Diverged, Metrics
from rlbook.callbacks import Callbacks
from rlbook.dqn import dqn_target, linear_epsilon
from rlbook.drqn import (
    DRQN,
    Chunks,
    DRQNConfig,
    RecurrentReplayBuffer,
    State,
    check_steps,
    chunk_dtype,
    sequence_loss,
    to_chunks,
    values_at,
)
from rlbook.envs import derive_seed
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/r2d2.py · The sum tree
class SumTree:
    """A binary tree of sums, which finds the leaf under a point in log2(leaves) steps."""

    def __init__(self, capacity: int) -> None:
        self.leaves = 2 ** math.ceil(math.log2(capacity))
        self.nodes = np.zeros(2 * self.leaves)  # node 1 is the top, the second half the leaves

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self.nodes[1])

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.nodes[self.leaves :][indices]

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        """Give leaves new values, and sum anew on the way up."""
        nodes = self.leaves + indices
        self.nodes[nodes] = values
        for _ in range(int(math.log2(self.leaves))):
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, points: np.ndarray) -> np.ndarray:
        """Return the leaf under each point of [0, total), all leaves laid end to end."""
        nodes = np.ones(len(points), dtype=np.int64)
        for _ in range(int(math.log2(self.leaves))):
            left, right = self.nodes[2 * nodes], self.nodes[2 * nodes + 1]
            go_right = (points >= left) & (right > 0)  # rounding must not lead to an empty leaf
            points = np.where(go_right, points - left, points)
            nodes = 2 * nodes + go_right
        return nodes - self.leaves


# %% book/r2d2.py · Importance weights
def importance_weights(probability: np.ndarray, count: int, beta: float) -> np.ndarray:
    """Return the weights of sampled chunks, given the probability of each among `count`."""
    weights = (count * probability) ** -beta
    return (weights / weights.max()).astype(np.float32)


# %% book/r2d2.py · The buffer
@dataclass
class PrioritizedChunks(Chunks):
    """Chunks with their indices in the buffer and their importance weights."""

    indices: np.ndarray  # (batch,)
    weights: Tensor  # (batch,)

    def after(self, steps: int) -> Self:
        """Return the chunks without their first steps."""
        per_step = ("obs", "action", "reward", "discount", "terminated", "episode_start", "mask")
        rest = {name: getattr(self, name)[steps:] for name in per_step}
        return dataclasses.replace(self, **rest, bootstrap=self.bootstrap[steps:] - steps)


class PrioritizedRecurrentReplayBuffer(RecurrentReplayBuffer):
    """DRQN's buffer, sampled by priority; its chunks begin with burn-in and may overlap."""

    def __init__(
        self,
        capacity: int,
        dtype: np.dtype,
        num_envs: int,
        n: int,
        gamma: float,
        seed: int,
        alpha: float = 0.6,
        burn_in: int = 0,
        overlap: int = 0,
    ) -> None:
        super().__init__(capacity, dtype, num_envs, n, gamma, seed)
        self.alpha, self.burn_in, self.overlap = alpha, burn_in, overlap
        self.tree = SumTree(len(self.ring.storage))  # of priority ** alpha
        self.max_priority = 1.0  # of a new chunk: as high as any so far, it never falls
        self.recent_states: deque[np.ndarray] = deque(maxlen=overlap)  # before the last steps

    def begin(self, episode_start: np.ndarray, state: np.ndarray) -> None:
        """Begin an episode after the burn-in; give each new chunk its hidden state."""
        super().begin(episode_start, state)
        self.filled[episode_start] = self.burn_in
        self.recent_states.append(state)

    def close(self, closed: np.ndarray, ended: np.ndarray) -> None:
        """Store open chunks; where the episode goes on, the next chunk repeats the last steps."""
        going_on = closed & ~ended
        full = self.open[going_on]
        super().close(closed, ended)
        if self.overlap and going_on.any():
            for name in ("action", "reward", "terminated", "mask"):
                self.open[name][going_on, : self.overlap] = full[name][:, -self.overlap :]
            for name in ("obs", "episode_start"):
                self.open[name][going_on, : self.overlap + 1] = full[name][:, -self.overlap - 1 :]
            self.open["state"][going_on] = self.recent_states[0][going_on]
            self.filled[going_on] = self.overlap

    def store(self, chunks: np.ndarray) -> None:
        """Put closed chunks into the ring, each with the highest priority."""
        chunks = chunks[chunks["mask"][:, self.burn_in :].any(axis=1)]  # more than burn-in
        indices = (self.ring.position + np.arange(len(chunks))) % len(self.ring.storage)
        self.ring.add(chunks)
        self.tree.set(indices, self.max_priority**self.alpha)

    def sample(self, batch_size: int, beta: float = 1.0) -> PrioritizedChunks:
        """Sample chunks by priority, with importance weights to the power of `beta`."""
        if not len(self):
            raise ValueError("The replay buffer is empty: add chunks before you sample.")
        indices = self.tree.find(self.ring.generator.random(batch_size) * self.tree.total)
        probability = self.tree[indices] / self.tree.total
        weights = torch.from_numpy(importance_weights(probability, len(self), beta))
        chunks = to_chunks(self.ring.storage[indices])
        return PrioritizedChunks(**vars(chunks), indices=indices, weights=weights)

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Give chunks new priorities."""
        priorities = np.maximum(np.asarray(priorities, dtype=np.float64), 1e-6)  # none is lost
        if len(indices) != len(priorities) or not np.isfinite(priorities).all():
            raise ValueError("update_priorities needs one finite priority for each index.")
        self.tree.set(indices, priorities**self.alpha)
        self.max_priority = max(self.max_priority, float(priorities.max()))

    def state_dict(self) -> dict[str, Any]:
        """Return what DRQN's buffer does, the priorities and the recent hidden states."""
        return {
            **super().state_dict(),
            "tree": torch.from_numpy(self.tree[: len(self)]),
            "max_priority": self.max_priority,
            "recent_states": [torch.from_numpy(state) for state in self.recent_states],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored buffer."""
        super().load_state_dict(state)
        self.tree, self.max_priority = SumTree(len(self.ring.storage)), state["max_priority"]
        self.tree.set(np.arange(len(self)), state["tree"].numpy())
        self.recent_states.clear()
        self.recent_states.extend(part.numpy().copy() for part in state["recent_states"])


# %% book/r2d2.py · Value rescaling
RESCALE_EPSILON = 1e-3  # keeps the derivative of the inverse bounded


def rescale(x: Tensor) -> Tensor:
    """Squash values to about their square root, sign kept."""
    return x / ((x.abs() + 1).sqrt() + 1) + RESCALE_EPSILON * x


def rescale_inverse(y: Tensor) -> Tensor:
    """Undo `rescale`, in a form in which nothing cancels."""
    size, b = y.abs(), 1 + 2 * RESCALE_EPSILON
    d = 2 * size / (b + (b**2 + 4 * RESCALE_EPSILON * size).sqrt())
    return y.sign() * d * (d + 2)


# %% book/r2d2.py · The loss
def r2d2_loss(
    q: Tensor,  # (time, batch, actions), with gradient
    action: Tensor,  # (time, batch)
    reward: Tensor,  # (time, batch)
    discount: Tensor,  # (time, batch)
    terminated: Tensor,  # (time, batch)
    mask: Tensor,  # (time, batch), False at padded steps
    weights: Tensor,  # (batch,), importance weights
    next_q_target: Tensor,  # (time, batch, actions)
    next_q: Tensor | None = None,  # (time, batch, actions) for Double
    rescaling: bool = False,
    huber: bool = False,
) -> tuple[Tensor, Metrics, Tensor]:
    """Return the weighted mean over valid steps, named metrics and the TD errors (time, batch)."""
    check_steps(q.shape[:2], reward=reward, discount=discount, terminated=terminated)
    if weights.shape != q.shape[1:2]:
        raise ValueError(f"weights must be ({q.shape[1]},), not {tuple(weights.shape)}.")
    with torch.no_grad():
        if rescaling:
            next_q_target = rescale_inverse(next_q_target)
        target = dqn_target(reward, discount, terminated, next_q_target, next_q)
        if rescaling:
            target = rescale(target)
    return sequence_loss(q, action, target, mask, weights, huber)


# %% book/r2d2.py · The priorities
def sequence_priorities(td_error: Tensor, mask: Tensor, eta: float) -> Tensor:
    """Mix the largest and the mean absolute TD error of each chunk, over its valid steps."""
    size = torch.where(mask, td_error.abs(), 0.0)
    mean = size.sum(dim=0) / mask.sum(dim=0).clamp(min=1)
    return eta * size.amax(dim=0) + (1 - eta) * mean


# %% book/r2d2.py · Exploring: an ε for each environment
def spread_epsilon(epsilon: float, spread: float, count: int) -> np.ndarray:
    """Return an epsilon for each of `count` environments, from `epsilon` down to its power."""
    return epsilon ** (1 + spread * np.linspace(0, 1, count))


# %% book/r2d2.py · The settings
class R2D2Config(DRQNConfig):
    """The settings of R2D2: those of DRQN, and those of what it replays."""

    chunk_length: int = Field(default=40, ge=1, description="Steps of a chunk, burn-in included.")
    burn_in: int = Field(
        default=8, ge=0, description="First steps of a chunk, read but not trained."
    )
    overlap: int = Field(
        default=8, ge=0, description="Steps that a chunk shares with the one before it."
    )
    batch_size: int = Field(default=16, ge=1, description="Chunks of one update.")
    n_step: int = Field(default=5, ge=1, description="Rewards summed before the target bootstraps.")
    alpha: float = Field(
        default=0.6, ge=0, description="Exponent of priorities; 0 samples uniformly."
    )
    beta: float = Field(
        default=0.4, ge=0, le=1, description="First exponent of importance weights."
    )
    beta_end: float = Field(default=1.0, ge=0, le=1, description="The same at the end of the run.")
    eta: float = Field(
        default=0.9, ge=0, le=1, description="Share of the largest error in a priority."
    )
    value_rescaling: bool = Field(default=False, description="Whether values are learned squashed.")
    epsilon_spread: float = Field(
        default=0.0, ge=0, description="Spread of epsilon over the environments; 0: all have one."
    )

    @model_validator(mode="after")
    def check_chunks(self) -> Self:
        """Raise where burn-in, overlap or returns do not fit into a chunk."""
        trained = self.chunk_length - self.burn_in
        if trained < 1:
            raise ValueError(
                f"Setting 'chunk_length' ({self.chunk_length}) must be at least 'burn_in' plus "
                f"one ({self.burn_in + 1}): a chunk of burn-in alone trains nothing."
            )
        if self.overlap >= self.chunk_length:
            raise ValueError(
                f"Setting 'overlap' ({self.overlap}) must be less than 'chunk_length' "
                f"({self.chunk_length}): each chunk needs a step of its own."
            )
        for name, steps in (("n_step", self.n_step), ("overlap", self.overlap)):
            if steps > trained:
                raise ValueError(
                    f"Setting {name!r} ({steps}) must not exceed the {trained} steps that a chunk "
                    "trains: 'chunk_length' less 'burn_in'."
                )
        return self


# %% book/r2d2.py · The agent
class R2D2(DRQN):
    """DRQN with prioritised replay, burn-in and an epsilon for each environment."""

    name: ClassVar[str] = "r2d2"
    config_class: ClassVar[type[Config]] = R2D2Config
    config: R2D2Config
    replay: PrioritizedRecurrentReplayBuffer
    last_sequence_priorities: np.ndarray | None = None  # of the last update, (batch,)

    def make_replay(self) -> PrioritizedRecurrentReplayBuffer:
        """Make the buffer of chunks."""
        config = self.config
        return PrioritizedRecurrentReplayBuffer(
            config.buffer_size,
            chunk_dtype(self.preprocess.inputs, sum(self.state_sizes), config.chunk_length),
            config.num_envs,
            config.n_step,
            config.gamma,
            derive_seed(config.seed, "replay"),
            alpha=config.alpha,
            burn_in=config.burn_in,
            overlap=config.overlap,
        )

    def beta_now(self) -> float:
        """Return the exponent of the importance weights now."""
        progress = min(1.0, self.global_step / self.config.total_steps)
        return self.config.beta + (self.config.beta_end - self.config.beta) * progress

    def epsilon(self, count: int) -> np.ndarray:
        """Return the probability of a random action in each of `count` environments now."""
        config = self.config
        final = spread_epsilon(config.final_epsilon, config.epsilon_spread, count)
        steps = self.global_step, config.epsilon_decay_steps
        return np.array([linear_epsilon(*steps, each) for each in final])

    def sample(self) -> PrioritizedChunks:
        """Sample a batch of chunks by priority."""
        return self.replay.sample(self.config.batch_size, self.beta_now()).to(self.device)

    @torch.no_grad()
    def state_after_burn_in(self, network: nn.Module, batch: Chunks) -> State:
        """Return a network's hidden state after the first steps of chunks, without gradient."""
        steps, state = self.config.burn_in, self.chunk_state(batch)
        if steps == 0:
            return state
        return network(batch.obs[:steps], state, batch.episode_start[:steps])[1]

    def compute_gradients(self, batch: Chunks) -> Metrics:
        """Backpropagate the weighted loss of the steps after the burn-in; store new priorities."""
        assert isinstance(batch, PrioritizedChunks)
        config, trained = self.config, batch.after(self.config.burn_in)
        obs, episode_start, bootstrap = trained.obs, trained.episode_start, trained.bootstrap
        if not config.carry_state:
            episode_start = torch.ones_like(episode_start)  # every step starts from zero
        state = self.state_after_burn_in(self.q_network, batch)
        q, _ = self.q_network(obs, state, episode_start)
        with torch.no_grad():  # the target network burns in for itself
            state = self.state_after_burn_in(self.target_network, batch)
            q_target, _ = self.target_network(obs, state, episode_start)
        loss, metrics, td_error = r2d2_loss(
            q[:-1],
            trained.action,
            trained.reward,
            trained.discount,
            trained.terminated,
            trained.mask,
            trained.weights,
            values_at(q_target, bootstrap),
            values_at(q.detach(), bootstrap) if config.double else None,
            rescaling=config.value_rescaling,
            huber=config.huber,
        )
        priorities = sequence_priorities(td_error, trained.mask, config.eta).cpu().numpy()
        if not np.isfinite(priorities).all():
            raise Diverged(f"the TD errors of update {self.updates + 1} are not finite")
        loss.backward()
        self.replay.update_priorities(batch.indices, priorities)
        self.last_sequence_priorities = priorities
        return metrics


def train_r2d2(config: R2D2Config, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train R2D2 with these settings."""
    return train(R2D2(config=config), progress, callbacks)
