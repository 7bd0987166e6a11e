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
# # The command line
#
# You can use the library from a shell, without a line of Python: train an agent, stop it,
# continue, ask it for an action, watch it play. In this chapter you use the command `rlbook` and
# then build it. Its flags come from the [settings](settings.ipynb), and every mistake of a user is
# answered with one sentence.
#
# | | |
# |---|---|
# | Builds on | [settings](settings.ipynb), [the agent](agent.ipynb), [the run](run.ipynb) |
# | Same as in most tools | commands with flags, `--help`, exit codes for scripts |
# | Different | one sentence for a mistake, not a traceback; a command is a function with a docstring |
#
# A run directory is at the centre. `train` and `resume` write to it; `evaluate`, `predict`,
# `watch` and `plot` only read it.

# %% tags=["hide-input"]
#| export
import argparse
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import gymnasium as gym
import numpy as np

import rlbook
from rlbook.envs import make_env, nearest
from rlbook.progress import Interrupted, RunFailed
from rlbook.settings import (
    ELSEWHERE,
    Config,
    add_flags,
    flag_name,
    flag_settings,
    gather_settings,
    make_config,
    read_flag,
    shipped_configs,
)

if TYPE_CHECKING:  # importing torch takes seconds: commands that need it import it themselves
    from rlbook.agent import Agent
    from rlbook.run import RunResult

# %% tags=["hide-input"]
import contextlib
import io
import signal
import subprocess
import tempfile
import time

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.patches import FancyBboxPatch
from PIL import Image

import rlbook.cli as finished  # the module that this chapter exports
from rlbook.figures import PALETTE, filmstrip, pick_frames, use_style

use_style()
folder = tempfile.TemporaryDirectory()  # the commands of this chapter leave their files here

