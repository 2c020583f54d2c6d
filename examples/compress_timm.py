"""Compress a network of timm, let the original teach it, and save it.

    python examples/compress_timm.py
    python examples/compress_timm.py --name deit_small_patch16_224 --photos my_photos --ratio 0.6

Without a name it takes a small DeiT that comes with the package, trained to tell a hundred noisy handwritten digits
apart. With a name, timm fetches its weights, and `my_photos` has a folder of images for each class of the network.
"""

import logging
from pathlib import Path

import timm
import typer
from small_networks import small_deit

import facts
from experiments.mini.digits import Digits
from facts.tasks import ImageFolder


def main(
    name: str = "", photos: Path = Path("photos"), ratio: float = 0.3, epochs: int = 3, out: Path = Path("smaller")
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows progress
    if name:
        model, task = timm.create_model(name, pretrained=True).eval(), ImageFolder(root=photos)
    else:
        model, task = small_deit(), Digits(num_calibration=1024)

    calibration = task.calibration(model)  # any loader of (images, labels) will do
    result = facts.compress(model, calibration, ratio=ratio)  # of the FLOPs of its linear layers
    print(result)
    recovered = facts.recover(result, calibration, epochs=epochs, views=bool(name))  # digits must not be flipped
    facts.save_compressed(recovered, out)

    networks = {"original": model, "compressed": result.model, "recovered": recovered.model}
    networks["loaded"] = facts.load_compressed(out).model  # anywhere, without the original
    for title, network in networks.items():
        print(f"{title}: top-1 {task.evaluate(network)['top1']:.1f}")


if __name__ == "__main__":
    typer.run(main)
