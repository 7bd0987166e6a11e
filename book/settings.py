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

# %% tags=["hide-input"]
#| export
import argparse
import importlib.resources
import numbers
import os
import types
import typing
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union

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

from rlbook.envs import nearest

# %% tags=["hide-input"]
import tempfile
from collections.abc import Callable

from pydantic import model_validator


def sentence(mistake: Callable[[], object]) -> str:
    """Make a mistake and return what is said about it."""
    try:
        mistake()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was wrong")


# %% [markdown]
# ## Numbers in many forms


# %%
#| export
def types_in(hint: Any) -> list[Any]:
    """List what a type is made of: `float | None` of a union, float and nothing."""
    inner = [part for argument in typing.get_args(hint) for part in types_in(argument)]
    return [typing.get_origin(hint) or hint, *inner]


def read_number(value: Any, whole: bool) -> Any:
    """Return a number, also one that is text; leave what is not one as it is."""
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        return value
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return value
    if not whole:
        return number
    if not number.is_integer():
        return value
    # Not through the float, which is exact only up to 2 ** 53.
    exact: Any = Decimal(value) if isinstance(value, str) else value
    return int(exact)


def read_value(value: Any, hint: Any) -> Any:
    """Return lists as tuples and numbers as int or float, wherever `hint` asks for them."""
    parts = types_in(hint)
    if tuple in parts and isinstance(value, list | tuple):
        return tuple(read_value(entry, hint) for entry in value)
    if str in parts or dict in parts or not (int in parts or float in parts):
        return value
    return read_number(value, whole=float not in parts)


# %% [markdown]
# ## One sentence

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
#| export
LIMITS = {  # pydantic's name of a mistake: our words
    "finite_number": "finite",
    "greater_than": "above {gt:.12g}",
    "greater_than_equal": "at least {ge:.12g}",
    "less_than": "below {lt:.12g}",
    "less_than_equal": "at most {le:.12g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def explain(error: ValidationError, config_class: type[BaseModel], settings: dict[str, Any]) -> str:
    """Say in one sentence what pydantic found first."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    if "error" in context:  # raised by a validator, in a sentence of its own
        return str(context["error"])
    name = str(first["loc"][0])
    if first["type"] in LIMITS:
        wanted, given = LIMITS[first["type"]].format(**context), first["input"]
    else:  # of the wrong type
        wanted, given = describe(config_class.model_fields[name].annotation), settings.get(name)
    return f"Setting {name!r} must be {wanted}, not {given!r}."


def check_names(config_class: type[BaseModel], names: Iterable[Any]) -> None:
    """Raise for a name that is no setting, naming the nearest one that is."""
    known = list(config_class.model_fields)
    for name in names:
        if name not in known:
            owner = config_class.__name__.removesuffix("Config")
            lists = f" `rlbook train {owner.lower()} --help` lists them."
            hint = nearest(str(name), known) or lists
            raise ValueError(f"{owner} has no setting {name!r}.{hint}")


# %% [markdown]
# ## The settings that all algorithms share


# %%
#| export
class Config(BaseModel):
    """The settings of a run, whatever the algorithm."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    env_id: str = Field(
        default="CartPole-v1",
        description="Gymnasium id; `module:Name-v0` imports the module first.",
    )
    env_kwargs: dict[str, Any] = Field(default={}, description="Keywords for the environment.")
    num_envs: int = Field(default=1, ge=1, description="Environments that step side by side.")
    total_steps: int = Field(
        default=50_000, ge=1, description="Environment steps of the whole run."
    )
    seed: int = Field(default=0, ge=0, description="Seed of everything random in the run.")
    device: str = Field(default="cpu", description="Where the networks live, such as cpu or cuda.")
    threads: int = Field(
        default=1, ge=1, description="Torch threads while learning; small networks like one."
    )
    compile: bool = Field(
        default=False,
        description="Compile what an update computes (torch.compile); needs a C++ compiler.",
    )
    run_dir: str | None = Field(
        default=None, description="Directory of the run; without one nothing is written."
    )
    eval_every: int = Field(
        default=5_000, ge=0, description="Environment steps between evaluations; 0 for none."
    )
    eval_episodes: int = Field(default=10, ge=1, description="Greedy episodes of an evaluation.")
    log_every: int = Field(
        default=1_000, ge=1, description="Environment steps between lines of training metrics."
    )
    checkpoint_every: int = Field(
        default=10_000,
        ge=1,
        description="Environment steps between checkpoints, which reset all environments.",
    )
    checkpoint_replay: bool = Field(
        default=True, description="Whether checkpoints hold the replay buffer."
    )
    tensorboard: bool = Field(
        default=False, description="Whether to write TensorBoard scalars too."
    )

    def __init__(self, /, **settings: Any) -> None:
        check_names(type(self), settings)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ValueError(explain(error, type(self), settings)) from None

    @field_validator("*", mode="before")
    @classmethod
    def read_field(cls, value: Any, info: ValidationInfo) -> Any:
        """Read a value as its field is declared, before pydantic checks it strictly."""
        return read_value(value, cls.model_fields[str(info.field_name)].annotation)

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with some settings changed."""
        return type(self)(**{**self.model_dump(), **changes})

    def __setattr__(self, name: str, value: Any) -> None:
        checked = self.replace(**{name: value})  # raises before anything has changed
        super().__setattr__(name, getattr(checked, name))


AnyConfig = TypeVar("AnyConfig", bound=Config)


def make_config(config_class: type[AnyConfig], settings: dict[str, Any]) -> AnyConfig:
    """Make settings from names and values."""
    check_names(config_class, settings)  # here too: a name that is no text cannot be a keyword
    return config_class(**settings)


# %%
class ToyConfig(Config):
    """The settings of an algorithm that does not exist."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each hidden layer."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    activation: Literal["relu", "tanh"] = Field(default="relu", description="Between the layers.")
    double: bool = Field(default=True, description="Whether to use double DQN.")

    @model_validator(mode="after")
    def check_evaluations_fit(self) -> Self:
        """Raise where settings contradict each other."""
        if self.eval_every > self.total_steps:
            raise ValueError(
                f"Setting 'eval_every' ({self.eval_every}) must not exceed 'total_steps' "
                f"({self.total_steps})."
            )
        return self


