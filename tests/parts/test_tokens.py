"""Merging tokens in a network: which blocks and tokens can, and what becomes of the merged network."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
import transformers
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import SiglipVisionConfig, SiglipVisionModel

import facts
from facts.models import TimmModel
from facts.modules.merging import by_ward
from facts.modules.tokens import Merge, MergedBlock, change_block
from facts.moments.batch import LayerBatch
from facts.parts.tokens import Merging
from facts.saving import standalone
from tests.merging import SIZES, SMALL, batches, spread, vit
from tests.refusals import refuses
from tests.toys import Net


@pytest.fixture(scope="module")
def prepared():
    return facts.prepare(vit(), batches(), parts=("units", "tokens"))


@pytest.fixture(scope="module")
def result(prepared):
    return facts.compress(prepared, ratio=0.6)


def test_without_merging_the_outputs_are_the_originals():
    model, (x, _), *_ = vit(), *batches()
    changed = copy.deepcopy(model)
    for block in changed.blocks:
        change_block(block, MergedBlock, Merge())
    assert torch.allclose(changed(x), model(x), rtol=0, atol=1e-10)


class FirstToken(nn.Module):
    def forward(self, x):
        return x[:, :1]


def test_a_module_of_another_class_behind_the_blocks_sees_all_tokens():
    model, (x, _), *_ = vit(), *batches()
    merged = facts.compress(model, batches(), parts="tokens", search="uniform", ratio=0.6).model
    model.blocks.append(FirstToken())
    other = facts.compress(model, batches(), parts="tokens", search="uniform", ratio=0.6).model
    assert type(other.blocks[-1]) is FirstToken and not torch.allclose(merged(x), model(x))
    assert torch.allclose(other(x), merged(x), rtol=0, atol=1e-10)


def test_merging_equal_tokens_changes_nothing_and_each_keeps_its_place():
    """Without positions, images of pairs of equal columns: half of the tokens are copies."""
    model = vit(num_classes=0, global_pool="", class_token=False)
    model.pos_embed.data.zero_()
    images = torch.randn(4, 3, 64, 32).double()
    images = torch.cat([each for part in images.split(16, dim=-1) for each in (part, part)], dim=-1)
    merged = copy.deepcopy(model)
    for part in facts.prepare(model, [images], parts="tokens").parts.values():
        part.put(merged, 8)
        merged.get_submodule(part.owner).tokens.directions = torch.eye(48)
    expected = model(images)
    assert merged(images).shape == expected.shape
    assert torch.allclose(merged(images), expected, rtol=0, atol=1e-6)  # shares are float32


def test_outputs_permute_with_tokens():
    """As long as pairs merge: among three, the order of tokens decides which one the others are compared with."""
    model, order = vit(num_classes=0, global_pool="", class_token=False), torch.randperm(16)
    model.pos_embed.data.zero_()
    prepared = facts.prepare(model, [x for x, _ in batches()], parts="tokens")
    plan = {"blocks.0.tokens": 14, "blocks.1.tokens": None, "blocks.2.tokens": 12}
    merged = prepared.apply(plan, prepared.decompositions(facts.estimators.FACTS()))
    patches = torch.randn(2, 16, 3, 16, 16).double()
    found, permuted, dense = (
        network(each.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3))
        for network, each in ((merged, patches), (merged, patches[:, order]), (model, patches))
    )
    assert torch.allclose(permuted, found[:, order], rtol=0, atol=1e-5) and not torch.allclose(found, dense)


def as_published(model, image, counts):
    """Token Merging by the letter, one sample: the r most similar pairs of mean keys, and proportional attention."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(image)))
    sizes = torch.ones(x.shape[1], dtype=x.dtype)
    for block, count in zip(model.blocks, counts, strict=True):
        attention, num_tokens = block.attn, x.shape[1]
        qkv = attention.qkv(block.norm1(x)).reshape(num_tokens, 3, attention.num_heads, -1).permute(1, 2, 0, 3)
        weights = (qkv[0] @ qkv[1].mT * attention.scale + sizes.log()).softmax(dim=-1)
        x = x + attention.proj((weights @ qkv[2]).transpose(0, 1).flatten(1))
        keys = nn.functional.normalize(qkv[1].mean(dim=0), dim=-1)
        pairs = []
        for a in range(1, num_tokens, 2):
            b = max(range(2, num_tokens, 2), key=lambda b: keys[a] @ keys[b])
            pairs.append((-(keys[a] @ keys[b]).item(), a, b))
        sums, weight, gone = x[0] * sizes[:, None], sizes.clone(), set()
        for _, a, b in sorted(pairs)[: num_tokens - count]:
            sums[b], weight[b] = sums[b] + sums[a], weight[b] + weight[a]
            gone.add(a)
        left = [place for place in range(num_tokens) if place not in gone]
        x, sizes = (sums[left] / weight[left, None])[None], weight[left]
        x = x + block.mlp(block.norm2(x))
    return model.forward_head(model.norm(x))


