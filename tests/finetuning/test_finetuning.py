"""Finetuning by distillation: its loss, its steps, its rates; pivoted layers, and blocks; interruptions."""

import copy
import math
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import facts
from experiments.compose import CONF
from facts.finetuning import Finetuning, finetune
from facts.finetuning.recipe import compressed_blocks, matching_error, recorded_outputs
from facts.finetuning.recovery import DistillationData
from facts.finetuning.training import State, plain_factors
from facts.modules.forms import FORMS
from facts.moments.losses import kl_divergence, summed_cross_entropy
from tests.finetuning.setting import RUNS, SIZES, Given, Reads, finetuned, interrupt, make_student, noted, recipe
from tests.networks import image_batches, make_model, make_sharing, make_vit, relative_error, same_weights
from tests.refusals import refused, refuses

STEPS, EPOCH = 60, 5
BATCHES = image_batches([8] * 4, shape=(3, 16, 16))
NESTED = nn.ModuleList([nn.Sequential(nn.Sequential(nn.Linear(20, 20)), nn.Linear(20, 20)), nn.Linear(20, 20)])


def test_the_loss_is_the_formula():
    student, teacher, [(images, labels)] = make_model(seed=1), make_model(), image_batches([5])
    loss = Finetuning(alpha=0.3).loss(Given([5]), student, teacher, images, labels)
    expected = 0.0
    for z, t, label in zip(*(each.tolist() for each in (student(images), teacher(images), labels)), strict=True):
        p, q = ([math.exp(value) / sum(map(math.exp, values)) for value in values] for values in (t, z))
        expected += 0.7 * -math.log(q[label])
        expected += 0.3 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    alone = Finetuning(alpha=0.0).loss(Given([5]), student, None, images, labels)
    assert alone.equal(summed_cross_entropy(student(images), labels))


@pytest.fixture
def steps(monkeypatch):
    return noted(monkeypatch, lambda it: torch.cat([p.grad.flatten() for g in it.param_groups for p in g["params"]]))


def test_a_step_takes_the_gradient_of_the_mean_loss(steps):
    student, teacher, task = make_model(seed=1), make_model(), Given([2, 3])
    images, labels = (torch.cat(parts) for parts in zip(*task.batches, strict=True))
    (recipe().loss(task, student, teacher, images, labels) / 5).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
    finetune(student, teacher, task, recipe(accumulate=2))
    assert relative_error(steps[0].sort().values, expected.sort().values) < 1e-12


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_gradients_are_clipped_to_a_norm(steps, precision):
    finetuned(Given([4], torch.float32), dtype=torch.float32, clip_grad=1e-2, precision=precision)
    assert steps[0].norm().item() == pytest.approx(1e-2, rel=1e-4)


def test_every_parameter_is_trained_and_the_teacher_is_not():
    student, teacher = make_student().requires_grad_(False), make_model().train()
    before = copy.deepcopy(student)
    finetune(student, teacher, Given([4, 4]), recipe())
    assert any("left" in name for name, _ in student.named_parameters())
    for (name, ours), theirs in zip(student.named_parameters(), before.parameters(), strict=True):
        assert not ours.equal(theirs), name
    assert same_weights(teacher, make_model()) and teacher.training and not student.training


@pytest.mark.parametrize("trained", [False, True])
def test_the_statistics_of_batch_norm_follow_only_where_the_recipe_says_so(trained):
    student = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(196, 4)).double()
    images, _ = Given([4]).batches[0]
    mean = student[0](images).mean(dim=(0, 2, 3))
    finetune(student, make_model(), Given([4]), recipe(train_batch_norm=trained))
    expected = 0.1 * mean if trained else torch.zeros(4).double()  # BatchNorm's own momentum, one step
    torch.testing.assert_close(student[1].running_mean, expected)
    assert not student[1].training and not student[1].bias.equal(torch.zeros(4))


def test_a_backbone_can_learn_more_slowly():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 16))
    student = nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(16, 4))).double()
    before = copy.deepcopy([*student.parameters()])
    finetune(student, make_model(), Given([4]), recipe(weight_decay=0.0, backbone_scale=0.1))
    steps = [(a - b).abs().max().item() for a, b in zip(student.parameters(), before, strict=True)]
    assert steps == pytest.approx([0.001, 0.001, 0.01, 0.01], rel=1e-3)  # AdamW's first step is the rate


def test_a_loss_that_is_not_finite_is_an_error():
    task = Given([2, 2])
    task.batches[1][0][0] = torch.nan
    refuses("the loss is nan in epoch 0, step 1: check that the inputs are finite, lower", finetuned, task)
    task.batches = []
    refuses(r"no complete batch to train on: lower its batch_size", finetuned, task)


