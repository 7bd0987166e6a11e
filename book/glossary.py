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
# # Glossary
#
# The words of the book, each in a sentence or two, with the chapter that explains it. The symbols
# are in [Notation](notation.ipynb).

# %% [markdown]
# ## The task
#
# ### Agent
#
# The program that chooses actions and learns from what they lead to. See
# [Basics](basics.ipynb#agent-and-environment).
#
# ### Environment
#
# The world that an agent acts in: it takes an action and gives back an observation, a reward and
# whether the episode has ended. See [Basics](basics.ipynb#agent-and-environment) for a tiny one and
# [Environments](envs.ipynb) for real ones.
#
# ### State of the environment
#
# Everything about the situation that matters for what comes next. See
# [Basics](basics.ipynb#agent-and-environment).
#
# ### Observation
#
# What the agent sees of the state; all of it in CartPole, a part of it in CartPole without
# velocities. See [Basics](basics.ipynb#agent-and-environment).
#
# ### Action
#
# What the agent chooses at each step: one of a few choices, or a vector of real numbers. See
# [Basics](basics.ipynb#agent-and-environment).
#
# ### Reward
#
# The number that the environment gives for each step, and that says how good the step was. See
# [Basics](basics.ipynb#agent-and-environment).
#
# ### Episode
#
# The steps from one reset of an environment to the next terminated or truncated step. See
# [Basics](basics.ipynb#agent-and-environment).
#
# ### Partial observability
#
# The observation does not show all of the state, so the best action depends on what was seen
# before. See [Environments](envs.ipynb) and [DRQN](drqn.ipynb).
#
# ### Return
#
# The sum of the rewards of an episode, not discounted unless it says otherwise. See
# [Basics](basics.ipynb#return-and-discount).
#
# ### Discount
#
# The factor $\gamma$ by which a reward counts less for each step that it comes later. See
# [Basics](basics.ipynb#return-and-discount).
#
# ### Terminated
#
# The episode has come to its end, as a part of the task: nothing follows, and the value of what
# follows is zero. See [Basics](basics.ipynb#terminated-and-truncated).
#
# ### Truncated
#
# The episode was cut off from outside, by a time limit for example: something would have followed, so
# the target still bootstraps. See [Basics](basics.ipynb#terminated-and-truncated) and
# [Environments](envs.ipynb).
#
# ### Vector environment
#
# Several environments that step together, so that one forward pass serves them all. See
# [Environments](envs.ipynb#vector-environments).

# %% [markdown]
# ## Values and targets
#
# ### Policy
#
# The rule by which an agent chooses actions: the probability of each action in each state. See
# [Basics](basics.ipynb#policy).
#
# ### Value of a state
#
# The mean of the discounted return from this state on, if the agent follows its policy. See
# [Basics](basics.ipynb#value).
#
# ### Q-value
#
# The discounted return to expect if the agent takes this action now and follows its policy afterwards.
# See [Basics](basics.ipynb#q-value).
#
# ### Greedy
#
# Taking the action that looks best, without exploring: the one with the largest Q-value. Where a
# network outputs the policy, it is the likeliest action or, for continuous ones, the mean. See
# [Basics](basics.ipynb#greedy).
#
# ### Temporal difference
#
# The difference between two estimates of the same value, one made a step later than the other.
# Learning from it needs no complete episode. See
# [Basics](basics.ipynb#learning-from-a-single-step).
#
# ### Target
#
# What a value is trained towards: the reward plus the discounted estimate of what follows. See
# [Basics](basics.ipynb#learning-from-a-single-step).
#
# ### TD error
#
# The target of a value minus the value itself, that of an action or of a state; short for
# temporal-difference error. See
# [Basics](basics.ipynb#learning-from-a-single-step).
#
# ### Learning rate
#
# How far an update moves: the fraction of the TD error in a table, the size of a gradient step in
# a network. See [Basics](basics.ipynb#learning-from-a-single-step).
#
# ### Bootstrapping
#
# Using your own estimate of what follows as a part of the target. It stops at a terminated step and
# goes on at a truncated one. See [Basics](basics.ipynb#learning-from-a-single-step).
#
# ### n-step return
#
# The discounted sum of the next $n$ rewards, with a bootstrapped value behind it. See
# [Replay](replay.ipynb#n-step-returns).
#
# ### Target network
#
# A copy of the Q-network that follows it slowly and makes the targets, so that the targets change
# slowly, too. See [DQN](dqn.ipynb#the-target-network).
#
# ### Double DQN
#
# The Q-network chooses the next action and the target network says what it is worth, which
# makes the target less optimistic. See [DQN](dqn.ipynb#the-target).
#
# ### Overestimation
#
# The maximum of noisy values is too high on average, and targets made from it pass the error on.
# See [DQN](dqn.ipynb#the-target).
#
# ### Off-policy
#
# Learning about one policy from actions that another one chose, so that old data can be replayed. See
# [Basics](basics.ipynb#on-policy-and-off-policy).
#
# ### On-policy
#
# Learning about the policy that chooses the actions, so that old data is of no use: an older policy
# chose it. See [Basics](basics.ipynb#on-policy-and-off-policy).

