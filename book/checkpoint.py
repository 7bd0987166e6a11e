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
# A run takes hours, and machines stop when they like. In this chapter you build files that a run
# can rely on: each is whole or not there at all, each knows when it was damaged, and each can be
# opened without running anything that somebody hid in it. Around them you build a directory that
# keeps the last two and passes over one that cannot be trusted.
#
# | | |
# |---|---|
# | You need | files, and a rough idea of a hash |
# | Same as `torch.save` and `torch.load` | the format: tensors, numbers, texts, lists and dicts |
# | Different | written beside the old file and renamed; a checksum; plain content only |

# %%
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

import torch

# %% [markdown]
# The cells that are not part of the library need a little more.

# %%
import json
import subprocess
import sys
import tempfile
import time
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np

from rlbook.figures import COLORS, PALETTE, use_style

use_style()
scratch = tempfile.TemporaryDirectory()  # goes away with the notebook
folder = Path(scratch.name)

# %% [markdown]
# ## The problem: killed while writing
#
# A process has written a checkpoint of 2 MB and is now writing the next one to the same place. Then
# it dies. What can be read afterwards? Try it: the script below forks a victim for each moment. A
# limit on the size of its files makes the kernel kill the victim at an exact byte, as suddenly as
# `kill -9`; no `except` and no `finally` runs. After the last byte, the victim kills itself. One
# round of victims uses plain `torch.save`, the other the finished module of this chapter.

# %%
EXPERIMENT = """
import json, os, resource, signal, sys
from pathlib import Path

import torch
import rlbook.checkpoint as checkpoint

path, (old, new) = Path(sys.argv[1]), [{"step": i, "rows": torch.ones(500_000)} for i in (1, 2)]
plain = lambda p, content: torch.save(content, p), lambda p: torch.load(p, weights_only=True)
ours = checkpoint.write_checkpoint, checkpoint.read_checkpoint
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # leave no core dumps
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file beyond its limit kills

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def victim(write, moment):
    if moment == "written":  # all bytes are there, and nothing more happens
        os.replace = die
    elif moment != "renamed":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * moment),) * 2)
    write(path, new)
    die()

def outcome(read):
    try:
        return {1: "old", 2: "new"}[read(path)["step"]]
    except Exception:
        return "nothing"

for name, write, read in ("torch.save", *plain), ("write_checkpoint", *ours):
    for moment in [0, 0.2, 0.4, 0.6, 0.8, 0.99, "written", "renamed"]:
        write(path, old)
        size = path.stat().st_size
        if (child := os.fork()) == 0:
            victim(write, moment)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        print(json.dumps([name, moment, outcome(read)]))
"""
(folder / "victims").mkdir()
command = [sys.executable, "-c", EXPERIMENT, str(folder / "victims" / "agent.pt")]
output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
left_behind = [json.loads(line) for line in output.splitlines()]

# %% tags=["hide-input"]
tones = {"old": PALETTE[5], "new": PALETTE[2], "nothing": PALETTE[3]}
names = ["write_checkpoint", "torch.save"]
figure, ax = plt.subplots(figsize=(9, 2.3))
for i, (name, _, outcome) in enumerate(left_behind):
    x, y = i % 8, names.index(name)
    ax.barh(y, 0.94, height=0.8, left=x - 0.47, color=tones[outcome])
    ax.text(x, y, outcome, ha="center", va="center")
moments = [f"{m:.0%}" if m not in ("written", "renamed") else m for _, m, _ in left_behind[:8]]
ax.set_xticks(range(8), moments)
ax.set_yticks([0, 1], names, family="monospace")
ax.set(xlabel="killed when this part of the new file was written", xlim=(-0.6, 7.6))
ax.set_title("what can be read after the kill")
ax.grid(False)
plt.show()

# %%
assert {o for name, moment, o in left_behind[:6]} == {"nothing"}
assert [o for name, moment, o in left_behind[8:]] == 7 * ["old"] + ["new"]

# %% [markdown]
# Plain `torch.save` loses **both** checkpoints. Opening a file for writing empties it, so the old
# one is gone before the first new byte, and the new one is no use until its last: the directory of
# the archive stands at the end. This is what a reader of half a file is told:

