"""What the pages of the site are made from: chapters, their headings, and what they export."""

import ast
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

import nbformat
import yaml
from myst_parser.mdit_to_docutils.base import default_slugify

from rlbook.tangle import defined_names, read_toc

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / os.environ.get("RLBOOK_SOURCE", "")).resolve()  # of notebooks and made pages


class Section(NamedTuple):
    """A part of a module: the heading under which the chapter teaches it, and its public names."""

    heading: str
    names: list[str]


@functools.cache
def chapters() -> list[str]:
    """List the chapters that have been run, in the order of the book."""
    return [name for name in read_toc(ROOT) if (SOURCE / "book" / f"{name}.ipynb").is_file()]


def modules() -> list[str]:
    """List the chapters among them that export a module."""
    return [name for name in chapters() if (ROOT / "rlbook" / f"{name}.py").is_file()]


@functools.cache
def read_module(name: str) -> tuple[str, ast.Module]:
    """Return the source of a module and its syntax tree."""
    source = (ROOT / "rlbook" / f"{name}.py").read_text(encoding="utf-8")
    return source, ast.parse(source)


def public_names(tree: ast.Module) -> list[str]:
    """List the public names that a piece of code defines, in its order."""
    return [name for node in tree.body for name in sorted(defined_names(ast.Module([node], [])))]


def sections(name: str) -> list[Section]:
    """Sort the public names of a module under the headings of its provenance comments."""
    source, tree = read_module(name)
    headings = [
        (source.count("\n", 0, match.start()) + 1, match[1])
        for match in re.finditer(r"^# %% book/\w+\.py · (.+)$", source, flags=re.MULTILINE)
    ]
    found: dict[str, list[str]] = {}
    for node in tree.body:
        heading = [text for line, text in headings if line <= node.lineno][-1:]
        public = public_names(ast.Module([node], []))
        if heading and public:
            found.setdefault(heading[0], []).extend(public)
    return [Section(*pair) for pair in found.items()]


def assignment(module: str, name: str) -> str:
    """Return the statement that gives a constant its value, with the comment above it."""
    source, tree = read_module(module)
    node = next(n for n in tree.body if name in defined_names(ast.Module([n], [])))
    lines, first = source.splitlines(), node.lineno - 1
    while lines[first - 1].startswith("# ") and not lines[first - 1].startswith("# %%"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


@functools.cache
def notebook(name: str) -> nbformat.NotebookNode:
    """Read the notebook of a chapter, with its outputs."""
    return nbformat.read(SOURCE / "book" / f"{name}.ipynb", as_version=4)


@functools.cache
def headings(name: str) -> list[tuple[int, str]]:
    """List the headings of a chapter with the index of the cell in which each stands."""
    found = []
    for i, cell in enumerate(notebook(name).cells):
        if cell.cell_type == "markdown":
            prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            found += [(i, text) for text in re.findall(r"^#{1,6} +(.+?) *$", prose, re.MULTILINE)]
    return found


def title(name: str) -> str:
    """Return the first heading of a chapter."""
    return headings(name)[0][1]


def heading_link(chapter: str, heading: str, text: str | None = None) -> str:
    """Write a Markdown link to a heading of a chapter."""
    text = (text or heading).replace("[", r"\[").replace("]", r"\]")
    anchor = "" if heading == title(chapter) else f"#{default_slugify(heading)}"
    return f"[{text}](/book/{chapter}.ipynb{anchor})"


@functools.cache
def timeline() -> list[dict]:
    """Read the entries of the timeline."""
    return yaml.safe_load((ROOT / "book" / "timeline.yml").read_text(encoding="utf-8"))["entries"]


def write(path: Path, text: str | bytes) -> None:
    """Write a generated file, only if it is new: an old time stamp saves Sphinx work."""
    data = text.encode() if isinstance(text, str) else text
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
