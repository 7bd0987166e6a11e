"""Made from book/sac.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "SAC",
    "ActionScale",
    "Critics",
    "EnsembleForward",
    "SACConfig",
    "SACModel",
    "Sizes",
    "check_bounds",
    "log_slope",
    "policy_loss",
    "sac_loss",
    "sac_target",
    "squashed_sample",
    "temperature_loss",
    "train_sac",
    "unpack",
]

# %% book/sac.py · SAC
import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.dqn import MLP, check_shapes, polyak_update
from rlbook.envs import derive_seed
from rlbook.replay import Batch, ReplayBuffer, make_rows, to_batch, transition_dtype
from rlbook.run import RunResult, train
from rlbook.settings import Config, setting


# %% book/sac.py · The squashed Gaussian
def log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), and exactly so where tanh(u) rounds to 1."""
    return 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Turn standard normal noise into actions in (-1, 1) and the logs (batch,) of their density."""
    u = mean + log_std.exp() * noise  # (batch, actions), before squashing
    normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    return u.tanh(), (normal - log_slope(u)).sum(dim=1)


# %% book/sac.py · The critics
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer


def unpack(weights: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """View rows of weights, one a member, as (members, inputs, outputs) and bias of each layer."""
    layers, start = [], 0
    for inputs, outputs in sizes:
        middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
        weight = weights[:, start:middle].unflatten(1, (inputs, outputs))
        layers.append((weight, weights[:, middle:end].unsqueeze(1)))
        start = end
    return layers


# %% book/sac.py · Forward and backward by hand
class EnsembleForward(torch.autograd.Function):
    """ReLU networks side by side with one output each: (batch, inputs) to (members, batch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, sizes: Sizes) -> Tensor:
        """Run all members on the same inputs."""
        *hidden, (weight, bias) = unpack(weights, sizes)
        kept = [x.expand(len(weights), *x.shape)]  # (members, batch, inputs), not copied
        for hidden_weight, hidden_bias in hidden:
            kept.append(torch.baddbmm(hidden_bias, kept[-1], hidden_weight).relu_())
        ctx.save_for_backward(weights, *kept)
        ctx.sizes = sizes
        # One output: a row times a matrix is several times faster than a matrix times a column.
        return torch.bmm(weight.mT, kept[-1].mT).squeeze(1) + bias.squeeze(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and weights, but for those that nobody wants."""
        weights, *kept = ctx.saved_tensors
        layers, (wants_x, wants_weights, _) = unpack(weights, ctx.sizes), ctx.needs_input_grad
        grads = torch.empty_like(weights) if wants_weights else None
        slots = unpack(grads, ctx.sizes) if grads is not None else []
        delta = grad.unsqueeze(2)  # (members, batch, outputs)
        for i in reversed(range(len(layers))):
            last, weight = i == len(layers) - 1, layers[i][0]
            if slots:
                slot, bias_slot = slots[i]
                if last:
                    torch.bmm(delta.mT, kept[i], out=slot.mT)
                else:
                    torch.bmm(kept[i].mT, delta, out=slot)
                torch.sum(delta, dim=1, keepdim=True, out=bias_slot)
            if i or wants_x:
                delta = delta * weight.mT if last else torch.bmm(delta, weight.mT)
            if i:  # where ReLU was shut, nothing passes
                shut = torch.ops.aten.threshold_backward.grad_input
                shut(delta, kept[i], 0, grad_input=delta)
        return (delta.sum(dim=0) if wants_x else None), grads, None


class Critics(nn.Module):
    """An ensemble of Q-functions of one observation and one action."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...], members: int) -> None:
        super().__init__()
        self.sizes: Sizes = tuple(itertools.pairwise((inputs + actions, *hidden, 1)))
        bounds = [(1 / math.sqrt(n), (n + 1) * m) for n, m in self.sizes]  # as nn.Linear starts
        rows = [torch.empty(members, count).uniform_(-bound, bound) for bound, count in bounds]
        self.weights = nn.Parameter(torch.cat(rows, dim=1))  # (members, weights of one)

    def forward(
        self, obs: Tensor, action: Tensor, chosen: Tensor | None = None, learn: bool = True
    ) -> Tensor:
        """Return the values (batch, members) that all members, or the chosen ones, see."""
        weights = self.weights if learn else self.weights.detach()
        weights = weights if chosen is None else weights[chosen]
        x = torch.cat([obs, action], dim=1)
        return EnsembleForward.apply(x, weights, self.sizes).t()


# %% book/sac.py · The model
class SACModel(nn.Module):
    """An actor that proposes actions in (-1, 1), and critics that value them."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], num_critics: int = 2
    ) -> None:
        super().__init__()
        self.actor = MLP((inputs, *hidden, 2 * actions))
        self.critics = Critics(inputs, actions, hidden, num_critics)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation (batch, actions) of the Gaussian."""
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        return mean, log_std.clamp(-20, 2)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (batch, actions) and the logs (batch,) of their densities."""
        return squashed_sample(*self.policy(obs), noise)

    def value(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return what the policy maximises (batch,): the smallest of the critics' values."""
        return self.critics(obs, action, learn=False).amin(dim=1)


# %% book/sac.py · The loss of the critics
def sac_target(
    reward: Tensor,
    discount: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
) -> Tensor:
    """Return reward plus discounted soft value: the smallest Q-value plus the bonus for entropy."""
    next_value = next_q.amin(dim=1) - alpha * next_log_prob
    return reward + discount * ~terminated * next_value


def sac_loss(
    q: Tensor,  # (batch, critics), with gradient
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, any number of critics), of the target critics
    next_log_prob: Tensor,  # (batch,)
    alpha: Tensor,  # ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean squared TD error, summed over the critics, and named metrics."""
    vectors = {"reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(q), **vectors, next_log_prob=next_log_prob)
    if next_q.ndim != 2 or len(next_q) != len(q):
        raise ValueError(f"next_q must be ({len(q)}, critics), not {tuple(next_q.shape)}.")
    with torch.no_grad():
        target = sac_target(reward, discount, terminated, next_q, next_log_prob, alpha)
    td_error = q - target.unsqueeze(1)  # (batch, critics)
    loss = td_error.square().mean(dim=0).sum()
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "q_mean": q.mean(),
            "target_mean": target.mean(),
            "td_error_abs": td_error.abs().mean(),
        }
    return loss, metrics


# %% book/sac.py · The loss of the policy, and the temperature
def policy_loss(value: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """Return the mean of the entropy's price minus the value, both (batch,)."""
    check_shapes(len(value), value=value, log_prob=log_prob)
    return (alpha * log_prob - value).mean()


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return a loss that raises the temperature while the entropy is below its target."""
    return -log_alpha * (log_prob.detach() + target_entropy).mean()


# %% book/sac.py · Bounds
def check_bounds(env_id: str, space: gym.spaces.Box) -> None:
    """Raise unless each action has a lower and a higher bound, both finite."""
    if not space.is_bounded("both"):
        raise ValueError(
            f"{env_id!r} has actions without finite bounds on both sides ({space}): give it such "
            "bounds, for example with gymnasium.wrappers.TransformAction."
        )
    if not (space.low < space.high).all() or np.dtype(space.dtype).kind != "f":
        raise ValueError(f"{env_id!r} has actions that cannot vary between real bounds ({space}).")


class ActionScale:
    """Between the actions (-1, 1) of the policy and those of the environment."""

    def __init__(self, space: gym.spaces.Box) -> None:
        self.low, self.high = space.low, space.high
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self.center, self.half = low / 2 + high / 2, high / 2 - low / 2

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Map (-1, 1) to the bounds, and never a rounding error beyond them."""
        scaled = (self.center + self.half * action).astype(self.low.dtype)
        return np.clip(scaled, self.low, self.high)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        """Map the bounds to (-1, 1)."""
        return (action - self.center) / self.half


# %% book/sac.py · Settings
@dataclass(kw_only=True)
class SACConfig(Config):
    """The settings of SAC."""

    env_id: str = setting("Pendulum-v1", "Gymnasium id; `module:Name-v0` imports the module first.")
    hidden: tuple[int, ...] = setting((256, 256), "Units of each hidden layer.", low=1)
    lr: float = setting(3e-4, "Learning rate of Adam, for actor, critics and temperature.", above=0)
    batch_size: int = setting(256, "Transitions of one update.", low=1)
    buffer_size: int = setting(100_000, "Transitions that the replay buffer holds.", low=1)
    warmup_steps: int = setting(1_000, "Steps of random actions, without updates.", low=0)
    updates_per_step: int = setting(1, "Updates per environment step (UTD).", low=1)
    policy_delay: int = setting(1, "Updates of the critics per update of the policy.", low=1)
    gamma: float = setting(0.99, "Discount of a reward one step later.", low=0, high=1)
    tau: float = setting(0.005, "Fraction that the targets move per update.", above=0, high=1)
    initial_alpha: float = setting(1.0, "Temperature at the start.", above=0)
    learn_alpha: bool = setting(True, "Whether the temperature follows the entropy.")
    target_entropy: float | None = setting(None, "Entropy to hold; by default -dim(actions).")

    def check(self) -> None:
        """Raise where settings contradict each other."""
        if self.batch_size > self.buffer_size:
            raise ValueError(
                f"Setting 'batch_size' ({self.batch_size}) must not exceed 'buffer_size' "
                f"({self.buffer_size})."
            )


# %% book/sac.py · The agent
class SAC(Agent):
    """An actor that learns what twin critics value, and to stay as random as it can afford."""

    name: ClassVar[str] = "sac"
    config_class: ClassVar[type[Config]] = SACConfig
    actions: ClassVar[str] = "continuous"
    parts: ClassVar[tuple[str, ...]] = ("model", "target", "optimizer", "replay")
    loss = staticmethod(sac_loss)
    config: SACConfig
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make model, target critics, optimisers and buffer."""
        config, space = self.config, self.action_space
        check_bounds(config.env_id, space)
        self.scale = ActionScale(space)
        self.model = self.make_model(math.prod(self.observation_space.shape or ()), space.shape[0])
        self.model.to(self.device)
        self.target = copy.deepcopy(self.model.critics)
        self.log_alpha = torch.tensor(math.log(config.initial_alpha), device=self.device)
        self.log_alpha.requires_grad_(config.learn_alpha)
        entropy = config.target_entropy
        self.target_entropy = -float(space.shape[0]) if entropy is None else entropy
        self.parameters: list[Tensor] = [*self.model.parameters()]
        if config.learn_alpha:
            self.parameters.append(self.log_alpha)
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lr, fused=True)
        normalised = gym.spaces.Box(-1, 1, space.shape)
        dtype = transition_dtype(self.observation_space, normalised)
        self.replay = ReplayBuffer(config.buffer_size, dtype, derive_seed(config.seed, "replay"))
        self.noise = torch.Generator(self.device).manual_seed(derive_seed(config.seed, "noise"))

    def make_model(self, inputs: int, actions: int) -> SACModel:
        """Make actor and critics."""
        return SACModel(inputs, actions, self.config.hidden)

    @torch.inference_mode()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Draw an action from the policy, or take its middle; at first any within the bounds."""
        shape = (len(obs), *self.action_space.shape)
        if explore and self.global_step < self.config.warmup_steps:
            return self.scale.to_env(self.generator.uniform(-1, 1, shape)), state
        tensor = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        u, log_std = self.model.policy(tensor)
        if explore:
            noise = torch.from_numpy(self.generator.standard_normal(shape, dtype=np.float32))
            u = u + log_std.exp() * noise.to(self.device)
        return self.scale.to_env(u.tanh().cpu().numpy()), state

    @torch.inference_mode()
    def q_values(self, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Return what each critic (batch, critics) thinks of actions of the environment."""
        pair = (obs, self.scale.from_env(action))
        tensors = [torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in pair]
        return self.model.critics(*tensors).cpu().numpy()

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, actions scaled to (-1, 1)."""
        self.replay.add(
            make_rows(
                self.replay.rows.dtype,
                obs=transition.obs,
                action=self.scale.from_env(transition.action),
                reward=transition.reward,
                next_obs=transition.next_obs,
                terminated=transition.terminated,
                discount=self.config.gamma,
            )
        )

    def updates_due(self) -> int:
        """Count the updates that the last steps call for, once the warm-up is over."""
        config = self.config
        if self.global_step <= config.warmup_steps or len(self.replay) < config.batch_size:
            return 0
        return config.num_envs * config.updates_per_step

    def sample(self) -> Batch:
        """Draw a batch from the replay buffer."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def choose_critics(self) -> Tensor | None:
        """Say which target critics judge the next action; None is all of them."""
        return None

    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step of the critics and, when it is due, one of the policy."""
        shape = (2, *batch.action.shape)
        noise, next_noise = torch.randn(shape, generator=self.noise, device=self.device)
        obs, alpha = batch.obs.float(), self.log_alpha.detach().exp()
        loss, metrics = self.judge(obs, batch, next_noise, alpha)
        total = loss
        if (self.updates + 1) % self.config.policy_delay == 0:
            policy, policy_metrics = self.improve(obs, noise, alpha)
            total, metrics = total + policy, metrics | policy_metrics
        for parameter in self.parameters:
            parameter.grad = None
        total.backward()  # no loss has a gradient in the weights of another
        self.optimizer.step()
        polyak_update(self.target, self.model.critics, self.config.tau)
        values = {name: float(value) for name, value in metrics.items()}
        return UpdateResult(values["loss"], values)

    def judge(
        self, obs: Tensor, batch: Batch, noise: Tensor, alpha: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics, whose target is reward plus discounted soft value."""
        with torch.no_grad():
            next_obs = batch.next_obs.float()
            next_action, next_log_prob = self.model.sample(next_obs, noise)
            next_q = self.target(next_obs, next_action, self.choose_critics())
        q = self.model.critics(obs, batch.action)
        reward, discount, terminated = batch.reward, batch.discount, batch.terminated
        return self.loss(q, reward, discount, terminated, next_q, next_log_prob, alpha)

    def improve(
        self, obs: Tensor, noise: Tensor, alpha: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the policy and of the temperature."""
        action, log_prob = self.model.sample(obs, noise)
        loss = policy_loss(self.model.value(obs, action), log_prob, alpha)
        entropy = -log_prob.detach().mean()
        metrics = {"policy_loss": loss.detach(), "entropy": entropy, "alpha": alpha}
        if self.config.learn_alpha:
            loss = loss + temperature_loss(self.log_alpha, log_prob, self.target_entropy)
        return loss, metrics

    def state_dict(self) -> dict[str, Any]:
        """Return all that learning depends on, the temperature and the noise included."""
        own = {"log_alpha": self.log_alpha.detach().clone(), "noise": self.noise.get_state()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state)
        self.log_alpha.data.copy_(state["log_alpha"])
        self.noise.set_state(state["noise"].cpu())


def train_sac(config: SACConfig, progress: bool = True) -> RunResult:
    """Train SAC with these settings."""
    return train(SAC(config=config), progress)
