# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Figures
#
# This chapter has the functions that draw the figures of this book: learning curves with a band,
# filmstrips, animations, heat maps, and the curves of stored results and runs. At the end you can
# draw a learning curve that does not flatter its algorithm, and you have measured how far you can
# trust its band.
#
# | | |
# |---|---|
# | You need | NumPy, and the mean and variance of a sample |
# | Same as in most papers | mean over seeds, 95 % bootstrap interval, one colour per algorithm |
# | Different from many papers | it says how often that interval is wrong with few seeds |
#
# The figure shows why this matters. Algorithms A and B each have five learning curves, and all ten
# come from **the same distribution**. So A is not better than B, and a figure in which A wins is
# wrong.

# %% tags=["hide-input"]
#| export
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

# %% tags=["hide-input"]
import os

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no screen then

import base64
import tempfile

import matplotlib.pyplot as plt
import yaml
from IPython.display import HTML
from scipy.special import stdtrit
from scipy.stats import trim_mean

import rlbook.figures as finished  # the module that this chapter exports
from rlbook.envs import make_env
from rlbook.sweep import iqm_interval

# %% tags=["hide-input"]
steps = np.arange(1_000, 50_001, 1_000)  # (points,)
shape = 1 - np.exp(-steps / 10_000)  # the true mean curve, as a share of the final level


def made_up_returns(rng: np.random.Generator, seeds: int) -> np.ndarray:
    """Return curves (seeds, points) whose true mean is 400 x `shape`."""
    level = rng.normal(400, 60, size=(seeds, 1))
    return level * shape + rng.normal(0, 12, size=(seeds, len(steps)))


rng = np.random.default_rng(1)
a, b = made_up_returns(rng, 5), made_up_returns(rng, 5)
finished.use_style()
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
best = a[:, -1].argmax()
left.plot(steps, a[best], color=finished.PALETTE[3], label="A (best of 5 seeds)")
left.plot(steps, b.mean(axis=0), color=finished.PALETTE[0], label="B (mean of 5 seeds)")
left.legend(loc="lower right")
finished.label_curves(left, title="A seems to win")
finished.plot_band(right, steps, a, "A", finished.PALETTE[3])
finished.plot_band(right, steps, b, "B", finished.PALETTE[0])
right.plot(steps, 400 * shape, color="black", linestyle="--", label="the true mean of both")
right.legend(loc="lower right")
finished.label_curves(right, title="no difference to see", ylabel="")
plt.show()

# %% [markdown]
# On the left, A shows its best seed and B its mean. On the right, both show the mean of their five
# seeds, with the 95 % interval of that mean as a band.
#
# How much does the best seed flatter? In these made-up curves the final returns of seeds have a
# standard deviation of 60. The best of two samples from a normal distribution is on average
# $1 / \sqrt{\pi} \approx 0.56$ standard deviations above the mean, and the best of more is higher:

# %%
samples = np.random.default_rng(0).normal(size=(20_000, 20))
flattery = {n: samples[:, :n].max(axis=1).mean() for n in (2, 5, 10, 20)}
for n, sigmas in flattery.items():
    print(f"best of {n:2d} seeds: {sigmas:+.2f} standard deviations, {60 * sigmas:+4.0f} of return")
assert abs(flattery[2] - 1 / np.sqrt(np.pi)) < 0.03

# %% [markdown]
# The more seeds you try, the better your best one looks. So the best seed says more about your
# budget than about your algorithm.
#
# ## Colours
#
# Each algorithm has one colour through the whole book. About one man in twelve has trouble telling
# red from green, so the first colours are those of Okabe and Ito, which were chosen for
# such readers. Their eighth colour, yellow, is left out because it is hard to see on white. Brown,
# indigo and olive are from the palettes of Paul Tol, made for the same purpose. Violet was chosen
# because it differs enough from all the others.

# %%
#| export
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


# %% tags=["hide-input"]
DEUTERANOPIA = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
)
pixels = np.array([matplotlib.colors.to_rgb(color) for color in COLORS.values()])
light = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
light = np.clip(light @ DEUTERANOPIA.T, 0, 1)
seen = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
figure, ax = plt.subplots(figsize=(8, 1.8))
ax.imshow(np.stack([pixels, seen]), aspect="auto")
ax.set_xticks(range(len(COLORS)), list(COLORS))
ax.set_yticks([0, 1], ["most readers", "no green-sensitive cones"])
ax.set_xticks(np.arange(len(COLORS) - 1) + 0.5, minor=True)
ax.grid(False)
ax.grid(which="minor", color="white", linewidth=4)
ax.axhline(0.5, color="white", linewidth=4)
ax.tick_params(which="both", length=0)
ax.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# The second row shows what a reader without green-sensitive cones sees, by the model of Machado,
# Oliveira and Fernandes. A test checks with this model that no two colours become too similar.
#
# Some figures show one algorithm several times, for example an ablation, which runs it with one
# part left out. Then the first curve keeps the algorithm's colour, and the others take what is
# left of the palette.

