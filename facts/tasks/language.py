"""Language modelling: the perplexity of a text, and accuracy on multiple-choice benchmarks of lm-eval."""

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from huggingface_hub import constants
from pydantic import Field
from torch import Tensor, nn

from facts.moments.losses import NOTHING, next_tokens, summed_cross_entropy
from facts.tasks.base import ClassLogits, Evaluation, pass_over
from facts.utils.cache import content_key
from facts.utils.files import at_home
from facts.utils.hub import HUB, answers, fetched
from facts.utils.numerics import mean_and_error, seed_of, shuffled
from facts.utils.options import Count, needing, options
from facts.utils.progress import progress_of, silence

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

Batch = tuple[Tensor, Tensor]
Split = Literal["training", "evaluation"]


@options
class Language(ClassLogits):
    """Perplexity of a text and accuracy on lm-eval benchmarks, calibrated on the next-token loss.

    Texts are cut into non-overlapping windows of `sequence_length` tokens; the remainder is dropped. Training windows
    are shuffled by `seed`: the first `num_sensitivity` are for searches, the next `num_calibration` for the factors
    (paper, supplement: 256 of 2,048 tokens). Analyses use windows of `analysis_length` tokens of the evaluation text:
    `num_factors` for the factors, `num_held_out` for the comparison. Benchmarks use `num_questions` each (default: all)
    and score `num_answers_at_once` per batch.
    """

    sequence_length: Annotated[int, Field(ge=2)] = 2048
    num_calibration: Count = 256
    num_sensitivity: Count = 16
    analysis_length: Annotated[int, Field(ge=2)] = 128
    num_factors: Count = 128
    num_held_out: Count = 128
    batch_size: Count = 1
    num_questions: Count | None = None
    num_answers_at_once: Count = 16
    seed: int = 0

    @abstractmethod
    def text(self, split: Split) -> str:
        """The whole text of a split."""

    @abstractmethod
    def benchmarks(self) -> Sequence[str | Mapping[str, Any]]:
        """Tasks of lm-eval, by name or by configuration."""

    @property
    def benchmark_folder(self) -> str | None:
        """Folder with the configurations of your own benchmarks; None for lm-eval's."""
        return None

    @property
    @abstractmethod
    def benchmarks_key(self) -> str:
        """Hash of the questions, as far as they are known."""

    def tokens(self, split: Split, model: nn.Module) -> Tensor:
        """The tokens `[L]` of a text."""
        tokens = tokenized(self.text(split), tokenizer_of(model))
        most: int = model.get_input_embeddings().num_embeddings
        if len(tokens) and (largest := int(tokens.max())) >= most:
            own = f"{type(model).__name__} knows {most:,} tokens, and its tokenizer gives number {largest:,}"
            raise ValueError(f"{own}: give it the tokenizer that it was trained with, or resize_token_embeddings")
        return tokens

    def content_key(self, model: nn.Module) -> str:
        settings = {field.name: getattr(self, field.name) for field in fields(Language)}
        return content_key(
            settings, self.tokens("training", model), self.tokens("evaluation", model), self.benchmarks_key
        )

    def calibration(self, model: nn.Module) -> list[Batch]:
        return self._parts("training", model, self.sequence_length, "num_sensitivity", "num_calibration")[1]

    def sensitivity(self, model: nn.Module) -> list[Batch]:
        return self._parts("training", model, self.sequence_length, "num_sensitivity", "num_calibration")[0]

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> list[Batch]:
        """Windows of the training text from an offset that differs between epochs, the same number in each."""
        generator = torch.Generator().manual_seed(seed_of(seed, epoch))
        tokens, length = self.tokens("training", model), self.sequence_length
        num_starts = max(1, min(length, len(tokens) - length + 1))
        start = torch.randint(num_starts, (), generator=generator)
        found = windows(tokens[start:], length)[: (len(tokens) - num_starts + 1) // length]
        whole = len(found) // self.batch_size * self.batch_size  # a smaller last batch is left out
        return self._batches(found[torch.randperm(len(found), generator=generator)[:whole]])

    def analysis(self, model: nn.Module) -> tuple[list[Batch], list[Batch]]:
        return self._parts("evaluation", model, self.analysis_length, "num_factors", "num_held_out")

    def evaluation(self, model: nn.Module) -> list[Batch]:
        return self._batches(windows(self.tokens("evaluation", model), self.sequence_length))

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        return (1, self.sequence_length)

    def evaluate(
        self, model: nn.Module, precision: torch.dtype = torch.float32, original: nn.Module | None = None
    ) -> Evaluation:
        """Measure perplexity, and accuracies in percent, per benchmark and their mean; with errors of both means."""
        value, error = perplexity_of(*losses_of_windows(model, self.evaluation(model), precision))
        metrics = {"perplexity": value} | ({} if error is None else {"perplexity_error": error})
        if self.benchmarks():
            found = self._accuracies(model, precision)
            values, errors = zip(*found.values(), strict=True)
            metrics["accuracy"] = sum(values) / len(found)
            if not math.isnan(error := math.hypot(*errors) / len(found)):  # as of a single question
                metrics["accuracy_error"] = error
            metrics |= {f"accuracy_{name}": value for name, (value, _) in found.items()}
        return Evaluation(metrics)

    def _accuracies(self, model: nn.Module, precision: torch.dtype) -> dict[str, tuple[float, float]]:
        """Zero-shot accuracy in percent by benchmark, and its error, by the likelihoods of the answers as they are.

        Raises `ImportError` without lm-eval, `ConnectionError` if questions cannot be fetched, `ValueError` for a
        benchmark that is unknown or has no accuracy.
        """
        benchmarks = self.benchmarks()
        manager = find_benchmarks(benchmarks, self.benchmark_folder)
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        names = [task if isinstance(task, str) else task["task"] for task in benchmarks]
        with progress_of("benchmarks"), silence():
            network = HFLM(
                pretrained=model,
                tokenizer=copy.deepcopy(tokenizer_of(model)),  # lm-eval would give it a padding token
                backend="causal",
                batch_size=self.num_answers_at_once,
                mixed_precision_dtype=None if precision == torch.float32 else precision,
            )
            evaluated = simple_evaluate(
                network,
                tasks=list(benchmarks),
                task_manager=manager,
                limit=self.num_questions,
                bootstrap_iters=0,  # the bootstrap starts processes
                log_samples=False,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        found, sizes = evaluated["results"], evaluated["n-samples"]
        if without := [name for name in names if "acc,none" not in found[name]]:
            raise ValueError(f"lm-eval reports no accuracy for {', '.join(without)}: name multiple-choice benchmarks")
        accuracies = {}
        for name in names:
            share, others = found[name]["acc,none"], sizes.get(name, {"effective": 1})["effective"] - 1
            # A group's size is unknown, and so is its error.
            error = math.sqrt(share * (1 - share) / others) if others else math.nan
            accuracies[name] = 100 * share, 100 * error
        return accuracies

    def _parts(self, split: Split, model: nn.Module, length: int, *names: str) -> tuple[list[Batch], list[Batch]]:
        """Draw two disjoint sets of windows, sized by the fields `names`. Raises `ValueError` for too few windows."""
        sizes, found = [getattr(self, name) for name in names], windows(self.tokens(split, model), length)
        if len(found) < sum(sizes):
            needed = f"{' + '.join(names)} needs {sum(sizes)} windows of {length} tokens"
            raise ValueError(f"{needed}; the {split} text has {len(found)}: give a longer one, or smaller numbers")
        first, second = found[shuffled(len(found), self.seed)[: sum(sizes)]].split(sizes)
        return self._batches(first), self._batches(second)

    def _batches(self, found: Tensor) -> list[Batch]:
        return [(tokens, next_tokens(tokens)) for tokens in found.split(self.batch_size)]


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
    """Read a file or a data set on the hub. Raises an `OSError` if there is none, `ValueError` for a bad one."""
    if source.startswith(HUB):
        return fetched_text(source)
    try:
        return at_home(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8 ({error}): save it as UTF-8") from error


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
    path = at_home(source)
    if not path.is_file():
        raise FileNotFoundError(f"no text {path}: give a file or {HUB}OWNER/DATASET/CONFIGURATION/SPLIT")
    return f"{path} ({path.stat().st_size:,} bytes)"


def tokenizer_of(model: nn.Module) -> Any:
    """The network's tokenizer. Raises `ValueError` if it has none."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"{type(model).__name__} has no tokenizer: set model.tokenizer to its transformers tokenizer")
    return tokenizer


@lru_cache(maxsize=4)
def tokenized(text: str, tokenizer: Any) -> Tensor:
    """Tokens `[L]` of a text, including any that the tokenizer adds at its start and end."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def windows(tokens: Tensor, length: int) -> Tensor:
    """Cut tokens `[L]` into windows `[N, length]` and drop the remainder. Raises `ValueError` if none fits."""
    if len(tokens) < length:
        kind = f"a text of {len(tokens)} tokens does not fill a window of {length}"
        raise ValueError(f"{kind}: give a longer one, or lower the length")
    return tokens[: len(tokens) // length * length].view(-1, length)


def perplexity(model: nn.Module, batches: Iterable[Batch], precision: torch.dtype = torch.float32) -> float:
    """exp of the mean loss over all next tokens; the first token of a window is not predicted."""
    return perplexity_of(*losses_of_windows(model, batches, precision))[0]


def perplexity_of(losses: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """Perplexity from the losses and next tokens of windows `[N]`, and its standard error, None for one window."""
    mean, error = mean_and_error(losses, counts)
    value = torch.tensor(mean, dtype=torch.float64).exp().item()
    return value, None if error is None else value * error  # d exp(x) = exp(x) dx


def losses_of_windows(
    model: nn.Module, batches: Iterable[Batch], precision: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The summed loss and the number of next tokens of each window `[N]`, in float64 and in the order of the data."""

    def measure(logits: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(logits.split(1), targets.split(1), strict=True)
        losses = torch.stack([summed_cross_entropy(*pair) for pair in pairs])
        return torch.stack([losses.double(), (targets != NOTHING).sum(dim=1)]).cpu()

    losses, counts = torch.cat(pass_over(batches, model, measure, precision), dim=1)
    return losses, counts


def find_benchmarks(benchmarks: Sequence[str | Mapping[str, Any]], folder: str | None = None) -> "TaskManager":
    """Task manager for these benchmarks. Raises `ImportError` without lm-eval, `ValueError` if one is unknown."""
    names = [task for task in benchmarks if isinstance(task, str)]
    with needing("llm", f"the benchmark {', '.join(names) or 'of questions'}"):
        from lm_eval.tasks import TaskManager
    with silence():
        manager = TaskManager(include_path=folder, include_defaults=bool(names) and folder is None)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known]:
        where = f"in {folder}, which describes {', '.join(sorted(known)) or 'none'}" if folder else "in lm-eval"
        raise ValueError(f"no benchmark is called {', '.join(unknown)} {where}")
    return manager
