"""Made from book/agent.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "BUILT_FROM",
    "REGISTRY",
    "REPLAY",
    "WRAPPERS",
    "Agent",
    "Diverged",
    "Interface",
    "Metrics",
    "Transition",
    "UpdateResult",
    "action_kind",
    "algorithm_name",
    "algorithms",
    "as_batch",
    "chapter_modules",
    "check_algorithm",
    "check_fits",
    "check_parts",
    "check_spaces",
    "choose_config",
    "compile_methods",
    "family",
    "find_algorithm",
    "find_device",
    "find_interface",
    "fits",
    "has_compiler",
    "has_lstm",
    "import_module",
    "is_learned",
    "learned_in",
    "load",
    "load_state",
    "not_finite",
    "observation_kind",
    "own_algorithms",
    "restore",
    "seeded_torch",
    "tensors_of",
    "torch_for_learning",
    "where_episodes_start",
]

# %% book/agent.py · The agent
import copy
import functools
import importlib
import importlib.resources
import os
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlbook.checkpoint import (
    CheckpointDirectory,
    CheckpointError,
    plain_space,
    read_checkpoint,
    space_from_plain,
    write_checkpoint,
)
from rlbook.envs import (
    EVALUATION_ENVS,
    Evaluation,
    derive_seed,
    evaluate,
    make_env,
    missing_module,
    nearest,
)
from rlbook.preprocess import Preprocessing, prepared_space
from rlbook.replay import ReplayConfig, updates_due
from rlbook.settings import Config, gather_settings, make_config

if TYPE_CHECKING:  # a later chapter has the loop, which imports this module
    from rlbook.callbacks import Callbacks
    from rlbook.run import RunDirectory, RunResult


# %% book/agent.py · What passes between loop and agent
@dataclass(slots=True)
class Transition:
    """One step of all environments, as the loop gives it to the agent."""

    obs: np.ndarray  # (num_envs, ...)
    action: np.ndarray  # (num_envs, ...)
    reward: np.ndarray  # (num_envs,)
    next_obs: np.ndarray  # (num_envs, ...), the true successor, at an episode's end too
    terminated: np.ndarray  # (num_envs,)
    truncated: np.ndarray  # (num_envs,)
    episode_start: np.ndarray  # (num_envs,), whether obs is the first of its episode
    state: Any  # the hidden state of a recurrent agent before this step


Metrics = dict[str, Tensor]  # scalars by name, without gradient


@dataclass(slots=True)
class UpdateResult:
    """What one gradient step reports."""

    metrics: Metrics  # "loss" is among them


# %% book/agent.py · Which algorithms there are
REGISTRY: dict[str, type["Agent"]] = {}  # an agent class puts itself here when it is defined


def algorithm_name(agent_class: type["Agent"]) -> str:
    """Name an algorithm so that another process finds it: one that is not ours as `module:name`."""
    module, own = agent_class.__module__, "name" in vars(agent_class)
    if module.startswith(("rlbook.", "__")) or "<locals>" in agent_class.__qualname__:
        return agent_class.name
    return f"{module}:{agent_class.name if own else agent_class.__name__}"


@functools.cache
def chapter_modules() -> list[str]:
    """The modules of the book in its order, as the exporter wrote them down."""
    return (importlib.resources.files("rlbook") / "chapters.txt").read_text().split()


def family(agent_class: type["Agent"]) -> list[str]:
    """Name an algorithm and those that it extends, the nearest first."""
    named = [c for c in agent_class.__mro__ if issubclass(c, Agent) and hasattr(c, "name")]
    return [algorithm_name(each) for each in named]


def import_module(module: str, wanted: str) -> Any:
    """Import a user's module, or say why `wanted` cannot be found."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{wanted} {missing_module(error)}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{wanted} cannot be imported, since {module!r} raises {why}") from error


