"""A saved network comes back bit by bit, from JSON and safetensors alone."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import facts
from facts.compression.comparison import rounded
from facts.models.weights import sha256
from facts.modules.heads import PaddedHeads
from facts.modules.networks import run, whole_image
from facts.saving.load import BoundedTensors
from facts.saving.manifest import MANIFEST, WEIGHTS
from facts.utils.cache import Cache
from facts.utils.files import replacing
from tests.disk import room_for
from tests.networks import image_batches, make_image_classifier, make_model
from tests.refusals import refuses
from tests.saving.edits import tensor
from tests.saving.setting import assert_same, compressed, from_recipe, from_timm, mini_mambavision, reloaded, swin

REFUSED = "names no architecture that can be built from JSON; pass the dense network"
IMAGES = torch.randn(2, 3, 32, 32)
FOLDERS = Path(__file__).with_name("folders")
EXPECTED = json.loads((FOLDERS / "expected.json").read_text())


def of_timm(tag, shape, **options):
    return lambda: (timm.create_model(tag, num_classes=16, **options).eval(), shape)


REBUILT = {
    "a recipe": (from_recipe, {"form": "plain"}),
    "a name of timm": (from_timm, {"form": "pivoted"}),
    "MambaVision": (mini_mambavision, {"form": "pivoted"}),
    "common options": (of_timm("test_vit", (1, 64, 32), img_size=[64, 32], in_chans=1, global_pool="avg"), {}),
    "others": (of_timm("test_resnet", (4, 64, 64), global_pool="max", in_chans=4), {"layers": ["fc"]}),
    "dropout, which is left out": (of_timm("test_vit", (3, 160, 160), proj_drop_rate=0.3, drop_path_rate=0.1), {}),
    "buffers that are in no file": (swin, {}),
}


@pytest.mark.parametrize("name", REBUILT)
def test_networks_that_can_be_rebuilt(name, tmp_path):
    """Swin's masks must be of the type of its weights."""
    make, options = REBUILT[name]
    model, shape = make()
    result = compressed(model.bfloat16() if name == "a name of timm" else model, shape, **options)
    assert_same(loaded := reloaded(result, tmp_path / "first"), result, shape)
    assert (repr(loaded.model) == repr(result.model)) == (not name.startswith("dropout"))
    assert all(dict(loaded.model.named_buffers())[name].equal(buffer) for name, buffer in result.model.named_buffers())
    facts.save_compressed(loaded, tmp_path / "second")
    assert (tmp_path / "second" / WEIGHTS).read_bytes() == (tmp_path / "first" / WEIGHTS).read_bytes()
    with torch.device("meta"):  # the caller's default
        again = facts.load_compressed(tmp_path / "second")
    assert_same(again, result, shape)


def test_units_narrower_than_before(units, tmp_path):
    plan, block = units.plan, units.model.blocks[0]
    assert block.mlp.fc1.out_features == plan["blocks.0.mlp"] < 192 and plan["blocks.0.attn.scores"] < 16
    assert isinstance(block.attn.qkv, PaddedHeads) and plan["blocks.0.attn.scores"] != plan["blocks.0.attn.outputs"]
    assert_same(loaded := reloaded(units, tmp_path), units, (3, 32, 32))
    assert repr(loaded.model) == repr(units.model)
    assert_same(reloaded(loaded, tmp_path / "again", model=copy.deepcopy(units.original)), units, (3, 32, 32))


