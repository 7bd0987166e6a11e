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
# # Settings
#
# You type a learning rate in three places: as a keyword in Python, as a key in a file, as a flag
# in the shell. In this chapter you build settings that are declared **once**, as a field of a
# [pydantic](https://docs.pydantic.dev) model, and that work in all three places, with the same
# checks and the same words when something is wrong.
#
# | | |
# |---|---|
# | Builds on | `nearest` from [environments](envs.ipynb), which finds the name you meant |
# | Same as pydantic | types, ranges and defaults are declared in the field; checks run by themselves |
# | Different | strict about types, lenient about how a number is written; one sentence per mistake |
# | Used by | [the agent](agent.ipynb), [the run](run.ipynb), [the command line](cli.ipynb) |

# %% tags=["hide-input"]
#| export
import argparse
import importlib.resources
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar, Union

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo

from rlbook.envs import name_env, nearest

# %% tags=["hide-input"]
import tempfile

from pydantic import model_validator

from rlbook import settings as finished


def sentence(mistake: Callable[[], object]) -> str:
    """Make a mistake and return what is said about it."""
    try:
        mistake()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was wrong")


# %% [markdown]
# Here is the finished module at work. One field gives you a keyword, a key in a file, a flag and a
# line of `--help`, and each of two mistakes gets a sentence.


# %%
class FirstConfig(finished.Config):
    """All shared settings, and a learning rate."""

    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")


parser = argparse.ArgumentParser(prog="first", add_help=False)
finished.add_flags(parser, FirstConfig, ["lr"])
typed = finished.flag_settings(parser.parse_args(["--lr", "3e-4"]), FirstConfig)

print("keyword:", FirstConfig(lr=3e-4).lr)
print("key:    ", finished.make_config(FirstConfig, yaml.safe_load("lr: 3e-4")).lr)
print("flag:   ", finished.make_config(FirstConfig, typed).lr)
print(parser.format_help())
print(sentence(lambda: FirstConfig(lr=-1)))
print(sentence(lambda: finished.make_config(FirstConfig, {"lrr": 3e-4})))

# %% [markdown]
# ## The problem: mistakes that nobody reports
#
# Many scripts read settings like this. Look at what these lines do with a misspelled key, with a
# number that YAML reads as text, and with a switch that somebody turns off in the shell.

# %%
file = yaml.safe_load("learning_rte: 0.1\ntarget_lr: 1e-4")
naive = argparse.ArgumentParser()
naive.add_argument("--double", type=bool, default=True)

print("learning rate:", file.get("learning_rate", 0.001), "(the key is misspelled: the default)")
print("target rate:  ", repr(file["target_lr"]), "(YAML wants a point: 1.0e-4)")
print("double:       ", naive.parse_args(["--double", "false"]).double, "(bool('false') is True)")

# %% [markdown]
# The run starts without an error, and a day later you compare two curves that came from the same
# settings. So names and types must be checked where settings are read.
#
# pydantic does most of this: a class with annotated fields checks its values whenever an object is
# made. But by default it ignores names that it does not know, takes `True` for the number 1,
# refuses the text `1e5` for a whole number, and reports a mistake in a paragraph:


# %%
class PlainConfig(BaseModel):
    """Settings by pydantic alone."""

    lr: float = Field(default=1e-3, gt=0)
    seed: int = 0


print(PlainConfig(learning_rate=0.1, seed=True))  # type: ignore[call-arg]
try:
    PlainConfig(lr=-1, seed="1e5")  # type: ignore[arg-type]
except ValidationError as error:
    print(error)

# %% [markdown]
# Two options forbid the first two: `extra="forbid"` and `strict=True`. The other two take a
# function each.
#
# ## One number, written in many ways
#
# YAML and the shell deliver `1e-3` as text, people write `1e5` steps although that is a float, and
# seeds come out of `np.arange`. It is clear what is meant each time. So before pydantic checks a
# value strictly, we convert it to the type that its field declares. 1.5 is not a whole number and
# `True` is not a number: both stay as they are, and pydantic refuses them. A list from YAML
# becomes a tuple, which cannot be changed by accident.

# %%
#| export
def types_in(hint: Any) -> list[Any]:
    """List the types in a type: of `float | None` the union, float and nothing."""
    inner = [part for argument in typing.get_args(hint) for part in types_in(argument)]
    return [typing.get_origin(hint) or hint, *inner]