# %%
#| export
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


# %%
assert series_colors(["dqn", "sac"]) == [COLORS["dqn"], COLORS["sac"]]
assert series_colors(["dqn", "dqn", "dqn"]) == [COLORS["dqn"], COLORS["drqn"], COLORS["r2d2"]]

# %% [markdown]
# ## One style
#
# A figure must be readable on a screen, on paper and on a dark page. On a dark page, black labels
# on a transparent background are invisible, so the background is white and opaque.

# %%
#| export
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


# %%
use_style()
blank = plt.figure(figsize=(1, 1))
blank.canvas.draw()
corner = np.asarray(blank.canvas.buffer_rgba())[0, 0]
plt.close(blank)
assert corner.tolist() == [255, 255, 255, 255]  # white, and no transparency

# %% [markdown]
# ## Curves with a band
#
# You have $n$ seeds, and at one point of the curve their returns $x_1, \dots, x_n$. The curve
# shows their mean $\bar x$. How far can it be from the mean of infinitely many seeds? The band
# answers with a **bootstrap interval**: sample $n$ of the $n$ returns with replacement, take their
# mean, repeat this 2,000 times, and keep the middle 95 % of the means. (It has nothing to do with
# the bootstrapping of [Basics](basics.ipynb).) The function `mean_interval` comes from
# [Environments](envs.ipynb), which uses it for the returns of episodes, and has the example by
# hand: the returns 1, 2 and 3 have the interval from 1 to 3.

# %%
mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
assert np.allclose([mean, low, high], [2, 1, 3])

# %% [markdown]
# One seed has no spread, so it gets no band. The label says how many seeds there are, because you
# cannot judge a band without this number.

# %%
#| export
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

# %% [markdown]
# All learning curves of the book have the same two axes: environment steps, with 10,000 written as
# 10k, and the undiscounted return, whatever discount the algorithm itself uses.

# %%
#| export
def label_curves(ax: Axes, title: str = "", ylabel: str = "undiscounted return") -> None:
    """Label the axes of learning curves, with large numbers of steps as 10k and 1M."""
    ax.set(xlabel="environment steps", ylabel=ylabel, title=title)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))

# %% [markdown]
# How much does it help to run more seeds? Here are the first one, the first three and all of
# twelve seeds.

# %%
twelve = made_up_returns(np.random.default_rng(4), 12)
figure, panels = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
for ax, n in zip(panels, (1, 3, 12), strict=True):
    plot_band(ax, steps, twelve[:n], "made up", COLORS["dqn"])
    ax.plot(steps, 400 * shape, color=COLORS["reference"], linestyle="--", label="true mean")
    ax.legend(loc="lower right")
    label_curves(ax, ylabel="undiscounted return" if n == 1 else "")
plt.show()

# %% [markdown]
# ### Does the band keep its promise?
#
# A 95 % interval should contain the true mean in 95 of 100 experiments. You can measure that:
# repeat the experiment 4,000 times with a known mean, and count. Two other intervals are common in
# papers:
#
# - **one standard error**, $\bar x \pm s / \sqrt n$, with
#   $s^2 = \frac{1}{n-1}\sum_i (x_i - \bar x)^2$;
# - **Student's interval**, $\bar x \pm t_{n-1}\, s / \sqrt n$, where $t_{n-1}$ is the 97.5 %
#   quantile of Student's distribution: 1.96 for many seeds, 2.78 for five and 12.7 for two. It is
#   made for returns that are roughly normal.
#
# A bootstrap interval also works for the interquartile mean (IQM), the mean without the lowest and
# the highest quarter of the returns. [Sweeps](sweep.ipynb) sums up its last evaluations with it.