# %% [markdown]
# ## Exploration, replay and recurrence
#
# ### Exploring
#
# Trying actions whose outcome the agent does not know well yet. See
# [Basics](basics.ipynb#exploring-and-exploiting).
#
# ### Exploiting
#
# Taking the action that looks best by what the agent knows already. See
# [Basics](basics.ipynb#exploring-and-exploiting).
#
# ### Epsilon-greedy
#
# Acting at random with probability $\varepsilon$, and greedily otherwise. See
# [Basics](basics.ipynb#exploring-and-exploiting).
#
# ### Transition
#
# What one step leaves behind: observation, action, reward, next observation, whether it terminated,
# and the discount of what follows. See [Replay](replay.ipynb#a-transition).
#
# ### Replay buffer
#
# A store of transitions from which batches are sampled at random. See [Replay](replay.ipynb).
#
# ### Circular buffer
#
# A buffer of fixed size in which the newest entry overwrites the oldest once it is full; also
# called a ring. See [Replay](replay.ipynb#the-circular-buffer).
#
# ### Prioritised replay
#
# Sampling more often what had a large TD error, with importance weights that correct the bias. See
# [R2D2](r2d2.ipynb).
#
# ### Importance weight
#
# The factor in a loss that makes up for a chunk that is sampled more often than the others. See
# [R2D2](r2d2.ipynb#importance-weights).
#
# ### Chunk
#
# A piece of an episode, at most `chunk_length` steps long; recurrent networks are trained on it.
# See [DRQN](drqn.ipynb).
#
# ### Burn-in
#
# The first steps of a chunk, which only bring the hidden state up to date and are not learned from. See
# [R2D2](r2d2.ipynb).
#
# ### Padding
#
# Entries without a step, which fill sequences of different lengths up to one rectangle; a mask tells them
# from steps. See [Recurrent PPO](recurrent_ppo.ipynb).
#
# ### LSTM
#
# A recurrent network, one that passes a hidden state from step to step; its cell keeps what its
# gates let in, over many steps. See [DRQN](drqn.ipynb#the-model).
#
# ### Hidden state
#
# What a recurrent network passes on to its next step, also called recurrent state: for an LSTM,
# the vectors $h_t$ and $c_t$. It is reset to zero at the start of an episode. See
# [DRQN](drqn.ipynb#the-model).
#
# ### Value rescaling
#
# Learning values on a squashed scale, so that large and small rewards need no clipping. See
# [R2D2](r2d2.ipynb#value-rescaling).

