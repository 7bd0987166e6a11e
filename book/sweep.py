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
# One training run is an anecdote: with another seed the same code scores 500 or 200. In this
# chapter you build the tool that made the learning curves of this book. It trains each variant of an
# algorithm with several seeds, one process per run and as many at a time as you have cores. You may
# stop it at any moment, by Ctrl-C or by the plug: the same command goes on from the last checkpoints
# and repeats no run that is finished. At the end it prints a mean and an interquartile mean for each
# variant, both with an interval, and writes one small file that holds every curve, the settings, the
# seeds, the versions and the command.
#
# | | |
# |---|---|
# | Builds on | [the run](run.ipynb), whose exact resume it relies on; [settings](settings.ipynb) |
# | Same as in most tools | a grid of settings, a pool of processes |
# | Different | no database and no server: the run directories are the state |
# | Used for | every learning curve in `book/results/` |

# %%
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from scipy import stats
from tqdm import tqdm

from rlbook.agent import find_algorithm
from rlbook.envs import mean_interval
from rlbook.progress import Interrupted, Progress, RunFailed, catch_signals
from rlbook.run import RunDirectory, resume, train, versions
from rlbook.settings import Config, check_names, make_config, parse_yaml, read_settings

# %% [markdown]
# The cells that only show something need a little more.

# %%
import contextlib
from statistics import NormalDist

import matplotlib.pyplot as plt
from scipy.special import stdtrit

from rlbook.figures import COLORS, PALETTE, load_result, plot_result, plot_scores, use_style

use_style()
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The problem: how often is one seed wrong?
#
# Say that algorithm A is better than B by half a standard deviation of its score between seeds,
# which statisticians call a medium effect. You train each with $n$ seeds and believe the higher
# mean. The difference of the two means has the standard deviation $\sigma\sqrt{2/n}$, so you are
# wrong with probability
#
# $$P(\text{wrong}) = \Phi\Bigl(-\frac{d}{\sigma}\sqrt{\frac{n}{2}}\Bigr)$$
#
# where $\Phi(z)$ is the probability that a standard normal number is below $z$, and
# $d/\sigma = 0.5$. By hand, for one seed: $\Phi(-0.354) = 0.36$. You might as well toss a coin that
# is slightly bent.


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
# So a claim of this size needs some twenty seeds. And does the interval that you print beside a mean
# hold the truth as often as it says? Draw many sets of $n$ scores, and count the misses:


# %%
def missed(n: int, factor: float, rng: np.random.Generator) -> float:
    """Return how often mean ± factor · standard error of n seeds misses the true mean."""
    scores = rng.normal(size=(20_000, n))
    error = scores.std(axis=1, ddof=1) / np.sqrt(n)
    return float(np.mean(np.abs(scores.mean(axis=1)) > factor * error))


counts, rng = np.array([2, 3, 4, 5, 7, 10, 15, 20]), np.random.default_rng(0)
naive = [missed(n, 1.96, rng) for n in counts]
student = [missed(n, float(stdtrit(n - 1, 0.975)), rng) for n in counts]
figure, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(counts, naive, "o-", color=PALETTE[3], label="mean ± 1.96 standard errors")
ax.plot(counts, student, "o-", color=PALETTE[2], label="Student's t, as in this book")
ax.axhline(0.05, color=COLORS["random"], linestyle="--", linewidth=1)
ax.set(xlabel="seeds", ylabel="how often the interval\nmisses the truth", ylim=(0, 0.4))
ax.set(xticks=counts, title="a 95 % interval should miss in 5 %")
ax.legend()
plt.show()

# %% [markdown]
# With few seeds the usual ±1.96 standard errors promise too much: with three seeds a "95 % interval"
# misses the truth almost every fifth time. Student's t makes it as wide as it has to be, and
# `mean_interval` from [environments](envs.ipynb) does that.
#
# ## Variants
#
# A variant is a name and the settings in which it differs. A grid makes variants of all
# combinations; what stands after `=` is read as YAML, so that lists work too. (YAML takes 1e-3 for a
# text; the settings make a number of it.)

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
# Ablations have better names than `tau=1.0, target_update_interval=1`, and stand in a file:
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
# An algorithm is a setting like any other: `--vary algo=dqn,drqn`, or `algo: redq` in a variant. Then
# each setting that the sweep gives to all must be one that all of its algorithms have.

# %%
#| export
def check_variants(variants: Any) -> Variants:
    """Return named variants as they stand in a file, or say what is wrong with them."""
    if not isinstance(variants, dict) or not variants:
        raise ValueError("`variants` must hold at least one `name: {setting: value}`.")
    checked: Variants = {}
    for name, settings in variants.items():
        if not isinstance(settings, dict | None):
            raise ValueError(f"Variant {name!r} must be settings as `name: value`.")
        checked[str(name)] = settings or {}
    return checked


# %% [markdown]
# ## The plan
#
# The whole sweep is a list. An entry holds all that is needed to do one run, and nothing that is
# not plain text and numbers, so that it can be sent to another process, or one day to another
# machine. Its settings are a new mapping each: exercise 3 shows why that matters.

# %%
#| export
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


def check_seeds(seeds: Any) -> list[int]:
    """Return seeds from their number or their list."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        seeds = list(range(seeds))
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError("`seeds` must be a number above 0, or a list of different whole numbers.")
    return list(seeds)


# %% [markdown]
# Each variant has a folder, named after it as far as a file system allows. Of two variants that come
# to the same name the later gets a number, so that a variant added at the end never renames another,
# whose runs would have to be done again.

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

# %%
#| export
def make_plan(
    algo: str, settings: dict[str, Any], variants: Variants, seeds: list[int], directory: Path
) -> list[Item]:
    """List the runs, seed by seed, so that all variants advance together."""
    for name in ("seed", "run_dir"):
        if any(name in own for own in variants.values()):
            raise ValueError(f"A variant cannot set {name!r}: the sweep does.")
    whole = [{"algo": algo, **settings, **own} for own in variants.values()]
    algos = [str(every.pop("algo")) for every in whole]
    for name, every in zip(algos, whole, strict=True):
        check_names(find_algorithm(name).config_class, every)
    plan = []
    rows = list(zip(algos, variants, folder_names(list(variants)), whole, strict=True))
    for seed, (name, variant, folder, every) in itertools.product(seeds, rows):
        run_dir = str(directory / folder / f"seed_{seed}")
        plan.append(Item(name, variant, seed, run_dir, dict(every)))
    return plan


# %%
for item in make_plan("dqn", {"total_steps": 2_000}, grid(["n_step=1,10"]), [0, 1], Path("runs/x")):
    print(item)

# %% [markdown]
# A sweep runs for hours, so every mistake that can be found before it begins must be. And a folder
# that holds runs with other settings must not be mixed with new ones. Note what is allowed: more
# seeds and more variants in the same folder. What is there already is not repeated. Two variants that
# come to the same settings, as `lr=1e-3` and `lr=0.001` do, would be the same runs twice.

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


def check_keys(value: Any) -> None:
    """Raise unless settings survive the way through a file, where keys are texts."""
    if isinstance(value, dict):
        plain(value)
        if not all(isinstance(key, str) for key in value):
            raise ValueError("A sweep needs settings whose mappings have texts as keys.")
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list | tuple):
            check_keys(part)


# %%
#| export
def check_plan(plan: Sequence[Item]) -> None:
    """Raise before anything runs if a run could not, or would mix with other results."""
    tried: dict[str, dict[str, Any]] = {}  # variant -> all its settings
    for item in plan:
        config = item.config()
        check_keys(item.settings)
        if config.eval_every == 0:
            raise ValueError("A sweep compares evaluations: 'eval_every' must be above 0.")
        if item.variant not in tried:
            whole = {"algo": item.algo, **config.model_dump(), "seed": None, "run_dir": None}
            for other in (name for name, settings in tried.items() if settings == whole):
                raise ValueError(f"{other!r} and {item.variant!r} are the same settings: drop one.")
            find_algorithm(item.algo)(config=config)  # finds environment, spaces and device wrong
            tried[item.variant] = whole
        path = Path(item.run_dir) / "config.yaml"
        if path.exists():
            check_same(read_settings(path), item)


def check_same(stored: dict[str, Any], item: Item) -> None:
    """Raise if the run that is there has other settings than the one that is wanted."""
    config = item.config()
    there = plain({"algo": None, **type(config)().model_dump(), **stored})
    wanted = plain({"algo": item.algo, **config.model_dump()})
    for name, value in wanted.items():
        if name != "run_dir" and there[name] != value:  # the whole sweep may have been moved
            raise ValueError(
                f"{item.run_dir} holds a run with {name} {there[name]!r}, not {value!r}: "
                "choose another directory with --run-dir."
            )


# %% [markdown]
# ## One run
#
# `run_item` is the heart, and it has no state of its own. Called for the first time it trains;
# called after a crash it goes on from the last checkpoint; called when all is done it only reads
# what is there. So whoever calls it, in whichever process, need not remember anything. It leaves a
# note of its seconds, its day and its versions beside the run, since the metrics must not hold times:
# they would differ from run to run. Another sweep may have come by in the same folder meanwhile, so
# what lies there is taken only if its settings are those that are wanted (`outcome_of`), and damage is
# said, never counted.

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
    path = Path(item.run_dir) / "config.yaml"
    if path.exists():
        check_same(read_settings(path), item)
    return read_outcome(item.run_dir)


# %%
#| export
NOTE = "sweep.json"


def read_note(folder: str | Path) -> dict[str, Any]:
    """Read the sweep's own note beside a run, or above all: its seconds, and if it is finished."""
    path = Path(folder) / NOTE
    try:
        note = json.loads(path.read_text())
    except (OSError, ValueError):
        note = None
    sound = isinstance(note, dict) and type(note.get("seconds")) in (int, float)
    return note if sound else {"seconds": 0.0}


