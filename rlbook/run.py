"""Made from book/run.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "DETAILS_EVERY",
    "Averages",
    "Collector",
    "Episodes",
    "Evaluator",
    "Journal",
    "MetricsFile",
    "Moment",
    "Run",
    "RunDirectory",
    "RunResult",
    "TensorBoardFiles",
    "Turns",
    "check_finite",
    "check_resumable",
    "crosses",
    "lock",
    "resume",
    "tensorboard_class",
    "train",
    "warn_of_cuts",
]

# %% book/run.py · The run
import json
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlbook.agent import Agent, Transition, find_algorithm, torch_for_learning
from rlbook.checkpoint import CheckpointDirectory
from rlbook.envs import (
    Evaluation,
    derive_seed,
    evaluate,
    make_env,
    make_vector_env,
    true_next_obs,
)
from rlbook.progress import Interrupted, Progress, RunFailed, catch_signals
from rlbook.settings import Config, make_config, read_settings, write_settings


# %% book/run.py · The run directory
class MetricsFile:
    """Lines of metrics, one JSON object each, which can be cut back to an earlier size."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: dict[str, float]) -> None:
        """Add one line."""
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RunFailed(f"Could not write {self.path}: {error.strerror}.") from error

    def read(self) -> list[dict[str, float]]:
        """Read all lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def sync(self) -> int:
        """Put the lines safely on the disk and return their size in bytes."""
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def truncate(self, size: int) -> None:
        """Drop what was written after a checkpoint: the resumed run writes it again."""
        with open(self.path, "ab") as file:
            file.truncate(min(size, file.tell()))  # never longer, should somebody have cut it


def tensorboard_class() -> Any:
    """Import TensorBoard's writer, or say how to get it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "TensorBoard is not installed: `pip install 'rlbook[tensorboard]'` or drop the setting."
        ) from error
    return SummaryWriter


class TensorBoardFiles:
    """The curves that TensorBoard draws; their writer is made when the first line comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def append(self, line: dict[str, float]) -> None:
        """Add one line; the first of a resumed run drops what was written from its step on."""
        step = int(line["global_step"])
        if self.writer is None:
            self.writer = tensorboard_class()(str(self.folder), purge_step=step)
        for name, value in line.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to the same run; the lock falls with the process."""
    with open(folder / "writer.lock", "a") as file:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"Another process is at work on {folder}: wait for it, or stop it."
                ) from error
        yield


class RunDirectory:
    """The files of one run: `config.yaml`, `metrics.jsonl` and `checkpoints/`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.metrics = MetricsFile(self.metrics_path)
        self.tensorboard = TensorBoardFiles(self.path / "tensorboard")
        self.checkpoints = CheckpointDirectory(self.path / "checkpoints")

    @classmethod
    def create(cls, path: str, agent: Agent) -> "RunDirectory":
        """Make the directory of a new run; one that holds a run already is left alone."""
        directory = cls(path)
        if directory.config_path.exists() or directory.metrics_path.exists():
            raise ValueError(
                f"{path} already holds a run: go on with `rlbook resume {path}` or choose another."
            )
        if agent.config.tensorboard:
            tensorboard_class()  # a mistake is better told before anything is written
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            write_settings(directory.config_path, agent.name, agent.config)
        except OSError as error:
            raise ValueError(f"Could not make {path}: {error.strerror}.") from error
        return directory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """Open the directory of a run that exists."""
        directory = cls(path)
        if not directory.config_path.is_file():
            raise ValueError(f"{path} is not a run directory: it has no config.yaml.")
        return directory

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes from writing to the same run."""
        return lock(self.path)

    def append(self, line: dict[str, float], tensorboard: bool = False) -> None:
        """Add one line to the metrics, and to TensorBoard's files if asked."""
        self.metrics.append(line)
        if tensorboard:
            self.tensorboard.append(line)

    def read_metrics(self) -> list[dict[str, float]]:
        """Read all lines of the metrics."""
        return self.metrics.read()


# %% book/run.py · When is it time?
def crosses(step: int, advance: int, every: int) -> bool:
    """Say whether the last `advance` steps reached or passed a multiple of `every`."""
    return every > 0 and step % every < advance


