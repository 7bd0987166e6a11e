"""A sourcebook of deep reinforcement learning: read as notebooks, imported, run from the shell."""

from typing import TYPE_CHECKING, Any

import gymnasium as gym

import rlbook.envs  # noqa: F401  registers the environments of the book

if TYPE_CHECKING:
    from rlbook.agent import Agent, load

    ALGORITHMS: dict[str, type[Agent]]

__version__ = "0.1.0"
__all__ = ["ALGORITHMS", "__version__", "load"]

# Those drawn in pixels are registered by name alone: their module imports torch.
for _name, _maker, _limit in (
    ("PointReach", "PointReach", 50),
    ("PendulumPixels", "make_pendulum_pixels", None),
    ("Pixels", "make_pixels", None),
):
    if f"rlbook/{_name}-v0" not in gym.registry:
        gym.register(f"rlbook/{_name}-v0", f"rlbook.pixels:{_maker}", max_episode_steps=_limit)


def __getattr__(name: str) -> Any:
    """Import torch and the algorithms only when they are asked for."""
    if name == "load":
        from rlbook.agent import load

        return load
    if name == "ALGORITHMS":
        from rlbook.agent import algorithms

        return algorithms()
    raise AttributeError(f"module 'rlbook' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})
