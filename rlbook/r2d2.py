"""Made from book/r2d2.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "R2D2",
    "RESCALE_EPSILON",
    "Assessment",
    "OverlappingChunks",
    "PrioritizedChunks",
    "PrioritizedDRQN",
    "PrioritizedRecurrentReplayBuffer",
    "R2D2Config",
    "SumTree",
    "importance_weights",
    "r2d2_loss",
    "r2d2_target",
    "rescale",
    "rescale_inverse",
    "sequence_priorities",
    "train_r2d2",
]

# %% book/r2d2.py · R2D2: replaying what surprised you
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbook.agent import UpdateResult
from rlbook.drqn import (
    DRQN,
    Chunks,
    DrawnChunks,
    DRQNConfig,
    LSTMQNetwork,
    OpenChunks,
    RecurrentReplayBuffer,
    SequenceTrace,
    State,
    best_values,
    bootstrapped,
    check_steps,
    chunk_dtype,
    sequence_loss,
    sequence_slope,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config, setting


# %% book/r2d2.py · The sum tree
class SumTree:
    """Leaves with a mass each; a node knows the mass below it, so a draw takes log(n) steps."""

    def __init__(self, capacity: int, most_children: int = 128) -> None:
        depth = 1
        while most_children**depth < capacity:
            depth += 1
        children = math.ceil(capacity ** (1 / depth))  # no more than needed: a draw adds up a node
        self.levels: list[np.ndarray] = []  # the top first; (nodes above, children)
        nodes = capacity
        while not self.levels or nodes > 1:
            nodes = -(-nodes // children)  # rounded up
            self.levels.insert(0, np.zeros((nodes, children)))

    @property
    def total(self) -> float:
        """The mass of all leaves."""
        return float(self.levels[0].sum())

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.levels[-1].reshape(-1)[indices]

    def set(self, indices: np.ndarray, masses: np.ndarray | float) -> None:
        """Give leaves new masses, and sum anew on the way up to the top."""
        nodes, (below, *above) = np.asarray(indices), reversed(self.levels)
        below.reshape(-1)[nodes] = masses
        for level in above:
            nodes = nodes // below.shape[1]
            level.reshape(-1)[nodes] = below[nodes].sum(axis=1)
            below = level

    def find(self, points: np.ndarray) -> np.ndarray:
        """Return the leaf under each point of [0, total), all leaves laid end to end."""
        (top,), *below = self.levels  # all points share the top: one sum serves them
        ends = top.cumsum()  # where the mass of each child ends
        points = np.minimum(points, math.nextafter(ends[-1], 0.0))  # rounding may overshoot
        nodes = ends.searchsorted(points, side="right")  # the first that reaches beyond
        points = points - np.where(nodes > 0, ends[nodes - 1], 0.0)
        rows = np.arange(len(points))
        for level in below:  # the same, for each point in the node that it has come to
            ends = level.take(nodes, axis=0).cumsum(axis=1)  # (points, children)
            points = np.minimum(points, np.nextafter(ends[:, -1], 0.0))
            child = (ends > points[:, None]).argmax(axis=1)
            points = points - np.where(child > 0, ends[rows, child - 1], 0.0)
            nodes = level.shape[1] * nodes + child
        return nodes


# %% book/r2d2.py · The chunks
class OverlappingChunks(OpenChunks):
    """Open chunks that begin with burn-in, and repeat the end of the chunk before."""

    def __init__(self, num_envs: int, dtype: np.dtype, burn_in: int, overlap: int) -> None:
        super().__init__(num_envs, dtype)
        self.burn_in, self.overlap = burn_in, overlap
        self.trail: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=overlap)

    def begin(self, episode_start: np.ndarray, state: tuple[np.ndarray, np.ndarray]) -> None:
        """Begin an episode after the burn-in, where its memory is known: zero."""
        super().begin(episode_start, state)
        if np.count_nonzero(episode_start):
            self.filled[episode_start] = self.burn_in
        self.trail.append(state)

    def take(self, envs: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Hand out chunks; where the episode goes on, the next repeats the last steps."""
        rows, going = super().take(envs, ended), envs[~ended]
        if self.overlap and len(going):
            full, first = rows[~ended], self.length - self.overlap
            chunk: np.ndarray = np.zeros(len(going), rows.dtype)
            for name in ("action", "reward", "terminated", "mask"):
                chunk[name][:, : self.overlap] = full[name][:, first:]
            for name in ("obs", "episode_start"):
                chunk[name][:, : self.overlap + 1] = full[name][:, first:]
            hidden, cell = self.trail[0]  # before the first of the last steps
            chunk["hidden"], chunk["cell"] = hidden[going], cell[going]
            self.rows[going], self.filled[going] = chunk, self.overlap
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the open chunks and their memories."""
        trail = [[torch.from_numpy(part) for part in state] for state in self.trail]
        return {**super().state_dict(), "memories": trail}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored chunks and their memories."""
        super().load_state_dict(state)
        self.trail.clear()
        self.trail.extend((hidden.numpy(), cell.numpy()) for hidden, cell in state["memories"])


