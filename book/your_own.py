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
# # Your own environment, network and algorithm
#
# You have a problem of your own, an idea for a network, or an algorithm that this book does not
# have. This chapter brings one of each, and each takes about a page:
#
# - an **environment**: a path along a cliff, whose observation is a dictionary;
# - a **network**: DQN with a dueling network;
# - an **algorithm**: SARSA, from its loss to its class.
#
# Then all of it goes into a file, and the shell trains it, kills it, resumes it, evaluates it and
# asks it for an action. You do not need to read the library for any of this.
#
# Here is the world. The agent starts at S and walks to G. A step costs 1. A step onto the cliff
# costs 20 and leads back to S. The shortest path runs along the edge and takes 7 steps. On the
# path of 9 steps, away from the edge, an agent whose steps are sometimes random falls less often.

# %% tags=["hide-input"]
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Dict, Discrete
from gymnasium.wrappers import FlattenObservation, TimeLimit
from matplotlib import pyplot as plt
from pydantic import Field
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult, load
from rlbook.checkpoint import CheckpointDirectory
from rlbook.dqn import DQN, MLP, epsilon_greedy
from rlbook.figures import COLORS, use_style
from rlbook.settings import Config

use_style()


def draw_world(ax: plt.Axes, paths: dict[str, list[tuple[int, int]]]) -> None:
    """Draw the cliff and some paths of (row, column)."""
    colors = (COLORS["dqn"], COLORS["sac"])
    ax.add_patch(plt.Rectangle((0.5, 1.5), 4, 1, color="#cccccc"))
    for x, text in ((0, "S"), (5, "G"), (2.5, "cliff")):
        ax.text(x, 2.25, text, ha="center", va="center")
    for i, (name, path) in enumerate(paths.items()):
        rows, columns = np.array(path).T
        ax.plot(columns, rows + 0.12 * i - 0.06, color=colors[i], marker=".", label=name)
    ax.set(xlim=(-0.5, 5.5), ylim=(2.5, -0.5), xticks=[], yticks=[], aspect="equal")
    for line in range(1, 6):
        ax.axvline(line - 0.5, color="#dddddd", lw=0.8, zorder=0)
    for line in range(1, 3):
        ax.axhline(line - 0.5, color="#dddddd", lw=0.8, zorder=0)


edge = [(2, 0), *((1, column) for column in range(6)), (2, 5)]
safe = [(2, 0), (1, 0), *((0, column) for column in range(6)), (1, 5), (2, 5)]
figure, ax = plt.subplots(figsize=(6, 2.6))
draw_world(ax, {"along the edge, 7 steps": edge, "away from it, 9 steps": safe})
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)
plt.show()

# %% [markdown]
# | | |
# |---|---|
# | Builds on | [Environments](envs.ipynb), [DQN](dqn.ipynb), [The agent](agent.ipynb) |
# | You write | two spaces, `reset` and `step`; one `nn.Module`; five methods and a loss |
# | You get | settings, seeds, evaluation, files, exact resume, sweeps, the command line |

# %% [markdown]
# ## An environment
#
# An environment is a subclass of Gymnasium's `Env` with two spaces and two methods. Three rules
# keep it sound:
#
# - call `super().reset(seed=seed)` and take all random numbers from `self.np_random`, so that a
#   seed fixes an episode;
# - return `terminated` only where the task is over. A limit on the steps is for the wrapper
#   `TimeLimit`, which sets `truncated`: [an agent bootstraps through that](envs.ipynb);
# - return observations that fit the space. The library checks their shapes and says in one
#   sentence what is wrong.
#
# Here the observation is a dictionary, as in many robotics environments.


# %%
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left: (rows, columns)


class Cliff(gym.Env[dict[str, int], int]):
    """Walk along a cliff: a step costs 1, a fall 20 and the way back."""

    def __init__(self, width: int = 6) -> None:
        self.rows, self.columns = 3, width
        self.observation_space = Dict({"row": Discrete(self.rows), "column": Discrete(width)})
        self.action_space = Discrete(4)

    def observe(self) -> dict[str, int]:
        """Return what the agent sees."""
        return {"row": self.row, "column": self.column}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, int], dict[str, Any]]:
        """Start at the left end."""
        super().reset(seed=seed)
        self.row, self.column = self.rows - 1, 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[dict[str, int], float, bool, bool, dict[str, Any]]:
        """Make a move; walls stop it."""
        down, right = MOVES[action]
        self.row = min(max(self.row + down, 0), self.rows - 1)
        self.column = min(max(self.column + right, 0), self.columns - 1)
        if self.row < self.rows - 1 or self.column == 0:
            return self.observe(), -1.0, False, False, {}
        if self.column == self.columns - 1:
            return self.observe(), -1.0, True, False, {}  # the goal
        self.column = 0
        return self.observe(), -20.0, False, False, {}  # the cliff


