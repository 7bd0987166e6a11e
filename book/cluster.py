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
# A sweep of forty runs that takes a night on two cores takes half an hour on forty. In this
# chapter you give [the sweep](sweep.ipynb) a second backend, [Ray](https://docs.ray.io): the same
# runs, done as tasks on one machine or on a hundred. The curves are the same, bit for bit, and if
# a worker dies, its run continues on another from the last checkpoint.
#
# | | |
# |---|---|
# | Builds on | [Sweeps](sweep.ipynb): the plan, `run_item` and the report are used as they are |
# | Same | the command, the run directories, the result |
# | Different | who starts the processes, and what happens when one dies |
# | Needs | `pip install 'rlbook[ray]'`, and a disk that all machines share |

# %% tags=["hide-input"]
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

# %% tags=["hide-input"]
import subprocess
import tempfile

from rlbook.cli import main
from rlbook.figures import load_result
from rlbook.sweep import sweep

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The same numbers
#
# Here is one small sweep, first without Ray. It is far too short to say anything about DQN: after 100
# updates a high score is luck. We only want to compare the backends.

# %%
line = "sweep dqn --total-steps 600 --learning-starts 200 --epsilon-decay-steps 400"
line += " --eval-every 200 --eval-episodes 5 --checkpoint-every 200 --seeds 2"
words = f"{line} --run-dir runs/local"
print(f"$ rlbook {words}")
with contextlib.chdir(folder):
    assert main(words.split()) == 0

# %% [markdown]
# And with Ray, which starts a cluster of all cores of this machine if it finds no other:

# %%
words = f"{line} --run-dir runs/ray --backend ray"
print(f"$ rlbook {words}")
command = [sys.executable, "-m", "rlbook.cli", *words.split()]
done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout)

# %% [markdown]
# Are the results the same? Yes: every number of every curve, and every byte of every run's
# metrics.

# %%
local, remote = (load_result(folder / f"runs/{name}/result.json") for name in ("local", "ray"))
assert local["runs"]["dqn"]["returns"] == remote["runs"]["dqn"]["returns"]
files = sorted((folder / "runs/local").glob("*/*/metrics.jsonl"))
for file in files:
    assert file.read_bytes() == Path(str(file).replace("runs/local", "runs/ray")).read_bytes()
assert len(files) == 2
print(f"{len(files)} runs, equal byte for byte")

# %% [markdown]
# This backend is short because it has no state to carry. An `Item` is text and numbers, so it can be
# sent anywhere; `run_item` needs nothing but the item; and its results are in the run directory, on a
# disk that all machines share. So a task is one call of `run_item`. If its worker dies, the same call
# on another worker finds the directory and continues from the checkpoint.
#
# ## Finding the cluster
#
# Ray is a large package, so it is an optional dependency and imported only when you ask for it.

# %%
#| export
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


# %% [markdown]
# `ray.init()` connects to the cluster that the environment variable `RAY_ADDRESS` names, or to one
# that `ray start` began on this machine; if there is neither, it starts one here. If nobody
# answers at the address, Ray keeps trying for minutes. So `knock` tries it first. If you set the
# address yourself and nobody answers, that is an error. If the address was left behind by a
# cluster that has ended, we start a new one.

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
# A task asks for one core. Its worker may have any working directory, so paths become absolute.
# The directory in which you started the sweep is searched for modules, as with the local backend,
# because an environment may be defined there. If a run raises an error, the traceback goes to
# `log.txt` beside the run.

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


# %% [markdown]
# There are two kinds of failure.
#
# - A worker **dies**, because its machine was taken away or ran out of memory. That says nothing about
#   the run, so Ray starts the task again, at most `RETRIES` times. Machines are taken away with SIGTERM,
#   so on SIGTERM a worker writes its checkpoint and exits, and Ray sees a worker that died.
# - A run **raises** an error, for example because its loss is not finite. It would raise the same error
#   again, so the sweep reports it. Ray's `max_retries` does not repeat tasks that raise.
#
# When memory runs out, Ray ends workers itself. It counts these separately, and by default it
# starts their tasks again without a limit. `import_ray` sets a limit for the clusters that we
# start; a cluster that is running already has its own.
#
# On Ctrl-C the tasks are cancelled. A run sees that as Ctrl-C: it writes a checkpoint and ends.
#
# A network disk may show a new file only after some seconds. So when a task is done, `why_it_ended` waits
# a little for the files of its run.

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
# ## Mistakes
#
# Without Ray the sweep says what to install, before anything runs. `None` in `sys.modules` makes the
# import fail as if the package were missing. An unknown backend is a mistake, too.

# %%
there = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "ray"}
sys.modules["ray"] = None  # type: ignore[assignment]
for backend in ("ray", "slurm"):
    try:
        sweep("dqn", {}, backend=backend)
    except ValueError as error:
        print(error)
del sys.modules["ray"]
sys.modules.update(there)

# %% [markdown]
# ## Honest edges
#
# - **A shared disk is required**, which most clusters have. Without one a run could not continue on
#   another machine. If the files of a finished run cannot be found, the sweep says so.
# - **The lock on a run directory**, which keeps two processes from doing the same run, belongs to
#   the operating system. Some network disks do not support it across machines. Then you rely on
#   Ray alone, which starts a task again only when it considers its worker dead.
# - **Equal bit for bit** holds between machines of one kind. Another processor may add numbers in
#   another order.
# - **Ray starts slowly**, and each worker imports torch. For runs of a few seconds the local backend is
#   faster.
# - **A run whose worker dies more than `RETRIES` times counts as failed**; the same command continues
#   from its checkpoint. `tests/test_sweep_ray.py` ends workers by SIGKILL and by SIGTERM, and checks
#   that their runs end with the same bytes.
#
# ## Exercises
#
# **Exercise 1.** With `retry_exceptions=True` Ray also repeats tasks that raise an error. How often would
# it start a run with a learning rate of $10^{30}$, and what would the sweep report?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A run whose loss is not finite stops with an error. Started again from its last checkpoint it takes
# the same steps, bit for bit, and stops at the same update. With five retries Ray would start it six
# times, and the sweep would then report what it could have reported after the first.
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
# **Exercise 2, a planted bug.** This version of `as_task` sends the items as they are, and tests on one
# machine pass. Where does a worker on another machine write its run, and why do the tests not notice?

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
# Into `runs/a` in the working directory of the *worker*. On one machine that may be the directory of
# the sweep, so both are the same. On another machine it is some other directory, and the sweep never
# sees the run.
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
# **Exercise 3.** The sweep hands all tasks to Ray at once, unless `--jobs` sets a limit. The local
# backend starts only as many runs as there are cores. Forty runs of one hour start on two cores, and
# after two hours a machine with eighteen more cores joins the cluster. When are all runs done? And when,
# if the sweep allowed only two at a time?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Ray queues the tasks and uses the cores that join later: all runs are done after four hours. With two
# at a time it takes twenty. The local backend needs its limit, since a process that is started runs at
# once: forty of them would share two cores and their memory.
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
# **Exercise 4.** A spot machine is cheap because it may be taken away, say once an hour and without a
# warning. A run takes 1,000 steps a second and writes a checkpoint every 50,000 steps. What part of its
# work is done twice? And what if SIGTERM comes a minute before?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Checkpoints are 50 s apart, and on average the end comes halfway between two. So 25 s of 3,600 are
# lost, 0.7 %, plus the start of a new worker. With a SIGTERM before, almost nothing is done twice: the
# run writes a checkpoint before it ends.
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