# %%
def iqm_intervals(values: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the bootstrap interval of the IQM of each experiment; values: (experiments, seeds)."""
    picks = (rng.integers(values.shape[1], size=values.shape) for _ in range(500))
    draws = (np.take_along_axis(values, pick, axis=1) for pick in picks)
    middles = [trim_mean(draw, proportiontocut=0.25, axis=1) for draw in draws]
    low, high = np.percentile(middles, [2.5, 97.5], axis=0)
    return low, high


def coverage(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    """Return the share of the intervals that contain the truth."""
    return float(np.mean((low <= truth) & (truth <= high)))


# %%
counts = [3, 5, 10, 20]
names = ("Student's t", "bootstrap", "bootstrap of the IQM", "one standard error")
measured: dict[str, list[float]] = {name: [] for name in names}
rng = np.random.default_rng(0)
for n in counts:
    values = rng.normal(400, 60, size=(4_000, n))  # (experiments, seeds)
    mean, low, high = mean_interval(values, axis=1)
    error = values.std(axis=1, ddof=1) / np.sqrt(n)
    half = stdtrit(n - 1, 0.975) * error
    measured["Student's t"].append(coverage(mean - half, mean + half, 400))
    measured["bootstrap"].append(coverage(low, high, 400))
    measured["bootstrap of the IQM"].append(coverage(*iqm_intervals(values, rng), 400))
    measured["one standard error"].append(coverage(mean - error, mean + error, 400))

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 3.2))
ax.axhline(0.95, color=COLORS["reference"], linestyle="--")
ax.text(20.4, 0.957, "95 %: what is promised", ha="right", va="bottom")
for (name, shares), marker in zip(measured.items(), "os^v", strict=True):
    ax.plot(counts, shares, marker=marker, label=name)
ax.legend(loc="center right", bbox_to_anchor=(1, 0.58))
ax.set(xlabel="seeds", ylabel="share of intervals\nthat contain the mean", ylim=(0.5, 1.02), xticks=counts)
plt.show()
for name, shares in measured.items():
    print(f"{name:20s} with 5 seeds: contains the true mean in {100 * shares[1]:.1f} % of experiments")

# %%
assert all(abs(share - 0.95) < 0.02 for share in measured["Student's t"])
assert measured["bootstrap"][1] < 0.87 < 0.93 < measured["Student's t"][1]
assert measured["bootstrap of the IQM"][1] < 0.92
assert measured["one standard error"][1] < 0.70

# %% [markdown]
# With five seeds, a bootstrap interval misses the true mean two or three times as often as it
# promises. It only knows the five returns, and five returns seldom show the full spread. Student's
# interval keeps its promise, if returns are normal. Why do the curves of the book not show it?
# Because returns are not normal: they have a largest value, and some seeds fail. Then Student's
# interval can reach returns that are impossible, such as those above 500 in CartPole. Compare both
# on five seeds, one of which fails:

# %%
five = np.array([500.0, 500.0, 492.0, 500.0, 100.0])
mean, low, high = mean_interval(five)
half = stdtrit(4, 0.975) * five.std(ddof=1) / np.sqrt(5)
print(f"mean {mean:.0f}, bootstrap interval {low:.0f} to {high:.0f}")
print(f"Student's interval {mean - half:.0f} to {mean + half:.0f}, where 500 is the most there is")
assert five.min() <= low <= mean <= high <= five.max() < mean + half

# %% [markdown]
# So trust a band of five seeds less than its 95 % says. Ten seeds are better, and a figure that
# also shows each seed as a dot is better still.

# %% [markdown]
# ## Filmstrips
#
# A return of 500 does not tell you what the agent does. A filmstrip does, even on paper: frames at
# equal distances, the first and the last of the episode among them. By hand: three of ten frames
# are numbers 0, 4.5 (rounded to the even number 4) and 9.

# %%
#| export
Frames = Sequence[np.ndarray] | np.ndarray  # n images of (height, width, 3), uint8


def pick_frames(frames: Frames, n: int) -> list[np.ndarray]:
    """Choose `n` frames spread evenly from the first to the last, or all when there are fewer."""
    if n < 1:
        raise ValueError(f"n must be at least 1, but it is {n}.")
    chosen = np.linspace(0, len(frames) - 1, min(n, len(frames))).round().astype(int)
    return [frames[i] for i in chosen]

# %%
assert pick_frames(np.arange(10), 3) == [0, 4, 9]
assert pick_frames(np.arange(2), 3) == [0, 1]

# %% [markdown]
# An environment that was made without `render_mode="rgb_array"` renders `None`, and an image of
# floats would be drawn black. Both are errors:

# %%
#| export
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


# %%
#| export
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

# %% [markdown]
# Here is a policy of one line for CartPole: push the cart to the side to which the pole leans. How
# does its episode end? (The frames are cut to their middle.)

# %%
def chase(observation: np.ndarray) -> int:
    """Push to the side to which the pole leans."""
    return int(observation[2] > 0)


def play(policy: Callable[[np.ndarray], int], seed: int) -> list[np.ndarray]:
    """Return the frames of one episode of CartPole."""
    env = make_env("CartPole-v1", render_mode="rgb_array")
    observation, _ = env.reset(seed=seed)
    frames, over = [np.asarray(env.render())], False
    while not over:
        observation, _, terminated, truncated, _ = env.step(policy(observation))
        frames.append(np.asarray(env.render()))
        over = terminated or truncated
    env.close()
    return [frame[160:340, 150:450] for frame in frames]  # each (180, 300, 3)


episode = play(chase, seed=0)
numbers = [int(i) for i in pick_frames(np.arange(len(episode)), 8)]
filmstrip([episode[i] for i in numbers], titles=[f"step {i}" for i in numbers])

# %% [markdown]
# The pole swings from side to side, wider each time, because the policy looks at where the pole is
# and not at how fast it moves.

# %% [markdown]
# ## Animations
#
# A figure or an animation may be opened by somebody while it is being written. So we write it
# whole, under another name first, with `write_whole` of [Settings](settings.ipynb).

# %%
#| export
def write_image(path: str | Path, save: Callable[[Path], object]) -> None:
    """Let `save` write an image in one step, or say why that cannot be."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save)
    except OSError as error:
        raise ValueError(f"Cannot write {path}: {error.strerror or error}.") from error

# %% [markdown]
# GIFs play everywhere: in a README, in a mail and in a browser. They have three traps. A frame has
# at most 256 colours, and if each frame has its own set, parts that do not move flicker. A delay
# is a whole number of hundredths of a second, but at 30 frames a second each frame should take
# 3.33 of them. And browsers slow down a GIF of more than 50 frames a second.
#
# By hand: three frames at 30 a second end after 3.33, 6.67 and 10 hundredths. Rounded, that is 3,
# 7 and 10, so the delays are 3, 4 and 3, and the sum is right. At 100 frames a second, every other
# frame is left out, and the rest play at 50.

# %%
#| export
def frame_delays(count: int, fps: float) -> list[int]:
    """Return the delay of each frame in hundredths of a second; rounding errors do not add up."""
    clock = np.round(np.arange(count + 1) * 100 / fps).astype(int)
    return [int(delay) for delay in np.diff(clock)]


# %%
assert frame_delays(3, fps=30) == [3, 4, 3]
assert sum(frame_delays(300, fps=30)) == 1000  # ten seconds

# %%
#| export
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

# %% [markdown]
# CartPole moves in steps of a fiftieth of a second. Here is the episode at half that speed.

# %%
with tempfile.TemporaryDirectory() as folder:
    save_gif(episode, f"{folder}/chase.gif", fps=25)
    data = Path(f"{folder}/chase.gif").read_bytes()
print(f"{len(episode)} frames, {len(data) / 1000:.0f} kB")
picture = base64.b64encode(data).decode()
HTML(f'<img alt="A pole swings and falls" src="data:image/gif;base64,{picture}">')

# %% [markdown]
# ## Heat maps
#
# To see the values that an agent gives to its states, vary two dimensions and keep the others
# fixed. The colour map is viridis: equal steps of value look like equal steps of brightness, in
# grey print too.
#
# `values[j, i]` belongs to `x[i]` and `y[j]`, in the *middle* of its cell. With three columns from
# 0 to 2, the cells are 1 wide, and the picture reaches from −0.5 to 2.5.

# %%
#| export
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

# %%
image = plot_heatmap(Figure().subplots(), np.zeros((2, 3)), (0, 2, 0, 1), "x", "y", "value")
assert np.allclose(image.get_extent(), (-0.5, 2.5, -0.5, 1.5))

# %% [markdown]
# A second policy for CartPole uses the velocity too: it pushes to the side to which the pole will
# lean in a quarter of a second. From which states can each of the two save the pole? Start the
# cart at rest in the middle, with each pole angle and angular velocity in turn, and count the
# steps until the end, up to 200.

# %%
def look_ahead(observation: np.ndarray) -> int:
    """Push to the side to which the pole will lean in a quarter of a second."""
    return int(observation[2] + 0.25 * observation[3] > 0)


def survival(policy: Callable[[np.ndarray], int], start: np.ndarray) -> int:
    """Return the number of steps from a state until the end, 200 at most."""
    env.reset(seed=0)
    env.state = observation = start
    steps, terminated = 0, False
    while not terminated and steps < 200:
        observation, _, terminated, _, _ = env.step(policy(observation))
        steps += 1
    return steps


env = make_env("CartPole-v1").unwrapped
angles, velocities = np.linspace(-0.2, 0.2, 31), np.linspace(-3, 3, 31)
survived = {
    policy.__name__: np.array(
        [[survival(policy, np.array([0, 0, x, y])) for x in angles] for y in velocities]
    )  # (ys, xs)
    for policy in (chase, look_ahead)
}

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
extent = (angles[0], angles[-1], velocities[0], velocities[-1])
for ax, (name, values) in zip(panels, survived.items(), strict=True):
    ylabel = "angular velocity (radians per second)" if name == "chase" else ""
    plot_heatmap(ax, values, extent, "pole angle (radians)", ylabel, "steps", limits=(0, 200))
    ax.set_title(name)
plt.show()

# %% [markdown]
# The bright band goes downwards to the right: a pole that leans to the right can be saved if it
# moves to the left. From the yellow region `look_ahead` keeps the pole up for all 200 steps. Both
# maps have the same `limits`, so you can compare their colours.

# %%
assert (survived["look_ahead"] == 200).mean() > 0.2
assert (survived["chase"] == 200).mean() < 0.05

# %% [markdown]
# ## Stored results
#
# Ablations over many seeds take hours. So `rlbook sweep` trains them once, their results are
# stored in `book/results/`, each with the command that made it, and a chapter only draws them. If
# a file cannot be drawn, `load_result` raises an error that says why.

# %%
#| export
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


# %%
#| export
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

# %% [markdown]
# A variant keeps its colour, whichever other variants are drawn with it, so that you can compare
# two figures of one result. The first variant of each algorithm has the colour of that algorithm.

# %%
#| export
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

# %% [markdown]
# Beside its figure a chapter prints where the result comes from: the command, the day, the version
# of the library, and eight digits of a hash of the result. A test compares those digits with the
# file, so it notices a figure that was drawn from an older file.

# %%
#| export
def made_by(result: dict[str, Any]) -> str:
    """Return the command that made a result, the day, the version and a hash of the result."""
    version = result["versions"]["rlbook"]
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:8]
    return f"{result['command']}  # {result['created']}, rlbook {version}, {digest}"

