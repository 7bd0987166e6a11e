"""Made from book/sac.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "LOG_STD",
    "SAC",
    "ActionScale",
    "ActorCritic",
    "Critics",
    "Draw",
    "Judgement",
    "NoiseSource",
    "SACConfig",
    "SACModel",
    "SoftLearner",
    "Temperature",
    "check_bounds",
    "critic_loss",
    "critic_slope",
    "gaussian",
    "log_slope",
    "policy_loss",
    "policy_slopes",
    "sac_loss",
    "sac_target",
    "squash",
    "squashed_sample",
    "temperature_slope",
    "train_sac",
]

# %% book/sac.py · SAC
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.dqn import Adam, check_batch_fits, check_shapes
from rlbook.ensemble import Ensemble, Trace
from rlbook.envs import derive_seed
from rlbook.replay import (
    Batch,
    DrawnBatches,
    ReplayBuffer,
    make_rows,
    to_batch,
    transition_dtype,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config, setting

# %% book/sac.py · The squashed Gaussian
LOG_STD = -20.0, 2.0  # the narrowest and the widest bell that the actor may propose


def log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), and exactly so where tanh(u) rounds to 1."""
    v = -2 * u
    return torch.add(v + 2 * math.log(2), nn.functional.softplus(v), alpha=-2)


