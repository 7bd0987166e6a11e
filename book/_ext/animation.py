"""Make the animation of the first page: train agents at shipped settings, and watch them.

    .venv/bin/python book/_ext/animation.py

Runs that are already in runs/first_page are kept. What is drawn is what `rlbook watch` writes.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "first_page"
OUT = ROOT / "book" / "_static" / "agents.gif"
AGENTS = [  # algorithm, shipped settings, what is seen, flags of `rlbook watch`
    ("dqn", "acrobot", "DQN swings an arm up", []),
    ("drqn", "masked_cartpole", "DRQN balances, blind to speed", ["--max-steps", "300"]),
    ("sac", "pendulum", "SAC swings a pendulum up", []),
    ("drqv2", "point_reach", "DrQ-v2 reaches, from pixels", ["--episodes", "8", "--max-steps", "14"]),
]
FPS, HEIGHT, SECONDS, GAP = 20, 200, 6, 12


def rlbook(*arguments: str) -> None:
    """Run a command of the book."""
    subprocess.run([sys.executable, "-m", "rlbook.cli", *arguments], cwd=ROOT, check=True)


def watch(algorithm: str, config: str, flags: list[str]) -> Image.Image:
    """Train an agent unless that is done, and open what `rlbook watch` shows of it."""
    run, gif = RUNS / f"{algorithm}_{config}", RUNS / f"{algorithm}_{config}.gif"
    if not run.is_dir():
        rlbook("train", algorithm, "--config", config, "--seed", "0", "--run-dir", str(run))
    rlbook("watch", str(run), "--out", str(gif), *flags)
    return Image.open(gif)


def frames_in_time(animation: Image.Image) -> list[Image.Image]:
    """Take frames at equal times; the last one stays when an episode is over."""
    frames: list[Image.Image] = []
    ends: list[int] = []
    for i in range(getattr(animation, "n_frames", 1)):
        animation.seek(i)
        picture = animation.convert("RGB")
        frames.append(picture.resize((round(picture.width * HEIGHT / picture.height), HEIGHT)))
        ends.append(animation.info.get("duration", 40) + (ends[-1] if ends else 0))
    times = np.arange(FPS * SECONDS) * 1000 / FPS
    return [frames[min(int(np.searchsorted(ends, time, "right")), len(frames) - 1)] for time in times]


def main() -> None:
    """Put the animations side by side, each with its line below."""
    columns = [frames_in_time(watch(algo, config, flags)) for algo, config, _, flags in AGENTS]
    font = ImageFont.load_default(size=14)
    pictures = []
    for row in zip(*columns, strict=True):
        width = sum(frame.width for frame in row) + GAP * (len(row) - 1)
        picture = Image.new("RGB", (width, HEIGHT + 28), "white")
        x = 0
        for frame, (_, _, text, _) in zip(row, AGENTS, strict=True):
            picture.paste(frame, (x, 0))
            place = (x + frame.width / 2, HEIGHT + 14)
            ImageDraw.Draw(picture).text(place, text, fill="#333333", anchor="mm", font=font)
            x += frame.width + GAP
        pictures.append(picture)
    # One palette for all frames: what does not move is then the same, and costs nothing.
    palette = pictures[len(pictures) // 2].quantize(48)
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    pictures[0].save(
        OUT, save_all=True, append_images=pictures[1:], duration=1000 // FPS, loop=0, optimize=True
    )
    print(f"wrote {OUT.relative_to(ROOT)}, {OUT.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
