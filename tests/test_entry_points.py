"""The installed console scripts: they exist, start quickly, end quietly when a pipe is closed, and
sweep over settings.
"""

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
from nmt.cli.compose import ComposedCommand, compose_command
from nmt.errors import ConfigError

SCRIPTS = Path(sys.executable).parent


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a console script."""
    script = [SCRIPTS / name, *arguments]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def run_python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return done.stdout.split()


def test_every_command_has_its_script_and_its_function() -> None:
    points = {point.name: point for point in entry_points(group="console_scripts")}
    for name in COMMANDS:
        function = f"{name}_" if keyword.iskeyword(name) else name
        assert points[f"nmt-{name}"].value == f"nmt.cli.main:{function}"
        assert callable(getattr(entry, function))
    with pytest.raises(AttributeError):
        _ = entry.nonsense


@pytest.mark.slow
def test_help_needs_less_than_a_second() -> None:
    for name in COMMANDS:
        for _ in range(5):  # on a busy machine, some take longer
            start = os.times()
            result = run(f"nmt-{name}", "--help")
            cpu_seconds = os.times().children_user - start.children_user
            if cpu_seconds < 0.5:
                break
        assert cpu_seconds < 0.5
        assert result.returncode == 0
        assert "75 training stopped\nby a signal after saving a checkpoint" in result.stdout
    assert result.stdout == run("nmt", name, "--help").stdout


def test_nmt_alone_lists_the_commands() -> None:
    result = run("nmt")
    assert result.returncode == 0
    assert all(f"  {name}" in result.stdout for name in COMMANDS)


def test_help_shows_the_values_of_the_settings_that_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read_help(*words: str) -> str:
        assert entry.main(COMMANDS["train"], [*words, "--help"]) == 0
        return capsys.readouterr().out

    text = read_help("model=tiny", "seed=7")
    assert "in brackets: the value with your settings" in text
    for line in ("model.d_model [128]", "seed [7]", "max_updates [1500]", "adapter [none]"):
        assert f"  {line}" in text
    for words in ([], ["model=nonsense"], ["-m"]):
        assert "  model.d_model [512]" in read_help(*words), words


@pytest.mark.slow
def test_cfg_shows_the_composed_config() -> None:
    result = run("nmt-train", "+model=big", "run_dir=a,b", "--cfg", "job")
    assert result.returncode == 0
    assert "d_model: 1024" in result.stdout
    assert "run_dir: a,b" in result.stdout


@pytest.mark.slow
def test_a_sweep_runs_every_choice_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs: list[tuple[int | None, str]] = []

    def note(composed: ComposedCommand) -> None:
        config = composed.config
        runs.append((config.last, config.run_dir))
        if config.last == 3:
            raise ConfigError("enough")

    arguments = ["run_dir='a,b c'", "output=it's", "hydra.sweep.dir=sweep"]
    with pytest.raises(ConfigError, match="enough"):
        compose_command(COMMANDS["average"], ["-m", "last=1,2,3,4", *arguments], note)
    assert runs == [(number, "a,b c") for number in (1, 2, 3)]  # only nmt-train adds a subfolder


@pytest.mark.slow
def test_typed_files_replace_the_text_of_an_experiment_in_a_sweep_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("data:\n  train: {tsv: [t.tsv]}\n  valid: {tsv: [v.tsv]}\n")
    sources: list[list[str]] = []
    arguments = ["data.train.src=a", "data.train.tgt=b", "data.valid.num_pairs=5", "seed=1,2"]
    compose_command(
        COMMANDS["preprocess"],
        ["-m", "experiment=mine.yaml", "hydra.sweep.dir=sweep", *arguments],
        lambda composed: sources.append(
            composed.config.data.train.text_keys + composed.config.data.valid.text_keys
        ),
    )
    assert sources == [["src", "num_pairs"]] * 2


@pytest.mark.slow
def test_commands_import_what_they_need_and_garbage_collection_skips_it() -> None:
    code = "import sys, nmt, nmt.cli.main; print('torch' in sys.modules, 'hydra' in sys.modules)"
    assert run_python(code) == ["False", "False"]
    code = (
        "import gc, sys; from nmt.cli.commands import COMMANDS; from nmt.cli.main import main;"
        "status = main(COMMANDS['translate'], ['model_dir=nowhere']);"
        "print(status, gc.isenabled(), len(gc.get_objects()) < 50_000);"
        "print('torch' in sys.modules, 'hydra' in sys.modules)"
    )
    assert run_python(code) == ["2", "True", "True", "True", "False"]


@pytest.mark.slow
def test_a_value_may_use_a_resolver_of_hydra() -> None:
    # in another process, in which no earlier test has registered the resolvers
    code = (
        "from nmt.cli.commands import COMMANDS; from nmt.cli.compose import compose_command;"
        "words = ['output=out-${python_version:major}.txt'];"
        "print(compose_command(COMMANDS['translate'], words, print).config.output)"
    )
    assert run_python(code) == [f"out-{sys.version_info.major}.txt"]


# packages and modules that a command needs for some jobs only, and imports for these
IMPORTED_LATER = {
    "translate": [
        *["ctranslate2", "filelock", "google", "html.parser", "hydra", "jinja2", "pyarrow"],
        *["nmt.data.binary", "nmt.data.vocabulary", "nmt.documents.formats", "nmt.evaluate"],
        *["nmt.export", "nmt.translate.attention", "regex", "sacrebleu", "xml.parsers.expat"],
    ],
    "train": ["hydra", "jinja2", "nmt.documents", "nmt.export", "nmt.preprocess"],
    "evaluate": [
        *["google", "hydra", "jinja2", "nmt.checkpoint", "nmt.translate", "pyarrow", "torch"],
    ],
    "preprocess": ["google", "hydra", "jinja2", "nmt.preprocess", "pyarrow", "torch"],
    "serve": ["asyncio", "hydra", "nmt.serve", "starlette", "torch", "uvicorn"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED_LATER)
def test_commands_import_at_their_start_only_what_every_job_needs(name: str) -> None:
    code = "import sys; from nmt.cli.commands import COMMANDS; from nmt.cli.main import *;"
    code += "import nmt.cli.compose; gc.callbacks.append(lambda *_: print('a collection'));"
    code += f"import_function(COMMANDS['{name}']); gc.callbacks.clear(); print(*sys.modules)"
    modules = set(run_python(code))
    assert "collection" not in modules, "of objects that are frozen after the import"
    assert "omegaconf" in modules
    assert not modules.intersection(IMPORTED_LATER[name])


def test_a_closed_pipe_is_no_error() -> None:
    for name, *arguments in (["nmt"], ["nmt-train", "--help"]):
        script = [SCRIPTS / name, *arguments]
        with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


@pytest.mark.slow
def test_a_closed_stdout_is_no_error_if_nothing_is_written_to_it(tmp_path: Path) -> None:
    for words in ("nmt --help", f"nmt-visualize what=mask output={tmp_path}/mask.png"):
        shell = ["sh", "-c", f"{SCRIPTS}/{words} >&-"]
        result = subprocess.run(shell, capture_output=True, text=True, check=False)
        assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr


INTERRUPT_AN_IMPORT = """
import os, signal, sys

