"""Detection and segmentation on scenes: data, losses, errors and figures."""

from tests.detection import installed  # noqa: F401, I001

from dataclasses import replace

from itertools import chain

import pytest
import torch
from torch.nn import functional as F

from facts.tasks.dense import ADE20K
from facts.tasks.dense import Coco

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
    assert len({*chain(*calibration.items.indices, *sensitivity.items.indices)}) == 26
    factors, held_out = task.analysis(network)
    assert not {*chain(*factors.items.indices)} & {*chain(*held_out.items.indices)}
    first, second = (task.training(network, epoch) for epoch in (0, 1))
    assert sorted(chain(*first.items.indices)) == sorted(chain(*second.items.indices)) == list(range(800))
    assert first.items.indices != second.items.indices
    torch.testing.assert_close(next(iter(first[5:6]))[0], list(first[:6])[5][0], rtol=0, atol=0)


def test_the_loss_is_the_sum_over_images_of_each_one_s_own(task, network):
    images, targets = next(iter(task.calibration(network)))
    alone = [{name: tensor[i : i + 1] for name, tensor in targets.items()} for i in range(4)]
    with torch.no_grad():
        features = network(images)
        together = task.loss(features, targets)
        parts = [task.loss(features.of_sample(i), one) for i, one in enumerate(alone)]
    torch.testing.assert_close(together, sum(parts), rtol=1e-6, atol=1e-6)  # float32


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


def test_the_shipped_networks_are_good(detection, detector, segmentation, segmenters):
    figures = detection.evaluate(detector)
    assert figures["box_map"] > 50 and figures["mask_map"] > 50
    assert all(segmentation.evaluate(network)["miou"] > 50 for network in segmenters.values())


def test_missing_and_too_few_data_are_clear_errors(tmp_path, detection):
    with pytest.raises(FileNotFoundError, match="COCO 2017, unpacked"):
        Coco(root=str(tmp_path), num_calibration=1, batch_size=1).inspect()
    with pytest.raises(FileNotFoundError, match="ADEChallengeData2016"):
        ADE20K(root=str(tmp_path), num_calibration=1, batch_size=1).inspect()
    with pytest.raises(ValueError, match="holds 800 training images"):
        replace(detection, num_calibration=800).inspect()