figure, ax = plt.subplots(figsize=(8.5, 3.1))
boxes = [
    (0.0, 2.2, 1.9, "my.yaml, --flags", PALETTE[0]),
    (0.0, 1.2, 1.9, "train", PALETTE[0]),
    (0.0, 0.2, 1.9, "resume", PALETTE[0]),
    (3.3, 0.9, 2.4, "runs/a\n\nconfig.yaml\nmetrics.jsonl\ncheckpoints/", PALETTE[2]),
    (7.2, 2.4, 1.3, "evaluate", PALETTE[3]),
    (7.2, 1.65, 1.3, "predict", PALETTE[3]),
    (7.2, 0.9, 1.3, "watch", PALETTE[3]),
    (7.2, 0.15, 1.3, "plot", PALETTE[3]),
]
for x, y, width, text, color in boxes:
    height = 1.3 if "\n" in text else 0.45
    style = {"boxstyle": "round,pad=0.08", "fc": "white", "ec": color}
    ax.add_patch(FancyBboxPatch((x, y), width, height, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", family="monospace")
results = ["mean and interval", "an action", "agent.gif", "curve.png"]
for y, result in zip((2.62, 1.87, 1.12, 0.37), results, strict=True):
    ax.annotate("", (7.05, y), (5.85, 1.55), arrowprops={"arrowstyle": "->", "color": "#555555"})
    ax.text(8.75, y, result, va="center", fontsize=9)
black = {"arrowstyle": "->", "color": "black"}
ax.annotate("", (0.95, 1.78), (0.95, 2.07), arrowprops=black)
ax.annotate("", (3.15, 1.5), (2.05, 1.42), arrowprops=black)
ax.annotate("", (3.15, 1.2), (2.05, 0.5), arrowprops={**black, "arrowstyle": "<->"})
ax.set(xlim=(-0.2, 10.6), ylim=(0.0, 3.0))
ax.axis("off")
plt.show()

# %% [markdown]
# ## A session
#
# In this notebook, `start` starts a command as your shell would, in an empty folder. Train DQN on
# CartPole for a few seconds:


# %% tags=["hide-input"]
def start(line: str) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    print(f"$ {line}", flush=True)
    words = [sys.executable, "-m", "rlbook.cli", *shlex.split(line)[1:]]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, text=True, cwd=folder.name, **out)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a command, and print its output and its exit code."""
    printed, _ = process.communicate()
    print(printed + (f"(exit code {process.returncode})" if process.returncode else ""))
    return printed


# %%
flags = "--config cartpole --total-steps 7000 --epsilon-decay-steps 4000 --checkpoint-every 3000"
process = start(f"rlbook train dqn {flags} --eval-every 1000 --seed 1 --run-dir runs/a")

# %% [markdown]
# While it learns, somebody shuts the machine down, and the process gets the signal SIGTERM. Here
# that happens after its first checkpoint. The run writes another one and says how to continue.

# %%
while process.poll() is None and not list(Path(folder.name).glob("runs/a/checkpoints/*.pt")):
    time.sleep(0.02)
process.send_signal(signal.SIGTERM)
printed = finish(process)
assert process.returncode == 143 and "rlbook resume runs/a" in printed

# %%
finish(start("rlbook resume runs/a"))
lines = (Path(folder.name) / "runs/a/metrics.jsonl").read_text().splitlines()
evaluations = [json.loads(line) for line in lines if "eval_return_mean" in line]
assert [line["global_step"] for line in evaluations] == list(range(1_000, 7_001, 1_000))

# %% [markdown]
# The run ends with the same weights as one that was never stopped. [The run](run.ipynb) explains
# how.
#
# What has the agent learned? `evaluate` plays episodes. `predict` prints the action for one
# observation and the Q-values that it comes from. Here the pole leans to the right and falls. From
# now on, `say` runs a command inside this notebook, which saves the time to start a process.


# %% tags=["hide-input"]
def say(line: str, main: Callable[[list[str]], int] = finished.main) -> str:
    """Run a command inside the notebook; print and return its output."""
    said = io.StringIO()
    both = contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)
    with both[0], both[1], contextlib.chdir(folder.name):
        code = main(shlex.split(line)[1:])
    print(f"$ {line}\n{said.getvalue()}" + (f"(exit code {code})\n" if code else ""))
    return said.getvalue()


# %%
say("rlbook evaluate runs/a --episodes 20")
answer = json.loads(say('rlbook predict runs/a --observation "[0, 0, 0.1, 0.5]"'))
assert answer["action"] == answer["q_values"].index(max(answer["q_values"]))

# %% [markdown]
# Watch it play. The command writes an animation; here are six of its frames.

# %%
say("rlbook watch runs/a --out agent.gif --max-steps 100 --seed 1")
with Image.open(Path(folder.name) / "agent.gif") as animation:
    frames = []
    for i in range(animation.n_frames):
        animation.seek(i)
        frames.append(np.asarray(animation.convert("RGB")))
display(filmstrip(pick_frames(frames, 6)))

# %% [markdown]
# And the learning curve of the run:

# %%
say("rlbook plot runs/a --out curve.png")
display(Image.open(Path(folder.name) / "curve.png").resize((825, 424)))

# %% [markdown]
# Now you build this command.
#
# ## The parser
#
# Python's `argparse` answers a mistake with the usage of the whole command and puts the reason
# into the last line. A training command has many flags, so its usage is long:

# %%
plain = argparse.ArgumentParser(prog="rlbook train")
add_flags(plain, rlbook.ALGORITHMS["dqn"].config_class)
said = io.StringIO()
with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
    plain.parse_args(["--total-step", "100", "--sead", "1"])
*usage, last = said.getvalue().splitlines()
print(f"({len(usage)} lines of usage)", last, sep="\n")

# %% [markdown]
# And it accepted `--total-step` for `--total-steps`, because `argparse` completes flags. A script
# that relies on this breaks as soon as a second flag starts with the same letters.
#
# Our parser completes nothing. A mistake raises a `ValueError` with one sentence, which names the
# nearest flag if there is one.

# %%
#| export
class Parser(argparse.ArgumentParser):
    """A parser of arguments that answers a mistake with an exception of one sentence."""

    def __init__(self, command: str, **options: Any) -> None:
        self.flags: list[str] = []  # those that the help shows
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=f"rlbook {command}", allow_abbrev=False, formatter_class=formatter, **options
        )

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument, and remember its flags."""
        if options.get("help") != argparse.SUPPRESS:
            self.flags += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **options)

    def add_settings(self, title: str, config_class: type[Config], names: Sequence[str]) -> None:
        """Add the flags of some settings, as a group of the help."""
        add_flags(self.add_argument_group(title), config_class, names)
        self.flags += [flag_name(name) for name in names]

    def error(self, message: str) -> NoReturn:
        """Raise an exception instead of printing the usage and exiting."""
        words = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise ValueError(f"{words[0].upper()}{words[1:]}: see `{self.prog} --help`.")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments, naming the nearest flag for one that is unknown."""
        options, unknown = self.parse_known_args(arguments)
        for word in unknown:
            if word.startswith("-"):
                flag = word.partition("=")[0]
                meant = flag_name(ELSEWHERE.get(flag[2:].replace("-", "_"), ""))
                known = f" Did you mean {meant!r}?" if meant in self.flags else ""
                hint = known or nearest(flag, self.flags)
                raise ValueError(f"`{self.prog}` has no flag {flag!r}.{hint}")
        if unknown:
            raise ValueError(f"`{self.prog}` does not know what to do with {unknown[0]!r}.")
        return options

# %%
parser = Parser("train")
add_flags(parser, Config)
for words in (["--sead", "1"], ["--total-step", "100"], ["--seed"], ["now"]):
    try:
        parser.parse(words)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## A table of commands
#
# A command is a function that takes a parser and the words that were typed, and returns an exit
# code. The decorator `command` puts it into a table. Its docstring is its line of help.

# %%
#| export
CommandFunction = Callable[[Parser, list[str]], int]


@dataclass(frozen=True)
class Command:
    """One command: what it does in a line, an example, and the function that does it."""

    summary: str
    example: str
    run: CommandFunction


COMMANDS: dict[str, Command] = {}


def command(name: str, example: str) -> Callable[[CommandFunction], CommandFunction]:
    """Put a function into the table; its docstring is its line of help."""

    def register(function: CommandFunction) -> CommandFunction:
        COMMANDS[name] = Command((function.__doc__ or "").splitlines()[0], example, function)
        return function

    return register


# %%
#| export
def help_text() -> str:
    """Describe all commands, each with an example."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {entry.summary}" for name, entry in COMMANDS.items()]
    examples = [f"  {entry.example}" for entry in COMMANDS.values()]
    return "\n".join(
        [
            "usage: rlbook COMMAND ...",
            "",
            "Train, resume, evaluate and watch the agents of the book.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            *examples,
            "",
            "`rlbook COMMAND --help` says more; `rlbook --version` prints the version.",
        ]
    )

# %% [markdown]
# The first command lists the algorithms. `rlbook.ALGORITHMS` imports them when it is first used,
# and with them torch, which takes seconds. `rlbook --help` should answer at once, so this module
# does not import torch at the top.

