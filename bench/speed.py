"""Measure what the chapter `speed` shows, and write it to one file.

    python bench/speed.py [--out book/results/speed.json] [--rounds 27] [--only PART ...]

Times are those of the processor, on one thread; where the time goes, two threads, and compiling
itself are measured by the clock on the wall. Contestants take turns.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compiling is timed as the first time

import numpy as np
import torch
from clock import measure_step, price_of_looking
from products import (
    acting_products,
    all_of,
    dqn_products,
    drqv2_products,
    lay_out,
    multiplications,
    recurrent_products,
    redq_products,
    sac_products,
    sb3_sac_products,
)
from timing import Work, compare, fill_randomly, spread, take_turns
from torch import nn

import rlbook
from rlbook.agent import Agent, algorithms, torch_for_learning
from rlbook.dqn import MLP, Adam, flatten_parameters, td_loss, td_slope
from rlbook.ensemble import Ensemble
from rlbook.envs import make_vector_env
from rlbook.r2d2 import SumTree
from rlbook.redq import REDQ
from rlbook.replay import ReplayBuffer
from rlbook.settings import make_config, read_settings
from rlbook.sweep import versions, write_result

CONFIGS = {
    "dqn": "cartpole",
    "drqn": "masked_cartpole",
    "r2d2": "masked_cartpole",
    "sac": "pendulum",
    "redq": "pendulum",
    "drqv2": "point_reach",
}
STEPS = {"dqn": 6_000, "drqn": 3_000, "r2d2": 3_000, "sac": 600, "redq": 300, "drqv2": 300}
NEVER = 1_000_000  # a policy delay that no benchmark reaches


def shipped_settings(name: str) -> dict[str, Any]:
    """Read the settings that an algorithm is shipped with."""
    path = Path(rlbook.__path__[0]) / "configs" / name / f"{CONFIGS[name]}.yaml"
    return {k: v for k, v in read_settings(path).items() if k != "algo"}


def make_agent(name: str, **changes: Any) -> Agent:
    """Make an agent at its shipped settings, without evaluations and files."""
    agent_class = algorithms()[name]
    quiet = {"eval_every": 0, "warmup_steps": 300}
    known = {field.name for field in dataclasses.fields(agent_class.config_class)}
    settings = {**shipped_settings(name), **quiet, **changes}
    wanted = {k: v for k, v in settings.items() if k in known}
    return agent_class(config=make_config(agent_class.config_class, wanted))


def with_experience(name: str, steps: int = 600, **changes: Any) -> Agent:
    """Make an agent whose buffer holds enough to learn from."""
    agent = make_agent(name, **{"warmup_steps": steps, **changes})
    agent.learn(steps, progress=False)
    return agent


def updates(agent: Any, count: int = 1) -> Work:
    """Return a function that makes updates as the loop does."""

    def run() -> None:
        for batch in agent.batches(count):
            agent.update(batch)
            agent.updates += 1

    return run


# Where the time goes ------------------------------------------------------------------------------


def measure_steps(rounds: int) -> dict[str, Any]:
    """Return the microseconds of each kind of work per environment step, for each algorithm."""
    found: dict[str, Any] = {}
    price, count = price_of_looking(), max(3, rounds // 4)
    for name in CONFIGS:
        agent = with_experience(name)
        runs = [measure_step(agent, STEPS[name], price) for _ in range(count)]
        kinds = dict.fromkeys(kind for run in runs for kind in run)
        times = np.array([[run.get(kind, 0.0) for kind in kinds] for run in runs])
        shares = times / times.sum(axis=1, keepdims=True)  # a slow run is slow in all its parts
        found[name] = {
            "config": CONFIGS[name],
            "env_id": agent.config.env_id,
            "num_envs": agent.config.num_envs,
            "runs": count,
            "steps": STEPS[name],
            "microseconds": {k: spread(column) for k, column in zip(kinds, times.T, strict=True)},
            "shares": {k: spread(column) for k, column in zip(kinds, shares.T, strict=True)},
        }
    return found


# Beside Stable-Baselines3 -------------------------------------------------------------------------

PENDULUM = 3, 1  # numbers seen, and moved
UPDATES = 10  # of SAC, in one turn of each contestant
STRETCH = 200  # steps of training SAC, in one turn: enough for the set-up not to count


def measure_dqn(rounds: int) -> dict[str, Any]:
    """Time training DQN on CartPole beside Stable-Baselines3, at the RL Zoo's settings."""
    import dqn as bench

    ours, theirs = bench.make_rlbook(), bench.make_sb3()
    ours.learn(2 * bench.WARMUP, progress=False)
    theirs.learn(2 * bench.WARMUP)
    steps, count = 8 * bench.ROUND, 8 * bench.UPDATES
    widths, together = (4, *bench.HIDDEN, 2), 16
    learning = dqn_products(widths, bench.BATCH, together) * (count // together)
    works: dict[str, Work] = {
        "rlbook": lambda: ours.learn(steps, progress=False),
        "stable-baselines3": lambda: theirs.learn(steps, reset_num_timesteps=False),
        "matrix products": all_of(learning + acting_products(widths) * steps),
    }
    what = f"training, CartPole-v1, {list(bench.HIDDEN)} units, batch {bench.BATCH}"
    unit = f"ms for {steps:,} steps and {count:,} updates"
    return {"what": what, "unit": unit, **compare(works, max(3, rounds // 3), calls=1)}


def measure_sac_training(rounds: int, **sizes: Any) -> dict[str, Any]:
    """Time training SAC on Pendulum beside Stable-Baselines3: one step, one update."""
    import sac as bench

    hidden, batch = tuple(sizes.get("hidden", bench.HIDDEN)), sizes.get("batch_size", bench.BATCH)
    sizes = {**sizes, "hidden": hidden, "batch_size": batch}
    ours, theirs = bench.make_rlbook(**sizes), bench.make_sb3(**sizes)
    inputs, actions = PENDULUM
    acting = acting_products((inputs, *hidden, 2 * actions))
    works: dict[str, Work] = {
        "rlbook": lambda: ours.learn(STRETCH, progress=False),
        "stable-baselines3": lambda: theirs.learn(STRETCH, reset_num_timesteps=False),
        "matrix products": all_of(sac_products(*PENDULUM, hidden, batch) + acting, STRETCH),
    }
    what = f"training, Pendulum-v1, {list(hidden)} units, batch {batch}"
    measured = compare(works, max(3, rounds // 3), per=STRETCH, calls=1)
    return {"what": what, "unit": "ms for a step and an update", **measured}


def measure_sac_update(
    rounds: int, hidden: tuple[int, ...] = (256, 256), threads: int = 1
) -> dict[str, Any]:
    """Time one update of SAC beside Stable-Baselines3, on random transitions of Pendulum's size."""
    import sac as bench

    works = bench.update_works(bench.make_rlbook(hidden), bench.make_sb3(hidden), UPDATES)
    works["matrix products"] = all_of(sac_products(*PENDULUM, hidden, bench.BATCH), UPDATES)
    torch.set_num_threads(threads)
    measured = compare(works, rounds, per=UPDATES, calls=1, wall=threads > 1)
    torch.set_num_threads(1)
    what = f"one update, {list(hidden)} units, batch {bench.BATCH}"
    what += f", {threads} threads, by the clock on the wall" * (threads > 1)
    return {"what": what, "unit": "ms for an update", **measured}


def measure_peers(rounds: int) -> dict[str, Any]:
    """Time DQN and SAC beside Stable-Baselines3, at the same settings."""
    import stable_baselines3

    shipped = shipped_settings("sac")
    sizes = {name: shipped[name] for name in ("hidden", "batch_size", "lr", "tau")}
    return {
        "stable-baselines3": stable_baselines3.__version__,
        "dqn": measure_dqn(rounds),
        "sac, as shipped": measure_sac_training(rounds, **sizes),
        "sac": measure_sac_update(rounds),
        "sac, two threads": measure_sac_update(rounds, threads=2),
        "sac, training": measure_sac_training(rounds),
    }


def measure_widths(rounds: int) -> dict[str, Any]:
    """Time one update of SAC beside Stable-Baselines3 for layers of several widths."""
    found: dict[str, Any] = {}
    for units in (32, 64, 128, 256, 512):
        sizes = *PENDULUM, (units, units), 256
        counts = {
            "rlbook": multiplications(sac_products(*sizes)),
            "stable-baselines3": multiplications(sb3_sac_products(*sizes)),
        }
        measured = measure_sac_update(rounds, hidden=(units, units))
        found[str(units)] = {"multiplications": counts, **measured}
    return found


# Beside bare passes -------------------------------------------------------------------------------


def bare_recurrent(agent: Any) -> Work:
    """Return the passes of a recurrent update: burn-in, both networks forward, and one back."""
    batch = agent.sample()
    start, burn_in = agent.start(batch), getattr(agent.config, "burn_in", 0)
    warm, obs = batch.obs[:burn_in], batch.obs[burn_in:]

    def memory(network: Any) -> Any:
        return network.unroll(warm, start, None)[1] if burn_in else start

    @torch.no_grad()  # as in the update; the network turns it on for its LSTM
    def run() -> None:
        q, trace = agent.online.trace(obs, memory(agent.online), None)
        agent.target.q_values_sequence(obs, memory(agent.target), None)
        agent.online.backward(trace, torch.ones_like(q))

    return run


def bare_ensemble(agent: REDQ) -> Work:
    """Return the passes of an update of all critics, from inputs that lie ready."""
    batch, critics = agent.sample(), agent.model.critics
    x, chosen = torch.cat([batch.obs, batch.action], dim=1), agent.choose_critics()

    def run() -> None:
        agent.model.actor.values(batch.next_obs)
        agent.target.values(x, chosen=chosen)
        critics.learn(torch.ones_like, x)

    return run


def bare_convolutions(agent: Any) -> Work:
    """Return the encoder's passes over both images of a batch, and its way back for one."""
    batch, encoder = agent.sample(), agent.model.encoder

    def run() -> None:
        encoder.zero_grad()
        with torch.no_grad():
            encoder(batch.next_obs)
        encoded = encoder(batch.obs)
        encoded.backward(torch.ones_like(encoded))

    return run


def measure_recurrent(name: str, rounds: int) -> dict[str, Any]:
    """Time an update of DRQN or R2D2 against its bare passes and products."""
    agent: Any = with_experience(name)
    works = {
        "update": updates(agent),
        "forward and backward": bare_recurrent(agent),
        "matrix products": all_of(recurrent_products(agent)),
    }
    config = agent.config
    what = f"{config.batch_size} chunks of {config.chunk_length} steps, {config.units} units"
    return {"what": what, **compare(works, rounds)}


def measure_ensemble(rounds: int) -> dict[str, Any]:
    """Time an update of ten of REDQ's critics against its bare passes and products."""
    sizes: dict[str, Any] = {"hidden": [256, 256], "batch_size": 256}
    sizes |= {"num_critics": 10, "subset_size": 2}
    agent: Any = with_experience("redq", policy_delay=NEVER, **sizes)
    inputs, model = agent.observation_space.shape[0], make_agent("redq", **sizes).model
    works = {
        "update": updates(agent),
        "forward and backward": bare_ensemble(agent),
        "matrix products": all_of(redq_products(model, inputs, 256, 2, policy=False)),
    }
    what = "10 critics of [256, 256] units, batch 256, no policy"
    return {"what": what, **compare(works, rounds)}


def measure_pixels(rounds: int) -> dict[str, Any]:
    """Time an update of DrQ-v2 against its bare convolutions and its products."""
    agent: Any = with_experience("drqv2")
    delay = agent.config.policy_delay  # only one of so many updates teaches the actor
    works = {
        "update": updates(agent, delay),
        "bare convolutions": bare_convolutions(agent),
        "matrix products": all_of(drqv2_products(agent)),
    }
    per = {"update": delay, "bare convolutions": 1, "matrix products": delay}
    shape = agent.observation_space.shape
    what = f"{agent.config.batch_size} images of {shape[1]} x {shape[2]} pixels"
    return {"what": what, **compare(works, rounds, per=per)}


def measure_bare(rounds: int) -> dict[str, Any]:
    """Time whole updates against bare passes and against their matrix products alone."""
    return {
        "drqn": measure_recurrent("drqn", rounds),
        "r2d2": measure_recurrent("r2d2", rounds),
        "redq": measure_ensemble(rounds),
        "drqv2": measure_pixels(rounds),
    }


# One change at a time -----------------------------------------------------------------------------


def optimiser_work(flat: bool, fused: bool, ours: bool = False) -> Work:
    """Return a step of Adam for a Q-network of two layers of 256 units."""
    network = MLP((4, 256, 256, 2))
    parts = [flatten_parameters(network)] if flat else list(network.parameters())
    for part in parts:
        part.grad = torch.rand_like(part)
    if ours:
        return Adam(parts, lr=1e-3).step
    return torch.optim.Adam(parts, lr=1e-3, fused=fused, foreach=False).step


def gradient_works(hidden: tuple[int, ...], batch: int) -> dict[str, Work]:
    """Return the gradient of DQN's loss by autograd and by hand."""
    torch.manual_seed(0)
    network = MLP((4, *hidden, 2))
    flat = flatten_parameters(network)
    x, action, target = torch.rand(batch, 4), torch.randint(2, (batch,)), torch.rand(batch)
    plain = nn.Sequential(*[m for la in network.layers for m in (la, nn.ReLU())][:-1])

    def autograd() -> None:
        flat.grad.zero_()  # type: ignore[union-attr]
        td_loss(plain(x), action, target)[0].backward()

    def by_hand() -> None:
        with torch.no_grad():
            q, inputs = network.trace(x)
            network.backward(inputs, td_slope(q, action, target)[0])

    return {"autograd": autograd, "by hand": by_hand}


def critics_work(ensembles: list[Ensemble], batch: int) -> Work:
    """Return the gradients of critics, all in one ensemble or one in each, and a step of Adam."""
    x = torch.rand(batch, 14)
    optimizer = Adam([part for each in ensembles for part in each.parameters()], lr=1e-3)

    def run() -> None:
        for each in ensembles:
            each.learn(lambda out: torch.full_like(out, 1 / batch), x)
        optimizer.step()

    return run


def ensemble_works(units: int, batch: int) -> dict[str, Work]:
    """Return the update of ten critics but for its loss: as ten ensembles of one, and as one."""
    widths = (14, units, units, 1)
    return {
        "ten ensembles of one": critics_work([Ensemble(widths, 1) for _ in range(10)], batch),
        "one of ten critics": critics_work([Ensemble(widths, 10)], batch),
    }


def order_works(units: int, batch: int) -> dict[str, Work]:
    """Return the same with one ensemble: in batched products, and one critic after the other."""
    widths = (14, units, units, 1)
    ways = {"batched products": False, "one after the other": True}
    return {
        way: critics_work([lay_out(Ensemble(widths, 10), apart)], batch)
        for way, apart in ways.items()
    }


def gather_works(capacity: int = 100_000, batch: int = 256) -> dict[str, Work]:
    """Return drawing a batch from arrays, one a field, and from rows that hold all fields."""
    agent: Any = make_agent("sac", buffer_size=capacity)
    rows, rng = fill_randomly(agent.replay.rows), np.random.default_rng(0)
    columns = {name: rows[name].copy() for name in rows.dtype.names}

    def fields() -> None:
        places = rng.integers(capacity, size=batch)
        for column in columns.values():
            torch.from_numpy(column.take(places, axis=0))

    def once() -> None:
        places = rng.integers(capacity, size=batch)
        found = rows.take(places, axis=0)
        for name in rows.dtype.names:
            torch.from_numpy(found[name])

    return {"an array a field": fields, "one row a transition": once}


def place_works() -> dict[str, Work]:
    """Return drawing the batches of four updates one by one, and at once into one place."""
    agent: Any = with_experience("dqn", buffer_size=50_000)

    def one_by_one() -> None:
        for _ in range(4):
            agent.sample()

    return {"one by one": one_by_one, "four in place": lambda: agent.drawn.draw(agent.replay, 4)}


def stretch_works() -> dict[str, Work]:
    """Return sixteen updates of DQN whose targets are valued one by one, and at once."""
    agent: Any = with_experience("dqn", target_every=16, hidden=[256, 256], double=False)

    def one_by_one() -> None:
        for batch in agent.drawn.draw(agent.replay, 16):
            agent.update(batch)

    def at_once() -> None:
        agent.updates = 0  # a stretch begins
        for batch in agent.batches(16):
            agent.update(batch)

    return {"one by one": one_by_one, "sixteen at once": at_once}


def collect_work(num_envs: int, steps: int = 64) -> Work:
    """Return the acting and stepping of some environment steps, in so many environments."""
    agent: Any = make_agent("dqn", num_envs=num_envs)
    envs = make_vector_env(agent.config.env_id, num_envs, agent.config.env_kwargs)
    state = {"obs": envs.reset(seed=0)[0], "start": np.zeros(num_envs, dtype=bool)}

    def run() -> None:
        for _ in range(steps // num_envs):
            action, _ = agent.act(state["obs"], None, state["start"], explore=True)
            state["obs"] = envs.step(action)[0]

    return run


def measure_changes(rounds: int) -> dict[str, Any]:
    """Time each change alone: first what stood there before, then what stands there now."""
    pairs: dict[str, dict[str, Work]] = {
        "fused Adam": {
            "plain": optimiser_work(flat=False, fused=False),
            "fused": optimiser_work(flat=False, fused=True),
        },
        "weights in one tensor": {
            "six tensors": optimiser_work(flat=False, fused=True),
            "one": optimiser_work(flat=True, fused=True),
        },
        "Adam in one call": {
            "PyTorch's": optimiser_work(flat=True, fused=True),
            "ours": optimiser_work(flat=True, fused=True, ours=True),
        },
        "gradient by hand": gradient_works((256, 256), 64),
        "values of a stretch": stretch_works(),
        "one ensemble, 32 units, batch 64": ensemble_works(32, 64),
        "one ensemble, 256 units, batch 256": ensemble_works(256, 256),
        "critic by critic, 256 units, batch 256": order_works(256, 256),
        "gather once": gather_works(),
        "batches in place": place_works(),
        "vector environments": {
            "1 environment": collect_work(1),
            "8 environments": collect_work(8),
        },
    }
    return {what: compare(works, rounds) for what, works in pairs.items()}


# Threads and compiling ----------------------------------------------------------------------------


def measure_threads(rounds: int) -> dict[str, Any]:
    """Time one and two threads by the clock on the wall: on a busy machine this says nothing."""
    sizes = {
        "1 network of [64, 64] units, batch 64": ((4, 64, 64, 1), 1, 64),
        "1 network of [256, 256] units, batch 64": ((4, 256, 256, 1), 1, 64),
        "10 networks of [256, 256] units, batch 256": ((14, 256, 256, 1), 10, 256),
    }
    found: dict[str, Any] = {}
    for name, (widths, members, batch) in sizes.items():
        ensemble, x = Ensemble(widths, members), torch.rand(batch, widths[0])

        def work(ensemble: Ensemble = ensemble, x: torch.Tensor = x) -> None:
            ensemble.learn(torch.ones_like, x)

        def switch(threads: str, work: Work = work) -> None:
            torch.set_num_threads(int(threads[0]))
            work()  # threads wake up

        works: dict[str, Work] = dict.fromkeys(("1 thread", "2 threads"), work)
        found[name] = compare(works, rounds, wall=True, before=switch)
    torch.set_num_threads(1)
    return found


def compiled_pair(name: str) -> tuple[Agent, Agent, float]:
    """Return an agent, the same compiled, and the seconds on the wall that compiling took."""
    began = time.perf_counter()
    plain = with_experience(name)
    between = time.perf_counter()
    compiled = with_experience(name, compile=True)  # acting compiles, and so do updates
    for batch in [plain.sample() for _ in range(8)]:
        compiled.update(batch)
        compiled.updates += 1
    return plain, compiled, time.perf_counter() - between - (between - began)


def measure_compile(rounds: int) -> dict[str, Any]:
    """Time updates with and without the setting `compile`, and what compiling costs."""
    found: dict[str, Any] = {}
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8))  # who compiles first imports the compiler
    for name in CONFIGS:
        torch.compiler.reset()  # or one algorithm would find what another has compiled
        plain, compiled, extra = compiled_pair(name)
        count = getattr(plain.config, "policy_delay", 1)  # one of so many teaches the policy, too
        works = {"plain": updates(plain, count), "compiled": updates(compiled, count)}
        found[name] = {
            "config": CONFIGS[name],
            "functions": list(plain.compiled),
            "compile_seconds": float(f"{extra:.3g}"),
            **compare(works, rounds, per=count),
        }
    return found


# How cost grows -----------------------------------------------------------------------------------


def filled_replay(capacity: int) -> ReplayBuffer:
    """Return a full buffer of DQN's rows."""
    agent: Any = make_agent("dqn", buffer_size=10_000)
    replay = ReplayBuffer(capacity, agent.replay.rows.dtype, seed=0)
    replay.rows["reward"] = 1.0  # touch all pages
    replay.size = capacity
    return replay


def priority_work(capacity: int, batch: int = 64) -> Work:
    """Return drawing a batch by priority and giving it new priorities."""
    tree, rng = SumTree(capacity), np.random.default_rng(0)
    tree.set(np.arange(capacity), rng.random(capacity))

    def run() -> None:
        found = tree.find(rng.random(batch) * tree.total)
        tree.set(found, rng.random(batch))

    return run


def grow(rounds: int, what: str, unit: str, works: dict[int, Work], per: int = 1) -> dict[str, Any]:
    """Time the same for several sizes."""
    times = take_turns({str(size): work for size, work in works.items()}, rounds)
    found = {size: spread(values, 1e3 / per) for size, values in times.items()}
    return {"what": what, "unit": unit, "turns": rounds, "ms": found}


def measure_growth(rounds: int) -> dict[str, Any]:
    """Time what grows with a size: how much longer does ten times as much take?"""
    sizes = (10_000, 100_000, 1_000_000)
    draws: dict[int, Work] = {n: partial(filled_replay(n).sample, 64) for n in sizes}
    priorities = {n: priority_work(n) for n in sizes}
    redq: dict[int, Any] = {
        n: with_experience("redq", num_critics=n, policy_delay=NEVER) for n in (2, 5, 10, 20)
    }
    drqn: dict[int, Any] = {
        n: with_experience("drqn", steps=2_000, chunk_length=n, n_step=5) for n in (8, 16, 32, 64)
    }
    pixels: dict[int, Any] = {
        n * n: with_experience("drqv2", env_kwargs={"size": n}) for n in (24, 36, 48, 64)
    }
    ensemble, chunks, images = redq[2].config, drqn[8].config, pixels[24 * 24].config
    critics = f"REDQ's critics, {list(ensemble.hidden)} units, batch {ensemble.batch_size}"
    recurrent = f"DRQN, {chunks.batch_size} chunks, {chunks.units} units"
    delay = images.policy_delay
    return {
        "replay": grow(rounds, "drawing 64 transitions", "transitions stored", draws),
        "priorities": grow(rounds, "64 draws and new priorities", "leaves of the tree", priorities),
        "ensemble": grow(rounds, critics, "critics", {n: updates(a) for n, a in redq.items()}),
        "chunk": grow(rounds, recurrent, "steps", {n: updates(a) for n, a in drqn.items()}),
        "image": grow(
            rounds, f"DrQ-v2, batch {images.batch_size}", "pixels of an image",
            {n: updates(a, delay) for n, a in pixels.items()}, per=delay,
        ),
    }  # fmt: skip


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "steps": measure_steps,
    "peers": measure_peers,
    "widths": measure_widths,
    "bare": measure_bare,
    "changes": measure_changes,
    "compile": measure_compile,
    "growth": measure_growth,
    "threads": measure_threads,
}


def processor_name() -> str:
    """Return what the processor calls itself."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def circumstances(rounds: int, parts: list[str]) -> dict[str, Any]:
    """Say with what, when and where a measurement is made."""
    only = f" --only {' '.join(parts)}" if len(parts) < len(PARTS) else ""
    return {
        "command": f"python bench/speed.py --rounds {rounds}{only}",
        "rounds": rounds,
        "versions": versions(),
        "created": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": processor_name()},
    }


def main() -> None:
    """Measure all parts, or some, and write the file; parts that are not measured stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("book/results/speed.json"))
    parser.add_argument("--rounds", type=int, default=27, help="turns of each contestant")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    made = circumstances(options.rounds, options.only)
    later = options.out.exists() and len(options.only) < len(PARTS)
    result = json.loads(options.out.read_text()) if later else dict(made)
    with torch_for_learning(1):
        for name in options.only:
            began = time.perf_counter()
            result[name] = PARTS[name](options.rounds)
            if later:  # this part alone was made now
                result.setdefault("made_later", {})[name] = made
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            write_result(options.out, result)


if __name__ == "__main__":
    main()