toy = ToyConfig(hidden=[32, 32], lr="3e-4", total_steps=1e5)
toy.hidden, toy.lr, toy.total_steps

# %%
for mistake in (
    {"learning_rate": 1e-4},
    {"total_step": 100},
    {"lr": "fast"},
    {"lr": 0},
    {"hidden": 64},
    {"hidden": [64, 0]},
    {"activation": "rleu"},
    {"double": 1},
    {"seed": True},
    {"num_envs": 1.5},
    {"total_steps": 100},
):
    print(sentence(lambda wrong=mistake: make_config(ToyConfig, wrong)))

# %% [markdown]
# ## Settings in a file
#
# A file of settings is YAML, a line for each. Files that come with the book are found by their
# name, others by their path.


# %%
#| export
def shipped_configs() -> dict[str, Path]:
    """The config files inside the package, as `algorithm/name`."""
    folder = Path(str(importlib.resources.files("rlbook"))) / "configs"
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.yaml"))}


def find_config(name: str, algo: str | None) -> Path:
    """Find a YAML file by its path, or a shipped one by its name."""
    shipped = shipped_configs()
    names = [key.split("/")[1] for key in shipped if key.startswith(f"{algo}/")]
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        if not path.is_file():
            beside = [str(file) for file in path.parent.glob("*.y*ml")]
            raise ValueError(f"There is no config file {name!r}.{nearest(name, beside + names)}")
        return path
    if algo is None:
        raise ValueError(
            f"Say which algorithm the shipped config {name!r} is for, or name a file: {name}.yaml."
        )
    if name not in names:
        hint = nearest(name, names) or f" There are: {', '.join(names) or 'none'}."
        raise ValueError(f"{algo!r} has no shipped config {name!r}.{hint}")
    return shipped[f"{algo}/{name}"]


