"""Output of the command line before it does anything: help, lists of choices, completion, errors."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import facts
from facts.cli import app, options

COMMANDS = ["benchmark", "compress", "cut", "evaluate", "export", "pareto", "push", "recover", "list"]
LEAN = """
import sys
for name in ("hydra", "jinja2", "matplotlib", "omegaconf", "pandas", "sklearn", "wandb"):
    sys.modules[name] = None
import torch, facts
import facts.cli.compress, facts.cli.evaluate, facts.tasks
model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 3))
facts.compress(model, [(torch.randn(8, 12), torch.randint(3, (8,)))], ratio=0.8)
facts.pareto
"""


def completions(words: str) -> list[str]:
    """Words that Bash would offer after these."""
    setting = {"_FACTS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return CliRunner().invoke(app, [], prog_name="facts", env=setting).output.split()


def test_help_has_examples_and_explains_every_method(run):
    text = CliRunner().invoke(app, []).output
    assert all(command in text for command in COMMANDS) and "--install-completion" in text
    assert run("--version").output.strip() == facts.__version__
    for command in COMMANDS:
        text = run(command, "--help").output
        assert "Examples" in text and text.count(f"facts {command} ") >= 3  # usage, and at least two examples
    text = run("compress", "--help").output
    for name, explanation in (options.ESTIMATORS | options.SEARCHES).items():
        assert f"{name}: {explanation[:20]}" in text


def test_lists_of_models_with_the_tags_of_their_weights(run, caplog):
    run("list", "searches")
    assert "loading PyTorch" not in caplog.text  # which only networks need
    for part in ("vit_tiny*16_224", "timm/vit_tiny_patch16_224"):
        (found,) = run("list", "models", part).stdout.splitlines()[1:]
        assert found.split() == ["timm/vit_tiny_patch16_224", "augreg_in21k_ft_in1k,", "augreg_in21k"]  # default first
    narrow = CliRunner().invoke(app, ["list", "models", "vit_tiny*16_224"], env={"COLUMNS": "30"}).stdout
    assert "…" not in narrow and "_patch16_224 " in narrow
    assert "torchvision/swin_t " in run("list", "models", "swin_t").stdout
    assert "none of the models has 'qqqq' in its name" in run("list", "models", "qqqq", code=1).output


def test_help_waits_for_no_large_library():
    """In a process of its own, since here they are loaded already."""
    code = "import sys, facts.cli; sys.exit(bool({'torch', 'timm', 'transformers', 'pandas'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_commands_options_methods_and_networks_are_completed():
    assert completions("facts ") == COMMANDS
    assert "--latency-ms" in completions("facts compress --lat")
    assert completions("facts compress --search cors") == ["cors", "cors_fisher"]
    assert completions("facts pareto --searches uniform,mem") == ["uniform,memvit"]
    assert completions("facts compress t") == ["timm/", "torchvision/", "transformers/"]
    assert completions("facts compress torchvision/resnet5") == ["torchvision/resnet50"]
    assert {"timm/test_vit", "timm/test_vit.r160_in1k"} <= {*completions("facts evaluate timm/test_vit")}


def test_usage_errors(run):
    network, places = ("timm/test_vit", "--data", "."), ("--out", "vit")
    for command, arguments, message in (
        ("compress", ("--estimator", "fact"), ": did you mean facts?"),
        ("compress", ("--recover", 0), "should be greater than or equal to"),
        ("compress", ("--recover", "inf"), "should be less than or equal to 100000"),
        ("compress", ("--num-workers", 100_000), "should be less than or equal to 128"),
        ("pareto", ("--estimators", "facts,fact"), "'fact' is not one of "),
        ("pareto", ("--ratios", "0.3,half"), "half is not a fraction in (0, 1]: write one, such as 0.5"),
        ("compress", ("--ratio", "50%"), "50% is not a fraction in (0, 1]: did you mean 0.5?"),
        ("compress", ("--ratio", "50"), "50 is not a fraction in (0, 1]: did you mean 0.5?"),
        ("compress", ("--ratio", "0"), "0 is not a fraction in (0, 1]: write one, such as 0.5"),
        ("compress", ("--ratio", "150%"), "150% is not a fraction in (0, 1]: write one, such as 0.5"),
    ):
        assert message in run(command, *network, *places, *arguments, code=2).output


@pytest.mark.system
def test_an_error_is_one_line_and_no_traceback(tmp_path):
    command, narrow = ["cut", str(tmp_path), "--out", str(tmp_path / "out")], os.environ | {"COLUMNS": "40"}
    result = subprocess.run([sys.executable, "-m", "facts", *command], capture_output=True, text=True, env=narrow)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert str(tmp_path) in line and "compression.json" in line and "Traceback" not in result.stderr
    assert isinstance(CliRunner().invoke(app, ["--traceback", *command]).exception, FileNotFoundError)


@pytest.mark.system
def test_a_network_is_compressed_without_what_tables_need():
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("a comparison needs pandas: pip install -e '.[experiments]'")
