"""A made-up ImageNet of 1,000 classes, three training and two validation pictures of 8 x 8 pixels each."""

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from scipy.io import savemat

from facts.tasks.classification.imagenet_files import synsets

# As text the numbers sort otherwise than they count, and than they are stored.
TRAIN_NUMBERS = (9, 120, 20)
NUM_VAL = 2000
SHARD = "{}-{:05}-of-{:05}.parquet"

Files = dict[str, bytes]
"""Contents by `<synset>/<file>`."""


def encoded(rng: np.random.Generator) -> bytes:
    buffer = BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def make_files() -> dict[str, Files]:
    """The training and validation pictures."""
    rng = np.random.default_rng(0)
    train = {f"{name}/{name}_{number}.JPEG": encoded(rng) for name in synsets() for number in TRAIN_NUMBERS}
    labels = rng.permutation(np.arange(NUM_VAL) % 1000)
    val = {
        f"{synsets()[label]}/ILSVRC2012_val_{number:08}.JPEG": encoded(rng) for number, label in enumerate(labels, 1)
    }
    return {"train": train, "val": val}


def write_folders(root: Path, files: dict[str, Files]) -> None:
    for split, images in files.items():
        for name, data in images.items():
            path = root / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def write_tars(root: Path, files: dict[str, Files]) -> None:
    inner = {name: {} for name in reversed(synsets())}
    for name, data in files["train"].items():
        synset, file = name.split("/")
        inner[synset][file] = data
    write_tar(root / "ILSVRC2012_img_train.tar", {f"{name}.tar": tar_bytes(images) for name, images in inner.items()})
    backwards = {name.split("/")[1]: data for name, data in reversed(files["val"].items())}
    write_tar(root / "ILSVRC2012_img_val.tar", backwards)
    write_devkit(root, [name.split("/")[0] for name in files["val"]])


def tar_bytes(members: Files, mode: str = "w") -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, BytesIO(data))
    return buffer.getvalue()


def write_tar(path: Path, members: Files) -> None:
    path.write_bytes(tar_bytes(members))


def write_devkit(root: Path, found: list[str]) -> None:
    """`found` are the synsets of the validation pictures. The real file, too, numbers classes in an order of its own,
    and lists wider synsets after them."""
    wnids = [*np.random.default_rng(1).permutation(synsets()).tolist(), "n00001740", "n00001930"]
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    table = np.array([(number, wnid, 0) for number, wnid in enumerate(wnids, 1)], dtype=fields)
    meta = BytesIO()
    savemat(meta, {"synsets": table[:, None]})
    truth = "".join(f"{wnids.index(synset) + 1}\n" for synset in found)
    folder = "ILSVRC2012_devkit_t12"
    members = {
        f"{folder}/readme.txt": b"",
        f"{folder}/data/meta.mat": meta.getvalue(),
        f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    (root / f"{folder}.tar.gz").write_bytes(tar_bytes(members, "w:gz"))


def write_shards(root: Path, files: dict[str, Files]) -> None:
    """Two shards a split, of row groups of 100 pictures in random order, and a shard of test pictures."""
    (root / "data").mkdir()
    for split, images in (("train", files["train"]), ("validation", files["val"])):
        names = np.random.default_rng(2).permutation(list(images)).tolist()
        middle = len(names) // 2 + 30
        for shard, part in enumerate((names[:middle], names[middle:])):
            write_shard(root / "data" / SHARD.format(split, shard, 2), {name: images[name] for name in part})
    (root / "data" / SHARD.format("test", 0, 1)).write_bytes(b"not looked at")


def write_shard(path: Path, images: Files) -> None:
    """Paths have the class appended, as those of the shards on the hub."""
    rows = []
    for name, data in images.items():
        synset, file = name.split("/")
        stem, suffix = file.split(".")
        rows.append(({"bytes": data, "path": f"{stem}_{synset}.{suffix}"}, synsets().index(synset)))
    write_rows(path, rows)


def write_rows(path: Path, rows: list[tuple[dict, int]]) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures, labels = zip(*rows, strict=True)
    table = pa.table({"image": pa.array(pictures, image), "label": pa.array(labels, pa.int64())})
    pq.write_table(table, path, row_group_size=100)
