"""Add to each chapter of the site what its notebook need not repeat.

A line says how to open it in JupyterLab; exported cells lead to the pages of the library; figures
have a name that other pages can point to; words of the glossary lead there. Marks for the style
sheet say what a narrow screen may fold, what it must scroll and where no line may end.
"""

import ast
import base64
import re
from typing import Any

import library
import reference
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def chapter_name(docname: str) -> str | None:
    """Return the chapter that a page is made from, if it is made from one."""
    folder, _, name = docname.partition("/")
    return name if folder == "book" and name in library.chapters() else None


def page_reference(docname: str, text: str, anchor: str = "") -> nodes.reference:
    """Make a link to another page."""
    depth = "../"  # chapters are one folder deep
    link = nodes.reference("", "", refuri=f"{depth}{docname}.html{anchor}", internal=True)
    link += nodes.Text(text)
    return link


def library_reference(module: str, name: str) -> nodes.reference:
    """Make a link to the documentation of a name of the library."""
    anchor = f"#rlbook.{module}.{name}"
    link = page_reference(f"reference/api/{module}", "", anchor)
    link += nodes.literal("", name)
    return link


def opening_line(name: str) -> nodes.paragraph:
    """Say how to run a chapter, and lead to its module and its difference from the one before."""
    line = nodes.paragraph(classes=["chapter-line"])
    command = "make lab" if name == "index" else f"make lab CHAPTER={name}"
    line += [nodes.Text("Open in JupyterLab: "), nodes.literal("", command)]
    if name in library.modules():
        line += [nodes.Text(" · module "), page_reference(f"reference/api/{name}", "")]
        line[-1] += nodes.literal("", f"rlbook.{name}")
    for old, new in reference.differences.pairs(library.timeline(), library.modules()):
        if new == name:
            text = f"what changed from {library.title(old).split(':')[0]}"
            line += [nodes.Text(" · "), page_reference(f"reference/differences/{name}", text)]
    return line


def link_exports(cell: nodes.Element, name: str) -> None:
    """Put links to the library under a cell that is exported."""
    source = next(iter(cell.findall(nodes.literal_block)), None)
    if source is None or not source.astext().startswith("#| export"):
        return
    public = library.public_names(ast.parse(source.astext()))
    if public:
        line = nodes.paragraph(classes=["exported-line"])
        line += nodes.Text("In the library: ")
        for i, export in enumerate(public):
            line += [nodes.Text(", ")] * bool(i) + [library_reference(name, export)]
        # Behind the source, before what the cell shows.
        cell.insert(1, line)


def name_figures(doctree: nodes.document, name: str) -> None:
    """Give each figure an anchor and a text for those who cannot see it."""
    expected = reference.chapter_figures(name)
    count = 0
    for cell in doctree.findall(lambda n: is_element(n, "cell_code")):
        images = [n for n in cell.findall(nodes.image) if ".png" in n["uri"]]
        for image in images:
            if count < len(expected):
                anchor, heading, png = expected[count]
                count += 1
                image["alt"] = f"{heading}, figure {count} of this chapter"
                image["ids"].append(anchor)
                if png_width(png) > WIDE:
                    frame = nodes.container(classes=["wide-figure"])
                    image.parent.replace(image, frame)
                    frame += image


WIDE = 830  # pixels: the letters of a wider figure would be too small on a phone


def png_width(png: str) -> int:
    """Read the width of a picture from its first bytes."""
    return int.from_bytes(base64.b64decode(png[:40])[16:20], "big")


def mark_outputs(cell: nodes.Element) -> None:
    """Mark what a cell prints as sentences, unless blanks put it into columns."""
    for output in cell.findall(lambda n: is_element(n, "cell_code_output")):
        for block in output.findall(nodes.literal_block):
            if not re.search(r"\S {2,}\S|^ +\S|[█|]", block.astext(), flags=re.MULTILINE):
                block["classes"].append("sentences")


def keep_punctuation(doctree: nodes.document) -> None:
    """Keep a formula on one line with the comma behind it, and with a bracket before it."""
    for formula in list(doctree.findall(nodes.math)):
        parent, i = formula.parent, formula.parent.index(formula)
        neighbours = [parent[k] if 0 <= k < len(parent) else None for k in (i - 1, i + 1)]
        before, after = (n.astext() if isinstance(n, nodes.Text) else "" for n in neighbours)
        left, right = re.search(r"[(\[“]*$", before), re.match(r"-\w+|[,.;:?!)\]”’]*", after)
        if left and right and left[0] + right[0]:
            together = nodes.inline(classes=["together"])
            parent[i] = together
            together += [nodes.Text(left[0]), formula, nodes.Text(right[0])]
            if left[0]:
                parent[i - 1] = nodes.Text(before[: left.start()])
            if right[0]:
                parent[i + 1] = nodes.Text(after[right.end() :])


