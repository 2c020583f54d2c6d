"""Networks without a classifier: how outputs are read, the Fisher of features, and what is compared."""

import math

import pytest
import timm
import torch
from torch import nn

import facts
from facts.calibration.data import Data
from facts.calibration.outputs import default_error, output_kind
from facts.cost.probe import Probe
from facts.moments import losses
from facts.moments.losses import SampledFeatures, SquaredError, kl_divergence, scales_of, squared_error
from tests.networks import image_batches
from tests.refusals import refuses
from tests.toys import Net

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"image_size": 16, "patch_size": 8}


def images():
    return [images for images, _ in image_batches([16] * 4, shape=(3, 16, 16), dtype=torch.float32)]


def tower():
    transformers = pytest.importorskip("transformers")
    return transformers.ViTModel(transformers.ViTConfig(**SIZES)).eval()


def pyramid():
    """Outputs of different shapes, a map and tokens, by name."""

    def run(net, x):
        grid = net.conv(x).relu()
        tokens = net.tokens(grid.flatten(2).mT).tanh()
        return {"grid": grid, "tokens": tokens, "spare": net.spare(tokens)}

    return Net(run, conv=nn.Conv2d(3, 4, 2, 2), tokens=nn.Linear(4, 6), spare=nn.Linear(6, 12))


def vit(num_classes):
    return timm.create_model("vit_tiny_patch16_224", img_size=16, depth=1, num_classes=num_classes)


def test_how_outputs_are_read():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(768, 8))
    ends = (nn.Sequential(flat, end) for end in (nn.LayerNorm(8), nn.ReLU()))
    for reading, models in (("classes", (vit(10), flat)), ("features", (vit(0), *ends, pyramid(), tower()))):
        for model in models:
            assert output_kind(model, Probe.of(model, torch.randn(2, 3, 16, 16))) == reading


def test_labels_or_the_argument_decide_first():
    flat, labels = nn.Sequential(nn.Flatten(), nn.Linear(768, 12), nn.ReLU(), nn.Linear(12, 8)), torch.zeros(16).long()
    errors = {
        "given": facts.prepare(flat, [(images()[0], labels)]).output_error,
        "classes": facts.prepare(nn.Sequential(flat, nn.ReLU()), images(), outputs="classes").output_error,
        "features": facts.prepare(flat, images(), outputs="features").output_error,
    }
    assert errors["given"] is errors["classes"] is kl_divergence
    assert isinstance(errors["features"], SquaredError)
    assert isinstance(facts.prepare(vit(0), [(images()[0], labels)]).output_error, SquaredError)
    refuses("give it or loss=, not both", facts.prepare, flat, images(), outputs="features", loss=len)


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_the_network_says_how_its_outputs_are_read(tmp_path, problem, has_labels):
    """Also after it was saved."""
    transformers = pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")
    config = transformers.ViTConfig(**SIZES, num_labels=4, problem_type=problem)
    model, labels = transformers.ViTForImageClassification(config).eval(), (torch.rand(16, 4) < 0.4).float()
    data = [(images()[0], labels)] if has_labels else images()
    result = facts.compress(model, data, estimator="pela", search="uniform", ratio=0.6)
    facts.save_compressed(result, tmp_path / "network")
    loaded = default_error(facts.load_compressed(tmp_path / "network").model, Data.of(images(), model))
    for error in (result.output_error, loaded):
        if problem == "regression":
            assert isinstance(error, SquaredError)
        else:  # a softmax does not see that all logits are shifted
            assert error is losses.binary_kl_divergence and error(labels, labels - 4) > 1
    prepared = facts.prepare(model, [(images()[0], torch.zeros(16).long())])
    refuses("give one for each output", prepared.collect, [facts.estimators.FACTS()])


def test_the_loss_makes_up_the_gauss_newton_matrix(monkeypatch):
    """Gradients for every direction of the noise, in float64, against Jᵀ M J of the dense Jacobian."""
    model, x = pyramid().double(), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    names = ("grid", "tokens")
    scales = scales_of(model, [(torch.randn(64, 3, 4, 4, dtype=torch.float64), None)], names, torch.float32)
    loss, weight, found, expected = SampledFeatures(scales, names), model.conv.weight, 0, 0
    outputs = {name: losses.features_last(model(x)[name]) for name in names}
    for name, scale in zip(names, scales, strict=True):
        values = outputs[name]
        rows = [torch.autograd.grad(value, weight, retain_graph=True)[0].flatten() for value in values.flatten()]
        metric = scale.expand_as(values).flatten() ** -2 / (2 * values.numel())
        expected = expected + torch.stack(rows).T @ (metric[:, None] * torch.stack(rows))
        for index in range(values.numel()):
            draws = {each: torch.zeros(outputs[each].shape, dtype=torch.float64) for each in names}
            draws[name].view(-1)[index] = 1
            waiting = iter(draws.values())
            monkeypatch.setattr(torch, "randn", lambda *args, waiting=waiting, **options: next(waiting))
            gradient = torch.autograd.grad(loss(model(x), None), weight)[0].flatten()
            found = found + torch.outer(gradient, gradient)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_draws_are_the_same_in_every_pass_and_new_in_every_batch():
    loss, outputs = SampledFeatures([torch.ones(5)]), torch.randn(3, 5)
    first, second = (loss.drawn(0, number)(outputs, None) for number in (0, 1))
    assert first == loss.drawn(0, 0)(outputs, None) != second and first != loss.drawn(1, 0)(outputs, None)


def test_scales_are_deviations_and_a_constant_feature_counts_little():
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    model = pyramid().double()
    grid, tokens = scales_of(model, [(x[:5], None), (x[5:], None)], ("grid", "tokens"), torch.float32)
    outputs = model(x)
    flat = outputs["grid"].movedim(1, -1).flatten(0, -2), outputs["tokens"].flatten(0, -2)
    torch.testing.assert_close(tokens, flat[1].std(dim=0, correction=0))
    least = 1e-3 * flat[0].square().mean().sqrt()
    torch.testing.assert_close(grid, flat[0].std(dim=0, correction=0).clamp(min=least.item()))
    same = nn.Linear(2, 2, bias=False)
    same.weight.data = torch.eye(2)
    (scale,) = scales_of(same, [(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), None)], (), torch.float32)
    torch.testing.assert_close(scale, torch.tensor([1.0, 1e-3 * math.sqrt(15)], dtype=torch.float64))


def test_the_error_is_the_mean_over_tensors_by_name_if_asked():
    first, second = pyramid(), pyramid()
    x = torch.randn(3, 3, 4, 4)
    before, after = first(x), second(x)
    own = {name: squared_error(before[name], after[name]) for name in before}
    torch.testing.assert_close(squared_error(before, after), torch.stack(list(own.values())).mean())
    torch.testing.assert_close(SquaredError(["grid"])(before, after), own["grid"])
    refuses("no output is called pool: there are grid, tokens, spare", SquaredError(["pool"]), before, after)


def test_a_layer_of_an_output_that_does_not_count_is_left_alone():
    prepared = facts.prepare(tower(), images(), outputs="last_hidden_state", parts="units")
    assert prepared.skipped["pooler.dense"] == "the loss does not depend on it"
    assert facts.compress(prepared).summary.distance.mean < 0.5


def test_searches_that_train_on_labels_refuse_features():
    message = "features have no labels: choose a search that compares outputs"
    refuses(message, facts.compress, facts.prepare(tower(), images()), search="comcat")
