"""Benchmarks of multiple choice from the records of real ones, by lm-eval and by hand."""

from tests.language import installed  # noqa: F401, I001

import json
from pathlib import Path

import pytest
import torch

from facts.tasks.language.corpus import Corpus
from tests.language.choice.records import question
from tests.language.stories import CHOICE, STORY, needs_files

pytestmark = [needs_files, pytest.mark.external]

NUM_RECORDS = {"piqa": 1838, "openbookqa": 500, "winogrande": 1267, "arc_challenge": 1172, "arc_easy": 2376}
# A few of ARC's have three or five.
NUM_CHOICES = {"piqa": {2}, "openbookqa": {4}, "winogrande": {2}, "arc_challenge": {3, 4, 5}, "arc_easy": {3, 4, 5}}
CHANCE = {"piqa": 1 / 2, "openbookqa": 1 / 4, "winogrande": 1 / 2, "arc_challenge": 1 / 4, "arc_easy": 1 / 4}
NUM_QUESTIONS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The benchmarks' files, with the paths of the records and of a cache, which else would be in the home folder."""
    folder, cache = tmp_path_factory.mktemp("choice"), tmp_path_factory.mktemp("datasets")
    for file in (Path(__file__).parent / "choice").iterdir():
        if file.is_file():
            text = file.read_text().replace("RECORDS", CHOICE.as_posix()).replace("CACHE", cache.as_posix())
            (folder / file.name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def figures(stories, folder):
    """Of the first questions of each, beside a text that takes no time."""
    (text := folder / "story.txt").write_text(STORY)
    task = Corpus(
        training_text=str(text),
        evaluation_text=str(text),
        sequence_length=64,
        batch_size=16,
        benchmark_names=tuple(NUM_RECORDS),
        benchmark_folder=str(folder),
        num_questions=NUM_QUESTIONS,
    )
    return task.evaluate(stories)


@pytest.mark.parametrize("name", NUM_RECORDS)
def test_every_record_becomes_a_question(folder, name):
    """An instruction's last word says how many choices there are; the parts put together again are the whole."""
    from lm_eval.tasks import TaskManager

    task = TaskManager(include_path=str(folder), include_defaults=False).load(name)["tasks"][name]
    found, given = list(task.eval_docs), records(name)
    assert len(found) == len(given) == NUM_RECORDS[name]
    assert {len(asked["choices"]) for asked in found} == NUM_CHOICES[name]
    for asked, record in zip(found, given, strict=True):
        words = record["instruction"].split()
        names = words[-1].split("/")
        choices = [f"{name.capitalize()}: {choice}" for name, choice in zip(names, asked["choices"], strict=True)]
        whole = " ".join([asked["question"], *choices, "Answer format:", words[-1]]).split()
        assert whole == words[-len(whole) :]
        assert words[-len(whole) - 1] in ("question:", "sentence:")
        assert all(asked["choices"])
        assert names[asked["label"]] == record["answer"]


def test_accuracies_are_what_chance_allows(figures):
    """Within four standard deviations of guessing: the model knows nothing but stories."""
    found = {name: figures[f"accuracy_{name}"] for name in NUM_RECORDS}
    assert figures["accuracy"] == pytest.approx(sum(found.values()) / len(found))
    for name, accuracy in found.items():
        chance = CHANCE[name]
        assert abs(accuracy / 100 - chance) < 4 * (chance * (1 - chance) / NUM_QUESTIONS) ** 0.5, (name, accuracy)


@pytest.mark.parametrize("name", ["arc_easy", "winogrande"])
def test_accuracy_is_the_one_counted_by_hand(stories, figures, name):
    """The choice whose tokens are the likeliest after the context, by their sum.

    To the last question: the best two choices lie 0.05 nats apart or more, and sums in float32 differ by some 1e-5.
    """
    right = 0
    for record in records(name)[:NUM_QUESTIONS]:
        asked = question(record)
        if name == "winogrande":
            before, after = asked["question"].split("_")
            pairs = [(before + choice, " " + after.strip()) for choice in asked["choices"]]
        else:
            pairs = [(f"Question: {asked['question']}\nAnswer:", " " + choice) for choice in asked["choices"]]
        scores = [log_likelihood(stories, *pair) for pair in pairs]
        right += scores.index(max(scores)) == asked["label"]
    assert figures[f"accuracy_{name}"] == pytest.approx(100 * right / NUM_QUESTIONS)


def records(name):
    return json.loads((CHOICE / f"{name}.test.json").read_text(encoding="utf-8"))


@torch.inference_mode()
def log_likelihood(model, context, continuation):
    whole, beginning = (model.tokenizer(text)["input_ids"] for text in (context + continuation, context))
    tokens = torch.tensor([whole])
    scores = model(tokens).logits[0, :-1].double().log_softmax(dim=-1)
    return scores.gather(1, tokens[0, 1:, None])[len(beginning) - 1 :].sum().item()
