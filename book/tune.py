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
# # Tuning
#
# An algorithm has a dozen settings, and the good values differ from problem to problem. In this
# chapter you build `rlbook tune`: it tries settings, gives up early on those that go badly, learns
# from the scores where to look next, and writes the best settings as a config that `rlbook train`
# takes. The search uses [Optuna](https://optuna.org); the runs are those of
# [a sweep](sweep.ipynb). Then you see why you should not believe the score of the winner, and what
# to do about it.
#
# | | |
# |---|---|
# | Builds on | [Sweeps](sweep.ipynb): an `Item` is one run, in a process of its own; [A cluster](cluster.ipynb): the same on Ray |
# | Same | runs, checkpoints, exact resume |
# | Different | which settings come next depends on how the earlier ones did |
# | Needs | `pip install 'rlbook[tune]'` |

# %% tags=["hide-input"]
#| export
import importlib
import importlib.resources
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import filelock
import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import create_model

from rlbook.agent import Agent, family, find_algorithm
from rlbook.cluster import RETRIES, as_task, cancel, connect, do_item, import_ray, why_it_ended
from rlbook.envs import derive_seed
from rlbook.figures import COLORS, STYLE
from rlbook.progress import Interrupted, RunFailed, catch_signals
from rlbook.run import versions
from rlbook.settings import (
    Config,
    check_names,
    make_config,
    read_settings,
    read_value,
    write_settings,
)
from rlbook.sweep import (
    SET_BY_THE_SWEEP,
    Item,
    Outcome,
    Worker,
    check_plan,
    check_seeds,
    check_writable,
    cores,
    make_plan,
    name_algorithm,
    name_environment,
    overrides,
    plain,
    read_outcome,
    replace_file,
    short,
    start_worker,
    stop_workers,
    why_it_failed,
    write_result,
)

# %% tags=["hide-input"]
import contextlib
import itertools
import tempfile

import matplotlib.pyplot as plt
from IPython.display import Image

from rlbook.cli import main
from rlbook.dqn import DQNConfig
from rlbook.figures import load_result, made_by, use_style

use_style()
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A search
#
# Six sets of settings for DQN on CartPole, one seed each, 3,000 steps, two at a time. A set of
# settings that is tried is called a *trial*. Six are far too few to find anything, but enough to
# see how it works:

# %%
words = "tune dqn --config cartpole --total-steps 3000 --eval-every 500 --epsilon-decay-steps 1500"
words += " --eval-episodes 5 --trials 6 --jobs 2 --run-dir runs/tune"
print(f"$ rlbook {words}")
with contextlib.chdir(folder):
    assert main(words.split()) == 0

# %% [markdown]
# The first trial is the config as it was. Giving up early begins when five trials are complete, so
# a search of six hardly shows it. The directory holds `best.yaml`, `top.yaml`, `result.json` and
# this figure: the score of each trial, and how much each setting mattered for a place among the
# best, relative to the others.

# %%
Image(folder / "runs/tune/tune.png", width=760)

# %% [markdown]
# The best settings are an ordinary config:

# %%
words = "train --config runs/tune/best.yaml --seed 100 --total-steps 2000 --run-dir runs/a"
print(f"$ rlbook {words}")
with contextlib.chdir(folder):
    assert main(words.split()) == 0

# %% [markdown]
# ## The search space
#
# A search space is a file with a line for each setting: a range or a list of choices. Learning
# rates are searched on a logarithmic scale, since the step from 0.001 to 0.002 matters as much as
# that from 0.0001 to 0.0002. A range between whole numbers gives whole numbers. Each algorithm of
# the book comes with such a file, and an algorithm of your own that extends one of them uses the
# same file. `--space my.yaml` names another. This is DQN's:

# %%
print((importlib.resources.files("rlbook") / "spaces" / "dqn.yaml").read_text())

