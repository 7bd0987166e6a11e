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
# # TRPO: steps of a known size
#
# How long should a step be? A2C leaves that to a learning rate, and PPO to a loss that becomes flat. In this chapter
# you build *trust region policy optimisation* (TRPO), which computes the answer: the best step among those that
# change the policy by no more than a given amount. You need three tools for it: products with a matrix that is never
# written down, conjugate gradients, and a line search. Each is some ten lines. The figure shows five runs on CartPole
# and five on Pendulum.
#
# | | |
# |---|---|
# | Paper | Schulman et al. 2015, *Trust Region Policy Optimization* |
# | Observations | vectors |
# | Actions | discrete or continuous |
# | Learns | on-policy, from rollouts of several environments |
# | Same as | [A2C](policy_gradient.ipynb): networks, rollout buffer, GAE, one step of the policy for each rollout; [PPO](ppo.ipynb): the probability ratio, the values learn in several epochs of minibatches |
# | Different from both | a bound on the KL divergence in place of a learning rate or a clipped loss; the natural gradient; no optimiser for the policy |

# %% tags=["hide-input"]
#| export
from collections.abc import Callable, Iterable
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence

from rlbook.agent import Metrics, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import check_shapes, set_learning_rate
from rlbook.policy_gradient import A2C, RolloutBatch, RolloutConfig, explained_variance, normalize
from rlbook.ppo import check_minibatches
from rlbook.run import RunResult, train
from rlbook.settings import Config

# %% tags=["hide-input"]
import copy
import math
import os
import time
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from torch.distributions import Categorical, Normal

from rlbook.envs import make_env
from rlbook.figures import (
    COLORS,
    draw_parts,
    filmstrip,
    label_curves,
    load_result,
    made_by,
    plot_result,
    show_parity,
    use_style,
)
from rlbook.policy_gradient import CategoricalPolicy
from rlbook.ppo import PPO
from rlbook.run import Collector

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()

# %% tags=["hide-input"]
cartpole, pendulum = load_result("results/trpo_cartpole.json"), load_result("results/trpo_pendulum.json")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
for ax, result in ((left, cartpole), (right, pendulum)):
    plot_result(ax, result)
    label_curves(ax, ax.get_title(), "return of 20 greedy episodes")
plt.show()
for result in (cartpole, pendulum):
    finals = result["runs"]["trpo"]["final"]
    print(made_by(result))
    print("last evaluation of each seed:", *(round(score) for score in finals), f" mean {np.mean(finals):.0f}")
assert np.mean(cartpole["runs"]["trpo"]["final"]) >= 460
assert np.mean(pendulum["runs"]["trpo"]["final"]) >= -250

# %% [markdown]
# ## The problem: one step too long
#
# The gradient says in which direction to go, not how far. Take a policy that A2C has trained for a while, collect one
# rollout, and make a single step along its gradient. How good is the policy after a step of length 0.01? Of length 10?

# %%
student = A2C.from_config("cartpole", seed=5, num_steps=128, eval_every=0)
student.learn(50_000, progress=False)
student.rollout.clear()
collector = Collector(student)
while not student.rollout.full:
    collector.step()
collector.envs.close()
batch = student.finish_rollout()  # 1,024 steps
advantage = normalize(batch.advantage)

moved = copy.deepcopy(student)
parameters = list(moved.policy.parameters())
log_prob = moved.policy(batch.obs).log_prob(batch.action)
gradients = torch.autograd.grad((log_prob * advantage).mean(), parameters)
norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
lengths, scores = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), []
start = student.evaluate(episodes=20).mean
for length in lengths:
    moved.policy.load_state_dict(student.policy.state_dict())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter += length * gradient / norm
    scores.append(moved.evaluate(episodes=20).mean)
print(f"return {start:.0f} before;", *(f"{x:.0f}" for x in scores), "after a step of each length")
assert scores[-1] < 0.5 * start

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 2.8))
ax.semilogx(lengths, scores, color=COLORS["a2c"], marker="o")
ax.axhline(start, color=COLORS["reference"], linestyle="--", linewidth=1)
ax.annotate("before the step", (10, start), (0, 4), ha="right", textcoords="offset points")
ax.set(xlabel="length of one step along the gradient", ylabel="return of 20 greedy episodes", ylim=(0, 515))
plt.show()

# %% [markdown]
# Short steps change little. Somewhere a step is best, and beyond it one step is enough to ruin what 50,000 steps of the
# environment have taught. With a bad policy the next rollout is bad data, too, so the agent may not recover. And the
# right length is not a number that you can choose once: it depends on the network, on the policy and on the batch.
#
# ## How far has the policy moved?
#
# A length in parameters says little, because what counts is what the policy does. So measure the distance between two
# policies by the **KL divergence** of their actions, averaged over the states of the rollout:
#
# $$\overline{D}(\pi_{\text{old}}, \pi_\theta) = \operatorname{mean}_s \Bigl[\sum_a \pi_{\text{old}}(a \mid s)
#   \log \frac{\pi_{\text{old}}(a \mid s)}{\pi_\theta(a \mid s)}\Bigr]$$
#
# It is 0 if the policies are equal and positive otherwise. Both policies give their whole distribution, so it can be
# computed exactly in each state; PPO's *approximate KL* is an estimate from the sampled actions.
# By hand: if the probability of the first of two
# actions goes from 0.5 to 0.75, it is $0.5 \log \tfrac{0.5}{0.75} + 0.5 \log \tfrac{0.5}{0.25} = 0.144$. For Gaussians
# with the same $\sigma$ it is $(\mu - \mu')^2 / 2\sigma^2$: a shift of the mean by 0.1 counts 0.005 if $\sigma = 1$, and 0.5
# if $\sigma = 0.1$.

# %%
#| export
def mean_kl(old: Distribution, new: Distribution) -> Tensor:
    """Return the KL divergence of the new policy from the old one, averaged over states."""
    return kl_divergence(old, new).mean()

