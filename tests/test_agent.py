"""What the chapter of the agent cannot test about itself: spaces, files, registry, randomness."""

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import TINY, assert_same

import rlbook
from rlbook.agent import (
    REGISTRY,
    Agent,
    as_batch,
    chapter_modules,
    find_algorithm,
    fits,
    torch_for_learning,
)
from rlbook.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from rlbook.dqn import DQN, DQNConfig
from rlbook.run import resume, train
from rlbook.settings import Config, gather_settings

SMALL: dict[str, Any] = {
    "hidden": (16,),
    "batch_size": 16,
    "learning_starts": 50,
    "train_frequency": 2,
    "n_step": 3,
    "num_envs": 2,
    "eval_every": 0,
    "seed": 4,
}


def small_agent(**settings: Any) -> DQN:
    return DQN("CartPole-v1", **{**SMALL, **settings})


@pytest.fixture
def trained() -> DQN:
    agent = small_agent()
    agent.learn(200, progress=False)
    return agent


# Spaces and devices


@pytest.mark.parametrize(
    ("env_id", "kinds"),
    [
        ("Pendulum-v1", ("vector", "continuous")),
        ("test/Picture-v0", ("image", "discrete")),
    ],
)
def test_spaces_that_do_not_fit_name_what_does(env_id: str, kinds: tuple[str, str]) -> None:
    with pytest.raises(ValueError) as error:
        DQN(env_id)
    message = str(error.value)
    assert message.startswith(f"'{env_id}' has {kinds[0]} observations (")
    assert f") and {kinds[1]} actions (" in message
    assert "\n" not in message
    assert "but dqn needs vector observations and discrete actions: " in message
    fitting = [n for n, c in rlbook.ALGORITHMS.items() if fits(c, kinds)]
    hint = f"try {' or '.join(fitting)}" if fitting else "no algorithm of this book fits it yet"
    assert message.endswith(f": {hint}.")


def test_an_algorithm_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Steady(DQN):
        actions: ClassVar[str] = "continuous"

    monkeypatch.setitem(REGISTRY, "steady", Steady)
    with pytest.raises(ValueError, match=r": try .*steady\.$"):
        DQN("Pendulum-v1")


class Empty(gym.Env[Any, Any]):
    """Nothing but spaces."""

    def __init__(self, observation_space: gym.Space) -> None:
        self.observation_space, self.action_space = observation_space, gym.spaces.Discrete(2)


@pytest.fixture(autouse=True, scope="module")
def own_environments() -> Iterator[None]:
    spaces = {
        "test/Picture-v0": gym.spaces.Box(0, 255, (84, 84, 3), np.uint8),
    }
    for env_id, space in spaces.items():
        gym.register(env_id, f"{__name__}:Empty", kwargs={"observation_space": space})
    yield
    for env_id in spaces:
        del gym.registry[env_id]


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_gets_a_sentence(device: str) -> None:
    with pytest.raises(ValueError, match=rf"^There is no device '{device}' here: use 'cpu'\.$"):
        small_agent(device=device)


def test_settings_beside_a_whole_config_are_a_mistake() -> None:
    config = DQNConfig(hidden=(8,))
    assert DQN(config=config).config is config
    for given in ({"env_id": "Acrobot-v1"}, {"seed": 3}, {"sead": 3}):
        with pytest.raises(ValueError, match=rf"not both: .* takes '{next(iter(given))}'\.$"):
            DQN(config=config, **given)
    with pytest.raises(ValueError, match=r"^`config` must be a DQNConfig, not a Config\.$"):
        DQN(config=Config())


def test_an_unknown_environment_or_setting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'CartPole-v1'"):
        DQN("CartPol-v1")
    for before, now in (("warmup_steps", "learning_starts"), ("epsilon_floor", "final_epsilon")):
        old: dict[str, Any] = {before: 1}
        with pytest.raises(ValueError, match=f"'{before}'. Did you mean '{now}'"):
            DQN("CartPole-v1", **old)
    with pytest.raises(ValueError, match=r"DQN has no setting 'gama'\. Did you mean 'gamma'"):
        DQN("CartPole-v1", gama=0.9)


