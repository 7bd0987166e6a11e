"""Made from book/settings.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "AnyConfig",
    "Config",
    "UniqueKeysLoader",
    "add_flags",
    "check_names",
    "check_range",
    "check_setting",
    "convert",
    "convert_number",
    "convert_whole",
    "describe",
    "find_config",
    "flag_name",
    "flag_settings",
    "gather_settings",
    "make_config",
    "parse_yaml",
    "read_flag",
    "read_settings",
    "setting",
    "shipped_configs",
    "write_settings",
]

# %% book/settings.py · Settings
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


# %% book/settings.py · One field, one line
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


# %% book/settings.py · A value of the right type
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


# %% book/settings.py · A value in range
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


# %% book/settings.py · The settings that all algorithms share
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


# %% book/settings.py · Settings in a file
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


# %% book/settings.py · Settings on the command line
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
