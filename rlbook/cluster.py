"""Made from book/cluster.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "RETRIES",
    "as_task",
    "cancel",
    "connect",
    "do_item",
    "import_ray",
    "knock",
    "one_sentence",
    "run_on_ray",
    "still_there",
    "why_it_ended",
]

# %% book/cluster.py · A cluster
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlbook.progress import Interrupted, catch_signals
from rlbook.sweep import Item, Outcome, Report, read_outcome, run_item

# %% book/cluster.py · Finding the cluster
RETRIES = 5  # times that a run is started again because its worker died


def import_ray() -> Any:
    """Import Ray, or say how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports to its makers otherwise
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no warning about GPUs
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes its time
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # without end otherwise
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "The backend 'ray' needs Ray, which is not installed: `pip install 'rlbook[ray]'`."
        ) from error
    return ray


def knock(address: str, seconds: float = 10.0) -> None:
    """Raise unless somebody answers at `host:port` or `ray://host:port`."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not port.isdigit():  # a word that Ray understands, such as `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConnectionError(f"nobody answers at {address}") from error


def still_there() -> bool:
    """Say whether the cluster that `ray start` began on this machine still answers."""
    own = os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None
    folder = os.environ.get("RAY_TMPDIR") or own or "/tmp"  # as Ray has it
    try:
        knock(Path(folder, "ray", "ray_current_cluster").read_text().strip(), seconds=2.0)
    except OSError:  # no such file, or nobody at its address
        return False
    return True


def connect(ray: Any) -> None:
    """Find the cluster, or start one here."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        knock(address)
        own = None if address or still_there() else "local"
        ray.init(address=own, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        where = address or "the address that Ray found"
        raise ValueError(
            f"There is no Ray cluster at {where}: start one with `ray start --head`, or unset "
            "RAY_ADDRESS."
        ) from error


# %% book/cluster.py · A task
def do_item(fields: dict[str, Any], directory: str) -> Outcome:
    """Do one run in a worker of Ray, or what an earlier worker left of it."""
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        return run_item(Item(**fields))
    except Interrupted as stopped:
        if stopped.signal_number == signal.SIGTERM:
            os._exit(1)  # the machine is taken away: Ray does the task again
        raise
    except Exception:
        with contextlib.suppress(OSError):  # the disk itself may be the trouble
            Path(fields["run_dir"], "log.txt").write_text(traceback.format_exc())
        raise


def as_task(item: Item) -> dict[str, Any]:
    """Return an item as plain values that mean the same on any machine with the same disk."""
    return {**dataclasses.asdict(item), "run_dir": str(Path(item.run_dir).absolute())}


def one_sentence(error: Exception) -> str:
    """Return the last line of what a task raised, without the name of its class."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ") if lines else type(cause).__name__


def run_on_ray(
    plan: Sequence[Item], jobs: int | None = None, say: Callable[[str], None] = print
) -> list[Item]:
    """Do all runs that are not finished as Ray tasks; return those that failed."""
    ray = import_ray()
    connect(ray)
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(do_item)
    report, running, here = Report(plan, say), dict[Any, Item](), os.getcwd()
    with catch_signals() as caught:
        try:
            while (report.waiting or running) and not caught:
                while report.waiting and (jobs is None or len(running) < jobs):
                    item = report.waiting.pop(0)
                    running[task.remote(as_task(item), here)] = item
                for done in ray.wait(list(running), timeout=0.2)[0]:
                    item = running.pop(done)
                    report.end(item, why_it_ended(ray, done, item))
                report.show()
        finally:
            cancel(ray, list(running))
    report.close(caught)
    return report.failed


def cancel(ray: Any, tasks: list[Any]) -> None:
    """Stop tasks as Ctrl-C does, so that their runs write checkpoints, and wait for that."""
    for task in tasks:
        ray.cancel(task)
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=60)


def why_it_ended(ray: Any, done: Any, item: Item, patience: float = 20.0) -> str:
    """Say why a task failed, or that what it left cannot be seen here, after some seconds."""
    try:
        ray.get(done)
        end = time.monotonic() + patience
        while read_outcome(item.run_dir) is None:
            if time.monotonic() > end:
                return (
                    f"a worker finished {item.run_dir}, but it is not here: give --run-dir a "
                    "directory on a disk that all machines share"
                )
            time.sleep(0.2)
    except (ray.exceptions.RayError, ValueError) as error:
        return one_sentence(error)
    return ""
