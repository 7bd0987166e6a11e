"""Train recurrent PPO on CartPole without velocities, and play two episodes side by side by hand.

python examples/recurrent_ppo_cartpole.py [STEPS]
"""

import sys

import numpy as np

from rlbook.envs import make_env
from rlbook.recurrent_ppo import RecurrentPPO


def main(steps: int) -> float:
    """Train for some steps and return the mean of twenty greedy episodes."""
    agent = RecurrentPPO.from_config("masked_cartpole", seed=1)
    agent.learn(steps)
    after = agent.evaluate(episodes=20)
    low, high = after.interval
    print(f"after {steps:,} steps: {after.mean:.1f} (95 % interval {low:.1f} to {high:.1f})")

    envs = [make_env("rlbook/MaskedCartPole-v0") for _ in range(2)]
    obs = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(envs)])
    state, start, falls = None, np.ones(2, dtype=bool), 0
    for _ in range(500):
        actions, state = agent.predict(obs, state, episode_start=start)
        for i, env in enumerate(envs):
            obs[i], _, terminated, truncated, _ = env.step(actions[i])
            start[i] = terminated or truncated  # its hidden state is zeroed before the next step
            if start[i]:
                obs[i], _ = env.reset()
            falls += terminated
    print(f"two poles for ten seconds: {falls} falls")
    return after.mean


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
