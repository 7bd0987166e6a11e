"""Learn Pendulum-v1 with SAC, keep the agent, and ask it what to do."""

import tempfile
from pathlib import Path

from rlbook.sac import SAC


def main(total_steps: int = 10_000) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    agent = SAC.from_config("pendulum")
    agent.learn(total_steps)
    with tempfile.TemporaryDirectory() as folder:
        agent.save(Path(folder) / "agent.pt")
        agent = SAC.load(Path(folder) / "agent.pt")
    torque, _ = agent.predict([1.0, 0.0, 0.5])  # upright, falling to the left
    score = agent.evaluate(episodes=20)
    print(f"{score.mean:.0f} ± {score.std:.0f} over 20 episodes; torque when falling: {torque}")
    return score.mean


if __name__ == "__main__":
    main()
