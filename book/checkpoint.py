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
# # Checkpoints
#
# A run takes hours, and machines crash, run out of disk space and are switched off. A checkpoint
# is a file from which the run can continue. In this chapter you build checkpoints that you can
# rely on: each file is complete or not there at all, damage is noticed, and opening a stranger's
# file runs no code.
#
# | | |
# |---|---|
# | You need | files, and a rough idea of what a hash is |
# | Same as `torch.save` and `torch.load` | the format: tensors, numbers, text, lists and dicts |
# | Different | written to a temporary file and renamed; a checksum; no objects that run code |
#
# Here is the finished module at work. It saves at three steps and keeps the last two. Then we
# damage the newest file and ask for the newest checkpoint.

# %% tags=["hide-input"]
#| export
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

# %% tags=["hide-input"]
import json
import subprocess
import sys
import tempfile
from unittest import mock

import matplotlib.pyplot as plt

import rlbook.checkpoint as finished  # the module that this chapter exports
from rlbook.figures import PALETTE, use_style

use_style()
scratch = tempfile.TemporaryDirectory()  # is deleted with the notebook
folder = Path(scratch.name)

# %%
demo = finished.CheckpointDirectory(folder / "demo", keep=2)
for step in (10, 20, 30):
    demo.save(step, {"step": step, "weights": torch.full((3,), float(step))})
print("kept:   ", [path.name for path in demo.paths()])

newest = demo.paths()[-1]
newest.write_bytes(newest.read_bytes()[:-100])  # cut off the end
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    path, content = demo.newest()
print("warning:", str(caught[0].message).replace(f"{folder}/", ""))
print("loaded: ", path.name, content)
assert content["step"] == 20

# %% [markdown]
# ## The problem: killed while writing
#
# A process has written a checkpoint of 2 MB and is now writing the next one to the same path. Then
# it is killed. What can you read afterwards? The folded cell tries it. It starts eight processes,
# and the operating system kills each at another byte of the new file, as suddenly as `kill -9`
# would: no `except` and no `finally` runs. It does this with plain `torch.save` and with the
# module of this chapter. The last two columns are kills after the last byte, before and after our
# module gives the file its final name.

# %% tags=["hide-input"]
EXPERIMENT = """
import json, os, resource, signal, sys
from pathlib import Path

import torch
import rlbook.checkpoint as checkpoint

path, (old, new) = Path(sys.argv[1]), [{"step": i, "weights": torch.ones(500_000)} for i in (1, 2)]
plain = lambda p, content: torch.save(content, p), lambda p: torch.load(p, weights_only=True)
ours = checkpoint.write_checkpoint, checkpoint.read_checkpoint
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # leave no core dumps
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file larger than its limit kills the process

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write_and_die(write, stop):
    if stop == "written":  # all bytes are there, and nothing more happens
        os.replace = die
    elif stop != "renamed":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * stop),) * 2)
    write(path, new)
    die()

def outcome(read):
    try:
        return {1: "old", 2: "new"}[read(path)["step"]]
    except Exception:
        return "nothing"

for name, write, read in ("torch.save", *plain), ("write_checkpoint", *ours):
    for stop in [0, 0.2, 0.4, 0.6, 0.8, 0.99, "written", "renamed"]:
        write(path, old)
        size = path.stat().st_size
        if (child := os.fork()) == 0:
            write_and_die(write, stop)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        print(json.dumps([name, stop, outcome(read)]))
"""
(folder / "killed").mkdir()
command = [sys.executable, "-c", EXPERIMENT, str(folder / "killed" / "agent.pt")]
output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
outcomes = [json.loads(line) for line in output.splitlines()]

tones = {"old": PALETTE[5], "new": PALETTE[2], "nothing": PALETTE[3]}
names = ["write_checkpoint", "torch.save"]
figure, ax = plt.subplots(figsize=(9, 2.3))
for i, (name, _, outcome) in enumerate(outcomes):
    x, y = i % 8, names.index(name)
    ax.barh(y, 0.94, height=0.8, left=x - 0.47, color=tones[outcome])
    ax.text(x, y, outcome, ha="center", va="center")
stops = [f"{m:.0%}" if m not in ("written", "renamed") else m for _, m, _ in outcomes[:8]]
ax.set_xticks(range(8), stops)
ax.set_yticks([0, 1], names, family="monospace")
ax.set(xlabel="killed when this part of the new file was written", xlim=(-0.6, 7.6))
ax.set_title("the checkpoint that can be read after the kill")
ax.grid(False)
plt.show()

