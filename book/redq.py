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
# # REDQ: many updates for each step
#
# A step in the real world is expensive, a gradient step is cheap. So why not make twenty updates
# after each step? The paper's answer: SAC's critics then learn from their own errors, since each
# update builds on values that the last one may have made too large.
# *Randomized ensembled double Q-learning* (REDQ) keeps ten critics instead of two, and uses a random
# pair of them in each target. You build it here from [SAC](sac.ipynb) in a few lines. The figure
# compares three agents on Pendulum: a smaller REDQ with five critics, the same with two critics, and
# SAC. The first two make ten updates for each environment step, SAC one; this number is called the
# update-to-data ratio (UTD).

# %% tags=["hide-input"]
#| export
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlbook.callbacks import Callbacks
from rlbook.run import RunResult, train
from rlbook.sac import SAC, SACConfig
from rlbook.settings import Config

# %% tags=["hide-input"]
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from rlbook.figures import (
    COLORS,
    PALETTE,
    draw_parts,
    label_curves,
    load_result,
    made_by,
    plot_band,
    plot_heatmap,
    use_style,
)
from rlbook.sac import Critics, critic_loss, sac_target

use_style()
RESULTS = Path("results")

# %% tags=["hide-input"]
stored = load_result(RESULTS / "redq_pendulum.json")
sac_stored = load_result(RESULTS / "sac_pendulum.json")
fig, ax = plt.subplots()
for row, label, color in (
    (stored["runs"]["REDQ"], "REDQ, five critics, UTD 10", COLORS["redq"]),
    (stored["runs"]["N = 2"], "two critics, UTD 10", PALETTE[0]),
    (sac_stored["runs"]["SAC"], "SAC, two critics, UTD 1", COLORS["sac"]),
):
    steps, returns = np.array(row["steps"]), np.array(row["returns"])
    plot_band(ax, steps[steps <= 2_500], returns[:, steps <= 2_500], label, color)
ax.legend()
label_curves(ax, "Pendulum-v1")
plt.show()
print(made_by(stored))
print(made_by(sac_stored))
print("REDQ at the end, seed by seed:", [round(x) for x in stored["runs"]["REDQ"]["final"]])

# %% [markdown]
# Do not credit the ensemble yet. Two critics with ten updates for each step do as well.
# (They are REDQ with an ensemble of two.) So on Pendulum more updates help, and the figure is no
# evidence for the ensemble. The next section says why many updates can still be dangerous.
#
# | | |
# |---|---|
# | Paper | Chen, Wang, Zhou and Ross 2021, *Randomized Ensembled Double Q-Learning* |
# | Observations | vectors |
# | Actions | continuous, with finite bounds |
# | Learns | off-policy, from replay, with many updates for each step |
# | Same as SAC | actor, critics, losses, entropy coefficient, replay, target critics |
# | Different from SAC | $N$ critics; the smallest of a random $M$ of them in each target; the actor maximises the mean of all |
#
# ## The problem
#
# Critics have errors, and an actor that maximises them moves to where the error is positive. How large
# is the effect? Take 20 actions that are all worth 0, and critics whose errors are standard normal
# numbers. The actor chooses the action with the highest value. How high is that value on average?

# %%
SHAPE = (20_000, 20, 10)  # samples, actions, critics
errors = np.random.default_rng(0).standard_normal(SHAPE)
one_critic = errors[:, :, 0].max(axis=1).mean()
two_critics = errors[:, :, :2].min(axis=2).max(axis=1).mean()
print(f"the best of 20, by one critic: {one_critic:.2f}; by the smaller of two: {two_critics:.2f}")
assert one_critic > two_critics > 0.5

