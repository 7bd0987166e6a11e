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

# %%
#| export
import argparse
import ast
import difflib
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# %% [markdown]
# ## The order of the book

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


# %%
#| export
def toc_files(node: Any) -> Iterator[str]:
    """Yield what a table of contents calls `root` or `file`, from top to bottom."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("root", "file"):
                yield str(value)
            else:
                yield from toc_files(value)
    elif isinstance(node, list):
        for value in node:
            yield from toc_files(value)


def read_toc(root: Path) -> list[str]:
    """List the names of all chapters in the order of `_toc.yml`."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    return [file.removeprefix("book/") for file in toc_files(toc)]


# %% [markdown]
# ## Reading a chapter

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
    # Without comment_magics=False the comment `# copy the weights` would be read as a command.
    fmt = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    notebook = jupytext.read(chapter_path, fmt=fmt)
    notebook.metadata["jupytext"].pop("comment_magics", None)
    return notebook


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
            headings = re.findall(r"^#+ +(.+?) *$", cell.source, flags=re.MULTILINE)
            heading = headings[-1] if headings else heading
            continue
        # The source of a code cell stands in the chapter as it is: that gives its line.
        position = max(text.find(cell.source, position), position)
        first, _, code = cell.source.partition("\n")
        if first.strip() == "#| export":
            line = text.count("\n", 0, position) + 2
            cells.append(ExportedCell(code.strip("\n"), heading, line))
        position += len(cell.source)
    return cells


# %% [markdown]
# ## What may not be exported

