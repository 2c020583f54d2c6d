"""Networks and data named on the command line, and the metrics measured on them."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from facts.calibration.data import Batch
from facts.cli.options import TIMM, TORCHVISION, TRANSFORMERS, models
from facts.cost.count import meta_input
from facts.finetuning.recovery import HALVES
from facts.models import CausalLM, ImageClassifier, ImageEncoder, Recipe, TimmModel, TorchvisionModel
from facts.models.from_transformers import (
    PROCESSORS,
    TransformersModel,
    import_transformers,
    published_configuration,
    read_processors,
)
from facts.models.weights import PUBLISHED, fetch, read_checkpoint
from facts.modules.networks import is_encoder, noise, problem_of, reads_tokens, type_of
from facts.moments.losses import DECLARED
from facts.result import STANDARD_ERROR, CompressionResult
from facts.saving.load import load_compressed
from facts.saving.manifest import MANIFEST, Metrics
from facts.tasks.base import pass_over
from facts.tasks.classification.base import are_right, data_config, evaluate_features, num_classes
from facts.tasks.classification.images import ImageFolder
from facts.tasks.language import Corpus, Split, losses_of_windows, perplexity_of, windows
from facts.utils.hub import REPOSITORY
from facts.utils.numerics import mean_and_error
from facts.utils.options import first_line

log = logging.getLogger(__name__)

CONFIGURATION = "config.json"
HAS_ITS_OWN = "{} has weights and classes of its own: leave out --weights and --num-classes"
LEAST_JUDGED = 20  # samples, before an accuracy is called chance
ENOUGH_IMAGES = 200  # images to calibrate on
Data = ImageFolder | Corpus


def is_saved(name: str) -> bool:
    """Whether a name is that of a folder that `facts compress` wrote."""
    return (Path(name) / MANIFEST).is_file()


def load(name: str, weights: str | None, num_classes: int | None, device: str | None) -> nn.Module:
    """`build` a network, or load a folder that `facts compress` wrote."""
    if not is_saved(name):
        return build(name, weights, num_classes, device)
    if num_classes is not None:
        raise ValueError(HAS_ITS_OWN.format(name))
    return load_result(name)[0].model.to(_device(device))


def load_result(folder: Path | str) -> tuple[CompressionResult, torch.dtype]:
    """Load a folder that `facts compress` wrote, to compute in float32, and the type of its weights."""
    result = load_compressed(folder)
    dtype = type_of(result.model)
    result.model.float()
    return result.with_summary(seconds={}), dtype  # those are another command's


def stored_type(network: nn.Module) -> torch.dtype:
    """The type of most values in the checkpoint that a network was built from; float32 if it is not on this machine."""
    path = network.recipe.checkpoint() if isinstance(network.recipe, Recipe) else None
    if path is None:
        return torch.float32
    types = Counter[torch.dtype]()
    for tensor in read_checkpoint(path).values():
        types[tensor.dtype] += tensor.numel()
    return max(HALVES.keys() & types.keys(), key=types.__getitem__, default=torch.float32)


def build(name: str, weights: str | None, num_classes: int | None, device: str | None) -> nn.Module:
    """Build the network of a name, in evaluation mode on its device (default: the GPU, if there is one)."""
    place = _device(device)  # before minutes of loading
    torch.manual_seed(0)  # random weights are the same in every run
    network = _recipe(name, weights, num_classes).build()
    if isinstance(network.recipe, TransformersModel) and vars(network).keys().isdisjoint(PROCESSORS):
        read_processors(network, Path(name))  # its weights are random, or elsewhere
    return network.to(place)


def original_of(compressed: nn.Module, weights: str | None, device: str | None) -> nn.Module:
    """Rebuild the network that a loaded one was made from, and move both to a device.

    Raises `ValueError` if its weights are not published, and for weights other than the ones it was made from.
    """
    place, recipe = _device(device), vars(compressed).get("recipe")
    if recipe is None:
        raise ValueError("nothing in the folder says how to rebuild the original: compare the two networks in Python")
    known: dict[str, str] = vars(compressed)["provenance"] or {}
    if weights is None and "repository" in known:
        weights = str(fetch(known["repository"]))
    if weights is None and not isinstance(recipe, TorchvisionModel):
        source = known.get("source", "not known")
        raise ValueError(f"the original's weights ({source}) are not published: give them as --weights FILE")
    torch.manual_seed(0)  # as `build` does
    original = replace(recipe, weights=weights or "pretrained").build()
    if known.get("sha256") not in (None, original.recipe.provenance().get("sha256")):
        raise ValueError(f"the folder was made from other weights ({known['source']}): give those as --weights FILE")
    if not isinstance(recipe, TransformersModel):
        original.pretrained_cfg = vars(compressed)["pretrained_cfg"]  # the images of both are the same
    compressed.to(place)
    return original.to(place)


def input_shape(network: nn.Module, sequence_length: int | None = None) -> tuple[int, ...]:
    """Shape of one image `[C, H, W]`, or of a window of tokens `[1, T]`."""
    if reads_tokens(network):
        return 1, sequence_length or Corpus.sequence_length
    return data_config(network)["input_size"]


def batch_of(network: nn.Module, shape: tuple[int, ...], size: int) -> Tensor:
    """Make a meaningless batch of inputs, given the `input_shape`."""
    return noise(network, (size, *meta_input(network, shape).shape[1:]), next(network.parameters()).device)


def _recipe(name: str, weights: str | None, num_classes: int | None) -> Recipe:
    if is_saved(name):
        raise ValueError(f"{name} is compressed already: name the network it was made from, and a smaller budget")
    chosen = weights or "pretrained"
    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    known, (base, _, variant), tag = models(), name.partition("."), name.partition("/")[2]
    if base in known and (not variant or variant in known[base]):
        if name.startswith(TIMM):
            return TimmModel(tag=tag, weights=chosen, arguments=arguments)
        if num_classes == 0:
            raise ValueError(f"--num-classes 0, no classifier, is for networks of timm, not for {name}")
        return TorchvisionModel(tag=tag, weights=chosen, arguments=arguments)
    folder = Path(name)
    if not name.startswith(TRANSFORMERS) and not (folder / CONFIGURATION).is_file():
        raise ValueError(f"there is no network {name!r}: {_instead_of(name, [*known])}")
    if num_classes is not None:
        raise ValueError(f"--num-classes is for networks of timm and torchvision, not for {name}")
    if name.startswith(TRANSFORMERS):
        return _of_transformers(published_configuration(tag), name, tag=tag, weights=chosen)
    own = next((folder / file for file in PUBLISHED if (folder / file).is_file()), folder / PUBLISHED[0])
    try:
        configuration = json.loads((folder / CONFIGURATION).read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIGURATION} is damaged: {error}") from error
    if not isinstance(configuration, dict) or not isinstance(configuration.get("model_type"), str):
        timms = configuration.get("architecture") if isinstance(configuration, dict) else None
        advice = f"name the network {TIMM}{timms} --weights {own}" if timms else "give the folder of such a network"
        raise ValueError(f"{folder / CONFIGURATION} is not transformers', which has a model_type: {advice}")
    return _of_transformers(configuration, name, configuration=configuration, weights=weights or str(own))


def _instead_of(name: str, known: list[str]) -> str:
    """Say which names are like an unknown one, or what names there are."""
    base = name.partition(".")[0]
    near = [each for each in known if each.endswith(f"/{base}")] or [each for each in known if each.startswith(base)]
    if REPOSITORY.fullmatch(name) and not name.startswith((TIMM, TORCHVISION)):
        near = [TRANSFORMERS + name]
    if near := near or get_close_matches(base, known):
        return f"is it {' or '.join(near[:3])}?"
    return (
        f"name one as {TIMM}NAME or {TORCHVISION}NAME (`facts list models`) or {TRANSFORMERS}OWNER/NAME, or give a "
        f"folder with the {CONFIGURATION} of transformers"
    )


def _of_transformers(settings: dict, name: str, **fields: Any) -> TransformersModel:
    """The recipe of a configuration's network; for a pair with a text encoder (CLIP, SigLIP), of its image encoder."""
    encoder = ImageEncoder.in_pair(settings)
    return ImageEncoder(**fields | {"configuration": encoder}) if encoder else _kind(settings, name)(**fields)


