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
# This is a book that runs. Each chapter builds one algorithm from nothing: the model, the buffer, the
# loss, the trainer, in the order in which you need them, with one small example by hand before each
# piece of code. The cells that make up the algorithm are exported into a Python package of the same
# name, so what you read is what you import:
#
# ```python
# from rlbook.dqn import DQN
#
# agent = DQN("CartPole-v1", seed=1)
# agent.learn(20_000)
# print(agent.evaluate(episodes=10).mean)
# ```
#
# And because every chapter is executed from top to bottom by the tests, with asserts on the numbers
# that it shows, the book is its own test suite.
#
# ## For whom
#
# For students and engineers with a laptop and no GPU who want to see an idea work within a minute,
# trust the numbers, and take the code into their own scripts.
#
# ## What you need to know
#
# - Python with NumPy, and enough PyTorch to read a training loop: tensors, modules, `backward`.
# - What a derivative and an expected value are.
# - No reinforcement learning: the words are introduced where they are first needed. If you would like
#   a first book on the subject itself, read the opening chapters of Sutton and Barto (2018) beside
#   this one.
#
# ## Five minutes
#
# Below, in this very cell, an agent learns to balance a pole. It plays at random at first; nobody tells
# it the laws of motion.

# %%
import os

import numpy as np
from matplotlib import pyplot as plt

import rlbook
from rlbook.dqn import DQN
from rlbook.envs import make_env
from rlbook.figures import COLORS, filmstrip, pick_frames, use_style

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()
agent = DQN("CartPole-v1", num_envs=4, n_step=10, tau=0.02, target_every=1, update_every=3,
            observation_scale=(1, 1, 8, 1), epsilon_steps=10_000, epsilon_floor=0.1,
            lr_decay_from=0.5, eval_every=1000, seed=0)
result = agent.learn(20_000)

# %% tags=["hide-input"]
lines = [line for line in result.history if "eval_return_mean" in line]
figure, ax = plt.subplots(figsize=(6, 2.8))
ax.plot(
    [line["global_step"] for line in lines],
    [line["eval_return_mean"] for line in lines],
    color=COLORS["dqn"],
    marker="o",
)
ax.axhline(22, color=COLORS["random"], ls="--", label="pushing at random")
ax.set(xlabel="environment steps", ylabel="steps balanced, of 500", ylim=(0, 515))
ax.legend()
plt.show()

# %% [markdown]
# What it does now, in an episode that it has not seen:

# %%
env = make_env("CartPole-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=7)
frames, done = [env.render()], False
while not done and len(frames) < 200:
    action, _ = agent.predict(obs)
    obs, _, terminated, truncated, _ = env.step(int(action))
    frames.append(env.render())
    done = terminated or truncated
env.close()
filmstrip(pick_frames(np.array(frames), 8))

# %% [markdown]
# ## How to read
#
# Read the foundations in order if you want to know how everything works, or go straight to an
# algorithm and come back when a name is new: every name that a chapter imports from `rlbook.envs`,
# say, is built in the chapter *Environments*, under the same name.
#
# Each chapter on an algorithm has the same parts: a promise, the problem that it solves, the pieces
# with numbers by hand, a live run of at most a minute and a half, a look inside the trained agent,
# what each part buys over several seeds, what differs from the paper, and exercises, one of which is
# a bug that somebody planted. The solutions are folded away.
#
# The algorithms that this book has built so far:

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
# | Import | `from rlbook.dqn import DQN` |
# | Shell | `rlbook train dqn --config cartpole --run-dir runs/a` |
# | Test | `make test` runs the library's tests and every chapter |
#
# ## Conventions
#
# - $s$, $a$, $r$, $s'$: state, action, reward, next state; $\gamma$: the discount; $\theta$: the weights
#   of a network; $\theta^-$: those of its target; $\varepsilon$: the probability of a random action.
# - A *step* is one step of one environment. Four environments that step once make four steps.
# - A *return* is the sum of the rewards of an episode, not discounted, unless it says otherwise.
# - Arrays are `(batch, ...)` or `(time, batch, ...)`, and a number per sample is `(batch,)`.
# - A curve over several seeds is a mean with a 95 % Student-t interval of the mean.
#
# ## Reference
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition. MIT Press.
