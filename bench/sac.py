"""Time one update of SAC against Stable-Baselines3, side by side: [256, 256], batch 256.

Sizes of Pendulum, random transitions; each turn is ten updates that are asked for at once.

    python bench/sac.py [--updates 10] [--rounds 21] [--threads 1 2]
"""

import argparse
import statistics
from typing import Any

import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import SAC as SB3SAC
from stable_baselines3.common.logger import configure
from timing import Work, alternate, fill_randomly

from rlbook.sac import SAC

Widths = tuple[int, ...]
HIDDEN, BATCH, STORED, CAPACITY = (256, 256), 256, 5_000, 100_000


def make_rlbook(
    hidden: Widths = HIDDEN, batch_size: int = BATCH, lr: float = 3e-4, tau: float = 0.005
) -> SAC:
    """An agent of this book with random transitions to learn from."""
    sizes: dict[str, Any] = {"hidden": hidden, "batch_size": batch_size, "lr": lr, "tau": tau}
    agent = SAC("Pendulum-v1", buffer_size=CAPACITY, warmup_steps=0, eval_every=0, **sizes)
    agent.replay.add(fill_randomly(np.zeros(STORED, agent.replay.rows.dtype)))
    return agent


def make_sb3(
    hidden: Widths = HIDDEN, batch_size: int = BATCH, lr: float = 3e-4, tau: float = 0.005
) -> SB3SAC:
    """An agent of Stable-Baselines3 with the same networks, batch and kind of transitions."""
    agent = SB3SAC(
        "MlpPolicy",
        "Pendulum-v1",
        policy_kwargs={"net_arch": list(hidden)},
        batch_size=batch_size,
        learning_rate=lr,
        tau=tau,
        buffer_size=CAPACITY,
        learning_starts=0,
        train_freq=1,
        gradient_steps=1,
        device="cpu",
    )
    agent.set_logger(configure(None, []))
    generator = np.random.default_rng(0)
    for _ in range(STORED):
        obs, next_obs = generator.normal(size=(2, 1, 3)).astype(np.float32)
        action, reward = generator.uniform(-1, 1, size=(1, 1)), generator.normal(size=1)
        agent.replay_buffer.add(obs, next_obs, action, reward, np.zeros(1), [{}])
    return agent


def update_works(ours: SAC, theirs: SB3SAC, count: int) -> dict[str, Work]:
    """Return `count` updates of each library, asked for at once."""

    def update() -> None:
        for batch in ours.batches(count):
            ours.update(batch)
            ours.updates += 1

    size = ours.config.batch_size
    return {
        "rlbook": update,
        "stable-baselines3": lambda: theirs.train(gradient_steps=count, batch_size=size),
    }


def measure(threads: int, rounds: int, count: int) -> None:
    """Alternate between the two, so that both meet the same noise, and print medians and ratio."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as `learn` does, and for all alike
    ours, theirs = make_rlbook(), make_sb3()
    works = update_works(ours, theirs, count)
    times = {name: [x / count for x in values] for name, values in alternate(works, rounds).items()}
    for name, values in times.items():
        low, high = min(values), max(values)
        median = statistics.median(values)
        print(f"{name:>18}: {1e3 * median:6.2f} ms (from {1e3 * low:.2f} to {1e3 * high:.2f})")
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    print(
        f"SAC update, {list(HIDDEN)}, batch {BATCH}, {threads} thread(s), "
        f"Stable-Baselines3 {stable_baselines3.__version__}: ratio {statistics.median(ratios):.2f} "
        f"(of the fastest rounds {min(times['stable-baselines3']) / min(times['rlbook']):.2f})"
    )


def main() -> None:
    """Measure on one thread and on as many as PyTorch takes by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=10, help="updates of one round")
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds of each library")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    options = parser.parse_args()
    for threads in dict.fromkeys(options.threads):
        measure(threads, options.rounds, options.updates)


if __name__ == "__main__":
    main()
