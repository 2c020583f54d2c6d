"""Detection and instance segmentation on COCO, or on other data in its format."""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import CocoDataset
from mmdet.datasets.transforms import LoadAnnotations, PackDetInputs, RandomFlip, Resize
from mmdet.evaluation import CocoMetric
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from facts.models.feature_network import Features
from facts.tasks.dense.base import Count, DensePrediction, Split
from facts.utils.options import options
from facts.utils.silence import silence

COARSEST = 3  # of the maps from the backbone's stages: FPN's `fpn_convs.3.conv`
NONE = -1  # the label of a row of padding
METRICS = {
    f"{ours}_map{threshold}": f"{theirs}_mAP{threshold}"
    for ours, theirs in (("box", "bbox"), ("mask", "segm"))
    for threshold in ("", "_50", "_75")
}


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
        load = [LoadImageFromFile(), LoadAnnotations(with_bbox=True, with_mask=True)]
        flip = [RandomFlip(prob=0.5)] if augmented and self.augmentation == "standard" else []
        with silence():
            return CocoDataset(
                ann_file=str(self._annotations(split)),
                data_prefix={"img": str(Path(self.root) / f"{split}2017")},
                metainfo={"classes": self.classes},
                pipeline=[*load, Resize(scale=self.scale, keep_ratio=True), *flip, PackDetInputs()],
                filter_cfg={"filter_empty_gt": True, "min_size": 32},
                test_mode=split == "val",  # keep every image
            )

    def metric(self) -> CocoMetric:
        with silence():
            return CocoMetric(ann_file=str(self._annotations("val")), metric=["bbox", "segm"])

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
        contents = (self._annotations(split).read_bytes() for split in ("train", "val"))
        return " ".join(hashlib.sha256(content).hexdigest() for content in contents)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return tuple(category["name"] for category in json.loads(self._annotations("val").read_text())["categories"])

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
