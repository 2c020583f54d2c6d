"""Arguments that no call can serve, and no images: each is refused by a line that says what is allowed.

To add an attack, add a line.
"""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import facts
from facts.estimators import FACTS, PELA, KroneckerFactors
from facts.moments.losses import kl_divergence
from facts.search import Uniform
from facts.search.base import SearchResult
from facts.tasks.classification.images import decode
from tests.networks import image_batches, make_model
from tests.refusals import refused
from tests.toys import Net

pytestmark = [pytest.mark.attack, pytest.mark.system]

BATCHES = image_batches([8, 8], dtype=torch.float32)
IMAGES, LABELS = BATCHES[0]
SIZES = {"first": nn.Linear(192, 16), "second": nn.Linear(16, 12), "last": nn.Linear(12, 4)}
INTEGERS = nn.Parameter(torch.ones(4, 192, dtype=torch.int8), requires_grad=False)


def by_keyword(net, x):
    return net.last(torch.relu(net.second(input=torch.relu(net.first(x.flatten(1))))))


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 12), nn.Linear(12, 12), nn.Linear(12, 12))
        self[3].weight = self[2].weight


def wrapped(run):
    return Net(lambda net, x: run(net.network, x), network=make_model(torch.float32))


def of_first(outputs, labels):
    return F.cross_entropy(outputs[0], labels, reduction="sum")


class AppleParameter(nn.Parameter):
    is_mps = True


class Narrow(PELA):
    def factors(self, moments):
        return KroneckerFactors(A=torch.eye(5))


def planning(**ranks):
    class Planning(Uniform):
        def allocate(self, problem):
            return SearchResult({name: ranks.get(name, 1) for name in problem.layers if ranks.get(name) != 0})

    return Planning()


def in_inference_mode(run, *arguments):
    with torch.inference_mode():
        return run(*arguments)


def compress(model=None, data=BATCHES, **options):
    return facts.compress(make_model(torch.float32) if model is None else model, data, **options)


def holding(parameter):
    return compress(nn.ParameterList([parameter]))


test_it_is_refused_in_one_line = refused(
    (lambda: compress("vit"), "the model must be a torch.nn.Module, got a str"),
    (lambda: holding(INTEGERS), "compress it first and quantise the"),
    (lambda: compress(nn.ReLU()), "ReLU has no weights in floating point"),
    (lambda: holding(AppleParameter()), "cannot compute in float64, which decides ranks: use"),
    (lambda: compress(make_model().to("meta")), "is on the meta device, without values"),
    (lambda: compress(Net(by_keyword, **SIZES)), r"layer second is called by keyword"),
    (lambda: holding(nn.UninitializedParameter()), "has lazy layers without weights yet: run it"),
    (
        lambda: compress(nn.Sequential(torch.jit.ScriptModule())),
        "ScriptModule is TorchScript: give the module that it was traced or scripted from",
    ),
    (lambda: compress(wrapped(torch.no_grad()(lambda net, x: net(x)))), "^layer .* is called without gradients"),
    (lambda: compress(wrapped(lambda net, x: net(x).detach())), "the network detaches its outputs"),
    (lambda: compress(wrapped(lambda net, x: net(x) - torch.inf)), "have an error of nan from themselves"),
    (lambda: compress(data=[IMAGES * torch.nan]), "the inputs hold NaN or infinity, leave such samples"),
    (lambda: compress(data=(IMAGES, LABELS)), r"cannot read .* of int64 \[8\] \("),
    (
        lambda: compress(Tied(), layers=["1", "2", "3"], budget=facts.Budget(params=2500)),
        "layer 2 cannot be compressed: it shares its weight with 3. Leave it out, or give it a plain weight of its own",
    ),
    (lambda: compress(data=["a", "b"]), "got a str"),
    (lambda: compress(data=None), "FACTS needs calibration data"),
    (lambda: compress(data=[(IMAGES, LABELS[:3])]), "samples has 3 labels"),
    (lambda: compress(data=[BATCHES[0], (IMAGES[:0], LABELS[:0])]), "holds no samples"),
    (lambda: compress(data=[IMAGES.to_sparse()]), "a batch of the data is nested or torch.sparse_coo"),
    (lambda: compress(sensitivity=[]), "the sensitivity data is empty"),
    (lambda: facts.recover(compress(ratio=1), None), "got CompressionResult and NoneType"),
    (lambda: facts.recover(make_model(), BATCHES), "a result of facts.compress.* EveryShape"),
    (
        lambda: facts.prepare(wrapped(lambda net, x: (net(x), x)), BATCHES, loss=of_first, output_error=kl_divergence),
        "kl_divergence cannot compare the outputs of Net, tuple .*: give facts.prepare\\(..., output_error=",
    ),
    (lambda: compress(loss=F.cross_entropy), 'the loss must be a sum.* Give reduction="sum"'),
    (lambda: in_inference_mode(compress), r"nothing made under torch.inference_mode\(\) has gradients"),
    (lambda: compress(in_inference_mode(make_model)), "has gradients: build the network, and"),
    (lambda: compress(data=[(IMAGES, LABELS[0])]), r"outputs and targets that are .* int64 \[\]"),
    *(
        (lambda data=data: compress(data=data), "must be a loader or a list of")
        for data in (Path("photos"), "photos", {"images": IMAGES}, 5, make_model)
    ),
    (lambda: compress(ratio=0), "ratio is the fraction that remains and must lie in .* got 0"),
    (lambda: compress(ratio=float("nan")), "ratio is the fraction that remains and must lie in .* got nan"),
    (lambda: compress(estimator="fact"), "unknown estimator 'fact'; choose one of"),
    (lambda: compress(estimator=FACTS), r"a name or an instance: FACTS\(\), not FACTS"),
    (lambda: compress(search="best"), "unknown search 'best'; choose one of"),
    (
        lambda: compress(estimator=Narrow()),
        r"Narrow gives A \[5, 5\] for layer grid; it must be \[6, 6\], or None for the identity",
    ),
    (lambda: compress(search=planning(grid=0)), "Planning must plan a rank, or None, .*; wrong for grid"),
    (lambda: compress(search=planning(rows=99)), r"rank 99 for layer rows: .* 1 \.\. 11"),
    (lambda: compress(form="round"), "form must be one of plain, pivoted, got 'round'"),
    (lambda: facts.Execution("bfloat16"), "precision must be a type such as torch.bfloat16"),
    *(
        (lambda name=name: getattr(facts, name)(make_model(), "a"), f"{name} needs a result")
        for name in ("save_compressed", "save_elastic", "push_to_hub")
    ),
    (lambda: compress(execution=facts.Execution(cache=__file__)), "cannot write to the folder .*choose another one"),
    error=(ValueError, OSError),
)


def encoded(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


test_images_that_are_none = refused(
    (b"photo", "cannot identify"),
    (encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)))[:3000], "truncated"),
    (encoded(Image.new("1", (20_000, 20_000))), "exceeds limit"),  # a bomb of 400 megapixels
    (encoded(Image.new("1", (60_000, 1))), "60000 x 1 pixels are a strip"),
    (encoded(Image.fromarray(np.ones((8, 8), np.int32)), "TIFF"), "range"),  # of 32 bits
    by=decode,
    start="^no usable image: .*",
)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_shades(kind):
    """Within one step of 255, by which conversions differ in how they round."""
    grey = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64)
    shades = np.asarray(decode(encoded(Image.fromarray(grey), kind)))
    assert shades.shape == (48, 64, 3) and np.abs(shades - grey[..., None] / 257).max() <= 1
