"""Train TRPO on CartPole, see how sure it is of its actions, save it and load it again."""

import tempfile
from pathlib import Path

import numpy as np

from rlbook.trpo import TRPO


def main(total_steps: int = 100_000) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    agent = TRPO.from_config("cartpole", seed=1)
    agent.learn(total_steps)
    with tempfile.TemporaryDirectory() as folder:
        agent.save(Path(folder) / "agent.pt")
        agent = TRPO.load(Path(folder) / "agent.pt")
    score = agent.evaluate(episodes=20)
    falling = np.array([[0.0, 0.0, 0.1, 0.5]], np.float32)  # to the right
    left, right = agent.probabilities(falling)[0]
    print(f"{score.mean:.0f} ± {score.std:.0f} over 20 episodes")
    print(f"a pole that falls to the right: push left {left:.0%}, right {right:.0%}")
    return score.mean


if __name__ == "__main__":
    main()