# %% [markdown]
# By hand: from the start, a step to the right leads onto the cliff. The path along the edge is up,
# five times right, and down: seven steps with a reward of −1 each.

# %%
world = Cliff()
world.reset()
assert world.step(1)[:3] == ({"row": 2, "column": 0}, -20.0, False)
steps = [world.step(action) for action in (0, 1, 1, 1, 1, 1, 2)]
assert sum(reward for _, reward, *_ in steps) == -7
assert [terminated for _, _, terminated, *_ in steps] == [False] * 6 + [True]

# %% [markdown]
# DQN takes a vector. If it gets a dictionary, the error names the wrapper of Gymnasium that makes
# a vector of it:

# %%
try:
    DQN(Cliff)
except ValueError as error:
    print(error)

# %% [markdown]
# So write a function that makes the environment with its wrappers. The column becomes six entries,
# one of them 1, and the row three. Agents and settings take such a function in place of an id, or
# the class if it needs no wrapper, or an instance.


# %%
def make_cliff(width: int = 6) -> gym.Env:
    """Make a cliff with a vector as observation and a limit of 100 steps."""
    return FlattenObservation(TimeLimit(Cliff(width), 100))


# %%
print(make_cliff().reset()[0], "is what an agent sees at the start")
agent = DQN(make_cliff, env_kwargs={"width": 4})
assert agent.observation_space.shape == (7,)

# %% [markdown]
# ## A network
#
# DQN makes its network in `make_network` (SAC has `make_actor` and `make_critics`). Override it
# with any module that has the same inputs and outputs. For DQN these are observations (batch,
# inputs) in and values (batch, actions) out.
#
# A **dueling** network (Wang et al. 2016) has two heads, the value $V(s)$ of a state and the
# advantage $A(s, a)$ of each action over the others. It adds them, after it has subtracted the
# mean advantage:
#
# $$Q(s, a) = V(s) + A(s, a) - \tfrac{1}{|\mathcal{A}|}\sum_{a'} A(s, a').$$
#
# By hand: with $V = 5$ and the advantages 1 and 3, whose mean is 2, the values are 4 and 6.