# %%
before, after = Categorical(torch.tensor([[0.5, 0.5]])), Categorical(torch.tensor([[0.75, 0.25]]))
assert abs(mean_kl(before, after).item() - 0.144) < 1e-3 and mean_kl(before, before) == 0
for sigma, distance in ((1.0, 0.005), (0.1, 0.5)):
    wide, shifted = (Normal(torch.tensor([mu]), sigma) for mu in (0.0, 0.1))
    assert abs(mean_kl(wide, shifted).item() - distance) < 1e-6

# %% [markdown]
# ## What would the new policy get?
#
# You know from [PPO](ppo.ipynb) what to maximise: the advantages of the old policy's actions,
# weighed by the probability ratio. TRPO calls their mean the *surrogate objective*, and leaves it
# unclipped:
#
# $$L(\theta) = \operatorname{mean}\Bigl[\frac{\pi_\theta(a_t \mid s_t)}{\pi_{\text{old}}(a_t \mid s_t)}\, \hat A_t\Bigr]$$
#
# You can trust the surrogate only near the old policy: it asks what the new policy would do in
# the states that the old one has visited. So TRPO maximises it under a constraint, the **trust
# region**:
#
# $$\text{maximise } L(\theta) \quad \text{subject to} \quad \overline{D}(\pi_{\text{old}}, \pi_\theta) \le \delta$$
#
# Here $\delta$ is the bound, not a TD error. The loss is $-L$, since losses are minimised. The
# value network has a loss of its own, the squared error $\operatorname{mean}[(V(s) - y)^2]$, and
# an optimiser of its own. By hand: probabilities that went from 0.5 to 0.75 and from 0.5 to 0.25,
# with the advantages 1 and $-2$, give $L = (1.5 \cdot 1 - 0.5 \cdot 2) / 2 = 0.25$, where it was
# $-0.5$ before. Values 1 and 3 with returns 2 and 5 have the loss $(1 + 4) / 2 = 2.5$.

# %%
#| export
def trpo_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return the negative surrogate objective of a rollout; all arguments are (batch,)."""
    check_shapes(len(log_prob), log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    ratio = (log_prob - old_log_prob).exp()
    return -(ratio * advantage).mean()


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """Return the mean squared error of the values; both arguments are (batch,)."""
    check_shapes(len(returns), value=value, returns=returns)
    return (value - returns).square().mean()

# %%
old, new = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
worth = torch.tensor([1.0, -2.0])
assert trpo_loss(new, old, worth) == -0.25 and trpo_loss(old, old, worth) == 0.5
assert value_loss(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 5.0])) == 2.5

# %% [markdown]
# ## The natural gradient
#
# For a small step $x$ from the old parameters, the surrogate is nearly a plane, and the KL divergence nearly a bowl:
#
# $$L(\theta + x) \approx L(\theta) + g^\top x, \qquad
#   \overline{D} \approx \tfrac12\, x^\top F x$$
#
# Here $g$ is the gradient of $L$. The divergence has no linear term, because it is 0 at $x = 0$
# and nowhere lower. $F$ is its matrix of second derivatives, the **Fisher matrix**. Among all
# steps of the same divergence, $L$ rises most where a contour of the plane touches a contour of
# the bowl. There the two gradients, $g$ and $F x$, are parallel, so $x$ points along
#
# $$x = F^{-1} g,$$
#
# the **natural gradient**. Its length follows from the bound: stretch $x$ by $\beta$ until
# $\tfrac12 \beta^2 x^\top F x = \delta$,
#
# $$\beta = \sqrt{\frac{2 \delta}{x^\top F x}}.$$
#
# Do it once by hand, for a policy with two parameters, $\mu$ and $\log \sigma$ of a Gaussian. The
# action $a$ pays $-(a - 1)^2$, so the mean reward is $J = -(\mu - 1)^2 - \sigma^2$, and its
# gradient at $\mu = 0$ is $g = (2, -2\sigma^2)$. The Fisher matrix is known:
# $F = \operatorname{diag}(1 / \sigma^2,\, 2)$.
#
# | | $\sigma = 0.5$ | $\sigma = 0.1$ |
# |---|---|---|
# | gradient $g$ | $(2,\; -0.5)$ | $(2,\; -0.02)$ |
# | Fisher matrix $F$ | $\operatorname{diag}(4,\; 2)$ | $\operatorname{diag}(100,\; 2)$ |
# | natural gradient $x = F^{-1} g$ | $(0.5,\; -0.25)$ | $(0.02,\; -0.01)$ |
# | $x^\top F x$ | $1 + 0.125 = 1.125$ | $0.04 + 0.0002 = 0.0402$ |
# | $\beta$ for $\delta = 0.09$ | $\sqrt{0.18 / 1.125} = 0.4$ | $\sqrt{0.18 / 0.0402} = 2.116$ |
# | step $\beta x$ | $(0.2,\; -0.1)$ | $(0.042,\; -0.021)$ |

# %%
def gaussian_kl(step: np.ndarray, sigma: float) -> np.ndarray:
    """Return the KL divergence after steps (..., 2) of the mean and of log sigma."""
    wider = sigma * np.exp(step[..., 1])
    return step[..., 1] + (sigma**2 + step[..., 0] ** 2) / (2 * wider**2) - 0.5


delta, steps_by_hand = 0.09, {}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True, sharey=True)
grid = np.stack(np.meshgrid(np.linspace(-0.3, 0.3, 241), np.linspace(-0.4, 0.4, 241)), axis=-1)
for ax, sigma in zip(axes, (0.5, 0.1), strict=True):
    g, fisher = np.array([2, -2 * sigma**2]), np.diag([1 / sigma**2, 2])
    x = np.linalg.solve(fisher, g)
    natural = np.sqrt(2 * delta / (x @ fisher @ x)) * x
    steps_by_hand[sigma] = natural
    ax.contour(*np.moveaxis(grid, -1, 0), gaussian_kl(grid, sigma), [delta], colors=COLORS["trpo"])
    bowl = 0.5 * np.einsum("...i,ij,...j", grid, fisher, grid)
    ax.contour(*np.moveaxis(grid, -1, 0), bowl, [delta], colors="#999999", linestyles="dashed")
    for step, name, color in ((0.05 * g, "0.05 g", "a2c"), (natural, "natural", "trpo")):
        ax.annotate("", step, (0, 0), arrowprops={"arrowstyle": "-|>", "lw": 2, "color": COLORS[color]})
        ax.plot([], [], color=COLORS[color], label=f"{name}: KL {gaussian_kl(step, sigma):.2f}")
    ax.set(xlabel="step of μ", title=f"σ = {sigma}", ylim=(-0.4, 0.7))
    ax.legend(loc="upper left")
axes[0].set_ylabel("step of log σ")
plt.show()
print("natural steps:", *(step.round(3) for step in steps_by_hand.values()))
assert np.allclose(steps_by_hand[0.5], [0.2, -0.1]) and np.allclose(steps_by_hand[0.1], [0.042, -0.021], atol=1e-3)

# %% [markdown]
# The solid line is the trust region, the dashed ellipse its approximation by the bowl. A gradient
# step with the learning rate 0.05 is too timid for the wide policy. For the narrow one it goes
# far outside, to a KL divergence of 0.5, since the same shift of the mean is now a whole standard
# deviation. The natural step ends on the ellipse in both panels. The exact contour is near the
# ellipse but differs from it: in both panels the step ends outside, by more on the left. The line
# search below takes care of that.
#
# ## Products with the Fisher matrix
#
# A network has thousands of parameters, and $F$ would have millions of entries. But you never
# need $F$ itself, only products $Fv$ with vectors, and these take two backward passes. The first,
# made once for all products, gives the gradient of $\overline{D}$. `create_graph=True` keeps its
# graph, so that you can differentiate it again. Its inner product with $v$ is a number, and the
# gradient of that number is
#
# $$\nabla \bigl( (\nabla \overline{D})^\top v \bigr) = (\nabla^2 \overline{D})\, v = F v.$$
#
# The old policy is held fixed, so it must carry no gradient. Where the batch says little about a direction, $F$ is nearly
# singular there, and the natural gradient would be huge. **Damping** adds a small multiple of the identity,
# $F + \epsilon I$, and keeps such directions in check.
#
# One vector of all parameters is easier to compute with than a list of tensors. `flatten` makes it, and `set_parameters`
# goes the other way.

# %%
#| export
Product = Callable[[Tensor], Tensor]  # from a vector to a matrix times that vector


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return all numbers of some tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def set_parameters(parameters: list[nn.Parameter], vector: Tensor) -> None:
    """Copy a vector into the parameters, the reverse of `flatten`."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))


