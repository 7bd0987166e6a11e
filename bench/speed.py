"""Measure what the chapter `speed` shows, and write it to one file.

    python bench/speed.py [--rounds 21] [--only PART ...] [--out book/results/speed.json]

A part may be one contest of the peers alone, such as peers/ppo.
All on one thread. Times are those of the processor, which other programs do not slow down much;
only the seconds that compiling takes are read from the clock on the wall.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before the libraries are imported: one thread for all.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import torch
from timing import Work, compare, on_the_stopwatch, spread, take_turns
from torch import nn

from rlbook.agent import Agent, algorithms, torch_for_learning
from rlbook.dqn import MLP
from rlbook.r2d2 import SumTree
from rlbook.replay import ReplayBuffer
from rlbook.run import Run
from rlbook.sac import Critics
from rlbook.sweep import versions, write_result

CONFIGS = {
    "dqn": "cartpole",
    "drqn": "masked_cartpole",
    "r2d2": "masked_cartpole",
    "sac": "pendulum",
    "redq": "pendulum",
    "drqv2": "point_reach",
}
NEVER = 1_000_000
SB3 = "stable-baselines3"


def make_agent(name: str, steps: int = 600, **changes: Any) -> Any:
    """Make an agent at its shipped settings, after `steps` random environment steps."""
    settings = {"eval_every": 0, "learning_starts": steps, **changes}
    agent = algorithms()[name].from_config(CONFIGS[name], **settings)
    agent.learn(steps, progress=False)
    return agent


def updates(agent: Agent, count: int = 1) -> Work:
    """Return `count` updates, each with a batch of its own, as the loop makes them."""

    def run() -> None:
        for _ in range(count):
            agent.update(agent.sample())
            agent.updates += 1

    return run


def training(agent: Agent, steps: int) -> Work:
    """Return the work of training for so many more steps, in one run.

    `learn` called again and again would also measure how it comes back to the episodes under way.
    """
    run = Run(agent, None, progress=False, until=NEVER)

    def go_on() -> None:
        with torch_for_learning(1):
            for _ in range(steps // agent.config.num_envs):
                run.step()

    return go_on


# What an update is made of ------------------------------------------------------------------------

LARGE = {"hidden": (512, 512), "batch_size": 256}
ENOUGH = {"dqn": 2_000, "drqn": 2_000, "r2d2": 2_000, "sac": 300, "redq": 60, "drqv2": 200}


def measure_parts(rounds: int) -> dict[str, Any]:
    """Return the microseconds of each kind of work in training, per update."""
    agents = {name: make_agent(name) for name in CONFIGS}
    agents |= {f"{name}, large": make_agent(name, **LARGE) for name in ("dqn", "sac")}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in agents}
    for _ in range(max(3, rounds // 4)):
        for name, agent in agents.items():
            steps, before = ENOUGH[agent.name], agent.updates
            if "large" in name:
                steps //= 4
            with on_the_stopwatch(agent) as watch:
                training(agent, steps)()
            made = agent.updates - before
            runs[name].append({kind: spent / made for kind, spent in watch.spent.items()})
    found: dict[str, Any] = {}
    for name, agent in agents.items():
        kinds = dict.fromkeys(kind for run in runs[name] for kind in run)
        times = {k: spread([run.get(k, 0.0) for run in runs[name]], 1e6) for k in kinds}
        hidden, batch = list(agent.config.hidden), agent.config.batch_size
        found[name] = {"hidden": hidden, "batch_size": batch, "microseconds": times}
    return found


# Beside Stable-Baselines3 and SBX -----------------------------------------------------------------


def measure_dqn(rounds: int) -> dict[str, Any]:
    """Time training DQN on CartPole at the settings of the RL Zoo."""
    from peers import DQN_EVERY, DQN_STARTS, DQN_UPDATES, LIBRARIES, our_dqn, their_dqn

    steps = 4 * DQN_EVERY
    works: dict[str, Work] = {}
    for name in ("eager", "compiled"):
        ours = our_dqn(name == "compiled")
        ours.learn(2 * DQN_STARTS, progress=False)
        works[name] = training(ours, steps)
    for name, library in LIBRARIES.items():
        theirs = their_dqn(library)
        theirs.learn(2 * DQN_STARTS)
        works[name] = partial(theirs.learn, steps, reset_num_timesteps=False)
    what = f"training, CartPole-v1, [256, 256], batch 64, {DQN_UPDATES} updates a {DQN_EVERY} steps"
    return {"what": what, "unit": "a step", "works": compare(works, rounds // 2 + 1, SB3, steps)}


def measure_sac(rounds: int, hidden: tuple[int, ...], batch: int, whole: bool) -> dict[str, Any]:
    """Time updates of SAC, or training with an update a step."""
    from peers import LIBRARIES, our_sac, their_sac

    count = 200 if whole else 20
    works: dict[str, Work] = {}
    for name in ("eager", "compiled"):
        ours = our_sac(hidden, batch, name == "compiled")
        ours.learn(2 * batch, progress=False)
        works[name] = training(ours, count) if whole else updates(ours, count)
    for name, library in LIBRARIES.items():
        theirs = their_sac(library, hidden, batch)
        theirs.learn(2 * batch)

        def one_by_one(agent: Any = theirs) -> None:
            for _ in range(count):
                agent.train(gradient_steps=1, batch_size=batch)

        train = partial(theirs.learn, count, reset_num_timesteps=False)
        works[name] = train if whole else one_by_one
    sizes = f"{list(hidden)}, batch {batch}"
    if whole:
        what, unit = f"training, Pendulum-v1, {sizes}, an update a step", "a step"
        rounds = rounds // 2 + 1
    else:
        what, unit = f"one update, {sizes}", "an update"
        works["sbx, 20 at once"] = partial(theirs.train, gradient_steps=count, batch_size=batch)
    return {"what": what, "unit": unit, "works": compare(works, rounds, SB3, count)}


def measure_ppo(rounds: int) -> dict[str, Any]:
    """Time training PPO on CartPole at the settings of the RL Zoo."""
    from peers import LIBRARIES, PPO_ENVS, PPO_EPOCHS, PPO_STEPS, our_ppo, their_ppo

    rollout = PPO_ENVS * PPO_STEPS
    steps = 8 * rollout
    works: dict[str, Work] = {}
    for name in ("eager", "compiled"):
        ours = our_ppo(name == "compiled")
        ours.learn(2 * rollout, progress=False)
        works[name] = training(ours, steps)
    for name, library in LIBRARIES.items():
        theirs = their_ppo(library)
        theirs.learn(2 * rollout)
        works[name] = partial(theirs.learn, steps, reset_num_timesteps=False)
    often = f"{PPO_EPOCHS} updates a {rollout} steps"
    what = f"training, CartPole-v1, [64, 64], batch {rollout}, {often}"
    return {"what": what, "unit": "a step", "works": compare(works, rounds // 2 + 1, SB3, steps)}


CONTESTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dqn": measure_dqn,
    "sac": partial(measure_sac, hidden=(256, 256), batch=256, whole=False),
    "sac, as shipped": partial(measure_sac, hidden=(64, 64), batch=128, whole=False),
    "sac, as shipped, training": partial(measure_sac, hidden=(64, 64), batch=128, whole=True),
    "ppo": measure_ppo,
}


def measure_peers(rounds: int) -> dict[str, Any]:
    """Time DQN, SAC and PPO beside Stable-Baselines3 and SBX, at the same settings."""
    return {name: measure(rounds) for name, measure in CONTESTS.items()}


# Beside bare passes -------------------------------------------------------------------------------


def bare_recurrent(agent: Any) -> Work:
    """Return a pass through both recurrent networks and one backward pass."""
    batch, burn_in = agent.sample(), getattr(agent.config, "burn_in", 0)
    obs, start = batch.obs[burn_in:], batch.episode_start[burn_in:]

    def state(network: nn.Module) -> Any:
        return agent.state_after_burn_in(network, batch) if burn_in else agent.chunk_state(batch)

    def run() -> None:
        agent.optimizer.zero_grad()
        with torch.no_grad():
            agent.target_network(obs, state(agent.target_network), start)
        agent.q_network(obs, state(agent.q_network), start)[0].sum().backward()

    return run


def bare_ensemble(agent: Any) -> Work:
    """Return a pass through actor, chosen target critics and critics, and one backward pass."""
    batch, chosen = agent.sample(), agent.choose_critics()

    def run() -> None:
        agent.critic_optimizer.zero_grad()
        with torch.no_grad():
            next_action, _ = agent.actor(batch.next_obs)
            agent.target_critics(batch.next_obs, next_action, chosen)
        agent.critics(batch.obs, batch.action).sum().backward()

    return run


def bare_pixels(agent: Any) -> Work:
    """Return the passes of encoder, critics and actor, and their backward passes."""
    batch = agent.sample()

    def run() -> None:
        agent.critic_optimizer.zero_grad()
        with torch.no_grad():
            encoded = agent.encoder(batch.next_obs)
            agent.target_critic(encoded, agent.actor(encoded))
        agent.critic(agent.encoder(batch.obs), batch.action).sum().backward()
        agent.actor_optimizer.zero_grad()
        encoded = agent.encoder(batch.obs).detach()
        agent.critic(encoded, agent.actor(encoded)).sum().backward()

    return run


def measure_bare(rounds: int) -> dict[str, Any]:
    """Time one update beside the bare forward and backward passes of its networks."""
    paper = {"hidden": (256, 256), "batch_size": 256, "num_critics": 10}
    cases: dict[str, tuple[Any, Callable[[Any], Work], str]] = {
        "drqn": (make_agent("drqn"), bare_recurrent, "16 chunks of 32 steps, 64 LSTM units"),
        "r2d2": (make_agent("r2d2"), bare_recurrent, "16 chunks of 8 + 32 steps, 64 LSTM units"),
        "redq": (
            make_agent("redq", policy_delay=NEVER, **paper),
            bare_ensemble,
            "10 critics of [256, 256], batch 256, no update of the actor",
        ),
        "drqv2": (
            make_agent("drqv2", policy_delay=1),
            bare_pixels,
            "64 images of 24 × 24 pixels, actor in every update",
        ),
    }
    return {
        name: {
            "what": what,
            "works": compare(
                {"update": updates(agent), "bare passes": bare(agent)}, rounds, "update"
            ),
        }
        for name, (agent, bare, what) in cases.items()
    }


# Compiling ----------------------------------------------------------------------------------------


def compile_seconds(name: str, **changes: Any) -> tuple[Any, float]:
    """Return a compiled agent and the seconds on the wall that its first updates took longer."""
    agent = make_agent(name, compile=True, **changes)
    update, ends = updates(agent), [time.perf_counter()]
    for _ in range(2):  # three updates that compile, if not in the first, and three that do not
        for _ in range(3):
            update()
        ends.append(time.perf_counter())
    return agent, (ends[1] - ends[0]) - (ends[2] - ends[1])


def count_operations(agent: Agent) -> int:
    """Count the operations of PyTorch that one update starts, those inside others included."""
    update = updates(agent)
    update()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update()
    return sum(event.name.startswith("aten::") for event in profile.events())


@contextmanager
def empty_compiler_cache() -> Iterator[None]:
    """Give the compiler an empty folder for its programs, until the end of the block."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="inductor-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def measure_compile(rounds: int) -> dict[str, Any]:
    """Time updates, eager and compiled, and compiling itself: at first, and from a cache."""
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8))  # import the compiler
    found: dict[str, Any] = {}
    for name in [name for name in CONFIGS if algorithms()[name].compiled]:
        changes = {} if name == "dqn" else {"policy_delay": 1}
        with empty_compiler_cache():  # other parts may have compiled the same
            torch.compiler.reset()
            _, first = compile_seconds(name, **changes)
            torch.compiler.reset()  # forgets the programs in memory; those on the disk stay
            compiled, again = compile_seconds(name, **changes)
        eager = make_agent(name, **changes)
        works = {"eager": updates(eager), "compiled": updates(compiled)}
        found[name] = {
            "operations": [count_operations(agent) for agent in (eager, compiled)],
            "first_seconds": float(f"{first:.3g}"),
            "again_seconds": float(f"{again:.3g}"),
            "works": compare(works, rounds, "eager"),
        }
    return found


