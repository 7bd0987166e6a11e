"""What all tests share."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlbook.tangle import find_root


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors are faster with one thread, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once, from the notebooks as they are; warnings are errors."""
    out = tmp_path_factory.mktemp("site") / "html"
    root = find_root(Path(__file__).parent)
    flags = ["-W", "--keep-going", "-q", "-c", "book"]
    command = [sys.executable, "-m", "sphinx", *flags, ".", str(out)]
    built = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out
