"""Compress a language model, on windows of a text; compare perplexity, and a sentence.

    python examples/compress_language_model.py
    python examples/compress_language_model.py --name Qwen/Qwen3-0.6B --text my.txt --ratio 0.8 --length 1024

Without a name it takes a small network of Qwen3's architecture that comes with the package, trained on Python's
reference in English, and pages of that reference which it has not seen. With a name, transformers fetches weights and
tokenizer; it takes them as float32.
"""

from pathlib import Path

import torch
import typer
from small_networks import small_qwen

import facts
from experiments.mini.language import PythonReference
from facts.models import CausalLM
from facts.tasks.language import perplexity, tokenized, windows

NUM_TEST = 100  # windows


def main(
    name: str = "", text: Path | None = None, ratio: float = 0.6, length: int = 128, out: Path = Path("fewer_words")
) -> None:
    model = CausalLM(tag=name).build() if name else small_qwen()
    words = text.read_text() if text else PythonReference().text("evaluation")
    found = windows(tokenized(words, model.tokenizer), length)  # [N, length], without padding
    found = found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]
    calibration = found[NUM_TEST:].split(8)
    test = [(tokens, facts.next_tokens(tokens)) for tokens in found[:NUM_TEST].split(8)]

    result = facts.compress(model, calibration, ratio=ratio, cost="params")
    print(result)
    start = model.tokenizer("A function is", return_tensors="pt")
    for title, network in {"original": model, "compressed": result.model}.items():
        (written,) = network.generate(**start, max_new_tokens=20, do_sample=False)
        print(f"{title}: perplexity {perplexity(network, test):.2f}; {model.tokenizer.decode(written)!r}")
    facts.save_compressed(result, out)  # with the tokenizer: facts.load_compressed(out) needs nothing else


if __name__ == "__main__":
    typer.run(main)
