"""The stored evidence: each result is one that today's code would make again, and is shown."""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbook.agent import find_algorithm
from rlbook.cli import main
from rlbook.figures import load_result, made_by
from rlbook.settings import make_config
from rlbook.sweep import iqm_interval, make_plan, overrides, plain, short
from rlbook.tangle import find_root

ROOT = find_root(Path(__file__).parent)
RESULTS = sorted((ROOT / "book" / "results").glob("*.json"))
MEASURED = ("redq_bias", "speed")  # by scripts of their own
PARITY = "parity_"  # by bench/parity.py: tests/test_parity.py looks at these
SWEEPS = [p for p in RESULTS if p.stem not in MEASURED and not p.stem.startswith(PARITY)]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))


def names(paths: list[Path]) -> list[str]:
    """Name the tests after the files."""
    return [path.stem for path in paths]


def readers(stem: str) -> list[tuple[str, str]]:
    """Return what each cell that reads a result printed, and all of its outputs."""
    named, found = re.compile(rf'["/]{stem}(\.json)?"'), []
    for notebook in NOTEBOOKS:
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code" and named.search("".join(cell["source"])):
                outputs = cell["outputs"]
                printed = "".join("".join(output.get("text", [])) for output in outputs)
                found.append((printed, json.dumps(outputs)))
    return found


@pytest.mark.parametrize("path", RESULTS, ids=names(RESULTS))
def test_each_result_is_drawn_where_it_is_read(path: Path) -> None:
    cells = readers(path.stem)
    assert cells, f"no chapter reads {path.name}"
    drawn = [outputs for _, outputs in cells]
    if path.stem == "speed":  # one file for a whole chapter, whose other cells draw it
        drawn = [(ROOT / "book" / "speed.ipynb").read_text()]
    assert any("image/png" in outputs for outputs in drawn), "it is read, and no figure is drawn"


@pytest.mark.parametrize("path", RESULTS, ids=names(RESULTS))
def test_each_chapter_names_the_command_and_shows_the_file_as_it_is_now(path: Path) -> None:
    told = made_by(json.loads(path.read_text()))
    for printed, _ in readers(path.stem):
        assert told in printed, f"run the chapter again: it does not print {told!r}"


def test_a_result_that_changed_is_told_apart() -> None:
    result = json.loads(SWEEPS[0].read_text())
    told = made_by(result)
    next(iter(result["runs"].values()))["returns"][0][0] += 1
    assert made_by(result) != told


@pytest.mark.parametrize("path", SWEEPS, ids=names(SWEEPS))
def test_todays_code_accepts_the_settings_of_each_result(path: Path) -> None:
    result = load_result(path)
    for name, run in result["runs"].items():
        config = make_config(find_algorithm(run["algo"]).config_class, run["settings"])
        assert plain(overrides(config)) == run["settings"], name
        made_with = {**result["defaults"][run["algo"]], **run["settings"]}
        today = plain(vars(config))
        changed = {key for key, value in made_with.items() if today[key] != value}
        assert not changed, f"{name}: these have other defaults today, so make it anew"
    assert {"python", "torch", "numpy", "gymnasium", "rlbook"} <= set(result["versions"])
    assert len(result["seeds"]) >= 5 and result["seconds"] > 0 and result["created"]


@pytest.mark.parametrize("path", SWEEPS, ids=names(SWEEPS))
def test_the_curves_of_each_result_are_whole(path: Path) -> None:
    result = load_result(path)
    for name, run in result["runs"].items():
        settings = {**result["defaults"][run["algo"]], **run["settings"]}
        every, total = settings["eval_every"], settings["total_steps"]
        assert run["steps"] == list(range(every, total + 1, every)), name


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


def test_the_measured_bias_has_the_settings_of_its_script() -> None:
    result = json.loads((ROOT / "book" / "results" / "redq_bias.json").read_text())
    script = runpy.run_path(str(ROOT / result["command"].split()[1]))
    assert len(result["seeds"]) >= 5 and list(result["measured"]) == list(script["VARIANTS"])
    for name, row in result["measured"].items():
        agent_class, own = script["VARIANTS"][name]
        settings = script["SHARED"] | own
        make_config(agent_class.config_class, settings)  # today's code accepts them
        assert row["settings"] == plain({"algo": agent_class.name, **settings})
        assert row["steps"] == [script["EVERY"] * (i + 1) for i in range(script["POINTS"])]
        shape = (len(result["seeds"]), len(row["steps"]))
        assert {np.shape(row[key]) for key in ("bias", "std", "returns")} == {shape}