def write_note(folder: str | Path, note: dict[str, Any]) -> None:
    """Write the note in one step."""
    path = Path(folder) / NOTE
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(note))
    os.replace(temporary, path)


# %% [markdown]
# Two processes in one run directory would ruin it. It is easily done: type the command twice, or
# start again while an old process still writes its last checkpoint. [A run](run.ipynb) refuses the
# second one; a sweep lets it wait, and then it finds the run finished or goes on with it. The lock is
# `filelock`'s, one of the operating system: it is given back when its holder dies, whatever it dies of.

# %%
#| export
def run_item(item: Item) -> Outcome:
    """Do one run, or what is left of it: begin, go on from its checkpoint, or only read it."""
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
            write_note(folder, {"seconds": seconds, "finished": finished, **today})
        outcome = read_outcome(folder)
        assert outcome is not None
        return outcome


# %%
settings = {
    **{"env_id": "CartPole-v1", "total_steps": 1_500, "learning_starts": 200, "epsilon_decay_steps": 800},
    **{"eval_every": 500, "eval_episodes": 5, "checkpoint_every": 500, "train_frequency": 8},
}
item = make_plan("dqn", settings, {"dqn": {}}, [0], folder / "one")[0]
for call in ("first", "second"):
    clock = time.perf_counter()
    outcome = run_item(item)
    print(f"{call} call: {time.perf_counter() - clock:6.3f} s", outcome.steps, outcome.returns)

# %% [markdown]
# ## A process for each run
#
# One process per run: a crash takes nobody with it, and each has an interpreter of its own. The
# hard part is to stop them. A sweep may end by Ctrl-C, by SIGTERM, or without any chance to say
# goodbye, by SIGKILL, which is also how a system ends programs when memory runs out. Its workers must
# stop in each case, or they would go on for hours, unseen.
#
# The trick is a pipe. Each worker reads from its stdin, where nothing is ever written. When the
# sweep ends, **however** it ends, the operating system closes the other end, the read returns, and
# the worker sends itself SIGTERM, on which [a run](run.ipynb) writes a checkpoint and ends. Should it
# hang, in an environment that never returns, SIGKILL follows a minute later.

