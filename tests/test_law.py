"""The law of the book, for every algorithm: the code that teaches is the code that trains."""

import ast
import copy
import importlib
import inspect
import multiprocessing
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import assert_same, learn_elsewhere
from torch import Tensor, nn

from rlbook.agent import Agent, UpdateResult, algorithms, chapter_modules
from rlbook.run import Collector, resume, train
from rlbook.tangle import find_root

ROOT = find_root(Path(__file__).parent)
ALGORITHMS = {
    name: agent_class
    for name, agent_class in algorithms().items()
    if agent_class.__module__.startswith("rlbook.")
}

# The smallest agents that learn: an update at each step, of all that they are made of.
VECTOR: dict[str, Any] = {
    "hidden": (8,),
    "batch_size": 4,
    "learning_starts": 8,
    "train_frequency": 1,
    "eval_every": 0,
    "seed": 3,
}
VALUES = {**VECTOR, "n_step": 2, "target_update_interval": 10}
RECURRENT = {**VALUES, "env_id": "rlbook/MaskedCartPole-v0", "lstm_units": 8}
ON_POLICY: dict[str, Any] = {
    "env_id": "Pendulum-v1",
    "hidden": (8,),
    "num_envs": 2,
    "num_steps": 4,
    "eval_every": 0,
    "seed": 3,
}
SMALL: dict[str, dict[str, Any]] = {
    "dqn": {**VALUES, "num_envs": 2},
    "drqn": {**RECURRENT, "chunk_length": 4},
    "r2d2": {**RECURRENT, "chunk_length": 6, "burn_in": 2, "overlap": 2},
    "a2c": ON_POLICY,
    "ppo": {**ON_POLICY, "epochs": 2, "minibatch_size": 4},
    "recurrent_ppo": {
        **ON_POLICY,
        "epochs": 2,
        "minibatch_size": 4,
        "sequence_length": 2,
        "lstm_units": 8,
    },
    "trpo": {**ON_POLICY, "value_epochs": 2, "minibatch_size": 4},
    "sac": {**VECTOR, "env_id": "Pendulum-v1"},
    "redq": {
        **VECTOR,
        "env_id": "Pendulum-v1",
        "num_critics": 3,
        "gradient_steps": 2,
        "policy_delay": 2,
    },
    "drqv2": {**VECTOR, "features": 4, "policy_delay": 1},
}
EVERY = pytest.mark.parametrize("name", list(ALGORITHMS))
COMPILABLE = [name for name, agent_class in ALGORITHMS.items() if agent_class.compiled]


def make(name: str, **settings: Any) -> Agent:
    """Make a small agent."""
    return ALGORITHMS[name](**{**SMALL[name], **settings})


def learned(agent: Agent, steps: int = 40) -> Agent:
    """Let an agent learn, and return it."""
    agent.learn(steps, progress=False)
    assert agent.updates > 0
    return agent


def learn_from_batches(agent: Agent, updates: int) -> None:
    """Step on and update on each batch that the agent gives, from replay or from a rollout."""
    collector, wanted = Collector(agent), agent.updates + updates
    while agent.updates < wanted:
        collector.step()
        for batch in agent.batches():
            agent.update(batch)
            agent.updates += 1
    collector.envs.close()


def state_of(agent: Agent) -> dict[str, Any]:
    """Return all that learning depends on, as an agent has it that was loaded from there.

    A copy of an array leaves anything in the gaps between the fields of its elements.
    """
    fresh = type(agent)(config=agent.config.replace(compile=False))
    fresh.load_state_dict(agent.state_dict())
    return fresh.state_dict()


def weights(agent: Agent) -> dict[str, Tensor]:
    """Return the parameters of all networks by name."""
    return {
        f"{part}.{name}": parameter
        for part in agent.parts
        if isinstance(module := getattr(agent, part), nn.Module)
        for name, parameter in module.state_dict().items()
    }


def test_every_algorithm_of_the_book_is_tried_here() -> None:
    assert set(ALGORITHMS) == set(SMALL)


# What is taught is what trains


