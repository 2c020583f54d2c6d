"""The commands on an image classifier of transformers, and on images in data sets of Hugging Face."""

import json
import shutil

import pytest
import torch

from facts.cli import models
from facts.tasks import ImageDataset, ImageFolder
from facts.tasks.classification.image_dataset import Rows
from facts.utils.hub import constants
from tests.cli.conftest import VIT
from tests.networks import make_image_classifier
from tests.saving.test_hub import hub  # noqa: F401

transformers = pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")
datasets = pytest.importorskip("datasets", reason="the extra `llm` is not installed: make install-llm")

CLASSES = ("fox", "cat", "dog")  # not in the order of the folders


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A network as transformers saves one, with names of its classes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    names = dict(enumerate(CLASSES))
    model = make_image_classifier(id2label=names, label2id={name: label for label, name in names.items()})
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture
def dataset(photos):
    """The photos as a data set with columns of images and classes, in the order of the network's classes."""
    return datasets.load_dataset("imagefolder", data_dir=str(photos), split="train")


def accuracy(folder, images, labels):
    """Of the network by transformers' own means."""
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        found = model(**processor(images, return_tensors="pt")).logits.argmax(dim=-1)
    return 100 * (found == torch.tensor(labels)).double().mean().item()


def saved(folder):
    return json.loads((folder / "compression.json").read_text())


class TestNetworks:
    def test_compress_and_evaluate(self, run, classifier, photos, tmp_path):
        result = run("compress", classifier, "--data", photos, "--num-workers", 0, "--out", tmp_path / "small")
        assert "top1" in result.output
        manifest = saved(tmp_path / "small")
        assert (tmp_path / "small" / "preprocessor_config.json").is_file()
        for network, which in ((tmp_path / "small", "compressed"), (classifier, "original")):
            found = json.loads(run("evaluate", network, "--data", photos, "--num-workers", 0, "--json").stdout)
            assert found["top1"] == manifest["metrics"]["top1"][which]
            assert found["flops"] == manifest["summary"]["before" if which == "original" else "after"]["flops"]

    def test_accuracy_is_that_by_transformers_and_labels_are_the_networks(self, run, classifier, photos):
        from PIL import Image

        files = ImageFolder(root=photos).validation_images.names
        images = [Image.open(photos / name).convert("RGB") for name in files]
        expected = accuracy(classifier, images, [CLASSES.index(name.split("/")[0]) for name in files])
        found = json.loads(run("evaluate", classifier, "--data", photos, "--num-workers", 0, "--json").stdout)
        assert found["top1"] == pytest.approx(expected) and 0 < expected < 100

    def test_by_the_name_of_a_repository(self, run, classifier, photos, hub, tmp_path):  # noqa: F811
        files = {path.name: path.read_bytes() for path in classifier.iterdir()}
        hub.repositories["somebody/tiny"] = {"main": files}
        out = tmp_path / "small"
        run("compress", "transformers/somebody/tiny", "--data", photos, "--num-workers", 0, "--out", out)
        assert saved(out)["base_model"]["repository"] == "somebody/tiny"
        command = ("evaluate", "transformers/somebody/tiny", "--data", photos, "--num-workers", 0, "--json")
        assert json.loads(run(*command).stdout)["top1"] == saved(out)["metrics"]["top1"]["original"]
        assert "top1" in run(*command, "--weights", "random").output  # whose processor is fetched

    @pytest.mark.parametrize(
        ("configuration", "kind"),
        [
            ({"architectures": ["SwinForImageClassification"], "model_type": "swin"}, "ImageClassifier"),
            ({"architectures": ["DeiTForImageClassificationWithTeacher"], "model_type": "deit"}, "ImageClassifier"),
            ({"architectures": ["ViTModel"], "model_type": "vit"}, "ImageClassifier"),
            ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "CausalLM"),
            ({"model_type": "gpt2"}, "CausalLM"),
        ],
    )
    def test_its_configuration_says_what_it_is(self, configuration, kind):
        assert models._kind(configuration, "it").__name__ == kind

    def test_a_network_of_another_kind(self, run, photos, tmp_path):
        (tmp_path / "config.json").write_text('{"architectures": ["DetrForObjectDetection"], "model_type": "detr"}')
        result = run("evaluate", tmp_path, "--data", photos, code=1)
        assert "is a 'detr' of transformers, neither a language model (AutoModelForCausalLM) nor an" in result.output

    def test_without_an_image_processor(self, run, classifier, photos, tmp_path):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(classifier / name, tmp_path)
        result = run("evaluate", tmp_path, "--data", photos, code=1)
        assert "ViTForImageClassification has no image processor: set model.image_processor" in result.output

    def test_random_weights_have_the_processor_of_their_folder(self, run, classifier, photos):
        result = run("evaluate", classifier, "--weights", "random", "--data", photos, "--num-workers", 0)
        assert "top1" in result.output

    def test_finetuning_images_have_its_size(self, classifier, photos):
        network = models.build(str(classifier), None, None, "cpu")
        images, labels = next(iter(ImageFolder(root=photos, num_workers=0, batch_size=4).training(network, epoch=0)))
        assert images.shape == (4, 3, 32, 32) and labels.shape == (4, 3)