# %%
#| export
PATIENCE = 60.0  # seconds in which a run has to write its checkpoint and end


def follow_parent() -> None:
    """Stop this process when the other end of its stdin goes away: SIGTERM, then SIGKILL."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)  # an environment may hang
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def worker(text: str) -> int:
    """Do the run that is described in JSON; the exit code says how it went."""
    follow_parent()
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
# The workers get a session of their own. Otherwise Ctrl-C in a terminal would reach them at the
# same time as their parent, and a second signal stops a run at once, without its checkpoint.

# %%
#| export
class Workers:
    """Processes that each do one run, with one thread each."""

    def __init__(self) -> None:
        self.running: dict[subprocess.Popen[bytes], Item] = {}

    def start(self, item: Item) -> None:
        """Start the process of one run; what it prints goes to log.txt beside the run."""
        Path(item.run_dir).mkdir(parents=True, exist_ok=True)
        with open(Path(item.run_dir) / "log.txt", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlbook.sweep", json.dumps(dataclasses.asdict(item))],
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
            )
        self.running[process] = item

    def finished(self) -> list[tuple[Item, int]]:
        """Return the runs whose process has ended since the last call, with its exit code."""
        ended = [process for process in self.running if process.poll() is not None]
        return [(self.running.pop(process), process.returncode) for process in ended]

    def stop(self, patience: float = PATIENCE) -> None:
        """Let every process write its checkpoint and end."""
        for process in self.running:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.running:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


# %% [markdown]
# What a process printed last is why it failed.

# %%
#| export
def last_words(item: Item, code: int) -> str:
    """Say why a process failed: the signal that ended it, or the last line that it printed."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = (Path(item.run_dir) / "log.txt").read_text(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else f"its process ended with code {code}"


# %% [markdown]
# ## One bar for all
#
# Twenty bars would flicker, so there is one for the whole sweep. It counts environment steps, since
# a run may take hours, and finds them where the runs leave them anyway: in the last line of each
# `metrics.jsonl`. A run that has ended is one line of text above the bar.

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
# The loop that feeds the processes: start what fits, report what has ended, and on a signal stop
# all. A `Backend` is whatever does a list of runs; the chapter [cluster](cluster.ipynb) adds another.

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
    report, workers, jobs = Report(plan, say), Workers(), jobs or cores()
    with catch_signals() as caught:
        try:
            while (report.waiting or workers.running) and not caught:
                while report.waiting and len(workers.running) < jobs:
                    workers.start(report.waiting.pop(0))
                for item, code in workers.finished():
                    report.end(item, last_words(item, code))
                report.show()
                time.sleep(0.05)
        finally:
            workers.stop()
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
# ## What the seeds say together
#
# The mean of five scores is at the mercy of one: $10, 12, 11, 13$ and a failure at $-100$ have the
# mean $-10.8$, which no run scored. The median, 11, ignores four of five. Agarwal et al. (2021)
# recommend what lies between, the **interquartile mean**: leave out the lowest and the highest
# quarter, and average the rest. By hand, of five scores one goes on each side, and
# $(10 + 11 + 12) / 3 = 11$.
#
# How sure is it? Student's t does not apply to a trimmed mean. The bootstrap does: draw as many
# scores, with replacement, as there are seeds, take the interquartile mean, do so thousands of
# times, and read off the middle 95 %. SciPy has both parts.