def read_value(value: Any, hint: Any) -> Any:
    """Return lists as tuples and numbers as int or float, where the type `hint` asks for them."""
    parts = types_in(hint)
    if tuple in parts and isinstance(value, list | tuple):
        return tuple(read_value(entry, hint) for entry in value)
    wants_number = (int in parts or float in parts) and not (str in parts or dict in parts)
    if not wants_number or isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        return value
    try:
        exact: Any = Decimal(value) if isinstance(value, str) else value
        number = float(exact)
        if float in parts:
            return number
        return int(exact) if number.is_integer() else value
    except (ValueError, ArithmeticError):  # a text that is no number, or one too large for a float
        return value


# %% [markdown]
# A float holds every whole number up to $2^{53}$ and then only every second one, so a large seed
# must not pass through it: $2^{53} + 1$ as a float is $2^{53}$.

# %%
assert read_value("1e-3", float) == 0.001 and read_value("1e5", int) == 100_000
assert read_value([64, "64"], tuple[int, ...]) == (64, 64)
assert read_value(1.5, int) == 1.5 and read_value(True, int) is True  # pydantic will refuse them

assert float(2**53 + 1) == 2**53
assert read_value(2**53 + 1, int) == read_value(str(2**53 + 1), int) == 2**53 + 1

# %% [markdown]
# ## A mistake in one sentence
#
# The sentence about a wrong type names the right type in plain words, because *expected
# tuple[int, ...]* is no help to somebody who has never seen that notation:

# %%
#| export
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a mapping",
    types.NoneType: "nothing",
}


def describe(hint: Any) -> str:
    """Name a type in the words of a user."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin is Annotated:
        return describe(arguments[0])
    if origin is tuple:
        return f"a list, each entry {describe(arguments[0])}"
    if origin in (types.UnionType, Union):
        return " or ".join(describe(part) for part in arguments)
    return WORDS.get(origin or hint, str(hint))


# %%
for hint in (int, float | None, tuple[int, ...], Literal["relu", "tanh"], dict[str, Any]):
    print(f"{hint!s:38} {describe(hint)}")

# %% [markdown]
# pydantic reports a mistake as a small dictionary. For a learning rate of −1 its `type` is
# `greater_than`, and its `ctx` (context) holds the limit. So a table is enough to say it in our
# words. A field with `ge` or `le` allows the limit itself, one with `gt` or `lt` does not: a
# discount may be 1, a learning rate must be above 0. If the limit is for the entries of a list,
# `loc` (location) ends with the number of the entry.

# %%
#| export
LIMITS = {  # the type of pydantic's error: what the value must be
    "finite_number": "finite",
    "greater_than": "above {gt:.12g}",
    "greater_than_equal": "at least {ge:.12g}",
    "less_than": "below {lt:.12g}",
    "less_than_equal": "at most {le:.12g}",
    "multiple_of": "a multiple of {multiple_of:.12g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
}


def explain(error: ValidationError, config_class: type[BaseModel], settings: dict[str, Any]) -> str:
    """Say in one sentence what pydantic found first."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    if "error" in context:  # a validator of ours raised it, with a sentence of its own
        return str(context["error"])
    name, *inside = first["loc"]  # where pydantic found it: a setting, and perhaps an entry of it
    if first["type"] in LIMITS:
        wanted, given = LIMITS[first["type"]].format(**context), first["input"]
        each = "Each entry of setting" if inside and isinstance(inside[-1], int) else "Setting"
        return f"{each} {name!r} must be {wanted}, not {given!r}."
    wanted = describe(config_class.model_fields[str(name)].annotation)  # it has the wrong type
    return f"Setting {name!r} must be {wanted}, not {settings.get(str(name), first['input'])!r}."


# %%
class RateConfig(BaseModel):
    """One setting, strictly checked."""

    model_config = ConfigDict(strict=True)
    lr: float = Field(default=1e-3, gt=0)


for wrong in ({"lr": -1.0}, {"lr": "fast"}):
    try:
        RateConfig(**wrong)
    except ValidationError as error:
        print(error.errors(include_url=False)[0])
        print(explain(error, RateConfig, wrong), end="\n\n")

