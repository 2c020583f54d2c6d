"""Folders made by hand to do harm, and damaged ones: each is refused, with the reason, before it is built.

To add an attack, add a line to `ATTACKS`; to `BOMBS` if it aims at time or memory.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import facts
from facts.models import CausalLM, OpenMMLabModel
from facts.models.weights import sha256
from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest
from tests.refusals import refuses
from tests.saving import edits
from tests.saving.setting import assert_same, compressed, from_recipe, swin

pytestmark = pytest.mark.attack

LAYER, LONG = "blocks.0.mlp.fc1", 10**6
DIGITS = b': {"x": ' + b"9" * LONG + b","
DAMAGED, UNFIT = r"compression\.json is damaged \(", "does not fit this VisionTransformer: .*"
REFUSED = r"compression\.json is refused: "
REFERENCE = "would read other files or run code"
OUTSIDE, NOT_WHOLE = "outside of the folder: put the file itself there", "is not a whole safetensors file"
MISSING = "holds no compression|is missing|Is a directory|No such file"


def each(name, make, values, message):
    """Attacks of one kind, each with a value."""
    return {f"{name} {str(value)[:30]!r}": (make(value), message) for value in values}


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("it_ran",)


SETTINGS = (b"auto_map", b"custom_generate", b"vocab_file", b"cache_dir", b"init_inputs", b"fast_tokenizer_files")
NO_CONTENT, NO_OBJECTS = "is not a regular file", (b"{", b"[]", b"[" * 10**5)
FILES = {
    "a pickle": (edits.write(WEIGHTS, pickle.dumps(Harmful())), NOT_WHOLE),
    **each("setting", lambda name: edits.write("tokenizer_config.json", b'{"%s": 1}' % name), SETTINGS, REFERENCE),
    **each("settings", partial(edits.write, "generation_config.json"), NO_OBJECTS, "is not (JSON|a JSON object)"),
    **each("link", partial(edits.link, MANIFEST), ("/etc/passwd", "/dev/zero", "../secret", ".."), OUTSIDE),
    **each("link of", lambda name: edits.link(name, "../secret"), (WEIGHTS, "notes.txt"), OUTSIDE),
    **each("link to", lambda name: edits.link("a.txt", name), ("a.txt", "gone"), NO_CONTENT),
    **each("pipe", lambda name: edits.replaced(name, os.mkfifo), (MANIFEST, WEIGHTS, "a.txt"), NO_CONTENT),
    **each("folder", lambda name: edits.replaced(name, os.mkdir), (MANIFEST, WEIGHTS, "config.json"), MISSING),
    **each("no", lambda name: edits.replaced(name, lambda _: None), (MANIFEST, WEIGHTS), MISSING),
}
TEXTS = (b"", b"[]", b"1", b"null", bytes(range(256)), b'{"recipe": ' + b"[" * 10**5, b"// mine\n{}")
FIELDS = ("recipe", "plan", "fingerprint", "versions", "summary", "skipped", "base_model", "metrics")
WRONG = (
    *(("plan", []), ("recipe", "timm"), ("fingerprint", "0"), ("versions", {"facts": "newest"}), ("summary", {})),
    *(("skipped", ["head"]), ("base_model", {"name": 3}), ("metrics", {"top1": 70.3}), ("layouts", {"a": "b"})),
    *(("metrics", {"top1": {"original": float("inf")}}), ("buffers", {"mask": "I8"})),
    ("described", {"a": {"tokens": 1, "protected": 1, "size": 2**63, "entry": "", "num_directions": 1}}),
)
MANIFESTS = {
    **each("text", partial(edits.write, MANIFEST), TEXTS, DAMAGED),
    **each("without", edits.drop, FIELDS, rf"{DAMAGED}({'|'.join(FIELDS)}): Field required"),
    **each("wrong", lambda wrong: edits.put(wrong[1], wrong[0]), WRONG, rf"{DAMAGED}({'|'.join(dict(WRONG))})"),
    "newer": (edits.put({"facts": "999.0"}, "versions"), r"by facts 999\.0, but this is .*: pip install -U facts"),
    "no recipe": (edits.put(None, "recipe"), "no architecture that can be built from JSON; pass the dense network"),
    "other weights": (edits.put("0" * 64, "fingerprint"), r"is not the file that compression\.json describes"),
}
TAGS = ("hf-hub:somebody/model", "local-dir:/etc", "../vit", "")
LOADED = ("pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")
NAMES = ("img_size", "embed_dim", "depth", "num_heads", "num_classes")
SIZES = [*product(NAMES, (-1, 10**30)), *product(NAMES[1:2], (0.5, "x", 10**8, [[]], {"a": 1}))]
OPENMMLAB = (
    *({"backbone.type": "os.system"}, {"neck": [{"norm.type": ["GN"]}]}, {"neck.init_cfg.checkpoint": "evil"}),
    *({"backbone._delete_": True}, {"pretrained": "evil"}),
)
TRANSFORMERS = (
    *({"auto_map": {"AutoConfig": "a.B"}}, {"text_config": [{"auto_map": {}}]}, {"quantization_config": {"a": "awq"}}),
    *({"attribute_map": {"a": "_attn_implementation"}}, {"_attn_implementation": ["sdpa"]}, {"__dict__": {"a": 1}}),
    {"attn_implementation": "somebody/kernel"},
)
TORCHVISION = ({"arguments": {"pretrained": True}}, {"tag": "fasterrcnn_resnet50_fpn"})
PATHS = ("/a.py", "../a.py", "..\\a.py", "a.json")
RECIPES = {
    **each("kind", lambda it: edits.put(it, "recipe", "kind"), ("keras", ["a"]), "this version cannot build; pass the"),
    "code": (edits.put("print()", "recipe", "code"), f"{REFUSED}.*unexpected keyword argument"),
    **each("source", lambda it: edits.put(it, "recipe", "weights"), ("pretrained", "a.pth"), f"{REFUSED}.*'random'"),
    **each("tag", lambda tag: edits.put(tag, "recipe", "tag"), TAGS, "is not one of timm's tags, but a repository or"),
    "no tag": (edits.put("no_such_network", "recipe", "tag"), "cannot be built as it was saved"),
    **each("loaded", lambda name: edits.argument(name, {"source": "hub"}), LOADED, "would have timm load something"),
    **each("torchvision", edits.torchvision, TORCHVISION, f"{REFUSED}torchvision's .* or would load something"),
    **each("address", lambda name: edits.argument("act_layer", name), ("https://a.b", ["/etc"]), "may not name a file"),
    **each("size", lambda size: edits.argument(*size), SIZES, f"{REFUSED}|cannot be built|{UNFIT}"),
    **each("config", lambda name: edits.openmmlab(config=name), PATHS, "is not a file name among the library's"),
    **each("option", lambda it: edits.openmmlab(arguments=it), OPENMMLAB, "set (type|init_cfg|_delete_|pretrained) to"),
    "classifier": (edits.openmmlab(classifier={"tag": "a", "weights": "a.pth"}), "names a classifier to be loaded"),
    **each("configuration", edits.transformers, TRANSFORMERS, f"{REFUSED}.*(sets .* to|may not name a file)"),
    "by tag": (edits.put({"kind": "transformers", "tag": "a/b"}, "recipe"), f"{REFUSED}.*has no configuration"),
}
RANKS = (0, -1, 3.0, True, "3", [3], float("nan"))
NO_LAYER = "the plan does not fit .* is (missing|.*, not a linear layer)"
LAYERS = ("gone", "blocks.0.norm1", "patch_embed.proj", "patch_embed.proj.linear", "", "__class__")
PLANS = {
    **each("rank", lambda rank: edits.put(rank, "plan", LAYER), RANKS, rf"{DAMAGED}plan\.blocks\.0\.mlp\.fc1"),
    **each("large", lambda rank: edits.put(rank, "plan", LAYER), (49, 10**30), "has ranks up to 48, not"),
    **each("layer", partial(edits.put, 3, "plan"), LAYERS, NO_LAYER),
    **each("other", lambda rank: edits.put(rank, "plan", LAYER), (3, None), UNFIT),
    "another layout": (edits.put("diagonal", "layouts", LAYER), DAMAGED + "layouts"),
    "no layout": (edits.drop("layouts", LAYER), UNFIT),
}
WHOLE = ((b"{}", 2**63), (b"{}", 10**3), (b"[]", 2), (b"[" * 10**5, 10**5), (b"{}", 2))
DTYPES = [{"dtype": value} for value in ("O", None, 32, "F64")]
SHAPES = [{"shape": value} for value in ([-1], [2**64], [2**32, 2**32], [0], [5.5, 48], "x", None)]
OFFSETS = [{"data_offsets": value} for value in ([0, 2**62], [-4, 0], [4, 0], [], None, [1, 961])]
HEADERS = {
    **each("header", lambda given: edits.raw_header(*given), WHOLE, f"{NOT_WHOLE}|{UNFIT}|has more than 0 parameters"),
    **each("weights", lambda data: edits.weights(lambda _: data), (b"", b"\1", bytes(100)), NOT_WHOLE),
    "weights cut short": (edits.changed(WEIGHTS, lambda data: data[:-100]), NOT_WHOLE),
    "a bit": (edits.changed(WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "different SHA-256"),
    **each("head", edits.described, DTYPES + SHAPES + OFFSETS, NOT_WHOLE),
    "shape": (edits.described({"shape": [48, 5]}), UNFIT + r"\(48, 5\)"),
    "renamed": (edits.header(lambda head: head.update(x=head.pop("head.weight"))), UNFIT + "head.weight is missing"),
    "NaN": (edits.tensor("head.bias", lambda bias: bias * torch.nan), r"head\.bias holds NaN or infinity"),
}
ATTACKS = FILES | MANIFESTS | RECIPES | PLANS | HEADERS

CONFIGURATION = "recipe", "configuration"
CLASSIFIER = {
    "image_size": (edits.put(10**9, *CONFIGURATION, "image_size"), "image_size is 1000000000, which no network has"),
    "hidden_act": (edits.put("somebody/kernel", *CONFIGURATION, "hidden_act"), "may not name a file or an address"),
    "model_type": (edits.put("timm_wrapper", *CONFIGURATION, "model_type"), r"timm network within transformers"),
    "id2label": (edits.put(dict.fromkeys(range(70_000), "a"), *CONFIGURATION, "id2label"), "too many for any network"),
}
UNITS = {
    f"{name} {rank}": (edits.put(rank, "plan", name), rf"'{name}' {fault}")
    for name, rank, fault in (
        ("blocks.0.attn.scores", 17, "has ranks up to 16, not 17"),
        ("blocks.0.attn.outputs", 17, "has ranks up to 16, not 17"),
        ("blocks.0.mlp", 193, "has ranks up to 192, not 193"),
        ("blocks.2.attn.scores", 1, "is missing"),
        ("blocks.0.mlp.scores", 1, "is missing"),
        ("blocks.0.attn", 1, "is missing, or no part to compress"),
    )
} | {"other widths": (edits.put(3, "plan", "blocks.0.mlp"), "tensors differ")}
FOLDERS = {"vit": ATTACKS, "classifier": CLASSIFIER, "units": UNITS}


@pytest.mark.parametrize(("original", "attack"), [(name, each) for name, own in FOLDERS.items() for each in own])
def test_a_folder(original, attack, originals, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("facts.saving.load.convert", lambda *_: pytest.fail("it was built"))
    for recipe in (CausalLM, OpenMMLabModel):
        monkeypatch.setattr(recipe, "architecture", lambda self: pytest.fail("it was built"))
    (tmp_path / "secret").write_text("mine")
    change, message = FOLDERS[original][attack]
    folder = shutil.copytree(originals[original], tmp_path / "saved")
    change(folder)
    refuses(message, facts.load_compressed, folder, raised=(ValueError, OSError))
    assert not (tmp_path / "it_ran").exists()


def test_pivots_that_are_no_permutation(tmp_path):
    model, shape = from_recipe()
    facts.save_compressed(result := compressed(model.bfloat16(), shape, form="pivoted"), tmp_path)
    name = next(name for name in result.model.state_dict() if name.endswith(".order"))
    edits.tensor(name, torch.zeros_like)(tmp_path)
    refuses(r"order is not a permutation; save or fetch the network again", facts.load_compressed, tmp_path)


def test_files_that_are_no_harm(originals, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(originals["vit"], tmp_path / "saved")
    for name in ("LICENSE", "a.py", ".git/index", "figures/ranks.png", f".{WEIGHTS}.x1y2z3"):
        edits.write(name)(folder)
    edits.write("pytorch_model.bin", pickle.dumps(Harmful()))(folder)
    edits.header(lambda head: head.update(__metadata__={"x": "x" * (0x10280 - len(json.dumps(head)) - 27)}))(folder)
    assert (folder / WEIGHTS).read_bytes()[:2] == b"\x80\2", "as a pickle begins"
    edits.link("notes.txt", "README.md")(folder)
    edits.link("link.md", folder / "README.md")(folder)
    assert facts.load_compressed(folder).plan
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("target", ["../../blobs/", "../../../", "../../blobs/../../"])
def test_links_of_a_cache_lead_to_its_blobs(target, originals, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0f"
    snapshot.mkdir(parents=True)
    shutil.copytree(originals["vit"], blobs)
    shutil.copytree(originals["vit"], tmp_path, dirs_exist_ok=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(target + file.name)
    if target == "../../blobs/":
        assert facts.load_compressed(snapshot).plan
    else:
        refuses(OUTSIDE, facts.load_compressed, snapshot)


BOMBS = {  # of the network each is made from, in a process that may take 4 GiB
    "vit": {
        "tokenizer of 1 TB": (edits.write("t.json", b""), edits.grown("t.json", 10**12)),
        "manifest of 1 TB": (edits.grown(MANIFEST, 10**12),),
        "a million digits": (edits.changed(MANIFEST, lambda text: text.replace(b": {", DIGITS, 1)),),
        "a million arguments": (edits.put(dict.fromkeys(range(LONG), 1), "recipe", "arguments"),),
        "wide": (edits.argument("embed_dim", 60_000),),
        "a header of 32 MiB": (edits.raw_header(b"{" + b" " * 2**25, 2**25),),
        "a million tensors": (edits.header(lambda head: head.update(dict.fromkeys(map(str, range(LONG)), "x" * 9))),),
        "weights of 10 TB": (edits.grown(WEIGHTS, 10**13),),
    },
    "swin": {"buffers": (edits.argument("img_size", 20_000),), "depths": (edits.argument("depths", [10**8, 1]),)},
}
LOAD = """
import re, resource, sys, time
from pathlib import Path
import facts