# %%
#| export
@dataclass(frozen=True)
class Dimension:
    """One setting to be searched: a range, or a list of choices."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False  # whole numbers only
    choices: tuple[Any, ...] = ()

    @property
    def labels(self) -> dict[Any, Any]:
        """The choices by what Optuna stores for them: a list, or none, by its text."""
        return {str(v) if v is None or isinstance(v, list) else v: v for v in self.choices}

    def suggest(self, trial: Any) -> Any:
        """Let a trial choose a value."""
        if self.choices:
            return self.labels[trial.suggest_categorical(self.name, list(self.labels))]
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def stored(self, value: Any) -> Any:
        """Return what Optuna would store for a value; None if the dimension does not have it."""
        if self.choices:
            wanted = list(value) if isinstance(value, tuple) else value
            return next((label for label, choice in self.labels.items() if choice == wanted), None)
        return value if type(value) in (int, float) and self.low <= value <= self.high else None


Space = tuple[Dimension, ...]


def read_dimension(name: str, given: Any, config_class: type[Config]) -> Dimension:
    """Read one line of a search space, or say what is wrong with it."""
    what, field_info = f"The search space of {name!r}", config_class.model_fields[name]
    numbers, hint = (int, float), field_info.annotation
    if isinstance(given, list) and given:
        choices = [list(v) if isinstance(v, list | tuple) else read_value(v, hint) for v in given]
        dimension = Dimension(name, choices=tuple(choices))
        if len(dimension.labels) < len(given):
            raise ValueError(f"{what} has a choice twice.")
    elif isinstance(given, dict) and {"low", "high"} <= set(given) <= {"low", "high", "log"}:
        low, high = (read_value(given[end], hint) for end in ("low", "high"))
        log = given.get("log", False)
        if type(low) not in numbers or type(high) not in numbers or not low < high:
            raise ValueError(f"{what} must go from a number `low` to a higher one `high`.")
        if type(log) is not bool or (log and low <= 0):
            raise ValueError(f"{what} can have `log: true` only if it is above 0.")
        whole = type(low) is int and type(high) is int
        dimension = Dimension(name, low, high, log, whole)
    else:
        raise ValueError(f"{what} must be a list of choices, or {{low: 1, high: 9, log: true}}.")
    own: dict[str, Any] = {name: (field_info.annotation, field_info)}
    checked = create_model(config_class.__name__, __base__=Config, **own)
    for value in dimension.choices or (dimension.low, dimension.high):
        checked(**{name: value})  # raises where the setting cannot have this value
    return dimension


def read_space(given: Mapping[str, Any], config_class: type[Config]) -> Space:
    """Read a search space: a line for each setting."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError("A search space must hold at least one `setting: [choice, choice]`.")
    check_names(config_class, given)
    for name in ("seed", "run_dir", "env_id", "env_kwargs", "total_steps", "eval_every"):
        if name in given:
            raise ValueError(f"{name!r} cannot be searched: trials must differ in settings alone.")
    return tuple(read_dimension(name, value, config_class) for name, value in given.items())