def own_algorithms(module: str) -> dict[str, type["Agent"]]:
    """The algorithms in a user's module, as `module:name`."""
    found = vars(import_module(module, f"An algorithm in {module!r}")).values()
    classes = [v for v in found if isinstance(v, type) and issubclass(v, Agent) and v is not Agent]
    names = {agent_class: algorithm_name(agent_class) for agent_class in classes}
    return {f"{module}:{name.rpartition(':')[2]}": c for c, name in names.items() if ":" in name}


def algorithms() -> dict[str, type["Agent"]]:
    """All algorithms by name: those of the book in its order, then a user's own."""
    for module in chapter_modules():
        importlib.import_module(f"rlbook.{module}")
    order = {f"rlbook.{module}": i for i, module in enumerate(chapter_modules())}
    return dict(sorted(REGISTRY.items(), key=lambda kv: order.get(kv[1].__module__, len(order))))


def find_algorithm(name: str) -> type["Agent"]:
    """Find an algorithm by its name or as `module:name`, or say which name is nearest."""
    own = own_algorithms(name.rpartition(":")[0]) if ":" in name else {}
    if name in chapter_modules():  # most often: then no other chapter need be imported
        importlib.import_module(f"rlbook.{name}")
    known = REGISTRY if name in REGISTRY else own if ":" in name else algorithms()
    if name not in known:
        hint = nearest(name, list(known)) or f" There are: {', '.join(known) or 'none'}."
        advice = "" if ":" in name else " One of your own is named `module:name`."
        raise ValueError(f"There is no algorithm {name!r}.{hint}{advice}")
    if ":" in name:
        check_algorithm(known[name])
    return known[name]


# %% book/agent.py · Does the algorithm fit the environment?
def observation_kind(space: gym.Space) -> str:
    """Say what the observations are, in one word: vector, image or other."""
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return "vector"
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 3:
        return "image"
    return "other"


def action_kind(space: gym.Space) -> str:
    """Say what the actions are, in one word: discrete, continuous or other."""
    if isinstance(space, gym.spaces.Discrete):
        return "discrete"
    return "continuous" if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 else "other"


def fits(agent_class: type["Agent"], found: tuple[str, str]) -> bool:
    """Say whether an algorithm can handle these kinds of observations and actions."""
    observations, actions = found
    return observations == agent_class.observations and actions in agent_class.actions.split(" or ")


WRAPPERS = (  # what turns other observations and other actions into those that agents take
    "wrap it in gymnasium.wrappers.FlattenObservation, which makes one vector of them",
    "wrap it in gymnasium.wrappers.TransformAction with a Discrete or one-dimensional Box space",
)


def check_spaces(agent: "Agent") -> None:
    """Raise unless the agent can handle its environment; name an algorithm that can."""
    spaces = agent.observation_space, agent.action_space
    found = observation_kind(spaces[0]), action_kind(spaces[1])
    if fits(type(agent), found):
        return
    fitting = [name for name, agent_class in algorithms().items() if fits(agent_class, found)]
    hint = f"try {' or '.join(fitting)}" if fitting else "no algorithm of this book fits it yet"
    hint = next((WRAPPERS[i] for i in range(2) if found[i] == "other"), hint)
    seen, done = (
        f"{kind.replace('other', type(space).__name__)} {what} ({' '.join(str(space).split())})"
        for kind, space, what in zip(found, spaces, ("observations", "actions"), strict=True)
    )
    raise ValueError(
        f"{agent.config.env_id!r} has {seen} and {done}, but {agent.name} needs "
        f"{agent.observations} observations and {agent.actions} actions: {hint}."
    )


