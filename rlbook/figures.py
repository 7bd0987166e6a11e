"""Made from book/figures.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "CHANGE_NO_RESULT",
    "COLORS",
    "PALETTE",
    "STYLE",
    "Curve",
    "Frames",
    "area_difference",
    "check_frames",
    "choose_runs",
    "draw_parts",
    "draw_result",
    "filmstrip",
    "find_runs",
    "frame_delays",
    "group_runs",
    "has_scores",
    "image_kind",
    "join_results",
    "label_curves",
    "load_result",
    "made_by",
    "on_common_grid",
    "part_colors",
    "pick_frames",
    "plot_against",
    "plot_band",
    "plot_heatmap",
    "plot_parity",
    "plot_result",
    "plot_results",
    "plot_runs",
    "plot_scores",
    "read_metrics",
    "read_run",
    "result_problem",
    "run_labels",
    "save_gif",
    "series_colors",
    "show_parity",
    "use_style",
    "write_image",
]

# %% book/figures.py · Figures
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from PIL import Image

from rlbook.envs import mean_interval, nearest
from rlbook.settings import read_settings, write_whole

# %% book/figures.py · Colours
COLORS: dict[str, str] = {
    "dqn": "#0072B2",  # blue
    "drqn": "#E69F00",  # orange
    "r2d2": "#009E73",  # bluish green
    "sac": "#D55E00",  # vermilion
    "redq": "#CC79A7",  # reddish purple
    "drqv2": "#56B4E9",  # sky blue
    "a2c": "#661100",  # brown
    "ppo": "#332288",  # indigo
    "recurrent_ppo": "#8833EE",  # violet
    "trpo": "#666633",  # olive
    "reference": "#000000",  # a known value or a paper's number
    "random": "#595959",  # the random policy
}
PALETTE: list[str] = [color for name, color in COLORS.items() if name != "random"]


def series_colors(algorithms: Sequence[str]) -> list[str]:
    """Give the first series of each algorithm its own colour, and the others what is left."""
    free = [color for color in PALETTE if color not in {COLORS.get(a) for a in algorithms}]
    colors: list[str] = []
    for i, algorithm in enumerate(algorithms):
        first = algorithm in COLORS and algorithm not in algorithms[:i]
        colors.append(COLORS[algorithm] if first else free[0])
        if not first:
            free.append(free.pop(0))  # colours repeat only when all were used
    return colors


# %% book/figures.py · One style
STYLE: dict[Any, Any] = {
    "figure.figsize": (7.0, 3.6),  # inches
    "figure.dpi": 110,  # 770 pixels: the width of a page of text, and a small file
    "figure.facecolor": "white",  # opaque, so that black labels can be read on a dark page
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.facecolor": "white",
    "axes.edgecolor": "#555555",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "image.cmap": "viridis",
}


def use_style() -> None:
    """Give every figure made after this call the style of the book."""
    matplotlib.rcParams.update(STYLE)


# %% book/figures.py · Curves with a band
def plot_band(
    ax: Axes, steps: np.ndarray, values: np.ndarray, label: str, color: str | None = None
) -> Line2D:
    """Draw the mean of `values` (seeds, points) and the 95 % bootstrap interval of that mean."""
    steps, values = np.asarray(steps), np.atleast_2d(np.asarray(values, dtype=np.float64))
    if values.shape != (len(values), steps.size) or len(values) == 0:
        raise ValueError(
            f"values must be (seeds, points) with one point for each of the {steps.size} steps, "
            f"but its shape is {values.shape}."
        )
    seeds = len(values)
    mean, low, high = mean_interval(values, axis=0)
    (line,) = ax.plot(steps, mean, color=color, label=f"{label} ({seeds} seed{'s' * (seeds > 1)})")
    if seeds > 1:  # one seed says nothing about the spread between seeds
        ax.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    return line


def label_curves(ax: Axes, title: str = "", ylabel: str = "undiscounted return") -> None:
    """Label the axes of learning curves, with large numbers of steps as 10k and 1M."""
    ax.set(xlabel="environment steps", ylabel=ylabel, title=title)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


# %% book/figures.py · Filmstrips
Frames = Sequence[np.ndarray] | np.ndarray  # n images of (height, width, 3), uint8


def pick_frames(frames: Frames, n: int) -> list[np.ndarray]:
    """Choose `n` frames spread evenly from the first to the last, or all when there are fewer."""
    if n < 1:
        raise ValueError(f"n must be at least 1, but it is {n}.")
    chosen = np.linspace(0, len(frames) - 1, min(n, len(frames))).round().astype(int)
    return [frames[i] for i in chosen]


def check_frames(frames: Frames) -> None:
    """Raise unless there are frames, all of them 8-bit colour images of one size."""
    if len(frames) == 0:
        raise ValueError("There are no frames to draw: an episode has at least one.")
    for frame in map(np.asarray, frames):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(
                "Frames must be uint8 images of (height, width, 3), but one is "
                f"{frame.dtype} of shape {frame.shape}."
            )
        if frame.shape != frames[0].shape:
            raise ValueError(f"Frames differ in size: {frames[0].shape} and {frame.shape}.")


def filmstrip(frames: Frames, titles: Sequence[str] | None = None, columns: int = 8) -> Figure:
    """Lay frames out side by side, from left to right and then down."""
    check_frames(frames)
    if titles is not None and len(titles) != len(frames):
        raise ValueError(f"There are {len(titles)} titles for {len(frames)} frames.")
    columns = max(1, min(columns, len(frames)))
    rows = math.ceil(len(frames) / columns)
    width = 9.0 / columns  # inches
    height = width * frames[0].shape[0] / frames[0].shape[1] + (0.25 if titles else 0.05)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, rows * height))
        for i, frame in enumerate(frames):
            ax = figure.add_subplot(rows, columns, i + 1)
            ax.imshow(frame, interpolation="antialiased")
            ax.set(xticks=[], yticks=[])
            ax.set_title(titles[i] if titles else "")
            ax.grid(False)
            ax.spines[:].set(visible=True, color="#BBBBBB")
    return figure


# %% book/figures.py · Animations
def write_image(path: str | Path, save: Callable[[Path], object]) -> None:
    """Let `save` write an image in one step, or say why that cannot be."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save)
    except OSError as error:
        raise ValueError(f"Cannot write {path}: {error.strerror or error}.") from error


