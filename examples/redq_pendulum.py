"""Learn Pendulum-v1 with REDQ in a quarter of SAC's steps, and ask its critics what they say."""

import numpy as np

from rlbook.redq import REDQ


def main(total_steps: int = 2_500) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    agent = REDQ.from_config("pendulum")
    agent.learn(total_steps)
    upright = np.array([[1.0, 0.0, 0.0]])
    q = agent.q_values(upright)[0]  # one value of each critic, for the action of the policy
    print(f"upright, the critics say {q.round(1)}")
    score = agent.evaluate(episodes=20)
    print(f"{score.mean:.0f} ± {score.std:.0f} over 20 episodes")
    return score.mean


if __name__ == "__main__":
    main()
