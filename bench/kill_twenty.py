"""Kill runs with SIGKILL at twenty random moments, resume each time, and compare every bit.

    python bench/kill_twenty.py [--kills 20] [--steps 20000] [--seed 0]

Each process is a real `rlbook train` or `rlbook resume`. A run that ends before all kills are spent
is compared with the uninterrupted one, and the next run begins. The exit code is 1 if any differs.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlbook.checkpoint import CheckpointDirectory

SETTINGS = {
    "config": "cartpole",
    "num_envs": 3,  # does not divide the steps between checkpoints
    "train_frequency": 8,
    "checkpoint_every": 1000,
    "eval_every": 2500,
    "eval_episodes": 3,
    "log_every": 100,
}


def start(path: Path, steps: int) -> "subprocess.Popen[str]":
    """Start a run, or go on with it."""
    command = [sys.executable, "-m", "rlbook.cli"]
    if (path / "config.yaml").exists():
        command += ["resume", str(path)]
    else:
        settings = {**SETTINGS, "total_steps": steps, "run_dir": path}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        command += ["train", "dqn", *flags]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> None:
    """Wait for a process, which must not fail."""
    _, complaint = process.communicate()
    if process.returncode != 0:
        sys.exit(f"A run failed with exit code {process.returncode}: {complaint}")


def signs_of_life(path: Path) -> tuple[int, int]:
    """Return the lines of metrics and the checkpoints, which a process at work changes."""
    metrics = path / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return lines, len(list((path / "checkpoints").glob("*")))


def differences(one: Any, two: Any, path: str = "") -> list[str]:
    """List where two nested states are not the same, bit for bit."""
    if type(one) is not type(two):
        return [f"{path}: {type(one).__name__} and {type(two).__name__}"]
    if isinstance(one, dict):
        if list(one) != list(two):
            return [f"{path}: other keys"]
        return [line for key in one for line in differences(one[key], two[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return [f"{path}: {len(one)} and {len(two)} entries"]
        pairs = enumerate(zip(one, two, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}/{i}")]
    if isinstance(one, torch.Tensor):
        if one.dtype != two.dtype or one.shape != two.shape:
            return [f"{path}: other kinds of tensors"]
        bits = [part.contiguous().numpy().tobytes() for part in (one, two)]
        return [] if bits[0] == bits[1] else [f"{path}: other numbers"]
    return [] if one == two else [f"{path}: {one!r} and {two!r}"]


def compare(whole: Path, killed: Path) -> list[str]:
    """List all that is not the same in two runs: last checkpoint and metrics."""
    states = []
    for path in (whole, killed):
        newest = CheckpointDirectory(path / "checkpoints").newest()
        assert newest is not None
        newest[1]["config"].pop("run_dir")
        states.append(newest[1])
    found = differences(states[0], states[1])
    if (whole / "metrics.jsonl").read_bytes() != (killed / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl: other bytes")
    return found


def kill_at_random(path: Path, steps: int, seconds: float, dice: random.Random) -> bool:
    """Start a process, kill it at some moment; say whether it was still there to be killed."""
    process, before = start(path, steps), signs_of_life(path)
    while process.poll() is None and signs_of_life(path) == before:
        time.sleep(0.005)  # still importing: nothing to disturb
    time.sleep(dice.uniform(0, seconds / 6))
    if process.poll() is not None:
        finish(process)
        return False
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return True


def main() -> int:
    """Kill, resume, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None, help="of the moments")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"The moments are drawn with --seed {seed}.", flush=True)
    dice, kills, runs, bad = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        process = start(whole, options.steps)
        while process.poll() is None and signs_of_life(whole) == (0, 0):
            time.sleep(0.005)
        began = time.perf_counter()
        finish(process)
        seconds = time.perf_counter() - began
        print(f"A run of {options.steps:,} steps, left alone: {seconds:.1f} s.", flush=True)
        while kills < options.kills:
            runs += 1
            path = Path(folder) / f"killed {runs}"
            while kills < options.kills and kill_at_random(path, options.steps, seconds, dice):
                kills += 1
                lines, files = signs_of_life(path)
                half = len(list((path / "checkpoints").glob("*.tmp")))
                torn = ", one half written" if half else ""
                print(
                    f"kill {kills:2}: {lines:4} lines, {files - half} checkpoints{torn}", flush=True
                )
            finish(start(path, options.steps))
            found = compare(whole, path)
            bad += bool(found)
            verdict = "; ".join(found) or "weights, optimiser, buffer and metrics are identical"
            print(f"run {runs}: {verdict}", flush=True)
    print(f"{kills} kills in {runs} runs: {bad or 'none'} of the runs ended differently.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