def frame_delays(count: int, fps: float) -> list[int]:
    """Return the delay of each frame in hundredths of a second; rounding errors do not add up."""
    clock = np.round(np.arange(count + 1) * 100 / fps).astype(int)
    return [int(delay) for delay in np.diff(clock)]


def save_gif(frames: Frames, path: str | Path, fps: float = 30) -> None:
    """Write an endless animation that plays at the speed of the environment."""
    check_frames(frames)
    if not 0 < fps < math.inf:
        raise ValueError(f"fps must be above 0 and finite, but it is {fps}.")
    stride = math.ceil(fps / 50)  # browsers slow down a GIF of more than 50 frames a second
    images = [Image.fromarray(np.asarray(frame)) for frame in frames[::stride]]
    # One palette for all, from a montage: with a palette for each frame, still parts flicker.
    montage = Image.fromarray(np.concatenate(pick_frames(frames, 8)))
    palette = montage.quantize(256, Image.Quantize.FASTOCTREE)  # white ends as 254, not 253
    first, *rest = [i.quantize(palette=palette, dither=Image.Dither.NONE) for i in images]
    delays = [10 * delay for delay in frame_delays(len(images), fps / stride)]  # milliseconds

    def save(file: Path) -> None:
        first.save(file, format="GIF", save_all=True, append_images=rest, duration=delays, loop=0)

    write_image(path, save)