# %%
print(", ".join(name for name in shipped_configs() if name.startswith("dqn/")))
print(sentence(lambda: find_config("cartpol", "dqn")))
print(sentence(lambda: find_config("cartpole", None)))
print(sentence(lambda: find_config("nowhere.yaml", None)))

# %% [markdown]
# A file that is not YAML is reported with its line. The safe loader makes plain values only: a YAML
# file of a stranger cannot run code. Of a key that stands there twice it would silently keep the last
# value, and somebody would wonder for an hour why changing the first does nothing. Ours complains.


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
                    problem = f"{key.value!r} stands there twice"
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
# A file may start from another one: with `config: cartpole` in it you write down only what differs.
# The key `algo` says whose settings these are, and contradictions are refused.


# %%
#| export
def gather_settings(name: str, algo: str | None) -> tuple[str | None, dict[str, Any]]:
    """Read a config, on top of the one that its key `config` names; return its algorithm too."""
    path = find_config(name, algo)
    settings = read_settings(path)
    found = settings.pop("algo", algo)
    if algo not in (None, found):
        raise ValueError(f"{path} is for {found!r}, not for {algo!r}: name one algorithm.")
    found = None if found is None else str(found)
    base = settings.pop("config", None)
    if base is None:
        return found, settings
    below = read_settings(find_config(str(base), found))
    found_below = below.pop("algo", found)
    if found not in (None, found_below):
        raise ValueError(f"{path} is for {found!r}, but its config {base!r} for {found_below!r}.")
    return found_below, {**below, **settings}


# %% [markdown]
# A run writes **all** its settings beside its results, defaults included, so that the file still
# means the same when a default changes. It is written under another name and renamed, which is all
# or nothing: the chapter on [checkpoints](checkpoint.ipynb) shows why.


# %%
#| export
def write_settings(path: Path, algo: str, config: Config) -> None:
    """Write all settings of a run as YAML, in one step."""
    settings = config.model_dump()
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
    try:
        text = yaml.safe_dump({"algo": algo, **plain}, sort_keys=False)
    except yaml.YAMLError as error:
        raise ValueError(
            "Setting 'env_kwargs' must hold plain numbers, texts, lists and mappings only, "
            "since it is stored with the run."
        ) from error
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


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


# %%
#| export
def flag_name(name: str) -> str:
    """Spell a setting as a flag."""
    return "--" + name.replace("_", "-")


