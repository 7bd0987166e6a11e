"""DrQ-v2: its shifts, networks and losses, which loss trains what, and exact resume."""

import json
import math
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box
from helpers import assert_same_run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import nn

import rlbook
from rlbook.cli import main
from rlbook.drqv2 import (
    ENCODERS,
    DrQv2,
    DrQv2Config,
    Encoder,
    PixelActor,
    PixelCritic,
    drqv2_actor_loss,
    drqv2_critic_loss,
    noise_std,
    noisy_action,
    random_shift,
    shift_images,
    smallest_image,
    train_drqv2,
)
from rlbook.pixels import PointReach
from rlbook.run import resume
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "hidden": (16,),
    "features": 8,
    "batch_size": 16,
    "learning_starts": 32,
    "buffer_size": 500,
    "eval_every": 0,
}


class Room(gym.Env[np.ndarray, np.ndarray]):
    """A grey image, brighter with each step; keywords say what else happens."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 16, 16),
        dtype: str = "uint8",
        discrete: bool = False,
        length: int = 5,
        terminates: bool = False,
        best: float | None = None,
        high: float = 1.0,
    ) -> None:
        high_pixel = 255 if dtype == "uint8" else 1.0
        self.observation_space = Box(0, high_pixel, tuple(shape), np.dtype(dtype).type)
        actions = Box(-1.0, high, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2) if discrete else actions  # type: ignore[assignment]
        self.length, self.terminates, self.best = length, terminates, best

    def image(self) -> np.ndarray:
        image = np.full(self.observation_space.shape or (), 100 + 10 * self.steps)
        return image.astype(self.observation_space.dtype)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.image(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        reward = 1.0 if self.best is None else 1 - (float(action[0]) - self.best) ** 2
        over = self.steps >= self.length
        return self.image(), reward, over and self.terminates, over and not self.terminates, {}


@pytest.fixture(autouse=True, scope="module")
def room() -> Iterator[None]:
    gym.register("Room-v0", lambda **kwargs: Room(**kwargs))
    yield
    gym.registry.pop("Room-v0")


def room_agent(own: dict[str, Any] | None = None, **env_kwargs: Any) -> DrQv2:
    return DrQv2("Room-v0", env_kwargs=env_kwargs, **{**SMALL, **(own or {})})


def reach_agent(**own: Any) -> DrQv2:
    return DrQv2("rlbook/PointReach-v0", **{**SMALL, **own})


# Shifts


def shift_plainly(image: np.ndarray, dy: int, dx: int, pad: int) -> np.ndarray:
    """The definition, pixel by pixel."""
    out = np.empty_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            from_y = min(max(y + dy - pad, 0), height - 1)
            from_x = min(max(x + dx - pad, 0), width - 1)
            out[:, y, x] = image[:, from_y, from_x]
    return out


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 4),
    pad=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_each_pixel_is_the_one_that_the_definition_names(
    height: int, width: int, channels: int, pad: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(256, size=(5, channels, height, width)).astype(np.uint8)
    shifts = rng.integers(2 * pad + 1, size=(2, 5))
    shifted = shift_images(torch.from_numpy(images), torch.from_numpy(shifts), pad)
    assert shifted.dtype == torch.uint8
    for image, (dy, dx), found in zip(images, shifts.T, shifted, strict=True):
        assert np.array_equal(found, shift_plainly(image, dy, dx, pad))


def every_shift(image: torch.Tensor, pad: int) -> torch.Tensor:
    """Shift one image in all ways."""
    side = 2 * pad + 1
    shifts = torch.from_numpy(np.indices((side, side)).reshape(2, side * side))
    return shift_images(image.repeat(side * side, 1, 1, 1), shifts, pad)


def test_all_shifts_are_equally_likely() -> None:
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.permutation(256)[:25].reshape(1, 1, 5, 5).astype(np.uint8))
    names = {shifted.numpy().tobytes(): i for i, shifted in enumerate(every_shift(image[0], pad=2))}
    assert len(names) == 25
    many = random_shift(image.repeat(10_000, 1, 1, 1), 2, rng)
    counts = np.bincount([names[shifted.numpy().tobytes()] for shifted in many], minlength=25)
    assert chisquare(counts).pvalue > 1e-3


def test_no_pad_is_no_shift() -> None:
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(random_shift(images, 0, np.random.default_rng(0)), images)


def test_an_update_shifts_both_observations_each_by_its_own_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = grown(reach_agent(pad=4, batch_size=64, n_step=1, policy_delay=1), 80)
    frames = torch.from_numpy(agent.replay.ring.frames[: agent.replay.ring.written])
    known: dict[bytes, int] = {}
    for frame in frames:
        for shift, shifted in enumerate(every_shift(frame, pad=4)):
            known.setdefault(shifted.numpy().tobytes(), shift)
    given: list[Any] = []

    def remember(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            given.append(arguments[0])
            return method(*arguments)

        return call

    for name in ("critic_gradients", "actor_gradients"):
        monkeypatch.setattr(agent, name, remember(getattr(agent, name)))
    agent.update(agent.sample())
    batch, actor_obs = given
    assert batch.obs.dtype == torch.uint8 and torch.equal(batch.obs, actor_obs)
    found = [[known[i.numpy().tobytes()] for i in part] for part in (batch.obs, batch.next_obs)]
    for shifts in found:
        assert len(set(shifts)) > 20  # of 81, by 64 draws
    assert np.mean(np.array(found[0]) == np.array(found[1])) < 0.2


# The model


@pytest.mark.parametrize("name", list(ENCODERS))
def test_the_smallest_image_fits_and_the_next_smaller_does_not(name: str) -> None:
    side = smallest_image(ENCODERS[name])
    encoder, (channels, *_) = Encoder(2, ENCODERS[name]), ENCODERS[name][-1]
    assert encoder(torch.zeros(4, 2, side, side, dtype=torch.uint8)).shape == (4, channels)
    with pytest.raises(RuntimeError):
        encoder(torch.zeros(4, 2, side - 1, side, dtype=torch.uint8))


def test_an_encoder_is_its_convolutions() -> None:
    torch.manual_seed(0)
    encoder = Encoder(3, ENCODERS["small"])
    images = torch.randint(256, (5, 3, 24, 24), dtype=torch.uint8)
    x = images.double() / 255 - 0.5
    for convolution, (_, _, stride) in zip(encoder.convolutions, ENCODERS["small"], strict=True):
        weight, bias = (part.detach().double() for part in convolution.parameters())
        x = torch.nn.functional.conv2d(x, weight, bias, stride).relu()
    torch.testing.assert_close(encoder(images).double(), x.flatten(1), atol=1e-4, rtol=1e-4)


def test_each_critic_is_its_own_network() -> None:
    torch.manual_seed(0)
    critic = PixelCritic(inputs=6, features=5, hidden=(16,), actions=2, num_critics=3)
    encoded, action = torch.randn(7, 6), torch.randn(7, 2)
    q = critic(encoded, action)
    x = torch.cat([critic.trunk(encoded), action], dim=1)
    assert q.shape == (7, 3)
    for i, q_network in enumerate(critic.q_networks):
        assert torch.equal(q[:, i], q_network(x).squeeze(1))
    assert not torch.equal(q[:, 0], q[:, 1])


def test_features_are_bounded_whatever_the_encoding() -> None:
    actor = PixelActor(inputs=6, features=5, hidden=(16,), actions=2)
    assert actor.trunk(1e6 * torch.randn(7, 6)).abs().max() <= 1
    assert actor(torch.randn(7, 6)).shape == (7, 2)


# Noise and losses


def test_noise_falls_in_agent_steps_and_stays() -> None:
    found = [noise_std(step, 1.0, 0.2, 8) for step in (0, 4, 8, 80)]
    assert found == pytest.approx([1, 0.6, 0.2, 0.2])


def test_clipped_noise_and_a_whole_gradient() -> None:
    action = torch.tensor([0.9, -0.9, 0.0], requires_grad=True)
    noisy = noisy_action(action, torch.tensor([2.0, -0.05, 0.2]), clip=0.3)
    torch.testing.assert_close(noisy.detach(), torch.tensor([1.0, -0.95, 0.2]))
    noisy.sum().backward()
    assert action.grad is not None and action.grad.tolist() == [1, 1, 1]
    whole = noisy_action(action, torch.tensor([-0.9, 0.0, 0.7]))
    assert whole.tolist() == pytest.approx([0, -0.9, 0.7])


def random_inputs(batch: int) -> dict[str, Any]:
    rng = np.random.default_rng(batch)
    numbers = {
        "q": rng.normal(size=(batch, 2)),
        "reward": rng.normal(size=batch),
        "discount": rng.uniform(0.5, 1, size=batch),
        "terminated": rng.random(batch) < 0.3,
        "next_q": rng.normal(size=(batch, 2)),
    }
    return {name: torch.from_numpy(np.asarray(value)) for name, value in numbers.items()}


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_loss_is_that_of_numpy(batch: int) -> None:
    inputs = random_inputs(batch)
    loss, metrics = drqv2_critic_loss(**inputs)
    x = {name: value.numpy() for name, value in inputs.items()}
    y = x["reward"] + x["discount"] * np.where(x["terminated"], 0, x["next_q"].min(1))
    errors = x["q"] - y[:, None]
    assert float(loss) == pytest.approx((errors**2).sum(1).mean())
    assert float(metrics["loss"]) == pytest.approx(float(loss))
    assert float(metrics["q_mean"]) == pytest.approx(x["q"].mean())
    assert float(metrics["target_mean"]) == pytest.approx(y.mean())
    assert float(metrics["td_error_abs"]) == pytest.approx(np.abs(errors).mean())


def test_actor_loss_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    q, unbounded = rng.normal(size=(9, 2)), rng.normal(size=(9, 3))
    expected = -q.min(1).mean() + 0.01 * (unbounded**2).mean()
    loss, metrics = drqv2_actor_loss(torch.from_numpy(q), torch.from_numpy(unbounded), 0.01)
    assert float(loss) == float(metrics["actor_loss"]) == pytest.approx(expected)
    for wrong in (torch.zeros(9), torch.zeros(8, 2)):
        with pytest.raises(ValueError, match=r"q must be \(batch, critics\) and unbounded"):
            drqv2_actor_loss(wrong, torch.from_numpy(unbounded), 0.01)


@pytest.mark.parametrize("name", ["reward", "discount", "terminated"])
def test_loss_refuses_shapes_that_would_broadcast(name: str) -> None:
    inputs = random_inputs(8)
    inputs[name] = inputs[name].unsqueeze(1)
    with pytest.raises(ValueError, match=name):
        drqv2_critic_loss(**inputs)
    with pytest.raises(ValueError, match="next_q"):
        drqv2_critic_loss(**{**random_inputs(8), "next_q": torch.zeros(2, 8)})


# The agent


def grown(agent: DrQv2, steps: int = 60) -> DrQv2:
    agent.learn(steps, progress=False)
    return agent


def has_gradient(network: nn.Module) -> list[bool]:
    return [parameter.grad is not None for parameter in network.parameters()]


def zero_gradients(agent: DrQv2) -> None:
    for optimizer in (agent.critic_optimizer, agent.actor_optimizer):
        optimizer.zero_grad()


def parameters(*networks: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for part in networks for parameter in part.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(one, two) for one, two in zip(first, second, strict=True)]


def test_no_actor_gradient_reaches_the_encoder() -> None:
    agent = grown(reach_agent())
    zero_gradients(agent)
    agent.actor_gradients(agent.sample().obs, torch.zeros(16, 2))
    assert not any(has_gradient(agent.encoder))
    assert all(has_gradient(agent.actor))
    assert not any(has_gradient(agent.target_critic))


def test_the_critic_loss_trains_the_encoder_and_not_the_actor() -> None:
    agent = grown(reach_agent())
    zero_gradients(agent)
    agent.critic_gradients(agent.sample(), torch.zeros(16, 2))
    assert all(has_gradient(agent.encoder))
    assert all(has_gradient(agent.critic))
    assert not any(has_gradient(agent.actor))
    assert not any(has_gradient(agent.target_critic))


def test_an_update_of_both_moves_encoder_and_critic_as_one_of_the_critic_alone() -> None:
    agents = [grown(reach_agent(policy_delay=delay, learning_starts=59)) for delay in (1, 1_000)]
    assert [agent.updates for agent in agents] == [1, 1]
    for part in ("encoder", "critic", "target_critic"):
        first, second = (parameters(getattr(agent, part)) for agent in agents)
        assert all(same(first, second)), part
    actors = [parameters(agent.actor) for agent in agents]
    assert not any(same(*actors))


def test_gradients_of_the_actor_loss_never_move_the_critic() -> None:
    """The actor loss leaves a gradient in the critic, which the next update must not use."""
    agents = [grown(reach_agent(policy_delay=1)) for _ in range(2)]
    for agent in agents:
        agent.updates = 0
        agent.update(agent.sample())
    for parameter in agents[1].critic.parameters():
        parameter.grad = 1e6 * torch.ones_like(parameter)
    for agent in agents:
        agent.update(agent.sample())
    first, second = (parameters(agent.encoder, agent.critic) for agent in agents)
    assert all(same(first, second))


def test_the_actor_trains_the_encoder_only_where_it_is_asked_to() -> None:
    settings: dict[str, Any] = {"policy_delay": 1, "learning_starts": 59}
    agents = [grown(reach_agent(actor_trains_encoder=t, **settings)) for t in (False, True)]
    first, second = (parameters(agent.encoder) for agent in agents)
    assert not any(same(first, second))
    first, second = (parameters(agent.critic) for agent in agents)
    assert all(same(first, second))  # either way the critic learns from its own loss alone


@pytest.mark.parametrize("count", [1, 2, 3])
def test_there_are_as_many_critics_as_asked_for(count: int) -> None:
    agent = grown(reach_agent(num_critics=count))
    assert agent.q_values(agent.observation_space.sample()[None]).shape == (1, count)
    assert agent.updates > 0
    assert math.isfinite(agent.update(agent.sample()).metrics["loss"])


def test_the_actor_waits_for_its_turn() -> None:
    agent = grown(reach_agent(policy_delay=3))
    before = parameters(agent.actor)
    agent.updates = 0
    for turn in (1, 2, 3):
        result = agent.update(agent.sample())
        agent.updates += 1
        unmoved = same(before, parameters(agent.actor))
        assert all(unmoved) if turn < 3 else not any(unmoved)
        names = ["loss", "q_mean", "q_std", "target_mean", "td_error_abs"]
        assert list(result.metrics) == (names if turn < 3 else [*names, "actor_loss"])
    assert all(value.ndim == 0 and not value.requires_grad for value in result.metrics.values())


def test_images_stay_as_they_are() -> None:
    agent = grown(reach_agent())
    batch = agent.sample()
    before = batch.obs.clone(), batch.next_obs.clone()
    agent.update(batch)
    assert torch.equal(batch.obs, before[0]) and torch.equal(batch.next_obs, before[1])


def test_the_target_critic_follows_and_the_encoder_has_none() -> None:
    agent = grown(reach_agent(tau=0.25))
    before = parameters(agent.target_critic)
    agent.update(agent.sample())
    after = zip(parameters(agent.target_critic), before, parameters(agent.critic), strict=True)
    for slow, old, fast in after:
        torch.testing.assert_close(slow, 0.75 * old + 0.25 * fast)


def test_updates_come_at_their_rate_after_the_random_steps() -> None:
    agent = grown(reach_agent(train_frequency=4, learning_starts=40, num_envs=2), steps=120)
    assert agent.updates == (120 - 40) // 4


def test_noise_in_updates_is_clipped() -> None:
    """Noise beyond the clip changes nothing more."""
    agent = grown(reach_agent(noise_clip=0.2))
    batch, gradients = agent.sample(), []
    for size in (0.2, 5.0):
        zero_gradients(agent)
        noise = torch.full((16, 2), size)
        metrics = agent.critic_gradients(batch, noise) | agent.actor_gradients(batch.obs, noise)
        gradients.append([metrics["loss"], metrics["actor_loss"], *grads(agent)])
    assert all(same(*gradients))


def grads(agent: DrQv2) -> list[torch.Tensor]:
    networks = (agent.encoder, agent.actor, agent.critic)
    return [p.grad for part in networks for p in part.parameters() if p.grad is not None]


# Networks of one's own


class Norm(nn.Module):
    """Convolutions with normalised outputs; images may be of any size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 5, 2), nn.GroupNorm(1, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images.float() / 255).flatten(1)


