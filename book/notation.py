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
# # Notation
#
# The symbols of the book and their names in the code. Each symbol has one meaning, except for some
# letters that papers use in two: these have [a table of their own](#letters-with-two-meanings).
#
# ## Steps and episodes
#
# | symbol | in the code | meaning |
# |---|---|---|
# | $t$ | `step`, `time` | the number of a step; as an index, the time at which something is known |
# | $s$, $s_t$ | `obs` | a state, when the observation shows all of it |
# | $o$, $o_t$ | `obs` | an observation, when it may hide a part of the state; $o_{\le t}$ is all that was seen up to $t$ |
# | $a$, $a_t$ | `action` | an action |
# | $r$, $r_t$ | `reward` | the reward for the action $a_t$ |
# | $s'$, $a'$ | `next_obs`, `next_action` | the state after it, and an action there |
# | $\gamma$ | `gamma` | the discount: how much a reward counts that comes one step later |
# | $n$ | `n_step` | rewards that are summed before a target bootstraps |
# | $k$ | | the steps that were really taken, at most $n$: fewer at the end of an episode |
# | $\gamma^k$ | `discount` | the weight of the value after those steps |
# | $G$, $G_t$ | | the return of an episode; the discounted return from step $t$ on |
# | $T$ | `max_episode_steps` | the length of an episode, or the one at which it is cut off |
# | $\ell$ | `chunk_length` | the length of a chunk |
#
# ## Values, policies and their networks
#
# | symbol | in the code | meaning |
# |---|---|---|
# | $V$, $V(s)$ | `value` | the discounted return to expect from a state |
# | $Q$, $Q(s, a)$ | `q` | the same, if the first action is $a$; $Q_i$ is that of critic $i$ |
# | $A(s, a)$ | `advantage` | the advantage of an action: its Q-value minus the value of the state |
# | $V_\pi$, $Q_\pi$ | | the same two, where it matters that the agent follows the policy $\pi$ |
# | $a^*$ | | the action with the largest Q-value |
# | $\theta$ | `q_network`, `policy`, `actor`, `critics` | the parameters that are trained |
# | $\theta^-$, $Q^-$ | `target_network`, `next_q_target` | the parameters of the target network, and its values |
# | $\tau$ | `tau` | the share by which the target network moves at each of its updates |
# | $x$, $W$, $b$ | `x`, `weight`, `bias` | the input of a layer, its weights and its bias: $x \mapsto W x + b$ |
# | $h_t$, $c_t$ | `state` | the hidden state of an LSTM and its cell |
# | $z^f$, $z^i$, $z^o$, $U$ | | the gates of an LSTM (forget, input, output), and its weights for $h_{t-1}$ |
# | $f$ | `encoder` | the network that turns an image into features |
# | $\pi(a \mid s)$ | `policy`, `actor` | a policy: the probability, or the density, of an action |
# | $\pi_{\text{old}}$, $V_{\text{old}}$ | `log_prob`, `value` of a batch | the policy and the values that collected the rollout |
# | $\mu$, $\sigma$ | `mean`, `std` | the mean and the standard deviation of a Gaussian policy before it is squashed, or of noise |
# | $\epsilon$ | `noise` | a sample of Gaussian noise (SAC) |
# | $J(\theta)$ | `mean_reward` | what a policy gets on average, which a policy gradient increases |
# | $z_a$ | `logits` | what a network outputs for an action, before it becomes a probability |
# | $H$ | `entropy` | the entropy of a policy |
# | $\hat A_t$, $\lambda$ | `advantage`, `gae_lambda` | an estimate of the advantage, and the weight of later TD errors in it |
# | $u$ | `u`, `unbounded` | the action before it is squashed: $a = \tanh u$ |
# | $\alpha$ | `alpha` | the entropy coefficient (temperature) |
# | $\bar{\mathcal H}$ | `target_entropy` | the entropy that the entropy coefficient is tuned to reach |
# | $N$, $M$, $\mathcal M$ | `num_critics`, `subset_size`, `chosen` | critics of an ensemble, those that make one target, and which they are |
#
# ## Learning
#
# | symbol | in the code | meaning |
# |---|---|---|
# | $y$, $y_t$ | `y`, `target` | what a value is trained towards |
# | $\delta$ | `td_error` | the TD error: the target minus the value, $y - Q(s, a)$, or $r_t + \gamma V(s_{t+1}) - V(s_t)$ in GAE; where only its size matters, also with the other sign |
# | $L$ | `loss` | a loss; $L_\pi$ is that of an actor, $L_\alpha$ that of the entropy coefficient. In TRPO $L$, and in PPO $L^{\text{clip}}$, is maximised: the loss is $-L$ |
# | $c_V$, $c_H$ | `value_coefficient`, `entropy_coefficient` | the weights of the value loss and of the entropy in a loss |
# | $\rho$ | `ratio` | the probability of an action now, divided by that when it was chosen |
# | $\varepsilon$ | `clip_range` | how far that ratio may move from 1 |
# | $\overline{D}$, $\delta$ | `mean_kl`, `target_kl` | the mean KL divergence of two policies, and its bound |
# | $g$, $F$, $x$ | `gradient`, `fisher`, `direction` | the gradient of an objective, the Fisher matrix, and $F^{-1} g$, the natural gradient |
# | $v$ | `vector` | any vector that a matrix is multiplied by |
# | $\epsilon$ | `damping` | what is added to the diagonal of $F$, as $F + \epsilon I$ with the identity $I$ |
# | $B$ | `batch_size` | the size of a batch |
# | $m_{t,b}$ | `mask` | 1 for a step that counts, 0 for padding; $b$ is the index in the batch |
# | $\varepsilon$, $T_\varepsilon$ | `epsilon`, `epsilon_decay_steps` | the probability of a random action, and the steps in which it falls |
# | $\kappa$ | `epsilon_spread` | how far the $\varepsilon$ of several environments lie apart (R2D2) |
# | $p_i$, $\eta$ | `priorities`, `eta` | the priority of chunk $i$, and the share of the largest TD error in it |
# | $P(i)$, $w_i$ | `weights` | the probability that chunk $i$ is sampled, and its importance weight |
# | $\beta$ | `beta` | the power of an importance weight |
# | $\Delta y$, $\Delta x$ | | the corner, down and to the right, at which a padded image is cut |
# | $\lambda$ | `saturation_penalty` | what a large action costs before it is squashed |
#
# ## Statistics
#
# | symbol | meaning |
# |---|---|
# | $\bar x$, $s$ | mean and standard deviation of a sample; over seeds unless it says otherwise |
# | $\sigma$ | the standard deviation that a sample is drawn from |
# | $t_{n-1}$ | the 97.5 % point of Student's distribution with $n - 1$ degrees of freedom |
# | $\bar x \pm t_{n-1}\, s / \sqrt n$ | Student's interval of a mean; bands are bootstrap intervals ([Figures](figures.ipynb)) |
# | $\rho_k$ | the correlation of a sequence with itself, $k$ steps later |
# | $P$, $\Phi$ | a probability; the probability that a standard Gaussian stays below a number |
# | $R^2$ | how much of a quantity a fit explains: 1 for all, 0 for nothing |
#
# ## Letters with two meanings
#
# Some letters are well known in two meanings, and the book keeps both:
#
# | letter | above it is | but also |
# |---|---|---|
# | $\alpha$ | the entropy coefficient (SAC, REDQ) | the learning rate of a table (Basics, Environments, DQN); the power of a priority (R2D2) |
# | $G$ | the return from a step on (Basics, Policy gradient) | only its first $k$ rewards, the `reward` of a stored transition (DRQN, R2D2) |
# | $u$ | the action before it is squashed | a random number between 0 and 1 (Policy gradient) |
# | $\mu$, $\sigma$ | those of a Gaussian policy | the running mean and deviation of observations (PPO) |
# | $f$ | the encoder of images (DrQ-v2) | R2D2's value rescaling, $f(x)$ and $f^{-1}(y)$; the forget gate of an LSTM, $z^f$ |
# | $\beta$ | the power of an importance weight (R2D2) | the length of a step (TRPO) |
# | $\epsilon$ | a sample of Gaussian noise (SAC) | the damping of the Fisher matrix (TRPO) |
# | $x$ | the input of a layer | the natural gradient (TRPO) |
# | $\varepsilon$ | the probability of a random action | how far PPO lets a ratio move |
# | $\delta$ | the TD error | the bound on the KL divergence (TRPO) |
# | $r$ | a reward | the residual of conjugate gradients (TRPO), whose directions are $p$ and lengths $\alpha$ |
# | $\rho$ | the ratio of two probabilities (PPO) | the correlation of a sequence with itself |
# | $\lambda$ | the weight of later TD errors (GAE) | what a large action costs (DrQ-v2) |
# | $z$ | a logit | the gates of an LSTM (DRQN) |
# | $c$ | the cell of an LSTM (DRQN) | a weight in a loss |
# | $\sigma$ | a standard deviation | the logistic function inside an LSTM (DRQN) |
# | $\pi$ | a policy | the number 3.14… in a Gaussian density |
# | $N$ | the critics of an ensemble (REDQ) | the chunks in a buffer (R2D2) |
# | $n$ | the steps of a return | the size of a sample; how often an action was tried (The agent) |
# | $p$ | a priority (R2D2) | the padding around an image (DrQ-v2); a probability (Policy gradient) |
# | $A$, $m$ | an advantage, a mask | the mean height of a curve, and a number of seeds (Figures) |
# | $b$ | the bias of a layer | the index in a batch; the baseline of a policy gradient (Basics) |
# | $s$, $t$ | a state, a time | in statistics, those of the table before; $s$ is also the number of a run (Environments) |
#
# The letters $i$ and $j$ are indices. The sentence around them says what $d$, $e$, $D$ and $R$ mean,
# $k$, $x$ and $z$ where they are not those above, and $\rho$ in [Pixels](pixels.ipynb).
#
# ## Arrays
#
# - Arrays are `(batch, ...)` or `(time, batch, ...)`. A number per sample is `(batch,)`, never
#   `(batch, 1)`, which would broadcast into a wrong loss.
# - A *step* is one step of one environment. Four environments that step once make four steps.
# - A *return* is the sum of the rewards of an episode, not discounted, unless it says otherwise.
# - A curve over several seeds is a mean with its 95 % bootstrap interval.
#
# The [glossary](glossary.ipynb) explains the words.

