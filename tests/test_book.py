"""The promises that hold the book together: one source, one order, no drift."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupytext.config import load_jupytext_configuration_file

from rlbook.tangle import (
    find_root,
    library_files,
    main,
    misfits,
    module_source,
    paired_notebook,
    read_notebook,
    read_toc,
    run_chapter,
    tangle,
    write_notebook,
)

ROOT = find_root(Path(__file__).parent)
CHAPTERS = read_toc(ROOT)
HEADER = (ROOT / "book" / "tangle.py").read_text(encoding="utf-8").split("# %%")[0]


def write_book(root: Path, **chapters: str) -> Path:
    """Write a tiny book; each text becomes a chapter with the header of a real one."""
    for folder in ("book", "rlbook"):
        (root / folder).mkdir()
    (root / "rlbook" / "__init__.py").touch()
    names = list(chapters)
    files = "".join(f"  - file: book/{name}\n" for name in names[1:])
    toc = f"format: jb-book\nroot: book/{names[0]}\n" + (f"chapters:\n{files}" if files else "")
    (root / "_toc.yml").write_text(toc)
    for name, text in chapters.items():
        (root / "book" / f"{name}.py").write_text(HEADER + text, encoding="utf-8")
    return root


@functools.cache
def committed(name: str) -> nbformat.NotebookNode:
    """Read the notebook of a chapter once for all tests, which leave it as it is."""
    return nbformat.read(ROOT / "book" / f"{name}.ipynb", as_version=4)


def exported(*cells: str) -> str:
    """Write a chapter whose exported cells all stand under the heading `Part`."""
    return "# %% [markdown]\n# ## Part\n\n" + "".join(
        f"# %%\n#| export\n{cell}\n\n" for cell in cells
    )


# The real book


def test_library_is_what_the_chapters_export(capsys: pytest.CaptureFixture[str]) -> None:
    agree = tangle(ROOT, check=True)
    assert agree, capsys.readouterr().out


def test_toc_names_each_chapter_once_and_each_chapter_is_in_it() -> None:
    assert len(CHAPTERS) == len(set(CHAPTERS))
    files = {path.stem for path in (ROOT / "book").glob("*.py")} - {"conf"}
    notebooks = {path.stem for path in (ROOT / "book").glob("*.ipynb")}
    assert set(CHAPTERS) == files == notebooks


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebook_has_the_cells_of_its_chapter(name: str) -> None:
    path = ROOT / "book" / f"{name}.py"
    chapter = [(cell.cell_type, cell.source) for cell in read_notebook(path).cells]
    stored = committed(name)
    nbformat.validate(stored)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == chapter, (
        f"run `python -m rlbook.tangle run {name}`"
    )


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebook_was_run_in_order_and_left_no_debris(name: str) -> None:
    stored = committed(name)
    code = [cell for cell in stored.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    shown = "".join(output.get("text", "") for output in outputs)
    assert str(ROOT) not in shown and "/tmp/" not in shown, "a path of one machine is shown"


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebook_renders_on_a_code_host(name: str) -> None:
    """Small, without widgets or scripts, and with nothing that only a terminal understands."""
    path = ROOT / "book" / f"{name}.ipynb"
    assert path.stat().st_size < 1_500_000
    stored = committed(name)
    assert "widgets" not in stored.metadata
    outputs = [output for cell in stored.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"image/png", "text/html", "text/markdown", "text/plain"}
    shown = [str(output.get("text", "")) for output in outputs]
    for output in outputs:
        shown += [text for kind, text in output.get("data", {}).items() if kind != "image/png"]
    for text in shown:
        assert "<script" not in text and "<iframe" not in text
        assert "\r" not in text and "\x1b" not in text, "left by a progress bar or by colours"
        if name != "progress":  # which draws one, at a moment that it chooses
            assert not re.search(r"\d+%\||it/s\]|[█▏▎▍▌▋▊▉]", text), "left by a progress bar"
        assert not re.search(r"^\S*Warning: ", text, flags=re.MULTILINE), text
        machine = r"(?<![\w./])/(?:home|root|tmp|work|workspace|Users|var|opt|usr|mnt)/|[A-Z]:\\\\"
        assert not re.search(machine, text), "a path of one machine is shown"


@pytest.mark.parametrize("name", CHAPTERS)
def test_links_between_chapters_lead_to_notebooks(name: str) -> None:
    """A link to a notebook works in JupyterLab, on a code host and on the site alike."""
    for cell in committed(name).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            for file in re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", prose):
                assert (ROOT / "book" / file).is_file(), file
                assert not file.endswith(".py"), f"link to the notebook in place of {file}"


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_opens_with_words_and_at_most_six_facts(name: str) -> None:
    """First the promise, then code; the facts are one short table without a header."""
    cells = read_notebook(ROOT / "book" / f"{name}.py").cells
    assert cells[0].cell_type == "markdown"
    facts_table = r"^\| \| \|\n\|---\|---\|\n((?:\|.*\n?)+)"
    for cell in cells:
        for facts in re.findall(facts_table, cell.source, re.MULTILINE):
            assert len(facts.splitlines()) <= 6, facts


@pytest.mark.parametrize("name", CHAPTERS)
def test_saving_an_untouched_notebook_leaves_its_chapter_as_it_is(name: str) -> None:
    """Otherwise JupyterLab refuses to open a notebook that is newer than its chapter."""
    path = ROOT / "book" / f"{name}.py"
    config = load_jupytext_configuration_file(str(ROOT / "pyproject.toml"))
    notebook = jupytext.read(path.with_suffix(".ipynb"))
    text = jupytext.writes(notebook, fmt="py:percent", config=config)
    assert text.split("# %%", 1)[1] == path.read_text(encoding="utf-8").split("# %%", 1)[1]


@pytest.mark.parametrize("name", CHAPTERS)
def test_header_of_a_chapter_holds_no_version(name: str) -> None:
    text = (ROOT / "book" / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith(HEADER.rstrip()), "the header differs from that of the other chapters"


def test_modules_import_only_their_own_dependencies() -> None:
    """Without the extra `book` the whole library can still be imported."""
    blocked = ["jupytext", "nbformat", "nbclient", "jupyter_client", "IPython", "sphinx", "pygame"]
    names = (ROOT / "rlbook" / "chapters.txt").read_text().split()
    # A finder, since SciPy takes even `sys.modules["sphinx"] = None` for a Sphinx that is there.
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
""" + "\n".join(f"import rlbook.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True)


# What a module looks like


def test_provenance_names_each_heading_once(tmp_path: Path) -> None:
    text = (
        exported("import os", "A = 1")
        + '# %%\nprint("not exported")\n\n'
        + exported("B = 2").replace("## Part", "## Other\n#\n# ```\n# # not a heading\n# ```")
    )
    root = write_book(tmp_path, tiny=text)
    module = module_source(root / "book" / "tiny.py")
    assert module is not None
    comments = [line for line in module.splitlines() if line.startswith("# %%")]
    assert comments == ["# %% book/tiny.py · Part", "# %% book/tiny.py · Other"]
    assert "not exported" not in module
    assert module.startswith('"""Made from book/tiny.py')
    assert module.endswith("B = 2\n") and not module.endswith("\n\n")


def test_all_holds_public_names_that_the_module_defines(tmp_path: Path) -> None:
    cell = "from math import pi\nRATE: float = pi\n_hidden, shown = 1, 2\nos.environ['x'] = 'y'"
    functions = "def f() -> None:\n    inner = 1\n\n\nclass Ring:\n    size = 3"
    root = write_book(tmp_path, tiny=exported("import os\n" + cell, functions))
    module = module_source(root / "book" / "tiny.py")
    assert module is not None
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert names == ["RATE", "Ring", "f", "shown"]


def test_modules_have_the_spacing_of_a_formatter(tmp_path: Path) -> None:
    cells = ["import os\nimport sys", "A = os", "B = sys", "def f() -> None: ...", "C = 1"]
    many = [f"{'long_name_' * 4}{i} = {i}" for i in range(5)]
    root = write_book(tmp_path, tiny=exported(*cells, *many), small=exported(cells[0], cells[3]))
    assert tangle(root)
    config = ["--config", str(ROOT / "pyproject.toml")]
    modules = [str(root / "rlbook" / f"{name}.py") for name in ("tiny", "small")]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "format", "--diff", *config, *modules], check=True)
    subprocess.run([*ruff, "check", "--ignore", "F401,E701", *config, *modules], check=True)


