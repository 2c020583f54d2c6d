"""Write a compressed network, or a folder for every budget, with its model card; and push it to the Hub."""

import hashlib
import logging
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCardData, constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors.torch import save_file
from tabulate import tabulate
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from facts.models.from_transformers import write_processors
from facts.models.weights import sha256
from facts.modules.linear_calls import copy_with
from facts.modules.networks import is_transformers
from facts.parts import descriptions, part_at
from facts.result import CompressionResult
from facts.saving.manifest import DECOMPOSITIONS, ELASTIC, LOADER, MANIFEST, WEIGHTS, Elastic, Manifest, Metrics
from facts.saving.recipes import provenance_of, recipe_of_result
from facts.saving.structure import FLOATS, layouts_of, refuse_unsavable, saved_tensors, types_of_buffers
from facts.utils.files import at_home, replacing, writable_folder
from facts.utils.hub import REPOSITORY, answers, refusal
from facts.utils.version import __version__

log = logging.getLogger(__name__)

CARD = "README.md"
MARK = b"\n<!-- Saving again renews this page, unless it has been edited. "


def save_compressed(
    result: CompressionResult, folder: Path | str, metrics: Metrics | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write `model.safetensors`, `compression.json` (recipe, plan, summary, provenance) and `README.md` into `folder`.

    Processors and settings of a transformers network are written too; for a timm vision transformer of which only units
    and tokens are compressed, also code as text, `load_without_facts.txt`, which facts itself never runs. If no recipe
    rebuilds the network, a warning is logged, and loading needs the dense network. `metrics`, such as `{"top1":
    {"original": 72.1, "compressed": 70.3}}`, are for the model card, which is rewritten unless it was edited. Values
    are stored as `dtype` (default: their own types). If the process is killed halfway, loading refuses the folder.
    Raises `FileExistsError` for a folder that holds something else, `ValueError` for tensors that no file can hold, and
    for weights that are NaN or infinite.
    """
    _refuse_no_result(result, "save_compressed")
    metrics = Manifest.metrics_of(metrics)
    if dtype not in (None, *FLOATS.values()):
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype!r}")
    model = result.model if dtype is None else copy_with(result.model).to(dtype)
    refuse_unsavable(model)
    folder = target_folder(Path(folder))
    for name in (ELASTIC, DECOMPOSITIONS):  # of an earlier network
        (folder / name).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as path:
        save_file(saved_tensors(model), str(path))
        fingerprint = sha256(path)  # another save may soon replace the file with the final name
    for name, state in model.state_dict().items():
        if not isinstance(state, Tensor | None):
            log.warning("%s, a %s, is not saved: only the dense network can bring it", name, type(state).__name__)
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
        described=descriptions(model),
    )
    _write_loader(folder, model, manifest)
    _describe(folder, manifest)


def _refuse_no_result(given: Any, caller: str) -> None:
    if not isinstance(given, CompressionResult):
        raise ValueError(f"{caller} needs a result of facts.compress or load_compressed, got a {type(given).__name__}")


def _write_loader(folder: Path, model: nn.Module, manifest: Manifest) -> None:
    """Write the text of `standalone.py` if it can load the network; otherwise remove an earlier save's."""
    kinds, put = manifest.summary.parts, [name for name, rank in manifest.plan.items() if rank]
    parts = (part_at(model, name, kinds, manifest.described) for name in put)
    has_code = isinstance(model, VisionTransformer) and manifest.recipe and put
    if has_code and all(part and part.loads_without_facts() for part in parts):
        with replacing(folder / LOADER) as path:
            path.write_bytes(Path(__file__).with_name("standalone.py").read_bytes())
    else:
        (folder / LOADER).unlink(missing_ok=True)


def write_metrics(folder: Path, metrics: Metrics) -> None:
    """Add metrics to a saved network, as `save_compressed` writes them."""
    _describe(folder, replace(Manifest.read(folder), metrics=Manifest.metrics_of(metrics)))


def _describe(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and the model card."""
    with replacing(folder / MANIFEST) as path:
        path.write_text(manifest.text())
    write_card(folder, folder.resolve().name)


def target_folder(path: Path) -> Path:
    """Expand `~` and check a folder, which the first file creates.

    Raises `OSError` if it cannot be written, or holds anything but a saved network.
    A model card, as fetched by `push_to_hub`, and hidden files may be there already.
    """
    path = at_home(path)
    is_new = path.is_dir() and not (path / MANIFEST).is_file()
    if is_new and any(file.name != CARD and not file.name.startswith(".") for file in path.iterdir()):
        raise FileExistsError(f"{path} holds something other than a compressed network: give a new or empty folder")
    return writable_folder(path, keep=False)


def write_card(folder: Path, source: str) -> None:
    """Write `README.md` for a saved network that is loaded from `source`, unless an existing card was edited."""
    path = folder / CARD
    card = path.read_bytes() if path.exists() else b""
    written = card.rpartition(MARK)[0]
    if not card or card == written + _mark(written):
        text = _card(folder, source).encode(errors="replace")  # names of folders may be no text
        with replacing(path) as temporary:
            temporary.write_bytes(text + _mark(text))


def _mark(text: bytes) -> bytes:
    return MARK + hashlib.sha256(text).hexdigest().encode() + b" -->\n"


def _card(folder: Path, source: str) -> str:
    """Render Markdown with the YAML header of the Hugging Face Hub. Unknown values are left out."""
    manifest = Manifest.read(folder)
    elastic = Elastic.read(folder) if (folder / ELASTIC).exists() else None
    summary, base = manifest.summary, manifest.base_model or {}
    header = ModelCardData(library_name="facts", base_model=base.get("repository"), tags=["facts", "compression"])
    made = {
        "original": base.get("name"),
        "its weights": base.get("source") and f"{base['source']}, SHA-256 {base.get('sha256', 'unknown')}",
        "licence": base.get("repository") and f"the original's, see https://huggingface.co/{base['repository']}",
        "method": manifest.plan and summary.method,
        "budget": ", ".join(
            f"{ratio:.4g} of the {cost} of the compressed parts" for cost, ratio in summary.bounds.items()
        ),
        "recovery": summary.recovery,
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    known = "\n".join(f"- {name}: {value}" for name, value in made.items() if value)
    dense = "" if manifest.recipe else ", model=dense"  # without a recipe, the reader provides the dense network
    cut = ", ratio=0.6" if elastic else ""
    code = f'```python\nimport facts\n\nnetwork = facts.load_compressed("{source}"{dense}{cut}).model\n```'
    if "16" in summary.sizes[1].types:
        code += "\n\nThe weights are in half precision: `network.float()` computes with them in float32."
    if elastic and elastic.curve:
        headers = (f"FLOPs of the {elastic.parts}", "predicted distance of the outputs")
        code += f"\n\n{tabulate(elastic.curve, headers, tablefmt='github', floatfmt='.3g')}"
        code += "\n\nPredictions are for comparing cuts: a measured distance can be several times as large."
    code += f"\n\nWithout facts: `{LOADER}`." if (folder / LOADER).exists() else ""
    table = _table(manifest, (folder / WEIGHTS).stat().st_size)
    return f"---\n{header}\n---\n\n# {source}\n\n{table}\n\n{code}\n\n{known}\n"


def _table(manifest: Manifest, num_bytes: int) -> str:
    before, after, latency = manifest.summary.before, manifest.summary.after, manifest.summary.latency
    batch = f" of a batch of {latency['samples']:.0f}" if "samples" in latency else ""
    costs = [
        ("FLOPs (G)", before.flops, after.flops, 1e9),
        ("parameters (M)", before.params, after.params, 1e6),
        ("file (MB)", None, num_bytes, 1e6),
        (f"latency{batch} (ms)", latency.get("dense"), latency.get("measured"), 1e-3),
        *((name, both.get("original"), both.get("compressed"), 1) for name, both in (manifest.metrics or {}).items()),
    ]
    rows = [
        (name, *(value if value is None else value / unit for value in (old, new)))
        for name, old, new, unit in costs
        if (old, new) != (None, None)
    ]
    return tabulate(rows, ("", "original", "compressed"), tablefmt="github", floatfmt=".4g")


def push_to_hub(
    result: CompressionResult,
    repository: str,
    *,
    metrics: Metrics | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Save a network to the repository `OWNER/NAME`, created if necessary (`private` or not), and return its address.

    `metrics` is as in `save_compressed`; `token` needs write access (default: the one from `hf auth login`). A model
    card that was edited there is kept. Raises `ValueError` for a name of any other form, `ConnectionError` if the hub
    does not answer, and `PermissionError` if it refuses.
    """
    _refuse_no_result(result, "push_to_hub")
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository!r} is not a repository: name it as OWNER/NAME")
    if not answers():
        raise ConnectionError(f"{constants.ENDPOINT} does not answer, so nothing was pushed: try again when it does")
    hub = HfApi(token=token)
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        with TemporaryDirectory(prefix="facts-") as folder:
            with suppress(EntryNotFoundError):  # `write_card` keeps an edited card
                hub.hf_hub_download(repository, CARD, local_dir=folder)
            save_compressed(result, folder, metrics)
            write_card(Path(folder), repository)
            outdated = [LOADER, "elastic.*"]  # if an earlier network had them and this one lacks them
            hub.upload_folder(repo_id=repository, folder_path=folder, delete_patterns=outdated)
    except HfHubHTTPError as error:
        raise PermissionError(f"nothing was pushed: {refusal(error, repository)}") from error
    return str(address)
