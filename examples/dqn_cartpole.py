"""Train DQN on CartPole, see what it learned, save it and load it again."""

import tempfile
from pathlib import Path

from rlbook.dqn import DQN
from rlbook.settings import gather_settings


def main(steps: int = 50_000) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    _, settings = gather_settings("cartpole", "dqn")  # what `--config cartpole` is in the shell
    agent = DQN(**{**settings, "seed": 1})
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
    main()