def losses_of(agent_class: type[Agent]) -> tuple[Any, list[str]]:
    """Return the losses of a chapter, or of the one that it extends if it adds none."""
    for parent in agent_class.__mro__:
        module = importlib.import_module(parent.__module__)
        if losses := [name for name in module.__all__ if name.endswith("_loss")]:
            return module, losses
        assert parent is not Agent, f"{agent_class.__name__} has no loss"
    raise AssertionError


@EVERY
def test_update_calls_the_losses_of_its_chapter_with_a_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, losses = losses_of(ALGORITHMS[name])
    calls: dict[str, int] = dict.fromkeys(losses, 0)

    def counted(loss_name: str) -> Any:
        function = getattr(module, loss_name)

        def count(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            loss = result[0] if isinstance(result, tuple) else result
            assert loss.requires_grad, f"{loss_name} is called without a gradient"
            calls[loss_name] += 1
            return result

        return count

    own = importlib.import_module(ALGORITHMS[name].__module__)  # it may import a loss, too
    for loss_name in losses:
        count = counted(loss_name)
        for place in {module, own}:
            if hasattr(place, loss_name):
                monkeypatch.setattr(place, loss_name, count)
    agent = learned(make(name))
    before = dict(calls)
    learn_from_batches(agent, 4)  # enough for delayed parts
    unused = [loss for loss in losses if calls[loss] == before[loss]]
    assert not unused, f"{name}.update never calls {unused}"


@EVERY
def test_an_update_moves_every_network_that_learns(name: str) -> None:
    agent = make(name)
    before = copy.deepcopy(weights(agent))
    learned(agent)
    still = [key for key, value in weights(agent).items() if torch.equal(value, before[key])]
    assert not [key for key in still if "scale" not in key]


@EVERY
def test_nothing_stands_between_an_algorithm_and_agent_but_an_algorithm(name: str) -> None:
    for parent in ALGORITHMS[name].__mro__[1:]:
        if parent is Agent:
            break
        assert parent in ALGORITHMS.values(), f"{parent.__name__} is not an algorithm"
    assert Agent.__mro__[1:] == (Agent.__base__, object)  # ABC alone


@EVERY
def test_update_is_plain(name: str) -> None:
    classes = [c for c in ALGORITHMS[name].__mro__ if c in ALGORITHMS.values()]
    source = "".join(inspect.getsource(agent_class) for agent_class in classes)
    assert "inference_mode" not in source
    for word in (".zero_grad()", ".backward()", ".step()"):
        assert word in source, f"{name} has no {word}"
    assert ("polyak_update(" in source) == ("replay" in ALGORITHMS[name].parts)
    returned = inspect.signature(ALGORITHMS[name].update).return_annotation
    assert returned in (UpdateResult, "UpdateResult")


@pytest.mark.parametrize("module", chapter_modules())
def test_no_module_uses_a_private_name_of_pytorch(module: str) -> None:
    source = (ROOT / "rlbook" / f"{module}.py").read_text()
    names = r"torch\.(?:\w+\.)*_(?!_)\w+(?:\.\w+)*|torch\.ops\.aten\.\w+|inspect\.unwrap"
    private = re.findall(names, source)
    allowed = ["torch._dynamo.config.trace_autograd_ops"] if module == "agent" else []
    assert private == allowed


def test_no_class_has_one_child_and_is_never_made() -> None:
    children: dict[str, list[str]] = defaultdict(list)
    ours, calls = set[str](), set[str]()
    for module in chapter_modules():
        tree = ast.parse((ROOT / "rlbook" / f"{module}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                ours.add(node.name)
                for base in node.bases:
                    children[ast.unparse(base).split("[")[0].split(".")[-1]].append(node.name)
            elif isinstance(node, ast.Call):
                calls.add(ast.unparse(node.func).split("[")[0].split(".")[-1])
            elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):  # to register them
                calls |= {ast.unparse(entry) for entry in node.iter.elts}
    # A user makes these: the class of an algorithm and its settings, which another one may extend.
    calls |= {c.__name__ for c in ALGORITHMS.values()}
    calls |= {c.config_class.__name__ for c in ALGORITHMS.values()}
    lonely = {name: children[name] for name in ours - calls if len(children[name]) == 1}
    assert not lonely


# Agents are values


@EVERY
def test_a_copy_learns_as_the_original_would(name: str) -> None:
    agent = learned(make(name))
    twins = [copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))]
    middle = copy.deepcopy(weights(agent))
    learned(agent)
    assert any(not torch.equal(middle[key], value) for key, value in weights(agent).items())
    for twin in twins:
        learned(twin)
        assert_same(state_of(agent), state_of(twin))