for folder in sys.argv[1:3]:  # whole ones, so that imports are not counted
    facts.load_compressed(folder)
held = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 2**10
resource.setrlimit(resource.RLIMIT_DATA, (held + 150 * 2**20,) * 2)
for folder in sys.argv[3:]:
    start = time.process_time()
    try:
        facts.load_compressed(folder)
    except (ValueError, OSError):
        print(folder, time.process_time() - start)
"""


@pytest.mark.system
def test_bombs_are_refused_within_a_second_and_150_mebibytes(originals, tmp_path):
    whole, folders = {"vit": originals["vit"], "swin": tmp_path / "swin"}, []
    facts.save_compressed(compressed(*swin()), whole["swin"])
    for network, name in ((network, name) for network, bombs in BOMBS.items() for name in bombs):
        folders.append(shutil.copytree(whole[network], tmp_path / name))
        for attack in BOMBS[network][name]:
            attack(folders[-1])
    command = [sys.executable, "-c", LOAD, *whole.values(), *folders]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
    assert len(lines) == len(folders)
    assert [line for line in lines if float(line.rsplit(" ", 1)[1]) >= 1] == []


@pytest.mark.parametrize("killed_at", [WEIGHTS, MANIFEST])
def test_a_save_killed_over_an_older_network(killed_at, tmp_path):
    """After each step but the last, the folder holds the older network or is refused."""
    model, shape = from_recipe()
    facts.save_compressed(compressed(model, shape), tmp_path / "saved")
    facts.save_compressed(compressed(model, shape, ratio=0.8), tmp_path / "newer")
    older = facts.load_compressed(tmp_path / "saved")
    (tmp_path / "saved" / f".{killed_at}.x1y2z3").write_bytes((tmp_path / "newer" / killed_at).read_bytes()[:100])
    if killed_at == WEIGHTS:
        assert facts.load_compressed(tmp_path / "saved").plan == older.plan
    else:
        shutil.copy(tmp_path / "newer" / WEIGHTS, tmp_path / "saved")
        refuses("does not fit", facts.load_compressed, tmp_path / "saved")


def test_of_two_saves_at_once_no_mix_is_loaded(tmp_path, monkeypatch):
    """Networks of one plan; the second save replaces the first's weights once they are written, or are being read."""
    first, second = (compressed(*from_recipe(), form="plain") for _ in range(2))
    recipe = facts.saving.save.recipe_of_result

    def meanwhile(result):
        if result is first:
            facts.save_compressed(second, tmp_path / "second")
            shutil.copy(tmp_path / "second" / WEIGHTS, tmp_path / "saved")
        return recipe(result)

    monkeypatch.setattr("facts.saving.save.recipe_of_result", meanwhile)
    facts.save_compressed(first, tmp_path / "saved")
    refuses(r"is not the file that compression\.json describes", facts.load_compressed, tmp_path / "saved")

    def replaced(path):
        digest = sha256(path)
        facts.save_compressed(second, tmp_path / "saved")
        return digest

    monkeypatch.undo()
    facts.save_compressed(first, tmp_path / "saved")
    monkeypatch.setattr("facts.saving.load.sha256", replaced)
    assert_same(facts.load_compressed(tmp_path / "saved"), first, (3, 32, 32))


