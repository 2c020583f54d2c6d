import pytest
import timm

from facts.tasks import ImageNet
from tests.tasks import fake_imagenet


@pytest.fixture(scope="session")
def files():
    """The pictures of every layout."""
    return fake_imagenet.make_files()


@pytest.fixture(scope="session")
def root(files, tmp_path_factory):
    """The pictures in class folders."""
    folder = tmp_path_factory.mktemp("folders")
    fake_imagenet.write_folders(folder, files)
    return folder


@pytest.fixture
def dataset_cache(tmp_path_factory, monkeypatch):
    """Data sets are converted here rather than in the home folder."""
    pytest.importorskip("datasets", reason="the extra `llm` is not installed: make install-llm")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def parquet(files, dataset_cache, tmp_path):
    """The same pictures in Hugging Face's Parquet files."""
    fake_imagenet.write_parquet(tmp_path / "parquet", files)
    return tmp_path / "parquet"


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
