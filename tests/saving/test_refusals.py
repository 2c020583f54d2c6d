"""Damaged folders, and folders made by hand to do harm: each is refused, with the reason, before it is built.

To add an attack, add a line to `ATTACKS`; to `BOMBS` if it aims at time or memory.
"""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from functools import reduce
from operator import getitem

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import facts
from facts.models import CausalLM, OpenMMLabModel
from facts.models.weights import sha256
from facts.saving.manifest import MANIFEST, WEIGHTS
from tests.networks import make_image_classifier
from tests.saving.setting import compressed, from_recipe, saved_swin, saved_vit

pytestmark = pytest.mark.attack

LAYER, LONG = "blocks.0.mlp.fc1", 10**6
DAMAGED, UNFIT = r"compression\.json is damaged \(", "does not fit this VisionTransformer: .*"
REFUSED, LOADING = r"compression\.json is refused: ", "would have timm load something"
NO_DATA, REFERENCE = "a saved network is JSON, safetensors, text and images", "would read other files or run code"
OUTSIDE, NOT_WHOLE = "outside of the folder: put the file itself there", "is no whole safetensors file"
MISSING = "holds no compression|is missing|Is a directory|No such file"


def put(value, *place, file=MANIFEST):
    """Set a value of a JSON file."""

    def attack(folder):
        content = json.loads((folder / file).read_text())
        reduce(getitem, place[:-1], content)[place[-1]] = value
        (folder / file).write_text(json.dumps(content))

    return attack


def drop(*place):
    def attack(folder):
        content = json.loads((folder / MANIFEST).read_text())
        del reduce(getitem, place[:-1], content)[place[-1]]
        (folder / MANIFEST).write_text(json.dumps(content))

    return attack


def argument(name, value):
    return put(value, "recipe", "arguments", name)


def configured(**fields):
    return put({"kind": "transformers", "configuration": {"model_type": "llama", **fields}}, "recipe")


def openmmlab(**fields):
    return put({"kind": "openmmlab", "toolbox": "mmdet", "config": "swin/a.py", **fields}, "recipe")


def write(name, content=b"harmless"):
    def attack(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return attack


def changed(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def replaced(name, make):
    """Put a link, a pipe, a folder or nothing in the place of a file."""

    def attack(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return attack


def link(name, target):
    return replaced(name, lambda path: path.symlink_to(target))


def grown(name, size):
    """Make a sparse file, which takes no room on the disk."""

    def attack(folder):
        with (folder / name).open("ab") as file:
            file.truncate(size)

    return attack


def weights(change):
    """Change the file of the weights, and have the manifest describe it."""

    def attack(folder):
        changed(WEIGHTS, change)(folder)
        put(sha256(folder / WEIGHTS), "fingerprint")(folder)

    return attack


def header(change):
    def changed_header(data):
        size = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + size])
        change(content)
        text = json.dumps(content).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return weights(changed_header)


def raw_header(text, size=None):
    return weights(lambda _: struct.pack("<Q", len(text) if size is None else size) + text)


def tensor(name, change):
    def attack(folder):
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, name: change(tensors[name])}, folder / WEIGHTS)
        put(sha256(folder / WEIGHTS), "fingerprint")(folder)

    return attack


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("it_ran",)