# %% book/run.py · The way back
class Episodes:
    """The episodes under way in all environments, with the way back to where they are."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.envs = make_vector_env(config.env_id, config.num_envs, config.env_kwargs)
        self.recent: deque[float] = deque(maxlen=20)  # returns of the last finished episodes

    def reset(self, step: int) -> None:
        """Start new episodes in all environments, seeded by the run's seed and the step."""
        count, seed = self.envs.num_envs, self.config.seed
        seeds: list[int | None] = [derive_seed(seed, "envs", step, i) for i in range(count)]
        self.obs, _ = self.envs.reset(seed=seeds)
        self.origin = step
        self.actions: list[np.ndarray] = []  # since the reset: they lead back to this moment
        self.episode_start = np.ones(count, dtype=bool)
        self.returns = np.zeros(count)

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Take one step; return true successors, rewards, and who terminated or was truncated."""
        self.obs, reward, terminated, truncated, infos = self.envs.step(action)
        self.actions.append(action)
        next_obs = true_next_obs(self.obs, infos)
        self.episode_start = terminated | truncated
        self.returns += reward
        if next_obs is not self.obs:  # some episode ended
            truncated &= ~terminated
            self.recent.extend(self.returns[self.episode_start].tolist())
            self.returns[self.episode_start] = 0.0
        return next_obs, reward, terminated, truncated

    def state_dict(self) -> dict[str, Any]:
        """Return the way from the last reset to here."""
        actions = torch.from_numpy(np.array(self.actions))  # one tensor: quickly written and read
        return {"origin": self.origin, "actions": actions, "recent": list(self.recent)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Reset as the stored run did and repeat its actions."""
        self.reset(saved["origin"])
        for action in saved["actions"]:
            self.advance(np.asarray(action))
        self.recent = deque(saved["recent"], maxlen=self.recent.maxlen)


# %% book/run.py · Collecting
def check_finite(step: int, what: str, values: np.ndarray) -> None:
    """Raise when the environment returned a number that no agent can learn from."""
    if values.dtype.kind != "f":  # bytes and whole numbers are always finite
        return
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)  # as the buffer will hold them
    if not np.isfinite(stored).all():
        how = "too large for 32 bits" if np.isfinite(values).all() else "not finite"
        raise ValueError(f"The environment returned a {what} that is {how}, step {step}.")


def warn_of_cuts(config: Config) -> None:
    """Say that no episode has come to its end, as too long ones never do."""
    warnings.warn(
        f"No episode has ended yet. Checkpoints reset all environments, so none can be longer than "
        f"'checkpoint_every' ({config.checkpoint_every}) over 'num_envs' ({config.num_envs}): "
        "raise the first?",
        stacklevel=4,
    )


class Collector(Episodes):
    """Steps an agent through its environments, and can find its way back to any step."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent.config)
        self.agent, self.warned = agent, False
        self.reset(agent.global_step)

    def reset(self, step: int) -> None:
        """Start new episodes, of which the agent remembers nothing."""
        super().reset(step)
        check_finite(step, "observation", self.obs)
        self.state: Any = None

    def step(self) -> None:
        """Take one step in each environment and show it to the agent."""
        agent, obs, state, start = self.agent, self.obs, self.state, self.episode_start
        action, self.state = agent.act(obs, state, start, explore=True)
        next_obs, reward, terminated, truncated = self.advance(action)
        # One quick sum of squares of each: it is small only where all numbers are finite.
        seen = float(np.vdot(next_obs, next_obs)) if next_obs.dtype.kind == "f" else 0.0
        if not seen + float(np.vdot(reward, reward)) < 1e77:
            check_finite(agent.global_step, "reward", reward)
            check_finite(agent.global_step, "observation", next_obs)
        if next_obs is not self.obs:  # an episode ended: look at the start of the next one too
            check_finite(agent.global_step, "observation", self.obs)
        agent.global_step += len(reward)
        cut = crosses(agent.global_step, len(reward), self.config.checkpoint_every)
        if cut:
            truncated = ~terminated  # a checkpoint ends the episode
        agent.observe(
            Transition(obs, action, reward, next_obs, terminated, truncated, start, state)
        )
        if cut:
            whole = agent.global_step - self.origin >= self.config.checkpoint_every
            self.reset(agent.global_step)
            if whole and not self.recent and not self.warned:
                warn_of_cuts(self.config)
                self.warned = True

    def state_dict(self) -> dict[str, Any]:
        """Return the way from the last reset to here, and the memory of the agent."""
        return {**super().state_dict(), "state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a stored moment, with the memory that the agent had then."""
        super().load_state_dict(saved)
        self.state = saved["state"]


# %% book/run.py · Averages between lines
DETAILS_EVERY = 32  # turns of the loop with an update


class Averages:
    """Means of named metrics since they were last taken."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: dict[str, float]) -> None:
        """Count one set of metrics."""
        for name, value in metrics.items():
            if name.endswith("updates"):
                self.sums[name], self.counts[name] = value, 1
                continue
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def want_details(self) -> bool:
        """Say whether it is time for more than the loss."""
        return self.counts.get("loss", 0) % DETAILS_EVERY == 0

    def take(self) -> dict[str, float]:
        """Return the means and start again."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means


