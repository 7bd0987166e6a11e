"""Measure what the chapter `speed` shows, and write it to one file.

    python bench/speed.py [--out book/results/speed.json] [--rounds 27] [--only PART ...]

Times are those of the processor, on one thread; where the time goes, and threads, are measured by
the clock on the wall. Contestants take turns.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compiling is timed as the first time

import numpy as np
import torch
from timing import Work, compare, spread, take_turns
from torch import nn

import rlbook.dqn
import rlbook.drqn
import rlbook.ensemble
import rlbook.run
import rlbook.sac
from rlbook.agent import Agent, algorithms, torch_for_learning
from rlbook.dqn import MLP, Adam, flatten_parameters, td_loss, td_slope
from rlbook.drqn import LSTMQNetwork
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
STEPS = {"dqn": 8_000, "drqn": 4_000, "r2d2": 4_000, "sac": 600, "redq": 60, "drqv2": 300}


def make_agent(name: str, **changes: Any) -> Agent:
    """Make an agent at its shipped settings, without evaluations and files."""
    agent_class = algorithms()[name]
    path = Path(rlbook.__path__[0]) / "configs" / name / f"{CONFIGS[name]}.yaml"
    settings = {k: v for k, v in read_settings(path).items() if k != "algo"}
    quiet = {"eval_every": 0, "warmup_steps": 300}
    known = {field.name for field in dataclasses.fields(agent_class.config_class)}
    wanted = {k: v for k, v in {**settings, **quiet, **changes}.items() if k in known}
    return agent_class(config=make_config(agent_class.config_class, wanted))


def with_experience(name: str, steps: int = 600, **changes: Any) -> Agent:
    """Make an agent whose buffer holds enough to learn from."""
    agent = make_agent(name, **{"warmup_steps": steps, **changes})
    agent.learn(steps, progress=False)
    return agent


# Where the time goes ------------------------------------------------------------------------------


class Clock:
    """Counts the time of each kind of work; what is inside another is taken out of it."""

    def __init__(self, price: tuple[float, float] = (0.0, 0.0)) -> None:
        self.spent: dict[str, float] = {}
        self.stack, self.undo = ["loop"], list[Callable[[], None]]()
        self.price = price  # seconds that a look at the clock costs the caller, and the called
        self.last = time.perf_counter()

    def switch(self) -> None:
        """Book the time since the last switch."""
        now, label = time.perf_counter(), self.stack[-1]  # no call to the system: the least to pay
        self.spent[label] = self.spent.get(label, 0.0) + now - self.last
        self.last = now

    def timed(self, work: Callable[..., Any], label: str) -> Callable[..., Any]:
        """Return the same function, on the clock; acting and environment count as a whole."""

        def run(*args: Any, **keywords: Any) -> Any:
            caller = self.stack[-1]
            if caller in ("acting", "environment", "target", label):
                return work(*args, **keywords)
            self.switch()
            self.stack.append(label)
            try:
                return work(*args, **keywords)
            finally:
                self.switch()
                self.stack.pop()
                self.spent[caller] -= self.price[0]
                self.spent[label] -= self.price[1]

        return run

    def watch(self, owner: Any, names: str, label: str) -> None:
        """Put functions of an object, a class or a module on the clock, where they exist."""
        for name in names.split():
            if not hasattr(owner, name):
                continue
            own, old = name in vars(owner), getattr(owner, name)
            setattr(owner, name, self.timed(old, label))
            undo = (lambda n=name, o=old: setattr(owner, n, o)) if own else None
            self.undo.append(undo or (lambda n=name: delattr(owner, n)))


def price_of_looking(count: int = 20_000) -> tuple[float, float]:
    """Return the seconds that a call on the clock adds to its caller and to itself."""
    clock = Clock()
    watched = clock.timed(lambda: None, "called")
    for _ in range(count):
        watched()
    clock.switch()
    return clock.spent["loop"] / count, clock.spent["called"] / count


def watch_loop(clock: Clock, agent: Any) -> None:
    """Put what the loop calls on the clock, and what of it is the buffer's."""
    clock.watch(agent, "act", "acting")
    clock.watch(agent, "observe sample draw", "buffer")
    clock.watch(agent, "update valued", "update")
    clock.watch(agent.replay, "update_priorities", "buffer")
    clock.watch(getattr(agent, "drawn", None), "draw", "buffer")


