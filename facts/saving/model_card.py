"""Model card of a saved network: its original, costs and metrics, and how to load it."""

import hashlib
from pathlib import Path

from huggingface_hub import ModelCardData
from tabulate import tabulate

from facts.saving.manifest import ELASTIC, LOADER, WEIGHTS, Elastic, Manifest
from facts.utils.files import replacing

CARD = "README.md"
MARK = b"\n<!-- Saving again renews this page, unless it has been edited. "


def write_card(folder: Path, source: str) -> None:
    """Write `README.md` for a saved network that is loaded from `source`, unless an existing card was edited."""
    path = folder / CARD
    card = path.read_bytes() if path.exists() else b""
    written = card.rpartition(MARK)[0]
    if not card or card == written + _mark(written):
        num_bytes, alone = (folder / WEIGHTS).stat().st_size, (folder / LOADER).exists()
        elastic = Elastic.read(folder) if (folder / ELASTIC).exists() else None
        text = model_card(Manifest.read(folder), num_bytes, source, alone, elastic).encode()
        with replacing(path) as temporary:
            temporary.write_bytes(text + _mark(text))


def _mark(text: bytes) -> bytes:
    return MARK + hashlib.sha256(text).hexdigest().encode() + b" -->\n"


def model_card(manifest: Manifest, num_bytes: int, source: str, alone: bool, elastic: Elastic | None = None) -> str:
    """Render Markdown with the YAML header of the Hugging Face Hub. Unknown values are left out.

    `alone` means that the folder has code that loads the network without facts; `elastic` describes a folder for every
    budget.
    """
    summary, base = manifest.summary, manifest.base_model or {}
    header = ModelCardData(library_name="facts", base_model=base.get("repository"), tags=["facts", "compression"])
    parts = "units" if summary.parts == "units" else f"{summary.form} layers"
    made = {
        "original": base.get("name"),
        "its weights": base.get("source") and f"{base['source']}, SHA-256 {base.get('sha256', 'unknown')}",
        "licence": base.get("repository") and f"the original's, see https://huggingface.co/{base['repository']}",
        "method": manifest.plan and f"{summary.estimator}, {summary.search}, {parts}",
        "budget": ", ".join(
            f"{ratio:.4g} of the {cost} of these {summary.parts}" for cost, ratio in summary.bounds.items()
        ),
        "recovery": summary.recovery,
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    known = "\n".join(f"- {name}: {value}" for name, value in made.items() if value)
    dense = "" if manifest.recipe else ", model=dense"  # without a recipe, the reader provides the dense network
    cut = ", ratio=0.6" if elastic else ""
    code = f'```python\nimport facts\n\nnetwork = facts.load_compressed("{source}"{dense}{cut}).model\n```'
    if elastic and elastic.curve:
        headers = (f"FLOPs of the {elastic.parts}", "predicted distance of the outputs")
        code += f"\n\n{tabulate(elastic.curve, headers, tablefmt='github', floatfmt='.3g')}"
    code += f"\n\nWithout facts: `{LOADER}`." if alone else ""
    return f"---\n{header}\n---\n\n# {source}\n\n{_table(manifest, num_bytes)}\n\n{code}\n\n{known}\n"


def _table(manifest: Manifest, num_bytes: int) -> str:
    before, after, summary = manifest.summary.before, manifest.summary.after, manifest.summary
    costs = [
        ("FLOPs (G)", before.flops, after.flops, 1e9),
        ("parameters (M)", before.params, after.params, 1e6),
        ("file (MB)", None, num_bytes, 1e6),
        ("latency (ms)", summary.latency.get("dense"), summary.latency.get("measured"), 1e-3),
        *((name, both.get("original"), both.get("compressed"), 1) for name, both in (manifest.metrics or {}).items()),
    ]
    rows = [
        (name, *(value if value is None else value / unit for value in (old, new)))
        for name, old, new, unit in costs
        if (old, new) != (None, None)
    ]
    return tabulate(rows, ("", "original", "compressed"), tablefmt="github", floatfmt=".4g")
