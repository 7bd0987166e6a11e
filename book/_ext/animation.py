"""Make the animations of the first page: train agents at shipped settings, and watch them.

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
STATIC = ROOT / "book" / "_static"
AGENTS = [  # algorithm, shipped settings, what is seen, flags of `rlbook watch`
    ("dqn", "acrobot", "DQN swings an arm up", []),
    ("drqn", "masked_cartpole", "DRQN balances, blind to speed", ["--max-steps", "300"]),
    ("sac", "pendulum", "SAC swings a pendulum up", []),
    ("drqv2", "point_reach", "DrQ-v2 reaches, from pixels", ["--episodes", "8", "--max-steps", "14"]),
]
FPS, SIDE, SECONDS = 20, 200, 6


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
        picture.thumbnail((SIDE, SIDE))
        frames.append(picture)
        ends.append(animation.info.get("duration", 40) + (ends[-1] if ends else 0))
    times = np.arange(FPS * SECONDS) * 1000 / FPS
    return [frames[min(int(np.searchsorted(ends, time, "right")), len(frames) - 1)] for time in times]


def main() -> None:
    """Write one animation for each agent, all of one size, with its line below."""
    font = ImageFont.load_default(size=13)
    for algorithm, config, text, flags in AGENTS:
        pictures = []
        for frame in frames_in_time(watch(algorithm, config, flags)):
            picture = Image.new("RGB", (SIDE, SIDE + 26), "white")
            picture.paste(frame, ((SIDE - frame.width) // 2, (SIDE - frame.height) // 2))
            place = (SIDE / 2, SIDE + 13)
            ImageDraw.Draw(picture).text(place, text, fill="#333333", anchor="mm", font=font)
            pictures.append(picture)
        # One palette for all frames: what does not move is then the same, and costs nothing.
        palette = pictures[-1].quantize(32)
        colors = [value if value < 248 else 255 for value in palette.getpalette() or []]
        palette.putpalette(colors)  # white stays white
        first, *others = [p.quantize(palette=palette, dither=Image.Dither.NONE) for p in pictures]
        out = STATIC / f"agent_{algorithm}.gif"
        first.save(out, save_all=True, append_images=others, duration=1000 // FPS, loop=0)
        print(f"wrote {out.relative_to(ROOT)}, {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
