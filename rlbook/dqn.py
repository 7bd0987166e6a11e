"""Made from book/dqn.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "DQN",
    "MLP",
    "Adam",
    "DQNConfig",
    "QAgent",
    "QLearner",
    "QNetwork",
    "TDErrors",
    "TransitionCollector",
    "ValuedBatch",
    "apply_gradients",
    "check_batch_fits",
    "check_shapes",
    "clip_gradients",
    "decayed",
    "dqn_loss",
    "dqn_target",
    "epsilon_greedy",
    "flatten_parameters",
    "gradient_step",
    "linear_epsilon",
    "polyak_update",
    "step_loss",
    "step_slope",
    "td_loss",
    "td_slope",
    "train_dqn",
]

# %% book/dqn.py · DQN: learning values with a network
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


# %% book/dqn.py · The Q-network
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


# %% book/dqn.py · The target
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


# %% book/dqn.py · The loss
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


# %% book/dqn.py · The target network
@torch.no_grad()
def polyak_update(target: nn.Module, online: nn.Module, tau: float) -> None:
    """Move the target network the fraction `tau` of the way to the online one; 1 copies it."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, tau)


# %% book/dqn.py · Exploring
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


# %% book/dqn.py · A gradient step
def decayed(initial: float, progress: float, decay_from: float) -> float:
    """Keep `initial` up to the fraction `decay_from` of a run, then fall linearly to 0."""
    if progress <= decay_from or decay_from == 1:  # the last step may overshoot the end
        return initial
    return initial * max(0.0, (1 - progress) / (1 - decay_from))


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


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], max_norm: float) -> None:
    """Shorten the gradient, taken as one vector, to `max_norm` where it is longer."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients))
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)


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


# %% book/dqn.py · Settings
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


# %% book/dqn.py · The agent
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


@dataclass
class ValuedBatch(Batch):
    """Transitions with what the target network, while it rests, says of them."""

    next_q: Tensor  # (batch, actions), the values of the successors
    y: Tensor | None = None  # (batch,), the targets, unless the online network chooses in them


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


def train_dqn(config: DQNConfig, progress: bool = True) -> RunResult:
    """Train DQN with these settings."""
    return train(DQN(config=config), progress)
