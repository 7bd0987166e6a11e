"""The site and JupyterLab in a real browser, which is Chromium from the system's packages."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

from rlbook.tangle import find_root

ROOT = find_root(Path(__file__).parent)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
]
PATIENCE = 120_000  # milliseconds: a busy machine is slow, and only a broken page takes longer
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium: install the package `chromium` to test the pages in a browser",
)


class Visit(NamedTuple):
    """What a page did while it was open."""

    problems: list[str]  # errors on the console, and failed requests
    hosts: list[str]  # requests that left the machine's own files
    figures: list[str]  # pictures that did not show
    equations: tuple[int, int]  # formulas in the page, formulas that were typeset
    overflow: int  # by how many pixels the page is wider than a phone
    excess: dict[str, list[int]]  # by how many pixels parts of a kind are wider than their place
    cut: list[str]  # formulas whose end cannot be reached, with all solutions unfolded


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium, with a profile of its own."""
    install = 'no Playwright: install it with `pip install "rlbook[browser]"`'
    sync_api = pytest.importorskip("playwright.sync_api", reason=install)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(site: Path) -> list[Path]:
    """List the pages that a reader can come to, without the listings of sources."""
    chapters, library = (site / "book").glob("*.html"), (site / "reference").rglob("*.html")
    return sorted([*chapters, *library, site / "genindex.html"])


def own(url: str) -> bool:
    """Say whether a page may ask for an address: what lies beside it, or in it."""
    return url.startswith(("file:", "data:", "blob:"))


PARTS = {
    "differences": ".code-difference",
    "sentences": ".cell_output .sentences pre",
    "wide figures": ".cell_output .wide-figure",
}
LOOK = """async parts => {
    if (window.MathJax) await MathJax.startup.promise;
    for (const image of document.images) image.loading = 'eager';
    const images = [...document.images].filter(image => image.src);
    await Promise.all(images.map(image => image.decode().catch(() => null)));
    const formulas = [...document.querySelectorAll('article .math')];
    const hidden = image => image.offsetParent && (!image.naturalWidth || !image.clientWidth);
    const excess = selector => [...document.querySelectorAll(selector)]
        .map(part => part.scrollWidth - part.clientWidth);
    return {
        figures: images.filter(hidden).map(image => image.src),
        formulas: formulas.length,
        typeset: formulas.filter(f => f.querySelector('mjx-container') &&
            !f.querySelector('mjx-merror')).length,
        overflow: document.documentElement.scrollWidth - window.innerWidth,
        excess: Object.fromEntries(Object.entries(parts).map(([n, s]) => [n, excess(s)])),
    };
}"""
CUT = """() => {
    for (const part of document.querySelectorAll('article details')) part.open = true;
    const cut = f => f.scrollWidth > f.clientWidth + 1 &&
        getComputedStyle(f).overflowX !== 'auto';
    return [...document.querySelectorAll('article span.math')].filter(cut)
        .map(f => f.textContent);
}"""


@pytest.fixture(scope="module")
def visits(browser: Any, pages: list[Path]) -> dict[str, Visit]:
    """Open every page once, in one tab, and note what happens."""
    notes, problems, hosts = {}, list[str](), list[str]()
    context = browser.new_context(viewport={"width": 390, "height": 800})
    context.set_default_timeout(PATIENCE)
    tab = context.new_page()
    tab.on("console", lambda message: problems.extend([message.text] * (message.type == "error")))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("requestfailed", lambda request: problems.append(f"failed: {request.url}"))
    tab.on("request", lambda request: hosts.extend([request.url] * (not own(request.url))))
    for path in pages:
        tab.goto(path.as_uri(), wait_until="load")
        seen = tab.evaluate(LOOK, PARTS)
        name = f"{path.parent.name}/{path.stem}"
        notes[name] = Visit(
            problems=problems.copy(),
            hosts=hosts.copy(),
            figures=seen["figures"],
            equations=(seen["formulas"], seen["typeset"]),
            overflow=seen["overflow"],
            excess=seen["excess"],
            cut=tab.evaluate(CUT) if name == "book/sac" else [],
        )
        problems.clear()
        hosts.clear()
    context.close()
    return notes


@pytest.fixture(scope="module")
def laptop(browser: Any) -> Iterator[Any]:
    """One tab as wide as a laptop, for all tests that only look at a page."""
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    yield tab
    tab.close()


