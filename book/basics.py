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
# # Basics: learning by trying
#
# A mouse stands in a small house. A crumb lies two steps away, a whole cheese five steps away. Nobody
# tells the mouse where they are. It can only walk around and eat what it finds. How does it learn to
# leave the crumb alone and walk to the cheese?
#
# In this chapter you answer that question in three ways. First you compute the best route with the
# plan of the house in your hand. Then the mouse finds it by trying, and keeps what it learns in a
# table. Last, in a smaller world of two doors, the mouse has no table: it makes good choices more
# likely, a little with each try. On the way you meet the words that the rest of the book uses,
# each with a number that you can check in your head. The figure shows where you start and what you
# will have computed.
#
# | | |
# |---|---|
# | You need | Python with NumPy, and what a mean and a derivative are |
# | You build | four small algorithms: value iteration, Q-learning, SARSA and REINFORCE |
# | The worlds | a house of twelve squares, a shore of eighteen, and two doors |
# | Time | the whole chapter runs in less than 20 seconds |

# %% tags=["hide-input"]
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

from rlbook.figures import COLORS, plot_band, use_style

use_style()

# %% tags=["hide-input"]
HOUSE = ("...C", ".#..", "S.c.")  # C cheese, c crumb, S start, # wall
UP, RIGHT, DOWN, LEFT = ACTIONS = range(4)
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # what each action adds to the row and the column
BLUE, GREEN, RED = COLORS["dqn"], COLORS["r2d2"], COLORS["sac"]
GREY = COLORS["random"]


def draw_food(ax: Axes, x: float, y: float, size: float) -> None:
    """Draw a piece of cheese."""
    corners = np.array([(-0.5, 0.25), (0.5, 0.25), (0.5, -0.05), (0.1, -0.3)])
    ax.add_patch(Polygon(corners * size + (x, y), facecolor="#F2C84B", edgecolor="#8A6A00", lw=1))
    for dx, dy, radius in ((0.25, 0.08, 0.09), (-0.08, 0.12, 0.06)):
        ax.add_patch(Circle((x + dx * size, y + dy * size), radius * size, color="#8A6A00", lw=0))


def draw_mouse(ax: Axes, x: float, y: float, size: float = 0.5) -> None:
    """Draw the head of a mouse."""
    for dx, dy, radius, color in (
        *((-0.3, -0.28, 0.2, GREY), (0.3, -0.28, 0.2, GREY), (0, 0, 0.36, "#9A9A9A")),
        *((-0.12, -0.06, 0.05, "black"), (0.12, -0.06, 0.05, "black"), (0, 0.12, 0.06, "#D98880")),
    ):
        ax.add_patch(Circle((x + dx * size, y + dy * size), radius * size, color=color, lw=0))


def draw_plan(
    ax: Axes,
    plan: Sequence[str],
    values: np.ndarray | None = None,
    arrows: np.ndarray | None = None,
    title: str = "",
    digits: int = 1,
) -> None:
    """Draw a plan of squares, a value for each square, and arrows where (squares, actions) is true."""
    height, width = len(plan), len(plan[0])
    for s, kind in enumerate("".join(plan)):
        row, column = divmod(s, width)
        color = {"#": "#555555", "x": "#7FA8C9"}.get(kind, "white")
        shown = values is not None and kind in ".S"
        if shown:
            color = plt.get_cmap("Blues")(max(0.0, float(values[s])) / 22)
        square = Rectangle((column, row), 1, 1, facecolor=color, edgecolor="#AAAAAA", lw=0.8)
        ax.add_patch(square)
        x, y = column + 0.5, row + 0.5
        if kind in "Cc":
            draw_food(ax, x, y, 0.75 if kind == "C" else 0.35)
        if kind == "x":
            ax.text(x, y, "~ ~", ha="center", va="center", color="white", weight="bold")
        if shown:
            low = y if arrows is None else y + 0.22
            ax.text(x, low, f"{values[s]:.{digits}f}", ha="center", va="center", fontsize=8.5)
        best = np.flatnonzero(arrows[s]) if arrows is not None and kind in ".S" else []
        for a in best:
            down, right = 0.2 * np.array(MOVES[a])
            back = 1 if len(best) == 1 else 0  # two arrows share their beginning
            begin = (x - back * right, y - 0.15 - back * down)
            style = {"arrowstyle": "-|>", "color": RED, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (x + right, y - 0.15 + down), begin, arrowprops=style)
    ax.set(xlim=(-0.03, width + 0.03), ylim=(height + 0.03, -0.03), xticks=[], yticks=[], title=title)
    ax.set_aspect("equal")
    ax.grid(False)
    ax.spines[:].set_visible(False)


promised = np.array([8.1, 9, 10, 0, 7.29, 0, 9, 10, 6.561, 5.9049, 0, 9])  # checked further down
directions = [[RIGHT], [RIGHT], [RIGHT], [], [UP], [], [UP, RIGHT], [UP], [UP], [LEFT], [], [UP]]
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.7))
draw_plan(left, HOUSE, title="the house")
draw_mouse(left, 0.5, 2.5)
for s in range(12):
    shade = "white" if s == 5 else "#666666"
    left.text(s % 4 + 0.06, s // 4 + 0.24, str(s), fontsize=8.5, color=shade)
draw_plan(
    right,
    HOUSE,
    promised,
    np.array([[a in best for a in ACTIONS] for best in directions]),
    "how good each square is, and where to go",
)
plt.show()

# %% [markdown]
# ## Agent and environment
#
# The one who decides and learns is the **agent**: here, the mouse. Everything else is the
# **environment**: the house, its walls and its food. They take turns. The agent chooses an **action**:
# up, right, down or left. The environment answers with two things. One is the **reward**, a number that
# says how good this step was: 10 for the cheese, 2 for the crumb, 0 for anything else. The other is
# the new **state**, which is everything about the situation that matters for what comes next: here, the
# number of the square on which the mouse stands. The walk from the start to the food is an
# **episode**. Then the mouse is put back to the start, and the next episode begins.

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(4.6, 1.7))
for x, name in ((0.0, "agent"), (3.0, "environment")):
    box = FancyBboxPatch((x, 0), 1.4, 1, boxstyle="round,pad=0.05", facecolor="white", edgecolor=BLUE)
    ax.add_patch(box)
    ax.text(x + 0.7, 0.5, name, ha="center", va="center", weight="bold")
for y, start, end, text in ((0.8, 1.5, 2.9, "action"), (0.2, 2.9, 1.5, "state, reward")):
    ax.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": "black"})
    ax.text(2.2, y + (0.08 if y > 0.5 else -0.1), text, ha="center", va="bottom" if y > 0.5 else "top")
ax.set(xlim=(-0.2, 4.6), ylim=(-0.25, 1.25))
ax.axis("off")
plt.show()

# %% [markdown]
# The agent need not see all of the state of the environment. The part that it sees is called the
# **observation**. Our mouse sees the number of its square, so here the observation is the state. A robot
# with one camera sees less: a single picture does not show how fast things move. A
# [later chapter](drqn.ipynb) takes care of that; in this one the two are the same.
#
# As code, the house is three lines of text, `HOUSE`. An action is a number, and `MOVES` says how it
# changes row and column:

# %%
assert HOUSE == ("...C", ".#..", "S.c.")  # C cheese, c crumb, S start, # wall
assert (UP, RIGHT, DOWN, LEFT) == (0, 1, 2, 3)
assert MOVES == ((-1, 0), (0, 1), (1, 0), (0, -1))

# %% [markdown]
# The environment is one function. A move against a wall leaves the mouse where it is. The flag
# **terminated** says that the episode has come to its end: the food is eaten, and nothing follows.
#
# By hand, from the start, which is square 8: a step to the right leads to square 9 and pays 0. From
# there, up is a wall, so the mouse stays on 9. Another step to the right leads to the crumb on square
# 10 and pays 2, and the episode has terminated.