interrupted_module = sys.argv[1]
sys.argv[:] = ["nmt-translate", "experiment=copy", "model_dir=nowhere"]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted_module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from nmt.cli.main import translate
sys.exit(translate())
"""


EARLY_MODULES = ["logging", "nmt.errors", "nmt.cli.commands", "nmt.config", "hydra"]
LATE_MODULES = ["omegaconf", "nmt.cli.translate", "torch", "numpy", "sentencepiece"]


@pytest.mark.parametrize(
    "modules",
    [["nmt.errors", "hydra"], pytest.param(EARLY_MODULES + LATE_MODULES, marks=pytest.mark.long)],
)
def test_an_interrupted_import_ends_a_command_with_one_line(modules: list[str]) -> None:
    for module in modules:
        script = [sys.executable, "-c", INTERRUPT_AN_IMPORT, module]
        done = subprocess.run(
            script, capture_output=True, check=False, text=True, stdin=subprocess.DEVNULL
        )
        assert done.stderr == "nmt-translate: interrupted\n", module
        assert done.returncode == 130, module


def test_few_modules_are_imported_before_interrupts_are_handled() -> None:
    code = "import sys; before = set(sys.modules); import nmt.cli.interrupts\n"
    code += "print(*sorted(set(sys.modules) - before))"
    imported = run_python(code)
    assert set(imported) <= {"__future__", "nmt", "nmt.cli", "nmt.cli.interrupts"}


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        pytest.param("--cfg job", marks=pytest.mark.slow),
        pytest.param("input=/dev/null model_dir=nowhere", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_for_all_output_is_no_success(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        script = [str(SCRIPTS / "nmt-translate"), *words.split()]
        assert subprocess.run(script, check=False, stdout=full, stderr=full).returncode == 2


def test_a_folder_as_stdin_ends_python_itself_and_a_folder_as_input_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python opens stdin before it runs any code, so that no command can print its own line."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        for script in ([sys.executable, "-c", "pass"], [SCRIPTS / "nmt-translate"]):
            done = subprocess.run(
                script, stdin=descriptor, capture_output=True, check=False, text=True, timeout=600
            )
            assert done.returncode == 1
            assert "<stdin> is a directory" in done.stderr.splitlines()[0]
            assert "Traceback" not in done.stderr
    finally:
        os.close(descriptor)
    arguments = [f"input={tmp_path}", "model_dir=nowhere"]
    assert entry.main(COMMANDS["translate"], arguments) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
