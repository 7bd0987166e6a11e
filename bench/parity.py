"""Train an algorithm and its counterpart in Stable-Baselines3 at the same settings, and compare.

    python bench/parity.py ppo [--seeds 10] [--run-dir runs/parity] [--out FILE.json]

Both play the same evaluation episodes, without exploring, at the same environment steps. Each run
is kept in the run directory when it is done, so a second call goes on where the first one stopped.
Seconds are those of the processor.
"""

import argparse
import copy
import datetime
import importlib
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from rlbook.agent import Agent, find_algorithm, torch_for_learning
from rlbook.envs import derive_seed, evaluate, make_env
from rlbook.figures import area_difference
from rlbook.run import crosses, train, versions
from rlbook.settings import make_config
from rlbook.sweep import iqm_interval, plain, replace_file, short, write_result

OURS, PEERS = "rlbook", {"stable_baselines3": "Stable-Baselines3", "sb3_contrib": "sb3-contrib"}


@dataclass(frozen=True)
class Task:
    """One comparison: what both are trained on, our settings, and where theirs differ."""

    algo: str  # ours
    peer: str  # module and class of theirs
    env_id: str
    total_steps: int
    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)  # what is not ours in their words
    num_envs: int = 1
    eval_every: int = 2_000
    eval_episodes: int = 10
    seeds: int = 10
    deviations: tuple[str, ...] = ()  # what the settings cannot make equal
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # of ours, to find a cause

    @property
    def peer_name(self) -> str:
        """The name of the other library."""
        return PEERS[self.peer.split(":")[0]]

    def settings(self, seed: int, **changes: Any) -> dict[str, Any]:
        """Our settings for one seed."""
        shared = {
            "env_id": self.env_id,
            "num_envs": self.num_envs,
            "total_steps": self.total_steps,
            "eval_every": self.eval_every,
            "eval_episodes": self.eval_episodes,
            "checkpoint_every": self.total_steps,  # checkpoints reset our environments
            "seed": seed,
        }
        return {**shared, **self.ours, **changes}

    def our_agent(self, seed: int, **changes: Any) -> Agent:
        """Make our agent."""
        agent_class = find_algorithm(self.algo)
        return agent_class(
            config=make_config(agent_class.config_class, self.settings(seed, **changes))
        )

    def their_class(self) -> Any:
        """Import the class of the other library."""
        module, name = self.peer.split(":")
        return getattr(importlib.import_module(module), name)

    def their_arguments(self) -> dict[str, Any]:
        """Return the settings that we give to their class."""
        settings = {"policy": "MlpPolicy", **in_their_words(self.ours), **self.theirs}
        return copy.deepcopy(settings)  # their classes add to the dictionaries in it

    def their_model(self, seed: int, **env_kwargs: Any) -> Any:
        """Make the agent of the other library."""
        envs = make_vec_env(self.env_id, self.num_envs, seed=seed, env_kwargs=env_kwargs)
        return self.their_class()(env=envs, **self.their_arguments(), seed=seed, device="cpu")

    def their_settings(self) -> dict[str, Any]:
        """Return all arguments of their class, those that we leave at their defaults, too."""
        parameters = inspect.signature(self.their_class()).parameters
        left_out = ("env", "seed", "device", "_init_setup_model")
        defaults = {name: p.default for name, p in parameters.items() if name not in left_out}
        settings = defaults | self.their_arguments()
        return {name: readable(value) for name, value in settings.items()}


