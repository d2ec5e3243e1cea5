"""The installed console scripts: there, quick, quiet in a closed pipe; Hydra's own flags work."""

from __future__ import annotations

import keyword
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nmt.cli import main as entry
from nmt.cli.commands import COMMANDS
from nmt.cli.compose import with_config
from nmt.config import AverageConfig
from nmt.errors import ConfigError

SCRIPTS = Path(sys.executable).parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [SCRIPTS / arguments[0], *arguments[1:]]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def run_shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)


def python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return done.stdout.split()


def test_every_command_has_its_script_and_its_function() -> None:
    points = {point.name: point for point in entry_points(group="console_scripts")}
    for name in COMMANDS:
        name_of_it = f"{name}_" if keyword.iskeyword(name) else name
        assert points[f"nmt-{name}"].value == f"nmt.cli.main:{name_of_it}"
        assert callable(getattr(entry, name_of_it))
    with pytest.raises(AttributeError):
        _ = entry.nonsense


@pytest.mark.slow
def test_help_needs_less_than_a_second() -> None:
    for name in COMMANDS:
        before = os.times()
        one = run(f"nmt-{name}", "--help")
        assert os.times().children_user - before.children_user < 0.5  # CPU time
        assert one.returncode == 0
        assert "75 training stopped by a\nsignal and saved" in one.stdout
    assert one.stdout == run("nmt", name, "--help").stdout


def test_nmt_alone_lists_the_commands_and_an_unknown_one_names_the_nearest() -> None:
    result = run("nmt")
    assert result.returncode == 0
    assert all(f"  {name}" in result.stdout for name in COMMANDS)
    result = run("nmt", "trian")
    assert result.returncode == 2
    assert result.stderr == "nmt: no command trian; did you mean train or translate?\n"


@pytest.mark.slow
def test_hydra_shows_the_composed_config_and_completes_words() -> None:
    result = run("nmt-train", "+model=big", "--cfg", "job")
    assert result.returncode == 0
    assert "d_model: 1024" in result.stdout
    result = run("nmt-train", "-sc", "query=bash", COMP_LINE="nmt-train model=b")
    assert result.stdout.split() == ["model=base", "model=big"]


@pytest.mark.slow
@pytest.mark.slow
def test_a_sweep_runs_every_choice_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int | None, str]] = []

    def note(config: AverageConfig) -> None:
        seen.append((config.last, config.run_dir))
        if config.last == 3:
            raise ConfigError("enough")

    arguments = ["run_dir='a,b c'", "hydra.sweep.dir=sweep"]
    with pytest.raises(ConfigError, match="enough"):
        with_config(COMMANDS["average"], ["-m", "last=1,2,3,4", *arguments], note)
    assert seen == [(last, "a,b c") for last in (1, 2, 3)]  # of nmt-train alone it has others


@pytest.mark.slow
def test_files_that_are_typed_replace_those_of_an_experiment_in_a_sweep_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("data:\n  train: {tsv: [t.tsv]}\n  valid: {tsv: [v.tsv]}\n")
    seen: list[tuple[list[str], list[str]]] = []
    arguments = ["data.train.src=a", "data.train.tgt=b", "data.valid.num_pairs=5", "seed=1,2"]
    with_config(
        COMMANDS["preprocess"],
        ["-m", "experiment=mine.yaml", "hydra.sweep.dir=sweep", *arguments],
        lambda c: seen.append((c.data.train.source_keys, c.data.valid.source_keys)),
    )
    assert seen == [(["src"], ["num_pairs"])] * 2


@pytest.mark.slow
def test_commands_import_what_they_need_and_garbage_collection_goes_over_none_of_it() -> None:
    code = "import sys, nmt, nmt.cli.main; print('torch' in sys.modules, 'hydra' in sys.modules)"
    assert python(code) == ["False", "False"]
    code = (
        "import gc, sys; from nmt.cli.commands import COMMANDS; from nmt.cli.main import main;"
        "status = main(COMMANDS['translate'], ['model_dir=nowhere']);"
        "print(status, gc.isenabled(), len(gc.get_objects()) < 50_000, 'torch' in sys.modules)"
    )
    assert python(code) == ["2", "True", "True", "True"]


def test_a_closed_pipe_is_no_error() -> None:
    for name, *arguments in (["nmt"], ["nmt-train", "--help"]):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([SCRIPTS / name, *arguments], **pipes) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


@pytest.mark.slow
def test_a_closed_stdout_is_no_error_where_nothing_is_written_to_it(tmp_path: Path) -> None:
    for command in ("nmt --help", f"nmt-visualize what=mask output={tmp_path}/mask.png"):
        done = run_shell(f"{SCRIPTS}/{command} >&-")
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
