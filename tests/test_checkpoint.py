"""What the chapter on checkpoints promises: whole or not there, damage found, no code run."""

import errno
import hashlib
import io
import os
import pickle
import resource
import subprocess
import sys
import textwrap
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st

import rlbook.checkpoint
from rlbook.checkpoint import (
    TRAILER,
    TRAILER_SIZE,
    CheckpointDirectory,
    CheckpointError,
    HashingWriter,
    UnreadableError,
    check_plain,
    plain_space,
    read_checkpoint,
    space_from_plain,
    verify_checksum,
    write_checkpoint,
)

unhurried = settings(deadline=None, max_examples=50)  # a busy machine is no failure
strange_pickles = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def content(step: int) -> dict[str, Any]:
    """Return something like a checkpoint."""
    network = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(network.parameters())
    network(torch.ones(3)).sum().backward()
    adam.step()
    return {
        "step": step,
        "network": network.state_dict(),
        "optimizer": adam.state_dict(),
        "generator": np.random.default_rng(step).bit_generator.state,
    }


def sealed(data: bytes) -> bytes:
    """Give any bytes a correct checksum, as anybody can."""
    return data + TRAILER + hashlib.sha256(data).hexdigest().encode()


def refusal(path: Path) -> str:
    """Read a file that must be refused, and return what is said about it."""
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """Yield a sound checkpoint, and see to it that it is the same afterwards, with nothing new."""
    path = tmp_path / "agent.pt"
    write_checkpoint(path, content(1))
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["agent.pt"]
    assert read_checkpoint(path)["step"] == 1


# What is written is read


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    path, written = tmp_path / "agent.pt", content(2**40)
    write_checkpoint(path, written)
    read = read_checkpoint(path)
    assert read.keys() == written.keys()
    assert read["generator"] == written["generator"]  # 128-bit integers included
    for name, tensor in written["network"].items():
        assert torch.equal(read["network"][name], tensor)
    moments = written["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(read["optimizer"]["state"][0]["exp_avg"], moments)
    assert read["optimizer"]["param_groups"] == written["optimizer"]["param_groups"]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=10,
)