def open_plainly(tab: Any, path: Path) -> None:
    """Open a page whose formulas do not matter, and leave them as they are: it takes a moment."""
    tab.route("**/mathjax/**", lambda route: route.abort())
    tab.goto(path.as_uri())


# The site


def test_every_page_opens_without_an_error(visits: dict[str, Visit]) -> None:
    assert len(visits) > 20
    assert not {name: visit.problems for name, visit in visits.items() if visit.problems}


def test_no_page_asks_another_host(visits: dict[str, Visit]) -> None:
    assert not {name: visit.hosts for name, visit in visits.items() if visit.hosts}


def test_figures_are_visible(visits: dict[str, Visit]) -> None:
    assert not {name: visit.figures for name, visit in visits.items() if visit.figures}


def test_equations_are_typeset(visits: dict[str, Visit]) -> None:
    assert visits["book/dqn"].equations[0] > 10
    wrong = {n: v.equations for n, v in visits.items() if v.equations[0] != v.equations[1]}
    assert not wrong


def test_layout_holds_at_phone_width(visits: dict[str, Visit]) -> None:
    assert not {name: visit.overflow for name, visit in visits.items() if visit.overflow > 0}


def test_first_screen_says_what_for_whom_and_how_to_start(laptop: Any, site: Path) -> None:
    laptop.goto((site / "book" / "index.html").as_uri())
    parts = [f"strong:text('{text}')" for text in ("A book that runs", "What you get")]
    for part in [*parts, "h2:has-text('Five minutes')", "img[src*='agent_']"]:
        box = laptop.locator(f"article {part}").first.bounding_box()
        assert box is not None and box["y"] + box["height"] <= 800, part


def test_a_hundred_characters_fit_on_a_laptop(browser: Any, site: Path) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    open_plainly(tab, site / "book" / "drqn.html")
    wide = tab.eval_on_selector_all(
        "article .cell_input pre",
        """all => {
            const lines = pre => pre.textContent.split('\\n');
            const longest = pre => Math.max(...lines(pre).map(line => line.length));
            return all.filter(pre => longest(pre) <= 100 && pre.scrollWidth > pre.clientWidth)
                .map(pre => pre.textContent);
        }""",
    )
    assert not wide
    tab.close()


def test_differences_can_be_read_on_a_phone(visits: dict[str, Visit]) -> None:
    sizes = visits["differences/drqn"].excess["differences"]
    assert len(sizes) > 10 and max(sizes) <= 0


def test_differences_of_long_names_fit_a_phone(visits: dict[str, Visit]) -> None:
    assert max(visits["differences/r2d2"].excess["differences"]) <= 0


@pytest.mark.parametrize("name", ["agent", "cli", "sweep"])
def test_the_list_of_contents_does_not_push_the_page_aside(
    laptop: Any, site: Path, name: str
) -> None:
    laptop.goto((site / "reference" / "api" / f"{name}.html").as_uri())
    excess = "list => list.scrollWidth - list.clientWidth"
    assert laptop.eval_on_selector(".bd-sidebar-secondary", excess) <= 0


def test_a_phone_folds_sentences_and_scrolls_wide_figures(visits: dict[str, Visit]) -> None:
    excess = visits["book/checkpoint"].excess
    assert len(excess["sentences"]) > 3 and max(excess["sentences"]) <= 0
    assert excess["wide figures"] and min(excess["wide figures"]) > 100


def test_no_formula_is_cut_on_a_phone(visits: dict[str, Visit]) -> None:
    assert visits["book/sac"].equations[1] > 10 and not visits["book/sac"].cut


def test_search_finds_prioritized(browser: Any, site: Path) -> None:
    tab = browser.new_page()
    errors: list[str] = []
    tab.on("console", lambda message: errors.extend([message.text] * (message.type == "error")))
    tab.goto((site / "search.html").as_uri() + "?q=prioritized")
    tab.wait_for_selector("#search-results li a[href*='book/r2d2.html']")  # one result at a time
    tab.close()
    assert not errors


def test_search_field_leads_to_the_results(browser: Any, site: Path) -> None:
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto((site / "book" / "index.html").as_uri())
    tab.keyboard.press("Control+K")
    tab.keyboard.type("burn-in")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#search-results li a")
    assert "search.html" in tab.url
    tab.close()