def test_comments_are_never_taken_for_commands(tmp_path: Path) -> None:
    root = write_book(tmp_path, tiny=exported("# copy the weights\n# ls\n# %time\nA = 1"))
    assert "# copy the weights\n# ls\n# %time\nA = 1" in (
        module_source(root / "book" / "tiny.py") or ""
    )


def test_chapter_without_exports_makes_no_module(tmp_path: Path) -> None:
    root = write_book(tmp_path, index="# %% [markdown]\n# # Hello\n", tiny=exported("A = 1"))
    assert tangle(root)
    assert not (root / "rlbook" / "index.py").exists()
    assert (root / "rlbook" / "chapters.txt").read_text() == "tiny\n"


# What is refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%timeit f()", "magic '%timeit f()'"),
        ("!ls", "magic '!ls'"),
        ("len?", "magic 'len?'"),
        ("x = = 3", "invalid syntax in 'x = = 3'"),
        ("return 3", "'return' outside function"),
        ("x = (1,", "was never closed"),
        ("from .replay import ReplayBuffer", "relative import"),
        ("from __future__ import annotations", "cannot be exported"),
        ("A = 2", "A is defined by an earlier cell too"),
    ],
)
def test_refusals_name_chapter_heading_and_line(tmp_path: Path, line: str, message: str) -> None:
    root = write_book(tmp_path, tiny=exported("A = 1", line))
    path = root / "book" / "tiny.py"
    number = path.read_text(encoding="utf-8").splitlines().index(line) + 1
    with pytest.raises(ValueError) as caught:
        module_source(path)
    assert f"book/tiny.py, under 'Part', line {number}: " in str(caught.value)
    assert message in str(caught.value)


