"""Time DQN against Stable-Baselines3 at the RL Zoo's settings for CartPole, side by side.

    python bench/dqn.py [--steps 5120] [--rounds 5]
"""

import argparse
import statistics
import time

import gymnasium as gym
import stable_baselines3
import torch
from stable_baselines3 import DQN as SB3DQN

from rlbook.dqn import DQN

HIDDEN, BATCH, ROUND, UPDATES, WARMUP, LR = (256, 256), 64, 256, 128, 1_000, 2.3e-3


def make_rlbook() -> DQN:
    """An agent of this book at the RL Zoo's settings, without evaluations or files."""
    return DQN(
        "CartPole-v1",
        hidden=HIDDEN,
        batch_size=BATCH,
        update_every=ROUND,
        updates_per_round=UPDATES,
        buffer_size=100_000,
        warmup_steps=WARMUP,
        lr=LR,
        double=False,
        huber=True,
        max_grad_norm=10.0,
        tau=1.0,
        target_every=UPDATES,  # once a round, as theirs (see below)
        epsilon_steps=1,  # at the floor, where theirs is too once the warm-up is over
        epsilon_floor=0.04,
        eval_every=0,
    )


def make_sb3() -> SB3DQN:
    """An agent of Stable-Baselines3 at the same settings."""
    return SB3DQN(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        policy_kwargs={"net_arch": list(HIDDEN)},
        batch_size=BATCH,
        train_freq=ROUND,
        gradient_steps=UPDATES,
        buffer_size=100_000,
        learning_starts=WARMUP,
        learning_rate=LR,
        # Counted in environment steps. The Zoo has 10: 25 copies of the same weights between two
        # rounds of updates. One copy leads to the same weights, and takes less time.
        target_update_interval=ROUND,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        device="cpu",
    )


def main() -> None:
    """Alternate between the two, so that both meet the same noise, and print medians and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_120, help="environment steps of one round")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each library")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours, theirs = make_rlbook(), make_sb3()
    ours.config.threads = options.threads
    ours.learn(2 * WARMUP, progress=False)  # past the warm-up: from here on every round updates
    theirs.learn(2 * WARMUP)
    speeds: dict[str, list[float]] = {"rlbook": [], "stable-baselines3": []}
    for _ in range(options.rounds):
        began = time.perf_counter()
        ours.learn(options.steps, progress=False)
        middle = time.perf_counter()
        theirs.learn(options.steps, reset_num_timesteps=False)
        ended = time.perf_counter()
        speeds["rlbook"].append(options.steps / (middle - began))
        speeds["stable-baselines3"].append(options.steps / (ended - middle))
    for name, values in speeds.items():
        low, median, high = min(values), statistics.median(values), max(values)
        print(f"{name:>18}: {median:8,.0f} steps/s (from {low:,.0f} to {high:,.0f})")
    ratios = [a / b for a, b in zip(speeds["rlbook"], speeds["stable-baselines3"], strict=True)]
    print(
        f"DQN, CartPole-v1, {list(HIDDEN)}, batch {BATCH}, {UPDATES} updates per {ROUND} steps, "
        f"{options.threads} thread(s), Stable-Baselines3 {stable_baselines3.__version__}: "
        f"ratio {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