# %%
assert {outcome for _, _, outcome in outcomes[:6]} == {"nothing"}
assert [outcome for _, _, outcome in outcomes[8:]] == 7 * ["old"] + ["new"]

# %% [markdown]
# Plain `torch.save` loses **both** checkpoints. Opening a file for writing empties it, so the old
# checkpoint is gone before the first new byte. And the new one cannot be read until its last byte
# is written, because the table of contents of the file is at its end.
#
# ## A checksum
#
# Half a file at least gives an error. A single flipped bit may not, and disks, memory and networks
# flip one now and then. By hand: the number 1.0 as a 32-bit float is `3f800000`. Flip its second
# highest bit and you get `7f800000`, which is infinity.

# %%
file = io.BytesIO()
torch.save({"weights": torch.ones(1_000)}, file)
damaged = bytearray(file.getvalue())
first = damaged.index(torch.ones(1_000).numpy().tobytes())
damaged[first + 3] ^= 0x40  # the highest byte of a number is stored last
weights = torch.load(io.BytesIO(bytes(damaged)), weights_only=True)["weights"]
print(weights[:4])
assert weights[0] == float("inf")

# %% [markdown]
# No error, no warning, and one weight is infinite. So our files end with a checksum: the SHA-256
# hash of everything before it.
#
# ```
# | the file that torch.save writes ...... | rlbook-sha256: | 64 hexadecimal digits |
# ```
#
# `torch.load` ignores the extra bytes at the end. `HashingWriter` computes the hash while the file
# is written. The cell also defines the errors of this chapter. An `UnreadableError` is a
# `CheckpointError` whose file may be sound: this machine is not allowed to read it, or has too
# little memory.

# %%
#| export
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

# %% [markdown]
# By hand: the standard of SHA-256 gives the hash of `abc` as an example. It begins with `ba7816bf`
# and ends with `f20015ad`. If we write `abc` in two pieces, the hash must be the same.

# %%
with HashingWriter(open(folder / "abc", "wb", buffering=0)) as file:
    file.write(b"a")
    file.write(b"bc")
digest = file.hash.hexdigest()
print(digest)
assert digest.startswith("ba7816bf") and digest.endswith("f20015ad")
assert (folder / "abc").read_bytes() == b"abc"

# %% [markdown]
# ## Only what can be read back
#
# We will open checkpoints with `weights_only=True`, which accepts tensors and plain Python values
# and refuses everything else (*Files from strangers* below shows why). The worst checkpoint is one
# that is written without complaint and refused on the day you need it. So we check before we
# write. Types are compared exactly, because `weights_only` refuses subclasses too: NumPy's
# `float64` is a subclass of `float`.

# %%
#| export
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

# %% [markdown]
# By hand: the mean of a NumPy array is such a `float64`, here two levels down. The state of a
# NumPy generator, on the other hand, is made of plain integers and text.

# %%
try:
    check_plain({"step": 1, "metrics": {"loss": np.array([0.5, 1.5]).mean()}})
except CheckpointError as error:
    print(error)
    assert str(error).startswith("checkpoint['metrics']['loss'] is a float64")
check_plain(np.random.default_rng(0).bit_generator.state)
check_plain({"weights": torch.ones(3), "lr": 1e-3, "sizes": (64, 64), "name": None})

# %% [markdown]
# ## All or nothing
#
# To replace a file so that it is never half written, take four steps:
#
# 1. **Write** the new content to a temporary file in the same directory.
# 2. **Sync** that file: wait until it is on the disk. Without this, a power cut after the next
#    step could leave an empty file under the new name.
# 3. **Rename** it to the final name. The file system does this in one step: whoever opens the name
#    gets all of the old file or all of the new one.
# 4. **Sync the directory**, so that the new name is on the disk too. Some systems cannot do this.
#    Then we go on without it.

