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
# # Callbacks
#
# You want a run to stop when the agent is good enough, or when it has not improved for a long
# time, and you want to keep the best agent of the run and not only the last. Or you want something
# that no library foresaw: a message on your phone, a metric of your own. For that, the [training
# loop](run.ipynb) calls objects of yours, the *callbacks*, at four moments. At the end of this
# chapter you have three that most people need, and one of your own.
#
# | | |
# |---|---|
# | Builds on | [Environments](envs.ipynb) for evaluations, [Checkpoints](checkpoint.ipynb), [The agent](agent.ipynb) |
# | New here | the protocol, stopping at a return, stopping without improvement, keeping the best agent |
# | Same as elsewhere | a class with a method for each moment |
# | Different from elsewhere | the state of a callback is part of the checkpoint, so that a resumed run is exact |
#
# This is what stopping saves. The agent below learns CartPole with a budget of 20,000 steps, and
# stops at the first evaluation whose mean return is at least 400:

# %% tags=["hide-input"]
#| export
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbook.checkpoint import write_checkpoint
from rlbook.envs import Evaluation, Mistake
from rlbook.settings import Config

if TYPE_CHECKING:  # the loop is the next chapter
    from rlbook.run import Run

# %% tags=["hide-input"]
import tempfile

import numpy as np
from matplotlib import pyplot as plt

import rlbook
from rlbook.dqn import DQN
from rlbook.figures import COLORS, label_curves, use_style

use_style()

# %%
agent = DQN.from_config("cartpole", total_steps=20_000, eval_every=1_000, stop_at_return=400, seed=1)
result = agent.learn(20_000)
steps, returns = result.curve("eval_return_mean")
print(f"stopped at step {agent.global_step:,} because {result.stopped}")
figure, ax = plt.subplots(figsize=(7, 3))
ax.plot(steps, returns, "o-", color=COLORS["dqn"])
ax.axhline(400, color=COLORS["reference"], linestyle="--")
ax.set(xlim=(0, 20_000))
label_curves(ax, "DQN on CartPole, one seed: it stops when an evaluation reaches 400")
plt.show()
assert (result.stopped is None) == (returns[-1] < 400)
assert (returns[:-1] < 400).all()

# %% [markdown]
# ## The protocol
#
# A callback has a method for each of four moments. Each method gets the run, and with it
# everything: the agent (`run.agent`), the settings (`run.config`), the lines of metrics
# (`run.logger.lines`), the files (`run.directory`) and the *collector* (`run.collector`), which
# steps the environments and holds their last observations. A callback can read all of it, and can
# act on the run in two ways:
#
# - `run.stop("the reason")` ends the run after this step, with a checkpoint, as if `total_steps`
#   were reached;
# - `run.log(name=value)` adds a metric to the next line of training metrics in `metrics.jsonl`. As
#   with the metrics of updates, the line holds the mean since the line before.
#
# If a callback remembers something between calls, its `state_dict` returns that, as plain numbers,
# texts and tensors. It is saved with each checkpoint, and a resumed run gives it back. Without
# that, a run that was killed while it waited for an improvement would begin to wait again.
#
# Training in pieces, with several calls of `learn`, should stop where the whole would. Each piece
# ends with an evaluation, whether one is due by `eval_every` or not. One that is not due is logged,
# but only the last of the run, at `total_steps` or after a stop, is told to callbacks.

