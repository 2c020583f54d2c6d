"""Image classification on photos: how they are chosen, transformed and batched."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import timm.data
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torchvision import transforms

from facts.tasks.base import settings_of
from facts.tasks.classification.base import Classification, balanced
from facts.tasks.classification.image_files import ImageFiles
from facts.tasks.classification.pictures import Decodable, DecodedBatches
from facts.tasks.classification.preprocessing import data_config, num_classes, preprocessing_key, processed_for
from facts.tasks.numbered_batches import NumberedBatches
from facts.utils.cache import content_key
from facts.utils.options import Count, options
from facts.utils.processors import loader_workers
from facts.utils.random import seed_of

Augmentation = Literal["none", "train"]
Transform = Literal["paper", "timm"]
TrainingAugmentation = Literal["crop", "deit"]

# DeiT's defaults, like Mixup's below, except mmax9: at magnitude 10 timm has Pillow posterize images to 0 bits.
DEIT_TRANSFORM: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25, "re_mode": "pixel"}

NUM_REFERENCE = 10_000  # a linear probe of 1,000 classes then takes a minute or two


@options
class Images(Classification):
    """Images at `root`, some of them for calibration and training, others for evaluation.

    `transform: paper` resizes to 256 (bicubic) and crops to 224, or in proportion for another input size; `timm` uses
    the checkpoint's evaluation transform or, for a transformers model, its image processor. `augmentation: train`
    calibrates with timm's training transform instead. `training_augmentation` is for finetuning, which uses all
    training images: `deit` crops, flips, applies RandAugment, erases, and mixes images by Mixup or CutMix; `crop`
    crops, flips and jitters colours.

    The loader runs `num_workers` processes (default: one per processor, up to 16).
    """

    root: Path
    num_sensitivity: Count = 512
    transform: Transform = "timm"
    augmentation: Augmentation = "none"
    training_augmentation: TrainingAugmentation = "deit"
    num_workers: Annotated[int, Field(ge=0)] | None = None
    seed: int = 0

    @property
    @abstractmethod
    def training_images(self) -> ImageFiles:
        """All images for calibration, searches and training."""

    @property
    @abstractmethod
    def validation_images(self) -> ImageFiles:
        """All images for evaluation."""

    @property
    @abstractmethod
    def classes(self) -> Sequence[str]:
        """Names of the classes."""

    @abstractmethod
    def chosen_indices(self) -> dict[str, list[int]]:
        """Indices of the training images for `sensitivity` and for `calibration`, in order."""

    def labelled(self, images: ImageFiles, model: nn.Module) -> ImageFiles | None:
        """The images with the network's labels; None if it has other classes."""
        return images

    def content_key(self, model: nn.Module) -> str:
        files = (self.training_images.content_key, self.validation_images.content_key)
        return content_key(*files, settings_of(self), preprocessing_key(model))

    def calibration(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["calibration"], self.augmentation)

    def sensitivity(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["sensitivity"])

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> NumberedBatches:
        """All training images. Raises `ValueError` if their classes are not the network's."""
        files = self._with_labels(self.training_images, model)
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed_of(seed, epoch))).tolist()
        deit = self.training_augmentation == "deit"
        mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=num_classes(model)) if deit else None
        settings = {**data_config(model), **(DEIT_TRANSFORM if deit else {})}
        transform = timm.data.create_transform(**settings, is_training=True)
        how = transform, self.batch_size, (seed, epoch), mixup
        items = DecodedBatches(files.selected(order), *how, for_training=True)
        return self._loaded(items, content_key(self.content_key(model), seed, epoch))

    def analysis(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        images = self.validation_images
        counts = (self.num_factors_per_class, self.num_held_out_per_class)
        parts = balanced(torch.from_numpy(images.labels), counts, self.seed)
        factors, held_out = (self._batches(model, images, part.tolist()) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> NumberedBatches:
        """All evaluation images. Raises `ValueError` if their classes are not the network's."""
        self._with_labels(self.validation_images, model)
        return self._batches(model, self.validation_images)

    def for_features(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        """Images to learn classes of features from, at most `NUM_REFERENCE`, and all evaluation images."""
        images = self.training_images
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))[:NUM_REFERENCE]
        return self._batches(model, images, order.tolist()), self._batches(model, self.validation_images)

    def chosen_images(self) -> dict[str, dict[str, list]]:
        """The `indices` and `names` of the images for `sensitivity` and for `calibration`, in order."""
        chosen = self.chosen_indices()
        return {use: {"indices": at, "names": self.training_images.selected(at).names} for use, at in chosen.items()}

    def _with_labels(self, images: ImageFiles, model: nn.Module) -> ImageFiles:
        labelled = self.labelled(images, model)
        if labelled is None:
            found = f"{self.root} has {len(self.classes)} class folders, and the network {num_classes(model)} classes"
            raise ValueError(f"these images need labels: {found}. Give a folder for each class, named by synset or not")
        return labelled

    def _batches(
        self,
        model: nn.Module,
        images: ImageFiles,
        indices: Sequence[int] | None = None,
        augmentation: Augmentation = "none",
    ) -> NumberedBatches:
        """Batches of the images at `indices` (default: all), without labels if their classes are not the network's."""
        labelled = self.labelled(images, model)
        images = labelled or images
        how = (self.transform, augmentation, preprocessing_key(model), self.batch_size, self.seed)
        key = content_key(images.content_key, indices, *how)
        files = images if indices is None else images.selected(indices)
        transform = self._transform(model, augmentation)
        return self._loaded(DecodedBatches(files, transform, self.batch_size, (self.seed,)), key, labelled is not None)

    def _loaded(self, items: DecodedBatches, key: str, with_labels: bool = True) -> NumberedBatches:
        finish, num_workers = Decodable(len(items.files), with_labels), loader_workers(self.num_workers)
        return NumberedBatches(items, finish, key, num_workers, range(len(items)), pin_memory=True)

    def _transform(self, model: nn.Module, augmentation: Augmentation) -> Callable[[Image.Image], Tensor]:
        """The transform from a PIL image to the tensor that the network expects."""
        config = data_config(model)
        if augmentation != "none":
            return timm.data.create_transform(**config, is_training=True)
        if self.transform == "timm":
            return processed_for(model) or timm.data.create_transform(**config, is_training=False)
        size, scaled = config["input_size"][-1], transforms.Normalize(config["mean"], config["std"])
        resize = transforms.Resize(size * 256 // 224, transforms.InterpolationMode.BICUBIC)
        return transforms.Compose([resize, transforms.CenterCrop(size), transforms.ToTensor(), scaled])