def _kind(configuration: dict, name: str) -> type[TransformersModel]:
    """The recipe of a configuration's class, or else of its type. Raises `ValueError` if it has none."""
    architectures, kind = configuration.get("architectures") or (), configuration.get("model_type")
    for recipe in (CausalLM, ImageClassifier):
        if any(architecture in names for names in recipe.classes().values() for architecture in architectures):
            return recipe
    known = {each for names in ImageEncoder.classes().values() for each in names}
    if any(getattr(import_transformers(), each).main_input_name == "pixel_values" for each in known & {*architectures}):
        return ImageEncoder
    for recipe in (CausalLM, ImageClassifier):
        if kind in recipe.classes():
            return recipe
    raise ValueError(f"{name}, a transformers {kind!r}, is no language model, image classifier or image encoder")


def _device(name: str | None) -> torch.device:
    """Device of a name. Raises `ValueError` if it is not on this machine."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:  # depending on the name and on how PyTorch was built
        raise ValueError(f"there is no device {name!r} here ({first_line(error)})") from error


def data_of(
    model: nn.Module, data: str, evaluation_text: str | None = None, sequence_length: int | None = None, **options: Any
) -> Data:
    """Images or a text for a network; an option of None is its default. Refuses a text shorter than a window."""
    if not data:
        raise ValueError("--data is empty: name a folder, a text file or a data set")
    options = {name: value for name, value in options.items() if value is not None}
    if not reads_tokens(model):
        images = ImageFolder(root=Path(data), **options)
        images.inspect()
        if "whole" not in options and (reason := no_labels(images, model)):
            log.info("%s: the network's own outputs are the labels", reason)
            found, images = images._found, replace(images, whole=True)  # nothing is measured on the other half
            vars(images).update(_found=found)
        return images.without_broken()
    options.pop("num_workers", None)  # windows of tokens are in memory
    if not options.pop("whole", True):
        raise ValueError("--unseen is for images: all of a text is measured, so name one not used to calibrate")
    if sequence_length:
        options["sequence_length"] = sequence_length
    texts = Corpus(training_text=data, evaluation_text=evaluation_text or data, **options)
    texts.inspect()
    splits: tuple[Split, ...] = ("training", "evaluation")
    for split in splits:
        windows(texts.tokens(split, model), texts.sequence_length)
    return texts


def task_of(
    model: nn.Module,
    data: str,
    evaluation_text: str | None,
    num_calibration: int | None,
    **options: Any,
) -> Data:
    """Calibration data: this many images or windows of text; without a number, all of them, up to a bound."""
    task = data_of(model, data, evaluation_text, num_calibration=num_calibration, **options)
    if isinstance(task, ImageFolder):
        count = len(task.chosen_indices()["calibration"])
        others = "" if task.whole else f"; {len(task.validation_images):,} others to evaluate on"
        few = "; a few hundred may give a better network" if count < ENOUGH_IMAGES else ""
        log.info("%s images to calibrate on, of which some are held out%s%s", f"{count:,}", others, few)
        if len({*task.training_images.labels.tolist()}) == 1 and task.labels(model) and not is_encoder(model):
            log.warning("all images are of one class: the others may be lost, so give images of every class")
        return task
    available = len(task.tokens("training", model)) // task.sequence_length
    num_sensitivity = max(1, min(task.num_sensitivity, num_calibration or available // 2))
    num_calibration = num_calibration or max(1, min(task.num_calibration, available - num_sensitivity))
    return replace(task, num_sensitivity=num_sensitivity, num_calibration=num_calibration)


def batches_of(task: Data, model: nn.Module) -> tuple[Any, Any]:
    """Batches to calibrate on, and for searches: windows of their own in texts, None for the same images."""
    return task.calibration(model), task.sensitivity(model) if isinstance(task, Corpus) else None


def nothing_to_evaluate(task: Data) -> str | None:
    """Reason why nothing can be measured after a compression, or None."""
    same = isinstance(task, Corpus) and task.evaluation_text == task.training_text
    return "give --evaluation-text, a different text than the one to calibrate on" if same else None


def no_labels(images: ImageFolder, model: nn.Module) -> str | None:
    """Reason why the images have no labels that a classifier knows, or None."""
    if is_encoder(model) or images.labels(model) is not None:
        return None
    if (problem := problem_of(model)) in DECLARED:
        return f"the network is for {problem}, for which folders and tables of single classes are no labels"
    if not images.classes:
        return f"{images.root} has no class folders and no labels"
    return f"the {len(images.classes)} classes at {images.root} are not the network's {num_classes(model)} classes"


def agreement(model: nn.Module, original: nn.Module, batches: Iterable[Batch], precision: torch.dtype) -> Tensor:
    """Whether both networks give an image the same first class, `[N]`. Raises `ValueError` without images."""
    images = [inputs for inputs, _ in batches]
    if not images:
        raise ValueError("there are too few images to hold some out")
    firsts = pass_over(images, original, lambda logits, _: logits.argmax(dim=-1), precision)
    return are_right(model, list(zip(images, firsts, strict=True)), precision)


def measured(
    task: Data, model: nn.Module, original: nn.Module, precision: torch.dtype, held_out: Iterable[Batch] | None = None
) -> dict[str, float]:
    """Measure top-1 accuracy in percent, perplexity, or an encoder's features compared with the original's.

    For images without labels it is the agreement of the first classes with the original's on those `held_out`.
    Returns also standard errors, if there are two samples or more, and the number of samples.
    """
    if isinstance(task, Corpus):
        losses, counts = losses_of_windows(model, task.evaluation(model), precision)
        outcomes = {"perplexity": losses / counts}
    elif is_encoder(model):
        outcomes = evaluate_features(model, original, *task.for_features(model), precision)
    elif held_out is not None and no_labels(task, model):
        if problem_of(model) == "regression":
            outcomes = evaluate_features(model, original, (), held_out, precision)
        else:
            outcomes = {"agreement": 100 * agreement(model, original, held_out, precision).double()}
    else:
        outcomes = {"top1": 100 * task.evaluate(model, precision).outcomes["top1"].double()}
    metrics = {}
    for name, samples in outcomes.items():
        summed = perplexity_of if name == "perplexity" else mean_and_error
        metrics[name], error = summed(samples, torch.ones_like(samples))  # windows are equally long
        if error is not None:
            metrics[name + STANDARD_ERROR] = error
    return metrics | {"num_samples": len(samples)}


def warn_of_chance(metrics: dict[str, float], original: nn.Module) -> None:
    """Warn if a classifier as it was given is no better than chance on its labels."""
    chance = 100 / (num_classes(original) or math.inf)
    if metrics["num_samples"] >= LEAST_JUDGED and metrics.get("top1", 100) <= chance:
        log.warning("the original's accuracy is that of chance: are the class folders named as the network's classes?")


def with_errors(metrics: Mapping[str, float]) -> dict[str, str]:
    """Write metrics, each with its standard error if that is known."""
    errors = {name: f" ± {metrics[name + STANDARD_ERROR]:.2g}" for name in metrics if name + STANDARD_ERROR in metrics}
    return {
        name: (f"{value:,}" if isinstance(value, int) else f"{value:.4g}") + errors.get(name, "")
        for name, value in metrics.items()
        if not name.endswith(STANDARD_ERROR)
    }


def compared(task: Data, result: CompressionResult, original: nn.Module, precision: torch.dtype) -> tuple[Metrics, str]:
    """Measure both networks; return the metrics of each, and a table of them."""
    networks = original, result.model
    before, after = (measured(task, each, original, precision, result.held_out) for each in networks)
    warn_of_chance(before, original)
    count = f"{before.pop('num_samples'):,} samples"
    metrics: Metrics = {name: {"original": before[name], "compressed": after[name]} for name in before}
    texts = with_errors(before), with_errors(after)
    rows = [(name, *(text[name] for text in texts)) for name in texts[0]]
    headers = (count, "original", "compressed")
    return metrics, tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "right", "right"))
