"""Made from book/checkpoint.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "TRAILER",
    "TRAILER_SIZE",
    "CheckpointDirectory",
    "CheckpointError",
    "HashingWriter",
    "UnreadableError",
    "check_plain",
    "explain_failure",
    "plain_space",
    "read_checkpoint",
    "reason",
    "space_from_plain",
    "sync_directory",
    "verify_checksum",
    "write_checkpoint",
]

# %% book/checkpoint.py · Checkpoints
import hashlib
import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

# %% book/checkpoint.py · A checksum
TRAILER = b"rlbook-sha256:"  # the file ends with this and 64 hexadecimal digits
TRAILER_SIZE = len(TRAILER) + 64


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or cannot be trusted."""


class UnreadableError(CheckpointError):
    """A checkpoint that may be sound, but cannot be read on this machine now."""


class HashingWriter(io.BufferedWriter):
    """A file that hashes what is written to it."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.hash = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        """Hash and write one piece."""
        self.hash.update(data)
        return super().write(data)


# %% book/checkpoint.py · Only what can be read back
def check_plain(value: Any, name: str = "checkpoint") -> None:
    """Raise unless all of `value` is of a type that can be read back without running code."""
    if type(value) in (dict, OrderedDict):
        for key, entry in value.items():
            check_plain(key, f"a key of {name}")
            check_plain(entry, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, entry in enumerate(value):
            check_plain(entry, f"{name}[{i}]")
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None)):
        raise CheckpointError(f"{name} is a {type(value).__name__}, which a file must not hold.")


# %% book/checkpoint.py · All or nothing
def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut, where the system can."""
    with suppress(OSError):  # some systems cannot open or sync a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def reason(error: BaseException) -> str:
    """Say in a few words what went wrong with a file."""
    while not isinstance(error, OSError) and error.__context__:
        error = error.__context__  # torch raises an error of its own over that of the file
    words = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return words or type(error).__name__


@contextmanager
def explain_failure(path: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"Could not write {path}: {reason(error)}. Older checkpoints are untouched."
        ) from error


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write to a temporary file, sync it and rename it, so that `path` is never half a file."""
    check_plain(content)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with explain_failure(path):
        try:
            with HashingWriter(open(temporary, "wb", buffering=0)) as file:
                torch.save(content, file)
                file.write(TRAILER + file.hash.hexdigest().encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()
        sync_directory(path.parent)


# %% book/checkpoint.py · Files from strangers
def verify_checksum(path: Path) -> None:
    """Raise unless the file ends with the SHA-256 of everything before it."""
    digest, remaining = hashlib.sha256(), max(0, path.stat().st_size - TRAILER_SIZE)
    with open(path, "rb") as file:
        while piece := file.read(min(remaining, 1 << 20)):
            digest.update(piece)
            remaining -= len(piece)
        trailer = file.read()
    if trailer != TRAILER + digest.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged or not an rlbook checkpoint (wrong checksum).")


def read_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Read a checkpoint after checking it; nothing in the file is ever run."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    try:
        verify_checksum(path)
        content = torch.load(path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was not opened: it holds more than tensors, numbers and text, "
            "and reading that could run code."
        ) from error
    except (OSError, MemoryError) as error:  # the file is not to blame
        raise UnreadableError(f"Could not read {path}: {reason(error)}.") from error
    except Exception as error:  # what torch raises for a forged file is not documented
        if "allocate memory" in str(error):
            raise UnreadableError(f"There is not enough memory here to read {path}.") from error
        raise CheckpointError(f"Could not read {path}: {reason(error)}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not an rlbook checkpoint.")
    return content


# %% book/checkpoint.py · Spaces as plain data
def plain_space(space: gym.Space) -> dict[str, Any]:
    """Write a space as tensors, numbers and text."""
    match space:
        case Discrete():
            return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
        case Box():
            bounds = {"low": torch.as_tensor(space.low), "high": torch.as_tensor(space.high)}
            return {"kind": "Box", "dtype": str(space.dtype), **bounds}
        case MultiDiscrete():
            nvec, start = torch.as_tensor(space.nvec), torch.as_tensor(space.start)
            return {"kind": "MultiDiscrete", "nvec": nvec, "start": start}
        case MultiBinary():
            return {"kind": "MultiBinary", "shape": list(space.shape)}
        case Tuple():
            return {"kind": "Tuple", "spaces": [plain_space(part) for part in space.spaces]}
        case Dict():
            spaces = {name: plain_space(part) for name, part in space.spaces.items()}
            return {"kind": "Dict", "spaces": spaces}
    raise ValueError(f"A checkpoint cannot hold the space {space}.")


def space_from_plain(plain: dict[str, Any]) -> gym.Space:
    """Make a space again from what `plain_space` returned."""
    match plain["kind"]:
        case "Discrete":
            return Discrete(plain["n"], start=plain["start"])
        case "Box":
            low, high = (plain[name].cpu().numpy() for name in ("low", "high"))
            return Box(low, high, dtype=np.dtype(plain["dtype"]).type)
        case "MultiDiscrete":
            nvec, start = (plain[name].cpu().numpy() for name in ("nvec", "start"))
            return MultiDiscrete(nvec, dtype=nvec.dtype.type, start=start)
        case "MultiBinary":
            return MultiBinary(plain["shape"])
        case "Tuple":
            return Tuple([space_from_plain(part) for part in plain["spaces"]])
        case "Dict":
            return Dict({name: space_from_plain(part) for name, part in plain["spaces"].items()})
    raise CheckpointError(f"A checkpoint of this version holds no space of kind {plain['kind']!r}.")


# %% book/checkpoint.py · Keeping the last two
class CheckpointDirectory:
    """The checkpoints of one run: the last `keep` stay, and a damaged one is skipped."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep

    def paths(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        return sorted(self.directory.glob("step_*.pt"))

    def last_step(self) -> int:
        """The step of the newest file, or 0 if there is none."""
        paths = self.paths()
        return int(paths[-1].stem.removeprefix("step_")) if paths else 0

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then delete all but it and the `keep` - 1 before it."""
        path = self.directory / f"step_{step:012d}.pt"
        with explain_failure(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("*.tmp"):  # left by a process that was killed
                leftover.unlink(missing_ok=True)
            write_checkpoint(path, content)
            # A newer file must be damaged, or the run would have continued from it.
            kept = [other for other in self.paths() if other <= path][-self.keep :]
            for other in set(self.paths()) - set(kept):
                other.unlink(missing_ok=True)
        return path

    def newest(self, device: str = "cpu") -> tuple[Path, dict[str, Any]] | None:
        """Read the newest sound checkpoint, or return None if the directory has no checkpoint."""
        paths = self.paths()
        for i, path in reversed(list(enumerate(paths))):
            try:
                return path, read_checkpoint(path, device)
            except UnreadableError:
                raise  # continuing from an older one would delete this one, which may be sound
            except CheckpointError as error:
                if i == 0:
                    raise CheckpointError(
                        f"{error} No checkpoint in {self.directory} is sound: start a new run."
                    ) from error
                warnings.warn(f"{error} Going on with the one before.", stacklevel=2)
        return None