# Predicting


def test_predict_takes_one_observation_or_a_batch(trained: DQN) -> None:
    batch = np.random.default_rng(0).normal(size=(50, 4))
    actions, state = trained.predict(batch)
    assert state is None and actions.shape == (50,) and set(actions.tolist()) == {0, 1}
    singles = [trained.predict(obs)[0] for obs in batch]
    assert actions.tolist() == [int(action) for action in singles]
    assert np.ndim(singles[0]) == 0 and trained.action_space.contains(singles[0])
    assert trained.predict(batch[0].tolist())[0] == singles[0]  # a list will do
    assert trained.predict(batch[:1])[0].shape == (1,)  # a batch of one stays a batch


def test_predict_is_greedy_unless_asked(trained: DQN) -> None:
    obs = np.tile([0.1, 0.0, 0.05, 0.0], (400, 1))
    assert len(set(trained.predict(obs)[0].tolist())) == 1
    before = trained.generator.bit_generator.state
    trained.predict(obs)
    assert trained.generator.bit_generator.state == before
    trained.global_step = 0  # epsilon is 1
    assert len(set(trained.predict(obs, deterministic=False)[0].tolist())) == 2


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        ([0.0, 0.0], r"must have the shape \(4,\), not \(2,\)"),
        (0.0, r"must have the shape \(4,\), not \(\)"),
        (np.zeros((2, 3, 4)), r"must have the shape \(4,\), not \(2, 3, 4\)"),
        ([[0.0] * 4, [0.0] * 3], r"must be numbers of the shape \(4,\)"),
        ("left", r"must be numbers of the shape \(4,\)"),
        (None, r"must "),
        ([0.0, 0.0, 0.0, np.nan], "must be finite"),
        ([0.0, 0.0, 0.0, 1e300], "must be finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_bad_observation_gets_a_sentence(obs: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^An observation {said}"):
        small_agent().predict(obs)


def test_an_observation_that_is_no_state_of_the_environment_gets_a_sentence() -> None:
    agent = DQN("FrozenLake-v1", hidden=(8,))
    assert agent.predict([0, 15])[0].shape == (2,)
    for obs in (99, -1, [0, 16]):
        with pytest.raises(ValueError, match=r"^An observation must be from 0 to 15\.$"):
            agent.predict(obs)


class Counting(DQN):
    """Plays its hidden state: the number of steps since the episode began, in turns."""

    def act(self, obs: Any, state: Any, episode_start: Any, explore: bool) -> Any:
        state = np.zeros(len(obs), np.int64) if state is None else state
        state = np.where(episode_start, 0, state + 1)
        return state % 2, state


def test_predict_passes_the_hidden_state_on_and_says_where_episodes_start() -> None:
    agent, obs = Counting("CartPole-v1"), np.zeros((3, 4))
    actions, state = agent.predict(obs)  # without a state all begin
    assert state.tolist() == [0, 0, 0]
    actions, state = agent.predict(obs, state)  # with one none does
    assert state.tolist() == actions.tolist() == [1, 1, 1]
    _, state = agent.predict(obs, state, episode_start=np.array([False, True, False]))
    assert state.tolist() == [2, 0, 2]
    _, state = agent.predict(obs, state=state, episode_start=[1, 0, 0], deterministic=True)
    assert state.tolist() == [0, 1, 3]
    assert agent.predict(obs[0], episode_start=True)[0].shape == ()
    with pytest.raises(ValueError, match=r"^episode_start needs one entry for each of 3 obs"):
        agent.predict(obs, state, episode_start=[True])


# Learning


def test_learning_again_goes_on(trained: DQN) -> None:
    updates, before = trained.updates, copy.deepcopy(trained.q_network.state_dict())
    result = trained.learn(100, progress=False)
    assert trained.global_step == result.metrics["global_step"] == 300
    assert trained.updates == updates + 50
    after = trained.q_network.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("steps", [0, -5])