# %%
#| export
@command("list", "rlbook list")
def list_command(parser: Parser, arguments: list[str]) -> int:
    """List the algorithms and the configs that come with them."""
    parser.add_argument("modules", nargs="*", help="modules with algorithms of your own")
    options = parser.parse(arguments)
    from rlbook.agent import own_algorithms

    known = dict(rlbook.ALGORITHMS)
    for module in options.modules:
        known |= own_algorithms(module)
    width = max(map(len, known))
    for name, agent_class in known.items():
        configs = [key.split("/")[1] for key in shipped_configs() if key.startswith(f"{name}/")]
        fits = f"{agent_class.observations} observations, {agent_class.actions} actions"
        about = (agent_class.__doc__ or "").partition("\n")[0]
        print(f"{name:{width}}  {about}")
        print(f"{'':{width}}  {fits}; configs: {', '.join(configs) or 'none'}")
    return 0

# %% [markdown]
# ## Flags and files
#
# The flags of `rlbook train` depend on the algorithm, and the algorithm may be named in a config
# file that a flag names. So the words are read twice: first only for the algorithm and `--config`,
# then with all flags of that algorithm. An algorithm that is typed must come first; exercise 2
# asks why.

# %%
#| export
def choose(
    arguments: Sequence[str], command: str = "train"
) -> tuple[str | None, dict[str, Any]]:
    """Find the algorithm and the settings of the config file before the flags are known."""
    first = Parser(command, add_help=False)
    first.add_argument("--config")
    config = first.parse_known_args(arguments)[0].config
    algo = None if not arguments or arguments[0].startswith("-") else arguments[0]
    return (algo, {}) if config is None else gather_settings(config, algo)


# %% [markdown]
# An algorithm has about forty settings. The help shows them in three groups: those that you need
# most, those of the algorithm, and those of any run.

# %%
#| export
COMMON = ("env_id", "env_kwargs", "num_envs", "total_steps", "seed", "run_dir")


def add_groups(parser: Parser, config_class: type[Config]) -> None:
    """Give a parser the flags of all settings, in groups."""
    own = [name for name in config_class.model_fields if name not in Config.model_fields]
    rest = [name for name in Config.model_fields if name not in COMMON]
    titles = ("common settings [default]; flags override the config file", "algorithm", "run")
    for title, names in zip(titles, (COMMON, own, rest), strict=True):
        if names:
            parser.add_settings(title, config_class, names)


# %%
#| export
def parse_training(
    parser: Parser, arguments: Sequence[str]
) -> tuple["type[Agent]", dict[str, Any], argparse.Namespace]:
    """Parse a command that trains: the algorithm, the settings of file and flags, the options."""
    parser.usage = f"{parser.prog} [ALGO] [--config NAME|FILE] [--SETTING VALUE ...]"
    parser.add_argument("algo", nargs="?", help="the algorithm, unless the config file names it")
    parser.add_argument("--config", metavar="NAME|FILE", help="a shipped config or a YAML file")
    algo, settings = choose(arguments, parser.prog.removeprefix("rlbook "))
    if algo is None:
        add_groups(parser, Config)
        more = f"`{parser.prog} ALGO --help` shows the settings of an algorithm too."
        parser.description = f"{parser.description or ''}\n{more}".strip()
        if {"-h", "--help"} & {*arguments}:
            parser.parse(arguments)  # prints the help and exits
        example = f"`{parser.prog} dqn`"
        raise ValueError(f"Name an algorithm, as in {example}, or a config file with `algo:`.")
    from rlbook.agent import find_algorithm

    agent_class = find_algorithm(algo)
    add_groups(parser, agent_class.config_class)
    options = parser.parse(arguments)
    if options.algo not in (None, algo):
        raise ValueError(f"The config is for {algo!r}, not for {options.algo!r}: name one of them.")
    typed = flag_settings(options, agent_class.config_class)
    return agent_class, {**settings, **typed}, options


# %% [markdown]
# The last line decides which value wins: a flag overrides the file, and the file overrides the
# default. By hand: the file below sets `lr` and `seed`, the flag sets `seed` again, and `n_step`
# comes from the shipped config `cartpole` that the file builds on.

# %%
with contextlib.chdir(folder.name):
    Path("my.yaml").write_text("algo: dqn\nconfig: cartpole\nlr: 5e-4\nseed: 3\n")
    words = ["--config", "my.yaml", "--seed", "4"]
    agent_class, settings, _ = parse_training(Parser("train"), words)
config: Any = make_config(agent_class.config_class, settings)
print(f"{agent_class.name}: n_step {config.n_step}, lr {config.lr}, seed {config.seed}")
assert (agent_class.name, config.lr, config.seed) == ("dqn", 5e-4, 4)

# %% [markdown]
# ## Training and resuming
#
# In Python a run without `run_dir` writes no files. In a shell the result would then be lost when
# the process ends. So a run gets a directory with a name such as `runs/dqn-CartPole-v1-0`, unless
# you name one.

# %%
#| export
def default_run_dir(algo: str, config: Config) -> str:
    """Name a run directory after what is trained."""
    name = re.sub(r"[^\w.-]+", "-", f"{algo}-{config.env_id}-{config.seed}")
    return f"runs/{name}"


