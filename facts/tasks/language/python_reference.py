"""Python's reference in English, which the standard library holds for `help()`: a text without a download."""

import re
from collections.abc import Mapping
from functools import cache
from pydoc_data.topics import topics
from typing import Annotated, Any

from pydantic import Field

from facts.tasks.language.base import Language, Split
from facts.tasks.language.questions import KINDS, benchmark, questions
from facts.utils.cache import content_key
from facts.utils.options import options

EVERY, FIRST = 6, 1  # of the topics in alphabetical order, for evaluation


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
    """Every sixth topic for evaluation, the others for training and calibration; the text is that of this Python.

    Benchmarks are made from the evaluation text (`facts.tasks.language.questions`): `num_questions` of each kind.
    """

    sequence_length: Annotated[int, Field(ge=2)] = 128
    num_questions: Annotated[int, Field(ge=1)] = 150

    def inspect(self) -> str:
        sizes = {split: len(self.text(split)) for split in ("training", "evaluation")}
        return "{training:,} characters to train on and {evaluation:,} others, part of Python".format(**sizes)

    def text(self, split: Split) -> str:
        return "\n\n".join(paragraphs(split)) + "\n"

    def benchmarks(self) -> list[Mapping[str, Any]]:
        return [benchmark(kind, paragraphs("evaluation"), self.num_questions, self.seed) for kind in KINDS]

    @property
    def benchmarks_key(self) -> str:
        return content_key([questions(kind, paragraphs("evaluation"), self.num_questions, self.seed) for kind in KINDS])