# %%
#| export
def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut, where the system can."""
    with suppress(OSError):  # some systems cannot open or sync a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

# %% [markdown]
# All of this can fail: the disk may be full, or the directory may be gone. The user should get the
# reason in one sentence. But torch calls our `write`, and if that raises an `OSError`, torch often
# raises a `RuntimeError` of its own instead. Python keeps the first error as the `__context__` of
# the second, so we can find it.

# %%
#| export
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

# %% [markdown]
# By hand: error 28 is a full disk, whether it comes directly or behind another error.

# %%
full = OSError(28, "No space left on device")
hiding = RuntimeError("unexpected pos 640 vs 534\nand 40 more lines")
assert reason(hiding) == "unexpected pos 640 vs 534"
hiding.__context__ = full
assert reason(full) == reason(hiding) == "No space left on device"
try:
    with explain_failure(Path("agent.pt")):
        raise hiding
except CheckpointError as error:
    print(error)

# %% [markdown]
# Now the four steps together. Whatever goes wrong, the temporary file is deleted. Only a kill can
# leave one, as it did seven times in the experiment above.

# %%
#| export
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

# %%
assert len(list((folder / "killed").glob("*.tmp"))) == 7
path = folder / "agent.pt"
write_checkpoint(path, {"step": 1, "weights": torch.ones(1_000)})
sound = path.read_bytes()
assert sound[-TRAILER_SIZE:-64] == b"rlbook-sha256:"
assert sound[-64:].decode() == hashlib.sha256(sound[:-TRAILER_SIZE]).hexdigest()
assert torch.load(path, weights_only=True)["step"] == 1  # torch reads it too

# %% [markdown]
# Pretend that the disk is full when the file is synced. The old checkpoint is untouched, and no
# temporary file is left.

# %%
with mock.patch("os.fsync", side_effect=full), suppress(CheckpointError):
    write_checkpoint(path, {"step": 2, "weights": torch.zeros(1_000)})
assert path.read_bytes() == sound
assert not list(folder.glob("*.tmp"))

# %% [markdown]
# ## Files from strangers
#
# Somebody offers you a trained agent. What happens when you open the file? `torch.load` is built
# on pickle, and a pickle is not data but a small program: to rebuild its objects it names
# functions to call, and it may name **any** function. This file makes a directory. It could as
# well delete your files.


# %%
class Gift:
    """An object that is restored by calling `os.mkdir`."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(folder / "I was here"),)


torch.save({"weights": torch.ones(3), "gift": Gift()}, folder / "gift.pt")
torch.load(folder / "gift.pt", weights_only=False)
print("the file made a directory:", (folder / "I was here").exists())
assert (folder / "I was here").exists()

# %% [markdown]
# With `weights_only=True` torch calls only the few functions that rebuild tensors and plain
# values. If the file names any other function, torch stops before it calls anything.

# %%
(folder / "I was here").rmdir()
try:
    torch.load(folder / "gift.pt", weights_only=True)
except pickle.UnpicklingError as error:
    print(type(error).__name__)
print("the file made a directory:", (folder / "I was here").exists())
assert not (folder / "I was here").exists()

# %% [markdown]
# So we read in two steps: compare the checksum, then let torch read with `weights_only=True`.

# %%
#| export
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

# %% [markdown]
# By hand: `abc` followed by its hash is accepted, and `abd` followed by the same hash is not.

# %%
(folder / "abc").write_bytes(b"abc" + TRAILER + digest.encode())
verify_checksum(folder / "abc")
(folder / "abc").write_bytes(b"abd" + TRAILER + digest.encode())
try:
    verify_checksum(folder / "abc")
except CheckpointError as error:
    print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# Whatever goes wrong becomes a `CheckpointError` with one sentence, or an `UnreadableError` if the
# file may be sound. The last `except` is wide because torch does not document which errors a
# forged file can cause.

# %%
#| export
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

# %% [markdown]
# We flip 300 bits, one at a time, and cut the file at 100 points: the checksum finds each of them.
# Then we give the hostile file a correct checksum, which anybody can compute. A checksum finds
# accidents, not attacks; `weights_only` stops the attack.

# %%
assert read_checkpoint(path)["step"] == 1


def refusal(content: bytes) -> str | None:
    """Return the error for a file with this content, or None if it is accepted."""
    (folder / "copy.pt").write_bytes(content)
    try:
        read_checkpoint(folder / "copy.pt")
    except CheckpointError as error:
        return str(error).replace(f"{folder}/", "")
    return None