# %%
#| export
class Callback:
    """Is told what happens in a run; a subclass fills in the moments that it cares for."""

    def after_step(self, run: "Run") -> None:
        """After a step of all environments and the updates that were due."""

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        """After an evaluation was logged, unless it only ends a piece of a longer run."""

    def after_checkpoint(self, run: "Run", path: Path) -> None:
        """After a checkpoint was written."""

    def at_end(self, run: "Run") -> None:
        """Before the last checkpoint of `learn`, unless an error or a signal ended it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""


Callbacks = Sequence[Callback]

# %% [markdown]
# ## Stopping
#
# The simplest one stops at a return. It looks at evaluations and not at the episodes of the
# training, because in those the agent explores.

# %%
#| export
class StopAtReturn(Callback):
    """Stops at the first evaluation whose mean return reaches `wanted`."""

    def __init__(self, wanted: float) -> None:
        self.wanted = wanted

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        if evaluation.mean >= self.wanted:
            run.stop(f"the mean return {evaluation.mean:.1f} has reached {self.wanted:g}")

# %% [markdown]
# The second one stops when `patience` evaluations in a row were no better than the best before
# them. Evaluations are noisy, and learning curves have plateaus: with a small patience you may
# stop a run that was about to improve. This callback counts, so it has a state.

# %%
#| export
class StopWithoutImprovement(Callback):
    """Stops when `patience` evaluations in a row were no better than the best before them."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("-inf"), 0

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        self.waited = 0 if evaluation.mean > self.best else self.waited + 1
        self.best = max(self.best, evaluation.mean)
        if self.waited >= self.patience:
            run.stop(f"{self.waited} evaluations were no better than {self.best:.1f}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

# %% [markdown]
# By hand: with a patience of 2 and evaluations of 1, 3, 2, 3 and 4, the third and the fourth are
# no better than 3 (an equal one is no improvement). So it stops at the fourth.

# %%
class Stopped(Exception):
    """Stands for the end of a run."""


class PretendedRun:
    """Has only the method that these callbacks call."""

    def stop(self, reason: str) -> None:
        raise Stopped(reason)


def evaluated(value: float) -> Evaluation:
    """An evaluation of one episode with this return."""
    return Evaluation(returns=np.array([value]), lengths=np.array([1]))


patient = StopWithoutImprovement(patience=2)
for number, value in enumerate((1.0, 3.0, 2.0, 3.0, 4.0), start=1):
    try:
        patient.after_evaluation(PretendedRun(), evaluated(value))
    except Stopped as reason:
        print(f"evaluation {number}: {reason}")
        break
assert number == 4 and patient.state_dict() == {"best": 3.0, "waited": 2}

# %% [markdown]
# ## Keeping the best agent
#
# An agent can get worse again while it learns, so the last agent of a run need not be the best
# one. `KeepBest` writes the agent to `checkpoints/best.pt` in the run directory whenever an
# evaluation is better than all before. The file holds no replay buffer, since it is there to act
# and not to learn on.
#
# Be careful with its score. The best of twenty noisy evaluations is partly luck, so its mean
# return tends to be too high. Evaluate the kept agent again, on new episodes, before you report a
# number: `rlbook evaluate runs/a --best`. The commands `predict`, `watch` and `export` take `--best`,
# too. In Python, `rlbook.load("runs/a/checkpoints/best.pt")` loads the kept agent, and
# `rlbook.load("runs/a")` the last one.

# %%
#| export
BEST = "best.pt"


class KeepBest(Callback):
    """Writes the agent to `checkpoints/best.pt` when an evaluation is better than all before."""

    def __init__(self) -> None:
        self.best = float("-inf")

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        if not run.directory:
            raise Mistake("KeepBest needs a 'run_dir' to keep the best agent in.")
        if evaluation.mean > self.best:
            self.best, folder = evaluation.mean, run.directory.checkpoints.directory
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder / BEST, run.agent.checkpoint(replay=False))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]

# %% [markdown]
# ## From a setting
#
# Each of the three has a setting, and so a flag and a key in YAML: `stop_at_return`,
# `stop_patience` and `keep_best`. A run that is resumed by `rlbook resume` has them again. Give
# your own callbacks to `resume(path, callbacks=[...])` again; otherwise the run warns and goes on
# without them. In Python a run without `run_dir` writes no files, so `keep_best` would keep
# nothing: that is an error.