# %% [markdown]
# This is what a file holds, here with made-up curves. The bands are 95 % intervals of the mean of
# five seeds.

# %%
rng = np.random.default_rng(5)
curves = {"default": made_up_returns(rng, 5), "no_target_network": 0.6 * made_up_returns(rng, 5)}
result = {
    "command": "none: these numbers are made up",
    "algo": "dqn",
    "env_id": "MadeUp-v0",
    "seeds": [0, 1, 2, 3, 4],
    "versions": {"numpy": np.__version__, "rlbook": "0.2.0"},
    "created": "2026-11-16",
    "seconds": 0.0,
    "runs": {
        name: {
            "algo": "dqn",
            "settings": {} if name == "default" else {"target_update_interval": 1},
            "steps": steps.tolist(),
            "returns": values.tolist(),
            "final": values[:, -1].tolist(),
            "iqm": iqm_interval(values[:, -1]),
            "seconds": [0.0] * 5,
        }
        for name, values in curves.items()
    },
}
with tempfile.TemporaryDirectory() as folder:
    Path(f"{folder}/result.json").write_text(json.dumps(result))
    result = load_result(f"{folder}/result.json")

figure, ax = plt.subplots()
plot_result(ax, result, {"default": "DQN", "no_target_network": "without target network"})
plt.show()
assert made_by(result) != made_by({**result, "seconds": 1.0})

