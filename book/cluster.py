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
# # A cluster
#
# A sweep of forty runs takes a night on two cores, and minutes on forty. In this chapter you give
# [the sweep](sweep.ipynb) a second backend, [Ray](https://docs.ray.io): the same list of runs, done
# as tasks on one machine or on a hundred. The curves that come out are the same, bit for bit, and a
# task whose worker dies starts again on another from its last checkpoint.
#
# | | |
# |---|---|
# | Builds on | [sweeps](sweep.ipynb): the plan, `run_item` and the report are used as they are |
# | Same | the command, the run directories, the result |
# | Different | who starts the processes, and what happens when one dies |
# | Needs | `pip install 'rlbook[ray]'`, and a disk that all machines see |

# %%
#| export
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

# %%
import subprocess
import tempfile

from rlbook.figures import load_result

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Why a second backend is short
#
# A backend that had to carry state to the workers and back, and to note what is done, would be long.
# This one has nothing to carry. An `Item` is text and numbers, so it can be sent anywhere;
# `run_item` needs nothing but the item; and what it makes lies in the run directory, on a disk that
# all machines share. So a task is one line, and so is its repetition after a crash: `run_item` finds
# the directory and goes on from the checkpoint.
#
# ## Finding the cluster
#
# Ray is a large package, so it is an extra, and imported only when it is asked for. `ray.init()`
# connects to the cluster that the variable `RAY_ADDRESS` names, or to one that `ray start` began on
# this machine, and where there is neither it starts one of all cores here. An address at which
# nobody answers would keep Ray trying for minutes, so `knock` finds that out first: of an address that
# you gave, which is then a mistake, and of a cluster that has died and left its address behind.

# %%
#| export
RETRIES = 5  # times that a run is begun again because its worker died


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


# %%
#| export
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


# %% [markdown]
# ## A task
#
# A task asks for one core, and Ray then gives its process one thread; a run sets its own number of
# threads besides. The working directory of a worker may be any, so paths become absolute, and the
# directory of the sweep is searched for modules, as it is on your own machine: an environment may
# be defined there. What a run raises goes to `log.txt` beside it, whichever machine it was on.

# %%
#| export
def do_item(fields: dict[str, Any], directory: str) -> Outcome:
    """Do one run in a worker of Ray, or what an earlier worker left of it."""
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        return run_item(Item(**fields))
    except Interrupted as stopped:
        if stopped.signal_number == signal.SIGTERM:
            os._exit(1)  # the worker is taken away: Ray does the task again
        raise
    except Exception:
        with contextlib.suppress(OSError):  # perhaps it could not be written in the first place
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


# %% [markdown]
# Two kinds of failure need two answers. A worker that **dies**, because its machine was taken away
# or its memory ran out, says nothing about the run, and the task is done again, `RETRIES` times at
# most. (Ray counts the workers that it ends itself to save memory apart, and by default it does their
# tasks again without end. The clusters that `import_ray` starts do not; one that is there already has
# settings of its own.) So that SIGTERM, with which machines are taken away, counts as dying and not
# as Ctrl-C, the worker leaves at once after its checkpoint. A run that **raises**, because a loss is not finite,
# would raise again: it is the result, and the sweep reports it. Ray's `max_retries` makes that very
# difference.
#
# On Ctrl-C the tasks are cancelled, which reaches a run as Ctrl-C does: it writes a checkpoint and
# ends. And what a worker has written on another machine may take a moment to be seen here, since
# network disks remember for some seconds that a file was not there.

# %%
#| export
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


# %% [markdown]
# ## The same numbers
#
# The command of the shell, once with each backend, and a budget that lets you wait for it. The first
# is called inside this notebook, the second as your shell would; the runs are processes of their own
# in both.

# %%
from rlbook.cli import main

budget = "--total-steps 600 --learning-starts 200 --epsilon-decay-steps 400"
budget += " --eval-every 200 --eval-episodes 5"
line = f"sweep dqn {budget} --checkpoint-every 200 --seeds 2"
words = f"{line} --run-dir runs/local --out local.json"
print(f"$ rlbook {words}")
with contextlib.chdir(folder):
    assert main(words.split()) == 0

# %%
words = f"{line} --run-dir runs/ray --out ray.json --backend ray"
print(f"$ rlbook {words}")
command = [sys.executable, "-m", "rlbook.cli", *words.split()]
done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout)

# %% [markdown]
# Are they the same? Every number of every curve is, and every byte of every run's metrics.

# %%
local, remote = (load_result(folder / f"{name}.json") for name in ("local", "ray"))
assert local["runs"]["dqn"]["returns"] == remote["runs"]["dqn"]["returns"]
files = sorted((folder / "runs/local").glob("*/*/metrics.jsonl"))
for file in files:
    assert file.read_bytes() == Path(str(file).replace("runs/local", "runs/ray")).read_bytes()
assert len(files) == 2
print(f"{len(files)} runs, equal byte for byte")

# %% [markdown]
# ## Mistakes
#
# Without Ray the sweep says what to install, before anything runs. `None` in `sys.modules` makes an
# import fail as if the package were not there.

# %%
from rlbook.sweep import sweep

there = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "ray"}
sys.modules["ray"] = None  # type: ignore[assignment]
try:
    sweep("dqn", {}, backend="ray")