def test_a_type_of_its_own_for_the_file(tmp_path):
    batches = image_batches([16] * 4, dtype=torch.float32)
    result = facts.compress(make_model(torch.float32), batches, ratio=0.7, form="plain")
    half = rounded(result, torch.float16)
    facts.save_compressed(half, tmp_path, dtype=torch.float16)
    loaded, images = facts.load_compressed(tmp_path, model=make_model(torch.float32)).model, batches[0][0]
    assert next(loaded.parameters()).dtype == torch.float16 and loaded.pretrained_cfg == {"input_size": (3, 8, 8)}
    assert loaded.float()(images).equal(half.model(images)) and not half.model(images).equal(result.model(images))
    before, after = half.summary.sizes
    assert before.types == after.types == "float16" and 2 * after.num_bytes == result.summary.sizes[1].num_bytes
    assert half.summary.distance != result.summary.distance
    next(result.model.parameters()).data.fill_(1e5)
    message = "holds NaN or infinity; change it, or store a type of wider range"
    refuses(message, facts.save_compressed, result, tmp_path / "other", dtype=torch.float16)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unknown", None),
        *(("recipe", each) for each in ("adam", {"lr": 1})),
        *(("provenance", each) for each in ("mine", {"year": 2026})),
        *(("pretrained_cfg", each) for each in (None, nn.ReLU(), {"architecture": ["vit"]}, property(lambda _: {}))),
    ],
)
def test_any_network_is_loaded_onto_its_dense_form_whatever_its_attributes_mean(name, value, tmp_path, monkeypatch):
    model = make_model(torch.float32)
    monkeypatch.setattr(type(model), name, value, raising=False)
    facts.save_compressed(result := compressed(model, (3, 8, 8)), tmp_path)
    refuses(REFUSED, facts.load_compressed, tmp_path)
    assert_same(facts.load_compressed(tmp_path, model=make_model(torch.float32, seed=5)), result, (3, 8, 8))


def test_dense_networks_that_do_not_fit_are_refused_and_left_alone(saved):
    refuses("must be the dense network, got a module", facts.load_compressed, saved[1], model=timm)
    refuses("meta dev", facts.load_compressed, saved[1], model=nn.Linear(1, 1, device="meta"))
    given, damaged = from_recipe()[0], shutil.copytree(saved[1], saved[1].with_name("NaN"))
    tensor("norm.bias", lambda bias: bias * torch.nan)(damaged)
    before = given.norm.weight.clone()
    refuses(r"norm\.bias holds NaN", facts.load_compressed, damaged, model=given)
    assert given.norm.bias.isfinite().all() and given.norm.weight.equal(before)
    other, _ = from_recipe(num_classes=9)
    message = r"model\.safetensors does not fit .*: 2 tensors differ, .* head\.bias: \(5,"
    refuses(message, facts.load_compressed, saved[1], model=other)
    assert not any(isinstance(module, facts.LowRankLinear | facts.PivotedLinear) for module in other.modules())


def test_places_that_cannot_be_read_or_written(saved, tmp_path):
    (tmp_path / "file").write_text("")
    refuses("cannot write to the folder", facts.save_compressed, saved[0], tmp_path / "file", raised=OSError)
    for name, options, kind in (("nowhere", {}, "folder: give one"), ("small", {"revision": "1"}, "repository")):
        refuses(f"{name} is not a {kind}", facts.load_compressed, tmp_path / name, **options, raised=FileNotFoundError)
    with pytest.raises(ValueError, match=r"metrics must be finite numbers, like .* \(top1\.original: [^\n]*\)$"):
        facts.save_compressed(saved[0], tmp_path / "new", {"top1": {"original": torch.nan}})
    with pytest.raises(FileExistsError, match="holds something other than a compressed network: give a new or empty"):
        facts.save_compressed(saved[0], tmp_path)
    assert not (tmp_path / WEIGHTS).exists()
    with room_for(1000):
        refuses("no room for", facts.save_compressed, saved[0], tmp_path / "full" / "network", raised=OSError)
    assert not (tmp_path / "full").exists()


def test_buffers_that_are_in_no_file_keep_their_types_in_a_given_network(tmp_path):
    model, shape = swin("swinv2_cr_tiny_ns_224")
    facts.save_compressed(result := compressed(model, shape), tmp_path)
    assert "BF16" in json.loads((tmp_path / MANIFEST).read_text())["buffers"].values()
    assert_same(facts.load_compressed(tmp_path, model=swin("swinv2_cr_tiny_ns_224")[0].float()), result, shape)


@pytest.mark.parametrize("was_compressed", [False, True])
def test_what_no_recipe_builds_asks_for_the_network(was_compressed, tmp_path, caplog):
    """Heads that neither name, shapes nor modules show; or a loaded network, compressed once more."""
    model, shape = of_timm("test_vit", (3, 160, 160), **{} if was_compressed else {"num_heads": 4})()
    if was_compressed:
        narrower = facts.compress(model, [torch.rand(4, *shape)] * 2, parts="units", ratio=0.8)
        model = reloaded(narrower, tmp_path / "first").model
    facts.save_compressed(result := compressed(model, shape), tmp_path / "last")
    assert "load it with facts.load_compressed(folder, model=the dense network)" in caplog.text
    refuses(REFUSED, facts.load_compressed, tmp_path / "last")
    assert_same(facts.load_compressed(tmp_path / "last", model=model), result, shape)