# %% book/r2d2.py · The weights
def importance_weights(masses: np.ndarray, total: float, count: int, beta: float) -> np.ndarray:
    """Return the weights of drawn chunks, given their masses and that of all `count` chunks."""
    weights = (masses * (count / total)) ** -beta
    return (weights / weights.max()).astype(np.float32)


@dataclass
class PrioritizedChunks(Chunks):
    """Chunks, where they lie in the buffer, and how much each counts."""

    indices: np.ndarray  # (batch,)
    weights: Tensor  # (batch,)


# %% book/r2d2.py · The buffer
class PrioritizedRecurrentReplayBuffer(RecurrentReplayBuffer):
    """DRQN's buffer, drawn from by priority; its chunks may overlap and begin with burn-in."""

    def __init__(self, *args: Any, alpha: float = 0.6, burn_in: int = 0, overlap: int = 0) -> None:
        super().__init__(*args)  # what DRQN's buffer takes
        rows = self.open.rows
        self.open = OverlappingChunks(len(rows), rows.dtype, burn_in, overlap)
        self.alpha, self.burn_in, self.tree = alpha, burn_in, SumTree(len(self.ring.rows))
        self.highest = 1.0  # priority of a new chunk: as high as any so far

    def store(self, rows: np.ndarray) -> None:
        """Put closed chunks into the ring, each with the highest priority."""
        if self.burn_in:  # a chunk that is burn-in alone teaches nothing
            rows = rows[np.asarray(rows["mask"])[:, self.burn_in :].any(axis=1)]
        places = (self.ring.position + np.arange(len(rows))) % len(self.ring.rows)
        super().store(rows)
        self.tree.set(places, self.highest**self.alpha)

    def sample(
        self, batch_size: int, beta: float = 1.0, *, out: DrawnChunks | None = None
    ) -> PrioritizedChunks:
        """Draw chunks in proportion to priority ** alpha, with weights that make up for it."""
        if not len(self):
            raise ValueError("The replay buffer is empty: add chunks before you sample.")
        total = self.tree.total
        indices = self.tree.find(self.ring.generator.random(batch_size) * total)
        weights = torch.from_numpy(importance_weights(self.tree[indices], total, len(self), beta))
        if out is None:
            rows = self.ring.rows.take(indices)
            return PrioritizedChunks.from_rows(rows, indices=indices, weights=weights)
        self.ring.rows.take(indices, out=out.rows, mode="clip")
        return PrioritizedChunks(**vars(out.to_time_first()), indices=indices, weights=weights)

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Give chunks new priorities."""
        priorities = np.maximum(np.asarray(priorities, dtype=np.float64), 1e-6)  # none is lost
        highest = float(priorities.max())
        if len(indices) != len(priorities) or not math.isfinite(highest):
            raise ValueError("update_priorities needs one finite priority for each index.")
        self.tree.set(indices, priorities**self.alpha)
        self.highest = max(self.highest, highest)

    def state_dict(self) -> dict[str, Any]:
        """Return what DRQN's buffer does, and the priorities."""
        masses = torch.from_numpy(self.tree[: len(self)])
        return {**super().state_dict(), "masses": masses, "highest": self.highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored buffer and its priorities."""
        super().load_state_dict(state)
        self.tree, self.highest = SumTree(len(self.ring.rows)), state["highest"]
        self.tree.set(np.arange(len(self)), state["masses"].numpy())


# %% book/r2d2.py · Value rescaling
RESCALE_EPSILON = 1e-3  # keeps the slope of the inverse bounded


def rescale(x: Tensor) -> Tensor:
    """Squash values to about their square root, sign kept."""
    size = x.abs()
    return x / ((size + 1).sqrt() + 1) + RESCALE_EPSILON * x


def rescale_inverse(x: Tensor) -> Tensor:
    """Undo `rescale`, in a form in which nothing cancels."""
    size, slope = x.abs(), 1 + 2 * RESCALE_EPSILON
    root = 2 * size / (slope + (slope**2 + 4 * RESCALE_EPSILON * size).sqrt())
    return x.sign() * root * (root + 2)


# %% book/r2d2.py · The loss
@torch.no_grad()
def r2d2_target(
    reward: Tensor, discount: Tensor, terminated: Tensor, next_value: Tensor, rescaling: bool
) -> Tensor:
    """Return DRQN's target, which values on a squashed scale leave and come back to."""
    if not rescaling:
        return bootstrapped(reward, discount, terminated, next_value)
    return rescale(bootstrapped(reward, discount, terminated, rescale_inverse(next_value)))


def r2d2_loss(
    q: Tensor,  # (time, batch, actions), with gradient
    action: Tensor,  # (time, batch)
    reward: Tensor,  # (time, batch)
    discount: Tensor,  # (time, batch)
    terminated: Tensor,  # (time, batch)
    mask: Tensor,  # (time, batch), False at padded steps
    weights: Tensor,  # (batch,), of importance
    next_q_target: Tensor,  # (time, batch, actions)
    next_q_online: Tensor | None = None,  # (time, batch, actions) for Double
    rescaling: bool = False,
    huber: bool = False,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the weighted mean over valid steps, named metrics and the TD errors (time, batch)."""
    check_steps(q.shape[:2], reward=reward, discount=discount, terminated=terminated)
    if weights.shape != q.shape[1:2]:
        raise ValueError(f"weights must be ({q.shape[1]},), not {tuple(weights.shape)}.")
    next_value = best_values(next_q_target, next_q_online)
    target = r2d2_target(reward, discount, terminated, next_value, rescaling)
    return sequence_loss(q, action, target, mask, weights, huber)


# %% book/r2d2.py · The priorities
def sequence_priorities(error: Tensor, mask: Tensor, eta: float) -> Tensor:
    """Mix the largest and the mean absolute TD error of each chunk, over its valid steps."""
    size = torch.where(mask, error.abs(), 0.0)
    mean = size.sum(dim=0) / mask.sum(dim=0).clamp(min=1)
    return eta * size.amax(dim=0) + (1 - eta) * mean


# %% book/r2d2.py · The settings
@dataclass(kw_only=True)
class R2D2Config(DRQNConfig):
    """The settings of R2D2: those of DRQN, and those of what it replays."""

    chunk_length: int = setting(40, "Steps of a chunk, those of burn-in included.", low=1)
    burn_in: int = setting(8, "First steps of a chunk, which only warm up the memory.", low=0)
    overlap: int = setting(8, "Steps that a chunk shares with the one before it.", low=0)
    batch_size: int = setting(16, "Chunks of one update.", low=1)
    n_step: int = setting(5, "Rewards summed before the target bootstraps.", low=1)
    alpha: float = setting(0.6, "Power of a priority; 0 draws uniformly.", low=0)
    beta: float = setting(0.4, "Power of an importance weight at the start.", low=0, high=1)
    beta_end: float = setting(1.0, "The same at the end of the run.", low=0, high=1)
    eta: float = setting(0.9, "Share of the largest TD error in a priority.", low=0, high=1)
    value_rescaling: bool = setting(False, "Whether values are learned on a squashed scale.")

    def check(self) -> None:
        """Raise where settings contradict each other."""
        super().check()
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


# %% book/r2d2.py · The agent
class PrioritizedDRQN(DRQN):
    """DRQN that draws its chunks by priority."""

    config: R2D2Config
    replay: PrioritizedRecurrentReplayBuffer

    def make_replay(self) -> PrioritizedRecurrentReplayBuffer:
        """Make the buffer."""
        config = self.config
        return PrioritizedRecurrentReplayBuffer(
            config.buffer_size,
            chunk_dtype(self.sight.inputs, config.units, config.chunk_length),
            config.num_envs,
            config.n_step,
            config.gamma,
            self.replay_seed(),
            alpha=config.alpha,
            burn_in=config.burn_in,
            overlap=config.overlap,
        )

    def beta(self) -> float:
        """Return the power of the importance weights now."""
        progress = min(1.0, self.global_step / self.config.total_steps)
        return self.config.beta + (self.config.beta_end - self.config.beta) * progress

    def draw(self, out: DrawnChunks | None) -> PrioritizedChunks:
        """Draw a batch by priority."""
        size, beta = self.config.batch_size, self.beta()
        chunks = self.replay.sample(size, beta, out=out).to(self.device)
        return chunks if self.config.memory else chunks.forget_each_step()

    def sample(self) -> PrioritizedChunks:
        """Draw a batch to keep."""
        return self.draw(None)


class Assessment(NamedTuple):
    """What a batch of chunks says about the network."""

    trace: SequenceTrace
    slope: Tensor  # (time, batch, actions), of the loss at the values
    metrics: Tensor  # as METRICS of DRQN names them
    priorities: np.ndarray  # (batch,)


class R2D2(PrioritizedDRQN):
    """DRQN that replays what surprised it, after a burn-in of its memory."""

    name: ClassVar[str] = "r2d2"
    config_class: ClassVar[type[Config]] = R2D2Config
    last_sequence_priorities: np.ndarray | None = None  # of the last update, (batch,)

    @torch.no_grad()
    def burn_in(self, network: LSTMQNetwork, chunks: Chunks) -> State:
        """Return a network's memory after the first steps of chunks, with no gradient."""
        steps, start = self.config.burn_in, self.start(chunks)
        if steps == 0:
            return start
        _, memory = network.unroll(chunks.obs[:steps], start, chunks.starts(0, steps))
        return network.reset_state(memory, chunks.episode_start[steps])

    @torch.no_grad()
    def assess(self, batch: PrioritizedChunks) -> Assessment:
        """Return the slope of a batch's loss, its metrics and the priority of each chunk."""
        config, first = self.config, self.config.burn_in
        obs, mask = batch.obs[first:], batch.mask[first:]
        starts = batch.starts(first, len(batch.obs))
        q, trace = self.online.trace(obs, self.burn_in(self.online, batch), starts)
        memory = self.burn_in(self.target, batch)  # the target network reads, too, for itself
        q_target = self.target.q_values_sequence(obs, memory, starts)
        values = best_values(q_target, q if config.double else None)  # from `first` on
        y = r2d2_target(
            batch.reward[first:],
            batch.discount[first:],
            batch.terminated[first:],
            values.gather(0, batch.bootstrap[first:] - first),
            config.value_rescaling,
        )
        action = batch.action[first:]
        slope, metrics, error = sequence_slope(q, action, y, mask, batch.weights, config.huber)
        priorities = sequence_priorities(error, mask, config.eta).cpu().numpy()
        return Assessment(trace, slope, metrics, priorities)

    def update(self, batch: Chunks) -> UpdateResult:
        """Make one weighted gradient step, then store how much each chunk surprised."""
        assert isinstance(batch, PrioritizedChunks)
        found = self.assess(batch)
        self.last_sequence_priorities = found.priorities
        if not np.isfinite(found.priorities).all():
            raise FloatingPointError(f"the TD errors of update {self.updates + 1} are not finite")
        self.replay.update_priorities(batch.indices, found.priorities)
        return self.descend(found.trace, found.slope, found.metrics)


def train_r2d2(config: R2D2Config, progress: bool = True) -> RunResult:
    """Train R2D2 with these settings."""
    return train(R2D2(config=config), progress)