# %%
torch.save({"weights": torch.ones(1_000)}, folder / "plain.pt")
whole = (folder / "plain.pt").read_bytes()
(folder / "half.pt").write_bytes(whole[: len(whole) // 2])
try:
    torch.load(folder / "half.pt", weights_only=True)
except RuntimeError as error:
    print(error)

# %% [markdown]
# ## A checksum at the end
#
# Half a file at least announces itself. A single flipped bit need not. Disks, memory and networks
# flip one now and then, and here you can do it yourself. By hand: the number 1.0 as a 32-bit float
# is `3f800000`. Flip its second highest bit, and it is `7f800000`, which means infinity.

# %%
bits = torch.ones(1_000).numpy().tobytes()
damaged = bytearray(whole)
damaged[whole.index(bits) + 3] ^= 0x40  # the highest byte of the first weight comes fourth
weights = torch.load(io.BytesIO(bytes(damaged)), weights_only=True)["weights"]
print(weights[:4])
assert weights[0] == float("inf")

# %% [markdown]
# No error, no warning: one weight is infinite. (Torch writes a short checksum for each tensor but
# does not look at it when it reads.) So our files end with a checksum of their own, the SHA-256 of
# all bytes before it, hashed while they are written:
#
# ```
# | the archive of torch.save ............ | rlbook-sha256: | 64 hexadecimal digits |
# ```
#
# Torch looks for the directory of the archive from the end backwards and is not disturbed by a few
# bytes behind it.

# %%
#| export
TRAILER = b"rlbook-sha256:"  # the file ends with this and 64 hexadecimal digits
TRAILER_SIZE = len(TRAILER) + 64


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or cannot be trusted."""


class UnreadableError(CheckpointError):
    """A checkpoint that may be sound, but cannot be read here and now."""


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
# By hand there is one hash that everybody knows, that of `abc`, which begins with `ba7816bf` and
# ends with `f20015ad`. Writing it in two pieces must give the same.

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
# Later in this chapter a checkpoint is opened with `weights_only=True`, which reads tensors and
# plain Python values and refuses the rest. A checkpoint that is written without complaint and
# refused when you need it would be the worst of all. So look before you write. The types are
# compared exactly, because a subclass is enough to be refused: NumPy's `float64` is a `float`, and
# to rebuild one, the reader would have to call a function of NumPy.

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
# By hand: the mean of a NumPy array is such a `float64`, and it hides two levels down. The state of
# NumPy's generator, on the other hand, is plain: its two 128-bit numbers are Python integers.

# %%
try:
    check_plain({"step": 1, "metrics": {"loss": np.array([0.5, 1.5]).mean()}})
except CheckpointError as error:
    print(error)
    assert str(error).startswith("checkpoint['metrics']['loss'] is a float64")
state = np.random.default_rng(0).bit_generator.state
print(state["state"])
check_plain(state)
check_plain({"weights": torch.ones(3), "lr": 1e-3, "sizes": (64, 64), "name": None})

# %% [markdown]
# ## All or nothing
#
# The way to replace a file without a moment in which it is half there is old and short:
#
# 1. **Write** the new content to another file in the same directory.
# 2. **Sync** that file: wait until the disk has it. Without this, a power cut after the next step
#    could leave the new name with no content.
# 3. **Rename** it over the old one. The file system does that in one step: whoever opens the name
#    gets all of the old file or all of the new one.
# 4. **Sync the directory**, so that the new name is on the disk too.
#
# The fourth step is of no use where a system cannot do it, and then nothing is lost but some safety
# against power cuts.

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


# %%
sync_directory(folder)
sync_directory(folder / "not there")  # no error: the rename has been done by then

# %% [markdown]
# All of this can fail: the disk is full, the directory is gone or may not be written. The user
# should get the system's reason in one sentence. There is a catch. Torch's archive writer calls our
# `write`, and when that raises `OSError`, torch often raises a `RuntimeError` about the inside of
# the archive instead. Python keeps the first error as the context of the second, so you can walk
# back to it.

# %%
#| export
def reason(error: BaseException) -> str:
    """Say in a few words what went wrong with a file."""
    while not isinstance(error, OSError) and error.__context__:
        error = error.__context__  # torch hides the error of the file behind one of its own
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
# By hand: error 28 is a full disk, whichever way it comes.

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
# Now the whole thing. Whatever happens, the temporary file goes away. Only a kill leaves it there:
# seven of the victims above did.

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
assert len(list((folder / "victims").glob("*.tmp"))) == 7
path = folder / "agent.pt"
write_checkpoint(path, {"step": 1, "weights": torch.ones(1_000)})
content = path.read_bytes()
assert content[-TRAILER_SIZE:-64] == b"rlbook-sha256:"
assert content[-64:].decode() == hashlib.sha256(content[:-TRAILER_SIZE]).hexdigest()
assert torch.load(path, weights_only=True)["step"] == 1  # torch reads it too

# %% [markdown]
# Play a full disk: let the sync fail. The old checkpoint is untouched, and nothing is left behind.

# %%
with mock.patch("os.fsync", side_effect=full), suppress(CheckpointError):
    write_checkpoint(path, {"step": 2, "weights": torch.zeros(1_000)})
assert path.read_bytes() == content
assert not list(folder.glob("*.tmp"))

# %% [markdown]
# ## Trust nothing
#
# Somebody offers you a trained agent. What happens when you open the file? `torch.load` is built on
# pickle, and a pickle is not data but a small program: it says which functions to call with which
# arguments so that the objects come back. It may name **any** function. Here is a file that makes a
# directory. It could as well have sent your keys away.


# %%
class Gift:
    """An object that is restored by calling `os.mkdir`."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(folder / "I was here"),)


torch.save({"weights": torch.ones(3), "gift": Gift()}, folder / "gift.pt")
assert not (folder / "I was here").exists()
torch.load(folder / "gift.pt", weights_only=False)
print("somebody was here:", (folder / "I was here").exists())
assert (folder / "I was here").exists()

# %% [markdown]
# With `weights_only=True` torch reads the program itself and calls nothing but the few functions
# that rebuild tensors and plain values. At any other name it stops, before it calls anything.

# %%
(folder / "I was here").rmdir()
try:
    torch.load(folder / "gift.pt", weights_only=True)
except pickle.UnpicklingError as error:
    print(type(error).__name__)
print("somebody was here:", (folder / "I was here").exists())
assert not (folder / "I was here").exists()

# %% [markdown]
# So reading takes two steps: check the sum, then let torch read with `weights_only=True`. The sum
# is computed a megabyte at a time, so that a large file needs no memory.

# %%
#| export
def verify_checksum(path: Path) -> None:
    """Raise unless the file ends with the SHA-256 of all that stands before."""
    digest, remaining = hashlib.sha256(), max(0, path.stat().st_size - TRAILER_SIZE)
    with open(path, "rb") as file:
        while piece := file.read(min(remaining, 1 << 20)):
            digest.update(piece)
            remaining -= len(piece)
        trailer = file.read()
    if trailer != TRAILER + digest.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged or not an rlbook checkpoint (wrong checksum).")


# %% [markdown]
# By hand: `abc` with its hash behind it is sound, and `abd` with the same hash is not.

# %%
(folder / "abc").write_bytes(b"abc" + TRAILER + digest.encode())
verify_checksum(folder / "abc")
(folder / "abc").write_bytes(b"abd" + TRAILER + digest.encode())
try:
    verify_checksum(folder / "abc")
except CheckpointError as error:
    print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# The reader turns whatever goes wrong into one kind of error with one sentence. The last `except`
# is as wide as it looks: a file that was made to do harm can send torch down any path.

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
    except Exception as error:  # what torch raises for a file made in bad faith is not documented
        if "allocate memory" in str(error):
            raise UnreadableError(f"There is not enough memory here to read {path}.") from error
        raise CheckpointError(f"Could not read {path}: {reason(error)}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not an rlbook checkpoint.")
    return content


# %% [markdown]
# Flip 300 single bits, one at a time, and cut the file at 100 places. Then give the hostile file a
# correct checksum: anybody can compute one. A checksum finds accidents, not lies, and that is why
# the second step is there.

# %%
assert read_checkpoint(path)["step"] == 1


def refused(content: bytes) -> str | None:
    """Return what is said about a file with this content, or None when it is accepted."""
    (folder / "copy.pt").write_bytes(content)
    try:
        read_checkpoint(folder / "copy.pt")
    except CheckpointError as error:
        return str(error).replace(f"{folder}/", "")
    return None


rng, found = np.random.default_rng(0), 0
for bit in rng.integers(8 * len(content), size=300):
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    found += refused(bytes(flipped)) is not None
cut = sum(refused(content[:end]) is not None for end in rng.integers(len(content), size=100))
print(f"{found} of 300 flipped bits and {cut} of 100 cuts were found")
assert found == 300 and cut == 100

gift = (folder / "gift.pt").read_bytes()
print(refused(gift))
print(refused(gift + TRAILER + hashlib.sha256(gift).hexdigest().encode()))
assert not (folder / "I was here").exists()

# %% [markdown]
# ## Keeping the last two
#
# A checkpoint can be damaged long after it was written, so the one before it stays too. Names carry
# the step with leading zeros, so that their order is the order of the steps. A new checkpoint is
# written first and old ones are dropped afterwards. By hand, keeping two: after the steps 10, 20
# and 30, the files of 20 and 30 are left.

# %%
#| export
class CheckpointDirectory:
    """The checkpoints of one run: the last `keep` stay, and a damaged one is passed over."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep

    def paths(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        return sorted(self.directory.glob("step_*.pt"))

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then drop all but it and the `keep` - 1 before it."""
        path = self.directory / f"step_{step:012d}.pt"
        with explain_failure(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("*.tmp"):  # of a process killed while writing
                leftover.unlink(missing_ok=True)
            write_checkpoint(path, content)
            # A newer file is a damaged one, or this run would have gone on from it.
            kept = [other for other in self.paths() if other <= path][-self.keep :]
            for other in set(self.paths()) - set(kept):
                other.unlink(missing_ok=True)
        return path

    def newest(self, device: str = "cpu") -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint that is sound, or return None where there is none at all."""
        paths = self.paths()
        for i, path in reversed(list(enumerate(paths))):
            try:
                return path, read_checkpoint(path, device)
            except UnreadableError:
                raise  # to go on from an older one would lose a sound one
            except CheckpointError as error:
                if i == 0:
                    raise CheckpointError(
                        f"{error} No checkpoint in {self.directory} is sound: start a new run."
                    ) from error
                warnings.warn(f"{error} Going on with the one before.", stacklevel=2)
        return None


# %%
checkpoints = CheckpointDirectory(folder / "checkpoints", keep=2)
assert checkpoints.newest() is None
(folder / "checkpoints").mkdir()
(folder / "checkpoints" / "step_000000000005.pt.4242.tmp").touch()  # somebody was killed here
for step in (10, 20, 30):
    checkpoints.save(step, {"step": step})
print(sorted(file.name for file in (folder / "checkpoints").iterdir()))
assert [int(file.stem[5:]) for file in checkpoints.paths()] == [20, 30]
assert len(list((folder / "checkpoints").iterdir())) == 2  # the leftover is gone too

# %% [markdown]
# Now damage the newest. The one before it steps in, with a warning. A run that goes on from step 20
# drops the damaged one as soon as it has saved again.

# %%
newest = checkpoints.paths()[-1]
newest.write_bytes(newest.read_bytes()[:-100])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _, content = checkpoints.newest() or (None, {})
print(str(caught[0].message).replace(f"{folder}/", ""))
assert content["step"] == 20
checkpoints.save(25, {"step": 25})
assert [int(file.stem[5:]) for file in checkpoints.paths()] == [20, 25]

# %% [markdown]
# And when none is sound, that is an error and not a fresh start: a run that silently begins again
# at step 0 would look like one that forgot everything.

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
# ## What it costs
#
# A replay buffer of 32 MB, written and read both ways, five times in turn. The fastest time counts,
# since other work on the machine only ever adds to it. `no checksum` is plain `torch.save` and
# `torch.load`, which do not wait for the disk either; `no sync` is ours with the waiting taken out,
# so that you can tell the price of the checksum from the price of the disk.

# %%
large = {"rows": torch.randint(256, (32_000_000,), dtype=torch.uint8)}
big = folder / "big.pt"


def write_unsynced() -> None:
    """Write with a checksum, but do not wait for the disk."""
    with mock.patch("os.fsync"):
        write_checkpoint(big, large)


calls = {
    "write, no checksum": lambda: torch.save(large, big),
    "write, no sync": write_unsynced,
    "write": lambda: write_checkpoint(big, large),
    "read, no checksum": lambda: torch.load(big, weights_only=True),
    "read": lambda: read_checkpoint(big),
    "SHA-256 alone": lambda: hashlib.sha256(large["rows"].numpy()),
}
seconds: dict[str, list[float]] = {name: [] for name in calls}
for _ in range(5):
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - start)
milliseconds = {name: 1e3 * min(times) for name, times in seconds.items()}
assert torch.equal(read_checkpoint(big)["rows"], large["rows"])

# %%
figure, ax = plt.subplots(figsize=(7, 2.6))
colors = [PALETTE[5], PALETTE[0], PALETTE[0], PALETTE[5], PALETTE[0], COLORS["random"]]
bars = ax.barh(list(milliseconds), list(milliseconds.values()), color=colors)
ax.bar_label(bars, fmt=" %.0f ms", padding=2)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="milliseconds for 32 MB (fastest of 5)")
ax.margins(x=0.15)
plt.show()
speed = 32 / milliseconds["SHA-256 alone"]
print(f"SHA-256 hashes {speed:.1f} GB a second here")

# %% [markdown]
# The hash takes a fraction of a second for a buffer of this size, and a checkpoint is written every
# ten thousand steps. How long the disk takes to say "done" depends on the disk.
#
# ## Honest edges
#
# - The checksum finds accidents. It does not prove who wrote the file (exercise 3).
# - `weights_only` protects you from code, not from nonsense: a stranger's agent may simply be bad. Its
#   promise holds from torch 2.6 on; in older versions it could be broken (CVE-2025-32434).
# - Reading a checkpoint runs nothing. `rlbook.load` then makes the environment that the settings name,
#   and `module:Name-v0` imports a module of that name if there is one on your machine: look at
#   `read_checkpoint(path)["config"]` first where you do not trust the source.
# - A new checkpoint is written before an old one is dropped, so there must be room for three.
# - The promise about power cuts is as good as the disk's: some confirm a sync before it is done.
# - Two processes that write into the same directory remove each other's temporary files. One of
#   them then fails with a sentence, and no checkpoint is damaged.
#
# ## Exercises
#
# **Exercise 1, a planted bug.** This directory also keeps the last two. It worked in a test with
# the steps 1, 2 and 3. Here is a longer run. What is left, and why?


# %%
class ShortNames(CheckpointDirectory):
    """A directory of checkpoints with a bug."""

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then drop what is older than the last two."""
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
# Names are sorted as texts, letter by letter, and `step_10000` comes before `step_8000` because `1`
# comes before `8`. So from step 10,000 on, each new checkpoint counts as the oldest and is deleted
# the moment it has been written. The run ends with the checkpoints of the steps 8,000 and 9,000 and
# no error. Leading zeros make the order of texts the order of numbers:
#
# ```python
# class ShortNames(CheckpointDirectory):
#     """A directory of checkpoints whose names are in the order of their steps."""
#
#     def save(self, step: int, content: dict[str, Any]) -> Path:
#         """Write the checkpoint of a step, then drop what is older than the last two."""
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
# **Exercise 2.** Why does `write_checkpoint` put the temporary file beside the checkpoint and not
# into the directory for temporary files, where the system would clean it up?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A rename is one step only within one file system. The directory for temporary files is often on
# another one, and then `os.replace` fails with *Invalid cross-device link*. `shutil.move` would not
# fail: it copies, and a copy can be cut off in the middle, which is where we started.
#
# ```python
# with tempfile.TemporaryDirectory() as name:
#     write_checkpoint(Path(name) / "agent.pt", {"step": 1})
#     assert os.listdir(name) == ["agent.pt"]  # the temporary file was here, and has been renamed
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Forge a checkpoint: change one weight in the file of somebody else so that
# `read_checkpoint` accepts it. What would the owner have to do so that you cannot?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Change the weight, write the file again, and the checksum is right: it is made from the content
# alone, so whoever can change the content can change the sum.
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
# The owner needs a sum that depends on a secret: `hmac.new(key, content, "sha256")` for readers who
# share the key, or a signature for all others.
#
# </details>

# %% [markdown]
# **Exercise 4.** Replace SHA-256 by `zlib.crc32` and measure. Does it still find every flipped bit?
# Would you keep it?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# CRC-32 finds every single flipped bit and every burst of up to 32 bits, and misses other damage
# with a chance of one in four thousand million, so against accidents it does well. How fast each of
# them is depends on the processor: many have instructions for SHA-256, and then there is little to
# win. SHA-256 stays, for one reason more: it names the content, so two runs with the same sum have
# the same weights, and you can say which checkpoint a result came from.
#
# ```python
# import hashlib
# import zlib
#
# content = bytearray(32_000_000)
# for name, digest in (("CRC-32", zlib.crc32), ("SHA-256", hashlib.sha256)):
#     start = time.perf_counter()
#     digest(content)
#     print(f"{name}: {0.032 / (time.perf_counter() - start):.1f} GB a second")
# before = zlib.crc32(content)
# content[12_345] ^= 1
# assert zlib.crc32(content) != before
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** A run is killed after the rename of step 30 and before the rotation. What stands
# in the directory, what does `newest` return, and when is it tidy again?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Three sound checkpoints: 10, 20 and 30. `newest` returns 30. The next `save` writes 40 and keeps
# 30 and 40, so one save later all is tidy. Nothing in between needs repair, which is why the order
# is first write, then drop.
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
# Agents and runs do this for you: `agent.save("agent.pt")`, and in the shell
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
#   with the warning that this chapter shows; that of
#   [torch.load](https://docs.pytorch.org/docs/stable/generated/torch.load.html) says what
#   `weights_only` admits.