# %%
def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Combine values (batch, 1) and advantages (batch, actions) to Q-values (batch, actions)."""
    return value + advantage - advantage.mean(dim=1, keepdim=True)


# %%
assert dueling(torch.tensor([[5.0]]), torch.tensor([[1.0, 3.0]])).tolist() == [[4, 6]]


# %%
class DuelingNetwork(nn.Module):
    """A Q-network with a head for the state and one for the actions."""

    def __init__(self, inputs: int, actions: int, units: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, units), nn.ReLU())
        self.value, self.advantage = nn.Linear(units, 1), nn.Linear(units, actions)

    def forward(self, obs: Tensor) -> Tensor:
        """Map observations (batch, inputs) to values (batch, actions)."""
        features = self.body(obs.float())
        return dueling(self.value(features), self.advantage(features))


class DuelingDQN(DQN):
    """DQN with a dueling network."""

    name = "dueling_dqn"

    def make_network(self) -> nn.Module:
        """Make the network."""
        (inputs,), actions = self.observation_space.shape, int(self.action_space.n)
        return DuelingNetwork(inputs, actions, units=64)


# %% [markdown]
# Buffer, target network, exploration and loss are those of [DQN](dqn.ipynb). Here 12,000 steps are
# enough:

# %%
settings: dict[str, Any] = {"num_envs": 8, "eval_every": 0, "seed": 0}
replay = {"learning_starts": 200, "target_update_interval": 1, "tau": 0.05, "gamma": 0.95}
exploring = {"final_epsilon": 0.2, "epsilon_decay_steps": 2_000}
dueling_dqn = DuelingDQN(make_cliff, **settings, **replay, **exploring)
dueling_dqn.learn(12_000, progress=False)
print("greedy return:", dueling_dqn.evaluate(episodes=1).mean)
assert dueling_dqn.evaluate(episodes=1).mean >= -15

# %% [markdown]
# ## An algorithm
#
# DQN learns what the greedy policy would earn. **SARSA** learns what the agent earns as it really
# acts, random steps included. It is named after what it learns from: state, action, reward, next
# state and next action. Its target uses the value of that next action, where DQN uses the largest
# value:
#
# $$y = r + \gamma\,(1 - d)\,Q(s', a'), \qquad a' \sim \pi(\cdot \mid s'),$$
#
# with $d = 1$ at a terminated step. Write the loss as a pure function, and check it with numbers.
# By hand: $Q(s, a) = 2$, $r = 1$, $\gamma = 0.5$ and $Q(s', a') = 6$ give $y = 4$ and a squared
# error of 4. At a terminated step $y = 1$, and the squared error is 1. (DQN would take the larger
# value $8$ of the other action, and get $y = 5$.)


# %%
def sarsa_loss(
    q: Tensor,  # (batch, actions), with gradient
    action: Tensor,  # (batch,)
    reward: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, actions)
    next_action: Tensor,  # (batch,)
    gamma: float,
) -> Tensor:
    """Return the mean squared TD error of the actions that were taken."""
    next_value = next_q.gather(1, next_action.unsqueeze(1)).squeeze(1)
    target = reward + gamma * ~terminated * next_value
    chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)
    return nn.functional.mse_loss(chosen, target.detach())


# %%
numbers = torch.tensor([[2.0, 9.0]]), torch.tensor([0]), torch.tensor([1.0])
next_step = torch.tensor([[8.0, 6.0]]), torch.tensor([1])
assert sarsa_loss(*numbers, torch.tensor([False]), *next_step, gamma=0.5) == 4
assert sarsa_loss(*numbers, torch.tensor([True]), *next_step, gamma=0.5) == 1

# %% [markdown]
# Settings are a class with annotated fields. A plain default is enough; `Field` adds a range and a
# line of help. Each field becomes a keyword in Python, a key in YAML and a flag in the shell.


# %%
class SarsaConfig(Config):
    """The settings of SARSA."""

    gamma: float = Field(default=0.95, ge=0, le=1, description="Discount of a later reward.")
    epsilon: float = Field(default=0.2, ge=0, le=1, description="Probability of a random action.")
    lr: float = 1e-3
    units: int = 64


# %% [markdown]
# An algorithm is a subclass of `Agent` with a `name`, a class of settings, `parts` and five
# methods. `parts` names the attributes that learning depends on, so that checkpoints save them:
# networks, optimisers, buffers, anything with `state_dict` and `load_state_dict`. A network or
# an optimiser that no part saves is an error as soon as an agent is made.
#
# - `build` makes networks and optimisers.
# - `act` chooses an action for each observation of a batch. It takes random numbers from
#   `self.generator`. `state` is the hidden state of a recurrent agent; SARSA passes it through.
# - `observe` gets one step of all environments.
# - `batches` yields what to learn from after this step. SARSA learns from each step once, so it
#   needs no buffer. (An agent with a replay buffer has `sample` instead, as [DQN](dqn.ipynb)
#   does.)
# - `update` makes one gradient step on a batch and returns an `UpdateResult` with its metrics,
#   scalar tensors by name. `loss` must be among them: the run stops if it is not finite.
#
# For the setting `compile`, put the forward pass, the loss and `loss.backward()` into a method of
# their own and list its name in `compiled`, as [DQN](dqn.ipynb) does.
#
# The next action is sampled from the policy at the next observation, also if the episode was
# truncated there.


# %%
class Sarsa(Agent):
    """SARSA with a small network, which learns from each step once."""

    name = "sarsa"
    config_class = SarsaConfig
    parts = ("q_network", "optimizer")

    def build(self) -> None:
        """Make network and optimiser."""
        (inputs,), actions = self.observation_space.shape, int(self.action_space.n)
        self.q_network = MLP((inputs, self.config.units, actions)).to(self.device)
        self.optimizer = torch.optim.Adam(self.q_network.parameters(), lr=self.config.lr)

    def q_values(self, obs: np.ndarray) -> Tensor:
        """Return the values (batch, actions) of observations."""
        return self.q_network(torch.as_tensor(obs, dtype=torch.float32, device=self.device))

    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the best action, or with probability epsilon any."""
        actions = self.q_values(obs).argmax(dim=1).cpu().numpy()
        if explore:
            choices, epsilon = int(self.action_space.n), self.config.epsilon
            actions = epsilon_greedy(actions, choices, epsilon, self.generator)
        return actions, state

    def observe(self, transition: Transition) -> None:
        """Keep the last step of all environments."""
        self.transition = transition

    def batches(self) -> Iterator[Transition]:
        """Learn from each step once."""
        yield self.transition

    def update(self, batch: Transition) -> UpdateResult:
        """Make one gradient step on the TD error."""
        next_action, _ = self.act(batch.next_obs, None, batch.episode_start, explore=True)
        numbers = batch.action, batch.reward.astype(np.float32), batch.terminated, next_action
        action, reward, terminated, next_action = (
            torch.as_tensor(values, device=self.device) for values in numbers
        )
        with torch.no_grad():
            next_q = self.q_values(batch.next_obs)
        q = self.q_values(batch.obs)
        loss = sarsa_loss(q, action, reward, terminated, next_q, next_action, self.config.gamma)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return UpdateResult({"loss": loss.detach()})