# %% [markdown]
# Many overlapping bands are hard to tell apart, and they hide the seeds. A second kind of figure
# shows only where each variant ends: the last evaluation of each seed as a dot, their
# interquartile mean as a diamond with its number, and its 95 % bootstrap interval as a bar.
# [Sweeps](sweep.ipynb) computes the last two and stores them in the file.

# %%
#| export
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

# %% [markdown]
# `draw_result` puts both into one figure: curves above, last evaluations below, and one legend
# outside.

# %%
#| export
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

# %%
draw_result(plt.figure(), result)
plt.show()

# %% [markdown]
# An ablation removes one part at a time and asks how much worse the algorithm gets. So
# `draw_parts` gives each removed part a panel of its own, with two curves: the algorithm without
# this part, and the whole algorithm. The vertical axis covers the returns of all seeds.

# %%
#| export
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

# %%
shapes = {"whole": 1.0, "no target network": 0.6, "no replay": 0.3, "no Double": 0.95}
made_up = {**result, "runs": {}}
for name, height in shapes.items():
    values = height * made_up_returns(rng, 5)
    made_up["runs"][name] = {
        **result["runs"]["default"],
        "returns": values.tolist(),
        "final": values[:, -1].tolist(),
        "iqm": iqm_interval(values[:, -1]),
    }
draw_parts(plt.figure(), made_up, columns=3)
plt.show()

# %% [markdown]
# ## Beside another library
#
# Two implementations of the same algorithm with the same settings should learn equally well.
# `bench/parity.py` trains both over several seeds and evaluates them at the same steps. One number
# sums up the learning curve of a seed, early and late parts alike: its mean height $A$, which is
# the area under the curve divided by its width. We estimate the difference of the two means over
# seeds:
#
# $$D = \frac{1}{n}\sum_{i=1}^{n} A_i^{\text{ours}} - \frac{1}{m}\sum_{j=1}^{m} A_j^{\text{theirs}}$$
#
# $D$ depends on the seeds, so it needs an interval. Its *bootstrap interval* asks what $D$ would
# have been with other seeds: sample as many seeds as there are from each side, with replacement,
# compute $D$ again, and repeat this ten thousand times. The middle 95 % of these numbers are the
# interval. If it contains 0, the seeds show no difference.
#
# `plot_parity` draws the curves and writes $D$ and its interval into the title: above 0 ours is
# better. `show_parity` does this for a stored file, as the chapters do.
#
# By hand, two seeds a side, each evaluated twice. Ours: (0, 10) and (10, 20), so $A = 5$ and $15$.
# Theirs: (0, 0) and (0, 10), so $A = 0$ and $5$. Then $D = 10 - 2.5 = 7.5$. A quarter of the
# samples of ours have the mean 5, and a quarter of theirs the mean 5, so $D = 0$ in one sample of
# 16, which is 6 %. That is more than the 2.5 % that are cut off, so the interval begins at 0. In
# the same way it ends at $15 - 0$.