def fisher_product(kl: Tensor, parameters: list[nn.Parameter], damping: float) -> Product:
    """Return the function v -> (F + damping) v, where F is the second derivative of `kl`."""
    gradient = flatten(torch.autograd.grad(kl, parameters, create_graph=True))  # first pass

    def product(vector: Tensor) -> Tensor:
        along = gradient @ vector
        second = torch.autograd.grad(along, parameters, retain_graph=True)  # second pass
        return flatten(second) + damping * vector

    return product

# %% [markdown]
# By hand: the Gaussian again. With $\sigma = 0.5$ the products with the unit vectors are the columns of
# $\operatorname{diag}(4, 2)$, and with a damping of 0.1 they are 4.1 and 2.1 on the diagonal.

# %%
class TwoNumbers(nn.Module):
    """A Gaussian policy with the parameters mu and log sigma, which sees nothing."""

    def __init__(self, mu: float, sigma: float) -> None:
        super().__init__()
        self.mu, self.log_sigma = (nn.Parameter(torch.tensor(x)) for x in (mu, math.log(sigma)))

    def forward(self) -> Normal:
        return Normal(self.mu.expand(1), self.log_sigma.exp())  # for one state


def fixed(policy: nn.Module, *inputs: Tensor) -> Distribution:
    """Return what a policy says, without a gradient."""
    with torch.no_grad():
        return policy(*inputs)


two = TwoNumbers(mu=0.0, sigma=0.5)
product = fisher_product(mean_kl(fixed(two), two()), list(two.parameters()), damping=0.0)
columns = torch.stack([product(unit) for unit in torch.eye(2)])
torch.testing.assert_close(columns, torch.tensor([[4.0, 0.0], [0.0, 2.0]]))
damped = fisher_product(mean_kl(fixed(two), two()), list(two.parameters()), damping=0.1)
torch.testing.assert_close(damped(torch.tensor([1.0, 1.0])), torch.tensor([4.1, 2.1]))

# %% [markdown]
# Does it hold for a network? The Fisher matrix has a second definition, without second derivatives: the mean of
# $\nabla \log \pi\, \nabla \log \pi^\top$ over the actions that the policy takes. For a tiny policy you can write the
# whole matrix down, action by action:

# %%
torch.manual_seed(0)
tiny, seen = CategoricalPolicy(inputs=2, actions=3, hidden=(3,), orthogonal=False), torch.randn(5, 2)
tiny_parameters = list(tiny.parameters())
explicit = 0.0
for obs in seen:
    distribution = tiny(obs.unsqueeze(0))
    for action in range(3):
        log_prob = distribution.log_prob(torch.tensor([action])).sum()
        score = flatten(torch.autograd.grad(log_prob, tiny_parameters, retain_graph=True))
        explicit += distribution.probs[0, action].detach() * torch.outer(score, score) / len(seen)
product = fisher_product(mean_kl(fixed(tiny, seen), tiny(seen)), tiny_parameters, damping=0.0)
by_products = torch.stack([product(unit) for unit in torch.eye(len(explicit))])
print(f"{len(explicit)} parameters, largest difference {(by_products - explicit).abs().max():.1e}")
torch.testing.assert_close(by_products, explicit, atol=1e-6, rtol=1e-4)

