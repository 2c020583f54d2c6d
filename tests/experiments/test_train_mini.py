"""The training of the small networks, and the images that it shows them."""

from functools import partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from experiments.train_mini import ColouredEpoch, epochs_for, main, mini_recipe, mini_recipes, train
from facts.tasks import Digits
from facts.tasks.classification.coloured_digits import load_coloured, split_indices
from facts.tasks.classification.digit_stream import NOISE_IN_TRAINING, draw_digits


def test_splits_are_fixed_disjoint_and_complete():
    train_indices, test_indices = split_indices("train"), split_indices("test")
    assert test_indices.tolist() == list(range(0, 1797, 3))
    assert sorted(train_indices.tolist() + test_indices.tolist()) == list(range(1797))


@pytest.fixture
def short_epochs(monkeypatch):
    monkeypatch.setattr("experiments.train_mini.Digits", partial(Digits, num_training=128))


def network_of(*input_size: int) -> nn.Module:
    """Something that says what images it expects."""
    network = nn.Identity()
    network.pretrained_cfg = {"input_size": input_size}
    return network


def test_networks_of_one_channel_are_trained_on_a_new_stream_each_epoch():
    batches_of = epochs_for(network_of(1, 32, 32), seed=3, batch_size=64)
    for epoch in (0, 1):
        expected, batches = draw_digits(f"training 3 {epoch}", 4096, 32, NOISE_IN_TRAINING), batches_of(epoch)
        assert len(batches) == 64
        assert all(torch.cat(own).equal(all_) for own, all_ in zip(zip(*batches, strict=True), expected, strict=True))


def test_networks_of_three_channels_see_each_coloured_digit_once_an_epoch_moved_anew(monkeypatch):
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(10)
    monkeypatch.setattr("experiments.train_mini.load_coloured", lambda split, side: (images, labels))
    batches_of = epochs_for(network_of(3, 32, 32), seed=0, batch_size=4)
    epochs = [list(batches_of(number)) for number in range(2)]
    seen = [torch.cat([labels for _, labels in batches]) for batches in epochs]
    assert [len(labels) for _, labels in epochs[0]] == [4, 4, 2] and len(batches_of(0)) == 3
    assert all(sorted(each.tolist()) == list(range(10)) for each in seen) and not seen[0].equal(seen[1])
    first, second = (
        torch.cat([moved for moved, _ in batches])[order.argsort()] for batches, order in zip(epochs, seen, strict=True)
    )
    assert not any(one.allclose(other, atol=0.1) for one, other in zip(first, second, strict=True))
    again = list(ColouredEpoch(32, seed=0, batch_size=4))
    assert all(one.equal(other) for (one, _), (other, _) in zip(again, epochs[0], strict=True))


def test_training_lowers_the_loss(short_epochs):
    torch.manual_seed(0)
    model = mini_recipe("convnext_b", weights="random").build()
    losses = train(model, epochs=3)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert not model.training


@pytest.mark.system
def test_the_command_writes_a_checkpoint_that_loads(short_epochs, tmp_path, capsys):
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
    images, labels = load_coloured("test", 48)
    assert images.shape == (599, 3, 48, 48)
    assert labels.equal(torch.tensor(load_digits().target)[split_indices("test")])
    load_coloured.cache_clear()
    assert images.equal(load_coloured("test", 48)[0])  # drawn alike each time
    brightest = images.amax(dim=1).flatten(1).argmax(dim=1)
    assert {*(brightest // 48 // 24).tolist()} == {0, 1}


def test_without_the_extra_detectors_are_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.train_mini.missing_packages", lambda extra: ["mmdet"])
    main(["mask_rcnn_swin_b", "--folder", str(tmp_path)])
    assert "mask_rcnn_swin_b is left out: mmdet missing (make install-detection)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