# %%
#| export
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

# %%
assert area_difference([0, 10], [[0, 10], [10, 20]], [[0, 0], [0, 10]]) == (7.5, 0, 15)

# %% [markdown]
# If both sides come from the same distribution, 95 % of such intervals should contain 0. With few
# seeds fewer do, because a bootstrap interval of few values is too narrow. The figure shows one
# pair:

# %%
for n in (5, 10, 20):
    pairs = [(made_up_returns(rng, n), made_up_returns(rng, n)) for _ in range(400)]
    low, high = np.array([area_difference(steps, *pair)[1:] for pair in pairs]).T
    contain = np.mean((low <= 0) & (high >= 0))
    print(f"{n:2d} seeds a side: the interval contains 0 in {contain:.0%} of 400 pairs")
assert contain > 0.88  # with twenty seeds a side

ours, theirs = pairs[0]
sides = {name: {"steps": steps, "returns": x} for name, x in (("rlbook", ours), ("peer", theirs))}
made_up = {"algo": "dqn", "env_id": "Made up", "difference": area_difference(steps, ours, theirs)}
plot_parity(plt.figure().subplots(), {**made_up, "runs": sides})
plt.show()

# %% [markdown]
# ## The metrics of a run
#
# A run writes `metrics.jsonl`, one JSON object per line: some have training metrics and some have
# evaluations. You may read the file while the run goes on, or after it was killed. Then the last
# line may be incomplete, and it is left out. An incomplete line in the middle is an error.

# %%
#| export
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

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(f"{folder}/metrics.jsonl")
    file.write_text(
        '{"global_step": 1000, "loss": 0.5}\n'
        '{"global_step": 2000, "eval_return_mean": 21.5, "eval_return_std": 3.0}\n'
        '{"global_step": 3000, "lo'
    )
    metrics = read_metrics(file)
print(metrics)
assert metrics["global_step"].tolist() == [1000, 2000]
assert np.isnan(metrics["loss"][1]) and metrics["eval_return_mean"][1] == 21.5

# %% [markdown]
# The settings of the run are in `config.yaml`. A curve is one metric together with these settings.

# %%
#| export
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

# %% [markdown]
# ## Runs side by side
#
# `rlbook plot runs/a runs/b --out curve.png` draws several runs into one figure. Runs that differ
# only in their seed become one curve with a band. Settings such as `run_dir` and `keep_best`,
# which change no result, do not count as a difference. (`checkpoint_every` does: a checkpoint
# resets the environments.) `find_runs` takes the directory of a sweep too, and finds its runs.

# %%
#| export
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

# %% [markdown]
# The runs of a group may have been evaluated at different steps. So the curves are interpolated at
# all steps at which any of them was evaluated, but only where all of them have values. Beyond the
# end of the shortest run, the mean would jump, because one run is missing.
#
# By hand: one run has the returns 0, 10, 20 at the steps 0, 10, 20, and another has 7, 7 at the
# steps 5 and 15. Both cover 5 to 15. There, the first has 5, 10 and 15 at the steps 5, 10 and 15.

