"""Recovery: the original teaches a compressed network on inputs alone, and on random views of images."""

import copy
import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resized_crop

import facts
from facts.compression.comparison import rounded
from facts.finetuning import Finetuning, Recovery, training
from facts.finetuning import recovery as views
from facts.finetuning.recovery import DistillationData, random_views
from facts.moments.losses import kl_divergence, squared_error
from facts.utils.cache import Cache
from tests.finetuning.setting import Reads, interrupt, noted
from tests.networks import image_batches, make_model, make_swin, numbered, same_weights
from tests.refusals import refuses
from tests.toys import Net

SIZES = [8] * 10
RECIPE = {"epochs": 3, "learning_rate": 3e-3, "num_warmups": 0, "batch_size": 4, "views": False, "save_every": 10}


def outspoken(model):
    """The network with larger weights, so that its outputs depend on its inputs."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight *= 4
    return model


def original(dtype=torch.float64):
    return outspoken(make_model(dtype))


@cache
def compressed():
    return facts.compress(original(), image_batches(SIZES), ratio=0.4, form="pivoted")


@cache
def recovered():
    return facts.recover(compressed(), image_batches(SIZES), **RECIPE)


def divergence(model, seed=7):
    """Mean KL from the original on samples that nothing was trained on."""
    images = torch.cat([images for images, _ in image_batches([200], seed=seed)])
    return kl_divergence(original()(images), model.eval()(images)).item() / len(images)


@pytest.mark.parametrize("form", ["plain", "pivoted"])
def test_it_comes_closer_to_the_original_at_the_same_cost(form):
    dense = original()
    dense.head.requires_grad_(False)  # it is trained nevertheless
    result = facts.compress(dense, image_batches(SIZES), ratio=0.4, form=form)
    before = copy.deepcopy(result.model)
    recovered = facts.recover(result, image_batches(SIZES), **RECIPE)
    assert divergence(recovered.model) < 0.7 * divergence(result.model)
    assert recovered.plan == result.plan and recovered.summary.after == result.summary.after
    assert facts.count_cost(recovered.model, (1, 3, 8, 8)) == facts.count_cost(result.model, (1, 3, 8, 8))
    assert [each.requires_grad for each in recovered.model.head.parameters()] == [False, False]
    assert sum(each.requires_grad for each in recovered.model.parameters()) > 10
    course = recovered.summary.recovery
    assert course.after < course.before
    assert (course.num_samples, course.num_to_choose, course.num_held_back) == (51, 9, 20)
    assert recovered.summary.seconds["recovery"] == course.seconds > 0
    assert f"{course.before:.4g} before, {course.after:.4g} after" in str(recovered)
    assert "chosen by 9 others" in str(recovered)
    half = rounded(recovered, torch.float16).summary
    assert half.recovery.after == half.distance.mean != course.after
    idle = recovered.with_summary(recovery=replace(course, after=course.before))
    assert rounded(idle, torch.float16).summary.recovery == idle.summary.recovery  # rounding is no gain
    assert same_weights(result.model, before) and same_weights(dense, original())


def auxiliary(net, images):
    """Return what an auxiliary head says, too, in training mode."""
    net.modes.append((net.training, net.net.training, net.drop.training))
    logits = net.drop(net.net(images))
    return (logits, logits) if net.training else logits


def test_heads_for_training_are_left_out():
    """Dropout, and all else that differs in training mode, does so."""
    batches = image_batches(SIZES, dtype=torch.float32)
    model = Net(auxiliary, net=original(torch.float32), drop=torch.nn.Dropout(0.1), modes=[])
    recovered = facts.recover(facts.compress(model, batches, ratio=0.4, form="plain"), batches, **RECIPE)
    assert recovered.summary.recovery.after < recovered.summary.recovery.before
    modes = recovered.model.modes
    assert modes.count((True, True, True)) == 1 and modes.count((False, True, True)) >= 30


@pytest.mark.parametrize(("form", "dtype"), [("plain", torch.float32), ("pivoted", torch.bfloat16)])
def test_it_never_ends_further_from_the_original(form, dtype):
    """At a rate that destroys the network, it is handed back as it came, or with a lucky rounding.

    New pivots are chosen after training, and half precision is computed in float32: both round.
    """
    batches = image_batches(SIZES, dtype=dtype)
    result = facts.compress(original(dtype), batches, ratio=0.4, form=form)
    recovered = facts.recover(result, batches, **{**RECIPE, "learning_rate": 10.0})
    course = recovered.summary.recovery
    as_it_came = same_weights(recovered.model, result.model) and recovered.model is not result.model
    is_exact = form == "plain" and dtype == torch.float32
    assert as_it_came if is_exact else as_it_came or course.after < course.before
    assert course.gained_nothing == str(course).startswith("nothing gained from ") == (course.after >= course.before)
    assert course.after > (0.9 if dtype == torch.bfloat16 else 0.999) * course.before


def test_what_is_held_back_is_not_trained_on():
    """Every third part, whatever the batches; and a single batch is cut in two."""
    batches = image_batches([5, 7, 3])
    inputs = DistillationData(batches, kl_divergence, 4, 0.3, views=False)
    parts = [part for images, _ in batches for part in images.split(-(-len(images) // -(-len(images) // 4)))]
    assert [len(part) for part in parts] == [3, 2, 4, 3, 3]
    trained, [held_back] = [part for part, _ in inputs.training(None, 0)], inputs.held_back
    assert held_back.equal(parts[2]) and held_back.untyped_storage().nbytes() == held_back.nbytes
    assert torch.cat(trained).equal(torch.cat([*parts[:2], *parts[3:]])) and inputs.num_samples == 11
    assert torch.cat([part for part, _ in inputs.training(None, 0)[1::2]]).equal(torch.cat([parts[1], parts[4]]))
    one = DistillationData(batches[:1], kl_divergence, 32, 0.1, views=False)
    assert [len(part) for part in one.held_back] == [2] and one.num_samples == 3
    uneven = DistillationData([(torch.rand(size, 3), None) for size in (48, 1)], kl_divergence, 16, 0.1, views=False)
    assert [len(part) for part in uneven.held_back] == [16] and uneven.num_samples == 33  # not the last one alone
    whole = [({"image": torch.rand(4, 3), "sizes": [1, 2, 3, 4]}, None)]  # it cannot be divided
    refuses("at least two samples", DistillationData, whole, kl_divergence, 2, 0.1, False)
    given, loss = (inputs, original(), original(), batches[0][0], None), Finetuning(alpha=0.5).loss
    refuses("inputs without labels have no loss", loss, *given, raised=NotImplementedError)


def test_data_that_differ_from_pass_to_pass_are_refused():
    batches = image_batches(SIZES)
    changing = numbered(batches, lambda: [images.mul_(1.01) for images, _ in batches])
    refuses("differ from pass to pass, so nothing can be held back", facts.recover, compressed(), changing, **RECIPE)
    data = TensorDataset(torch.cat([images for images, _ in image_batches(SIZES)]))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    assert facts.recover(compressed(), loader, **RECIPE).summary.recovery


@pytest.fixture
def rates(monkeypatch):
    return noted(monkeypatch, lambda optimizer: optimizer.param_groups[0]["lr"])


def test_the_time_is_bounded(rates, tmp_path, monkeypatch):
    """Every look at the clock takes a second, a checkpoint five; the cosine ends with the steps that fit."""
    passed, save = itertools.count(), Cache.save
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(passed)))
    monkeypatch.setattr(Cache, "save", lambda *given: [next(passed) for _ in range(5)] and save(*given))
    timed = {**RECIPE, "epochs": None, "learning_rate": 1e-3, "num_warmups": 3, "save_every": 20}
    recovered = facts.recover(compressed(), image_batches(SIZES), minutes=3, cache=tmp_path, **timed)
    assert 150 < recovered.summary.recovery.seconds <= 180
    assert len(rates) > 30 and rates[:3] == pytest.approx([0, 1e-3 / 3, 2e-3 / 3])
    assert rates[3] == pytest.approx(1e-3, rel=1e-3) and rates[-1] < 0.05 * 1e-3, rates


def test_it_is_the_same_to_the_bit_after_an_interruption(tmp_path, rates):
    """The data are read to be divided (twice), surveyed and hashed, then once an epoch, which has 17 steps."""
    result, expected = compressed(), recovered()
    for at, num_done in ((47, 0), (59, 20)):
        options = {**RECIPE, "cache": tmp_path / str(at)}
        with pytest.raises(KeyboardInterrupt):
            facts.recover(result, numbered(image_batches(SIZES), Reads(at, interrupt)), **options)
        assert len(rates) >= num_done
        rates.clear()
        again = facts.recover(result, image_batches(SIZES), **options)
        assert len(rates) == 51 - num_done and same_weights(again.model, expected.model)
        assert again.summary.recovery.after == expected.summary.recovery.after
        rates.clear()


def test_a_loaded_network_needs_its_original_and_no_labels(tmp_path):
    facts.save_compressed(compressed(), tmp_path)
    loaded = facts.load_compressed(tmp_path, original())
    refuses("does not hold the original network: give original=", facts.recover, loaded, image_batches(SIZES), epochs=1)
    images = [images for images, _ in image_batches(SIZES)]  # labels are not read
    assert same_weights(facts.recover(loaded, images, original=original(), **RECIPE).model, recovered().model)


def test_unsaved_buffers_keep_their_type():
    """Swin's masks of windows."""
    batches = image_batches([4] * 4, shape=(3, 16, 16), dtype=torch.bfloat16)
    result = facts.compress(outspoken(make_swin(torch.bfloat16)), batches, ratio=0.5)
    assert facts.recover(result, batches, **{**RECIPE, "epochs": 1}).model(batches[0][0]).dtype == torch.bfloat16