FILES = {
    **{f"pickle {name}": (write(name, pickle.dumps(Harmful())), NO_DATA) for name in ("a.txt", "d/e.png", WEIGHTS)},
    **{f"pickle {number}": (write("a.txt", pickle.dumps(Harmful(), number)), NO_DATA) for number in range(2, 6)},
    **{
        f"file {name}": (write(name), "has an unknown file type")
        for name in ("a.py", "b.so", "c.PTH", "d.bin", "e", "f/g.py", "h.zip", ".env", ".json", ".a.py.d", "i.py ")
    },
    "archive": (write("a.onnx", b"PK\x03\x04" + bytes(99)), "is a pickle, an archive or a program"),
    "program": (write("tokenizer.json", b"\x7fELF" + bytes(99)), "is a pickle, an archive or a program"),
    **{
        f"setting {name}": (write("tokenizer_config.json", json.dumps({name: "x"}).encode()), f"{name}, .*{REFERENCE}")
        for name in ("auto_map", "custom_generate", "vocab_file", "cache_dir", "init_inputs", "fast_tokenizer_files")
    },
    "settings without an end": (write("config.json", b"{"), "is no JSON"),
    "settings of a list": (write("special_tokens_map.json", b"[]"), "is no JSON object"),
    "deep settings": (write("generation_config.json", b"[" * 10**5), "is no JSON"),
    **{
        f"link {name} to {target}": (link(name, target), OUTSIDE)
        for name in (MANIFEST, WEIGHTS, "notes.txt")
        for target in ("/etc/passwd", "/dev/zero", "../secret", "..")
    },
    "link to itself": (link("notes.txt", "notes.txt"), "is no file with content"),
    "link into nothing": (link("notes.txt", "gone"), "is no file with content"),
    **{f"pipe {name}": (replaced(name, os.mkfifo), "is no file") for name in (MANIFEST, WEIGHTS, "a.txt")},
    **{f"folder {name}": (replaced(name, os.mkdir), MISSING) for name in (MANIFEST, WEIGHTS, "config.json")},
    **{f"no {name}": (replaced(name, lambda _: None), MISSING) for name in (MANIFEST, WEIGHTS)},
}
MANIFESTS = {
    **{
        f"manifest {content[:9]!r}": (write(MANIFEST, content), DAMAGED)
        for content in (b"", b"[]", b"1", b"null", bytes(range(256)), b'{"recipe": ' + b"[" * 10**5, b"// mine\n{}")
    },
    "manifest cut short": (changed(MANIFEST, lambda text: text[:-40]), DAMAGED),
    "manifest twice": (changed(MANIFEST, lambda text: text + text), DAMAGED),
    **{
        f"without {name}": (drop(name), rf"{DAMAGED}{name}: Field required")
        for name in ("recipe", "plan", "fingerprint", "versions", "summary", "skipped", "base_model", "metrics")
    },
    **{
        f"{name} = {value!r}": (put(value, name), DAMAGED + name)
        for name, value in (
            *(("plan", []), ("recipe", "timm"), ("fingerprint", "0"), ("versions", {"facts": "newest"})),
            *(("summary", {}), ("skipped", ["head"]), ("base_model", {"name": 3}), ("metrics", {"top1": 70.3})),
            *(("metrics", {"top1": {"original": float("inf")}}), ("buffers", {"mask": "I8"}), ("layouts", {"a": "b"})),
        )
    },
    "newer": (
        put({"facts": "999.0"}, "versions"),
        r"was written by facts 999\.0, and this is .*: pip install -U facts",
    ),
    "no recipe": (put(None, "recipe"), "names no architecture that can be built from JSON; pass the dense network"),
    "other weights": (put("0" * 64, "fingerprint"), r"is not the file that compression\.json describes"),
}
RECIPES = {
    "kind": (put("keras", "recipe", "kind"), "is of 'keras', which this version cannot build; pass the dense"),
    "kinds": (put(["timm"], "recipe", "kind"), r"is of \['timm'\]"),
    "code": (put("print()", "recipe", "code"), f"{REFUSED}.*Unexpected keyword argument"),
    **{f"weights {name}": (put(name, "recipe", "weights"), f"{REFUSED}.*'random'") for name in ("pretrained", "a.pth")},
    **{
        f"tag {tag}": (put(tag, "recipe", "tag"), "is no tag of timm's own, but a repository or a folder")
        for tag in ("hf-hub:somebody/model", "local-dir:/etc", "../vit", "")
    },
    "unknown tag": (put("no_such_network", "recipe", "tag"), "cannot be built as it was saved"),
    "unknown argument": (argument("colour", "red"), r"vit_tiny_patch16_224 cannot be built as it was saved: .*colour"),
    "pretrained": (argument("pretrained", True), LOADING),
    "checkpoint_path": (argument("checkpoint_path", "evil"), LOADING),
    "pretrained_cfg": (argument("pretrained_cfg", {"file": "evil"}), LOADING),
    "overlay": (argument("pretrained_cfg_overlay", {"source": "hub"}), LOADING),
    "address": (argument("act_layer", "https://example.com"), "is 'https://example.com', and may name no file"),
    "deep path": (argument("depths", [1, ["/etc/passwd"]]), "arguments.depths is '/etc/passwd', and may name no file"),
    **{
        f"{name} = {str(value)[:9]}": (argument(name, value), f"{REFUSED}|cannot be built|{UNFIT}")
        for name in ("img_size", "embed_dim", "depth", "num_heads", "num_classes")
        for value in (-1, 0.5, "x", 10**8, 10**30, [[]], {"a": 1})
    },
    **{
        f"config {name}": (openmmlab(config=name), "is no name of a file among the library's configurations")
        for name in ("/elsewhere/evil.py", "../../evil.py", "..\\evil.py", "swin/evil.json")
    },
    "type": (openmmlab(arguments={"backbone.type": "os.system"}), "arguments set type to 'os.system'"),
    "deep type": (openmmlab(arguments={"neck": [{"norm.type": ["GN"]}]}), r"arguments set type to \['GN'\]"),
    "init_cfg": (openmmlab(arguments={"neck.init_cfg.checkpoint": "evil"}), "arguments set init_cfg to 'evil'"),
    "delete": (openmmlab(arguments={"backbone._delete_": True}), "arguments set _delete_ to True"),
    "classifier": (openmmlab(classifier={"tag": "vit", "weights": "evil.pth"}), "names a classifier to be loaded"),
    "by tag": (put({"kind": "transformers", "tag": "a/b"}, "recipe"), f"{REFUSED}.*has no configuration"),
    **{
        f"configuration {name}": (configured(**{name: value}), f"{REFUSED}.*(sets .* to|may name no file)")
        for name, value in {
            "auto_map": {"AutoConfig": "a.B"},
            "text_config": [{"auto_map": {}}],
            "quantization_config": {"quant_method": "awq"},
            "attribute_map": {"a": "_attn_implementation"},
            "_attn_implementation": ["sdpa"],
            "attn_implementation": "somebody/kernel",
            "__dict__": {"a": 1},
        }.items()
    },
}
PLANS = {
    **{
        f"rank {rank!r}": (put(rank, "plan", LAYER), rf"{DAMAGED}plan\.blocks\.0\.mlp\.fc1")
        for rank in (0, -1, 3.0, True, "3", [3], float("nan"))
    },
    **{f"rank {rank}": (put(rank, "plan", LAYER), f"192 x 48, and its rank {rank}") for rank in (49, 10**6, 10**30)},
    **{
        f"layer {name!r}": (put(rank, "plan", name), rf"the plan does not fit .*: '{name}' is {kind}, and no linear")
        for name, kind, rank in (
            *(("gone", "not there", 3), ("blocks.0.norm1", "LayerNorm", None), ("patch_embed.proj", "Conv2d", 3)),
            *(("patch_embed.proj.linear", "not there", 3), ("", "VisionTransformer", 3), ("__class__", "not there", 3)),
        )
    },
    "another rank than the weights'": (put(3, "plan", LAYER), UNFIT),
    "dense where the weights are not": (put(None, "plan", LAYER), UNFIT),
    "nothing to compress": (put({}, "plan"), UNFIT),
    "another layout": (put("diagonal", "layouts", LAYER), DAMAGED + "layouts"),
    "no layout": (drop("layouts", LAYER), UNFIT),
}
HEADERS = {
    **{
        f"header {text[:9]!r}, {size}": (raw_header(text, size), f"{NOT_WHOLE}|{UNFIT}|has more than 0 parameters")
        for text, size in ((b"{}", 2**63), (b"{}", 10**3), (b"[]", None), (b"[" * 10**5, None), (b"{}", None))
    },
    "no size": (weights(lambda _: b"\1"), NOT_WHOLE),
    "zeros": (weights(lambda _: bytes(1000)), NOT_WHOLE),
    "cut short": (changed(WEIGHTS, lambda data: data[:-100]), NOT_WHOLE),
    "bytes behind": (weights(lambda data: data + bytes(16)), NOT_WHOLE),
    "a bit": (changed(WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "other SHA-256"),
    **{
        f"{field} {value!r}": (header(lambda head, f=field, v=value: head["head.weight"].update({f: v})), NOT_WHOLE)
        for field, values in {
            "dtype": ("O", None, 32, "F64"),
            "shape": ([-1], [2**64], [2**32, 2**32], [0], [5.5, 48], "x", None),
            "data_offsets": ([0, 2**62], [-4, 0], [4, 0], [], None, [1, 961]),
        }.items()
        for value in values
    },
    "shape [48, 5]": (header(lambda head: head["head.weight"].update(shape=[48, 5])), UNFIT + r"\(48, 5\)"),
    "renamed": (header(lambda head: head.update({"x": head.pop("head.weight")})), UNFIT + "head.weight is missing"),
    "integers": (tensor("head.bias", torch.Tensor.long), r"head\.bias: torch\.int64 instead of torch\.float32"),
    "NaN": (tensor("head.bias", lambda bias: bias * torch.nan), r"head\.bias holds NaN or infinity"),
}
ATTACKS = FILES | MANIFESTS | RECIPES | PLANS | HEADERS

QKV = "blocks.0.attn.qkv"
STORED, SCALES = f"{QKV}.parametrizations.weight.original", f"{QKV}.parametrizations.weight.0.scales"
QUANTIZED = {
    **{
        f"{name} = {value!r}": (put(value, "quantization", name), rf"{DAMAGED}quantization\.{name}")
        for name, values in {"weights": ("int2", 8), "group_size": (1, 32.0, True), "tensors": (QKV, [3])}.items()
        for value in values
    },
    **{
        f"tensor {name!r}": (put([name], "quantization", "tensors"), f"'{name}' is no weight of a linear layer, or is")
        for name in (f"{QKV}.bias", QKV, "blocks.0.norm1.weight", "pos_embed", f"{QKV}.__class__", "")
    },
    "a tensor twice": (put([f"{QKV}.weight"] * 2, "quantization", "tensors"), "or is named twice"),
    "another type": (put("int8", "quantization", "weights"), UNFIT),
    "another group": (put(31, "quantization", "group_size"), UNFIT),
    "a group beyond any row": (put(10**30, "quantization", "group_size"), UNFIT),
    "no quantization": (put(None, "quantization"), r"parametrizations\.weight.* is unexpected"),
    "signed": (tensor(STORED, torch.Tensor.char), r"original: torch\.int8 instead of torch\.uint8"),
    "floats": (tensor(STORED, torch.Tensor.float), r"original: torch\.float32 instead of torch\.uint8"),
    "whole scales": (tensor(SCALES, torch.Tensor.int), r"scales: torch\.int32 instead of torch\.float32"),
    "one scale": (tensor(SCALES, lambda scales: scales[:1].clone()), r"scales: \(1, 2\) instead of \(144, 2\)"),
    "large scales": (tensor(SCALES, lambda scales: scales.fill_(3e38)), f"{QKV}.weight holds NaN or infinity"),
}
CONFIGURATION = "recipe", "configuration"
CLASSIFIER = {
    "auto_map": (put({"AutoModel": "a.B"}, *CONFIGURATION, "auto_map"), "sets auto_map to"),
    "image_size": (put(10**9, *CONFIGURATION, "image_size"), "image_size is 1000000000, which no network has"),
    "hidden_act": (put("somebody/kernel", *CONFIGURATION, "hidden_act"), "may name no file and no address"),
    "model_type": (put("timm_wrapper", *CONFIGURATION, "model_type"), r"timm within transformers \(timm_wrapper\)"),
    "id2label": (put(dict.fromkeys(range(70_000), "a"), *CONFIGURATION, "id2label"), "too many for any network"),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    place = tmp_path_factory.mktemp("originals")
    facts.save_compressed(facts.quantize(from_recipe()[0], "int4"), place / "quantized")
    classifier = facts.compress(make_image_classifier(), estimator="pela", input_shape=(3, 32, 32))
    facts.save_compressed(classifier, place / "classifier")
    return {"vit": saved_vit(place / "vit"), "quantized": place / "quantized", "classifier": place / "classifier"}


def refused(original, tmp_path, attack, message):
    (tmp_path / "secret").write_text("mine")
    folder = shutil.copytree(original, tmp_path / "saved")
    attack(folder)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        facts.load_compressed(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_folder(attack, originals, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if attack != "NaN":  # which is seen once the weights are read
        monkeypatch.setattr("facts.saving.load.load_model", lambda *_: pytest.fail("it was built"))
    for recipe in (CausalLM, OpenMMLabModel):
        monkeypatch.setattr(recipe, "architecture", lambda self: pytest.fail("it was built"))
    refused(originals["vit"], tmp_path, *ATTACKS[attack])
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("attack", QUANTIZED)
def test_a_quantized_network(attack, originals, tmp_path):
    refused(originals["quantized"], tmp_path, *QUANTIZED[attack])


@pytest.mark.parametrize("attack", CLASSIFIER)
def test_a_network_of_transformers(attack, originals, tmp_path):
    refused(originals["classifier"], tmp_path, *CLASSIFIER[attack])


def test_pivots_that_are_no_permutation(tmp_path):
    model, shape = from_recipe()
    result = compressed(model.bfloat16(), shape, form="pivoted")
    layer = next(module for module in result.model.modules() if getattr(module, "order", None) is not None)
    layer.order[0] = layer.order[1]
    facts.save_compressed(result, tmp_path)
    with pytest.raises(ValueError, match=r"order is no permutation; save or fetch the network again"):
        facts.load_compressed(tmp_path)


def test_files_that_are_no_harm(originals, tmp_path):
    folder = shutil.copytree(originals["vit"], tmp_path / "saved")
    for name in ("LICENSE", ".gitattributes", ".git/index", "figures/ranks.png", f".{WEIGHTS}.x1y2z3"):
        write(name)(folder)
    link("notes.txt", "README.md")(folder)
    link("link.md", folder / "README.md")(folder)
    assert facts.load_compressed(folder).plan


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
        with pytest.raises(ValueError, match=OUTSIDE):
            facts.load_compressed(snapshot)


@pytest.mark.parametrize("killed_at", [WEIGHTS, MANIFEST])
def test_a_save_killed_over_an_older_network(killed_at, tmp_path):
    """After each step but the last, the folder holds the older network or is refused."""
    model, shape = from_recipe()
    facts.save_compressed(compressed(model, shape), tmp_path / "saved")
    facts.save_compressed(compressed(model, shape, ratio=0.8), tmp_path / "newer")
    older = facts.load_compressed(tmp_path / "saved")
    if killed_at == MANIFEST:
        shutil.copy(tmp_path / "newer" / WEIGHTS, tmp_path / "saved")
    (tmp_path / "saved" / f".{killed_at}.x1y2z3").write_bytes((tmp_path / "newer" / killed_at).read_bytes()[:100])
    if killed_at == WEIGHTS:
        assert facts.load_compressed(tmp_path / "saved").plan == older.plan
    else:
        with pytest.raises(ValueError, match="does not fit"):
            facts.load_compressed(tmp_path / "saved")


def places(content, place=()):
    """Every place of a nested value, branches before what they hold."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        yield (*place, name)
        yield from places(value, (*place, name))


NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 10**6, 10**12, 2**63, 0.5, -0.1, 1.5, 1e300])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["cpu", "mini", "/", "${ratio}"])
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=4), SCALARS, max_size=2)


@pytest.mark.system
@settings(max_examples=100)
@given(st.data())
def test_a_manifest_with_any_other_value_is_loaded_or_refused(originals, tmp_path_factory, data):
    folder = shutil.copytree(originals["vit"], tmp_path_factory.mktemp("changed") / "saved")
    manifest = json.loads((folder / MANIFEST).read_text())
    put(data.draw(VALUES), *data.draw(st.sampled_from(list(places(manifest)))))(folder)
    try:
        facts.load_compressed(folder)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)


BOMBS = {  # of the network each is made from, in a process that may take 4 GiB
    "vit": {
        "settings of 1 GB": (write("config.json", b""), grown("config.json", 10**9)),
        "tokenizer of 1 TB": (write("t.json", b""), grown("t.json", 10**12)),
        "manifest of 1 TB": (grown(MANIFEST, 10**12),),
        "a million digits": (
            changed(MANIFEST, lambda text: text.replace(b": {", b': {"x": ' + b"9" * LONG + b",", 1)),
        ),
        "a million layers": (put({f"blocks.{number}.mlp.fc1": 3 for number in range(LONG)}, "plan"),),
        "a million arguments": (put(dict.fromkeys(range(LONG), 1), "recipe", "arguments"),),
        "wide": (argument("embed_dim", 60_000),),
        "deep": (argument("depth", 9_999),),
        "a header of 32 MiB": (raw_header(b"{" + b" " * 2**25),),
        "a million tensors": (header(lambda head: head.update(dict.fromkeys(map(str, range(LONG)), "x" * 9))),),
        "weights of 10 TB": (grown(WEIGHTS, 10**13),),
        "weights of 100 GB, described": (
            raw_header(b'{"x": {"dtype": "F32", "shape": [25000000000], "data_offsets": [0, 100000000000]}}'),
            lambda folder: grown(WEIGHTS, (folder / WEIGHTS).stat().st_size + 10**11)(folder),
        ),
    },
    "swin": {
        "buffers": (argument("img_size", 20_000),),
        "window": (argument("window_size", 200), argument("img_size", 6400)),
        "depths": (argument("depths", [10**8, 1]),),
    },
}
LOAD = """
import json, resource, sys, time
from pathlib import Path
import facts

def memory(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024

for folder in sys.argv[1:3]:  # whole ones, so that imports are not counted
    facts.load_compressed(folder)
resource.setrlimit(resource.RLIMIT_DATA, ((4096 + int(memory("VmData"))) * 2**20,) * 2)
for folder in sys.argv[3:]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
    before, start = memory("VmRSS"), time.process_time()
    try:
        facts.load_compressed(folder)
        outcome = "loaded"
    except (ValueError, OSError):
        outcome = "refused"
    seconds, mebibytes = time.process_time() - start, memory("VmHWM") - before
    print(json.dumps({"folder": folder, "outcome": outcome, "seconds": seconds, "mebibytes": mebibytes}))
"""


@pytest.mark.system
def test_bombs_are_refused_within_a_second_and_100_mebibytes(originals, tmp_path):
    whole = {"vit": originals["vit"], "swin": saved_swin(tmp_path / "swin")}
    folders = []
    for network, bombs in BOMBS.items():
        for name, attacks in bombs.items():
            folders.append(shutil.copytree(whole[network], tmp_path / name))
            for attack in attacks:
                attack(folders[-1])
    command = [sys.executable, "-c", LOAD, *whole.values(), *folders]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
    found = list(map(json.loads, lines))
    assert len(found) == len(folders)
    for result in found:
        assert result["outcome"] == "refused" and result["seconds"] < 1 and result["mebibytes"] < 100, result
