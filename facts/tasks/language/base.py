"""Language modelling: parts shared by all texts."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from facts.moments.losses import NOTHING, next_tokens, summed_cross_entropy
from facts.tasks.base import ClassLogits, Evaluation, pass_over
from facts.tasks.language.benchmarks import Accuracy, accuracies
from facts.utils.cache import content_key
from facts.utils.options import Count, options
from facts.utils.random import seed_of

Batch = tuple[Tensor, Tensor]
Split = Literal["training", "evaluation"]


@options
class Language(ClassLogits):
    """Perplexity of a text and accuracy on lm-eval benchmarks, calibrated on the next-token loss.

    Texts are cut into non-overlapping windows of `sequence_length` tokens; the remainder is dropped. Training windows
    are shuffled by `seed`: the first `num_sensitivity` are for searches, the next `num_calibration` for the factors
    (paper, supplement: 256 of 2,048 tokens). Analyses use windows of `analysis_length` tokens of the evaluation text:
    `num_factors` for the factors, `num_held_out` for the comparison. Benchmarks use `num_questions` each (default: all)
    and score `num_answers_at_once` per batch; `accuracy` is `acc`, or `acc_norm`, which divides by answer lengths.
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
    accuracy: Accuracy = "acc"
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
        return tokenized(self.text(split), tokenizer_of(model))

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
        """Measure the perplexity, and accuracies in percent: per benchmark and their mean."""
        metrics = {"perplexity": perplexity(model, self.evaluation(model), precision)}
        if benchmarks := self.benchmarks():
            settings: dict[str, Any] = {"accuracy": self.accuracy, "benchmark_folder": self.benchmark_folder}
            settings |= {"num_questions": self.num_questions, "precision": precision}
            found = accuracies(model, tokenizer_of(model), benchmarks, self.num_answers_at_once, **settings)
            metrics["accuracy"] = sum(found.values()) / len(found)
            metrics |= {f"accuracy_{name}": value for name, value in found.items()}
        return Evaluation(metrics)

    def _parts(self, split: Split, model: nn.Module, length: int, *names: str) -> tuple[list[Batch], list[Batch]]:
        """Draw two disjoint sets of windows, sized by the fields `names`. Raises `ValueError` for too few windows."""
        sizes, found = [getattr(self, name) for name in names], windows(self.tokens(split, model), length)
        if len(found) < sum(sizes):
            needed = f"{' + '.join(names)} needs {sum(sizes)} windows of {length} tokens"
            raise ValueError(f"{needed}; the {split} text has {len(found)}")
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.seed))
        first, second = found[order[: sum(sizes)]].split(sizes)
        return self._batches(first), self._batches(second)

    def _batches(self, found: Tensor) -> list[Batch]:
        return [(tokens, next_tokens(tokens)) for tokens in found.split(self.batch_size)]


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
        raise ValueError(f"a text of {len(tokens)} tokens does not fill a window of {length}: lower the length")
    return tokens[: len(tokens) // length * length].view(-1, length)


def perplexity(model: nn.Module, batches: Iterable[Batch], precision: torch.dtype = torch.float32) -> float:
    """exp of the mean loss over all next tokens; the first token of a window is not predicted."""
    losses, counts = losses_of_windows(model, batches, precision)
    return (losses.sum() / counts.sum()).exp().item()


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