class TestDataSets:
    def test_a_saved_one_is_like_the_folder(self, run, classifier, dataset, tmp_path):
        dataset.save_to_disk(tmp_path / "photos")
        run("compress", classifier, "--data", tmp_path / "photos", "--num-workers", 0, "--out", tmp_path / "small")
        top1 = saved(tmp_path / "small")["metrics"]["top1"]["original"]
        task = ImageDataset(root=tmp_path / "photos", num_workers=0)
        rows = [int(name.split("/")[1]) for name in task.validation_images.names]
        names = dataset.features["label"].names
        expected = accuracy(
            classifier,
            [dataset[row]["image"].convert("RGB") for row in rows],
            [CLASSES.index(names[dataset[row]["label"]]) for row in rows],
        )
        assert top1 == pytest.approx(expected) and 0 < expected < 100
        assert len(task.training_images) + len(rows) == len(dataset)

    @pytest.mark.parametrize(
        ("name", "asked"),
        [
            ("hub:a/b", (None, None)),
            ("hub:a/b/plain", ("plain", None)),
            ("hub:a/b/plain/train", ("plain", "train")),
        ],
    )
    def test_at_the_hub(self, run, dataset, tmp_path, monkeypatch, name, asked):
        """With a network of timm, whose classes have no names."""

        def load_dataset(repository, configuration, split):
            assert (repository, configuration, split) == ("a/b", *asked)
            return dataset if split else datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # not asked
        run("compress", *VIT, "--data", name, "--out", tmp_path / "vit")
        assert saved(tmp_path / "vit")["metrics"]["top1"].keys() == {"original", "compressed"}
        task = ImageDataset(root=name)
        assert len(task.validation_images) == (6 if asked[1] else 5)
        assert f"{len(task.training_images)} images to calibrate on" in task.inspect()

    def test_images_alone_are_calibrated_on(self, run, dataset, tmp_path):
        dataset.remove_columns("label").save_to_disk(tmp_path / "photos")
        result = run("compress", *VIT, "--data", tmp_path / "photos", "--out", tmp_path / "vit")
        assert "not evaluated: the 0 classes at" in result.output

    def test_a_split_without_labels_is_not_evaluated_on(self, dataset, tmp_path):
        unknown = dataset.select(range(3)).map(lambda row: {"label": -1})
        parts = datasets.DatasetDict({"train": dataset, "test": unknown, "validation": dataset.select(range(2))})
        parts.save_to_disk(tmp_path / "three")
        assert len(ImageDataset(root=tmp_path / "three").validation_images) == 2
        del parts["validation"]
        parts.save_to_disk(tmp_path / "two")
        assert len(ImageDataset(root=tmp_path / "two").validation_images) == len(dataset) // 2
        unknown.save_to_disk(tmp_path / "one")
        with pytest.raises(ValueError, match="has images without labels: remove these rows, or the column of classes"):
            ImageDataset(root=tmp_path / "one").inspect()

    def test_images_that_are_broken_or_missing_are_left_out(self, dataset, tmp_path, caplog):
        undecoded = dataset.cast_column("image", datasets.Image(decode=False))
        files = [{"bytes": b"no image", "path": None}, *undecoded["image"][:7]]
        broken = datasets.Dataset.from_dict(
            {"image": files, "label": [0, 1] * 4},
            features=datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"])),
        )
        broken.save_to_disk(tmp_path)
        task = ImageDataset(root=tmp_path, num_workers=0)
        network = models.build("timm/test_vit", "random", 2, "cpu")
        missing = datasets.Dataset.from_dict({"image": [None]}, features=datasets.Features(image=datasets.Image()))
        assert Rows.of(missing, "train", "image", None).read(0) == b""
        images = [*task.calibration(network), *task.evaluation(network)]
        assert sum(len(labels) for _, labels in images) == 7
        assert "train/0 cannot be decoded and is left out" in caplog.text

    def test_the_column_called_label_is_taken(self, dataset, tmp_path):
        coarse = datasets.ClassLabel(names=["x", "y"])
        both = dataset.add_column("coarse", [0, 1] * (len(dataset) // 2)).cast_column("coarse", coarse)
        both.save_to_disk(tmp_path / "both")
        assert ImageDataset(root=tmp_path / "both").classes == ["cat", "dog", "fox"]
        both.rename_column("label", "fine").save_to_disk(tmp_path / "neither")
        with pytest.raises(ValueError, match="has several columns of classes, none of them called label: leave one"):
            ImageDataset(root=tmp_path / "neither").inspect()

    def test_the_cache_tells_data_sets_apart(self, dataset, tmp_path):
        network = models.build("timm/test_vit", "random", 3, "cpu")
        dataset.save_to_disk(tmp_path / "first")
        dataset.select(range(11, -1, -1)).save_to_disk(tmp_path / "second")
        keys = [ImageDataset(root=tmp_path / name).content_key(network) for name in ("first", "first", "second")]
        assert keys[0] == keys[1] != keys[2]
        rows = ImageDataset(root=tmp_path / "first").training_images
        assert rows.stamp(0) == ImageDataset(root=tmp_path / "first").training_images.stamp(0) != rows.stamp(1)


class TestErrors:
    @pytest.mark.parametrize("name", ["hub:cifar10", "hub:a/b/c/d/e"])
    def test_no_name_at_the_hub(self, run, name):
        result = run("evaluate", *VIT, "--data", name, code=1)
        assert f"images at the hub are hub:OWNER/DATASET/CONFIGURATION/SPLIT, got '{name}'" in result.output

    def test_no_hub(self, run, monkeypatch):
        def load_dataset(*arguments, **options):
            raise ConnectionError("no answer")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # not asked
        result = run("evaluate", *VIT, "--data", "hub:a/b", code=1)
        assert "hub:a/b is not on this machine and could not be fetched (no answer)" in result.output
        assert "give a folder of images" in result.output

    def test_no_images(self, run, tmp_path):
        datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).save_to_disk(tmp_path)
        result = run("evaluate", *VIT, "--data", tmp_path, code=1)
        assert "has 0 columns of images among text, label: give a data set with one" in result.output

    def test_no_split_of_a_known_name(self, run, dataset, tmp_path):
        datasets.DatasetDict({"one": dataset, "two": dataset}).save_to_disk(tmp_path)
        result = run("evaluate", *VIT, "--data", tmp_path, code=1)
        assert "has the splits one, two, and no images in train: name a split" in result.output
