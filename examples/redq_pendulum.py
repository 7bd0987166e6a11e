"""Learn Pendulum-v1 with REDQ in a quarter of SAC's steps, and ask its critics what they think."""

import numpy as np

from rlbook.redq import REDQ
from rlbook.settings import read_settings, shipped_configs


def main(total_steps: int = 2_500) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    settings = read_settings(shipped_configs()["redq/pendulum"])
    settings.pop("algo")
    agent = REDQ(**settings)
    agent.learn(total_steps)
    upright = np.array([[1.0, 0.0, 0.0]])
    torque, _ = agent.predict(upright)
    opinions = agent.q_values(upright, torque)[0]  # one of each critic
    print(f"upright, the critics say {opinions.round(1)}")
    score = agent.evaluate(episodes=20)
    print(f"{score.mean:.0f} ± {score.std:.0f} over 20 episodes")
    return score.mean


if __name__ == "__main__":
    main()
