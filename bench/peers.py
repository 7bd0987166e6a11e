"""DQN, SAC and PPO of three libraries, with the same settings for all."""

from typing import Any

import gymnasium as gym
import sbx
import stable_baselines3 as sb3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import LinearSchedule

from rlbook.dqn import DQN
from rlbook.ppo import PPO
from rlbook.sac import SAC

DQN_STARTS, DQN_EVERY, DQN_UPDATES = 1_000, 256, 128


def our_dqn(compiled: bool) -> DQN:
    """DQN of this book at the settings of the RL Zoo for CartPole, without evaluations."""
    return DQN(
        "CartPole-v1",
        hidden=(256, 256),
        batch_size=64,
        lr=2.3e-3,
        buffer_size=100_000,
        learning_starts=DQN_STARTS,
        train_frequency=DQN_EVERY,
        gradient_steps=DQN_UPDATES,
        target_update_interval=DQN_UPDATES,
        double=False,
        huber=True,
        max_grad_norm=10.0,
        epsilon_decay_steps=1,
        final_epsilon=0.04,
        eval_every=0,
        compile=compiled,
    )


def their_dqn(library: Any) -> Any:
    """DQN of Stable-Baselines3 or SBX at the same settings."""
    return library.DQN(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        policy_kwargs={"net_arch": [256, 256]},
        batch_size=64,
        learning_rate=2.3e-3,
        buffer_size=100_000,
        learning_starts=DQN_STARTS,
        train_freq=DQN_EVERY,
        gradient_steps=DQN_UPDATES,
        # In environment steps. The Zoo has 10: 25 copies of the same weights between two rounds of
        # updates. One copy has the same effect, and takes less time.
        target_update_interval=DQN_EVERY,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        device="cpu",
    )


def our_sac(hidden: tuple[int, ...], batch_size: int, compiled: bool) -> SAC:
    """SAC of this book on Pendulum: one environment, one update a step."""
    return SAC(
        "Pendulum-v1",
        hidden=hidden,
        batch_size=batch_size,
        buffer_size=100_000,
        learning_starts=100,
        train_frequency=1,
        gradient_steps=1,
        eval_every=0,
        compile=compiled,
    )


def their_sac(library: Any, hidden: tuple[int, ...], batch_size: int) -> Any:
    """SAC of Stable-Baselines3 or SBX at the same settings."""
    agent = library.SAC(
        "MlpPolicy",
        "Pendulum-v1",
        policy_kwargs={"net_arch": list(hidden)},
        batch_size=batch_size,
        buffer_size=100_000,
        learning_starts=100,
        train_freq=1,
        gradient_steps=1,
        device="cpu",
    )
    agent.set_logger(configure(None, []))
    return agent


PPO_ENVS, PPO_STEPS, PPO_EPOCHS = 8, 32, 20


def our_ppo(compiled: bool) -> PPO:
    """PPO of this book at the settings of the RL Zoo for CartPole, without evaluations."""
    return PPO(
        "CartPole-v1",
        num_envs=PPO_ENVS,
        num_steps=PPO_STEPS,
        minibatch_size=PPO_ENVS * PPO_STEPS,
        epochs=PPO_EPOCHS,
        gamma=0.98,
        gae_lambda=0.8,
        lr=1e-3,
        lr_decay_from=0.0,
        clip_range=0.2,
        clip_range_decay_from=0.0,
        total_steps=1_000_000,  # more than are made here: both schedules fall all the time
        eval_every=0,
        compile=compiled,
    )


def their_ppo(library: Any) -> Any:
    """PPO of Stable-Baselines3 or SBX at the same settings."""
    return library.PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", PPO_ENVS),
        n_steps=PPO_STEPS,
        batch_size=PPO_ENVS * PPO_STEPS,
        n_epochs=PPO_EPOCHS,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=LinearSchedule(1e-3, 0.0, 1.0),
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        ent_coef=0.0,
        device="cpu",
    )


LIBRARIES = {"stable-baselines3": sb3, "sbx": sbx}
