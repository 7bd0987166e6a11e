"""Write what changed in the code from one chapter to the chapter that builds on it."""

import ast
import difflib
import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import library
from library import heading_link, title
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

Definition = ast.FunctionDef | ast.ClassDef


class Piece(NamedTuple):
    """A function, a method or the head of a class: where it is from, its name and its lines."""

    module: str
    name: str
    lines: list[str]


def pairs(entries: list[dict], modules: list[str]) -> list[tuple[str, str]]:
    """List (chapter, later chapter that builds on it) where both are in the book."""
    chapter_of = {entry["name"]: entry.get("chapter") for entry in entries}
    found = [
        (old, entry["chapter"])
        for entry in entries
        for old in [chapter_of[name] for name in entry.get("builds_on", [])]
        if old in modules and entry.get("chapter") in modules
        if modules.index(old) < modules.index(entry["chapter"])  # TRPO is older than PPO, but later
    ]
    first = {new: old for old, new in reversed(found)}  # a page is about one: that named first
    return [(first[new], new) for new in modules if new in first]


def definitions(module: str) -> dict[str, Definition]:
    """Return the functions and classes that a module defines."""
    _, tree = library.read_module(module)
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def imports(module: str) -> dict[str, str]:
    """Return the names that a module imports from other chapters, with their chapters."""
    _, tree = library.read_module(module)
    return {
        alias.name: node.module.removeprefix("rlbook.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlbook.")
        for alias in node.names
        if node.module is not None
    }


def lines_of(module: str, node: ast.stmt) -> list[str]:
    """Return the lines of a definition with its decorators."""
    source, _ = library.read_module(module)
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return source.splitlines()[first - 1 : node.end_lineno]


def pieces(module: str, node: Definition) -> dict[str, Piece]:
    """Cut a class into its head and its methods; a function is one piece."""
    if isinstance(node, ast.FunctionDef):
        return {"": Piece(module, node.name, lines_of(module, node))}
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    whole, inside = lines_of(module, node), {}
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    cut = set()
    for method in methods:
        lines = lines_of(module, method)
        alone = textwrap.dedent("\n".join(lines)).splitlines()
        inside[method.name] = Piece(module, f"{node.name}.{method.name}", alone)
        last = method.end_lineno or 0
        cut |= set(range(last - len(lines) + 1, last + 1))
    head = [line for i, line in enumerate(whole, start=first) if i not in cut]
    while head and not head[-1].strip():
        head.pop()
    return {"": Piece(module, node.name, squeeze(head)), **inside}


def overridden(module: str, old: ast.ClassDef, new: ast.ClassDef) -> list[str]:
    """Return the head of a class with those fields alone that its heir declares anew."""

    def fields(node: ast.ClassDef) -> dict[str, ast.stmt]:
        found = [part for part in node.body if isinstance(part, ast.AnnAssign | ast.Assign)]
        targets = [part.target if isinstance(part, ast.AnnAssign) else part.targets[0] for part in found]
        return dict(zip(map(ast.unparse, targets), found, strict=True))

    body: list[ast.stmt] = [part for part in old.body if isinstance(part, ast.Expr)]
    body += [part for name, part in fields(old).items() if name in fields(new)]
    lines = lines_of(module, old)
    head = lines[: len(lines) - (old.end_lineno or 0) + old.body[0].lineno - 1]
    return head + [line for part in body for line in lines_of(module, part)]


def squeeze(lines: list[str]) -> list[str]:
    """Drop blank lines that follow a blank line: they stood around what was cut out."""
    return [line for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())]


