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
# The symbols of the book and the names that stand for them in the code. A symbol means the same in
# every chapter; where papers use one letter for two things, the chapter is named.
#
# ## Steps and episodes
#
# | symbol | in the code | meaning |
# |---|---|---|
# | $t$ | `step`, `time` | the number of a step; as an index, the time at which something is known |
# | $s$, $s_t$ | `obs` | a state, when the observation shows all of it |
# | $o$, $o_t$ | `obs` | an observation, when it hides a part of the state ([DRQN](drqn.ipynb)) |
# | $a$, $a_t$ | `action` | an action |
# | $r$, $r_t$ | `reward` | the reward for the action $a_t$ |
# | $s'$, $a'$ | `next_obs`, `next_action` | the state after it, and an action there |
# | $\gamma$ | `gamma` | the discount: what a reward one step later counts |
# | $n$ | `n_step` | rewards that are summed before a target bootstraps |
# | $k$ | | the steps that were really taken, at most $n$: fewer at the end of an episode |
# | $\gamma^k$ | `discount` | what the value after those steps counts |
# | $G$, $G_t$ | `reward` of a stored row | the discounted sum of $k$ rewards |
# | $T$ | `max_episode_steps` | the length at which an episode is cut off; in $\varepsilon_t$, the steps of the schedule |
#
# ## Values, policies and their networks
#
# | symbol | in the code | meaning |
# |---|---|---|
# | $V(s)$ | `value` | the discounted return to expect from a state |
# | $Q(s, a)$ | `q` | the same, if the first action is $a$ |
# | $\theta$ | `network`, `online` | the weights that are trained |
# | $\theta^-$, $Q^-$ | `target`, `next_q_target` | the weights of the target network, and its values |
# | $\tau$ | `tau` | the share by which the target network moves at each of its updates |
# | $\pi(a \mid s)$ | `actor` | a policy: the probability, or the density, of an action |
# | $\mu$, $\sigma$ | `mean`, `std` | the mean and the spread of a Gaussian policy before it is squashed |
# | $u$ | | the action before it is squashed: $a = \tanh u$ |
# | $\bar{\mathcal H}$ | `target_entropy` | the entropy that the temperature aims at |
# | $N$, $M$ | `critics`, `subset` | critics of an ensemble, and those that make one target (REDQ); in R2D2, $N$ chunks are stored |
#
# ## Learning
#
# | symbol | in the code | meaning |
# |---|---|---|
# | $y$, $y_t$ | `target` | what a value is trained towards |
# | $\delta$ | `td_error` | the TD error, $Q(s, a) - y$ |
# | $L$ | `loss` | a loss; as the end of a chunk in DRQN, its length |
# | $B$, $b$ | `batch_size` | the size of a batch, and the place in it |
# | $m_{t,b}$ | `mask` | 1 for a step that counts, 0 for padding |
# | $\varepsilon$ | `epsilon` | the probability of a random action |
# | $\epsilon$ | | a small constant in R2D2's value rescaling; a draw of Gaussian noise in SAC |
# | $\alpha$ | `alpha`, `lr` | learning rate of a table (DQN, Environments); power of a priority (R2D2); temperature (SAC) |
# | $\beta$ | `beta` | the power of an importance weight |
# | $\eta$ | `eta` | the share of the largest TD error in a priority |
# | $P(i)$, $w_i$ | `weights` | the chance that chunk $i$ is drawn, and its importance weight |
# | $\Delta y$, $\Delta x$, $p$ | `pad` | the shift of an image down and to the right, and the padding that makes room for it (DrQ-v2) |
# | $\lambda$ | | what a large action costs before it is squashed (DrQ-v2) |
# | $h$, $h_t$, $c_t$ | `state` | output and cell of an LSTM; $h(x)$ and $h^{-1}(x)$ are R2D2's value rescaling |
#
# ## Statistics
#
# | symbol | meaning |
# |---|---|
# | $\bar x$, $s$ | mean and standard deviation of a sample; over seeds unless it says otherwise |
# | $t_{n-1}$ | the 97.5 % point of Student's distribution with $n - 1$ degrees of freedom |
# | $\bar x \pm t_{n-1}\, s / \sqrt n$ | the 95 % interval of a mean, drawn as a band |
# | $\rho_k$ | the correlation of a sequence with itself, $k$ steps later |
# | $\Phi$ | the probability that a standard Gaussian stays below a number |
#
# ## Arrays
#
# - Arrays are `(batch, ...)` or `(time, batch, ...)`. A number per sample is `(batch,)`, never
#   `(batch, 1)`, which would broadcast into a wrong loss.
# - A *step* is one step of one environment. Four environments that step once make four steps.
# - A *return* is the sum of the rewards of an episode, not discounted, unless it says otherwise.
# - A curve over several seeds is a mean with the interval above.
#
# What the words mean stands in the [glossary](glossary.ipynb).
