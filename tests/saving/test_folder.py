"""A saved network comes back bit by bit, from JSON and safetensors alone, with a card of what was measured; hubs."""

import copy
import json
import re
import shutil
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
import timm
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import facts
from facts.cli import app
from facts.compression.comparison import rounded
from facts.cost.count import Cost
from facts.models.weights import sha256
from facts.modules.heads import PaddedHeads
from facts.modules.networks import run, whole_image
from facts.result import Summary
from facts.saving.load import BoundedTensors
from facts.saving.manifest import LOADER, MANIFEST, WEIGHTS
from facts.saving.save import CARD
from facts.utils.cache import Cache
from facts.utils.files import replacing
from tests.disk import room_for
from tests.networks import image_batches, make_image_classifier, make_model
from tests.refusals import refuses
from tests.saving.edits import tensor
from tests.saving.setting import assert_same, compressed, from_recipe, from_timm, mini_mambavision, reloaded, swin

REFUSED = "names no architecture that can be built from JSON; pass the dense network"
NAME, ADDRESS = "somebody/small-vit", "https://hub.example"
METRICS = {"top1": {"original": 97.25, "compressed": 95.5}, "seen": {"compressed": 0.0}}
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


def card_of(result, folder, metrics=None):
    facts.save_compressed(result, folder, metrics)
    _, head, body = (folder / CARD).read_text().split("---\n", 2)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    return yaml.safe_load(head), body, {name: cells for name, *cells in lines}


def test_costs_metrics_and_origin(result, tmp_path, monkeypatch):
    published = replace(result.model.recipe, tag="vit_tiny_patch16_224.augreg_in21k", weights="pretrained")
    monkeypatch.setattr(result.model, "recipe", published)
    timed = result.with_summary(latency={"dense": 0.004, "measured": 0.002, "samples": 8})
    head, body, rows = card_of(timed, tmp_path, METRICS)
    repository = "timm/vit_tiny_patch16_224.augreg_in21k"
    assert head == {"library_name": "facts", "base_model": repository, "tags": ["facts", "compression"]}
    assert f"- licence: the original's, see https://huggingface.co/{repository}" in body
    summary = result.summary
    assert rows["FLOPs (G)"] == [f"{each.flops / 1e9:.4g}" for each in (summary.before, summary.after)]
    assert rows["parameters (M)"] == [f"{each.params / 1e6:.4g}" for each in (summary.before, summary.after)]
    assert rows["file (MB)"] == ["", f"{(tmp_path / 'model.safetensors').stat().st_size / 1e6:.4g}"]
    names = ("latency of a batch of 8 (ms)", "top1", "seen")
    assert [rows[name] for name in names] == [["4", "2"], ["97.25", "95.5"], ["", "0"]]
    assert f"- method: {summary.estimator}, {summary.search}" in body
    assert ("pivoted" in body) == (summary.form == "pivoted")
    assert f"facts {facts.__version__}, torch " in body and "- budget: 0.5 of the flops of the compressed parts" in body


def test_unknown_values_are_left_out(result, tmp_path):
    head, body, rows = card_of(replace(result, summary=Summary(Cost(None, 10), Cost(None, 5))), tmp_path)
    assert "base_model" not in head and "None" not in body and "nan" not in body and "licence" not in body
    assert [name for name in rows if name.strip("-:")] == ["parameters (M)", "file (MB)"]