# %%
#| export
def check_callbacks(callbacks: Any) -> None:
    """Raise unless these are callbacks in a list, and not their classes."""
    if not isinstance(callbacks, list | tuple):
        raise ValueError("`callbacks` must be a list: write callbacks=[...].")
    for each in callbacks:
        if isinstance(each, type):
            name = each.__name__
            raise ValueError(f"A callback is an instance, not a class: write {name}(...).")
        if not hasattr(each, "after_step"):
            raise ValueError(f"{each!r} is no callback: extend rlbook.callbacks.Callback.")


def make_callbacks(config: Config) -> list[Callback]:
    """Make the callbacks that the settings ask for."""
    made: list[Callback] = []
    if config.keep_best:
        if config.run_dir is None:
            raise ValueError("Setting 'keep_best' needs a 'run_dir' to keep the best agent in.")
        made.append(KeepBest())
    if config.stop_at_return is not None:
        made.append(StopAtReturn(config.stop_at_return))
    if config.stop_patience is not None:
        made.append(StopWithoutImprovement(config.stop_patience))
    if made and not config.eval_every:
        names = "'keep_best', 'stop_at_return' and 'stop_patience'"
        raise ValueError(f"Settings {names} need evaluations: set 'eval_every' above 0.")
    return made

# %%
asked = make_callbacks(Config(stop_at_return=400, keep_best=True, run_dir="runs/a"))
assert [type(each) for each in asked] == [KeepBest, StopAtReturn] and make_callbacks(Config()) == []
try:
    make_callbacks(Config(keep_best=True))
except ValueError as error:
    print(error)

# %% [markdown]
# ## One of your own
#
# How many of its greedy actions does an agent change between two evaluations? Once its policy has
# settled, there should be few. This callback keeps a few hundred observations of the training,
# asks the agent after each evaluation for its greedy actions there, and logs the fraction that
# differ from the last time.


# %%
class PolicyChange(Callback):
    """Logs the fraction of observations whose greedy action changed since the last evaluation."""

    def __init__(self, size: int = 300) -> None:
        self.size, self.seen, self.before = size, [], None

    def after_step(self, run):
        if len(self.seen) < self.size and run.agent.global_step % 5 == 0:
            self.seen.append(run.collector.obs[0].copy())

    def after_evaluation(self, run, evaluation):
        actions, _ = run.agent.predict(np.array(self.seen[: self.size]))
        if self.before is not None:
            run.log(policy_change=(actions[: len(self.before)] != self.before).mean())
        self.before = actions


with tempfile.TemporaryDirectory() as folder:
    agent = DQN.from_config("cartpole", total_steps=16_000, eval_every=1_000, seed=2, keep_best=True,
                            run_dir=f"{folder}/a")
    result = agent.learn(16_000, callbacks=[PolicyChange()])
    best = rlbook.load(f"{folder}/a/checkpoints/best.pt")
scored = result.curve("eval_return_mean")
print(f"best evaluation {scored[1].max():.0f} at step {best.global_step:,}, last {scored[1][-1]:.0f}")
assert best.global_step == scored[0][scored[1].argmax()]

# %% tags=["hide-input"]
figure, (curve, change) = plt.subplots(1, 2, figsize=(8, 3))
curve.plot(*scored, "o-", color=COLORS["dqn"])
curve.plot(best.global_step, scored[1].max(), "*", ms=14, color=COLORS["reference"], label="kept")
curve.legend()
label_curves(curve, "greedy episodes")
change.plot(*result.curve("policy_change"), "o-", color=COLORS["dqn"])
label_curves(change, "policy change", "fraction of greedy actions\nthat changed")
plt.show()

