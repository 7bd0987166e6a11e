"""Train R2D2 on CartPole without velocities, and see the priorities of its last batch.

python examples/r2d2_cartpole.py [STEPS]
"""

import sys

from rlbook.r2d2 import R2D2


def main(steps: int) -> float:
    """Train for some steps and return the mean of twenty greedy episodes."""
    agent = R2D2.from_config("masked_cartpole", seed=1)
    print(f"before: {agent.evaluate(episodes=20).mean:.1f}")
    agent.learn(steps)
    after = agent.evaluate(episodes=20)
    low, high = after.interval
    print(f"after {steps:,} steps: {after.mean:.1f} (95 % interval {low:.1f} to {high:.1f})")
    priorities = agent.last_sequence_priorities
    if priorities is not None:
        print(f"priorities of the last batch: {priorities.min():.3f} to {priorities.max():.3f}")
    return after.mean


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
