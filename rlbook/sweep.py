"""Made from book/sweep.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "NOTE",
    "PATIENCE",
    "SET_BY_THE_SWEEP",
    "Backend",
    "Item",
    "Outcome",
    "Report",
    "Variants",
    "Worker",
    "check_out",
    "check_plan",
    "check_same",
    "check_seeds",
    "check_writable",
    "collect",
    "cores",
    "find_backend",
    "folder_names",
    "follow_parent",
    "grid",
    "has_text_keys",
    "iqm_interval",
    "joined",
    "last_step",
    "made_when",
    "make_plan",
    "name_algorithm",
    "name_environment",
    "outcome_of",
    "overrides",
    "plain",
    "read_note",
    "read_outcome",
    "replace_file",
    "resolve_seeds",
    "run_item",
    "run_plan",
    "short",
    "start_worker",
    "stop_workers",
    "summary",
    "sweep",
    "why_it_failed",
    "worker",
    "write_result",
]

# %% book/sweep.py · Sweeps
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

# %% book/sweep.py · Variants
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


# %% book/sweep.py · The plan
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


def folder_names(variants: Sequence[str]) -> list[str]:
    """Return a different folder for each variant."""
    folders: list[str] = []
    for name in variants:
        plain_name = re.sub(r"[^\w.=]+", "-", name).strip("-.") or "variant"
        plain_name += "_" * plain_name.endswith(".json")  # results have such names
        tries = (f"{plain_name}_{i}" if i > 1 else plain_name for i in itertools.count(1))
        folders.append(next(name for name in tries if name not in folders))
    return folders


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


# %% book/sweep.py · One run
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


# %% book/sweep.py · A process for each run
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


# %% book/sweep.py · The report
def last_step(run_dir: str | Path) -> int:
    """Return the step of the last whole line of a run's metrics; 0 if there is none."""
    try:
        with open(Path(run_dir) / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))  # a line is far shorter
            whole = file.read().rpartition(b"\n")[0]  # the last line may be half written
            return int(json.loads(whole.splitlines()[-1])["global_step"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0  # it has not begun


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


# %% book/sweep.py · One score for several seeds
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


# %% book/sweep.py · One small file
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


def check_writable(folder: Path) -> None:
    """Raise unless files can be written there, which is better known before the first run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"Cannot write into {folder}: {error.strerror or error}.") from error


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write a result in one step, one curve a line."""
    numbers = r'\[\n[^][{}"]*\]'
    text = re.sub(
        numbers, lambda found: json.dumps(json.loads(found[0])), json.dumps(result, indent=1)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, text + "\n")


# %% book/sweep.py · The whole sweep
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


# A cell in a notebook is called __main__ too, but it has no file.
if __name__ == "__main__" and "__file__" in globals():
    sys.exit(worker(sys.argv[1]))