# %% [markdown]
# All true values are 0. The smaller of two critics is closer than one critic, and still too high. Each
# update copies that error into the value of the step before, where the actor maximises it again. With
# one update for each step the environment corrects it: the actor goes to the place with the high value,
# and the reward is lower than predicted. With twenty, the error is copied twenty times before the next
# such correction. (This is what can happen when the actor finds every error. Below, on Hopper, you
# measure what does happen.)
#
# ## The random subset
#
# In the target REDQ takes the smallest of $M = 2$ critics, as SAC does. But the two are drawn anew from
# all $N$ at each update, the same two for the whole batch. So an error that two critics share does not
# stay in the targets.
#
# By hand: four critics say 1, 2, 3 and 4. Of the six pairs three have the minimum 1, two have 2, one
# has 3. The expected value is $(3\cdot 1 + 2\cdot 2 + 1\cdot 3)/6 = 10/6$. With $M = 1$ it would be the
# mean, 2.5; with $M = 4$ the minimum, 1. Called with indices as `chosen`, the `Critics` of the SAC
# chapter compute only these.

# %%
#| export
def random_subset(num_critics: int, size: int, generator: np.random.Generator) -> Tensor:
    """Draw `size` different indices below `num_critics`, each set as likely as any other."""
    return torch.from_numpy(generator.permutation(num_critics)[:size])

# %%
q = torch.tensor([1.0, 2.0, 3.0, 4.0])
pairs = [min(pair) for pair in itertools.combinations(q.tolist(), 2)]
assert sum(pairs) / len(pairs) == 10 / 6

generator = np.random.default_rng(0)
subsets = torch.stack([random_subset(4, 2, generator) for _ in range(20_000)])  # (samples, 2)
assert (subsets[:, 0] != subsets[:, 1]).all()
assert abs(q[subsets].amin(dim=1).mean().item() - 10 / 6) < 0.03

critics, obs, action = Critics(3, 1, (8,), num_critics=4), torch.randn(5, 3), torch.randn(5, 1)
chosen = random_subset(4, 2, generator)
torch.testing.assert_close(critics(obs, action, chosen), critics(obs, action)[:, chosen])

# %% [markdown]
# How low is the target in general? Draw the errors of $N$ critics, again standard normal numbers,
# and average the smallest of $M$ over all subsets. This is the error that the target has on average
# over many updates, each with its own subset. The figure shows the mean and the standard deviation
# of this error over 20,000 draws. For $M = 2$ the mean is known: $-1/\sqrt\pi = -0.56$.

# %%
def subset_minimum(errors: np.ndarray, size: int) -> np.ndarray:
    """Return the expected smallest error (samples,) of a random subset of each row."""
    count = errors.shape[1]
    ranked = np.sort(errors, axis=1)
    # the fraction of all subsets whose minimum is the i-th smallest error
    weights = [math.comb(count - 1 - i, size - 1) / math.comb(count, size) for i in range(count)]
    return ranked @ np.array(weights)


more_errors = np.random.default_rng(0).standard_normal((20_000, 20))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for size in (1, 2, 5):
    sizes = [n for n in (1, 2, 3, 5, 7, 10, 15, 20) if n >= size]
    found = [subset_minimum(more_errors[:, :n], size) for n in sizes]
    left.plot(sizes, [x.mean() for x in found], marker="o", label=f"M = {size}")
    right.plot(sizes, [x.std() for x in found], marker="o", label=f"M = {size}")
left.set(xlabel="critics N", ylabel="mean error of the target", xticks=(1, 5, 10, 15, 20))
right.set(xlabel="critics N", ylabel="standard deviation of the error", xticks=(1, 5, 10, 15, 20))
left.legend()
right.legend()
assert abs(subset_minimum(more_errors[:, :10], 2).mean() - -1 / math.sqrt(math.pi)) < 0.02