rng, found = np.random.default_rng(0), 0
for bit in rng.integers(8 * len(sound), size=300):
    flipped = bytearray(sound)
    flipped[bit // 8] ^= 1 << bit % 8
    found += refusal(bytes(flipped)) is not None
cut = sum(refusal(sound[:end]) is not None for end in rng.integers(len(sound), size=100))
print(f"{found} of 300 flipped bits and {cut} of 100 cuts were found")
assert found == 300 and cut == 100

gift = (folder / "gift.pt").read_bytes()
print(refusal(gift))
print(refusal(gift + TRAILER + hashlib.sha256(gift).hexdigest().encode()))
assert not (folder / "I was here").exists()

# %% [markdown]
# ## Spaces as plain data
#
# An agent knows the spaces of its observations and actions, and they belong in its checkpoint. But
# a Gymnasium space is an object that `weights_only` refuses. So we write its kind and its numbers.
# By hand: `Discrete(3, start=1)` is `{"kind": "Discrete", "n": 3, "start": 1}`.

# %%
#| export
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

# %%
assert plain_space(Discrete(3, start=1)) == {"kind": "Discrete", "n": 3, "start": 1}
for space in (
    Discrete(3, start=1),
    Box(-np.inf, 2.0, (4,)),
    Box(0, 255, (3, 8, 8), np.uint8),
    Dict({"pair": Tuple([MultiDiscrete([2, 3], start=[1, 0]), MultiBinary([2, 2])])}),
):
    write_checkpoint(folder / "space.pt", plain_space(space))
    assert space_from_plain(read_checkpoint(folder / "space.pt")) == space

# %% [markdown]
# ## Keeping the last two
#
# A file can be damaged long after it was written, so we keep the checkpoint before it as well. The
# file names carry the step with leading zeros, so that sorting the names sorts the steps. A new
# checkpoint is written first, and old ones are deleted afterwards. By hand, with `keep=2`: after
# the steps 10, 20 and 30, the files of 20 and 30 are left.

# %%
#| export
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

# %%
checkpoints = CheckpointDirectory(folder / "checkpoints", keep=2)
assert checkpoints.newest() is None and checkpoints.last_step() == 0
(folder / "checkpoints").mkdir()
(folder / "checkpoints" / "step_000000000005.pt.4242.tmp").touch()  # left by a kill
for step in (10, 20, 30):
    checkpoints.save(step, {"step": step})
assert [int(file.stem[5:]) for file in checkpoints.paths()] == [20, 30]
assert checkpoints.last_step() == 30
assert len(list((folder / "checkpoints").iterdir())) == 2  # the temporary file is gone too

# %% [markdown]
# You saw at the top of the chapter that `newest` skips a damaged file. The run then continues from
# step 20, and its next `save` deletes the damaged file. (After an `UnreadableError` it does not
# skip: the file may be sound, and going on from an older one would delete it.)

# %%
checkpoints.paths()[-1].write_bytes(b"damaged")
checkpoints.save(25, {"step": 25})
assert [int(file.stem[5:]) for file in checkpoints.paths()] == [20, 25]

# %% [markdown]
# If no checkpoint can be read, that is an error. A run that silently started again at step 0 would
# look as if it had unlearned everything.

# %%
for file in checkpoints.paths():
    file.write_bytes(b"")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        checkpoints.newest()
    except CheckpointError as error:
        print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# ## Honest edges
#
# - The checksum finds accidents. It does not prove who wrote the file (exercise 3).
# - `weights_only` protects you from code, not from a bad agent. Before torch 2.6 a file could get
#   around it (CVE-2025-32434).
# - `read_checkpoint` runs no code. But if a file names its algorithm as `module:name`,
#   `rlbook.load` imports that module if it is on your path, and `learn` and `evaluate` do the same
#   for the environment. If you do not trust the source, look at `read_checkpoint(path)["algo"]`
#   and `["config"]` first.
# - A new checkpoint is written before an old one is deleted, so the disk needs space for three.
# - Some disks report a sync as done before it is. No program can repair that.
# - Two processes that write to the same directory delete each other's temporary files. One of them
#   then fails with a sentence, and no checkpoint is damaged.
#
# ## Exercises
#
# **Exercise 1, a planted bug.** This directory also keeps the last two. It worked in a test with
# the steps 1, 2 and 3. Here is a longer run. Which files are left, and why?


# %%
class ShortNames(CheckpointDirectory):
    """A directory of checkpoints with a bug."""

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then delete all but the last two."""
        path = self.directory / f"step_{step}.pt"
        write_checkpoint(path, content)
        for old in self.paths()[: -self.keep]:
            old.unlink()
        return path


(folder / "short").mkdir()
short = ShortNames(folder / "short")
for step in (8_000, 9_000, 10_000, 11_000):
    short.save(step, {"step": step})
print([file.name for file in short.paths()])

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Names are sorted as text, letter by letter, and `step_10000` comes before `step_8000` because `1`
# comes before `8`. So from step 10,000 on, each new checkpoint counts as the oldest and is deleted
# as soon as it is written. The run ends with the checkpoints of the steps 8,000 and 9,000, without
# an error. With leading zeros, the order of the names is the order of the numbers:
#
# ```python
# class ShortNames(CheckpointDirectory):
#     """A directory of checkpoints whose names are in the order of their steps."""
#
#     def save(self, step: int, content: dict[str, Any]) -> Path:
#         """Write the checkpoint of a step, then delete all but the last two."""
#         path = self.directory / f"step_{step:012d}.pt"
#         write_checkpoint(path, content)
#         for old in self.paths()[: -self.keep]:
#             old.unlink()
#         return path
#
# with tempfile.TemporaryDirectory() as name:
#     repaired = ShortNames(Path(name))
#     for step in (8_000, 9_000, 10_000, 11_000):
#         repaired.save(step, {"step": step})
#     assert [read_checkpoint(file)["step"] for file in repaired.paths()] == [10_000, 11_000]
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Why does `write_checkpoint` put the temporary file beside the checkpoint, and not
# into the system's directory for temporary files?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A rename is one step only within one file system. The directory for temporary files is often on
# another one, and then `os.replace` fails with *Invalid cross-device link*. `shutil.move` would
# not fail: it copies. But a copy can be interrupted half-way, which is the problem that we started
# with.
#
# ```python
# with tempfile.TemporaryDirectory() as name:
#     write_checkpoint(Path(name) / "agent.pt", {"step": 1})
#     assert os.listdir(name) == ["agent.pt"]  # the temporary file was here, and has been renamed
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Forge a checkpoint: change one weight in somebody else's file so that
# `read_checkpoint` accepts it. What could the owner do to prevent this?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Change the weight and write the file again. The checksum is right, because anybody who can change
# the content can compute a new checksum.
#
# ```python
# with tempfile.TemporaryDirectory() as name:
#     theirs = Path(name) / "agent.pt"
#     write_checkpoint(theirs, {"weights": torch.zeros(3)})
#     stolen = read_checkpoint(theirs)
#     stolen["weights"][0] = 666
#     write_checkpoint(theirs, stolen)
#     assert read_checkpoint(theirs)["weights"][0] == 666
# ```
#
# The owner needs a checksum that depends on a secret: `hmac.new(key, content, "sha256")` for
# people who share the key, or a digital signature for everybody else.
#
# </details>

# %% [markdown]
# **Exercise 4.** A run is killed after it has renamed the file of step 30 and before it deletes
# the file of step 10. What is in the directory, what does `newest` return, and when are there two
# files again?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Three sound checkpoints: 10, 20 and 30. `newest` returns 30. The next `save` writes 40 and keeps
# 30 and 40. Nothing needs repair in between, because the new file is written before an old one is
# deleted.
#
# ```python
# with tempfile.TemporaryDirectory() as name:
#     run = CheckpointDirectory(Path(name))
#     for step in (10, 20):
#         run.save(step, {"step": step})
#     write_checkpoint(Path(name) / "step_000000000030.pt", {"step": 30})  # and then the kill
#     assert len(run.paths()) == 3 and run.newest()[1]["step"] == 30
#     run.save(40, {"step": 40})
#     assert [read_checkpoint(path)["step"] for path in run.paths()] == [30, 40]
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from pathlib import Path
# from rlbook.checkpoint import CheckpointDirectory, read_checkpoint, write_checkpoint
#
# write_checkpoint(Path("agent.pt"), {"weights": network.state_dict()})
# network.load_state_dict(read_checkpoint(Path("agent.pt"))["weights"])
# ```
#
# Agents and runs do this for you, with `agent.save("agent.pt")` in Python, and in the shell:
#
# ```
# rlbook train dqn --checkpoint-every 10000 --run-dir runs/a
# rlbook resume runs/a
# ```
#
# ## References
#
# - T. S. Pillai et al. (2014). All file systems are not created equal: on the complexity of
#   crafting crash-consistent applications. *OSDI*. What can go wrong without the two syncs.
# - National Institute of Standards and Technology (2015). *Secure Hash Standard*, FIPS 180-4. The
#   hash of `abc` is its first example.
# - The documentation of Python's [pickle](https://docs.python.org/3/library/pickle.html) begins
#   with the warning that this chapter shows. That of
#   [torch.load](https://docs.pytorch.org/docs/stable/generated/torch.load.html) says what
#   `weights_only` accepts.
