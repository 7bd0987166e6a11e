# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sweeps
#
# One training run proves little: with another seed the same code may score 500 or 200. In this
# chapter you build the tool that made the learning curves of this book. It trains each variant of an
# algorithm with several seeds, each run in a process of its own, as many at a time as you have cores.
# You can stop it at any moment: the same command continues from the last checkpoints and repeats no
# finished run. At the end it prints the average score of each variant with an interval, and writes
# one small file with every curve and everything that is needed to make it again.
#
# | | |
# |---|---|
# | Builds on | [The run](run.ipynb), [Settings](settings.ipynb) |
# | Same as in most tools | a grid of settings, a pool of processes |
# | Different | no database and no server: everything is in the run directories |
# | Used for | the learning curves and ablations in `book/results/` |

# %% tags=["hide-input"]
#| export
import dataclasses
import datetime
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from tqdm import tqdm

from rlbook.agent import Agent, algorithm_name, find_algorithm
from rlbook.envs import mean_interval, name_env
from rlbook.progress import Interrupted, Progress, RunFailed, catch_signals
from rlbook.run import RunDirectory, resume, train, versions
from rlbook.settings import (
    Config,
    check_names,
    make_config,
    parse_yaml,
    read_settings,
    write_whole,
)

# %% tags=["hide-input"]
import contextlib
from statistics import NormalDist

import matplotlib.pyplot as plt

from rlbook.cli import main
from rlbook.envs import MaskedCartPole
from rlbook.figures import COLORS, PALETTE, load_result, plot_result, plot_scores, use_style

use_style()
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A first sweep
#
# Does DQN learn CartPole faster with 10-step returns than with 1-step returns? Two variants and two
# seeds make four short runs. The cell calls the command as your shell would:

# %%
line = "sweep dqn --config cartpole --total-steps 3000 --epsilon-decay-steps 1500 --eval-every 500"
line += " --eval-episodes 5 --checkpoint-every 500 --vary n_step=1,10 --run-dir runs/steps"
print(f"$ rlbook {line} --seeds 2")
with contextlib.chdir(folder):
    assert main([*line.split(), "--seeds", "2"]) == 0

# %% [markdown]
# The file that it wrote holds the curves. `plot_result` draws their mean over the seeds with a 95 %
# interval as a band. `plot_scores` draws the last evaluation of each seed as a dot, and the
# interquartile mean (IQM) that this chapter explains below. `rlbook plot runs/steps/result.json` draws
# both.

# %%
result = load_result(folder / "runs/steps/result.json")
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.2))
labels = {"n_step=1": "1 step", "n_step=10": "10 steps"}
plot_result(left, result, labels)
plot_scores(right, result, labels)
plt.show()

# %% [markdown]
# Do not believe it yet. With two seeds a band only goes from the lower one to the higher one, and
# 3,000 steps are few. [DQN](dqn.ipynb) asks the same question with ten times as many steps and
# five seeds, and there 10-step returns come out ahead. How many seeds are enough?
#
# ## The problem: how often is one seed wrong?
#
# Suppose that the true mean of algorithm A is higher than that of B by $d$, and that the scores of
# each differ between seeds with the standard deviation $\sigma$. You train each with $n$ seeds and
# believe the higher mean. The difference between the two means has the standard deviation
# $\sigma\sqrt{2/n}$, so you are wrong with probability
#
# $$P(\text{wrong}) = \Phi\Bigl(-\frac{d}{\sigma}\sqrt{\frac{n}{2}}\Bigr)$$
#
# where $\Phi(z)$ is the probability that a standard normal number is below $z$. Take
# $d/\sigma = 0.5$, which statisticians call a medium effect. By hand, for one seed:
# $\Phi(-0.5\sqrt{0.5}) = \Phi(-0.354) = 0.36$. That is little better than tossing a coin.


# %%
def chance_of_error(n: np.ndarray, effect: float = 0.5) -> np.ndarray:
    """Return how often the worse of two algorithms has the higher mean over n seeds."""
    return np.array([NormalDist().cdf(-effect * np.sqrt(count / 2)) for count in n])


assert abs(chance_of_error(np.array([1]))[0] - 0.36) < 0.005
seeds_axis = np.arange(1, 41)
figure, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(seeds_axis, chance_of_error(seeds_axis), color=PALETTE[0])
ax.axhline(0.05, color=COLORS["random"], linestyle="--", linewidth=1)
ax.annotate("5 %", (40, 0.05), (0, 4), textcoords="offset points", ha="right")
ax.set(xlabel="seeds of each algorithm", ylabel="probability of believing\nthe worse one")
ax.set(ylim=(0, 0.5), title="A is better than B by half a standard deviation")
plt.show()

# %% [markdown]
# So a difference of this size needs about twenty seeds. And does the interval that you print
# beside a mean contain the true mean as often as it claims? Sample many sets of $n$ scores, and
# count how often the interval misses:


# %%
def missed(n: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return how often mean ± standard error, and the bootstrap interval, of n seeds miss the truth."""
    scores = rng.normal(size=(4_000, n))
    error = scores.std(axis=1, ddof=1) / np.sqrt(n)
    _, low, high = mean_interval(scores, axis=1)
    return float(np.mean(np.abs(scores.mean(axis=1)) > error)), float(np.mean((low > 0) | (high < 0)))


counts, rng = np.array([2, 3, 4, 5, 7, 10, 15, 20]), np.random.default_rng(0)
naive, bootstrap = zip(*[missed(n, rng) for n in counts], strict=True)
figure, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(counts, naive, "o-", color=PALETTE[3], label="mean ± one standard error")
ax.plot(counts, bootstrap, "o-", color=PALETTE[2], label="bootstrap interval, as in this book")
ax.axhline(0.05, color=COLORS["random"], linestyle="--", linewidth=1)
ax.set(xlabel="seeds", ylabel="how often the interval\nmisses the truth", ylim=(0, 0.55))
ax.set(xticks=counts, title="a 95 % interval should miss in 5 %")
ax.legend()
plt.show()

# %% [markdown]
# With few seeds both promise too much. One standard error, which many papers draw, misses the true
# mean in a third of all experiments even with twenty seeds. The bootstrap interval, which
# `mean_interval` from [Environments](envs.ipynb) computes, misses about every sixth time with five
# seeds and every tenth with ten, where it should be every twentieth. [Figures](figures.ipynb) says
# why the book uses it all the same.
#
# ## Variants
#
# A variant has a name and the settings in which it differs. `--vary` makes a grid: one variant for
# each combination of values. The text after `=` is read as YAML, so lists work too. (YAML reads
# 1e-3 as text; the settings turn it into a number.)

# %%
#| export
Variants = dict[str, dict[str, Any]]  # name -> the settings in which it differs


def grid(words: Sequence[str]) -> Variants:
    """Make a variant of each combination of `lr=1e-3,3e-4` and its like."""
    axes: dict[str, list[tuple[str, Any]]] = {}
    for word in words:
        typed_name, _, typed = word.partition("=")
        name, values = typed_name.strip().replace("-", "_"), parse_yaml(f"[{typed}]", f"{word!r}")
        if not values:
            raise ValueError(f"{word!r} must be a setting and its values, as in lr=1e-3,3e-4.")
        if name in axes or any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError(f"{word!r} repeats a setting or a value: name each once.")
        axes[name] = [(name, value) for value in values]
    return {
        ", ".join(f"{name}={value}" for name, value in choice): dict(choice)
        for choice in itertools.product(*axes.values())
    }


# %%
print(grid(["lr=1e-3,3e-4", "hidden=[64],[64,64]"]))

# %% [markdown]
# Ablations need better names than `tau=1.0, target_update_interval=1`, so a config file can name its
# variants:
#
# ```yaml
# algo: dqn
# config: cartpole
# seeds: 10
# variants:
#   all parts: {}
#   no target network: {tau: 1.0, target_update_interval: 1}
#   1-step returns: {n_step: 1}
# ```
#
# The algorithm can vary like any setting: `--vary algo=dqn,drqn`, or `algo: redq` in a variant. Then
# every setting that all variants share must exist in all of these algorithms.
#
# ## The plan
#
# A sweep is a list of runs. An `Item` describes one run in plain text and numbers, so it can be sent
# to another process or to another machine.

# %%
#| export
SET_BY_THE_SWEEP = ("seed", "run_dir")


@dataclass(frozen=True)
class Item:
    """One run of a sweep: all that a process needs to know to do it."""

    algo: str
    variant: str
    seed: int
    run_dir: str
    settings: dict[str, Any]

    def config(self) -> Config:
        """Return the settings of this run, checked."""
        own = {"seed": self.seed, "run_dir": self.run_dir}
        return make_config(find_algorithm(self.algo).config_class, {**self.settings, **own})


# %% [markdown]
# You say how many seeds you want, or list them. The first of them may be another than 0, for
# example to repeat a comparison on fresh seeds. By hand: three seeds from 1000 on are 1000, 1001
# and 1002.

# %%
#| export
def check_seeds(seeds: Any) -> list[int]:
    """Return seeds from their number or their list."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        seeds = list(range(seeds))
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError("`seeds` must be a number above 0, or a list of different whole numbers.")
    return list(seeds)


def resolve_seeds(first: Any, seeds: Any) -> list[int]:
    """Return seeds from their number, counted from `first` on, or from their list."""
    if first is not None and isinstance(seeds, list):
        raise ValueError("`seed` is the first of several, but `seeds` lists them: leave one out.")
    start = Config(seed=0 if first is None else first).seed  # which checks it
    if type(seeds) is int:  # True is an int, but not a number of seeds
        if seeds > 10_000:
            raise ValueError(f"A sweep of {seeds:,} seeds would never end: take 10,000 at most.")
        seeds = list(range(start, start + seeds))
    return check_seeds(seeds)


# %%
assert resolve_seeds(1000, 3) == [1000, 1001, 1002]
assert resolve_seeds(None, 3) == check_seeds(3) == [0, 1, 2]
assert resolve_seeds(None, [7, 9]) == [7, 9]

# %% [markdown]
# Each variant has a folder, named after it as far as a file system allows. If two variants would get
# the same folder, the later one gets a number. So a variant that you add at the end never changes the
# folder of another, and its finished runs are still found.

# %%
#| export
def folder_names(variants: Sequence[str]) -> list[str]:
    """Return a different folder for each variant."""
    folders: list[str] = []
    for name in variants:
        plain_name = re.sub(r"[^\w.=]+", "-", name).strip("-.") or "variant"
        plain_name += "_" * plain_name.endswith(".json")  # results have such names
        tries = (f"{plain_name}_{i}" if i > 1 else plain_name for i in itertools.count(1))
        folders.append(next(name for name in tries if name not in folders))
    return folders

# %%
assert folder_names(["lr=0.1", "a b"]) == ["lr=0.1", "a-b"]
assert folder_names(["lr=0.1", "a b", "a-b"]) == ["lr=0.1", "a-b", "a-b_2"]

# %% [markdown]
# From Python, an algorithm may be given as its class, and an environment as a function or class that
# makes it. Other processes find both by name, so they must be in a module that can be imported.

# %%
#| export
def name_algorithm(algo: str | type[Agent]) -> str:
    """Return the name by which other processes find an algorithm."""
    if not (isinstance(algo, type) and issubclass(algo, Agent)):
        return str(algo)
    name = algorithm_name(algo)
    if ":" not in name and not algo.__module__.startswith("rlbook."):
        raise ValueError(
            f"{algo.__name__} is defined in a notebook, a script or a function, where other "
            f"processes cannot import it: move it to a module, and name it `module:{name}`."
        )
    return name


def name_environment(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose environment other processes can import, named if it is not yet."""
    given = settings.get("env_id")
    if given is None:
        return settings
    env_id = given if isinstance(given, str) else name_env(given)
    if env_id.startswith(("local:", "__main__:")):
        raise ValueError(
            f"Setting 'env_id' is {re.split('[:.]', env_id)[-1]!r}, which other processes cannot "
            "import: make it with a function in a module, and name it `module:function`."
        )
    return {**settings, "env_id": env_id}

# %%
assert name_environment({"env_id": MaskedCartPole})["env_id"] == "rlbook.envs:MaskedCartPole"

# %%
#| export
def make_plan(
    algo: str, settings: dict[str, Any], variants: Variants, seeds: list[int], directory: Path
) -> list[Item]:
    """List the runs, seed by seed, so that all variants advance together."""
    if not isinstance(variants, dict) or not variants:  # they may come from a file
        raise ValueError("`variants` must hold at least one `name: {setting: value}`.")
    names, runs = [str(name) for name in variants], []
    for name, own, folder in zip(names, variants.values(), folder_names(names), strict=True):
        if not isinstance(own, dict | None):
            raise ValueError(f"Variant {name!r} must be settings as `name: value`.")
        for setting in SET_BY_THE_SWEEP:
            if setting in (own or {}):
                raise ValueError(f"A variant cannot set {setting!r}: the sweep does.")
        whole = name_environment({"algo": algo, **settings, **(own or {})})
        own_algo = name_algorithm(whole.pop("algo"))
        check_names(find_algorithm(own_algo).config_class, whole)
        runs.append((own_algo, name, directory / folder, whole))
    return [
        Item(own_algo, name, seed, str(folder / f"seed_{seed}"), dict(whole))
        for seed in seeds
        for own_algo, name, folder, whole in runs
    ]


# %%
for item in make_plan("dqn", {"total_steps": 2_000}, grid(["n_step=1,10"]), [0, 1], Path("runs/x")):
    print(item)

# %% [markdown]
# A sweep runs for hours, so it should find every mistake before the first run starts. It refuses:
#
# - settings with which an agent cannot be built;
# - runs without evaluations, and runs that may stop early, since it compares runs of equal length;
# - a folder that holds runs with other settings (more seeds and more variants are welcome);
# - two variants with equal settings, such as `lr=1e-3` and `lr=0.001`: they would be the same runs;
# - settings that would come back from a file changed, such as a mapping with numbers as keys.

# %%
#| export
def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they come back from a file, where a tuple is a list."""
    try:
        return dict(json.loads(json.dumps(settings)))
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            "A sweep needs settings that a file can hold: numbers, texts, lists and mappings."
        ) from None


def has_text_keys(value: Any) -> bool:
    """Say whether all mappings inside settings have texts as keys, as in a file."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and has_text_keys(part) for key, part in value.items())
    return not isinstance(value, list | tuple) or all(has_text_keys(part) for part in value)


def check_same(item: Item) -> None:
    """Raise if its directory holds a run with other settings."""
    path = Path(item.run_dir) / "config.yaml"
    if not path.exists():
        return
    config = item.config()
    there = plain({"algo": None, **type(config)().model_dump(), **read_settings(path)})
    wanted = plain({"algo": item.algo, **config.model_dump()})
    for name, value in wanted.items():
        if name != "run_dir" and there[name] != value:  # the whole sweep may have been moved
            raise ValueError(
                f"{item.run_dir} holds a run with {name} {there[name]!r}, not {value!r}: "
                "choose another directory with --run-dir."
            )


# %%
#| export
def check_plan(plan: Sequence[Item]) -> None:
    """Raise before anything runs if a run could not, or would mix with other results."""
    tried: dict[str, dict[str, Any]] = {}  # variant -> all its settings
    for item in plan:
        config = item.config()
        plain(item.settings)
        if not has_text_keys(item.settings):
            raise ValueError("A sweep needs settings whose mappings have texts as keys.")
        if config.eval_every == 0:
            raise ValueError("A sweep compares evaluations: 'eval_every' must be above 0.")
        for name in ("stop_at_return", "stop_patience"):
            if getattr(config, name) is not None:
                raise ValueError(f"A sweep compares runs of equal length: leave out {name!r}.")
        if item.variant not in tried:
            whole = {"algo": item.algo, **config.model_dump(), "seed": None, "run_dir": None}
            for other in (name for name, settings in tried.items() if settings == whole):
                raise ValueError(f"{other!r} and {item.variant!r} are the same settings: drop one.")
            find_algorithm(item.algo)(config=config)  # finds environment, spaces and device wrong
            tried[item.variant] = whole
        check_same(item)


# %% [markdown]
# ## One run
#
# `run_item` does one run. On the first call it trains; after a crash it continues from the last
# checkpoint; when the run is finished it only reads the curve. It keeps nothing in memory between
# calls, so any process can call it at any time.
#
# It writes a note beside the run, with the seconds, the day and the versions. These cannot go into the
# metrics, which must be the same in every repetition. `outcome_of` takes a finished run only if it has
# the settings of the plan, since another sweep may have used the same folder, and it raises an error if
# the metrics are damaged.

# %%
#| export
NOTE = "sweep.json"


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step, so that nobody reads half of it."""
    write_whole(path, lambda file: file.write_text(text))


def read_note(folder: str | Path) -> dict[str, Any]:
    """Read the note beside a run or a whole sweep: its seconds, and whether it is finished."""
    try:
        note = json.loads((Path(folder) / NOTE).read_text())
    except (OSError, ValueError):
        note = None
    sound = isinstance(note, dict) and type(note.get("seconds")) in (int, float)
    return note if sound else {"seconds": 0.0}


# %%
#| export
@dataclass(frozen=True)
class Outcome:
    """What a sweep keeps of one run."""

    steps: list[int]
    returns: list[float]  # eval_return_mean at each of the steps
    seconds: float


def short(number: float) -> float:
    """Round to five digits: enough for a figure, and small in a file."""
    return float(f"{number:.5g}")


def read_outcome(run_dir: str | Path) -> Outcome | None:
    """Read what a finished run left; None if it is not finished."""
    note, folder = read_note(run_dir), Path(run_dir)
    if not note.get("finished") or not (folder / "config.yaml").exists():
        return None
    try:
        lines = [line for line in RunDirectory(folder).metrics.read() if "eval_return_mean" in line]
        returns = [short(line["eval_return_mean"]) for line in lines]
        steps = [int(line["global_step"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        steps = []
    if not steps:
        raise ValueError(f"{folder}/metrics.jsonl is damaged: delete {folder} to do it again.")
    return Outcome(steps, returns, short(note["seconds"]))


def outcome_of(item: Item) -> Outcome | None:
    """Read what a run of the plan left, and refuse that of a run with other settings."""
    check_same(item)
    return read_outcome(item.run_dir)


# %% [markdown]
# Two processes in one run directory would ruin it. That happens easily: you type the command twice, or
# you start again while an old process still writes its last checkpoint. `rlbook train` refuses to
# start then. A sweep waits for the lock instead, and then finds the run finished or continues it. The
# operating system releases the lock when its holder dies, for whatever reason.

# %%
#| export
def run_item(item: Item) -> Outcome:
    """Do one run, or what is left of it: begin, continue from its checkpoint, or only read it."""
    folder = Path(item.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / "lock"):  # waits for another process that works here
        outcome = outcome_of(item)
        if outcome is not None:
            return outcome
        note, began, finished = read_note(folder), time.perf_counter(), False
        try:
            if (folder / "config.yaml").exists():
                resume(folder, progress=False)
            else:
                train(find_algorithm(item.algo)(config=item.config()), progress=False)
            finished = True
        finally:
            seconds = note["seconds"] + time.perf_counter() - began
            today = {"created": datetime.date.today().isoformat(), "versions": versions()}
            note = {"seconds": seconds, "finished": finished, **today}
            replace_file(folder / NOTE, json.dumps(note))
        outcome = read_outcome(folder)
        assert outcome is not None
        return outcome


# %%
settings = {
    **{"env_id": "CartPole-v1", "total_steps": 1_500, "learning_starts": 200, "train_frequency": 8},
    **{"epsilon_decay_steps": 800, "eval_every": 500, "eval_episodes": 5, "checkpoint_every": 500},
}
item = make_plan("dqn", settings, {"dqn": {}}, [0], folder / "one")[0]
for call in ("first", "second"):
    clock = time.perf_counter()
    outcome = run_item(item)
    print(f"{call} call: {time.perf_counter() - clock:6.3f} s", outcome.steps, outcome.returns)

# %% [markdown]
# The second call reads a file.
#
# ## A process for each run
#
# Each run has a process of its own, a *worker*, so a crash stops only one run. The hard part is to
# stop them all.
# A sweep may end by Ctrl-C, by SIGTERM, or by SIGKILL, for example when the machine runs out of memory,
# and SIGKILL leaves it no time to tell its workers. Yet they must stop in each case, or they would
# run on for hours without anybody noticing.
#
# The trick is a pipe. Each worker reads from its stdin, where nothing is ever written. When the sweep
# ends, **for whatever reason**, the operating system closes the other end, and the read returns. Then
# the worker sends itself SIGTERM, on which [a run](run.ipynb) writes a checkpoint and ends. If it
# hangs, in an environment that never returns, SIGKILL follows a minute later.

# %%
#| export
PATIENCE = 60.0  # seconds in which a run has to write its checkpoint and end


def follow_parent() -> None:
    """Stop this process when the other end of its stdin is closed: SIGTERM, then SIGKILL."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)  # an environment may hang
    os.kill(os.getpid(), signal.SIGKILL)


def worker(text: str) -> int:
    """Do the run that is described in JSON; the exit code says how it went."""
    threading.Thread(target=follow_parent, daemon=True).start()
    sys.path.append(os.getcwd())  # last, as the command line has it: an environment may be there
    try:
        run_item(Item(**json.loads(text)))
    except Interrupted as stopped:
        return 128 + stopped.signal_number
    except (ValueError, RunFailed) as error:
        print(" ".join(str(error).split()), flush=True)
        return 1
    return 0


# %% [markdown]
# Each worker also gets a session of its own. Otherwise Ctrl-C in a terminal would reach it twice,
# directly and through its parent, and a second signal stops a run at once, without a checkpoint. What
# a worker prints goes to `log.txt` beside the run. If it fails, the last line says why.

# %%
#| export
Worker = subprocess.Popen[bytes]


def start_worker(item: Item) -> Worker:
    """Start the process of one run; what it prints goes to log.txt beside the run."""
    Path(item.run_dir).mkdir(parents=True, exist_ok=True)
    with open(Path(item.run_dir) / "log.txt", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rlbook.sweep", json.dumps(dataclasses.asdict(item))],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
        )


def stop_workers(workers: Sequence[Worker]) -> None:
    """Let every process write its checkpoint and end."""
    for process in workers:
        assert process.stdin is not None
        process.stdin.close()
    for process in workers:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def why_it_failed(item: Item, code: int) -> str:
    """Name the signal that ended a process, or return the last line that it printed."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = (Path(item.run_dir) / "log.txt").read_text(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else f"its process ended with code {code}"


# %% [markdown]
# ## The report
#
# While it runs, a sweep shows one bar that counts the environment steps of all runs. It finds them in
# the last line of each `metrics.jsonl`. When a run ends, one line of text says how.

# %%
#| export
def last_step(run_dir: str | Path) -> int:
    """Return the step of the last whole line of a run's metrics; 0 if there is none."""
    try:
        with open(Path(run_dir) / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))  # a line is far shorter
            whole = file.read().rpartition(b"\n")[0]  # the last line may be half written
            return int(json.loads(whole.splitlines()[-1])["global_step"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0  # it has not begun


# %%
#| export
class Report:
    """What a sweep says while it runs: a line per run that has ended, and a bar for the whole."""

    def __init__(self, plan: Sequence[Item], say: Callable[[str], None]) -> None:
        self.plan, self.say, self.failed = plan, say, list[Item]()
        self.sizes = {item.run_dir: item.config().total_steps for item in plan}
        self.waiting = [item for item in plan if outcome_of(item) is None]
        self.ended = {item.run_dir for item in plan} - {item.run_dir for item in self.waiting}
        if self.ended:
            say(f"{len(self.ended)} of {len(plan)} runs are finished already.")
        self.bar = Progress("sweep", self.steps(), sum(self.sizes.values()), enabled=True)
        self.shown = time.perf_counter()

    def steps(self) -> int:
        """Count the environment steps of all runs so far."""
        return sum(n if d in self.ended else last_step(d) for d, n in self.sizes.items())

    def show(self) -> None:
        """Move the bar, once a second at most."""
        if time.perf_counter() - self.shown > 1:
            self.bar.step(self.steps(), {})
            self.shown = time.perf_counter()

    def end(self, item: Item, why: str) -> None:
        """Say how a run ended; `why` counts only if it left no result."""
        self.ended.add(item.run_dir)
        try:
            outcome = outcome_of(item)
        except ValueError as error:  # another sweep has been here meanwhile
            outcome, why = None, str(error)
        if outcome is None:
            self.failed.append(item)
            how = f"failed: {why}"
        else:
            how = f"return {outcome.returns[-1]:g} in {outcome.seconds:.0f} s"
        where = f"[{len(self.ended)}/{len(self.plan)}] {item.variant}, seed {item.seed}"
        with tqdm.external_write_mode():  # the bar steps aside
            self.say(f"{where}: {how}")

    def close(self, caught: list[int]) -> None:
        """Take the bar away, and raise if a signal has stopped the sweep."""
        self.bar.close(self.steps())
        if caught:
            left = sum(read_outcome(item.run_dir) is None for item in self.plan)
            where = f"Stopped with {left} of {len(self.plan)} runs unfinished"
            raise Interrupted(f"{where}: the same command goes on.", caught[0])


# %% [markdown]
# The loop starts as many workers as fit, reports each that has ended, and stops them all on a signal.
# A `Backend` is a function that does the runs of a plan and returns those that failed. `run_plan` is
# the first; [A cluster](cluster.ipynb) adds another.

# %%
#| export
Backend = Callable[[Sequence[Item], int | None, Callable[[str], None]], list[Item]]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_plan(
    plan: Sequence[Item], jobs: int | None = None, say: Callable[[str], None] = print
) -> list[Item]:
    """Do all runs that are not finished, `jobs` at a time; return those that failed."""
    report, running, jobs = Report(plan, say), dict[Worker, Item](), jobs or cores()
    with catch_signals() as caught:
        try:
            while (report.waiting or running) and not caught:
                while report.waiting and len(running) < jobs:
                    item = report.waiting.pop(0)
                    running[start_worker(item)] = item
                for process in [each for each in running if each.poll() is not None]:
                    item = running.pop(process)
                    report.end(item, why_it_failed(item, process.returncode))
                report.show()
                time.sleep(0.05)
        finally:
            stop_workers(list(running))
    report.close(caught)
    return report.failed


def find_backend(name: str) -> Backend:
    """Return what does the runs: processes of this machine, or a Ray cluster."""
    if name == "local":
        return run_plan
    if name == "ray":
        from rlbook.cluster import import_ray, run_on_ray  # it imports this module

        import_ray()  # says what is missing before anything runs
        return run_on_ray
    raise ValueError(f"There is no backend {name!r}: use 'local' or 'ray'.")


# %% [markdown]
# ## One score for several seeds
#
# One bad seed can spoil the mean of five: the scores $10, 12, 11, 13$ and a failure at $-100$ have the
# mean $-10.8$, which no run scored. Their median, 11, depends on one score alone. Agarwal et al.
# (2021) recommend the **interquartile mean** (IQM), which lies between the two: leave out the lowest
# and the highest quarter, and average the rest. By hand, of five scores one goes on each side, and
# $(10 + 11 + 12) / 3 = 11$.
#
# How certain is it? As for the mean, compute a *bootstrap interval*. Sample as many scores, with
# replacement, as there are seeds, and take their IQM. Do this thousands of times. The middle 95 %
# of these IQMs is the interval. (This bootstrap is from statistics. It has nothing to do with the
# bootstrapping of a value from the next one.)

# %%
#| export
def iqm_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the interquartile mean of scores and the ends of its 95 % bootstrap interval."""
    from scipy import stats  # here: the process of a run would import it for nothing, a second long

    scores = np.asarray(values, dtype=np.float64)
    center = float(stats.trim_mean(scores, 0.25))
    if len(scores) < 2:  # one value has no spread to estimate
        return center, float("nan"), float("nan")

    def iqm(draws: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(stats.trim_mean(draws, 0.25, axis=axis))

    found = stats.bootstrap((scores,), iqm, method="percentile", n_resamples=5_000, rng=0)
    return center, float(found.confidence_interval.low), float(found.confidence_interval.high)


def summary(result: dict[str, Any]) -> str:
    """Return two lines a variant: the interquartile mean of its last evaluations, and the mean."""
    lines = []
    width = max(map(len, result["runs"]))
    for name, run in result["runs"].items():
        seeds = len(run["final"])
        middles = {"IQM": iqm_interval(run["final"]), "mean": mean_interval(np.array(run["final"]))}
        for what, (middle, low, high) in middles.items():
            ends = f"{low:8.2f} to {high:8.2f}"
            spread = f"95 % bootstrap interval {ends}" if seeds > 1 else "one seed"
            label, count = (name, f"   {seeds} seeds" * (seeds > 1)) if what == "IQM" else ("", "")
            lines.append(f"{label:{width}}  {what:4} {middle:8.2f}   {spread}{count}")
    return "\n".join(lines)


# %%
one_failed = [10.0, 12.0, 11.0, 13.0, -100.0]
assert abs(np.mean(one_failed) + 10.8) < 1e-12 and iqm_interval(one_failed)[0] == 11
assert iqm_interval(one_failed)[1] < 11 and mean_interval(np.array(one_failed))[1] < -50
print(summary({"runs": {"one failed": {"final": one_failed}}}))

# %% [markdown]
# The lower ends of both intervals show the failure, because some of the resampled sets hold it
# two or three times. But no run scored the mean. So the book states the IQM of the last
# evaluations and shows the seeds beside it. Learning curves are means.
#
# ## One small file
#
# The result is one JSON file with everything that a figure needs, and everything that is needed to make
# it again: the command, the seeds, the versions and the settings. For each variant it lists the
# settings that are not at their defaults. The defaults are stored too, once per algorithm. If one of
# them changes some day, the file still says what was run, and a test finds the results that have to be
# made again.

# %%
#| export
def overrides(config: Config) -> dict[str, Any]:
    """Return the settings that are not at their default, without what the sweep sets itself."""
    return config.model_dump(exclude_defaults=True, exclude=set(SET_BY_THE_SWEEP))


def joined(values: Iterable[Any]) -> str:
    """Return the different values as one text."""
    return ", ".join(dict.fromkeys(str(value) for value in values))


def made_when(plan: Sequence[Item]) -> dict[str, Any]:
    """Return the versions with which the runs were made, and the day of the last one."""
    today = {"created": datetime.date.today().isoformat(), "versions": versions()}
    notes = [{**today, **read_note(item.run_dir)} for item in plan]
    found = {
        name: joined(note["versions"].get(name, "unknown") for note in notes) for name in versions()
    }
    return {"versions": found, "created": max(note["created"] for note in notes)}


# %%
#| export
def collect(plan: Sequence[Item], command: str, seconds: float) -> dict[str, Any]:
    """Put the outcomes of all runs together in the form of a stored result."""
    runs: dict[str, dict[str, Any]] = {}
    for item in plan:
        outcome = outcome_of(item)
        assert outcome is not None
        same = {"algo": item.algo, "settings": overrides(item.config()), "steps": outcome.steps}
        run = runs.setdefault(item.variant, {**same, "returns": [], "final": [], "seconds": []})
        if outcome.steps != run["steps"]:
            raise ValueError(
                f"{item.run_dir} was evaluated at other steps than other seeds, so its metrics are "
                f"damaged: delete it to do it again."
            )
        run["returns"].append(outcome.returns)
        run["final"].append(outcome.returns[-1])
        run["seconds"].append(outcome.seconds)
    for run in runs.values():
        run["iqm"] = [short(x) if x == x else None for x in iqm_interval(run["final"])]  # no NaN
    configs = {item.algo: find_algorithm(item.algo).config_class() for item in plan}
    return {
        "command": command,
        "algo": joined(item.algo for item in plan),
        "env_id": joined(item.config().env_id for item in plan),
        "seeds": list(dict.fromkeys(item.seed for item in plan)),
        **made_when(plan),
        "seconds": short(seconds),
        "defaults": {
            algo: config.model_dump(exclude=set(SET_BY_THE_SWEEP))
            for algo, config in configs.items()
        },
        "runs": runs,
    }


# %% [markdown]
# A stored result may have cost a day of computing. So the file that you name with `--out` is replaced
# only by a newer result of the same sweep. That, and whether it can be written at all, is checked
# before the first run. Without `--out` the result goes to `result.json` beside the runs, and each
# sweep there replaces it.

# %%
#| export
def check_out(out: Path, plan: Sequence[Item]) -> None:
    """Raise if a file stands there that is not an earlier result of the same sweep."""
    if out.suffix != ".json" or out.name == NOTE or out.is_dir():
        raise ValueError(f"{out} cannot be a result: name a file NAME.json other than {NOTE}.")
    if not out.exists():
        return
    try:
        old = json.loads(out.read_text())
        algos = {name: run.get("algo", old["algo"]) for name, run in old["runs"].items()}
        settings = {name: run["settings"] for name, run in old["runs"].items()}
        before = (old["seeds"], set(algos), algos, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{out} is not a stored result: it stays as it is.") from None
    seeds = list(dict.fromkeys(item.seed for item in plan))
    algos = {item.variant: item.algo for item in plan}
    settings = {item.variant: plain(overrides(item.config())) for item in plan}
    parts = ("seeds", "variants", "algorithms", "settings")
    for part, a, b in zip(parts, before, (seeds, set(algos), algos, settings), strict=True):
        if a != b:
            raise ValueError(f"{out} holds a sweep with other {part}: choose another --out.")


# %%
#| export
def check_writable(folder: Path) -> None:
    """Raise unless files can be written there, which is better known before the first run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"Cannot write into {folder}: {error.strerror or error}.") from error


# %% [markdown]
# JSON with an indent puts each number of a list on a line of its own. One curve per line is easier to
# read and to compare. A text in JSON holds no line break, so a `[` at the end of a line always
# opens a list.

# %%
#| export
def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write a result in one step, one curve a line."""
    numbers = r'\[\n[^][{}"]*\]'
    text = re.sub(
        numbers, lambda found: json.dumps(json.loads(found[0])), json.dumps(result, indent=1)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, text + "\n")


# %% [markdown]
# This is what the first sweep of this chapter wrote, with the longest parts left out:

# %%
one = {**result["runs"]["n_step=10"], "settings": "...", "returns": "..."}
brief = {**result, "defaults": "...", "runs": {"n_step=1": "...", "n_step=10": one}}
write_result(folder / "brief.json", brief)
print((folder / "brief.json").read_text())

# %% [markdown]
# ## The whole sweep
#
# If a run fails, the others continue, but no result is written: the mean over the seeds that survived
# is not the mean over seeds (exercise 5).

# %%
#| export
def sweep(
    algo: str | type[Agent],
    settings: dict[str, Any],
    *,
    variants: Variants | None = None,
    seeds: int | list[int] = 5,
    directory: str | Path | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    backend: str = "local",
    command: str = "rlbook.sweep.sweep",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train every variant with every seed, side by side, and return and write the result."""
    run_all = find_backend(backend)
    if jobs is not None and jobs < 1:
        raise ValueError(f"`jobs` must be a whole number above 0, not {jobs}.")
    algo, settings = name_algorithm(algo), name_environment(settings)
    chosen = {algo: {}} if variants is None else variants
    env_id = make_config(find_algorithm(algo).config_class, settings).env_id
    folder = Path(directory or "runs/sweep-" + re.sub(r"[^\w.]+", "-", f"{algo}-{env_id}"))
    plan = make_plan(algo, settings, chosen, check_seeds(seeds), folder)
    check_plan(plan)
    target = Path(out) if out is not None else folder / "result.json"
    if out is not None:
        check_out(target, plan)
    for place in (folder, target.parent):
        check_writable(place)
    began, runs = time.perf_counter(), sorted(item.run_dir for item in plan)
    note = read_note(folder)
    before = note["seconds"] if note.get("runs") == runs else 0.0  # another sweep's do not count
    try:
        failed = run_all(plan, jobs, say)
    finally:
        seconds = before + time.perf_counter() - began
        replace_file(folder / NOTE, json.dumps({"seconds": seconds, "runs": runs}))
    if failed:
        names = ", ".join(f"{item.variant} seed {item.seed}" for item in failed)
        raise RunFailed(f"{len(failed)} of {len(plan)} runs failed ({names}): nothing is written.")
    result = collect(plan, command, seconds)
    write_result(target, result)
    say(f"{summary(result)}\nThe result is in {target}.")
    return result


# %%
#| export
# A cell in a notebook is called __main__ too, but it has no file.
if __name__ == "__main__" and "__file__" in globals():
    sys.exit(worker(sys.argv[1]))


# %% [markdown]
# ## Stopped in the middle
#
# Now add two seeds to the first sweep, in the same directory. As soon as one of the new runs has
# written a checkpoint, the cell sends the signal of Ctrl-C:

# %%
def finished_runs() -> dict[str, int]:
    """Return the finished runs, with the time at which their metrics were last written."""
    runs = sorted((folder / "runs/steps").glob("*/seed_*"))
    return {
        f"{run.parent.name} {run.name}": (run / "metrics.jsonl").stat().st_mtime_ns
        for run in runs
        if read_outcome(run) is not None
    }


def half_done() -> list[str]:
    """Return the runs that have written a checkpoint and have at least half of the way to go."""
    runs = sorted((folder / "runs/steps").glob("*/seed_*"))
    return [f"{run.parent.name} {run.name}" for run in runs if 500 <= last_step(run) <= 1_500]


print(f"$ rlbook {line} --seeds 4")
words = [sys.executable, "-m", "rlbook.cli", *line.split(), "--seeds", "4"]
out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
process = subprocess.Popen(words, text=True, cwd=folder, **out)
while not (cut := half_done()) and process.poll() is None:
    time.sleep(0.02)
process.send_signal(signal.SIGINT)
print(process.communicate()[0], f"(exit code {process.returncode})", sep="")
assert process.returncode == 130
before = finished_runs()
print("finished:", ", ".join(before), "- in the middle:", ", ".join(cut))
assert len(before) >= 4 and cut and not set(cut) & set(before)

# %% [markdown]
# The same command again continues the runs that were stopped, and does not touch the finished ones:

# %%
print(f"$ rlbook {line} --seeds 4")
with contextlib.chdir(folder):
    assert main([*line.split(), "--seeds", "4"]) == 0
after = finished_runs()
assert len(after) == 8 and all(after[run] == when for run, when in before.items())

# %% [markdown]
# Did the interruption change a number? Take the run that was stopped and do it again in another
# directory, without a break:

# %%
variant, seed = cut[0].split()[0], int(cut[0][-1])
own = load_result(folder / "runs/steps/result.json")["runs"][variant]["settings"]
again = make_plan("dqn", own, {"again": {}}, [seed], folder / "runs/again")[0]
print(cut[0], run_item(again).returns)
was_cut = folder / "runs/steps" / variant / f"seed_{seed}" / "metrics.jsonl"
assert Path(again.run_dir, "metrics.jsonl").read_bytes() == was_cut.read_bytes()

# %% [markdown]
# No: both files of metrics are equal, byte for byte.
#
# ## Mistakes
#
# Each mistake gets one sentence, before anything runs:

# %%
mistakes: dict[str, dict[str, Any]] = {
    "no seeds": {"seeds": 0},
    "the same seed twice": {"seeds": [1, 1]},
    "an unknown setting": {"variants": {"fast": {"lrr": 0.1}}},
    "a wrong value": {"variants": {"fast": {"lr": "very"}}},
    "a seed in a variant": {"variants": {"lucky": {"seed": 7}}},
    "an unknown environment": {"variants": {"other": {"env_id": "CartPoel-v1"}}},
    "another sweep's result": {"out": folder / "runs/steps/result.json"},
}
for what, wrong in mistakes.items():
    try:
        sweep("dqn", settings, directory=folder / "runs/wrong", **wrong)
    except ValueError as error:
        print(f"{what:24} {str(error).replace(f'{folder}{os.sep}', '')}")
assert not (folder / "runs/wrong").exists()

# %% [markdown]
# ## Honest edges
#
# - The intervals are about seeds: they say how much the score of the last evaluation would change with
#   other seeds. They say nothing about other environments.
# - A bootstrap interval assumes that the seeds at hand represent all seeds. With five it is too
#   narrow, as you saw above, and with three or fewer nothing is trimmed from the IQM. So the
#   summary prints mean and IQM, and figures show the seeds beside the interval.
# - Two variants with the same seed share the first states of their evaluation episodes, so they are not
#   quite independent. The intervals ignore that.
# - Seconds are counted while several runs share a machine. Compare them within one sweep only. A process
#   that ends by SIGKILL does not count its seconds; the numbers of its run are right all the same.
# - A later version of this book or of PyTorch may round differently, so the same seed may end elsewhere.
#   A stored result names its versions and the day of its last run.
#
# ## Exercises
#
# **Exercise 1.** A is better than B by half a standard deviation. How many seeds of each do you need to
# believe the worse one in at most 5 % of the cases? Solve the formula for $n$, then check it in the
# figure.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# $\Phi(-1.645) = 0.05$, so $0.5\sqrt{n/2} = 1.645$ and $n = 2 \cdot 3.29^2 = 21.6$: 22 seeds each.
#
# ```python
# assert chance_of_error(np.array([21]))[0] > 0.05 > chance_of_error(np.array([22]))[0]
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** A simpler sweep has no pipes: it catches Ctrl-C and SIGTERM and passes them on to its
# workers. In which case would workers be left behind?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# After SIGKILL, which includes `kill -9` and running out of memory, and after a crash of the
# interpreter: the parent cannot pass anything on. Its pipes are closed in every case, because the
# operating system closes them.
#
# ```python
# import os
# import subprocess
# import sys
#
# reader, writer = os.pipe()
# sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
# parent = subprocess.Popen(sleep, pass_fds=[writer])
# os.close(writer)
# parent.kill()  # SIGKILL: it cannot do anything more
# parent.wait()
# assert os.read(reader, 1) == b""  # the end of the file: the system has closed the other end
# os.close(reader)
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** Here is a shorter plan: it has one mapping of settings, and puts the
# seed of each run into it. The sweep runs, and its interval is very narrow. Why should that alarm you?

# %%
shared = dict(settings)
short_plan = []
for seed in range(3):
    shared["seed"] = seed
    short_plan.append(shared)


def pretend_to_train(config: dict[str, Any]) -> float:
    """Stand for a training run: its score depends on the seed alone."""
    return float(np.random.default_rng(config["seed"]).normal(400, 80))


scores = np.array([pretend_to_train(config) for config in short_plan])
mean, low, high = mean_interval(scores)
print(f"mean {mean:.1f}, 95 % interval {low:.1f} to {high:.1f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# All three entries are the *same* mapping, and it holds the last seed: the sweep trained seed 2
# three times. Equal scores give an interval of width zero. A band without width is the sign of a
# broken sweep, not of a stable algorithm. `make_plan` makes a new mapping for each run.
#
# ```python
# short_plan = [{**settings, "seed": seed} for seed in range(3)]
# scores = np.array([pretend_to_train(config) for config in short_plan])
# assert len(set(scores)) == 3
# plan = make_plan("dqn", settings, {"dqn": {}}, [0, 1, 2], Path("runs/x"))
# assert [item.config().seed for item in plan] == [0, 1, 2]
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** The plan lists all variants with seed 0 first, then all with seed 1, and so on. Why is
# this order useful when a sweep is stopped halfway?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Every variant then has about the same number of finished seeds, so a first comparison is fair. The
# other order would have all seeds of the first variant and none of the last.
#
# ```python
# plan = make_plan("dqn", settings, {"a": {}, "b": {}}, [0, 1], Path("runs/x"))
# assert [(item.seed, item.variant) for item in plan] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Half of the runs of a variant end with a loss that is not finite. Somebody suggests
# averaging the others. A good run scores 400, and a failed one 0. What do they report, and what is
# true?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# They report 400, and the truth is 200: whoever uses this variant gets 0 in half of the cases. A
# failed run is a result. So the sweep says which runs failed, and you decide whether to give them a
# score or to repair the variant.
#
# ```python
# scores = np.array([400.0] * 5 + [0.0] * 5)
# assert scores[scores > 0].mean() == 400  # what they report
# assert scores.mean() == 200  # what you get
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# rlbook sweep dqn --config cartpole --seeds 5
# rlbook sweep dqn --config cartpole --seeds 5 --vary lr=1e-3,3e-4 --out lr.json
# rlbook sweep --config ablation.yaml --out ablation.json
# ```
#
# ```python
# from rlbook.sweep import sweep
# result = sweep("dqn", {"total_steps": 20_000}, variants={"wide": {"hidden": [256, 256]}}, seeds=5)
# ```
#
# ## References
#
# - P. Henderson et al. (2018). Deep reinforcement learning that matters. *AAAI*.
# - C. Colas, O. Sigaud, P.-Y. Oudeyer (2018). How many random seeds? arXiv:1806.08295.
# - R. Agarwal et al. (2021). Deep reinforcement learning at the edge of the statistical precipice.
#   *NeurIPS*.
