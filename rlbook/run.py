"""Made from book/run.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "LARGEST",
    "Collector",
    "EpisodesFile",
    "Evaluator",
    "GrowingFile",
    "Logger",
    "MetricsFile",
    "Run",
    "RunDirectory",
    "RunRecord",
    "RunResult",
    "TensorBoardFiles",
    "check_action",
    "check_finite",
    "check_resumable",
    "check_unchanged",
    "check_up_to_date",
    "closed_on_failure",
    "crosses",
    "environments_of",
    "lost_process",
    "resume",
    "tensorboard_class",
    "train",
    "versions",
    "warn_of_end",
    "warn_of_lost_replay",
    "warn_of_no_update",
    "with_plain_numbers",
]

# %% book/run.py · The run
import copy
import datetime
import errno
import json
import math
import os
import platform
import shlex
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, SupportsFloat

import filelock
import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch import Tensor

import rlbook
from rlbook.agent import (
    Agent,
    Diverged,
    Metrics,
    Transition,
    algorithm_name,
    check_fits,
    find_algorithm,
    load_state,
    torch_for_learning,
)
from rlbook.callbacks import Callbacks, check_callbacks, make_callbacks
from rlbook.checkpoint import CheckpointDirectory, CheckpointError
from rlbook.envs import (
    EVALUATION_ENVS,
    Evaluation,
    Mistake,
    close_vector_env,
    derive_seed,
    evaluate,
    make_env,
    make_vector_env,
    true_next_obs,
    try_env,
)
from rlbook.progress import Interrupted, Progress, RunFailed, catch_signals
from rlbook.settings import Config, make_config, read_settings, write_settings, write_whole


# %% book/run.py · The run directory
class GrowingFile:
    """A text file that only grows, and can be cut back to an earlier size."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> None:
        """Add lines, all or none."""
        encoded = text.encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                if file.write(encoded) < len(encoded):  # the disk is full: no half lines
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunFailed(f"Could not write {self.path}: {error.strerror}.") from error

    def sync(self) -> int:
        """Put the lines safely on the disk and return their size in bytes."""
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def truncate(self, size: int) -> None:
        """Drop what was written after a checkpoint: the resumed run writes it again."""
        with open(self.path, "ab") as file:
            file.truncate(min(size, file.tell()))  # never longer, should somebody have cut it


class MetricsFile(GrowingFile):
    """Lines of metrics, one JSON object each."""

    def append(self, line: dict[str, float]) -> None:
        """Add one line."""
        self.write(json.dumps(line) + "\n")

    def read(self) -> list[dict[str, float]]:
        """Read all lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class EpisodesFile(GrowingFile):
    """The finished episodes of the training, as CSV."""

    columns = "step,return,length,seconds\n"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lines: list[str] = []  # not written yet
        self.began = time.perf_counter()

    def add(self, step: int, episode_return: float, length: int) -> None:
        """Keep the line of an episode that has just ended."""
        seconds = time.perf_counter() - self.began
        self.lines.append(f"{step},{episode_return!r},{length},{seconds:.1f}\n")

    def flush(self) -> None:
        """Write the lines that were kept."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            self.lines.insert(0, self.columns)
        self.write("".join(self.lines))
        self.lines.clear()

    def go_on(self, size: int) -> None:
        """Cut the file back to a checkpoint, and let the clock go on from its last line."""
        self.truncate(size)
        last = self.path.read_text().splitlines()[-1:]
        seconds = float(last[0].split(",")[3]) if last and last[0] + "\n" != self.columns else 0.0
        self.began = time.perf_counter() - seconds


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

    def close(self) -> None:
        """End the writer's thread and close its file; a later line opens another."""
        if self.writer is not None:
            self.writer.close()


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    packages = {name: version(name) for name in ("torch", "numpy", "gymnasium")}
    return {"python": platform.python_version(), **packages, "rlbook": rlbook.__version__}


