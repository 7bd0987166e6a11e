"""The command line: a session from resume to plot, and one sentence for every mistake."""

import hashlib
import importlib.metadata
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium.envs.classic_control import CartPoleEnv
from helpers import in_child, run_rlbook
from PIL import Image, ImageSequence

import rlbook
from rlbook.checkpoint import TRAILER
from rlbook.cli import COMMANDS, main
from rlbook.dqn import DQN

RLBOOK = str(Path(sys.executable).with_name("rlbook"))
TINY_FLAGS = (
    "--learning-starts 50 --train-frequency 10 --eval-every 100 --eval-episodes 2 --hidden 8 "
    "--log-every 100"
)
TINY = shlex.split(TINY_FLAGS)


def run(line: str) -> int:
    """Run a line in this process and return its exit code."""
    return main(shlex.split(line))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with what it holds."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of 300 steps that all tests may read."""
    path = tmp_path_factory.mktemp("trained") / "a"
    words = ["train", "dqn", "--total-steps", "300", "--checkpoint-every", "100", *TINY]
    assert main([*words, "--run-dir", str(path)]) == 0
    return path


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory of its own, with a copy of the tiny run as runs/a."""
    shutil.copytree(trained, tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A session ------------------------------------------------------------------------------------


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in a real shell, with `rlbook` on the path."""
    env = {**os.environ, "PATH": f"{Path(RLBOOK).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def test_resume_evaluate_predict_watch_plot(folder: Path) -> None:
    """Each command in a process of its own; a run of 300 steps is there."""
    said = []
    for line in (
        "resume runs/a --total-steps 400",
        "evaluate runs/a --episodes 3 --json",
        'predict runs/a --observation "[0.1, 0, 0, 0]"',
        "watch runs/a --out agent.gif --max-steps 5",
        "plot runs/a --out curve.png",
    ):
        code = in_child(run_rlbook, shlex.split(line), folder)
        assert (code, (folder / "err").read_text()) == (0, "")
        said.append((folder / "out").read_text())
    assert "Done: step 400 with a mean return of" in said.pop(0)
    lines = (folder / "runs/a/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(x)["global_step"] for x in lines if "eval_return_mean" in x]
    assert steps == [100, 200, 300, 400]
    assert [text.count("\n") for text in said] == [1] * 4
    evaluation, prediction, watched, plotted = (text.rstrip("\n") for text in said)
    assert len(json.loads(evaluation)["returns"]) == 3
    values = json.loads(prediction)["q_values"]
    assert json.loads(prediction)["action"] == int(np.argmax(values))
    assert watched == "Wrote agent.gif: 6 frames, return 5.0." and plotted == "Wrote curve.png."
    with Image.open(folder / "agent.gif") as animation:
        assert animation.format == "GIF" and animation.size == (600, 400)


def test_a_mistake_in_a_real_shell_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = shell("rlbook trian dqn; echo $?; rlbook --version; rlbook --help | true", tmp_path)
    assert done.stderr == "`rlbook` has no command 'trian'. Did you mean 'train'?\n"
    assert done.stdout.splitlines() == ["2", f"rlbook {rlbook.__version__}"]


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from rlbook.cli import main; main(['--help']); main(['train', '--help']); "
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0 and b"--total-steps" in done.stdout


# What is printed ------------------------------------------------------------------------------


def test_help_has_an_example_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"  {entry.example}\n" in text
        assert main([name, "--help"]) == 0
        assert f"example:\n  {entry.example}" in capsys.readouterr().out
    expected = "list train resume evaluate predict watch plot sweep tune export tangle"
    assert sorted(COMMANDS) == sorted(expected.split())


def test_help_of_an_algorithm_lists_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dqn", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--final-epsilon X Probability of a random action at the end. [0.05]" in text
    assert "--hidden N [N ...] Units of each hidden layer. [[64, 64]]" in text


def test_help_shows_no_default_that_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    for line, flag in (("resume --help", "total-steps N"), ("watch --help", "env-kwargs YAML")):
        assert run(line) == 0
        shown = capsys.readouterr().out
        assert f"--{flag}" in shown and "[50000]" not in shown and "[{}]" not in shown


def test_help_is_grouped_under_a_short_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dqn", "--help"]) == 0
    text = capsys.readouterr().out
    usage = "usage: rlbook train [ALGO] [--config NAME|FILE] [--SETTING VALUE ...]\n"
    assert text.startswith(usage)
    common, algorithm, run = (
        text.index(f"\n{title}") for title in ("common settings", "algorithm:", "run:")
    )
    flags = ("--seed", "--final-epsilon", "--log-every")
    seed, epsilon, log = (text.index(f"  {flag} ") for flag in flags)
    assert common < seed < algorithm < epsilon < run < log
    assert "`rlbook train` names it after the run" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "dqn", "--learning-rate", "1"], "'--learning-rate'. Did you mean '--lr'?"),
        (["train", "dqn", "--n_envs", "2"], "no flag '--n_envs'. Did you mean '--num-envs'?"),
        (["train", "dqn", "--keep-bets"], "no flag '--keep-bets'. Did you mean '--keep-best'?"),
        (["sweep", "dqn", "--vary", "learning_rate=1,2"], "'learning_rate'. Did you mean 'lr'?"),
        (["sweep", "dqn", "--stop-patience", "3"], "equal length: leave out 'stop_patience'"),
    ],
)
def test_suggestions_name_the_setting_that_is_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_evaluate_and_watch_take_other_keywords_for_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    DQN("rlbook/TMaze-v0", env_kwargs={"length": 3, "walk": False}).save("maze.pt")
    flags = ["--episodes", "2", "--env-kwargs", "{length: 7}"]
    assert main(["evaluate", "maze.pt", *flags]) == 0
    agent = DQN.load("maze.pt")
    agent.config.env_kwargs = {"length": 7, "walk": False}
    assert f"mean return      {agent.evaluate(2).mean:.2f}" in capsys.readouterr().out
    assert main(["watch", "maze.pt", "--out", "maze.gif", "--env-kwargs", "length: 7"]) == 0
    assert "Wrote maze.gif: 9 frames" in capsys.readouterr().out  # seven steps and the turn
    assert main(["evaluate", "maze.pt", "--env-kwargs", "7"]) == 2
    assert "'env_kwargs' must be a mapping" in capsys.readouterr().err