def watch_update(clock: Clock, agent: Any) -> None:
    """Put the parts of an update on the clock."""
    module = sys.modules[type(agent).__module__]
    for owner in {rlbook.dqn, module}:
        clock.watch(owner, "apply_gradients", "optimiser")
        clock.watch(owner, "polyak_update", "target")
    clock.watch(rlbook.ensemble, "forward_pass", "forward")
    clock.watch(rlbook.ensemble, "backward_pass", "backward")
    clock.watch(torch.Tensor, "backward", "backward")
    clock.watch(torch.Tensor, "lerp_", "target")
    clock.watch(agent.optimizer, "step zero_grad", "optimiser")
    clock.watch(rlbook.sac, "critic_slope", "update")  # it is called from within a pass
    parts = [getattr(agent, name, None) for name in ("online", "target", "model")]
    model = parts[2]
    parts += [getattr(model, name, None) for name in ("actor", "critics", "critic", "encoder")]
    for part in parts:
        clock.watch(part, "forward trace q_values_sequence unroll draw values learn run", "forward")
        clock.watch(part, "weight_slopes input_slopes actor_slopes", "backward")
        if isinstance(part, MLP | LSTMQNetwork):
            clock.watch(part, "backward", "backward")


@contextlib.contextmanager
def on_the_clock(agent: Any, price: tuple[float, float], inside: bool) -> Iterator[Clock]:
    """Watch all that an agent and its loop do, or look inside its updates, too."""
    clock = Clock(price)
    watch_loop(clock, agent)
    if inside:
        watch_update(clock, agent)
    made = rlbook.run.make_vector_env

    def make(*args: Any, **keywords: Any) -> Any:
        envs = made(*args, **keywords)
        clock.watch(envs, "step reset", "environment")
        return envs

    rlbook.run.make_vector_env = make
    try:
        yield clock
    finally:
        rlbook.run.make_vector_env = made
        for undo in reversed(clock.undo):
            undo()


def measure_step(agent: Any, steps: int, price: tuple[float, float]) -> dict[str, float]:
    """Return the microseconds of each kind of work per environment step.

    The parts of an update come from a run of their own, and share out what updates take in a run
    that does not look inside: so the looking does not make updates seem longer than they are.
    """
    runs = []
    for inside in (False, True):
        with on_the_clock(agent, price, inside) as clock:
            agent.learn(steps, progress=False)
            clock.switch()
        runs.append({kind: spent / steps * 1e6 for kind, spent in clock.spent.items()})
    whole, looked = runs
    update = whole.pop("update")
    parts = {kind: spent for kind, spent in looked.items() if kind not in whole}
    parts["loss"] = parts.pop("update")  # what is left of an update
    total = sum(parts.values())
    return whole | {kind: update * spent / total for kind, spent in parts.items()}


