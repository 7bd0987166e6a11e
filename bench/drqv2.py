"""Time an update of DrQ-v2 against its bare forward and backward passes, in one run.

    python bench/drqv2.py [--updates 50] [--rounds 9]

The update includes drawing a batch, shifting its images, Adam and the moving average of the
target; the bare passes have a batch at hand and stop at the gradients.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from rlbook.agent import torch_for_learning
from rlbook.drqv2 import DrQv2
from rlbook.replay import Batch
from rlbook.settings import gather_settings


def grown(config: str) -> DrQv2:
    """An agent at shipped settings that has filled a part of its buffer."""
    _, settings = gather_settings(config, "drqv2")
    agent = DrQv2(**{**settings, "eval_every": 0})
    agent.learn(agent.config.warmup_steps + 20, progress=False)
    return agent


def whole(agent: DrQv2) -> None:
    """One update as in training."""
    agent.update(agent.sample())
    agent.updates += 1


def bare(agent: DrQv2, batch: Batch) -> None:
    """The passes of one update alone."""
    encoded = agent.model.encoder(batch.obs)
    loss, _ = agent.judge(encoded, batch)
    if (agent.updates + 1) % agent.config.policy_delay == 0:
        loss = loss + agent.improve(encoded.detach())
    agent.optimizer.zero_grad()
    loss.backward()
    agent.updates += 1


def seconds(function: Callable[[], None], count: int) -> float:
    """Return the time of one call in the mean."""
    began = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - began) / count


def main() -> None:
    """Alternate between the two, so that both meet the same noise, and print medians and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=50, help="updates of one round")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both")
    options = parser.parse_args()
    for config in ("point_reach", "pendulum_pixels"):
        agent = grown(config)
        batch = agent.sample()
        times: dict[str, list[float]] = {"update": [], "bare passes": []}
        with torch_for_learning(options.threads):
            for _ in range(options.rounds):
                times["update"].append(seconds(partial(whole, agent), options.updates))
                times["bare passes"].append(seconds(partial(bare, agent, batch), options.updates))
        ratios = [a / b for a, b in zip(times["update"], times["bare passes"], strict=True)]
        update, passes = (1e3 * statistics.median(values) for values in times.values())
        print(
            f"DrQ-v2, {config}, batch {agent.config.batch_size}, {options.threads} thread(s): "
            f"update {update:.1f} ms, bare passes {passes:.1f} ms, "
            f"ratio {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