def find_space(algo: str, file: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Read a file with a search space, or that of an algorithm or of the one that it extends."""
    if file is not None:
        if not Path(file).is_file():
            raise ValueError(f"There is no search space {str(file)!r}.")
        return read_settings(Path(file))
    folder = Path(str(importlib.resources.files("rlbook"))) / "spaces"
    for name in family(find_algorithm(algo)):
        if (folder / f"{name}.yaml").is_file():
            return read_settings(folder / f"{name}.yaml")
    example = "{lr: {low: 1e-4, high: 1e-2, log: true}}"
    raise ValueError(f"{algo!r} comes without a search space: give one as `space`: {example}.")

# %%
lr, hidden = read_space({"lr": {"low": 1e-4, "high": 1e-2, "log": True}, "hidden": [[64], [64, 64]]}, DQNConfig)
assert hidden.labels == {"[64]": [64], "[64, 64]": [64, 64]}
assert hidden.stored((64,)) == "[64]" and hidden.stored((32,)) is None
assert lr.stored(1e-3) == 1e-3 and lr.stored(1.0) is None
for wrong in ({"lr": [1e-3, -1.0]}, {"lr": {"low": 1, "high": 0}}, {"rl": [1, 2]}, {"seed": [1, 2]}):
    try:
        read_space(wrong, DQNConfig)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## A study that processes share
#
# A search takes hours, so it must survive a kill, and several processes should be able to share
# it. Optuna keeps what was tried and how it scored in a *study*. Ours is stored as a journal, a
# file to which every process appends. That works on the network disks of a cluster, too. Three
# rules make it safe:
#
# 1. **One decision at a time.** Whoever asks for the next trial, or ends one, holds the lock of the
#    directory.
# 2. **A trial has an owner**, who holds the lock of its folder. The system frees that lock when the process
#    ends, however it ends. So a trial that is marked as running and whose lock is free was left behind. It
#    is put back into the queue with the same settings and the same folder, where
#    [its runs](run.ipynb) continue from their checkpoints.
# 3. **The randomness follows from the number of the trial**, not from the process. With `--jobs 1`, a search
#    that was killed tries the same settings as one that was left alone.
#
# By default the settings are chosen by the *tree-structured Parzen estimator*: after some random trials it
# splits the trials so far into the good and the rest, and prefers values that are more frequent among the
# good.

# %%
#| export
def import_optuna() -> Any:
    """Import Optuna, or say how to get it."""
    try:
        with warnings.catch_warnings():  # of what it imports, in a notebook
            warnings.simplefilter("ignore")
            optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ValueError(
            "Tuning needs Optuna, which is not installed: `pip install 'rlbook[tune]'`."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


STARTUP = 5  # trials at random before the search learns from them, and before any is pruned


@dataclass
class Attempt:
    """A trial under way: its runs, one for each seed, and how far they are."""

    trial: Any  # Optuna's
    folder: str
    values: dict[str, Any]
    items: list[Item]
    lock: filelock.BaseFileLock
    handle: Any = None  # the process or task of the current run
    outcomes: list[Outcome] = field(default_factory=list)  # of the seeds that are done
    seen: int = 0  # evaluations of the current run
    reported: list[float] = field(default_factory=list)  # all scores so far


class Study:
    """What was tried, shared by all processes that work in one directory."""

    def __init__(
        self,
        algo: str,
        settings: dict[str, Any],
        space: Space,
        seeds: list[int],
        directory: Path,
        trials: int,
    ) -> None:
        self.optuna = import_optuna()
        self.algo, self.settings, self.space, self.seeds = algo, settings, space, seeds
        self.directory, self.trials = directory, trials
        self.own: set[int] = set()  # numbers of the trials of this process
        self.lock = filelock.FileLock(directory / "lock")
        storages = self.optuna.storages
        with self.lock:
            journal = storages.journal.JournalFileBackend(str(directory / "study.log"))
            self.study = self.optuna.create_study(
                storage=storages.JournalStorage(journal),
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
            )
            self.begin()

    def begin(self) -> None:
        """Write down what is searched, or compare it with what another process wrote."""
        config = make_config(find_algorithm(self.algo).config_class, self.settings)
        ranges = {d.name: list(d.choices) or [d.low, d.high, d.log] for d in self.space}
        chosen = plain({**overrides(config), "algo": self.algo})
        search = plain({"settings": chosen, "space": ranges, "seeds": self.seeds})
        there = self.study.user_attrs.get("search", search)
        for part, value in search.items():
            if there[part] != value:
                raise ValueError(
                    f"{self.directory} holds a search with other {part}: go on with those, or "
                    "choose another --run-dir."
                )
        if not self.study.trials:  # the first trial is the config as it is, as far as it fits
            values = {d.name: d.stored(getattr(config, d.name)) for d in self.space}
            fitting = {name: value for name, value in values.items() if value is not None}
            self.study.set_user_attr("search", search)
            self.study.enqueue_trial(fitting, user_attrs={"folder": "trial_0000"})

    def counted(self) -> list[Any]:
        """Return all trials but those that were left behind and put back into the queue."""
        trials = self.study.get_trials()
        again = {trial.user_attrs.get("continues") for trial in trials}
        return [trial for trial in trials if trial.number not in again]

    def requeue(self) -> None:
        """Put the trials back into the queue whose process has ended."""
        states = self.optuna.trial.TrialState
        for trial in self.study.get_trials(states=(states.RUNNING,)):
            folder = trial.user_attrs.get("folder")
            if trial.number in self.own:
                continue
            lock = self.folder_lock(folder or "trial_none")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                continue  # somebody is at work on it
            if trial.number in {each.number for each in self.counted()}:
                attributes = {"folder": folder or self.next_folder(), "continues": trial.number}
                self.study.enqueue_trial(trial.params, user_attrs=attributes)
            self.study.tell(trial.number, state=states.FAIL)
            lock.release()

    def folder_lock(self, folder: str) -> filelock.BaseFileLock:
        """Return the lock of a trial."""
        (self.directory / folder).mkdir(exist_ok=True)
        return filelock.FileLock(self.directory / folder / "owner.lock")

    def next_folder(self) -> str:
        """Name the folder of a new trial."""
        used = [trial.user_attrs.get("folder", "") for trial in self.counted()]
        return f"trial_{sum(name.startswith('trial_') for name in used):04d}"

    def ask(self) -> Attempt | None:
        """Return a trial to be done; None if all are done or somebody else's."""
        with self.lock:
            self.requeue()
            trials, states = self.counted(), self.optuna.trial.TrialState
            waiting = [trial for trial in trials if trial.state == states.WAITING]
            if not waiting and len(trials) >= self.trials:
                return None
            folder = waiting[0].user_attrs["folder"] if waiting else self.next_folder()
            seed = derive_seed(self.seeds[0], "tune", folder)
            self.study.sampler = self.optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP
            )
            trial = self.study.ask()
            trial.set_user_attr("folder", folder)
            self.own.add(trial.number)
            values = {dimension.name: dimension.suggest(trial) for dimension in self.space}
            lock = self.folder_lock(folder)
            lock.acquire()
        whole = {**self.settings, **values}
        place = self.directory / folder
        runs = [(seed, str(place / f"seed_{seed}")) for seed in self.seeds]
        items = [Item(self.algo, folder, seed, run_dir, whole) for seed, run_dir in runs]
        return Attempt(trial, folder, values, items, lock)

    def complete(self) -> list[list[float]]:
        """Return the scores that each complete trial has reported."""
        trials = self.study.get_trials(states=(self.optuna.trial.TrialState.COMPLETE,))
        return [list(trial.intermediate_values.values()) for trial in trials]

    def add_seconds(self, seconds: float) -> float:
        """Add the time of this process to that of the ones before, and return the sum."""
        with self.lock:
            total = float(self.study.user_attrs.get("seconds", 0.0)) + seconds
            self.study.set_user_attr("seconds", total)
        return total

    def tell(self, attempt: Attempt, state: str, score: float | None = None) -> None:
        """Write down how a trial ended, and give it up."""
        found = self.optuna.trial.TrialState[state]
        with self.lock:  # or another process could take a trial that just ended for one left behind
            self.study.tell(attempt.trial, score, state=found)
            attempt.lock.release()
        self.own.discard(attempt.trial.number)

    def unfinished(self) -> int:
        """Count the trials that are still to be done."""
        done = sum(trial.state.is_finished() for trial in self.counted())
        return max(self.trials, len(self.counted())) - done