def measure_steps(rounds: int) -> dict[str, Any]:
    """Return the microseconds of each kind of work per environment step, for each algorithm."""
    found: dict[str, Any] = {}
    price = price_of_looking()
    for name in CONFIGS:
        agent = with_experience(name)
        runs = [measure_step(agent, STEPS[name], price) for _ in range(max(3, rounds // 3))]
        kinds = dict.fromkeys(kind for run in runs for kind in run)
        times = np.array([[run.get(kind, 0.0) for kind in kinds] for run in runs])
        shares = times / times.sum(axis=1, keepdims=True)  # a slow run is slow in all its parts
        found[name] = {
            "config": CONFIGS[name],
            "env_id": agent.config.env_id,
            "num_envs": agent.config.num_envs,
            "microseconds": {k: spread(column) for k, column in zip(kinds, times.T, strict=True)},
            "shares": {k: spread(column) for k, column in zip(kinds, shares.T, strict=True)},
        }
    return found


# Matrix products ----------------------------------------------------------------------------------


def product(rows: int, inner: int, columns: int, members: int = 1) -> Work:
    """Return one product of matrices into memory that is there already."""
    shapes = (members, rows, inner), (members, inner, columns), (members, rows, columns)
    if members == 1:
        shapes = tuple(shape[1:] for shape in shapes)  # type: ignore[assignment]
    a, b, out = (torch.rand(shape) for shape in shapes)
    multiply = torch.mm if members == 1 else torch.bmm
    return lambda: multiply(a, b, out=out)


def layer_products(
    batch: int, widths: tuple[int, ...], members: int = 1, learn: bool = True, inputs: bool = False
) -> list[Work]:
    """Return the products of a pass through linear layers and, to learn, of the way back."""
    works = []
    for i, (a, b) in enumerate(pairwise(widths)):
        works.append(product(batch, a, b, members))
        if learn:
            works.append(product(a, batch, b, members))
        if (learn and i) or inputs:
            works.append(product(batch, b, a, members))
    return works


def lstm_products(time_steps: int, batch: int, inputs: int, units: int, learn: bool) -> list[Work]:
    """Return the products of an LSTM over a chunk: one a step, the inputs' all at once."""
    many, gates = time_steps * batch, 4 * units
    works = [product(many, inputs, gates), *[product(batch, units, gates)] * time_steps]
    if learn:
        works += [product(many, gates, inputs), *[product(batch, gates, units)] * time_steps]
        works += [product(inputs, many, gates), product(units, many, gates)]
    return works


def convolution_products(
    batch: int, shape: tuple[int, ...], layers: Any, learn: bool
) -> list[Work]:
    """Return the products that convolutions are, once their patches are laid out as rows."""
    works, (channels, height, width) = [], shape
    for i, (outputs, kernel, stride) in enumerate(layers):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        rows, inner = batch * height * width, channels * kernel**2
        works.append(product(rows, inner, outputs))
        if learn:
            works.append(product(inner, rows, outputs))
            works += [product(rows, outputs, inner)] * (i > 0)
        channels = outputs
    return works


def all_of(works: list[Work]) -> Work:
    """Return one function that does all works."""

    def run() -> None:
        for work in works:
            work()

    return run


# Side by side -------------------------------------------------------------------------------------


def updates(agent: Any, count: int = 1) -> Work:
    """Return a function that makes updates as the loop does."""

    def run() -> None:
        for batch in agent.batches(count):
            agent.update(batch)
            agent.updates += 1

    return run


def measure_peers(rounds: int) -> dict[str, Any]:
    """Time DQN and SAC against Stable-Baselines3, at the same settings."""
    import dqn as bench_dqn
    import sac as bench_sac
    import stable_baselines3

    ours, theirs, chunk = bench_dqn.make_rlbook(), bench_dqn.make_sb3(), bench_dqn.ROUND * 2
    ours.learn(2 * bench_dqn.WARMUP, progress=False)
    theirs.learn(2 * bench_dqn.WARMUP)
    sizes = (4, *bench_dqn.HIDDEN, 2)
    passes = [
        *layer_products(bench_dqn.BATCH, sizes),
        *layer_products(bench_dqn.BATCH, sizes, learn=False),
    ]
    bare = all_of(passes * (bench_dqn.UPDATES * 2))
    found = {
        "dqn": compare(
            {
                "rlbook": lambda: ours.learn(chunk, progress=False),
                "stable-baselines3": lambda: theirs.learn(chunk, reset_num_timesteps=False),
                "matrix products": bare,
            },
            "rlbook",
            rounds=rounds,
        )
    }
    agent, other, batch = bench_sac.make_rlbook(), bench_sac.make_sb3(), bench_sac.BATCH
    space, hidden = agent.observation_space.shape[0], tuple(bench_sac.HIDDEN)
    actions = agent.action_space.shape[0]
    critic, actor = (space + actions, *hidden, 1), (space, *hidden, 2 * actions)
    passes = [
        *layer_products(2 * batch, actor, learn=False),
        *layer_products(batch, critic, 2, learn=False),
        *layer_products(batch, critic, 2),
        *layer_products(batch, critic, 2, learn=False, inputs=True),
        *layer_products(batch, actor)[1:],
    ]
    works: dict[str, Work] = {
        "rlbook": updates(agent),
        "stable-baselines3": lambda: other.train(gradient_steps=1, batch_size=batch),
        "matrix products": all_of(passes),
    }
    found["sac"] = compare(works, "rlbook", rounds=rounds)
    torch.set_num_threads(2)
    found["sac, two threads"] = compare(works, "rlbook", rounds=rounds, wall=True)
    torch.set_num_threads(1)
    steps = 20  # each of the environment, followed by an update
    stretch: dict[str, Work] = {
        "rlbook": lambda: agent.learn(steps, progress=False),
        "stable-baselines3": lambda: other.learn(steps, reset_num_timesteps=False),
    }
    found["sac, training"] = compare(stretch, "rlbook", rounds=rounds)
    return {"stable-baselines3": stable_baselines3.__version__, **found}


def bare_recurrent(agent: Any) -> Work:
    """Return a forward pass of both networks over a batch and a backward pass of one, no more."""
    batch = agent.sample()
    start = agent.start(batch)

    def run() -> None:
        agent.weights.grad.zero_()
        with torch.no_grad():
            agent.target.q_values_sequence(batch.obs, start, None)
        q = agent.online.q_values_sequence(batch.obs, start, None)
        q.backward(torch.ones_like(q))

    return run


def recurrent_products(agent: Any) -> Work:
    """Return the matrix products of a recurrent update."""
    config, steps = agent.config, agent.config.chunk_length + 1
    encoder = (agent.sight.inputs, *config.hidden)
    works = []
    for learn in (True, False):
        works += layer_products(steps * config.batch_size, encoder, learn=learn)
        works += lstm_products(steps, config.batch_size, encoder[-1], config.units, learn)
        head = (config.units, agent.choices)
        works += layer_products(steps * config.batch_size, head, learn=learn, inputs=learn)
    return all_of(works)


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


def measure_bare(rounds: int) -> dict[str, Any]:
    """Time whole updates against bare passes and against their matrix products alone."""
    found: dict[str, Any] = {}
    for name in ("drqn", "r2d2"):
        agent: Any = with_experience(name)
        works = {
            "update": updates(agent),
            "forward and backward": bare_recurrent(agent),
            "matrix products": recurrent_products(agent),
        }
        found[name] = compare(works, "forward and backward", rounds=rounds)
    redq: Any = with_experience("redq", policy_delay=1_000_000, hidden=[256, 256], batch_size=256)
    size, inputs = 256, redq.observation_space.shape[0]
    critic = (inputs + redq.action_space.shape[0], 256, 256, 1)
    members, subset = redq.config.num_critics, redq.config.subset_size
    products = [
        *layer_products(size, critic, members),
        *layer_products(size, critic, subset, learn=False),
        *layer_products(size, (inputs, 256, 256, 2 * redq.action_space.shape[0]), learn=False),
    ]
    found["redq"] = compare(
        {
            "update": updates(redq),
            "forward and backward": bare_ensemble(redq),
            "matrix products": all_of(products),
        },
        "forward and backward",
        rounds=rounds,
    )
    if "drqv2" in algorithms():
        from rlbook.drqv2 import ENCODERS

        pixels: Any = with_experience("drqv2")
        shape, count = pixels.observation_space.shape, pixels.config.batch_size
        layers = ENCODERS[pixels.config.encoder]
        products = [w for k in (True, False) for w in convolution_products(count, shape, layers, k)]
        found["drqv2"] = compare(
            {
                "update": updates(pixels),
                "forward and backward": bare_convolutions(pixels),
                "matrix products": all_of(products),
            },
            "forward and backward",
            rounds=rounds,
        )
    return found


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


def ensemble_works(units: int, batch: int, members: int = 10) -> dict[str, Work]:
    """Return the critics' whole update but for the loss: a list of networks, and one ensemble."""
    widths, x = (14, units, units, 1), torch.rand(batch, 14)
    layers = [[nn.Linear(*pair) for pair in pairwise(widths)] for _ in range(members)]
    networks = [nn.Sequential(*[m for n in net for m in (n, nn.ReLU())][:-1]) for net in layers]
    optimizers = [torch.optim.Adam(network.parameters(), fused=True) for network in networks]
    ensemble = Ensemble(widths, members)
    optimizer = Adam(ensemble.parameters(), lr=1e-3)

    def one_by_one() -> None:
        for network in networks:
            network.zero_grad()
        torch.stack([network(x).mean() for network in networks]).sum().backward()
        for part in optimizers:
            part.step()

    def as_one() -> None:
        ensemble.learn(lambda out: torch.full_like(out, 1 / batch), x)
        optimizer.step()

    return {"list of networks": one_by_one, "one ensemble": as_one}


def gather_works(capacity: int = 100_000, batch: int = 256) -> dict[str, Work]:
    """Return drawing a batch from arrays, one a field, and from rows that hold all fields."""
    agent: Any = make_agent("sac", buffer_size=capacity)
    rows, rng = agent.replay.rows, np.random.default_rng(0)
    columns = {name: np.zeros((capacity, *rows[name].shape[1:]), rows[name].dtype)
               for name in rows.dtype.names}  # fmt: skip

    def fields() -> None:
        places = rng.integers(capacity, size=batch)
        for column in columns.values():
            torch.from_numpy(column[places])

    def once() -> None:
        found = rows.take(rng.integers(capacity, size=batch))
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


def thread_works(widths: tuple[int, ...], members: int, batch: int) -> dict[str, Work]:
    """Return the same passes, to be timed on one thread and on two."""
    ensemble, x = Ensemble(widths, members), torch.rand(batch, widths[0])
    return dict.fromkeys(("1 thread", "2 threads"), lambda: ensemble.learn(torch.ones_like, x))


def measure_changes(rounds: int) -> dict[str, Any]:
    """Time each change alone, against what stood there before."""
    found = {
        "fused Adam": compare(
            {"plain": optimiser_work(False, False), "fused": optimiser_work(False, True)},
            "fused", rounds=rounds),
        "weights in one tensor": compare(
            {"six tensors": optimiser_work(False, True), "one": optimiser_work(True, True)},
            "one", rounds=rounds),
        "Adam in one call": compare(
            {"PyTorch's": optimiser_work(True, True), "ours": optimiser_work(True, True, True)},
            "ours", rounds=rounds),
        "gradient by hand": compare(gradient_works((256, 256), 64), "by hand", rounds=rounds),
        "values of a stretch": compare(stretch_works(), "sixteen at once", rounds=rounds),
        "ensemble, 256 units": compare(
            ensemble_works(256, 256), "one ensemble", rounds=rounds
        ),
        "ensemble, 32 units": compare(
            ensemble_works(32, 64), "one ensemble", rounds=rounds
        ),
        "gather once": compare(gather_works(), "one row a transition", rounds=rounds),
        "batches in place": compare(place_works(), "four in place", rounds=rounds),
        "vector environments": compare(
            {"1 environment": collect_work(1), "8 environments": collect_work(8)},
            "8 environments", rounds=rounds),
    }  # fmt: skip
    return found


def measure_threads(rounds: int) -> dict[str, Any]:
    """Time one and two threads by the clock on the wall: on a busy machine this says nothing."""
    sizes = {"DQN": ((4, 256, 256, 1), 1, 64), "REDQ": ((14, 256, 256, 1), 10, 256)}
    works = {name: thread_works(*size) for name, size in sizes.items()}
    found: dict[str, Any] = {"load": [round(load, 2) for load in os.getloadavg()]}

    def switch(name: str) -> None:
        torch.set_num_threads(int(name[0]))
        works["DQN"][name]()  # threads wake up

    for name, pair in works.items():
        found[name] = compare(pair, "2 threads", rounds=rounds, wall=True, before=switch)
    torch.set_num_threads(1)
    return found


def measure_compile(rounds: int) -> dict[str, Any]:
    """Time updates with and without the setting `compile`, and what compiling costs."""
    found: dict[str, Any] = {}
    for name in CONFIGS:
        torch.compiler.reset()  # or one algorithm would find what another has compiled
        began = time.perf_counter()
        plain = with_experience(name)
        between = time.perf_counter()
        compiled = with_experience(name, compile=True)  # acting compiles, and so do updates
        for batch in [plain.sample() for _ in range(8)]:
            compiled.update(batch)
            compiled.updates += 1
        extra = time.perf_counter() - between - (between - began)
        works = {"plain": updates(plain), "compiled": updates(compiled)}
        found[name] = {
            "config": CONFIGS[name],
            "functions": list(plain.compiled),
            "compile_seconds": float(f"{extra:.3g}"),
            "works": compare(works, "plain", rounds=rounds),
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


def measure_growth(rounds: int) -> dict[str, Any]:
    """Time what grows with a size: how much longer does ten times as much take?"""
    sizes = (10_000, 100_000, 1_000_000)
    buffers = {size: filled_replay(size) for size in sizes}
    families: dict[str, dict[str, Work]] = {
        "replay, transitions": {str(n): (lambda b=b: b.sample(64)) for n, b in buffers.items()},
        "priorities, leaves": {str(n): priority_work(n) for n in sizes},
        "ensemble, critics": {
            str(n): updates(with_experience("redq", num_critics=n, policy_delay=1_000_000))
            for n in (2, 5, 10, 20)
        },
        "chunk, steps": {
            str(n): updates(with_experience("drqn", steps=2_000, chunk_length=n, n_step=5))
            for n in (8, 16, 32, 64)
        },
    }
    if "drqv2" in algorithms():
        families["image, pixels a side"] = {
            str(n): updates(with_experience("drqv2", env_kwargs={"size": n}))
            for n in (24, 36, 48, 64)
        }
    return {
        family: {size: spread(times, 1e3) for size, times in take_turns(works, rounds).items()}
        for family, works in families.items()
    }


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "steps": measure_steps,
    "peers": measure_peers,
    "bare": measure_bare,
    "changes": measure_changes,
    "compile": measure_compile,
    "growth": measure_growth,
    "threads": measure_threads,
}


def main() -> None:
    """Measure all parts, or some, and write the file; parts that are not measured stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("book/results/speed.json"))
    parser.add_argument("--rounds", type=int, default=27, help="turns of each contestant")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    made = {
        "command": f"python bench/speed.py --rounds {options.rounds}",
        "rounds": options.rounds,
        "versions": versions(),
        "created": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
    }
    if len(options.only) == len(PARTS):
        result = dict(made)
    with torch_for_learning(1):
        for name in options.only:
            began = time.perf_counter()
            result[name] = PARTS[name](options.rounds)
            if len(options.only) < len(PARTS):  # this part alone was made now
                result.setdefault("made_later", {})[name] = made
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            write_result(options.out, result)


if __name__ == "__main__":
    main()