@pytest.mark.parametrize("able", ["amx_bf16", "avx2", None])
def test_a_processor_with_instructions_for_bfloat16_uses_them(monkeypatch, able):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {able: True}, raising=False)
    if able is None:  # an old PyTorch says nothing about the processor
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    expected = "bfloat16" if able == "amx_bf16" else "float32"
    assert Recovery().finetuning(make_model(torch.float32)).precision == expected
    assert Recovery(precision="float32").finetuning(make_model(torch.float16)).precision == "float16"


def test_outputs_that_are_no_logits_are_compared_by_the_error_of_the_compression():
    options = {"ratio": 0.4, "form": "pivoted", "loss": lambda outputs, targets: outputs.square().sum()}
    result = facts.compress(original(), image_batches(SIZES), **options)
    assert result.output_error is squared_error
    errors = {}, {"output_error": squared_error}, {"output_error": kl_divergence}
    first, *others = (facts.recover(result, image_batches(SIZES), **RECIPE, **each).model for each in errors)
    assert [same_weights(first, other) for other in others] == [True, False]


def test_whole_images_are_themselves_or_their_mirror_images(monkeypatch):
    monkeypatch.setattr(views, "SMALLEST_AREA", 1.0)
    monkeypatch.setattr(views, "ASPECT", 1.0)
    images = torch.rand(64, 3, 9, 7, dtype=torch.float64)
    seen = random_views(images)
    flipped = [not torch.allclose(one, other, atol=1e-12) for one, other in zip(images, seen, strict=True)]
    expected = torch.stack([one.flip(-1) if flip else one for one, flip in zip(images, flipped, strict=True)])
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
    assert 16 < sum(flipped) < 48