# %% [markdown]
# ## Conjugate gradients
#
# Next, solve $F x = g$ with nothing but products. *Conjugate gradients* start at $x = 0$ and
# improve $x$ along one direction $p$ after another. The first is the *residual* $r = g - F x$,
# which is $g$ itself. Along $p$ the best length is $\alpha = r^\top r / p^\top F p$. The next
# direction is the new residual, with enough of the old direction added that
# $p_{\text{new}}^\top F\, p_{\text{old}} = 0$. Such directions are called *conjugate*: a step
# along one does not undo the work of the other. One iteration is
#
# $$x \leftarrow x + \alpha p, \qquad r \leftarrow r - \alpha F p, \qquad
#   p \leftarrow r + \frac{r_{\text{new}}^\top r_{\text{new}}}{r_{\text{old}}^\top r_{\text{old}}}\, p$$
#
# In exact arithmetic, $n$ unknowns need at most $n$ iterations, and often far fewer bring you
# close. The paper makes ten.
#
# By hand: $\begin{pmatrix} 3 & 1 \\ 1 & 3 \end{pmatrix} x = \begin{pmatrix} 4 \\ 0 \end{pmatrix}$,
# with this matrix as $F$. At first $r = p = (4, 0)$, $Fp = (12, 4)$,
# $\alpha = 16 / 48 = \tfrac13$, so $x = (\tfrac43, 0)$ and $r = (0, -\tfrac43)$. The next
# direction is $p = (0, -\tfrac43) + \tfrac{16/9}{16} (4, 0) = (\tfrac49, -\tfrac43)$, and the second step ends at
# $x = (1.5, -0.5)$, the solution.

# %%
#| export
def conjugate_gradient(product: Product, b: Tensor, iterations: int) -> Tensor:
    """Solve A x = b for a symmetric positive definite A, known by its products alone."""
    x = torch.zeros_like(b)
    residual = direction = b  # b - A x
    squared = initial = b @ b
    for _ in range(iterations):
        if squared <= 1e-10 * initial:  # solved, or there was nothing to solve
            break
        image = product(direction)
        length = squared / (direction @ image)
        x = x + length * direction
        residual = residual - length * image
        before, squared = squared, residual @ residual
        direction = residual + squared / before * direction
    return x

# %%
matrix, right_side = torch.tensor([[3.0, 1.0], [1.0, 3.0]]), torch.tensor([4.0, 0.0])
torch.testing.assert_close(conjugate_gradient(matrix.mv, right_side, 1), torch.tensor([4 / 3, 0.0]))
torch.testing.assert_close(conjugate_gradient(matrix.mv, right_side, 2), torch.tensor([1.5, -0.5]))

root = torch.randn(30, 30, dtype=torch.float64)
matrix, right_side = root @ root.t() + torch.eye(30), torch.randn(30, dtype=torch.float64)
solution = np.linalg.solve(matrix.numpy(), right_side.numpy())
errors = [np.abs(conjugate_gradient(matrix.mv, right_side, n).numpy() - solution).max() for n in range(1, 60)]
print(f"error after 10 iterations {errors[9]:.3f}, after 30 {errors[29]:.1e}")
assert errors[-1] < 1e-4 * np.abs(solution).max() + 1e-4

# %% [markdown]
# ## The largest step
#
# Then stretch the direction to the bound. `product` may include damping, and the step is then a little shorter
# than the bound allows. By hand: the Gaussian with $\sigma = 0.5$ and $\delta = 0.09$ should step by
# $(0.2, -0.1)$, as in the table.

# %%
#| export
def largest_step(product: Product, direction: Tensor, target_kl: float) -> Tensor:
    """Stretch a direction until its KL divergence, to second order and damped, is `target_kl`."""
    curvature = direction @ product(direction)
    return (2 * target_kl / curvature.clamp(min=1e-12)).sqrt() * direction

# %%
product = fisher_product(mean_kl(fixed(two), two()), list(two.parameters()), damping=0.0)
direction = conjugate_gradient(product, torch.tensor([2.0, -0.5]), 10)
torch.testing.assert_close(direction, torch.tensor([0.5, -0.25]))
torch.testing.assert_close(largest_step(product, direction, 0.09), torch.tensor([0.2, -0.1]))

# %% [markdown]
# ## The line search
#
# Plane and bowl are approximations. So try the step before you trust it: move the policy, and compute the exact surrogate
# and the exact KL divergence on the rollout. If the divergence is above the bound, or the surrogate has not improved,
# make the step shorter by a factor, and try again. If ten lengths fail, the policy stays where it was.
#
# By hand: the natural step of the Gaussian went a little too far, because the bowl is not exact. With the factor 0.8 the
# second length, $0.8 \cdot (0.2, -0.1)$, is inside.

# %%
#| export
def line_search(
    attempt: Callable[[float], tuple[Tensor, Tensor]],  # fraction of the step -> improvement, KL
    target_kl: float,
    shrink: float,
    steps: int,
) -> tuple[float, int]:
    """Return the first of 1, shrink, shrink^2, ... that is good, or 0, and how many were tried."""
    for i in range(steps):
        improvement, kl = attempt(shrink**i)
        if improvement > 0 and kl <= target_kl:
            return shrink**i, i + 1
    return 0.0, steps

# %%
def attempt_by_hand(fraction: float) -> tuple[Tensor, Tensor]:
    """Return improvement and KL divergence of the Gaussian after a fraction of its step."""
    step = fraction * steps_by_hand[0.5]
    mu, sigma = step[0], 0.5 * math.exp(step[1])
    improvement = -((mu - 1) ** 2) - sigma**2 + 1 + 0.5**2
    return torch.tensor(improvement), torch.tensor(gaussian_kl(step, 0.5))


for fraction in (1.0, 0.8):
    improvement, kl = attempt_by_hand(fraction)
    print(f"{fraction} of the step: improvement {improvement:.3f}, KL {kl:.4f} of {delta}")
