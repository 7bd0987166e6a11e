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
# A learning rate is typed in three places: as a keyword in Python, as a key in a file, as a flag in
# the shell. In this chapter you build settings that are declared **once**, as one field of a
# dataclass with one line of documentation, and that work in all three places, with the same checks
# and the same words when something is wrong. At the end, this field:
#
# ```python
# lr: float = setting(1e-3, "Learning rate of Adam.", above=0)
# ```
#
# is the keyword `lr=3e-4`, the key `lr: 3e-4`, the flag `--lr 3e-4`, a line of `--help`, and the
# sentence *Setting 'lr' must be above 0, not -1.0.*
#
# | | |
# |---|---|
# | Builds on | `nearest` from [environments](envs.ipynb), which finds the name you meant |
# | Same as tyro and simple-parsing | a setting is declared in the dataclass alone |
# | Different | about 200 lines over `argparse` and YAML; every mistake is one sentence |
# | Used by | [the agent](agent.ipynb), [the run](run.ipynb), [the command line](cli.ipynb) |

# %%
#| export
import argparse
import dataclasses
import importlib.resources
import math
import numbers
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml

from rlbook.envs import nearest

# %% [markdown]
# The cells that only show something need a little more. `sentence` runs something that is wrong
# and returns the complaint.

# %%
import tempfile
from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from rlbook.figures import PALETTE, use_style

use_style()


def sentence(mistake: Callable[[], object]) -> str:
    """Make a mistake and return what is said about it."""
    try:
        mistake()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was wrong")


# %% [markdown]
# This is the path of a setting. Three doors lead in, and whichever a value comes through, it passes
# the same two checks, whose complaints name the setting and say what it should be.

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(8.5, 2.9))
boxes = [
    (0.0, 2.0, 2.1, "keyword", "lr=3e-4", PALETTE[0]),
    (0.0, 1.0, 2.1, "key in a file", "lr: 3e-4", PALETTE[0]),
    (0.0, 0.0, 2.1, "flag", "--lr 3e-4", PALETTE[0]),
    (3.1, 1.0, 1.6, "right type?", "convert", PALETTE[3]),
    (5.5, 1.0, 1.6, "in range?", "check_range", PALETTE[3]),
    (7.9, 1.0, 1.9, "settings", "config.lr", PALETTE[2]),
]
for x, y, width, title, code, color in boxes:
    shape = FancyBboxPatch((x, y), width, 0.6, boxstyle="round,pad=0.08", fc="white", ec=color)
    ax.add_patch(shape)
    ax.text(x + width / 2, y + 0.44, title, ha="center", va="center", fontsize=9)
    ax.text(x + width / 2, y + 0.15, code, ha="center", va="center", fontsize=9, family="monospace")
for start, end in [
    ((2.25, 2.2), (2.95, 1.5)),
    ((2.25, 1.3), (2.95, 1.3)),
    ((2.25, 0.4), (2.95, 1.1)),
    ((4.85, 1.3), (5.35, 1.3)),
    ((7.25, 1.3), (7.75, 1.3)),
]:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "black"})
for x in (3.9, 6.3):
    arrow = {"arrowstyle": "->", "color": PALETTE[3]}
    ax.annotate("", (5.1, 0.42), (x, 0.86), arrowprops=arrow)
ax.text(5.1, 0.22, "one sentence: what is wrong, what to do", ha="center", fontsize=9)
ax.set(xlim=(-0.2, 10.0), ylim=(-0.2, 2.8))
ax.axis("off")
plt.show()

# %% [markdown]
# ## The problem: mistakes that nobody reports
#
# Most scripts read settings like this, and nothing ever goes wrong, or so it seems. Look at what
# these six lines do with two mistakes of every day, a misspelled key and a number that YAML does
# not take for one, and with a switch that somebody turns off in the shell.

# %%
file = yaml.safe_load("learning_rte: 0.1\ntarget_lr: 1e-4")
naive = argparse.ArgumentParser()
naive.add_argument("--double", type=bool, default=True)

print("learning rate:", file.get("learning_rate", 0.001), "(the key is misspelled: the default)")
print("target rate:  ", repr(file["target_lr"]), "(YAML wants a point: 1.0e-4)")
print("double:       ", naive.parse_args(["--double", "false"]).double, "(bool('false') is True)")

