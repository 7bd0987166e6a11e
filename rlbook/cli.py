"""Made from book/cli.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "COMMANDS",
    "COMMON",
    "Command",
    "CommandFunction",
    "Parser",
    "add_agent",
    "add_groups",
    "announce",
    "cannot_be_watched",
    "choose",
    "command",
    "complain",
    "count",
    "default_run_dir",
    "dispatch",
    "evaluate_command",
    "export_command",
    "help_text",
    "list_command",
    "load_agent",
    "main",
    "make_visible",
    "parse_training",
    "play",
    "plot_command",
    "predict_command",
    "read_observation",
    "resume_command",
    "seed_number",
    "show_warning",
    "sweep_command",
    "tangle_command",
    "train_command",
    "tune_command",
    "watch_command",
]

# %% book/cli.py · The command line
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


# %% book/cli.py · The parser
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


# %% book/cli.py · A table of commands
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


# %% book/cli.py · Flags and files
def choose(
    arguments: Sequence[str], command: str = "train"
) -> tuple[str | None, dict[str, Any]]:
    """Find the algorithm and the settings of the config file before the flags are known."""
    first = Parser(command, add_help=False)
    first.add_argument("--config")
    config = first.parse_known_args(arguments)[0].config
    algo = None if not arguments or arguments[0].startswith("-") else arguments[0]
    return (algo, {}) if config is None else gather_settings(config, algo)


COMMON = ("env_id", "env_kwargs", "num_envs", "total_steps", "seed", "run_dir")


def add_groups(parser: Parser, config_class: type[Config]) -> None:
    """Give a parser the flags of all settings, in groups."""
    own = [name for name in config_class.model_fields if name not in Config.model_fields]
    rest = [name for name in Config.model_fields if name not in COMMON]
    titles = ("common settings [default]; flags override the config file", "algorithm", "run")
    for title, names in zip(titles, (COMMON, own, rest), strict=True):
        if names:
            parser.add_settings(title, config_class, names)


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


# %% book/cli.py · Training and resuming
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


# %% book/cli.py · Using a trained agent
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


# %% book/cli.py · Many seeds
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


# %% book/cli.py · Writing the library
@command("tangle", "rlbook tangle --check")
def tangle_command(parser: Parser, arguments: list[str]) -> int:
    """Write the library from the chapters, or run, pair or list them."""
    from rlbook.tangle import main as tangle_main

    return tangle_main(arguments, parser)


# %% book/cli.py · Exit codes
def complain(message: object) -> None:
    """Print one sentence on stderr."""
    sys.stdout.flush()
    print(" ".join(str(message).split()), file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a sentence, without the line of code that it came from."""
    complain(f"Warning: {message}")


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


# A cell in a notebook is called __main__ too, but it has no file.
if __name__ == "__main__" and "__file__" in globals():
    sys.exit(main())
