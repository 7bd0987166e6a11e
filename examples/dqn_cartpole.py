"""Train DQN on CartPole, see what it learned, save it and load it again.

python examples/dqn_cartpole.py [STEPS]
"""

import sys
import tempfile
from pathlib import Path

from rlbook.dqn import DQN


def main(steps: int) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    agent = DQN.from_config("cartpole", seed=1)  # as `--config cartpole --seed 1` in the shell
    before = agent.evaluate(episodes=20).mean
    agent.learn(steps)
    with tempfile.TemporaryDirectory() as folder:
        agent.save(Path(folder) / "agent.pt")
        agent = DQN.load(Path(folder) / "agent.pt")
    score = agent.evaluate(episodes=20)
    low, high = score.interval
    print(f"before {before:.1f}, after {score.mean:.1f} (95 % interval {low:.1f} to {high:.1f})")
    push, _ = agent.predict([0.0, 0.0, 0.1, 0.5])  # falling to the right
    print(f"a pole that falls to the right: push to the {('left', 'right')[push]}")
    return score.mean


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
