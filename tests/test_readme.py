"""Commands on the pages are accepted, and each is run by a test or has a reason why not; names in
CONTRIBUTING.md exist; lines are wrapped.
"""

from __future__ import annotations

import re
import shlex

from pages import (
    PAGES,
    PAGES_WITH_PYTHON,
    ROOT,
    TABLES_OF_COMMANDS,
    ShellCommand,
    fenced_blocks,
    parse_command,
    shell_lines,
    table_lines,
)

from nmt.cli.arguments import read_arguments
from nmt.cli.commands import COMMANDS

COLUMNS = 110
GENERATED = re.compile(
    r"docs/benchmarks/(?!README)|docs/(api|settings)/|docs/(paper|tour[-\w]*)\.md"
)  # not wrapped by hand
TESTS = ROOT / "tests"

# Commands that test_page_commands.py does not run: a text in the command, and the test that runs
# such a command, or the reason why no test does
ELSEWHERE = {
    " devices=": "test_launch.py",
    "scheduler=tcp": "test_cluster.py",
    "nmt-serve ": "test_serve_workers.py",
    "--multirun experiment=": "test_first_hour.py",
    "experiment=wmt14": "needs the network and GPUs; test_paper.py builds the models",
    "=runs/table3": "needs the models of the row above",
    "nllb-200": "test_import_huggingface.py",
    "what=upload": "test_trackers.py",
    "tracker=[": "test_trackers.py",
    "sign=": "test_signatures.py",
    "verify_key=": "test_signatures.py",
    "format=web": "test_web_export.py",
    "format=bergamot": "test_export_bergamot.py",
    "half past three": "test_first_tutorial.py",
    "data.train.alignments=": "test_given_alignment.py",
    "data.train.columns=[1,2,3]": "test_given_alignment.py",
    "data.train.fields=[en,de,links]": "test_given_alignment.py",
    "measure=alignment": "test_scoring.py; test_aer.py reads such output",
    "tf32=true": "needs a GPU; test_make_gpu.py rehearses the run",
    "data.train.score=": "test_scored_corpora.py",
    "data.train.scores=web.scores": "test_scored_corpora.py; a tiny model gives lower scores",
    "data_dir=data/hints": "needs models that train for minutes; test_terminology.py trains others",
    "data_dir=data/m30k_hints": "likewise, and the network; test_terminology.py trains others",
    "comet/bin/python": "needs COMET; test_command_metric.py and test_rerank.py run other programs",
}
# other programs: a command begins with this text
PROGRAMS = {
    "make demo": "needs the network and 15 minutes; test_homeassistant.py runs its parts",
    "make gpu": "needs a GPU; test_make_gpu.py rehearses it",
    "make benchmark": "installs other toolkits; test_benchmark.py runs its parts",
    "MLFLOW_ALLOW_FILE_STORE=true mlflow ui": "serves until it is stopped",
    "make ": "runs the tests themselves, or tools of development",
    "git clone": "needs the network",
    "pip install": "needs the network",
    "python3 -m venv": "needs the network",
    "python -m pip wheel": "needs the network",
    "eval ": "test_arguments.py",
    "curl ": "test_serve_api.py",
    "dask ": "test_cluster.py",
    ".../python -m distributed": "is the output of a program",
    "npm ": "needs the network; test_web_export.py fetches the same package",
    "python -m http.server": "serves until it is stopped",
    "openssl ": "test_signatures.py makes keys with cryptography",
    "model_signing ": "is the program of another package",
    "torchrun ": "needs two machines; scripts/two_hosts.py runs it on two simulated ones",
    "sbatch ": "needs SLURM",
    "python scripts/compare.py": "test_ablation.py; fairseq needs an hour and its environment",
    ".venv/bin/python scripts/serve_benchmark.py": "needs a trained model and LibreTranslate",
    "python scripts/benchmark/run.py": "needs a GPU; test_benchmark.py runs its parts",
    ".venv/bin/python scripts/benchmark/run.py": "test_benchmark.py",
    "python scripts/fetch_homeassistant.py": "needs the network; test_homeassistant.py",
    "python scripts/gpu.py": "needs a GPU; test_make_gpu.py rehearses it",
    "python scripts/kill_and_resume.py": "takes minutes; test_launch.py kills ranks and launchers",
    "python scripts/parsing.py": "test_parsing.py",
    "python scripts/make_numbers.py": "test_bundled.py",
    "python scripts/aer.py": "test_aer.py",
    "time node translate.mjs": "test_export_bergamot.py",
    "fairseq-interactive ": "is a program of another toolkit",
    "head ": "is a program of the system",
    "paste ": "is a program of the system",
    "source ": "is a command of the shell",
}


