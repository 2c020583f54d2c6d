"""Detection and segmentation with OpenMMLab: COCO and ADE20K, or other data in their layouts.

Networks are those of `facts.models.openmmlab`.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from mmcv.transforms import LoadImageFromFile, RandomFlip, RandomResize, Resize
from mmdet.datasets import CocoDataset
from mmdet.datasets import transforms as detection
from mmdet.evaluation import CocoMetric
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.evaluator import BaseMetric
from mmengine.structures import InstanceData, PixelData
from mmseg.datasets import ADE20KDataset, BaseSegDataset
from mmseg.datasets import transforms as segmentation
from mmseg.evaluation import IoUMetric
from mmseg.structures import SegDataSample
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from facts.models.openmmlab import Features
from facts.models.weights import sha256
from facts.moments.losses import kl_divergence
from facts.tasks.base import Evaluation, Task, by_workers, chosen_indices_of, fields_of, pass_over
from facts.utils.batches import Groups, NumberedBatches
from facts.utils.cache import content_key
from facts.utils.numerics import jackknife_errors, seed_of, seeded, shuffled
from facts.utils.options import Count, options
from facts.utils.progress import progress_of, silence

Split = Literal["train", "val"]
COARSEST = 3  # of the maps from the backbone's stages: FPN's `fpn_convs.3.conv`
NONE = -1  # the label of a row of padding
NUM_GROUPS = 10  # of images, each left out once for the errors of metrics
METRICS = {
    f"{ours}_map{threshold}": f"{theirs}_mAP{threshold}"
    for ours, theirs in (("box", "bbox"), ("mask", "segm"))
    for threshold in ("", "_50", "_75")
}
FOLDERS: dict[Split, str] = {"train": "training", "val": "validation"}


@options
class DensePrediction(Task):
    """A task calibrated on the heads' own losses, one image at a time.

    The factors come from `num_calibration` training images; searches compare outputs on `num_sensitivity` others
    (paper, supplement on downstream tasks: 10). Analyses use `num_factors` evaluation images for the factors, and
    `num_held_out` others for the comparison. Images are resized to fit `scale`, the long and the short side.
    Training uses the library's `standard` augmentation, or `none`. Cost is counted for square images of `input_size`.
    """

    root: str
    num_calibration: Count
    num_sensitivity: Count = 10
    num_factors: Count = 32
    num_held_out: Count = 32
    batch_size: Count
    scale: tuple[Count, Count]
    augmentation: Literal["standard", "none"] = "standard"
    input_size: Count = 512
    num_workers: Annotated[int, Field(ge=0)] | None = None
    seed: int = 0

    @abstractmethod
    def dataset(self, split: Split, augmented: bool = False) -> BaseDataset:
        """The library's own dataset of a split; each item holds `inputs`, an image, and its `data_samples`."""

    @abstractmethod
    def metric(self) -> BaseMetric:
        """The library's own metric."""

    @abstractmethod
    def renamed(self, measured: dict[str, float]) -> dict[str, float]:
        """Rename the library's metrics to the names of this package."""

    @abstractmethod
    def targets(self, samples: list[Any]) -> dict[str, Tensor]:
        """Ground truth of the samples, as tensors with one row per image."""

    @abstractmethod
    def samples(self, targets: dict[str, Tensor]) -> list[Any]:
        """Build data samples from these targets."""

    @property
    @abstractmethod
    def files_key(self) -> str:
        """Hash of the files that the results depend on."""

    @cached_property
    def training_images(self) -> BaseDataset:
        return self.dataset("train")

    def inspect(self) -> str:
        self.chosen_indices()
        training, validation = len(self.training_images), len(self.dataset("val"))
        return f"{training:,} training and {validation:,} validation images at {self.root}"

    def content_key(self, model: nn.Module) -> str:
        preprocessor, plain = model.heads.data_preprocessor, int | float | list | tuple
        settings = {name: value for name, value in vars(preprocessor).items() if isinstance(value, plain)}
        return content_key(
            self.files_key,
            fields_of(self),
            [type(preprocessor).__name__, settings, preprocessor.mean, preprocessor.std],
        )

    def calibration(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["calibration"])

    def sensitivity(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["sensitivity"])

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> NumberedBatches:
        dataset = self.dataset("train", augmented=True)
        whole = len(dataset) // self.batch_size * self.batch_size  # a smaller last batch is left out
        order = shuffled(len(dataset), seed_of(seed, epoch))[:whole].tolist()
        return self._batches(model, dataset, order, (seed, epoch))

    def analysis(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        dataset = self.dataset("val")
        order = shuffled(len(dataset), self.seed).tolist()
        parts = order[: self.num_factors], order[self.num_factors :][: self.num_held_out]
        factors, held_out = (self._batches(model, dataset, part) for part in parts)
        return factors, held_out

    chosen_indices = chosen_indices_of

    def loss(self, outputs: Features, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the images' own losses; in training, the joint loss of the batch times its size.

        Outside training, the heads sample regions with one seed for every image: its loss is the same in any batch.
        """
        samples = self.samples(targets)
        if outputs.heads.training:
            return len(samples) * outputs.loss(samples)
        total = outputs.maps[0].new_zeros(())
        for number, sample in enumerate(samples):
            with seeded(self.seed, device=total.device):
                total = total + outputs.of_sample(number).loss([sample])
        return total

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        return (1, 3, self.input_size, self.input_size)

    def evaluation(self, model: nn.Module) -> NumberedBatches:
        """The validation images one by one, each with its data sample in a list."""
        dataset = self.dataset("val")
        return self._batches(model, dataset, range(len(dataset)), as_samples=True)

    def evaluate(
        self, model: nn.Module, precision: torch.dtype = torch.float32, original: nn.Module | None = None
    ) -> Evaluation:
        dataset, metric = self.dataset("val"), self.metric()
        metric.dataset_meta = dataset.metainfo

        def add(features: Features, samples: list[Any]) -> None:
            metric.process({}, [prediction.to_dict() for prediction in features.predictions(samples)])

        pass_over(self.evaluation(model), model, add, precision)
        with progress_of("metrics"), silence():
            results = [*metric.results]
            errors = jackknife_errors(partial(self.computed, metric), results, NUM_GROUPS)
            return Evaluation(self.computed(metric, results) | {f"{name}_error": each for name, each in errors.items()})

    def computed(self, metric: BaseMetric, results: list[Any]) -> dict[str, float]:
        """The library's metrics of the results of some images."""
        metric.results = [*results]  # which are cleared then
        return self.renamed(metric.evaluate(len(results)))

    def _batches(
        self, model: nn.Module, dataset: BaseDataset, indices: Sequence[int], seed: tuple = (), as_samples: bool = False
    ) -> NumberedBatches:
        """Batches of images, preprocessed by the network's library, with targets; or single images with samples."""

        def finish(items: list[Any]) -> tuple[Tensor, Any]:
            data = model.heads.data_preprocessor(pseudo_collate(items), training=not as_samples)
            samples = data["data_samples"]
            return data["inputs"], samples if as_samples else self.targets(samples)

        size = 1 if as_samples else self.batch_size
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        groups = Groups(dataset, parts, seed=(self.seed, *seed))
        key = content_key(self.content_key(model), list(indices), size, groups.seed)
        return NumberedBatches(groups, finish, key, range(len(groups)), by_workers(self.num_workers))


@options
class Coco(DensePrediction):
    """COCO's mean average precision of boxes and masks, in percent: over all IoU thresholds, and at 0.5 and 0.75.

    `root` holds `train2017/`, `val2017/` and `annotations/instances_{train,val}2017.json`, whose categories, in that
    order, are the network's classes. Sensitivity is the squared error of the neck's coarsest map before pooling (paper,
    supplement on downstream tasks), averaged over the map.
    """

    scale: tuple[Count, Count] = (1333, 800)

    def dataset(self, split: Split, augmented: bool = False) -> CocoDataset:
        # Training boxes and masks are scaled with the image; the metric reads the original ones from the file.
        load = [LoadImageFromFile(), detection.LoadAnnotations(with_bbox=True, with_mask=True)]
        resize = detection.Resize(scale=self.scale, keep_ratio=True)
        flip = [detection.RandomFlip(prob=0.5)] if augmented and self.augmentation == "standard" else []
        with silence():
            return CocoDataset(
                ann_file=str(self._annotations(split)),
                data_prefix={"img": str(Path(self.root) / f"{split}2017")},
                metainfo={"classes": self.classes},
                pipeline=[*load, resize, *flip, detection.PackDetInputs()],
                filter_cfg={"filter_empty_gt": True, "min_size": 32},
                test_mode=split == "val",  # keep every image
            )

    def metric(self) -> CocoMetric:
        with silence():
            return CocoMetric(ann_file=str(self._annotations("val")), metric=["bbox", "segm"])

    def computed(self, metric: CocoMetric, results: list[Any]) -> dict[str, float]:
        metric.img_ids = [truth["img_id"] for truth, _ in results]
        return super().computed(metric, results)

    def renamed(self, measured: dict[str, float]) -> dict[str, float]:
        # The metric has no entry for a network that finds nothing.
        return {ours: 100 * measured.get(f"coco/{theirs}", 0.0) for ours, theirs in METRICS.items()}

    def targets(self, samples: list[DetDataSample]) -> dict[str, Tensor]:
        """`boxes [N, M, 4]`, `labels [N, M]`, `masks [N, M, H, W]`, padded to the largest M in the batch.

        Also each image's size before and after padding to a multiple of 32, `[N, 2]` each.
        """
        known = [sample.gt_instances for sample in samples]
        device = known[0].bboxes.device
        masks = [each.masks.to_tensor(torch.bool, device) for each in known]
        return {
            "boxes": pad_sequence([each.bboxes for each in known], batch_first=True),
            "labels": pad_sequence([each.labels for each in known], batch_first=True, padding_value=NONE),
            "masks": pad_sequence(masks, batch_first=True),
            "sizes": torch.tensor([sample.img_shape for sample in samples], device=device),
            "padded_sizes": torch.tensor([sample.pad_shape for sample in samples], device=device),
        }

    def samples(self, targets: dict[str, Tensor]) -> list[DetDataSample]:
        rows = (dict(zip(targets, row, strict=True)) for row in zip(*targets.values(), strict=True))
        return [_sample(**row) for row in rows]

    def output_error(self, original: Features, changed: Features) -> Tensor:
        before, after = (features.maps[COARSEST].double() for features in (original, changed))
        return (after - before).square().flatten(1).mean(dim=1).sum()

    @property
    def files_key(self) -> str:
        return f"{sha256(self._annotations('train'))} {sha256(self._annotations('val'))}"

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return tuple(category["name"] for category in json.loads(self._annotations("val").read_bytes())["categories"])

    def _annotations(self, split: Split) -> Path:
        path = Path(self.root) / "annotations" / f"instances_{split}2017.json"
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: root must hold COCO 2017, unpacked")
        return path


def _sample(boxes: Tensor, labels: Tensor, masks: Tensor, sizes: Tensor, padded_sizes: Tensor) -> DetDataSample:
    known = labels != NONE
    height, width = masks.shape[1:]
    shapes = {"img_shape": tuple(sizes.tolist()), "pad_shape": tuple(padded_sizes.tolist())}
    sample = DetDataSample(metainfo={**shapes, "batch_input_shape": (height, width)})
    bitmaps = BitmapMasks(masks[known].cpu().numpy().astype(np.uint8), height, width)
    sample.gt_instances = InstanceData(bboxes=boxes[known], labels=labels[known], masks=bitmaps)
    return sample


@options
class ADE20K(DensePrediction):
    """Mean intersection over union of the classes, in percent.

    `root` holds `images/{training,validation}/` and `annotations/{training,validation}/`, with the same file names.
    Calibration and training use square crops of side `crop`; the standard augmentation also scales images by 0.5 to 2,
    flips them and changes colours. Sensitivity is the decoder's KL divergence over classes, averaged over the map.
    """

    scale: tuple[Count, Count] = (2048, 512)
    crop: Count = 512

    def dataset(self, split: Split, augmented: bool = False) -> BaseSegDataset:
        load, truth = LoadImageFromFile(), segmentation.LoadAnnotations()
        resize = Resize(scale=self.scale, keep_ratio=True)
        crop = segmentation.RandomCrop(crop_size=(self.crop, self.crop), cat_max_ratio=0.75)
        if augmented and self.augmentation == "standard":
            resize = RandomResize(scale=self.scale, ratio_range=(0.5, 2.0), keep_ratio=True)
            pipeline = [load, truth, resize, crop, RandomFlip(prob=0.5), segmentation.PhotoMetricDistortion()]
        elif split == "train":
            pipeline = [load, truth, resize, crop]
        else:
            pipeline = [load, resize, truth]  # predictions are compared at the size of the image on disk
        return self.files(split, [*pipeline, segmentation.PackSegInputs()])

    def files(self, split: Split, pipeline: list) -> BaseSegDataset:
        return ADE20KDataset(data_prefix=self._folders(split), pipeline=pipeline)

    def metric(self) -> IoUMetric:
        return IoUMetric(iou_metrics=["mIoU"], prefix="classes")

    def renamed(self, measured: dict[str, float]) -> dict[str, float]:
        return {"miou": float(measured["classes/mIoU"])}

    def targets(self, samples: list[SegDataSample]) -> dict[str, Tensor]:
        """`classes [N, H, W]`."""
        return {"classes": torch.cat([sample.gt_sem_seg.data for sample in samples])}

    def samples(self, targets: dict[str, Tensor]) -> list[SegDataSample]:
        size = tuple(targets["classes"].shape[1:])
        samples = [SegDataSample(metainfo={"img_shape": size}) for _ in targets["classes"]]
        for sample, classes in zip(samples, targets["classes"], strict=True):
            sample.gt_sem_seg = PixelData(data=classes[None])
        return samples

    def output_error(self, original: Features, changed: Features) -> Tensor:
        before, after = (features.logits.movedim(1, -1) for features in (original, changed))
        return kl_divergence(before, after) / before[0, ..., 0].numel()

    @property
    def files_key(self) -> str:
        listed = [each for split in FOLDERS for each in self.dataset(split).load_data_list()]
        files = [Path(each[kind]) for each in listed for kind in ("img_path", "seg_map_path")]
        return content_key([(file.name, file.stat().st_size) for file in files])

    def _folders(self, split: Split) -> dict[str, str]:
        folders = [Path(self.root) / kind / FOLDERS[split] for kind in ("images", "annotations")]
        if lacking := [str(folder) for folder in folders if not folder.is_dir()]:
            raise FileNotFoundError(f"no {', '.join(lacking)}: root must hold ADEChallengeData2016, unpacked")
        return dict(zip(("img_path", "seg_map_path"), map(str, folders), strict=True))