class RunRecord:
    """The file `run.json`: command, versions, machine, start, end, and how the run ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: dict[str, Any] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return what the processes so far wrote, the first one first."""
        try:
            record = json.loads(self.path.read_text())
            return [*record.pop("before", []), record]
        except (OSError, ValueError, TypeError, AttributeError):
            return []  # a new run, or a damaged file

    def start(self) -> None:
        """Write down that a process begins or goes on with the run."""
        before = self.read()
        program, *words = sys.argv or [""]
        self.record = {
            "command": shlex.join([Path(program).name, *words]),
            "versions": versions(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "start": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "end": None,
            "ended": "still running, or killed",
        }
        if before:
            self.record["before"] = before
        self.write()

    def end(self, how: str) -> None:
        """Write down how the process ended."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.record |= {"end": now, "ended": how}
        self.write()

    def write(self) -> None:
        """Replace the file in one step."""
        text = json.dumps(self.record, indent=2) + "\n"
        with suppress(OSError):
            write_whole(self.path, lambda file: file.write_text(text))


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self.episodes = EpisodesFile(self.path / "episodes.csv")
        self.record = RunRecord(self.path / "run.json")
        self.tensorboard = TensorBoardFiles(self.path / "tensorboard")
        self.checkpoints = CheckpointDirectory(self.path / "checkpoints")
        self.lock = filelock.FileLock(self.path / "writer.lock", timeout=0)

    @classmethod
    def create(cls, path: str, agent: Agent) -> "RunDirectory":
        """Make the directory of a new run; one that holds a run already is left alone."""
        directory = cls(path)
        directory.check_new()
        make_callbacks(agent.config)  # mistakes are better told before anything is written
        if agent.config.tensorboard:
            tensorboard_class()
        env = make_env(agent.config.env_id, agent.config.env_kwargs)
        try:
            try_env(env)
        finally:
            env.close()
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            with directory:
                directory.check_new()  # another process may have been quicker
                write_settings(directory.config_path, algorithm_name(type(agent)), agent.config)
        except OSError as error:
            raise ValueError(f"Could not make {path}: {error.strerror}.") from error
        return directory

    def check_new(self) -> None:
        """Raise if the directory holds a run already."""
        if self.config_path.exists() or self.metrics.path.exists():
            go_on = f"go on with `rlbook resume {self.path}` or choose another"
            raise ValueError(f"{self.path} already holds a run: {go_on}.")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """Open the directory of a run that exists."""
        directory = cls(path)
        if not directory.config_path.is_file():
            raise ValueError(f"{path} is not a run directory: it has no config.yaml.")
        return directory

    def __enter__(self) -> "RunDirectory":
        """Keep other processes from writing to the same run."""
        try:
            self.lock.acquire()
        except filelock.Timeout as error:
            raise ValueError(
                f"Another process is at work on {self.path}: wait for it, or stop it."
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release()


# %% book/run.py · When is it time?
def crosses(step: int, advance: int, every: int) -> bool:
    """Say whether the last `advance` steps reached or passed a multiple of `every`."""
    return every > 0 and step % every < advance


# %% book/run.py · Collecting
LARGEST = float(np.finfo(np.float32).max)  # the buffer stores 32 bits


def check_finite(step: int, what: str, values: np.ndarray) -> None:
    """Raise when the environment returned a number that no agent can learn from."""
    if values.dtype.kind == "f" and not (np.abs(values) <= LARGEST).all():
        how = "too large for 32 bits" if np.isfinite(values).all() else "not finite"
        raise RunFailed(f"The environment returned a {what} that is {how}, step {step}.")


def check_action(agent: Agent, acted: Any, count: int) -> None:
    """Raise unless `act` returned `count` actions of the action space, and a state."""
    act = f"`act` of {type(agent).__name__} must return"
    if not isinstance(acted, tuple) or len(acted) != 2:
        raise Mistake(f"{act} a pair: actions, and the state (None without one).")
    actions, space = np.asarray(acted[0]), agent.action_space
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.Box):
        return  # of another kind, which only an algorithm of your own can have
    if actions.shape != (count, *(space.shape or ())):
        raise Mistake(f"{act} an array with one action for each of {count} observations.")
    if isinstance(space, gym.spaces.Box):
        sound = np.allclose(actions, np.clip(actions, space.low, space.high), 1e-4, 1e-4)
    else:
        sound = all(space.contains(action) for action in actions)
    if not sound:
        raise Mistake(f"{act} actions of {space}, not {actions.tolist()}.")


@contextmanager
def lost_process(envs: SyncVectorEnv | AsyncVectorEnv) -> Iterator[None]:
    """Say in a sentence that an environment with a process of its own is gone."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        if isinstance(envs, SyncVectorEnv):  # an environment here raised it
            raise
        message = "The process of an environment has ended, killed or out of memory."
        raise RunFailed(message) from error


@contextmanager
def closed_on_failure(envs: SyncVectorEnv | AsyncVectorEnv) -> Iterator[None]:
    """Close the environments if what is done inside fails, so that no process is left behind."""
    try:
        yield
    except BaseException:
        close_vector_env(envs)
        raise


class Collector:
    """Steps an agent through its environments, and can come back to any step."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.config = agent, agent.config
        config = self.config
        self.envs = make_vector_env(
            config.env_id, config.num_envs, config.env_kwargs, config.vectorize
        )
        self.recent: deque[float] = deque(maxlen=20)  # returns of the last finished episodes
        self.finished: list[tuple[float, int]] = []  # return and length of those of the last step
        self.warned = False
        with closed_on_failure(self.envs):
            check_fits(agent, self.envs.single_observation_space, self.envs.single_action_space)
            self.begin(agent.global_step, self.reset(agent.global_step))

    def reset(self, step: int) -> np.ndarray:
        """Reset all environments, seeded by the run's seed and the step."""
        count, seed = self.config.num_envs, self.config.seed
        seeds: list[int | None] = [derive_seed(seed, "envs", step, i) for i in range(count)]
        with lost_process(self.envs):
            obs, _ = self.envs.reset(seed=seeds)
        check_finite(step, "observation", obs)
        return obs

    def begin(self, step: int, obs: np.ndarray) -> None:
        """Write down that new episodes begin."""
        count = self.config.num_envs
        self.origin, self.obs = step, obs
        self.actions: list[np.ndarray] = []  # since the reset: they lead back to this step
        self.episode_start = np.ones(count, dtype=bool)
        self.returns, self.first_step = np.zeros(count), [0] * count  # of the episodes under way
        self.discounted = np.zeros(count)  # returns so far, whose deviation can scale the rewards
        self.state: Any = None  # the agent's hidden state

    def play(self, action: np.ndarray) -> tuple[Any, ...]:
        """Step the environments; return observations, true successors, rewards and two ends."""
        with lost_process(self.envs):
            obs, reward, terminated, truncated, infos = self.envs.step(action)
        next_obs, step = true_next_obs(obs, infos), self.agent.global_step
        check_finite(step, "reward", reward)
        check_finite(step, "observation", next_obs)
        if next_obs is not obs:
            check_finite(step, "observation", obs)  # the first of a new episode
        return obs, next_obs, reward, terminated, truncated

    def record(self, action: np.ndarray, played: tuple[Any, ...]) -> None:
        """Write down what `play` returned."""
        self.obs, _, reward, terminated, truncated = played
        self.actions.append(action)
        if self.config.normalize_rewards:
            discount = self.agent.preprocessing.gamma * ~self.episode_start
            self.discounted = discount * self.discounted + reward
        self.episode_start = terminated | truncated
        self.returns += reward
        self.finished = []
        if self.episode_start.any():
            for i in np.flatnonzero(self.episode_start).tolist():
                length = len(self.actions) - self.first_step[i]
                self.finished.append((float(self.returns[i]), length))
                self.recent.append(float(self.returns[i]))
                self.returns[i], self.first_step[i] = 0.0, len(self.actions)

    def step(self) -> None:
        """Take one step in each environment and show it to the agent."""
        agent, state, start = self.agent, self.state, self.episode_start
        step, generator = agent.global_step + len(start), agent.generator.bit_generator
        checkpoint = crosses(step, len(start), self.config.checkpoint_every)
        preprocessing = agent.preprocessing
        before = generator.state, preprocessing.state_dict()
        try:
            preprocessing.update(self.obs)
            obs = preprocessing.prepare(self.obs)
            acted = agent.act(obs, state, start, explore=True)
            if not self.actions:  # the first since a reset: later ones will be alike
                check_action(agent, acted, len(start))
            action, next_state = acted
            played = self.play(action)
            fresh_obs = self.reset(step) if checkpoint else None
        except BaseException:
            generator.state = before[0]  # and nothing else has changed but the statistics
            preprocessing.load_state_dict(before[1])
            raise
        agent.global_step = step
        self.record(action, played)
        self.state = next_state
        _, next_obs, reward, terminated, truncated = played
        truncated = ~terminated if checkpoint else truncated & ~terminated
        next_obs = preprocessing.prepare(next_obs)
        reward = preprocessing.scale_reward(reward, self.discounted)
        if fresh_obs is not None:
            if step - self.origin >= self.config.checkpoint_every:
                self.warn_of_cuts()
            self.begin(step, fresh_obs)
        agent.observe(
            Transition(obs, action, reward, next_obs, terminated, truncated, start, state)
        )

    def warn_of_cuts(self) -> None:
        """Say once if no episode has come to its end, as too long ones never do."""
        if not self.recent and not self.warned:
            every, count = self.config.checkpoint_every, self.config.num_envs
            warnings.warn(
                "No episode has ended yet. Checkpoints reset all environments, so none can be "
                f"longer than 'checkpoint_every' ({every}) over 'num_envs' ({count}): raise the "
                "first?",
                stacklevel=4,
            )
            self.warned = True

    def state_dict(self) -> dict[str, Any]:
        """Return what leads from the last reset to this step."""
        actions = torch.from_numpy(np.array(self.actions))  # one tensor: quickly written and read
        return {
            "origin": self.origin,
            "actions": actions,
            "obs": torch.from_numpy(np.array(self.obs)),  # where they lead to
            "recent": list(self.recent),
            "state": self.state,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Reset as the stored run did, repeat its actions and take over the hidden state."""
        self.begin(saved["origin"], self.reset(saved["origin"]))
        for action in saved["actions"].numpy():
            self.record(action, self.play(action))
        if "obs" in saved and not np.allclose(self.obs, saved["obs"].numpy()):
            warnings.warn(
                "The environment ignores its seed or was changed: the same actions have led to "
                "another observation, so the run goes on, but not exactly.",
                stacklevel=5,
            )
        self.recent = deque(saved["recent"], maxlen=self.recent.maxlen)
        self.state = saved["state"]


# %% book/run.py · Logging
class Logger:
    """The lines of metrics of a run, in memory and in its directory."""

    def __init__(self, directory: RunDirectory | None, tensorboard: bool) -> None:
        self.directory, self.tensorboard = directory, tensorboard
        self.lines: list[dict[str, float]] = []
        self.sums: dict[str, Tensor] = {}  # of the metrics since the last line
        self.counts: dict[str, int] = {}
        self.trained: dict[str, float] = {}  # the last line of the training
        self.evaluated: dict[str, float] = {}  # and that of an evaluation

    def add(self, metrics: Metrics) -> None:
        """Count the metrics of one update."""
        for name, value in metrics.items():
            before = self.sums.get(name)
            value = torch.as_tensor(value).detach()  # one of your own may return another number
            self.sums[name] = value.double() if before is None else before + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def write(self, line: dict[str, float]) -> None:
        """Keep one line."""
        if self.directory:
            self.directory.metrics.append(line)
            if self.tensorboard:
                self.directory.tensorboard.append(line)
        self.lines.append(line)

    def log_training(self, step: int, updates: int, recent: Sequence[float]) -> None:
        """Write the means of the metrics since the last line, and how the last episodes went."""
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        line = {"global_step": step, **means, "updates": updates}
        if recent:
            line["train_return_mean"] = float(np.mean(recent))
        self.sums, self.counts = {}, {}
        if self.directory:
            self.directory.episodes.flush()
        self.write(line)
        self.trained = line

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write what an evaluation scored."""
        line = {
            "global_step": step,
            "eval_return_mean": evaluation.mean,
            "eval_return_std": evaluation.std,
            "eval_length_mean": float(evaluation.lengths.mean()),
        }
        self.write(line)
        self.evaluated = line

    def last(self, step: int) -> dict[str, float]:
        """Return the last line and the last evaluation together."""
        return {**(self.lines[-1] if self.lines else {}), **self.evaluated, "global_step": step}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same lines."""
        state = {name: getattr(self, name) for name in ("sums", "counts", "trained", "evaluated")}
        if self.directory is None:
            return {**state, "lines": self.lines}
        self.directory.episodes.flush()
        sizes = {"size": self.directory.metrics.sync(), "episodes": self.directory.episodes.sync()}
        return {**state, **sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a stored step: what was written after it is dropped."""
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])
        self.trained, self.evaluated = state["trained"], state["evaluated"]
        if self.directory:
            self.directory.metrics.truncate(state.get("size", 0))
            self.directory.episodes.go_on(state.get("episodes", 0))
            self.lines = self.directory.metrics.read()
        else:
            self.lines = list(state.get("lines", []))  # a copy of an agent leaves its directory