# %% [markdown]
# ## Giving up early
#
# Most settings are bad, and it shows early. At each evaluation a trial reports its score. Take the
# mean of its scores so far, and for each complete trial the mean of as many of its first scores.
# If the trial's own mean is below the median of the others, it is *pruned*, that is stopped.
# Nothing is pruned in the first quarter of a trial's first run, nor before five trials are
# complete.
#
# With several seeds, a trial does them one after another. Suppose that seed 0 scored 20, 50, 90 at
# its three evaluations, and seed 1 has 10 and 30 at its first two. At each evaluation of seed 1
# the trial reports the mean over both seeds, $(20 + 10)/2 = 15$ and $(50 + 30)/2 = 40$. So its
# five scores are 20, 50, 90, 15 and 40, with a mean of 43. The first five scores of the other
# trials come from the same seeds after the same steps, so like is compared with like. (Optuna's
# own `MedianPruner` would compare the *best* score so far, here 90: a trial whose first seed was
# lucky would never be pruned.) The score of a whole trial is the mean over its seeds of the last
# evaluation.

# %%
#| export
def evaluations(run_dir: str | Path) -> list[float]:
    """Return the scores of a run so far, from its metrics."""
    try:
        text = (Path(run_dir) / "metrics.jsonl").read_text()
    except OSError:
        return []  # it has not begun
    whole = text.rpartition("\n")[0]  # the last line may be half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line["eval_return_mean"] for line in lines if "eval_return_mean" in line]


def scores(outcomes: Sequence[Outcome], curve: Sequence[float], seen: int = 0) -> list[float]:
    """Return the mean over seeds at each evaluation of the current run, from `seen` on."""
    points = range(seen, len(curve))
    return [float(np.mean([*(o.returns[e] for o in outcomes), curve[e]])) for e in points]


def below_median(reported: Sequence[float], complete: Sequence[Sequence[float]]) -> bool:
    """Say whether the mean score so far is below the median of what complete trials had then."""
    count = len(reported)
    means = [np.mean(others[:count]) for others in complete if len(others) >= count]
    return len(means) >= STARTUP and bool(np.mean(reported) < np.median(means))