def test_a_solution_unfolds(browser: Any, site: Path) -> None:
    tab = browser.new_page()
    open_plainly(tab, site / "book" / "dqn.html")
    solution = tab.locator("details:has(> summary:text-is('Solution'))").first
    inside = solution.locator("p").first
    assert not inside.is_visible()
    solution.locator("summary").click()
    assert inside.is_visible()
    tab.close()


def test_dark_mode_keeps_figures_legible(browser: Any, site: Path) -> None:
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    open_plainly(tab, site / "book" / "dqn.html")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    colors = tab.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor,
                  getComputedStyle(document.querySelector('.cell_output img')).backgroundColor]"""
    )
    darkness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert darkness[0] < 200  # the page
    assert darkness[1] == 3 * 255  # a figure, drawn in black on white
    context.close()


def test_code_can_be_copied(browser: Any, site: Path) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    open_plainly(tab, site / "book" / "dqn.html")
    cell = tab.locator("div.cell_input:has-text('class MLP')").first  # imports are folded
    cell.hover()
    cell.locator("button.copybtn").click()
    assert tab.evaluate("navigator.clipboard.readText()").startswith("#| export\nclass MLP")
    context.close()


def test_next_leads_through_the_book(browser: Any, site: Path) -> None:
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    open_plainly(tab, site / "book" / "dqn.html")
    tab.click("a.right-next")
    assert tab.url.endswith("book/drqn.html")
    tab.click("a.left-prev")
    assert tab.url.endswith("book/dqn.html")
    tab.close()


# JupyterLab


def free_port() -> int:
    """Find a port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """Start JupyterLab as `make lab` does, on a copy of the book without outputs."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "_toc.yml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "book", tmp_path / "book")
    path = tmp_path / "book" / "dqn.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    port = free_port()
    flags = (
        f"--no-browser --ServerApp.ip=127.0.0.1 --ServerApp.port={port} --ServerApp.port_retries=0 "
        "--IdentityProvider.token=book --LabApp.news_url= "
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"
    )
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags += " --allow-root"
    folders = {
        f"JUPYTER{key}": str(tmp_path / "jupyter" / key)
        for key in ("_CONFIG_DIR", "_RUNTIME_DIR", "LAB_SETTINGS_DIR", "LAB_WORKSPACES_DIR")
    }
    make = ["make", "-o", ".venv/ready", "lab", "CHAPTER=dqn", f"LAB_FLAGS={flags}"]
    log = tmp_path / "lab.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*make, f"BIN={Path(sys.executable).parent}"],
            cwd=tmp_path,
            env={**os.environ, **folders},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/api?token=book", timeout=5).close()
                    break
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 15)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)


def run_cell(cell: Any) -> None:
    """Run a code cell as a reader does, and wait until JupyterLab has numbered it."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not re.search(r"\d", prompt := cell.locator(".jp-InputPrompt").first.inner_text()):
        assert time.monotonic() < deadline, f"the cell was not run: {cell.inner_text()}"
        if "*" not in prompt:  # a page that is still loading may lose a key: press it again
            cell.locator(".cm-content").first.click()
            cell.page.keyboard.press("Control+Enter")
        cell.page.wait_for_timeout(1000)


def test_jupyterlab_opens_the_chapter_and_runs_its_first_cells(browser: Any, lab: str) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    tab = context.new_page()
    hosts: list[str] = []
    own = (lab, "data:", "blob:")
    tab.on("request", lambda r: hosts.extend([r.url] * (not r.url.startswith(own))))
    tab.goto(f"{lab}/lab/tree/book/dqn.ipynb?token=book")
    notebook = tab.locator(".jp-Notebook").first
    notebook.wait_for(timeout=PATIENCE)
    tab.locator(".jp-Notebook h1:has-text('DQN')").wait_for(timeout=PATIENCE)
    tab.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=PATIENCE)
    cells = notebook.locator(".jp-CodeCell")
    for k in range(3):  # two cells of imports, then the figure that the chapter promises
        run_cell(cells.nth(k))
    output = notebook.locator(".jp-OutputArea-output")
    output.locator("img").first.wait_for(timeout=PATIENCE)
    printed = notebook.locator(".jp-RenderedText:has-text('rlbook sweep dqn --config cartpole')")
    printed.first.wait_for(timeout=PATIENCE)
    assert notebook.locator(".jp-RenderedText[data-mime-type*='error']").count() == 0
    assert not hosts
    context.close()