def bases(node: Definition) -> list[str]:
    """Name the classes that a class extends."""
    return [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []


def counterpart(old: str, new: str, node: Definition) -> tuple[str, str] | None:
    """Find what a definition of `new` replaces in `old`: (chapter, name)."""
    known = {name: old for name in definitions(old)}
    for name, module in imports(old).items():
        if module in library.modules() and name in definitions(module):
            known.setdefault(name, module)
    for base in bases(node):
        if base in known and known[base] == old:
            return old, base
    renamed = re.sub(new, old, node.name, flags=re.IGNORECASE)
    for name, module in known.items():
        if name.lower() == renamed.lower():
            return module, name
    ends = [name for name in known if name[0].isupper() and node.name.endswith(name)]
    return (known[max(ends, key=len)], max(ends, key=len)) if ends else None


def render(lines: list[str]) -> list[str]:
    """Highlight Python line by line."""
    text = highlight("\n".join(lines), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    # The indentation is that of the cell, also where it stands inside the mark of a docstring.
    return [re.sub(r"^((?:<span[^>]*>)*)\s+", r"\1", t) for t in text.split("\n")[: len(lines)]]


def indent(line: str) -> int:
    """Count the blanks at the start of a line."""
    return len(line) - len(line.lstrip())


def cell(kind: str, lines: list[tuple[str, str]]) -> str:
    """Write (line, its HTML) of one side as a cell of a table; a wrapped line stays indented."""
    inside = [f'<div style="--indent: {indent(line)}ch">{text.strip()}</div>' for line, text in lines]
    return f'<td class="{kind if lines else "none"}">{"".join(inside)}</td>'


def opcodes(old: list[str], new: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """Compare two pieces line by line, whatever their indentation."""
    plain = [line.strip() for line in old], [line.strip() for line in new]
    return difflib.SequenceMatcher(None, *plain, autojunk=False).get_opcodes()


def rows(old: list[str], new: list[str], context: int = 3) -> Iterator[str]:
    """Yield the rows of a table: equal lines side by side, a change as one row, long runs cut."""
    left, right = (list(zip(lines, render(lines), strict=True)) for lines in (old, new))
    for tag, i0, i1, j0, j1 in opcodes(old, new):
        if tag != "equal":
            yield f"<tr>{cell('old', left[i0:i1])}{cell('new', right[j0:j1])}</tr>"
            continue
        equal = [
            f"<tr>{cell('same', [here])}{cell('same', [there])}</tr>"
            for here, there in zip(left[i0:i1], right[j0:j1], strict=True)
        ]
        first, last = context * (i0 > 0), context * (i1 < len(old))
        hidden = len(equal) - first - last
        if hidden > 2:
            note = f'<tr><td class="cut" colspan="2">{hidden} equal lines</td></tr>'
            equal[first : len(equal) - last] = [note]
        yield from equal


def table(old: Piece | None, new: Piece) -> str:
    """Write two pieces side by side as HTML, or one that has no counterpart alone."""
    after = f"rlbook/{new.module}.py · {new.name}"
    if old is None:
        lines = list(zip(new.lines, render(new.lines), strict=True))
        heads, body = [after], [f"<tr>{cell('new', lines)}</tr>"]
    else:
        heads = [f"rlbook/{old.module}.py · {old.name}", after]
        body = list(rows(old.lines, new.lines))
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    return (
        f'<div class="code-difference highlight"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def api_link(module: str, name: str) -> str:
    """Write a link to the documentation of a name, if it has one."""
    public = any(name in section.names for section in library.sections(module))
    return f"[`{name}`](#rlbook.{module}.{name})" if public else f"`{name}`"


def heading_of(module: str, name: str) -> str:
    """Return the heading of the chapter under which a name is built."""
    found = [section.heading for section in library.sections(module) if name in section.names]
    return found[0] if found else title(module)


def page(old: str, new: str) -> str:
    """Write the page that shows what the chapter `new` changes in the code of `old`."""
    taken = [name for name, module in imports(new).items() if module == old]
    changed: list[tuple[str, Definition, tuple[str, str]]] = []
    added: list[tuple[str, Definition]] = []
    for name, node in definitions(new).items():
        match = counterpart(old, new, node)
        if match:
            changed.append((name, node, match))
        else:
            added.append((name, node))
    # The algorithm itself tells the story: its settings and its trainer come after it.
    changed.sort(key=lambda entry: (entry[0].startswith("train_"), entry[0].endswith("Config")))
    short = [title(name).split(":")[0] for name in (old, new)]
    links = [heading_link(name, title(name), text) for name, text in zip((old, new), short, strict=True)]
    parts = [
        f"# From {short[0]} to {short[1]}",
        f"What the code of {links[1]} changes in that of {links[0]}, made from the two modules. "
        "Lines that changed are marked; runs of equal lines are cut out.",
        f"- **Taken as it is**, by import: {', '.join(api_link(old, n) for n in taken) or 'nothing'}",
        f"- **Changed**: {', '.join(api_link(new, n) for n, *_ in changed) or 'nothing'}",
        f"- **New**: {', '.join(api_link(new, n) for n, *_ in added) or 'nothing'}",
    ]
    parts[2:] = ["\n".join(parts[2:])]
    for name, node, match in changed:
        before = pieces(match[0], definitions(match[0])[match[1]])
        after = pieces(new, node)
        parent = definitions(match[0])[match[1]]
        inherits = match[1] in bases(node)
        if inherits and isinstance(parent, ast.ClassDef) and isinstance(node, ast.ClassDef):
            before[""] = before[""]._replace(lines=overridden(match[0], parent, node))
        parts += [f"## {name}", f"Built in {heading_link(new, heading_of(new, name))}."]
        parts += [table(before.get(part), piece) for part, piece in after.items()]
        rest = ", ".join(f"`{part}`" for part in before if part not in after)
        if rest:
            parts += [f"{'Inherited unchanged' if inherits else 'No longer there'}: {rest}."]
    if added:
        parts += ["## What is new"]
    for name, node in added:
        whole = Piece(new, name, lines_of(new, node))
        parts += [f"### {name}", f"Built in {heading_link(new, heading_of(new, name))}."]
        parts += [table(None, whole)]
    return "\n\n".join(parts) + "\n"
