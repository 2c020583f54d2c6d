import gc
import weakref

import pytest
import torch

import facts
from facts.estimators import ESTIMATORS, FACTS
from facts.layers import select_layers
from facts.losses import summed_cross_entropy
from facts.memory import MemoryPolicy, in_parts
from facts.moments import collect_moments
from facts.moments.collect import MomentPass
from facts.search import CoRSFisher
from tests.networks import image_batches, make_model, relative_error

# Sums over float64 in another order; Lanczos: a relative residual of 1e-9.
EXACT, LANCZOS = 1e-12, 1e-7


def limited_model(at_once: int):
    """A network on a device with memory for so many samples."""
    model = make_model()

    def refuse(module, args):
        if len(args[0]) > at_once:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(refuse)
    return model


def factors_of(model, estimator, policy=None):
    moments = collect_moments(
        model, select_layers(model), image_batches([5, 5, 2]), estimator.moments, memory=policy or MemoryPolicy()
    )
    return {name: estimator.factors(values) for name, values in moments.items()}


def assert_same(first, second, tolerance):
    for name, factors in first.items():
        for side in ("A", "B"):
            ours, theirs = getattr(factors, side), getattr(second[name], side)
            assert (ours is None) == (theirs is None)
            assert ours is None or relative_error(ours, theirs) < tolerance, (name, side)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "asvd"])
def test_batches_in_parts_give_the_factors_of_whole_ones(name, caplog):
    """All but ASVD, whose statistic is defined by batch. 5 samples in 2 parts are 3, too many; in 4 they are 2."""
    estimator = ESTIMATORS[name]()
    tolerance = LANCZOS if name == "gfwsvd" else EXACT
    assert_same(factors_of(limited_model(2), estimator), factors_of(make_model(), estimator), tolerance)
    assert "each batch in 4 parts" in caplog.text


@pytest.mark.parametrize("search", ["cors", CoRSFisher(labels="given")])
def test_searches_come_to_the_same_plan_with_batches_in_parts(search):
    plans = [
        facts.compress(model, image_batches([5, 5, 2]), search=search, ratio=0.6, input_shape=(1, 3, 8, 8)).plan
        for model in (make_model(), limited_model(2))
    ]
    assert plans[0] == plans[1]


def test_too_little_memory_for_any_part_says_what_lowers_the_need():
    with pytest.raises(MemoryError, match=r"64 parts.*task.batch_size.*hardware.memory.moments=host"):
        factors_of(limited_model(0), FACTS())


def test_batches_stay_whole_where_the_policy_says_so():
    with pytest.raises(MemoryError, match="1 parts"):
        factors_of(limited_model(2), FACTS(), MemoryPolicy(halve_batches=False))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_moments_in_main_memory_are_those_on_the_device(name):
    estimator = ESTIMATORS[name]()
    tolerance = LANCZOS if name == "gfwsvd" else EXACT
    on_host = factors_of(make_model(), estimator, MemoryPolicy(moments="host"))
    assert_same(on_host, factors_of(make_model(), estimator), tolerance)


def test_the_device_is_filled_up_to_the_room_there_is(tmp_path):
    model = make_model()
    layers = select_layers(model)
    sizes = {name: 8 * layer.out_features**2 for name, layer in layers.items()}
    room = sizes["grid"] + sizes["windows"]
    data_pass = MomentPass(
        model, layers, list(FACTS().moments[1:]), summed_cross_entropy, torch.float32, tmp_path, room
    )
    kept = {name for name in layers if all(name != other for _, other in data_pass.elsewhere)}
    assert sum(sizes[name] for name in kept) <= room
    assert kept == {"grid", "windows"}


def test_parts_hold_every_sample_once():
    batch = ({"images": torch.arange(5), "masks": [torch.arange(5) * 10]}, torch.arange(5) * 100)
    for num_parts, expected in ((1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (8, [1] * 5)):
        parts = list(in_parts(batch, num_parts))
        assert [len(targets) for _, targets in parts] == expected
        joined = torch.cat([inputs["masks"][0] for inputs, _ in parts])
        assert torch.equal(joined, torch.arange(5) * 10)


def test_a_batch_that_cannot_be_divided_says_so_and_stays_whole_where_it_need_not_be():
    batch = (torch.zeros(4, 2), {"scale": torch.tensor(2.0)})
    assert next(in_parts(batch, 1)) is batch
    with pytest.raises(ValueError, match=r"4 samples holds a tensor of shape \[\]"):
        list(in_parts(batch, 2))


def test_a_pass_that_is_over_keeps_no_memory(tmp_path):
    """Freed at once, not when Python next looks for cycles: on a GPU its moments would be in the next pass's way."""
    model = make_model()
    settings = (summed_cross_entropy, torch.float32, tmp_path)
    data_pass = MomentPass(model, select_layers(model), list(FACTS().moments), *settings)
    gc.disable()
    try:
        data_pass.run(image_batches([3, 2]))
        gone = weakref.ref(data_pass)
        del data_pass
        assert gone() is None
    finally:
        gc.enable()