# %% book/run.py · Evaluating
class Evaluator:
    """Plays greedy episodes, in environments that the training never sees."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.envs: list[gym.Env] = []  # made when they are first needed

    def evaluate(self, agent: Agent, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Play episodes whose seeds follow from the step."""
        config = self.config
        if not self.envs:
            count = min(config.eval_episodes, EVALUATION_ENVS)
            self.envs = [make_env(config.env_id, config.env_kwargs) for _ in range(count)]
        seed = derive_seed(config.seed, "evaluation", agent.global_step)
        episodes, max_steps = config.eval_episodes, config.eval_max_steps
        return evaluate(agent.greedy, self.envs, seed, episodes, max_steps, stop)

    def close(self) -> None:
        """Close the environments; another evaluation makes new ones."""
        with ExitStack() as stack:
            while self.envs:
                stack.callback(self.envs.pop().close)


# %% book/run.py · The loop
@dataclass(frozen=True, repr=False)
class RunResult:
    """What a run leaves: its last metrics, all their lines, its checkpoint and its agent."""

    metrics: dict[str, float]
    history: list[dict[str, float]]
    checkpoint: Path | None
    agent: Agent
    seconds: float  # of this call
    stopped: str | None = None  # why a callback ended it, if one did

    def __repr__(self) -> str:
        score = self.metrics.get("eval_return_mean")
        parts = [] if score is None else [f"mean return {score:.1f}"]
        parts += [f"{self.seconds:.1f} s"] + [f"stopped: {self.stopped}"] * bool(self.stopped)
        parts += [str(self.checkpoint)] if self.checkpoint else ["nothing written"]
        return f"RunResult({self.agent!r}, {', '.join(parts)})"

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps at which a metric was written, and its values there."""
        lines = [line for line in self.history if name in line]
        steps, values = ([line[key] for line in lines] for key in ("global_step", name))
        return np.array(steps), np.array(values)


def with_plain_numbers(state: Any) -> Any:
    """Turn NumPy's numbers in a nested state, which a checkpoint cannot hold, into Python's."""
    if isinstance(state, dict):
        return {key: with_plain_numbers(value) for key, value in state.items()}
    if isinstance(state, list):
        return [with_plain_numbers(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state


class Run:
    """The loop: collect, update, log, evaluate and checkpoint, until it is done or stopped."""

    def __init__(
        self,
        agent: Agent,
        directory: RunDirectory | None,
        progress: bool = True,
        callbacks: Callbacks = (),
        until: int | None = None,
    ) -> None:
        self.agent, self.directory, self.config = agent, directory, agent.config
        self.until = until or agent.config.total_steps  # the step at which it ends
        self.callbacks = [*make_callbacks(agent.config), *callbacks]
        self.collector = Collector(agent)
        self.logger = Logger(directory, agent.config.tensorboard)
        self.evaluator = Evaluator(agent.config)
        self.label = f"{agent.name}, seed {agent.config.seed}"  # of several runs side by side
        self.shows_progress = progress
        self.progress = Progress(self.label, 0, self.until, enabled=False)  # until `train` begins
        self.stopped: str | None = None  # why a callback ended the run
        self.compiling = agent.config.compile  # until the first update is done
        self.caught: list[int] = []  # signals
        self.whole_step = agent.global_step  # the last step that was done as a whole
        paths = directory.checkpoints.paths() if directory else []
        self.saved: Path | None = paths[-1] if paths else None  # the last checkpoint

    def step(self) -> None:
        """Take one step of all environments and do what is due after it."""
        config, agent = self.config, self.agent
        self.collector.step()
        self.update()
        step = agent.global_step
        if self.directory:
            for episode in self.collector.finished:
                self.directory.episodes.add(step, *episode)
        if crosses(step, config.num_envs, config.log_every):
            self.logger.log_training(step, agent.updates, self.collector.recent)
        self.whole_step = step
        for callback in self.callbacks:
            callback.after_step(self)
        if crosses(step, config.num_envs, config.eval_every):
            self.evaluate()
        if crosses(step, config.num_envs, config.checkpoint_every):
            self.save()
        self.progress.step(step, self.logger.trained)

    def update(self) -> None:
        """Make the updates that are due, and count the metrics of the last."""
        agent = self.agent
        metrics: Metrics | None = None
        for batch in agent.batches():
            if self.compiling:
                self.progress.announce("compiling the update, which can take a minute")
            try:
                result = agent.update(batch)
            except RuntimeError as error:
                if not self.compiling:
                    raise
                reason = str(error).strip().partition("\n")[0]
                why = f"the update of {agent.name} could not be compiled ({reason})"
                raise Mistake(f"Setting 'compile' must be left out: {why}.") from error
            self.compiling = False
            metrics = getattr(result, "metrics", {})  # an algorithm may return nothing
            agent.updates += 1
        if metrics is None:
            return  # no update was due
        if "loss" not in metrics:
            example = 'UpdateResult({"loss": loss.detach()})'
            raise Mistake(f"`update` of {agent.name} must return a loss, as in {example}.")
        loss = float(metrics["loss"])
        if not math.isfinite(loss):
            raise Diverged(f"the loss of update {agent.updates} is {loss}")
        self.logger.add(metrics)

    def evaluate(self) -> None:
        """Log what greedy episodes score with these weights, unless that has just been done."""
        step = self.agent.global_step
        if self.logger.evaluated.get("global_step") != step:
            evaluation = self.evaluator.evaluate(self.agent, stop=lambda: bool(self.caught))
            self.logger.log_evaluation(step, evaluation)
            self.progress.evaluated(step, evaluation, self.logger.trained)
            # The closing evaluation of a piece of the run is one that the whole would not have.
            for callback in self.callbacks if self.whole_has_evaluation() else []:
                callback.after_evaluation(self, evaluation)

    def whole_has_evaluation(self) -> bool:
        """Say whether a run that is not cut into pieces would evaluate at this step as well."""
        step, advance, config = self.agent.global_step, self.config.num_envs, self.config
        at_end = step - advance < config.total_steps <= step
        return at_end or bool(self.stopped) or crosses(step, advance, config.eval_every)

    def stop(self, reason: str) -> None:
        """End the run after this step; for callbacks."""
        self.stopped = reason

    def log(self, **metrics: SupportsFloat) -> None:
        """Add metrics to the next line of the training; for callbacks."""
        self.logger.add({name: torch.tensor(float(value)) for name, value in metrics.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return what the run needs beside the agent to go on exactly."""
        parts = {"collector": self.collector.state_dict(), "logger": self.logger.state_dict()}
        named = [[type(callback).__name__, callback.state_dict()] for callback in self.callbacks]
        states = with_plain_numbers(named)
        ends = {"until": self.until, "stopped": self.stopped}
        return {**parts, "callbacks": states, "envs": environments_of(self.config), **ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to the step that was stored; the agent is there already."""
        self.collector.load_state_dict(state["collector"])
        self.logger.load_state_dict(state["logger"])
        self.whole_step = self.agent.global_step
        states = list(state.get("callbacks", []))
        for callback in self.callbacks:
            named = [each for each in states if each[0] == type(callback).__name__]
            if named:  # one that was added later begins now
                callback.load_state_dict(named[0][1])
                states.remove(named[0])
        for name, _ in states:
            warnings.warn(f"The run had the callback {name} and goes on without it.", stacklevel=4)

    def save(self) -> None:
        """Write a checkpoint from which the run goes on exactly."""
        if self.directory:
            content = {**self.agent.checkpoint(), "run": self.state_dict()}
            self.saved = self.directory.checkpoints.save(self.agent.global_step, content)
            for callback in self.callbacks:
                callback.after_checkpoint(self, self.saved)

    def train(self) -> RunResult:
        """Go on until the last step, or until something stops the run."""
        began, agent, config, ended = time.perf_counter(), self.agent, self.config, "failed"
        agent.training_state = None  # it is of a step that will soon be past
        # Only here, since a resumed run has not taken the steps before this one.
        self.progress = Progress(self.label, agent.global_step, self.until, self.shows_progress)
        if self.directory:
            self.directory.record.start()
        try:
            with torch_for_learning(config.threads), catch_signals() as self.caught:
                if self.evaluation_is_due():
                    self.evaluate()  # a signal has stopped it
                while agent.global_step < self.until and not self.stopped:
                    self.step()
                    if self.caught:
                        raise KeyboardInterrupt
                if config.eval_every:
                    self.evaluate()
                for callback in self.callbacks:
                    callback.at_end(self)
                self.save()
                if self.caught:  # after the last step: whoever asked to stop starts no other run
                    raise KeyboardInterrupt
            ended = "stopped by a callback" if self.stopped else "finished"
            warn_of_no_update(agent)
        except KeyboardInterrupt:
            ended = "interrupted"
            where = f"Stopped at step {agent.global_step:,}."
            raise Interrupted(f"{where} {self.rescue()}", *self.caught) from None
        except Diverged as error:
            where = f"The run stopped at step {agent.global_step:,} because {error}."
            raise RunFailed(f"{where} A lower learning rate may help. {self.rescue()}") from error
        except (RunFailed, CheckpointError) as error:
            raise RunFailed(f"{error} {self.rescue()}") from error
        except Exception as error:
            where = f"The run stopped at step {agent.global_step:,}. {self.rescue()}"
            if isinstance(error, Mistake):
                raise Mistake(f"{error} {where}") from error
            error.add_note(where)
            raise
        finally:
            self.close(ended)
        metrics, seconds = self.logger.last(agent.global_step), time.perf_counter() - began
        return RunResult(metrics, self.logger.lines, self.saved, agent, seconds, self.stopped)

    def evaluation_is_due(self) -> bool:
        """Say whether this is a step to evaluate at, as it is only if an evaluation was stopped."""
        step = self.agent.global_step
        return step > 0 and crosses(step, self.config.num_envs, self.config.eval_every)

    def rescue(self) -> str:
        """Save the last sound state if there is one, and say how to go on."""
        sound = self.whole_step == self.agent.global_step
        if sound:
            with suppress(CheckpointError, Diverged, RunFailed, OSError):
                self.save()  # which may fail for the same reason
        if self.directory is None:
            held = "the agent is as it was after this step and can `learn` on" if sound else ""
            return f"Nothing was written, since the run has no run_dir{held and '; ' + held}."
        if self.saved is None:
            return f"Without a checkpoint, `rlbook resume {self.directory.path}` starts again."
        return f"Go on from {self.saved} with `rlbook resume {self.directory.path}`."

    def close(self, ended: str) -> None:
        """Close bar and environments, keep what `learn` goes on from, and write down the end."""
        agent, self.agent.training_state = self.agent, None
        if self.whole_step == agent.global_step:
            with suppress(RunFailed, OSError):
                agent.training_state = self.state_dict()
        if self.directory:
            self.directory.record.end(f"{ended} at step {agent.global_step}")
        try:
            with ExitStack() as stack:  # whichever of them fails, all are closed
                if self.directory:
                    stack.callback(self.directory.tensorboard.close)
                stack.callback(close_vector_env, self.collector.envs)
                stack.callback(self.evaluator.close)
                stack.callback(self.progress.close, agent.global_step)  # the first, as on a stack
        except Exception as error:  # what was learned is not lost for that
            warnings.warn(f"The run has ended, but closing it failed: {error!r}", stacklevel=3)


# %% book/run.py · Starting and resuming
def environments_of(config: Config) -> dict[str, Any]:
    """Return the settings that say which environments a collector steps."""
    names = ("env_id", "env_kwargs", "num_envs", "seed")
    return copy.deepcopy({name: getattr(config, name) for name in names})


def check_resumable(path: Path, content: dict[str, Any], agent: Agent) -> None:
    """Raise unless the checkpoint was written by a run of this algorithm."""
    found, wanted = content.get("algo"), algorithm_name(type(agent))
    if found != wanted:
        raise ValueError(f"{path} holds a {found} agent, but the run is {wanted}.")
    if "size" not in (content.get("run") or {}).get("logger", {}):
        raise ValueError(f"{path} was written by `agent.save`, not by a run: use rlbook.load.")
    before, now = content["run"]["envs"]["num_envs"], agent.config.num_envs
    if before != now:
        raise ValueError(f"{path} is of a run with 'num_envs' {before}, not {now}: change it back.")


def check_unchanged(agent: Agent) -> None:
    """Raise if a setting that the agent was built from has changed since."""
    for name, built in agent.built_from.items():
        if getattr(agent.config, name, None) != built:
            fixed = f"was {built!r} when the agent was built, and is fixed since"
            raise ValueError(f"Setting {name!r} {fixed}: make a new agent.")
    directory = agent.directory
    if directory and Path(agent.config.run_dir or "") != directory.path:
        fixed = f"is fixed once a run has begun in {directory.path}"
        raise ValueError(f"Setting 'run_dir' {fixed}: give it to a `copy.deepcopy` of the agent.")


def check_up_to_date(agent: Agent, directory: RunDirectory) -> None:
    """Raise if the run is further than the agent, which would overwrite what came after it."""
    reached = directory.checkpoints.last_step()
    if reached > agent.global_step:
        gone = f"{directory.path} has gone on without this agent: it is at step {reached:,}"
        how = f"`rlbook resume {directory.path}` goes on from there"
        raise ValueError(f"{gone}, and the agent at {agent.global_step:,}. {how}.")


def warn_of_lost_replay(agent: Agent, stacklevel: int) -> None:
    """Say once that an agent goes on without what it had stored."""
    if agent.replay_lost:
        lost = "The replay buffer was not saved: it fills again, and the run is not exact."
        warnings.warn(lost, stacklevel=stacklevel)
        agent.replay_lost = False


def warn_of_no_update(agent: Agent) -> None:
    """Say so if a whole run was too short to learn from."""
    if agent.updates == 0 and agent.global_step >= agent.config.total_steps:
        warnings.warn(
            f"Nothing was learned: {agent.global_step:,} steps are too few for a first update. It "
            "waits for 'learning_starts' of a replay, or for a rollout of 'num_steps' in each "
            "environment.",
            stacklevel=4,
        )


def warn_of_end(until: int, total_steps: int) -> None:
    """Say what happens to schedules in a run that is longer than they are."""
    if until > total_steps:
        message = f"learn goes on beyond total_steps ({total_steps}): schedules stay at their end."
        advice = "Give the agent the steps of all calls as total_steps."
        warnings.warn(f"{message} {advice}", stacklevel=4)


def train(
    agent: Agent, progress: bool = True, callbacks: Callbacks = (), until: int | None = None
) -> RunResult:
    """Train an agent up to `total_steps` or to the step `until`, in its directory if it has one."""
    check_callbacks(callbacks)
    check_unchanged(agent)
    if agent.config.run_dir and not agent.directory:
        agent.directory = RunDirectory.create(agent.config.run_dir, agent)
    with agent.directory or nullcontext():
        if agent.directory:  # settings may have changed since the last `learn`
            check_up_to_date(agent, agent.directory)
            write_settings(agent.directory.config_path, algorithm_name(type(agent)), agent.config)
        run = Run(agent, agent.directory, progress, callbacks, until)
        before = agent.training_state
        with closed_on_failure(run.collector.envs):
            warn_of_end(run.until, agent.config.total_steps)
            warn_of_lost_replay(agent, stacklevel=4)
            if before and before["envs"] == environments_of(agent.config):
                run.load_state_dict(before)
            elif agent.global_step:
                run.saved = None  # new episodes begin here, and no checkpoint knows of them
            if run.until > agent.config.total_steps or (agent.global_step and not run.saved):
                run.save()  # so that `resume` can go on from here, and as far
        return run.train()


def resume(
    path: str | os.PathLike[str],
    total_steps: int | None = None,
    progress: bool = True,
    callbacks: Callbacks = (),
) -> RunResult:
    """Go on with a run from its newest sound checkpoint, as if it had never been stopped."""
    check_callbacks(callbacks)
    directory = RunDirectory.open(path)
    settings = read_settings(directory.config_path)
    agent_class = find_algorithm(str(settings.pop("algo", None)))
    settings |= {"run_dir": str(path)}
    if total_steps is not None:
        settings["total_steps"] = total_steps
    agent = agent_class(config=make_config(agent_class.config_class, settings))
    agent.directory = directory
    with directory:
        newest = directory.checkpoints.newest()  # on the CPU: the agent moves what it must
        until = agent.config.total_steps
        if newest:
            check_resumable(newest[0], newest[1], agent)
            until = total_steps or max(until, newest[1]["run"].get("until", 0))
            reached = newest[1]["agent"]["global_step"]
            if reached >= until + agent.config.num_envs:  # the last step of all may overshoot
                raise ValueError(f"{path} is already at step {reached:,}: ask for more steps.")
        run = Run(agent, directory, progress, callbacks, until)
        with closed_on_failure(run.collector.envs):
            if newest:
                run.saved, content = newest
                load_state(agent, content["agent"], run.saved)
                warn_of_lost_replay(agent, stacklevel=3)
                run.load_state_dict(content["run"])
                if total_steps is None:  # with it, the user asks for more
                    run.stopped = content["run"].get("stopped")
            else:
                directory.metrics.truncate(0)
                directory.episodes.truncate(0)
            if total_steps is not None:
                write_settings(directory.config_path, algorithm_name(type(agent)), agent.config)
        return run.train()