# %% book/figures.py · Heat maps
def plot_heatmap(
    ax: Axes,
    values: np.ndarray,
    extent: tuple[float, float, float, float],
    xlabel: str,
    ylabel: str,
    label: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> AxesImage:
    """Draw `values` (ys, xs), at even points of `extent`: first x, last x, first y, last y."""
    values = np.asarray(values)
    if values.ndim != 2 or min(values.shape) < 2:
        raise ValueError(f"values must be (ys, xs), two or more of each, but is {values.shape}.")
    x0, x1, y0, y1 = extent
    # A value is at the middle of its cell, so the outermost cells reach half a cell further.
    dx, dy = (x1 - x0) / (values.shape[1] - 1) / 2, (y1 - y0) / (values.shape[0] - 1) / 2
    edges = (x0 - dx, x1 + dx, y0 - dy, y1 + dy)
    low, high = limits
    image = ax.imshow(
        values, origin="lower", extent=edges, aspect="auto", cmap="viridis", vmin=low, vmax=high
    )
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=label)
    return image


# %% book/figures.py · Stored results
def has_scores(run: dict[str, Any], seeds: int) -> bool:
    """Say whether a variant has an algorithm, a last evaluation of each seed, and their IQM."""
    final, iqm = run.get("final"), run.get("iqm")
    if not isinstance(run.get("algo"), str) or not isinstance(final, list):
        return False
    if not isinstance(iqm, list) or len(iqm) != 3 or len(final) != seeds:
        return False
    ends = [end for end in iqm[1:] if end is not None]  # one seed has no interval
    return all(type(number) in (int, float) for number in [*final, iqm[0], *ends])


def result_problem(result: Any) -> str | None:
    """Say what is wrong with the form of a stored result, or return None."""
    if not isinstance(result, dict):
        return "it is not a mapping"
    kinds = {"command": str, "algo": str, "env_id": str, "seeds": list, "runs": dict}
    for key, kind in kinds.items():
        if not isinstance(result.get(key), kind) or not result[key]:
            return f"{key!r} is missing, empty or of the wrong type"
    for name, run in result["runs"].items():
        try:
            returns = np.asarray(run["returns"], dtype=np.float64)
            expected = (len(result["seeds"]), len(run["steps"]))
        except (KeyError, TypeError, ValueError):
            return f"the steps or returns of {name!r} are missing or not numbers, one list per seed"
        if not has_scores(run, len(result["seeds"])):
            return f"{name!r} lacks its algorithm, its last evaluations or their interquartile mean"
        if returns.shape != expected:
            return f"the returns of {name!r} are {returns.shape}, but seeds and steps {expected}"
    return None


def load_result(path: str | Path) -> dict[str, Any]:
    """Read a stored result, and refuse one whose curves cannot be drawn."""
    try:
        result: dict[str, Any] = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"Cannot read the result {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a stored result: it is not JSON.") from error
    if problem := result_problem(result):
        raise ValueError(f"{path} is not a stored result: {problem}.")
    return result