# %%
def step(s: int, a: int) -> tuple[int, float, bool]:
    """Move by one square; return the next state, the reward, and whether the episode terminated."""
    row, column = s // 4 + MOVES[a][0], s % 4 + MOVES[a][1]
    inside = 0 <= row < 3 and 0 <= column < 4
    s_next = 4 * row + column if inside and HOUSE[row][column] != "#" else s
    food = {"C": 10.0, "c": 2.0}.get(HOUSE[s_next // 4][s_next % 4], 0.0)
    return s_next, food, food > 0


# %%
START = 8
assert step(8, RIGHT) == (9, 0.0, False)
assert step(9, UP) == (9, 0.0, False)
assert step(9, RIGHT) == (10, 2.0, True)

# %% [markdown]
# ## Policy
#
# The rule by which an agent chooses its actions is its **policy**. We write it as $\pi(a \mid s)$: the
# probability of choosing the action $a$ in the state $s$. For the mouse that is a table with a row for
# each square and a column for each action, and each row sums to 1.
#
# Here are two policies. The first chooses every action with probability 1/4. The second always heads for
# the cheese: from the start it goes up twice and then to the right. By hand, that takes five steps, and
# the rewards are 0, 0, 0, 0 and 10.

# %%
random_policy = np.full((12, 4), 0.25)  # (states, actions)
cheese_policy = np.zeros((12, 4))
cheese_policy[[8, 4], UP] = 1
cheese_policy[[0, 1, 2], RIGHT] = 1
cheese_policy[[6, 7, 11], UP] = 1
cheese_policy[9, LEFT] = 1


def play(policy: np.ndarray, rng: np.random.Generator) -> list[tuple[int, int, float]]:
    """Play one episode; return the state, the action and the reward of each step."""
    s, terminated, steps = START, False, []
    while not terminated:
        a = int(rng.choice(4, p=policy[s]))
        s_next, r, terminated = step(s, a)
        steps.append((s, a, r))
        s = s_next
    return steps


rng = np.random.default_rng(4)
assert [r for _, _, r in play(cheese_policy, rng)] == [0, 0, 0, 0, 10]

# %% [markdown]
# The figure shows one episode of each.

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.7))
for ax, policy, name in zip(axes, (random_policy, cheese_policy), ("random", "cheese"), strict=True):
    walk = play(policy, np.random.default_rng(9))
    squares = [s for s, _, _ in walk] + [step(*walk[-1][:2])[0]]
    draw_plan(ax, HOUSE, title=f"{name} policy: {len(walk)} steps, reward {walk[-1][2]:.0f}")
    shake = np.random.default_rng(0).uniform(-0.22, 0.22, (2, len(squares)))  # so that lines part
    shake *= name == "random"
    x, y = np.array(squares) % 4 + 0.5 + shake[0], np.array(squares) // 4 + 0.5 + shake[1]
    ax.plot(x, y, color=BLUE, lw=1.2)
    ax.plot(x[-1], y[-1], "o", color=BLUE, markersize=5)
    draw_mouse(ax, 0.5, 2.5)
plt.show()

# %% [markdown]
# ## Return and discount
#
# The **return** is the sum of the rewards of an episode: 2 for the crumb, 10 for the cheese. But a sum
# does not care about time. It would be 10 for a mouse that finds the cheese after five steps, and 10
# for one that finds it after five hundred.
#
# So we let a reward count less the later it comes. The **discount** $\gamma$ is a number between 0 and
# 1: what a reward of 1 is worth now if it comes one step later. Let $r_t$ be the reward of step $t$,
# the one that the action of this step earns. The discounted return from step $t$ on is
#
# $$G_t = r_t + \gamma\, r_{t+1} + \gamma^2 r_{t+2} + \dots = r_t + \gamma\, G_{t+1}.$$
#
# By hand, with $\gamma = 0.9$: the way to the crumb has the rewards 0 and 2, which gives
# $0 + 0.9 \cdot 2 = 1.8$. The way to the cheese gives $0.9^4 \cdot 10 = 6.561$. The second form of the
# equation says how to compute all of them: start at the end and walk back.

# %%
GAMMA = 0.9


def discounted_returns(rewards: Sequence[float], gamma: float = GAMMA) -> list[float]:
    """Return the discounted return from each step on."""
    returns, g = [], 0.0
    for r in reversed(rewards):
        g = r + gamma * g
        returns.append(g)
    return returns[::-1]


# %%
assert np.allclose(discounted_returns([0, 2]), [1.8, 2])
assert np.isclose(discounted_returns([0, 0, 0, 0, 10])[0], 6.561)

# %% [markdown]
# The discount says how patient the agent is. By hand, with $\gamma = 0.5$ the crumb is worth 1 and the
# cheese $0.5^4 \cdot 10 = 0.625$: an impatient mouse is right to take the crumb.

# %%
assert discounted_returns([0, 2], 0.5)[0] == 1
assert discounted_returns([0, 0, 0, 0, 10], 0.5)[0] == 0.625

# %% tags=["hide-input"]
gammas = np.linspace(0, 1, 101)
figure, ax = plt.subplots(figsize=(5, 2.7))
for rewards, name, color in (([0, 2], "crumb", GREY), ([0, 0, 0, 0, 10], "cheese", BLUE)):
    ax.plot(gammas, [discounted_returns(rewards, g)[0] for g in gammas], color=color, label=name)
ax.axvline(GAMMA, color="black", ls=":", lw=1)
ax.text(GAMMA - 0.01, 8.6, "ours", ha="right")
ax.set(xlabel="discount", ylabel="discounted return from the start")
ax.legend()
plt.show()

# %% [markdown]
# In the rest of the book, the word *return* without *discounted* means the plain sum. Agents learn with a
# discount, and figures show what they reach without one.

# %% [markdown]
# ## Value
#
# A policy that chooses at random has a different return in each episode. What can the mouse expect? The
# **value** of a state, $V_\pi(s)$, is the mean of the discounted return from this state on, if the
# agent follows the policy $\pi$. One way to find it is to play many episodes and take the mean.

# %%
rng = np.random.default_rng(0)
sampled = np.array(
    [discounted_returns([r for _, _, r in play(random_policy, rng)])[0] for _ in range(3000)]
)
error = sampled.std() / np.sqrt(len(sampled))  # the standard error of the mean
print(f"random policy from the start: {sampled.mean():.2f}, give or take {2 * error:.2f}")

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5, 2.4))
ax.hist(sampled, bins=np.arange(0, 7.01, 0.25), color=BLUE, alpha=0.6)
ax.axvline(sampled.mean(), color="black", lw=1.5)
ax.text(sampled.mean() + 0.1, ax.get_ylim()[1] * 0.85, "mean: the value of the start")
ax.set(xlabel="discounted return of an episode", ylabel="episodes of 3,000")
plt.show()

# %% [markdown]
# You can also compute it without playing at all. An action $a$ pays a reward $r$ and leads to a next state
# $s'$. What the mouse can expect from there is the value of $s'$, and it comes one step later. So the
# value of a state is the mean, over its actions, of the reward plus the discounted value of the next
# state:
#
# $$V_\pi(s) = \sum_a \pi(a \mid s)\, \bigl(r + \gamma\, V_\pi(s')\bigr)$$
#
# Both $r$ and $s'$ depend on $s$ and $a$. (If the environment itself is random, take the mean over its
# outcomes as well.) This is the *Bellman equation*. There is one for each state, so twelve squares make
# twelve linear equations with twelve unknowns. Write the mean reward of each state as a vector $r_\pi$,
# and the probabilities of going from one state to another as a matrix $P_\pi$. Then all equations
# together are $V = r_\pi + \gamma P_\pi V$, and NumPy solves them. The reward is paid for the step
# *onto* the food. Nothing follows after that, so the squares with food have the value 0 themselves.

# %%
ROOMS = [0, 1, 2, 4, 6, 7, 8, 9, 11]  # squares without wall or food


