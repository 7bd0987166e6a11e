"""Train DrQ-v2 on images of a pendulum, with and without random shifts.

python examples/drqv2_pendulum_pixels.py [STEPS]
"""

import sys

from rlbook.drqv2 import DrQv2


def main(steps: int, episodes: int = 10) -> dict[str, float]:
    """Train both for some steps and return the means of their greedy episodes."""
    scores = {}
    for name, pad in (("with shifts", 2), ("without shifts", 0)):
        agent = DrQv2.from_config("pendulum_pixels", pad=pad, seed=1, eval_every=0)
        agent.learn(steps)
        score = agent.evaluate(episodes)
        low, high = score.interval
        print(f"{name}: {score.mean:.0f} (95 % interval {low:.0f} to {high:.0f})")
        scores[name] = score.mean
    return scores


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4_000)
