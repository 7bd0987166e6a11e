"""What the chapter `figures` cannot test about itself: files, bad input, and its solutions."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from scipy.special import stdtrit

from rlbook import figures


@pytest.fixture
def ax() -> Axes:
    """Return the axes of an empty figure that no display knows of."""
    return Figure().subplots()


def moving_square(count: int, size: int = 40) -> list[np.ndarray]:
    """Return frames (size, size, 3), each different from all others."""
    frames = []
    for i in range(count):
        frame = np.full((size, size, 3), 255, dtype=np.uint8)
        frame[10:20, i % (size - 8) : i % (size - 8) + 8] = (0, 114, 178)
        frames.append(frame)
    return frames


def make_run(
    path: Path, seed: int, values: list[float], steps: list[int] | None = None, **settings: Any
) -> Path:
    """Write a run directory as a training run would."""
    path.mkdir(parents=True)
    config = {"algo": "dqn", "env_id": "CartPole-v1", "seed": seed, "run_dir": str(path)}
    (path / "config.yaml").write_text(yaml.safe_dump({**config, **settings}))
    with open(path / "metrics.jsonl", "w") as file:
        for step, value in zip(steps or range(10, 10 * len(values) + 1, 10), values, strict=True):
            print(json.dumps({"global_step": step, "loss": 0.1}), file=file)
            print(json.dumps({"global_step": step, "eval_return_mean": value}), file=file)
    return path


RUN: dict[str, Any] = {
    **{"algo": "dqn", "settings": {}, "steps": [10, 20, 30], "returns": [[1, 2, 3], [3, 4, 5]]},
    **{"final": [3, 5], "iqm": [4, 3, 5]},
}


def make_result(**changes: Any) -> dict[str, Any]:
    """Return a small stored result, with some of its entries changed."""
    runs = {"default": RUN, "no_replay": {**RUN, "returns": [[0, 0, 0], [1, 1, 1]]}}
    base = {"command": "rlbook sweep dqn", "algo": "dqn", "env_id": "CartPole-v1", "seeds": [0, 1]}
    return {**base, "runs": runs, **changes}


def message(call: Callable[[], object]) -> str:
    """Return what a call says when it refuses; it must be one sentence, or two with a hint."""
    with pytest.raises(ValueError) as info:
        call()
    text = str(info.value)
    assert text.endswith((".", "?")) and "\n" not in text
    return text


# Curves with a band


def test_band_is_the_bootstrap_interval_computed_by_hand(ax: Axes) -> None:
    values = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 60.0]])
    line = figures.plot_band(ax, np.array([0, 100]), values, "x", "#0072B2")
    assert np.allclose(np.asarray(line.get_ydata()), [2, 30])
    corners = np.asarray(ax.collections[0].get_paths()[0].vertices)
    # one of 27 samples is three times the smallest: more than the 2.5 % that are left out
    for x, low, high in ((0, 1, 3), (100, 10, 60)):
        ys = corners[corners[:, 0] == x, 1]
        assert np.isclose(ys.min(), low) and np.isclose(ys.max(), high)
    assert line.get_label() == "x (3 seeds)"


def test_a_band_never_shows_a_return_that_no_seed_had(ax: Axes) -> None:
    rng = np.random.default_rng(0)
    values = np.where(rng.random((5, 40)) < 0.7, 500.0, 10 * rng.random((5, 40)))
    figures.plot_band(ax, np.arange(40), values, "x")
    corners = np.asarray(ax.collections[0].get_paths()[0].vertices)
    for step in range(40):
        ys = corners[corners[:, 0] == step, 1]
        assert values[:, step].min() - 1e-9 <= ys.min() <= ys.max() <= values[:, step].max() + 1e-9


def test_the_directory_of_a_sweep_stands_for_its_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tmp_path / "sweep" / "plain" / f"seed_{seed}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"algo: dqn\nenv_id: E-v0\nseed: {seed}\n")
        line = '{"global_step": %d, "eval_return_mean": 1.0}\n'
        (folder / "metrics.jsonl").write_text(line % 10 + line % 20)
    runs = figures.find_runs(tmp_path / "sweep")
    assert [run.name for run in runs] == ["seed_0", "seed_1"]
    assert figures.find_runs(runs[0]) == [runs[0]]
    drawn = figures.plot_runs(runs, tmp_path / "curve.png")
    assert drawn.axes[0].get_lines()[0].get_label() == "dqn (2 seeds)"
    with pytest.raises(ValueError, match=r"has no metric 'speed'\. It has: eval_return_mean\."):
        figures.plot_runs(runs, tmp_path / "curve.png", metric="speed")


def test_one_seed_has_no_band(ax: Axes) -> None:
    line = figures.plot_band(ax, np.arange(4), np.arange(4.0), "x")
    assert line.get_label() == "x (1 seed)"
    assert not ax.collections


def test_seeds_and_points_are_not_confused(ax: Axes) -> None:
    assert "(3, 2)" in message(lambda: figures.plot_band(ax, np.arange(3), np.zeros((3, 2)), "x"))
    message(lambda: figures.plot_band(ax, np.arange(3), np.zeros((2, 3, 1)), "x"))
    message(lambda: figures.plot_band(ax, np.arange(3), np.zeros((0, 3)), "x"))


def test_each_algorithm_keeps_its_colour() -> None:
    assert figures.series_colors(["sac", "redq"]) == [
        figures.COLORS["sac"],
        figures.COLORS["redq"],
    ]
    many = figures.series_colors(["dqn"] * 9 + ["sac"])
    assert many[0] == figures.COLORS["dqn"] and many[-1] == figures.COLORS["sac"]
    assert figures.COLORS["dqn"] not in many[1:] and figures.COLORS["sac"] not in many[:-1]
    assert len(set(figures.series_colors(["dqn"] * 7))) == 7
    assert len(set(figures.COLORS.values())) == len(figures.COLORS)
    assert figures.series_colors(["somebody's own"])[0] in figures.PALETTE


# Colours

# How people without green-sensitive or red-sensitive cones see red, green and blue light
# (Machado, Oliveira and Fernandes 2009).
CONES = {
    "all cones": np.eye(3),
    "no green-sensitive cones": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no red-sensitive cones": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
RGB_TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def smallest_difference(colors: list[str], cones: np.ndarray) -> float:
    """Return the smallest distance of two colours in CIELAB, where 2 can just be noticed."""
    pixels = np.array([to_rgb(color) for color in colors])
    light = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(light @ cones.T, 0, 1) @ RGB_TO_XYZ.T / RGB_TO_XYZ.sum(axis=1)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f.T
    lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
    distances = np.linalg.norm(lab[:, None] - lab[None], axis=2)
    return float(distances[np.triu_indices(len(colors), k=1)].min())


@pytest.mark.parametrize("name", list(CONES))
def test_no_two_colours_look_alike(name: str) -> None:
    assert smallest_difference(list(figures.COLORS.values()), CONES[name]) > 15


def test_black_and_white_are_100_apart() -> None:
    assert abs(smallest_difference(["black", "white"], np.eye(3)) - 100) < 0.01


# Frames


def test_first_and_last_frame_are_always_picked() -> None:
    for count in range(1, 30):
        for n in range(2, 12):
            picked = [int(i) for i in figures.pick_frames(np.arange(count), n)]
            assert picked[0] == 0 and picked[-1] == count - 1
            assert len(picked) == min(n, count) == len(set(picked))
    assert "at least 1" in message(lambda: figures.pick_frames(np.arange(3), 0))


def test_filmstrip_lays_out_rows_and_titles() -> None:
    strip = figures.filmstrip(moving_square(10), titles=[f"step {i}" for i in range(10)], columns=4)
    assert len(strip.axes) == 10
    assert strip.axes[9].get_title() == "step 9"
    strip.canvas.draw()
    assert strip.axes[4].get_position().y1 < strip.axes[0].get_position().y0


@pytest.mark.parametrize("draw", [figures.filmstrip, lambda f: figures.save_gif(f, "unused.gif")])
def test_frames_that_cannot_be_drawn_are_refused(draw: Callable[[Any], object]) -> None:
    assert "no frames" in message(lambda: draw([]))
    assert "float64" in message(lambda: draw([np.zeros((4, 4, 3))]))
    assert "object" in message(lambda: draw([None]))  # an environment without rgb_array
    assert "(4, 4)" in message(lambda: draw([np.zeros((4, 4), dtype=np.uint8)]))
    mixed = [np.zeros((4, 4, 3), dtype=np.uint8), np.zeros((5, 4, 3), dtype=np.uint8)]
    assert "differ in size" in message(lambda: draw(mixed))
    assert not Path("unused.gif").exists()


def test_titles_are_counted() -> None:
    assert "2 titles for 3" in message(lambda: figures.filmstrip(moving_square(3), ["a", "b"]))


def gif_facts(path: Path) -> tuple[int, int, Any]:
    """Return the number of frames, their total milliseconds and the loop count of a GIF."""
    with Image.open(path) as image:
        frames = getattr(image, "n_frames", 1)
        total = 0
        for i in range(frames):
            image.seek(i)
            total += int(image.info["duration"])
        return frames, total, image.info.get("loop")


@pytest.mark.parametrize("fps", [10, 30, 50])
def test_gif_has_all_frames_loops_and_keeps_time(tmp_path: Path, fps: int) -> None:
    figures.save_gif(moving_square(30), tmp_path / "a.gif", fps=fps)
    assert gif_facts(tmp_path / "a.gif") == (30, 30_000 // fps, 0)
    assert os.listdir(tmp_path) == ["a.gif"]


def test_gif_of_a_fast_environment_drops_frames_and_keeps_time(tmp_path: Path) -> None:
    figures.save_gif(moving_square(30), tmp_path / "a.gif", fps=100)
    assert gif_facts(tmp_path / "a.gif") == (15, 300, 0)


def test_gif_of_a_still_scene_keeps_time(tmp_path: Path) -> None:
    frames = moving_square(1) * 10 + moving_square(3) + moving_square(3)[-1:] * 7
    figures.save_gif(frames, tmp_path / "a.gif", fps=20)  # equal frames are stored once
    assert gif_facts(tmp_path / "a.gif")[1:] == (1000, 0)


def test_gif_shows_the_colours_of_the_frames(tmp_path: Path) -> None:
    frames = moving_square(5)
    figures.save_gif(np.stack(frames), tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as image:
        for i, frame in enumerate(frames):
            image.seek(i)
            assert np.abs(np.asarray(image.convert("RGB")).astype(int) - frame).max() <= 2


def test_gif_of_one_frame(tmp_path: Path) -> None:
    figures.save_gif(moving_square(1), tmp_path / "new" / "a.gif")
    assert gif_facts(tmp_path / "new" / "a.gif")[0] == 1


@pytest.mark.parametrize("fps", [0, -3, float("nan"), float("inf")])
def test_impossible_speed_is_refused(tmp_path: Path, fps: float) -> None:
    assert "fps" in message(lambda: figures.save_gif(moving_square(2), tmp_path / "a.gif", fps))


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(b"old")

    def half(file: Path) -> None:
        file.write_bytes(b"half of the n")
        raise OSError(28, "No space left on device")

    text = message(lambda: figures.write_image(path, half))
    assert text == f"Cannot write {path}: No space left on device."
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.gif"]


def test_a_comparison_is_shown_with_what_is_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: dict[str, Any] = {"algo": "dqn", "steps": [10, 20], "returns": [[0.0, 10.0], [10.0, 20.0]]}
    run |= {"final": [10.0, 20.0], "iqm": [15.0, 10.0, 20.0]}
    facts: dict[str, Any] = {"command": "made up", "created": "today", "versions": {"rlbook": "0"}}
    facts |= {"algo": "dqn", "env_id": "X-v0", "seeds": [0, 1], "difference": [0.0, -1.0, 1.0]}
    result = {**facts, "deviations": ["One.", "Two."], "runs": {"rlbook": run, "peer": run}}
    (tmp_path / "r.json").write_text(json.dumps(result))
    figure = figures.show_parity(tmp_path / "r.json")
    assert "95 % interval" in figure.axes[0].get_title() and len(figure.axes[0].lines) == 2
    printed = capsys.readouterr().out
    assert printed == f"{figures.made_by(result)}\nnot the same: One. Two.\n"


def test_a_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gif").mkdir()
    assert "a.gif" in message(lambda: figures.save_gif(moving_square(2), tmp_path / "a.gif"))
    (tmp_path / "file").write_text("")
    assert "b.gif" in message(lambda: figures.save_gif(moving_square(2), tmp_path / "file/b.gif"))
    assert sorted(os.listdir(tmp_path)) == ["a.gif", "file"]


# Heat maps


def test_heatmap_puts_each_value_at_its_place(ax: Axes) -> None:
    values = np.arange(12.0).reshape(3, 4)  # (ys, xs)
    image = figures.plot_heatmap(ax, values, (0, 3, 10, 12), "x", "y", "value")
    left, right, bottom, top = image.get_extent()
    for j, y in enumerate([10, 11, 12]):
        for i, x in enumerate([0, 1, 2, 3]):
            column = int((x - left) / (right - left) * 4)
            row = int((y - bottom) / (top - bottom) * 3)
            assert values[row, column] == values[j, i]
    assert image.origin == "lower"
    assert ax.figure.axes[1].get_ylabel() == "value"
    assert "(4,)" in message(lambda: figures.plot_heatmap(ax, values[0], (0, 1, 0, 1), "", "", ""))


# Stored results


def test_result_round_trip_and_curves(tmp_path: Path, ax: Axes) -> None:
    (tmp_path / "r.json").write_text(json.dumps(make_result()))
    result = figures.load_result(tmp_path / "r.json")
    figures.plot_result(ax, result)
    assert [line.get_label() for line in ax.lines] == ["default (2 seeds)", "no_replay (2 seeds)"]
    assert ax.lines[0].get_color() == figures.COLORS["dqn"]
    assert np.allclose(np.asarray(ax.lines[0].get_ydata()), [2, 3, 4])


def test_variant_keeps_its_colour_when_drawn_alone(ax: Axes) -> None:
    figures.plot_result(ax, make_result())
    both = ax.lines[1].get_color()
    alone = Figure().subplots()
    figures.plot_result(alone, make_result(), {"no_replay": "without replay"})
    assert alone.lines[0].get_color() == both
    assert alone.lines[0].get_label() == "without replay (2 seeds)"


def test_scores_are_seeds_and_their_interquartile_mean(ax: Axes) -> None:
    figures.plot_scores(ax, make_result(), {"default": "DQN"})
    seeds, middle = (line.get_xydata() for line in ax.lines)
    assert np.array_equal(seeds, [[3, 0], [5, 0]]) and np.array_equal(middle, [[4, 0]])
    bars = [bar for bar in ax.patches if isinstance(bar, Rectangle)]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(3, 2)]
    assert [text.get_text() for text in ax.texts] == ["4"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["DQN"]
    alone = Figure().subplots()  # one seed has no interval
    one = {**RUN, "returns": [[1, 2, 3]], "final": [3], "iqm": [3, None, None]}
    figures.plot_scores(alone, make_result(seeds=[0], runs={"a": one}))
    assert len(alone.lines) == 2 and not alone.patches


def test_each_part_stands_beside_the_whole_within_what_was_seen() -> None:
    parts = {name: {**RUN, "returns": [[0, 0, 0], [1, 1, 1]]} for name in ("a", "b", "c", "d")}
    figure = Figure()
    figures.draw_parts(figure, make_result(runs={"default": RUN, **parts}), columns=3)
    *panels, scores = figure.axes
    assert [ax.get_title() for ax in panels if ax.get_visible()] == list(parts)
    for ax in panels[: len(parts)]:
        own, part = ax.lines
        assert own.get_color() == figures.COLORS["dqn"] != part.get_color()
        assert np.array_equal(np.asarray(own.get_ydata()), np.mean(RUN["returns"], axis=0))
        low, high = ax.get_ylim()  # seeds were between 0 and 5; the bands reach further
        assert -1 < low < 0 and 5 < high < 6
    labelled = [ax.get_xlabel() != "" for ax in panels[: len(parts)]]
    assert labelled == [False, True, True, True]  # each column has its steps below
    assert [tick.get_text() for tick in scores.get_yticklabels()] == ["default", *parts]
    message(lambda: figures.draw_parts(Figure(), make_result(runs={"default": RUN})))


def test_an_algorithm_keeps_its_colour_among_others(ax: Axes) -> None:
    runs = {"one": RUN, "two": {**RUN, "algo": "sac"}}
    figures.plot_result(ax, make_result(runs=runs))
    assert [line.get_color() for line in ax.lines] == [figures.COLORS[a] for a in ("dqn", "sac")]


def test_unknown_variant_gets_the_nearest_name(ax: Axes) -> None:
    text = message(lambda: figures.plot_result(ax, make_result(), ["no_reply"]))
    assert "'no_reply'" in text and "'no_replay'" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not a mapping"),
        (json.dumps(make_result(algo=3)), "'algo'"),
        (json.dumps(make_result(runs={})), "'runs'"),
        (json.dumps(make_result(runs={"a": 3})), "'a'"),
        (json.dumps(make_result(runs={"a": {"steps": [10]}})), "'a'"),
        (json.dumps(make_result(runs={"a": {**RUN, "returns": [[1, 2, 3], [1]]}})), "'a'"),
        (json.dumps(make_result(runs={"a": {**RUN, "returns": [["x"] * 3] * 2}})), "'a'"),
        (json.dumps(make_result(runs={"a": {**RUN, "returns": [[1, 2, 3]]}})), "(1, 3)"),
        *[
            (json.dumps(make_result(runs={"a": {**RUN, **wrong}})), "'a' lacks")
            for wrong in (
                {"iqm": [4, 3]},
                {"iqm": None},
                {"iqm": ["x", 3, 5]},
                {"final": None},
                {"final": [3]},
                {"algo": ["dqn"]},
            )
        ],
        (json.dumps(make_result(runs={"a": {"steps": [1], "returns": [[1], [2]]}})), "'a' lacks"),
    ],
)
def test_wrong_result_is_refused_when_read(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "r.json").write_text(content)
    text = message(lambda: figures.load_result(tmp_path / "r.json"))
    assert "is not a stored result" in text and says in text


def test_missing_result_is_named(tmp_path: Path) -> None:
    assert "none.json" in message(lambda: figures.load_result(tmp_path / "none.json"))
    message(lambda: figures.load_result(tmp_path))


# Metrics and runs


def test_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 0, [1.0, 2.0]) / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n") + whole[:cut].endswith(b"}")
        assert len(figures.read_metrics(path)["global_step"]) == complete


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 0, [1.0, 2.0]) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for damage in ("{", "[]", "3", '{"loss": 1}', "\udc80".encode(errors="surrogateescape")):
        text = damage if isinstance(damage, bytes) else damage.encode()
        parts = [lines[0].encode(), text, *(line.encode() for line in lines[2:])]
        path.write_bytes(b"\n".join(parts) + b"\n")
        assert "Line 2 of" in message(lambda: figures.read_metrics(path))


def test_metrics_are_aligned_with_their_steps(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 0, [1.0, 2.0]) / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"global_step": 30, "note": "text", "loss": null, "eval_return_mean": NaN}\n')
    metrics = figures.read_metrics(path)
    assert metrics["global_step"].tolist() == [10, 10, 20, 20, 30]
    assert metrics["global_step"].dtype == np.int64
    expected = [np.nan, 1, np.nan, 2, np.nan]
    assert np.array_equal(metrics["eval_return_mean"], expected, equal_nan=True)
    assert "note" not in metrics


def drawn(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    """Return the points of each line by its label."""
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for line in figure.axes[0].lines
    }


def test_seeds_become_one_band_and_settings_stay_apart(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / "a", 0, [1.0, 2.0], lr=0.1),
        make_run(tmp_path / "b", 1, [3.0, 4.0], lr=0.1, log_every=7, keep_best=True),
        make_run(tmp_path / "c", 0, [9.0, 9.0], lr=0.2),
        make_run(tmp_path / "d", 0, [5.0, 5.0], algo="sac", env_id="CartPole-v1"),
    ]
    figure = figures.plot_runs(paths, tmp_path / "out" / "curve.png")
    assert drawn(figure) == {
        "dqn, lr 0.1 (2 seeds)": ([10, 20], [2, 3]),
        "dqn, lr 0.2 (1 seed)": ([10, 20], [9, 9]),
        "sac (1 seed)": ([10, 20], [5, 5]),
    }
    assert len(figure.axes[0].collections) == 1
    lines = figure.axes[0].lines
    assert (lines[0].get_color(), lines[2].get_color()) == (
        figures.COLORS["dqn"],
        figures.COLORS["sac"],
    )
    with Image.open(tmp_path / "out" / "curve.png") as image:
        assert np.asarray(image.convert("RGBA"))[..., 3].min() == 255  # legible on a dark page


def test_runs_of_different_grids_are_interpolated_where_both_reach(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 0, [0.0, 10.0, 20.0], steps=[0, 10, 20])
    b = make_run(tmp_path / "b", 1, [7.0, 7.0], steps=[5, 15])
    figure = figures.plot_runs([a, b], tmp_path / "curve.svg")
    assert drawn(figure) == {"dqn (2 seeds)": ([5, 10, 15], [6, 8.5, 11])}
    c = make_run(tmp_path / "c", 2, [7.0], steps=[100])
    assert "in common" in message(lambda: figures.plot_runs([a, c], tmp_path / "x.png"))


def test_runs_of_two_environments_say_which(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 0, [1.0], env_id="A-v0")
    b = make_run(tmp_path / "b", 0, [1.0], env_id="B-v0")
    figure = figures.plot_runs([a, b], tmp_path / "curve.pdf")
    assert set(drawn(figure)) == {"dqn, A-v0 (1 seed)", "dqn, B-v0 (1 seed)"}
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")


def test_other_metrics_can_be_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 0, [1.0, 2.0])
    figure = figures.plot_runs([run], tmp_path / "curve.png", metric="loss")
    assert figure.axes[0].get_ylabel() == "loss"
    text = message(lambda: figures.plot_runs([run], tmp_path / "x.png", metric="los"))
    assert "'los'" in text and "'loss'" in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", 0, [1.0], eval_every=0)
    out = tmp_path / "x.png"

    def says(*paths: Path) -> str:
        return message(lambda: figures.plot_runs(paths, out))

    assert "at least one" in says()
    assert "no run directory" in says(tmp_path / "nowhere")
    assert "config.yaml" in says(good, tmp_path)
    assert "repeats another run" in says(good, good)
    (good / "metrics.jsonl").write_text('{"global_step": 10, "loss": 0.1}\n')
    assert "has no evaluations, since 'eval_every' is 0 (0 for none): train with" in says(good)
    assert says(good).endswith("or plot another metric. It has: loss.")
    (good / "metrics.jsonl").write_text("")
    assert says(good).endswith("or plot another metric. It has: none yet.")
    (good / "metrics.jsonl").unlink()
    assert "metrics.jsonl" in says(good)
    (good / "metrics.jsonl").write_text("")
    for content, sentence in (
        (b"a: [", "is not valid YAML, line 1"),
        (b"just text", "must hold settings"),
        (b"algo: dqn", "no run directory"),
        (b"\x00", "is not valid YAML"),
        (b"\xff\xfe\xfa", "is not valid YAML"),
    ):
        (good / "config.yaml").write_bytes(content)
        assert sentence in says(good)
    assert not out.exists()


@pytest.mark.parametrize("name", ["curve", "curve.xyz", "curve.gif", ""])
def test_only_known_kinds_of_figures_are_written(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "a", 0, [1.0])
    assert ".png" in message(lambda: figures.plot_runs([run], tmp_path / name))


def test_plotting_runs_leaves_the_style_of_the_user_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figures.plot_runs([make_run(tmp_path / "a", 0, [1.0])], tmp_path / "x.png")
    figures.filmstrip(moving_square(2))
    assert dict(matplotlib.rcParams) == before


# The solutions of the exercises


def test_solution_smoothing_hardly_narrows_the_band() -> None:
    shape = 1 - np.exp(-np.arange(1_000, 50_001, 1_000) / 10_000)
    ratios = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        curves = rng.normal(400, 60, (5, 1)) * shape + rng.normal(0, 12, (5, 50))
        ratios.append(curves[:, -10:].mean(axis=1).std(ddof=1) / curves[:, -1].std(ddof=1))
    assert 0.9 < np.median(ratios) < 1.0


def test_solution_how_many_seeds() -> None:
    rng = np.random.default_rng(0)
    power = {}
    for n in (5, 22, 23):
        a, b = rng.normal(0, 60, (100_000, n)), rng.normal(60, 60, (100_000, n))
        error = np.sqrt((a.var(axis=1, ddof=1) + b.var(axis=1, ddof=1)) / n)
        difference = b.mean(axis=1) - a.mean(axis=1)
        power[n] = np.mean(np.abs(difference) > stdtrit(2 * n - 2, 0.975) * error)
    assert abs(power[5] - 0.285) < 0.01
    assert 0.89 < power[22] < 0.903 < 0.905 < power[23]


def test_stored_results_are_drawn_and_named(tmp_path: Path) -> None:
    result = {"command": "rlbook sweep", "algo": "dqn", "env_id": "CartPole-v1", "seeds": [0, 1]}
    run = {**RUN, "steps": [1, 2], "returns": [[0.0, 1.0], [0.0, 2.0]]}
    runs = {"a": run, "b": {**run, "final": [1.0, 2.0], "iqm": [1.5, 1.0, 2.0]}}
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**result, "runs": runs}))
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    labels = []
    for paths, out in (([one], tmp_path / "1.png"), ([one, two], tmp_path / "2.svg")):
        curves, scores = figures.plot_results(paths, out).axes
        labels.append(curves.get_legend_handles_labels()[1])
        rows = [tick.get_text() for tick in scores.get_yticklabels()]
        assert [label.removesuffix(" (2 seeds)") for label in labels[-1]] == rows
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "one.json").write_bytes(one.read_bytes())  # the same name elsewhere
    both = figures.join_results([one, tmp_path / "x" / "one.json"])
    assert len(both["runs"]) == 4 and both["env_id"] == "CartPole-v1"
    assert labels[0] == ["a (2 seeds)", "b (2 seeds)"]
    assert labels[1][:3] == ["one: a (2 seeds)", "one: b (2 seeds)", "two: a (2 seeds)"]
    assert (tmp_path / "1.png").stat().st_size > 0 and (tmp_path / "2.svg").stat().st_size > 0
    assert ".png" in message(lambda: figures.plot_results([one], tmp_path / "x.txt"))