# %% book/agent.py · Randomness with an owner
@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed` and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs too
        yield


# %% book/agent.py · Threads and devices
@contextmanager
def torch_for_learning(threads: int) -> Iterator[None]:
    """Use `threads` threads and round numbers below 1e-38 to zero inside, as before outside."""
    threads_before = torch.get_num_threads()
    flushed_before = bool(torch.tensor(1e-38) / 10 == 0)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # Adam's averages of idle weights decay there, and slow all down
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.set_flush_denormal(flushed_before)


def find_device(name: str) -> torch.device:
    """Return the device of that name, or say that it is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"There is no device {name!r} here: use 'cpu'.") from error
    return device


# %% book/agent.py · One observation or many
def as_batch(obs: Any, space: gym.Space) -> tuple[np.ndarray, bool]:
    """Return observations as (batch, ...), and whether it was a single one."""
    shape = space.shape or ()
    if isinstance(obs, dict):
        how = "gymnasium.spaces.utils.flatten(env.unwrapped.observation_space, observation)"
        raise ValueError(f"An observation must be an array, not a dictionary: make one with {how}.")
    try:
        given = np.array(obs)
        batch = given.astype(space.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"An observation must be numbers of the shape {shape}.") from error
    if batch.dtype.kind in "iub" and not np.array_equal(batch, given):
        raise ValueError(f"An observation must be whole numbers of the type {batch.dtype}.")
    if batch.shape not in (shape, (len(batch) if batch.ndim else 0, *shape)):
        raise ValueError(f"An observation must have the shape {shape}, not {batch.shape}.")
    if not np.isfinite(batch).all():
        raise ValueError("An observation must be finite, and this one is not.")
    if isinstance(space, gym.spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n) - 1
        if ((batch < first) | (batch > last)).any():
            raise ValueError(f"An observation must be from {first} to {last}.")
    single = batch.shape == shape
    return (batch[None] if single else batch), single


def where_episodes_start(given: Any, state: Any, count: int) -> np.ndarray:
    """Return for each of `count` observations whether an episode starts there."""
    if given is None:
        return np.full(count, state is None)
    start = np.atleast_1d(np.asarray(given, dtype=bool))
    if start.shape != (count,):
        raise ValueError(f"episode_start needs one entry for each of {count} observations.")
    return start


# %% book/agent.py · Nothing broken is kept
class Diverged(FloatingPointError):
    """A loss, a TD error or a weight is not finite any more."""


def not_finite(state: Any, name: str = "") -> str | None:
    """Return the name of the first tensor in a nested state that is not finite all over."""
    if isinstance(state, torch.Tensor):
        return name if state.is_floating_point() and not bool(state.isfinite().all()) else None
    items = state.items() if isinstance(state, dict) else enumerate(state)
    nested = [(k, v) for k, v in items if isinstance(v, dict | list | tuple | torch.Tensor)]
    return next(filter(None, (not_finite(v, f"{name}.{k}".strip(".")) for k, v in nested)), None)


# %% book/agent.py · Nothing is forgotten
def is_learned(value: Any) -> bool:
    """Say whether this is a network, an optimiser or a tensor that has a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def learned_in(value: Any) -> list[Any]:
    """List what is learned in an attribute, which may be a list or dict of networks."""
    inside = list(value.values()) if isinstance(value, dict) else value
    inside = inside if isinstance(inside, list | tuple) else [value]
    return [each for each in inside if is_learned(each)]


def tensors_of(network: torch.nn.Module) -> list[Tensor]:
    """List the parameters and buffers that a network saves."""
    return [v for v in network.state_dict(keep_vars=True).values() if isinstance(v, Tensor)]


def check_parts(agent: "Agent") -> None:
    """Raise unless the parts can be saved and hold all networks and optimisers of the agent."""
    owner, saved = type(agent).__name__, list[Any]()
    parts: Any = agent.parts
    if isinstance(parts, str):  # the comma that makes ("q_network",) a tuple is easily forgotten
        raise ValueError(f"`parts` of {owner} must be a tuple: write ({parts!r},).")
    for name in parts:
        if not hasattr(agent, name):
            raise ValueError(f"{owner} has the part {name!r}, but `build` makes no self.{name}.")
        part = getattr(agent, name)
        if not all(callable(getattr(part, f"{verb}state_dict", None)) for verb in ("", "load_")):
            what = f"a {type(part).__name__}, which has no state_dict and load_state_dict"
            cure = "put it into a class that has both, or into a network as its buffer"
            raise ValueError(f"The part {name!r} of {owner} is {what}: {cure}.")
        saved.append(part)
        if not isinstance(part, torch.optim.lr_scheduler.LRScheduler):  # it saves no optimiser
            saved += learned_in(getattr(part, "__dict__", {}))
    networks = [part for part in saved if isinstance(part, torch.nn.Module)]
    ids = {id(each) for each in saved} | {id(t) for part in networks for t in tensors_of(part)}
    for name, value in vars(agent).items():
        for each in learned_in(value):
            needed = tensors_of(each) if isinstance(each, torch.nn.Module) else [each]
            if not all(id(tensor) in ids for tensor in needed):
                alone = each is value and not isinstance(each, Tensor)
                cure = "add it to" if alone else "put it into an nn.Module, and that into"
                raise ValueError(
                    f"self.{name} of {owner} is in no part, so no checkpoint would hold what it "
                    f"learns: {cure} `parts`."
                )


def check_algorithm(agent_class: type["Agent"]) -> None:
    """Raise unless a class has its methods, a name, settings, and a way to get its batches."""
    owner, config_class = agent_class.__name__, getattr(agent_class, "config_class", None)
    if missing := sorted(agent_class.__abstractmethods__):
        raise ValueError(f"{owner} does not define {', '.join(missing)}, as each algorithm must.")
    if not hasattr(agent_class, "name"):
        raise ValueError(f"{owner} needs a name, such as `name = {owner.lower()!r}`.")
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        raise ValueError(f"{owner} needs a `config_class`: a subclass of rlbook.settings.Config.")
    if agent_class.batches is not Agent.batches:
        return
    if agent_class.sample is Agent.sample or not issubclass(config_class, ReplayConfig):
        raise ValueError(
            f"{owner} needs a method `batches`, which yields what to learn from; or, to learn from "
            "replay, a method `sample` and settings that extend ReplayConfig."
        )


# %% book/agent.py · Compiling
def has_lstm(agent: "Agent") -> bool:
    """Say whether a network of the agent has an LSTM in it."""
    parts = [getattr(agent, name) for name in agent.parts]
    networks = [part for part in parts if isinstance(part, torch.nn.Module)]
    return any(isinstance(layer, torch.nn.LSTM) for part in networks for layer in part.modules())


def has_compiler() -> bool:
    """Say whether there is the C++ compiler that `torch.compile` would call."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_methods(agent: "Agent") -> None:
    """Replace the methods that compute gradients by compiled ones."""
    if not agent.compiled:
        lstm = "PyTorch cannot compile a backward pass through an LSTM"
        why = lstm if has_lstm(agent) else "it lists no method in `compiled`"
        raise ValueError(f"Setting 'compile' is not for {agent.name}: {why}. Leave it out.")
    if not has_compiler():
        raise ValueError("Setting 'compile' needs a C++ compiler such as g++, and there is none.")
    if torch.__version__ < "2.13":  # compares as versions do
        raise ValueError(f"Setting 'compile' needs PyTorch 2.13, and this is {torch.__version__}.")
    torch._dynamo.config.trace_autograd_ops = True
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "recompile_limit": 256}
    for name in agent.compiled:
        setattr(agent, name, torch.compile(getattr(agent, name), **options))


# %% book/agent.py · The base class
@dataclass(frozen=True)
class Interface:
    """What an agent needs to know of its environment."""

    observation_space: gym.Space
    action_space: gym.Space
    frame_stack: int = 1

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        spaces = {"observations": self.observation_space, "actions": self.action_space}
        return {name: plain_space(space) for name, space in spaces.items()} | {
            "frame_stack": self.frame_stack
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Interface":
        """Make it from plain data."""
        observations, actions = (space_from_plain(plain[n]) for n in ("observations", "actions"))
        return cls(observations, actions, plain["frame_stack"])


def find_interface(config: Config) -> Interface:
    """Return the interface of the environment that the settings name."""
    env = make_env(config.env_id, config.env_kwargs)
    stacked = env.get_wrapper_attr("frame_stack") if env.has_wrapper_attr("frame_stack") else 1
    env.close()
    channels, *_ = prepared_space(env.observation_space).shape or (1,)
    if not isinstance(stacked, int) or stacked < 1 or channels % stacked:
        stacked = 1  # an attribute of that name which means something else
    return Interface(env.observation_space, env.action_space, stacked)


def check_fits(agent: "Agent", observation_space: gym.Space, action_space: gym.Space) -> None:
    """Raise if an environment, which a setting names, is not what the agent was made for."""
    known = agent.interface
    seen, found = prepared_space(known.observation_space), prepared_space(observation_space)
    actions = [  # a checkpoint does not hold the dtype of a Discrete space
        (space.n, space.start) if isinstance(space, gym.spaces.Discrete) else space
        for space in (known.action_space, action_space)
    ]
    if (seen.shape, seen.dtype) != (found.shape, found.dtype) or actions[0] != actions[1]:
        raise ValueError(
            f"{agent.config.env_id!r} has the spaces {observation_space} and {action_space}, but "
            f"the agent was made for {known.observation_space} and {known.action_space}: "
            "make a new one."
        )


REPLAY = "replay"  # the one part that a checkpoint may leave out
BUILT_FROM = (  # settings that shape networks and buffers, which a later change would not reach
    *("num_envs", "device", "compile", "normalize_observations", "normalize_rewards"),
    *("hidden", "observation_scale", "lstm_units", "encoder", "features", "num_critics"),
    *("orthogonal_init", "initial_std", "forget_bias", "previous_action", "actor_trains_encoder"),
    *("initial_alpha", "target_entropy", "gamma", "n_step", "buffer_size", "num_steps"),
    *("chunk_length", "burn_in", "overlap", "alpha"),
)


def choose_config(
    config_class: type[Config], config: Config | None, settings: dict[str, Any]
) -> Config:
    """Return the config that was given whole, or make one from settings; both would contradict."""
    if config is None:
        return make_config(config_class, settings)
    if settings:
        named = ", ".join(map(repr, settings))
        raise ValueError(f"Give a `config` or settings, not both: config.replace() takes {named}.")
    if not isinstance(config, config_class):
        wanted, given = config_class.__name__, type(config).__name__
        raise ValueError(f"`config` must be a {wanted}, not a {given}.")
    return config


class Agent(ABC):
    """An algorithm with its networks: what the loop and a user call."""

    name: ClassVar[str]
    config_class: ClassVar[type[Config]]
    observations: ClassVar[str] = "vector"
    actions: ClassVar[str] = "discrete"
    parts: ClassVar[tuple[str, ...]] = ()  # attributes with a state_dict, saved and loaded by name
    compiled: ClassVar[tuple[str, ...]] = ()  # methods that the setting `compile` compiles
    config: Config
    replay: Any  # the buffer of an agent that learns from replay
    directory: "RunDirectory | None" = None  # made by the loop when `run_dir` is set
    training_state: dict[str, Any] | None = None  # where the loop stopped: `learn` goes on there
    replay_lost = False  # whether the state that was loaded came without its buffer

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            REGISTRY[algorithm_name(cls)] = cls

    def __init__(
        self,
        env_id: Any = None,
        *,
        config: Config | None = None,
        interface: Interface | None = None,
        **settings: Any,
    ) -> None:
        check_algorithm(type(self))
        given = settings if env_id is None else {"env_id": env_id, **settings}
        self.config = config = choose_config(self.config_class, config, given)
        self.device = find_device(config.device)
        self.interface = interface or find_interface(config)  # a checkpoint has one
        self.action_space = self.interface.action_space
        self.preprocessing = Preprocessing(self.interface.observation_space, config)
        self.observation_space = self.preprocessing.space  # of what `act` and `observe` get
        check_spaces(self)
        self.global_step = 0  # environment steps seen
        self.updates = 0  # gradient steps made
        self.generator = np.random.default_rng(derive_seed(config.seed, "agent"))
        with seeded_torch(derive_seed(config.seed, "networks")):
            self.build()
        check_parts(self)
        if config.compile:
            compile_methods(self)
        # Without a schedule the optimisers keep the learning rate that they were made with.
        rate = () if hasattr(config, "lr_now") else ("lr",)
        self.built_from = {name: getattr(config, name, None) for name in (*BUILT_FROM, *rate)}

    def __repr__(self) -> str:
        where = f"{self.config.env_id!r}, seed={self.config.seed}"
        learned = f"step {self.global_step:,}, {self.updates:,} updates"
        return f"{type(self).__name__}({where}: {learned})"

    # What an algorithm fills in

    @abstractmethod
    def build(self) -> None:
        """Make networks, optimisers and buffer."""

    @abstractmethod
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Choose an action for each observation; return the next hidden state too."""

    @abstractmethod
    def observe(self, transition: Transition) -> None:
        """Store one step of all environments."""

    @abstractmethod
    def update(self, batch: Any) -> UpdateResult:
        """Make one gradient step; the caller counts it in `updates`, as the loop does."""

    def sample(self) -> Any:
        """Sample what one update learns from; an agent with a replay buffer fills this in."""
        raise TypeError(f"{self.name} does not learn from replay.")

    def batches(self) -> Iterator[Any]:
        """Yield what is to be learned from after the last step: samples, as many as are due."""
        assert isinstance(self.config, ReplayConfig)
        if len(self.replay) >= self.config.batch_size:
            for _ in range(updates_due(self.config, self.global_step)):
                yield self.sample()

    # What a user calls

    @classmethod
    def from_config(cls, name: str | os.PathLike[str], **settings: Any) -> Self:
        """Make an agent from a shipped config or a YAML file; keywords override it."""
        config = os.fspath(name)
        _, stored = gather_settings(config, algorithm_name(cls))
        return cls(config=make_config(cls.config_class, {**stored, **settings}))

    def learn(
        self, steps: int, progress: bool = True, callbacks: "Callbacks" = ()
    ) -> "RunResult":
        """Train for `steps` more environment steps."""
        if steps < 1:
            raise ValueError(f"learn needs at least one step, not {steps}.")
        from rlbook.run import train  # here, since that module imports this one

        if "total_steps" not in self.config.model_fields_set:  # nobody gave it: schedules need one
            self.config = self.config.replace(total_steps=self.global_step + steps)
        return train(self, progress, callbacks, until=self.global_step + steps)

    def evaluate(self, episodes: int = 10, seed: int = 0) -> Evaluation:
        """Play greedy episodes that were not learned from."""
        config, count = self.config, min(episodes, EVALUATION_ENVS)
        envs = [make_env(config.env_id, config.env_kwargs) for _ in range(count)]
        seed = derive_seed(config.seed, "evaluate", seed)
        try:
            for env in envs:
                check_fits(self, env.observation_space, env.action_space)
            with torch_for_learning(config.threads):
                return evaluate(self.greedy, envs, seed, episodes, config.eval_max_steps)
        finally:
            for env in envs:
                env.close()

    def greedy(self, obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        """Act without exploring, on observations as they come from the environment."""
        return self.act(self.preprocessing.prepare(obs), state, start, explore=False)

    def predict(
        self, obs: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[Any, Any]:
        """Choose an action for one observation or a batch; without `state` an episode starts."""
        batch, single = as_batch(obs, self.preprocessing.env_space)
        start = where_episodes_start(episode_start, state, len(batch))
        prepared = self.preprocessing.prepare(batch)
        actions, state = self.act(prepared, state, start, explore=not deterministic)
        return (actions[0] if single else actions), state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole agent to one file."""
        write_checkpoint(Path(path), self.checkpoint())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> Self:
        """Read an agent from a file, or from the newest checkpoint of a run directory."""
        agent = load(path, device, cls)
        if not isinstance(agent, cls):
            raise ValueError(f"{path} holds a {agent.name} agent: use rlbook.load.")
        return agent

    # What is saved

    def state_dict(self) -> dict[str, Any]:
        """Return all that learning depends on: counters, generator, statistics and parts."""
        return {
            "global_step": self.global_step,
            "updates": self.updates,
            "generator": self.generator.bit_generator.state,
            "preprocessing": self.preprocessing.state_dict(),
            **{part: getattr(self, part).state_dict() for part in self.parts},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.global_step, self.updates = state["global_step"], state["updates"]
        self.generator.bit_generator.state = state["generator"]
        self.preprocessing.load_state_dict(state["preprocessing"])
        self.training_state = None  # it belongs to another step
        self.replay_lost = REPLAY in self.parts and REPLAY not in state
        for name in self.parts:
            if name == REPLAY and self.replay_lost:
                continue
            part, saved = getattr(self, name), state[name]
            if isinstance(part, torch.optim.Optimizer):
                saved = copy.deepcopy(saved)  # it would keep the tensors that it is given
            part.load_state_dict(saved)

    def checkpoint(self, replay: bool = True) -> dict[str, Any]:
        """Return what a checkpoint holds of the agent: name, settings, interface and state."""
        state = self.state_dict()
        if broken := not_finite(state):
            raise Diverged(f"{broken} is not finite any more, so nothing was saved")
        if not (replay and self.config.checkpoint_replay):
            state.pop(REPLAY, None)
        return {
            "algo": algorithm_name(type(self)),
            "config": self.config.model_dump(),
            "interface": self.interface.plain(),
            "agent": state,
            "run": self.training_state,  # so that a loaded agent can go on where this one is
        }

    # What is copied

    def copied(self) -> dict[str, Any]:
        """Return what a copy holds: all but compiled methods and the run directory."""
        own = {name: part for name, part in vars(self).items() if name not in self.compiled}
        config = self.config.replace(run_dir=None, keep_best=False)
        return own | {"directory": None, "config": config}

    def become(self, state: dict[str, Any]) -> None:
        """Take over what `copied` returned."""
        vars(self).update(state)
        if self.config.compile:
            compile_methods(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = object.__new__(type(self))
        twin.become(copy.deepcopy(self.copied(), memo))
        return twin

    def __getstate__(self) -> bytes:
        return pickle.dumps(self.copied())  # tensors as bytes, never as shared memory

    def __setstate__(self, state: bytes) -> None:
        self.become(pickle.loads(state))


# %% book/agent.py · Loading
def load_state(agent: Agent, state: dict[str, Any], source: Path) -> None:
    """Let an agent take over a state from a file, or say that it does not fit."""
    try:
        agent.load_state_dict(state)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())  # torch writes one line per weight
        raise CheckpointError(f"{source} does not fit this {agent.name}: {why}") from error


def restore(
    content: dict[str, Any], source: Path, device: str, wanted: type[Agent] = Agent
) -> Agent:
    """Make the agent that a checkpoint holds, as a user's own subclass if that is `wanted`."""
    kinds = {"algo": str, "config": dict, "agent": dict}
    try:
        interface = Interface.from_plain(content["interface"])
        assert all(isinstance(content[name], kind) for name, kind in kinds.items())
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} is not an rlbook checkpoint.") from error
    found = find_algorithm(content["algo"])
    agent_class = wanted if issubclass(wanted, found) and wanted.name == found.name else found
    settings = {**content["config"], "device": device, "run_dir": None, "keep_best": False}
    if not has_compiler():  # only learning would need it
        settings["compile"] = False
    config = make_config(agent_class.config_class, settings)
    agent = agent_class(config=config, interface=interface)
    load_state(agent, content["agent"], source)
    run = content.get("run")
    agent.training_state = run if isinstance(run, dict) else None
    return agent


def load(
    path: str | os.PathLike[str], device: str = "cpu", wanted: type[Agent] = Agent
) -> Agent:
    """Read an agent, whichever its algorithm, from a file or a run directory."""
    path = Path(path)
    if not path.is_dir():
        return restore(read_checkpoint(path), path, device, wanted)
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run directory: it has no config.yaml.")
    newest = CheckpointDirectory(path / "checkpoints").newest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet: go on with `rlbook resume {path}`.")
    return restore(newest[1], newest[0], device, wanted)