def test_agents_go_to_another_process_and_come_back() -> None:
    agents = [learned(make(name)) for name in ALGORITHMS]
    before = [copy.deepcopy(weights(agent)) for agent in agents]
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a new interpreter
        back = pool.map(learn_elsewhere, agents)
    assert_same([weights(agent) for agent in agents], before)  # no memory is shared
    for agent, returned in zip(agents, back, strict=True):
        assert_same(state_of(learned(agent)), state_of(returned))
        assert_same(state_of(learned(agent, 10)), state_of(learned(returned, 10)))


@EVERY
def test_settings_that_build_reads_are_fixed_from_then_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_class, read = ALGORITHMS[name], set[str]()
    config_class = agent_class.config_class
    build, get = agent_class.build, config_class.__getattribute__

    def noted(config: Any, key: str) -> Any:
        read.update({key} & config_class.model_fields.keys())
        return get(config, key)

    def watched(agent: Agent) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(config_class, "__getattribute__", noted)
            build(agent)

    monkeypatch.setattr(agent_class, "build", watched)
    agent = make(name)
    scheduled = {"lr"} if hasattr(agent.config, "lr_now") else set()  # set before each step
    assert "hidden" in read and read - set(agent.built_from) <= {"env_id", "seed"} | scheduled


def test_a_fixed_setting_that_changes_is_refused() -> None:
    for name, setting, value in (("r2d2", "burn_in", 1), ("sac", "lr", 0.5), ("ppo", "gamma", 0.5)):
        agent = make(name)
        agent.config = agent.config.replace(**{setting: value})
        with pytest.raises(ValueError, match=f"Setting '{setting}' was .*make a new agent"):
            agent.learn(8, progress=False)
    dqn: Any = make("dqn")
    dqn.config = dqn.config.replace(lr=0.5)
    learned(dqn)
    assert dqn.optimizer.param_groups[0]["lr"] == 0.5


def test_a_copy_writes_nowhere(tmp_path: Path) -> None:
    agent = make("dqn", run_dir=str(tmp_path / "a"), checkpoint_every=50)
    learned(agent, 60)
    written = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    twin = learned(copy.deepcopy(agent))
    assert twin.config.run_dir is None and twin.directory is None
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == written


@EVERY
def test_networks_can_be_cast_and_moved(name: str) -> None:
    agent, other = make(name), make(name)
    for part in agent.parts:
        if isinstance(module := getattr(agent, part), nn.Module):
            module.to("cpu").double().float()
    assert_same(learned(agent).state_dict(), learned(other).state_dict())


# Episodes side by side


@EVERY
def test_episodes_side_by_side_are_played_as_alone(name: str) -> None:
    agent = learned(make(name))
    space = agent.observation_space
    assert isinstance(space, gym.spaces.Box)
    generator, shape = np.random.default_rng(0), (6, 3, *space.shape)
    image = space.dtype == np.uint8
    seen = generator.integers(256, size=shape) if image else generator.normal(size=shape)
    starts = np.array([[1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]], bool)
    together, state = [], None
    for obs, start in zip(seen, starts, strict=True):
        actions, state = agent.predict(obs, state, episode_start=start)
        together.append(actions)
    for i in range(3):
        state = None
        for obs, start, actions in zip(seen[:, i], starts[:, i], together, strict=True):
            action, state = agent.predict(obs, None if start else state)
            np.testing.assert_allclose(action, actions[i], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["drqn", "r2d2", "recurrent_ppo"])