# %%
sarsa = Sarsa(make_cliff, num_envs=16, eval_every=0, checkpoint_every=4_000, seed=0)
sarsa.learn(24_000, progress=False)
print("greedy return:", sarsa.evaluate(episodes=1).mean)
assert sarsa.evaluate(episodes=1).mean >= -15

# %% [markdown]
# Which path does each of them take? DQN's values say what a walk without random steps costs, so
# the edge is best. SARSA's values include the falls, so here it keeps away from the edge.
# (A network's values are not exact: with another seed SARSA may walk along it, too.)


# %%
def walk(agent: Agent) -> list[tuple[int, int]]:
    """Return the places on a greedy walk."""
    env = make_cliff()
    obs, _ = env.reset(seed=0)
    places, ended = [(2, 0)], False
    while not ended:
        action, _ = agent.predict(obs)
        obs, _, terminated, truncated, _ = env.step(int(action))
        ended = terminated or truncated
        places.append((env.unwrapped.row, env.unwrapped.column))
    return places


figure, ax = plt.subplots(figsize=(6, 2.6))
draw_world(ax, {"dueling DQN": walk(dueling_dqn), "SARSA": walk(sarsa)})
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)
plt.show()

# %% [markdown]
# ## In the shell
#
# The shell, other processes and other machines cannot see into this notebook. Put what you wrote
# into a file, here `my_things.py`. Then `my_things:make_cliff` is the environment and
# `my_things:sarsa` the algorithm. (The next cell collects the cells above into the file. You would
# write them there in the first place.)

# %%
imports = """
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Dict, Discrete
from gymnasium.wrappers import FlattenObservation, TimeLimit
from pydantic import Field
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.dqn import DQN, MLP, epsilon_greedy
from rlbook.settings import Config
"""
pieces = ("MOVES", "def make_cliff", "def dueling", "class Dueling", "def sarsa_loss", "class Sarsa")
written = [cell for cell in globals()["In"] if cell.startswith(pieces)]  # IPython keeps all cells there
folder = Path(tempfile.mkdtemp())
(folder / "my_things.py").write_text("\n\n\n".join([imports, *written]))


def start(words: str) -> subprocess.Popen[str]:
    """Start a command in the folder of the file."""
    program = "import sys; from rlbook.cli import main; sys.exit(main())"  # which is what `rlbook` does
    command = [sys.executable, "-c", program, *words.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "COLUMNS": "100"}, **pipes)


def shell(words: str) -> str:
    """Run a command to its end and return what it printed."""
    process = start(words)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text


listed = shell("list my_things")
print("$ rlbook list my_things\n...\n" + listed[listed.index("my_things") :])

# %% [markdown]
# Now train, and kill it in the middle with SIGKILL, which no program can catch:

# %%
flags = "--env-id my_things:make_cliff --num-envs 16 --total-steps 24000 --checkpoint-every 4000"
process = start(f"train my_things:sarsa {flags} --eval-every 0 --run-dir runs/cliff")
checkpoints = CheckpointDirectory(folder / "runs" / "cliff" / "checkpoints")
while not checkpoints.paths() and process.poll() is None:
    time.sleep(0.05)
process.send_signal(signal.SIGKILL)
process.communicate()
killed_at = checkpoints.last_step()
print("killed; its last checkpoint is at step", f"{killed_at:,}")
assert killed_at < 24_000

# %% [markdown]
# The run remembers its algorithm and its environment, so to resume it you name only the directory:

# %%
resumed = shell("resume runs/cliff")
evaluated = shell("evaluate runs/cliff --episodes 3")
print("$ rlbook resume runs/cliff\n" + resumed.splitlines()[-3])
print("$ rlbook evaluate runs/cliff --episodes 3\n" + evaluated)
assert "Done: step 24,000" in resumed and "mean return" in evaluated

# %% [markdown]
# `predict` prints the action for an observation, here that of the start: column 0 of six, and row
# 2 of three. `Sarsa` has a method `q_values`, so the answer holds these, too:

# %%
words = "predict runs/cliff --observation [1,0,0,0,0,0,0,0,1]"
predicted = shell(words)
print(f"$ rlbook {words}\n{predicted}")
answer = json.loads(predicted)
assert answer["action"] == answer["q_values"].index(max(answer["q_values"]))

# %% [markdown]
# Did the kill change the result? The agent `sarsa` above was trained with the same settings and
# without a break. Compare the weights bit for bit:

# %%
sys.path.insert(0, str(folder))
import my_things

resumed_agent = load(folder / "runs" / "cliff")
assert type(resumed_agent) is my_things.Sarsa
for mine, theirs in zip(
    sarsa.q_network.parameters(), resumed_agent.q_network.parameters(), strict=True
):
    assert torch.equal(mine, theirs)
print("killed and resumed, with the same weights bit for bit")

# %% [markdown]
# Other commands take `my_things:sarsa` in the same way, as in
# `rlbook sweep my_things:sarsa --seeds 5`, and so does a YAML file: `algo: my_things:sarsa`.
#
# A trained agent can be loaded where the environment is not installed. To show it, we delete the
# function that makes the environment. The agent still predicts; only evaluating and learning need
# the environment:

# %%
del my_things.make_cliff
action, _ = resumed_agent.predict([1, 0, 0, 0, 0, 0, 0, 0, 1])
print("at the start it goes", ("up", "right", "down", "left")[int(action)])
try:
    resumed_agent.evaluate(episodes=1)
except ValueError as error:
    print(error)
shutil.rmtree(folder)

# %% [markdown]
# ## Honest edges
#
# - SARSA in a table takes the same action that its target used. Ours samples an action for the
#   target, and after the update samples another one to act. Both come from the same ε-greedy
#   policy, one update apart, and the agent need not store the action until the next step.
# - Another process cannot import what a notebook or the script that you started defines. A run
#   remembers such an environment as `__main__:make_cliff`. If you resume it elsewhere, the error
#   says what to do.
# - A `Dict` space that is made from a plain dictionary sorts its keys, and `FlattenObservation`
#   follows that order. `predict` takes the vector as the
#   environment gives it, so flatten by the same wrapper, not by hand.
# - `rlbook watch` asks for pictures: a function that makes an environment needs a `render_mode`
#   argument for that, and passes it on.
# - Put the environment and the algorithm into two files if an agent should be loaded where the
#   simulator is not installed: loading imports the algorithm's file alone.
# - `rlbook tune` needs a file with the ranges of your settings, `--space my.yaml`, unless your
#   algorithm extends one of the book: [Tuning](tune.ipynb) shows such files.
# - An algorithm of yours may take other observations than vectors and images: declare
#   `observations = "other"`. But the buffers of this book store only arrays.

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** Expected SARSA replaces $Q(s', a')$ by its mean over the policy,
# $\sum_a \pi(a \mid s')\,Q(s', a)$. Write that value for an ε-greedy policy.
#
# <details>
# <summary>Solution</summary>
#
# Each action has the probability $\varepsilon / |\mathcal{A}|$, and the best one $1 - \varepsilon$
# more. By hand: values 1 and 3 with $\varepsilon = 0.5$ give $0.25 \cdot 1 + 0.75 \cdot 3 = 2.5$.
#
# ```python
# def expected_value(next_q, epsilon):
#     return epsilon * next_q.mean(dim=1) + (1 - epsilon) * next_q.amax(dim=1)
#
# assert expected_value(torch.tensor([[1.0, 3.0]]), 0.5) == 2.5
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Let the observation of the cliff be a single number, row times width plus column,
# as `Discrete(18)`. Which wrapper do you need now?
#
# <details>
# <summary>Solution</summary>
#
# None but the time limit: a `Discrete` observation becomes a [one-hot vector](preprocess.ipynb) by
# itself.
#
# ```python
# class NumberedCliff(Cliff):
#     """The cliff, with its squares numbered."""
#
#     def __init__(self, width: int = 6) -> None:
#         super().__init__(width)
#         self.observation_space = Discrete(self.rows * width)
#
#     def observe(self):
#         return self.row * self.columns + self.column
#
# numbered = DQN(lambda: TimeLimit(NumberedCliff(), 100))
# assert numbered.observation_space.shape == (18,)
# assert np.ndim(numbered.predict(12)[0]) == 0
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** This cliff has wind, which sometimes blows the agent one row down.
# Learning works. But two runs with the same seed differ, and a resumed run is not the run that was
# killed. Why?