# %%
#| export
def parse_cell(cell: ExportedCell, chapter: str) -> ast.Module:
    """Parse an exported cell; refuse what would not work, or not be readable, in a module."""

    def mistake(what: str, line: int | None) -> ValueError:
        where = cell.line + (line or 1) - 1
        return ValueError(f"{chapter}, under {cell.heading!r}, line {where}: {what}")

    try:
        tree = ast.parse(cell.code)
    except SyntaxError as error:
        bad = (error.text or "").strip()
        if bad.startswith(("%", "!", "?")) or bad.endswith("?"):
            raise mistake(f"a module cannot hold the magic {bad!r}.", error.lineno) from None
        raise mistake(f"{error.msg} in {bad!r}.", error.lineno) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise mistake("write `from rlbook.NAME`, not a relative import.", node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            raise mistake("`from __future__` cannot be exported; quote the type.", node.lineno)
    return tree


# %% [markdown]
# ## Public names

# %%
#| export
def defined_names(tree: ast.Module) -> list[str]:
    """List the public names that a cell defines at its top level; imported ones are not its own."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    names.append(part.id)
    return [name for name in names if not name.startswith("_")]


def all_list(names: Sequence[str]) -> str:
    """Write `__all__`: constants, then classes, then functions, each in alphabetical order."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    quoted = [f'"{name}"' for name in ordered]
    line = f"__all__ = [{', '.join(quoted)}]"
    if len(line) <= 100:
        return line
    return "\n".join(["__all__ = [", *(f"    {name}," for name in quoted), "]"])


# %% [markdown]
# ## The module

# %%
#| export
def module_source(chapter_path: Path) -> str | None:
    """Write the module that a chapter exports, or return None when it exports nothing."""
    chapter = f"book/{chapter_path.name}"
    names: list[str] = []
    blocks: list[str] = []
    heading, after_imports = None, False
    for cell in exported_cells(chapter_path):
        tree = parse_cell(cell, chapter)
        for name in defined_names(tree):
            if name in names:
                raise ValueError(
                    f"{chapter}, under {cell.heading!r}, line {cell.line}: {name} is defined twice."
                )
            names.append(name)
        defines = bool(tree.body) and isinstance(tree.body[0], ast.FunctionDef | ast.ClassDef)
        blank_lines = 1 if not blocks or (after_imports and not defines) else 2
        title = f"# %% {chapter} · {cell.heading}\n" if cell.heading != heading else ""
        blocks.append("\n" * blank_lines + title + cell.code + "\n")
        heading = cell.heading
        after_imports = all(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
    if not blocks:
        return None
    header = f'"""Made from {chapter}: edit the chapter, then run `rlbook tangle`."""\n\n'
    return header + all_list(names) + "\n" + "".join(blocks)


# %% [markdown]
# ## The library

# %%
#| export
def chapter_files(root: Path) -> list[str]:
    """List the names of the chapters in the folder book/; the settings of the site are not one."""
    return sorted(path.stem for path in (root / "book").glob("*.py") if path.stem != "conf")


def library_files(root: Path) -> tuple[dict[Path, str], list[str]]:
    """Return the text of each generated file of the library, and the mistakes in the chapters."""
    files: dict[Path, str] = {}
    mistakes: list[str] = []
    names = []
    for name in read_toc(root):
        path = root / "book" / f"{name}.py"
        if not path.is_file():
            continue
        try:
            source = module_source(path)
        except ValueError as error:
            mistakes.append(str(error))
            continue
        if source is not None:
            files[root / "rlbook" / f"{name}.py"] = source
            names.append(name)
    files[root / "rlbook" / "chapters.txt"] = "".join(f"{name}\n" for name in names)
    return files, mistakes


def misfits(root: Path) -> list[str]:
    """Say which chapters, modules and entries of `_toc.yml` lack their counterpart."""
    toc, chapters = read_toc(root), chapter_files(root)
    modules = sorted(path.stem for path in (root / "rlbook").glob("*.py"))
    return [
        *(f"book/{n}.py is in _toc.yml, but not there." for n in toc if n not in chapters),
        *(f"book/{n}.py is not in _toc.yml." for n in chapters if n not in toc),
        *(f"rlbook/{n}.py has no chapter." for n in modules if n not in [*toc, "__init__"]),
    ]


# %%
#| export
def tangle(root: Path, check: bool = False) -> bool:
    """Write all modules from their chapters, or check them; return whether nothing is amiss."""
    files, mistakes = library_files(root)
    mistakes += misfits(root)
    changed = False
    for path, new in files.items():
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if new == old:
            continue
        changed = True
        name = path.relative_to(root).as_posix()
        if check:
            diff = difflib.unified_diff(
                old.splitlines(keepends=True), new.splitlines(keepends=True), name, f"{name} (new)"
            )
            sys.stdout.writelines(diff)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
    for mistake in mistakes:
        print(mistake)
    return not mistakes and not (check and changed)


# %% [markdown]
# ## The notebook

# %%
#| export
def paired_notebook(chapter_path: Path) -> Any:
    """Make the notebook of a chapter; cells that did not change keep their outputs."""
    import nbformat

    notebook = read_notebook(chapter_path)
    notebook_path = chapter_path.with_suffix(".ipynb")
    old = nbformat.read(notebook_path, as_version=4).cells if notebook_path.is_file() else []
    outputs = {cell.id: cell for cell in old if cell.cell_type == "code"}
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        # The id is made of the source, so that it stays when the cell moves.
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        cell.metadata.pop("lines_to_next_cell", None)
        if cell.cell_type == "code" and cell.id in outputs:
            cell.outputs = outputs[cell.id].outputs
            cell.execution_count = outputs[cell.id].execution_count
    return notebook


def write_notebook(notebook: Any, chapter_path: Path) -> None:
    """Write the notebook beside its chapter, if that changes anything."""
    import nbformat

    path = chapter_path.with_suffix(".ipynb")
    text = nbformat.writes(notebook) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


# %% [markdown]
# ## Running a chapter

# %%
#| export
def run_chapter(chapter_path: Path) -> str:
    """Run a chapter from top to bottom, write its notebook, and return what it said on stderr."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = paired_notebook(chapter_path)
    # With no folder to look for kernels in, the one left is the interpreter that runs this line.
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels),
        resources={"metadata": {"path": str(chapter_path.parent)}},
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        store_widget_state=False,
        timeout=None,
    )
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    try:
        client.execute(cleanup_kc=True, env=environment)
    except CellExecutionError as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise ValueError(f"book/{chapter_path.name} stopped:\n{plain}") from None
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    said = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            errors = [output for output in cell.outputs if output.get("name") == "stderr"]
            said += [output.text for output in errors]
            cell.outputs = [output for output in cell.outputs if output not in errors]
    write_notebook(notebook, chapter_path)
    return "".join(said)


# %% [markdown]
# ## The command

# %%
#| export
def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m rlbook.tangle`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlbook.tangle", description=main.__doc__)
    verbs = ["export", "run", "sync", "list"]
    parser.add_argument("verb", nargs="?", default="export", choices=verbs)
    parser.add_argument("names", nargs="*", metavar="NAME", help="chapters, all if none is given")
    parser.add_argument("--check", action="store_true", help="write nothing, show what is new")
    options = parser.parse_args(arguments)
    try:
        root = find_root()
        if options.verb == "export":
            return 0 if tangle(root, check=options.check) or not options.check else 1
        names = options.names or read_toc(root)
        for name in names:
            path = root / "book" / f"{name}.py"
            if options.verb == "list":
                print(f"book/{name}.ipynb")
            elif options.verb == "sync":
                write_notebook(paired_notebook(path), path)
            else:
                start = time.monotonic()
                said = run_chapter(path)
                print(f"{name:12} {time.monotonic() - start:6.1f} s", flush=True)
                if said:
                    print(f"  on stderr: {said.strip()}", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


# %%
#| export
# A cell in a notebook is called __main__ too, but it has no file.
if __name__ == "__main__" and "__file__" in globals():
    sys.exit(main())