# %%
#| export
def on_common_grid(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (points,) and values (curves, points) on the range that all curves cover."""
    first = max(steps[0] for _, steps, _ in curves)
    last = min(steps[-1] for _, steps, _ in curves)
    grid = np.unique(np.concatenate([steps for _, steps, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    if grid.size == 0:
        raise ValueError("Runs that differ only in their seed have no range of steps in common.")
    return grid, np.stack([np.interp(grid, steps, values) for _, steps, values in curves])

# %%
one = ({}, np.array([0, 10, 20]), np.array([0.0, 10.0, 20.0]))
other = ({}, np.array([5, 15]), np.array([7.0, 7.0]))
grid, values = on_common_grid([one, other])
assert grid.tolist() == [5, 10, 15]
assert values.tolist() == [[5, 10, 15], [7, 7, 7]]

# %% [markdown]
# The label of a group names its algorithm and up to three of the settings in which it differs from
# the other groups.

# %%
#| export
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


# %%
#| export
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

# %% [markdown]
# The stored results of sweeps are drawn in the same way. If there are several files, the label of
# a curve starts with the name of its file.

# %%
#| export
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

# %% [markdown]
# Ten made-up runs: five seeds at each of two learning rates, and one of them stopped early. The
# bands are 95 % intervals of the mean of five seeds. The lower curve ends where its shortest run
# does.

# %%
with tempfile.TemporaryDirectory() as folder:
    paths = []
    for seed in range(10):
        path = Path(folder) / f"run{seed}"
        path.mkdir()
        config = {"algo": "dqn", "env_id": "MadeUp-v0", "lr": [1e-3, 1e-4][seed % 2]}
        (path / "config.yaml").write_text(yaml.safe_dump({**config, "seed": seed}))
        returns = made_up_returns(rng, 1)[0] * [1, 0.7][seed % 2]
        lines = [
            json.dumps({"global_step": int(step), "eval_return_mean": float(value)}) + "\n"
            for step, value in zip(steps, returns, strict=True)
        ]
        (path / "metrics.jsonl").write_text("".join(lines[: 35 if seed == 3 else 50]))
        paths.append(path)
    figure = plot_runs(paths, Path(folder) / "curve.png")
figure

# %% [markdown]
# ## Honest edges
#
# - **No interval knows what it has not seen.** Take seeds that either solve the task or fail:
#   suppose that four seeds in five reach 500 and the fifth stays at 100, so that the mean is 420.
#   Then in $0.8^5 = 33\,\%$ of experiments all five seeds reach 500, and the band has no width at
#   all, around the wrong mean. If a band is suspiciously narrow, draw the seeds.

# %%
def solve_or_fail(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Sample returns of 500 with probability 0.8, else of 100: the mean is 420."""
    return np.where(rng.random(size) < 0.8, 500.0, 100.0)


rng = np.random.default_rng(0)
shares = {}
for n in (5, 10, 20):
    _, low, high = mean_interval(solve_or_fail(rng, (4_000, n)), axis=1)
    shares[n] = coverage(low, high, 420)
    print(f"{n:2d} seeds that solve or fail: the band contains the mean in {100 * shares[n]:.0f} %")
assert abs(shares[5] - (1 - 0.8**5)) < 0.02

# %% [markdown]
# - **The band is too narrow with few seeds**, as you have measured: with five it contains the mean
#   in about five of six experiments. It never leaves the range of the returns that were seen.
# - **The band holds at each step by itself.** Even with many seeds, the 95 % are those of a single
#   step. The whole true curve is inside the band less often.
# - **Overlapping bands do not prove that two algorithms are equal.** To compare two algorithms,
#   look at the interval of the difference (exercise 4).
# - **Agarwal et al. (2021) recommend the interquartile mean with a stratified bootstrap** over
#   many tasks and seeds together, for example 26 games with three runs each. In this book it is
#   over the seeds of one task. With few seeds its interval is too narrow as well, so the seeds are
#   drawn beside it.
# - **A GIF has 256 colours.** That is enough for CartPole. In a picture with many shades you see
#   steps.

# %% [markdown]
# ## Exercises
#
# **1. A planted bug.** A colleague writes a band with Student's interval. By hand, 1, 2 and 3 have
# the mean 2, $s = 1$ and $t_2 = 4.303$, so the interval is $2 \pm 4.303 / \sqrt 3 = 2 \pm 2.484$.
# The function passes this example, and the coverage of single points is right. But with curves of
# 100 points the bands are too narrow. What is wrong?

# %%
def band_with_a_bug(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the mean over the first axis; values: (seeds, points)."""
    mean = values.mean(axis=0)
    error = values.std(axis=0, ddof=1) / np.sqrt(values.shape[0])
    factor = stdtrit(values.size - 1, 0.975)
    return mean - factor * error, mean + factor * error


low, high = band_with_a_bug(np.array([[1.0], [2.0], [3.0]]))
assert np.allclose([low[0], high[0]], [2 - 2.484, 2 + 2.484], atol=1e-3)

for points in (1, 100):
    samples = rng.normal(400, 60, size=(4_000, 5, points))  # (experiments, seeds, points)
    bands = np.array([band_with_a_bug(sample) for sample in samples])  # (experiments, 2, points)
    share = coverage(bands[:, 0], bands[:, 1], 400)
    print(f"curves of {points:3d} points: the band contains the mean in {100 * share:.0f} %")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `values.size` counts seeds times points. With one point it is the number of seeds, so every test
# on single numbers passes. With 100 points it is 500, and the factor falls from 2.78 to 1.96, as
# if there were five hundred seeds. It should be `values.shape[0] - 1`. The lesson for tests: try a
# shape in which no two dimensions are equal and none is one.
#
# ```python
# def band_with_a_bug(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
#     """Return the 95 % interval of the mean over the first axis; values: (seeds, points)."""
#     mean = values.mean(axis=0)
#     error = values.std(axis=0, ddof=1) / np.sqrt(values.shape[0])
#     factor = stdtrit(values.shape[0] - 1, 0.975)
#     return mean - factor * error, mean + factor * error
#
# low, high = band_with_a_bug(np.tile([[1.0], [2.0], [3.0]], (1, 100)))
# assert np.allclose([low, high], [[2 - 2.484], [2 + 2.484]], atol=1e-3)
# ```
#
# </details>
#
# **2. The run that stopped early.** Two seeds of one algorithm return 100 and 0 at every
# evaluation. The second stops after half of the steps. Draw the mean of the curves that are still
# running. What does it seem to say?
#
# <details>
# <summary>Solution</summary>
#
# The mean is 50 in the first half and jumps to 100 in the second, as if the algorithm had suddenly
# learned. `on_common_grid` stops at the end of the shorter run instead.
#
# ```python
# good = ({}, np.arange(1, 11), np.full(10, 100.0))
# stopped = ({}, np.arange(1, 6), np.zeros(5))
# running = [np.mean([c[2][i] for c in (good, stopped) if i < len(c[2])]) for i in range(10)]
# assert running == [50.0] * 5 + [100.0] * 5
# grid, values = on_common_grid([good, stopped])
# assert grid.tolist() == [1, 2, 3, 4, 5] and values.mean(axis=0).tolist() == [50.0] * 5
# ```
#
# </details>
#
# **3. Smoothing.** Many papers smooth each curve with a moving average. Smooth the made-up curves
# `a` (seeds, points) over ten points. Does the band become narrower at the end? Should it?
#
# <details>
# <summary>Solution</summary>
#
# Hardly. The noise of single evaluations averages out, but the seeds still end at different
# levels, and that makes up nearly the whole band. Smoothing changes how a curve looks. More seeds
# change what you know.
#
# ```python
# smooth = np.array([np.convolve(curve, np.ones(10) / 10, mode="valid") for curve in a])
# widths = []
# for curves in (a, smooth):
#     _, low, high = mean_interval(curves[:, -1])
#     widths.append(high - low)
# print(f"width of the band at the end: {widths[0]:.0f}, smoothed {widths[1]:.0f}")
# assert 0.6 < widths[1] / widths[0] < 1.4
# ```
#
# </details>
#
# **4. How many seeds?** Two algorithms differ by 60, one standard deviation between seeds. How
# many seeds of each do you need so that the interval of the difference excludes zero in nine of
# ten experiments? Guess, then simulate.
#
# <details>
# <summary>Solution</summary>
#
# The difference of two means has the standard error $60 \sqrt{2/n}$, and its interval uses
# $t_{2n-2}$. You need 23 seeds of each. With five seeds of each, you miss a real difference of
# this size in seven of ten experiments.
#
# ```python
# rng = np.random.default_rng(0)
# for n, power in ((5, 0.3), (23, 0.9)):
#     better, worse = rng.normal(60, 60, (20_000, n)), rng.normal(0, 60, (20_000, n))
#     difference = better.mean(axis=1) - worse.mean(axis=1)
#     spread = np.sqrt((better.var(axis=1, ddof=1) + worse.var(axis=1, ddof=1)) / n)
#     found = np.mean(difference > stdtrit(2 * n - 2, 0.975) * spread)
#     print(f"{n} seeds of each find the difference in {100 * found:.0f} % of experiments")
#     assert abs(found - power) < 0.03
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# From a script, with runs of your own and with the stored results of the book:
#
# ```python
# import matplotlib.pyplot as plt
# from rlbook.figures import load_result, plot_result, plot_runs, use_style
#
# use_style()
# plot_runs(["runs/a", "runs/b"], "curve.png")
# figure, ax = plt.subplots()
# plot_result(ax, load_result("book/results/NAME.json"))
# ```
#
# From the shell, the curves and an animation:
#
# ```
# rlbook plot runs/a runs/b --out curve.png
# rlbook watch runs/a --out agent.gif
# ```
#
# ## References
#
# - R. Agarwal, M. Schwarzer, P. S. Castro, A. Courville, M. G. Bellemare. *Deep reinforcement
#   learning at the edge of the statistical precipice.* NeurIPS 2021.
# - C. Colas, O. Sigaud, P.-Y. Oudeyer. *How many random seeds? Statistical power analysis in deep
#   reinforcement learning experiments.* 2018.
# - P. Henderson, R. Islam, P. Bachman, J. Pineau, D. Precup, D. Meger. *Deep reinforcement
#   learning that matters.* AAAI 2018.
# - G. M. Machado, M. M. Oliveira, L. A. F. Fernandes. *A physiologically-based model for
#   simulation of color vision deficiency.* IEEE Transactions on Visualization and Computer
#   Graphics, 2009.
# - M. Okabe, K. Ito. *Color universal design: how to make figures and presentations that are
#   friendly to colorblind people.* 2008.
# - Student. *The probable error of a mean.* Biometrika, 1908.
