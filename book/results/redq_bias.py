"""Measure how far critics are from the returns that follow, on Hopper-v5 (extra `mujoco`).

    python book/results/redq_bias.py --run-dir runs/redq_bias --out book/results/redq_bias.json

Each seed of each variant is kept in the run directory when it is done, so a second call goes on.
"""

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlbook.envs import derive_seed, make_env
from rlbook.redq import REDQ
from rlbook.run import versions
from rlbook.sac import SAC, squashed_sample
from rlbook.sweep import short

SHARED: dict[str, Any] = {
    "env_id": "Hopper-v5",
    "hidden": (64, 64),
    "batch_size": 64,
    "lr": 3e-4,
    "learning_starts": 250,
    "target_entropy": -1.0,
    "eval_every": 0,
}
VARIANTS: dict[str, tuple[type[SAC], dict[str, Any]]] = {
    "SAC, UTD 1": (SAC, {}),
    "SAC, UTD 20": (SAC, {"gradient_steps": 20, "policy_delay": 20}),
    "REDQ, UTD 20": (REDQ, {}),
}
EVERY, POINTS, EPISODES, HORIZON = 250, 9, 10, 1_000


@torch.no_grad()
def errors(agent: SAC, seed: int) -> np.ndarray:
    """Return mean Q minus the discounted soft return that followed, step by step."""
    env, generator = make_env(agent.config.env_id), torch.Generator().manual_seed(seed)
    alpha, gamma, found = agent.temperature().item(), agent.config.gamma, []
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=derive_seed(seed, episode))
        q, rewards, log_probs, truncated = [], [], [], False
        while len(q) < HORIZON:
            tensor = torch.as_tensor(obs, dtype=torch.float32)[None]
            noise = torch.randn(1, agent.action_space.shape[0], generator=generator)
            mean, log_std = agent.actor(tensor)
            action, log_prob = squashed_sample(mean, log_std, noise)
            q.append(float(agent.critics(tensor, action).mean()))
            log_probs.append(float(log_prob))
            obs, reward, terminated, truncated, _ = env.step(agent.scale.to_env(action.numpy())[0])
            rewards.append(float(reward))
            if terminated or truncated:
                break
        value, returns = 0.0, np.zeros(len(q))
        for t in reversed(range(len(q))):
            returns[t] = rewards[t] + gamma * value  # what Q(s, a) claims
            value = returns[t] - alpha * log_probs[t]  # the soft value of the state
        kept = len(q) // 2 if truncated else len(q)  # a cut-off tail is missing from late returns
        found.append((np.array(q) - returns)[:kept])
    env.close()
    return np.concatenate(found)


def measure(name: str, seed: int) -> dict[str, Any]:
    """Train one seed of one variant, and stop every so often to measure."""
    agent_class, own = VARIANTS[name]
    agent, began = agent_class(**SHARED, **own, seed=seed), time.perf_counter()
    rows = []
    for point in range(1, POINTS + 1):
        agent.learn(EVERY, progress=False)
        bias = errors(agent, derive_seed(seed, "bias", point))
        score = agent.evaluate(episodes=10, seed=point).mean
        rows.append([agent.global_step, *map(short, (score, bias.mean(), bias.std()))])
    steps, returns, means, stds = (list(column) for column in zip(*rows, strict=True))
    seconds = short(time.perf_counter() - began)
    return {"steps": steps, "returns": returns, "bias": means, "std": stds, "seconds": seconds}


def main() -> None:
    """Measure all variants and seeds, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/redq_bias"))
    parser.add_argument("--out", type=Path, default=Path("book/results/redq_bias.json"))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[str, Any]] = {}
    for seed in range(options.seeds):
        for name, (agent_class, own) in VARIANTS.items():
            path = options.run_dir / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(measure(name, seed)))
                print(path.name, path.read_text(), flush=True)
            found = json.loads(path.read_text())
            settings = {"algo": agent_class.name, **SHARED, **own}
            run = runs.setdefault(name, {"settings": settings, "steps": found["steps"]})
            for key in ("returns", "bias", "std", "seconds"):
                run.setdefault(key, []).append(found[key])
    result = {
        "command": "python book/results/redq_bias.py",
        "algo": "redq",
        "env_id": SHARED["env_id"],
        "seeds": list(range(options.seeds)),
        "versions": versions(),
        "created": datetime.date.today().isoformat(),
        "seconds": short(sum(sum(run["seconds"]) for run in runs.values())),
        "measured": runs,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