# %%
#| export
def iqm_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the interquartile mean of scores and the ends of its 95 % bootstrap interval."""
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
            spread = f"95 % interval {low:8.2f} to {high:8.2f}" if seeds > 1 else "one seed"
            label, count = (name, f"   {seeds} seeds" * (seeds > 1)) if what == "IQM" else ("", "")
            lines.append(f"{label:{width}}  {what:4} {middle:8.2f}   {spread}{count}")
    return "\n".join(lines)


# %%
one_failed = [10.0, 12.0, 11.0, 13.0, -100.0]
assert abs(np.mean(one_failed) + 10.8) < 1e-12 and iqm_interval(one_failed)[0] == 11
assert iqm_interval(one_failed)[2] <= 13 < 50 < mean_interval(np.array(one_failed))[2]
print(summary({"runs": {"one failed": {"final": one_failed}}}))

# %% [markdown]
# The interval of the mean reaches far beyond the best score, 13, to a place where no run has been.
# That of the interquartile mean does not, and its lower end still tells of the failure: in some of
# the draws it came up often enough to survive the trimming. The interquartile mean sums up a variant
# in every stored result, and in every figure of last evaluations, beside the seeds themselves.
# Learning curves are means.

# %% [markdown]
# ## One small file
#
# The result is one JSON file with all that a figure needs, and all that a sceptic needs to make it
# again: every curve, on the one grid of steps at which all seeds were evaluated, and the
# interquartile mean of the last evaluations with the ends of its interval. A variant names the
# settings that are not at their default. The defaults stand beside it, once an algorithm: when one
# of them is changed some day, the file still says what was run, and a test can say which results
# have to be made anew.

# %%
#| export
SET_BY_THE_SWEEP = ("seed", "run_dir")


def overrides(config: Config) -> dict[str, Any]:
    """Return the settings that are not at their default, without what the sweep sets itself."""
    default = type(config)()
    differing = {name: v for name, v in config.model_dump().items() if v != getattr(default, name)}
    return {name: v for name, v in differing.items() if name not in SET_BY_THE_SWEEP}


def defaults(algo: str) -> dict[str, Any]:
    """Return the default settings of an algorithm, without what the sweep sets itself."""
    own = find_algorithm(algo).config_class().model_dump()
    return {name: value for name, value in own.items() if name not in SET_BY_THE_SWEEP}


def made_when(plan: Sequence[Item]) -> dict[str, Any]:
    """Return the last day on which a run was made, and with which versions; all, if they differ."""
    notes = [read_note(item.run_dir) for item in plan]
    made_with = [note.get("versions") or versions() for note in notes]
    together = {
        name: ", ".join(dict.fromkeys(str(each.get(name, "unknown")) for each in made_with))
        for name in versions()
    }
    today = datetime.date.today().isoformat()
    return {"versions": together, "created": max(str(note.get("created", today)) for note in notes)}


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
    return {
        "command": command,
        "algo": ", ".join(dict.fromkeys(item.algo for item in plan)),
        "env_id": ", ".join(dict.fromkeys(item.config().env_id for item in plan)),
        "seeds": list(dict.fromkeys(item.seed for item in plan)),
        **made_when(plan),
        "seconds": short(seconds),
        "defaults": {algo: defaults(algo) for algo in dict.fromkeys(item.algo for item in plan)},
        "runs": runs,
    }


# %% [markdown]
# A stored result may have cost a day, so the file that you name with `--out` is only replaced by a
# newer result of the same sweep. That, and whether it can be written at all, is checked before the
# first run, not after the last. Without `--out` the result stands beside the runs, always that of the
# last sweep there.

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
        runs = old["runs"].items()
        algos = {name: run.get("algo", old["algo"]) for name, run in runs}
        before = (old["seeds"], set(algos), algos, {name: run["settings"] for name, run in runs})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{out} is not a stored result: it stays as it is.") from None
    seeds = list(dict.fromkeys(item.seed for item in plan))
    algos = {item.variant: item.algo for item in plan}
    settings = {item.variant: plain(overrides(item.config())) for item in plan}
    now = (seeds, set(algos), algos, settings)
    parts = ("seeds", "variants", "algorithms", "settings")
    differ = [part for part, a, b in zip(parts, before, now, strict=True) if a != b]
    if differ:
        raise ValueError(f"{out} holds a sweep with other {differ[0]}: choose another --out.")


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
# JSON with an indent puts each number of a list on a line of its own. One curve a line is easier to
# read, and so are the differences between two versions of a file:

# %%
#| export
TEXT_OR_NUMBERS = r'"(?:[^"\\]|\\.)*"|\[[^\[\]{}"]*\]'  # brackets in a text stay


def as_line(found: str) -> str:
    """Put a list of numbers on one line."""
    return json.dumps(json.loads(found)) if found.startswith("[") else found


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write a result in one step, one curve a line."""
    text = json.dumps(result, indent=1)
    text = re.sub(TEXT_OR_NUMBERS, lambda found: as_line(found[0]), text)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, out)