# %% [markdown]
# ## Actors and critics
#
# ### Policy gradient
#
# The gradient of the mean return with respect to the parameters of the policy. It is estimated from
# samples: the gradient of the log-probability of an action, times the return that followed. See
# [Basics](basics.ipynb#the-policy-gradient).
#
# ### Log-probability
#
# The logarithm of the probability, or of the density, with which a policy chose an action. See
# [Basics](basics.ipynb#the-policy-gradient).
#
# ### Baseline
#
# A number that is subtracted from the reward or return in a policy gradient: it leaves the mean as it
# is and takes away noise. See [Basics](basics.ipynb#the-policy-gradient).
#
# ### Advantage
#
# How much better an action is than what the policy does on average in that state: its Q-value minus the
# value of the state. See [Policy gradient](policy_gradient.ipynb).
#
# ### Generalised advantage estimation
#
# An estimate of the advantage: the TD errors from a step on, with weights that fall by $\gamma\lambda$ a
# step. See [Policy gradient](policy_gradient.ipynb#generalised-advantage-estimation).
#
# ### Rollout
#
# The last steps of all environments, in order, from which an on-policy agent learns before it throws them
# away. See [Policy gradient](policy_gradient.ipynb#the-rollout-buffer).
#
# ### Explained variance
#
# How much of the returns the values predict: 1 for all, 0 for no more than a constant. See
# [Policy gradient](policy_gradient.ipynb).
#
# ### Probability ratio
#
# The probability of an action under the policy as it is now, divided by the probability with which it was
# chosen. See [PPO](ppo.ipynb#the-ratio).
#
# ### KL divergence
#
# A measure of how different two distributions are; 0 if they are equal. See [PPO](ppo.ipynb).
#
# ### Trust region
#
# The policies so close to the old one that its data still says something about them. See
# [TRPO](trpo.ipynb).
#
# ### Natural gradient
#
# The direction that raises an objective most if each step may change the policy, rather than its
# parameters, by the same small amount. See [TRPO](trpo.ipynb#the-natural-gradient).
#
# ### Fisher matrix
#
# The second derivatives, in the parameters, of the KL divergence between a policy and a slightly
# changed one. It says how much a small step changes the policy. See
# [TRPO](trpo.ipynb#products-with-the-fisher-matrix).
#
# ### Line search
#
# Trying shorter and shorter steps in one direction until one is good. See
# [TRPO](trpo.ipynb#the-line-search).
#
# ### Actor
#
# The network that chooses the action, that is the policy. See
# [Policy gradient](policy_gradient.ipynb) and, for continuous actions, [SAC](sac.ipynb).
#
# ### Critic
#
# The network beside the actor that estimates values: in A2C and PPO the value of a state, in SAC,
# REDQ and DrQ-v2 the Q-value of an action. There its gradient tells the actor how to change the
# action. See
# [Policy gradient](policy_gradient.ipynb) and [SAC](sac.ipynb#the-critics).
#
# ### Entropy
#
# How random a policy is: the mean of its negative log-probability. SAC rewards it, so that the
# actor keeps exploring. See [SAC](sac.ipynb#entropy).
#
# ### Entropy coefficient
#
# The weight $\alpha$ of the entropy beside the reward. See
# [SAC](sac.ipynb#the-entropy-coefficient).
#
# ### Temperature
#
# Another name of the entropy coefficient. See [SAC](sac.ipynb#entropy).
#
# ### Ensemble
#
# Several critics that start with different parameters and learn from the same batches; how many is
# the ensemble size. See [REDQ](redq.ipynb).
#
# ### Update-to-data ratio
#
# Updates per environment step. See [REDQ](redq.ipynb).
#
# ### Polyak averaging
#
# Moving the target network a small fraction of the way to the Q-network after each update. See
# [DQN](dqn.ipynb#the-target-network).
#
# ### Augmentation
#
# Changing an image in a way that should not change its value, such as a shift by a few pixels. See
# [DrQ-v2](drqv2.ipynb#random-shifts).

# %% [markdown]
# ## Running and measuring
#
# ### Seed
#
# The number from which all randomness of a run is derived; two runs with the same seed and settings
# are equal. See [Environments](envs.ipynb#seeds).
#
# ### Checkpoint
#
# A file with everything that a run needs to continue: parameters, optimisers, buffer, counters,
# random number generators. See [Checkpoints](checkpoint.ipynb).
#
# ### Greedy episode
#
# An episode without random actions, in an environment of its own: evaluations are made of these.
# See [The run](run.ipynb#evaluating).
#
# ### Ablation
#
# Taking one part away, with all else equal, to see how much it helps. See
# [DQN](dqn.ipynb#what-each-part-buys).
#
# ### Bootstrap interval
#
# The middle 95 % of the means of resampled values: a confidence interval, drawn as the band around
# a curve. With few values it is too narrow. See [Figures](figures.ipynb#curves-with-a-band).
#
# ### Interquartile mean
#
# The mean without the lowest and the highest quarter of the values, IQM for short. See
# [Sweeps](sweep.ipynb#one-score-for-several-seeds).

# %% [markdown]
# ## Where each word comes first
#
# A word that no chapter uses does not belong here. The cell looks for each of them in the text of all
# chapters, in the order of the book; the site links the first use in a chapter to this page.

# %%
import re

import nbformat
from IPython.display import Markdown

from rlbook.tangle import find_root, read_toc


def prose(chapter: str) -> str:
    """Return the text of a chapter, without code."""
    cells = nbformat.read(f"{chapter}.ipynb", as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


texts = {name: prose(name) for name in read_toc(find_root()) if name not in ("index", "glossary")}
titles = {name: re.search("^# (.+?)(:.*)?$", text, re.MULTILINE)[1] for name, text in texts.items()}
homes = {}
for term in re.findall(r"^### (.+)$", prose("glossary"), flags=re.MULTILINE):
    pattern = re.compile(rf"(?<![\w-]){re.escape(term)}(s|es)?(?![\w-])", flags=re.IGNORECASE)
    homes[term] = [name for name, text in texts.items() if pattern.search(" ".join(text.split()))]
assert all(homes.values()), [term for term, names in homes.items() if not names]

# %% tags=["hide-input"]
rows = ["| word | comes first in | and in how many other chapters |", "|---|---|---|"]
for term, (first, *others) in sorted(homes.items(), key=lambda item: item[0].lower()):
    anchor = term.lower().replace(" ", "-")
    rows.append(f"| [{term}](#{anchor}) | [{titles[first]}]({first}.ipynb) | {len(others)} |")
Markdown("\n".join(rows))