# %% [markdown]
# If a name is unknown, the sentence suggests the nearest known one, or our name for a setting that
# other libraries call something else. If neither exists, it says which command lists all settings.

# %%
#| export
ELSEWHERE = {  # what other libraries call a setting, and what it was called here before 0.2
    "learning_rate": "lr",
    "total_timesteps": "total_steps",
    "timesteps": "total_steps",
    "steps": "total_steps",
    "n_envs": "num_envs",
    "env": "env_id",
    "env_name": "env_id",
    "n_steps": "num_steps",
    "ent_coef": "entropy_coefficient",
    "vf_coef": "value_coefficient",
    "exploration_final_eps": "final_epsilon",
    "n_epochs": "epochs",
    "train_freq": "train_frequency",
    "eval_freq": "eval_every",
    "n_eval_episodes": "eval_episodes",
    "net_arch": "hidden",
    "warmup_steps": "learning_starts",
    "update_every": "train_frequency",
    "updates_per_round": "gradient_steps",
    "updates_per_step": "gradient_steps",
    "target_every": "target_update_interval",
    "epsilon_floor": "final_epsilon",
    "epsilon_steps": "epsilon_decay_steps",
    "units": "lstm_units",
    "memory": "carry_state",
    "policy_value": "actor_value",
    "actor_teaches_encoder": "actor_trains_encoder",
}


def nearest_setting(name: str, known: Sequence[str]) -> str:
    """Return a hint that names the setting that is meant, or nothing."""
    meant = ELSEWHERE.get(name.replace("-", "_"))
    return f" Did you mean {meant!r}?" if meant in known else nearest(name, known)


def check_names(config_class: type[BaseModel], names: Iterable[Any]) -> None:
    """Raise for a name that is no setting, naming the nearest one that is."""
    known = list(config_class.model_fields)
    for name in names:
        if name not in known:
            owner = config_class.__name__.removesuffix("Config") or "Config"
            hint = nearest_setting(str(name), known) or " `rlbook train ALGO --help` lists them."
            raise ValueError(f"{owner} has no setting {name!r}.{hint}")


# %%
assert sentence(lambda: check_names(RateConfig, ["lrr"])).endswith("Did you mean 'lr'?")

# %% [markdown]
# ## The settings that all algorithms share
#
# An algorithm inherits from this class and adds its own fields. Values are checked when an object
# is made, when `replace` copies it, and when somebody assigns to a field, so a wrong setting stops
# a run before it begins. Defaults are checked, too, and a field without a type or without a default
# is refused where the class is written. In Python, `env_id` may also be an environment, or a class
# or function that makes one; `name_env` from [environments](envs.ipynb) gives it a name.

# %%
#| export
VALUES = (bool, int, float, str, tuple, list, dict, types.NoneType, FieldInfo)  # of settings


