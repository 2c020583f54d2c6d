"""Changes to the folder of a saved network, as damage or somebody else would make them: functions of the folder."""

import json
import struct
from functools import reduce
from operator import getitem

from safetensors.torch import load_file, save_file

from facts.models.weights import sha256
from facts.saving.manifest import MANIFEST, WEIGHTS


def of_folder(attack):
    """From the arguments that follow the folder, a function of the folder alone."""
    return lambda *arguments: lambda folder: attack(folder, *arguments)


@of_folder
def edited(folder, change, name=MANIFEST):
    content = json.loads((folder / name).read_text())
    content.pop("checksum", None)  # which would refuse every change
    change(content)
    (folder / name).write_text(json.dumps(content))


def put(value, *place):
    return edited(lambda content: reduce(getitem, place[:-1], content).__setitem__(place[-1], value))


def drop(*place):
    return edited(lambda content: reduce(getitem, place[:-1], content).pop(place[-1]))


def argument(name, value):
    return put(value, "recipe", "arguments", name)


def openmmlab(**fields):
    return put({"kind": "openmmlab", "toolbox": "mmdet", "config": "swin/a.py", **fields}, "recipe")


def transformers(configuration):
    return put({"kind": "transformers", "configuration": {"model_type": "llama", **configuration}}, "recipe")


def torchvision(fields):
    return put({"kind": "torchvision", "tag": "resnet18", **fields}, "recipe")


@of_folder
def write(folder, name, content=b"harmless"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)


def changed(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@of_folder
def replaced(folder, name, make):
    """Put a link, a pipe, a folder or nothing in the place of a file."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


def link(name, target):
    return replaced(name, lambda path: path.symlink_to(target))


@of_folder
def grown(folder, name, size):
    """Make a sparse file, which takes no room on the disk."""
    with (folder / name).open("ab") as file:
        file.truncate(size)


@of_folder
def weights(folder, change):
    """Change the file of the weights, and have the manifest describe it."""
    changed(WEIGHTS, change)(folder)
    put(sha256(folder / WEIGHTS), "fingerprint")(folder)


def header(change):
    def changed_header(data):
        size = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + size])
        change(content)
        text = json.dumps(content).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return weights(changed_header)


def described(fields):
    return header(lambda head: head["head.weight"].update(fields))


def raw_header(text, size):
    return weights(lambda _: struct.pack("<Q", size) + text)


@of_folder
def tensor(folder, name, change):
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, name: change(tensors[name])}, folder / WEIGHTS)
    put(sha256(folder / WEIGHTS), "fingerprint")(folder)
