"""The stored evidence: each result is one that today's code would make again, and is shown."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbook.agent import find_algorithm
from rlbook.cli import main
from rlbook.figures import load_result
from rlbook.settings import make_config
from rlbook.sweep import iqm_interval, make_plan, overrides, plain, short
from rlbook.tangle import find_root

ROOT = find_root(Path(__file__).parent)
RESULTS = sorted((ROOT / "book" / "results").glob("*.json"))
SWEEPS = [path for path in RESULTS if "runs" in json.loads(path.read_text())]
CHAPTERS = {path.stem: path.read_text() for path in (ROOT / "book").glob("*.py")}


def names(paths: list[Path]) -> list[str]:
    """Name the tests after the files."""
    return [path.stem for path in paths]


@pytest.mark.parametrize("path", RESULTS, ids=names(RESULTS))
def test_each_result_is_drawn_in_a_chapter(path: Path) -> None:
    named = re.compile(rf'["/]{path.stem}(\.json)?"')
    shown = [name for name, text in CHAPTERS.items() if named.search(text)]
    assert shown, f"no chapter mentions {path.name}"
    drawn = []
    for name in shown:
        cells = json.loads((ROOT / "book" / f"{name}.ipynb").read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        drawn += [
            "image/png" in json.dumps([cell["outputs"] for cell in code[i : i + 6]])
            for i, cell in enumerate(code)
            if named.search("".join(cell["source"]))
        ]
    assert any(drawn), "it is read, and no figure follows"


@pytest.mark.parametrize("path", RESULTS, ids=names(RESULTS))
def test_the_command_of_each_result_stands_in_a_chapter(path: Path) -> None:
    command = json.loads(path.read_text())["command"]
    printed = [
        "".join(output.get("text", []))
        for name in CHAPTERS
        if (notebook := ROOT / "book" / f"{name}.ipynb").exists()
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    assert any(command in text for text in printed), command


@pytest.mark.parametrize("path", SWEEPS, ids=names(SWEEPS))
def test_todays_code_accepts_the_settings_of_each_result(path: Path) -> None:
    result = load_result(path)
    for name, run in result["runs"].items():
        config = make_config(find_algorithm(run["algo"]).config_class, run["settings"])
        assert plain(overrides(config)) == run["settings"], f"{name} has other defaults today"
    assert {"python", "torch", "numpy", "gymnasium", "rlbook"} <= set(result["versions"])
    enough = 1 if path.stem.endswith("_hopper") else 5  # an hour a seed
    assert len(result["seeds"]) >= enough and result["seconds"] > 0 and result["created"]


@pytest.mark.parametrize("path", SWEEPS, ids=names(SWEEPS))
def test_the_command_of_each_result_still_means_its_settings(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, asked = load_result(path), dict[str, Any]()
    program, *words = shlex.split(result["command"])
    assert program == "rlbook" and str(ROOT) not in result["command"]

    def remember(algo: str, settings: dict[str, Any], **keywords: Any) -> None:
        variants = keywords["variants"] or {algo: {}}
        plan = make_plan(algo, settings, variants, keywords["seeds"], Path("runs"))
        asked["seeds"] = list(dict.fromkeys(item.seed for item in plan))
        asked["runs"] = {i.variant: (i.algo, plain(overrides(i.config()))) for i in plan}

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rlbook.sweep.sweep", remember)
    assert main(words) == 0
    assert asked["seeds"] == result["seeds"]
    stored = {name: (run["algo"], run["settings"]) for name, run in result["runs"].items()}
    assert asked["runs"] == stored


@pytest.mark.parametrize("path", SWEEPS, ids=names(SWEEPS))
def test_the_score_of_each_result_is_the_interquartile_mean_of_its_seeds(path: Path) -> None:
    for run in load_result(path)["runs"].values():
        assert run["final"] == [curve[-1] for curve in run["returns"]]
        score = [short(x) if np.isfinite(x) else None for x in iqm_interval(run["final"])]
        assert run["iqm"] == score


def test_todays_code_accepts_the_settings_of_the_measured_bias() -> None:
    result = json.loads((ROOT / "book" / "results" / "redq_bias.json").read_text())
    assert (ROOT / result["command"].split()[1]).is_file() and len(result["seeds"]) >= 5
    for name, row in result["measured"].items():
        settings = dict(row["settings"])
        config_class = find_algorithm(settings.pop("algo")).config_class
        assert plain(overrides(make_config(config_class, settings))), name
        shape = (len(result["seeds"]), len(row["steps"]))
        assert {np.shape(row[key]) for key in ("bias", "std", "returns")} == {shape}