# %% [markdown]
# The run starts, and a day later you compare two curves of the same settings. So a setting needs a
# known name and a known type, and both must be checked where they are read.
#
# ## One field, one line
#
# A dataclass already has names, types and defaults. What is missing is a line of documentation and
# the range, and a field has a place for such things: its `metadata`.

# %%
#| export
def setting(
    default: Any,
    doc: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
) -> Any:
    """Declare a setting: its default, its line of documentation and the range it may take."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# %% [markdown]
# A mapping as default is copied for each object, or all runs would share one.

# %%
@dataclass
class Example:
    """A dataclass with two settings."""

    lr: float = setting(1e-3, "Learning rate of Adam.", above=0)
    env_kwargs: dict[str, Any] = setting({}, "Keywords for the environment.")  # noqa: RUF009


lr_field = dataclasses.fields(Example)[0]
print(lr_field.name, lr_field.type, lr_field.default, dict(lr_field.metadata))
assert Example().env_kwargs is not Example().env_kwargs

# %% [markdown]
# ## A value of the right type
#
# The types that settings may have are few: whole numbers, numbers, true or false, texts, lists,
# mappings, a choice, and each of them or nothing. First, their names in plain words, because
# *expected tuple[int, ...]* is no help to somebody who has never seen that notation:

# %%
#| export
def describe(hint: Any) -> str:
    """Name a type in the words of a user."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        return f"a list, each entry {describe(arguments[0])}"
    if origin is types.UnionType:
        return " or ".join(describe(part) for part in arguments)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return {**words, dict: "a mapping", types.NoneType: "nothing"}.get(origin or hint, str(hint))


# %%
for hint in (int, float | None, tuple[int, ...], Literal["relu", "tanh"], dict[str, Any]):
    print(f"{hint!s:38} {describe(hint)}")

# %% [markdown]
# Numbers come in many dresses. YAML and the shell deliver `1e-3` as a text, people write `1e5`
# steps although that is a float, and seeds come out of `np.arange`. All of these are meant well and
# clear. What is refused: 1.5 as a whole number, and `True` as any number, although Python thinks
# that it is 1.

# %%
#| export
def convert_number(value: Any) -> float:
    """Return a number, also one that is written as text; true is not a number."""
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        raise TypeError
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise TypeError from None


def convert_whole(value: Any) -> int:
    """Return a whole number, also one that is written as 1e5 or 5.0."""
    number = convert_number(value)
    if not number.is_integer():
        raise TypeError
    # Not through the float, which is exact only up to 2 ** 53.
    return int(value) if isinstance(value, numbers.Integral) else int(number)


# %% [markdown]
# A float holds every whole number up to $2^{53}$ and then only every second one, so a large seed
# must not pass through it. By hand: $2^{53} + 1$ as a float is $2^{53}$.

# %%
assert convert_number("1e-3") == 0.001 and convert_whole("1e5") == 100_000
assert float(2**53 + 1) == 2**53
assert convert_whole(2**53 + 1) == 2**53 + 1

# %% [markdown]
# The rest is a case for each type. A list of settings arrives as a list from YAML and as a tuple
# from Python; it is stored as a tuple, which nobody can change by accident.