# %%
class WindyCliff(Cliff):
    """The cliff with wind, and a bug."""

    def step(self, action: int) -> tuple[dict[str, int], float, bool, bool, dict[str, Any]]:
        """Make a move, or be blown down."""
        return super().step(2 if np.random.random() < 0.1 else action)


def blown(seed: int) -> list[dict[str, int]]:
    """Return what an agent sees that always goes up."""
    world = WindyCliff()
    world.reset(seed=seed)
    return [world.step(0)[0] for _ in range(200)]


print("the same seed gives the same episode:", blown(3) == blown(3))

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `np.random.random()` draws from a global generator that `reset(seed=...)` does not touch. Draw
# from the generator of the environment:
#
# ```python
# class WindyCliff(Cliff):
#     """The cliff with wind that a seed fixes."""
#
#     def step(self, action: int) -> tuple[dict[str, int], float, bool, bool, dict[str, Any]]:
#         """Make a move, or be blown down."""
#         return super().step(2 if self.np_random.random() < 0.1 else action)
#
# assert blown(3) == blown(3) and blown(3) != blown(4)
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Give SARSA a learning rate that falls linearly to 0 over the run (an agent counts
# its environment steps in `self.global_step`). What must be saved for a resumed run to be exact?
#
# <details>
# <summary>Solution</summary>
#
# Nothing new: the rate follows from `self.global_step`, which is saved, and from the settings.
#
# ```python
# class DecayingSarsa(Sarsa):
#     """SARSA whose learning rate falls to 0."""
#
#     name = "decaying_sarsa"
#
#     def update(self, batch):
#         progress = min(1.0, self.global_step / self.config.total_steps)
#         for group in self.optimizer.param_groups:
#             group["lr"] = self.config.lr * (1 - progress)
#         return super().update(batch)
#
# decaying = DecayingSarsa(make_cliff, total_steps=100, eval_every=0)
# decaying.learn(100, progress=False)
# assert decaying.optimizer.param_groups[0]["lr"] == 0
# ```
#
# </details>

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook import DQN, SAC, load
#
# DQN(make_my_env)                       # a function or a class that makes an environment, or an instance
# SAC("my_things:make_robot", vectorize="async", num_envs=4)   # a slow simulator, in four processes
# load("runs/a").predict(observation)    # needs no simulator
# ```
#
# ```
# rlbook list my_things
# rlbook train my_things:sarsa --env-id my_things:make_cliff --run-dir runs/a
# rlbook sweep my_things:sarsa --env-id my_things:make_cliff --seeds 5
# ```
#
# ## References
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition,
#   section 6.4 (SARSA) and example 6.6 (the cliff, which is longer there and costs 100).
# - Z. Wang et al. (2016). Dueling network architectures for deep reinforcement learning. *ICML*,
#   [arXiv:1511.06581](https://arxiv.org/abs/1511.06581).
