"""Settings: one field is a keyword, a key and a flag, with the same checks and the same words."""

import argparse
import copy
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator

from rlbook.agent import algorithms
from rlbook.settings import (
    ELSEWHERE,
    Config,
    add_flags,
    find_config,
    flag_settings,
    gather_settings,
    make_config,
    read_settings,
    shipped_configs,
    write_settings,
)


class ToyConfig(Config):
    """One setting of each type."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each layer."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate, in 100 % of the cases.")
    gamma: float = Field(default=0.99, ge=0, le=1, description="Discount.")
    clip: float | None = Field(default=None, gt=0, description="Clip the gradient to this norm.")
    kind: Literal["relu", "on"] = Field(default="relu", description="Between the layers.")
    names: tuple[str, ...] = ()
    double: bool = True

    @model_validator(mode="after")
    def check_kind_is_double(self) -> Self:
        """Raise where settings contradict each other."""
        if self.kind == "on" and not self.double:
            raise ValueError("Setting 'kind' can be 'on' only with 'double'.")
        return self


def from_shell(*words: str) -> dict[str, Any]:
    """Return the settings that flags name."""
    parser = argparse.ArgumentParser()
    add_flags(parser, ToyConfig)
    return flag_settings(parser.parse_args(words), ToyConfig)


SAME = [
    ({"hidden": (32, 16)}, "hidden: [32, 16]", ["--hidden", "32", "16"]),
    ({"hidden": [32, 16]}, "hidden: [32, 16]", ["--hidden", "[32, 16]"]),
    ({"hidden": (8,)}, "hidden: [8]", ["--hidden", "8"]),
    ({"hidden": ()}, "hidden: []", ["--hidden", "[]"]),
    ({"lr": 3e-4}, "lr: 3e-4", ["--lr", "3e-4"]),
    ({"lr": 1}, "lr: 1", ["--lr=1"]),
    ({"total_steps": 100_000}, "total_steps: 1e5", ["--total-steps", "1e5"]),
    ({"seed": 2**53 + 1}, f"seed: {2**53 + 1}", ["--seed", str(2**53 + 1)]),
    ({"clip": 0.5}, "clip: 0.5", ["--clip", "0.5"]),
    ({"clip": None}, "clip: null", ["--clip", "null"]),
    ({"kind": "on"}, "kind: 'on'", ["--kind", "on"]),
    ({"names": ("1", "on")}, "names: ['1', 'on']", ["--names", "1", "on"]),
    ({"double": False}, "double: false", ["--no-double"]),
    ({"double": False}, "double: no", ["--double", "false"]),
    ({"double": True}, "double: yes", ["--double"]),
    ({"run_dir": "1"}, "run_dir: '1'", ["--run-dir", "1"]),
    ({"env_kwargs": {"g": 9.8}}, "env_kwargs: {g: 9.8}", ["--env-kwargs", '{"g": 9.8}']),
    ({"env_kwargs": {"g": 9.8}}, "env_kwargs: {g: 9.8}", ["--env-kwargs", "g: 9.8"]),
]


@pytest.mark.parametrize(("keywords", "text", "words"), SAME)
def test_keyword_key_and_flag_mean_the_same(
    keywords: dict[str, Any], text: str, words: list[str]
) -> None:
    made = ToyConfig(**keywords)
    assert make_config(ToyConfig, yaml.safe_load(text)) == made
    assert make_config(ToyConfig, from_shell(*words)) == made


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": "fast"}, "Setting 'lr' must be a number, not 'fast'."),
    ({"lr": True}, "Setting 'lr' must be a number, not True."),
    ({"lr": 0}, "Setting 'lr' must be above 0, not 0.0."),
    ({"lr": "nan"}, "Setting 'lr' must be finite, not nan."),
    ({"lr": "inf"}, "Setting 'lr' must be finite, not inf."),
    ({"lr": None}, "Setting 'lr' must be a number, not None."),
    ({"gamma": 1.5}, "Setting 'gamma' must be at most 1, not 1.5."),
    ({"seed": -1}, "Setting 'seed' must be at least 0, not -1."),
    ({"seed": 1.5}, "Setting 'seed' must be a whole number, not 1.5."),
    ({"total_steps": 0}, "Setting 'total_steps' must be at least 1, not 0."),
    ({"hidden": 64}, "Setting 'hidden' must be a list, each entry a whole number, not 64."),
    ({"hidden": [64, 0]}, "Each entry of setting 'hidden' must be at least 1, not 0."),
    ({"clip": "x"}, "Setting 'clip' must be a number or nothing, not 'x'."),
    ({"kind": "off"}, "Setting 'kind' must be one of 'relu', 'on', not 'off'."),
    ({"double": 1}, "Setting 'double' must be true or false, not 1."),
    ({"env_kwargs": [1]}, "Setting 'env_kwargs' must be a mapping, not [1]."),
    (
        {"env_id": 3},
        "An environment is a Gymnasium id, an instance, or a class or function that makes one, "
        "not 3.",
    ),
    ({"kind": "on", "double": False}, "Setting 'kind' can be 'on' only with 'double'."),
    ({"gama": 0.9}, "Toy has no setting 'gama'. Did you mean 'gamma'?"),
    ({"xyz": 1}, "Toy has no setting 'xyz'. `rlbook train ALGO --help` lists them."),
]


@pytest.mark.parametrize(("keywords", "message"), WRONG)
def test_each_mistake_is_one_sentence_as_keyword_and_key(
    keywords: dict[str, Any], message: str
) -> None:
    for make in (lambda: ToyConfig(**keywords), lambda: make_config(ToyConfig, keywords)):
        with pytest.raises(ValueError) as raised:
            make()
        assert str(raised.value) == message and type(raised.value) is ValueError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "fast"], "Setting 'lr' must be a number, not 'fast'."),
        (["--lr", "[1"], "Setting 'lr' must be a number, not '[1'."),
        (["--lr", ""], "Setting 'lr' must be a number, not None."),
        (["--gamma", "2"], "Setting 'gamma' must be at most 1, not 2.0."),
        (["--hidden", "64", "a"], "must be a list, each entry a whole number, not [64, 'a']."),
        (["--hidden", "[64"], "must be a list, each entry a whole number, not '[64'."),
        (["--double", "maybe"], "Setting 'double' must be true or false, not 'maybe'."),
        (["--kind", "off"], "Setting 'kind' must be one of 'relu', 'on', not 'off'."),
        (["--env-kwargs", "5"], "Setting 'env_kwargs' must be a mapping, not 5."),
    ],
)
def test_each_mistake_is_one_sentence_as_flag(words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        from_shell(*words)
    assert str(raised.value).endswith(message)


def test_only_typed_flags_override_a_file() -> None:
    from_file = {"lr": 0.5, "hidden": [256], "double": False}
    config = make_config(ToyConfig, {**from_file, **from_shell("--seed", "3")})
    assert (config.seed, config.lr, config.hidden, config.double) == (3, 0.5, (256,), False)


def test_help_shows_doc_and_default_of_each_setting() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ToyConfig)
    text = " ".join(parser.format_help().split())
    assert "--hidden N [N ...] Units of each layer. [[64, 64]]" in text
    assert "--lr X Learning rate, in 100 % of the cases. [0.001]" in text
    assert "--kind relu|on Between the layers. [relu]" in text


def test_flags_and_help_need_no_more_than_a_plain_field() -> None:
    class PlainConfig(Config):
        rate: float = 1e-3
        sizes: tuple[int, ...] = (8,)
        names: dict[str, int] = Field(default={})

    parser = argparse.ArgumentParser()
    add_flags(parser, PlainConfig)
    assert "--rate X [0.001]" in " ".join(parser.format_help().split())
    options = parser.parse_args(["--rate", "3e-4", "--sizes", "4", "1e1"])
    assert flag_settings(options, PlainConfig) == {"rate": 3e-4, "sizes": (4, 10)}
    assert PlainConfig().names == {} and PlainConfig().names is not PlainConfig().names


def test_flags_are_checked_alone_and_contradictions_with_the_file() -> None:
    typed = from_shell("--kind", "on", "--no-double")
    assert typed == {"kind": "on", "double": False}
    with pytest.raises(ValueError, match="only with 'double'"):
        make_config(ToyConfig, typed)


def test_defaults_are_read_and_checked_like_values() -> None:
    class ListConfig(Config):
        sizes: tuple[int, ...] = [8, 8]  # type: ignore[assignment]

    class WrongConfig(Config):
        lr: float = Field(default=-1, gt=0)

    class WordConfig(Config):
        lr: float = "fast"  # type: ignore[assignment]

    assert ListConfig().sizes == (8, 8)
    with pytest.raises(ValueError, match=r"^Setting 'lr' must be above 0, not -1\.0\.$"):
        WrongConfig()
    with pytest.raises(ValueError, match=r"^Setting 'lr' must be a number, not 'fast'\.$"):
        WordConfig()


def test_other_constraints_are_sentences_too() -> None:
    class MoreConfig(Config):
        lr: float = Field(default=0.5, lt=1)
        batch: int = Field(default=8, multiple_of=8)
        betas: tuple[float, float] = (0.9, 0.999)
        sizes: tuple[int, ...] = Field(default=(8,), min_length=1)
        title: str = Field(default="a", min_length=1, max_length=3)

        @field_validator("env_id")
        @classmethod
        def check_env(cls, value: str) -> str:
            """Raise for an environment that is too slow."""
            if value == "Slow-v0":
                raise ValueError("Setting 'env_id' is too slow.")
            return value

    cases: list[tuple[Any, str]] = [
        ({"lr": 1}, "Setting 'lr' must be below 1, not 1.0."),
        ({"batch": 12}, "Setting 'batch' must be a multiple of 8, not 12."),
        ({"betas": [0, 1, 2]}, "Setting 'betas' must be a list of at most 2, not (0.0, 1.0, 2.0)."),
        ({"betas": [0]}, "Setting 'betas' must be a list, each entry a number, not [0]."),
        ({"sizes": []}, "Setting 'sizes' must be a list of at least 1, not ()."),
        ({"title": ""}, "Setting 'title' must be a text of at least 1 characters, not ''."),
        ({"title": "long"}, "Setting 'title' must be a text of at most 3 characters, not 'long'."),
        ({"env_id": "Slow-v0"}, "Setting 'env_id' is too slow."),
        ({"lr": 1, "sizs": []}, "More has no setting 'sizs'. Did you mean 'sizes'?"),
        ({1: 2}, "More has no setting 1. `rlbook train ALGO --help` lists them."),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError) as raised:
            make_config(MoreConfig, wrong)
        assert str(raised.value) == message


def test_what_is_assigned_is_checked_before_anything_changes() -> None:
    config = ToyConfig(kind="on")
    config.lr = "3e-4"  # type: ignore[assignment]
    assert config.lr == 3e-4 and config == ToyConfig(kind="on", lr=3e-4)
    for name, value, message in (
        ("lr", -1, "Setting 'lr' must be above 0, not -1.0."),
        ("double", False, "Setting 'kind' can be 'on' only with 'double'."),
        ("gama", 0.9, "Toy has no setting 'gama'. Did you mean 'gamma'?"),
    ):
        with pytest.raises(ValueError) as raised:
            setattr(config, name, value)
        assert str(raised.value) == message and type(raised.value) is ValueError
    assert config == ToyConfig(kind="on", lr=3e-4)


def test_numpy_numbers_are_numbers() -> None:
    settings = {"seed": np.int64(3), "lr": np.float32(0.5), "hidden": list(np.array([8, 8]))}
    config = make_config(ToyConfig, settings)
    assert (config.seed, config.lr, config.hidden) == (3, 0.5, (8, 8))
    assert all(type(size) is int for size in config.hidden)


def test_mappings_are_not_shared_between_configs() -> None:
    mine = {"g": 1}
    first, second = ToyConfig(env_kwargs=mine), ToyConfig()
    first.env_kwargs["h"] = 2
    assert mine == {"g": 1} and second.env_kwargs == {} == ToyConfig().env_kwargs


def test_a_config_can_be_copied_replaced_and_pickled() -> None:
    config = ToyConfig(lr=0.5)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert config.replace(seed=3) == ToyConfig(lr=0.5, seed=3) and config.seed == 0
    with pytest.raises(ValueError, match="at least 0"):
        config.replace(seed=-3)


@given(st.integers(0, 2**63))
def test_whole_numbers_survive_yaml_and_shell(number: int) -> None:
    made = [ToyConfig(seed=number), make_config(ToyConfig, {"seed": str(number)})]
    made.append(make_config(ToyConfig, from_shell("--seed", str(number))))
    assert all(config.seed == number and type(config.seed) is int for config in made)


@given(st.floats(1e-300, 1e300))
def test_numbers_survive_yaml_and_shell(number: float) -> None:
    text = repr(number)
    for settings in (yaml.safe_load(f"lr: {text}"), {"lr": text}, from_shell("--lr", text)):
        assert make_config(ToyConfig, settings).lr == number


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = ToyConfig(hidden=(1, 2), env_kwargs={"size": [3, 4], "é": None}, names=("on",))
    write_settings(path, "toy", config)
    stored = read_settings(path)
    assert stored.pop("algo") == "toy" and make_config(ToyConfig, stored) == config
    assert list(tmp_path.iterdir()) == [path]


def test_what_yaml_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_settings(path, "toy", ToyConfig())
    before = path.read_text()
    for value in (object(), ToyConfig()):  # pydantic could write the second, but not read it back
        with pytest.raises(ValueError, match="env_kwargs' must hold plain numbers"):
            write_settings(path, "toy", ToyConfig(env_kwargs={"f": value}))
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"lr: [1\nseed: 2", "is not valid YAML, line 2: "),
        (b"lr: 1\nseed: 2\nlr: 3", "is not valid YAML, line 3: 'lr' appears twice."),
        (b"env_kwargs: {a: 1, 'a': 2}", "is not valid YAML, line 1: 'a' appears twice."),
        (b"\xff\xfe\x00", "is not valid YAML: it is not text in UTF-8."),
        (b"a: \x00", "is not valid YAML"),
        (b"", "must hold settings as `name: value`, one a line."),
        (b"- 1\n- 2", "must hold settings as `name: value`, one a line."),
        (b"1: 2", "must hold settings as `name: value`, one a line."),
        (b"x: !!python/object/apply:os.system ['echo hi']", "is not valid YAML, line 1: "),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        read_settings(path)
    assert str(raised.value).startswith(str(path)) and message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_directory_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Could not read .*: Is a directory\."):
        read_settings(tmp_path)


def test_configs_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert find_config("cartpole", "dqn") == shipped_configs()["dqn/cartpole"]
    path = tmp_path / "my.yaml"
    path.write_text("seed: 1")
    assert find_config(str(path), None) == path
    with pytest.raises(ValueError, match=r"config 'cartpol'. Did you mean 'cartpole'"):
        find_config("cartpol", "dqn")
    with pytest.raises(ValueError, match=r"no config file .*mi\.yaml.* Did you mean .*my\.yaml"):
        find_config(str(tmp_path / "mi.yaml"), None)
    with pytest.raises(ValueError, match=r"'cartpole.yaml'. Did you mean 'cartpole'"):
        find_config("cartpole.yaml", "dqn")
    with pytest.raises(ValueError, match="Say which algorithm"):
        find_config("cartpole", None)


def test_a_file_can_start_from_another(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("algo: dqn\nconfig: cartpole\nseed: 7\ntotal_steps: 5\n")
    algo, settings = gather_settings(str(path), None)
    assert algo == "dqn" and (settings["seed"], settings["total_steps"]) == (7, 5)
    assert settings["env_id"] == "CartPole-v1" and "config" not in settings
    with pytest.raises(ValueError, match=r"is for 'dqn', not for 'sac': name one algorithm\."):
        gather_settings(str(path), "sac")
    path.write_text(f"algo: sac\nconfig: {shipped_configs()['dqn/cartpole']}\n")
    with pytest.raises(ValueError, match=r"cartpole.yaml is for 'dqn', not for 'sac'"):
        gather_settings(str(path), None)


def test_a_file_starts_from_one_beside_it_which_may_start_from_a_third(tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text("algo: dqn\nconfig: base.yaml\nseed: 7\n")
    (tmp_path / "base.yaml").write_text("algo: dqn\nconfig: cartpole\nseed: 6\nlr: 0.5\n")
    _, settings = gather_settings(str(tmp_path / "top.yaml"), None)
    assert (settings["seed"], settings["lr"], settings["env_id"]) == (7, 0.5, "CartPole-v1")
    (tmp_path / "base.yaml").write_text("algo: dqn\nconfig: top.yaml\n")
    with pytest.raises(ValueError, match=r"top\.yaml starts from itself: its key `config` must"):
        gather_settings(str(tmp_path / "top.yaml"), None)


def test_every_shipped_config_is_valid_for_its_algorithm() -> None:
    import rlbook

    for name, path in shipped_configs().items():
        algo, settings = gather_settings(str(path), None)
        assert algo == name.split("/")[0]
        if algo in rlbook.ALGORITHMS:
            make_config(rlbook.ALGORITHMS[algo].config_class, settings)


def test_words_of_other_libraries_lead_to_settings_that_exist() -> None:
    ours = [a for a in algorithms().values() if a.__module__.startswith("rlbook.")]  # no test's
    known = {name for agent in ours for name in agent.config_class.model_fields}
    assert set(ELSEWHERE.values()) <= known
    assert not set(ELSEWHERE) & known  # those are words of ours