def test_without_a_metric_it_is_token_merging_as_published(tmp_path):
    model, data = vit(), batches()
    prepared = facts.prepare(model, data, parts="tokens", execution=facts.Execution(cache=tmp_path / "cache"))
    result = facts.compress(prepared, estimator="pela", search="uniform", ratio=0.7)
    counts = [*result.plan.values()]
    assert counts[0] > counts[1] > counts[2]
    planned = result.problem.prepared.saved_flops(result.plan)  # without a metric, and without activations
    assert planned < result.summary.before.flops - result.summary.after.flops < 1.02 * planned
    for image in data[0][0][:3]:
        assert torch.allclose(result.model(image[None]), as_published(model, image[None], counts), atol=1e-6)
    facts.save_compressed(result, tmp_path / "saved")
    assert facts.load_compressed(tmp_path / "saved", vit()).model(data[0][0]).equal(result.model(data[0][0]))
    result.model.blocks[0].attn.fused_attn = False
    refuses("the keys of this attention are not seen", result.model, data[0][0])


def encoder(norm_first, batch_first=True):
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=norm_first, batch_first=batch_first)

    def run(net, x):
        return net.head(net.encoder(x if batch_first else x.transpose(0, 1)).mean(dim=1 if batch_first else 0))

    return Net(run, encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head=nn.Linear(16, 4))


# The network, the shape of its inputs, its protected tokens, and where it merges.
NETWORKS = {
    "timm": (vit, (3, 64, 64), 1, "norm2"),
    "distilled": (lambda: vit("deit_tiny_distilled_patch16_224"), (3, 64, 64), 2, "norm2"),
    "side by side": (lambda: vit(block_fn=ParallelScalingBlock), (3, 64, 64), 1, ""),  # attention and MLP
    "torchvision": (lambda: torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64), (3, 64, 64), 1, "ln_2"),
    "ViT": (lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES)), (3, 32, 32), 1, "layernorm_after"),
    "DINOv2": (lambda: transformers.Dinov2Model(transformers.Dinov2Config(**SIZES)), (3, 32, 32), 1, "norm2"),
    "SigLIP": (lambda: SiglipVisionModel(SiglipVisionConfig(**SIZES)), (3, 32, 32), 0, "layer_norm2"),
    "norm first": (lambda: encoder(norm_first=True), (12, 16), 0, "norm2"),
    "norm last": (lambda: encoder(norm_first=False), (12, 16), 0, "norm1"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_with_global_attention_merge_after_it_or_else_before_the_block(name):
    build, shape, protected, entry = NETWORKS[name]
    prepared = facts.prepare(spread(build()), [x for x, _ in batches(shape)], parts="tokens")
    assert {(part.protected, part.entry) for part in prepared.parts.values()} == {(protected, entry)}
    search = "cors_fisher" if name in ("side by side", "norm first", "norm last") else "uniform"
    result = facts.compress(prepared, ratio=0.6, search=search)
    assert 0 < result.summary.spent["flops"] <= result.summary.budget["flops"] and result.summary.distance.mean < 1
    assert all(result.plan.values()) or search == "cors_fisher"


@pytest.mark.parametrize(
    ("tag", "sizes"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (2,), "num_heads": (2,)}),  # windows
        ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 1}),  # rotated queries and keys
        ("beit_base_patch16_224", {"img_size": 64, "depth": 1, "embed_dim": 48, "num_heads": 3}),  # biases
    ],
)
def test_blocks_whose_tokens_have_places_are_left_alone(tag, sizes):
    model, data = spread(timm.create_model(tag, **sizes)), batches((3, sizes["img_size"], sizes["img_size"]))
    prepared = facts.prepare(model, data, parts=("layers", "tokens"))
    reasons = [reason for part, reason in prepared.skipped.items() if part.endswith(".tokens")]
    assert reasons and all("places of its tokens" in reason for reason in reasons)
    assert not any(part.shortens for part in prepared.parts.values())
    message = rf"no tokens of this {type(model).__name__} can be merged \([\w\.]*blocks\.0\.tokens: a"
    refuses(message, facts.prepare, model, data, parts="tokens")