except ValueError as error:
    print(error)
del sys.modules["ray"]
sys.modules.update(there)

# %% [markdown]
# A backend that nobody has written is a mistake, too:

# %%
try:
    sweep("dqn", {}, backend="slurm")
except ValueError as error:
    print(error)

# %% [markdown]
# ## Honest edges
#
# - **A shared disk is assumed**, as most clusters have. Without one a run could not go on from its
#   checkpoint on another machine. A sweep that finds nothing where a worker finished says so.
# - **The lock that keeps two processes out of one run** is that of the operating system. Network
#   disks that do not support it across machines leave you with Ray's own promise, which starts a
#   task again only when it takes its worker for dead.
# - **Equal bit for bit** holds between machines of one kind. Another processor may add in another
#   order.
# - **Ray starts slowly**, and a worker imports torch anew. For runs of seconds the local backend is
#   faster.
# - **A run whose worker dies more than `RETRIES` times counts as failed**; the same command goes on
#   from its checkpoint. That a run whose worker was ended goes on, and ends with the same bytes, is
#   shown in `tests/test_sweep_ray.py`, by SIGKILL and by SIGTERM.
#
# ## Exercises
#
# **Exercise 1.** Ray can also repeat tasks that raise: `retry_exceptions=True`. How often would a
# run with a learning rate of $10^{30}$ be done then, and what would come out?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A run whose loss is not finite stops with an error. Begun again from its last checkpoint it does
# the same steps, bit for bit, and stops at the same update. With five retries the sweep would do
# that part six times, and then report what it knew after the first.
#
# ```python
# from rlbook.progress import RunFailed
# from rlbook.sweep import make_plan
#
# short = {"total_steps": 600, "learning_starts": 200, "eval_every": 200, "checkpoint_every": 200}
# (item,) = make_plan("dqn", {**short, "lr": 1e30}, {"too fast": {}}, [0], folder / "runs/fast")
# said = []
# for attempt in range(1 + RETRIES):
#     try:
#         run_item(item)
#     except RunFailed as error:
#         said.append(str(error))
# assert len(said) == 6 and len(set(said)) == 1
# print(said[0].split(".")[0])
# ```
#
# </details>

# %% [markdown]
# **Exercise 2, a planted bug.** Somebody sends the items as they are, since "the tests pass". Where
# do the runs of this task go, and why do tests on one machine not notice?

# %%
def to_task(item: Item) -> dict[str, Any]:
    """Return an item as plain values."""
    return dataclasses.asdict(item)


item = Item("dqn", "dqn", 0, "runs/a/seed_0", {})
print(to_task(item)["run_dir"])

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Into `runs/a` below the working directory of the *worker*. On one machine that may well be the
# directory of the sweep, so both mean the same. On another machine it is any directory, the runs end
# up there, and the sweep never sees them.
#
# ```python
# def to_task(item: Item) -> dict[str, Any]:
#     return {**dataclasses.asdict(item), "run_dir": str(Path(item.run_dir).absolute())}
#
#
# assert Path(to_task(item)["run_dir"]).is_absolute()
# assert to_task(item) == as_task(item)
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** All tasks are handed to Ray at once unless `--jobs` says otherwise; the local
# backend starts no more than there are cores. Forty runs of an hour begin on two cores, and after two
# hours a machine with eighteen more joins. When are they done, if the queue is Ray's? When, if the
# sweep had fixed two at a time?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Ray queues what does not fit and sees the cores that join later: after four hours. With two at a
# time it takes twenty. The local backend has no queue but its own, since a process that is started
# runs at once: forty of them would share two cores and their memory.
#
# ```python
# def hours(runs: int, cores: Callable[[int], int]) -> int:
#     hour = 0
#     while runs > 0:
#         runs -= cores(hour)
#         hour += 1
#     return hour
#
#
# assert hours(40, lambda hour: 2 if hour < 2 else 20) == 4
# assert hours(40, lambda hour: 2) == 20
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** A spot machine is cheap because it may be taken away, say about once an hour and
# without a warning. A run makes 1,000 steps a second and writes a checkpoint every 50,000 steps. What
# part of its work is done twice? And if SIGTERM comes a minute before?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Checkpoints are 50 s apart, and the end comes on average in the middle between two. So 25 s of
# 3,600 are lost: 0.7 %, and the start of a new worker on top. With a SIGTERM first, next to nothing
# is done twice: the run writes a checkpoint before it leaves.
#
# ```python
# lost = 50_000 / 1_000 / 2
# assert abs(lost / 3_600 - 0.007) < 1e-4
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# pip install 'rlbook[ray]'
# ray start --head                                  # on one machine
# ray start --address=THE_ADDRESS_IT_PRINTED        # on each of the others
# rlbook sweep dqn --config cartpole --seeds 20 --backend ray --run-dir /shared/runs/dqn
# ```
#
# ```python
# from rlbook.sweep import sweep
# result = sweep("dqn", {"total_steps": 20_000}, seeds=20, backend="ray", directory="/shared/runs/dqn")
# ```
#
# ## References
#
# - P. Moritz et al. (2018). Ray: a distributed framework for emerging AI applications. *OSDI*.