def test_one_bad_chapter_does_not_hold_up_the_others(tmp_path: Path) -> None:
    root = write_book(tmp_path, bad=exported("x = = 1"), good=exported("A = 1"))
    with pytest.raises(ValueError, match=r"book/bad\.py"):
        tangle(root)
    assert (root / "rlbook" / "good.py").is_file()
    assert not (root / "rlbook" / "bad.py").exists()


# Drift


def test_check_shows_a_diff_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_book(tmp_path, tiny=exported("A = 1"))
    assert not tangle(root, check=True)
    assert not (root / "rlbook" / "tiny.py").exists()
    assert tangle(root) and tangle(root, check=True)
    (root / "rlbook" / "tiny.py").write_text("A = 2\n")
    capsys.readouterr()
    assert not tangle(root, check=True)
    shown = capsys.readouterr().out
    assert "-A = 2\n" in shown and "+A = 1\n" in shown
    assert (root / "rlbook" / "tiny.py").read_text() == "A = 2\n"


def test_misfits_are_told_both_ways(tmp_path: Path) -> None:
    root = write_book(tmp_path, index="# %%\nx = 1\n", tiny=exported("A = 1"))
    assert tangle(root)
    (root / "book" / "tiny.py").rename(root / "book" / "other.py")
    (root / "rlbook" / "index.py").touch()
    (root / "book" / "conf.py").touch()
    assert misfits(root, library_files(root)[0]) == [
        "book/tiny.py is in _toc.yml but does not exist.",
        "book/other.py is not in _toc.yml.",
        "rlbook/index.py is exported by no chapter: delete it.",
        "rlbook/tiny.py is exported by no chapter: delete it.",
    ]
    assert not tangle(root, check=True)


def test_toc_with_parts_and_sections_keeps_its_order(tmp_path: Path) -> None:
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/a\nparts:\n"
        "  - caption: One\n    chapters:\n"
        "      - file: book/c\n        sections:\n          - file: book/b\n"
        "  - caption: Two\n    chapters:\n      - file: book/d\n"
    )
    assert read_toc(tmp_path) == ["a", "c", "b", "d"]


# The command


def test_outside_a_checkout_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    error = capsys.readouterr().err
    assert "not a checkout of the book" in error and error.count("\n") == 1


def test_without_jupytext_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_book(tmp_path, tiny=exported("A = 1"))
    monkeypatch.setitem(sys.modules, "jupytext", None)
    with pytest.raises(ValueError, match=r"rlbook\[book\]"):
        module_source(root / "book" / "tiny.py")