def test_a_layer_under_two_names(tmp_path):
    def build():
        return nn.Sequential(layer := nn.Linear(64, 64), nn.GELU(), layer)

    result = compressed(build(), (64,), layers=["0"])
    result.model[2] = result.model[0]
    assert_same(loaded := reloaded(result, tmp_path, model=build()), result, (64,))
    assert loaded.model[0] is loaded.model[2]


class Stateful(nn.Sequential):
    def __init__(self, table, state=None, persistent=True):
        super().__init__(nn.Linear(16, 16))
        self.register_buffer("table", table, persistent)
        self.state = state

    def forward(self, x):
        return super().forward(x) + self.table.to(torch.complex64).real

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


FLOAT8 = torch.arange(16.0).to(torch.float8_e4m3fn)
STATES = [
    *((torch.arange(16).to(dtype),) for dtype in (torch.int16, torch.uint16, torch.uint32, torch.complex64)),
    *((FLOAT8,), (FLOAT8, None, False)),
    *((torch.randn(64)[:16],), (torch.randn(1).expand(16),), (torch.randn(1).expand(16), None, False)),
    *((torch.zeros(16), torch.ones(3)), (torch.zeros(16), {"scale": 1.0})),
]


@pytest.mark.parametrize("given", STATES)
def test_buffers_and_states_of_any_kind(given, tmp_path, caplog):
    result = compressed(Stateful(*given), (16,), layers=["0"])
    facts.save_compressed(rounded(result, torch.float16), tmp_path)
    loaded, x = reloaded(result, tmp_path, model=Stateful(*copy.deepcopy(given))).model, torch.randn(2, 16)
    assert loaded(x).equal(result.model(x)) and loaded.table.dtype == given[0].dtype
    lost = any(isinstance(each, dict) for each in given)
    assert ("_extra_state, a dict, is not saved: only the dense network can bring it" in caplog.text) == lost


