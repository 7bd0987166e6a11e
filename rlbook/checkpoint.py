"""Made from book/checkpoint.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "TRAILER",
    "TRAILER_SIZE",
    "CheckpointDirectory",
    "CheckpointError",
    "HashingWriter",
    "read_checkpoint",
    "sync_directory",
    "verify_checksum",
    "write_checkpoint",
]

# %% book/checkpoint.py · Checkpoints
import hashlib
import os
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch

# %% book/checkpoint.py · A checksum at the end
TRAILER = b"rlbook-sha256:"  # the file ends with this and 64 hexadecimal digits
TRAILER_SIZE = len(TRAILER) + 64


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or cannot be trusted."""


class HashingWriter:
    """Passes bytes on to a file and hashes them on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write and hash one piece."""
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()


# %% book/checkpoint.py · All or nothing
def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut."""
    if os.name != "posix":  # other systems cannot open a directory
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write to a temporary file, sync it and rename it, so that `path` is never half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            writer = HashingWriter(file)
            torch.save(content, writer)
            file.write(TRAILER + writer.hash.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"Could not write {path}: {reason}. Older files are untouched.") from error
    finally:
        temporary.unlink(missing_ok=True)


# %% book/checkpoint.py · Trust nothing
def verify_checksum(path: Path) -> None:
    """Raise unless the file ends with the SHA-256 of all that stands before."""
    digest, remaining = hashlib.sha256(), path.stat().st_size - TRAILER_SIZE
    with open(path, "rb") as file:
        while remaining > 0:
            piece = file.read(min(remaining, 1 << 20))
            if not piece:
                break
            digest.update(piece)
            remaining -= len(piece)
        trailer = file.read()
    if trailer != TRAILER + digest.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged or not an rlbook checkpoint: its checksum does not match.")


def read_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Read a checkpoint after checking it; nothing in the file is ever run."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    verify_checksum(path)
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} holds more than numbers and names, and opening it could run code: it was not opened."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not an rlbook checkpoint.")
    return content


# %% book/checkpoint.py · Keeping the last two
class CheckpointDirectory:
    """The checkpoints of one run: the last `keep` stay, and a damaged one is passed over."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep

    def paths(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        return sorted(self.directory.glob("step_*.pt"))

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then drop what is older than the last `keep`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob("*.tmp"):  # of a process that was killed while writing
            leftover.unlink(missing_ok=True)
        path = self.directory / f"step_{step:012d}.pt"
        write_checkpoint(path, content)
        for old in self.paths()[: -self.keep]:
            old.unlink()
        return path

    def newest(self, device: str = "cpu") -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint that is sound, or return None where there is none at all."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return path, read_checkpoint(path, device)
            except CheckpointError as error:
                warnings.warn(f"{error} Going on with the one before.", stacklevel=2)
        if paths:
            raise CheckpointError(f"No checkpoint in {self.directory} can be read: start a new run.")
        return None