# %% [markdown]
# $M$ sets how low the target is on average, and $N$ how much that varies: with more critics, more of
# their errors cancel. SAC is the leftmost point of $M = 2$.
#
# ## The actor maximises the mean
#
# SAC's actor maximises the smaller of two critics. The smallest of ten would be far too low, and the
# mean of ten is a better estimate than any one of them. So REDQ's actor maximises the *mean*, in SAC's
# own `actor_loss`. By hand: if four critics say 1, 2, 3 and 4, SAC's rule gives the actor 1, and REDQ's
# gives 2.5.
#
# Back to the 20 actions that are worth 0. REDQ's actor chooses the one with the highest mean of ten
# critics, which is harder to fool, and the target is the smaller of a random two:

# %%
best = errors.mean(axis=2).argmax(axis=1)
redq_error = subset_minimum(errors[np.arange(len(best)), best], 2).mean()
print(f"error of REDQ's target: {redq_error:.2f}, of SAC's: {two_critics:.2f}")
assert abs(redq_error) < 0.1 < two_critics

# %% [markdown]
# Nearly 0. Two effects work against each other, a maximum that is too high and a minimum that is
# too low, and here they cancel. In another task they need not, but two settings change them: a
# larger $M$ lowers the minimum, and a larger $N$ leaves the actor smaller errors to find.
#
# ## The loss
#
# The loss is SAC's: `sac_target` with the values of the chosen target critics, and `critic_loss`, whose
# sum is now over $N$ critics.
#
# $$y = r + \gamma\,(1 - \texttt{terminated})\,
# \bigl(\min_{i \in \mathcal M} Q^-_i(s', a') - \alpha \log \pi(a' \mid s')\bigr),
# \qquad L_Q = \sum_{i=1}^{N} \operatorname{mean}\bigl[(Q_i(s, a) - y)^2\bigr]$$
#
# By hand, with the numbers of the SAC chapter: $r = 1$, $\gamma = 0.9$, the two chosen critics say 3.0
# and 2.4, $\log\pi = -0.5$, $\alpha = 0.2$, so $y = 3.25$. For three critics that said 3.25, 3.0 and
# 3.75 the loss is $0 + 0.0625 + 0.25 = 0.3125$. Their standard deviation, the metric `q_std`, says how
# much they disagree.

# %%
y = sac_target(
    reward=torch.tensor([1.0]),
    discount=torch.tensor([0.9]),
    terminated=torch.tensor([False]),
    next_q=torch.tensor([[3.0, 2.4]]),  # (batch, M)
    next_log_prob=torch.tensor([-0.5]),
    alpha=0.2,
)
loss, metrics = critic_loss(q=torch.tensor([[3.25, 3.0, 3.75]]), target=y)  # q: (batch, N)
torch.testing.assert_close(y, torch.tensor([3.25]))
torch.testing.assert_close(loss, torch.tensor(0.3125))
{name: round(value.item(), 4) for name, value in metrics.items()}

# %% [markdown]
# ## Settings
#
# The defaults are the paper's: ten critics, two in the subset, twenty updates for each step, and the
# actor updated once for each step, hence at every twentieth update. With `actor_value="min"` the actor
# maximises the minimum, as in SAC; the ablations use it.

# %%
#| export
class REDQConfig(SACConfig):
    """The settings of REDQ: those of SAC, more critics and more updates for each step."""

    num_critics: int = Field(default=10, ge=1, description="Critics in the ensemble (N).")
    subset_size: int = Field(default=2, ge=1, description="Critics sampled for each target (M).")
    gradient_steps: int = Field(
        default=20, ge=1, description="Updates after each 'train_frequency' steps (UTD)."
    )
    policy_delay: int = Field(
        default=20, ge=1, description="Critic updates per update of the actor."
    )
    actor_value: Literal["mean", "min"] = Field(
        default="mean",
        description="What the actor maximises: the mean or the minimum of the critics.",
    )

    @model_validator(mode="after")
    def check_subset_fits(self) -> Self:
        """Raise unless there are enough critics for the subset."""
        if self.subset_size > self.num_critics:
            raise ValueError(
                f"Setting 'subset_size' ({self.subset_size}) must not exceed 'num_critics' "
                f"({self.num_critics})."
            )
        return self