def squash(u: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions in (-1, 1) for u (batch, actions), and the logs (batch,) of their density."""
    rarity = torch.addcmul(log_std + log_slope(u), noise, noise, value=0.5).sum(dim=1)
    return u.tanh(), -0.5 * math.log(2 * math.pi) * u.shape[1] - rarity


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Turn standard normal noise into actions in (-1, 1) and the logs (batch,) of their density."""
    return squash(mean + log_std.exp() * noise, log_std, noise)


# %% book/sac.py · The critics
class Critics(Ensemble):
    """An ensemble of Q-functions of one observation and one action."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...], members: int) -> None:
        super().__init__((inputs + actions, *hidden, 1), members)

    def forward(
        self, obs: Tensor, action: Tensor, chosen: Tensor | None = None, learn: bool = True
    ) -> Tensor:
        """Return the values (batch, members) that all members, or the chosen ones, see."""
        return self.outputs(torch.cat([obs, action], dim=1), chosen, learn).squeeze(2).t()


# %% book/sac.py · The loss of the critics
def sac_target(
    reward: Tensor,
    discount: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor | float,
) -> Tensor:
    """Return reward plus discounted soft value: the smallest Q-value plus the bonus for entropy."""
    next_value = next_q.amin(dim=1) - alpha * next_log_prob
    return reward + discount * ~terminated * next_value


class Judgement(NamedTuple):
    """What critics said and what they should have said, for metrics."""

    q: Tensor  # (batch, critics)
    target: Tensor  # (batch,)

    def error(self) -> np.ndarray:
        """Return how far each critic (batch, critics) is from the target."""
        return self.q.cpu().numpy() - self.target.cpu().numpy()[:, None]

    def loss(self) -> dict[str, float]:
        """Return the loss, by name."""
        error = self.error()
        return {"loss": float(np.vdot(error, error)) / len(error)}

    def details(self) -> dict[str, float]:
        """Return the means of values, targets and distances."""
        values, wanted, error = self.q.cpu().numpy(), self.target.cpu().numpy(), self.error()
        return {
            "q_mean": float(values.sum()) / values.size,  # quicker than `mean`
            "target_mean": float(wanted.sum()) / wanted.size,
            "td_error_abs": float(np.abs(error).sum()) / error.size,
        }


def critic_loss(q: Tensor, target: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the squared distance of q (batch, critics) from the target (batch,), and metrics."""
    check_shapes(len(q), target=target)
    loss, judged = (q - target.unsqueeze(1)).square().sum() / len(q), Judgement(q.detach(), target)
    return loss, judged.loss() | judged.details()


def critic_slope(q: Tensor, target: Tensor) -> Tensor:
    """Return the slope of `critic_loss` at q, whose shape is (..., batch, critics)."""
    return (q - target.unsqueeze(1)).mul_(2 / len(target))


def sac_loss(
    q: Tensor,  # (batch, critics), with gradient
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, any number of critics), of the target critics
    next_log_prob: Tensor,  # (batch,)
    alpha: Tensor | float,
) -> tuple[Tensor, dict[str, float]]:
    """Return the mean squared TD error, summed over the critics, and named metrics."""
    vectors = {"reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(q), **vectors, next_log_prob=next_log_prob)
    if next_q.ndim != 2 or len(next_q) != len(q):
        raise ValueError(f"next_q must be ({len(q)}, critics), not {tuple(next_q.shape)}.")
    with torch.no_grad():
        target = sac_target(reward, discount, terminated, next_q, next_log_prob, alpha)
    return critic_loss(q, target)


# %% book/sac.py · The loss of the policy, and the temperature
def policy_loss(value: Tensor, log_prob: Tensor, alpha: Tensor | float) -> Tensor:
    """Return the mean of the entropy's price minus the value, both (batch,)."""
    check_shapes(len(value), value=value, log_prob=log_prob)
    return (alpha * log_prob - value).mean()


def policy_slopes(action: Tensor, spread: Tensor, q_slope: Tensor, alpha: float) -> Tensor:
    """Return the slopes (batch, 2 * actions) of each sample's loss, at mean and log std."""
    at_mean = torch.addcmul(2 * alpha * action, q_slope, action.square() - 1)
    return torch.cat([at_mean, at_mean * spread - alpha], dim=1)  # spread: std times noise


def temperature_slope(entropy: float, target_entropy: float) -> float:
    """Return the slope at log alpha: negative while the entropy is below its target."""
    return entropy - target_entropy


# %% book/sac.py · The model
@dataclass(slots=True)
class Draw:
    """Actions that the actor drew, and what the way back to its weights needs."""

    action: Tensor  # (batch, actions)
    log_prob: Tensor  # (batch,)
    spread: Tensor  # (batch, actions), standard deviation times noise
    free: Tensor  # (batch, actions), whether log std was not held
    trace: Trace  # through the actor

    def after(self, rows: int) -> "Draw":
        """Return the batch without its first rows."""
        action, log_prob, spread = self.action[rows:], self.log_prob[rows:], self.spread[rows:]
        return Draw(action, log_prob, spread, self.free[rows:], self.trace.after(rows))


def gaussian(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Read an actor's outputs as mean and log standard deviation (batch, actions)."""
    mean, log_std = outputs.chunk(2, dim=1)
    return mean, log_std.clamp(*LOG_STD)


class SACModel(nn.Module):
    """An actor that proposes actions in (-1, 1), and critics that value them."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], num_critics: int = 2
    ) -> None:
        super().__init__()
        self.actor = Ensemble((inputs, *hidden, 2 * actions), members=1)
        self.critics = Critics(inputs, actions, hidden, num_critics)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the Gaussian, for autograd."""
        return gaussian(self.actor.outputs(obs)[0])

    def draw(self, obs: Tensor, noise: Tensor) -> Draw:
        """Turn noise (batch, actions) into actions."""
        out, trace = self.actor.run(obs)
        mean, log_std = out[0].chunk(2, dim=1)
        held = log_std.clamp(*LOG_STD)
        spread = held.exp() * noise
        action, log_prob = squash(mean + spread, held, noise)
        return Draw(action, log_prob, spread, held == log_std, trace)

    def actor_slopes(self, draw: Draw, q_slope: Tensor, alpha: float) -> Tensor:
        """Return the slopes of the policy's loss at the actor's weights."""
        slopes = policy_slopes(draw.action, draw.spread, q_slope, alpha).div_(len(q_slope))
        slopes[:, q_slope.shape[1] :].mul_(draw.free)
        return self.actor.weight_slopes(slopes.unsqueeze(0), draw.trace)

    def share(self, q: Tensor) -> Tensor:
        """Return how much each critic (batch, critics) counts for the policy: the lowest alone."""
        lowest = q.min(dim=1, keepdim=True).indices  # much quicker than argmin
        return torch.zeros_like(q).scatter_(1, lowest, 1.0)

    def opinions(self, q: Tensor) -> dict[str, float]:
        """Return more metrics of the values (batch, critics); two critics need none."""
        return {}


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
        check_batch_fits(self.batch_size, self.buffer_size)


# %% book/sac.py · The agent
class Temperature:
    """The price of entropy: fixed, or learned until the entropy is the one that is wanted."""

    def __init__(
        self, initial: float, target_entropy: float, learned: bool, device: torch.device
    ) -> None:
        self.log_alpha = torch.tensor(math.log(initial), device=device)
        self.slope = torch.zeros_like(self.log_alpha)
        self.target_entropy, self.learned = target_entropy, learned

    def alpha(self) -> float:
        """Return the price now."""
        return math.exp(self.log_alpha.item())

    def learn(self, entropy: float) -> None:
        """Find the gradient, unless the price is fixed."""
        if self.learned:
            self.slope.fill_(temperature_slope(entropy, self.target_entropy))
            self.log_alpha.grad = self.slope

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned."""
        return {"log_alpha": self.log_alpha.detach().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was learned."""
        self.log_alpha.data.copy_(state["log_alpha"])


class NoiseSource:
    """Standard normal numbers from a generator of its own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)  # of the CPU: any machine can load it

    def normal(self, *shape: int) -> Tensor:
        """Draw a tensor."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return where the generator is."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generator.set_state(state["generator"].cpu())


class ActorCritic(Agent):
    """Acts by a squashed Gaussian and judges by its critics."""

    actions: ClassVar[str] = "continuous"
    config: SACConfig
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make the model and its target critics."""
        check_bounds(self.config.env_id, self.action_space)
        self.scale = ActionScale(self.action_space)
        inputs = math.prod(self.observation_space.shape or ())
        self.model = self.make_model(inputs, self.action_space.shape[0]).to(self.device)
        self.target = copy.deepcopy(self.model.critics).requires_grad_(False)
        self.target.rooms = self.model.critics.rooms  # they take turns

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
        u, log_std = gaussian(self.model.actor.values(tensor)[0])
        if explore:
            noise = torch.from_numpy(self.generator.standard_normal(shape, dtype=np.float32))
            u = u + log_std.exp() * noise.to(self.device)
        return self.scale.to_env(u.tanh().cpu().numpy()), state

    @torch.inference_mode()
    def q_values(self, obs: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
        """Return what each critic (batch, critics) thinks of actions, or of the policy's own."""
        chosen = self.predict(obs)[0] if action is None else action
        pair = (obs, self.scale.from_env(chosen))
        tensors = [torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in pair]
        return self.model.critics(*tensors).cpu().numpy()


class SoftLearner(ActorCritic):
    """Teaches the critics, the policy and the temperature from a batch of transitions."""

    def build(self) -> None:
        """Make model, target critics, temperature and optimiser."""
        super().build()
        config, entropy = self.config, self.config.target_entropy
        target_entropy = -float(self.action_space.shape[0]) if entropy is None else entropy
        goal = target_entropy, config.learn_alpha
        self.temperature = Temperature(config.initial_alpha, *goal, self.device)
        learned = [*self.model.parameters(), self.temperature.log_alpha]
        self.optimizer = Adam(learned, lr=config.lr)
        self.noise = NoiseSource(derive_seed(config.seed, "noise"), self.device)

    def choose_critics(self) -> Tensor | None:
        """Say which target critics judge the next action; None is all of them."""
        return None

    @torch.inference_mode()
    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step of the critics and, when it is due, one of the policy."""
        due = (self.updates + 1) % self.config.policy_delay == 0
        obs, next_obs, size = batch.obs.float(), batch.next_obs.float(), len(batch.reward)
        seen = torch.cat([next_obs, obs]) if due else next_obs  # one pass of the actor for both
        draw = self.model.draw(seen, self.noise.normal(len(seen), *batch.action.shape[1:]))
        alpha = self.temperature.alpha()
        next_q = self.target.values(next_obs, draw.action[:size], chosen=self.choose_critics())
        step = batch.reward, batch.discount, batch.terminated
        y = sac_target(*step, next_q.squeeze(2).t(), draw.log_prob[:size], alpha)
        q = self.teach_critics(obs, batch.action, y)
        self.model.actor.weights.grad = self.temperature.log_alpha.grad = None  # Adam lets them be
        policy = self.teach_policy(obs, draw.after(size), alpha) if due else {}
        self.optimizer.step()
        self.target.weights.lerp_(self.model.critics.weights, self.config.tau)
        judged = Judgement(q, y)
        return UpdateResult(
            lambda: judged.loss() | policy, lambda: judged.details() | self.model.opinions(q)
        )

    def teach_critics(self, obs: Tensor, action: Tensor, y: Tensor) -> Tensor:
        """Find the gradient of the critics for their target y (batch,); return what they said."""
        out = self.model.critics.learn(lambda out: critic_slope(out, y), obs, action)
        return out.squeeze(2).t()  # (batch, critics)

    def teach_policy(self, obs: Tensor, draw: Draw, alpha: float) -> dict[str, float]:
        """Find the gradient of the actor and, if it is learned, of the temperature."""
        out, trace = self.model.critics.run(obs, draw.action)
        q = out.squeeze(2).t()  # (batch, critics)
        share, actions = self.model.share(q), slice(obs.shape[1], None)
        q_slope = self.model.critics.input_slopes(share.t().unsqueeze(2), trace, actions)
        self.model.actor.weights.grad = self.model.actor_slopes(draw, q_slope, alpha)
        entropy = -float(draw.log_prob.mean())
        self.temperature.learn(entropy)
        value = float((share * q).sum()) / len(q)
        return {"policy_loss": -alpha * entropy - value, "entropy": entropy, "alpha": alpha}


class SAC(SoftLearner):
    """An actor that learns what twin critics value, and to stay as random as it can afford."""

    name: ClassVar[str] = "sac"
    config_class: ClassVar[type[Config]] = SACConfig
    parts: ClassVar[tuple[str, ...]] = (
        "model", "target", "temperature", "optimizer", "replay", "noise"
    )
    compiled: ClassVar[tuple[str, ...]] = ("model.critics.run",)

    def build(self) -> None:
        """Make all that learns, and the buffer."""
        super().build()
        normalised = gym.spaces.Box(-1, 1, self.action_space.shape)
        dtype = transition_dtype(self.observation_space, normalised)
        seed = derive_seed(self.config.seed, "replay")
        self.replay = ReplayBuffer(self.config.buffer_size, dtype, seed)
        most = 4  # more would not fit the cache
        self.drawn = DrawnBatches(dtype, self.config.batch_size, most, self.device)

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
        """Draw a batch to keep."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def batches(self, count: int) -> Iterator[Batch]:
        """Draw for `count` updates, some at a time and over those before."""
        for batches in self.drawn.draw_all(self.replay, count):
            yield from batches


def train_sac(config: SACConfig, progress: bool = True) -> RunResult:
    """Train SAC with these settings."""
    return train(SAC(config=config), progress)
