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
# # Deep reinforcement learning, a sourcebook
#
# **A book that runs.** Each chapter builds an algorithm or a tool from nothing, with an example by
# hand before each piece of code. Its cells are also a Python package: the code that teaches is the
# code that trains. The tests run every chapter, with asserts on the numbers that it shows.
#
# ![An arm that a DQN agent swings up](_static/agent_dqn.gif)
# ![A pole that a DRQN agent balances without seeing speeds](_static/agent_drqn.gif)
# ![A pendulum that a SAC agent swings up](_static/agent_sac.gif)
# ![A point that a DrQ-v2 agent moves to its goal, from pixels](_static/agent_drqv2.gif)
#
# Four agents that learned on a laptop: DQN swings up an arm, DRQN balances a pole whose speed it cannot
# see, SAC swings up a pendulum, and DrQ-v2 moves a point to its goal from pixels.
#
# **What you get**: the algorithms from DQN to DrQ-v2, explained from the first word; code that you
# can import, in plain PyTorch; runs that can be stopped and resumed; and results over several
# *seeds* (the same run with other random numbers), each stored with the command that made it. It
# is made for students and engineers with a laptop and no GPU.
#
# ## Five minutes
#
# Three lines train an agent to balance a pole on a cart. It pushes at random at first; nobody tells it
# the laws of motion. `"cartpole"` names settings that come with the library.

# %%
from rlbook import DQN

agent = DQN.from_config("cartpole", seed=1)
result = agent.learn(20_000)

# %% [markdown]
# What happened? Every 2,500 steps the agent was evaluated: how many steps does it keep the pole up? One
# attempt, an *episode*, ends when the pole falls, or after 500 steps.

# %% tags=["hide-input"]
import os

from matplotlib import pyplot as plt

import rlbook
from rlbook.envs import make_env
from rlbook.figures import COLORS, filmstrip, label_curves, use_style

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()
steps, returns = result.curve("eval_return_mean")
figure, ax = plt.subplots(figsize=(6, 2.8))
ax.plot(steps, returns, color=COLORS["dqn"], marker="o", label="DQN, one seed")
ax.axhline(22, color=COLORS["random"], ls="--", label="pushing at random")
label_curves(ax, ylabel="steps balanced, of 500")
ax.set_ylim(0, 515)
ax.legend()
plt.show()

# %% [markdown]
# And here is what it does now, in an episode that it has not seen, a picture every 25 steps:

# %% tags=["hide-input"]
env = make_env("CartPole-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=7)
frames = []
for step in range(200):
    if step % 25 == 0:
        frames.append(env.render())
    action, _ = agent.predict(obs)
    obs, _, terminated, truncated, _ = env.step(int(action))
    if terminated or truncated:
        break
env.close()
filmstrip(frames)

# %% [markdown]
# In a shell, with all 50,000 steps of these settings:
#
# ```
# rlbook train dqn --config cartpole --run-dir runs/a
# rlbook watch runs/a --out agent.gif
# ```
#
# ## Where to go next
#
# **To learn**, start with [Basics](basics.ipynb): what an agent, a policy, a return and a value are, on a
# world of a dozen states. Then read [Environments](envs.ipynb), [Replay](replay.ipynb) and
# [DQN](dqn.ipynb), and go on along the arrows of the figure below. You need Python with NumPy, enough
# PyTorch to read a training loop, and to know what a derivative and an expected value are. You need no
# reinforcement learning.
#
# **To use** the library, go to the section *Use it* at the end of your algorithm's chapter; the map
# near the end of [Basics](basics.ipynb) says which algorithm is for which problem. [The command
# line](cli.ipynb) and [Sweeps](sweep.ipynb) are the tools. For a problem of your own, read
# [Your own environment, network and algorithm](your_own.ipynb).
#
# **To contribute**, read [how chapters become modules](tangle.ipynb), then [the agent](agent.ipynb) and
# [the run](run.ipynb); the README says how to add a chapter.
#
# The figure shows what a reader needs before each chapter:

# %% tags=["hide-input"]
before = {  # chapter: what one should have read
    "basics": (),
    "envs": ("basics",),
    "replay": ("envs",),
    "dqn": ("replay",),
    "drqn": ("dqn",),
    "r2d2": ("drqn",),
    "policy_gradient": ("dqn",),
    "ppo": ("policy_gradient",),
    "recurrent_ppo": ("ppo", "drqn"),
    "trpo": ("ppo",),
    "sac": ("dqn",),
    "redq": ("sac",),
    "pixels": ("replay",),
    "drqv2": ("pixels", "sac"),
}


def depth(chapter: str) -> int:
    """Return the length of the longest way from the start of the book."""
    return max((depth(name) + 1 for name in before[chapter]), default=0)


rows = {"basics": 1, "envs": 1, "replay": 1, "dqn": 1, "drqn": 0, "r2d2": 0, "sac": 1, "redq": 1,
        "pixels": 2, "drqv2": 2, "policy_gradient": 3, "ppo": 3, "recurrent_ppo": 1, "trpo": 3}
place = {chapter: (depth(chapter), rows[chapter]) for chapter in before}
figure, ax = plt.subplots(figsize=(8, 3.0))
ax.set(xlim=(-0.5, max(x for x, _ in place.values()) + 0.5), ylim=(3.6, -0.6))
ax.axis("off")
for chapter, names in before.items():
    for name in names:
        ax.annotate("", place[chapter], place[name], zorder=1, arrowprops={
            "arrowstyle": "-|>", "color": "#999999", "lw": 0.9, "shrinkA": 16, "shrinkB": 20})
for chapter, (x, y) in place.items():
    color = COLORS.get("a2c" if chapter == "policy_gradient" else chapter, "#666666")
    ax.text(x, y, chapter, ha="center", va="center", fontsize=9, zorder=2,
            weight="bold" if color != "#666666" else "normal",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": color, "lw": 1.4})
plt.show()

# %% [markdown]
# Each chapter on an algorithm has the same parts. It first shows what you will get and which
# problem it solves, and then builds the pieces with numbers by hand. Next come the whole
# algorithm, a live run of at most a minute and a half, and a look inside the trained agent. Then
# the chapter measures how much each part helps, over several seeds, and lists what differs from
# the paper. Last come exercises, one of them a planted bug. The solutions are folded away.
#
# These are the algorithms of this book. Do not worry about words that you do not know yet; each chapter
# explains its own.

# %%
for name, algorithm in rlbook.ALGORITHMS.items():
    print(f"{name:>6}: {algorithm.observations} observations, {algorithm.actions} actions;",
          algorithm.__doc__)

# %% [markdown]
# ## Ways to use it
#
# | | |
# |---|---|
# | Read | this site, or the notebooks in `book/` on your code host |
# | Experiment | `make lab` opens JupyterLab on the chapters |
# | Import | `from rlbook import DQN` |
# | Shell | `rlbook train dqn --config cartpole --run-dir runs/a` |
# | Test | `make test` runs the library's tests and every chapter |
#
# [Notation](notation.ipynb) lists symbols and shapes, the [glossary](glossary.ipynb) the words, and the
# [timeline](timeline.ipynb) what came when.
#
# ## Reference
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition. MIT Press.
