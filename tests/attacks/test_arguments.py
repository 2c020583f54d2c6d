"""Arguments that no call can serve: each is refused by a line that says what is allowed, before any work.

To add an attack, add a line.
"""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import facts
from facts.estimators import FACTS, PELA, KroneckerFactors
from facts.moments.losses import kl_divergence
from facts.search import Uniform
from facts.search.base import SearchResult
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
    """A network that runs another one in its own way."""
    return Net(lambda net, x: run(net.network, x), network=make_model(torch.float32))


def with_input(network, x):
    return network(x), x


def of_first(outputs, labels):
    return F.cross_entropy(outputs[0], labels, reduction="sum")


class AppleParameter(nn.Parameter):
    is_mps = True


class Narrow(PELA):
    def factors(self, moments):
        return KroneckerFactors(A=torch.eye(5))


class Planning(Uniform):
    """Plans what it was made to."""

    def __init__(self, **ranks):
        object.__setattr__(self, "ranks", ranks)

    def allocate(self, problem):
        return SearchResult({name: self.ranks.get(name, 1) for name in problem.layers if self.ranks.get(name) != 0})


def in_inference_mode(run, *arguments):
    with torch.inference_mode():
        return run(*arguments)


def compress(model=None, data=BATCHES, **options):
    return facts.compress(make_model(torch.float32) if model is None else model, data, **options)


def holding(parameter):
    return compress(nn.ParameterList([parameter]))


NUMBER = "ratio is the fraction that remains and must lie in"
ATTACKS = {
    # networks
    "a name for a network": (lambda: compress("vit"), "the model must be a torch.nn.Module, got a str"),
    "a quantised network": (lambda: holding(INTEGERS), "compress it first and quantise the"),
    "a network without weights": (lambda: compress(nn.ReLU()), "ReLU has no weights in floating point"),
    "a network on an Apple GPU": (
        lambda: holding(AppleParameter()),
        "cannot compute in float64, which decides ranks: use",
    ),
    "a network on meta": (lambda: compress(make_model().to("meta")), "is on the meta device, without values"),
    "a layer called by keyword": (lambda: compress(Net(by_keyword, **SIZES)), r"layer second is called by keyword"),
    "samples instead of batches": (
        lambda: compress(timm.create_model("test_vit"), [torch.zeros(3, 160, 160)] * 4),
        r"VisionTransformer cannot read the first sample of float32 \[3, 160, 160\] .*: a batch has its samples along",
    ),
    "lazy layers": (lambda: holding(nn.UninitializedParameter()), "has lazy layers without weights yet: run it"),
    "a traced module": (
        lambda: compress(nn.Sequential(torch.jit.ScriptModule())),
        "ScriptModule is TorchScript: give the module that it was traced or scripted from",
    ),
    **{
        name: (lambda run=run: compress(wrapped(run)), message)
        for name, run, message in (
            ("no gradients", torch.no_grad()(lambda network, x: network(x)), "^layer .* is called without gradients"),
            ("detached outputs", lambda network, x: network(x).detach(), "the network detaches its outputs"),
            ("infinite outputs", lambda network, x: network(x) - torch.inf, "have an error of nan from themselves"),
        )
    },
    "inputs of NaN": (
        lambda: compress(data=[IMAGES * torch.nan]),
        "the inputs hold NaN or infinity, leave such samples",
    ),
    "a pair in place of pairs": (lambda: compress(data=(IMAGES, LABELS)), r"cannot read .* of int64 \[8\] \("),
    "two layers of one weight": (
        lambda: compress(Tied(), layers=["1", "2", "3"], budget=facts.Budget(params=2500)),
        "layer 2 cannot be compressed: it shares its weight with 3. Leave it out, or give it a plain weight of its own",
    ),
    # data
    "texts for images": (lambda: compress(data=["a", "b"]), "got a str"),
    "no data": (lambda: compress(data=None), "FACTS needs calibration data"),
    "labels of another shape": (lambda: compress(data=[(IMAGES, LABELS[:3])]), "samples has 3 labels"),
    "a batch without samples": (lambda: compress(data=[BATCHES[0], (IMAGES[:0], LABELS[:0])]), "holds no samples"),
    "sparse data": (lambda: compress(data=[IMAGES.to_sparse()]), "a batch of the data is nested or torch.sparse_coo"),
    "no sensitivity data": (lambda: compress(sensitivity=[]), "the sensitivity data is empty"),
    "nothing to recover from": (lambda: facts.recover(compress(ratio=1), None), "got CompressionResult and NoneType"),
    "a network to recover": (lambda: facts.recover(make_model(), BATCHES), "a result of facts.compress.* EveryShape"),
    "two outputs": (
        lambda: facts.prepare(wrapped(with_input), BATCHES, loss=of_first, output_error=kl_divergence),
        "kl_divergence cannot compare the outputs of Net, tuple .*: give facts.prepare\\(..., output_error=",
    ),
    "a mean over samples": (lambda: compress(loss=F.cross_entropy), 'the loss must be a sum.* Give reduction="sum"'),
    "inference mode": (
        lambda: in_inference_mode(compress),
        r"nothing made under torch.inference_mode\(\) has gradients",
    ),
    "made in it": (lambda: compress(in_inference_mode(make_model)), "has gradients: build the network, and"),
    "a label for all": (lambda: compress(data=[(IMAGES, LABELS[0])]), r"outputs and targets that are .* int64 \[\]"),
    **{
        f"a {type(data).__name__} for batches": (lambda data=data: compress(data=data), "must be a loader or a list of")
        for data in (Path("photos"), "photos", {"images": IMAGES}, 5, make_model)
    },
    # budgets
    "ratio 0": (lambda: compress(ratio=0), NUMBER),
    "ratio NaN": (lambda: compress(ratio=float("nan")), NUMBER),
    # methods
    "an unknown estimator": (lambda: compress(estimator="fact"), "unknown estimator 'fact'; choose one of"),
    "an estimator's class": (lambda: compress(estimator=FACTS), r"a name or an instance: FACTS\(\), not FACTS"),
    "an unknown search": (lambda: compress(search="best"), "unknown search 'best'; choose one of"),
    "factors of another shape": (
        lambda: compress(estimator=Narrow()),
        r"Narrow gives A \[5, 5\] for layer grid; it must be \[6, 6\], or None for the identity",
    ),
    "a plan without a layer": (
        lambda: compress(search=Planning(grid=0)),
        "Planning must plan a rank, or None, .*; wrong for grid",
    ),
    "a rank beyond the layer": (lambda: compress(search=Planning(rows=99)), r"rank 99 for layer rows: .* 1 \.\. 11"),
    "an unknown form": (lambda: compress(form="round"), "form must be one of plain, pivoted, got 'round'"),
    "precision as a text": (lambda: facts.Execution("bfloat16"), "precision must be a type such as torch.bfloat16"),
    # places
    **{
        f"a network for {name}": (lambda name=name: getattr(facts, name)(make_model(), "a"), f"{name} needs a result")
        for name in ("save_compressed", "save_elastic", "push_to_hub")
    },
    "a file for the cache": (
        lambda: compress(execution=facts.Execution(cache=__file__)),
        "cannot write to the folder .*choose another one",
    ),
}


test_it_is_refused_in_one_line = refused(*ATTACKS.values(), error=(ValueError, OSError))
