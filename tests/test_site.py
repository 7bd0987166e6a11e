"""The site, as files: nothing from another host, and links both ways between book and library."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import yaml
from PIL import Image

import rlbook
from rlbook.tangle import find_root, read_toc

ROOT = find_root(Path(__file__).parent)
CHAPTERS = read_toc(ROOT)
MODULES = (ROOT / "rlbook" / "chapters.txt").read_text(encoding="utf-8").split()
ENTRIES = yaml.safe_load((ROOT / "book" / "timeline.yml").read_text(encoding="utf-8"))["entries"]
BOOK = [c for c in rlbook.ALGORITHMS.values() if c.__module__.startswith("rlbook.")]


def page(site: Path, name: str) -> str:
    """Read a page of the site."""
    return (site / f"{name}.html").read_text(encoding="utf-8")


# Where it is built from


def test_the_site_is_built_from_the_folder_that_the_makefile_names(tmp_path: Path) -> None:
    """Sphinx reads conf.py in its folder, and `make book` names the notebooks from the root."""
    (tmp_path / "book").mkdir()
    shutil.copy(ROOT / "book" / "glossary.ipynb", tmp_path / "book")
    env = {**os.environ, "RLBOOK_SOURCE": os.path.relpath(tmp_path, ROOT)}
    subprocess.run([sys.executable, "conf.py"], cwd=ROOT / "book", env=env, check=True)
    toc = yaml.safe_load((tmp_path / "reference" / "toc.yml").read_text(encoding="utf-8"))
    found = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    assert [file for file in found if file.startswith("book/")] == ["book/glossary"]


# Pages


def test_each_chapter_has_a_page_and_each_module_too(site: Path) -> None:
    wanted = {f"book/{name}" for name in CHAPTERS} | {f"reference/api/{name}" for name in MODULES}
    assert not {name for name in wanted if not (site / f"{name}.html").is_file()}
    assert "book/index.html" in (site / "index.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    """Links may lead away; scripts, styles, fonts and pictures may not."""
    loads = re.compile(
        r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"'](?:https?:)?//[^\"']+"
        r"|<link\b(?![^>]*rel=[\"'](?:canonical|author|license)[\"'])[^>]*\bhref=[\"'](?:https?:)?//[^\"']+"
    )
    for path in site.rglob("*.html"):
        assert not loads.findall(path.read_text(encoding="utf-8")), path.name
    for path in (site / "_static").rglob("*.css"):
        css = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", css), path.name


def test_links_inside_the_site_lead_somewhere(site: Path) -> None:
    anchors: dict[Path, set[str]] = {}
    missing = []
    for path in site.rglob("*.html"):
        for link in re.findall(r"<a\b[^>]*\bhref=\"([^\"]+)\"", path.read_text(encoding="utf-8")):
            file, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or file.startswith("//"):
                continue
            target = (path.parent / file).resolve() if file else path
            if target not in anchors and target.is_file():
                text = target.read_text(encoding="utf-8") if target.suffix == ".html" else ""
                anchors[target] = set(re.findall(r"\bid=\"([^\"]+)\"", text))
            if target not in anchors or (anchor and anchor not in anchors[target]):
                missing.append(f"{path.relative_to(site)}: {link}")
    assert not missing, missing[:10]


def test_each_exported_name_links_chapter_and_library(site: Path) -> None:
    for name in MODULES:
        chapter, api = page(site, f"book/{name}"), page(site, f"reference/api/{name}")
        module = __import__(f"rlbook.{name}", fromlist=["__all__"])
        for public in module.__all__:
            assert f'id="rlbook.{name}.{public}"' in api, f"{name}.{public} is not documented"
            assert f"../reference/api/{name}.html#rlbook.{name}.{public}" in chapter, public
        assert f"../../book/{name}.html" in api


def test_each_setting_is_documented(site: Path) -> None:
    for algorithm in BOOK:
        config = algorithm.config_class
        text = page(site, "reference/api/" + config.__module__.removeprefix("rlbook."))
        for name in config.model_fields:
            assert f">{name}<" in text, f"{config.__name__}.{name}"


def test_chapters_say_how_to_open_them(site: Path) -> None:
    for name in CHAPTERS:
        command = "make lab" if name == "index" else f"make lab CHAPTER={name}"
        text = re.sub(r"<[^>]+>", "", page(site, f"book/{name}"))
        assert f"Open in JupyterLab: {command}" in " ".join(text.split())


def test_differences_begin_with_the_algorithm(site: Path) -> None:
    text = page(site, "reference/differences/redq")
    names = ("redq", "redqconfig", "train-redq")
    sections = [text.index(f'<section id="{name}">') for name in names]
    assert sections == sorted(sections)


def test_differences_show_what_a_chapter_changes(site: Path) -> None:
    chapter_of = {entry["name"]: entry.get("chapter") for entry in ENTRIES}
    pairs = [
        (chapter_of[old], entry["chapter"])
        for entry in ENTRIES
        if entry.get("chapter") in MODULES
        for old in entry.get("builds_on", [])
        if chapter_of[old] in MODULES
        if MODULES.index(chapter_of[old]) < MODULES.index(entry["chapter"])
    ]
    pairs = [pair for i, pair in enumerate(pairs) if pair[1] not in {p[1] for p in pairs[:i]}]
    assert {("dqn", "drqn"), ("drqn", "r2d2")} <= set(pairs)
    for old, new in pairs:
        text = page(site, f"reference/differences/{new}")
        assert f"rlbook/{old}.py · " in text and f"rlbook/{new}.py · " in text
        assert 'class="old"' in text and 'class="new"' in text
        assert f"../reference/differences/{new}.html" in page(site, f"book/{new}")
    plain = re.sub(r"<[^>]+>", "", page(site, "reference/differences/drqn"))
    assert "def drqn_loss(" in plain and "def dqn_loss(" in plain


def test_figure_index_shows_each_figure_and_leads_to_it(site: Path) -> None:
    index = page(site, "reference/figures")
    for name in CHAPTERS:
        outputs = [
            output
            for cell in nbformat.read(ROOT / "book" / f"{name}.ipynb", as_version=4).cells
            for output in cell.get("outputs", [])
        ]
        count = sum("image/png" in output.get("data", {}) for output in outputs)
        assert len(re.findall(rf'href="\.\./book/{name}\.html#figure-\d+"', index)) == count, name
        assert len(re.findall(r'<img\b[^>]*\bid="figure-\d+"', page(site, f"book/{name}"))) == count


def test_first_page_shows_trained_agents_of_several_algorithms(site: Path) -> None:
    images = r'<img\b[^>]*\bsrc="\.\./(_images/agent_(\w+)\.gif)"'
    shown = re.findall(images, page(site, "book/index"))
    assert len(shown) >= 3
    assert {algorithm for _, algorithm in shown} <= set(rlbook.ALGORITHMS)
    for path, _ in shown:
        assert getattr(Image.open(site / path), "n_frames", 1) > 20  # it moves
    assert sum((site / path).stat().st_size for path, _ in shown) < 300_000


# The timeline, the glossary, the notation


def test_timeline_and_library_agree() -> None:
    """What the timeline calls implemented is registered, and the reverse."""
    chapters = [entry["chapter"] for entry in ENTRIES if "chapter" in entry]
    assert len(chapters) == len(set(chapters))
    registered = {cls.__module__.removeprefix("rlbook.") for cls in BOOK}
    assert set(chapters) == registered


def test_timeline_is_complete_and_in_order() -> None:
    names = [entry["name"] for entry in ENTRIES]
    assert len(names) == len(set(names)) and len(names) >= 35
    asked = ["DQN", "DRQN", "DDPG", "TRPO", "PPO", "SAC", "R2D2", "TQC", "REDQ", "DrQ-v2", "CrossQ"]
    assert not {*asked, "Discrete SAC"} - set(names)
    assert ENTRIES[0]["year"] == 1989
    assert [entry["year"] for entry in ENTRIES] == sorted(entry["year"] for entry in ENTRIES)
    keys = {"name", "year", "paper", "family", "idea", "builds_on", "chapter", "within", "scope"}
    for i, entry in enumerate(ENTRIES):
        assert {"name", "year", "paper", "family", "idea"} <= set(entry) <= keys, entry["name"]
        assert set(entry.get("builds_on", [])) <= set(names[:i]), entry["name"]
        assert ("scope" in entry) == ("chapter" in entry or "within" in entry), entry["name"]
        assert entry.get("within", "dqn") in CHAPTERS, entry["name"]


def test_each_letter_of_mathematics_stands_under_notation() -> None:
    listed = """alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi pi
        rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"""
    greek = set(listed.split())

    def letters(name: str) -> set[str]:
        text = (ROOT / "book" / f"{name}.py").read_text(encoding="utf-8")
        return set(re.findall(r"\\([A-Za-z]+)", text)) & greek

    known = letters("notation")
    assert not {name: new for name in CHAPTERS if (new := letters(name) - known)}


def test_glossary_is_linked_from_the_chapters(site: Path) -> None:
    for name in MODULES:
        if name in ("settings", "tangle"):  # no reinforcement learning happens there
            continue
        link = r'class="term[^"]*" href="\.\./book/glossary\.html#'
        assert re.search(link, page(site, f"book/{name}")), name


def test_every_word_of_the_glossary_is_linked_from_some_chapter(site: Path) -> None:
    text = (ROOT / "book" / "glossary.py").read_text(encoding="utf-8")
    terms = re.findall(r"^# ### (.+)$", text, flags=re.MULTILINE)
    link = r'class="term[^"]*" href="\.\./book/glossary\.html#([^"]+)"'
    pages = [page(site, f"book/{name}") for name in CHAPTERS]
    linked = {anchor for text in pages for anchor in re.findall(link, text)}
    assert len(terms) > 30
    assert not {term.lower().replace(" ", "-") for term in terms} - linked


def test_a_function_that_returns_is_no_return(site: Path) -> None:
    """The glossary's return is what an agent collects."""
    assert 'href="../book/glossary.html#return"' in page(site, "book/dqn")
    assert re.search(r"and\s+returns\s+an\s+exit", page(site, "book/cli"))  # no link between


def test_a_formula_keeps_its_punctuation(site: Path) -> None:
    """A browser may end a line behind a formula, so that the next one begins with a comma."""
    lost = r"\\\)</span>[,.;:!?)]++(?!</span>)"
    assert 'class="together"' in page(site, "book/dqn")
    assert not {name for name in CHAPTERS if re.search(lost, page(site, f"book/{name}"))}


def test_what_a_class_borrows_from_torch_is_not_explained_again(site: Path) -> None:
    page = (site / "reference" / "api" / "dqn.html").read_text()
    assert "rlbook.dqn.QNetwork.forward" in page
    assert "rlbook.dqn.QNetwork.register_buffer" not in page


def test_fields_of_a_named_tuple_are_no_aliases(site: Path) -> None:
    for name in MODULES:
        assert "Alias for field" not in page(site, f"reference/api/{name}"), name