# %%
#| export
def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`, or raise TypeError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # the only unions here are `X | None`
        inner = next(part for part in arguments if part is not types.NoneType)
        return None if value is None else convert(value, inner)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(entry, arguments[0]) for entry in value)
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if origin is Literal and value in arguments:
        return value
    if hint is float:
        return convert_number(value)
    if hint is int:
        return convert_whole(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise TypeError


# %%
for value, hint in [
    ("1e-3", float),
    (1e5, int),
    ([64, 64], tuple[int, ...]),
    (None, float | None),
    ("tanh", Literal["relu", "tanh"]),
    (True, int),
    (1.5, int),
    ("false", bool),
    ([64, "wide"], tuple[int, ...]),
]:
    try:
        shown = repr(convert(value, hint))
    except TypeError:
        shown = f"refused: not {describe(hint)}"
    print(f"{value!r:14} {shown}")

# %% [markdown]
# ## A value in range
#
# `low` and `high` belong to the range, `above` does not: a discount may be 0 or 1, a learning rate
# must be more than 0. Infinity and NaN are in no range.

# %%
#| export
def check_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raise unless a number, or each number of a list, lies in the range of its setting."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise ValueError(f"Setting {name!r} must be finite, not {number}.")
        if number < limits["low"]:
            raise ValueError(f"Setting {name!r} must be at least {limits['low']}, not {number}.")
        if number > limits["high"]:
            raise ValueError(f"Setting {name!r} must be at most {limits['high']}, not {number}.")
        if number <= limits["above"]:
            raise ValueError(f"Setting {name!r} must be above {limits['above']}, not {number}.")


def check_setting(item: "dataclasses.Field[Any]", value: Any, hint: Any) -> Any:
    """Return the value of a setting in its own type, or say what is wrong with it."""
    try:
        converted = convert(value, hint)
    except TypeError:
        wanted = describe(hint)
        raise ValueError(f"Setting {item.name!r} must be {wanted}, not {value!r}.") from None
    check_range(item.name, converted, item.metadata)
    return converted


# %%
print(check_setting(lr_field, "3e-4", float))
print(sentence(lambda: check_setting(lr_field, "fast", float)))
print(sentence(lambda: check_setting(lr_field, -1, float)))
print(sentence(lambda: check_setting(lr_field, "nan", float)))
assert sentence(lambda: check_setting(lr_field, 0, float)).endswith("must be above 0, not 0.0.")

# %% [markdown]
# ## The settings that all algorithms share
#
# An algorithm inherits from this class and adds its own fields. The check runs when the object is
# made, so a wrong setting stops a run before it begins, and it runs again in
# `dataclasses.replace`. Unknown names are caught one moment earlier, before Python's own
# complaint, which knows no neighbours.

# %%
#| export
@dataclass(kw_only=True)
class Config:
    """The settings of a run, whatever the algorithm."""

    env_id: str = setting("CartPole-v1", "Gymnasium id; `module:Name-v0` imports the module first.")
    env_kwargs: dict[str, Any] = setting({}, "Keywords for the environment.")  # noqa: RUF009
    num_envs: int = setting(1, "Environments that step side by side.", low=1)
    total_steps: int = setting(50_000, "Environment steps of the whole run.", low=1)
    seed: int = setting(0, "Seed of everything random in the run.", low=0)
    device: str = setting("cpu", "Where the networks live, such as cpu or cuda.")
    threads: int = setting(1, "Torch threads while learning; small networks like one.", low=1)
    compile: bool = setting(False, "Compile forward passes (torch.compile); it rarely pays here.")
    run_dir: str | None = setting(None, "Directory of the run; without one nothing is written.")
    eval_every: int = setting(5_000, "Environment steps between evaluations; 0 for none.", low=0)
    eval_episodes: int = setting(10, "Greedy episodes of an evaluation.", low=1)
    log_every: int = setting(1_000, "Environment steps between lines of training metrics.", low=1)
    checkpoint_every: int = setting(
        10_000, "Environment steps between checkpoints, which reset all environments.", low=1
    )
    checkpoint_replay: bool = setting(True, "Whether checkpoints hold the replay buffer.")
    tensorboard: bool = setting(False, "Whether to write TensorBoard scalars too.")

    def __new__(cls, **settings: Any) -> Self:
        check_names(cls, settings)  # before Python's own error, which names no neighbour
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = check_setting(item, getattr(self, item.name), hints[item.name])
            setattr(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Raise a ValueError where settings contradict each other; algorithms extend this."""


# %%
#| export
AnyConfig = TypeVar("AnyConfig", bound=Config)


def check_names(config_class: type[Config], settings: Mapping[str, Any]) -> None:
    """Raise for a name that is no setting, naming the nearest one that is."""
    known = [item.name for item in dataclasses.fields(config_class)]
    for name in settings:
        if name not in known:
            owner = config_class.__name__.removesuffix("Config")
            lists = f" `rlbook train {owner.lower()} --help` lists them."
            hint = nearest(str(name), known) or lists
            raise ValueError(f"{owner} has no setting {name!r}.{hint}")


def make_config(config_class: type[AnyConfig], settings: dict[str, Any]) -> AnyConfig:
    """Make settings from names and values."""
    check_names(config_class, settings)  # here too: a name that is no text cannot be a keyword
    return config_class(**settings)


# %% [markdown]
# Here is a small algorithm's worth of settings, for the rest of the chapter: three fields of its
# own, and a `check` for what no single field can know.


# %%
@dataclass(kw_only=True)
class ToyConfig(Config):
    """The settings of an algorithm that does not exist."""

    hidden: tuple[int, ...] = setting((64, 64), "Units of each hidden layer.", low=1)
    lr: float = setting(1e-3, "Learning rate of Adam.", above=0)
    activation: Literal["relu", "tanh"] = setting("relu", "Between the layers.")
    double: bool = setting(True, "Whether the online network chooses the next action.")

    def check(self) -> None:
        """Raise where settings contradict each other."""
        if self.eval_every > self.total_steps:
            raise ValueError(
                f"Setting 'eval_every' ({self.eval_every}) must not exceed 'total_steps' "
                f"({self.total_steps})."
            )


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
# Read these as somebody who made the mistake: each names the setting, says what it should be, and
# shows what it was. In Python they are a `ValueError`; in the shell they are printed alone, and the
# exit code is 2.
#
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
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(config).items()}
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
#
# A flag is the name with dashes. What stands in the metadata becomes its line of help, with the
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


def add_flags(
    parser: argparse._ActionsContainer,
    config_class: type[Config],
    names: Sequence[str] | None = None,
) -> None:
    """Give a parser a flag for each setting, or for those in `names`."""
    hints = typing.get_type_hints(config_class)
    metavars = {int: "N", float: "X", bool: "BOOL", dict: "YAML"}
    for item in dataclasses.fields(config_class):
        if names is not None and item.name not in names:
            continue
        hint = hints[item.name]
        parts = {hint, typing.get_origin(hint), *typing.get_args(hint)}
        default = {} if item.default is dataclasses.MISSING else item.default
        plain = list(default) if isinstance(default, tuple) else default
        shown = yaml.safe_dump(plain, default_flow_style=True).splitlines()[0]
        options: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,  # only what was typed overrides a file
            "metavar": next((word for kind, word in metavars.items() if kind in parts), "TEXT"),
            "help": f"{item.metadata['doc']} [{shown}]".replace("%", "%%"),
        }
        if Literal in parts:
            options["metavar"] = "|".join(map(str, typing.get_args(hint)))
        if tuple in parts:
            options["nargs"] = "+"
        if hint is bool:  # --double, --double false and --no-double
            options |= {"nargs": "?", "const": "true"}
            opposite = flag_name(f"no_{item.name}")
            quiet: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(
                opposite, dest=item.name, action="store_const", const="false", **quiet
            )
        parser.add_argument(flag_name(item.name), **options)


# %%
parser = argparse.ArgumentParser(prog="toy", add_help=False)
add_flags(parser, ToyConfig, ["hidden", "lr", "activation", "double", "env_kwargs"])
print(parser.format_help())

# %% [markdown]
# What was typed is a text. It is read as YAML would read it, so that a value means the same in the
# shell and in a file. Only a setting that wants a text takes it as it is: a directory called `1` is
# a directory, and `on` is a name, not a switch.

# %%
#| export
def read_flag(typed: str | Sequence[str], hint: Any) -> Any:
    """Read what was typed after a flag as YAML would, but leave a text as it is."""
    if not isinstance(typed, str):
        alone = len(typed) == 1 and typed[0].startswith("[")  # "[64, 64]" is the whole list
        return read_flag(typed[0], None) if alone else [read_flag(word, hint) for word in typed]
    parts = (hint, *typing.get_args(hint))
    wants_text = str in parts or any(isinstance(part, str) for part in parts)  # or such a choice
    if wants_text and typing.get_origin(hint) is not dict:
        return typed
    try:
        return yaml.safe_load(typed)
    except yaml.YAMLError:
        return typed  # which is not of the right type, and is said to be so


def flag_settings(options: argparse.Namespace, config_class: type[Config]) -> dict[str, Any]:
    """Return the settings that were typed as flags, each checked."""
    hints, typed = typing.get_type_hints(config_class), vars(options)
    settings = {}
    for item in dataclasses.fields(config_class):
        if item.name in typed:
            hint = hints[item.name]
            settings[item.name] = check_setting(item, read_flag(typed[item.name], hint), hint)
    return settings


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
