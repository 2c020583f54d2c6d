"""One network, one data pass and one set of accuracies for all tests on photos; without the photos they are skipped."""

import pytest
import timm
import torch
from safetensors.torch import load_file

import facts
from facts.compression import moment_cache
from facts.estimators import ESTIMATORS, GFWSVD
from facts.layers import select_layers
from facts.losses import summed_cross_entropy
from facts.moments import collect_moments
from tests.photos.data import DATA, PHOTOS, WEIGHTS, Setting, load_photos, top1

# GFWSVD to four digits only: its Lanczos iterations on this network take minutes otherwise.
METHODS = {name: estimator() for name, estimator in ESTIMATORS.items()} | {"gfwsvd": GFWSVD(tolerance=1e-4)}
RATIO = 0.8


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/photos/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.slow)
        if not (WEIGHTS.exists() and PHOTOS.exists()):
            item.add_marker(pytest.mark.skip(reason=f"no photos and weights in {DATA}"))


@pytest.fixture(scope="session")
def setting(tmp_path_factory):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = timm.create_model("vit_tiny_patch16_224").eval()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()}, strict=True)
    calibration = load_photos("calibration", resize=True, every=2)
    validation = load_photos("validation", resize=False)
    assert [sum(len(labels) for _, labels in split) for split in (calibration, validation)] == [500, 650]
    yield Setting(model, calibration, validation, tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def accuracies(setting):
    """Top-1 of the dense network and of each method at a uniform ratio, from one pass over the calibration photos."""
    model, calibration = setting.model, setting.calibration
    figures = {"dense": top1(model, setting.validation)}
    layers = select_layers(model)
    cache = moment_cache(setting.cache, model, layers, calibration, summed_cross_entropy, torch.float32)
    moments = [moment for estimator in METHODS.values() for moment in estimator.moments]
    collect_moments(model, layers, calibration, moments, cache=cache)
    for name, estimator in METHODS.items():
        result = facts.compress(model, calibration, estimator=estimator, ratio=RATIO, cache=setting.cache)
        figures[name] = top1(result.model, setting.validation)
    print(*(f"{name:12} {figure:6.2f} %" for name, figure in figures.items()), sep="\n")
    return figures
