"""Environments, networks, settings and algorithms of one's own, as a newcomer brings them."""

import copy
import functools
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import FlattenObservation, TimeLimit
from helpers import CHILDREN, assert_same, assert_same_run, in_child, run_rlbook
from pydantic import Field
from torch import nn

import rlbook
from rlbook.agent import find_algorithm
from rlbook.checkpoint import read_checkpoint
from rlbook.cli import main
from rlbook.dqn import DQN, DQNConfig
from rlbook.envs import Mistake, close_vector_env, make_env, name_env
from rlbook.progress import RunFailed
from rlbook.run import Collector, Run, RunDirectory, resume, train
from rlbook.settings import Config, gather_settings, read_settings
from rlbook.sweep import check_plan, grid, make_plan, sweep
from rlbook.tune import tune

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "batch_size": 4,
    "learning_starts": 8,
    "train_frequency": 1,
    "eval_every": 0,
}

MODULE = '''
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import FlattenObservation, TimeLimit
from torch import nn

from rlbook import DQN, DQNConfig


class Corridor(gym.Env):
    """Walk to the right end; the observation is a dictionary."""

    def __init__(self, length=5):
        self.length = length
        numbers = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = gym.spaces.Dict({"place": numbers, "bump": gym.spaces.Discrete(2)})
        self.action_space = gym.spaces.Discrete(2)

    def observe(self, bump):
        place = np.array([2 * self.place / self.length - 1], np.float32)
        return {"place": place, "bump": int(bump)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(self.length))
        return self.observe(False), {}

    def step(self, action):
        before = self.place
        self.place = max(0, self.place + (1 if action else -1))
        done = self.place >= self.length
        return self.observe(before == self.place), float(done) - 0.1, done, False, {}


def make_corridor(length=5):
    return FlattenObservation(TimeLimit(Corridor(length), 30))


class OwnConfig(DQNConfig):
    env_id: str = "own_things:make_corridor"
    lr: float = 2e-3
    advantage_units: int = 8
    note: str = "plain"


class Dueling(nn.Module):
    def __init__(self, inputs, actions, units):
        super().__init__()
        self.value, self.advantage = (
            nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, outputs))
            for outputs in (1, actions)
        )

    def forward(self, obs):
        advantage = self.advantage(obs)
        return self.value(obs) + advantage - advantage.mean(dim=1, keepdim=True)


class DuelingDQN(DQN):
    """DQN with a dueling network."""

    name = "dueling"
    config_class = OwnConfig

    def make_network(self):
        units = self.config.advantage_units
        return Dueling(self.observation_space.shape[0], int(self.action_space.n), units)


class Nameless(DuelingDQN):
    """Without a name of its own."""


class WithTensors(DuelingDQN):
    """Returns its values as a tensor with a gradient."""

    name = "tensors"

    def q_values(self, obs):
        return self.q_network(torch.as_tensor(obs, dtype=torch.float32))

    def act(self, obs, state, episode_start, explore):
        return self.q_values(obs).argmax(dim=1).numpy(), state
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of one's own, which is on the path."""
    (tmp_path / "own_things.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_things", raising=False)
    return tmp_path


class Said(NamedTuple):
    """What a command printed."""

    returncode: int
    stdout: str
    stderr: str


def shell(*words: str, folder: Path) -> Said:
    """Be a user in a folder."""
    code = in_child(run_rlbook, list(words), folder)
    return Said(code, (folder / "out").read_text(), (folder / "err").read_text())


TINY = ["--total-steps", "60", "--learning-starts", "8", "--batch-size", "4", "--eval-every", "0"]


# Algorithms


def test_an_algorithm_of_ones_own_is_found_by_module_and_name(own: Path) -> None:
    assert find_algorithm("own_things:dueling").__name__ == "DuelingDQN"
    assert find_algorithm("own_things:Nameless").__name__ == "Nameless"
    with pytest.raises(ValueError, match=r"no algorithm 'own_things:duelling'.* Did you mean"):
        find_algorithm("own_things:duelling")
    with pytest.raises(ValueError, match=r"needs the module 'own_thing', .* add that folder to"):
        find_algorithm("own_thing:dueling")
    with pytest.raises(ValueError, match="One of your own is named `module:name`"):
        find_algorithm("sarsaparilla")
    (own / "broken_things.py").write_text("1 / 0")
    with pytest.raises(ValueError, match="'broken_things' raises ZeroDivisionError"):
        find_algorithm("broken_things:x")


@pytest.mark.parametrize("name", ["dueling", "Nameless"])
def test_a_run_remembers_it_and_other_processes_resume_and_load(own: Path, name: str) -> None:
    settings = {"total_steps": 80, "checkpoint_every": 30, "log_every": 10, "seed": 1, **SMALL}
    agent_class = find_algorithm(f"own_things:{name}")
    train(agent_class(**settings, run_dir="whole"), progress=False)
    agent = agent_class(**settings, run_dir="parts")
    with RunDirectory.create("parts", agent) as directory:
        run = Run(agent, directory, progress=False)
        while agent.global_step < 44:
            run.step()
        run.save()
        run.close("stopped")
    assert read_checkpoint(run.saved or Path())["algo"] == f"own_things:{name}"
    said = shell("resume", "parts", folder=own)
    assert said.returncode == 0, said.stderr
    assert_same_run(Path("whole"), Path("parts"))
    assert type(rlbook.load("parts")) is agent_class
    found = json.loads(shell("evaluate", "parts", "--episodes", "2", "--json", folder=own).stdout)
    assert len(found["returns"]) == 2


def test_shell_lists_trains_and_sweeps_it(own: Path) -> None:
    listed = shell("list", "own_things", folder=own).stdout
    assert re.search(r"^own_things:dueling +DQN with a dueling network\.$", listed, re.MULTILINE)
    assert "\ndqn " in f"\n{listed}"
    words = ["own_things:dueling", *TINY]
    assert shell("train", *words, "--run-dir", "a", folder=own).returncode == 0
    (own / "my.yaml").write_text("algo: own_things:dueling\nadvantage_units: 4\ntotal_steps: 40\n")
    said = shell("train", "--config", "my.yaml", "--run-dir", "b", "--note", "typed", folder=own)
    assert said.returncode == 0, said.stderr
    config = rlbook.load(own / "b").config
    assert config.advantage_units == 4 and config.note == "typed"  # type: ignore[attr-defined]
    words += ["--eval-every", "30", "--eval-episodes", "1", "--seeds", "2", "--jobs", "1"]
    said = shell("sweep", *words, "--run-dir", "s", folder=own)
    assert said.returncode == 0, said.stderr + said.stdout
    assert len(list((own / "s").rglob("step_*.pt"))) >= 2
    said = shell("train", "own_things:duelin", folder=own)
    assert said.returncode == 2 and said.stderr.count("\n") == 1
    config_class = find_algorithm("own_things:dueling")
    assert config_class.from_config("my.yaml").config.total_steps == 40


# Settings


def test_a_plain_field_is_a_setting_like_any_other(own: Path) -> None:
    agent_class = find_algorithm("own_things:dueling")
    assert agent_class.config_class().lr == 2e-3  # type: ignore[attr-defined]
    assert agent_class(lr="1e-4").config.lr == 1e-4  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'lr' must be a number, not 'fast'"):
        agent_class(lr="fast")
    said = shell("train", "own_things:dueling", "--help", folder=own)
    assert "--advantage-units N" in said.stdout


def test_a_setting_without_a_default_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="Setting 'beta' of Wanting needs a default"):

        class Wanting(Config):
            beta: float


@pytest.mark.parametrize("name", ["beta", "lr"])
@pytest.mark.parametrize("value", [1e-3, None, (8, 8), Field(default=3)])
def test_a_setting_without_a_type_is_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as error:
        type("Bare", (DQNConfig,), {name: value, "__module__": __name__})
    said = f"Setting {name!r} of Bare needs a type, as in `{name}: float = ...`."
    assert str(error.value) == said


# Loading without the simulator


@pytest.mark.parametrize("normalize", [False, True])
def test_a_loaded_agent_predicts_without_the_simulator(own: Path, normalize: bool) -> None:
    settings = {**SMALL, "normalize_observations": normalize}
    agent = DQN("own_things:make_corridor", **settings)
    agent.learn(40, progress=False)
    agent.save("agent.pt")
    expected = agent.predict([0.5, 1.0, 0.0])[0]
    (own / "own_things.py").unlink()
    script = """
    import rlbook
    agent = rlbook.load("agent.pt")
    print(agent.predict([0.5, 1.0, 0.0])[0])
    for use in (agent.evaluate, lambda: agent.learn(10)):
        try:
            use()
        except ValueError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    alone = subprocess.run(command, cwd=own, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    sentence = (
        "Environment 'own_things:make_corridor' needs the module 'own_things', which is not "
        "installed or not on the path: install it, or start from the folder that holds it, or add "
        "that folder to PYTHONPATH."
    )
    assert alone.stdout.splitlines() == [str(expected), sentence, sentence]
    said = shell("predict", "agent.pt", "--observation", "[0.5, 1, 0]", folder=own)
    assert json.loads(said.stdout)["action"] == expected


def test_predict_prints_q_values_that_are_a_tensor_with_a_gradient(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent: Any = find_algorithm("own_things:tensors")(**SMALL)
    agent.save("agent.pt")
    for text, shape in (("[0.5, 1, 0]", (2,)), ("[[0.5, 1, 0]]", (1, 2))):
        assert main(["predict", "agent.pt", "--observation", text]) == 0
        values = np.array(json.loads(capsys.readouterr().out)["q_values"])
        assert values.shape == shape and np.isfinite(values).all()


def test_pixels_load_without_their_environment(tmp_path: Path) -> None:
    agent = rlbook.DrQv2(features=4, **SMALL)
    agent.save(tmp_path / "agent.pt")
    content = read_checkpoint(tmp_path / "agent.pt")
    content["config"]["env_id"] = "gone:Gone-v0"
    rlbook.checkpoint.write_checkpoint(tmp_path / "agent.pt", content)
    obs = agent.observation_space.sample()
    assert np.array_equal(rlbook.load(tmp_path / "agent.pt").predict(obs)[0], agent.predict(obs)[0])


# Environments


def make_short(limit: int = 9) -> gym.Env:
    """CartPole with a time limit of its own."""
    return TimeLimit(CartPoleEnv(), limit)


class Short(CartPoleEnv):
    """CartPole as a class."""


@pytest.mark.parametrize(
    ("given", "env_id"),
    [
        (make_short, f"{__name__}:make_short"),
        (Short, f"{__name__}:Short"),
        (lambda: make_short(5), "local:<lambda>"),
        (functools.partial(make_short, 5), "local:maker"),
        (gym.make("CartPole-v1"), "CartPole-v1"),
        (gym.make("CartPole-v1", sutton_barto_reward=True), "local:CartPoleEnv"),
        (make_short(4), "local:CartPoleEnv"),
    ],
)
def test_environments_as_they_come(given: Any, env_id: str, tmp_path: Path) -> None:
    agent = DQN(given, **SMALL)
    assert agent.config.env_id.startswith(env_id)
    agent.learn(30, progress=False)
    assert agent.updates > 0 and agent.evaluate(episodes=2).mean != 0
    for twin in (copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
        twin.learn(10, progress=False)
    named_again = DQNConfig(env_id=given).env_id  # an instance is copied, so it gets a new name
    assert named_again == agent.config.env_id or isinstance(given, gym.Env)
    agent.save(tmp_path / "agent.pt")
    assert rlbook.load(tmp_path / "agent.pt").config.env_id == agent.config.env_id


def test_an_environment_whose_constants_were_changed_is_copied_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    env.step(0)
    assert name_env(env) == "CartPole-v1"
    env.unwrapped.gravity = 3.7  # type: ignore[attr-defined]
    agent = DQN(env, **SMALL)
    assert make_env(agent.config.env_id).get_wrapper_attr("gravity") == 3.7
    env.unwrapped.gravity = 20.0  # type: ignore[attr-defined]
    other = DQN(env, **SMALL)  # and the first agent keeps its own
    found = [make_env(each.config.env_id).get_wrapper_attr("gravity") for each in (agent, other)]
    assert found == [3.7, 20.0]
    monkeypatch.setattr(CartPoleEnv, "__deepcopy__", Stubborn.__deepcopy__, raising=False)
    with pytest.warns(UserWarning, match="without what was changed in it: give a function"):
        DQN(env, **SMALL)


def test_two_functions_of_one_name_stay_apart() -> None:
    ids = [name_env(lambda limit=limit: make_short(limit)) for limit in (3, 4)]
    assert len(set(ids)) == 2
    assert [make_env(env_id).get_wrapper_attr("_max_episode_steps") for env_id in ids] == [3, 4]


class Stubborn(CartPoleEnv):
    """An environment that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no")


def test_what_is_no_environment_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"cannot be copied.*give a function that makes one"):
        DQN(Stubborn())
    with pytest.raises(ValueError, match="An environment is a Gymnasium id, an instance"):
        DQN(3)
    with pytest.raises(ValueError, match=r"made a int, which is no gymnasium\.Env"):
        DQN(lambda: 3)


def test_resuming_says_what_to_do_when_nobody_can_import_the_environment(tmp_path: Path) -> None:
    script = """
    from test_own import make_short
    from rlbook import DQN
    def make_mine():
        return make_short(6)
    def make_local():
        return lambda: make_short(6)
    for name, env in (("main", make_mine), ("local", make_local())):
        DQN(env, run_dir=name, eval_every=0, learning_starts=50).learn(20, progress=False)
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(script))
    path = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(rlbook.__file__).parents[1]}"}
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, check=True, env=path)
    for name, named in (("main", "make_mine"), ("local", "<lambda>")):
        with pytest.raises(ValueError) as error:
            resume(tmp_path / name, total_steps=40, progress=False)
        assert "move what makes it to a module of its own" in str(error.value)
        assert named in str(error.value) and "\n" not in str(error.value)


class Goal(gym.Env[Any, Any]):
    """Pays the sum of its goal, which an owner may move, and counts its squares from 1."""

    def __init__(self, frame_stack: Any = 4) -> None:
        self.observation_space = gym.spaces.Discrete(3)
        self.action_space = gym.spaces.Discrete(2)
        self.goal, self.frame_stack = np.zeros(2), frame_stack

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return 1, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return int(self.goal.any()) + 2, float(self.goal.sum()), True, False, {}


def test_an_array_that_was_changed_in_an_environment_is_kept() -> None:
    gym.register("test/Goal-v0", f"{__name__}:Goal")
    env = gym.make("test/Goal-v0")
    assert DQN(env, **SMALL).config.env_id == "test/Goal-v0"
    env.unwrapped.goal = np.array([3.0, 4.0])  # type: ignore[attr-defined]
    env_id = DQN(env, **SMALL).config.env_id
    assert env_id != "test/Goal-v0" and make_env(env_id).get_wrapper_attr("goal").sum() == 7
    del gym.registry["test/Goal-v0"]


def test_a_square_that_the_space_does_not_have_stops_the_run() -> None:
    DQN(Goal, **SMALL).learn(5, progress=False)
    env = Goal()
    env.goal = np.ones(2)
    with pytest.raises(Mistake, match=r"observation 3, but its space is Discrete\(3\)\."):
        DQN(env, **SMALL).learn(5, progress=False)


@pytest.mark.parametrize("meant", [4, deque(maxlen=4), None])
def test_an_attribute_of_the_name_of_ours_means_nothing(meant: Any) -> None:
    assert DQN(lambda: Goal(meant), **SMALL).interface.frame_stack == 1


def test_frozen_lake_is_learned_from_one_hot_squares() -> None:
    settings = {**SMALL, "hidden": (), "lr": 0.05, "epsilon_decay_steps": 1_000, "gamma": 0.9}
    agent = DQN("FrozenLake-v1", env_kwargs={"is_slippery": False}, num_envs=4, **settings)
    assert agent.observation_space.shape == (16,)
    agent.learn(4_000, progress=False)
    assert agent.evaluate(episodes=1).mean == 1
    assert agent.predict(14)[0] == 2  # beside the goal: to the right
    assert agent.predict([14, 14])[0].tolist() == [2, 2]
    with pytest.raises(ValueError, match="whole numbers"):
        agent.predict(1.5)


class Channels(gym.Env[np.ndarray, np.ndarray]):
    """Pictures of (height, width, channels)."""

    observation_space = gym.spaces.Box(0, 255, (24, 20, 3), np.uint8)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps = 0
        return np.full((24, 20, 3), (1, 2, 3), np.uint8), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full((24, 20, 3), (1, 2, 3), np.uint8), 1.0, False, self.steps > 5, {}


def test_pictures_with_channels_last_are_learned_from() -> None:
    agent = rlbook.DrQv2(Channels, features=4, **SMALL)
    agent.learn(20, progress=False)
    batch = agent.sample().obs
    assert batch.shape[1:] == (3, 24, 20) and agent.updates > 0
    assert batch[0, :, 0, 0].tolist() == [1, 2, 3]
    obs, _ = Channels().reset()
    assert agent.predict(obs)[0].shape == (1,) and agent.evaluate(1).mean == 6


SPACES = {
    "Dict": gym.spaces.Dict({"a": gym.spaces.Discrete(2)}),
    "Tuple": gym.spaces.Tuple([gym.spaces.Discrete(2)]),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "MultiBinary": gym.spaces.MultiBinary(3),
    "Box": gym.spaces.Box(0, 1, (4, 4)),
}


class Strange(CartPoleEnv):
    """CartPole that claims other spaces."""

    def __init__(self, kind: str, actions: bool) -> None:
        super().__init__()
        setattr(self, "action_space" if actions else "observation_space", SPACES[kind])


@pytest.mark.parametrize("kind", list(SPACES))
def test_other_spaces_name_the_wrapper_for_them(kind: str) -> None:
    with pytest.raises(ValueError) as error:
        DQN(Strange, env_kwargs={"kind": kind, "actions": False})
    message = str(error.value)
    assert f" has {kind} observations (" in message and "\n" not in message
    assert message.endswith("FlattenObservation, which makes one vector of them.")
    with pytest.raises(ValueError, match=rf"and {kind} actions .*wrappers\.TransformAction"):
        DQN(Strange, env_kwargs={"kind": kind, "actions": True})


def test_flattened_dictionaries_are_learned_from(own: Path) -> None:
    import own_things  # type: ignore[import-not-found]

    agent = DQN(lambda: FlattenObservation(own_things.Corridor()), **SMALL)
    agent.learn(40, progress=False)
    assert agent.observation_space.shape == (3,) and agent.updates > 0


def test_a_dictionary_to_predict_from_names_how_to_flatten_it(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, env = DQN("own_things:make_corridor", **SMALL), make_env("own_things:make_corridor")
    observation: Any = {"place": np.array([0.5], np.float32), "bump": 0}
    with pytest.raises(ValueError, match=r"not a dictionary: make one with gymnasium\.spaces\."):
        agent.predict(observation)
    agent.predict(gym.spaces.utils.flatten(env.unwrapped.observation_space, observation))
    agent.save("agent.pt")
    words = ["predict", "agent.pt", "--observation", '{"place": [0.5], "bump": 0}']
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "flatten(env.unwrapped.observation_space, observation)" in said
    assert said.count("\n") == 1


class Wrong(CartPoleEnv):
    """CartPole whose step returns something of the wrong shape."""

    def __init__(self, what: str, after: int = 3) -> None:
        super().__init__()
        self.what, self.after = what, after

    def reset(self, **keywords: Any) -> Any:
        self.count = 0
        obs, info = super().reset(**keywords)
        return (obs[:3] if self.what == "reset" else obs), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self.count += 1
        if self.count == self.after:
            obs = obs[:1] if self.what == "observation" else obs
            reward = {"reward": np.ones(2), "text": "one", "none": None}.get(self.what, reward)
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("observation", r"returned an observation of the shape \(1,\), but its space says \(4,\)"),
        ("reset", r"returned an observation of the shape \(3,\), but its space says \(4,\)"),
        ("reward", r"returned the reward array\(\[1\., 1\.\]\), which is not one number"),
        ("text", "returned the reward 'one', which is not one number"),
        ("none", "returned the reward None, which is not one number"),
    ],
)
def test_a_wrong_shape_gets_a_sentence(what: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DQN(Wrong, env_kwargs={"what": what}, **SMALL).learn(20, progress=False)


@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_a_wrong_value_amid_a_run_is_a_sentence_with_the_last_sound_state(
    vectorize: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--env-id", f"{__name__}:Wrong", "--env-kwargs", "{what: text}", *TINY]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's, of what a process raised
        assert main(["train", "dqn", *words, "--vectorize", vectorize, "--run-dir", str(run)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "The environment returned the reward 'one', which is not one number. The run stopped at "
        f"step 2. Go on from {run}/checkpoints/step_000000000002.pt with `rlbook resume {run}`."
    )
    assert rlbook.load(run).global_step == 2


def test_main_is_a_sentence_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dqn", "--env-id", f"{__name__}:make_nothing"]) == 2
    assert "There is no environment" in capsys.readouterr().err


def test_a_reward_of_one_entry_is_a_number() -> None:
    class OneEntry(CartPoleEnv):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, np.array([reward]), *rest

    agent = DQN(OneEntry, **SMALL)
    agent.learn(20, progress=False)
    assert torch.equal(agent.sample().reward, torch.ones(4))


# Environments in processes


class Slow(CartPoleEnv):
    """CartPole whose step sleeps five milliseconds, and which says where it lives."""

    def __init__(self, note: str | None = None) -> None:
        super().__init__()
        self.note = note

    def reset(self, **options: Any) -> Any:
        if self.note is not None:
            with open(self.note, "a") as file:
                file.write(f"{os.getpid()}\n")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def steps_per_second(num_envs: int, vectorize: str) -> float:
    """Measure how fast an agent collects, its own work included; others may use the machine."""
    agent = DQN(Slow, num_envs=num_envs, vectorize=vectorize, **{**SMALL, "learning_starts": 9_999})
    collector, moments = Collector(agent), [time.perf_counter()]
    for _ in range(200):
        collector.step()
        moments.append(time.perf_counter())
    close_vector_env(collector.envs)
    return num_envs / float(np.quantile(np.diff(moments), 0.1))


def test_four_slow_environments_are_three_times_as_fast_as_one() -> None:
    for _ in range(4):  # a busy machine may spoil a measurement
        one, four = steps_per_second(1, "sync"), steps_per_second(4, "async")
        if four >= 3 * one:
            return
    raise AssertionError(f"{one:.0f} and {four:.0f} steps per second")


@pytest.mark.parametrize("env_id", ["CartPole-v1", lambda: make_short(7)])
def test_a_run_in_processes_is_the_run_of_one_process_and_resumes_exactly(
    env_id: Any, tmp_path: Path
) -> None:
    settings = {**SMALL, "env_id": name_env(env_id) if callable(env_id) else env_id}
    settings |= {"num_envs": 3, "total_steps": 90, "checkpoint_every": 36, "log_every": 9}
    folders = {kind: tmp_path / kind for kind in ("sync", "async", "parts")}
    for kind in ("sync", "async"):
        train(DQN(**settings, vectorize=kind, run_dir=str(folders[kind])), progress=False)
    agent = DQN(**settings, vectorize="async", run_dir=str(folders["parts"]))
    with RunDirectory.create(str(folders["parts"]), agent) as directory:
        run = Run(agent, directory, progress=False)
        while agent.global_step < 51:
            run.step()
        run.save()
        run.close("stopped")
    resume(folders["parts"], progress=False)
    assert_same_run(folders["async"], folders["parts"])
    one, two = (rlbook.load(folders[kind]).state_dict() for kind in ("sync", "async"))
    assert_same(one, two)
    assert not multiprocessing.active_children()


def alive(pid: int) -> bool:
    """Say whether a process runs, and is not only waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks up processes in /proc")
def test_a_killed_environment_ends_the_run_with_a_sentence_and_its_last_state(
    tmp_path: Path,
) -> None:
    note = tmp_path / "pids"
    settings = {**SMALL, "env_id": name_env(Slow), "env_kwargs": {"note": str(note)}}
    settings |= {"num_envs": 3, "vectorize": "async", "checkpoint_every": 100_000}
    agent = DQN(**settings, run_dir=str(tmp_path / "run"), total_steps=90)
    update: Any = agent.update
    killed: list[int] = []

    def kill_one(batch: Any) -> Any:
        if agent.global_step == 60 and not killed:
            killed.append(sorted({int(pid) for pid in note.read_text().split()} - {os.getpid()})[1])
            os.kill(killed[0], signal.SIGKILL)
        return update(batch)

    agent.update = kill_one  # type: ignore[method-assign]
    with pytest.raises(RunFailed) as error:
        train(agent, progress=False)
    assert str(error.value).startswith("The process of an environment has ended, killed or out of ")
    assert f"with `rlbook resume {tmp_path / 'run'}`" in str(error.value)
    assert "\n" not in str(error.value)
    assert not any(alive(int(pid)) for pid in set(note.read_text().split()) - {str(os.getpid())})
    assert rlbook.load(tmp_path / "run").global_step == 60
    resume(tmp_path / "run", progress=False)
    whole = DQN(**{**settings, "env_kwargs": {}}, total_steps=90)
    whole.learn(90, progress=False)
    weights = [a.q_network.state_dict() for a in (whole, rlbook.load(tmp_path / "run"))]  # type: ignore[attr-defined]
    assert_same(dict(weights[0]), dict(weights[1]))


def train_for_ever(note: str) -> None:
    """Train in processes until somebody comes."""
    DQN(Slow, env_kwargs={"note": note}, num_envs=2, vectorize="async", **SMALL).learn(10**6)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks up processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_environment_outlives_its_run(number: int, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    process = CHILDREN.Process(target=train_for_ever, args=(str(note),))
    process.start()
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not note.exists() or note.read_text().count("\n") < 4):
        time.sleep(0.05)
    pids = {int(pid) for pid in note.read_text().split()} - {process.pid}
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    os.kill(process.pid, number)
    process.join(60)
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


# What an algorithm of one's own saves


class Keeper:
    """A class of one's own that holds a network and saves it."""

    def __init__(self) -> None:
        self.network = nn.Linear(4, 2)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.network.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state)


def made(parts: Any, **attributes: Any) -> rlbook.agent.Agent:
    """Make an agent with these parts and attributes."""

    class Own(DQN):
        def build(self) -> None:
            vars(self).update(attributes)

    Own.parts = parts
    return Own()


def test_what_no_part_saves_is_a_sentence_when_an_agent_is_made() -> None:
    network = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(network.parameters())
    both = {"network": network, "optimizer": optimizer}
    for name, parts in (("network", ()), ("optimizer", ("network",)), ("network", ("optimizer",))):
        with pytest.raises(ValueError, match=rf"self\.{name} of Own is in no part.*: add it"):
            made(parts, **both)
    with pytest.raises(ValueError, match=r"self\.nets of Own .* into an nn\.Module"):
        made((), nets=[network])
    with pytest.raises(ValueError, match=r"self\.alpha of Own .* into an nn\.Module"):
        made((), alpha=nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"self\.alpha of Own .* into an nn\.Module"):
        made((), alpha=torch.zeros(1, requires_grad=True))
    with pytest.raises(ValueError, match=r"self\.norm of Own is in no part.*: add it"):
        made((), norm=nn.BatchNorm1d(4, affine=False))  # which has buffers alone
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # which does not save its optimiser
    with pytest.raises(ValueError, match=r"self\.optimizer of Own is in no part"):
        made(("network", "scheduler"), scheduler=scheduler, **both)


def test_what_a_part_holds_is_saved_with_it() -> None:
    keeper, whole = Keeper(), nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    made(("keeper",), keeper=keeper, network=keeper.network)
    made(("whole",), whole=whole, body=whole[0], loss=nn.MSELoss(), layers=[*whole])


def test_a_part_that_cannot_be_saved_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"the part 'net', but `build` makes no self\.net"):
        made(("net",))
    for value, kind in ((3, "int"), (np.zeros(2), "ndarray"), ({}, "dict")):
        with pytest.raises(ValueError, match=f"The part 'x' of Own is a {kind}, which has no"):
            made(("x",), x=value)
    with pytest.raises(ValueError, match=r"must be a tuple: write \('q_network',\)"):
        made("q_network")


# What an algorithm of one's own takes over


def test_it_takes_the_configs_of_the_algorithm_that_it_extends(own: Path) -> None:
    (own / "named_things.py").write_text(
        "from rlbook import DQN\n\nclass Named(DQN):\n    name = 'named'\n\n"
        "class Below(Named):\n    name = 'below'\n"
    )
    stored = DQN.from_config("cartpole").config.model_dump()
    for name in ("named", "below"):
        agent_class = find_algorithm(f"named_things:{name}")
        assert agent_class.from_config("cartpole").config.model_dump() == stored
    words = ["train", "named_things:below", "--config"]
    said = shell(*words, "cartpole", *TINY, "--run-dir", "a", folder=own)
    assert said.returncode == 0, said.stderr
    assert rlbook.load(own / "a").config.train_frequency == stored["train_frequency"]  # type: ignore[attr-defined]
    said = shell(*words, "cartpol", folder=own)
    assert said.returncode == 2 and "Did you mean 'cartpole'?" in said.stderr
    (own / "mine.yaml").write_text("algo: named_things:below\nconfig: cartpole\nseed: 7\n")
    algo, settings = gather_settings("mine.yaml", None)
    assert algo == "named_things:below" and settings["num_envs"] == stored["num_envs"]
    assert agent_class.from_config("mine.yaml").config.model_dump() == {**stored, "seed": 7}
    (own / "mine.yaml").write_text("algo: dqn")
    with pytest.raises(ValueError, match=r"mine.yaml is for 'dqn', not for 'named_things:below'"):
        find_algorithm("named_things:below").from_config("mine.yaml")


# Sweeps


SHORT: dict[str, Any] = {**SMALL, "total_steps": 40, "eval_every": 20, "eval_episodes": 1}
HUSHED: dict[str, Any] = {"say": lambda line: None, "jobs": 1}


def test_python_sweeps_and_tunes_classes_and_functions(own: Path) -> None:
    import own_things

    settings = {**SHORT, "env_id": own_things.make_corridor}
    found = sweep(own_things.DuelingDQN, settings, seeds=1, directory="s", **HUSHED)
    assert found["algo"] == "own_things:dueling" and found["env_id"] == "own_things:make_corridor"
    space = {"lr": [1e-3]}
    tune(own_things.DuelingDQN, settings, space=space, trials=1, directory="t", **HUSHED)
    best = read_settings(Path("t/best.yaml"))
    assert (best["algo"], best["env_id"]) == ("own_things:dueling", "own_things:make_corridor")


def test_a_sweep_varies_algorithms_of_ones_own(own: Path) -> None:
    variants = grid(["algo=own_things:dueling,own_things:tensors"])
    plan = make_plan("own_things:dueling", SHORT, variants, [0], Path("s"))
    check_plan(plan)
    assert [item.algo for item in plan] == ["own_things:dueling", "own_things:tensors"]
    assert len({item.run_dir for item in plan}) == 2


@pytest.mark.parametrize("search", [sweep, tune])
def test_what_other_processes_cannot_import_is_a_sentence(search: Any) -> None:
    with pytest.raises(ValueError, match=r"Setting 'env_id' is '<lambda>.*', which .* in a module"):
        search("dqn", {**SHORT, "env_id": lambda: make_short(5)})
    with pytest.raises(ValueError, match=r"Setting 'env_id' is 'made', which other processes"):
        search("dqn", {**SHORT, "env_id": "__main__:made"})

    class Local(DQN):
        """Inside a function."""

    with pytest.raises(ValueError, match=r"Local is defined in .*: move it to a module"):
        search(Local, SHORT)


# The first mistakes in an environment and in an algorithm


class Old(CartPoleEnv):
    """CartPole as environments were before Gymnasium, or with another mistake."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "spaces":
            del self.action_space

    def reset(self, **keywords: Any) -> Any:
        if self.what == "seed" and "seed" in keywords:
            raise TypeError("Old.reset() got an unexpected keyword argument 'seed'")
        obs, info = super().reset(**keywords)
        return obs if self.what == "reset" else (obs, info)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.what == "step":
            return obs, reward, terminated, info
        return obs, ("one" if self.what == "reward" else reward), terminated, truncated, info


def make_old(what: str) -> gym.Env:
    """Wrap it."""
    return TimeLimit(Old(what), 50)


@pytest.mark.parametrize("maker", ["Old", "make_old"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("spaces", "has no action_space: set self.action_space in its __init__."),
        ("seed", "`reset` takes no seed: write `def reset(self, *, seed=None, options=None)`."),
        ("reset", "something else than `obs, info`, which Gymnasium asks for."),
        ("step", "something else than `obs, reward, terminated, truncated, info`, which"),
        ("reward", "returned the reward 'one', which is not one number."),
    ],
)
def test_a_wrong_environment_is_a_sentence_before_anything_is_written(
    maker: str, what: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--env-id", f"{__name__}:{maker}", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "dqn", *place, "--env-kwargs", f"{{what: {what}}}"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("maker", [Old, make_old])
def test_a_reset_without_seed_is_a_sentence_without_a_run_directory_too(maker: Any) -> None:
    agent = DQN(maker, env_kwargs={"what": "seed"}, **SMALL)
    for use in (lambda: agent.learn(10, progress=False), agent.evaluate):
        with pytest.raises(ValueError, match=r"`reset` takes no seed: write `def reset\(self, \*"):
            use()


class OneEntry(CartPoleEnv):
    """CartPole whose reward is an array of one entry."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


def test_a_reward_of_one_entry_is_evaluated_too() -> None:
    agent = DQN(OneEntry, **SMALL)
    assert agent.evaluate(episodes=2).mean > 1


class Acting(DQN):
    """DQN whose actions a test decides."""

    answer: Any = None

    def act(self, obs: Any, state: Any, episode_start: Any, explore: bool) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros(1, int), "must return a pair: actions, and the state"),
        ((np.zeros(2, int), None), "one action for each of 1 observations"),
        ((np.full(1, 2), None), r"actions of Discrete\(2\), not \[2\]"),
        ((np.full(1, 0.5), None), r"actions of Discrete\(2\), not \[0.5\]"),
    ],
)
def test_a_wrong_action_is_a_sentence_at_the_first_step(answer: Any, message: str) -> None:
    agent = Acting(**SMALL)
    agent.answer = answer
    with pytest.raises(ValueError, match=f"`act` of Acting .*{message}.* can `learn` on"):
        agent.learn(10, progress=False)


def test_an_algorithm_without_settings_or_batches_is_a_sentence() -> None:
    class Bare(rlbook.agent.Agent):
        build = act = observe = update = lambda self, *given: None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="Bare needs a name, such as `name = 'bare'`"):
        Bare()
    Bare.name = "bare"
    with pytest.raises(ValueError, match="Bare needs a `config_class`: a subclass of"):
        Bare()
    for config_class in (Config, DQNConfig):
        Bare.config_class = config_class
        with pytest.raises(ValueError, match="Bare needs a method `batches`, which yields"):
            Bare()


def test_an_incomplete_algorithm_is_the_same_sentence_in_the_shell(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "bare_things.py").write_text(
        "from rlbook.agent import Agent\n\n"
        "class Empty(Agent):\n    name = 'empty'\n\n"
        "class Bare(Agent):\n    name = 'bare'\n"
        "    build = act = observe = update = lambda self, *given: None\n"
    )
    for name, said in (
        ("empty", "Empty does not define act, build, observe, update, as each algorithm must."),
        ("bare", "Bare needs a `config_class`: a subclass of rlbook.settings.Config."),
    ):
        for words in (["train"], ["sweep", "--seeds", "1"]):
            assert main([words[0], f"bare_things:{name}", *words[1:]]) == 2
            assert capsys.readouterr().err == f"{said}\n"


def test_callbacks_of_the_wrong_kind_are_a_sentence() -> None:
    agent = DQN(**SMALL)
    with pytest.raises(ValueError, match=r"an instance, not a class: write KeepBest\(\.\.\.\)"):
        agent.learn(5, callbacks=[rlbook.callbacks.KeepBest])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"`callbacks` must be a list"):
        agent.learn(5, callbacks=rlbook.callbacks.KeepBest())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"3 is no callback: extend"):
        agent.learn(5, callbacks=[3])  # type: ignore[list-item]
