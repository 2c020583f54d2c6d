"""The records of these benchmarks as questions, their choices, and the place of the right one (lm-eval calls it)."""

import re
from typing import Any


def split(records: Any) -> Any:
    """Of a Hugging Face data set."""
    return records.map(question)


def question(record: dict[str, str]) -> dict[str, Any]:
    """An instruction reads "Please ...: QUESTION Answer1: CHOICE Answer2: CHOICE Answer format: answer1/answer2"."""
    word, place = re.fullmatch(r"([a-z]+)(\d)", record["answer"]).groups()
    asked = record["instruction"].partition(": ")[2].rpartition("Answer format:")[0]
    text, *choices = re.split(rf"{word.capitalize()}\d:", asked)
    return {"question": text.strip(), "choices": [choice.strip() for choice in choices], "label": int(place) - 1}