# %% book/run.py · The journal
class Journal:
    """The lines of metrics of a run, in memory and in its directory."""

    def __init__(self, directory: RunDirectory | None, tensorboard: bool) -> None:
        self.directory, self.tensorboard = directory, tensorboard
        self.lines: list[dict[str, float]] = []
        self.averages = Averages()
        self.evaluated: dict[str, float] = {}  # the last evaluation

    def write(self, line: dict[str, float]) -> None:
        """Keep one line."""
        self.lines.append(line)
        if self.directory:
            self.directory.append(line, self.tensorboard)

    def log(self, agent: Agent, recent: Sequence[float]) -> None:
        """Write the training metrics since the last line, and how the last episodes went."""
        line: dict[str, float] = {"global_step": agent.global_step, **self.averages.take()}
        line["updates"] = agent.updates
        if recent:
            line["train_return_mean"] = float(np.mean(recent))
        self.write(line)

    def enter(self, step: int, evaluation: Evaluation) -> None:
        """Write what an evaluation scored."""
        self.evaluated = {
            "global_step": step,
            "eval_return_mean": evaluation.mean,
            "eval_return_std": evaluation.std,
            "eval_length_mean": float(evaluation.lengths.mean()),
        }
        self.write(self.evaluated)

    def last(self, step: int) -> dict[str, float]:
        """Return the last line and the last evaluation together."""
        return {**(self.lines[-1] if self.lines else {}), **self.evaluated, "global_step": step}

    def state_dict(self, directory: RunDirectory) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same lines."""
        averages, size = vars(self.averages).copy(), directory.metrics.sync()
        return {"averages": averages, "evaluated": self.evaluated, "metrics_size": size}

    def load_state_dict(self, state: dict[str, Any], directory: RunDirectory) -> None:
        """Go back to a stored moment: what was written after it is dropped."""
        vars(self.averages).update(state["averages"])
        self.evaluated = state["evaluated"]
        directory.metrics.truncate(state["metrics_size"])
        self.lines = directory.read_metrics()


# %% book/run.py · Evaluating
class Evaluator:
    """Plays greedy episodes, in environments that the training never sees."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.envs: list[gym.Env] = []  # made when they are first needed

    def evaluate(self, agent: Agent) -> Evaluation:
        """Play one episode in each environment; the seeds follow from the step."""
        config = self.config
        if not self.envs:
            episodes = range(config.eval_episodes)
            self.envs = [make_env(config.env_id, config.env_kwargs) for _ in episodes]
        seed = derive_seed(config.seed, "evaluation", agent.global_step)
        return evaluate(agent.greedy, self.envs, seed)

    def close(self) -> None:
        """Close the environments; another evaluation makes new ones."""
        while self.envs:
            self.envs.pop().close()


# %% book/run.py · A moment of a run
class Moment:
    """What a checkpoint holds of a run, and brings back."""

    def __init__(self, agent: Agent, directory: RunDirectory | None) -> None:
        self.agent, self.directory = agent, directory
        self.collector = Collector(agent)
        self.journal = Journal(directory, agent.config.tensorboard)
        self.saved: Path | None = None  # the last checkpoint

    def save(self) -> None:
        """Write a checkpoint from which the run goes on exactly."""
        if self.directory is None:
            return
        state = {"collector": self.collector.state_dict()}
        state |= self.journal.state_dict(self.directory)
        content = {**self.agent.checkpoint(), "run": state}
        self.saved = self.directory.checkpoints.save(self.agent.global_step, content)

    def load(self, path: Path, content: dict[str, Any]) -> None:
        """Go back to the moment of a checkpoint."""
        assert self.directory is not None
        self.agent.load_state_dict(content["agent"])
        self.collector.load_state_dict(content["run"]["collector"])
        self.journal.load_state_dict(content["run"], self.directory)
        self.saved = path

    def advice(self) -> str:
        """Say how to go on after the run was stopped."""
        if self.directory is None:
            return "Nothing was written, since the run has no run_dir."
        if self.saved is None:
            return f"Without a checkpoint, `rlbook resume {self.directory.path}` starts again."
        return f"Go on from {self.saved} with `rlbook resume {self.directory.path}`."


