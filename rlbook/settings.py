"""Made from book/settings.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ELSEWHERE",
    "LIMITS",
    "VALUES",
    "WORDS",
    "AnyConfig",
    "Config",
    "TakesFlags",
    "UniqueKeysLoader",
    "add_flags",
    "bare_name",
    "check_names",
    "describe",
    "explain",
    "find_config",
    "flag_name",
    "flag_settings",
    "gather_settings",
    "is_file_name",
    "make_config",
    "nearest_setting",
    "parse_yaml",
    "read_config",
    "read_flag",
    "read_settings",
    "read_value",
    "shipped_configs",
    "shipped_for",
    "types_in",
    "write_settings",
    "write_whole",
]

# %% book/settings.py · Settings
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


# %% book/settings.py · One number, written in many ways
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


# %% book/settings.py · A mistake in one sentence
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


# %% book/settings.py · The settings that all algorithms share
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


# %% book/settings.py · Settings in a file
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


# %% book/settings.py · Settings on the command line
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
