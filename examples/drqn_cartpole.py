"""Train DRQN on CartPole without velocities, and play an episode with its hidden state by hand.

python examples/drqn_cartpole.py [STEPS]
"""

import sys

from rlbook.drqn import DRQN
from rlbook.envs import make_env


def main(steps: int) -> float:
    """Train for some steps and return the mean of twenty greedy episodes."""
    agent = DRQN.from_config("masked_cartpole", seed=1)
    print(f"before: {agent.evaluate(episodes=20).mean:.1f}")
    agent.learn(steps)
    after = agent.evaluate(episodes=20)
    low, high = after.interval
    print(f"after {steps:,} steps: {after.mean:.1f} (95 % interval {low:.1f} to {high:.1f})")

    env = make_env("rlbook/MaskedCartPole-v0")
    obs, _ = env.reset(seed=0)
    state, over, length = None, False, 0
    while not over:
        action, state = agent.predict(obs, state)  # the hidden state goes in and comes out
        obs, _, terminated, truncated, _ = env.step(action)
        over, length = terminated or truncated, length + 1
    print(f"one episode by hand: {length} steps")
    return after.mean


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