# %% [markdown]
# ## The whole sweep
#
# If a run fails, the others go on, but no result is written: a mean over the seeds that happened to
# survive is not the mean over seeds (exercise 5).

# %%
#| export
def sweep(
    algo: str,
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
    chosen = check_variants({algo: {}} if variants is None else variants)
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
        write_note(folder, {"seconds": seconds, "runs": runs})
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
# What do 10-step returns buy on CartPole within 3,000 steps? Two variants, three seeds, six runs of
# about a second each. The command runs as your shell would run it, and as soon as one run has
# finished and another is in the middle, somebody presses Ctrl-C.

# %%
budget = "--total-steps 3000 --epsilon-decay-steps 1500 --eval-every 500 --eval-episodes 5"
line = f"sweep dqn --config cartpole {budget} --checkpoint-every 500 --seeds 3 --vary n_step=1,10"
line += " --run-dir runs/steps --out steps.json"


def finished_runs() -> dict[str, int]:
    """Return the finished runs, with the time at which their metrics were last touched."""
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


print(f"$ rlbook {line}")
words = [sys.executable, "-m", "rlbook.cli", *line.split()]
out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
process = subprocess.Popen(words, text=True, cwd=folder, **out)
while not (finished_runs() and (cut := half_done())) and process.poll() is None:
    time.sleep(0.02)
process.send_signal(signal.SIGINT)
print(process.communicate()[0], f"(exit code {process.returncode})", sep="")
assert process.returncode == 130
before = finished_runs()
print("finished:", ", ".join(before), "- in the middle:", ", ".join(cut))
assert before and cut and not set(cut) & set(before)

# %% [markdown]
# The same command again, this time inside the notebook, which saves a process. It does not touch
# what was finished, and goes on with the rest:

# %%
from rlbook.cli import main

print(f"$ rlbook {line}")
with contextlib.chdir(folder):
    assert main(line.split()) == 0
after = finished_runs()
assert len(after) == 6 and all(after[run] == when for run, when in before.items())

# %% [markdown]
# Did the interruption change a number? Take the run that was cut in the middle and do it once more
# elsewhere, from beginning to end:

# %%
result = load_result(folder / "steps.json")
variant, seed = cut[0].split()[0], int(cut[0][-1])
own = {**result["runs"][variant]["settings"]}
again = make_plan("dqn", own, {"again": {}}, [seed], folder / "runs/again")[0]
print(cut[0], run_item(again).returns)
was_cut = folder / "runs/steps" / variant / f"seed_{seed}" / "metrics.jsonl"
assert Path(again.run_dir, "metrics.jsonl").read_bytes() == was_cut.read_bytes()

# %% [markdown]
# Not one digit in any line of its metrics. The file holds all of it. `plot_result` draws the curves, `plot_scores` the last
# evaluations: each seed a dot, and the interquartile mean with its interval. `rlbook plot steps.json`
# draws both.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
labels = {"n_step=1": "1 step", "n_step=10": "10 steps"}
plot_result(left, result, labels)
plot_scores(right, result, labels)
plt.show()
one = {**result["runs"]["n_step=10"], "settings": "...", "returns": "..."}
small = {**result, "runs": {"n_step=1": "...", "n_step=10": one}}
print(json.dumps(small, indent=1), f"{(folder / 'steps.json').stat().st_size:,} bytes", sep="\n")

# %% [markdown]
# Three seeds give a band that leaves the range of possible returns, which is the truth about three
# seeds. The bootstrap knows no more than the seeds that it draws from: of three, its interval is the
# range from the lowest to the highest, however far the next one may be from there.
#
# Nor are 3,000 steps enough. [DQN](dqn.ipynb) asks the same question with ten times as many and five
# seeds, and there the answer is clear: an interquartile mean of 500 with 10 steps and of 238 with one.
# Whatever the figure above says, too few steps mislead as surely as too few seeds.
#
# ## Mistakes

# %%
mistakes: dict[str, dict[str, Any]] = {
    "no seeds": {"seeds": 0},
    "the same seed twice": {"seeds": [1, 1]},
    "an unknown setting": {"variants": {"fast": {"lrr": 0.1}}},
    "a wrong value": {"variants": {"fast": {"lr": "very"}}},
    "a seed in a variant": {"variants": {"lucky": {"seed": 7}}},
    "an unknown environment": {"variants": {"other": {"env_id": "CartPoel-v1"}}},
    "another sweep's result": {"out": folder / "steps.json"},
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
# - The interval is over seeds, of the score of the last evaluation. It says nothing about other
#   environments. That of the mean takes scores for normal; with a few runs that fail completely they
#   are not. That of the interquartile mean takes the seeds at hand for all there are: with five it
#   is too narrow, as [figures](figures.ipynb) measures, and with three or fewer seeds nothing is
#   trimmed. So both stand in the summary, and figures show the seeds beside the interval.
# - Two variants with the same seed share the starts of their evaluations, and those of their episodes
#   after each checkpoint, though they soon play different games. The intervals ignore that and treat
#   the runs as independent.
# - Seconds are counted while several runs share a machine. Compare them within one sweep only.
# - After a SIGKILL the seconds of the killed process are lost; the numbers of the run are not.
# - A stored result names the last day on which one of its runs was made, and the versions. A later revision of this book may
#   round differently, so the same seed may end elsewhere; the distribution over seeds should not.
#
# ## Exercises
#
# **Exercise 1.** How many seeds does it take to believe the worse algorithm in at most 5 % of the
# cases, if the better one is better by half a standard deviation? Solve the formula for $n$, then
# read it off the figure.

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
# **Exercise 2.** A simpler sweep would catch Ctrl-C and SIGTERM and pass them on to its workers,
# without pipes. Which end of the sweep would then leave workers behind?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# SIGKILL, and with it the out-of-memory killer, `kill -9` and a crash of the interpreter: the
# parent has no chance to pass anything on. Its pipes are closed in every case, because that is done
# by the operating system and not by the parent.
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
# parent.kill()  # SIGKILL: it cannot say goodbye
# parent.wait()
# assert os.read(reader, 1) == b""  # the end of the file: the system has closed the other end
# os.close(reader)
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** A shorter plan: one mapping of settings, the seed put into it for
# each run. The sweep runs, and its result is wonderfully clear. Why should that alarm you?

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
# three times. Identical scores give an interval of width zero. A band that vanishes is the sign of
# a broken sweep, not of a stable algorithm. `make_plan` builds a new mapping for each run.
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
# **Exercise 4.** The plan lists all variants of seed 0 first, then those of seed 1, and so on. What
# is good about this order when a sweep is stopped half way?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Every variant then has about the same number of finished seeds, and a first comparison is fair.
# The other order would have all seeds of the first variant and none of the last. It also spreads a
# slow hour of the machine over all variants.
#
# ```python
# plan = make_plan("dqn", settings, {"a": {}, "b": {}}, [0, 1], Path("runs/x"))
# assert [(item.seed, item.variant) for item in plan] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Half of the runs of a variant end with a loss that is not finite. Somebody
# suggests to average the rest. With scores of 400 for a sound run and 0 for a failed one, what do
# they report, and what is true?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# They report 400, and the truth is 200: whoever uses this variant gets 0 in half of the cases. A
# failed run is a result. So the sweep says which runs failed, and leaves it to you to give them a
# score or to mend the variant.
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