class Config(BaseModel):
    """The settings of a run, whatever the algorithm."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        ignored_types=VALUES,  # if they have no type: `__init_subclass__` refuses them
    )

    env_id: str = Field(
        default="CartPole-v1",
        description="Gymnasium id, `module:Name-v0`, or `module:function` that makes one.",
    )
    env_kwargs: dict[str, Any] = Field(default={}, description="Keywords for the environment.")
    num_envs: int = Field(default=1, ge=1, description="Environments that step side by side.")
    vectorize: Literal["sync", "async"] = Field(
        default="sync", description="Step them one after the other, or each in its own process."
    )
    total_steps: int = Field(default=50_000, ge=1, description="Environment steps of the run.")
    normalize_observations: bool = Field(
        default=False, description="Standardise vector observations by their running statistics."
    )
    normalize_rewards: bool = Field(
        default=False, description="Divide rewards by the running deviation of their return."
    )
    seed: int = Field(default=0, ge=0, description="Seed of everything random in the run.")
    device: str = Field(default="cpu", description="Where the networks live, such as cpu or cuda.")
    threads: int = Field(default=1, ge=1, description="Torch threads; small networks like one.")
    compile: bool = Field(
        default=False,
        description="Compile what an update computes (torch.compile); needs a C++ compiler.",
    )
    run_dir: str | None = Field(
        default=None,
        description="Directory of the run; without one, `rlbook train` names it after the run, and "
        "Python writes nothing.",
    )
    eval_every: int = Field(
        default=5_000, ge=0, description="Environment steps between evaluations; 0 for none."
    )
    eval_episodes: int = Field(default=10, ge=1, description="Greedy episodes of an evaluation.")
    eval_max_steps: int = Field(
        default=30_000, ge=1, description="Steps after which such an episode is cut."
    )
    stop_at_return: float | None = Field(
        default=None, description="Stop when an evaluation's mean return reaches this."
    )
    stop_patience: int | None = Field(
        default=None, ge=1, description="Stop after so many evaluations without improvement."
    )
    keep_best: bool = Field(
        default=False,
        description="Keep the agent of the best evaluation in checkpoints/best.pt of the run_dir.",
    )
    log_every: int = Field(
        default=1_000, ge=1, description="Environment steps between lines of training metrics."
    )
    checkpoint_every: int = Field(
        default=10_000,
        ge=1,
        description="Environment steps between checkpoints, which reset all environments.",
    )
    checkpoint_replay: bool = Field(default=True, description="Save the replay buffer, too.")
    tensorboard: bool = Field(default=False, description="Write TensorBoard scalars, too.")

    def __init__(self, /, **settings: Any) -> None:
        check_names(type(self), settings)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ValueError(explain(error, type(self), settings)) from None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = {*cls.__annotations__, "model_config"}
        for name, value in vars(cls).items():
            if isinstance(value, VALUES) and name not in known and not name.startswith("_"):
                how = f"as in `{name}: float = ...`"
                raise TypeError(f"Setting {name!r} of {cls.__name__} needs a type, {how}.")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            if field.is_required():  # `--help` lists every setting with its default
                raise TypeError(f"Setting {name!r} of {cls.__name__} needs a default.")

    @field_validator("*", mode="before")
    @classmethod
    def read_field(cls, value: Any, info: ValidationInfo) -> Any:
        """Read a value as its field declares it, before pydantic checks it strictly."""
        if info.field_name == "env_id" and not isinstance(value, str | None):
            return name_env(value)
        return read_value(value, cls.model_fields[str(info.field_name)].annotation)

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with some settings changed."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    def __setattr__(self, name: str, value: Any) -> None:
        checked = self.replace(**{name: value})  # raises before anything has changed
        super().__setattr__(name, getattr(checked, name))


AnyConfig = TypeVar("AnyConfig", bound=Config)


def make_config(config_class: type[AnyConfig], settings: dict[str, Any]) -> AnyConfig:
    """Make settings from names and values."""
    check_names(config_class, settings)  # here too: a name that is no text cannot be a keyword
    return config_class(**settings)


# %% [markdown]
# The rest of the chapter uses the settings of a small algorithm. No single field can know that two
# settings contradict each other, so a `model_validator` checks that. Its message reaches the user
# word for word.
#
# (pydantic's option `validate_assignment` would leave a value that such a validator refused in the
# object. So `__setattr__` makes a checked copy first.)


# %%
class ToyConfig(Config):
    """The settings of an algorithm that does not exist."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each hidden layer."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    activation: Literal["relu", "tanh"] = Field(default="relu", description="Between the layers.")
    double: bool = Field(default=True, description="Choose the next action by the q_network.")

    @model_validator(mode="after")
    def check_evaluations_fit(self) -> Self:
        """Raise if there would be no evaluation."""
        if self.eval_every > self.total_steps:
            raise ValueError(
                f"Setting 'eval_every' ({self.eval_every}) must not exceed 'total_steps' "
                f"({self.total_steps})."
            )
        return self


toy = make_config(ToyConfig, {"hidden": [32, 32], "lr": "3e-4", "total_steps": 1e5})
assert toy == ToyConfig(hidden=(32, 32), lr=0.0003, total_steps=100_000)
assert toy.replace(seed=1).seed == 1 and toy.seed == 0
toy.hidden, toy.lr, toy.total_steps

# %%
for mistake in (
    {"learning_rate": 1e-4},
    {"total_step": 100},
    {"lr": "fast"},
    {"lr": 0},
    {"lr": "nan"},
    {"hidden": 64},
    {"hidden": [64, 0]},
    {"activation": "rleu"},
    {"double": 1},
    {"seed": True},
    {"num_envs": 1.5},
    {"total_steps": 100},
):
    print(sentence(lambda wrong=mistake: make_config(ToyConfig, wrong)))
print(sentence(lambda: setattr(toy, "eval_every", 1e6)))
assert toy.eval_every == 5_000

