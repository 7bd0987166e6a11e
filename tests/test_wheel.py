"""The installed package works where the repository and the tools of the book are not."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What the extras bring along: none of it may be needed.
FORBIDDEN = {
    "book": ["IPython", "ipykernel", "jupyterlab", "jupytext", "myst_nb", "nbclient", "sphinx"],
    "test": ["hypothesis", "mypy", "nbmake", "pytest"],
    "other": ["mujoco", "pygame", "stable_baselines3", "tensorboard"],
}
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

class Blocker(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {[name for names in FORBIDDEN.values() for name in names]!r}:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Blocker
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy, so that the repository stays as it is."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "rlbook", source / "rlbook", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("rlbook-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into an environment of its own that sees the packages of this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([*command, *offline], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and the .pth files in it are not read: the
    # repository, which they lead to, stays out of sight.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (site / "sitecustomize.py").write_text(BLOCKER)
    return folder / "bin"


@pytest.mark.skipif(os.name != "posix", reason="looks for programs where POSIX has them")
def test_the_installed_wheel_works_without_the_repository(tmp_path: Path) -> None:
    programs = install(build_wheel(tmp_path), tmp_path / "venv")
    empty = tmp_path / "empty"
    empty.mkdir()
    hidden = ("PYTHON", "VIRTUAL_ENV", "JUPYTER", "COV_", "PYTEST")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}

    def call(*words: str) -> str:
        done = subprocess.run(
            [str(programs / words[0]), *words[1:]],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout

    code = "import rlbook, json; from rlbook.tune import find_space as space; print(json.dumps("
    code += "[rlbook.__file__, list(rlbook.ALGORITHMS), list(space('dqn'))])); "
    code += "from rlbook.cli import main; main(['list'])"
    facts, *listed = call("python", "-c", code).splitlines()
    place, algorithms, space = json.loads(facts)
    assert Path(place).is_relative_to(tmp_path / "venv")
    assert "lr" in space
    assert [line.split()[0] for line in listed[::2]] == algorithms
    assert re.search(r"configs: .*cartpole", "\n".join(listed))
    short = ["--total-steps", "300", "--learning-starts", "200", "--eval-every", "150"]
    trained = call("rlbook", "train", "dqn", "--config", "cartpole", *short, "--run-dir", "run")
    assert "Done: step 300 with a mean return of" in trained
    evaluated = json.loads(call("rlbook", "evaluate", "run", "--episodes", "3", "--json"))
    assert len(evaluated["returns"]) == 3 and evaluated["mean"] > 0
    assert sorted(path.name for path in empty.iterdir()) == ["run"]