def bind_numbers(doctree: nodes.document) -> None:
    """Keep a number on one line with its per cent sign, and the sizes of an image together."""
    for node in list(doctree.findall(nodes.Text)):
        bound = re.sub(r"(?<=\d) (?=%)|(?<=\d) (?=× ?\d)|(?<=\d ×) (?=\d)", "\u00a0", node.astext())
        if bound != node.astext() and isinstance(node.parent, nodes.paragraph):
            parent = node.parent
            parent[[child is node for child in parent].index(True)] = nodes.Text(bound)


def is_element(node: nodes.Node, kind: str) -> bool:
    """Tell whether a node is a part of a notebook of the given kind."""
    return isinstance(node, nodes.container) and node.get("nb_element") == kind


def glossary() -> dict[str, str]:
    """Return the terms of the glossary, longest first, with their definitions."""
    text = "\n\n".join(c.source for c in library.notebook("glossary").cells)
    found = re.findall(r"^### (.+?)\n+(.+?)(?=\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    terms = {term.strip(): " ".join(meaning.split()) for term, meaning in found}
    return dict(sorted(terms.items(), key=lambda pair: -len(pair[0])))


def plain(text: str) -> str:
    """Take the marks of Markdown out of a text, for a tooltip."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*`$\\]", "", text)


def linkable(node: nodes.Text) -> bool:
    """Tell whether a word in this place may become a link."""
    outside = (nodes.reference, nodes.literal, nodes.title, nodes.math, nodes.raw, nodes.table)
    parent = node.parent
    while parent is not None:
        if isinstance(parent, (*outside, addnodes.pending_xref)):
            return False
        if "chapter-line" in parent.get("classes", []) or is_element(parent, "cell_code"):
            return False
        parent = parent.parent
    return isinstance(node.parent, nodes.paragraph)


# A function returns something, too: only behind these words is a return what an agent collects.
BEFORE_RETURN = (r"\ba ", r"\bthe ", r"\bits ", r"\btheir ", r"\bno ", r"\bof ", "mean ", "-step ", "counted ")


def term_pattern(term: str) -> re.Pattern[str]:
    """Make the pattern that finds a term of the glossary, in the singular or the plural."""
    before = r"(?<![\w-])"
    if term == "Return":
        before = "(?:" + "|".join(f"(?<={word})" for word in BEFORE_RETURN) + ")"
    return re.compile(rf"{before}{re.escape(term)}(?:s|es)?(?![\w-])", re.IGNORECASE)


def link_terms(doctree: nodes.document) -> None:
    """Link the first use of each term of the glossary."""
    texts = [node for node in doctree.findall(nodes.Text) if linkable(node)]
    for term, meaning in glossary().items():
        pattern = term_pattern(term)
        for i, node in enumerate(texts):
            text = node.astext()
            match = pattern.search(text)
            if match:
                anchor = "#" + library.default_slugify(term)
                link = page_reference("book/glossary", match[0], anchor)
                link["reftitle"], link["classes"] = plain(meaning), ["term"]
                parts = [nodes.Text(text[: match.start()]), link, nodes.Text(text[match.end() :])]
                parts = [part for part in parts if part.astext()]
                node.parent.replace(node, parts)
                texts[i : i + 1] = [part for part in parts if part is not link]
                break


def dress_chapter(app: Sphinx, doctree: nodes.document) -> None:
    """Do all of this to the page of a chapter."""
    name = chapter_name(app.env.docname)
    if name is None:
        return
    heading = next(iter(doctree.findall(nodes.title)))
    heading.parent.insert(heading.parent.index(heading) + 1, opening_line(name))
    for cell in list(doctree.findall(lambda node: is_element(node, "cell_code"))):
        link_exports(cell, name)
        mark_outputs(cell)
    name_figures(doctree, name)
    keep_punctuation(doctree)
    bind_numbers(doctree)
    if name not in ("glossary", "index"):
        link_terms(doctree)


def skip_member(_app: Sphinx, _what: str, _name: str, member: Any, *_rest: Any) -> bool | None:
    """Leave out fields of a named tuple, which its signature lists, and methods that are PyTorch's."""
    field = str(member.__doc__).startswith("Alias for field number")
    borrowed = str(getattr(member, "__module__", "")).startswith("torch.")
    return True if field or borrowed else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("doctree-read", dress_chapter)
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-skip-member", skip_member)
    app.connect("build-finished", reference.copy_thumbnails)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