def policy_value(policy: np.ndarray, gamma: float = GAMMA) -> np.ndarray:
    """Solve the Bellman equations: the value of each state (states,) under a policy."""
    reward, follow = np.zeros(12), np.zeros((12, 12))  # follow[s, s_next] is a probability
    for s in ROOMS:
        for a in ACTIONS:
            s_next, r, _ = step(s, a)
            reward[s] += policy[s, a] * r
            follow[s, s_next] += policy[s, a]
    return np.linalg.solve(np.eye(12) - gamma * follow, reward)


random_value, cheese_value = policy_value(random_policy), policy_value(cheese_policy)

# %% [markdown]
# By hand, for the cheese policy: the square beside the cheese is worth 10, the one before it 9,
# then 8.1, 7.29, and the start 6.561. For the random policy, the start must agree with the mean
# that you have sampled. You can check square 9, beside the crumb, with its Bellman equation. Two
# of the four actions lead against a wall, one leads to the crumb, and one back to the start:
#
# $$V(9) = \tfrac{1}{4} \cdot 2 + \tfrac{2}{4} \cdot 0.9\, V(9) + \tfrac{1}{4} \cdot 0.9\, V(8)$$

# %%
assert np.allclose(cheese_value[[2, 1, 0, 4, 8]], [10, 9, 8.1, 7.29, 6.561])
assert abs(random_value[START] - sampled.mean()) < 5 * error
v = random_value
assert np.isclose(v[9], 2 / 4 + 2 / 4 * 0.9 * v[9] + 1 / 4 * 0.9 * v[8])

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.7))
draw_plan(axes[0], HOUSE, random_value, title="values under the random policy")
draw_plan(axes[1], HOUSE, cheese_value, cheese_policy > 0, "values under the cheese policy")
plt.show()

# %% [markdown]
# The same square has two values: a value always belongs to a policy.

# %% [markdown]
# ## Q-value
#
# A value says how good it is to be somewhere. It does not say what to do. The **Q-value** $Q_\pi(s, a)$
# does: it is the discounted return to expect if the agent takes the action $a$ now, and follows the
# policy $\pi$ from then on.
#
# $$Q_\pi(s, a) = r + \gamma\, V_\pi(s')$$
#
# By hand, on square 9 with the cheese policy afterwards: a step to the right gets the crumb, 2. A step
# to the left leads to the start: $0.9 \cdot 6.561 = 5.905$. A step up only loses time, because the wall
# keeps the mouse on square 9: $0.9 \cdot 5.905 = 5.314$.


# %%
def q_values(value: np.ndarray, gamma: float = GAMMA) -> np.ndarray:
    """Look one step ahead: the Q-values (states, actions) that follow from the values (states,)."""
    q = np.zeros((12, 4))
    for s in ROOMS:
        for a in ACTIONS:
            s_next, r, _ = step(s, a)
            q[s, a] = r + gamma * value[s_next]
    return q


# %%
q = q_values(cheese_value)
assert q[9, RIGHT] == 2
assert np.allclose(q[9, [LEFT, UP]], [5.905, 5.314], atol=1e-3)

# %% [markdown]
# Each square now has four numbers, one for each side that the mouse can leave by:

# %% tags=["hide-input"]
CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1))


def draw_q(ax: Axes, q: np.ndarray, title: str = "") -> None:
    """Draw the four Q-values of each square of the house as four triangles."""
    draw_plan(ax, HOUSE, title=title)
    for s in ROOMS:
        corner = np.array([s % 4, s // 4])
        for a in ACTIONS:
            triangle = np.array([CORNERS[a], CORNERS[(a + 1) % 4], (0.5, 0.5)]) + corner
            color = plt.get_cmap("Blues")(q[s, a] / 22)
            ax.add_patch(Polygon(triangle, facecolor=color, edgecolor="#AAAAAA", lw=0.5))
            x, y = corner + 0.5 + 0.33 * np.array(MOVES[a])[::-1]
            weight = "bold" if np.isclose(q[s, a], q[s].max()) else "normal"
            ax.text(x, y, f"{q[s, a]:.1f}", ha="center", va="center", fontsize=8.5, weight=weight)


figure, ax = plt.subplots(figsize=(5, 3.7))
draw_q(ax, q, "Q-values, with the cheese policy afterwards (largest in bold)")
plt.show()

# %% [markdown]
# ## Greedy
#
# With Q-values, acting is easy: take the action with the largest one. An agent that does so is
# **greedy**. Start from any policy, compute its Q-values and act greedily on them: the new policy is
# never worse than the old one. (This is the *policy improvement theorem*, Sutton and Barto, section
# 4.2; here we check it for one policy.) Try it with the random policy.

# %%
def greedy_policy(q: np.ndarray) -> np.ndarray:
    """Choose the best action of each state; among equals, the first."""
    return np.eye(4)[q.argmax(axis=1)]  # (states, actions)


better_policy = greedy_policy(q_values(random_value))
better_value = policy_value(better_policy)
print(f"value of the start: {random_value[START]:.2f} random, {better_value[START]:.2f} greedy")
assert (better_value >= random_value - 1e-12).all()

# %% [markdown]
# Better, but the new policy takes the crumb. It trusts Q-values that assume a random walk after
# the first step, and a random walk rarely reaches the cheese. So do it again with the Q-values of
# the new policy, and again, until nothing changes. *Value iteration* does both at once and never
# writes a policy down: it replaces each value by that of the best action, over and over.
#
# $$V(s) \leftarrow \max_a \bigl(r + \gamma\, V(s')\bigr)$$
#
# By hand, starting from zeros: after the first sweep over all squares, the two beside the cheese have 10,
# the three beside the crumb have 2, and all others still have 0. After the second sweep, values of 9
# appear two steps from the cheese, and the start has $0.9 \cdot 2 = 1.8$. After six sweeps nothing changes
# any more.

# %%
sweeps = [np.zeros(12)]
for _ in range(7):
    sweeps.append(q_values(sweeps[-1]).max(axis=1))
assert sweeps[1].tolist() == [0, 0, 10, 0, 0, 0, 2, 10, 0, 2, 0, 2]
assert np.allclose(sweeps[2][[1, 6, 11, 8]], [9, 9, 9, 1.8])
assert np.allclose(sweeps[6], sweeps[7])

# %% tags=["hide-input"]
figure, axes = plt.subplots(2, 2, figsize=(5.6, 4.9))
for ax, count in zip(axes.flat, (1, 2, 4, 6), strict=True):
    ahead = q_values(sweeps[count - 1])
    best = np.isclose(ahead, ahead.max(axis=1, keepdims=True)) & (ahead > 0)
    draw_plan(ax, HOUSE, sweeps[count], best, f"after {count} sweep{'s' * (count > 1)}")
plt.show()

# %% [markdown]
# Look at square 9, to the left of the crumb. After four sweeps its best action is still to take the
# crumb. After six it is to turn around. These are the values of the best policy, and are called
# *optimal*: no policy has larger ones. They are the values of the figure that opened the chapter:

# %%
best_value = sweeps[-1]
assert np.allclose(best_value, promised)

# %% [markdown]
# ## Exploring and exploiting
#
# So far you knew the plan of the house: you called `step` for every square and every action. The mouse
# cannot. It only sees what its own steps lead to.
#
# To act on what you know already is **exploiting**. To try what you do not know yet is **exploring**.
# A greedy agent only exploits. A simple way to explore is this: with a small probability $\varepsilon$ the
# agent takes a random action, and otherwise the greedy one. This is called *epsilon-greedy*, or ε-greedy.
#
# By hand: with $\varepsilon = 0.4$ and four actions, the best action has the probability
# $0.6 + 0.4 / 4 = 0.7$, and each of the others 0.1.


# %%
def choose(q_row: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Choose at random with probability epsilon, and else the best action, equals at random."""
    if rng.random() < epsilon:
        return int(rng.integers(len(q_row)))
    best = np.flatnonzero(q_row == q_row.max())
    return int(best[rng.integers(len(best))])


# %%
rng = np.random.default_rng(0)
chosen = [choose(np.array([0.0, 1.0, 0.0, 0.0]), 0.4, rng) for _ in range(10_000)]
assert np.allclose(np.bincount(chosen) / 10_000, [0.1, 0.7, 0.1, 0.1], atol=0.02)

# %% [markdown]
# Here is a first way to learn. For each state and action, the mouse remembers the best discounted return
# that it ever had from there. It acts greedily on what it remembers, and chooses at random among equals.
# At the start it remembers nothing, so its first walk is random.
#
# Put 20 greedy mice into the house, one after the other, for 300 episodes each. Then 20 mice that
# explore: their $\varepsilon$ starts at 1 and falls to 0.1. The *seed* of a mouse is the number that its
# random generator starts from, so the same seed gives the same life again.

# %%
def remember_best(epsilons: Sequence[float], seed: int) -> list[float]:
    """Act on the best discounted return of each state and action; return what each episode paid."""
    rng, q, paid = np.random.default_rng(seed), np.zeros((12, 4)), []
    for epsilon in epsilons:
        s, terminated, steps = START, False, []
        while not terminated:
            a = choose(q[s], epsilon, rng)
            s_next, r, terminated = step(s, a)
            steps.append((s, a, r))
            s = s_next
        for (s, a, _), g in zip(steps, discounted_returns([r for _, _, r in steps]), strict=True):
            q[s, a] = max(q[s, a], g)
        paid.append(r)
    return paid


falling = np.maximum(0.1, 1 - np.arange(300) / 200)
greedy_paid = np.array([remember_best(np.zeros(300), seed) for seed in range(20)])
exploring_paid = np.array([remember_best(falling, seed) for seed in range(20)])
assert (greedy_paid == greedy_paid[:, :1]).all()  # each greedy mouse repeats its first episode
assert (exploring_paid[:, -50:] == 10).mean() > (greedy_paid == 10).mean() + 0.3

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.4, 2.8))
for paid, name, color in ((exploring_paid, "explores", GREEN), (greedy_paid, "greedy", GREY)):
    fraction = (paid == 10).reshape(20, 30, 10).mean(axis=2)  # (seeds, blocks of ten episodes)
    plot_band(ax, np.arange(10, 301, 10), fraction, name, color)
ax.set(xlabel="episode", ylabel="fraction of episodes\nthat end at the cheese", ylim=(-0.02, 1.05))
ax.legend(loc="center right")
plt.show()
print(f"{(greedy_paid[:, -1] == 2).sum()} of 20 greedy mice ate crumbs for ever")

# %% [markdown]
# Each line is the mean of 20 mice, and the band is the 95 % interval of that mean: roughly, the
# true mean lies in such a band 95 times out of 100. A greedy mouse that has found the crumb goes
# there for ever. It does the best thing that it knows, and never learns more. The few that live on
# cheese were lucky in their first walk.
#
# You can compute how lucky they were. Let $P$ be the probability that a random walk ends at the crumb.
# Then the value of the start under the random policy, without a discount, is $2 P + 10\,(1 - P)$.

# %%
crumb_first = (10 - policy_value(random_policy, gamma=1.0)[START]) / 8
print(f"a random walk ends at the crumb with probability {crumb_first:.2f}")
assert abs((greedy_paid[:, 0] == 2).mean() - crumb_first) < 0.35

# %% [markdown]
# Exploring has a price, too: a mouse that explores makes detours, and some of them end at the crumb. That
# is why $\varepsilon$ falls once the mouse knows its way. How to balance exploring and exploiting is a
# question that every algorithm in this book has to answer.

# %% [markdown]
# ## Learning from a single step
#
# The mouse of the last section has three weaknesses. It learns nothing until the episode is over. If a
# good first step is followed by a long detour, it thinks badly of the first step. And if rewards were a
# matter of luck, it would remember the luckiest one. There is a better way: learn from each step at once.
#
# The mouse keeps a table of guesses, one Q-value $Q(s, a)$ for each state and action. Say its guess for
# going up from square 4 is 4. It goes up, gets the reward 0 and arrives on square 0, where its largest
# Q-value is 8.1. Now it has a better guess: going up from square 4 is worth $0 + 0.9 \cdot 8.1 = 7.29$. This
# better guess is the *target* $y$:
#
# $$y = r + \gamma \max_{a'} Q(s', a')$$
#
# The target minus the old value is a **temporal difference**: the difference between two guesses
# of the same thing, one of them made a step later. It is called the **TD error** (TD for temporal
# difference) and written $\delta$. The mouse then moves the old value towards the target by a
# fraction $\alpha$ of the TD error. This fraction is the **learning rate**:
#
# $$Q(s, a) \leftarrow Q(s, a) + \alpha\, \delta \qquad \text{with} \qquad \delta = y - Q(s, a)$$
#
# By hand, with $\alpha = 0.5$: the TD error is $7.29 - 4 = 3.29$, and the new value is
# $4 + 0.5 \cdot 3.29 = 5.645$.

# %%
y = 0 + GAMMA * 8.1
td_error = y - 4
assert np.isclose(td_error, 3.29) and np.isclose(4 + 0.5 * td_error, 5.645)

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.4, 1.4))
ax.axhline(0, color="#AAAAAA", lw=1)
for x, text, color in ((4, "old value\n4", GREY), (5.645, "new value\n5.645", BLUE), (7.29, "target\n7.29", GREEN)):
    ax.plot(x, 0, "o", color=color)
    ax.text(x, -0.25, text, ha="center", va="top", color=color, fontsize=9)
arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}
ax.annotate("", (7.29, 0.75), (4, 0.75), arrowprops={**arrow, "color": GREEN})
ax.text(7.4, 0.75, "TD error", va="center", color=GREEN, fontsize=9)
ax.annotate("", (5.645, 0.3), (4, 0.3), arrowprops={**arrow, "color": BLUE})
ax.text(5.75, 0.3, "learning rate × TD error", va="center", color=BLUE, fontsize=9)
ax.set(xlim=(3.2, 8.6), ylim=(-0.95, 0.95))
ax.axis("off")
plt.show()

# %% [markdown]
# There is something odd about this target: a part of it, the 8.1, is a guess of the mouse itself. To learn
# one guess from another is to **bootstrap**, as if you pulled yourself up by your own bootstraps. It works
# because each target also contains one step of truth, the reward. Beside the food the target is all truth,
# so these values become right first. Then they make good targets for the squares before them.
#
# ### Terminated and truncated
#
# When the mouse has eaten the cheese, nothing follows. There is no next value to add, so the
# target is the reward alone. In the formula, the flag `terminated` counts as 1 if it is set and as
# 0 if not:
#
# $$y = r + \gamma\, (1 - \texttt{terminated}) \max_{a'} Q(s', a')$$
#
# But an episode can also stop for a reason that has nothing to do with the mouse: you have watched for an
# hour, and you go home. Then the episode is **truncated**. The mouse would have walked on, so the next
# state still has a value, and the target must include it. In short: bootstrapping stops at a terminated
# step, and goes on at a truncated one.
#
# By hand: a step pays 1 and the best next Q-value is 9. If the step terminated the episode, the target
# is 1. If the episode goes on, or was only truncated, the target is $1 + 0.9 \cdot 9 = 9.1$.


# %%
def td_target(r: float, terminated: bool, next_q: np.ndarray, gamma: float = GAMMA) -> float:
    """Return the reward plus the discounted value of the next state, if anything follows."""
    return r if terminated else r + gamma * float(next_q.max())


# %%
next_q = np.array([9.0, 3.0, 0.0, 1.0])
assert td_target(1, True, next_q) == 1 and td_target(1, False, next_q) == 9.1

# %% [markdown]
# What happens if you mix them up? Imagine a warm shelf on which the mouse gets 1 for each step,
# for ever. Its value is $1 + 0.9 + 0.9^2 + \dots = 1 / (1 - 0.9) = 10$. You watch for five steps
# at a time. Now suppose that you wrongly treat every fifth step as terminated. Then four targets
# of five are $1 + 0.9\, V$, and the fifth is 1. Their mean is $1 + \tfrac{4}{5} \cdot 0.9\, V$.
# The value settles where it equals that mean, at $V = 1 / 0.28 = 3.57$. You get no error message,
# just a wrong value.

# %%
def shelf_values(ends_at_truncation: bool, steps: int = 4000, alpha: float = 0.01) -> np.ndarray:
    """Learn the value of the shelf, watched for five steps at a time."""
    value, history = 0.0, []
    for t in range(1, steps + 1):
        truncated = t % 5 == 0
        y = td_target(1, truncated and ends_at_truncation, np.array([value]))
        value += alpha * (y - value)
        history.append(value)
    return np.array(history)


right_values, wrong_values = shelf_values(False), shelf_values(True)
assert abs(right_values[-1] - 10) < 0.3
assert abs(wrong_values[-1] - 1 / 0.28) < 0.1

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5, 2.6))
ax.axhline(10, color="black", ls="--", lw=1, label="true value")
ax.plot(right_values, color=GREEN, label="bootstraps at truncation")
ax.plot(wrong_values, color=RED, label="takes truncation for the end")
ax.set(xlabel="step", ylabel="learned value", ylim=(0, 11))
ax.legend(loc="center right")
plt.show()

# %% [markdown]
# In practice the environment reports both flags: [Environments](envs.ipynb) shows how.

# %% [markdown]
# ## Q-learning
#
# Put the pieces together: choose actions by the epsilon-greedy rule, and after each step move one
# entry of the table by a fraction of its TD error. This is all of *Q-learning* (Watkins 1989):

# %%
Step = Callable[[int, int], tuple[int, float, bool]]


def q_learning(
    step: Step,
    start: int,
    q: np.ndarray,
    episodes: int,
    epsilon: float,
    rng: np.random.Generator,
    alpha: float = 0.5,
) -> list[float]:
    """Play episodes and update the table `q` (states, actions) in place; return their returns."""
    returns = []
    for _ in range(episodes):
        s, total, terminated = start, 0.0, False
        while not terminated:
            a = choose(q[s], epsilon, rng)
            s_next, r, terminated = step(s, a)
            y = td_target(r, terminated, q[s_next])
            q[s, a] += alpha * (y - q[s, a])
            s, total = s_next, total + r
        returns.append(total)
    return returns


# %% [markdown]
# By hand: at first all entries are 0, so all targets are 0 until the mouse finds food. However long its
# first episode is, only the entry of the last step changes. It becomes $0.5 \cdot 2 = 1$ at the crumb, or
# $0.5 \cdot 10 = 5$ at the cheese.

# %%
for seed in range(10):
    first_q = np.zeros((12, 4))
    (first_return,) = q_learning(step, START, first_q, 1, 0.5, np.random.default_rng(seed))
    assert np.count_nonzero(first_q) == 1 and first_q.max() == 0.5 * first_return

# %% [markdown]
# Now watch the table. This mouse has $\varepsilon = 1$, so it explores all the time. The number in a square
# is the largest Q-value there, and the arrow is the action that it belongs to.

# %% tags=["hide-input"]
table, rng, played = np.zeros((12, 4)), np.random.default_rng(0), 0
figure, axes = plt.subplots(3, 2, figsize=(5.6, 7.2))
for ax, episodes in zip(axes.flat, (1, 5, 10, 20, 50, 2000), strict=True):
    q_learning(step, START, table, episodes - played, 1.0, rng)
    played = episodes
    best = (table == table.max(axis=1, keepdims=True)) & (table > 0)
    title = f"after {episodes:,} episode{'s' * (episodes > 1)}"
    draw_plan(ax, HOUSE, table.max(axis=1), best, title)
plt.show()

# %% [markdown]
# The values spread backwards from the food, as they did in value iteration. But this time nobody gave the
# mouse the plan: each update comes from a step that it took itself. In the end its table contains the
# values that you computed with the plan:

# %%
print("table:   ", table[ROOMS].max(axis=1).round(2))
print("computed:", best_value[ROOMS].round(2))
assert np.allclose(table.max(axis=1), best_value, atol=0.05)

# %% [markdown]
# ## On-policy and off-policy
#
# Every step of that mouse was random. Yet its table contains the values of a mouse that always does the
# best thing. That is because the target takes the *largest* Q-value of the next state, whichever action
# the mouse really takes there. To learn about one policy (here the greedy one) from the actions of another
# (here the random one) is called **off-policy** learning.
#
# You can also ask what an action is worth if the mouse goes on as it does now, random steps included. To
# learn about the policy that chooses the actions is called **on-policy** learning. *SARSA* (Rummery and
# Niranjan 1994) does it with one change: it chooses the next action $a'$ first, and then the target takes
# the Q-value of this action.
#
# $$y = r + \gamma\, (1 - \texttt{terminated})\, Q(s', a')$$
#
# The name lists what it needs: state, action, reward, state, action. By hand, with a reward of 0 and the
# Q-values 9, 3, 0 and 1 in the next state: Q-learning's target is always $0.9 \cdot 9 = 8.1$. SARSA's is
# $0.9 \cdot 3 = 2.7$ if the mouse happens to choose the second action.


# %%
def sarsa(
    step: Step,
    start: int,
    q: np.ndarray,
    episodes: int,
    epsilon: float,
    rng: np.random.Generator,
    alpha: float = 0.5,
) -> list[float]:
    """As `q_learning`, but the target follows the action that is really taken next."""
    returns = []
    for _ in range(episodes):
        s, total, terminated = start, 0.0, False
        a = choose(q[s], epsilon, rng)
        while not terminated:
            s_next, r, terminated = step(s, a)
            a_next = choose(q[s_next], epsilon, rng)
            y = td_target(r, terminated, q[s_next, [a_next]])  # the maximum over this one action
            q[s, a] += alpha * (y - q[s, a])
            s, a, total = s_next, a_next, total + r
        returns.append(total)
    return returns


# %%
assert np.isclose(td_target(0, False, next_q), 8.1)
assert np.isclose(td_target(0, False, next_q[[1]]), 2.7)

# %% [markdown]
# The difference matters where a random step can hurt. Here is a second house, with water between the
# start and the cheese. Each step pays −1, so a short way is better than a long one. A step into the water
# pays −100 and leads back to the start. The short way along the water takes 7 steps, and the way along the
# upper wall takes 9.

# %%
SHORE = ("......", "......", "SxxxxC")


def shore_step(s: int, a: int) -> tuple[int, float, bool]:
    """Move by one square; the water costs 100 and leads back to the start."""
    row = min(max(s // 6 + MOVES[a][0], 0), 2)
    column = min(max(s % 6 + MOVES[a][1], 0), 5)
    if SHORE[row][column] == "x":
        return 12, -100.0, False
    return 6 * row + column, -1.0, SHORE[row][column] == "C"


assert shore_step(12, RIGHT) == (12, -100.0, False)
assert shore_step(11, DOWN) == (17, -1.0, True)

# %% [markdown]
# Twenty mice learn with each algorithm, for 500 episodes with $\varepsilon = 0.1$ and $\alpha = 0.1$.

# %%
def learn_on_shore(learn: Callable[..., list[float]], seed: int) -> tuple[np.ndarray, list[float]]:
    """Learn for 500 episodes; return the table and the return of each episode."""
    q = np.zeros((18, 4))
    return q, learn(shore_step, 12, q, 500, 0.1, np.random.default_rng(seed), alpha=0.1)


def greedy_path(q: np.ndarray, longest: int = 30) -> list[int]:
    """Follow the best actions from the start; return the squares on the way."""
    path, terminated = [12], False
    while not terminated and len(path) <= longest:
        s_next, _, terminated = shore_step(path[-1], int(q[path[-1]].argmax()))
        path.append(s_next)
    return path


shore = {
    name: [learn_on_shore(learn, seed) for seed in range(20)]
    for name, learn in (("Q-learning", q_learning), ("SARSA", sarsa))
}
lengths = {name: np.median([len(greedy_path(q)) - 1 for q, _ in mice]) for name, mice in shore.items()}
late = {name: np.mean([returns[-200:] for _, returns in mice]) for name, mice in shore.items()}
for name in shore:
    print(f"{name}: {lengths[name]:.0f} steps if it makes no random ones;",
          f"mean return with random steps {late[name]:.1f}, over the last 200 episodes")
assert lengths == {"Q-learning": 7, "SARSA": 9} and late["SARSA"] > late["Q-learning"]

# %% tags=["hide-input"]
figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 4.9), height_ratios=[1, 1.1])
draw_plan(above, SHORE, title="the way without random steps, one mouse each")
colors = {"Q-learning": RED, "SARSA": GREEN}
for name, mice in shore.items():
    middle = sorted(mice, key=lambda mouse: len(greedy_path(mouse[0])))[10]
    path = np.array(greedy_path(middle[0]))
    shift = 0.06 if name == "SARSA" else -0.06  # so that both lines show
    above.plot(path % 6 + 0.5 + shift, path // 6 + 0.5, "o-", color=colors[name], markersize=3)
    above.text(3, path[len(path) // 2] // 6 + 0.32, name, ha="center", color=colors[name])
    blocks = np.array([returns for _, returns in mice]).reshape(20, 20, 25).mean(axis=2)
    plot_band(below, np.arange(25, 501, 25), blocks, name, colors[name])
draw_mouse(above, 0.5, 2.5)
below.set(xlabel="episode", ylabel="return, with random steps", ylim=(-60, 0))
below.legend(loc="lower right")
plt.show()

# %% [markdown]
# The curves show the mean and the 95 % interval of 20 mice, in blocks of 25 episodes. Q-learning
# finds the short way along the water. It is the best way for a mouse that makes no random steps.
# But this mouse still makes a random step now and then, and some of them end in the water. SARSA's
# values include these accidents, so it keeps away from the water. Both are right: Q-learning
# answers what is best without random steps, SARSA what is best with them.
#
# | | learns about | can learn from old steps | for example |
# |---|---|---|---|
# | on-policy | the policy that acts | no: an older policy took them | SARSA |
# | off-policy | another policy than the one that acted: the greedy one (Q-learning), the newest one (SAC) | yes | Q-learning, [DQN](dqn.ipynb), [SAC](sac.ipynb) |

# %% [markdown]
# ## The policy gradient
#
# So far the mouse learned values, and its policy followed from them. You can also learn the policy
# itself. Take a smaller world: the mouse stands before two doors. Behind the left one is a crumb that pays
# 2, behind the right one a cheese that pays 10. It opens one door, and the episode is over. Such a world
# is called a *bandit* with two arms, after the machines in casinos.
#
# The policy has one parameter $\theta$. The probability of the right door is
#
# $$\pi_\theta(\text{right}) = \frac{1}{1 + e^{-\theta}},$$
#
# and the left door has the rest. The mean reward of this policy is
# $J(\theta) = 2\, \pi_\theta(\text{left}) + 10\, \pi_\theta(\text{right})$. To make it larger, you need to know
# how it changes with $\theta$. Its derivative is called the **policy gradient**.

# %%
PAY = np.array([2.0, 10.0])  # left, right


def door_policy(theta: float) -> np.ndarray:
    """Return the probabilities of the left and of the right door."""
    right = 1 / (1 + np.exp(-theta))
    return np.array([1 - right, right])


def mean_reward(theta: float, pay: np.ndarray = PAY) -> float:
    """Return J, the mean reward of the policy."""
    return float(door_policy(theta) @ pay)


assert mean_reward(0.0) == 6  # both doors with probability 1/2

# %% [markdown]
# There is a difficulty: the formula of $J$ needs the rewards of both doors, and the mouse opens one at a
# time. What helps is the **log-probability** of a door, $\log \pi_\theta(a)$. The derivative of $\log \pi$
# is the derivative of $\pi$ divided by $\pi$, so
#
# $$\frac{dJ}{d\theta} = \sum_a \frac{d \pi_\theta(a)}{d\theta}\, r(a)
#   = \sum_a \pi_\theta(a)\, \frac{d \log \pi_\theta(a)}{d\theta}\, r(a).$$
#
# The last sum weighs each door by the probability that the mouse opens it. So it is a mean that the mouse
# can sample: open a door, get the reward, and multiply it by the derivative of the log-probability of that
# door. For our policy this derivative is $\pi_\theta(\text{left})$ for the right door, and
# $-\pi_\theta(\text{right})$ for the left one. (Check it on paper.)
#
# By hand, at $\theta = 0$, where both doors have the probability 1/2: the right door gives the sample
# $0.5 \cdot 10 = 5$, and the left door $-0.5 \cdot 2 = -1$. Their mean is $(5 - 1)/2 = 2$. It is positive, so a
# larger $\theta$ is better, which means a larger probability of the right door.

# %%
def log_probability_gradient(theta: float, a: int) -> float:
    """Return the derivative of the log-probability of a door, 0 for left and 1 for right."""
    left, right = door_policy(theta)
    return float(left if a == 1 else -right)


samples = np.array([log_probability_gradient(0.0, a) * PAY[a] for a in (0, 1)])
assert samples.tolist() == [-1, 5] and samples.mean() == 2

# %% [markdown]
# Check it numerically: the derivative of $J$ is its change over a small step of $\theta$, divided by the
# step.

# %%
for theta in (-2.0, 0.0, 0.7, 3.0):
    numerical = (mean_reward(theta + 1e-5) - mean_reward(theta - 1e-5)) / 2e-5
    by_rule = sum(door_policy(theta)[a] * log_probability_gradient(theta, a) * PAY[a] for a in (0, 1))
    assert np.isclose(numerical, by_rule)

# %% tags=["hide-input"]
thetas = np.linspace(-4, 4, 101)
figure, ax = plt.subplots(figsize=(5, 2.6))
ax.plot(thetas, [mean_reward(theta) for theta in thetas], color=BLUE)
ax.plot([-1.2, 1.2], [6 - 2.4, 6 + 2.4], color=RED, lw=1.5)
ax.plot(0, 6, "o", color=RED)
ax.text(0.35, 5.2, "gradient 2", color=RED)
ax.set(xlabel="parameter of the policy", ylabel="mean reward")
plt.show()

# %% [markdown]
# The samples are right on average, but they are noisy: 5 or −1, where the mean is 2. A **baseline** $b$
# makes them less noisy. It is a number that you subtract from each reward. An action becomes more likely
# if its reward was above the baseline, and less likely if it was below:
#
# $$\frac{d \log \pi_\theta(a)}{d\theta}\, \bigl(r(a) - b\bigr)$$
#
# The mean of the samples does not change. What the baseline takes from one door it gives to the other,
# because the derivatives of the log-probabilities have the mean 0: here $(0.5 - 0.5)/2$.
#
# By hand, with $b = 6$, the mean reward: the right door gives $0.5 \cdot (10 - 6) = 2$, and the left one
# $-0.5 \cdot (2 - 6) = 2$. Both samples are 2, and the noise is gone.

# %%
with_baseline = np.array([log_probability_gradient(0.0, a) * (PAY[a] - 6) for a in (0, 1)])
assert with_baseline.tolist() == [2, 2]
assert samples.var() == 9 and with_baseline.var() == 0

# %% [markdown]
# *REINFORCE* (Williams 1992) repeats this: open a door, and change $\theta$ by a learning rate, here
# 0.02, times the sample. The baseline is a running mean of the rewards so far. In a longer episode the
# reward is replaced by the discounted return from that step on; [Policy
# gradient](policy_gradient.ipynb) builds that.

# %%
def reinforce(pay: np.ndarray, use_baseline: bool, seed: int, steps: int = 300) -> list[float]:
    """Learn which door to open; return the probability of the right one at each step."""
    rng, theta, baseline, history = np.random.default_rng(seed), 0.0, None, []
    for _ in range(steps):
        probabilities = door_policy(theta)
        a = int(rng.random() < probabilities[1])
        r = pay[a]
        baseline = r if baseline is None else baseline
        theta += 0.02 * log_probability_gradient(theta, a) * (r - baseline * use_baseline)
        baseline += 0.1 * (r - baseline)
        history.append(probabilities[1])
    return history


# %% [markdown]
# Does the baseline matter? Put 50 more behind each door. The right door is still better by 8, so the
# choice is the same as before. But without a baseline, each door that the mouse opens becomes much more
# likely, the wrong one as well. After a few unlucky tries the mouse can get stuck with the wrong door.

# %%
cases = {
    "2 and 10": (PAY, False, GREY),
    "52 and 60": (PAY + 50, False, RED),
    "52 and 60, baseline": (PAY + 50, True, GREEN),
}
doors = {
    name: np.array([reinforce(pay, use_baseline, seed) for seed in range(30)])
    for name, (pay, use_baseline, _) in cases.items()
}  # (seeds, steps) each

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.4, 2.9))
for name, (_, _, color) in cases.items():
    line = plot_band(ax, np.arange(300), doors[name], name, color)
    line.set_linewidth(4 if color == GREY else 1.8)  # the green line lies on it
ax.set(xlabel="doors opened", ylabel="probability of\nthe better door", ylim=(0, 1.04))
ax.legend(loc="lower right")
plt.show()
stuck = {name: int((history[:, -1] < 0.5).sum()) for name, history in doors.items()}
print("mice of 30 that prefer the crumb in the end:", stuck)
assert stuck["52 and 60"] > 2 and stuck["52 and 60, baseline"] == 0

# %% [markdown]
# The curves show the mean and the 95 % interval of 30 mice. With a baseline, the mice learn 52 and 60
# about as fast as 2 and 10.
#
# The policy gradient has two more advantages. It needs no maximum over all actions, so an action can
# also be a real number, such as the force of a motor. And the policy can stay random where that is
# best, as in rock, paper, scissors.

# %% [markdown]
# ## Where tables end
#
# A table has a row for each state. Twelve squares need twelve rows. A pole on a cart has four numbers as
# its state: two positions and two speeds. Cut each of them into 10 bins, and the table has $10^4$ rows. A
# small running robot has 17 numbers, which makes $10^{17}$ rows. Even with 8 bytes per row that is 800,000
# terabytes, and the robot would never visit most of the rows.

# %%
assert 10**17 * 8 / 1e12 == 800_000

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.4, 2.9))
counts = np.arange(1, 25)
ax.plot(counts, 10.0**counts, color=BLUE)
for count, name in ((2, "a house of 10 × 10"), (4, "pole on a cart"), (17, "running robot")):
    ax.plot(count, 10.0**count, "o", color=BLUE)
    ax.text(count + 0.5, 10.0**count, name, va="top")
ax.axhline(2e9, color=GREY, ls="--", lw=1)
ax.text(24, 4e9, "memory of a laptop (16 GB)", color=GREY, ha="right", va="bottom", fontsize=9)
ax.set(xlabel="numbers in the state, 10 bins each", ylabel="rows of the table", yscale="log")
plt.show()

# %% [markdown]
# There is a second problem. What an agent learns in one row of a table says nothing about the row
# beside it. But a pole that leans by 3.0 degrees and one that leans by 3.1 degrees need the same
# push. So the rest of the book replaces the table by a neural network $Q_\theta(s, a)$ with the
# parameters $\theta$. It takes the numbers as they are, and what it learns about one state changes
# its answer for similar ones. The target and the TD error stay as you know them, and the update
# becomes a gradient step on the squared TD error. [DQN](dqn.ipynb) begins with a table that fails
# on the pole, and then builds that network.

# %% [markdown]
# ## A map of the book
#
# Which chapter is for your problem? Start at the top and answer the questions.

# %% tags=["hide-input"]
# A question and its answers, each of which leads to another question or to a chapter.
# To add a chapter, add an answer here and a line to ABOUT.
MAP = (
    "What are your actions?",
    {
        "a few choices:\nleft, right, jump": (
            "Does one observation show\nall that matters?",
            {
                "yes": (
                    "Are steps in the\nenvironment cheap?",
                    {"no": "dqn", "yes, millions\nof them": "ppo"},
                ),
                "no, the agent\nmust remember": (
                    "Are steps in the\nenvironment cheap?",
                    {
                        "no": (
                            "Are rewards rare, or of\nvery different sizes?",
                            {"no": "drqn", "yes": "r2d2"},
                        ),
                        "yes, millions\nof them": "recurrent_ppo",
                    },
                ),
            },
        ),
        "real numbers:\nforces, angles": (
            "What do you observe?",
            {
                "a few numbers": (
                    "What does a step in the\nenvironment cost?",
                    {
                        "nearly nothing": (
                            "Must each update stay\nwithin a bound?",
                            {"no": "ppo", "yes": "trpo"},
                        ),
                        "a little": "sac",
                        "much": "redq",
                    },
                ),
                "images": "drqv2",
            },
        ),
    },
)
ABOUT = {
    "dqn": ("DQN", "Q-learning with a network", "a few actions; a vector of numbers shows all that matters"),
    "drqn": ("DRQN", "DQN that remembers", "a few actions; the agent must remember"),
    "r2d2": ("R2D2", "replays what surprised it", "as DRQN; rewards are rare or of very different sizes"),
    "ppo": ("PPO", "learns a policy, on-policy", "you observe a few numbers; steps in the environment are cheap"),
    "recurrent_ppo": ("Recurrent PPO", "PPO that remembers", "as PPO; the agent must remember"),
    "trpo": ("TRPO", "bounds each step of the policy", "as PPO; no update may change the policy by much"),
    "sac": ("SAC", "learns values and a policy", "actions are real numbers; you observe a few numbers"),
    "redq": ("REDQ", "learns more from each step", "as SAC; steps in the environment are expensive"),
    "drqv2": ("DrQ-v2", "control from pixels", "actions are real numbers; you observe images"),
}
Node = str | tuple[str, dict[str, Any]]  # a chapter, or a question with its answers


def chapters_of(node: Node) -> list[str]:
    """List the chapters that a node of the map leads to."""
    if isinstance(node, str):
        return [node]
    return [chapter for child in node[1].values() for chapter in chapters_of(child)]


def draw_map(ax: Axes, node: Node, x: float = 0.0, y: float = 0.0) -> float:
    """Draw a question, its answers below it and where they lead; return the next free height."""
    question, answers = node
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#EEF3F8", "edgecolor": "#8899AA"}
    ax.text(x + 0.1, y, question, va="top", fontsize=9.5, weight="bold", bbox=box)
    trunk, top = x + 0.15, y
    first_is_chapter = isinstance(next(iter(answers.values())), str)
    y += 0.2 * (question.count("\n") + 1) + (0.3 if first_is_chapter else 0.18)
    for answer, child in answers.items():
        height = 0.19 * max(answer.count("\n") + 1, 2 if isinstance(child, str) else 1)
        middle = y + height / 2
        ax.plot([trunk, trunk + 0.2], [middle, middle], color="#8899AA", lw=1.2)
        ax.text(trunk + 0.26, middle, answer, va="center", fontsize=9.5)
        if isinstance(child, str):
            title, about, _ = ABOUT[child]
            edge = {"facecolor": "white", "edgecolor": COLORS.get(child, "black"), "lw": 2}
            ax.annotate("", (2.35, middle), (2.05, middle), arrowprops={"arrowstyle": "-|>", "lw": 1.2})
            text = ax.text(2.48, middle, f"\n{about}", va="center", fontsize=9, bbox={**box, **edge})
            ax.text(2.48, middle - 0.1, title, va="center", fontsize=9.5, weight="bold")
            text.set_linespacing(1.3)
            y += height + 0.24
        else:
            y = draw_map(ax, child, x + 0.4, y + height + 0.14)
    ax.plot([trunk, trunk], [top + 0.1, middle], color="#8899AA", lw=1.2, zorder=0)
    return y


figure, ax = plt.subplots(figsize=(4.6, 9.8))
bottom = draw_map(ax, MAP)
ax.set(xlim=(0, 4.6), ylim=(bottom, -0.15))
ax.axis("off")
plt.show()

# %% tags=["hide-input"]
chapters = list(dict.fromkeys(chapters_of(MAP)))  # one may stand at two places
unknown = [name for name in chapters if not Path(f"{name}.ipynb").is_file()]
absent = [name for name in COLORS if Path(f"{name}.ipynb").is_file() and name not in chapters]
assert not unknown and not absent, f"not a chapter: {unknown}; not on the map: {absent}"
rows = ["| your problem | chapter |", "|---|---|"]
for chapter in chapters:
    title, about, problem = ABOUT[chapter]
    rows.append(f"| {problem} | [{title}]({chapter}.ipynb): {about} |")
Markdown("\n".join(rows))

# %% [markdown]
# Whatever you choose, read [Environments](envs.ipynb), [Replay](replay.ipynb) and [DQN](dqn.ipynb)
# next: the other chapters refer to them. PPO, recurrent PPO and TRPO learn on-policy: before these,
# read [Policy gradient](policy_gradient.ipynb), and before recurrent PPO [DRQN](drqn.ipynb), too. All
# but DrQ-v2 observe a vector of numbers: for images with a few choices the book has no algorithm yet.
# Recurrent PPO takes real numbers as actions, too.

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** The mouse with $\gamma = 0.9$ walks to the cheese, the one with $\gamma = 0.5$ takes the
# crumb. At which discount does it change its mind? Work it out on paper, then check it.
#
# <details>
# <summary>Solution</summary>
#
# The crumb is worth $2 \gamma$ from the start, the cheese $10\, \gamma^4$. They are equal where
# $\gamma^3 = 0.2$, so at $\gamma = 0.585$. It is where the two lines of the figure cross.
#
# ```python
# for gamma, worth in ((0.57, 2 * 0.57), (0.60, 10 * 0.60**4)):
#     value = np.zeros(12)
#     for _ in range(20):
#         value = q_values(value, gamma).max(axis=1)
#     assert np.isclose(value[START], worth)
# assert round(0.2 ** (1 / 3), 3) == 0.585
# ```
#
# </details>

# %% [markdown]
# **Exercise 2. Optimism.** There is a way to explore without random actions: start with a table in which
# every entry is 10, as good as the cheese. Why does a greedy mouse with this table find the cheese?
# Try it with `q_learning` and $\varepsilon = 0$.
#
# <details>
# <summary>Solution</summary>
#
# Whatever the mouse tries is worse than it expected: the entry falls below 10, and next time another
# action looks better. So the mouse tries everything, until it finds the cheese, which is as good as
# expected.
#
# ```python
# for seed in range(10):
#     hopeful = np.full((12, 4), 10.0)
#     paid = q_learning(step, START, hopeful, 100, 0.0, np.random.default_rng(seed))
#     assert paid[-20:] == [10.0] * 20
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** This Q-learning runs without an error. Even after 1,000 episodes the
# values have not spread from the cheese to the start. Look at where they stop in the figure, and find
# the mistake.

# %%
def q_learning_with_a_bug(episodes: int, seed: int) -> np.ndarray:
    """As `q_learning` in the house with epsilon = 1, with a bug; return the table."""
    q, rng = np.zeros((12, 4)), np.random.default_rng(seed)
    for _ in range(episodes):
        s, terminated = START, False
        while not terminated:
            a = choose(q[s], 1.0, rng)
            s_next, r, terminated = step(s, a)
            y = r if terminated else r + GAMMA * q[s_next, a]
            q[s, a] += 0.5 * (y - q[s, a])
            s = s_next
    return q


broken = q_learning_with_a_bug(1000, seed=0)
figure, ax = plt.subplots(figsize=(3.2, 2.6))
draw_plan(ax, HOUSE, broken.max(axis=1), title="largest Q-values, with the bug")
plt.show()

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The target uses `q[s_next, a]`, the value of doing the *same* action again, in place of the largest
# one. So values only spread along straight lines: along the top to square 0, and up the right side. At
# the corner they stop, because going up from square 4 asks what going up from square 0 is worth, and
# that is a wall.
#
# ```python
# def q_learning_with_a_bug(episodes: int, seed: int) -> np.ndarray:
#     """As `q_learning` in the house with epsilon = 1; return the table."""
#     q, rng = np.zeros((12, 4)), np.random.default_rng(seed)
#     for _ in range(episodes):
#         s, terminated = START, False
#         while not terminated:
#             a = choose(q[s], 1.0, rng)
#             s_next, r, terminated = step(s, a)
#             y = r if terminated else r + GAMMA * q[s_next].max()
#             q[s, a] += 0.5 * (y - q[s, a])
#             s = s_next
#     return q
#
# repaired = q_learning_with_a_bug(1000, seed=0)
# assert np.allclose(repaired[[0, 4, 8]].max(axis=1), [8.1, 7.29, 6.561], atol=0.05)
# ```
#
# </details>

# %% [markdown]
# **Exercise 4. Expected SARSA.** SARSA's target depends on the action that chance picks next. Replace
# $Q(s', a')$ by its mean over the ε-greedy policy. Is that on-policy? Which way does the mouse take along
# the water?
#
# <details>
# <summary>Solution</summary>
#
# It is on-policy: it asks what the ε-greedy policy is worth, and computes the mean over its next actions
# in place of sampling one. So it keeps away from the water as SARSA does, with less noise in its targets.
#
# ```python
# def expected_sarsa(step, start, q, episodes, epsilon, rng, alpha=0.5):
#     """As `sarsa`, with the mean over the next action."""
#     for _ in range(episodes):
#         s, terminated = start, False
#         while not terminated:
#             a = choose(q[s], epsilon, rng)
#             s_next, r, terminated = step(s, a)
#             mean = epsilon * q[s_next].mean() + (1 - epsilon) * q[s_next].max()
#             y = td_target(r, terminated, np.array([mean]))
#             q[s, a] += alpha * (y - q[s, a])
#             s = s_next
#     return []
#
# steps = [len(greedy_path(learn_on_shore(expected_sarsa, seed)[0])) - 1 for seed in range(5)]
# assert np.median(steps) == 9
# ```
#
# </details>

# %% [markdown]
# **Exercise 5. The best baseline.** With $b = 6$ the noise was gone, at $\theta = 0$. Now let the right door
# have the probability 0.8. Which baseline makes both samples equal? Is it the mean reward?
#
# <details>
# <summary>Solution</summary>
#
# The samples are $0.2\, (10 - b)$ for the right door and $-0.8\, (2 - b)$ for the left one. They are equal
# at $b = 3.6$. The mean reward is $0.8 \cdot 10 + 0.2 \cdot 2 = 8.4$, so it is not the best baseline: the best
# one is the mean with the two probabilities swapped. The mean reward is what people use, because it is
# easy to estimate.
#
# ```python
# theta = np.log(0.8 / 0.2)
# assert np.isclose(door_policy(theta)[1], 0.8)
# noise = {}
# for b in (0.0, 3.6, 8.4):
#     both = np.array([log_probability_gradient(theta, a) * (PAY[a] - b) for a in (0, 1)])
#     mean = door_policy(theta) @ both
#     assert np.isclose(mean, 1.28)  # the gradient does not depend on the baseline
#     noise[b] = door_policy(theta) @ (both - mean) ** 2
# assert np.isclose(noise[3.6], 0) and noise[8.4] > noise[0.0]
# ```
#
# At this $\theta$ the mean reward is even worse than no baseline. With 50 more behind each door it would
# be far better than none.
#
# </details>

# %% [markdown]
# ## References
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition. MIT Press.
#   Everything in this chapter at length; the walk along the water is their example 6.6.
# - R. Bellman (1957). *Dynamic Programming*. Princeton University Press.
# - C. Watkins (1989). *Learning from Delayed Rewards*. PhD thesis, Cambridge.
# - G. Rummery and M. Niranjan (1994). *On-Line Q-Learning Using Connectionist Systems*. Technical report
#   CUED/F-INFENG/TR 166, Cambridge.
# - R. Williams (1992). *Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
#   Learning*. Machine Learning 8.
