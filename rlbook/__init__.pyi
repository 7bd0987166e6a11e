"""What `import rlbook` offers; each name is imported when it is first asked for."""

from .agent import Agent, load
from .replay import (
    Batch,
    NStepAccumulator,
    ReplayBuffer,
    ReplayConfig,
    make_transitions,
    storage_dtype,
    to_batch,
    transition_dtype,
    updates_due,
)
from .dqn import (
    DQN,
    MLP,
    DQNConfig,
    QNetwork,
    check_shapes,
    decayed,
    dqn_loss,
    dqn_target,
    epsilon_greedy,
    linear_epsilon,
    polyak_update,
    set_learning_rate,
    train_dqn,
)
from .run import RunResult, resume, train

ALGORITHMS: dict[str, type[Agent]]
__version__: str

__all__ = [
    "ALGORITHMS",
    "DQN",
    "MLP",
    "Agent",
    "Batch",
    "DQNConfig",
    "NStepAccumulator",
    "QNetwork",
    "ReplayBuffer",
    "ReplayConfig",
    "RunResult",
    "__version__",
    "check_shapes",
    "decayed",
    "dqn_loss",
    "dqn_target",
    "epsilon_greedy",
    "linear_epsilon",
    "load",
    "make_transitions",
    "polyak_update",
    "resume",
    "set_learning_rate",
    "storage_dtype",
    "to_batch",
    "train",
    "train_dqn",
    "transition_dtype",
    "updates_due",
]
