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
# # From chapter to library
#
# Every module of `rlbook` but `__init__.py` is written in a chapter of this book. Here you build
# the tool that makes this possible. It takes the marked cells of a chapter and writes them as a module that
# you can import. It also runs a chapter from top to bottom and stores its outputs in a notebook.
# At the end you apply it to this chapter, and it writes its own module.
#
# You need Python and nothing else: there is no reinforcement learning here.

# %% tags=["hide-input"]
#| export
import argparse
import ast
import difflib
import hashlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# %% tags=["hide-input"]
import tempfile

import jupytext
import matplotlib.pyplot as plt
import nbformat

import rlbook.tangle as finished  # the module that this chapter exports
from rlbook.figures import PALETTE, use_style

use_style()


def draw_paths() -> None:
    """Draw what becomes of a chapter."""
    _, ax = plt.subplots(figsize=(7, 2.1))
    ax.set(xlim=(0, 100), ylim=(0, 30))
    ax.axis("off")
    blue, orange, green = PALETTE[0], PALETTE[1], PALETTE[2]

    def box(x: float, y: float, title: str, text: str, color: str) -> None:
        frame = {"boxstyle": "round,pad=0.6", "facecolor": color + "22", "edgecolor": color}
        ax.text(x, y, f"{title}\n{text}", ha="center", va="center", fontsize=9, bbox=frame)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555"})
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        side = "right" if end[1] > start[1] else "left"
        ax.text(*middle, f" {text} ", ha=side, va="bottom", fontsize=9, style="italic")

    box(12, 15, "book/dqn.py", "the chapter: edit here", blue)
    box(50, 25, "rlbook/dqn.py", "the exported cells", orange)
    box(50, 5, "book/dqn.ipynb", "all cells, with outputs", green)
    box(87, 25, "import, rlbook train", "the library", orange)
    box(87, 5, "JupyterLab, site, tests", "the book", green)
    arrow((24, 18), (40, 25), "tangle")
    arrow((24, 12), (38.5, 5), "run")
    arrow((60, 25), (76, 25))
    arrow((61.5, 5), (75, 5))
    plt.show()


draw_paths()

# %% [markdown]
# You edit one file, the chapter. Two files are made from it, and both are stored in the
# repository: the module, so that `pip install` needs no notebook tools, and the notebook, so that
# you can read it on any code host.
#
# ## A chapter exported
#
# A chapter is a Python file in the percent format: a line `# %%` starts a cell of code, and
# `# %% [markdown]` starts a cell of text. A cell whose first line is `#| export` belongs to the
# library. Here is a whole book of one chapter with three cells, and the module that comes out of
# it:

# %%
tiny_chapter = '''\
# %% [markdown]
# ## Halving

# %%
#| export
def halve(x: float) -> float:
    """Return half of `x`."""
    # copy nothing, keep nothing
    return x / 2


# %%
print("halve(5) is", halve(5))
'''
folder = tempfile.TemporaryDirectory()
tiny_book = Path(folder.name)
(tiny_book / "book").mkdir()
(tiny_book / "rlbook").mkdir()
(tiny_book / "_toc.yml").write_text("format: jb-book\nroot: book/tiny\n")
tiny = tiny_book / "book" / "tiny.py"
tiny.write_text(tiny_chapter)

finished.tangle(tiny_book)
print((tiny_book / "rlbook" / "tiny.py").read_text())

# %% [markdown]
# Why not import the chapter itself? Because that would run its demonstrations too, such as the
# training in the chapter on DQN. The line `#| export` is a convention of nbdev, a tool with the
# same purpose. But nbdev reads `.ipynb` files, and we want to edit plain text, where a change of
# one line is a diff of one line.
#
# ## The order of the book
#
# `_toc.yml` at the root of the repository lists the chapters. There is no other list, so none can
# disagree with it. First find the root, from any folder inside it:

# %%
#| export
def find_root(start: Path | None = None) -> Path:
    """Find the checkout of the book around the folder `start`, by default the current one."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "_toc.yml").is_file() and (folder / "book").is_dir():
            return folder
    raise ValueError(
        "This is not a checkout of the book: no folder from here upwards has _toc.yml and book/."
    )

# %% [markdown]
# The table of contents is a tree: a root, parts with chapters, perhaps chapters with sections. The
# order of the book is the order in which the names appear in it.

# %%
#| export
def toc_files(node: Any) -> Iterator[str]:
    """Yield the `root` and each `file` of a table of contents, from top to bottom."""
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in children:
        if key in ("root", "file"):
            yield str(value)
        elif isinstance(value, dict | list):
            yield from toc_files(value)


def read_toc(root: Path) -> list[str]:
    """List the names of all chapters in the order of `_toc.yml`."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    return [file.removeprefix("book/") for file in toc_files(toc)]

# %% [markdown]
# By hand: a book with a root and one part of two chapters has three names.

# %%
tiny_toc = """
format: jb-book
root: book/index
parts:
  - caption: Arithmetic
    chapters:
      - file: book/tiny
      - file: book/large
"""
assert list(toc_files(yaml.safe_load(tiny_toc))) == ["book/index", "book/tiny", "book/large"]
assert read_toc(find_root())[0] == "index"

# %% [markdown]
# ## Reading a chapter
#
# The library jupytext reads the percent format, but it has a trap. In this format a shell command
# of a notebook is written as a comment. So jupytext guesses which comments are commands, and an
# English comment can look like one:

# %%
innocent = "# %%\n# copy the weights to the target network\nx = 1\n"
print(repr(jupytext.reads(innocent, fmt="py:percent").cells[0].source))

# %% [markdown]
# The comment has become a line of code that is not Python. `comment_magics=False` turns this off.
# Only authors need jupytext, so it is imported where it is used.

# %%
#| export
def read_notebook(chapter_path: Path) -> Any:
    """Read a chapter, a percent script, as a notebook."""
    try:
        import jupytext
    except ModuleNotFoundError:
        raise ValueError(
            'Reading a chapter needs jupytext: install it with `pip install "rlbook[book]"`.'
        ) from None
    # Otherwise the comment `# copy the weights` would be read as a shell command.
    fmt = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    notebook = jupytext.read(chapter_path, fmt=fmt)
    notebook.metadata["jupytext"] = {"formats": "ipynb,py:percent"}
    return notebook

# %% [markdown]
# From the notebook we take the exported cells. Each keeps the heading above it, which goes into
# the module to say where the code is explained, and its line number, which goes into error
# messages. jupytext does not give line numbers, so we search the text for the cell. A line
# `# like this` inside a fenced block of a text cell is a comment in code and not a heading, so
# fenced blocks are removed first.

# %%
#| export
class ExportedCell(NamedTuple):
    """A cell for the library: its code, the heading above it and the line where its code starts."""

    code: str
    heading: str
    line: int


def exported_cells(chapter_path: Path) -> list[ExportedCell]:
    """List the cells of a chapter that start with the line `#| export`."""
    text = chapter_path.read_text(encoding="utf-8")
    cells, heading, position = [], chapter_path.stem, 0
    for cell in read_notebook(chapter_path).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            heading = [heading, *re.findall(r"^#{1,6} +(.+?) *$", prose, flags=re.MULTILINE)][-1]
            continue
        position = max(position, text.find(cell.source, position))
        first, _, code = cell.source.partition("\n")
        if first.strip() == "#| export":
            line = text.count("\n", 0, position) + 2
            cells.append(ExportedCell(code.strip("\n"), heading, line))
        position += len(cell.source)
    return cells

# %% [markdown]
# By hand: in `tiny_chapter` the function starts on line 6, under the heading *Halving*.

# %%
(cell,) = exported_cells(tiny)
assert (cell.heading, cell.line) == ("Halving", 6)
assert cell.code.startswith("def halve") and cell.code.endswith("return x / 2")

