"""A sourcebook of deep reinforcement learning: read as notebooks, imported, run from the shell."""

from typing import Any

import gymnasium as gym
import lazy_loader

import rlbook.envs  # noqa: F401  registers the environments of the book

__version__ = "0.2.0"

# Those drawn in pixels are registered by name alone: their module imports torch.
for _name, _maker, _limit in (
    ("PointReach", "PointReach", 50),
    ("PendulumPixels", "make_pendulum_pixels", None),
    ("Pixels", "make_pixels", None),
):
    if f"rlbook/{_name}-v0" not in gym.registry:
        gym.register(f"rlbook/{_name}-v0", f"rlbook.pixels:{_maker}", max_episode_steps=_limit)

# What __init__.pyi lists is imported when it is asked for: torch takes a second.
_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["ALGORITHMS", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name of the library, or the table of all algorithms."""
    if name == "ALGORITHMS":
        from rlbook.agent import algorithms

        return algorithms()
    return _load(name)


def __dir__() -> list[str]:
    """List the names that are imported when they are asked for, too."""
    return sorted({*globals(), *__all__})
