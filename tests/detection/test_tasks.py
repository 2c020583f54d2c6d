"""Detection and segmentation on scenes: data, losses, errors and figures."""

from tests.detection import installed  # noqa: F401, I001

from dataclasses import replace

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from pycocotools.coco import COCO
from torch.nn import functional as F

from facts.calibration.selection import select_layers
from facts.moments.data_pass import DataPass
from facts.tasks.dense.ade20k import ADE20K
from facts.tasks.dense.coco import Coco

pytestmark = pytest.mark.external


@pytest.fixture(params=["detection", "segmentation"])
def task(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def network(request, task):
    if isinstance(task, Coco):
        return request.getfixturevalue("detector")
    return request.getfixturevalue("segmenters")["upernet_swin_b"]


def test_batches_can_be_read_again_and_are_keyed_by_what_they_hold(task, network):
    calibration, sensitivity = task.calibration(network), task.sensitivity(network)
    (images, targets), *_ = calibration
    again, _ = next(iter(calibration))
    torch.testing.assert_close(images, again, rtol=0, atol=0)
    assert images.shape == (4, 3, 64, 64)
    assert all(len(tensor) == 4 for tensor in targets.values())
    assert [len(batches) for batches in (calibration, sensitivity)] == [4, 3]
    assert calibration.content_key != sensitivity.content_key == task.sensitivity(network).content_key


def test_calibration_sensitivity_and_analysis_share_no_image(task, network):
    chosen = task.chosen_indices()
    assert len({*chosen["calibration"], *chosen["sensitivity"]}) == 26
    factors, held_out = task.analysis(network)
    assert not {*factors.groups.indices} & {*held_out.groups.indices}


def test_epochs_have_an_order_of_their_own(task, network):
    first, second = (task.training(network, epoch) for epoch in (0, 1))
    assert sorted(first.groups.indices) == sorted(second.groups.indices) == list(range(800))
    assert first.groups.indices != second.groups.indices
    part = next(iter(first[5:6]))[0]
    torch.testing.assert_close(part, list(first[:6])[5][0], rtol=0, atol=0)


def test_the_loss_is_the_sum_over_images_of_each_one_s_own(task, network):
    images, targets = next(iter(task.calibration(network)))
    alone = [{name: tensor[i : i + 1] for name, tensor in targets.items()} for i in range(4)]
    with torch.no_grad():
        features = network(images)
        together = task.loss(features, targets)
        parts = [task.loss(features.of_sample(i), one) for i, one in enumerate(alone)]
    torch.testing.assert_close(together, sum(parts), rtol=1e-6, atol=1e-6)  # float32


def test_gradients_reach_every_layer(task, network):
    layers, seen = select_layers(network).layers, {}
    settings = {"loss": task.loss, "precision": torch.float32, "needs_grads": True}
    data_pass = DataPass(network, layers, lambda name, batch: seen.update({name: batch.g}), **settings)
    assert data_pass.run(list(task.calibration(network))[:1]) == 4
    assert seen.keys() == layers.keys()
    assert all(grads.abs().amax(dim=(1, 2)).min() > 0 for grads in seen.values())


def test_sensitivity_of_a_detector_is_the_squared_error_of_its_coarsest_own_map(detection, detector):
    images = torch.randn(2, 3, 64, 64)
    seen = []
    hook = detector.neck.fpn_convs[3].conv.register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad():
        original, changed = detector(images), detector(images + 0.1)
    hook.remove()
    expected = F.mse_loss(seen[1].double(), seen[0].double()) * 2  # two images
    torch.testing.assert_close(detection.output_error(original, changed), expected)


def test_sensitivity_of_a_segmenter_is_the_divergence_of_its_classes(segmentation, segmenters):
    network, images = segmenters["upernet_deit_b"], torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        original, changed = network(images), network(images + 0.1)
        p, q = (features.heads.decode_head(features.maps).double().softmax(1) for features in (original, changed))
    expected = (p * (p / q).log()).sum(dim=1).mean(dim=(1, 2)).sum()
    torch.testing.assert_close(segmentation.output_error(original, changed), expected)


def test_targets_become_the_library_s_samples_again(detection, detector):
    dataset = detection.dataset("train")
    order = detection.chosen_indices()["calibration"][:4]
    _, targets = next(iter(detection.calibration(detector)))
    for index, sample in zip(order, detection.samples(targets), strict=True):
        expected = dataset[index]["data_samples"].gt_instances
        assert sample.gt_instances.labels.tolist() == expected.labels.tolist()
        torch.testing.assert_close(sample.gt_instances.bboxes, expected.bboxes.tensor)
        assert (sample.gt_instances.masks.masks == expected.masks.masks).all()


class Oracle:
    """Predicts what the annotations say."""

    def __init__(self, dataset, coco):
        self.dataset, self.coco = dataset, coco

    def __call__(self, number):
        info = self.dataset.get_data_info(number)
        anns = self.coco.loadAnns(self.coco.getAnnIds(info["img_id"]))
        boxes = torch.tensor([annotation["bbox"] for annotation in anns])
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([annotation["category_id"] for annotation in anns])
        masks = torch.from_numpy(np.stack([self.coco.annToMask(annotation) for annotation in anns])).bool()
        instances = InstanceData(bboxes=boxes, labels=labels, scores=torch.ones(len(anns)), masks=masks)
        return DetDataSample(metainfo={"img_id": info["img_id"], "ori_shape": (64, 64)}, pred_instances=instances)


def test_the_metric_gives_perfect_predictions_a_hundred(detection):
    dataset, metric = detection.dataset("val"), detection.metric()
    metric.dataset_meta = dataset.metainfo
    oracle = Oracle(dataset, COCO(f"{detection.root}/annotations/instances_val2017.json"))
    for number in range(len(dataset)):
        metric.process({}, [{**oracle(number).to_dict(), "img_id": dataset.get_data_info(number)["img_id"]}])
    figures = detection.figures(metric.evaluate(len(dataset)))
    assert figures == pytest.approx(dict.fromkeys(figures, 100))
    assert len(figures) == 6


def test_the_shipped_detector_is_good(detection, detector):
    figures = detection.evaluate(detector)
    assert figures["box_map"] > 50
    assert figures["mask_map"] > 50


@pytest.mark.parametrize("name", ["upernet_swin_b", "upernet_deit_b"])
def test_the_shipped_segmenters_are_good(segmentation, segmenters, name):
    assert segmentation.evaluate(segmenters[name])["miou"] > 50


def test_missing_data_are_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="COCO 2017 as it is unpacked"):
        Coco(root=str(tmp_path), num_calibration=1, batch_size=1).inspect()
    with pytest.raises(FileNotFoundError, match="ADEChallengeData2016"):
        ADE20K(root=str(tmp_path), num_calibration=1, batch_size=1).inspect()


def test_too_few_images_are_a_clear_error(detection):
    with pytest.raises(ValueError, match="holds 800 training images"):
        replace(detection, num_calibration=800).inspect()