# %% [markdown]
# Each sentence names the setting and says what it should be. In Python it is the message of a
# `ValueError`. In the shell it is printed without a traceback, and the exit code is 2.
#
# ## Settings in a file
#
# A file of settings is YAML, with one line for each setting. A file that comes with the book (a
# *shipped config*) is found by its name, any other by its path. An algorithm of your own that
# extends one of the book, as DQN with another network does, takes the shipped configs of that one.

# %%
#| export
def shipped_configs() -> dict[str, Path]:
    """The config files inside the package, as `algorithm/name`."""
    folder = Path(str(importlib.resources.files("rlbook"))) / "configs"
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.yaml"))}


def is_file_name(config: str) -> bool:
    """Say whether a config is named by its path, not by the name of a shipped one."""
    return config.endswith((".yaml", ".yml")) or "/" in config


def shipped_for(algo: str | None) -> dict[str, Path]:
    """The shipped configs of an algorithm, or of the nearest that it extends, by their names."""
    shipped = shipped_configs().values()
    owners = {path.parent.name for path in shipped}
    if algo is not None and algo not in owners:  # one of your own
        from rlbook.agent import family, find_algorithm  # here, since that module imports this one

        algo = next((name for name in family(find_algorithm(algo)) if name in owners), None)
    return {path.stem: path for path in shipped if path.parent.name == algo}


def find_config(name: str, algo: str | None) -> Path:
    """Find a YAML file by its path, or a shipped one by its name."""
    if is_file_name(name) and Path(name).is_file():
        return Path(name)
    shipped = shipped_for(algo)
    if is_file_name(name):
        near = [str(file) for file in Path(name).parent.glob("*.y*ml")] + [*shipped]
        raise ValueError(f"There is no config file {name!r}.{nearest(name, near)}")
    if algo is None:
        raise ValueError(
            f"Say which algorithm the shipped config {name!r} is for, or name a file: {name}.yaml."
        )
    if name not in shipped:
        hint = nearest(name, [*shipped]) or f" There are: {', '.join(shipped) or 'none'}."
        raise ValueError(f"{algo!r} has no shipped config {name!r}.{hint}")
    return shipped[name]


# %%
print(", ".join(name for name in shipped_configs() if name.startswith("dqn/")))
print(sentence(lambda: find_config("cartpol", "dqn")))
print(sentence(lambda: find_config("cartpole", None)))
print(sentence(lambda: find_config("nowhere.yaml", None)))

# %% [markdown]
# If a file is not YAML, the error names the line. PyYAML's safe loader makes plain values only, so
# a stranger's file cannot run code. But if a key appears twice, it silently keeps the last value,
# and changing the first does nothing. Our loader reports a repeated key as a mistake.

# %%
#| export
class UniqueKeysLoader(yaml.SafeLoader):
    """Reads plain values, and takes a key that stands twice in a mapping for a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a dictionary, unless a key is repeated."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"{key.value!r} appears twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML, or say in which line of `source` it is broken."""
    try:
        return yaml.load(text, Loader=UniqueKeysLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date of month 99, say
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = problem or "it holds something that YAML does not allow"
        raise ValueError(f"{source} is not valid YAML{where}: {reason}.") from error


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; the key `algo` names the algorithm."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Could not read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid YAML: it is not text in UTF-8.") from error
    settings = parse_yaml(text, str(path))
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError(f"{path} must hold settings as `name: value`, one a line.")
    return settings


# %% [markdown]
# A file may start from another one: with `config: cartpole` in it you write down only what
# differs. A file that is named there by its path is looked for beside the file that names it, and
# may start from a third. The key `algo` names the algorithm. If the two files, or the file and the command, name
# different algorithms, that is an error.

# %%
#| export
def bare_name(algo: object) -> str:
    """Return the name of an algorithm without its module."""
    return str(algo).rpartition(":")[2]


def read_config(name: str, algo: str | None) -> tuple[str | None, dict[str, Any]]:
    """Read one config, for an algorithm if it is known; return the algorithm and the settings."""
    path = find_config(name, algo)
    settings = read_settings(path)
    found = settings.pop("algo", algo)
    if algo is None:
        return (None if found is None else str(found)), settings
    if is_file_name(name) and bare_name(found) != bare_name(algo):  # a shipped one fits
        raise ValueError(f"{path} is for {found!r}, not for {algo!r}: name one algorithm.")
    return algo, settings