class OneCritic(nn.Module):
    """A critic of one network with LayerNorm."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, 16), nn.LayerNorm(16), nn.ELU(), nn.Linear(16, 1)
        )

    def forward(self, encoded: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([encoded, action], dim=1))


class OwnNetworks(DrQv2):
    """DrQ-v2 with other networks."""

    def make_encoder(self) -> nn.Module:
        return Norm(3)

    def make_actor(self, inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 2))

    def make_critic(self, inputs: int) -> nn.Module:
        return OneCritic(inputs + 2)


def test_networks_can_be_replaced() -> None:
    # Images of 12 x 12 pixels are too small for our encoder.
    agent = OwnNetworks("rlbook/PointReach-v0", env_kwargs={"size": 12}, **SMALL)
    networks = (agent.encoder, agent.actor, agent.critic, agent.target_critic)
    before = parameters(*networks)
    grown(agent, 80)
    assert not any(same(before, parameters(*networks)))
    assert agent.predict(agent.observation_space.sample())[0].shape == (2,)


# Values and actions


@pytest.mark.parametrize(("terminates", "value"), [(False, 2.0), (True, 1.0)])
def test_truncation_bootstraps_and_termination_does_not(terminates: bool, value: float) -> None:
    own = {"gamma": 0.5, "tau": 0.1, "train_frequency": 1, "n_step": 1, "lr": 3e-3}
    agent = grown(room_agent(own, length=1, terminates=terminates), steps=350)
    images = np.full((1, 1, 16, 16), 100, np.uint8)
    np.testing.assert_allclose(agent.q_values(images), value, atol=0.15)


@pytest.mark.parametrize(("best", "low", "high"), [(3.0, 2.0, 3.0), (-1.0, -1.0, 0.0)])
def test_learns_the_best_action_of_a_bandit(best: float, low: float, high: float) -> None:
    own = {"train_frequency": 1, "policy_delay": 1, "noise_steps": 100, "lr": 3e-3}
    agent = grown(room_agent(own, length=1, terminates=True, best=best, high=3.0), steps=250)
    action, _ = agent.predict(np.full((1, 16, 16), 100, np.uint8))
    assert low <= action[0] <= high  # 1 is the middle of the bounds


def test_predict_on_one_image_and_on_a_batch() -> None:
    agent = reach_agent()
    images = np.stack([PointReach().reset(seed=i)[0] for i in range(5)])
    many, one = agent.predict(images)[0], agent.predict(images[2])[0]
    assert many.shape == (5, 2) and one.shape == (2,)
    np.testing.assert_allclose(one, many[2], atol=1e-6)
    agent.global_step = 1_000
    noisy = [agent.predict(images, deterministic=False)[0] for _ in range(2)]
    assert (noisy[0] != noisy[1]).any() and np.abs(noisy).max() <= 1
    with pytest.raises(ValueError, match=r"must have the shape \(3, 24, 24\)"):
        agent.predict(images[:, :2])


def test_noise_in_acting_is_not_clipped() -> None:
    agent = reach_agent(noise_start=0.9, noise_end=0.9, noise_clip=0.01, learning_starts=0)
    images = np.stack([PointReach().reset(seed=i)[0] for i in range(64)])
    off = agent.predict(images, deterministic=False)[0] - agent.predict(images)[0]
    assert np.abs(off).max() > 0.5


def test_frames_of_a_stack_are_stored_once() -> None:
    agent = DrQv2(
        "rlbook/Pixels-v0", env_kwargs={"env_id": "rlbook/PointReach-v0", "size": 16}, **SMALL
    )
    assert agent.observation_space.shape == (9, 16, 16)
    assert agent.replay.ring.frames.shape[1:] == (3, 16, 16)
    grown(agent, 120)  # no time limit here: one episode, then one more for the second `learn`
    assert agent.replay.ring.written == 121 + 2


# Runs


def run_config(path: Path, **own: Any) -> DrQv2Config:
    every = {"eval_every": 100, "eval_episodes": 2, "log_every": 50, "checkpoint_every": 80}
    return DrQv2Config(run_dir=str(path), **{**SMALL, **every, "total_steps": 260, **own})


def crash_at(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """Let the process 'die' in the middle of a run."""
    real = DrQv2.update

    def update(self: DrQv2, batch: Any) -> Any:
        if self.updates == updates:
            raise MemoryError("the power went out")
        return real(self, batch)

    monkeypatch.setattr(DrQv2, "update", update)


@pytest.mark.parametrize("pixels", [False, True])
def test_resumed_run_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixels: bool
) -> None:
    kwargs = {"env_id": "rlbook/PointReach-v0", "size": 16, "frame_stack": 2}
    seen: dict[str, Any] = {"env_id": "rlbook/Pixels-v0", "env_kwargs": kwargs}
    short = {"num_envs": 2, "train_frequency": 4, "total_steps": 180, "eval_episodes": 1}
    own = {**(seen if pixels else {}), **short}
    train_drqv2(run_config(tmp_path / "whole", **own), progress=False)
    with monkeypatch.context() as patch:
        crash_at(patch, updates=30)  # between the checkpoints of the steps 80 and 160
        with pytest.raises(MemoryError):
            train_drqv2(run_config(tmp_path / "cut", **own), progress=False)
    resume(tmp_path / "cut", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_save_and_load(tmp_path: Path) -> None:
    agent = grown(reach_agent(), 90)
    agent.save(tmp_path / "agent.pt")
    again = DrQv2.load(tmp_path / "agent.pt")
    images = np.stack([PointReach().reset(seed=i)[0] for i in range(5)])
    np.testing.assert_array_equal(agent.predict(images)[0], again.predict(images)[0])
    assert agent.update(agent.sample()).metrics == again.update(again.sample()).metrics


def test_without_its_buffer_a_run_says_that_it_is_not_exact(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    light = train_drqv2(run_config(tmp_path / "a", checkpoint_replay=False), progress=False)
    whole = train_drqv2(run_config(tmp_path / "b"), progress=False)
    assert light.checkpoint is not None and whole.checkpoint is not None
    assert light.checkpoint.stat().st_size < 0.5 * whole.checkpoint.stat().st_size
    rlbook.load(tmp_path / "a").predict(np.zeros((3, 24, 24), np.uint8))
    assert not recwarn.list  # who only acts needs no buffer
    with pytest.warns(UserWarning, match="not saved: it fills again, and the run is not exact"):
        resume(tmp_path / "a", total_steps=300, progress=False)


def test_shipped_configs_make_agents() -> None:
    for name, size in (("point_reach", (3, 24, 24)), ("pendulum_pixels", (9, 40, 40))):
        settings = read_settings(shipped_configs()[f"drqv2/{name}"])
        assert settings.pop("algo") == "drqv2"
        agent = DrQv2(config=make_config(DrQv2Config, settings))
        assert agent.observation_space.shape == size


# The shell, and bad input


def run(line: str) -> int:
    return main(shlex.split(line))


FLAGS = "--hidden 16 --features 8 --batch-size 16 --learning-starts 32 --total-steps 60"


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(f"train drqv2 --config point_reach {FLAGS} --eval-every 0 --run-dir runs/a") == 0
    images = np.stack([PointReach().reset(seed=i)[0] for i in range(2)])
    np.save("one.npy", images[0])
    np.save("two.npy", images)
    capsys.readouterr()
    answers = []
    for name in ("one", "two"):
        assert run(f"predict runs/a --observation {name}.npy") == 0
        answers.append(json.loads(capsys.readouterr().out))
    one, two = answers
    agent = rlbook.load("runs/a")
    np.testing.assert_allclose(two["action"], agent.predict(images)[0], atol=1e-6)
    np.testing.assert_allclose(one["action"], two["action"][0], atol=1e-6)
    np.testing.assert_allclose(one["q_values"], two["q_values"][0], atol=1e-5)
    assert run("watch runs/a --out agent.gif") == 0 and Path("agent.gif").stat().st_size > 1_000
    assert run("evaluate runs/a --episodes 2") == 0
    np.save("wrong.npy", images[0][:, :20])
    assert run("predict runs/a --observation wrong.npy") == 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"env_id": "Pendulum-v1"}, "has vector observations .* try .*sac or redq"),
    (
        {"env_id": "Room-v0", "env_kwargs": {"dtype": "float32"}},
        r"has images of float32, but drqv2 needs bytes",
    ),
    (
        {"env_id": "Room-v0", "env_kwargs": {"shape": [3, 14, 20]}},
        r"images of 14 x 20 pixels, but the smallest .* 'small' can take is 15 x 15",
    ),
    (
        {"env_id": "rlbook/PointReach-v0", "encoder": "nature"},
        r"'nature' can take is 36 x 36",
    ),
    ({"env_id": "Room-v0", "env_kwargs": {"discrete": True}}, "discrete actions .* continuous"),
    ({"env_id": "Room-v0", "env_kwargs": {"high": float("inf")}}, "without finite bounds"),
    (
        {"env_id": "rlbook/Pixels-v0", "env_kwargs": {"env_id": "rlbook/OneStep-v0"}},
        "'rlbook/OneStep-v0' cannot render",
    ),
    ({"pad": -1}, "at least 0, not -1"),
    ({"noise_end": -0.1}, "at least 0"),
    ({"encoder": "large"}, "must be one of 'small', 'nature'"),
    ({"batch_size": 600, "buffer_size": 500}, "must not exceed 'buffer_size'"),
    ({"reward_scale": 0}, "above 0"),
]


@pytest.mark.parametrize(("own", "message"), BAD)
def test_mistakes_get_a_sentence(
    own: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DrQv2(**{**SMALL, **own})
    assert "\n" not in str(error.value)
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name.replace('_', '-')}={yaml.safe_dump(own[name]).strip()}" for name in own]
    assert main(["train", "drqv2", *(flag.removesuffix("\n...") for flag in flags)]) == 2
    said = capsys.readouterr().err.strip()
    assert str(error.value) in said and "\n" not in said
    assert not list(tmp_path.iterdir())


def test_the_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[1] / "examples" / "drqv2_pendulum_pixels.py"
    scores = runpy.run_path(str(example))["main"](steps=20, episodes=2)
    said = capsys.readouterr().out
    assert list(scores) == ["with shifts", "without shifts"]
    assert all(f"{name}: {score:.0f} (95 %" in said for name, score in scores.items())
    assert list(tmp_path.iterdir()) == []