test_a_bad_field_is_named = refused(
    ({"schedule": "steps"}, "give them with schedule=steps"),
    ({"decay_epochs": [8]}, "give them with schedule=steps"),
    ({"epochs": 3}, r"Finetuning: epochs=3: unexpected keyword argument \(options: .*num_epochs"),
    ({"num_epochs": "a\nb"}, r"Finetuning: num_epochs=a b: input should be a valid integer"),
    by=lambda fields: recipe(**fields),
)


def rates(**fields):
    """The rate of every step, for a training of 12 epochs."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = recipe(learning_rate=0.1, **fields).scheduler(optimizer, STEPS, EPOCH, initialize=True)
    return [schedule.step_update(step) or optimizer.param_groups[0]["lr"] for step in range(STEPS)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.05 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]),
        ({"schedule": "linear"}, [0.1 * (1 - step / STEPS) for step in range(STEPS)]),
        ({"schedule": "steps", "decay_epochs": [8, 11]}, [0.1] * 8 * EPOCH + [0.01] * 3 * EPOCH + [0.001] * EPOCH),
    ],
)
def test_rates_follow_the_schedule_once_they_have_risen(fields, expected):
    plain, risen = rates(**fields), rates(num_warmups=6, **fields)
    assert plain == pytest.approx(expected)
    assert risen[:6] == pytest.approx([0.1 * step / 6 for step in range(6)]) and risen[6:] == plain[6:]
    assert rates(num_warmups=999, **fields)[12:] == plain[12:]  # a fifth at most


def test_too_little_memory_for_a_batch_says_what_lowers_the_need():
    student, message = make_student(), "a batch of 3 .*divide batch_size and multiply accumulate by the same"
    student.register_forward_pre_hook(Mock(side_effect=torch.OutOfMemoryError("none left")))
    refuses(message, finetune, student, make_model(), Given([3]), recipe(), raised=MemoryError)


def test_pivoted_layers_are_trained_as_plain_factors_and_come_back():
    task = Given([3, 2])
    student = facts.compress(make_model(seed=1), estimator="pela", ratio=0.6, form="pivoted").model
    ranks = {name: module.rank for name, module in student.named_modules() if isinstance(module, facts.PivotedLinear)}
    [(images, _)] = image_batches([4])
    before, reference = student.eval()(images), copy.deepcopy(student)
    with plain_factors(reference):
        assert sum(isinstance(module, facts.LowRankLinear) for module in reference.modules()) == len(ranks) > 2
        torch.testing.assert_close(reference(images), before)
        finetune(reference, make_model(), task, recipe())
        expected = reference(images)
    finetune(student, make_model(), task, recipe())
    assert {name: student.get_submodule(name).rank for name in ranks} == ranks
    torch.testing.assert_close(student(images), expected)
    assert relative_error(student(images), before) > 0.01


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_pivots_are_permuted_after_training_only_if_they_were(precision):
    left, right = torch.randn(200, 60), torch.randn(60, 120)
    model = nn.Sequential(FORMS["pivoted"](precision).layer(nn.Linear(120, 200), left, right))
    permuted = model[0].order is not None
    assert permuted == (precision == torch.bfloat16)
    with plain_factors(model):
        torch.testing.assert_close(model[0].weight, left @ right, rtol=1e-3, atol=1e-3)
    assert (model[0].order is not None) == permuted


def compressed(model, **options):
    return facts.compress(model, estimator="pela", search="uniform", ratio=0.5, **options)


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (make_vit(), ["blocks.1.mlp.fc1", "head"], ["blocks.1"]),
        (make_sharing(), ["stem"], ["blocks.0", "blocks.1", "blocks.2"]),  # they share it
        (NESTED, ["0.0.0"], ["0.0"]),
        (NESTED, ["0.0.0", "0.1"], ["0"]),  # without the one within it
    ],
)
def test_blocks_of_layers(model, layers, expected):
    assert compressed_blocks(compressed(model, layers=layers, cost="params").model, model) == expected


def test_blocks_are_those_with_low_rank_or_narrower_layers():
    model = make_vit()
    assert compressed_blocks(compressed(model).model, model) == [f"blocks.{i}" for i in range(3)]
    assert compressed_blocks(model, model) == []
    prepared = facts.prepare(model, BATCHES, layers="blocks.1.*", parts="units")
    assert compressed_blocks(facts.compress(prepared, search="uniform", ratio=0.5).model, model) == ["blocks.1"]


def of_blocks(original, changed, images):
    """Outputs of the blocks of both networks that are compressed in one."""
    names = compressed_blocks(changed, original)
    with recorded_outputs(original, names) as ours, recorded_outputs(changed, names) as theirs:
        original(images)
        changed(images)
    assert len(ours) == len(names) and not original._forward_hooks
    return ours, theirs


def test_the_error_is_a_sum_over_samples_and_blocks():
    original, [(images, _)] = make_vit(), image_batches([5], shape=(3, 16, 16))
    ours, theirs = of_blocks(original, compressed(original).model, images)
    pairs = [(one[i], other[i]) for one, other in zip(ours, theirs, strict=True) for i in range(5)]
    expected = sum(((other - one).norm() / one.norm()) ** 2 for one, other in pairs)
    torch.testing.assert_close(matching_error(ours, theirs, 5), expected)
    assert matching_error(ours, ours, 5) == 0 < expected
    assert matching_error([torch.zeros(5, 2)], [torch.zeros(5, 2)], 5) == 0
    assert matching_error([torch.ones(5, 2)], [torch.zeros(5, 3)], 5) == 0


def test_blocks_come_nearer_if_they_count():
    """More so than when the outputs alone are taught; the weight of the blocks' errors is all that differs."""
    original = make_vit()
    inputs = DistillationData(BATCHES, kl_divergence, part_size=8, held_back=0.25, views=False)
    errors = {}
    for weight in (0.0, 1.0):
        student = compressed(original).model
        recipe = Finetuning(num_epochs=12, learning_rate=1e-3, alpha=1.0, weight_decay=0.0, block_weight=weight)
        finetune(student, original, inputs, recipe)
        errors[weight] = matching_error(*of_blocks(original, student, BATCHES[-1][0]), 8).item()
    assert errors[1.0] < 0.7 * errors[0.0]