def gather_settings(
    name: str, algo: str | None, above: tuple[str, ...] = ()
) -> tuple[str | None, dict[str, Any]]:
    """Read a config, on top of the one that its key `config` names; return its algorithm too."""
    algo, settings = read_config(name, algo)
    base = settings.pop("config", None)
    if base is None:
        return algo, settings
    base, above = str(base), (*above, name)
    if is_file_name(base):
        base = str(Path(name).parent / base)
    if base in above:
        raise ValueError(f"{base} starts from itself: its key `config` must name another file.")
    algo, below = gather_settings(base, algo, above)
    return algo, {**below, **settings}


# %% [markdown]
# A run writes **all** its settings beside its results, defaults included, so that the file still
# means the same when a default changes. It is written under another name and then renamed, so
# nobody ever reads half a file: [Checkpoints](checkpoint.ipynb) shows why that matters.

# %%
#| export
def write_whole(path: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write beside `path`, then rename, so that `path` is never half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_settings(path: Path, algo: str, config: Config) -> None:
    """Write all settings of a run as YAML, in one step."""
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in config}
    try:
        text = yaml.safe_dump({"algo": algo, **plain}, sort_keys=False)
    except yaml.YAMLError as error:
        raise ValueError(
            "Setting 'env_kwargs' must hold plain numbers, texts, lists and mappings only, "
            "since it is stored with the run."
        ) from error
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "config.yaml"
    write_settings(path, "toy", toy)
    there = read_settings(path)
    assert there.pop("algo") == "toy"
    assert make_config(ToyConfig, there) == toy  # a round trip changes nothing

    path.write_text("lr: 0.1\nhidden: [64\nseed: 1\n")
    print(sentence(lambda: read_settings(path)).replace(folder, "runs/a"))
    path.write_text("just a text")
    print(sentence(lambda: read_settings(path)).replace(folder, "runs/a"))

# %% [markdown]
# ## Settings on the command line
#
# A flag is the name of the setting with dashes. The description becomes its line of help, with the
# default in brackets. A list takes several words, and a switch takes none or one: `--double`,
# `--double false` and `--no-double` all work.
#
# The default of every flag is `SUPPRESS`: a flag that nobody typed leaves no trace, so only what
# was typed overrides a file. (Exercise 4 shows what happens otherwise.)

# %%
#| export
def flag_name(name: str) -> str:
    """Spell a setting as a flag."""
    return "--" + name.replace("_", "-")