def measure_widths(rounds: int) -> dict[str, Any]:
    """Time eager and compiled updates for layers of several widths, batch 128."""
    found: dict[str, Any] = {}
    for name in ("dqn", "sac"):
        found[name] = {}
        for units in (16, 32, 64, 128, 256, 512, 1024):
            torch.compiler.reset()
            sizes = {"hidden": (units, units), "batch_size": 128}
            works = {
                kind: updates(make_agent(name, compile=kind == "compiled", **sizes))
                for kind in ("eager", "compiled")
            }
            found[name][str(units)] = compare(works, rounds, "eager")
    return found


# Few large operations -----------------------------------------------------------------------------


def critics_works(units: int, batch: int = 256, count: int = 10) -> dict[str, Work]:
    """Return the passes of ten critics, there and back: one after another, and batched."""
    obs, action = torch.rand(batch, 11), torch.rand(batch, 3)
    x = torch.cat([obs, action], dim=1)
    networks = nn.ModuleList(MLP((14, units, units, 1)) for _ in range(count))
    critics = Critics(11, 3, (units, units), count)

    def loop() -> None:
        networks.zero_grad()
        torch.cat([network(x) for network in networks], dim=1).sum().backward()

    def batched() -> None:
        critics.zero_grad()
        critics(obs, action).sum().backward()

    return {"loop": loop, "batched": batched}