def test_learning_nothing_is_a_mistake(steps: int) -> None:
    with pytest.raises(ValueError, match=f"^learn needs at least one step, not {steps}"):
        small_agent().learn(steps)


def test_evaluating_changes_nothing_and_can_be_repeated(trained: DQN, tmp_path: Path) -> None:
    trained.save(tmp_path / "before.pt")
    first, again = trained.evaluate(5, seed=1), trained.evaluate(5, seed=1)
    np.testing.assert_array_equal(first.returns, again.returns)
    assert (first.returns != trained.evaluate(5, seed=2).returns).any()
    stored = read_checkpoint(tmp_path / "before.pt")["agent"]
    assert_same(stored, trained.state_dict())
    with pytest.raises(ValueError, match="at least one episode"):
        trained.evaluate(0)


def global_generators() -> list[Any]:
    """Return the states of the generators that belong to nobody."""
    return [pickle.dumps(np.random.get_state()), torch.get_rng_state(), random.getstate()]


def test_global_generators_are_left_alone_and_do_not_matter() -> None:
    states = []
    for seed in (1, 2):
        np.random.seed(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        before = global_generators()
        agent = small_agent()
        agent.learn(200, progress=False)
        agent.evaluate(2)
        after = global_generators()
        assert_same(before, after)
        states.append(agent.state_dict())
    assert_same(states[0], states[1])


def test_making_networks_reseeds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    small_agent()
    assert not seeds


def test_the_seed_alone_decides() -> None:
    agents = [small_agent(seed=seed) for seed in (0, 0, 1)]
    for agent in agents:
        agent.learn(200, progress=False)
    assert_same(agents[0].state_dict(), agents[1].state_dict())
    one, two = (agent.q_network.state_dict() for agent in (agents[0], agents[2]))
    assert all(not torch.equal(one[name], two[name]) for name in one)


def test_torch_is_as_before_after_learning() -> None:
    before = torch.get_num_threads(), bool(torch.tensor(1e-38) / 10 == 0)
    with pytest.raises(KeyError), torch_for_learning(before[0] + 1):
        assert torch.get_num_threads() == before[0] + 1
        assert torch.tensor(1e-38) / 10 == 0
        raise KeyError
    assert before == (torch.get_num_threads(), bool(torch.tensor(1e-38) / 10 == 0))


# Saving and loading


def test_a_saved_agent_goes_on_exactly(trained: DQN, tmp_path: Path) -> None:
    trained.save(tmp_path / "agent.pt")
    loaded = DQN.load(tmp_path / "agent.pt")
    assert_same(trained.state_dict(), loaded.state_dict())
    assert vars(trained.config) == vars(loaded.config)
    for agent in (trained, loaded):
        agent.learn(150, progress=False)
    assert_same(trained.state_dict(), loaded.state_dict())


def test_load_finds_the_algorithm_of_a_file_and_of_a_directory(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    result = train(small_agent(run_dir=run_dir, total_steps=200), progress=False)
    result.agent.save(str(tmp_path / "agent.pt"))
    for path in (tmp_path / "agent.pt", tmp_path / "run", run_dir, result.checkpoint):
        assert path is not None
        agent = rlbook.load(path)
        assert isinstance(agent, DQN) and agent.global_step == 200
        assert agent.config.run_dir is None  # a loaded agent never writes into a finished run
        assert_same(agent.state_dict(), result.agent.state_dict())


def test_without_a_compiler_a_compiled_agent_is_loaded_to_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = small_agent(compile=True)
    agent.save(tmp_path / "agent.pt")
    monkeypatch.setenv("CXX", "no-such-compiler")
    loaded = rlbook.load(tmp_path / "agent.pt")
    assert loaded.predict(np.zeros(4))[0] == agent.predict(np.zeros(4))[0]
    with pytest.raises(ValueError, match=r"^Setting 'compile' needs a C\+\+ compiler"):
        small_agent(compile=True)


def test_what_cannot_be_loaded_is_said(trained: DQN, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*none\.pt"):
        rlbook.load(tmp_path / "none.pt")
    with pytest.raises(ValueError, match=r"is not a run directory: it has no config\.yaml"):
        rlbook.load(tmp_path)
    (tmp_path / "config.yaml").write_text("algo: dqn\n")
    with pytest.raises(ValueError, match="has no checkpoint yet: go on with `rlbook resume"):
        rlbook.load(tmp_path)
    content = trained.checkpoint()
    for changed, said in (
        ({**content, "algo": "dqm"}, "There is no algorithm 'dqm'. Did you mean 'dqn'"),
        ({"agent": {}}, "is not an rlbook checkpoint"),
        ({**content, "config": {**content["config"], "hidden": (8,)}}, "does not fit this dqn"),
        ({**content, "config": {**content["config"], "gama": 1}}, "no setting 'gama'"),
        ({**content, "agent": {"global_step": 0}}, "does not fit this dqn"),
    ):
        write_checkpoint(tmp_path / "changed.pt", changed)
        with pytest.raises(ValueError, match=said):
            rlbook.load(tmp_path / "changed.pt")


def test_a_file_without_the_buffer_is_small_and_predicts(tmp_path: Path) -> None:
    agents = [small_agent(checkpoint_replay=keep, buffer_size=50_000) for keep in (True, False)]
    for agent, name in zip(agents, ("full.pt", "light.pt"), strict=True):
        agent.learn(800, progress=False)
        agent.save(tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("full.pt", "light.pt")]
    assert sizes[1] < sizes[0] / 3
    light, obs = DQN.load(tmp_path / "light.pt"), np.full((3, 4), 0.01)
    np.testing.assert_array_equal(light.q_values(obs), agents[0].q_values(obs))
    assert len(light.replay) == 0
    light.learn(100, progress=False)
    assert light.updates > agents[0].updates


def test_learning_twice_in_a_directory_is_one_run(tmp_path: Path) -> None:
    agent = small_agent(run_dir=str(tmp_path / "run"), log_every=50)
    agent.learn(100, progress=False)
    agent.learn(100, progress=False)
    assert rlbook.load(tmp_path / "run").global_step == 200
    again = resume(tmp_path / "run", 300, progress=False)
    assert [line["global_step"] for line in again.history] == [50, 100, 150, 200, 250, 300]


# Settings from a file


def test_an_agent_is_made_from_a_shipped_config_and_keywords() -> None:
    agent = DQN.from_config("cartpole", seed=1)
    _, shipped = gather_settings("cartpole", "dqn")
    assert agent.config.seed == 1 and "n_step" in shipped
    assert agent.config == DQNConfig(**{**shipped, "seed": 1})


def test_an_agent_is_made_from_a_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("algo: dqn\nconfig: cartpole\nlr: 5e-4\nhidden: [8]\n")
    shipped = DQN.from_config("cartpole").config
    for name in (path, str(path)):
        agent = DQN.from_config(name, seed=7)
        assert agent.config == shipped.replace(lr=5e-4, hidden=(8,), seed=7)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("cartpol", {}, r"'dqn' has no shipped config 'cartpol'\. Did you mean 'cartpole'\?"),
        ("nowhere.yaml", {}, r"There is no config file 'nowhere\.yaml'\."),
        ("cartpole", {"sed": 1}, r"DQN has no setting 'sed'\. Did you mean 'seed'\?"),
        ("cartpole", {"seed": -1}, r"Setting 'seed' must be at least 0, not -1\."),
    ],
)
def test_an_unknown_config_gets_one_sentence(name: str, settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        DQN.from_config(name, **settings)


def test_a_file_for_another_algorithm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("algo: sac\n")
    with pytest.raises(ValueError, match=r"mine\.yaml is for 'sac', not for 'dqn': name one"):
        DQN.from_config(str(tmp_path / "mine.yaml"))


# The registry


def test_algorithms_stand_in_the_order_of_the_book() -> None:
    book = {n: c for n, c in rlbook.ALGORITHMS.items() if c.__module__.startswith("rlbook.")}
    places = [chapter_modules().index(c.__module__.removeprefix("rlbook.")) for c in book.values()]
    assert places == sorted(places) and next(iter(rlbook.ALGORITHMS)) == "dqn"
    assert rlbook.ALGORITHMS["dqn"] is DQN
    assert all(agent_class.name == name for name, agent_class in book.items())


def test_an_agent_of_your_own_declares_itself_and_comes_last(tmp_path: Path) -> None:
    try:

        class Timid(DQN):
            """Never explores."""

            name: ClassVar[str] = "timid"

            def act(self, obs: Any, state: Any, episode_start: Any, explore: bool) -> Any:
                return super().act(obs, state, episode_start, explore=False)

        class Nameless(DQN):
            """A step on the way to another class: no algorithm of its own."""

        assert list(rlbook.ALGORITHMS)[-1] == "timid" and Nameless not in REGISTRY.values()
        assert find_algorithm("timid") is Timid and REGISTRY["dqn"] is DQN
        result = train(Timid("CartPole-v1", **SMALL, total_steps=60), progress=False)
        result.agent.save(tmp_path / "timid.pt")
        assert isinstance(rlbook.load(tmp_path / "timid.pt"), Timid)
        small_agent().save(tmp_path / "dqn.pt")
        with pytest.raises(ValueError, match=r"dqn\.pt holds a dqn agent: use rlbook\.load"):
            Timid.load(tmp_path / "dqn.pt")
    finally:
        REGISTRY.pop("timid", None)


def test_an_agent_must_say_how_it_acts_and_learns() -> None:
    class Lazy(Agent):
        config_class = DQN.config_class

    with pytest.raises(TypeError, match="abstract"):
        Lazy("CartPole-v1")  # type: ignore[abstract]


def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import rlbook, sys; print('torch' in sys.modules, dir(rlbook))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False") and "ALGORITHMS" in done.stdout
    with pytest.raises(AttributeError, match="attribute lod"):
        _ = rlbook.lod  # type: ignore[attr-defined]


class Curious(DQN):
    """A user's own kind of DQN, without a name of its own."""


def test_a_subclass_without_a_name_loads_what_it_saved(tmp_path: Path) -> None:
    agent = Curious(**TINY)
    agent.save(tmp_path / "agent.pt")
    assert type(Curious.load(tmp_path / "agent.pt")) is Curious
    assert type(DQN.load(tmp_path / "agent.pt")) is Curious
    assert type(rlbook.load(tmp_path / "agent.pt")) is Curious


@pytest.mark.parametrize("part", ["q_network", "target_network", "optimizer", "n_step"])
def test_a_checkpoint_without_one_of_its_parts_is_refused(part: str, tmp_path: Path) -> None:
    content = DQN(**TINY).checkpoint()
    del content["agent"][part]
    write_checkpoint(tmp_path / "agent.pt", content)
    with pytest.raises(CheckpointError, match=f"does not fit this dqn: '{part}'"):
        rlbook.load(tmp_path / "agent.pt")


@pytest.mark.parametrize(
    "change", [{"algo": ["dqn"]}, {"config": 5}, {"agent": 3}, {"interface": {}}]
)
def test_a_checkpoint_of_another_make_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "agent.pt", DQN(**TINY).checkpoint() | change)
    with pytest.raises(CheckpointError, match="is not an rlbook checkpoint"):
        rlbook.load(tmp_path / "agent.pt")


@pytest.mark.parametrize("obs", [[300, 0], [0.7, 0.2], [-1, 0], np.array([256, 3])])
def test_an_observation_that_its_bytes_cannot_hold_is_refused(obs: Any) -> None:
    space = gym.spaces.Box(0, 255, (2,), np.uint8)
    with pytest.raises(ValueError, match="An observation must be whole numbers of the type uint8"):
        as_batch(obs, space)
    assert as_batch([255.0, 0], space)[0].tolist() == [[255, 0]]


def test_two_agents_of_one_state_do_not_share_it() -> None:
    one, two = DQN(**TINY), DQN(**TINY)
    one.learn(100, progress=False)
    two.load_state_dict(one.state_dict())
    before = copy.deepcopy(two.state_dict())
    one.learn(60, progress=False)
    assert_same(two.state_dict(), before)
