"""What the chapter on environments cannot test about itself."""

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from scipy.stats import bootstrap

import rlbook.envs
from rlbook.envs import (
    Evaluation,
    TMaze,
    derive_seed,
    evaluate,
    make_env,
    make_vector_env,
    mean_interval,
    true_next_obs,
)

PROBES = ["OneStep", "TwoStep", "ObservationReward", "ActionReward", "ConstantReward"]
ENVIRONMENTS = [*PROBES, "MaskedCartPole", "TMaze"]
GAMMA = 0.9


def constant_policy(action: Any) -> Callable[..., tuple[np.ndarray, None]]:
    """Return a policy that plays one action for ever."""
    return lambda obs, state, start: (np.array([action] * len(obs)), None)


def play(env: gym.Env, action: Any, seed: int) -> list[tuple[float, float]]:
    """Play one episode with one action and return first entries of observations, and rewards."""
    obs, _ = env.reset(seed=seed)
    steps, ended = [], False
    while not ended:
        next_obs, reward, terminated, truncated, _ = env.step(action)
        steps.append((float(obs[0]), float(reward)))
        obs, ended = next_obs, terminated or truncated
    return steps


# Registration


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_registered_environments_pass_the_checker_of_gymnasium(name: str) -> None:
    env = make_env(f"rlbook/{name}-v0")
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name", PROBES)
def test_continuous_probes_pass_the_checker_of_gymnasium(name: str) -> None:
    env = make_env(f"rlbook/{name}-v0", {"continuous": True})
    assert env.action_space == gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_id_always_makes_the_class_of_the_library(name: str) -> None:
    assert type(make_env(f"rlbook/{name}-v0").unwrapped) is getattr(rlbook.envs, name)


def test_registering_again_is_silent_and_changes_nothing() -> None:
    before = gym.registry["rlbook/TMaze-v0"]
    rlbook.envs.register_env("TMaze", max_episode_steps=3)
    assert gym.registry["rlbook/TMaze-v0"] is before


# Names, modules and keywords


def message(env_id: str, env_kwargs: dict[str, Any] | None = None) -> str:
    """Return what a user is told when this environment cannot be made."""
    with pytest.raises(ValueError) as caught:
        make_env(env_id, env_kwargs)
    return str(caught.value)


def test_unknown_id_names_the_nearest() -> None:
    assert message("CartPool-v1") == (
        "There is no environment 'CartPool-v1'. Did you mean 'CartPole-v1'?"
    )
    assert "Did you mean 'rlbook/TMaze-v0'?" in message("rlbook/TMase-v0")


def test_a_function_that_a_module_does_not_have_is_said() -> None:
    said = message("rlbook.envs:make_enf")
    assert said == (
        "There is no environment 'rlbook.envs:make_enf'. The module 'rlbook.envs' has no function "
        "'make_enf'. Did you mean 'rlbook.envs:make_env'?"
    )
    assert "has no function" not in message("rlbook.envs:Grid-v0")  # an id, as its version shows
    assert message("rlbook.envs:rlbook/TMaze-v1").endswith(
        " Did you mean 'rlbook.envs:rlbook/TMaze-v0'?"
    )
    assert "Did you mean" not in message("rlbook.envs:xyzzy")  # the module alone is not near


@pytest.mark.parametrize("env_id", ["", "no such thing", "xyzzy-v0", "xyzzy/Plugh-v0"])
def test_unknown_id_without_a_near_one_says_where_to_look(env_id: str) -> None:
    said = message(env_id)
    assert said.startswith(f"There is no environment {env_id!r}.")
    assert "pprint_registry" in said


def test_unknown_version_names_a_known_one() -> None:
    assert "Did you mean 'CartPole-v1'?" in message("CartPole-v77")