def test_crops_are_those_of_torchvision(monkeypatch):
    """Whose sides are whole pixels: the middle quarter of an image of 8 x 8."""
    draws = torch.tensor([1.0, 0.5, 0.9, 0.5, 0.5], dtype=torch.float64)[:, None]
    monkeypatch.setattr(views, "SMALLEST_AREA", 0.25)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: draws)
    images = torch.arange(64.0, dtype=torch.float64).reshape(1, 1, 8, 8).square().expand(1, 3, 8, 8)
    ours = random_views(images)
    theirs = resized_crop(images, 2, 2, 4, 4, [8, 8], InterpolationMode.BILINEAR, antialias=False)
    # Beyond the crop's border ours sees the image, theirs repeats the last pixel.
    torch.testing.assert_close(ours[..., 1:-1, 1:-1], theirs[..., 1:-1, 1:-1])


def test_each_epoch_has_views_of_its_own_and_a_second_reading_the_same():
    training_data = DistillationData([(torch.rand(12, 3, 8, 8), None)], kl_divergence, 4, 0.3, views=True)
    epochs = [training_data.training(None, epoch, seed=5) for epoch in (0, 0, 1)]
    first, again, other = (torch.cat([part for part, _ in epoch]) for epoch in epochs)
    assert first.equal(again) and not first.equal(other)
    assert torch.cat([part for part, _ in epochs[0][1:]]).equal(first[4:])
