import pytest
import timm

from facts.tasks import ImageNet
from tests.tasks import fake_imagenet

WRITERS = {
    "folders": fake_imagenet.write_folders,
    "tars": fake_imagenet.write_tars,
    "shards": fake_imagenet.write_shards,
}


@pytest.fixture(scope="session")
def files():
    """What every layout holds."""
    return fake_imagenet.make_files()


@pytest.fixture(scope="session")
def roots(files, tmp_path_factory):
    """The same images in each layout."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in WRITERS}
    for layout, write in WRITERS.items():
        write(folders[layout], files)
    return folders


@pytest.fixture(params=WRITERS)
def root(request, roots):
    """Each layout in turn."""
    return roots[request.param]


@pytest.fixture(scope="session")
def network():
    overlay = {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bilinear", "mean": (0.4, 0.5, 0.6)}
    arguments = {"img_size": 32, "depth": 1, "num_classes": 1000, "pretrained_cfg_overlay": overlay}
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


@pytest.fixture(scope="session")
def task():
    """A function from a root and other fields to a small task."""

    def make(root, **fields) -> ImageNet:
        sizes = {"num_calibration": 24, "num_sensitivity": 10, "batch_size": 8, "num_workers": 0}
        return ImageNet(root=root, **sizes | fields)

    return make