assert line_search(attempt_by_hand, delta, shrink=0.8, steps=10) == (0.8, 2)
assert line_search(attempt_by_hand, 1e-9, shrink=0.8, steps=10) == (0.0, 10)  # never inside

# %% [markdown]
# ## Settings
#
# TRPO has no learning rate for its policy. `target_kl` is the bound $\delta$; `lr`,
# `value_epochs` and `minibatch_size` are those of the value network. With `cg_iterations: 1` the
# direction is that of the plain gradient, as the first iteration by hand showed.
# `line_search: false` takes every step as it is. Both let you measure what the parts are worth.

# %%
#| export
class TRPOConfig(RolloutConfig):
    """The settings of TRPO."""

    num_steps: int = Field(default=128, ge=1, description="Steps of each environment in a rollout.")
    target_kl: float = Field(
        default=0.01, gt=0, description="How far, in KL divergence, a step may move the policy."
    )
    cg_iterations: int = Field(
        default=10, ge=1, description="Iterations of conjugate gradients; 1 is the plain gradient."
    )
    damping: float = Field(
        default=0.1, ge=0, description="What is added to the diagonal of the Fisher matrix."
    )
    line_search: bool = Field(
        default=True, description="Shorten steps that are too long or do not improve."
    )
    line_search_steps: int = Field(
        default=10, ge=1, description="How many lengths are tried before the step is dropped."
    )
    line_search_shrink: float = Field(
        default=0.8, gt=0, lt=1, description="Factor from one length to the next."
    )
    value_epochs: int = Field(
        default=10, ge=1, description="How often the values learn from each rollout."
    )
    minibatch_size: int = Field(default=128, ge=1, description="Steps of one update of the values.")
    normalize_advantages: bool = Field(
        default=True, description="Give the advantages of a rollout mean 0 and deviation 1."
    )

    @model_validator(mode="after")
    def check_division(self) -> Self:
        """Raise unless a rollout divides into minibatches."""
        check_minibatches(self.rollout_size, self.minibatch_size)
        return self

# %% [markdown]
# ## The agent
#
# The networks, `act`, `observe` and `finish_rollout` are those of A2C, and `batches` yields each full rollout once. One
# update is one rollout: a step of the policy, then some epochs of minibatches for the values.
#
# | step | equation | in the code |
# |---|---|---|
# | 1 | $\hat A$, $y$ and $\log \pi_{\text{old}}$ of the rollout | `finish_rollout` |
# | 2 | $g = \nabla L(\theta)$ | `trpo_loss`, `torch.autograd.grad` |
# | 3 | $v \mapsto (F + \epsilon I)\, v$ | `fisher_product` of `mean_kl` |
# | 4 | $x \approx (F + \epsilon I)^{-1} g$ | `conjugate_gradient` |
# | 5 | $\beta x$ with $\beta = \sqrt{2\delta / x^\top (F + \epsilon I)\, x}$ | `largest_step` |
# | 6 | the first of $1, 0.8, 0.64, \dots$ with $L(\theta + \cdot) > L(\theta)$ and $\overline{D} \le \delta$ | `line_search` of `attempt` |
# | 7 | for each epoch, each minibatch: a step of Adam on $\operatorname{mean}[(V - y)^2]$ | `compute_gradients`, `optimizer.step()` |
#
# The old distribution is computed before the step, without a gradient. `attempt` leaves the policy at the fraction that
# it was asked for, so the last call decides where the policy ends; a fraction of 0 puts it back. The setting `compile`
# compiles `compute_gradients`, the part with the most repetitions. The step of the policy stays eager: it happens once
# a rollout.

# %%
#| export
class TRPO(A2C):
    """A policy that takes one step a rollout, and stays in a trust region."""

    name: ClassVar[str] = "trpo"
    config_class: ClassVar[type[Config]] = TRPOConfig
    config: TRPOConfig  # type: ignore[assignment]  # A2C's loss has coefficients, ours has none

    def build(self) -> None:
        """Make what A2C is made of; but Adam trains the value network alone."""
        super().build()
        values = self.value_network.parameters()
        self.optimizer = torch.optim.Adam(values, lr=self.config.lr, eps=1e-5, fused=True)

    def update_policy(self, batch: RolloutBatch) -> Metrics:
        """Go along the natural gradient, and back until it improves and stays in the region."""
        config, parameters = self.config, list(self.policy.parameters())
        advantage = normalize(batch.advantage) if config.normalize_advantages else batch.advantage
        with torch.no_grad():
            old = self.policy(batch.obs)
        new = self.policy(batch.obs)
        loss = trpo_loss(new.log_prob(batch.action), batch.log_prob, advantage)
        gradient = -flatten(torch.autograd.grad(loss, parameters, retain_graph=True))
        fisher = fisher_product(mean_kl(old, new), parameters, config.damping)
        direction = conjugate_gradient(fisher, gradient, config.cg_iterations)
        step = largest_step(fisher, direction, config.target_kl)
        start = flatten(parameters).detach()

        def attempt(fraction: float) -> tuple[Tensor, Tensor]:
            """Go this fraction of the step; return the improvement and the KL divergence."""
            # Not 0 times the step, which is no zero if the step is infinite.
            set_parameters(parameters, start + fraction * step if fraction > 0 else start)
            new = self.policy(batch.obs)
            new_loss = trpo_loss(new.log_prob(batch.action), batch.log_prob, advantage)
            return (loss - new_loss).detach(), mean_kl(old, new).detach()

        fraction, steps = 1.0, 0
        if config.line_search:
            limits = config.target_kl, config.line_search_shrink, config.line_search_steps
            fraction, steps = line_search(attempt, *limits)
        improvement, kl = attempt(fraction)  # 0 is back to the start
        return {
            "policy_loss": loss.detach() - improvement,
            "improvement": improvement,
            "kl": kl,
            "line_search_steps": torch.tensor(float(steps)),
            "accepted": torch.tensor(float(fraction > 0)),
            "entropy": self.policy(batch.obs).entropy().detach().mean(),
        }

    def compute_gradients(self, batch: RolloutBatch) -> Metrics:
        """Backpropagate the loss of the values."""
        loss = value_loss(self.value_network(batch.obs), batch.returns)
        loss.backward()
        return {"value_loss": loss.detach()}

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Take one step of the policy, then train the values on the rollout for some epochs."""
        config = self.config
        metrics = self.update_policy(batch)
        metrics["explained_variance"] = explained_variance(batch.value, batch.returns)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        for _ in range(config.value_epochs):
            order = self.generator.permutation(len(batch))
            for indices in torch.from_numpy(order).to(self.device).split(config.minibatch_size):
                self.optimizer.zero_grad()
                metrics |= self.compute_gradients(batch[indices])
                self.optimizer.step()
        metrics["loss"] = metrics["policy_loss"] + metrics["value_loss"]
        return UpdateResult(metrics)


def train_trpo(config: TRPOConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train TRPO with these settings."""
    return train(TRPO(config=config), progress, callbacks)