def choose_runs(
    result: dict[str, Any], variants: Sequence[str] | Mapping[str, str] | None
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return label, colour and run of all or some variants; a mapping gives them labels."""
    runs = result["runs"]
    chosen = list(runs) if variants is None else variants
    labels = dict(chosen) if isinstance(chosen, Mapping) else {name: name for name in chosen}
    colors = dict(zip(runs, series_colors([r["algo"] for r in runs.values()]), strict=True))
    for name in labels:
        if name not in runs:
            raise ValueError(f"The result has no variant {name!r}.{nearest(name, list(runs))}")
    return [(label, colors[name], runs[name]) for name, label in labels.items()]


def plot_result(
    ax: Axes,
    result: dict[str, Any],
    variants: Sequence[str] | Mapping[str, str] | None = None,
) -> None:
    """Draw the curves of a stored result, or of some variants; a mapping gives them labels."""
    for label, color, run in choose_runs(result, variants):
        plot_band(ax, np.array(run["steps"]), np.array(run["returns"]), label, color)
    label_curves(ax, title=result["env_id"])
    ax.legend()


def made_by(result: dict[str, Any]) -> str:
    """Return the command that made a result, the day, the version and a hash of the result."""
    version = result["versions"]["rlbook"]
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:8]
    return f"{result['command']}  # {result['created']}, rlbook {version}, {digest}"


def plot_scores(
    ax: Axes,
    result: dict[str, Any],
    variants: Sequence[str] | Mapping[str, str] | None = None,
    colors: Sequence[str] | None = None,
) -> None:
    """Draw the last evaluation of each seed, and their interquartile mean with its interval."""
    chosen = choose_runs(result, variants)
    for row, (_, own, run) in enumerate(chosen):
        color = colors[row] if colors else own
        middle, low, high = run["iqm"]
        if low is not None:  # one seed says nothing about the spread between seeds
            ax.barh(row, high - low, 0.25, left=low, color=color, alpha=0.3)
        ax.plot(run["final"], [row] * len(run["final"]), "o", color=color, markersize=4, alpha=0.7)
        ax.plot(middle, row, "D", color="white", markeredgecolor="black", markersize=6)
        above = (middle, row - 0.22)
        number = f"{middle:.0f}" if abs(middle) >= 100 else f"{middle:.3g}"
        ax.text(*above, number.replace("-", "−"), ha="center", va="bottom", fontsize=8)
    ax.set_yticks(range(len(chosen)), [label for label, _, _ in chosen])
    ax.set(ylim=(len(chosen) - 0.5, -0.7), title=result["env_id"])
    ax.set_xlabel("return of the last evaluation: seeds, IQM and its 95 % interval")
    ax.grid(visible=False, axis="y")
    ax.use_sticky_edges = False  # otherwise a bar starts at the very edge and cuts its dot
    ax.margins(x=0.08)


def draw_result(figure: Figure, result: dict[str, Any]) -> None:
    """Draw the curves of a stored result, and below them the last evaluation of each seed."""
    rows = 0.9 + 0.35 * len(result["runs"])  # inches
    figure.set_size_inches(7, 3.6 + rows)
    curves, ends = figure.subplots(2, 1, height_ratios=[3.6, rows])
    plot_result(curves, result)
    curves.legend().remove()
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    plot_scores(ends, result)
    ends.set_title("")


def plot_against(ax: Axes, result: dict[str, Any], whole: str, part: str) -> None:
    """Draw a variant beside the whole, which has the colour of its algorithm."""
    for name, color in zip((whole, part), part_colors(result, 2), strict=True):
        run = result["runs"][name]
        plot_band(ax, np.array(run["steps"]), np.array(run["returns"]), name, color)
    label_curves(ax, ylabel="return")
    ax.set_title(part, fontsize=9)


def part_colors(result: dict[str, Any], count: int) -> list[str]:
    """Return the colour of the whole, and then one for all parts."""
    own = COLORS.get(next(iter(result["runs"].values()))["algo"], PALETTE[0])
    return [own, *[COLORS["reference"]] * (count - 1)]


def draw_parts(figure: Figure, result: dict[str, Any], columns: int = 4) -> None:
    """Draw each variant of a result beside the first, and below them the last evaluations."""
    whole, *parts = result["runs"]
    if not parts:
        raise ValueError("A result of one variant has no parts to compare: use draw_result.")
    lines = math.ceil(len(parts) / columns)
    above, below = 0.4 + 1.6 * lines, 0.8 + 0.3 * (1 + len(parts))  # inches
    figure.set_size_inches(9, above + below)
    panels, ends = figure.subfigures(2, 1, height_ratios=[above, below], squeeze=False)[:, 0]
    axes = panels.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    returns = np.concatenate([np.ravel(run["returns"]) for run in result["runs"].values()])
    margin = 0.05 * float(np.ptp(returns))
    axes[0, 0].set_ylim(returns.min() - margin, returns.max() + margin)
    for ax, part in zip(axes.flat, parts, strict=False):
        plot_against(ax, result, whole, part)
        ax.label_outer()
    for i, ax in enumerate(axes.flat[len(parts) :], start=len(parts)):
        ax.set_visible(False)
        axes.flat[i - columns].tick_params(labelbottom=True)
        axes.flat[i - columns].set_xlabel("environment steps")
    rows = ends.subplots()
    plot_scores(rows, result, colors=part_colors(result, 1 + len(parts)))
    rows.set_title("")


# %% book/figures.py · Beside another library
def area_difference(
    steps: Sequence[int] | np.ndarray,  # (points,)
    ours: Any,  # returns (seeds, points)
    theirs: Any,  # returns (seeds, points)
) -> tuple[float, float, float]:
    """Return how much higher our mean curve lies than theirs, and its 95 % bootstrap interval."""
    width = steps[-1] - steps[0]
    areas = [np.trapezoid(np.asarray(returns), steps, axis=1) / width for returns in (ours, theirs)]
    generator = np.random.default_rng(0)
    samples = []  # means of seeds, sampled with replacement
    for area in areas:  # (seeds,)
        chosen = generator.integers(len(area), size=(10_000, len(area)))
        samples.append(area[chosen].mean(axis=1))
    low, high = np.percentile(samples[0] - samples[1], [2.5, 97.5])
    return float(areas[0].mean() - areas[1].mean()), float(low), float(high)


def plot_parity(ax: Axes, result: dict[str, Any]) -> None:
    """Draw our curves and those of another library, with the difference between them above."""
    own = COLORS.get(result["algo"], PALETTE[0])
    used = own, COLORS["reference"]  # ours and theirs; then variants of ours
    colors = [*used, *(color for color in PALETTE if color not in used)]
    for (name, run), color in zip(result["runs"].items(), colors, strict=False):
        plot_band(ax, np.array(run["steps"]), np.array(run["returns"]), name, color)
    difference, low, high = (f"{x:+.1f}".replace("-", "−") for x in result["difference"])
    facts = f"difference of the mean heights {difference}, 95 % interval {low} to {high}"
    label_curves(ax, title=f"{result['env_id']}: {facts}")
    ax.legend(loc="lower right")


def show_parity(path: str | Path) -> Figure:
    """Draw a stored comparison; print how it was made, and in what the two sides still differ."""
    result = load_result(path)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2))
        plot_parity(figure.subplots(), result)
    print(made_by(result))
    print("not the same:", *result["deviations"])
    return figure


# %% book/figures.py · The metrics of a run
def read_metrics(path: str | Path) -> dict[str, np.ndarray]:
    """Read `metrics.jsonl` as one array per name, NaN where a line does not have it."""
    lines = Path(path).read_text(errors="replace").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append({**record, "global_step": int(record["global_step"])})
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # a run that goes on, or was killed, was writing it
                break
            raise ValueError(f"Line {number} of {path} is not a line of metrics.") from error
    numbers = [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in records]
    names = {name: None for line in numbers for name in line}  # a dict keeps their order
    metrics = {name: np.array([line.get(name, np.nan) for line in numbers]) for name in names}
    return {"global_step": np.array([], dtype=np.int64), **metrics}


Curve = tuple[dict[str, Any], np.ndarray, np.ndarray]  # settings, steps, values


def read_run(path: str | Path, metric: str) -> Curve:
    """Return the settings of a run, and the steps and values of one metric."""
    path = Path(path)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (path / name).is_file():
            raise ValueError(f"{path} is no run directory: it has no {name} to read.")
    config, metrics = read_settings(path / "config.yaml"), read_metrics(path / "metrics.jsonl")
    if not {"algo", "env_id", "seed"} <= set(config):
        raise ValueError(f"{path} is no run directory: its config.yaml is not that of a run.")
    values = metrics.get(metric, np.array([]))
    found = np.isfinite(values)
    if not found.any():
        known = [name for name in metrics if name != "global_step"]
        listed = ", ".join(known) or "none yet"
        if metric.startswith("eval_") and "eval_return_mean" not in known:
            raise ValueError(
                f"The run {path} has no evaluations, since 'eval_every' is "
                f"{config.get('eval_every')} (0 for none): train with another, or plot another "
                f"metric. It has: {listed}."
            )
        hint = nearest(metric, known) or f" It has: {listed}."
        raise ValueError(f"The run {path} has no metric {metric!r}.{hint}")
    return config, metrics["global_step"][found], values[found]


# %% book/figures.py · Runs side by side
def find_runs(path: str | Path) -> list[Path]:
    """Return a run directory, or the runs of a sweep in its directory."""
    path = Path(path)
    runs = [] if (path / "config.yaml").exists() else sorted(path.glob("*/seed_*/config.yaml"))
    return [run.parent for run in runs] or [path]


CHANGE_NO_RESULT = ("run_dir", "log_every", "checkpoint_replay", "tensorboard", "keep_best")


def group_runs(paths: Sequence[str | Path], metric: str) -> list[list[Curve]]:
    """Group the runs that differ only in their seed."""
    groups: dict[str, dict[Any, Curve]] = {}
    for path in paths:
        config, steps, values = read_run(path, metric)
        seed = config.pop("seed")
        for name in CHANGE_NO_RESULT:
            config.pop(name, None)
        group = groups.setdefault(json.dumps(config, sort_keys=True, default=str), {})
        if seed in group:  # the same numbers twice would draw a band that is too narrow
            raise ValueError(f"{path} repeats another run: same settings, same seed {seed}.")
        group[seed] = (config, steps, values)
    return [list(group.values()) for group in groups.values()]


def on_common_grid(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (points,) and values (curves, points) on the range that all curves cover."""
    first = max(steps[0] for _, steps, _ in curves)
    last = min(steps[-1] for _, steps, _ in curves)
    grid = np.unique(np.concatenate([steps for _, steps, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    if grid.size == 0:
        raise ValueError("Runs that differ only in their seed have no range of steps in common.")
    return grid, np.stack([np.interp(grid, steps, values) for _, steps, values in curves])


def run_labels(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Name each group by its algorithm, and by the settings in which it differs from the others."""
    labels = []
    many_envs = len({config["env_id"] for config in configs}) > 1
    for config in configs:
        like = [c for c in configs if all(c[k] == config[k] for k in ("algo", "env_id"))]
        differ = [key for key in config if any(c.get(key) != config[key] for c in like)]
        parts = [str(config["algo"])] + [str(config["env_id"])] * many_envs
        parts += [f"{key} {config[key]}" for key in differ[:3]] + ["…"] * (len(differ) > 3)
        labels.append(", ".join(parts))
    return labels


def image_kind(out: str | Path) -> str:
    """Return the kind of image that a file name asks for, or say which kinds there are."""
    kind = Path(out).suffix[1:].lower()
    if kind not in ("png", "pdf", "svg"):
        raise ValueError(f"Cannot write {out}: its name must end in .png, .pdf or .svg.")
    return kind


def plot_runs(
    paths: Sequence[str | Path], out: str | Path, metric: str = "eval_return_mean"
) -> Figure:
    """Draw runs as curves, seeds of the same settings as one with a band; write the figure."""
    if not paths:
        raise ValueError("There is no run to plot: name at least one run directory.")
    kind = image_kind(out)
    groups = group_runs(paths, metric)
    configs = [group[0][0] for group in groups]
    colors = series_colors([str(config["algo"]) for config in configs])
    environments = {str(config["env_id"]): None for config in configs}
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        ax = figure.subplots()
        for group, label, color in zip(groups, run_labels(configs), colors, strict=True):
            line = plot_band(ax, *on_common_grid(group), label, color)
            line.set_marker("o" if np.size(line.get_xdata()) == 1 else "")  # a point has no line
        ylabel = "undiscounted return" if metric == "eval_return_mean" else metric
        label_curves(ax, title=", ".join(environments), ylabel=ylabel)
        ax.legend()
        write_image(out, lambda file: figure.savefig(file, format=kind))
    return figure


def join_results(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Read stored results as one; if there are several, a variant is named after its file, too."""
    results = [load_result(path) for path in paths]
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    runs = {
        f"{file}: {name}" if len(results) > 1 else name: run
        for file, result in zip(names, results, strict=True)
        for name, run in result["runs"].items()
    }
    return {"env_id": ", ".join({str(result["env_id"]): None for result in results}), "runs": runs}


def plot_results(paths: Sequence[str | Path], out: str | Path) -> Figure:
    """Draw the curves of stored results, their scores below, and write the figure."""
    kind, result = image_kind(out), join_results(paths)
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        draw_result(figure, result)
        write_image(out, lambda file: figure.savefig(file, format=kind))
    return figure