def documented_commands() -> list[tuple[str, ShellCommand]]:
    """Return the commands of nmt on all pages and in --help, with their page."""
    lines = [(page.name, line) for page in PAGES for line in shell_lines(page)]
    lines += [(page.name, line) for page in TABLES_OF_COMMANDS for line in table_lines(page)]
    lines += [("--help", line) for command in COMMANDS.values() for line in command.examples]
    commands = [(page, parse_command(line)) for page, line in lines]
    return [(page, command) for page, command in commands if command is not None]


def test_documented_commands_are_accepted() -> None:
    commands = documented_commands()
    for page, command in commands:
        assert command.name in COMMANDS, f"{page}: {command.name}"
        read_arguments(command.arguments, COMMANDS[command.name])
    in_readme = {command.name for page, command in commands if page == "README.md"}
    assert in_readme == COMMANDS.keys()


def test_every_command_of_the_pages_is_run_by_a_test_or_says_why_not() -> None:
    lines = [(page.name, line) for page in PAGES for line in shell_lines(page)]
    is_used = dict.fromkeys([*ELSEWHERE, *PROGRAMS], False)
    for page, line in lines:
        if parse_command(line) is None:
            keys = [start for start in PROGRAMS if line.startswith(start)]
            assert keys, f"{page}: {line}: no test runs it"
        else:
            keys = [fragment for fragment in ELSEWHERE if fragment in line]
        is_used |= dict.fromkeys(keys, True)
    assert [key for key, used in is_used.items() if not used] == []
    for reason in [*ELSEWHERE.values(), *PROGRAMS.values()]:
        for name in re.findall(r"test_\w+\.py", reason):
            assert (TESTS / name).is_file(), name


def test_commands_stand_in_blocks_that_the_tests_read() -> None:
    programs = "|".join(map(re.escape, ["nmt ", "nmt-", *PROGRAMS]))
    num_blocks = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # all blocks, since the end of a block of another language looks like a start
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for language, block in blocks:
            if language in ("", "bash", "console", "sh"):
                match = re.search(rf"^(?:{programs})\S* .*$", block, re.MULTILINE)
                assert match is None, f"{page.name}: {match[0]}: begin its block with ```shell"
        num_blocks += len(blocks)
    assert num_blocks > 50


def test_python_and_output_of_tutorials_and_guides_are_checked_by_a_test() -> None:
    source = (TESTS / "test_first_tutorial.py").read_text(encoding="utf-8")
    compared = set(re.findall(r"docs/tutorials/[\w-]+\.md", source))
    for folder in ("tutorials", "how-to"):
        for page in sorted((ROOT / "docs" / folder).glob("*.md")):
            text = page.read_text(encoding="utf-8")
            name = page.relative_to(ROOT).as_posix()
            is_run = name in compared or name in PAGES_WITH_PYTHON
            assert is_run or not fenced_blocks(text, "python"), name
            assert name in compared or not fenced_blocks(text, "text"), name


def test_scripts_have_the_options_that_the_pages_give_them() -> None:
    num_options = 0
    for page in PAGES:
        for line in shell_lines(page):
            words = shlex.split(line, comments=True)
            if len(words) > 1 and words[0].endswith("python") and words[1].endswith(".py"):
                script = ROOT / words[1]
                source = "".join(path.read_text("utf-8") for path in script.parent.glob("*.py"))
                options = {word for word in words[2:] if word.startswith("--")} - {"--help"}
                assert not {option for option in options if f'"{option}"' not in source}, line
                num_options += len(options)
    assert num_options > 20


def test_files_and_names_in_the_table_of_additions_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| to add |") :].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        names = re.findall(r"`([^`]+)`", row)
        files = [name for name in names if re.fullmatch(r"[\w/]+\.(py|md|cfg|yaml)", name)]
        texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
        if any("nmt/config/" in name for name in names):
            texts += [path.read_text("utf-8") for path in (ROOT / "nmt/config").glob("*.py")]
        for name in set(names) - set(files):
            for word in re.findall(r"\w+", name) if not (ROOT / name).is_dir() else []:
                assert any(re.search(rf"\b{word}\b", text) for text in texts), (row, word)


def test_lines_of_prose_are_wrapped() -> None:
    for page in [ROOT / "CHANGELOG.md", *PAGES]:
        name = page.relative_to(ROOT).as_posix()
        lines = [] if GENERATED.match(name) else page.read_text(encoding="utf-8").split("\n")
        is_code = False
        for number, line in enumerate(lines, start=1):
            is_code ^= line.startswith("```")
            is_free = is_code or line.startswith(("    ", "|", "```")) or " " not in line.strip()
            assert is_free or len(line) <= COLUMNS, f"{name}:{number} has {len(line)} columns"


def test_no_page_is_long() -> None:
    for page in PAGES:
        num_lines = page.read_text(encoding="utf-8").count("\n")
        assert num_lines <= 250, f"{page.name} has {num_lines} lines; divide it"
