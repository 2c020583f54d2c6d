"""Semantic segmentation on ADE20K, or on other data in its layout."""

from pathlib import Path

import torch
from mmcv.transforms import LoadImageFromFile, RandomFlip, RandomResize, Resize
from mmengine.structures import PixelData
from mmseg.datasets import ADE20KDataset, BaseSegDataset
from mmseg.datasets.transforms import LoadAnnotations, PackSegInputs, PhotoMetricDistortion, RandomCrop
from mmseg.evaluation import IoUMetric
from mmseg.structures import SegDataSample
from torch import Tensor

from facts.models.feature_network import Features
from facts.moments.losses import kl_divergence
from facts.tasks.dense.base import Count, DensePrediction, Split
from facts.utils.cache import content_key
from facts.utils.options import options

FOLDERS: dict[Split, str] = {"train": "training", "val": "validation"}


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
        load, truth, resize = LoadImageFromFile(), LoadAnnotations(), Resize(scale=self.scale, keep_ratio=True)
        crop = RandomCrop(crop_size=(self.crop, self.crop), cat_max_ratio=0.75)
        if augmented and self.augmentation == "standard":
            resize = RandomResize(scale=self.scale, ratio_range=(0.5, 2.0), keep_ratio=True)
            pipeline = [load, truth, resize, crop, RandomFlip(prob=0.5), PhotoMetricDistortion()]
        elif split == "train":
            pipeline = [load, truth, resize, crop]
        else:
            pipeline = [load, resize, truth]  # predictions are compared at the size of the image on disk
        return self.files(split, [*pipeline, PackSegInputs()])

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
