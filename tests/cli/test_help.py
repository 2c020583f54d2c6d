"""What the command line says before it does anything: help, choices, completion, errors."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import facts
from facts.cli import app
from facts.cli.choices import ESTIMATORS, SEARCHES
from facts.estimators import ESTIMATORS as ALL_ESTIMATORS
from facts.search import SEARCHES as ALL_SEARCHES

COMMANDS = ("compress", "evaluate", "export", "inspect", "measure", "pareto", "list")
FACTS = [sys.executable, "-c", "from facts.cli import app; app(prog_name='facts')"]


def completions(words: str) -> list[str]:
    """What Bash would offer after these words."""
    setting = {"_FACTS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return CliRunner().invoke(app, [], prog_name="facts", env=setting).output.split()


def test_a_bare_command_prints_the_help():
    result = CliRunner().invoke(app, [])
    for command in COMMANDS:
        assert command in result.output
    assert "--install-completion" in result.output


def test_version(run):
    assert run("--version").output.strip() == facts.__version__


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples(run, command):
    text = run(command, "--help").output
    assert "Examples" in text
    assert text.count(f"facts {command} ") >= 3  # usage, and at least two examples


def test_the_help_explains_every_method_that_there_is(run):
    assert (list(ESTIMATORS), list(SEARCHES)) == (list(ALL_ESTIMATORS), list(ALL_SEARCHES))
    text = run("compress", "--help").output
    for name, explanation in (ESTIMATORS | SEARCHES).items():
        assert f"{name}: {explanation[:20]}" in text


def test_help_waits_for_no_large_library():
    """In a process of its own, since here they are loaded already."""
    code = "import sys, facts.cli; sys.exit(bool({'torch', 'timm', 'transformers', 'pandas'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_commands_options_and_methods_are_completed():
    assert completions("facts ") == list(COMMANDS)
    assert "--latency-ms" in completions("facts compress --lat")
    assert completions("facts compress --estimator kfac_") == ["kfac_expand", "kfac_reduce"]
    assert completions("facts compress --search cors") == ["cors", "cors_fisher"]
    assert completions("facts pareto --searches uniform,mem") == ["uniform,memvit"]


def test_networks_are_completed():
    assert completions("facts compress t") == ["timm/", "transformers/"]
    assert {"timm/test_vit", "timm/test_vit.r160_in1k"} <= {*completions("facts evaluate timm/test_vit")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--estimator", "fact"], "'fact' is not one of 'aafm', 'asvd', 'facts'"),
        (["--search", "core"], "'core' is not one of 'asvd', 'comcat'"),
        (["--ratio", "half"], "Invalid value for '--ratio'"),
        (["--num-calibration", "0"], "should be greater than or equal to 1"),
    ],
)
def test_arguments_that_are_wrong_in_themselves(run, arguments, message):
    result = run("compress", "timm/test_vit", "--data", "photos", "--out", "vit", *arguments, code=2)
    assert message in result.output


@pytest.mark.system
def test_an_error_is_one_line_and_no_traceback(tmp_path):
    """As a person sees it."""
    command = [*FACTS, "inspect", str(tmp_path)]
    environment = os.environ | {"COLUMNS": "40"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert str(tmp_path) in line and "compression.json" in line
    assert "Traceback" not in result.stderr


@pytest.mark.system
def test_a_reader_that_has_seen_enough_is_no_error(compressed):
    """A pipe whose other end is closed, as after `head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [*FACTS, "inspect", str(compressed[1]), "--json"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert result.stderr == ""


def test_a_traceback_where_one_is_asked_for(tmp_path):
    result = CliRunner().invoke(app, ["--traceback", "inspect", str(tmp_path)])
    assert isinstance(result.exception, FileNotFoundError)