def test_an_error_of_the_environment_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    real, calls = rlbook.envs.ObservationReward.reward, itertools.count()

    def broken(*arguments: Any) -> Any:
        if next(calls) > 5:  # not when it is tried, before the run
            raise ValueError("joint 3 is out of range")
        return real(*arguments)

    monkeypatch.setattr("rlbook.envs.ObservationReward.reward", broken)
    flags = ["--env-id=rlbook/ObservationReward-v0", "--total-steps", "20", "--run-dir", "a"]
    with pytest.raises(ValueError, match="joint 3") as failure:
        main(["train", "dqn", *flags])
    assert "Go on from a/checkpoints/step_000000000005.pt" in failure.value.__notes__[0]


def test_list_names_algorithms_and_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    fits = "vector observations, discrete actions; configs: "
    assert re.search(rf"^dqn +\w.*\n +{fits}.*cartpole", text)
    assert [line.split()[0] for line in text.splitlines()[::2]] == list(rlbook.ALGORITHMS)


def test_list_takes_an_algorithm_without_a_docstring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlbook.DQN, "__doc__", None)
    assert main(["list"]) == 0
    assert re.search(r"^dqn *$", capsys.readouterr().out, flags=re.MULTILINE)


def test_list_lines_up_the_algorithms_however_long_their_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    indents = {len(line) - len(line.lstrip()) for line in lines[1::2]}
    assert indents == {max(map(len, rlbook.ALGORITHMS)) + 2}
    assert all(line[indents.copy().pop() - 1] == " " for line in lines[::2])


def test_tangle_passes_on_what_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["tangle", "list", "dqn", "sac"]) == 0
    assert capsys.readouterr().out.splitlines() == ["book/dqn.ipynb", "book/sac.ipynb"]
    assert main(["tangle", "lits"]) == 2
    assert capsys.readouterr().err.startswith("Verb invalid choice: 'lits'")