def test_a_bit_of_the_manifest(originals, tmp_path):
    """It is noticed, or changes nothing that is read; files without a checksum are still read."""
    text = (originals["vit"] / MANIFEST).read_bytes()
    whole, num_noticed = Manifest.read(originals["vit"]), 0
    for place in range(0, len(text), 5):
        changed = bytearray(text)
        changed[place] ^= 1 << place % 8
        (tmp_path / MANIFEST).write_bytes(changed)
        try:
            assert replace(Manifest.read(tmp_path), checksum=None) == replace(whole, checksum=None)
        except ValueError:
            num_noticed += 1
    assert num_noticed > len(text) / 5 - 5
    (tmp_path / MANIFEST).write_bytes(text)
    edits.put("edited", "skipped", "head")(tmp_path)
    assert Manifest.read(tmp_path).skipped["head"] == "edited"


def places(content, place=()):
    """Every place of a nested value, branches before what they hold."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        yield (*place, name)
        yield from places(value, (*place, name))


NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 10**6, 10**12, 2**63, 0.5, -0.1, 1.5, 1e300])
WORDS = st.text(st.characters(exclude_characters="\n"), max_size=8)  # which errors repeat
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(WORDS, SCALARS, max_size=2)


@pytest.mark.system
@settings(max_examples=100)
@given(st.data())
def test_a_manifest_with_any_other_value_is_loaded_or_refused(originals, tmp_path_factory, data):
    folder = shutil.copytree(originals["vit"], tmp_path_factory.mktemp("changed") / "saved")
    manifest = json.loads((folder / MANIFEST).read_text())
    edits.put(data.draw(VALUES), *data.draw(st.sampled_from(list(places(manifest)))))(folder)
    try:
        facts.load_compressed(folder)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)
