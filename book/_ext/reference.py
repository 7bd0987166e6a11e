"""Write the pages of the site that are made from the library and the notebooks."""

import base64
import hashlib
import importlib
import inspect
import io
import shutil
from pathlib import Path
from typing import Any

import differences
import library
import yaml
from library import ROOT, SOURCE, heading_link, title, write
from PIL import Image

from rlbook.settings import Config, describe, flag_name

FOLDER = SOURCE / "reference"  # not committed: made anew by each build
API = "reference/api"


def settings_table(config: type[Config]) -> str:
    """Write the settings of an algorithm as a table: name, default and documentation."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in config.model_fields.items():
        kind = describe(field.annotation).replace("|", r"\|")
        doc = (field.description or "").replace("|", r"\|")
        rows.append(f"| `{name}` | `{field.default!r}` | {doc} ({kind}; `{flag_name(name)}`) |")
    return "\n".join(rows)


def api_entry(module: Any, name: str) -> str:
    """Write the directive that documents one public name."""
    thing = getattr(module, name)
    defined_here = getattr(thing, "__module__", None) == module.__name__
    if inspect.isclass(thing) and defined_here:
        # The fields of a settings class follow as a table, with their documentation.
        skip = "" if issubclass(thing, Config) else "   :members:\n"
        table = f"\n{settings_table(thing)}\n" if issubclass(thing, Config) else ""
        directive = f".. autoclass:: {module.__name__}.{name}\n{skip}"
    elif inspect.isfunction(thing) and defined_here:
        directive, table = f".. autofunction:: {module.__name__}.{name}\n", ""
    else:  # a constant: what it is stands in its code, since it has no docstring
        code = library.assignment(module.__name__.removeprefix("rlbook."), name)
        directive = f".. py:data:: {module.__name__}.{name}\n"
        table = f"\n```python\n{code}\n```\n"
    return f"```{{eval-rst}}\n{directive}```\n{table}"


def api_page(name: str) -> str:
    """Write the page of a module, with the headings of its chapter."""
    module = importlib.import_module(f"rlbook.{name}")
    parts = [
        f"# `rlbook.{name}`",
        f"Taught in the chapter {heading_link(name, title(name))}; each heading below leads to "
        "the part of it that builds what stands here.",
    ]
    for section in library.sections(name):
        is_title = section.heading == title(name)
        parts += [f"## {'At the start' if is_title else section.heading}"]
        parts += [f"Built in {heading_link(name, section.heading)}."]
        parts += [api_entry(module, public) for public in section.names]
    return "\n\n".join(parts) + "\n"


def api_index(names: list[str]) -> str:
    """Write the page that lists all modules and what each exports."""
    rows = []
    for name in names:
        exports = [public for section in library.sections(name) for public in section.names]
        links = ", ".join(f"[`{public}`](#rlbook.{name}.{public})" for public in sorted(exports))
        rows.append(f"## [`rlbook.{name}`](/{API}/{name}.md)")
        rows.append(f"From the chapter {heading_link(name, title(name))}: {links}.")
    intro = (
        "# The library\n\nEvery module of `rlbook` is exported by the chapter of the same name. "
        "These pages are made from its docstrings; under each exported cell of a chapter stand "
        "the links to them."
    )
    return "\n\n".join([intro, *rows]) + "\n"


def thumbnail(png: str) -> bytes:
    """Shrink a figure of a notebook to the width of a small one."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.thumbnail((480, 360))
    data = io.BytesIO()
    image.quantize(128).save(data, "png", optimize=True)
    return data.getvalue()


def chapter_figures(name: str) -> list[tuple[str, str, str]]:
    """List the figures of a chapter: anchor, heading above it, and picture."""
    found: list[tuple[str, str, str]] = []
    for i, cell in enumerate(library.notebook(name).cells):
        heading = [text for index, text in library.headings(name) if index <= i][-1]
        for output in cell.get("outputs", []):
            png = output.get("data", {}).get("image/png")
            if png:
                found.append((f"figure-{len(found) + 1}", heading, png))
    return found


def figure_index(names: list[str]) -> str:
    """Write the page with all figures of the book, and their thumbnails beside it."""
    parts = ["# All figures", "Each figure leads to the place in its chapter where it is made."]
    for name in names:
        cards = []
        for anchor, heading, png in chapter_figures(name):
            digest = hashlib.sha256(png.encode()).hexdigest()[:12]
            path = FOLDER / "thumbnails" / f"{digest}.png"
            if not path.is_file():
                write(path, thumbnail(png))
            target = f"../book/{name}.html#{anchor}"
            alt = f"{heading}, {anchor.replace('-', ' ')} of the chapter {title(name)}"
            image = f'<img src="thumbnails/{path.name}" alt="{alt}" loading="lazy">'
            cards.append(f'<a href="{target}">{image}<span>{heading}</span></a>')
        if cards:
            grid = "\n".join(['<div class="figure-grid">', *cards, "</div>"])
            parts += [f"## {title(name)}", grid]
    return "\n\n".join(parts) + "\n"


def write_pages() -> Path:
    """Write all pages, and the table of contents with them behind the chapters."""
    names, chapters = library.modules(), library.chapters()
    pages = {f"api/{name}.md": api_page(name) for name in names}
    pages["api.md"] = api_index(names)
    pages["figures.md"] = figure_index(chapters)
    pairs = differences.pairs(library.timeline(), names)
    pages |= {f"differences/{new}.md": differences.page(old, new) for old, new in pairs}
    for path in [*FOLDER.glob("*.md"), *FOLDER.glob("*/*.md")]:
        if str(path.relative_to(FOLDER)) not in pages:  # of a chapter that is gone
            path.unlink()
    for file, text in pages.items():
        write(FOLDER / file, text)
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    for part in toc["parts"]:  # a chapter that has not been run has no page yet
        part["chapters"] = [c for c in part["chapters"] if (SOURCE / f"{c['file']}.ipynb").is_file()]
    changes = [{"file": f"reference/differences/{new}"} for _, new in pairs]
    api = {"file": "reference/api", "sections": [{"file": f"{API}/{name}"} for name in names]}
    if changes:
        toc["parts"].append({"caption": "From chapter to chapter", "chapters": changes})
    toc["parts"].append({"caption": "Reference", "chapters": [{"file": "reference/figures"}, api]})
    write(FOLDER / "toc.yml", yaml.safe_dump(toc, sort_keys=False))
    return FOLDER / "toc.yml"


def copy_thumbnails(app: Any, error: Exception | None) -> None:
    """Put the thumbnails beside the page that shows them."""
    if error is None:
        target = Path(app.outdir) / "reference" / "thumbnails"
        shutil.copytree(FOLDER / "thumbnails", target, dirs_exist_ok=True)