@pytest.mark.attack
@pytest.mark.parametrize(("precision", "at"), [("float32", 1), ("float32", 6), ("float32", 10), ("float16", 6)])
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(tmp_path, precision, at):
    fields = {**RUNS, "precision": precision, "dtype": torch.float32}
    expected, outcome = finetuned(Given(SIZES, torch.float32), **fields)
    with pytest.raises(KeyboardInterrupt):
        finetuned(Given(SIZES, torch.float32, Reads(at, interrupt)), tmp_path, **fields)
    reads = Reads()
    student, again = finetuned(Given(SIZES, torch.float32, reads), tmp_path, **fields)
    # Steps end with batches 2, 4, 5, 7, 9, 10; checkpoints are written after the second, third, fourth and sixth.
    assert reads.count == 10 - max(number for number in (0, 4, 5, 7) if number < at)
    assert same_weights(student, expected) and again.losses == outcome.losses
    finetuned(Given(SIZES, torch.float32, interrupt), tmp_path, **fields)  # it was through: nothing is read


@pytest.mark.attack
def test_a_checkpoint_holds_the_scale_of_the_loss():
    """Which the other tests leave as it starts: it changes when gradients overflow, or after 2,000 steps."""
    state, again = (State(make_student(torch.float32), recipe(precision="float16"), 1) for _ in range(2))
    changed = state.scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 7}
    state.scaler.load_state_dict(changed)
    again.restore(state.tensors())
    assert again.scaler.state_dict() == changed


@pytest.mark.attack
@pytest.mark.system
def test_a_killed_process_leaves_no_trace(tmp_path):
    command = "finetuned(Given(SIZES, before_batch=Reads(8, kill)), sys.argv[1], **RUNS)"
    code = [sys.executable, "-c", f"import sys; from tests.finetuning.setting import *; {command}", str(tmp_path)]
    job = subprocess.run(code, cwd=Path(CONF).parent, capture_output=True, text=True)
    assert job.returncode == -signal.SIGKILL, job.stderr
    assert len(list(tmp_path.iterdir())) == 1
    reads = Reads()
    student, _ = finetuned(Given(SIZES, before_batch=reads), tmp_path, **RUNS)
    assert reads.count == 3 and same_weights(student, finetuned(Given(SIZES), **RUNS)[0])


@pytest.mark.attack
@pytest.mark.parametrize("change", ["recipe", "student", "teacher", "data"])
def test_what_is_not_the_same_starts_anew(tmp_path, change):
    """And leaves the other's checkpoint alone."""
    finetuned(Given(SIZES), tmp_path, **RUNS)
    other = facts.compress(make_model(seed=1), estimator="pela", ratio=0.5).model
    teacher = make_model(seed=2 if change == "teacher" else 0)
    reads, fields = Reads(), {**RUNS, "alpha": 0.25} if change == "recipe" else RUNS
    task = Given(SIZES[::-1] if change == "data" else SIZES, before_batch=reads)
    finetune(other if change == "student" else make_student(), teacher, task, recipe(**fields), tmp_path)
    assert reads.count == 10 and len(list(tmp_path.glob("finetuning-*"))) == 2