# %% [markdown]
# ## The step again
#
# The same student and the same rollout. TRPO takes its weights and makes one step, with more and more iterations of
# conjugate gradients. The bound is the same for all, 0.01. How much does the surrogate gain, with the usual damping
# and with hardly any?

# %%
iterations, gains = (1, 2, 3, 5, 10, 20), {0.1: [], 0.001: []}
for damping, row in gains.items():
    for count in iterations:
        careful = TRPO.from_config("cartpole", cg_iterations=count, damping=damping)
        careful.policy.load_state_dict(student.policy.state_dict())
        report = careful.update_policy(batch)
        row.append(report["improvement"].item())
        assert report["kl"] <= 0.01
    print(f"damping {damping}:", *(f"{gain:.4f}" for gain in row))
assert gains[0.1][4] > gains[0.1][0]  # ten iterations, and one

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5, 2.6))
for (damping, row), style in zip(gains.items(), ("-", ":"), strict=True):
    ax.plot(iterations, row, style, color=COLORS["trpo"], marker="o", label=f"damping {damping}")
ax.set(xlabel="iterations of conjugate gradients", ylabel="gain of the surrogate", ylim=(0, None), xticks=iterations)
ax.legend()
plt.show()

# %% [markdown]
# One iteration is the plain gradient, stretched to the bound. With damping, the natural gradient
# gains more within the same bound, and three iterations bring most of it. With hardly any, the gain
# rises up to five iterations, where it is larger than any with damping, and then falls. A likely
# reason for the fall: with more iterations the solution relies on directions about which the batch
# says almost nothing, the bowl is a bad approximation there, and the line search has to shorten the
# step.
#
# ## Does it compute the right values?
#
# The probes of the last chapters: the values of two steps, of a reward for ever that is cut off every 10 steps, and the
# best actions for real numbers, which are $x/2$ at the observation $x$.

# %%
PROBE: dict[str, Any] = {"hidden": (16,), "num_steps": 16, "minibatch_size": 32, "lr": 5e-3, "gamma": 0.9,
                         "eval_every": 0}
two_steps, forever = TRPO("rlbook/TwoStep-v0", **PROBE), TRPO("rlbook/ConstantReward-v0", **PROBE)
two_steps.learn(4_000, progress=False)
forever.learn(8_000, progress=False)
found = two_steps.values(np.array([[-1.0], [0.0]], np.float32)), forever.values(np.ones((1, 1), np.float32))
real = TRPO("rlbook/ActionReward-v0", **PROBE, env_kwargs={"continuous": True}, initial_std=0.5, target_kl=0.05)
real.learn(8_000, progress=False)
best = real.predict(np.array([[-1.0], [1.0]]))[0].flatten()
print("two steps:", found[0].round(2), " for ever:", found[1].round(1), " best actions:", best.round(2))
assert np.allclose(found[0], [0.9, 1.0], atol=0.05) and np.allclose(found[1], 10, atol=0.5)
assert np.allclose(best, [-0.5, 0.5], atol=0.15)

# %% [markdown]
# ## A live run
#
# CartPole with the shipped settings for 30,000 steps, and A2C and PPO with theirs for the same number. `log_every` is the
# size of a rollout, so that each update writes a line.

# %%
began = time.process_time()
agent = TRPO.from_config("cartpole", total_steps=30_000, seed=0, eval_every=5_000, log_every=1_024)
run = train(agent)
rivals = {name: train(rival.from_config("cartpole", total_steps=30_000, seed=0))
          for name, rival in (("ppo", PPO), ("a2c", A2C))}
print(f"{time.process_time() - began:.0f} seconds of processor time for all three")
steps, returns = run.curve("eval_return_mean")
assert returns.max() > 200  # whatever comes after

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(steps, returns, color=COLORS["trpo"], marker="o", label="TRPO")
for name, rival in rivals.items():
    ax.plot(*rival.curve("eval_return_mean"), color=COLORS[name], marker="o", label=name.upper())
label_curves(ax, "CartPole-v1, one seed each", "return of 20 greedy episodes")
ax.legend()
plt.show()

# %% [markdown]
# From a rollout A2C makes one step with a learning rate, TRPO one step of a known size, and PPO
# forty small ones. TRPO and PPO learn about equally fast here, and A2C stays far behind. PPO then
# keeps what it has, because its settings let learning rate and clip range fall to 0; TRPO goes on
# with the same bound to the end.
#
# ## Watch it
#
# The agent, greedy, in an episode that it has not seen; every 25 steps a frame of its first 200:

# %%
env = make_env("CartPole-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=123)
frames = []
for step in range(200):
    if step % 25 == 0:
        frames.append(env.render())
    obs, _, terminated, truncated, _ = env.step(int(agent.predict(obs)[0]))
    if terminated or truncated:
        break
env.close()
filmstrip(frames)

# %% [markdown]
# And a look inside: what did each update do? On the left the KL divergence of each step and its bound; on the right how
# many lengths the line search tried. A second run has hardly any damping.

# %%
loose = TRPO.from_config("cartpole", total_steps=30_000, seed=0, eval_every=0, log_every=1_024, damping=0.001)
updates = {"damping 0.1": run, "damping 0.001": train(loose, progress=False)}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
for (name, each), marker in zip(updates.items(), (".", "x"), strict=True):
    kls, tries, accepted = (each.curve(metric)[1] for metric in ("kl", "line_search_steps", "accepted"))
    left.plot(kls, marker, color=COLORS["trpo"], label=name)
    right.plot(tries, marker, color=COLORS["trpo"])
    print(f"{name}: {accepted.sum():.0f} of {len(kls)} steps accepted, KL at most {kls.max():.4f}")
    assert len(kls) == each.agent.updates and kls.max() <= 0.01
left.axhline(0.01, color=COLORS["reference"], linestyle="--", linewidth=1)
left.set(xlabel="update", ylabel="KL divergence of the step", ylim=(0, 0.0115))
left.legend(loc="lower right")
right.set(xlabel="update", ylabel="lengths tried", ylim=(0, 10.5))
plt.show()

# %% [markdown]
# No step is ever above the bound: that is what the line search promises, and the assert checks
# it. With a damping of 0.1, every step is accepted at once and ends below the bound, because the
# damping adds to $x^\top F x$ and so makes the step shorter than the bound would allow. With
# hardly any damping, the line search has to shorten about half of the steps.
#
# ## What each part buys
#
# Five seeds each on CartPole, 30,000 steps, with one part changed at a time. Olive is the whole algorithm, black the
# variant: the line is the mean, the band its 95 % interval. Below, each dot is the last evaluation of a seed, the diamond
# their interquartile mean (IQM), and the bar its 95 % interval, as [Sweeps](sweep.ipynb) explains them. The *plain
# gradient* has one iteration of conjugate gradients.

# %% tags=["hide-input"]
parts = load_result("results/trpo_parts.json")
draw_parts(plt.figure(), parts)
plt.show()
print(made_by(parts))

# %% [markdown]
# **The natural gradient** seems to matter most. With the plain one, stretched to the same bound,
# the IQM falls from 458 to 306, but the intervals overlap, so five seeds do not settle it. **The
# line search** does nothing here: with a damping of 0.1 the first length was accepted in every
# update of every seed, so the runs with and without it are the same to the last digit. It has
# work to do when the damping is small. Then runs with it end between 349 and 500 and runs without
# between 266 and 500. **The damping** itself makes no difference that five seeds could show, as
# long as the line search is there.
#
# ## Beside sb3-contrib
#
# Does another implementation, at the same settings, learn as fast? `bench/parity.py` trains ours
# and that of sb3-contrib, an extension of Stable-Baselines3, with rollouts of 1,024 steps of two
# environments, a damping of 0.001 and 20 epochs for the values. Both have ten seeds and play the
# same evaluation episodes at the same steps. A test gives both the same weights and the same
# rollout: the steps of their policies agree to four digits.

# %% tags=["hide-input"]
show_parity("results/parity_trpo.json")

# %% [markdown]
# The interval in the title, which [Figures](figures.ipynb) explains, holds 0: ten seeds show no
# difference. The seeds of each side differ widely, with mean heights (of a seed's curve over all its
# steps) from 206 to 491 for ours and from 240 to 468 for theirs. At the last evaluation the lowest
# are 482 and 339. On both sides a policy that balances for 500 steps is often lost again.
#
# ## Honest edges
#
# | paper | here | why |
# |---|---|---|
# | advantages from sampled returns, "single path" or "vine" | GAE with a value network | Schulman et al. 2016 added it to TRPO; lower variance |
# | the Fisher matrix from a tenth of the data | from the whole rollout | small networks; one setting less |
# | no damping mentioned | damping 0.1 | nearly singular matrices; common implementations have it. It also shortens the step where the curvature is small |
# | rollouts of 50,000 steps and more for robots | 1,024 steps | small tasks; more updates for the same data |
# | a guarantee of improvement, with a maximum of KL over states and a penalty | the mean KL over the rollout, from samples | the paper does the same in practice |
#
# - A bounded step is not a safe one. The surrogate is estimated from 1,024 steps, and the return can fall: on CartPole
#   the mean of the five seeds goes from 427 after 20,000 steps to 324 after 40,000, before all end at 500.
# - The bound holds for the mean KL divergence on the states of the rollout. In single states, and in states that the
#   rollout has not visited, the policy may move further.
# - The paper's experiments are robots in MuJoCo and seven Atari games. Nothing here claims to reproduce them.
# - The policy and the value network share no layers. With a common body the step of one would move the other.
# - The values are trained on all of the rollout after the policy has moved, so they lag behind it by one step.
# - There is no entropy bonus. Only the trust region limits how fast the policy becomes certain.
#
# ## Exercises
#
# **Exercise 1.** The natural gradient does not depend on how you write the policy down. Check it: a Gaussian with the
# parameters $\mu$ and $\sigma$, in place of $\mu$ and $\log \sigma$, should take nearly the same step for a small $\delta$. Does
# the plain gradient do so?
#
# <details>
# <summary>Solution</summary>
#
# With $\sigma$ itself the gradient is $(2, -2\sigma)$ and
# $F = \operatorname{diag}(1/\sigma^2, 2/\sigma^2)$. The two natural steps lead to the same
# policy, the two plain ones do not.
#
# ```python
# def after_natural(g: list[float], fisher: list[float], delta: float) -> np.ndarray:
#     x = np.array(g) / fisher
#     return np.sqrt(2 * delta / (x**2 @ fisher)) * x
#
#
# sigma, delta = 0.5, 1e-6
# by_log = after_natural([2, -2 * sigma**2], [1 / sigma**2, 2], delta)
# by_sigma = after_natural([2, -2 * sigma], [1 / sigma**2, 2 / sigma**2], delta)
# assert np.allclose(by_log[0], by_sigma[0])
# assert np.allclose(sigma * np.exp(by_log[1]), sigma + by_sigma[1], rtol=1e-5)  # the same policy
# plain_log, plain_sigma = 1e-3 * -2 * sigma**2, 1e-3 * -2 * sigma
# assert not np.isclose(sigma * np.exp(plain_log), sigma + plain_sigma, rtol=1e-5)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** How good a guess is the bowl? For the student, divide the exact KL divergence of the whole step by
# $\delta$, with the usual damping and without any, and for a small $\delta$.
#
# <details>
# <summary>Solution</summary>
#
# With damping the step stays below the bound. Without, it goes past the bound: along directions
# about which the batch says little it goes so far that the second derivatives at the start no
# longer describe the divergence. With a tiny $\delta$ the exact divergence is nearer to the bowl.
#
# ```python
# def overshoot(delta: float, damping: float) -> float:
#     agent = TRPO("CartPole-v1", line_search=False, damping=damping, target_kl=delta)
#     agent.policy.load_state_dict(student.policy.state_dict())
#     return agent.update_policy(batch)["kl"].item() / delta
#
#
# damped, undamped, tiny_step = overshoot(0.01, 0.1), overshoot(0.01, 0.0), overshoot(1e-5, 0.0)
# assert damped <= 1 < undamped
# assert tiny_step < undamped
# ```
#
# </details>

# %% [markdown]
# **Exercise 3 (a planted bug).** A colleague finds `fixed` superfluous: both policies are the
# same anyway. The agent still learns. But along which direction does it step?

# %%
def product_with_a_bug(policy: nn.Module) -> Product:
    """Return products with the Fisher matrix of a policy, with a bug."""
    return fisher_product(mean_kl(policy(), policy()), list(policy.parameters()), damping=0.1)


print("with the bug:", product_with_a_bug(two)(torch.ones(2)).tolist(), " by hand: [4.1, 2.1]")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Both arguments move with the parameters now. The divergence of a policy from itself is 0
# wherever it goes, and so are all its derivatives. What is left is the damping, a multiple of the
# identity. So the agent steps along the plain gradient, by a length that comes from the damping
# alone, $\sqrt{2\delta / 0.1}$; the line search shortens it, and nothing complains. The old
# policy has to be held fixed.
#
# ```python
# def product_with_a_bug(policy: nn.Module) -> Product:
#     """Return products with the Fisher matrix of a policy, without the bug."""
#     return fisher_product(mean_kl(fixed(policy), policy()), list(policy.parameters()), damping=0.1)
#
#
# torch.testing.assert_close(product_with_a_bug(two)(torch.ones(2)), torch.tensor([4.1, 2.1]))
# assert abs(product_with_a_bug(two)(torch.ones(2))[0].item() - 4.1) < 1e-5
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Close the chapter and write the step of the policy from memory, for a policy that is so small that you
# can write down the whole Fisher matrix and let PyTorch solve the system. Compare with `update_policy`.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_step(policy: nn.Module, batch: RolloutBatch, delta: float, damping: float) -> Tensor:
#     parameters = list(policy.parameters())
#     log = policy.mlp(batch.obs).log_softmax(dim=1)  # (batch, actions)
#     scores = [[flatten(torch.autograd.grad(z, parameters, retain_graph=True)) for z in row] for row in log]
#     scores = torch.stack([torch.stack(row) for row in scores])  # (batch, actions, parameters)
#     fisher = torch.einsum("ba,bai,baj->ij", log.exp().detach(), scores, scores) / len(batch)
#     fisher += damping * torch.eye(len(fisher))
#     a = (batch.advantage - batch.advantage.mean()) / batch.advantage.std(correction=0)
#     g = (scores[torch.arange(len(batch)), batch.action] * a.unsqueeze(1)).mean(dim=0)
#     x = torch.linalg.solve(fisher, g)
#     return (2 * delta / (x @ fisher @ x)).sqrt() * x
#
#
# small = TRPO("CartPole-v1", hidden=(3,), cg_iterations=100, line_search=False)
# obs, action = torch.randn(32, 4), torch.randint(2, (32,))
# with torch.no_grad():
#     log_prob, value = small.policy(obs).log_prob(action), small.value_network(obs)
# little = RolloutBatch(obs, action, torch.randn(32), torch.randn(32), log_prob, value)
# mine = my_step(small.policy, little, small.config.target_kl, small.config.damping)
# before = flatten(small.policy.parameters()).detach().clone()
# small.update_policy(little)
# moved = flatten(small.policy.parameters()).detach() - before
# torch.testing.assert_close(moved, mine, atol=1e-3 * mine.abs().max().item(), rtol=1e-2)
# ```
#
# </details>

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook import TRPO
#
# agent = TRPO.from_config("cartpole")
# agent.learn(100_000)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train trpo --config pendulum --run-dir runs/trpo
# rlbook evaluate runs/trpo --episodes 20
# rlbook watch runs/trpo --out pendulum.gif
# ```
#
# The example `examples/trpo_cartpole.py` is a script of this kind.
#
# ## References
#
# - J. Schulman, S. Levine, P. Moritz, M. Jordan, P. Abbeel (2015). *Trust Region Policy Optimization.* ICML.
# - S. Kakade (2001). *A Natural Policy Gradient.* NIPS.
# - S. Kakade, J. Langford (2002). *Approximately Optimal Approximate Reinforcement Learning.* ICML: why small steps
#   improve.
# - M. Hestenes, E. Stiefel (1952). *Methods of Conjugate Gradients for Solving Linear Systems.* Journal of Research of
#   the National Bureau of Standards 49.
# - J. Schulman, P. Moritz, S. Levine, M. Jordan, P. Abbeel (2016). *High-Dimensional Continuous Control Using
#   Generalized Advantage Estimation.* ICLR.
# - A. Raffin et al. *sb3-contrib*: the implementation beside which this one is measured.
