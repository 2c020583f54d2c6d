"""Published networks, a ViT-Tiny and a DeiT-Tiny, and real ImageNet photos, which are no part of the project."""

import csv
from pathlib import Path

import pandas as pd
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as transforms

from facts.utils.files import replacing

DATA = Path(__file__).parents[3] / "shared" / "data"
NETWORKS = {  # names, and the mean and deviation of their pixels
    "vit_tiny": ("vit_tiny_patch16_224", [0.5] * 3, [0.5] * 3),
    "deit_tiny": ("deit_tiny_patch16_224", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
}
PHOTOS = DATA / "imagenet_photos"
RESULTS = Path(__file__).parents[2] / "results"
BATCH = 40


def weights_of(network):
    return DATA / network / f"{NETWORKS[network][0]}_fp16.safetensors"


def load_network(network):
    model = timm.create_model(NETWORKS[network][0]).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(weights_of(network)).items()})
    return model


def load_photos(split, start=0, every=1, network="vit_tiny"):
    """Batches `(images [N, 3, 224, 224], labels [N])` of every so many photos of one split, from one of them on."""
    with (PHOTOS / "labels.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["file"].startswith(f"{split}/")][start::every]
    resize = [transforms.Resize(256, InterpolationMode.BICUBIC)] if split == "calibration" else []
    prepare = transforms.Compose(
        [
            *resize,  # validation photos are stored at this size
            transforms.CenterCrop(224),
            transforms.ToImage(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize(*NETWORKS[network][1:]),
        ]
    )
    images = torch.stack([prepare(Image.open(PHOTOS / row["file"]).convert("RGB")) for row in rows])
    labels = torch.tensor([int(row["label"]) for row in rows])
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def load_all(network):
    """A network, the photos to calibrate on, and those for validation."""
    return load_network(network), *(load_photos(split, network=network) for split in ("calibration", "validation"))


@torch.inference_mode()
def top1(model, batches):
    right = sum((model(images).argmax(dim=1) == labels).sum().item() for images, labels in batches)
    return 100 * right / sum(len(labels) for _, labels in batches)


class Table:
    """A table in `results`, as CSV and as Markdown below its text, written whenever a row is added.

    `columns` maps names to the formats of floats; `file` has no ending. With `resume`, it starts with the rows that an
    earlier run has written.
    """

    def __init__(self, file, columns, text, resume=False):
        self.file, self.columns, self.text = file, columns, text
        path = RESULTS / f"{file}.csv"
        self.rows = pd.read_csv(path, keep_default_na=False).values.tolist() if resume and path.exists() else []

    def lacks(self, *first):
        """Check that no row begins with these values."""
        return list(first) not in [row[: len(first)] for row in self.rows]

    def add(self, *row):
        self.rows.append([*row])
        print(*row)
        with replacing(RESULTS / f"{self.file}.csv") as path:
            self.frame.to_csv(path, index=False)
        self.write_page()

    def write_page(self):
        write_page(self.frame, self.columns, self.file, self.text)

    @property
    def frame(self):
        return pd.DataFrame(self.rows, columns=list(self.columns))


def write_page(table, columns, file, text):
    """Write the columns of a table as Markdown below its text."""
    with replacing(RESULTS / f"{file}.md") as path:
        markdown = table[list(columns)].to_markdown(index=False, floatfmt=tuple(columns.values()))
        path.write_text(f"{text}\n\n{markdown}\n")