class TakesFlags(Protocol):
    """A parser, or a group of flags in one."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        """Add a flag."""


def add_flags(
    parser: TakesFlags,
    config_class: type[Config],
    names: Sequence[str] | None = None,
) -> None:
    """Give a parser a flag for each setting, or for those in `names`."""
    metavars = {dict: "YAML", int: "N", float: "X", bool: "BOOL"}
    for name, field in config_class.model_fields.items():
        if names is not None and name not in names:
            continue
        parts = types_in(field.annotation)
        default = field.get_default(call_default_factory=True)
        plain = list(default) if isinstance(default, tuple) else default
        shown = yaml.safe_dump(plain, default_flow_style=True).splitlines()[0]
        options: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,  # only what was typed overrides a file
            "metavar": next((word for kind, word in metavars.items() if kind in parts), "TEXT"),
            "help": f"{field.description or ''} [{shown}]".strip().replace("%", "%%"),
        }
        if Literal in parts:
            options["metavar"] = "|".join(map(str, typing.get_args(field.annotation)))
        if tuple in parts:
            options["nargs"] = "+"
        if field.annotation is bool:  # --double, --double false and --no-double
            options |= {"nargs": "?", "const": "true"}
            quiet: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            opposite = flag_name(f"no_{name}")
            parser.add_argument(opposite, dest=name, action="store_const", const="false", **quiet)
        parser.add_argument(flag_name(name), **options)


# %%
parser = argparse.ArgumentParser(prog="toy", add_help=False)
add_flags(parser, ToyConfig, ["hidden", "lr", "activation", "double", "env_kwargs"])
print(parser.format_help())

# %% [markdown]
# The shell delivers text. We read it as YAML, so that a value means the same in the shell and in a
# file. A setting that is itself a text keeps what was typed: a directory may be called `1`, and
# YAML would make a number of that.
#
# At first only the flags that were typed are checked, in a class with just these fields and those
# of `Config`, and without the algorithm's `model_validator`. Whether settings contradict each
# other is checked later, together with those of the file.

# %%
#| export
def read_flag(typed: str | Sequence[str], hint: Any) -> Any:
    """Read what was typed after a flag as YAML would, but leave a text as it is."""
    if not isinstance(typed, str):
        alone = len(typed) == 1 and typed[0].startswith("[")  # "[64, 64]" is the whole list
        return read_flag(typed[0], None) if alone else [read_flag(word, hint) for word in typed]
    parts = types_in(hint)
    wants_text = str in parts or any(isinstance(part, str) for part in parts)  # or such a choice
    if wants_text and dict not in parts:
        return typed
    try:
        return yaml.safe_load(typed)
    except yaml.YAMLError:
        return typed  # which is not of the right type, and is said to be so


def flag_settings(options: argparse.Namespace, config_class: type[Config]) -> dict[str, Any]:
    """Return the settings that were typed as flags, each checked."""
    fields = {n: field for n, field in config_class.model_fields.items() if n in vars(options)}
    typed = {n: read_flag(vars(options)[n], field.annotation) for n, field in fields.items()}
    own: dict[str, Any] = {n: (field.annotation, field) for n, field in fields.items()}
    checked = create_model(config_class.__name__, __base__=Config, **own)(**typed)
    return {name: getattr(checked, name) for name in typed}


# %%
def shell(line: str) -> dict[str, Any]:
    """Return the settings that a command line names."""
    toy_parser = argparse.ArgumentParser()
    add_flags(toy_parser, ToyConfig)
    return flag_settings(toy_parser.parse_args(line.split()), ToyConfig)


print(shell("--hidden 32 32 --lr 3e-4 --total-steps 1e5"))
print(shell("--hidden [32,32] --no-double --run-dir 1 --env-kwargs {'gravity':9.8}"))
assert shell("--double") == shell("--double true") == shell("--double yes") == {"double": True}
assert shell("--no-double") == shell("--double false") == {"double": False}
for line in ("--lr fast", "--hidden 64 wide", "--activation sigmoid", "--double perhaps"):
    print(sentence(lambda line=line: shell(line)))

# %% [markdown]
# ## Keyword, key and flag
#
# Now we check the promise of the first paragraph: the same settings give the same object in all
# three places, and the same mistake gets the same sentence.

# %%
by_keyword = ToyConfig(hidden=(32, 32), lr=3e-4, double=False)
by_file = make_config(ToyConfig, yaml.safe_load("hidden: [32, 32]\nlr: 3e-4\ndouble: false"))
by_flag = make_config(ToyConfig, shell("--hidden 32 32 --lr 3e-4 --no-double"))
assert by_keyword == by_file == by_flag

said = {
    sentence(lambda: ToyConfig(lr=-1)),
    sentence(lambda: make_config(ToyConfig, yaml.safe_load("lr: -1"))),
    sentence(lambda: shell("--lr -1")),
}
assert len(said) == 1
said

# %% [markdown]
# ## Honest edges
#
# - Settings are flat. Nested settings (`optimizer.lr`) would need dots in flags and a tree in
#   YAML; Hydra and tyro do that well. Nothing in this book needs it.
# - Only the environment checks what `env_kwargs` holds, when it is made.
# - Of several mistakes only the first is reported.
# - On Python 3.11, `argparse` takes a negative number such as `-1e-3` for a flag. Write
#   `--x=-1e-3`, or a list in brackets.
#
# ## Exercises
#
# **Exercise 1.** Give `ToyConfig` a setting `gamma`, a discount from 0 to 1, both included. Which
# lines do you write, and where does the setting appear?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# One line. It appears as a keyword, a key, a flag and a line of help, and it is checked.
#
# ```python
# class MoreConfig(ToyConfig):
#     gamma: float = Field(default=0.99, ge=0, le=1, description="Discount of later rewards.")
#
# assert MoreConfig(gamma=1).gamma == 1.0
# assert sentence(lambda: MoreConfig(gamma=1.01)).endswith("must be at most 1, not 1.01.")
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** In Python, `True` is a number: `True == 1`. Take the test of `bool` out of
# `read_value`. Which two mistakes go unnoticed, although pydantic is strict?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `float(True)` is 1.0, so `lr=True` becomes a learning rate of 1.0, and `seed=True` becomes a seed
# of 1. pydantic never sees the `True`, so its strictness does not help.
#
# ```python
# assert isinstance(True, numbers.Real) and float(True) == 1.0
# assert sentence(lambda: ToyConfig(seed=True)) == "Setting 'seed' must be a whole number, not True."
# assert sentence(lambda: ToyConfig(lr=True)) == "Setting 'lr' must be a number, not True."
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A user types `--run-dir null` and gets a directory called `null`, while
# `run_dir: null` in a file means none. Is that right? What would you lose with the other choice?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `run_dir` may be a text, so what is typed is taken as it is: `read_flag("null", str | None)` is
# `"null"`. Otherwise nobody could name a directory `null`, `on` or `1`, and such a name would
# silently be lost. In the shell you say "no value" by leaving the flag out.
#
# ```python
# assert read_flag("null", str | None) == "null"
# assert read_flag("null", float | None) is None
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** A shorter `add_flags` gives each flag its default, as `argparse`
# expects. A file asks for a learning rate of 0.0003, the shell only for a seed. Which learning
# rate does the run get, and why does no test of flags alone find this?


# %%
def add_flags_short(short_parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for each setting (with a bug)."""
    for name, field in ToyConfig.model_fields.items():
        short_parser.add_argument(flag_name(name), default=field.default)


