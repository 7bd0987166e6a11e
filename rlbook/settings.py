"""Made from book/settings.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "AnyConfig",
    "Config",
    "check_range",
    "convert",
    "convert_number",
    "describe",
    "find_config",
    "make_config",
    "read_settings",
    "setting",
    "shipped_configs",
    "write_settings",
]

# %% book/settings.py · Settings
import dataclasses
import importlib.resources
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

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


# %% book/settings.py · Checking a value
def describe(hint: Any) -> str:
    """Name a type in the words of a user."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        return f"a list, each entry {describe(arguments[0])}"
    if origin is types.UnionType:
        return " or ".join("nothing" if part is type(None) else describe(part) for part in arguments)
    return words.get(origin or hint, str(hint))


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`, or raise TypeError; 1 is a number, true is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # the only unions here are `X | None`
        inner = next(part for part in arguments if part is not type(None))
        return None if value is None else convert(value, inner)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(entry, arguments[0]) for entry in value)
    if origin is Literal and value in arguments:
        return value
    if hint is float and isinstance(value, str):  # YAML reads 1e-3 as a text
        return convert_number(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():  # 1e5
        return int(value)
    if isinstance(value, bool) == (hint is bool) and isinstance(value, origin or hint):
        return value
    raise TypeError


def convert_number(text: str) -> float:
    """Read a number that is written as text."""
    try:
        return float(text)
    except ValueError:
        raise TypeError from None


def check_range(name: str, value: Any, limits: typing.Mapping[str, Any]) -> None:
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


# %% book/settings.py · The settings that all algorithms share
@dataclass(kw_only=True)
class Config:
    """The settings of a run, whatever the algorithm."""

    env_id: str = setting("CartPole-v1", "Gymnasium id; `module:Name-v0` imports the module first.")
    env_kwargs: dict[str, Any] = setting({}, "Keywords for the environment.")
    num_envs: int = setting(1, "Environments that step side by side.", low=1)
    total_steps: int = setting(50_000, "Environment steps of the whole run.", low=1)
    seed: int = setting(0, "Seed of everything random in the run.", low=0)
    device: str = setting("cpu", "Where the networks live, such as cpu or cuda.")
    threads: int = setting(1, "Torch threads while learning; small networks like one.", low=1)
    run_dir: str | None = setting(None, "Directory of the run; without one nothing is written.")
    eval_every: int = setting(5_000, "Environment steps between evaluations; 0 for none.", low=0)
    eval_episodes: int = setting(10, "Greedy episodes of an evaluation.", low=1)
    log_every: int = setting(1_000, "Environment steps between lines of training metrics.", low=1)
    checkpoint_every: int = setting(10_000, "Environment steps between checkpoints.", low=1)
    checkpoint_replay: bool = setting(True, "Whether checkpoints hold the replay buffer.")
    tensorboard: bool = setting(False, "Whether to write TensorBoard scalars too.")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            try:
                value = convert(value, hints[item.name])
            except TypeError:
                wanted = describe(hints[item.name])
                raise ValueError(f"Setting {item.name!r} must be {wanted}, not {value!r}.") from None
            check_range(item.name, value, item.metadata)
            setattr(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Raise a ValueError where settings contradict each other; algorithms extend this."""


AnyConfig = TypeVar("AnyConfig", bound=Config)


def make_config(config_class: type[AnyConfig], settings: dict[str, Any]) -> AnyConfig:
    """Make settings from names and values, naming the nearest setting for one that is unknown."""
    known = [item.name for item in dataclasses.fields(config_class)]
    for name in settings:
        if name not in known:
            algorithm = config_class.__name__.removesuffix("Config")
            raise ValueError(f"{algorithm} has no setting {name!r}.{nearest(name, known)}")
    return config_class(**settings)


# %% book/settings.py · Settings in a file
def shipped_configs() -> dict[str, Path]:
    """The config files inside the package, as `algorithm/name`."""
    folder = Path(str(importlib.resources.files("rlbook"))) / "configs"
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.yaml"))}


def find_config(name: str, algo: str | None) -> Path:
    """Find a YAML file by its path, or a shipped one by its name."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        if not Path(name).is_file():
            raise ValueError(f"There is no config file {name!r}.")
        return Path(name)
    shipped = shipped_configs()
    if algo is None:
        raise ValueError(f"Say which algorithm the shipped config {name!r} is for.")
    if f"{algo}/{name}" not in shipped:
        names = [key.split("/")[1] for key in shipped if key.startswith(f"{algo}/")]
        hint = nearest(name, names) or f" There are: {', '.join(names) or 'none'}."
        raise ValueError(f"{algo!r} has no shipped config {name!r}.{hint}")
    return shipped[f"{algo}/{name}"]


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; the key `algo` names the algorithm."""
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"Could not read {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError(f"{path} must hold settings as `name: value`, one a line.")
    return settings


def write_settings(path: Path, algo: str, config: Config) -> None:
    """Write all settings of a run as YAML, in one step."""
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(config).items()}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(yaml.safe_dump({"algo": algo, **plain}, sort_keys=False))
    os.replace(temporary, path)