def test_samples_along_another_axis_have_their_own_reason():
    prepared = facts.prepare(spread(encoder(True, False)), batches((12, 16)), parts=("layers", "tokens"))
    assert "samples are not along the first axis" in prepared.skipped["encoder.layers.0.tokens"]


def test_slopes_are_the_gradients_times_the_moves(prepared):
    part = replace(prepared.parts["blocks.1.tokens"], tokens=9)  # as many levels as tokens
    x, g = torch.randn(5, part.tokens - part.protected, 48), torch.randn(5, part.tokens - part.protected, 48)
    decomposition = prepared.decompositions(prepared.resolve_defaults(facts.estimators.FACTS()))["blocks.1.tokens"]
    lost = part.slopes(LayerBatch(x, g), decomposition).flip(-1).cumsum(-1).flip(-1)  # at 0 .. T - 1 tokens
    count, means, features = len(x[0]), x, x @ decomposition.right.float().mT
    places, sizes = torch.arange(count).expand(5, -1), torch.ones(5, count)
    for number in range(count - 1, 0, -1):
        choice = by_ward(features, sizes, ones := torch.ones_like(sizes), number)
        (features, sizes), (means, _) = (choice.merged(each, ones) for each in (features, means))
        places = choice.places.gather(1, places)
        moved = means.take_along_dim(places[..., None], dim=1) - x
        assert torch.allclose(lost[:, part.protected + number], (g * moved).sum(dim=(1, 2)), atol=1e-4)


def texts(masked_from=None):
    """Six batches of texts of 16 tokens; behind the first batch, tokens are masked from this one on."""
    batches = [{"input_ids": torch.randint(1, 50, (4, 16)), "labels": torch.arange(4)} for _ in range(6)]
    for number, batch in enumerate(batches if masked_from else ()):
        batch["attention_mask"] = (torch.arange(16) < (masked_from if number else 16)).long().expand(4, 16)
    return batches


def bert():
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=32)
    return transformers.BertForSequenceClassification(config).eval()


def test_tokens_that_a_later_sample_masks_are_not_merged():
    model = bert()
    options = {"ratio": 0.7, "parts": "tokens", "search": "uniform"}
    refuses(r"no tokens of this .+ can be merged .+ or a mask", facts.compress, model, texts(10), **options)
    refuses("merges tokens, so none can be masked", facts.compress(model, texts(), **options).model, **texts(10)[1])


def test_a_network_in_training_mode_keeps_its_statistics():
    model = vit(depth=1)
    spectral_norm(model.blocks[0].mlp.fc1)  # whose vectors change with each call in training mode
    before = copy.deepcopy(model.state_dict())
    prepared = facts.prepare(model.train(), batches(), parts="units,tokens")
    assert "blocks.0.tokens" in prepared.parts
    assert all(tensor.equal(before[name]) for name, tensor in prepared.model.state_dict().items())


def test_a_batch_equals_its_samples_and_threads_do_not_disturb_each_other(result):
    ((x, _), *_), model = batches(), result.model
    expected = model(x)
    assert torch.allclose(torch.cat([model(each[None]) for each in x]), expected, atol=1e-10)
    with ThreadPoolExecutor(4) as pool:
        assert all(found.equal(expected) for found in pool.map(model, [x] * 12))


@pytest.mark.system
def test_it_is_copied_and_exported(result, tmp_path):
    ((x, _), *_), model = batches(), result.model
    expected = model(x)
    assert copy.deepcopy(model)(x).equal(expected) and pickle.loads(pickle.dumps(model))(x).equal(expected)
    shapes = {"x": {0: torch.export.Dim("n")}}
    assert torch.allclose(torch.export.export(model, (x,), dynamic_shapes=shapes).module()(x[:3]), expected[:3])
    facts.export_onnx(copy.deepcopy(model).float(), x.float(), tmp_path / "model.onnx")  # compares its outputs
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="eager")(x), expected)


def test_other_image_sizes_keep_the_share(tmp_path):
    """In the text that loads a folder without facts, too."""
    recipe = TimmModel(tag="vit_tiny_patch16_224", weights="random", arguments=SMALL | {"dynamic_img_size": True})
    result = facts.compress(spread(recipe.build()), batches(), parts="tokens", ratio=0.5, search="uniform")
    small = result.model
    sizes = []
    small.blocks[-1].mlp.fc1.register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[1]))
    for side in (64, 128):
        small(torch.randn(2, 3, side, side).double())
    assert sizes[1] - 1 == pytest.approx(4 * (sizes[0] - 1), abs=2)
    facts.save_compressed(result, tmp_path)
    images = torch.randn(2, 3, 128, 128).double()
    torch.testing.assert_close(standalone.load(tmp_path)(images), small(images), rtol=1e-4, atol=1e-5)


