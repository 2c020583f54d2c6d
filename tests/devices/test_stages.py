"""Every stage runs on a device that is not the CPU, and gives there what it gives on the CPU.

The device is pretended (`pretended.py`): the values come from the same kernels, so results are the same to rounding of
sums in another order.
"""

import copy

import pytest
import torch

import facts
from experiments.mini.digits import Digits
from experiments.mini.train import mini_recipe
from facts.analysis import CrossMoments, FisherSimilarity, Subject, Throughput, TokenCoupling
from facts.cost.latency import module_seconds
from facts.cost.timing import TimingPolicy
from facts.estimators import ESTIMATORS
from facts.finetuning import finetune
from facts.modules.lowrank import LowRankLayer
from facts.modules.pivots import pivoted_layer
from facts.moments.memory import MemoryPolicy
from facts.pruning import DISP, Isomorphic, NViT, block_times
from facts.search import SEARCHES
from facts.tasks.classification.base import are_right
from tests.devices.pretended import OnCuda, on_cuda, pretended_cuda
from tests.finetuning.setting import SIZES, Given, make_student, recipe
from tests.networks import image_batches, make_causal_lm, make_convnext, make_model, make_swin, make_vit
from tests.pruning import problems as pruning_problems

pytestmark = pytest.mark.system

BATCHES = image_batches([4, 4, 4])
RECOVERY = {"epochs": 1, "num_warmups": 0, "batch_size": 4, "views": False}
HASTY = TimingPolicy(num_turns=2, min_seconds=0)
QUICK = {
    "disp_llm": DISP(num_steps=3),
    "isomorphic": Isomorphic(round_to=1),
    "nvit": NViT(num_steps=2, steps_between=2),
}


def texts(number=3, length=12):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(64, (2, length), generator=generator) for _ in range(number)]


def digits_of(name):
    model = mini_recipe(name).build()
    return model, list(Digits(num_calibration=32, num_sensitivity=16, batch_size=16).calibration(model))


FAMILIES = {
    "every shape": lambda: (make_model(), BATCHES),
    "ViT": lambda: (make_vit(), image_batches([4, 4], shape=(3, 16, 16))),
    "Swin": lambda: (make_swin(), image_batches([4, 4], shape=(3, 16, 16))),
    "ConvNeXt": lambda: (make_convnext(), image_batches([4, 4], shape=(3, 32, 32))),
    "MambaVision": lambda: digits_of("mambavision_b"),
    "distilled DeiT": lambda: digits_of("deit_b"),
    "language model": lambda: (make_causal_lm(), texts()),
}


def values(model):
    """The tensors of a network, on the CPU; of low-rank layers the products: vectors have either sign."""
    tensors = {name: tensor.cpu().detach() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, LowRankLayer):
            for own in module.state_dict().keys() - {"bias"}:
                del tensors[f"{name}.{own}"]
            tensors[f"{name}.weight"] = module.weight.cpu().detach()
    return tensors


