"""Small networks that use linear layers in every way that the library has to understand."""

import pytest
import timm
import torch
from torch import nn

import facts
from facts.utils.batches import NumberedBatches
from tests.toys import Net

UNIFORM = {"search": "uniform", "form": "plain"}  # choices of which a test can say by hand what they give
LAYERS = ("grid", "windows", "rows", "tokens", "shared", "vector")
IMAGE_CLASSIFIERS = {
    "vit": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96},
    "swin": {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
}


class EveryShape(nn.Module):
    """Images `[N, 3, 8, 8]`; each layer is named after the tensors it sees.

    `grid` [N, H, W, d] as in ConvNeXt, `windows` [N·4, 4, d] as in Swin, `rows` [N·T, d] as in a Mamba mixer, `tokens`
    [N, T, d], `shared` [N, T, d] twice in a pass, `vector` [N, d], and a classifier that is not compressed.
    """

    def __init__(self, dim=6, num_classes=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=2, stride=2)
        self.grid = nn.Linear(dim, 10)
        self.windows = nn.Linear(10, dim + 5)
        self.rows = nn.Linear(dim + 5, 12, bias=False)
        self.tokens = nn.Linear(12, 10)
        self.shared = nn.Linear(10, 10)
        self.vector = nn.Linear(10, 14)
        self.head = nn.Linear(14, num_classes)

    def forward(self, images):
        x = self.patch_embed(images).permute(0, 2, 3, 1)  # [N, 4, 4, d]
        num_samples = len(x)
        x = torch.tanh(self.grid(x))
        x = x.reshape(num_samples, 2, 2, 2, 2, -1).transpose(2, 3).reshape(num_samples * 4, 4, -1)
        x = torch.tanh(self.windows(x))
        x = torch.tanh(self.rows(x.flatten(0, 1))).reshape(num_samples, 16, -1)
        weights = torch.softmax(x @ x.mT, dim=-1)  # tokens meet, so that their gradients differ
        x = torch.tanh(self.tokens(weights @ x))
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.shared(x))
        return self.head(torch.tanh(self.vector(x.mean(dim=1))))


class Stack(nn.Module):
    """Blocks on tokens `[N, 16, 12]` of images `[N, 3, 8, 8]`; `step(block, x)` is what comes after each of them."""

    def __init__(self, blocks, step=lambda block, x: block(x), stem=None):
        super().__init__()
        self.stem = stem or nn.Linear(12, 12)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(12, 4)
        self.step = step

    def forward(self, images):
        x = self.stem(images.reshape(len(images), 16, 12))
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(x.mean(dim=1))


def image_batches(sizes, num_classes=4, shape=(3, 8, 8), dtype=torch.float64, seed=1):
    """Batches of the given sizes, the same images whatever the sizes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(num_classes, (sum(sizes),), generator=generator)
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


def compress_on_all(model, batches, **options):
    """Compress without holding samples out, to compare with what is computed from all of them."""
    own = {name: options.pop(name) for name in ("layers", "execution", "loss") if name in options}
    return facts.compress(facts.prepare(model, batches, held_out=(), **own), **options)


def numbered(batches, before_batch=lambda: None, key=None):
    """The same batches, read by number; `before_batch()` is called before each is handed out."""

    def finish(batch):
        before_batch()
        return batch

    return NumberedBatches(batches, finish, key, range(len(batches)))


class Runs:
    """Counts the runs of a module on samples with values, in `number`.

    A layer with hooks, such as this one, is also tried on a single vector.
    """

    def __init__(self, module):
        self.number = 0

        def count(module, args):  # a function, which copies of the module share
            self.number += not args[0].is_meta and args[0].shape[:-1] != (1,)

        module.register_forward_pre_hook(count)


def make_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return EveryShape().to(dtype)


def make_swin(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 2, "num_classes": 4, "embed_dim": 10, "window_size": 4}
    return timm.models.SwinTransformer(**sizes, depths=(2,), num_heads=(2,)).to(dtype)


def make_convnext(dtype=torch.float64):
    torch.manual_seed(0)
    return timm.models.ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(4, 6, 8, 10), ls_init_value=0.5).to(dtype)


def make_sharing(step=lambda block, x: block(x)):
    """Three blocks with a layer, used twice, that is also the stem's."""

    def block(net, x):
        return x + net.shared(torch.tanh(net.layer(torch.tanh(net.shared(x)))))

    torch.manual_seed(0)
    shared = nn.Linear(12, 12)
    return Stack([Net(block, layer=nn.Linear(12, 12), shared=shared) for _ in range(3)], step, stem=shared).double()


def make_vit(depth=3, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "num_classes": 4, "embed_dim": 16, "num_heads": 2}
    return timm.models.VisionTransformer(**sizes, depth=depth).to(dtype)


def make_causal_lm(kind="qwen3", dtype=torch.float64):
    """One of transformers; skips the test where that is not installed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    config = transformers.AutoConfig.for_model(kind, **sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def make_image_classifier(kind="vit", **settings):
    """One of transformers, for images `[3, 32, 32]` of 5 classes; skips the test where that is not installed."""
    transformers = pytest.importorskip("transformers")
    fields = {"image_size": 32, "patch_size": 4, "initializer_range": 0.2, **IMAGE_CLASSIFIERS[kind]}
    names = {} if "id2label" in settings else {"num_labels": 5}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**fields, **names, **settings})
    return transformers.AutoModelForImageClassification.from_config(config).eval()


@torch.no_grad()
def seen_by(module, network, images):
    """The inputs `[T, n]` of a module of the network."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    network(images)
    hook.remove()
    return torch.cat(seen)


def same_weights(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and x.equal(y) for (a, x), (b, y) in pairs)


def relative_error(actual, expected):
    return float((actual - expected).detach().norm() / expected.detach().norm())


@timm.models.register_model
def tiny_vit(pretrained=False, **options):
    """The smallest vision transformer of timm with fewer blocks and for smaller images: `timm/tiny_vit` by name."""
    small = {"img_size": 32, "patch_size": 8, "depth": 2, "pretrained_cfg_overlay": {"input_size": (3, 32, 32)}}
    given = {name: value for name, value in options.items() if value is not None}  # timm passes on all that it takes
    return timm.create_model("test_vit", **small | given)
