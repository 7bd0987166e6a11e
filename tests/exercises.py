"""Read the exercises of a chapter, and run their solutions with no more of it than they need."""

import ast
import builtins
import re
import symtable
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlbook.tangle import find_root, read_notebook

ROOT = find_root(Path(__file__).parent)
START = re.compile(r"^\*\*(?:Exercise )?(\d+)\b", flags=re.MULTILINE)
SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>(.*?)</details>", flags=re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PLANTED = re.compile(r"planted bug|find the bug", flags=re.IGNORECASE)


@dataclass
class Exercise:
    """A question, the code that comes with it, and the code of its folded solution."""

    number: int
    text: str = ""
    given: list[ast.stmt] = field(default_factory=list)  # its own cells, up to the solution
    before: list[ast.stmt] = field(default_factory=list)  # what the chapter ran until then

    @property
    def planted(self) -> bool:
        """Whether the code that comes with it has a bug to find."""
        return bool(PLANTED.search(SOLUTION.sub("", self.text)))

    @property
    def solution(self) -> str | None:
        """The code of the solution, or nothing if there is none."""
        folded = SOLUTION.search(self.text)
        return "\n".join(PYTHON.findall(folded[1])) if folded else None


def cells(chapter: str) -> list[tuple[str, str]]:
    """List the kind and the source of each cell."""
    notebook = read_notebook(ROOT / "book" / f"{chapter}.py")
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def exercises(chapter: str) -> list[Exercise]:
    """List the exercises of a chapter in their order."""
    found: list[Exercise] = []
    earlier: list[ast.stmt] = []
    inside = False
    for kind, source in cells(chapter):
        if kind == "code":
            if source.startswith("#| export"):
                continue  # the module has it
            statements = ast.parse(source).body
            if inside and found and found[-1].solution is None:
                found[-1].given += statements
            earlier += statements
            continue
        for heading, text in by_heading(source):
            inside = heading.startswith("Exercises") if heading else inside
            if not inside:
                continue
            first, *starts = START.split(text)
            if found:
                found[-1].text += first
            for number, body in zip(starts[::2], starts[1::2], strict=True):
                found.append(Exercise(int(number), body, [], list(earlier)))
    return found


def by_heading(source: str) -> Iterator[tuple[str, str]]:
    """Cut a text at its headings of the second level; the first piece may have none."""
    first, *rest = re.split(r"^## +(.+)$", source, flags=re.MULTILINE)
    yield "", first
    yield from zip(rest[::2], rest[1::2], strict=True)


# What a piece of code needs


def root_name(node: ast.expr) -> str | None:
    """Return `a` for `a.b[0].c`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield a table of names and those of the functions and classes inside it."""
    yield table
    for child in table.get_children():
        yield from scopes(child)


def table_of(node: ast.AST) -> symtable.SymbolTable:
    """Let Python sort the names of a piece of code."""
    return symtable.symtable(ast.unparse(node), "<code>", "exec")


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value at the top level."""
    symbols = table_of(node).get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def looked_up(node: ast.AST) -> set[str]:
    """Return the names of the top level that a piece of code looks up, in functions too."""
    top = table_of(node)
    found = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    for scope in scopes(top):
        symbols = [symbol for symbol in scope.get_symbols() if symbol.is_global()]
        found |= {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    return found - set(dir(builtins))


def used_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement needs to find when it starts."""
    match node:
        case ast.For():
            inside = used_in_order([*node.body, *node.orelse])
            return looked_up(node.iter) | (inside - stored_names(node.target))
        case ast.With():
            targets = [item.optional_vars for item in node.items if item.optional_vars]
            inside = used_in_order(node.body) - set().union(*map(stored_names, targets))
            return inside.union(*(looked_up(item.context_expr) for item in node.items))
        case ast.If() | ast.While():
            return looked_up(node.test) | used_in_order(node.body) | used_in_order(node.orelse)
        case ast.Try():
            handlers = [used_in_order(handler.body) for handler in node.handlers]
            kinds = [looked_up(handler.type) for handler in node.handlers if handler.type]
            errors = {handler.name for handler in node.handlers if handler.name}
            rest = used_in_order(node.body) | used_in_order(node.orelse)
            return rest.union(*handlers, *kinds, used_in_order(node.finalbody)) - errors
    return looked_up(node)


def stored_names(node: ast.AST) -> set[str]:
    """Return the names in a target such as `i, (a, b)`."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def used_in_order(statements: Sequence[ast.stmt]) -> set[str]:
    """Return what a run of statements needs to find, and does not make by itself."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in statements:
        used |= used_names(node) - bound
        bound |= bound_names(node)
    return used


def changed_names(node: ast.stmt) -> set[str]:
    """Return the names whose objects a statement may change: `a.add(1)` and `a[0] = 1`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return set()
    touched: list[ast.expr] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            touched.append(part)
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            touched += [part.value] if isinstance(part.value.func, ast.Attribute) else []
    return {name for name in map(root_name, touched) if name is not None}


def needed(statements: list[ast.stmt], names: set[str], known: set[str]) -> list[ast.stmt]:
    """Choose the statements that the names depend on."""
    inside: set[str] = set()
    while True:
        chosen = one_pass(statements, names | inside, known)
        # A function may use what is defined only after it.
        found = [node for node in chosen if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        if (used := set().union(*map(used_names, found))) <= inside:
            return chosen
        inside |= used


def one_pass(statements: list[ast.stmt], names: set[str], known: set[str]) -> list[ast.stmt]:
    """Walk from the last statement to the first, and keep what gives the names their values."""
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = set().union(*map(bound_names, imports))
    plain = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    wanted, chosen = set(names), []
    for node in reversed(statements):
        bound = bound_names(node)
        changed = (changed_names(node) - imported - known) & wanted
        if bound & wanted or changed:
            chosen.append(node)
            # Other statements, a loop for example, may leave a name as it was.
            wanted = (wanted - bound if isinstance(node, plain) else wanted) | used_names(node)
    return chosen[::-1]


def repairs(exercise: Exercise) -> list[ast.stmt]:
    """Return the statements of a solution that define the planted pieces anew."""
    planted = {name for node in exercise.given for name in bound_names(node)}
    solution = [n for n in ast.parse(exercise.solution or "").body if bound_names(n) & planted]
    code: list[ast.stmt] = [n for n in solution if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return code or [node for node in solution if isinstance(node, ast.Assign)]


def run_exercise(exercise: Exercise, place: types.ModuleType, repaired: bool = True) -> None:
    """Run a solution behind what it needs; unless `repaired`, with the bug still in place."""
    solution = ast.parse(exercise.solution or "").body
    if not repaired:
        left_out = {ast.dump(node) for node in repairs(exercise)}
        solution = [node for node in solution if ast.dump(node) not in left_out]
    names = used_in_order([*exercise.given, *solution])
    setup = needed(exercise.before, names, set(vars(place)))
    # An assert that comes with a planted bug shows the bug: the repair would fail it.
    given = [node for node in exercise.given if not isinstance(node, ast.Assert)]
    tree = ast.Module([*setup, *given, *solution], [])
    exec(compile(tree, f"<exercise {exercise.number}>", "exec"), vars(place))