def test_a_hidden_state_of_another_batch_gets_a_sentence(name: str) -> None:
    agent = make(name)
    obs = np.zeros((2, *agent.interface.observation_space.shape), np.float32)  # type: ignore[misc]
    _, state = agent.predict(obs[0])
    with pytest.raises(ValueError, match="hidden state is of a batch of 1, and there are 2 obser"):
        agent.predict(obs, state)


# One switch


def compiled_agent(
    name: str, monkeypatch: pytest.MonkeyPatch, backend: str, **settings: Any
) -> Agent:
    """Make an agent whose gradients are compiled by a backend."""
    original = torch.compile

    def compile_with(function: Any, **keywords: Any) -> Any:
        return original(function, **keywords, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_with)
    return make(name, **settings, compile=True)


def assert_close(one: Agent, two: Agent) -> None:
    """Compare weights up to rounding."""
    assert one.updates == two.updates
    others = weights(two)
    for key, value in weights(one).items():
        torch.testing.assert_close(value, others[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", COMPILABLE)
def test_compiled_and_eager_learn_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = make(name)
    before = copy.deepcopy(weights(eager))
    compiled = compiled_agent(name, monkeypatch, "aot_eager")
    for agent in (eager, compiled):
        learned(agent, 30)
    assert_close(eager, compiled)
    moved = weights(compiled)
    assert any(not torch.equal(before[key], value) for key, value in moved.items())


@pytest.mark.parametrize("name", [name for name in ("dqn", "sac") if name in ALGORITHMS])
def test_the_real_compiler_gives_the_same_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, compiled = make(name), compiled_agent(name, monkeypatch, "inductor")
    for agent in (eager, compiled):
        learned(agent, 30)
    assert_close(eager, compiled)


@torch._dynamo.config.patch(recompile_limit=1)  # PyTorch's own is eight
def test_a_process_may_compile_many_different_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    for units in (9, 10, 11):
        settings = {"hidden": (units,), "huber": units % 2 == 0}
        with monkeypatch.context() as patch:
            compiled = compiled_agent("dqn", patch, "aot_eager", **settings)
        assert_close(learned(make("dqn", **settings), 12), learned(compiled, 12))


def test_a_copy_of_a_compiled_agent_learns_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = learned(compiled_agent("dqn", monkeypatch, "aot_eager"), 30)
    twin = copy.deepcopy(agent)
    still = copy.deepcopy(weights(agent))
    learned(twin, 30)
    assert_same(weights(agent), still)  # the original was not touched
    learned(agent, 30)
    assert_same(state_of(agent), state_of(twin))


def test_a_compiled_run_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"total_steps": 80, "checkpoint_every": 40}
    compiled_agent("dqn", monkeypatch, "aot_eager")
    whole = train(make("dqn", compile=True, run_dir=str(tmp_path / "a"), **kept), progress=False)
    half = {**kept, "total_steps": 40, "run_dir": str(tmp_path / "b")}
    train(make("dqn", compile=True, **half), progress=False)
    resumed = resume(tmp_path / "b", total_steps=80, progress=False)
    assert_same(whole.agent.state_dict(), resumed.agent.state_dict())


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in COMPILABLE])
def test_recurrent_agents_say_that_compiling_is_not_for_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"'compile' is not for {name}: PyTorch .* an LSTM"):
        make(name, compile=True)


def test_an_agent_without_an_lstm_is_not_told_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALGORITHMS["dqn"], "compiled", ())
    with pytest.raises(ValueError, match=r"'compile' is not for dqn: it lists no method in"):
        make("dqn", compile=True)


def test_what_cannot_be_compiled_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Printing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print(x.sum())  # which no graph can hold
            return super().forward(x)

    monkeypatch.setattr(ALGORITHMS["dqn"], "make_network", lambda agent: Printing(4, 2))
    agent = compiled_agent("dqn", monkeypatch, "aot_eager", env_id="CartPole-v1")
    with pytest.raises(ValueError, match=r"^Setting 'compile' must be left out: the update of dqn"):
        agent.learn(40, progress=False)


def test_without_a_compiler_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler such as g\+\+"):
        make("dqn", compile=True)