def test_tokens_of_a_loaded_network_can_be_changed(result, tmp_path):
    (x, _), *_ = batches()
    facts.save_compressed(result, tmp_path)
    loaded, seen = facts.load_compressed(tmp_path, vit()), []
    model = loaded.model
    assert loaded.plan == result.plan and model(x).equal(result.model(x))
    model.blocks[-1].mlp.fc1.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    *_, last = (name for name, count in result.plan.items() if name.endswith(".tokens") and count)
    for count in (3, 2, result.plan[last]):
        facts.set_tokens(model, {last: count})
        found = model(x)
    assert seen[:2] == [3, 2] and found.equal(result.model(x))
    refuses(f"{last} can have 2 to 17 tokens, not 1", facts.set_tokens, model, {last: 1})
    refuses("head merges no tokens: choose from blocks", facts.set_tokens, model, {"head": 3})


@pytest.mark.system
@pytest.mark.parametrize("alone", [True, False])
def test_a_folder_for_every_budget_is_cut(alone, result, tmp_path):
    (x, _), *_ = batches()
    if alone:
        result = facts.compress(vit(), batches(), parts="tokens", ratio=0.6)
    facts.save_elastic(result, tmp_path)
    assert facts.load_compressed(tmp_path, vit()).model(x).allclose(vit()(x))
    calibration = result.problem.prepared
    dense = sum(part.flops(None, {}) for part in calibration.parts.values())
    cut = facts.load_compressed(tmp_path, vit(), ratio=0.4)
    assert 0 < cut.summary.spent["flops"] <= cut.summary.budget["flops"] <= 0.4 * dense
    again = calibration.apply(cut.plan, calibration.decompositions(result.problem.estimator))
    assert cut.model(x).allclose(again(x), atol=1e-6) and any(n for p, n in cut.plan.items() if "tokens" in p)


class Prompted(nn.Module):
    """Tokens of its own stand in front of those of the data, between them, and behind; two lists of blocks see them."""

    def __init__(self):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True) for _ in range(4)]
        self.early, self.late = nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:])
        self.own, self.head = nn.Parameter(torch.randn(6, 16)), nn.Linear(16, 4)

    def hidden(self, x):
        one, two, three = (each.expand(len(x), -1, -1) for each in self.own.split((1, 2, 3)))
        x = torch.cat([one, x[:, :8], two, x[:, 8:], three], dim=1)
        for block in (*self.early, *self.late):
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.hidden(x)[:, 0])


def test_tokens_that_do_not_come_from_the_data_are_never_merged(tmp_path):
    model, data = spread(Prompted()), batches((24, 16))
    prepared = facts.prepare(model, data, parts="tokens")
    assert {part.places for part in prepared.parts.values()} == {(-3, -2, -1, 0, 9, 10)}
    result = facts.compress(prepared, search="uniform", ratio=0.5)
    facts.save_compressed(result, tmp_path)
    for network in (result.model, facts.load_compressed(tmp_path, spread(Prompted())).model):
        rows = network.hidden(data[0][0])
        for own in (0, 9, 10, 27, 28, 29):
            assert ((rows == rows[:, own, None]).all(dim=-1).sum(dim=1) == 1).all()
        assert all(len(each.unique(dim=0)) < 30 for each in rows)


def test_of_one_sample_of_integers_nothing_can_be_told_but_protected_tokens_can_be_said():
    model, one = bert(), texts()[0]
    alike = [{name: each[:1].expand(4, *each.shape[1:]) for name, each in one.items()}] * 6
    message = "only one sample of integers is known: say how many there are at the front"
    refuses(message, facts.prepare, model, alike, parts="tokens")
    prepared = facts.prepare(model, alike, parts="tokens", protected=5)
    assert {part.protected for part in prepared.parts.values()} == {5}


def test_two_calls_of_a_backbone_are_two_sequences(monkeypatch):
    seen, slopes = set(), Merging.slopes

    def noted(self, batch, decomposition):
        seen.add(tuple(batch.x.shape[1:]))
        return slopes(self, batch, decomposition)

    monkeypatch.setattr(Merging, "slopes", noted)
    modules = {"backbone": vit(num_classes=0, depth=2), "head": nn.Linear(48, 4)}
    siamese = Net(lambda net, x: net.head(net.backbone(x[:, 0]) - net.backbone(x[:, 1])), **modules)
    result = facts.compress(spread(siamese), batches((2, 3, 64, 64)), parts="tokens", ratio=0.6)
    assert seen == {(16, 48)} and any(result.plan.values())