# %% [markdown]
# ## What may not be exported
#
# Some code works in a cell but not in a module: a magic such as `%timeit`, or a `return` outside a
# function. A relative import works in the module but not in the chapter. And `from __future__` is
# only allowed at the top of a file. Each of these is an error that names the chapter, the heading
# and the line.

# %%
#| export
def parse_cell(cell: ExportedCell, chapter: str) -> ast.Module:
    """Parse an exported cell, and refuse what would not work in a module."""

    def mistake(line: int | None, what: str) -> ValueError:
        where = f"{chapter}, under {cell.heading!r}, line {cell.line + (line or 1) - 1}"
        return ValueError(f"{where}: {what}.")

    try:
        compile(cell.code, chapter, "exec")
    except SyntaxError as error:
        lines = cell.code.splitlines()
        bad = lines[min(error.lineno or 1, len(lines)) - 1].strip()
        if bad.startswith(("%", "!", "?")) or bad.endswith("?"):
            raise mistake(error.lineno, f"a module cannot hold the magic {bad!r}") from None
        raise mistake(error.lineno, f"{error.msg} in {bad!r}") from None
    tree = ast.parse(cell.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise mistake(node.lineno, "a relative import, write `from rlbook.NAME import` instead")
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            raise mistake(node.lineno, "`from __future__` cannot be exported, quote the type")
    return tree

# %%
for bad_line in ["%timeit halve(3)", "return 3", "x = = 3", "from .replay import ReplayBuffer"]:
    try:
        parse_cell(ExportedCell(f"y = 2\n{bad_line}", "Halving", 6), "book/tiny.py")
    except ValueError as error:
        print(error)
        assert "line 7" in str(error)

# %% [markdown]
# ## Public names
#
# `__all__` lists what a module offers: every function, class and constant that it defines at its
# top level, unless the name starts with an underscore. Imported names do not count. The order is
# the usual one: constants, classes, functions.

# %%
#| export
def defined_names(tree: ast.Module) -> set[str]:
    """Return the public names that a cell defines at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            # In `a.b = 1` the name `a` is loaded, not stored: nothing new is defined.
            stored = [part for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)]
            names |= {part.id for part in stored if isinstance(part, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def all_list(names: set[str]) -> str:
    """Write `__all__`: constants, then classes, then functions, each in alphabetical order."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    quoted = [f'"{name}"' for name in ordered]
    line = f"__all__ = [{', '.join(quoted)}]"
    if len(line) <= 100:
        return line
    return "\n".join(["__all__ = [", *(f"    {name}," for name in quoted), "]"])

# %%
names = defined_names(ast.parse("import os\nGAMMA = 0.99\n_x, y = 1, 2\nclass Ring: size = 3"))
assert names == {"GAMMA", "Ring", "y"}
assert all_list(names) == '__all__ = ["GAMMA", "Ring", "y"]'

# %% [markdown]
# ## The module
#
# Now put it together: one line that says where the module comes from, `__all__`, and the cells.
# Whenever the heading changes, a comment names the chapter and the new heading. The comment starts
# with `# %%`, so that editors show the sections. Blank lines are placed as a code formatter would.
# If two cells define the same name, that is an error: you would read one definition in the chapter
# and run the other.

# %%
#| export
def module_source(chapter_path: Path) -> str | None:
    """Write the module that a chapter exports, or return None when it exports nothing."""
    chapter = f"book/{chapter_path.name}"
    names: set[str] = set()
    text, heading, after_imports = "", None, True
    for cell in exported_cells(chapter_path):
        tree = parse_cell(cell, chapter)
        for name in names & defined_names(tree):
            where = f"{chapter}, under {cell.heading!r}, line {cell.line}"
            raise ValueError(f"{where}: {name} is defined by an earlier cell too.")
        names |= defined_names(tree)
        definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        defines = any(isinstance(node, definition) for node in tree.body[:1])
        text += "\n" if after_imports and not defines else "\n\n"
        text += f"# %% {chapter} · {cell.heading}\n" if cell.heading != heading else ""
        text += cell.code + "\n"
        heading = cell.heading
        after_imports = all(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
    if not text:
        return None
    header = f'"""Made from {chapter}: edit the chapter, then run `rlbook tangle`."""'
    return f"{header}\n\n{all_list(names)}\n{text}"

# %% [markdown]
# By hand, the module of the tiny chapter is this, to the last character:

# %%
expected = '''\
"""Made from book/tiny.py: edit the chapter, then run `rlbook tangle`."""

__all__ = ["halve"]


# %% book/tiny.py · Halving
def halve(x: float) -> float:
    """Return half of `x`."""
    # copy nothing, keep nothing
    return x / 2
'''
assert module_source(tiny) == expected

# %% [markdown]
# ## The library
#
# The library consists of all modules and of `chapters.txt`, which holds their names in the order
# of the book: an installed `rlbook` has no `_toc.yml`. A mistake in one chapter does not stop the
# others from being written, and all mistakes are reported together.

# %%
#| export
def library_files(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return the text of each generated file of the library, and the mistakes in the chapters."""
    files, names, mistakes = {}, [], []
    for name in read_toc(root):
        path = root / "book" / f"{name}.py"
        try:
            source = module_source(path) if path.is_file() else None
        except ValueError as error:
            mistakes.append(str(error))
            continue
        if source is not None:
            files[f"rlbook/{name}.py"] = source
            names.append(name)
    files["rlbook/chapters.txt"] = "".join(f"{name}\n" for name in names)
    return files, mistakes

# %% [markdown]
# Every chapter must be in `_toc.yml` and every module must come from a chapter. Two files are
# neither: `conf.py`, the settings of the site, and `__init__.py`.

# %%
#| export
def misfits(root: Path, exported: Collection[str]) -> list[str]:
    """Say which chapters, modules and entries of `_toc.yml` lack their counterpart."""
    toc = {f"book/{name}.py" for name in read_toc(root)}
    chapters = {f"book/{path.name}" for path in (root / "book").glob("*.py")} - {"book/conf.py"}
    modules = {f"rlbook/{path.name}" for path in (root / "rlbook").glob("*.py")}
    stale = modules - {"rlbook/__init__.py", *exported}
    return [
        *(f"{name} is in _toc.yml but does not exist." for name in sorted(toc - chapters)),
        *(f"{name} is not in _toc.yml." for name in sorted(chapters - toc)),
        *(f"{name} is exported by no chapter: delete it." for name in sorted(stale)),
    ]


# %%
#| export
def tangle(root: Path, check: bool = False) -> bool:
    """Write all modules, or with `check` show what would change; return whether all agree."""
    files, mistakes = library_files(root)
    changed = False
    for name, new in files.items():
        path = root / name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if new == old:
            continue
        changed = True
        if check:
            lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name}, from its chapter"))
        else:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    notes = misfits(root, files)
    agree = not notes and not (check and changed)
    for line in ["The chapters and the library agree."] if agree else notes:
        print(line)
    return agree

# %% [markdown]
# Write the tiny library. Then change the chapter, and let `check` show the difference.

# %%
assert tangle(tiny_book)
tiny.write_text(tiny_chapter.replace("x / 2", "x * 0.5"))
assert not tangle(tiny_book, check=True)

# %% [markdown]
# ## The notebook
#
# The notebook has the same cells as the chapter, and their outputs. Every cell of a notebook has
# an id. Other tools choose ids at random, so that each new notebook differs from the old one in
# every cell. We compute the id from the source. So a cell that did not change keeps its id,
# wherever it moves, and we use the id to find its old output.

# %%
#| export
def paired_notebook(chapter_path: Path) -> Any:
    """Make the notebook of a chapter; cells that did not change keep their outputs."""
    import nbformat

    path = chapter_path.with_suffix(".ipynb")
    old = nbformat.read(path, as_version=4).cells if path.is_file() else []
    known = {cell.id: cell for cell in old if cell.cell_type == "code"}
    notebook = read_notebook(chapter_path)
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    digests: list[str] = []
    for cell in notebook.cells:
        digests.append(hashlib.sha256(cell.source.encode()).hexdigest()[:12])
        cell.id = f"{digests[-1]}-{digests.count(digests[-1])}"  # the same source may come twice
        if cell.cell_type == "code" and cell.id in known:
            cell.outputs = known[cell.id].outputs
            cell.execution_count = known[cell.id].execution_count
    return notebook


def write_notebook(notebook: Any, chapter_path: Path, folder: Path | None = None) -> None:
    """Write a notebook beside its chapter, or into another folder."""
    import nbformat

    path = (folder or chapter_path.parent) / f"{chapter_path.stem}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")

# %% [markdown]
# ## Running a chapter
#
# To run a chapter, we start a Python process, send it one cell after the other and collect the
# outputs. The library nbclient does that. Four details are left to us:
#
# - Jupyter may know several Pythons under the name `python3`, some without `rlbook`. We want the
#   one that runs this code. With an empty list of kernel folders, nbclient starts that one.
# - A variable `MPLBACKEND` in your shell could hide the figures. So the process does not get it.
# - What a cell prints on stderr, mostly warnings, is shown to the author and not stored.
# - When a cell ran and which version of Python ran it is not stored either. So two runs write the
#   same file, if their cells print the same.
#
# The notebook beside the chapter is committed. But many chapters print how long something took, so
# their outputs differ each time. If you only build the site, you do not want all these changes in
# your checkout. So `make book` writes its notebooks to another `folder`, `_build/run/book`. The
# committed notebook is written only when somebody has changed its chapter and runs it.

# %%
#| export
def run_chapter(chapter_path: Path, folder: Path | None = None) -> str:
    """Run a chapter from top to bottom, write its notebook, and return its stderr."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = paired_notebook(chapter_path)
    language = dict(notebook.metadata["language_info"])
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels),
        resources={"metadata": {"path": str(chapter_path.parent)}},
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        store_widget_state=False,
    )
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    try:
        client.execute(cleanup_kc=True, env=environment)
    except CellExecutionError as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise ValueError(f"book/{chapter_path.name} stopped.\n{plain}") from None
    except (DeadKernelError, AssertionError):  # nbclient fails to clean up twice after Ctrl-C
        raise ValueError(f"book/{chapter_path.name} stopped: its process has ended.") from None
    notebook.metadata["language_info"] = language
    said = ""
    for cell in notebook.cells:
        for output in [out for out in cell.get("outputs", []) if out.get("name") == "stderr"]:
            said += output.text
            cell.outputs.remove(output)
    write_notebook(notebook, chapter_path, folder)
    return said

# %% [markdown]
# Run the tiny chapter. Its last cell prints a line. After a second run the notebook has the same
# bytes.

# %%
def outputs(chapter_path: Path) -> list[str]:
    """List what the cells of a chapter printed, as stored in its notebook."""
    cells = nbformat.read(chapter_path.with_suffix(".ipynb"), as_version=4).cells
    return [output.text for cell in cells for output in cell.get("outputs", [])]


tiny.write_text(tiny_chapter)
assert run_chapter(tiny) == ""
assert outputs(tiny) == ["halve(5) is 2.5\n"]

first = tiny.with_suffix(".ipynb").read_bytes()
run_chapter(tiny)
assert tiny.with_suffix(".ipynb").read_bytes() == first

# %% [markdown]
# Now edit only the text of the chapter, and write the notebook without running anything: the
# output is still there. Edit the code, and the output, which belongs to the old code, is gone.

# %%
tiny.write_text(tiny_chapter.replace("## Halving", "## Half of everything"))
write_notebook(paired_notebook(tiny), tiny)
assert outputs(tiny) == ["halve(5) is 2.5\n"]

tiny.write_text(tiny_chapter.replace("halve(5)", "halve(7)"))
write_notebook(paired_notebook(tiny), tiny)
assert outputs(tiny) == []

# %% [markdown]
# ## The command
#
# The command has four verbs: `export` (the default), `run`, `sync`, which writes notebooks without
# running them, and `list`, which prints the notebooks in the order of the book. With `--out` a run
# leaves the committed notebooks alone and writes into that folder.

# %%
#| export
def run_chapters(root: Path, names: Sequence[str], folder: Path | None = None) -> None:
    """Run chapters one after the other, with a line for each that is done."""
    for name in names:
        start = time.monotonic()
        said = run_chapter(root / "book" / f"{name}.py", folder)
        print(f"{name:16}{time.monotonic() - start:6.1f} s", flush=True)
        if said:
            print(f"on stderr: {said.rstrip()}", flush=True)


# %%
#| export
def main(
    arguments: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None
) -> int:
    """Export the chapters, or run, pair or list them."""
    if parser is None:  # `rlbook tangle` brings its own
        parser = argparse.ArgumentParser(prog="python -m rlbook.tangle", description=main.__doc__)
    verbs = ["export", "run", "sync", "list"]
    parser.add_argument("verb", nargs="?", default="export", choices=verbs)
    parser.add_argument("names", nargs="*", metavar="NAME", help="chapters to run, pair or list")
    parser.add_argument("--check", action="store_true", help="of an export: write nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the notebooks that run")
    options = parser.parse_args(arguments)
    try:
        root = find_root()
        toc = read_toc(root)
        for name in set(options.names) - set(toc):
            raise ValueError(f"There is no chapter {name!r}: the book has {', '.join(toc)}.")
        names = options.names or toc
        if options.verb == "export" and options.names:
            raise ValueError("`export` writes all modules: leave out the names.")
        if options.verb != "export" and options.check:
            raise ValueError(f"--check belongs to `export`, not to {options.verb!r}.")
        if options.verb == "export":
            return 0 if tangle(root, options.check) or not options.check else 1
        if options.verb == "run":
            run_chapters(root, names, options.out)
        for name in names:
            if options.verb == "list":
                print(f"book/{name}.ipynb")
            elif options.verb == "sync":
                path = root / "book" / f"{name}.py"
                write_notebook(paired_notebook(path), path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    return 0

# %% [markdown]
# The usual last lines of a command would also run here, because a notebook is called `__main__`
# too. But a notebook has no `__file__`:

# %%
#| export
if __name__ == "__main__" and "__file__" in globals():
    sys.exit(main())

# %% [markdown]
# ## It writes itself
#
# The last test: the functions that you have defined in this notebook read this chapter and write
# the module `rlbook/tangle.py`, the same to the last character.

# %%
root = find_root()
made = module_source(root / "book" / "tangle.py")
assert made == (root / "rlbook" / "tangle.py").read_text(encoding="utf-8")
print(made[: made.index("# %%")])

# %% [markdown]
# ## Honest edges
#
# - One chapter makes one module. A chapter cannot add to the module of another.
# - If an exported cell uses a name that no exported cell defines, this tool does not notice. The
#   linter and the type checker, which run over the modules, do.
# - It does not copy changes from the module back into the chapter. `--check` reports an edit in
#   `rlbook/`, and the next export overwrites it. The first line of each module says so.
#
# ## Exercises
#
# **1. A planted bug.** Here is a shorter `defined_names`. It finds all functions and classes, and
# a first test passes. What is wrong with it, and how would a user notice?

# %%
def shorter_names(tree: ast.Module) -> set[str]:
    """Return the names of all functions and classes."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


assert shorter_names(ast.parse("def halve(x): return x / 2")) == {"halve"}
print(sorted(shorter_names(ast.parse("class Ring:\n    def add(self, transition): ..."))))

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `ast.walk` goes down into classes and functions, so the method `add` becomes a name of the
# module. Nothing fails until somebody writes `from rlbook.replay import *`: then Python looks for
# `rlbook.replay.add` and raises an `AttributeError`. Only the statements in `tree.body` are at the
# top level. (It also leaves out constants, and includes names that start with an underscore.)
#
# ```python
# def shorter_names(tree: ast.Module) -> set[str]:
#     """Return the names of the functions and classes at the top level."""
#     kinds = ast.FunctionDef | ast.ClassDef
#     return {node.name for node in tree.body if isinstance(node, kinds)}
#
# assert shorter_names(ast.parse("class Ring:\n    def add(self, transition): ...")) == {"Ring"}
# ```
#
# </details>
#
# **2.** The id of a cell could be its position: `cell-1`, `cell-2`, and so on. These ids, too,
# stay the same when the notebook is written again. What goes wrong when you add a cell at the top
# and call `sync`?
#
# <details>
# <summary>Solution</summary>
#
# Every cell below moves down by one, and under its new id it finds the output of the cell above
# it. The notebook then shows outputs that its cells never made, which is worse than none.
#
# ```python
# stored = {"cell-1": "output of a", "cell-2": "output of b"}
# cells = ["new", "a", "b"]
# shown = {cell: stored.get(f"cell-{i}") for i, cell in enumerate(cells, start=1)}
# assert shown == {"new": "output of a", "a": "output of b", "b": None}
# ```
#
# </details>
#
# **3.** A cell of more than 40 exported lines often holds two ideas. Write a check that lists such
# cells for the whole book.
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def long_cells(name: str, limit: int = 40) -> list[str]:
#     """Say which exported cells of a chapter are longer than the limit."""
#     cells = exported_cells(find_root() / "book" / f"{name}.py")
#     lengths = [(cell, len(cell.code.splitlines())) for cell in cells]
#     return [f"line {cell.line}, {cell.heading!r}: {n} lines" for cell, n in lengths if n > limit]
#
# assert len(long_cells("tangle", limit=0)) > len(long_cells("tangle", limit=40))
# # For the whole book: {name: long_cells(name) for name in read_toc(find_root())}
# ```
#
# </details>
#
# **4.** An exported cell runs when the module is imported, so it should only define things. Write
# a check that finds a cell which does more, such as one that prints.
#
# <details>
# <summary>Solution</summary>
#
# A statement that is an expression, and not just a string, does something or is useless.
#
# ```python
# def effects(cell: ExportedCell) -> list[str]:
#     """Return the statements of a cell that define nothing."""
#     found = [node for node in ast.parse(cell.code).body if isinstance(node, ast.Expr)]
#     return [ast.unparse(node) for node in found if not isinstance(node.value, ast.Constant)]
#
# assert effects(ExportedCell("x = 1\nprint('hello')", "Part", 1)) == ["print('hello')"]
# assert effects(ExportedCell("def halve(x):\n    return x / 2", "Part", 1)) == []
# ```
#
# </details>
#
# ## Use it
#
# From Python:
#
# ```python
# from rlbook.tangle import find_root, tangle
#
# tangle(find_root(), check=True)
# ```
#
# From the shell, anywhere in a checkout:
#
# ```bash
# rlbook tangle                          # write the library from the chapters
# rlbook tangle --check                  # show what differs, exit code 1 if anything does
# rlbook tangle run tangle               # run this chapter and store its outputs
# rlbook tangle sync                     # write all notebooks, run nothing
# ```
#
# ## References
#
# - D. E. Knuth, *Literate Programming*, The Computer Journal 27(2), 1984. His program *tangle*
#   takes the code out of the text.
# - [nbdev](https://nbdev.fast.ai), from which `#| export` comes.
# - [jupytext](https://jupytext.readthedocs.io), which reads the percent format.
# - [nbclient](https://nbclient.readthedocs.io), which runs notebooks.
