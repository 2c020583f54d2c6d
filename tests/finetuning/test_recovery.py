"""Recovery: the original teaches a compressed network on inputs alone."""

import copy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import facts
from experiments.config import CONF
from facts.finetuning import Recovery, training
from facts.finetuning.inputs import Inputs
from facts.moments.losses import kl_divergence, squared_error
from tests.finetuning.setting import Reads, Watched, interrupt, same_weights
from tests.networks import image_batches, make_causal_lm, make_model

ROOT = Path(CONF).parent
SIZES = [8] * 10
RECIPE = {"epochs": 3, "learning_rate": 3e-3, "batch_size": 4, "views": False, "save_every": 2}


def outspoken(model):
    """The network with larger weights, so that its outputs depend on its inputs."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight *= 4
    return model


def original(dtype=torch.float64):
    return outspoken(make_model(dtype))


def compressed(form="pivoted", **options):
    return facts.compress(original(), image_batches(SIZES), ratio=0.4, form=form, **options)


def divergence(model, seed=7):
    """Mean KL from the original on samples that nothing was trained on."""
    images = torch.cat([images for images, _ in image_batches([200], seed=seed)])
    with torch.no_grad():
        return kl_divergence(original()(images), model.eval()(images)).item() / len(images)


@pytest.mark.parametrize("form", ["plain", "pivoted"])
def test_it_comes_closer_to_the_original_at_the_same_cost(form):
    result = compressed(form)
    recovered = facts.recover(result, image_batches(SIZES), **RECIPE)
    assert divergence(recovered.model) < 0.7 * divergence(result.model)
    assert recovered.plan == result.plan and recovered.summary.after == result.summary.after
    assert facts.count_cost(recovered.model, (1, 3, 8, 8)) == facts.count_cost(result.model, (1, 3, 8, 8))
    course = recovered.summary.recovery
    assert course.after < course.before and (course.num_samples, course.num_held_back) == (72, 8)
    assert recovered.summary.seconds["recovery"] == course.seconds > 0
    assert f"{course.after:.4g} from the original's" in str(recovered)


def test_neither_the_compressed_network_nor_the_original_changes():
    dense = original()
    result = facts.compress(dense, image_batches(SIZES), ratio=0.4)
    before = copy.deepcopy(result.model)
    facts.recover(result, image_batches(SIZES), **RECIPE)
    assert same_weights(result.model, before) and same_weights(dense, original())
    assert all(parameter.requires_grad for parameter in dense.parameters())


def test_labels_are_not_read():
    images = [images for images, _ in image_batches(SIZES)]
    forms = [images, [(each, None) for each in images], image_batches(SIZES), [{"x": each} for each in images]]
    result = compressed()
    first, *others = (facts.recover(result, data, **RECIPE).model for data in forms[:3])
    assert all(same_weights(first, other) for other in others)


def test_it_never_ends_further_from_the_original():
    """At a rate that destroys the network, the weights that it came with are the best."""
    result = compressed("plain")
    recovered = facts.recover(result, image_batches(SIZES), **{**RECIPE, "learning_rate": 10.0})
    assert same_weights(recovered.model, result.model)
    course = recovered.summary.recovery
    assert course.after == course.before


def test_it_stops_when_nothing_improves():
    recovered = facts.recover(compressed(), image_batches(SIZES), **{**RECIPE, "learning_rate": 10.0, "epochs": 9})
    assert recovered.summary.recovery.epochs == training.PATIENCE


def test_what_is_held_back_is_not_trained_on():
    """Every third part, whatever the batches; and a single batch is cut in two."""
    batches = image_batches([5, 7, 3])
    inputs = Inputs.of(batches, kl_divergence, 4, 0.3, views=False)
    parts = [part for images, _ in batches for part in images.split(-(-len(images) // -(-len(images) // 4)))]
    assert [len(part) for part in parts] == [3, 2, 4, 3, 3]
    trained = [part for part, _ in inputs.training(None, 0)]
    assert len(inputs.held_back) == 1 and inputs.held_back[0].equal(parts[2])
    assert torch.cat(trained).equal(torch.cat([*parts[:2], *parts[3:]])) and inputs.num_samples == 11
    assert torch.cat([part for part, _ in inputs.training(None, 0)[1::2]]).equal(torch.cat([parts[1], parts[4]]))
    one = Inputs.of(batches[:1], kl_divergence, 32, 0.1, views=False)
    assert [len(part) for part in one.held_back] == [2] and one.num_samples == 3


def test_the_time_is_bounded(monkeypatch):
    """By a clock on which every look takes a second: the steps that fit are planned, and the cosine ends with them."""
    clock, steps = iter(range(10**6)), []
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *args: (steps.append(self.param_groups[0]["lr"]), step(self, *args))[1]
    )
    options = {name: value for name, value in RECIPE.items() if name != "epochs"}
    recovered = facts.recover(compressed(), image_batches(SIZES), minutes=1, **options)
    course = recovered.summary.recovery
    assert 50 < course.seconds <= 60
    assert len(steps) > 40 and steps[0] == 3e-3 and steps[-1] < 3e-5


def test_it_is_the_same_to_the_bit_after_an_interruption(tmp_path):
    result, expected = compressed(), None
    for at in (None, 3, 17, 40):
        data = Watched(image_batches(SIZES), Reads(at, interrupt))
        if at:
            with pytest.raises(KeyboardInterrupt):
                facts.recover(result, data, folder=tmp_path / str(at), **RECIPE)
        recovered = facts.recover(result, image_batches(SIZES), folder=tmp_path / str(at), **RECIPE)
        expected = expected or recovered
        assert same_weights(recovered.model, expected.model)
        assert recovered.summary.recovery.after == expected.summary.recovery.after


def test_a_killed_process_leaves_no_trace(tmp_path):
    job = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tests.finetuning.test_recovery import *; from tests.finetuning.setting import kill;"
            "facts.recover(compressed(), Watched(image_batches(SIZES), Reads(30, kill)), folder=sys.argv[1], **RECIPE)",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert job.returncode == -signal.SIGKILL, job.stderr
    assert len(list(tmp_path.iterdir())) == 1
    again = facts.recover(compressed(), image_batches(SIZES), folder=tmp_path, **RECIPE)
    assert same_weights(again.model, facts.recover(compressed(), image_batches(SIZES), **RECIPE).model)


def test_a_compression_can_end_with_it(tmp_path):
    recipe = Recovery(**RECIPE)
    both = facts.compress(original(), image_batches(SIZES), ratio=0.4, recover=recipe, cache=tmp_path)
    assert same_weights(both.model, facts.recover(compressed(), image_batches(SIZES), **RECIPE).model)
    facts.save_compressed(both, tmp_path / "saved")
    loaded = facts.load_compressed(tmp_path / "saved", original())
    assert loaded.summary.recovery == both.summary.recovery and same_weights(loaded.model, both.model)


def test_a_loaded_network_needs_its_original(tmp_path):
    result = compressed()
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path, original())
    with pytest.raises(ValueError, match="does not hold the network that it was made from: give original="):
        facts.recover(loaded, image_batches(SIZES), epochs=1)
    recovered = facts.recover(loaded, image_batches(SIZES), original=original(), **RECIPE)
    assert same_weights(recovered.model, facts.recover(result, image_batches(SIZES), **RECIPE).model)


def test_outputs_that_are_no_logits_are_compared_by_the_error_of_the_compression():
    def loss(outputs, targets):
        return outputs.square().sum()

    result = compressed(loss=loss)
    assert result.output_error is squared_error
    by_default, by_name = (
        facts.recover(result, image_batches(SIZES), **RECIPE, **options)
        for options in ({}, {"output_error": squared_error})
    )
    assert same_weights(by_default.model, by_name.model)
    other = facts.recover(result, image_batches(SIZES), **RECIPE, output_error=kl_divergence)
    assert not same_weights(by_default.model, other.model)


def test_a_language_model_recovers():
    model, generator = make_causal_lm(), torch.Generator().manual_seed(0)
    tokens = [torch.randint(64, (16, 12), generator=generator) for _ in range(30)]
    result = facts.compress(model, tokens, ratio=0.4, cost="params")
    course = facts.recover(result, tokens, epochs=3, learning_rate=1e-3, batch_size=16).summary.recovery
    assert course.after < 0.75 * course.before and (course.num_samples, course.num_held_back) == (432, 48)


def test_a_network_in_half_precision_learns_in_float32():
    batches = [(images.bfloat16(), labels) for images, labels in image_batches(SIZES)]
    result = facts.compress(original(torch.bfloat16), batches, ratio=0.4)
    recovered = facts.recover(result, batches, **{**RECIPE, "learning_rate": 2e-3})
    assert {parameter.dtype for parameter in recovered.model.parameters()} == {torch.bfloat16}
    course = recovered.summary.recovery
    assert course.after < 0.8 * course.before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0}, "minutes"),
        ({"epochs": 0}, "epochs"),
        ({"held_back": 0.9}, "held_back"),
        ({"precision": "int8"}, "precision"),
        ({"epoch": 3}, "epoch"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValidationError, match=message):
        facts.recover(compressed(), image_batches(SIZES), **options)


def test_a_single_sample_is_too_little():
    with pytest.raises(ValueError, match="two samples or more"):
        facts.recover(compressed(), image_batches([1]), epochs=1)
