"""Texts and benchmarks from files or the Hugging Face Hub."""

from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import constants

from facts.tasks.language.base import Language, Split
from facts.tasks.language.benchmarks import find_benchmarks
from facts.utils.cache import content_key
from facts.utils.hub import HUB, answers, fetched
from facts.utils.options import options


@options
class Corpus(Language):
    """A text for calibration and one for evaluation, each a file or `hub:OWNER/DATASET/CONFIGURATION/SPLIT`.

    Rows of a data set are joined by blank lines, as is usual for WikiText; a file is read unchanged, so perplexities
    differ. `benchmark_names` are lm-eval's, or names in the YAML files of `benchmark_folder`.
    """

    training_text: str
    evaluation_text: str
    benchmark_names: tuple[str, ...] = ()
    benchmark_folder: str | None = None

    def inspect(self) -> str:
        texts = ", ".join(_found(source) for source in (self.training_text, self.evaluation_text))
        if not self.benchmark_names:
            return texts
        find_benchmarks(self.benchmark_names, self.benchmark_folder)
        if self.benchmark_folder is None and not (constants.HF_HUB_OFFLINE or answers()):
            raise ConnectionError(
                "lm-eval's questions are at the hub, which does not answer: connect the machine once, set "
                "HF_HUB_OFFLINE=1 if they were fetched before, or give benchmark_folder, or benchmark_names=[]"
            )
        return f"{texts}, {len(self.benchmark_names)} benchmarks"

    def text(self, split: Split) -> str:
        return read_text(self.training_text if split == "training" else self.evaluation_text)

    def benchmarks(self) -> tuple[str, ...]:
        return self.benchmark_names

    @property
    def benchmarks_key(self) -> str:
        """Hash of the names, the files in the folder and lm-eval's version, but not of questions on the hub."""
        folder = Path(self.benchmark_folder or "")
        files = sorted(folder.rglob("*")) if self.benchmark_folder else []
        files = [path for path in files if path.is_file() and path.parent.name != "__pycache__"]
        contents = {path.relative_to(folder): path.read_bytes() for path in files}
        return content_key(self.benchmark_names, contents, version("lm_eval") if self.benchmark_names else None)


def read_text(source: str) -> str:
    """Read a file or a data set on the hub. Raises an `OSError` if there is none, `ValueError` for a bad name."""
    if source.startswith(HUB):
        return fetched_text(source)
    return Path(source).expanduser().read_text(encoding="utf-8")


@lru_cache(maxsize=2)
def fetched_text(source: str) -> str:
    """Join the rows of a data set on the hub. Raises `ConnectionError` if it cannot be fetched."""
    parts = source.removeprefix(HUB).split("/")
    if len(parts) != 4:
        raise ValueError(f"a text at the hub is hub:OWNER/DATASET/CONFIGURATION/SPLIT, got {source!r}")
    *_, configuration, split = parts
    rows = fetched(source, configuration, split, 'the text as a file: evaluation_text="wiki.test.raw"')
    return "\n\n".join(rows["text"])


def _found(source: str) -> str:
    """Describe a text without fetching it. Raises an `OSError` if it cannot be found."""
    if source.startswith(HUB):
        return f"{source} ({'at the hub' if answers() else f'{len(read_text(source)):,} characters'})"
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no text {path}: give a file or {HUB}OWNER/DATASET/CONFIGURATION/SPLIT")
    return f"{path} ({path.stat().st_size:,} bytes)"