def readable(value: Any) -> Any:
    """Return a setting as JSON can hold it: schedules and classes by name."""
    if isinstance(value, dict):
        return {name: readable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [readable(part) for part in value]
    if isinstance(value, type):
        return value.__name__
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def falls_to_zero(start: float) -> LinearSchedule:
    """Their linear schedule over the whole run."""
    return LinearSchedule(start, 0.0, 1.0)


WORDS = {  # ours -> theirs
    "lr": "learning_rate",
    "num_steps": "n_steps",
    "minibatch_size": "batch_size",
    "epochs": "n_epochs",
    "entropy_coefficient": "ent_coef",
    "value_coefficient": "vf_coef",
    "normalize_advantages": "normalize_advantage",
    "value_epochs": "n_critic_updates",
    "damping": "cg_damping",
    "cg_iterations": "cg_max_steps",
    "line_search_steps": "line_search_max_iter",
    "line_search_shrink": "line_search_shrinking_factor",
    "train_frequency": "train_freq",
    "final_epsilon": "exploration_final_eps",
}
SAME = ("gamma", "gae_lambda", "max_grad_norm", "clip_range", "target_kl", "batch_size", "tau")
SAME += ("buffer_size", "learning_starts", "gradient_steps", "target_update_interval")
WORDS |= {name: name for name in (*SAME, "target_entropy")}


def in_their_words(ours: dict[str, Any]) -> dict[str, Any]:
    """Translate our settings, as far as they have a word for them."""
    found = {WORDS[name]: value for name, value in ours.items() if name in WORDS}
    for name in ("lr", "clip_range"):
        if ours.get(f"{name}_decay_from") == 0.0:
            found[WORDS[name]] = falls_to_zero(ours[name])
    units = list(ours["hidden"])
    two = {"net_arch": {"pi": units, "vf": units}, "activation_fn": nn.Tanh}
    found["policy_kwargs"] = two if "gae_lambda" in ours else {"net_arch": units}
    return found


BESSEL = (
    "Advantages are divided by the standard deviation with n in its denominator here and n - 1 "
    "there."
)
UPDATED = "At an evaluation ours has made the update of that step, theirs makes it next."

TASKS: dict[str, Task] = {
    "ppo": Task(
        algo="ppo",
        peer="stable_baselines3:PPO",
        env_id="CartPole-v1",
        total_steps=50_000,
        num_envs=8,
        ours={
            "num_steps": 32,
            "minibatch_size": 256,
            "epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "lr": 1e-3,
            "lr_decay_from": 0.0,
            "clip_range": 0.2,
            "clip_range_decay_from": 0.0,
            "entropy_coefficient": 0.0,
            "value_coefficient": 0.5,
            "max_grad_norm": 0.5,
            "hidden": (64, 64),
        },
        deviations=(BESSEL,),
    ),
    "ppo_hopper": Task(
        algo="ppo",
        peer="stable_baselines3:PPO",
        env_id="Hopper-v5",
        total_steps=100_000,
        num_envs=8,
        eval_every=5_000,
        seeds=5,
        ours={
            "num_steps": 256,
            "minibatch_size": 64,
            "epochs": 10,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "lr": 3e-4,
            "clip_range": 0.2,
            "entropy_coefficient": 0.0,
            "value_coefficient": 0.5,
            "max_grad_norm": 0.5,
            "hidden": (64, 64),
        },
        deviations=(BESSEL,),
    ),
    "a2c": Task(
        algo="a2c",
        peer="stable_baselines3:A2C",
        env_id="CartPole-v1",
        total_steps=50_000,
        num_envs=8,
        ours={
            "num_steps": 5,
            "gamma": 0.99,
            "gae_lambda": 1.0,
            "lr": 7e-4,
            "normalize_advantages": False,
            "entropy_coefficient": 0.0,
            "value_coefficient": 0.5,
            "max_grad_norm": 0.5,
            "hidden": (64, 64),
        },
        theirs={"use_rms_prop": False},
        deviations=("Theirs has RMSprop by default; here it has Adam, as ours.", UPDATED),
    ),
    "trpo": Task(
        algo="trpo",
        peer="sb3_contrib:TRPO",
        env_id="CartPole-v1",
        total_steps=100_000,
        num_envs=2,
        eval_every=4_000,
        ours={
            "num_steps": 512,
            "minibatch_size": 512,
            "value_epochs": 20,
            "gamma": 0.99,
            "gae_lambda": 0.98,
            "lr": 1e-3,
            "target_kl": 0.01,
            "damping": 1e-3,
            "cg_iterations": 15,
            "line_search_steps": 10,
            "line_search_shrink": 0.8,
            "hidden": (64, 64),
        },
        deviations=(
            BESSEL,
            "The KL divergence is that of the new policy from the old one here, and the reverse "
            "there: the same to second order.",
            "Conjugate gradients end early at a relative residual here, at an absolute one there.",
        ),
    ),
    "recurrent_ppo": Task(
        algo="recurrent_ppo",
        peer="sb3_contrib:RecurrentPPO",
        env_id="rlbook/MaskedCartPole-v0",
        total_steps=100_000,
        num_envs=8,
        eval_every=4_000,
        seeds=5,
        ours={
            "num_steps": 32,
            "sequence_length": 32,
            "minibatch_size": 256,
            "epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "lr": 1e-3,
            "lr_decay_from": 0.0,
            "clip_range": 0.2,
            "clip_range_decay_from": 0.0,
            "entropy_coefficient": 0.0,
            "value_coefficient": 0.5,
            "max_grad_norm": 0.5,
            "lstm_units": 64,
            "hidden": (64,),
        },
        theirs={
            "policy": "MlpLstmPolicy",
            "policy_kwargs": {
                "lstm_hidden_size": 64,
                "net_arch": {"pi": [64], "vf": [64]},
                "activation_fn": nn.Tanh,
            },
        },
        deviations=(
            BESSEL,
            "Theirs cuts the rollout at one random step more in each epoch.",
        ),
    ),
    "dqn": Task(
        algo="dqn",
        peer="stable_baselines3:DQN",
        env_id="CartPole-v1",
        total_steps=30_000,
        ours={
            "hidden": (256, 256),
            "batch_size": 64,
            "lr": 2.3e-3,
            "gamma": 0.99,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "train_frequency": 256,
            "gradient_steps": 128,
            "target_update_interval": 128,
            "tau": 1.0,
            "double": False,
            "huber": True,
            "max_grad_norm": 10.0,
            "epsilon_decay_steps": 4_800,
            "final_epsilon": 0.04,
        },
        theirs={"target_update_interval": 10, "exploration_fraction": 0.16},
        deviations=(
            "Theirs copies the target network every 10 environment steps, ours every 128 updates: "
            "both right before each round of 128 updates, with the same weights.",
            "Theirs acts at random for the first 1,000 steps, ours with the falling epsilon.",
        ),
    ),
    "dqn_lunarlander": Task(
        algo="dqn",
        peer="stable_baselines3:DQN",
        env_id="LunarLander-v3",
        total_steps=100_000,
        eval_every=5_000,
        seeds=20,
        ours={
            "hidden": (256, 256),
            "batch_size": 128,
            "lr": 6.3e-4,
            "gamma": 0.99,
            "buffer_size": 50_000,
            "learning_starts": 0,
            "train_frequency": 4,
            "gradient_steps": 4,
            "target_update_interval": 250,
            "tau": 1.0,
            "double": False,
            "huber": True,
            "max_grad_norm": 10.0,
            "epsilon_decay_steps": 12_000,
            "final_epsilon": 0.1,
        },
        theirs={
            "gradient_steps": -1,  # as many as steps were taken: 4
            "exploration_fraction": 0.12,  # 12,000 steps
        },
        deviations=(
            "Ours makes its first update when 128 transitions are stored, theirs after 4 steps.",
        ),
        variants={
            "rlbook, Double": {"double": True},
            "rlbook, Double, squared error": {
                "double": True,
                "huber": False,
                "max_grad_norm": None,
            },
        },
    ),
    "sac": Task(
        algo="sac",
        peer="stable_baselines3:SAC",
        env_id="Pendulum-v1",
        total_steps=5_000,
        eval_every=250,
        ours={
            "hidden": (64, 64),
            "batch_size": 128,
            "lr": 1e-3,
            "gamma": 0.99,
            "tau": 0.005,
            "buffer_size": 100_000,
            "learning_starts": 100,
            "train_frequency": 1,
            "gradient_steps": 1,
            "initial_alpha": 1.0,
            "target_entropy": -1.0,
        },
        theirs={"ent_coef": "auto"},
        deviations=(
            "Theirs halves the critics' loss, which Adam undoes.",
            "Theirs adds 1e-6 inside the logarithm of the tanh correction; ours is exact.",
            "Ours makes its first update when 128 transitions are stored, theirs after 100 steps.",
            UPDATED,
        ),
    ),
}


class Evaluations(BaseCallback):
    """Evaluates their agent at the steps and in the episodes in which ours is evaluated."""

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__()
        self.task, self.seed = task, seed
        self.envs = [make_env(task.env_id) for _ in range(task.eval_episodes)]
        self.steps: list[int] = []
        self.returns: list[float] = []

    def greedy(self, obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        """Act without exploring."""
        return self.model.predict(obs, state, start, deterministic=True)

    def _on_step(self) -> bool:
        step, task = self.num_timesteps, self.task
        if crosses(step, task.num_envs, task.eval_every):
            found = evaluate(self.greedy, self.envs, derive_seed(self.seed, "evaluation", step))
            self.steps.append(step)
            self.returns.append(found.mean)
        return step < task.total_steps  # theirs would go on to the end of a rollout


Curve = dict[str, Any]  # steps, returns, seconds


def run_ours(task: Task, seed: int, **changes: Any) -> Curve:
    """Train our agent and return its evaluations."""
    result = train(task.our_agent(seed, **changes), progress=False)
    steps, returns = result.curve("eval_return_mean")
    return {"steps": steps.tolist(), "returns": [short(x) for x in returns]}


def run_theirs(task: Task, seed: int) -> Curve:
    """Train their agent and return its evaluations."""
    callback = Evaluations(task, seed)
    with torch_for_learning(threads=1):
        task.their_model(seed).learn(task.total_steps, callback=callback)
    return {"steps": callback.steps, "returns": [short(x) for x in callback.returns]}


def contestants(task: Task, variants: bool = False) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return by name the settings in full, and what trains one seed."""

    def ours(changes: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], Curve]]:
        config = task.our_agent(0, **changes).config
        settings = {k: v for k, v in plain(vars(config)).items() if k not in ("seed", "run_dir")}
        return settings, lambda seed: run_ours(task, seed, **changes)

    found: dict[str, tuple[dict[str, Any], Any]] = {OURS: ours({})}
    theirs = {"num_envs": task.num_envs, **task.their_settings()}
    found[task.peer_name] = theirs, lambda seed: run_theirs(task, seed)
    if variants:
        found |= {name: ours(changes) for name, changes in task.variants.items()}
    return found


def agree(stored: dict[str, Any], today: dict[str, Any]) -> bool:
    """Say whether a run would be made with the stored settings today; new ones may have come."""
    today = plain(today)
    return all(name in today and today[name] == value for name, value in stored.items())


def stored_run(path: Path, settings: dict[str, Any], work: Callable[[], Curve]) -> Curve:
    """Return what an earlier call stored, or do the work and store it."""
    if path.exists():
        found: Curve = json.loads(path.read_text())
        if not agree(found["settings"], settings):
            raise ValueError(f"{path} was made with other settings: choose another --run-dir.")
        return found
    began = time.process_time()
    found = {"settings": settings, **work(), "seconds": short(time.process_time() - began)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(found))
    print(f"{path.stem}: {found['returns']} in {found['seconds']:.0f} s", flush=True)
    return found


def collect(task: Task, command: str, seeds: int, curves: dict[str, list[Curve]]) -> dict[str, Any]:
    """Return the result of all runs in the form of the book's stored results."""
    packages = ["stable-baselines3", "sb3-contrib"]
    runs = {}
    for who, found in curves.items():
        final = [curve["returns"][-1] for curve in found]
        runs[who] = {
            "algo": task.peer if who == task.peer_name else task.algo,
            "settings": found[0]["settings"],
            "steps": found[0]["steps"],
            "returns": [curve["returns"] for curve in found],
            "final": final,
            "iqm": [short(x) if np.isfinite(x) else None for x in iqm_interval(final)],
            "seconds": [curve["seconds"] for curve in found],
        }
    ours, theirs = runs[OURS], runs[task.peer_name]
    difference = area_difference(ours["steps"], ours["returns"], theirs["returns"])
    return {
        "command": command,
        "algo": task.algo,
        "env_id": task.env_id,
        "seeds": list(range(seeds)),
        "versions": versions() | {package: version(package) for package in packages},
        "created": datetime.date.today().isoformat(),
        "seconds": short(sum(sum(run["seconds"]) for run in runs.values())),
        "peer": task.peer,
        "difference": [short(x) for x in difference],
        "deviations": list(task.deviations),
        "runs": runs,
    }


def compare(name: str, seeds: int, run_dir: Path, out: Path, variants: bool = False) -> None:
    """Train all contestants, seed by seed in turn, and write what was found."""
    task = TASKS[name]
    command = f"python bench/parity.py {name} --seeds {seeds}" + " --variants" * variants
    entrants = contestants(task, variants)
    curves: dict[str, list[Curve]] = {who: [] for who in entrants}
    for seed in range(seeds):
        for who, (settings, work) in entrants.items():
            path = run_dir / name / f"{who.replace(', ', '_')}_{seed}.json"
            curves[who].append(stored_run(path, settings, lambda: work(seed)))  # noqa: B023
        result = collect(task, command, seed + 1, curves)
        told = "{:+.1f}, 95 % bootstrap interval {:+.1f} to {:+.1f}".format(*result["difference"])
        print(f"{name}, {seed + 1} seeds: difference of the mean heights {told}", flush=True)
    write_result(out, result)


def main() -> None:
    """Read the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, help="of each side; by default as the task says")
    parser.add_argument("--variants", action="store_true", help="also ours with one thing changed")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/parity"))
    parser.add_argument("--out", type=Path, help="book/results/parity_TASK.json by default")
    options = parser.parse_args()
    out = options.out or Path("book/results") / f"parity_{options.task}.json"
    seeds = options.seeds or TASKS[options.task].seeds
    compare(options.task, seeds, options.run_dir, out, options.variants)


if __name__ == "__main__":
    main()