def announce(run_dir: str, result: "RunResult") -> None:
    """Say how a run ended, where its files are and what to do next."""
    score = result.metrics.get("eval_return_mean")
    scored = "" if score is None else f" with a mean return of {score:.1f}"
    steps = int(result.metrics.get("global_step", 0))
    if result.stopped:
        print(f"Stopped early because {result.stopped}.")
    print(f"Done: step {steps:,}{scored} after {result.seconds:.0f} s. The run is in {run_dir}.")
    print(f"Try it with `rlbook evaluate {run_dir}`,")
    print(f"go on with `rlbook resume {run_dir} --total-steps {2 * steps}`.")


@command("train", "rlbook train dqn --config cartpole --seed 1 --run-dir runs/a")
def train_command(parser: Parser, arguments: list[str]) -> int:
    """Train an agent in a new run directory."""
    agent_class, settings, _ = parse_training(parser, arguments)
    config = make_config(agent_class.config_class, settings)
    if config.run_dir is None:
        config.run_dir = default_run_dir(agent_class.name, config)
    from rlbook.run import RunDirectory, train

    agent = agent_class(config=config)
    agent.directory = RunDirectory.create(config.run_dir, agent)
    what = f"{agent.name} on {config.env_id}, seed {config.seed}"
    print(f"Training {what}, for {config.total_steps:,} steps in {config.run_dir}.", flush=True)
    result = train(agent)
    announce(config.run_dir, result)
    return 0


# %%
#| export
@command("resume", "rlbook resume runs/a --total-steps 100000")
def resume_command(parser: Parser, arguments: list[str]) -> int:
    """Continue a run from its newest checkpoint."""
    parser.add_argument("run", help="a run directory")
    steps = "environment steps of the whole run [as in its settings]"
    parser.add_argument("--total-steps", default=argparse.SUPPRESS, metavar="N", help=steps)
    options = parser.parse(arguments)
    total_steps = flag_settings(options, Config).get("total_steps")
    from rlbook.run import RunDirectory, resume

    directory = RunDirectory.open(options.run)
    reached = directory.checkpoints.last_step()
    result = resume(options.run, total_steps)
    if reached and result.agent.global_step == reached:
        print(f"{options.run} was finished already: ask for more steps with --total-steps.")
    announce(options.run, result)
    return 0

# %% [markdown]
# ## Using a trained agent
#
# The other commands load the agent with `rlbook.load`, which works for every algorithm. They load
# the last agent of a run, or with `--best` the one that [`KeepBest`](callbacks.ipynb) kept: in
# Python, `rlbook.load("runs/a/checkpoints/best.pt")`. `evaluate` plays greedy episodes and prints
# their mean return with its [bootstrap interval](envs.ipynb).

# %%
#| export
def count(text: str) -> int:
    """Read a whole number above zero."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return number


def seed_number(text: str) -> int:
    """Read a whole number that may be zero."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def add_agent(parser: Parser, plays: bool = False) -> None:
    """Give a parser what says which agent is meant and, if it plays, where."""
    parser.add_argument("agent", help="a run directory or a checkpoint")
    best = "the agent of the best evaluation, which `--keep-best` kept, not the last"
    parser.add_argument("--best", action="store_true", help=best)
    if plays:
        others = "keywords of the environment that differ from those of the run"
        parser.add_argument("--env-kwargs", metavar="YAML", help=others)


def load_agent(options: argparse.Namespace) -> "Agent":
    """Load the agent that was named, for an environment with other keywords if there are any."""
    from rlbook.callbacks import BEST

    path = Path(options.agent)
    if options.best:
        path = path / "checkpoints" / BEST
        if Path(options.agent).is_dir() and not path.exists():
            what = "keeps no best agent: train it with the setting 'keep_best'"
            raise ValueError(f"{options.agent} {what}.")
    agent = rlbook.load(path)
    if getattr(options, "env_kwargs", None) is not None:
        given = Config(env_kwargs=read_flag(options.env_kwargs, dict)).env_kwargs
        agent.config.env_kwargs = {**agent.config.env_kwargs, **given}
    return agent


