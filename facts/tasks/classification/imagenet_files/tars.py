"""ImageNet as the original tar files, which are read in place."""

import json
import logging
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from scipy.io import loadmat

from facts.tasks.classification.imagenet_files.base import Split, by_name, stamp_of
from facts.tasks.classification.imagenet_files.slices import LazyFile, Slices
from facts.utils.files import replacing

log = logging.getLogger(__name__)

TARS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
NEEDED = (*TARS.values(), DEVKIT)
GROUND_TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"

Member = tuple[str, int, int]
"""Name, offset and length."""


def tar_images(root: Path, split: Split) -> Slices:
    """Find the images of a split.

    Raises `ValueError` for a damaged file, for missing or unknown classes, and if the numbers of validation images and
    labels differ.
    """
    path = root / TARS[split]
    members = indexed(path)
    names = [name for name, _, _ in members]
    if split == "val":
        names = with_synsets(names, root)
    stamp = stamp_of(path)
    places = [(offset, length, stamp) for _, offset, length in members]
    return Slices(**by_name(names, places, path), file=LazyFile(path))


def indexed(path: Path) -> list[Member]:
    """Images within a tar file, from the index beside it, which is written if it is missing or of another file."""
    index = path.with_suffix(".index.json")
    stat = path.stat()
    identity = [stat.st_size, stat.st_mtime_ns]
    try:
        known = json.loads(index.read_text())
        if known["file"] == identity:
            return known["members"]
    except (OSError, ValueError, KeyError, TypeError):
        log.info("%s is indexed, which takes a while", path)
    try:
        with path.open("rb", buffering=0) as file:
            members = list(members_of(file))
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged or not whole ({error}): fetch it again") from error
    try:
        with replacing(index) as temporary:
            temporary.write_text(json.dumps({"file": identity, "members": members}))
    except OSError as error:
        log.warning("the index %s cannot be written (%s): it is made again every time", index, error.strerror)
    return members


def members_of(file: BinaryIO) -> Iterator[Member]:
    """The images of a tar file, and of the tar files in it, whose names become folders."""
    with tarfile.open(fileobj=file, mode="r:") as outer:
        for member in outer.getmembers():
            path = PurePosixPath(member.name)
            if path.suffix != ".tar":
                if member.isfile():
                    yield path.name, member.offset_data, member.size
                continue
            # Opened at its start, so that offsets count from the start of the whole file; its end is unknown here.
            file.seek(member.offset_data)
            end = member.offset_data + member.size
            with tarfile.open(fileobj=file, mode="r:") as inner:
                for image in inner:
                    if image.offset >= end:
                        break
                    if image.offset_data + image.size > end:
                        raise tarfile.ReadError(f"{member.name} ends within {image.name}")
                    if image.isfile():
                        yield f"{path.stem}/{PurePosixPath(image.name).name}", image.offset_data, image.size


def with_synsets(names: list[str], root: Path) -> list[str]:
    """`<synset>/<name>` of the validation images: line i of the ground truth is the class of the i-th name."""
    devkit, tar = root / DEVKIT, root / TARS["val"]
    found = validation_synsets(devkit)
    if len(found) != len(names):
        raise ValueError(
            f"{tar} holds {len(names)} images, but {devkit} tells the classes of {len(found)}: fetch both again"
        )
    synset_of = dict(zip(sorted(names), found, strict=True))
    return [f"{synset_of[name]}/{name}" for name in names]


def validation_synsets(devkit: Path) -> list[str]:
    """Synset of every line of the ground truth."""
    try:
        with tarfile.open(devkit, "r:gz") as tar:
            members = {PurePosixPath(member.name).name: member for member in tar if member.isfile()}
            truth = tar.extractfile(members[GROUND_TRUTH])
            assert truth is not None  # since it is a file
            numbers = truth.read().split()
            synsets = loadmat(tar.extractfile(members[META]), squeeze_me=True)["synsets"]
        by_number = dict(zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True))
        return [by_number[int(number)] for number in numbers]
    except (tarfile.TarError, EOFError, OSError, zlib.error, KeyError) as error:
        raise ValueError(f"{devkit} is damaged or lacks something ({error}): fetch it again") from error
