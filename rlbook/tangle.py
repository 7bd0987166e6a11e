"""Made from book/tangle.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ExportedCell",
    "all_list",
    "defined_names",
    "exported_cells",
    "find_root",
    "library_files",
    "main",
    "misfits",
    "module_source",
    "paired_notebook",
    "parse_cell",
    "read_notebook",
    "read_toc",
    "run_chapter",
    "run_chapters",
    "tangle",
    "toc_files",
    "write_notebook",
]

# %% book/tangle.py · From chapter to library
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


# %% book/tangle.py · The order of the book
def find_root(start: Path | None = None) -> Path:
    """Find the checkout of the book around the folder `start`, by default the current one."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "_toc.yml").is_file() and (folder / "book").is_dir():
            return folder
    raise ValueError(
        "This is not a checkout of the book: no folder from here upwards has _toc.yml and book/."
    )


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


# %% book/tangle.py · Reading a chapter
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


# %% book/tangle.py · What may not be exported
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


# %% book/tangle.py · Public names
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


# %% book/tangle.py · The module
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


# %% book/tangle.py · The library
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


# %% book/tangle.py · The notebook
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


# %% book/tangle.py · Running a chapter
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


# %% book/tangle.py · The command
def run_chapters(root: Path, names: Sequence[str], folder: Path | None = None) -> None:
    """Run chapters one after the other, with a line for each that is done."""
    for name in names:
        start = time.monotonic()
        said = run_chapter(root / "book" / f"{name}.py", folder)
        print(f"{name:16}{time.monotonic() - start:6.1f} s", flush=True)
        if said:
            print(f"on stderr: {said.rstrip()}", flush=True)


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


if __name__ == "__main__" and "__file__" in globals():
    sys.exit(main())
