"""Scripts and notebooks run, and show what they say."""

import asyncio
import re
import runpy
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.docs.pages import ROOT

pytestmark = pytest.mark.system
EXAMPLES = ROOT / "examples"


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """A function that runs a script in a folder of its own and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(script: str, **arguments) -> str:
        runpy.run_path(str(EXAMPLES / script))["main"](**arguments)
        return capsys.readouterr().out

    return run


def numbers(pattern: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, printed)]


def test_a_network_of_timm(main):
    original, compressed, recovered, loaded = numbers(r"top-1 ([\d.]+)", main("compress_timm.py", epochs=2, ratio=0.1))
    assert 85 < original < 91 and compressed < recovered == loaded < original
    assert load_file("smaller/model.safetensors")


def test_an_image_classifier_of_transformers(main):
    pytest.importorskip("transformers", reason="pip install -e '.[examples]'")
    printed = main("compress_vit_of_transformers.py")
    before, after, loaded = numbers(r"(?:top-1 |, )([\d.]+) (?:before|after|loaded)", printed)
    assert before > 90 and before - 6 < after == loaded <= before


def test_a_language_model(main):
    pytest.importorskip("transformers", reason="pip install -e '.[examples]'")
    printed = main("compress_language_model.py")
    original, compressed = numbers(r"perplexity ([\d.]+)", printed)
    assert original < compressed < 1.1 * original < 20
    assert printed.count("'A function is") == 2 and Path("fewer_words/tokenizer.json").exists()


@pytest.fixture(scope="module")
def kernel():
    """One for all notebooks, since each would import the libraries anew; they start without the names of others."""
    client = pytest.importorskip("jupyter_client", reason="pip install -e '.[test]'")
    manager = client.AsyncKernelManager(kernel_name="python3")
    asyncio.run(manager.start_kernel())
    yield manager
    asyncio.run(manager.shutdown_kernel(now=True))


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(notebook, tmp_path, kernel):
    """From the first cell to the last, which also checks what they assert."""
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[test]'")
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[test]'")
    shutil.copy(EXAMPLES / "small_networks.py", tmp_path)
    book = nbformat.read(notebook, as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}"))
    client = nbclient.NotebookClient(book, kernel, timeout=300)
    client.execute()
    client.kc.stop_channels()
    shown = percentages(nbformat.read(notebook, as_version=4))
    assert len(shown) >= 4
    assert percentages(book) == pytest.approx(shown, abs=1.5)  # two standard errors: other processors round otherwise


def percentages(book) -> list[float]:
    """Numbers with one decimal that the cells show, without those of times."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    texts = (output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs)
    untimed = [re.sub(r"(?m)^latency.*", "", "".join(text)) for text in texts]
    return [float(number) for text in untimed for number in re.findall(r"(?<![\d.])\d\d\.\d(?! s|\d)", text)]
