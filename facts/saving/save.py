"""Write a compressed network to a folder of JSON and safetensors."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from facts.models.from_transformers import write_processors
from facts.models.weights import sha256
from facts.modules.linear_calls import copy_with
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import is_transformers
from facts.result import CompressionResult
from facts.saving.manifest import DECOMPOSITIONS, ELASTIC, LOADER, MANIFEST, WEIGHTS, Manifest, Metrics
from facts.saving.model_card import CARD, write_card
from facts.saving.recipes import provenance_of, recipe_of_result
from facts.saving.structure import layouts_of, types_of_buffers
from facts.utils.files import replacing, writable_folder
from facts.utils.version import __version__


def save_compressed(
    result: CompressionResult, folder: Path | str, metrics: Metrics | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write `model.safetensors`, `compression.json` (recipe, plan, summary, provenance) and `README.md` into `folder`.

    Processors and settings of a transformers network are written too; for a timm vision transformer with only units
    compressed, also code as text, `load_without_facts.txt`, which facts itself never runs. If no recipe rebuilds
    the network, a warning is logged, and loading needs the dense network. `metrics`, such as `{"top1": {"original":
    72.1, "compressed": 70.3}}`, are for the model card, which is rewritten unless it was edited. Values are stored as
    `dtype` (default: their own types). If the process is killed halfway, loading refuses the folder. Raises
    `FileExistsError` for a folder that holds something else.
    """
    metrics = TypeAdapter(Metrics | None).validate_python(metrics)
    folder = target_folder(Path(folder))
    for name in (ELASTIC, DECOMPOSITIONS):  # of an earlier network
        (folder / name).unlink(missing_ok=True)
    model = result.model if dtype is None else copy_with(result.model).to(dtype)
    with replacing(folder / WEIGHTS) as path:
        save_model(model, str(path))
        fingerprint = sha256(path)  # another save may soon replace the file with the final name
    libraries = ["torch", "timm"]
    if is_transformers(model):
        libraries.append("transformers")
        write_processors(model, folder)
    manifest = Manifest(
        recipe=recipe_of_result(result),
        plan=result.plan,
        fingerprint=fingerprint,
        versions={"facts": __version__, **{name: version(name) for name in libraries}},
        summary=result.summary,
        skipped=result.skipped,
        base_model=provenance_of(model),
        metrics=metrics,
        buffers=types_of_buffers(model),
        layouts=layouts_of(model),
    )
    _write_loader(folder, model, manifest)
    _describe(folder, manifest)


def _write_loader(folder: Path, model: nn.Module, manifest: Manifest) -> None:
    """Write the text of `standalone.py` if it can load the network; otherwise remove an earlier save's."""
    others = any(isinstance(module, LowRankLayer) for module in model.modules())
    if isinstance(model, VisionTransformer) and manifest.recipe and any(manifest.plan.values()) and not others:
        with replacing(folder / LOADER) as path:
            path.write_bytes(Path(__file__).with_name("standalone.py").read_bytes())
    else:
        (folder / LOADER).unlink(missing_ok=True)


def write_metrics(folder: Path, metrics: Metrics) -> None:
    """Add metrics to a saved network, as `save_compressed` writes them."""
    _describe(folder, replace(Manifest.read(folder), metrics=TypeAdapter(Metrics).validate_python(metrics)))


def _describe(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and the model card."""
    with replacing(folder / MANIFEST) as path:
        path.write_text(manifest.text())
    write_card(folder, folder.resolve().name)


def target_folder(path: Path) -> Path:
    """Create `path` if necessary. Raises `OSError` if it cannot be written, or holds anything but a saved network.

    A model card, as fetched by `push_to_hub`, and hidden files may be there already.
    """
    is_new = path.is_dir() and not (path / MANIFEST).is_file()
    if is_new and any(file.name != CARD and not file.name.startswith(".") for file in path.iterdir()):
        raise FileExistsError(f"{path} holds something other than a compressed network: give a new or empty folder")
    return writable_folder(path)
