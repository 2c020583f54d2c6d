import gc
import weakref
from itertools import product

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

import facts
from facts.calibration.prepared_model import Execution
from facts.estimators import FACTS, GFWSVD, PELA
from facts.moments.collect import MemoryPolicy, MomentPass
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from facts.utils.batches import in_parts
from tests.by_sample import BY_SAMPLE, EVERY, assert_same_factors, factors_of
from tests.finetuning.setting import Reads
from tests.networks import LAYERS, image_batches, make_model, make_sharing, numbered
from tests.refusals import refuses

BATCHES = image_batches([5, 5, 2])


def limited_model(at_once: int):
    """A network on a device with memory for so many samples."""
    model = make_model()

    def refuse(module, args):
        if len(args[0]) > at_once:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(refuse)
    return model


def test_batches_in_parts_give_the_factors_of_whole_ones(caplog):
    """Where no batch defines them. 5 samples in 2 parts are 3, too many; in 4 they are 2."""
    assert_same_factors(*(factors_of(model, BATCHES, BY_SAMPLE) for model in (limited_model(2), make_model())))
    assert "each batch in 4 parts" in caplog.text


def test_too_little_memory_for_any_part_says_what_lowers_the_need():
    message, given = r"64 parts.*lower the batch size.*MemoryPolicy\(moments=\"host\"\)", (BATCHES, {"facts": FACTS()})
    refuses(message, factors_of, limited_model(0), *given, raised=MemoryError)
    whole = MemoryPolicy(halve_batches=False)
    refuses("1 parts", factors_of, limited_model(2), *given, raised=MemoryError, memory=whole)


def test_moments_in_main_memory_are_those_on_the_device():
    policies = MemoryPolicy(moments="host"), MemoryPolicy()
    assert_same_factors(*(factors_of(make_model(), BATCHES, EVERY, memory=policy) for policy in policies))


def test_the_device_is_filled_up_to_the_room_there_is():
    layers = select_layers(model := make_model()).layers
    sizes = {name: 8 * layer.out_features**2 for name, layer in layers.items()}
    room = sizes["grid"] + sizes["windows"]
    data_pass = MomentPass(model, layers, list(FACTS().moments[1:]), summed_cross_entropy, torch.float32, room)
    assert {name for name in layers if all(name != other for _, other in data_pass.elsewhere)} == {"grid", "windows"}


def test_parts_hold_every_sample_once():
    batch = ({"images": torch.arange(5), "masks": [torch.arange(5) * 10]}, torch.arange(5) * 100)
    for num_parts, expected in ((1, [5]), (2, [3, 2]), (8, [1] * 5)):
        parts = list(in_parts(batch, num_parts))
        assert [len(targets) for _, targets in parts] == expected
        assert torch.cat([inputs["masks"][0] for inputs, _ in parts]).equal(torch.arange(5) * 10)
    with pytest.raises(ValueError, match=r"4 samples holds a tensor of shape \[\]"):
        list(in_parts((torch.zeros(4, 2), {"scale": torch.tensor(2.0)}), 2))


@pytest.fixture
def no_collector():
    """Memory is freed at once, not when Python next looks for cycles."""
    gc.disable()
    yield
    gc.enable()


def test_a_pass_that_is_over_keeps_no_memory(no_collector):
    """On a GPU its moments would be in the next pass's way."""
    layers = select_layers(model := make_model()).layers
    data_pass = MomentPass(model, layers, list(FACTS().moments), summed_cross_entropy, torch.float32)
    data_pass.run(image_batches([3, 2]))
    gone = weakref.ref(data_pass)
    del data_pass
    assert gone() is None


class TestLayersAtOnce:
    @pytest.mark.parametrize("estimator", [FACTS(num_iterations=2), GFWSVD(group_size=2), PELA()])
    @pytest.mark.parametrize("cached", [False, True])
    def test_decompositions_are_those_of_one_pass(self, estimator, cached, tmp_path):
        """From the moments, from the cache's moments, and from the cache's decompositions."""
        reads = Reads()
        model, batches = make_model(), numbered(BATCHES, reads, "images")
        whole = facts.prepare(model, batches).decompositions(estimator)
        execution = Execution(memory=MemoryPolicy(layers_at_once=4), cache=tmp_path if cached else None)
        calibration = facts.prepare(model, batches, execution=execution)
        results = [calibration.decompositions(estimator)]
        if cached:
            num_reads = reads.count
            results.append(calibration.decompositions(estimator))
            (file,) = tmp_path.glob("*/*.safetensors")  # one for all layers
            file.unlink()
            results.append(calibration.decompositions(estimator))
            assert (reads.count == num_reads) == (not isinstance(estimator, GFWSVD))  # it keeps no gradients
        for result in results:
            assert list(result) == list(LAYERS)
            for name, part in product(LAYERS, ("left", "right", "energies")):
                assert torch.equal(getattr(result[name], part), getattr(whole[name], part)), (name, part)

    def test_no_more_layers_have_their_moments_in_memory(self, no_collector, monkeypatch):
        collected, num_held = [], []
        real = facts.PreparedModel.moments

        def watched(calibration, wanted, only, **others):
            held = {name for name, storages in collected if not all(storage.expired() for storage in storages)}
            num_held.append(len(held | set(only)))
            moments = real(calibration, wanted, only, **others)
            for name, layer in moments.items():
                tensors = tree_leaves(list(layer.totals.values()))
                collected.append((name, [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]))
            return moments

        monkeypatch.setattr(facts.PreparedModel, "moments", watched)
        execution = Execution(memory=MemoryPolicy(layers_at_once=2))
        facts.prepare(make_sharing(), image_batches([3]), execution=execution).decompositions(FACTS(num_iterations=2))
        assert num_held == [2] * 2 * 2