def test_command_checks_exports_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_book(tmp_path, index="# %%\nx = 1\n", tiny=exported("A = 1"))
    monkeypatch.chdir(root / "book")
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    capsys.readouterr()
    assert main(["list"]) == 0
    assert capsys.readouterr().out.split() == ["book/index.ipynb", "book/tiny.ipynb"]
    assert main(["run", "tyni"]) == 2
    assert "There is no chapter 'tyni'" in capsys.readouterr().err
    assert main(["export", "tiny"]) == 2
    assert "`export` writes all modules: leave out the names." in capsys.readouterr().err
    assert main(["run", "tiny", "--check"]) == 2
    assert "--check belongs to `export`, not to 'run'." in capsys.readouterr().err

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlbook.tangle.run_chapters", stop)
    assert main(["run", "tiny"]) == 130  # 128 and the number of SIGINT
    assert capsys.readouterr().err == "Stopped.\n"


# Running and pairing


def test_running_twice_writes_the_same_bytes_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = (
        "# %%\nimport os, sys\nprint(sys.executable, os.environ['MPLBACKEND'])\n\n"
        "# %%\nsys.stderr.write('a warning')\nprint(os.path.basename(os.getcwd()))\n"
    )
    path = write_book(tmp_path, tiny=text) / "book" / "tiny.py"
    assert run_chapter(path) == "a warning"
    first = path.with_suffix(".ipynb").read_bytes()
    run_chapter(path)
    assert path.with_suffix(".ipynb").read_bytes() == first
    cells = nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells
    printed = [output.text for cell in cells for output in cell.outputs]
    inline = "module://matplotlib_inline.backend_inline"
    assert printed == [f"{sys.executable} {inline}\n", "book\n"]


def test_a_chapter_that_fails_is_named_and_its_notebook_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_book(tmp_path, tiny="# %%\nassert 1 + 1 == 3, 'wrong sum'\n")
    notebook = root / "book" / "tiny.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    before = notebook.read_bytes()
    monkeypatch.chdir(root)
    assert main(["run", "tiny"]) == 2
    shown = capsys.readouterr()
    assert "book/tiny.py stopped" in shown.err and "wrong sum" in shown.err
    assert "\x1b[" not in shown.err
    assert notebook.read_bytes() == before


def test_a_run_into_another_folder_leaves_the_pair_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# %%\nimport os\nprint(os.path.basename(os.getcwd()))\n"
    root = write_book(tmp_path, tiny=text)
    pair = root / "book" / "tiny.ipynb"
    write_notebook(paired_notebook(root / "book" / "tiny.py"), root / "book" / "tiny.py")
    before = pair.read_bytes()
    monkeypatch.chdir(root)
    assert main(["run", "tiny", "--out", "_build/run/book"]) == 0
    assert pair.read_bytes() == before
    (cell,) = nbformat.read(root / "_build/run/book/tiny.ipynb", as_version=4).cells
    assert cell.outputs[0].text == "book\n"  # it still finds the files beside its chapter


def test_making_the_book_changes_no_committed_notebook() -> None:
    """The targets run chapters into _build, which git ignores."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = re.findall(r"^\t.*rlbook\.tangle run.*", makefile, flags=re.MULTILINE)
    assert runs and all("--out _build/" in line for line in runs)
    assert "_build/" in (ROOT / ".gitignore").read_text().split()


def test_pairing_keeps_outputs_of_unchanged_cells_alone(tmp_path: Path) -> None:
    text = "# %%\n1 + 1\n\n# %%\n1 + 1\n\n# %%\n2 + 2\n"
    path = write_book(tmp_path, tiny=text) / "book" / "tiny.py"
    notebook = paired_notebook(path)
    assert len({cell.id for cell in notebook.cells}) == 3
    for i, cell in enumerate(notebook.cells):
        cell.outputs = [nbformat.v4.new_output("stream", text=str(i))]
    write_notebook(notebook, path)

    path.write_text(HEADER + "# %% [markdown]\n# New\n\n" + text.replace("2 + 2", "2 + 3"))
    after = paired_notebook(path).cells
    assert [cell.get("outputs") and cell.outputs[0].text for cell in after[:3]] == [None, "0", "1"]
    assert after[3].outputs == []
