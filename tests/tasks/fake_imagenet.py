"""A made-up ImageNet of 1,000 classes, three training and two validation pictures of 8 x 8 pixels each."""

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from facts.tasks.classification.files import synsets

TRAIN_NUMBERS = (9, 120, 20)  # as text they are in another order than as numbers
NUM_VAL = 2000

Files = dict[str, bytes]
"""Contents by `<synset>/<file>`."""


def encoded(rng: np.random.Generator) -> bytes:
    buffer = BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def make_files() -> dict[str, Files]:
    """The training and validation pictures."""
    rng = np.random.default_rng(0)
    train = {f"{name}/{name}_{number}.JPEG": encoded(rng) for name in synsets() for number in TRAIN_NUMBERS}
    labels = rng.permutation(np.arange(NUM_VAL) % 1000)
    val = {
        f"{synsets()[label]}/ILSVRC2012_val_{number:08}.JPEG": encoded(rng) for number, label in enumerate(labels, 1)
    }
    return {"train": train, "val": val}


def write_folders(root: Path, files: dict[str, Files]) -> None:
    for split, images in files.items():
        for name, data in images.items():
            path = root / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def write_parquet(root: Path, files: dict[str, Files]) -> None:
    """Two shards a split, of pictures in random order."""
    for split, images in (("train", files["train"]), ("validation", files["val"])):
        names = np.random.default_rng(2).permutation(list(images)).tolist()
        for shard in range(2):
            rows = [parquet_row(name, images[name]) for name in names[shard::2]]
            write_shard(root / "data" / f"{split}-{shard:05}-of-00002.parquet", rows)


def parquet_row(name: str, data: bytes) -> dict:
    """The path has the class appended, as on the hub."""
    synset, file = name.split("/")
    return {"image": {"bytes": data, "path": file.replace(".", f"_{synset}.")}, "label": synsets().index(synset)}


def write_shard(path: Path, rows: list[dict]) -> None:
    from datasets import ClassLabel, Dataset, Features, Image

    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features(image=Image(), label=ClassLabel(names=list(synsets())))
    Dataset.from_list(rows, features=features).to_parquet(path)