# %% [markdown]
# ## The agent
#
# `build`, `act`, `observe` and `update` are SAC's. This is the whole difference:

# %%
#| export
class REDQ(SAC):
    """SAC with an ensemble of critics, a random few of them in each target."""

    name: ClassVar[str] = "redq"
    config_class: ClassVar[type[Config]] = REDQConfig
    config: REDQConfig

    def choose_critics(self) -> Tensor:
        """Draw the target critics whose minimum is in the target of this update."""
        subset = random_subset(self.config.num_critics, self.config.subset_size, self.generator)
        return subset.to(self.device)

    def actor_value(self, q: Tensor) -> Tensor:
        """Return what the actor maximises (batch,): the mean of q (batch, critics)."""
        return q.mean(dim=1) if self.config.actor_value == "mean" else super().actor_value(q)

# %%
#| export
def train_redq(config: REDQConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train REDQ with these settings."""
    return train(REDQ(config=config), progress, callbacks)

# %%
agent = REDQ("Pendulum-v1", num_critics=4)
said = torch.tensor([[1.0, 2.0, 3.0, 4.0]])  # (batch, critics)
assert agent.actor_value(said).tolist() == [2.5]
assert SAC("Pendulum-v1").actor_value(said).tolist() == [1.0]
chosen = [tuple(sorted(agent.choose_critics().tolist())) for _ in range(200)]
print("pairs drawn by 200 updates:", sorted(set(chosen)))
assert len(set(chosen)) == 6

# %% [markdown]
# ## The algorithm at a glance
#
# What happens after each environment step, in the order of the code:
#
# | step | equation | in the code |
# |---|---|---|
# | | repeat UTD times: | `gradient_steps` |
# | | a batch of transitions $(s, a, r, s', \texttt{terminated})$ | `sample` |
# | 1 | a random subset $\mathcal M$ of $M$ critics | `choose_critics` |
# | 2 | $a' = \tanh(\mu(s') + \sigma(s')\,\epsilon')$, and $y$ as above | `squashed_sample`, `sac_target` |
# | 3 | a gradient step of all $N$ critics on $L_Q$ | `critic_loss`, `critic_optimizer.step()` |
# | 4 | at every `policy_delay`-th update: $a = \tanh(\mu(s) + \sigma(s)\,\epsilon)$, a gradient step of the actor on $\operatorname{mean}\bigl[\alpha\log\pi(a \mid s) - \tfrac1N\sum_i Q_i(s, a)\bigr]$, and one of $\log\alpha$ | `actor_value`, `actor_loss`, `alpha_loss` |
# | 5 | $\theta^-_i \leftarrow \theta^-_i + \tau\,(\theta_i - \theta^-_i)$ | `polyak_update` |
#
# The paper updates the actor once, after the loop. Here, with `policy_delay` equal to UTD, it is
# updated in the last repetition.
#
# ## A live run
#
# Pendulum for 2,000 steps, with five critics. So that it ends while you watch, there are only five
# updates for each step, each of them of the actor as well (`policy_delay=1`). SAC has the same
# steps and settings, but one update for each step. So the two differ in the ensemble *and* in the
# number of updates.

# %%
PENDULUM: dict[str, Any] = {"hidden": (64, 64), "lr": 1e-3, "batch_size": 128,
                            "learning_starts": 250, "tau": 0.01, "eval_every": 250,
                            "eval_episodes": 20, "log_every": 100}
began = time.process_time()
agent = REDQ("Pendulum-v1", seed=1, num_critics=5, gradient_steps=5, policy_delay=1, **PENDULUM)
run = agent.learn(2_000)
sac = SAC("Pendulum-v1", seed=1, **PENDULUM)
sac_run = sac.learn(2_000)
print(f"{time.process_time() - began:.0f} seconds of processor time for both")

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
plot_band(left, *run.curve("eval_return_mean"), "REDQ", COLORS["redq"])
plot_band(left, *sac_run.curve("eval_return_mean"), "SAC", COLORS["sac"])
label_curves(left, "Pendulum-v1")
left.legend()
right.plot(*run.curve("q_std"), color=COLORS["redq"])
label_curves(right, ylabel="disagreement (std between critics)")
final, sac_final = agent.evaluate(episodes=20), sac.evaluate(episodes=20)
print(f"after 2,000 steps: REDQ {final.mean:.0f}, SAC {sac_final.mean:.0f}")
assert run.curve("eval_return_mean")[1].max() > -600  # it swings up, whatever comes after

# %% [markdown]
# REDQ swings up while SAC, with a fifth of its updates, is still on the way. The right panel is the
# metric `q_std`: it is small while all critics say about 0, rises as the values grow, and later falls
# slowly.
#
# ## A look inside
#
# Where do the critics disagree? For each angle and speed, take the action of the policy and the
# standard deviation between the values of the five critics. White dots are states that the agent has
# seen. Where it has been often, all critics were fitted to many targets and agree; far from the dots
# each one extrapolates in its own way.

# %%
angles, speeds = np.linspace(-np.pi, np.pi, 61), np.linspace(-8, 8, 41)
angle, speed = np.meshgrid(angles, speeds)  # (41, 61)
states = np.stack([np.cos(angle), np.sin(angle), speed], axis=-1).reshape(-1, 3)
spread = agent.q_values(states).std(axis=1).reshape(angle.shape)  # between the critics
fig, ax = plt.subplots(figsize=(7.5, 4))
extent = (-np.pi, np.pi, -8.0, 8.0)
labels = ("angle (rad), 0 is up", "speed (rad/s)", "std between critics")
plot_heatmap(ax, spread, extent, *labels)
seen = agent.replay.storage["obs"][: len(agent.replay) : 4]
ax.plot(np.arctan2(seen[:, 1], seen[:, 0]), seen[:, 2], ".", color="white", markersize=2, alpha=0.6)
at_seen = np.median(agent.q_values(seen).std(axis=1))
print(f"median std of the critics: {at_seen:.1f} where it was, {np.median(spread):.1f} on the grid")
assert at_seen < np.median(spread)

# %% [markdown]
# ## What each part buys
#
# How much of what the first figure shows is due to the ensemble? REDQ makes ten updates of the
# critics for each step here, and every second one updates the actor as well. Take one part away at
# a time:
#
# | name | what is left | what is gone |
# |---|---|---|
# | N = 2 | two critics, both in every target | three critics, and with them the random subset |
# | M = 1 | one random critic in each target | the minimum in the target |
# | UTD 1 | one update for each step, of critics and actor | nine of ten critic updates, four of five actor updates |
# | M = 5 | all five critics in every target, as in Maxmin Q-learning (Lan et al. 2020) | the random subset |
# | actor on the minimum | an actor that maximises the smallest value, as in SAC | the mean in the actor's loss |
#
# REDQ is pink, the variant black, mean and 95 % interval of five seeds; below are the last
# evaluations with their interquartile mean (IQM), as in the SAC chapter.

# %%
draw_parts(plt.figure(), stored, columns=5)
print(made_by(stored))

# %% [markdown]
# It is the updates that help. With ten for each step every seed of REDQ ends above −200, and the IQM is
# −144. With one, the IQM is −777, and all five seeds end below −600. The other panels show no
# difference that five seeds could prove: two critics (−141), a single one in the target, without any
# minimum (−141), the smallest of all five (−149) and an actor on the minimum (−144) end at the same
# place within the intervals. A task as small as Pendulum tolerates ten updates for each step without an
# ensemble, so it says nothing for or against one.
#
# ## Are the critics right?
#
# The paper also asks how large the bias of the critics is: the mean value of all critics for a
# state and an action, minus the discounted return, entropy bonus included, that the policy then
# gets. We measure it on one of the paper's tasks, Hopper: a leg of four parts that has to hop
# forward without falling (`pip install 'rlbook[mujoco]'`). `book/results/redq_bias.py` trains three
# agents for 2,250 steps, five seeds each: SAC with one update for each step, SAC with twenty, and
# REDQ with N = 10 and twenty. All have 64 units and batches of 64, and update the actor once for
# each step. Every 250 steps the script plays ten episodes with the current policy, and takes the
# difference at every step. The first point, at step 250, is before any update. Where a time limit
# cuts an episode, the rewards after it are missing, so only the first half of that episode counts.
# The paper divides the differences by the mean return; here they are raw, since a return near zero
# would make the ratio explode.

# %%
found = json.loads((RESULTS / "redq_bias.json").read_text())
print(made_by(found))
fig, axes = plt.subplots(1, 3, figsize=(9, 3.4))
looks = dict(zip(found["measured"], (COLORS["sac"], PALETTE[0], COLORS["redq"]), strict=True))
panels = (("bias", "mean of Q minus return"), ("std", "spread of Q minus return"), ("returns", "return"))
for ax, (key, ylabel) in zip(axes, panels, strict=True):
    for name, row in found["measured"].items():
        plot_band(ax, np.array(row["steps"]), np.array(row[key]), name, looks[name])
    label_curves(ax, ylabel=ylabel)
axes[0].axhline(0, color=COLORS["reference"], linewidth=1)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
print(f"{'':12} | Q minus return, all points     | by seed at the end\n"
      f"{'':12} |  mean  lowest  highest  spread | {'Q minus return':25} | return")
for name, row in found["measured"].items():
    bias, score = np.array(row["bias"]), np.array(row["returns"])[:, -1]
    ends, scores = ("".join(f"{x:5.0f}" for x in seeds) for seeds in (bias[:, -1], score))
    over_all = f"{bias.mean():6.0f}{bias.min():8.0f}{bias.max():9.0f}{np.mean(row['std']):8.0f}"
    print(f"{name:12} |{over_all} | {ends} |{scores}")

# %% [markdown]
# With one update for each step SAC's critics are too low, on every seed and at every point. A likely
# reason: they start near 0 and have had few updates. With twenty they are too high on average, and two
# seeds of five end far too high. REDQ's mean is nearest to zero, and it ends between −43 and 1. Its
# spread within the states of an agent (the middle panel) is 39, against 44 for SAC with twenty updates
# and 32 with one. Against SAC with twenty updates this agrees with the paper, but five seeds do not
# prove it: after the first point, zero lies outside the band of that SAC at two points only, and outside
# that of REDQ at the last. REDQ's mean is near zero because errors of both signs cancel: without their
# signs they average 39 after the first point, against 55 for SAC with twenty updates and 38 with one.
#
# The returns say less. An agent that stands for a thousand steps without falling gets about 1,000, the
# others far less. At the end one seed of five stays up, the same for both agents with twenty updates. It
# makes the two bands wide, and they overlap almost wholly.
#
# The runs on Hopper, here and below, were made with rlbook 0.1.0, as the lines beside the figures
# say. Its updates differed in one thing: critics and actor took their steps together, so the
# actor's gradient used the critics from before their step.
#
# ## Hopper
#
# REDQ with the paper's N = 10, M = 2 and UTD 20 against SAC, with the same networks and the same 15,000
# steps: mean and 95 % interval of five seeds each. SAC has one update for each step, so this, too,
# compares the ensemble and the updates together.

# %%
fig, ax = plt.subplots()
for name, file in (("redq", "redq_hopper.json"), ("sac", "sac_hopper.json")):
    hopper = load_result(RESULTS / file)
    (row,) = hopper["runs"].values()
    plot_band(ax, np.array(row["steps"]), np.array(row["returns"]), name.upper(), COLORS[name])
    print(made_by(hopper))
    at_the_end, best = (np.round(x).astype(int) for x in (row["final"], np.max(row["returns"], axis=1)))
    middle, low, high = row["iqm"]
    print(f"{name}: seeds {at_the_end} at the end, IQM {middle:.0f} ({low:.0f} to {high:.0f}); "
          f"best {best}; {np.mean(row['seconds']) / 60:.1f} minutes a run")
ax.axhline(3517, color=COLORS["reference"], linestyle="--", linewidth=1)
ax.annotate("the paper's REDQ at 125,000 steps", (15_000, 3517), (0, -12), ha="right",
            textcoords="offset points")
ax.legend(loc="center left")
label_curves(ax, "Hopper-v5")

# %% [markdown]
# REDQ ends at 219 to 1916, SAC at 22 to 301, and the intervals of their IQMs overlap. A fall ends the
# episode, so one fall costs most of its return, and the last evaluation says little about a run. On the
# way every seed of REDQ was above 1,000 at least once, and no seed of SAC above 350; but the best of
# fifteen evaluations is always flattering. The price is about thirty times as much time for a run. The
# paper's 3517 comes after 125,000 steps, eight times as many, with networks twice as wide and a batch
# twice as large.
#
# ## Honest edges
#
# - **Sizes.** The paper has two layers of 256 and a batch of 256, which are the defaults here. The
#   Hopper config has 128 and 128, so that 280,000 updates take minutes, not an hour; Pendulum
#   has 64, a batch of 128, N = 5 and UTD 10. N and UTD of Pendulum were chosen on the seeds 100 to 102,
#   which are not among those shown.
# - **The actor** is updated once for each step in the paper. On Pendulum it is updated with every
#   second update of the critics (`policy_delay: 2`), five times for each step, for REDQ and all its
#   variants but one; with UTD 1 it is updated once for each step.
# - **The first steps** on Hopper are 1,000 random ones, not 5,000: they would be a third of our budget.
# - **Target entropy** on Hopper is −1, as in the paper, and not minus the number of action dimensions.
# - **Environment.** The paper's Hopper is Hopper-v2, ours Hopper-v5: rewards and physics differ.
#
# This chapter does not claim that the ensemble helps on Pendulum, that it reproduces the paper's table,
# or that any of this holds on a robot.
#
# ## Exercises
#
# **Exercise 1.** With N = 10 and M = 2, how many different subsets are there, and how often is a given
# critic in the target? What changes if the subset is drawn for each transition of the batch instead?
#
# <details>
# <summary>Solution</summary>
#
# 45, and each critic is in a fifth of them. Drawn for each transition, every critic would have to be
# computed for every batch: five times the work for the targets, and the targets of one batch would mix
# all pairs, so that an update sees an average over the 45 and not one of them. The paper draws once for
# each update.
#
# ```python
# pairs = list(itertools.combinations(range(10), 2))
# assert len(pairs) == 45 and sum(0 in pair for pair in pairs) / len(pairs) == 1 / 5
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Show that N = M = 2 and UTD 1 is not quite SAC. Where do they differ?
#
# <details>
# <summary>Solution</summary>
#
# The critics' loss is the same. The actor's is not: SAC's actor maximises the smaller critic, REDQ's
# the mean of the two. With `actor_value="min"` the two are the same algorithm.
#
# ```python
# q = torch.tensor([[1.0, 3.0]])
# twin = {"num_critics": 2, "gradient_steps": 1, "policy_delay": 1}
# assert SAC("Pendulum-v1").actor_value(q).item() == 1
# assert REDQ("Pendulum-v1", **twin).actor_value(q).item() == 2
# assert REDQ("Pendulum-v1", **twin, actor_value="min").actor_value(q).item() == 1
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** The paper also tries M = 1.5: one critic or two, each half the time. What is the mean
# error of the target for standard normal errors?
#
# <details>
# <summary>Solution</summary>
#
# Half of 0 and half of $-1/\sqrt\pi$: $-0.28$.
#
# ```python
# means = [subset_minimum(more_errors, size).mean() for size in (1, 2)]
# assert abs(sum(means) / 2 - -0.28) < 0.02
# ```
#
# </details>

# %% [markdown]
# **Exercise 4 (a planted bug).** This subset passes a quick look: the right number of indices, all in
# range, different from update to update. What is wrong with it, and what does it do to the target?

# %%
def my_subset(num_critics: int, size: int, generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.integers(num_critics, size=size))


generator = np.random.default_rng(0)
subsets = torch.stack([my_subset(4, 2, generator) for _ in range(20_000)])
print(f"expected minimum of 1, 2, 3, 4: {said[0][subsets].amin(dim=1).mean():.3f}, by hand {10 / 6:.3f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# It draws with repetition. With N = 4 a quarter of the pairs are the same critic twice, which is M
# = 1: the target is higher than it should be. A permutation draws without repetition.
#
# ```python
# def my_subset(num_critics: int, size: int, generator: np.random.Generator) -> Tensor:
#     return torch.from_numpy(generator.permutation(num_critics)[:size])
#
# subsets = torch.stack([my_subset(4, 2, generator) for _ in range(20_000)])
# assert abs(said[0][subsets].amin(dim=1).mean().item() - 10 / 6) < 0.03
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** Write the loss of REDQ's critics from memory, as a function of a batch, with a sum
# over the critics, and compare its gradients with those of `critic_gradients`.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_critic_loss(agent: REDQ, batch: Any, noise: Tensor, chosen: Tensor) -> Tensor:
#     with torch.no_grad():
#         alpha = agent.temperature()
#         mean, log_std = agent.actor(batch.next_obs)
#         u = mean + log_std.exp() * noise
#         log_gaussian = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
#         log_det = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
#         next_log_prob = (log_gaussian - log_det).sum(dim=1)
#         next_action = u.tanh()
#         next_q = agent.target_critics(batch.next_obs, next_action)[:, chosen].min(dim=1).values
#         next_value = next_q - alpha * next_log_prob
#         y = batch.reward + batch.discount * (1 - batch.terminated.float()) * next_value
#     q = agent.critics(batch.obs, batch.action)
#     return sum(((q[:, i] - y) ** 2).mean() for i in range(agent.config.num_critics))
#
#
# agent = REDQ("Pendulum-v1", hidden=(32, 32), batch_size=64, learning_starts=64)
# agent.learn(64, progress=False)
# batch, noise, chosen = agent.sample(), agent.sample_noise(64), agent.choose_critics()
# parameters = list(agent.critics.parameters())
# mine = torch.autograd.grad(my_critic_loss(agent, batch, noise, chosen), parameters)
# agent.critic_gradients(batch, noise, chosen)
# for parameter, gradient in zip(parameters, mine, strict=True):
#     torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook import REDQ
#
# agent = REDQ.from_config("pendulum")
# agent.learn(2_500)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train redq --config pendulum --seed 1 --run-dir runs/redq
# rlbook train redq --config hopper --run-dir runs/hopper    # extra: mujoco
# rlbook evaluate runs/redq --episodes 20
# ```
#
# The example `examples/redq_pendulum.py` is a script of this kind.
#
# ## References
#
# - X. Chen, C. Wang, Z. Zhou, K. Ross. *Randomized Ensembled Double Q-Learning: Learning Fast
#   Without a Model.* ICLR 2021. arXiv:2101.05982.
# - H. van Hasselt. *Double Q-learning.* NeurIPS 2010.
# - Q. Lan, Y. Pan, A. Fyshe, M. White. *Maxmin Q-learning: Controlling the Estimation Bias of
#   Q-learning.* ICLR 2020. arXiv:2002.06487.
