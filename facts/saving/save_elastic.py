"""Write a folder for every budget: the dense network, the decompositions of its parts and their errors."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from facts.parts import HiddenUnit, OutputUnit, ScoreUnit
from facts.decomposition.truncation import Decomposition
from facts.models.weights import sha256
from facts.modules.forms import FORMS
from facts.modules.modes import without_autocast
from facts.result import CompressionResult, Summary
from facts.saving.elastic import DECOMPOSITIONS, ELASTIC, MOST_SECONDS, Elastic, stored
from facts.saving.manifest import Manifest
from facts.saving.model_card import write_card
from facts.saving.save import save_compressed
from facts.search.base import MILPSearch, Profile
from facts.search.methods.cors import CoRS
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.problem import AllocationProblem
from facts.utils.files import replacing

KINDS = {ScoreUnit: "products", OutputUnit: "outputs", HiddenUnit: "hidden"}
SHOWN = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # ratios of the model card's curve


def save_elastic(result: CompressionResult, folder: Path | str) -> None:
    """Write a folder from which `facts.load_compressed(folder, ratio=0.6)` cuts a network for any budget.

    For a ratio, FLOPs and parameters, a cut equals what `facts.compress` makes of the same data with `rounds=()`, bit
    by bit if both run on the same CPU. Without a budget, the folder loads as the dense network. Moments and errors are
    computed again unless the result was made with a cache. Raises `ValueError` for a result that was loaded or
    recovered, and for a search without an integer program.
    """
    problem, search = result.problem, result.search
    if problem is None or result.summary.recovery:
        raise ValueError("save_elastic needs a result of facts.compress that is not recovered")
    if not isinstance(search, CoRS | CoRSFisher):
        raise ValueError(f"{type(search).__name__} gives no errors for other budgets: take search=cors_fisher or cors")
    calibration, folder = problem.calibration, Path(folder)
    with without_autocast(problem.device):
        decompositions = calibration.decompositions(problem.estimator)
        problem = replace(problem, decompositions=decompositions, bounds={"flops": SHOWN[0]}, latency=None)
        found = search.allocate(problem)
    curve = tuple(_curve(problem, search, found.offered)) if found.predicted is not None else ()
    plan, summary = dict.fromkeys(calibration.parts), _of_dense(result.summary, decompositions)
    save_compressed(replace(result, model=problem.apply(plan, {}), plan=plan, summary=summary), folder)
    tensors = {
        key: tensor.cpu().contiguous()
        for name, decomposition in decompositions.items()
        for key, tensor in stored(name, calibration.part_of[name], decomposition).items()
    }
    with replacing(folder / DECOMPOSITIONS) as path:
        save_file(tensors, str(path))
        checksum = sha256(path)
    example, parts = calibration.example, calibration.parts
    content = Elastic(
        parts="units" if calibration.units else "layers",
        form=next(name for name, form in FORMS.items() if form is problem.form),
        precision=str(calibration.execution.precision).removeprefix("torch."),  # type: ignore[arg-type]
        solver=search.solver,
        time_limit=min(search.time_limit, MOST_SECONDS),
        fit_bias=calibration.fit_bias,
        input_shape=tuple(example.shape) if isinstance(example, Tensor) else None,
        reads_integers=isinstance(example, Tensor) and not example.is_floating_point(),
        rows={name: parts.get(name, part).rows for part in parts.values() for name in part.layers(calibration.model)},
        # reversed, so that scores, which come first, decide for a module that holds outputs too
        kinds={unit.owner: KINDS[type(unit)] for unit in reversed(calibration.units.values())},  # type: ignore[misc]
        errors={name: tuple(errors.items()) for name, errors in found.offered.items()},
        curve=curve,
        weights=Manifest.read(folder).fingerprint,
        decompositions=checksum,
    )
    with replacing(folder / ELASTIC) as path:
        path.write_text(content.text())
    write_card(folder, folder.resolve().name)


def _curve(problem: AllocationProblem, search: MILPSearch, offered: Profile) -> Iterator[tuple[float, float]]:
    """Predicted distances at the ratios that the ranks on offer can meet."""
    for ratio in SHOWN:
        with suppress(ValueError):
            yield ratio, search.solve(replace(problem, bounds={"flops": ratio}), offered)[1].error


def _of_dense(summary: Summary, decompositions: Mapping[str, Decomposition]) -> Summary:
    """The summary of the dense network: what holds for every budget."""
    size, full = summary.sizes[0], summary.full_flops
    return Summary(
        before=summary.before,
        after=summary.before,
        repaired={name: each.num_repaired for name, each in decompositions.items() if each.num_repaired},
        seconds={},
        estimator=summary.estimator,
        search=summary.search,
        parts=summary.parts,
        widths=summary.widths,
        fit_bias=summary.fit_bias,
        full_flops=full and (full[0], full[0]),
        sizes=(size, size),
    )