@command("evaluate", "rlbook evaluate runs/a --episodes 20")
def evaluate_command(parser: Parser, arguments: list[str]) -> int:
    """Play greedy episodes and print what they scored."""
    add_agent(parser, plays=True)
    parser.add_argument("--episodes", type=count, default=20, metavar="N", help="how many [20]")
    parser.add_argument("--seed", type=seed_number, default=0, metavar="N", help="of them [0]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse(arguments)
    agent = load_agent(options)
    result = agent.evaluate(options.episodes, options.seed)
    low, high = result.interval
    known = options.episodes > 1  # one episode says nothing about the spread
    if options.json:
        interval = [low, high] if known else None
        line = {"mean": result.mean, "std": result.std, "interval": interval}
        print(json.dumps({**line, "returns": result.returns.tolist()}))
        return 0
    print(f"{agent.name} on {agent.config.env_id} after {agent.global_step:,} steps")
    print(f"mean return      {result.mean:.2f} over {options.episodes} greedy episodes")
    ends = f"{low:.2f} to {high:.2f} (bootstrap)" if known else "needs two episodes"
    print(f"95 % interval    {ends}")
    print(f"std of episodes  {result.std:.2f}")
    return 0

# %% [markdown]
# `predict` reads and writes JSON, so that any other program can use it. An image is too long for a
# command line, so it may come from a `.npy` file. Such a file can contain a pickle, and reading a
# pickle can run code ([Checkpoints](checkpoint.ipynb) shows how), so pickles are refused. A JSON
# object is passed on to the agent, which says how to make an array of it. If an agent has a method
# `q_values`, the answer holds its values, too. The method may return an array or a tensor.

# %%
#| export
def read_observation(text: str) -> Any:
    """Read an observation from JSON or from a .npy file."""
    if text.endswith(".npy"):
        try:
            return np.asarray(np.load(text, allow_pickle=False))  # a pickle could run code
        except OSError as error:
            raise ValueError(f"Could not read {text}: {error.strerror or error}.") from error
        except (ValueError, EOFError) as error:
            raise ValueError(f"{text} does not hold an array of numbers.") from error
    try:
        given = json.loads(text)
        return given if isinstance(given, dict) else np.asarray(given, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"An observation is JSON such as [0.1, 0, 0, 0], or a .npy file, not {text!r}."
        ) from error

# %%
print(read_observation("[0.1, 0, 0, 0]"), read_observation("[[1, 2], [3, 4]]").shape)
for text in ("0.1, 0, 0, 0", "[1, [2]]", "nowhere.npy"):
    try:
        read_observation(text)
    except ValueError as error:
        print(error)


# %%
#| export
@command("predict", 'rlbook predict runs/a --observation "[0.1, 0, 0, 0]"')
def predict_command(parser: Parser, arguments: list[str]) -> int:
    """Print as JSON the action for an observation, or for each of a batch."""
    add_agent(parser)
    example = "JSON such as [0.1, 0, 0, 0], or a .npy file"
    parser.add_argument("--observation", required=True, metavar="JSON|FILE", help=example)
    options = parser.parse(arguments)
    import torch

    from rlbook.agent import as_batch

    observation = read_observation(options.observation)
    agent = load_agent(options)
    action, _ = agent.predict(observation)
    answer: dict[str, Any] = {"action": np.asarray(action).tolist()}
    q_values = getattr(agent, "q_values", None)
    if q_values is not None:
        batch, single = as_batch(observation, agent.preprocessing.env_space)
        with torch.no_grad():
            values = torch.as_tensor(q_values(agent.preprocessing.prepare(batch)))
        answer["q_values"] = (values[0] if single else values).tolist()
    print(json.dumps(answer))
    return 0

# %% [markdown]
# `watch` plays in an environment that returns pictures, and writes them as an animation with
# `save_gif` from [figures](figures.ipynb).

# %%
#| export
def play(agent: "Agent", env: gym.Env, seed: int, max_steps: int) -> tuple[list[np.ndarray], float]:
    """Play one greedy episode; return its frames and its return."""
    obs, _ = env.reset(seed=seed)
    frames, total, state = [np.asarray(env.render())], 0.0, None
    start = np.ones(1, dtype=bool)
    for _ in range(max_steps):
        actions, state = agent.greedy(np.asarray(obs)[None], state, start)
        obs, reward, terminated, truncated, _ = env.step(actions[0])
        start = np.zeros(1, dtype=bool)
        frames.append(np.asarray(env.render()))
        total += float(reward)
        if terminated or truncated:
            break
    return frames, total


def cannot_be_watched(config: Config, why: str) -> ValueError:
    """Say what is missing, and what an environment needs to be watched."""
    return ValueError(
        f"{config.env_id!r} cannot be watched, since {why}: an environment lists rgb_array in "
        "metadata['render_modes'], takes the keyword render_mode, keeps it as self.render_mode and "
        "returns a picture from `render`."
    )


def make_visible(config: Config) -> gym.Env:
    """Make an environment that draws itself, without a window."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen otherwise
    plain = make_env(config.env_id, config.env_kwargs)
    plain.close()
    if "rgb_array" not in plain.metadata.get("render_modes", []):
        raise cannot_be_watched(config, "it has no render mode rgb_array")
    try:
        env = make_env(config.env_id, config.env_kwargs, render_mode="rgb_array")
    except ValueError as error:
        if isinstance(error.__cause__, TypeError):  # without the keyword it could be made
            raise cannot_be_watched(config, "it takes no keyword render_mode") from error
        raise
    if env.render_mode != "rgb_array":
        raise cannot_be_watched(config, "what makes it does not pass render_mode on")
    return env


# %%
#| export
@command("watch", "rlbook watch runs/a --out agent.gif")
def watch_command(parser: Parser, arguments: list[str]) -> int:
    """Play greedy episodes and write them as an animated GIF."""
    add_agent(parser, plays=True)
    parser.add_argument("--out", default="agent.gif", metavar="FILE", help="[agent.gif]")
    parser.add_argument("--episodes", type=count, default=1, metavar="N", help="how many [1]")
    parser.add_argument("--max-steps", type=count, default=1000, metavar="N", help="of each [1000]")
    parser.add_argument("--fps", type=count, metavar="N", help="[as the environment says, or 30]")
    parser.add_argument("--seed", type=seed_number, default=0, metavar="N", help="of the first [0]")
    options = parser.parse(arguments)
    if not options.out.endswith(".gif"):
        raise ValueError(f"The name of an animation must end in .gif, not be {options.out!r}.")
    agent = load_agent(options)
    from rlbook.figures import save_gif

    env = make_visible(agent.config)
    frames: list[np.ndarray] = []
    returns = []
    try:
        for episode in range(options.episodes):
            played, total = play(agent, env, options.seed + episode, options.max_steps)
            frames += played
            returns.append(total)
    except gym.error.DependencyNotInstalled as error:
        raise ValueError(
            f"Drawing {agent.config.env_id!r} needs a package that is not installed: "
            "`pip install 'rlbook[pixels]'`."
        ) from error
    finally:
        env.close()
    save_gif(frames, options.out, fps=options.fps or env.metadata.get("render_fps") or 30)
    scored = ", ".join(f"{total:.1f}" for total in returns)
    print(f"Wrote {options.out}: {len(frames)} frames, return {scored}.")
    return 0

# %% [markdown]
# `export` writes the policy for programs without Python. [Export](export.ipynb) explains how.

# %%
#| export
@command("export", "rlbook export runs/a --out policy.onnx")
def export_command(parser: Parser, arguments: list[str]) -> int:
    """Write the greedy policy as an ONNX file."""
    add_agent(parser)
    parser.add_argument("--out", default="policy.onnx", metavar="FILE", help="[policy.onnx]")
    options = parser.parse(arguments)
    from rlbook.export import export_onnx

    metadata = export_onnx(load_agent(options), options.out)
    print(f"Wrote {options.out}: {metadata['algo']} on {metadata['env_id']}.")
    for kind in ("inputs", "outputs"):
        for name, what in json.loads(metadata[kind]).items():
            print(f"{kind[:-1]:6}  {name}: {what}")
    return 0


# %% [markdown]
# `plot` draws the learning curves of runs. Runs that differ only in their seed become one curve: a
# mean with a band. It can draw the result of a sweep, too.

# %%
#| export
@command("plot", "rlbook plot runs/a runs/b --out curve.png")
def plot_command(parser: Parser, arguments: list[str]) -> int:
    """Draw the learning curves of runs, or those that a sweep stored; seeds become one band."""
    what = "run directories, directories of sweeps, or their results (.json)"
    parser.add_argument("runs", nargs="+", help=what)
    parser.add_argument("--out", default="curve.png", metavar="FILE", help="[curve.png]")
    parser.add_argument(
        "--metric", default="eval_return_mean", metavar="NAME", help="[eval_return_mean]"
    )
    options = parser.parse(arguments)
    from rlbook.figures import find_runs, plot_results, plot_runs

    stored = [run for run in options.runs if run.endswith(".json")]
    if stored and (len(stored) < len(options.runs) or options.metric != "eval_return_mean"):
        raise ValueError("A stored result holds evaluations: plot it without runs or --metric.")
    if stored:
        plot_results(stored, options.out)
    else:
        runs = [run for path in options.runs for run in find_runs(path)]
        plot_runs(runs, options.out, metric=options.metric)
    print(f"Wrote {options.out}.")
    return 0

# %% [markdown]
# ## Many seeds
#
# One seed proves little. `sweep` trains several side by side, and variants of the settings if you
# like. [Sweeps](sweep.ipynb) explains how, and [cluster](cluster.ipynb) does it on many machines.
# Here the command only passes on what was typed: `--seed` is the first of the seeds, and `--seeds`
# says how many there are.

# %%
#| export
@command("sweep", "rlbook sweep dqn --config cartpole --seeds 5 --vary lr=1e-3,3e-4")
def sweep_command(parser: Parser, arguments: list[str]) -> int:
    """Train several seeds, and variants of settings, side by side; print means and intervals."""
    parser.add_argument("--seeds", type=count, metavar="N", help="how many, from --seed on [5]")
    grid_help = "values of a setting, each a variant; more of these are combined"
    parser.add_argument("--vary", nargs="+", action="extend", metavar="NAME=A,B", help=grid_help)
    parser.add_argument("--jobs", type=count, metavar="N", help="runs at a time [one per core]")
    backends = "local, or ray: the cluster that ray.init() finds [local]"
    parser.add_argument("--backend", default="local", metavar="NAME", help=backends)
    where = "JSON of all curves [result.json in the directory of the sweep]"
    parser.add_argument("--out", metavar="FILE", help=where)
    agent_class, settings, options = parse_training(parser, arguments)
    from rlbook.agent import algorithm_name
    from rlbook.sweep import grid, resolve_seeds, sweep

    variants = settings.pop("variants") or {} if "variants" in settings else None
    if options.vary and variants is not None:
        raise ValueError("The config file has `variants` already: leave out --vary.")
    first, stored = settings.pop("seed", None), settings.pop("seeds", 5)
    seeds = resolve_seeds(first, options.seeds or stored)  # a flag counts more than the file
    directory = Config(run_dir=settings.pop("run_dir", None)).run_dir
    sweep(
        algorithm_name(agent_class),
        settings,
        variants=grid(options.vary) if options.vary else variants,
        seeds=seeds,
        directory=directory,
        out=options.out,
        jobs=options.jobs,
        backend=options.backend,
        command=shlex.join(["rlbook", "sweep", *arguments]),
    )
    return 0

# %% [markdown]
# `tune` searches for good settings, as [Tuning](tune.ipynb) explains. A setting that you type is
# not searched.

# %%
#| export
@command("tune", "rlbook tune dqn --config cartpole --trials 20 --seeds 2 --run-dir runs/tune")
def tune_command(parser: Parser, arguments: list[str]) -> int:
    """Search for good settings; write the best as a config."""
    parser.add_argument("--trials", type=count, default=20, metavar="N", help="how many [20]")
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="of each trial [1]")
    where = "YAML of ranges and choices [the one that comes with the algorithm]"
    parser.add_argument("--space", metavar="FILE", help=where)
    parser.add_argument("--no-prune", action="store_true", help="do every trial to its end")
    parser.add_argument("--jobs", type=count, metavar="N", help="runs at a time [one per core]")
    backends = "local, or ray: the cluster that ray.init() finds [local]"
    parser.add_argument("--backend", default="local", metavar="NAME", help=backends)
    result = "JSON of all trials, beside result.json in the directory of the search"
    parser.add_argument("--out", metavar="FILE", help=result)
    agent_class, settings, options = parse_training(parser, arguments)
    from rlbook.agent import algorithm_name
    from rlbook.sweep import resolve_seeds
    from rlbook.tune import find_space, tune

    seeds = resolve_seeds(settings.pop("seed", None), options.seeds)
    directory = Config(run_dir=settings.pop("run_dir", None)).run_dir
    space = find_space(algorithm_name(agent_class), options.space)
    tune(
        algorithm_name(agent_class),
        settings,
        space={name: given for name, given in space.items() if name not in vars(options)},
        trials=options.trials,
        seeds=seeds,
        directory=directory,
        out=options.out,
        jobs=options.jobs,
        backend=options.backend,
        prune=not options.no_prune,
        command=shlex.join(["rlbook", "tune", *arguments]),
    )
    return 0

# %% [markdown]
# ## Writing the library
#
# The last command belongs to the book: it writes the library [from its chapters](tangle.ipynb).
# That chapter has a `main` of its own, with more to do: `rlbook tangle run dqn` runs a chapter.

# %%
#| export
@command("tangle", "rlbook tangle --check")
def tangle_command(parser: Parser, arguments: list[str]) -> int:
    """Write the library from the chapters, or run, pair or list them."""
    from rlbook.tangle import main as tangle_main

    return tangle_main(arguments, parser)

# %% [markdown]
# ## Exit codes
#
# A script that calls `rlbook` looks at the exit code, and a person reads the last line. Both say
# what happened:
#
# | exit code | what happened | what is printed |
# |---|---|---|
# | 0 | success | the result |
# | 1 | the run failed: a loss that is not finite, a full disk, an exception in code of your own | why, and the last good checkpoint; of an exception the traceback, too |
# | 2 | a mistake in what was typed or in a file, or code of your own that breaks a rule, as with a reward that is no number | what is wrong and what to do |
# | 130, 143 | Ctrl-C, SIGTERM (128 + the number of the signal) | the checkpoint, and how to continue |
# | 141 | the program that reads the output has ended | nothing |
#
# Results go to stdout and errors to stderr, so that `rlbook predict ... | jq` never reads an error
# message.

# %%
#| export
def complain(message: object) -> None:
    """Print one sentence on stderr."""
    sys.stdout.flush()
    print(" ".join(str(message).split()), file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a sentence, without the line of code that it came from."""
    complain(f"Warning: {message}")


# %%
#| export
def dispatch(arguments: list[str]) -> int:
    """Find the command and run it; return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        print(f"rlbook {rlbook.__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        hint = nearest(name, list(COMMANDS)) or " `rlbook --help` lists them."
        raise ValueError(f"`rlbook` has no {what} {name!r}.{hint}")
    entry = COMMANDS[name]
    parser = Parser(name, description=entry.summary, epilog=f"example:\n  {entry.example}")
    return entry.run(parser, arguments[1:])

# %% [markdown]
# Only `main` turns exceptions into exit codes. Note what it does *not* catch: a `KeyError` or a
# `TypeError` is a bug, in this library or in code of your own, and keeps its traceback. So does a
# `ValueError` that your environment raises: the run has added a note to it.

# %%
#| export
def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rlbook` and return its exit code; a user's mistake is one sentence and exit code 2."""
    if os.getcwd() not in sys.path:  # so that `--env-id my_module:Name-v0` finds my_module.py here
        sys.path.append(os.getcwd())
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        warnings.filterwarnings("ignore", module="torch")  # about its own internals
        try:
            code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()  # here, so that a closed pipe raises inside this block
            return code
        except SystemExit as leaving:  # argparse has printed its help
            if isinstance(leaving.code, str):  # out of a user's module
                complain(leaving.code)
                return 1
            return int(leaving.code or 0)
        except ValueError as error:
            if hasattr(error, "__notes__"):  # out of an environment: the traceback leads there
                raise
            complain(error)
            return 2
        except Interrupted as stopped:
            complain(stopped)
            return 128 + stopped.signal_number
        except KeyboardInterrupt:
            complain("Stopped.")
            return 130
        except RunFailed as error:
            complain(error)
            return 1
        except BrokenPipeError:  # the reader, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except MemoryError as error:
            complain(f"There is not enough memory: {error}. A smaller buffer may help.")
            return 1
        except OSError as error:
            complain(f"{error.filename or 'A file'} could not be used: {error.strerror or error}.")
            return 1


# %%
#| export
# A cell in a notebook is called __main__ too, but it has no file.
if __name__ == "__main__" and "__file__" in globals():
    sys.exit(main())

# %%
for line in ("rlbook --help", "rlbook list"):
    say(line, main)

# %% [markdown]
# Here are the answers to eight mistakes. None of them changes anything on the disk.

# %%
before = {path: path.stat().st_mtime_ns for path in Path(folder.name).rglob("*")}
for line in (
    "rlbook trian dqn",
    "rlbook train dqn --lr fast",
    "rlbook train dqn --config cartpol",
    "rlbook train dqn --env-id Pendulum-v1",
    "rlbook train dqn --run-dir runs/a",
    "rlbook resume runs/a --total-steps 100",
    'rlbook predict runs/a --observation "[1, 2]"',
    "rlbook watch runs/a --out agent.mp4",
):
    say(line, main)
assert before == {path: path.stat().st_mtime_ns for path in Path(folder.name).rglob("*")}

# %% [markdown]
# ## Honest edges
#
# - `rlbook predict` gives a recurrent agent a single observation, without those before it. To play
#   a whole episode, use `agent.predict` in Python and pass the hidden state from step to step.
# - `rlbook train dqn --help` has to import torch to know the flags, and takes seconds.
# - The name of an algorithm comes before its flags. The Tab key does not complete flags.
#
# ## Exercises
#
# **Exercise 1.** Write a command `rlbook settings RUN` that prints the settings of a run that are
# not at their default. How many parts of the code do you have to change?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# One. The decorator does the rest, help included.
#
# ```python
# @command("settings", "rlbook settings runs/a")
# def settings_command(parser: Parser, arguments: list[str]) -> int:
#     """Print the settings of a run that are not at their default."""
#     parser.add_argument("run", help="a run directory")
#     options = parser.parse(arguments)
#     config = rlbook.load(options.run).config
#     default = type(config)()
#     for name, value in config.model_dump().items():
#         if value != getattr(default, name):
#             print(f"{name}: {value}")
#     return 0
#
# say("rlbook train dqn --total-steps 300 --learning-starts 100 --lr 0.01 --run-dir runs/new", main)
# printed = say("rlbook settings runs/new", main)
# assert "lr: 0.01" in printed and "seed" not in printed
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Why must the algorithm come before the flags? What would `--hidden 64 64 dqn`
# mean?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A flag for a list takes all words that follow, so `dqn` would be the third layer, and the error
# would be about `hidden`. And before the algorithm is known, the parser cannot tell which flags
# take a word: in `--double dqn`, `dqn` could be the value of the flag.
#
# ```python
# import argparse
#
# toy = argparse.ArgumentParser()
# toy.add_argument("--hidden", nargs="+")
# toy.add_argument("algorithm", nargs="?")
# assert toy.parse_args("--hidden 64 64 dqn".split()).hidden == ["64", "64", "dqn"]
# assert toy.parse_args("dqn --hidden 64 64".split()).algorithm == "dqn"
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** `rlbook evaluate --json` prints `"interval": null` for one episode. Why not the
# two NaN that `Evaluation.interval` returns?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# JSON has no NaN. Python writes and reads it all the same, but other programs refuse the whole
# line: `json.dumps({"low": float("nan")})` is `{"low": NaN}`.
#
# ```python
# import json
#
# assert json.dumps({"low": float("nan")}) == '{"low": NaN}'  # which is not JSON
# assert json.dumps({"interval": None}) == '{"interval": null}'
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** Somebody found that `main` has too many `except` lines and wrote
# this. It answers even more mistakes with one sentence. Look at the second answer. Does it help a
# user?


# %%
def short_main(arguments: list[str]) -> int:
    """Run `rlbook` (with a bug)."""
    try:
        return dispatch(arguments)
    except Exception as error:
        print(error)
        return 2


@command("best", "rlbook best runs/a")
def best_command(parser: Parser, arguments: list[str]) -> int:
    """Print the best evaluation of a run."""
    parser.add_argument("run", help="a run directory")
    path = Path(folder.name) / parser.parse(arguments).run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print(max(line["eval_return_mean"] for line in lines))
    return 0


print("exit code", short_main(["evaluate", "runs/a", "--episodes", "none"]))
print("exit code", short_main(["best", "runs/a"]))

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The answer is `'eval_return_mean'`, and the exit code blames the user. In truth `best` has a bug:
# not every line of the metrics holds an evaluation, and the first line without one raises a
# `KeyError`. The broad `except` caught it and threw away the traceback, which named the line.
# Catch what you can explain, and let all other exceptions through:
#
# ```python
# def short_main(arguments: list[str]) -> int:
#     """Run `rlbook`: explain the mistakes of the user, and let all other exceptions through."""
#     try:
#         return dispatch(arguments)
#     except ValueError as error:
#         print(error)
#         return 2
#
# run = Path(folder.name) / "runs" / "short"
# run.mkdir(parents=True)
# (run / "metrics.jsonl").write_text('{"global_step": 100, "loss": 0.5}\n')
# try:
#     answer = short_main(["best", "runs/short"])
# except KeyError as error:
#     answer = error.args[0]  # with a traceback, which names the line
# assert answer == "eval_return_mean"
# ```
#
# </details>

# %% tags=["hide-input"]
del COMMANDS["best"]  # only for the exercise

# %% [markdown]
# **Exercise 5.** Run `rlbook list | head -1` and then `echo ${PIPESTATUS[0]}` in bash, with and
# without the lines on `BrokenPipeError`. What does Python do by itself?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# With the lines: 141 (or 0, if all was written before `head` ended), and nothing on stderr.
# Without them: a traceback, or *Exception ignored in: <_io.TextIOWrapper name='<stdout>'>* when
# Python writes the rest of its output as it exits. To prevent that, `main` redirects stdout to the
# null device.
#
# ```python
# import subprocess
# import sys
#
# line = [sys.executable, "-m", "rlbook.cli", "--help"]
# process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
# process.stdout.close()  # nobody reads, as when `head` has ended
# assert process.stderr.read() == b""
# assert process.wait() == 141
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# rlbook train dqn --config cartpole --seed 1 --run-dir runs/a
# rlbook resume runs/a --total-steps 100000
# rlbook evaluate runs/a --episodes 20
# rlbook watch runs/a --out agent.gif
# ```
#
# ```python
# from rlbook.cli import main
# main(["evaluate", "runs/a", "--json"])  # the same from Python; returns the exit code
# ```
