"""Learn Pendulum-v1 with SAC, keep the agent, and ask it what to do."""

import tempfile
from pathlib import Path

from rlbook.sac import SAC, SACConfig, train_sac
from rlbook.settings import make_config, read_settings, shipped_configs


def main(total_steps: int = 10_000) -> float:
    """Train at the shipped settings and return the mean of 20 greedy episodes."""
    settings = read_settings(shipped_configs()["sac/pendulum"])
    settings.pop("algo")
    result = train_sac(make_config(SACConfig, {**settings, "total_steps": total_steps}))
    with tempfile.TemporaryDirectory() as folder:
        result.agent.save(Path(folder) / "agent.pt")
        agent = SAC.load(Path(folder) / "agent.pt")
    torque, _ = agent.predict([1.0, 0.0, 0.5])  # upright, falling to the left
    score = agent.evaluate(episodes=20)
    print(f"{score.mean:.0f} ± {score.std:.0f} over 20 episodes; torque when falling: {torque}")
    return score.mean


if __name__ == "__main__":
    main()
