"""What all tests share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from rlbook.tangle import find_root

# For every process that the tests start, those of xdist among them. Tests run side by side, and
# threads that wait for each other in a product of small matrices only take a core from another.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{library}_NUM_THREADS"] = "1"
# The files that take longest, which begin first: else one process ends long after the other.
LONGEST = (
    *("browser", "sweep_ray", "export", "tune", "own", "run", "law", "sweep", "drqv2", "wheel"),
    *("drqn", "ppo", "recurrent_ppo", "trpo", "policy_gradient", "dqn", "sac", "exercises"),
    *("progress", "checkpoint", "book", "cli", "preprocess", "pixels", "speed", "r2d2", "parity"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors are faster with one thread, and tests run side by side."""
    import torch  # not above: the process that only hands out the tests does without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all processes, from the notebooks as they are, without a warning."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a folder of its own in a common one
        shared = shared.parent
    out = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (out / "index.html").is_file():
            flags = ["-W", "--keep-going", "-q", "-c", "book"]
            # Looking for garbage in the trees of all pages takes a seventh of the time.
            code = "import gc, sys; gc.set_threshold(100_000); import sphinx.cmd.build as build; "
            code += "sys.exit(build.main(sys.argv[1:]))"
            command = [sys.executable, "-c", code, *flags, ".", str(out)]
            root = find_root(Path(__file__).parent)
            built = subprocess.run(command, cwd=root, capture_output=True, text=True)
            if built.returncode != 0:
                shutil.rmtree(out, ignore_errors=True)
            assert built.returncode == 0, built.stderr
    return out
