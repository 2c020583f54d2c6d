"""Language modelling on Python's reference, part of the standard library for `help()`, with questions made from it.

Questions are multiple choice: which of four continuations of a passage is the text's own?
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pydoc_data.topics import topics
from typing import Annotated, Any

from pydantic import Field

from facts.models.from_transformers import import_transformers
from facts.tasks.language import Language, Split
from facts.utils.cache import content_key
from facts.utils.options import options

EVERY, FIRST = 6, 1  # of the topics in alphabetical order, for evaluation
CONTEXT, ENDING = 12, 8  # words
CHOICES = 4
END = "<|endoftext|>"

Words = list[str]


@cache
def paragraphs(split: Split) -> tuple[str, ...]:
    """The paragraphs of a split's topics. A paragraph in several topics counts in the first one."""
    known, chosen = set(), []
    for number, topic in enumerate(sorted(topics)):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            words = " ".join(paragraph.split())
            if words and words not in known:
                known.add(words)
                if (number % EVERY == FIRST) == (split == "evaluation"):
                    chosen.append(paragraph.strip("\n"))
    return tuple(chosen)


@options
class PythonReference(Language):
    """Every sixth topic for evaluation, the others for training and calibration; the text is this Python version's.

    Benchmarks are made from the evaluation text: `num_questions` of each kind.
    """

    sequence_length: Annotated[int, Field(ge=2)] = 128
    num_questions: Annotated[int, Field(ge=1)] = 150

    def inspect(self) -> str:
        sizes = {split: len(self.text(split)) for split in ("training", "evaluation")}
        return "{training:,} characters for training and {evaluation:,} for evaluation, part of Python".format(**sizes)

    def text(self, split: Split) -> str:
        return "\n\n".join(paragraphs(split)) + "\n"

    def benchmarks(self) -> list[Mapping[str, Any]]:
        return [benchmark(kind, paragraphs("evaluation"), self.num_questions, self.seed) for kind in KINDS]

    @property
    def benchmarks_key(self) -> str:
        return content_key([questions(kind, paragraphs("evaluation"), self.num_questions, self.seed) for kind in KINDS])


def other_endings(ending: Words, others: list[Words], draw: random.Random) -> list[Words]:
    """Take the continuations of other passages."""
    return draw.sample(others, CHOICES - 1)


def other_words(ending: Words, others: list[Words], draw: random.Random) -> list[Words]:
    """Replace the first word of the ending by others, drawn by frequency in the text."""
    words = [other[0] for other in others if other[0] != ending[0]]
    chosen: set[str] = set()
    while len(chosen) < CHOICES - 1:
        chosen.add(draw.choice(words))
    return [[word, *ending[1:]] for word in sorted(chosen)]


def other_orders(ending: Words, others: list[Words], draw: random.Random) -> list[Words]:
    """Swap two neighbouring words of the ending."""
    places = [place for place in range(ENDING - 1) if ending[place] != ending[place + 1]]
    drawn = draw.sample(places, CHOICES - 1)
    return [[*ending[:at], ending[at + 1], ending[at], *ending[at + 2 :]] for at in drawn]


KINDS: dict[str, Callable[[Words, list[Words], random.Random], list[Words]]] = {
    "ending": other_endings,
    "word": other_words,
    "order": other_orders,
}


def passages(paragraphs: Sequence[str]) -> list[tuple[Words, Words]]:
    """Cut the paragraphs into overlapping passages, a context and its continuation; tables are left out."""
    found = []
    for words in (paragraph.split() for paragraph in paragraphs if "+--" not in paragraph):
        for start in range(0, len(words) - CONTEXT - ENDING + 1, ENDING):
            middle, end = start + CONTEXT, start + CONTEXT + ENDING
            found.append((words[start:middle], words[middle:end]))
    return found


def questions(kind: str, paragraphs: Sequence[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Make at most `count` questions of a kind: a `context`, `choices`, and the index of the right one as `answer`."""
    found, draw = passages(paragraphs), random.Random(f"{kind} {seed}")
    made = []
    for place in sorted(draw.sample(range(len(found)), min(count, len(found)))):
        context, ending = found[place]
        others = [other for _, other in found if other != ending]
        choices = [ending, *KINDS[kind](ending, others, draw)]
        order = draw.sample(range(CHOICES), CHOICES)
        shown = [" ".join(choices[number]) for number in order]
        made.append({"context": " ".join(context), "choices": shown, "answer": order.index(0)})
    return made


def benchmark(kind: str, paragraphs: Sequence[str], count: int, seed: int) -> dict[str, Any]:
    """Make a task of lm-eval from the questions."""

    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(questions(kind, paragraphs, count, seed))}

    return {
        "task": kind,
        "custom_dataset": load,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",  # fields rather than templates, which would be compiled for every question
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }


def new_tokenizer(text: str, num_tokens: int) -> Any:
    """Train a byte-level BPE tokenizer on a text; its token 0 marks the beginning and the end of a text."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], num_tokens, special_tokens=[END], show_progress=False)
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )
