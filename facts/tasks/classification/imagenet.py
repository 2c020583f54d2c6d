"""ImageNet-1k, from class folders, from the original tar files or from parquet shards."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import timm.data
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from facts.calibration.cutmix import CutMix
from facts.tasks.classification.base import Classification, Count, balanced
from facts.tasks.classification.crops import Crops
from facts.tasks.classification.image_batches import Decoded, ImageBatches, collate
from facts.tasks.classification.imagenet_files import ImageFiles, find_images
from facts.tasks.classification.preprocessing import data_config, num_classes, preprocessing_key, processed_for
from facts.tasks.classification.training_batches import AugmentedBatches, TrainingBatches
from facts.utils.cache import content_key
from facts.utils.options import options
from facts.utils.processors import loader_workers

Augmentation = Literal["none", "train", "train_cutmix"]
Transform = Literal["paper", "timm"]
TrainingAugmentation = Literal["crop", "deit"]

# The defaults of DeiT's code, like those of Mixup below, except mmax9: at magnitude 10, one draw in forty, timm
# asks Pillow for images of 0 bits, which Pillow 13 refuses.
DEIT_TRANSFORM: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25, "re_mode": "pixel"}


@options
class ImageNet(Classification):
    """ImageNet-1k in `root`: class folders, else the original tar files, else Hugging Face's parquet shards.

    A label is the position of the class among the sorted synsets. The training images, sorted by synset and file name,
    are shuffled by a seed: the first `num_sensitivity` are for rank searches, the next `num_calibration` give the
    factors (paper, section 5.1). `transform: paper` resizes to 256 (bicubic) and crops to 224, or in proportion for
    another input size; `timm` takes the evaluation transform of the checkpoint, for a network of
    transformers its image processor. `augmentation: train` calibrates on timm's training transform instead,
    `train_cutmix` with `facts.CutMix` on top. `training_augmentation` is for finetuning, which uses all training
    images: `deit` crops, flips, applies RandAugment, erases, and mixes images by Mixup or CutMix; `crop` crops, flips
    and jitters colours.

    The loader has `num_workers` processes (default: one for each processor, up to 16).

    With `crops`, a folder, the images of an evaluation and of a calibration without augmentation are decoded once, and
    kept as bytes of their crops: 7.5 GB for all validation images at 224 pixels, 2.5 GB for the paper's calibration.
    Networks with the same crops share them; other training images are kept anew.

    Tar files are read in place, with an index beside them. Images from parquet shards are copied into the temporary
    folder: 2 GB for the paper's number of images, all 140 GB for finetuning.
    """

    root: Path
    num_calibration: Count = 16384
    num_sensitivity: Count = 512
    transform: Transform = "paper"
    augmentation: Augmentation = "none"
    training_augmentation: TrainingAugmentation = "deit"
    num_workers: Annotated[int, Field(ge=0)] | None = None
    crops: Path | None = None
    seed: int = 0

    @cached_property
    def training_images(self) -> ImageFiles:
        return find_images(self.root, "train")

    @cached_property
    def shuffled_images(self) -> ImageFiles:
        """The training images, quick to read in any order."""
        return self.training_images.gathered(range(len(self.training_images)))

    @cached_property
    def validation_images(self) -> ImageFiles:
        return find_images(self.root, "val")

    def inspect(self) -> str:
        self.chosen_indices()
        training, validation = len(self.training_images), len(self.validation_images)
        return f"{training:,} training and {validation:,} validation images of 1,000 classes at {self.root}"

    def content_key(self, model: nn.Module) -> str:
        elsewhere = ("root", "num_workers", "crops")
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in elsewhere}
        files = (self.training_images.content_key, self.validation_images.content_key)
        return content_key(*files, settings, preprocessing_key(model))

    def calibration(self, model: nn.Module) -> ImageBatches | CutMix:
        batches = self._batches(model, self.training_images, self.chosen_indices()["calibration"], self.augmentation)
        return CutMix(batches, num_classes(model), seed=self.seed) if self.augmentation == "train_cutmix" else batches

    def sensitivity(self, model: nn.Module) -> ImageBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["sensitivity"])

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> TrainingBatches:
        config, mixup = data_config(model), None
        deit = self.training_augmentation == "deit"
        if deit:
            mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=num_classes(model))
        transform = timm.data.create_transform(**config, is_training=True, **(DEIT_TRANSFORM if deit else {}))
        batches = AugmentedBatches(self.shuffled_images, transform, mixup, self.batch_size, (seed, epoch))
        return TrainingBatches(batches, loader_workers(self.num_workers), range(len(batches)))

    def analysis(self, model: nn.Module) -> tuple[ImageBatches, ImageBatches]:
        images = self.validation_images
        counts = (self.num_factors_per_class, self.num_held_out_per_class)
        parts = balanced(torch.from_numpy(images.labels), counts, self.seed)
        factors, held_out = (self._batches(model, images, part.tolist()) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> ImageBatches:
        return self._batches(model, self.validation_images, None)

    def chosen_indices(self) -> dict[str, list[int]]:
        """Positions of the images for `sensitivity` and for `calibration` among the sorted training images.

        Raises `ValueError` if there are too few.
        """
        available, needed = len(self.training_images), self.num_sensitivity + self.num_calibration
        if available < needed:
            raise ValueError(
                f"{self.root} holds {available} training images; num_sensitivity + num_calibration needs {needed}"
            )
        order = torch.randperm(available, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return {"sensitivity": order[: self.num_sensitivity], "calibration": order[self.num_sensitivity : needed]}

    def chosen_images(self) -> dict[str, dict[str, list]]:
        """The `indices` and `names` of the images for `sensitivity` and for `calibration`, in order, to be saved."""
        names = self.training_images.names
        return {
            use: {"indices": indices, "names": [names[index] for index in indices]}
            for use, indices in self.chosen_indices().items()
        }

    def _batches(
        self,
        model: nn.Module,
        images: ImageFiles,
        indices: Sequence[int] | None,
        augmentation: Augmentation = "none",
    ) -> ImageBatches:
        """Batches of the images at `indices`, or of all images in the order that is quickest to read."""
        config = data_config(model)
        how = (self.transform, augmentation, preprocessing_key(model), self.batch_size, self.seed)
        own = processed_for(model) if (self.transform, augmentation) == ("timm", "none") else None
        transform, crops = own or make_transform(config, self.transform, augmentation), None
        if self.crops and augmentation == "none" and own is None:
            names = images.names
            if indices is not None and names is not self.validation_images.names:  # of these, there is one file
                names = [names[index] for index in indices]
            crops = Crops(self.crops, names, transform, config["input_size"][1:])

        num_workers = loader_workers(self.num_workers)

        def loader(rank: int, size: int) -> DataLoader:
            total = len(images if indices is None else indices)
            own = [position for position in range(total) if position // self.batch_size % size == rank]
            files = images.as_stored().selected(own) if indices is None else images.gathered([indices[i] for i in own])
            return DataLoader(
                Decoded(files, transform, crops),
                batch_size=self.batch_size,
                num_workers=num_workers,
                collate_fn=collate,
                pin_memory=torch.cuda.is_available(),
                persistent_workers=num_workers > 0,  # searches read the same batches again and again
                generator=torch.Generator().manual_seed(self.seed),
            )

        return ImageBatches(loader, content_key(images.content_key, indices, *how))


def make_transform(config: dict, transform: Transform, augmentation: Augmentation) -> Callable[[Image.Image], Tensor]:
    """Make the transform from a PIL image to the tensor that a model of this data configuration expects."""
    if augmentation != "none":
        return timm.data.create_transform(**config, is_training=True)
    if transform == "timm":
        return timm.data.create_transform(**config, is_training=False)
    size = config["input_size"][-1]
    return transforms.Compose(
        [
            transforms.Resize(size * 256 // 224, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize(config["mean"], config["std"]),
        ]
    )