def test_evaluate_prints_mean_interval_and_std(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = DQN.load("runs/a").evaluate(4, seed=7)
    assert main(["evaluate", "runs/a", "--episodes", "4", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    low, high = expected.interval
    assert f"mean return      {expected.mean:.2f} over 4 greedy episodes" in text
    assert f"95 % interval    {low:.2f} to {high:.2f}" in text
    assert main(["evaluate", "runs/a", "--episodes", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["interval"] is None and len(answer["returns"]) == 1


def test_predict_takes_json_and_npy_one_and_many(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = np.array([[0.1, 0, 0, 0], [0, 0, -0.1, 0]], np.float32)
    np.save("batch.npy", batch)
    answers = []
    for text in ("batch.npy", json.dumps(batch.tolist()), json.dumps(batch[0].tolist())):
        assert main(["predict", "runs/a", "--observation", text]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    many, same, one = answers
    assert many == same
    assert one["action"] == many["action"][0]
    assert np.allclose(one["q_values"], many["q_values"][0], atol=1e-6)


def test_a_checkpoint_file_serves_as_well_as_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted(Path("runs/a/checkpoints").glob("*.pt"))[-1]
    words = ["--observation", "[0, 0, 0, 0]"]
    assert main(["predict", str(path), *words]) == main(["predict", "runs/a", *words]) == 0
    one, two = capsys.readouterr().out.splitlines()
    assert one == two


def test_train_without_run_dir_makes_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--env-id", "rlbook/OneStep-v0", "--total-steps", "60", "--seed", "3"]
    assert main(["train", "dqn", *words, *TINY]) == 0
    path = "runs/dqn-rlbook-OneStep-v0-3"
    out = capsys.readouterr().out
    assert f"Training dqn on rlbook/OneStep-v0, seed 3, for 60 steps in {path}." in out
    assert f"`rlbook resume {path} --total-steps 120`" in out
    assert Path(path, "metrics.jsonl").is_file()


def test_file_then_flags_decide_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(
        "algo: dqn\nconfig: cartpole\nenv_id: rlbook/OneStep-v0\nobservation_scale: [1]\n"
        "total_steps: 1e2\nlr: 5e-4\neval_every: 0\nhidden: [8]\nseed: 1\ndouble: true\n"
    )
    assert run("train --config my.yaml --seed 2 --no-double --run-dir r") == 0
    stored = yaml.safe_load(Path("r/config.yaml").read_text())
    assert (stored["algo"], stored["seed"], stored["lr"]) == ("dqn", 2, 0.0005)
    assert (stored["double"], stored["n_step"], stored["total_steps"]) == (False, 10, 100)


def test_environments_of_the_current_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as in a script
    Path("my_envs.py").write_text(
        "import gymnasium as gym\nfrom rlbook.envs import OneStep\n"
        "gym.register('Mine-v0', OneStep)\n"
    )
    assert run(f"train dqn --env-id my_envs:Mine-v0 --total-steps 60 {TINY_FLAGS}") == 0


def test_resume_of_a_finished_run_changes_no_number(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("runs/a/metrics.jsonl").read_bytes()
    assert main(["resume", "runs/a"]) == 0
    assert "was finished already: ask for more steps" in capsys.readouterr().out
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


def test_watch_two_episodes_at_a_given_speed(folder: Path) -> None:
    assert run("watch runs/a --out b/c.gif --episodes 2 --max-steps 3 --fps 10") == 0
    with Image.open("b/c.gif") as animation:
        pages = ImageSequence.Iterator(animation)  # equal frames in a row share a page
        assert sum(page.info["duration"] for page in pages) == 8 * 100  # milliseconds


# Mistakes -------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str]] = [
    ("trian", "`rlbook` has no command 'trian'. Did you mean 'train'?"),
    ("--versoin", "`rlbook` has no flag '--versoin'. `rlbook --help` lists them."),
    ("list dqn", "An algorithm in 'dqn' needs the module 'dqn', which is not installed or not on"),
    ("train", "Name an algorithm, as in `rlbook train dqn`, or a config file with `algo:`."),
    ("train --seed 1", "Name an algorithm, as in `rlbook train dqn`, or"),
    ("train dqm", "There is no algorithm 'dqm'. Did you mean 'dqn'?"),
    ("train dqn --totl-steps 1", "has no flag '--totl-steps'. Did you mean '--total-steps'?"),
    ("train dqn --total-step 1", "has no flag '--total-step'. Did you mean '--total-steps'?"),
    ("train dqn --seed", "--seed expected one argument: see `rlbook train --help`."),
    ("train dqn --config", "--config expected one argument: see `rlbook train --help`."),
    ("sweep dqn --config", "--config expected one argument: see `rlbook sweep --help`."),
    ("train dqn --hidden", "--hidden expected at least one argument: see"),
    ("train dqn foo", "`rlbook train` does not know what to do with 'foo'."),
    ("train dqn --seed one", "Setting 'seed' must be a whole number, not 'one'."),
    ("train dqn --seed -1", "Setting 'seed' must be at least 0, not -1."),
    ("train dqn --lr nan", "Setting 'lr' must be finite, not nan."),
    ("train dqn --gamma 1.1", "Setting 'gamma' must be at most 1, not 1.1."),
    ("train dqn --tau 0", "Setting 'tau' must be above 0, not 0.0."),
    ("train dqn --double maybe", "Setting 'double' must be true or false, not 'maybe'."),
    ("train dqn --batch-size 9 --buffer-size 8", "'batch_size' (9) must not exceed 'buffer_size'"),
    ("train dqn --observation-scale 1 2", "'observation_scale' needs 4 factors, not 2."),
    ("train dqn --config cartpol", "no shipped config 'cartpol'. Did you mean 'cartpole'?"),
    ("train dqn --config nowhere.yaml", "There is no config file 'nowhere.yaml'."),
    ("train --config cartpole", "Say which algorithm the shipped config 'cartpole' is for"),
    ("train --config broken.yaml", "broken.yaml is not valid YAML, line 3: "),
    ("train --config other.yaml", "There is no algorithm 'sax'."),
    ("train dqn --config other.yaml", "other.yaml is for 'sax', not for 'dqn': name one"),
    ("train dqn --config typo.yaml", "DQN has no setting 'learning_rat'."),
    ("train dqn --env-id CartPol-v1", "There is no environment 'CartPol-v1'. Did you mean"),
    ("train dqn --env-id nowhere:X-v0", "needs the module 'nowhere'"),
    ("train dqn --env-id Pendulum-v1", "continuous actions (Box(-2.0, 2.0, (1,), float32)), but"),
    ("train dqn --env-kwargs {gg:1}", "does not take the env_kwargs"),
    ("train dqn --device tpu9", "There is no device 'tpu9' here: use 'cpu'."),
    ("train dqn --run-dir runs/a", "runs/a already holds a run: go on with `rlbook resume runs/a`"),
    ("train dqn --run-dir broken.yaml", "Could not make broken.yaml: "),
    ("resume", "The following arguments are required: run: see `rlbook resume --help`."),
    ("resume runs/b", "runs/b is not a run directory: it has no config.yaml."),
    ("resume runs/a --total-steps 100", "runs/a is already at step 300: ask for more steps."),
    ("resume runs/a --total-steps x", "Setting 'total_steps' must be a whole number, not 'x'."),
    ("resume runs/a --lr 1", "`rlbook resume` has no flag '--lr'."),
    ("evaluate runs/b", "There is no checkpoint runs/b."),
    ("evaluate runs", "runs is not a run directory: it has no config.yaml."),
    ("evaluate broken.yaml", "broken.yaml is damaged or not an rlbook checkpoint"),
    ("evaluate runs/a --episodes 0", "--episodes must be a whole number above 0, not '0': see"),
    ("evaluate runs/a --seed x", "--seed must be a whole number of at least 0, not 'x': see"),
    ("predict runs/a", "The following arguments are required: --observation: see"),
    ("predict runs/a --observation [1,2]", "An observation must have the shape (4,), not (2,)."),
    ("predict runs/a --observation [NaN,0,0,0]", "An observation must be finite"),
    ("predict runs/a --observation [1", "An observation is JSON such as [0.1, 0, 0, 0], or"),
    ("predict runs/a --observation nowhere.npy", "Could not read nowhere.npy: No such file"),
    ("predict runs/a --observation pickle.npy", "pickle.npy does not hold an array of numbers."),
    ("watch runs/a --out a.mp4", "The name of an animation must end in .gif, not be 'a.mp4'."),
    ("watch runs/a --out runs/a.gif/b.gif --fps 0", "--fps must be a whole number above 0"),
    ("plot runs/b", "runs/b is no run directory"),
    ("plot runs/a --metric los", "has no metric 'los'. Did you mean 'loss'?"),
    ("plot runs/a --out a.bmp", "its name must end in .png, .pdf or .svg."),
    ("plot none.json", "Cannot read the result none.json: No such file or directory."),
    ("plot a.json runs/a", "A stored result holds evaluations: plot it without runs or --metric."),
    ("plot a.json --metric loss", "plot it without runs or --metric."),
    ("tangle", "This is not a checkout of the book"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_each_mistake_is_one_sentence_and_harms_nothing(
    line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.yaml").write_text("seed: 1\nhidden: [64\n")
    Path("other.yaml").write_text("algo: sax\n")
    Path("typo.yaml").write_text("learning_rat: 1\n")
    np.save("pickle.npy", np.array([object()]), allow_pickle=True)
    before = snapshot(folder)
    code = run(line)
    out, err = capsys.readouterr()
    assert code == 2 and message in err
    assert err.count("\n") == 1 and "Traceback" not in err and out == ""
    assert snapshot(folder) == before


class Attack:
    """An object whose unpickling makes a directory."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("attacked",)


def seal(payload: bytes) -> bytes:
    """Give bytes a valid checksum."""
    return payload + TRAILER + hashlib.sha256(payload).hexdigest().encode()


def test_damaged_and_hostile_checkpoints_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = sorted(Path("runs/a/checkpoints").glob("*.pt"))
    sound = new.read_bytes()
    flipped = bytes([*sound[:500], sound[500] ^ 1, *sound[501:]])
    for content in (sound[: len(sound) // 2], flipped, b"", seal(pickle.dumps(Attack()))):
        new.write_bytes(content)
        before = snapshot(folder)
        assert main(["evaluate", str(new)]) == 2
        assert capsys.readouterr().err.startswith(str(new))
        assert main(["evaluate", "runs/a", "--episodes", "1"]) == 0  # from the one before
        out, err = capsys.readouterr()
        assert "after 200 steps" in out
        assert err.startswith(f"Warning: {new}") and "Going on with the one before." in err
        assert snapshot(folder) == before and not Path("attacked").exists()
    old.write_bytes(b"")
    before = snapshot(folder)
    for command in ("evaluate", "resume"):
        assert main([command, "runs/a"]) == 2
        assert "No checkpoint in runs/a/checkpoints is sound" in capsys.readouterr().err
    assert snapshot(folder) == before


def test_a_checkpoint_of_another_algorithm_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path("runs/a/config.yaml")
    other = next(name for name in [*rlbook.ALGORITHMS, "none"] if name != "dqn")
    config.write_text(config.read_text().replace("algo: dqn", f"algo: {other}"))
    before = snapshot(folder)
    assert main(["resume", "runs/a"]) == 2
    assert other in capsys.readouterr().err
    assert snapshot(folder) == before


def test_an_environment_that_cannot_draw_is_said_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DQN("rlbook/OneStep-v0").save("one.pt")
    assert main(["watch", "one.pt"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("'rlbook/OneStep-v0' cannot be watched, since it has no render mode ")
    assert said.endswith("returns a picture from `render`.\n") and said.count("\n") == 1
    assert not Path("agent.gif").exists()


def make_deaf(**kwargs: Any) -> gym.Env:
    """CartPole that does not pass the keyword on."""
    return CartPoleEnv()


def make_mute() -> gym.Env:
    """CartPole that does not take the keyword."""
    return CartPoleEnv()


@pytest.mark.parametrize(
    ("maker", "why"),
    [
        (make_mute, "it takes no keyword render_mode"),
        (make_deaf, "what makes it does not pass render_mode on"),
    ],
)
def test_watching_an_environment_of_ones_own_says_what_it_must_take(
    maker: Any, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DQN(maker).save("own.pt")
    assert main(["watch", "own.pt"]) == 2
    said = capsys.readouterr().err
    assert f"cannot be watched, since {why}: an environment lists rgb_array in" in said
    assert said.count("\n") == 1


def test_missing_pygame_names_the_extra(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert main(["watch", "runs/a"]) == 2
    assert "`pip install 'rlbook[pixels]'`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "Stopped."),
        (SystemExit("needs a licence"), 1, "needs a licence"),
        (OSError(28, "No space left on device", "runs/a/x"), 1, "runs/a/x could not be used: No"),
        (MemoryError("Unable to allocate 9 TiB"), 1, "There is not enough memory: Unable to"),
        (gym.error.Error("two\nlines"), None, ""),
        (KeyError("a bug"), None, ""),
    ],
)
def test_exit_codes_say_whose_fault_it_was(
    error: BaseException,
    code: int | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("rlbook.cli.dispatch", fail)
    if code is None:  # a bug of ours keeps its traceback
        with pytest.raises(type(error)):
            main([])
        return
    assert main([]) == code
    assert capsys.readouterr().err.startswith(message)


def test_a_failed_run_says_why_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--total-steps", "300", "--checkpoint-every", "100", "--lr", "1e30", "--run-dir", "r"]
    assert main(["train", "dqn", *words, *TINY]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "The run stopped at step" in err


def test_the_package_is_light_and_names_what_there_is() -> None:
    assert rlbook.ALGORITHMS["dqn"] is DQN
    assert rlbook.__version__ == importlib.metadata.version("rlbook")
    assert {"ALGORITHMS", "load", "__version__"} <= set(dir(rlbook))
    with pytest.raises(AttributeError, match="attribute nothing"):
        rlbook.nothing  # type: ignore[attr-defined]  # noqa: B018