# %% [markdown]
# A logged value is written with the next line of the training, so each point on the right is 1,000
# steps after its evaluation. From the first evaluation to the second most actions change. After that
# few do, also where the return falls and rises again: a few actions decide it. `PolicyChange` has no
# `state_dict` of its own, so a resumed run would collect other observations and log other numbers.
# (The weights would still be exact.) Exercise 1 repairs that.
#
# ## Exercises
#
# **Exercise 1.** Give `PolicyChange` a `state_dict` and a `load_state_dict`, so that a resumed run
# logs the same numbers.
#
# <details>
# <summary>Solution</summary>
#
# Arrays become tensors, which a checkpoint may hold.
#
# ```python
# import torch
#
#
# class ExactPolicyChange(PolicyChange):
#     def state_dict(self):
#         before = None if self.before is None else torch.from_numpy(self.before)
#         return {"seen": torch.from_numpy(np.array(self.seen)), "before": before}
#
#     def load_state_dict(self, state):
#         self.seen = list(state["seen"].numpy())
#         self.before = None if state["before"] is None else state["before"].numpy()
#
#
# first, second = ExactPolicyChange(), ExactPolicyChange()
# first.seen, first.before = [np.ones(4), np.zeros(4)], np.array([0, 1])
# second.load_state_dict(first.state_dict())
# assert np.array_equal(second.seen, first.seen) and np.array_equal(second.before, first.before)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2, a planted bug.** This callback should stop a run after a number of finished
# episodes, however long they are. It stops far too early. Why?


# %%
class EpisodeBudgetWithABug(Callback):
    """As intended: stops after so many finished episodes."""

    def __init__(self, episodes: int) -> None:
        self.left = episodes

    def after_step(self, run):
        self.left -= len(run.collector.recent)
        if self.left <= 0:
            run.stop("the episodes are used up")


agent = DQN("CartPole-v1", eval_every=0, learning_starts=1_000)
agent.learn(500, progress=False, callbacks=[EpisodeBudgetWithABug(10)])
print("stopped at step", agent.global_step)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `collector.recent` holds the last twenty returns, not those of this step, so each episode is
# counted again at each step. `collector.finished` holds the episodes that ended in the last step.
# (`episode_start` would count too many: a checkpoint resets all environments, so episodes start
# that did not end.)
#
# ```python
# class EpisodeBudgetWithABug(Callback):
#     """Stops after so many finished episodes."""
#
#     def __init__(self, episodes: int) -> None:
#         self.left = episodes
#
#     def after_step(self, run):
#         self.left -= len(run.collector.finished)
#         if self.left <= 0:
#             run.stop("the episodes are used up")
#
#
# agent = DQN("CartPole-v1", eval_every=0, learning_starts=1_000, seed=3)
# agent.learn(500, progress=False, callbacks=[EpisodeBudgetWithABug(10)])
# assert 100 < agent.global_step < 450  # at random an episode lasts about 22 steps
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Write a callback that stops a run after a given number of seconds.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# import time
#
#
# class TimeLimit(Callback):
#     def __init__(self, seconds):
#         self.seconds, self.began = seconds, time.monotonic()
#
#     def after_step(self, run):
#         if time.monotonic() - self.began > self.seconds:
#             run.stop(f"{self.seconds} seconds are over")
#
#
# agent = DQN("CartPole-v1", eval_every=0, learning_starts=1_000)
# agent.learn(400, progress=False, callbacks=[TimeLimit(0.0)])
# assert agent.global_step < 400
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Write a callback that collects the mean return of each evaluation, and compare it
# with the history of the run.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# class Collect(Callback):
#     def __init__(self):
#         self.means = []
#
#     def after_evaluation(self, run, evaluation):
#         self.means.append(evaluation.mean)
#
#
# collect = Collect()
# agent = DQN("CartPole-v1", eval_every=100, eval_episodes=2, learning_starts=1_000)
# history = agent.learn(300, progress=False, callbacks=[collect]).history
# assert collect.means == [line["eval_return_mean"] for line in history if "eval_return_mean" in line]
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# import rlbook
# from rlbook.callbacks import StopAtReturn
# from rlbook.dqn import DQNConfig, train_dqn
#
# result = train_dqn(DQNConfig(run_dir="runs/a", keep_best=True), callbacks=[StopAtReturn(475)])
# result.stopped
# best = rlbook.load("runs/a/checkpoints/best.pt")
# ```
#
# ```
# rlbook train dqn --config cartpole --stop-at-return 475 --stop-patience 20 --keep-best --run-dir runs/a
# rlbook evaluate runs/a --best
# ```