def add_flags(
    parser: argparse._ActionsContainer,
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
            parser.add_argument(
                flag_name(f"no_{name}"), dest=name, action="store_const", const="false", **quiet
            )
        parser.add_argument(flag_name(name), **options)


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
    fields = {
        name: field for name, field in config_class.model_fields.items() if name in vars(options)
    }
    typed = {
        name: read_flag(getattr(options, name), field.annotation) for name, field in fields.items()
    }
    # A class of these fields alone: whether settings contradict each other, the file decides too.
    own: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    checked = create_model(config_class.__name__, __base__=Config, **own)(**typed)
    return {name: getattr(checked, name) for name in typed}


# %%
def shell(line: str) -> dict[str, Any]:
    """Return the settings that a command line names."""
    toy_parser = argparse.ArgumentParser()
    add_flags(toy_parser, ToyConfig)
    return flag_settings(toy_parser.parse_args(line.split()), ToyConfig)


# %% [markdown]
# ## Three doors, one room
#
# Now the promise of the first paragraph: the same settings through all three doors give the same
# object, and the same mistake gets the same sentence.

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
# - Settings are flat. A setting of a setting (`optimizer.lr`) would need a dot in flags and a tree
#   in YAML; Hydra and tyro do that well. Nothing in this book needs it.
# - Checks run when an object is made. After `config.lr = "fast"` nothing complains until the
#   optimiser does.
# - YAML lets a key stand twice and takes the last. `lr: 0.1` at the top of a file and `lr: 0.01` at
#   its end is 0.01.
# - On Python 3.11, `argparse` takes a negative number such as `-1e-3` for a flag. Write
#   `--x=-1e-3`, or a list in brackets.
#
# ## Exercises
#
# **Exercise 1.** Give `ToyConfig` a setting `gamma`, a discount from 0 to 1, both included. Which
# lines do you write, and where do they appear?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# One line. It appears as a keyword, a key, a flag and a line of help, and it is checked.
#
# ```python
# @dataclass(kw_only=True)
# class MoreConfig(ToyConfig):
#     gamma: float = setting(0.99, "Discount of a reward one step later.", low=0, high=1)
#
# assert MoreConfig(gamma=1).gamma == 1.0
# assert sentence(lambda: MoreConfig(gamma=1.01)).endswith("must be at most 1, not 1.01.")
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Why does `convert_whole` call `convert_number` before it looks at
# `numbers.Integral`? Try it the other way round with `True`.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `isinstance(True, numbers.Integral)` is true, so `seed=True` would become seed 1 without a word.
# `convert_number` refuses truth values first, for whole numbers too.
#
# ```python
# assert isinstance(True, numbers.Integral)
# assert "'seed'" in sentence(lambda: ToyConfig(seed=True))
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
# `"null"`. Otherwise nobody could name a directory `null`, `on` or `1`, and the error would be
# silent. In the shell "no value" is said by leaving the flag out.
#
# ```python
# assert read_flag("null", str | None) == "null"
# assert read_flag("null", float | None) is None
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** A shorter `add_flags` gives each flag its default, as `argparse`
# expects. A file asks for a learning rate of 0.0003, the shell only for a seed. Which learning rate
# does the run get, and why does no test of flags alone find this?


# %%
def add_flags_short(short_parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for each setting (with a bug)."""
    for item in dataclasses.fields(ToyConfig):
        if item.default is not dataclasses.MISSING:
            short_parser.add_argument(flag_name(item.name), default=item.default)


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
# flags override the whole file. The run gets `lr` 0.001 and `hidden` (64, 64), and reports them
# truthfully in its `config.yaml`, where nobody looks. Each part is right alone; only a test that
# uses a file **and** a flag sees it. With `argparse.SUPPRESS` as the default, an untyped flag is
# not in the result at all.
#
# ```python
# def add_flags_short(short_parser: argparse.ArgumentParser) -> None:
#     """Give a parser a flag for each setting; one that is not typed leaves no trace."""
#     for item in dataclasses.fields(ToyConfig):
#         if item.default is not dataclasses.MISSING:
#             short_parser.add_argument(flag_name(item.name), default=argparse.SUPPRESS)
#
# another_parser = argparse.ArgumentParser()
# add_flags_short(another_parser)
# typed = vars(another_parser.parse_args(["--seed", "3"]))
# assert make_config(ToyConfig, {**from_file, **typed}).lr == 0.0003
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Write a `check` for a schedule with the settings `epsilon_start` and
# `epsilon_floor`, such that the first is never below the second. Why is this not done with `low`?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The range of one would depend on the value of the other, which no single field knows.
#
# ```python
# @dataclass(kw_only=True)
# class ScheduleConfig(Config):
#     epsilon_start: float = setting(1.0, "Probability at the first step.", low=0, high=1)
#     epsilon_floor: float = setting(0.1, "Lowest probability.", low=0, high=1)
#
#     def check(self) -> None:
#         if self.epsilon_start < self.epsilon_floor:
#             raise ValueError("Setting 'epsilon_start' must not be below 'epsilon_floor'.")
#
# assert "below" in sentence(lambda: ScheduleConfig(epsilon_start=0.05))
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
# - The Python documentation of `dataclasses`, `argparse` and `typing.get_type_hints`.
# - tyro, simple-parsing, Hydra and pydantic-settings do more of the same, with more to learn.