def adam_work(**options: bool) -> Work:
    """Return a step of Adam for a Q-network of two layers of 64 units."""
    network = MLP((4, 64, 64, 2))
    for parameter in network.parameters():
        parameter.grad = torch.rand_like(parameter)
    return torch.optim.Adam(network.parameters(), lr=1e-3, **options).step


def measure_batching(rounds: int) -> dict[str, Any]:
    """Time the same work in many small operations and in a few large ones."""
    widths = (16, 32, 64, 128, 256, 512)
    adam = {
        "one tensor at a time": adam_work(foreach=False),
        "foreach": adam_work(foreach=True),
        "fused": adam_work(fused=True),
    }
    return {
        "critics": {str(units): compare(critics_works(units), rounds, "loop") for units in widths},
        "adam": compare(adam, rounds, "one tensor at a time"),
    }


# How cost grows -----------------------------------------------------------------------------------


def sampling_work(capacity: int) -> Work:
    """Return sampling 64 transitions from a full buffer."""
    dtype = make_agent("dqn").replay.storage.dtype
    replay = ReplayBuffer(capacity, dtype, seed=0)
    replay.storage["reward"] = 1.0  # touch all of its memory
    replay.size = capacity
    return partial(replay.sample, 64)


def priorities_work(capacity: int) -> Work:
    """Return sampling 64 leaves of a sum tree by priority, and giving them new ones."""
    tree, generator = SumTree(capacity), np.random.default_rng(0)
    tree.set(np.arange(capacity), generator.random(capacity))

    def run() -> None:
        leaves = tree.find(generator.random(64) * tree.total)
        tree.set(leaves, generator.random(64))

    return run


