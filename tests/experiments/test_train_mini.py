import pytest
import torch

from experiments.train_mini import augment, main, mini_recipe, mini_recipes, train
from facts.tasks.classification.digits import load_images, split_indices


def test_splits_are_fixed_disjoint_and_complete():
    train_indices, test_indices = split_indices("train"), split_indices("test")
    assert test_indices.tolist() == list(range(0, 1797, 3))
    assert sorted(train_indices.tolist() + test_indices.tolist()) == list(range(1797))


def test_images_are_normalised_and_enlarged():
    images, labels = load_images("train", 16)
    assert images.shape == (1198, 1, 16, 16)
    assert labels.shape == (1198,)
    originals, _ = load_images("train", 8)
    assert abs(originals.mean()) < 0.01
    assert abs(originals.std() - 1) < 0.01


def test_augmentation_keeps_the_background():
    images, _ = load_images("train", 16)
    augmented = augment(images[:64], torch.Generator().manual_seed(0))
    assert augmented.shape == (64, 1, 16, 16)
    assert augmented.min() >= images.min()
    assert not torch.equal(augmented, images[:64])


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    model = mini_recipe("convnext_b", weights="random").build()
    losses = train(model, epochs=2)
    assert losses[1] < losses[0]
    assert not model.training


def test_the_command_writes_a_checkpoint_that_loads(tmp_path, capsys):
    main(["deit_b", "--epochs", "1", "--folder", str(tmp_path)])
    assert "top1" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mini_deit.safetensors"]
    mini_recipe("deit_b", weights=str(tmp_path / "mini_deit.safetensors")).build()


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["resnet"])
    message = capsys.readouterr().err
    assert all(name in message for name in mini_recipes())


def test_digits_in_colour_lie_on_discs_anywhere():
    images, labels = load_images("test", 48, channels=3)
    assert images.shape == (599, 3, 48, 48)
    assert torch.equal(labels, load_images("test", 16)[1])
    assert torch.equal(images, load_images("test", 48, channels=3)[0])  # drawn alike each time
    brightest = images.amax(dim=1).flatten(1).argmax(dim=1)
    assert {*(brightest // 48 // 24).tolist()} == {0, 1}


def test_without_the_extra_detectors_are_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.train_mini.missing_packages", lambda extra: ["mmdet"])
    main(["mask_rcnn_swin_b", "--folder", str(tmp_path)])
    assert "mask_rcnn_swin_b is left out: mmdet missing (make install-detection)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