def report(attempt: Attempt, complete: Callable[[], list[list[float]]]) -> bool:
    """Report the evaluations of the current run; return whether the trial should be pruned."""
    item = attempt.items[len(attempt.outcomes)]
    config, curve = item.config(), evaluations(item.run_dir)
    quarter = config.total_steps // config.eval_every // 4  # of the evaluations of a run
    whole = -(-config.total_steps // config.eval_every)
    last = len(attempt.outcomes) == len(attempt.items) - 1
    for mean in scores(attempt.outcomes, curve, attempt.seen):
        attempt.trial.report(mean, step=len(attempt.reported))
        attempt.reported.append(mean)
        attempt.seen += 1
        if last and attempt.seen == whole:
            return False  # the trial is complete: there is nothing left to save
        if len(attempt.reported) > quarter and below_median(attempt.reported, complete()):
            return True
    return False

# %%
first = Outcome(steps=[100, 200, 300], returns=[20.0, 50.0, 90.0], seconds=1.0)
assert scores([first], [10.0, 30.0]) == [15.0, 40.0]
assert scores([first], [10.0, 30.0], seen=1) == [40.0]
lucky = [20.0, 50.0, 90.0, 15.0, 40.0]
assert np.mean(lucky) == 43
assert below_median(lucky, complete=[[20.0, 50.0, 50.0, 50.0, 50.0, 50.0]] * 5)  # 43 < 44
assert not below_median(lucky, complete=[[20.0, 50.0, 50.0, 50.0, 50.0, 50.0]] * 4)  # too few

# %% [markdown]
# ## The runs
#
# The processes that do the runs are those of [the sweep](sweep.ipynb), or tasks of
# [Ray](cluster.ipynb). A search only has to start a run, to ask whether it has ended, and to stop
# it. A run that is stopped writes a checkpoint first.

# %%
#| export
class Runner(Protocol):
    """Whatever can do runs."""

    jobs: int  # runs at a time, unless somebody says otherwise

    def start(self, item: Item) -> Any:
        """Begin a run, or go on with it."""

    def ended(self, handle: Any, item: Item) -> str | None:
        """Return None while a run goes on; then why it failed, if it did."""

    def stop(self, handles: list[Any]) -> None:
        """Let runs write their checkpoints and end."""


class Processes:
    """Does runs in processes of this machine."""

    def __init__(self) -> None:
        self.jobs = cores()

    def start(self, item: Item) -> Worker:
        """Start a process."""
        return start_worker(item)

    def ended(self, handle: Worker, item: Item) -> str | None:
        """Return why a process failed, once it has ended."""
        return None if handle.poll() is None else why_it_failed(item, handle.returncode)

    def stop(self, handles: list[Worker]) -> None:
        """Stop processes as SIGTERM does."""
        stop_workers(handles)


class RayTasks:
    """Does runs as tasks of a Ray cluster."""

    def __init__(self) -> None:
        self.ray = import_ray()
        connect(self.ray)
        self.task = self.ray.remote(num_cpus=1, max_retries=RETRIES)(do_item)
        self.jobs = max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def start(self, item: Item) -> Any:
        """Submit a task."""
        return self.task.remote(as_task(item), os.getcwd())

    def ended(self, handle: Any, item: Item) -> str | None:
        """Return why a task failed, once it has ended."""
        done, _ = self.ray.wait([handle], timeout=0)
        return why_it_ended(self.ray, handle, item) if done else None

    def stop(self, handles: list[Any]) -> None:
        """Cancel tasks."""
        cancel(self.ray, handles)


def find_runner(name: str) -> Runner:
    """Return what does the runs: processes of this machine, or a Ray cluster."""
    if name not in ("local", "ray"):
        raise ValueError(f"There is no backend {name!r}: use 'local' or 'ray'.")
    return Processes() if name == "local" else RayTasks()


def shown(values: Mapping[str, Any]) -> str:
    """Write settings in a line."""
    words = {name: f"{v:.3g}" if isinstance(v, float) else str(v) for name, v in values.items()}
    return ", ".join(f"{name}={word}" for name, word in words.items())


def advance(attempt: Attempt, study: Study, runner: Runner, prune: bool) -> str | None:
    """Look after one trial; return how it ended, once it has."""
    item = attempt.items[len(attempt.outcomes)]
    why = runner.ended(attempt.handle, item)
    try:
        pruned = report(attempt, study.complete if prune else list)  # an empty list prunes nothing
        outcome = None if why is None else read_outcome(item.run_dir)
    except ValueError as error:  # what the run wrote is damaged
        runner.stop([attempt.handle])
        pruned, outcome, why = False, None, str(error)
    if pruned:
        if why is None:
            runner.stop([attempt.handle])
        config, last = item.config(), attempt.reported[-1]
        steps = min(attempt.seen * config.eval_every, config.total_steps)
        study.tell(attempt, "PRUNED")
        return f"pruned at step {steps:,} of seed {item.seed}, with return {last:g}"
    if why is None:
        return None
    if outcome is None:
        attempt.trial.set_user_attr("why", why)
        study.tell(attempt, "FAIL")
        return f"failed: {why}"
    attempt.outcomes.append(outcome)
    attempt.seen = 0
    if len(attempt.outcomes) < len(attempt.items):
        attempt.handle = runner.start(attempt.items[len(attempt.outcomes)])
        return None
    final = [outcome.returns[-1] for outcome in attempt.outcomes]
    attempt.trial.set_user_attr("final", final)
    study.tell(attempt, "COMPLETE", float(np.mean(final)))
    return f"return {np.mean(final):g}"


def search(
    study: Study, runner: Runner, jobs: int, prune: bool, say: Callable[[str], None]
) -> None:
    """Do trials until all are done, here or by other processes that share the study."""
    running: list[Attempt] = []
    asked = -1e9  # when somebody else had the last trials
    with catch_signals() as caught:
        try:
            while not caught:
                while len(running) < jobs and time.monotonic() - asked > 1:
                    attempt = study.ask()
                    if attempt is None:
                        asked = time.monotonic()
                        break
                    running.append(attempt)
                    attempt.handle = begin(attempt, study, runner, say)
                    if attempt.handle is None:
                        running.pop()
                for attempt in list(running):
                    how = advance(attempt, study, runner, prune)
                    if how is not None:
                        running.remove(attempt)
                        asked = -1e9
                        number = int(attempt.folder.removeprefix("trial_"))
                        where = f"[{study.trials - study.unfinished()}/{study.trials}]"
                        say(f"{where} trial {number}: {how} ({shown(attempt.values)})")
                if not running and not study.unfinished():
                    break
                time.sleep(0.2)
        finally:
            runner.stop([attempt.handle for attempt in running])
            for attempt in running:
                attempt.lock.release()
    if caught:
        left = f"{study.unfinished()} of {study.trials} trials unfinished"
        raise Interrupted(f"Stopped with {left}: the same command goes on.", caught[0])


def begin(attempt: Attempt, study: Study, runner: Runner, say: Callable[[str], None]) -> Any:
    """Start the first run of a trial; None if its settings contradict each other."""
    try:
        attempt.items[0].config()
    except ValueError as error:
        attempt.trial.set_user_attr("why", str(error))
        study.tell(attempt, "FAIL")
        say(f"{attempt.folder} failed: {error} ({shown(attempt.values)})")
        return None
    return runner.start(attempt.items[0])

# %% [markdown]
# ## What a search writes
#
# `best.yaml` is the config of the best trial. `top.yaml` is a sweep of the best five; you will see below
# what it is for. `result.json` holds all trials. How much a setting matters is estimated by
# [PED-ANOVA](https://arxiv.org/abs/2304.10255): it compares the distribution of a setting's values
# in the best tenth of the complete trials with that in all of them. If both are alike, the setting
# does not matter. The numbers are scaled to sum to 1.

# %%
#| export
def importance(study: Study) -> dict[str, float]:
    """Return how much each setting matters for a place in the best tenth; nothing if unknown."""
    optuna = study.optuna
    complete = study.study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    if len(complete) < 4 or len({trial.value for trial in complete}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        found = optuna.importance.get_param_importances(study.study, evaluator=evaluator)
    except (ValueError, RuntimeError, ZeroDivisionError):  # all the better trials are alike
        return {}
    shares = {name: short(float(share)) for name, share in found.items()}
    return shares if all(np.isfinite(list(shares.values()))) else {}


def collect_trials(study: Study) -> list[dict[str, Any]]:
    """Return all finished trials in their order."""
    trials = []
    dimensions = {dimension.name: dimension for dimension in study.space}
    for trial in study.counted():
        if not trial.state.is_finished():
            continue
        values = {}
        for name, stored in trial.params.items():
            choices = dimensions[name].labels
            values[name] = choices[stored] if choices else stored
        reported = list(trial.intermediate_values.values())
        score = trial.value if trial.value is not None else (reported or [None])[-1]
        trials.append(
            {
                "trial": int(trial.user_attrs["folder"].removeprefix("trial_")),
                "state": trial.state.name.lower(),
                "score": None if score is None else short(score),
                "final": trial.user_attrs.get("final", []),
                "evaluations": len(reported),
                "settings": values,
            }
        )
    return sorted(trials, key=lambda trial: trial["trial"])


def ranked(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the trials that were done to the end, the best first."""
    complete = [trial for trial in result["trials"] if trial["state"] == "complete"]
    return sorted(complete, key=lambda trial: -trial["score"])


def plural(number: int, noun: str) -> str:
    """Count things."""
    return f"{number} {noun}{'s' * (number != 1)}"


def draw_history(ax: Axes, result: dict[str, Any]) -> None:
    """Draw the score of each trial, and the best so far."""
    color = COLORS.get(result["algo"], "#0072B2")
    done = [trial for trial in result["trials"] if trial["state"] == "complete"]
    pruned = [t for t in result["trials"] if t["state"] == "pruned" and t["score"] is not None]
    ax.plot([t["trial"] for t in done], [t["score"] for t in done], "o", color=color, label="done")
    if pruned:
        points = [t["trial"] for t in pruned], [t["score"] for t in pruned]
        ax.plot(*points, "x", color=COLORS["random"], label="pruned, last score")
    best = np.maximum.accumulate([trial["score"] for trial in done])
    ax.step([t["trial"] for t in done], best, where="post", color=color, label="best so far")
    ax.set(xlabel="trial", ylabel="return, mean over seeds")
    ax.set_title(f"{len(result['trials'])} trials of {plural(len(result['seeds']), 'seed')}")
    ax.legend(fontsize=8)


def draw_importance(ax: Axes, result: dict[str, Any]) -> None:
    """Draw how much each setting matters, as far as the trials tell."""
    shares = dict(sorted(result["importance"].items(), key=lambda pair: pair[1]))
    ax.barh(list(shares), list(shares.values()), color=COLORS.get(result["algo"], "#0072B2"))
    ax.set(xlabel="importance, relative to the other settings")
    ax.set_title("importance" if shares else "importance: too few different trials")


def plot_search(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a figure of history and importance."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4))
        draw_history(figure.add_subplot(1, 2, 1), result)
        draw_importance(figure.add_subplot(1, 2, 2), result)
        figure.savefig(path, format="png")


def write_findings(study: Study, result: dict[str, Any], top: int = 5) -> None:
    """Write the best settings as a config, and the best few as a sweep."""
    config_class = find_algorithm(study.algo).config_class
    best = ranked(result)[0]
    config = make_config(config_class, {**study.settings, **best["settings"]})
    write_settings(study.directory / "best.yaml", study.algo, config)
    base = plain(overrides(make_config(config_class, study.settings)))
    variants = plain({f"trial {t['trial']}": t["settings"] for t in ranked(result)[:top]})
    text = yaml.safe_dump({"algo": study.algo, **base, "variants": variants}, sort_keys=False)
    replace_file(study.directory / "top.yaml", text)


def check_out(out: Path, algo: str, env_id: str) -> None:
    """Raise if a search cannot be written there, or if a file stands there that is not one."""
    if out.suffix != ".json" or out.is_dir():
        raise ValueError(f"{out} cannot be a result: name a file NAME.json.")
    check_writable(out.parent)
    if not out.exists():
        return
    try:
        old = json.loads(out.read_text())
        same = "trials" in old and (old["algo"], old["env_id"]) == (algo, env_id)
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise ValueError(f"{out} is not a search of {algo} on {env_id}: it stays as it is.")


def tune(
    algo: str | type[Agent],
    settings: dict[str, Any],
    *,
    space: Mapping[str, Any] | None = None,
    trials: int = 20,
    seeds: int | list[int] = 1,
    directory: str | Path | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    backend: str = "local",
    prune: bool = True,
    command: str = "rlbook.tune.tune",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Search for good settings; write the best as a config, and return and write all trials."""
    if trials < 1 or (jobs is not None and jobs < 1):
        raise ValueError("`trials` and `jobs` must be whole numbers above 0.")
    import_optuna()  # says what is missing before anything runs
    algo, settings = name_algorithm(algo), name_environment(settings)
    config_class = find_algorithm(algo).config_class
    dimensions = read_space(find_space(algo) if space is None else space, config_class)
    numbers = check_seeds(seeds)
    config = make_config(config_class, settings)
    settings = {name: value for name, value in settings.items() if name not in SET_BY_THE_SWEEP}
    place = re.sub(r"[^\w.]+", "-", f"{algo}-{config.env_id}")
    folder = Path(directory or f"runs/tune-{place}")
    check_plan(make_plan(algo, settings, {algo: {}}, numbers[:1], folder / "plan"))
    if out is not None:
        check_out(Path(out), algo, config.env_id)
    runner = find_runner(backend)
    check_writable(folder)
    study, began = Study(algo, settings, dimensions, numbers, folder, trials), time.perf_counter()
    try:
        search(study, runner, jobs or runner.jobs, prune, say)
    finally:
        seconds = study.add_seconds(time.perf_counter() - began)
    found = collect_trials(study)
    result = {
        "command": command,
        "algo": algo,
        "env_id": config.env_id,
        "seeds": numbers,
        "versions": versions(),
        "created": time.strftime("%Y-%m-%d"),
        "seconds": short(seconds),
        "settings": plain(overrides(config)),
        "trials": found,
        "importance": importance(study),
    }
    if not ranked(result):
        why = [t.user_attrs["why"] for t in study.counted() if "why" in t.user_attrs]
        raise RunFailed(f"No trial of {len(found)} was done to its end: {(why or ['?'])[-1]}")
    write_findings(study, result)
    write_result(folder / "result.json", result)
    if out is not None:
        write_result(Path(out), result)
    plot_search(result, folder / "tune.png")
    best = ranked(result)[0]
    say(f"Best of {len(found)}: trial {best['trial']}, return {best['score']:g}")
    say(f"  {shown(best['settings'])}")
    say(f"The best settings are in {folder}/best.yaml, a figure in {folder}/tune.png.")
    say("The score of a winner is too good. For one that you can believe, use fresh seeds:")
    say(f"  rlbook sweep --config {folder}/top.yaml --seed 1000 --seeds 5")
    return result


# %% [markdown]
# ## The winner's curse
#
# Look at the score of the best trial again. It was chosen *because* it was high, and a score is high for two
# reasons: the settings are good, or the seed was lucky. Among many trials, the luckiest wins. So the score of
# the winner is too good on average, and another trial may in truth be better.
#
# By hand: suppose that all settings are the same, and that a run scores 100 or 500, each with probability
# ½. The mean is 300. The best of three trials scores 500 unless all three are unlucky, so on average
# $500 - 400 \cdot \tfrac18 = 450$. The search has found nothing, and reports 450.

# %%
outcomes = [max(three) for three in itertools.product((100, 500), repeat=3)]
assert np.mean(outcomes) == 450

# %% [markdown]
# How large is the effect with real agents? The chapter [DRQN](drqn.ipynb) has trained seven variants of its
# settings on five seeds each. Take these as seven trials. Tune on one seed: the winner is the variant with
# the best score on that seed. Then look at the same variant on the four seeds that the search never saw.
# There are five seeds to tune on, hence five such searches:

# %%
stored = load_result("results/drqn_parts.json")
print(made_by(stored))
final = np.array([run["final"] for run in stored["runs"].values()])  # (variants, seeds)
names, seeds = list(stored["runs"]), range(final.shape[1])


def winners(final: np.ndarray, count: int) -> list[tuple[str, float, float]]:
    """Tune on each choice of `count` seeds: return the winner, its score there, and on the others."""
    found = []
    for chosen in itertools.combinations(range(final.shape[1]), count):
        others = [seed for seed in range(final.shape[1]) if seed not in chosen]
        best = int(final[:, list(chosen)].mean(axis=1).argmax())
        found.append((names[best], final[best, list(chosen)].mean(), final[best, others].mean()))
    return found


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
for row, (_, tuned, fresh) in enumerate(winners(final, 1)):
    left.annotate("", (fresh, row), (tuned, row), arrowprops={"arrowstyle": "->", "color": "#595959"})
    left.plot(tuned, row, "o", color=COLORS["drqn"])
    left.plot(fresh, row, "D", color=COLORS["reference"])
left.set_yticks(list(seeds), [f"seed {i}: {name}" for i, (name, *_) in enumerate(winners(final, 1))], fontsize=8)
left.set(xlabel="return of the winner")
left.set_title("five searches, one seed each")
counts = list(seeds)[1:]
means = {count: np.mean([row[1:] for row in winners(final, count)], axis=0) for count in counts}
right.plot(counts, [means[count][0] for count in counts], "o-", color=COLORS["drqn"], label="as the search reports it")
right.plot(counts, [means[count][1] for count in counts], "D-", color=COLORS["reference"], label="on fresh seeds")
right.set(xlabel="seeds of each trial", ylabel="return of the winner", xticks=counts)
right.set_title("all choices of seeds, on average")
right.legend(fontsize=8)
plt.show()
for count in counts:
    tuned, fresh = means[count]
    print(f"{plural(count, 'seed')}: the winner reports {tuned:.0f}, and scores {fresh:.0f} on fresh seeds")
assert means[1][0] > means[1][1]

# %% [markdown]
# Tuned on one seed, the five searches name three different winners, and each winner is worse than
# reported. With more seeds the gap shrinks, though not steadily: these are few variants and few
# seeds, and with four to tune on a single fresh one is left. Three things help:
#
# 1. **Several seeds for each trial** (`--seeds 3`). Fewer trials with more seeds can find better
#    settings than many trials with one, if the seeds differ more than the settings do
#    (exercise 2).
# 2. **Fresh seeds for the report.** Train the best few again on seeds that the search never saw, and report
#    only those: `rlbook sweep --config runs/tune/top.yaml --seed 1000 --seeds 5`.
# 3. **The same for everybody.** If you tune your algorithm, tune what you compare it with by the same number
#    of trials.

# %% [markdown]
# ## Honest edges
#
# - The score of a trial is its last evaluation. A search for settings that learn *fast* would take the mean
#   over the whole curve.
# - With several jobs the order in which trials end depends on the machine, and so does what the
#   search learns from them. Then a second search tries other settings.
# - `seconds` in `result.json` adds up all processes that worked on the search, but for those that
#   were killed by SIGKILL.
# - Pruning trusts early scores. Settings that start slowly and end well are lost; `--no-prune` keeps them.
# - The importance of a setting holds for its range and for these trials. With six trials, of which one is
#   the best tenth, it says next to nothing.
# - Trials keep their checkpoints, so that you can look at them; delete the directory when you are done.
#
# ## Exercises
#
# **Exercise 1, a planted bug.** This is meant to be the score that a search may report: the mean of the
# winner on seeds that played no part in the choice. It is still too good. Why?


# %%
def honest_score(final: np.ndarray, tuned_on: list[int]) -> float:
    """Return the score of the winner; `final` is (trials, seeds)."""
    best = final[:, tuned_on].mean(axis=1).argmax()
    return float(final[best].mean())


# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The mean is over all seeds, and those that were tuned on are among them. In the example below,
# trial 0 was lucky on seed 0, and the honest score leaves that seed out:
#
# ```python
# def honest_score(final: np.ndarray, tuned_on: list[int]) -> float:
#     """Return the score of the winner on fresh seeds; `final` is (trials, seeds)."""
#     best = final[:, tuned_on].mean(axis=1).argmax()
#     return float(np.delete(final[best], tuned_on).mean())
#
#
# lucky = np.array([[500.0, 100.0, 100.0], [100.0, 100.0, 100.0]])
# assert honest_score(lucky, [0]) == 100
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** You can afford 24 runs. Settings differ in their true mean, with deviation 1, and a run
# scores its true mean plus noise with deviation 2. Is it better to try 24 settings once, 8 settings three
# times, or 3 settings eight times? Compare the true mean of the winner.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The middle is best: many settings with one seed choose by luck, and few settings leave little
# to choose from.
#
# ```python
# rng = np.random.default_rng(0)
#
#
# def true_mean_of_winner(settings: int, seeds: int, searches: int = 20_000) -> float:
#     means = rng.normal(0, 1, (searches, settings))
#     measured = means + rng.normal(0, 2 / np.sqrt(seeds), means.shape)
#     best = measured.argmax(axis=1)
#     return float(means[np.arange(searches), best].mean())
#
#
# once, thrice, often = (true_mean_of_winner(n, 24 // n) for n in (24, 8, 3))
# assert thrice > once > often
# print(f"{once:.2f}, {thrice:.2f}, {often:.2f}")
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Why are learning rates searched on a logarithmic scale? Between 0.0001 and 0.01, what share
# of the trials is below 0.001 with and without it?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Half of them with it, one in eleven without: ten trials in eleven are in the upper decade.
#
# ```python
# low, high = 1e-4, 1e-2
# plain_share = (1e-3 - low) / (high - low)
# log_share = np.log(1e-3 / low) / np.log(high / low)
# assert abs(plain_share - 1 / 11) < 1e-9
# assert abs(log_share - 0.5) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** A trial with two seeds has reported 20, 50, 90 for the first seed. The second seed has 60 at
# its first evaluation. What does the trial report, as which score, and what is its mean so far?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The mean at the first evaluation, 40, as its fourth score. The mean of its four scores is 50.
#
# ```python
# done = Outcome(steps=[100, 200, 300], returns=[20.0, 50.0, 90.0], seconds=1.0)
# assert scores([done], [60.0]) == [40.0]
# assert np.mean([20.0, 50.0, 90.0, 40.0]) == 50
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# pip install 'rlbook[tune]'
# rlbook tune dqn --config cartpole --trials 20 --seeds 2 --run-dir runs/tune
# rlbook tune dqn --config cartpole --trials 20 --seeds 2 --run-dir runs/tune  # continue
# rlbook train --config runs/tune/best.yaml
# rlbook sweep --config runs/tune/top.yaml --seed 1000 --seeds 5
# ```
#
# ```python
# from rlbook.tune import tune
# space = {"lr": {"low": 1e-4, "high": 1e-2, "log": True}, "hidden": [[64], [64, 64]]}
# result = tune("dqn", {"total_steps": 20_000}, space=space, trials=20, seeds=2, directory="runs/tune")
# ```
#
# ## References
#
# - T. Akiba, S. Sano, T. Yanase, T. Ohta, M. Koyama (2019). Optuna: a next-generation hyperparameter
#   optimization framework. *KDD*.
# - J. Bergstra, R. Bardenet, Y. Bengio, B. Kégl (2011). Algorithms for hyper-parameter optimization.
#   *NeurIPS*.
# - S. Watanabe, A. Bansal, F. Hutter (2023). PED-ANOVA: efficiently quantifying hyperparameter importance in
#   arbitrary subspaces. *IJCAI*.
# - T. Eimer, M. Lindauer, R. Raileanu (2023). Hyperparameters in reinforcement learning and how to tune them.
#   *ICML*.