@pytest.mark.parametrize("has_recipe", [True, False])
def test_the_code_that_loads_it(has_recipe, result, tmp_path, monkeypatch):
    names, inputs = {"dense": nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 20))}, torch.randn(2, 3, 32, 32)
    if not has_recipe:
        result, inputs = facts.compress(names["dense"], estimator="pela", layers=["1"]), torch.randn(2, 12)
    _, body, _ = card_of(result, tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", body, re.DOTALL)[1], names)
    assert names["network"](inputs).equal(result.model(inputs))


def test_an_edited_card_is_kept_and_others_are_renewed(result, tmp_path):
    card_of(result, tmp_path)
    assert "97.25" in card_of(result, tmp_path, METRICS)[1]
    mine = (tmp_path / CARD).read_bytes().replace(b"0.5", b"0.6")
    (tmp_path / CARD).write_bytes(mine)
    facts.save_compressed(result, tmp_path)
    assert (tmp_path / CARD).read_bytes() == mine


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


class FakeHub:
    """Stands for huggingface_hub: a folder for each branch of a repository, and a cache of what was fetched."""

    def __init__(self, folder):
        self.folder, self.cache, self.private, self.answers = folder / "hub", folder / "cache", set(), True

    def create_repo(self, name, *, private, exist_ok):
        (self.folder / name / "main").mkdir(parents=True, exist_ok=exist_ok)
        self.private |= {name} if private else set()
        return f"{ADDRESS}/{name}"

    def hf_hub_download(self, name, file, *, local_dir):
        if not (source := self.folder / name / "main" / file).exists():
            raise RemoteEntryNotFoundError("404", response=Mock())
        shutil.copy(source, local_dir)

    def upload_folder(self, *, repo_id, folder_path, delete_patterns):
        branch = self.folder / repo_id / "main"
        for path in branch.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in delete_patterns):
                path.unlink()
        shutil.copytree(folder_path, branch, dirs_exist_ok=True)

    def snapshot_download(self, name, *, revision, token, allow_patterns, local_files_only):
        source, target = (place / name / (revision or "main") for place in (self.folder, self.cache))
        if local_files_only and not target.exists():
            raise LocalEntryNotFoundError("no snapshot")
        if not local_files_only:
            if not source.exists():
                raise RepositoryNotFoundError("404", response=Mock(status_code=404))
            target.mkdir(parents=True)
            for file in filter_repo_objects([path.name for path in source.iterdir()], allow_patterns=allow_patterns):
                shutil.copy(source / file, target)
        return str(target)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that is empty, for a user who has fetched nothing yet."""
    hub = FakeHub(tmp_path)
    monkeypatch.setattr("facts.saving.save.HfApi", lambda token: hub)
    monkeypatch.setattr("facts.saving.save.answers", lambda: hub.answers)
    monkeypatch.setattr("facts.saving.load.offline", lambda: not hub.answers)
    monkeypatch.setattr("facts.saving.load.snapshot_download", hub.snapshot_download)
    return hub


def test_a_network_comes_back_and_without_the_hub_from_the_cache(hub, result):
    assert facts.push_to_hub(result, NAME) == f"{ADDRESS}/{NAME}"
    repository = hub.folder / NAME
    assert f'facts.load_compressed("{NAME}")' in (repository / "main" / "README.md").read_text()
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))
    (repository / "main").rename(repository / "half")
    assert_same(facts.load_compressed(NAME, revision="half"), result, (3, 32, 32))
    hub.answers = False
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))


def test_units_with_the_code_that_loads_them(hub, units, result):
    facts.push_to_hub(units, NAME)
    branch = hub.folder / NAME / "main"
    assert (branch / LOADER).exists()
    assert_same(facts.load_compressed(NAME), units, (3, 32, 32))
    (branch / "README.md").write_bytes(mine := (branch / "README.md").read_bytes().replace(b"0.5", b"0.6"))
    facts.push_to_hub(result, NAME)
    assert not (branch / LOADER).exists() and (branch / "README.md").read_bytes() == mine  # an edited card is kept


def test_the_command_pushes_a_folder_with_its_metrics(hub, result, tmp_path):
    facts.save_compressed(result, tmp_path / "vit", {"top1": {"compressed": 70.3}})
    command = CliRunner().invoke(app, ["push", str(tmp_path / "vit"), NAME, "--private"])
    assert command.stdout == f"pushed to {ADDRESS}/{NAME}\n"
    assert hub.private == {NAME} and "70.3" in (hub.folder / NAME / "main" / "README.md").read_text()
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))


@pytest.mark.attack
def test_only_data_is_fetched_and_it_is_validated(hub, result):
    facts.push_to_hub(result, NAME)
    shutil.copytree(hub.folder / NAME, hub.folder / "a/b")
    for name in ("evil.py", "pytorch_model.bin", "other.safetensors"):
        (hub.folder / NAME / "main" / name).write_bytes(b"1")
    facts.load_compressed(NAME)
    assert {path.name for path in (hub.cache / NAME / "main").iterdir()} == {"README.md", MANIFEST, WEIGHTS}
    (hub.folder / "a/b/main" / WEIGHTS).write_bytes(b"\x80\x04N.")
    refuses(r"model\.safetensors is not a whole safetensors file", facts.load_compressed, "a/b")


def test_what_the_hub_or_its_absence_refuses(hub, result):
    with pytest.raises(FileNotFoundError, match=r"a/b is not a folder, .*could be read: .* 404; there is no a/b"):
        facts.load_compressed("a/b")
    for name in ("small-vit", "a/b/c", "../up", "/a/b"):
        refuses("is not a repository: name it as OWNER/NAME", facts.push_to_hub, result, name)
    hub.answers = False
    with pytest.raises(ConnectionError, match="does not answer, so nothing was pushed: try again"):
        facts.push_to_hub(result, NAME)
    with pytest.raises(FileNotFoundError, match=r"a/b is not a folder, and no repository could be read: .* snapshot"):
        facts.load_compressed("a/b")