def assert_alike(here, there):
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def on_both(work, make):
    """What a work on a network gives on the CPU, and on the pretended GPU with the network there."""
    here = work(make())
    with pretended_cuda():
        return here, work(on_cuda(make()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compression(family):
    model, batches = FAMILIES[family]()

    def work(model):
        result = facts.compress(model, batches, ratio=0.6)
        assert all(isinstance(tensor, OnCuda) == model_is_there(model) for tensor in result.model.state_dict().values())
        return result.plan, values(result.model)

    (plan, here), (other_plan, there) = on_both(work, lambda: model)
    assert plan == other_plan
    assert_alike(here, there)


def model_is_there(model):
    return next(model.parameters()).device.type == "cuda"


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator(name, form, tmp_path):
    def work(model):
        cache = tmp_path / str(model_is_there(model))
        first, again = (
            values(
                facts.compress(
                    model, BATCHES, estimator=name, search="uniform", form=form, execution=facts.Execution(cache=cache)
                ).model
            )
            for _ in range(2)
        )
        assert_alike(first, again)
        return first

    assert_alike(*on_both(work, make_model))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search(name):
    def work(model):
        return facts.compress(model, BATCHES, search=name, ratio=0.6).plan

    here, there = on_both(work, make_model)
    assert here == there


@pytest.mark.parametrize(
    "policy",
    [MemoryPolicy(moments="host"), MemoryPolicy(layers_at_once=2), MemoryPolicy(checkpoint_blocks=True)],
    ids=["host", "two layers", "checkpoints"],
)
def test_a_policy_of_memory(policy):
    batches = image_batches([4, 4], shape=(3, 16, 16))

    def work(model):
        return values(facts.compress(model, batches, ratio=0.6, execution=facts.Execution(memory=policy)).model)

    assert_alike(*on_both(work, make_vit))


def test_times_of_layers():
    with pretended_cuda():
        model = on_cuda(make_model())
        seconds = module_seconds(model, ["", "grid"], BATCHES[0][0].cuda())
        assert seconds[""] > seconds["grid"] > 0


def test_pivots_by_qr():
    """The leading rows and columns are singular."""
    left, right = torch.randn(12, 4), torch.randn(4, 10)
    left[1], right[:, 1] = left[0], right[:, 0]

    def work(left, right):
        layer = pivoted_layer(left, right)
        assert layer.order is not None
        return layer.weight.cpu()

    here = work(left, right)
    with pretended_cuda():
        torch.testing.assert_close(work(left.cuda(), right.cuda()), here)


def test_fitted_biases():
    assert_alike(
        *on_both(lambda model: values(facts.compress(facts.prepare(model, BATCHES, fit_bias=True)).model), make_model)
    )


def test_recovery(tmp_path):
    def work(model):
        result = facts.compress(model, BATCHES, ratio=0.5)
        return values(facts.recover(result, BATCHES, cache=tmp_path / str(model_is_there(model)), **RECOVERY).model)

    assert_alike(*on_both(work, make_model))


def test_finetuning(tmp_path):
    student = make_student()

    def work(teacher):
        there = model_is_there(teacher)
        model = on_cuda(student) if there else copy.deepcopy(student)
        finetune(model, teacher, Given(SIZES), recipe(num_epochs=1), tmp_path / str(there))
        return values(model)

    assert_alike(*on_both(work, make_model))


def test_an_evaluation():
    model, _ = digits_of("deit_b")
    task = Digits(num_calibration=32, num_sensitivity=16, batch_size=64)
    here, there = on_both(lambda model: task.judge(model).metrics, lambda: model)
    assert here == there


def test_saving_and_loading(tmp_path):
    with pretended_cuda():
        result = facts.compress(on_cuda(make_model()), BATCHES)
        facts.save_compressed(result, tmp_path)
        there = values(result.model)
    assert_alike(values(facts.load_compressed(tmp_path, make_model()).model), there)


@pytest.mark.parametrize(
    "analysis",
    [
        FisherSimilarity(num_probes=4, factors="raw", seed=0),
        CrossMoments(),
        TokenCoupling(layer="blocks.1.mlp.fc1"),
        Throughput(batch_size=2, timing=HASTY),
    ],
    ids=lambda analysis: type(analysis).__name__,
)
def test_an_analysis(analysis):
    batches = image_batches([12, 12], shape=(3, 16, 16))

    def work(model):
        held_out = facts.prepare(model, batches)
        subject = Subject(calibration=held_out, held_out=held_out, estimator=ESTIMATORS["facts"]())
        return analysis.run(subject).metrics

    here, there = on_both(work, make_vit)
    assert here.keys() == there.keys()
    for name in () if isinstance(analysis, Throughput) else here:
        assert here[name] == pytest.approx(there[name], rel=1e-4)


@pytest.mark.parametrize("name", QUICK)
def test_pruning(name, monkeypatch):
    """NViT times blocks, so what it keeps depends on the clock."""

    def work(model):
        return values(QUICK[name].prune(pruning_problems.make_problem(model)))

    monkeypatch.setattr(block_times, "MIN_SECONDS", 1e-4)
    here, there = on_both(work, pruning_problems.make_vit)
    assert here.keys() == there.keys()
    if name != "nvit":
        assert_alike(here, there)


def waits_of(work, batches):
    with pretended_cuda() as waits:
        model = on_cuda(make_model())
        calibration = facts.prepare(model, batches)
        waits.clear()
        work(calibration)
        return sum(waits.values())


WORKS = {
    "data pass": lambda calibration: calibration.moments(ESTIMATORS["facts"]().moments),
    "evaluation": lambda calibration: are_right(calibration.model, calibration.data),
}


@pytest.mark.parametrize(("name", "times"), [("data pass", 2), ("evaluation", 1)])
def test_how_often_the_device_is_waited_for(name, times):
    """For each further batch: for the check of labels, of values, and for outcomes. The rest is done once."""
    few, many = (waits_of(WORKS[name], image_batches([4] * number)) for number in (3, 13))
    assert many - few == 10 * times