short_parser = argparse.ArgumentParser()
add_flags_short(short_parser)
from_file = {"lr": 0.0003, "hidden": [256, 256]}
merged = {**from_file, **vars(short_parser.parse_args(["--seed", "3"]))}
buggy = make_config(ToyConfig, merged)
print("seed", buggy.seed, "lr", buggy.lr, "hidden", buggy.hidden)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Flags override the file, and here *every* flag has a value, typed or not: the defaults of all
# flags override the whole file. The run gets `lr` 0.001 and `hidden` (64, 64). Its `config.yaml`
# says so, but nobody looks there. Each part is right alone; only a test that uses a file **and** a
# flag finds the bug. With `argparse.SUPPRESS` as the default, a flag that was not typed is not in
# the result at all.
#
# ```python
# def add_flags_short(short_parser: argparse.ArgumentParser) -> None:
#     """Give a parser a flag for each setting; one that is not typed leaves no trace."""
#     for name in ToyConfig.model_fields:
#         short_parser.add_argument(flag_name(name), default=argparse.SUPPRESS)
#
# another_parser = argparse.ArgumentParser()
# add_flags_short(another_parser)
# typed = vars(another_parser.parse_args(["--seed", "3"]))
# assert make_config(ToyConfig, {**from_file, **typed}).lr == 0.0003
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Write settings of a schedule, `initial_epsilon` and `final_epsilon`, such that
# the first is never below the second. Why is this not done with `ge`?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The range of one depends on the value of the other, which no single field knows.
#
# ```python
# class ScheduleConfig(Config):
#     initial_epsilon: float = Field(default=1.0, ge=0, le=1, description="At the first step.")
#     final_epsilon: float = Field(default=0.1, ge=0, le=1, description="At the last step.")
#
#     @model_validator(mode="after")
#     def check_epsilon_falls(self) -> Self:
#         """Raise if epsilon would rise."""
#         if self.initial_epsilon < self.final_epsilon:
#             raise ValueError("Setting 'initial_epsilon' must not be below 'final_epsilon'.")
#         return self
#
# assert "below" in sentence(lambda: ScheduleConfig(initial_epsilon=0.05))
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.dqn import DQNConfig
# config = DQNConfig(env_id="CartPole-v1", lr=3e-4, hidden=(128, 128))
# ```
#
# ```
# rlbook train dqn --lr 3e-4 --hidden 128 128
# rlbook train --config my.yaml --seed 1          # my.yaml: algo: dqn, config: cartpole, lr: 3e-4
# ```
#
# ## References
#
# - [pydantic](https://docs.pydantic.dev): models, fields, validators, and the list of its errors.
# - The Python documentation of `argparse` and `typing`.
# - tyro, simple-parsing, Hydra and pydantic-settings do more of the same, with more to learn.