@dataclass(frozen=True)
class RunResult:
    """What a run leaves: its last metrics, all their lines, its checkpoint and its agent."""

    metrics: dict[str, float]
    history: list[dict[str, float]]
    checkpoint: Path | None
    agent: Agent
    seconds: float  # of this process

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps at which a metric was written, and its values there."""
        lines = [line for line in self.history if name in line]
        steps, values = ([line[key] for line in lines] for key in ("global_step", name))
        return np.array(steps), np.array(values)


# %% book/run.py · The loop
class Turns(Moment):
    """The turns of the loop: act, store, update, log, evaluate and checkpoint, when it is time."""

    def __init__(self, agent: Agent, directory: RunDirectory | None, progress: bool = True) -> None:
        super().__init__(agent, directory)
        self.config = agent.config
        self.evaluator = Evaluator(agent.config)
        self.progress = Progress(agent.name, agent.global_step, self.config.total_steps, progress)

    def step(self) -> None:
        """Take one step of all environments and do what is due after it."""
        config, agent = self.config, self.agent
        self.collector.step()
        metrics = agent.train_step(self.journal.averages.want_details())
        if metrics:
            self.journal.averages.add(metrics)
        if crosses(agent.global_step, config.num_envs, config.log_every):
            self.journal.log(agent, self.collector.recent)
        if crosses(agent.global_step, config.num_envs, config.eval_every):
            self.evaluate()
        if crosses(agent.global_step, config.num_envs, config.checkpoint_every):
            self.save()
        self.progress.step(agent.global_step, metrics)

    def evaluate(self) -> None:
        """Write what greedy episodes score with these weights, unless that has just been done."""
        step = self.agent.global_step
        if self.journal.evaluated.get("global_step") != step:
            evaluation = self.evaluator.evaluate(self.agent)
            self.journal.enter(step, evaluation)
            self.progress.evaluated(step, evaluation)


class Run(Turns):
    """The one loop, until it is done or somebody stops it."""

    def train(self) -> RunResult:
        """Go on until `total_steps`, or until somebody stops the run."""
        began, agent = time.perf_counter(), self.agent
        self.progress.start_at(agent.global_step)  # what came before was not done now
        try:
            with torch_for_learning(self.config.threads), catch_signals() as caught:
                while agent.global_step < self.config.total_steps and not caught:
                    self.step()
                if not caught and self.config.eval_every:
                    self.evaluate()
                self.save()
        except RunFailed as error:
            raise RunFailed(f"{error} {self.advice()}") from error
        except FloatingPointError as error:
            where = f"The run stopped at step {agent.global_step:,} because {error}."
            raise RunFailed(f"{where} A lower learning rate may help. {self.advice()}") from error
        finally:
            self.close()
        if caught:
            where = f"Stopped at step {agent.global_step:,}."
            raise Interrupted(f"{where} {self.advice()}", caught[0])
        metrics, seconds = self.journal.last(agent.global_step), time.perf_counter() - began
        return RunResult(metrics, self.journal.lines, self.saved, agent, seconds)

    def close(self) -> None:
        """Close bar and environments."""
        self.progress.close(self.agent.global_step)
        self.evaluator.close()
        self.collector.envs.close()


# %% book/run.py · Starting and resuming
def check_resumable(path: Path, content: dict[str, Any], agent: Agent) -> None:
    """Raise unless the checkpoint was written by a run of this algorithm, and is not beyond it."""
    if content.get("algo") != agent.name:
        found = content.get("algo")
        raise ValueError(f"{path} holds a {found} agent, but the run is {agent.name}.")
    if "run" not in content:
        raise ValueError(f"{path} was saved by hand and is not a moment of a run: use rlbook.load.")
    reached, total = content["agent"]["global_step"], agent.config.total_steps
    if reached >= total + agent.config.num_envs:  # the last step of all may overshoot
        where = agent.config.run_dir
        raise ValueError(f"{where} is already at step {reached:,}: ask for more steps.")


def train(agent: Agent, progress: bool = True) -> RunResult:
    """Train an agent up to its `total_steps`, in its run directory if it has one."""
    if agent.directory:  # `learn` called again: the run is longer now
        write_settings(agent.directory.config_path, agent.name, agent.config)
    elif agent.config.run_dir:
        agent.directory = RunDirectory.create(agent.config.run_dir, agent)
    with agent.directory.alone() if agent.directory else nullcontext():
        run = Run(agent, agent.directory, progress)
        if agent.global_step and agent.directory:  # `learn` called again has begun new episodes
            run.journal.lines = agent.directory.read_metrics()
            run.save()
        return run.train()


def resume(
    path: str | os.PathLike[str], total_steps: int | None = None, progress: bool = True
) -> RunResult:
    """Go on with a run from its newest sound checkpoint, as if it had never been stopped."""
    directory = RunDirectory.open(path)
    settings = read_settings(directory.config_path)
    agent_class = find_algorithm(str(settings.pop("algo", None)))
    settings |= {"run_dir": str(path)}
    if total_steps is not None:
        settings["total_steps"] = total_steps
    agent = agent_class(config=make_config(agent_class.config_class, settings))
    agent.directory = directory
    with directory.alone():
        newest = directory.checkpoints.newest()  # on the CPU: the agent moves what it must
        if newest:
            check_resumable(newest[0], newest[1], agent)
        run = Run(agent, directory, progress)
        if newest:
            run.load(*newest)
        else:
            directory.metrics.truncate(0)
        if total_steps is not None:
            write_settings(directory.config_path, agent.name, agent.config)
        return run.train()