def test_buffers_that_no_file_can_hold_are_refused_before_it_is_written(tmp_path):
    message = "since table is .*: make it a dense tensor of float64, float32"
    for name, value, words in (
        ("table", torch.ones(16, dtype=torch.complex128), message),
        ("table", torch.eye(16).to_sparse(), message),
        ("__metadata__", torch.zeros(1), "safetensors keeps the name __metadata__ for itself: rename this tensor"),
    ):
        result = compressed(nn.Sequential(nn.Linear(16, 16)), (16,), layers=["0"])
        result.model.register_buffer(name, value)
        refuses(words, facts.save_compressed, result, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_views_of_one_tensor_come_back_with_their_own_values(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        network = Stateful(torch.randn(16))
        network.register_buffer("other", network.table.view(4, 4))
        return network

    result = compressed(build(0), (16,), layers=["0"])
    result.model.other = result.model.other + 1
    loaded = reloaded(result, tmp_path, model=build(1)).model
    assert loaded.table.equal(result.model.table) and loaded.other.equal(result.model.other)


def test_threads_that_load_do_not_count_the_layers_of_others():
    with BoundedTensors(2), torch.device("meta"):
        other = Thread(target=lambda: [nn.Linear(1, 1) for _ in range(9)])
        other.start()
        other.join()
        nn.Linear(1, 1)
        refuses("it has more than 2 parameters", nn.Linear, 1, 1)


@pytest.mark.parametrize("tag", ["test_vit", "test_convnext"])
def test_networks_of_features_only(tag, tmp_path):
    model = timm.create_model(tag, features_only=True, in_chans=1, out_indices=(-2, -1)).eval()
    facts.save_compressed(result := compressed(model, (1, 160, 160)), tmp_path)
    loaded, images = facts.load_compressed(tmp_path).model, torch.randn(1, 1, 160, 160)
    assert all(map(torch.equal, loaded(images), result.model.eval()(images)))


def test_a_tilde_is_the_home_folder(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    facts.save_compressed(saved[0], "~/small")
    assert facts.load_compressed("~/small").plan == saved[0].plan
    Cache("~/cache").save("a", {})
    with replacing(Path("~/a")) as path:
        path.touch()
    assert {each.name for each in Path("home").iterdir()} == {"small", "cache", "a"} and not Path("~").exists()


def manifest_of(model, shape, folder):
    facts.save_compressed(compressed(model, shape), folder)
    return json.loads((folder / MANIFEST).read_text())


def test_the_manifest_says_where_weights_come_from(tmp_path):
    model, shape = from_recipe()
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    model = replace(model.recipe, weights=str(tmp_path / "mine.safetensors")).build()
    name, source = {"name": "vit_tiny_patch16_224"}, {"source": "mine.safetensors"}
    found = manifest_of(model, shape, tmp_path / "first")
    assert found["base_model"] == {**name, **source, "sha256": sha256(tmp_path / "mine.safetensors")}
    assert found["versions"].keys() == {"facts", "torch", "timm"}
    assert "weights" not in found["recipe"] and str(tmp_path) not in json.dumps(found)  # which is nobody's business
    facts.save_compressed(facts.load_compressed(tmp_path / "first"), tmp_path / "second")
    assert json.loads((tmp_path / "second" / MANIFEST).read_text())["base_model"] == found["base_model"]
    (tmp_path / "mine.safetensors").unlink()
    assert manifest_of(model, shape, tmp_path / "third")["base_model"] == {**name, **source}


@pytest.mark.parametrize("read", [True, False])
def test_the_manifest_says_whether_weights_are_the_published_ones(tmp_path, monkeypatch, read):
    """timm does not record it; the file shows it, where this machine has it."""
    (model, shape), published = from_timm(), tmp_path / "model.safetensors"
    save_file((model if read else from_timm()[0]).state_dict(), published)
    monkeypatch.setattr("facts.saving.recipes.fetched", lambda repository: published)
    base_model = manifest_of(model, shape, tmp_path / "saved")["base_model"]
    assert base_model["name"] == ("test_vit.r160_in1k" if read else "test_vit")
    assert base_model.get("repository") == ("timm/test_vit.r160_in1k" if read else None)
    assert base_model.get("sha256") == (sha256(published) if read else None)


def test_a_classifier_of_transformers_comes_back_from_its_folder_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_image_classifier("swin", attention_probs_dropout_prob=0.25)
    model.image_processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    loaded = reloaded(result := compressed(model, IMAGES.shape[1:]), tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".safetensors"}
    for each in (loaded.model, reloaded(loaded, tmp_path / "again").model):
        assert type(each) is type(result.model) and run(each, IMAGES).equal(run(result.model, IMAGES))
    settings = loaded.model.config.to_diff_dict()
    assert {**settings, **model.config.to_diff_dict()} == settings
    assert loaded.model.image_processor.to_dict() == model.image_processor.to_dict()


def test_classes_have_any_names_and_number(tmp_path):
    names = {0: "and/or", 1: "C:\\", 2: "__auto_map", **{index: f"https://{index}" for index in range(3, 21_841)}}
    model = make_image_classifier(id2label=names, label2id={name: index for index, name in names.items()})
    config = reloaded(compressed(model, IMAGES.shape[1:]), tmp_path).model.config
    assert config.id2label == names and config.label2id["and/or"] == 0


def dense():
    size = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 16, "patch_size": 4, "mlp_ratio": 2.0}
    return timm.create_model("vit_tiny_patch16_224", **size, num_classes=6)


@pytest.mark.parametrize("name", ["plain", "pivoted", "units", "elastic", "fitted", "encoder"])
def test_a_folder_loads_as_the_network_that_was_saved(name):
    """The encoder is built from its own configuration; two are cut, one of them with the means of fitted biases."""
    model, budget = None if name == "encoder" else dense(), {"ratio": 0.6} if name in ("elastic", "fitted") else {}
    loaded = facts.load_compressed(FOLDERS / name, model, **budget)
    assert loaded.plan == EXPECTED[f"{name}_plan"]
    summary = loaded.summary
    assert summary.after.params < summary.before.params and summary.spent["flops"] <= summary.budget["flops"]
    assert summary.search
    x = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    outputs, expected = whole_image(run(loaded.model, x)), torch.tensor(EXPECTED[name])
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())
