"""Saved networks that were changed by hand to do harm. To add an attack, add a line."""

import json
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facts.models.weights import sha256
from facts.saving.manifest import MANIFEST, WEIGHTS

Attack = Callable[[Path], Any]
LAYER = "blocks.0.mlp.fc1"
RAN = "it_ran"  # what code in a folder would make where the loader runs


def edited(change: Callable[[dict], Any], file: str = MANIFEST) -> Attack:
    def attack(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return attack


def field(name: str, value: Any) -> Attack:
    return edited(lambda manifest: manifest.update({name: value}))


def without(name: str) -> Attack:
    return edited(lambda manifest: manifest.pop(name))


def recipe(**fields: Any) -> Attack:
    return edited(lambda manifest: manifest["recipe"].update(fields))


def argument(name: str, value: Any) -> Attack:
    return edited(lambda manifest: manifest["recipe"]["arguments"].update({name: value}))


def plan(name: str, rank: Any) -> Attack:
    return edited(lambda manifest: manifest["plan"].update({name: rank}))


def file(name: str, content: bytes) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return attack


def changed(name: str, change: Callable[[bytes], bytes]) -> Attack:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def link(name: str, target: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return attack


def special(name: str, make: Callable[[str], Any]) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(str(folder / name))

    return attack


def sparse(name: str, size: int) -> Attack:
    return lambda folder: os.truncate(folder / name, size) if (folder / name).exists() else None


def fingerprinted(folder: Path) -> None:
    """Make the manifest fit the weights, as somebody does who means harm."""
    edited(lambda manifest: manifest.update(fingerprint=sha256(folder / WEIGHTS)))(folder)


def weights(content: bytes) -> Attack:
    def attack(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(content)
        fingerprinted(folder)

    return attack


def header(change: Callable[[dict], Any], spare: int = 0) -> Attack:
    """Another header before the same tensors, and `spare` bytes behind them."""

    def attack(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + size])
        change(content)
        text = json.dumps(content).encode()
        weights(struct.pack("<Q", len(text)) + text + data[8 + size :] + bytes(spare))(folder)

    return attack


def tensor(**fields: Any) -> Attack:
    return header(lambda header: header["head.weight"].update(fields))


def raw_header(text: bytes, size: int | None = None) -> Attack:
    return weights(struct.pack("<Q", len(text) if size is None else size) + text)


def names(number: int) -> Attack:
    """So many empty tensors."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return raw_header(json.dumps({f"t{n}": empty for n in range(number)}).encode())


def unix_socket(path: str) -> None:
    here = os.getcwd()
    os.chdir(Path(path).parent)  # such paths may have 108 letters
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(Path(path).name)
    finally:
        os.chdir(here)


class Harmful:
    def __reduce__(self):
        return os.mkdir, (RAN,)


PICKLE = pickle.dumps(Harmful())
DEEP = b"[" * 200_000
HUGE = 10**8
NAMES = {f"blocks.{number}.mlp.fc1": 3 for number in range(10**6)}

FILES = {
    **{f"a pickle as {name}": file(name, PICKLE) for name in ("a.txt", "b.json", "c.md", "d.png", "e/f.txt", WEIGHTS)},
    **{
        f"code as {name}": file(name, b"import os")
        for name in ("a.py", "b.so", "c.sh", "d", "e.pyc", "f.pth", "g.pt", "h.bin", "i.ckpt", "j.npy", "k.PY", "l.py ")
    },
    **{
        f"hidden {name}": file(name, b"{}")
        for name in (".env", ".bashrc", ".a.py", ".b/c.py", ".netrc", "d/.e", ".json", "__init__.py", "conftest.py")
    },
    **{f"an archive as {name}": file(name, b"PK\x03\x04" + b"\0" * 99) for name in ("a.txt", "b.onnx", "c.data")},
    **{f"a program as {name}": file(name, b"\x7fELF" + b"\0" * 99) for name in ("a.txt", "tokenizer.json", "b.gif")},
    **{
        f"settings with {name}": file("config.json", json.dumps({name: value}).encode())
        for name, value in {
            "auto_map": {"AutoModel": "x.Y"},
            "custom_generate": "somebody/code",
            "vocab_file": "/etc/passwd",
            "cache_dir": "/",
            "tokenizer_path": "/etc",
            "init_inputs": ["/etc/passwd"],
        }.items()
    },
    "settings without an end": file("config.json", b"{"),
    "settings of a list": file("tokenizer_config.json", b"[]"),
    "deep settings": file("generation_config.json", DEEP),
    "settings of 100 MB": lambda folder: (file("config.json", b"")(folder), sparse("config.json", 10**8)(folder)),
    "a tokenizer of 1 TB": lambda folder: (file("t.json", b"")(folder), sparse("t.json", 10**12)(folder)),
}

PLACES = {
    **{
        f"{name} -> {target}": link(name, target)
        for name in (MANIFEST, WEIGHTS, "notes.txt")
        for target in ("/etc/passwd", "/dev/zero", "../secret", "/proc/self/mem", name, "gone")
    },
    **{f"a pipe as {name}": special(name, os.mkfifo) for name in (MANIFEST, WEIGHTS, "notes.txt", "config.json")},
    **{f"a folder as {name}": special(name, os.mkdir) for name in (MANIFEST, WEIGHTS, "config.json")},
    **{f"a socket as {name}": special(name, unix_socket) for name in (MANIFEST, WEIGHTS, "a.txt")},
    **{f"no {name}": special(name, lambda path: None) for name in (MANIFEST, WEIGHTS)},
    "two links in a circle": lambda folder: (link("a", "b")(folder), link("b", "a")(folder)),
    "a way up": link("sub", ".."),
}

MANIFESTS = {
    "nothing": file(MANIFEST, b""),
    "a list": file(MANIFEST, b"[]"),
    "a number": file(MANIFEST, b"1"),
    "no text": file(MANIFEST, bytes(range(256))),
    "UTF-16": changed(MANIFEST, lambda text: text.decode().encode("utf-16")),
    "cut short": changed(MANIFEST, lambda text: text[:-40]),
    "twice": changed(MANIFEST, lambda text: text + text),
    "zeros behind": changed(MANIFEST, lambda text: text + b"\0"),
    "deep": file(MANIFEST, b'{"recipe": ' + DEEP),
    "500 MB": sparse(MANIFEST, 5 * 10**8),
    "a TB": sparse(MANIFEST, 10**12),
    "a million digits": changed(
        MANIFEST, lambda text: text.replace(b'"plan": {', b'"plan": {"x": ' + b"9" * 10**6 + b",")
    ),
    "a surrogate": changed(MANIFEST, lambda text: text.replace(b'"plan": {', b'"plan": {"\\ud800": 3,')),
    "no colon": changed(MANIFEST, lambda text: text.replace(b":", b"", 1)),
    "a comment": changed(MANIFEST, lambda text: b"// mine\n" + text),
    **{
        f"without {name}": without(name)
        for name in ("recipe", "plan", "fingerprint", "versions", "summary", "skipped", "base_model", "metrics")
    },
    **{
        f"{name} = {value!r}": field(name, value)
        for name in ("plan", "fingerprint", "versions", "summary", "skipped", "buffers", "layouts")
        for value in (1, "x", [[]], None)
    },
    **{f"recipe = {value!r}": field("recipe", value) for value in (1, "x", [], None, {})},
    "another version": field("versions", {"facts": "999.0"}),
    "a version that is none": field("versions", {"facts": "x"}),
    "another fingerprint": field("fingerprint", "0" * 64),
    "a short fingerprint": field("fingerprint", "0"),
    "infinite metrics": field("metrics", {"top1": {"original": float("inf")}}),
    "pivots of nothing": field("layouts", {LAYER: "sideways"}),
    "a buffer of objects": field("buffers", {"pos_embed": "O"}),
}

RECIPES = {
    **{
        f"{name} = {str(value)[:20]}": argument(name, value)
        for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes", "in_chans")
        for value in (-1, 0.5, "x", HUGE, 10**30, [[]], {"a": 1})
    },
    **{
        f"{name} = {value}": argument(name, value)
        for name, value in {
            "mlp_ratio": 1e9,
            "reg_tokens": 60_000,
            "pretrained": True,
            "checkpoint_path": "evil.pth",
            "cache_dir": "/",
            "block_fn": "os.system",
            "norm_layer": "os.system",
            "weight_init": "__import__('os')",
            "colour": "red",
            "": 1,
            "self": 1,
            "pretrained_cfg": {"url": "https://example.com"},
            "pretrained_cfg_overlay": {"hf_hub_id": "somebody/model"},
        }.items()
    },
    **{
        f"{name} = {value!r}": recipe(**{name: value})
        for name, value in [
            ("kind", "keras"),
            ("kind", None),
            ("kind", ["timm"]),
            ("kind", "openmmlab"),
            ("kind", "transformers"),
            ("tag", "hf-hub:somebody/model"),
            ("tag", "local-dir:/etc"),
            ("tag", "../vit"),
            ("tag", "no_such_network"),
            ("tag", "vit_giant_patch14_224"),
            ("tag", 7),
            ("tag", ""),
            ("weights", "pretrained"),
            ("weights", "/etc/passwd"),
            ("weights", "https://example.com/evil.pth"),
            ("arguments", []),
            ("arguments", {}),
            ("arguments", "x"),
            ("code", "print()"),
        ]
    },
    "a million arguments": recipe(arguments=dict.fromkeys(map(str, range(10**6)), 1)),
    "20,000 depths": argument("depth", [1] * 20_000),
    "deep arguments": changed(
        MANIFEST, lambda text: text.replace(b'"arguments": {', b'"arguments": {"a": ' + b"[" * 900 + b"]" * 900 + b",")
    ),
}

PLANS = {
    **{f"rank {rank!r}": plan(LAYER, rank) for rank in (0, -1, 1.5, True, "3", [3], 10**6, 10**30, float("nan"))},
    **{
        f"{name!r}": plan(name, 3)
        for name in ("", "gone", "blocks", "blocks.0.norm1", "patch_embed.proj", "__class__", "blocks.0.mlp.fc1.left")
    },
    "a million layers": edited(lambda manifest: manifest["plan"].update(NAMES)),
    "nothing to compress": field("plan", {}),
    "a name of a million letters": plan("a" * 10**6, 3),
    "other ranks than the weights have": plan(LAYER, 2),
    "dense where the weights are not": plan(LAYER, None),
}

HEADERS = {
    "no size": weights(b"\1"),
    "empty": weights(b""),
    "zeros": weights(bytes(1000)),
    "a size without an end": raw_header(b"{}", 2**63),
    "the largest size": raw_header(b"{}", 2**64 - 1),
    "a size beyond the file": raw_header(b"{}", 1000),
    "a list": raw_header(b"[]"),
    "deep": raw_header(DEEP),
    "no text": raw_header(b"\xff" * 100),
    "no tensors": raw_header(b"{}"),
    "32 MiB of spaces": raw_header(b"{" + b" " * 2**25),
    **{f"{number:,} names": names(number) for number in (10**6, 10**5, 60_000)},
    **{f"dtype {dtype!r}": tensor(dtype=dtype) for dtype in ("O", "F31", "", None, 32, "I64", "BOOL", "F64")},
    **{
        f"shape {shape}": tensor(shape=shape)
        for shape in ([], [-1], [2**64], [2**32, 2**32], [0], [5.5, 48], "x", None, [48, 5], [[5], 48])
    },
    **{
        f"offsets {offsets}": tensor(data_offsets=offsets)
        for offsets in ([0, 2**62], [-4, 0], [4, 0], [0], [], None, [2**64, 2**64 + 4], [1, 961])
    },
    "a tensor less": header(lambda header: header.pop("head.weight")),
    "a tensor renamed": header(lambda header: header.update({"x": header.pop("head.weight")})),
    "a tensor more": header(lambda header: header.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})),
    "metadata of objects": header(lambda header: header.update(__metadata__={"a": {"b": 1}})),
    "bytes behind": header(lambda header: None, spare=16),
    "cut short": changed(WEIGHTS, lambda data: data[:-100]),
    "cut short, and said so": lambda folder: (
        changed(WEIGHTS, lambda data: data[:-100])(folder),
        fingerprinted(folder),
    ),
    "a bit": changed(WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "100 GB": sparse(WEIGHTS, 10**11),
    "10 TB": sparse(WEIGHTS, 10**13),
}

KINDS = {
    "files": FILES,
    "places": PLACES,
    "manifest": MANIFESTS,
    "recipe": RECIPES,
    "plan": PLANS,
    "weights": HEADERS,
}
ATTACKS = {f"{kind}: {name}": attack for kind, attacks in KINDS.items() for name, attack in attacks.items()}