def test_missing_module_is_named_and_what_to_do() -> None:
    assert message("no_such_module:Name-v0") == (
        "Environment 'no_such_module:Name-v0' needs the module 'no_such_module', "
        "which is not installed or not on the path: install it, or start from the folder that "
        "holds it, or add that folder to PYTHONPATH."
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_not_installed_is_told_in_one_sentence() -> None:
    assert message("Ant-v3").startswith("Environment 'Ant-v3' cannot be made here: ")

    def needs_more(**kwargs: Any) -> gym.Env:
        raise gym.error.DependencyNotInstalled("pip install more")

    gym.register("tests/NeedsMore-v0", needs_more)
    try:
        assert message("tests/NeedsMore-v0").endswith("cannot be made here: pip install more")
    finally:
        del gym.registry["tests/NeedsMore-v0"]


def test_unknown_keyword_is_named() -> None:
    said = message("CartPole-v1", {"lenght": 3})
    assert "'CartPole-v1' does not take the env_kwargs {'lenght': 3}" in said
    assert "unexpected keyword argument 'lenght'" in said
    assert "was raised from" not in said


class SameArray(gym.Env[np.ndarray, Any]):
    """Counts its steps in one array, which it hands out again and again; truncated at five."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.seen = np.zeros(1, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen[:] = 0
        return self.seen, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.seen += 1
        return self.seen, 1.0, False, bool(self.seen == 5), {}


class Moody(SameArray):
    """Cannot be made, for reasons of its own."""

    def __init__(self, **keywords: Any) -> None:
        raise KeyError("mood")


for made in (SameArray, Moody):
    if f"test/{made.__name__}-v0" not in gym.registry:
        gym.register(f"test/{made.__name__}-v0", f"{__name__}:{made.__name__}")


@pytest.mark.filterwarnings("ignore:.*share an object")  # Gymnasium warns of such, too
def test_a_last_observation_survives_an_environment_that_reuses_its_array() -> None:
    envs = make_vector_env("test/SameArray-v0", 2)
    envs.reset(seed=0)
    successors = []
    for _ in range(6):
        obs, _, _, truncated, infos = envs.step(np.zeros(2, dtype=int))
        successors.append((float(true_next_obs(obs, infos)[0, 0]), bool(truncated[0])))
    assert successors == [(1, False), (2, False), (3, False), (4, False), (5, True), (1, False)]


def test_what_an_environment_raises_when_it_is_made_is_one_sentence() -> None:
    assert message("test/Moody-v0", {}) == (
        "Environment 'test/Moody-v0' cannot be made: KeyError: 'mood'."
    )
    said = message("test/Moody-v0", {"a": 1})
    assert said == "Environment 'test/Moody-v0' does not take the env_kwargs {'a': 1}: 'mood'."


@pytest.mark.parametrize("length", [0, -1, 2.5, "ten", None])
def test_tmaze_refuses_a_length_that_is_no_length(length: Any) -> None:
    said = message("rlbook/TMaze-v0", {"length": length})
    assert said == f"TMaze needs a whole length of at least 1, not {length!r}."


def test_keywords_reach_the_environment() -> None:
    assert make_env("rlbook/TMaze-v0", {"length": 3}).unwrapped.length == 3  # type: ignore[attr-defined]
    assert len(play(make_env("CartPole-v1", {"max_episode_steps": 3}), 0, seed=0)) == 3


def test_module_in_an_id_is_imported_first(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(
        textwrap.dedent(
            """
            import gymnasium as gym

            class Bare(gym.Env):  # without the keyword render_mode
                observation_space = action_space = gym.spaces.Discrete(1)

            gym.register("Bare-v0", Bare)
            """
        )
    )
    code = "from rlbook.envs import make_env; print(make_env('my_envs:Bare-v0').unwrapped)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Bare" in done.stdout


# Seeds


def test_derived_seeds_are_stable_across_processes_and_versions() -> None:
    assert derive_seed(0) == 1726737503  # sha256(b"0") begins with 5feceb66
    assert derive_seed(7, "envs", 1000, 3) == 1627233311


def test_derived_seeds_do_not_collide() -> None:
    paths = [(s, n, i) for s in range(20) for n in ("envs", "agent", "evaluate") for i in range(50)]
    seeds = {derive_seed(*path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= seed < 2**32 for seed in seeds)
    # a shorter path is another path, also when the rest of the longer one is zero
    assert len({derive_seed(0), derive_seed(0, 0), derive_seed(0, 0, 0), derive_seed(0, "a")}) == 4
    assert derive_seed(0, "agen", 116) != derive_seed(0, "agent")


def test_numpy_integers_derive_the_same_seed() -> None:
    assert derive_seed(3, "envs", int(np.int64(5))) == derive_seed(int(np.uint32(3)), "envs", 5)
    assert derive_seed(3, np.int64(5)) == derive_seed(3, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("env_id", [f"rlbook/{name}-v0" for name in ENVIRONMENTS] + ["CartPole-v1"])
def test_same_seed_same_episode(env_id: str) -> None:
    first, second = make_env(env_id), make_env(env_id)
    assert play(first, 0, seed=5) == play(second, 0, seed=5)
    assert play(first, 0, seed=5) == play(second, 0, seed=5)  # in used environments too


# Closed forms


def discounted(rewards: list[float]) -> float:
    """Return the discounted sum of the rewards."""
    return sum(GAMMA**k * reward for k, reward in enumerate(rewards))


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_probes_have_the_values_that_they_promise(continuous: bool, seed: int) -> None:
    def episode(name: str, action: float = 1) -> list[tuple[float, float]]:
        env = make_env(f"rlbook/{name}-v0", {"continuous": continuous})
        return play(env, np.array([action], np.float32) if continuous else action, seed)

    assert episode("OneStep") == [(1.0, 1.0)]
    steps = episode("TwoStep")
    assert [obs for obs, _ in steps] == [-1.0, 0.0]
    assert discounted([reward for _, reward in steps]) == GAMMA
    ((obs, reward),) = episode("ObservationReward")
    assert obs == reward and obs in (-1.0, 1.0)
    ((obs, reward),) = episode("ActionReward")
    assert reward == (1 - (1 - obs / 2) ** 2 if continuous else obs)


def test_both_signs_are_drawn() -> None:
    env = make_env("rlbook/ObservationReward-v0")
    signs = [play(env, 0, seed)[0][0] for seed in range(200)]
    assert set(signs) == {-1.0, 1.0} and abs(np.mean(signs)) < 0.25


def test_constant_reward_is_truncated_and_never_terminated() -> None:
    env = make_env("rlbook/ConstantReward-v0", {"limit": 4})
    env.reset(seed=0)
    ends = [env.step(0)[1:4] for _ in range(4)]
    assert ends == [(1.0, False, False)] * 3 + [(1.0, False, True)]


# Vector environments


def test_same_step_mode_keeps_the_last_observation() -> None:
    envs = make_vector_env("rlbook/TwoStep-v0", 3)
    obs, _ = envs.reset(seed=[0, 1, 2])
    stored = []
    for _ in range(4):
        after, reward, terminated, _, infos = envs.step(np.zeros(3, dtype=np.int64))
        stored.append((obs, reward, true_next_obs(after, infos), terminated))
        obs = after
    for k, (obs, reward, next_obs, terminated) in enumerate(stored):  # two episodes of two steps
        assert (obs == k % 2 - 1).all() and (next_obs == k % 2).all()
        assert (reward == k % 2).all() and (terminated == k % 2).all()


def test_true_next_obs_restores_only_what_ended_and_leaves_its_input_alone() -> None:
    envs = make_vector_env("CartPole-v1", 4)
    singles = [make_env("CartPole-v1") for _ in range(4)]
    envs.reset(seed=[0, 1, 2, 3])
    for i, env in enumerate(singles):
        env.reset(seed=i)
    generator, ended_steps = np.random.default_rng(0), 0
    for _ in range(300):
        action = generator.integers(2, size=4)
        after, _, terminated, truncated, infos = envs.step(action)
        untouched = after.copy()
        restored = true_next_obs(after, infos)
        assert (after == untouched).all()
        for i, env in enumerate(singles):
            expected = env.step(action[i])[0]
            np.testing.assert_array_equal(restored[i], expected)
            if terminated[i] or truncated[i]:
                ended_steps += 1
                np.testing.assert_array_equal(after[i], env.reset()[0])
    assert ended_steps > 20


# T-maze and masked CartPole


def tmaze_return(policy: dict[tuple[float, ...], int], cue: int, env: TMaze) -> float:
    """Play a deterministic memoryless policy against one cue."""
    env.reset(seed=0)
    env.cue = cue
    total, ended, obs = 0.0, False, env.observe()
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(policy[tuple(obs.tolist())])
        total, ended = total + reward, terminated or truncated
    return total


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_no_memoryless_policy_of_the_tmaze_beats_one_half(length: int, walk: bool) -> None:
    observations: list[tuple[float, ...]] = [(-1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
    env, scores = TMaze(length=length, walk=walk), []
    for actions in itertools.product(range(3 if walk else 2), repeat=4):  # all of them
        policy = dict(zip(observations, actions, strict=True))
        scores.append(np.mean([tmaze_return(policy, cue, env) for cue in (-1, 1)]))
    assert max(scores) == 0.5
    assert walk or min(scores) == 0.5  # where nobody can stand still, none does worse either


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("length", [1, 10, 40])
def test_memory_solves_the_tmaze(length: int, walk: bool) -> None:
    def remember(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        state = np.where(start, obs[:, 0], 0 if state is None else state)
        return np.where(obs[:, 1] == 1, (state > 0).astype(int), 2 if walk else 0), state

    envs = [make_env("rlbook/TMaze-v0", {"length": length, "walk": walk}) for _ in range(64)]
    result = evaluate(remember, envs, seed=0)
    assert result.mean == 1.0 and (result.lengths == length + 1).all()


def test_tmaze_cues_are_fresh_and_half_of_them_left() -> None:
    env = make_env("rlbook/TMaze-v0", {"length": 1})
    seeded = [env.reset(seed=derive_seed(seed, 0))[0][0] for seed in range(400)]
    following = [env.reset()[0][0] for _ in range(400)]  # as in a vector environment
    for cues in (seeded, following):
        assert set(cues) == {-1.0, 1.0} and abs(np.mean(cues)) < 0.2


def test_tmaze_ends_a_policy_that_stands_still_and_pays_it_nothing() -> None:
    envs = [make_env("rlbook/TMaze-v0", {"length": 3, "walk": True}) for _ in range(4)]
    for action in (0, 1, 2):  # against the wall at the start, or at the junction
        result = evaluate(constant_policy(action), envs, seed=1)
        assert (result.returns == 0).all() and (result.lengths == 6 * 3 + 10).all()


def test_a_random_walk_hardly_ever_meets_the_limit_of_the_tmaze() -> None:
    generator = np.random.default_rng(0)
    for length in (1, 10, 40):
        steps = generator.geometric(1 / 3, size=(10_000, length)).sum(1)
        steps += generator.geometric(2 / 3, size=10_000)
        assert (steps > TMaze(length, walk=True).limit).mean() < 0.01


def test_tmaze_renders_agent_goal_and_cue() -> None:
    env = make_env("rlbook/TMaze-v0", {"length": 4}, render_mode="rgb_array")
    env.reset(seed=0)
    first, _ = env.render(), env.step(0)
    second = env.render()
    assert isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
    assert first.shape == (80, 112, 3) and first.dtype == np.uint8
    orange = (230, 159, 0)
    assert (first == orange).all(-1).any() and not (second == orange).all(-1).any()


@pytest.mark.parametrize("seed", range(3))
def test_masked_cartpole_is_cartpole_without_velocities(seed: int) -> None:
    masked, full = make_env("rlbook/MaskedCartPole-v0"), make_env("CartPole-v1")
    assert masked.observation_space.shape == (2,)
    a, b = masked.reset(seed=seed)[0], full.reset(seed=seed)[0]
    for action in np.random.default_rng(seed).integers(2, size=500):
        np.testing.assert_array_equal(a, b[[0, 2]])
        a, *rest_a = masked.step(action)
        b, *rest_b = full.step(action)
        assert rest_a == rest_b
        if rest_a[1] or rest_a[2]:
            break
    assert masked.spec is not None and masked.spec.max_episode_steps == 500


def test_masked_cartpole_renders() -> None:
    pytest.importorskip("pygame")
    env = make_env("rlbook/MaskedCartPole-v0", render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    env.close()
    assert isinstance(frame, np.ndarray) and frame.shape == (400, 600, 3)


# Evaluation


class Drifting(gym.Env):
    """An environment that resets with whole numbers and then steps through halves."""

    observation_space = gym.spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0.0
        return np.array([0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 0.5
        return np.array([self.at]), 1.0, self.at >= 2, False, {}


def test_evaluation_has_observations_of_the_space_and_never_changes_them_afterwards() -> None:
    seen: list[np.ndarray] = []

    def policy(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        seen.append(obs)
        return np.zeros(len(obs), dtype=np.int64), state

    evaluate(policy, [Drifting(), Drifting()], seed=0)
    assert [obs[0, 0] for obs in seen] == [0.0, 0.5, 1.0, 1.5]
    assert all(obs.dtype == np.float32 for obs in seen)


def test_evaluation_marks_starts_once_and_carries_memory() -> None:
    starts: list[bool] = []

    def policy(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        starts.append(bool(start.all()))
        assert state == (None if start.all() else len(starts) - 1)
        return np.zeros(len(obs), dtype=np.int64), len(starts)

    evaluate(policy, [make_env("rlbook/ConstantReward-v0", {"limit": 3})] * 1, seed=0)
    assert starts == [True, False, False]


def test_evaluation_is_one_whole_episode_of_each_environment() -> None:
    envs = [make_env("rlbook/ConstantReward-v0", {"limit": limit}) for limit in (2, 5, 3)]
    result = evaluate(constant_policy(0), envs, seed=0)
    assert result.returns.tolist() == [2.0, 5.0, 3.0]
    assert result.lengths.tolist() == [2, 5, 3]


def test_evaluation_depends_on_its_seed_alone() -> None:
    envs = [make_env("CartPole-v1") for _ in range(5)]
    first = evaluate(constant_policy(1), envs, seed=3)
    again = evaluate(constant_policy(1), envs, seed=3)
    assert (first.returns == again.returns).all()
    long = evaluate(constant_policy(1), [make_env("CartPole-v1") for _ in range(9)], seed=3)
    assert (long.returns[:5] == first.returns).all()  # more episodes change none of the first


@pytest.mark.parametrize("count", [1, 2, 4, 7, 9])
def test_how_many_environments_play_changes_no_episode(count: int) -> None:
    def leaning(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        before = np.zeros(len(obs)) if state is None else np.where(start, 0, state)
        return (obs[:, 2] + 0.1 * before > 0).astype(np.int64), before + obs[:, 2]

    wanted = evaluate(leaning, [make_env("CartPole-v1") for _ in range(7)], seed=5)
    envs = [make_env("CartPole-v1") for _ in range(count)]
    found = evaluate(leaning, envs, seed=5, episodes=7)
    np.testing.assert_array_equal(wanted.returns, found.returns)
    np.testing.assert_array_equal(wanted.lengths, found.lengths)
    assert len(set(wanted.lengths.tolist())) > 2


def test_an_episode_that_ends_at_the_limit_is_not_cut() -> None:
    envs = [make_env("rlbook/ConstantReward-v0", {"limit": limit}) for limit in (4, 5, 6)]
    with pytest.warns(UserWarning, match=r"^1 of 3 episodes .* after 5 steps"):
        result = evaluate(constant_policy(0), envs, seed=0, max_steps=5)
    assert result.lengths.tolist() == [4, 5, 5]


def test_continuous_actions_can_be_evaluated() -> None:
    envs = [make_env("rlbook/ActionReward-v0", {"continuous": True}) for _ in range(8)]
    result = evaluate(lambda obs, state, start: (obs / 2, state), envs, seed=0)
    assert (result.returns == 1.0).all()


def test_evaluation_without_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one episode"):
        evaluate(constant_policy(0), [], seed=0)


def test_one_episode_has_no_interval() -> None:
    assert np.isnan(Evaluation(np.array([3.0]), np.array([3])).interval).all()


def test_interval_covers_the_true_mean_as_often_as_it_says_with_many_values() -> None:
    samples = np.random.default_rng(0).exponential(2.0, size=(80, 3_000))
    for confidence in (0.5, 0.95):
        _, low, high = mean_interval(samples, axis=0, confidence=confidence)
        assert abs(((low < 2) & (high > 2)).mean() - confidence) < 0.03


def test_interval_is_the_bootstrap_interval_of_scipy() -> None:
    values = np.random.default_rng(3).normal(size=12)
    found = bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    _, low, high = mean_interval(values)
    wanted = found.confidence_interval
    np.testing.assert_allclose([low, high], [wanted.low, wanted.high], atol=0.1)
    assert mean_interval(values)[1] == low  # the same values have the same interval


def test_interval_stays_among_the_values() -> None:
    mean, low, high = mean_interval(np.array([500.0, 500.0, 500.0, 500.0, 12.0]))
    assert 12 <= low < mean < high <= 500


def test_interval_along_another_axis_is_the_transposed_one() -> None:
    values = np.random.default_rng(1).normal(size=(4, 7))
    for a, b in zip(mean_interval(values, 1), mean_interval(values.T, 0), strict=True):
        np.testing.assert_array_equal(a, b)
