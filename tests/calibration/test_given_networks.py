"""Given networks: what hides layers is taken off in a copy, which is run in their place; nothing is left in them."""

import copy
import pickle
import threading
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import facts
from facts.modules.heads import PaddedHeads
from tests.calibration.test_facts_asked import QUICK, UNITS, Rows, batches
from tests.networks import make_vit

SETTINGS = {"layers": QUICK, "units,tokens": UNITS | {"parts": "units,tokens", "ratio": 0.4}}


def compiled(model):
    model.compile(backend="eager")
    return model


def in_parts(model):
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1] = nn.DataParallel(model.blocks[1])
    return model


def masked(model):
    """Masks that leave all weights as they are, and others that are in the weights already."""
    prune.identity(model.blocks[0].attn.qkv, "bias")
    for layer in (model.blocks[0].attn.qkv, model.blocks[1].mlp.fc1):
        prune.custom_from_mask(layer, "weight", (layer.weight != 0).float())
        layer.weight_orig.data[layer.weight_mask == 0] = 7
    return model


def normed(model):
    nn.utils.weight_norm(model.blocks[0].mlp.fc2)
    nn.utils.spectral_norm(model.blocks[0].attn.proj)
    model.eval()(torch.randn(2, 3, 16, 16))  # spectral_norm divides by the largest singular value
    return model


@cache
def of_plain(parts):
    return facts.compress(sparse_vit(), batches(3, 16, 16), **SETTINGS[parts])


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.(weight|spectral)_norm:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "parts"),
    [
        *((each, "units,tokens") for each in (in_parts, masked, normed)),
        *((each, "layers") for each in (partial(torch.compile, backend="eager"), compiled, nn.DataParallel, masked)),
    ],
)
def test_what_hides_layers_is_taken_off(wrap, parts):
    """Nothing given is changed."""
    data, x, given = batches(3, 16, 16), torch.randn(2, 3, 16, 16), wrap(sparse_vit())
    if wrap is normed:
        plain = sparse_vit()
        plain.blocks[0].attn.proj.weight.data = given.blocks[0].attn.proj.weight.detach()
        expected = facts.compress(plain, data, **SETTINGS[parts])
    else:
        expected = of_plain(parts)
    before = state_of(given)
    found = facts.compress(given, data, **SETTINGS[parts])
    assert found.plan == expected.plan and len(found.plan) > 4
    torch.testing.assert_close(found.model(x), expected.model(x), rtol=1e-4, atol=1e-5)
    assert_same_state(given, before)


def sparse_vit():
    model = make_vit(depth=2, dtype=torch.float32)
    for layer in (model.blocks[0].attn.qkv, model.blocks[1].mlp.fc1):
        layer.weight.data[:, ::3] = 0
    return model


def state_of(model):
    """All that modules hold, by module and attribute: the objects, and a copy of what they hold."""
    held = {(name, key): value for name, each in model.named_modules() for key, value in vars(each).items()}
    values = (*model.named_buffers(), *model.named_parameters())
    tensors = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in values}
    return held, {place: copy.copy(value) for place, value in held.items()}, tensors


def assert_same_state(model, before):
    (held, contents, tensors), (now, *_) = before, state_of(model)
    assert held.keys() == now.keys() and all(now[place] is held[place] for place in held)
    assert all(not isinstance(each, dict | list) or each == held[place] for place, each in contents.items())
    for name, each in (*model.named_buffers(), *model.named_parameters()):
        assert each.equal(tensors[name][0]) and each.requires_grad == tensors[name][1]


class Keeping(Rows):
    def __init__(self, flat=True):
        super().__init__(False, flat)
        self.factor = 2.0
        self.register_buffer("num_calls", torch.zeros(()))
        self.shapes = []

    def forward(self, x):
        self.last, self.found = self.factor * super().forward(x), {"mask": x.new_ones(len(x))}
        self.num_calls += 1
        self.shapes.append(x.shape)
        return self.last + 0 * self.found["mask"][:, None]


@pytest.mark.parametrize("settings", [QUICK, {"search": "cors", "ratio": 0.5}, {"parts": "layers"}])
def test_nothing_is_left_in_a_network(settings):
    model, data = Keeping().train(), batches(4, 12)
    model.first.eval()
    model.second.bias.requires_grad_(False)
    model(data[0][0]).sum().backward()  # a result of operations cannot be copied
    trained = [each for each in model.parameters() if each.requires_grad]
    before, grads = state_of(model), [each.grad.clone() for each in trained]
    result = facts.compress(model, data, **settings)
    result.model(data[0][0]).sum().backward()  # nothing that inference made is left
    recovered = facts.recover(result, data, epochs=1, original=model)
    recovered.model(data[0][0]).sum().backward()
    for each in (*result.model.parameters(), *recovered.model.parameters()):
        each.data.add_(1)
    assert_same_state(model, before)
    assert all(each.grad.equal(grad) for each, grad in zip(trained, grads, strict=True))


def test_what_cannot_be_copied_is_refused_before_any_work():
    model = nn.Sequential(Rows(False))
    model[0].second.guard = threading.Lock()
    with pytest.raises(ValueError, match=r"Sequential cannot be copied.*lock.*: give what cannot a __deepcopy__"):
        facts.compress(model, Unread(), **QUICK)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_networks_are_refused_as_such():
    quantization = pytest.importorskip("torchao.quantization")
    result = replace(plain := of_plain("units,tokens"), model=copy.deepcopy(plain.model))
    quantization.quantize_(result.model, quantization.Int8WeightOnlyConfig())
    for run in (
        lambda: facts.compress(result.model, Unread(), **QUICK),
        lambda: facts.recover(result, Unread()),
        lambda: facts.save_compressed(result, "never"),
    ):
        with pytest.raises(ValueError, match=r"blocks.0.* Int8Tensor"):
            run()


class Unread(list):
    def __iter__(self):
        raise AssertionError("the data are read")


@pytest.mark.parametrize("parts", ["layers", "units,tokens"])
def test_hooks_that_watch_go_along(parts):
    model, seen = make_vit(depth=1, dtype=torch.float32), []
    for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        model.blocks[0].get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    result = facts.compress(model, batches(3, 16, 16), estimator="pela", search="uniform", parts=parts, ratio=0.5)
    seen.clear()
    result.model(torch.randn(2, 3, 16, 16))
    assert seen == ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]


def test_results_are_pickled_and_padded_heads_traced():
    units = facts.compress(make_vit(depth=1, dtype=torch.float32), batches(3, 16, 16), parts="units", ratio=0.5)
    x = torch.randn(2, 3, 16, 16)
    for result in (of_plain("layers"), of_plain("units,tokens"), units):
        again = pickle.loads(pickle.dumps(result))
        assert again.plan == result.plan and torch.equal(again.model(x), result.model(x))
    (heads,) = (module for module in units.model.modules() if isinstance(module, PaddedHeads))
    x = torch.randn(2, 5, heads.linear.in_features)
    assert torch.equal(torch.fx.symbolic_trace(heads)(x), heads(x))