def collecting_work(num_envs: int) -> Work:
    """Return 120 environment steps of DQN without an update."""
    agent = make_agent("dqn", num_envs=num_envs)
    agent.config = agent.config.replace(learning_starts=NEVER)
    return training(agent, 120)


def measure_growth(rounds: int) -> dict[str, Any]:
    """Time what grows with a size: how much longer does ten times as much take?"""
    capacities, still = (10_000, 100_000, 1_000_000), {"policy_delay": NEVER}
    families: dict[str, tuple[str, str, dict[int, Work]]] = {
        "replay": (
            "sampling 64 transitions", "transitions stored",
            {n: sampling_work(n) for n in capacities},
        ),
        "priorities": (
            "64 samples and new priorities", "priorities stored",
            {n: priorities_work(n) for n in capacities},
        ),
        "environments": (
            "120 steps of DQN in CartPole", "environments",
            {n: collecting_work(n) for n in (1, 2, 4, 8)},
        ),
        "critics": (
            "REDQ's critics, [64, 64], batch 128", "critics",
            {n: updates(make_agent("redq", num_critics=n, **still)) for n in (2, 5, 10, 20)},
        ),
        "chunk": (
            "DRQN, 16 chunks, 64 LSTM units", "steps of a chunk",
            {n: updates(make_agent("drqn", 2_400, chunk_length=n)) for n in (16, 32, 64, 128)},
        ),
        "image": (
            "DrQ-v2, 64 images", "pixels of an image",
            {
                n * n: updates(make_agent("drqv2", env_kwargs={"size": n}, policy_delay=1))
                for n in (24, 36, 48, 64)
            },
        ),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for family, (what, unit, works) in families.items():
        times = take_turns({str(size): work for size, work in works.items()}, rounds)
        milliseconds = {size: spread(values, 1e3) for size, values in times.items()}
        found[family] = {"what": what, "unit": unit, "ms": milliseconds}
    return found


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "peers": measure_peers,
    "parts": measure_parts,
    "bare": measure_bare,
    "compile": measure_compile,
    "widths": measure_widths,
    "batching": measure_batching,
    "growth": measure_growth,
}
ONE_BY_ONE = PARTS | {f"peers/{name}": measure for name, measure in CONTESTS.items()}


PEERS = ("stable-baselines3", "sbx-rl", "jax")


def processor_name() -> str:
    """Return what the processor calls itself."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Measure all parts and write the file; with --only, the other parts stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="turns of each contestant")
    parser.add_argument(
        "--only", nargs="+", choices=ONE_BY_ONE, default=list(PARTS), metavar="PART"
    )
    parser.add_argument("--out", type=Path, default=Path("book/results/speed.json"))
    options = parser.parse_args()
    partly = len(options.only) < len(PARTS) and options.out.exists()
    only = f" --only {' '.join(options.only)}" if len(options.only) < len(PARTS) else ""
    made = {
        "command": f"python bench/speed.py --rounds {options.rounds}{only}",
        "versions": versions() | {name: version(name) for name in PEERS},
        "created": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": processor_name()},
    }
    result = json.loads(options.out.read_text()) if partly else made
    with torch_for_learning(1), empty_compiler_cache():
        for name in options.only:
            began = time.perf_counter()
            found, (part, _, contest) = ONE_BY_ONE[name](options.rounds), name.partition("/")
            result[part] = {**result.get(part, {}), contest: found} if contest else found
            if partly:
                result.setdefault("made_later", {})[name] = made
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            write_result(options.out, result)


if __name__ == "__main__":
    main()