@unhurried
@given(st.dictionaries(st.text(), PLAIN))
def test_what_is_plain_can_be_read_back(value: dict[str, Any]) -> None:
    check_plain(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == value


def test_a_space_of_ones_own_class_comes_back_as_the_kind_that_it_is() -> None:
    class Angle(Box):
        """A Box with another name."""

    plain = plain_space(Angle(-1.0, 1.0, (2,)))
    check_plain(plain)
    assert space_from_plain(plain) == Box(-1.0, 1.0, (2,))
    pair = MultiDiscrete([2, 3], start=[1, 5], dtype=np.int32)
    assert space_from_plain(plain_space(pair)) == pair


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1), "float64"),  # a float for isinstance, not for weights_only
        (np.zeros(2), "ndarray"),
        (deque([1]), "deque"),
        (defaultdict(int), "defaultdict"),
        (Counter(), "Counter"),
        ({1, 2}, "set"),
        (Path("a"), "Posix"),
        (lambda: 0, "function"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(old: Path, value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^checkpoint\['a'\]\[1\]\['b'\] is a .*{kind}"):
        write_checkpoint(old, {"a": [0, {"b": value}]})


def test_a_key_must_be_plain_too(old: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^a key of checkpoint is a int64"):
        write_checkpoint(old, {np.int64(3): 1})  # type: ignore[dict-item]


def test_torch_writes_from_front_to_back(tmp_path: Path) -> None:
    """A hash of the bytes in the order of writing is the hash of the file only then."""

    class OneWay(io.FileIO):
        def seek(self, *_: Any) -> int:
            raise AssertionError("a seek")

    with HashingWriter(OneWay(tmp_path / "a", "w")) as file:
        torch.save(content(1), file)
    data = (tmp_path / "a").read_bytes()
    assert hashlib.sha256(data).hexdigest() == file.hash.hexdigest()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with /proc")
def test_writing_needs_no_second_copy_in_memory(tmp_path: Path) -> None:
    script = """
        import sys, pathlib, torch
        from rlbook.checkpoint import write_checkpoint

        def peak():
            return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

        rows = torch.ones(200 * 2**20, dtype=torch.uint8)
        before = peak()
        write_checkpoint(pathlib.Path(sys.argv[1]), {"rows": rows})
        print((peak() - before) / 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "large.pt")]
    grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(grown) < 20  # MB, of 200


# Damage is found


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    write_checkpoint(path, content(1))
    data = path.read_bytes()
    last = 8 * len(data) - 1
    for bit in [0, last, *np.random.default_rng(0).integers(last, size=300).tolist()]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert "is damaged or not an rlbook checkpoint" in refusal(path)


def test_every_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    write_checkpoint(path, content(1))
    data = path.read_bytes()
    ends = {0, 1, TRAILER_SIZE - 1, TRAILER_SIZE, TRAILER_SIZE + 1, len(data) - TRAILER_SIZE}
    for end in [*ends, len(data) - 1, *range(0, len(data), len(data) // 50)]:
        path.write_bytes(data[:end])
        assert "is damaged or not an rlbook checkpoint" in refusal(path)
    path.write_bytes(data + b"\n")
    assert "is damaged" in refusal(path)


def test_a_plain_torch_file_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save(content(1), tmp_path / "agent.pt")
    assert "not an rlbook checkpoint" in refusal(tmp_path / "agent.pt")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert refusal(tmp_path / "agent.pt") == f"There is no checkpoint {tmp_path / 'agent.pt'}."
    assert refusal(tmp_path) == f"There is no checkpoint {tmp_path}."


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_sound_file_that_cannot_be_read_now_is_not_passed_over(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (10, 20):
        directory.save(step, {"step": step})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(UnreadableError, match=r"step_0*20\.pt"):
            directory.newest()
    newest = directory.newest()
    assert newest is not None and newest[1] == {"step": 20}


def test_torch_reports_missing_memory_in_the_words_that_reading_looks_for() -> None:
    with pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_a_file_that_cannot_be_opened_is_said(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("builtins.open", forbidden)
    message = refusal(old)
    monkeypatch.undo()
    assert message == f"Could not read {old}: Permission denied."


# No code is run


class Hostile:
    """Restored by making a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@strange_pickles
@pytest.mark.parametrize("seal", [False, True], ids=["no checksum", "right checksum"])
@pytest.mark.parametrize("form", ["torch", "torch before 1.6", "pickle"])
def test_a_hostile_file_runs_nothing(tmp_path: Path, form: str, seal: bool) -> None:
    marker, path, file = tmp_path / "marker", tmp_path / "agent.pt", io.BytesIO()
    gift = {"algo": "dqn", "config": {}, "agent": Hostile(marker)}
    if form == "pickle":
        pickle.dump(gift, file)
    else:
        torch.save(gift, file, _use_new_zipfile_serialization=form == "torch")
    path.write_bytes(sealed(file.getvalue()) if seal else file.getvalue())
    message = refusal(path)
    assert ("was not opened" if seal else "is damaged or not an rlbook checkpoint") in message
    assert not marker.exists()
    file.seek(0)
    if form == "pickle":  # it would have worked on somebody who trusts it
        pickle.load(file)
    else:
        torch.load(file, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("value", [[1, 2], torch.ones(3), "text", None])
def test_a_sound_file_of_something_else_is_no_checkpoint(tmp_path: Path, value: Any) -> None:
    file = io.BytesIO()
    torch.save(value, file)
    (tmp_path / "agent.pt").write_bytes(sealed(file.getvalue()))
    assert refusal(tmp_path / "agent.pt") == f"{tmp_path / 'agent.pt'} is not an rlbook checkpoint."


@strange_pickles
@unhurried
@given(st.binary(max_size=200))
def test_nonsense_with_a_right_checksum_gets_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "nonsense.pt"
    path.write_bytes(sealed(data))
    verify_checksum(path)
    refusal(path)


def test_a_forged_archive_is_read_or_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    write_checkpoint(path, content(1))
    data, rng = path.read_bytes()[:-TRAILER_SIZE], np.random.default_rng(0)
    for _ in range(300):
        forged = bytearray(data)
        for place in rng.integers(len(data), size=3):
            forged[place] = rng.integers(256)
        path.write_bytes(sealed(bytes(forged)))
        try:
            assert isinstance(read_checkpoint(path), dict)
        except CheckpointError as error:
            assert "\n" not in str(error)


# All or nothing


@pytest.mark.parametrize("once", [False, True], ids=["from then on", "once"])
def test_a_full_disk_leaves_the_old_checkpoint(
    old: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    class FullDisk(HashingWriter):
        calls = 0
        full_at = 10**9

        def write(self, data: Any, /) -> int:
            FullDisk.calls += 1
            if FullDisk.calls == self.full_at or (FullDisk.calls > self.full_at and not once):
                raise OSError(*FULL.args)
            return super().write(data)

    monkeypatch.setattr(rlbook.checkpoint, "HashingWriter", FullDisk)
    write_checkpoint(old.with_name("other.pt"), content(1))
    old.with_name("other.pt").unlink()
    pieces = FullDisk.calls
    assert pieces > 20
    for FullDisk.full_at in range(1, pieces + 1):
        FullDisk.calls = 0
        with pytest.raises(CheckpointError, match=r"agent\.pt: No space left on device\. Older"):
            write_checkpoint(old, content(2))
        assert len(list(old.parent.iterdir())) == 1


def test_a_file_beyond_the_limit_of_the_system_leaves_the_old_checkpoint(old: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"step": 2, "rows": torch.ones(1_000_000)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
        with pytest.raises(CheckpointError, match=r"agent\.pt: File too large\. Older"):
            write_checkpoint(old, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "target",
    ["os.fsync", "os.replace", "rlbook.checkpoint.torch.save", "rlbook.checkpoint.HashingWriter"],
)
@pytest.mark.parametrize("error", [FULL, RuntimeError("the archive\nis full"), PermissionError(13)])
def test_no_failure_touches_the_old_checkpoint(
    old: Path, monkeypatch: pytest.MonkeyPatch, target: str, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        with pytest.raises(CheckpointError, match=r"^Could not write [^\n]*\.$"):
            write_checkpoint(old, content(2))


@pytest.mark.parametrize("method", ["flush", "close"])
def test_a_late_failure_touches_nothing(
    old: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    class Late(HashingWriter):
        pass

    def fail(self: HashingWriter) -> None:
        getattr(super(Late, self), method)()
        raise OSError(*FULL.args)

    setattr(Late, method, fail)
    monkeypatch.setattr(rlbook.checkpoint, "HashingWriter", Late)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(old, content(2))


def test_ctrl_c_while_writing_touches_nothing(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(old, content(2))


def test_the_reason_is_the_file_and_not_what_was_being_handled(old: Path) -> None:
    try:
        raise OSError(errno.EIO, "another story")
    except OSError:
        with pytest.raises(CheckpointError, match="No such file or directory"):
            write_checkpoint(old.parent / "gone" / "agent.pt", content(2))


def test_a_place_that_cannot_be_written_gets_a_sentence(old: Path) -> None:
    for place, why in (
        (old.parent / "gone" / "agent.pt", "No such file or directory"),
        (old / "agent.pt", "Not a directory"),
        (old.parent, "Is a directory"),
    ):
        with pytest.raises(CheckpointError, match=rf"Could not write {place}: {why}\."):
            write_checkpoint(place, content(2))
        for leftover in old.parent.parent.glob(f"{old.parent.name}.*.tmp"):
            raise AssertionError(leftover)


def test_a_system_that_cannot_sync_directories_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.open", cannot)
    write_checkpoint(tmp_path / "agent.pt", content(1))
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "agent.pt")["step"] == 1


def test_a_kill_at_any_moment_leaves_a_sound_checkpoint(tmp_path: Path) -> None:
    script = """
        import os, random, signal, sys, time, warnings
        from pathlib import Path
        import torch
        from rlbook.checkpoint import CheckpointDirectory

        warnings.simplefilter("error")  # a damaged checkpoint would be one
        torch.set_num_threads(1)
        directory = CheckpointDirectory(Path(sys.argv[1]))
        directory.save(1, {"step": 1, "rows": torch.ones(300_000)})
        random.seed(0)

        def writing(child):
            return any(directory.directory.glob(f"*.{child}.tmp"))

        leftovers, step = 0, 1
        for _ in range(25):
            if (child := os.fork()) == 0:
                while True:
                    step += 1
                    directory.save(step, {"step": step, "rows": torch.ones(300_000)})
            goal = step + random.randrange(3)  # so many saves may be finished first
            while int(directory.paths()[-1].stem[5:]) < goal or not writing(child):
                time.sleep(0.0005)
            time.sleep(0.01 * random.random())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            leftovers += writing(child)
            path, content = directory.newest()
            assert content["step"] >= step and path.name == f"step_{content['step']:012d}.pt"
            assert len(content["rows"]) == 300_000
            step = content["step"]
        directory.save(step + 1, {"step": step + 1})
        assert len(list(directory.directory.iterdir())) == 2
        print(leftovers, step)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    leftovers, steps = map(int, run.stdout.split())
    assert leftovers > 0 and steps > 1  # some were killed while they wrote, and some wrote


# The directory


def steps_of(directory: CheckpointDirectory) -> list[int]:
    """Return the steps of the checkpoints that are there."""
    return [int(path.stem.removeprefix("step_")) for path in directory.paths()]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_stay(tmp_path: Path, keep: int) -> None:
    directory = CheckpointDirectory(tmp_path / "a" / "checkpoints", keep)
    steps = [1, 9, 10, 99, 100, 100, 1_000_000]  # one of them is written twice
    for i, step in enumerate(steps):
        path = directory.save(step, {"step": i})
        assert steps_of(directory) == sorted(set(steps[: i + 1]))[-keep:]
        newest = directory.newest()
        assert newest is not None and newest[0] == path and newest[1]["step"] == i


def test_an_empty_directory_has_no_newest(tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path).newest() is None
    assert CheckpointDirectory(tmp_path / "gone").newest() is None
    assert CheckpointDirectory(tmp_path / "gone").last_step() == 0


def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.save(10, {"step": 10})
    damaged = directory.save(20, {"step": 20})
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.warns(
        UserWarning, match=r"step_0*20\.pt is damaged .* Going on with the one before"
    ):
        newest = directory.newest()
    assert newest is not None and newest[1]["step"] == 10
    assert steps_of(directory) == [10, 20]  # reading removes nothing


def test_a_damaged_newer_one_does_not_crowd_out_sound_ones(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    directory.save(10, {"step": 10})
    directory.save(20, {"step": 20}).write_bytes(b"damaged")
    for step in (12, 14):  # the run went on from 10
        directory.save(step, {"step": step})
    assert steps_of(directory) == [12, 14]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = directory.newest()
    assert newest is not None and newest[1]["step"] == 14


def test_all_damaged_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (10, 20):
        directory.save(step, {"step": step})
    for path in directory.paths():
        path.write_bytes(path.read_bytes()[1:])
    with (
        pytest.warns(UserWarning, match="Going on with the one before") as caught,
        pytest.raises(CheckpointError, match=r"step_0*10\.pt is damaged .* start a new run\.$"),
    ):
        directory.newest()
    assert len(caught) == 1  # the oldest has none before it
    assert steps_of(directory) == [10, 20]


def test_only_leftovers_and_old_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in ("notes.txt", "best.pt", "step_000000000001.pt.77.tmp"):
        (tmp_path / name).touch()
    directory = CheckpointDirectory(tmp_path, keep=1)
    for step in (1, 2):
        directory.save(step, {"step": step})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["best.pt", "notes.txt", "step_000000000002.pt"]


def test_a_failed_save_drops_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        directory.save(step, {"step": step})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(FULL))
        with pytest.raises(CheckpointError, match="No space left on device"):
            directory.save(3, {"step": 3})
    assert steps_of(directory) == [1, 2]
    newest = directory.newest()
    assert newest is not None and newest[1]["step"] == 2


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    directory.save(1, {"step": 1}).unlink()
    (tmp_path / "checkpoints").rmdir()
    directory.save(2, {"step": 2})
    assert steps_of(directory) == [2]


def test_a_directory_that_cannot_be_made_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"^Could not write [^\n]*\.$"):
            CheckpointDirectory(place).save(1, {"step": 1})