# %% [markdown]
# ## Where each letter is used
#
# A list of symbols is soon wrong if nobody checks it. So this cell takes the letters out of all
# formulas of the book. Each letter that a chapter uses must be on this page, and each letter on this
# page must be used by a chapter.

# %%
import re

import nbformat
from IPython.display import Markdown

from rlbook.tangle import find_root, read_toc

GREEK = re.findall(
    r"\w+",
    """alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau
    phi varphi chi psi omega ell Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega""",
)


def letters(chapter: str) -> set[str]:
    """Return the letters in the formulas of a chapter, without the words in them."""
    cells = nbformat.read(f"{chapter}.ipynb", as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)  # no code
    found: set[str] = set()
    for formula in re.findall(r"\$\$.+?\$\$|\$[^$]+?\$", text, flags=re.DOTALL):
        symbols = re.sub(r"\\(text|texttt|operatorname|begin|end)\s*\{[^}]*\}", " ", formula)
        found |= {f"\\{name}" for name in re.findall(r"\\([A-Za-z]+)", symbols) if name in GREEK}
        found |= set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", symbols)))
    return found


chapters = [name for name in read_toc(find_root()) if name != "notation"]
used = {chapter: letters(chapter) for chapter in chapters}
here = letters("notation")
assert not {name: new for name, found in used.items() if (new := found - here)}, "not listed"
assert here == set().union(*used.values()), "listed, but not used"

# %% tags=["hide-input"]
rows = ["| letter | in the formulas of |", "|---|---|"]
for letter in sorted(here, key=lambda name: name.strip("\\").lower()):
    homes = [f"[{name}]({name}.ipynb)" for name in chapters if letter in used[name]]
    rows.append(f"| ${letter}$ | {', '.join(homes)} |")
Markdown("\n".join(rows))
