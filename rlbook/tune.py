"""Made from book/tune.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "STARTUP",
    "Attempt",
    "Dimension",
    "Processes",
    "RayTasks",
    "Runner",
    "Space",
    "Study",
    "advance",
    "begin",
    "below_median",
    "check_out",
    "collect_trials",
    "draw_history",
    "draw_importance",
    "evaluations",
    "find_runner",
    "find_space",
    "import_optuna",
    "importance",
    "plot_search",
    "plural",
    "ranked",
    "read_dimension",
    "read_space",
    "report",
    "scores",
    "search",
    "shown",
    "tune",
    "write_findings",
]

# %% book/tune.py · Tuning
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


# %% book/tune.py · The search space
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


# %% book/tune.py · A study that processes share
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


# %% book/tune.py · Giving up early
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


# %% book/tune.py · The runs
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


# %% book/tune.py · What a search writes
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
