"""Loaders give data in many forms; all of them mean the same to the network."""

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import facts
from facts.calibration.data import FirstSamples, as_batches
from facts.moments import InputSum
from facts.moments.losses import SampledLabels, summed_cross_entropy
from tests.networks import UNIFORM, image_batches, make_causal_lm, make_model

TOKENS = torch.arange(24).reshape(3, 8)


@pytest.fixture
def model():
    return make_model(torch.float32)


def weights_of(result):
    return torch.cat([tensor.flatten() for tensor in result.model.state_dict().values()])


class TestClassifiers:
    def test_a_loader_is_as_good_as_a_list(self, model):
        batches = image_batches([4, 4], dtype=torch.float32)
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        expected = facts.compress(model, batches)
        loader = DataLoader(TensorDataset(images, labels), batch_size=4)
        assert weights_of(facts.compress(model, loader)).equal(weights_of(expected))

    def test_data_without_labels_get_drawn_ones(self, model):
        """A loader of images alone, and one of tuples with nothing else in them."""
        batches = image_batches([4, 4], dtype=torch.float32)
        drawn = weights_of(facts.compress(model, batches, loss=SampledLabels(summed_cross_entropy)))
        images = [images for images, _ in batches]
        assert weights_of(facts.compress(model, images)).equal(drawn)
        assert weights_of(facts.compress(model, [(batch,) for batch in images])).equal(drawn)
        assert not weights_of(facts.compress(model, batches)).equal(drawn)

    def test_a_search_that_needs_labels_says_so(self, model):
        images = [images for images, _ in image_batches([4], dtype=torch.float32)]
        with pytest.raises(ValueError, match=r"no loss can be inferred from .* and NoneType"):
            facts.compress(model, images, search="comcat")

    def test_mappings_with_labels(self):
        transformers = pytest.importorskip("transformers")
        settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.ViTConfig(**settings, image_size=8, patch_size=4, num_labels=4)
        model = transformers.ViTForImageClassification(config).eval()
        batches = [
            {"pixel_values": images, "labels": labels} for images, labels in image_batches([4], dtype=torch.float32)
        ]
        result = facts.compress(model, batches)
        assert len(result.plan) == 12
        assert result.skipped == {"classifier": "its name holds `classifier`"}
        pairs = [({"pixel_values": batch["pixel_values"]}, batch["labels"]) for batch in batches]
        assert weights_of(facts.compress(model, pairs)).equal(weights_of(result))

    @pytest.mark.parametrize(("batch", "got"), [((1, 2, 3), "tuple of 3"), ("text", "str")])
    def test_another_form(self, model, batch, got):
        with pytest.raises(ValueError, match=rf"must be \(inputs, targets\), .*, got a {got}$"):
            facts.compress(model, [batch])

    def test_the_network_draws_no_labels_where_a_loss_is_given(self, model):
        images = [images for images, _ in image_batches([4], dtype=torch.float32)]
        seen = []

        def energy(outputs, targets):
            seen.append(targets)
            return outputs.square().sum()

        facts.compress(model, images, loss=energy, **UNIFORM)
        assert seen == [None]


class TestLanguageModels:
    def test_every_form_of_tokens(self):
        model = make_causal_lm()
        forms = [TOKENS, {"input_ids": TOKENS}, {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": TOKENS >= 0}]
        for batch in forms:
            ((tokens, targets),) = as_batches([batch], model)
            assert tokens.equal(TOKENS)
            assert targets.equal(facts.next_tokens(TOKENS))

    def test_labels_that_leave_something_out(self):
        labels = TOKENS.masked_fill(TOKENS % 8 < 3, -100)
        ((_, targets),) = as_batches([{"input_ids": TOKENS, "labels": labels}], make_causal_lm())
        assert targets[0].tolist() == [-100, -100, 3, 4, 5, 6, 7, -100]

    def test_padding(self):
        mask = torch.ones_like(TOKENS)
        mask[1, 5:] = 0
        with pytest.raises(ValueError, match=r"the texts are padded, .*: cut them into windows of one length"):
            facts.compress(make_causal_lm(), [{"input_ids": TOKENS, "attention_mask": mask}])


def test_first_samples_stop_at_the_batch_that_fills_them():
    batches = image_batches([3, 3, 3])
    assert [len(images) for images, _ in FirstSamples(batches, 4)] == [3, 3]


class OneIterator:
    """An iterable that is no iterator, but gives the same one each time."""

    def __init__(self, batches):
        self.iterator = iter(batches)

    def __iter__(self):
        return self.iterator


class Stream(OneIterator, IterableDataset):
    """Samples for a loader."""


@pytest.mark.parametrize("form", ["iterator", "iterable", "loader"])
def test_no_sample_is_lost_if_the_data_can_be_read_once(model, form):
    batches = image_batches([16] * 4, dtype=torch.float32)
    samples = [(image, label) for images, labels in batches for image, label in zip(images, labels, strict=True)]
    data = {
        "iterator": iter(batches),
        "iterable": OneIterator(batches),
        "loader": DataLoader(Stream(samples), batch_size=16),
    }[form]
    seen = facts.prepare(model, data).moments([InputSum()])
    expected = facts.prepare(model, batches).moments([InputSum()])
    for name, moments in expected.items():
        assert seen[name].num_samples == moments.num_samples == 64
        torch.testing.assert_close(seen[name][InputSum()], moments[InputSum()])


def test_an_iterator_is_read_once(model):
    batches = as_batches(iter(image_batches([2, 2])), model)
    assert len(list(batches)) == len(list(batches)) == 2
    assert as_batches(batches, model) is batches
    assert as_batches(None, model) is None


def test_a_loader_that_shuffles_gives_the_same_batches_in_every_pass():
    loader = DataLoader(TensorDataset(torch.arange(20.0), torch.arange(20)), batch_size=4, shuffle=True)
    state = torch.random.get_rng_state()
    first, second = ([images.tolist() for images, _ in as_batches(loader, nn.Identity())] for _ in range(2))
    assert first == second
    assert first != [[*range(start, start + 4)] for start in range(0, 20, 4)]
    assert torch.random.get_rng_state().equal(state)  # nobody else's numbers have changed


def test_processes_share_the_batches_of_a_loader_that_shuffles():
    """Batch k of the one order belongs to process k % 2, in every pass."""
    loader = DataLoader(TensorDataset(torch.arange(20.0), torch.arange(20)), batch_size=4, shuffle=True)
    batches = as_batches(loader, nn.Identity())
    expected = [images.tolist() for images, _ in batches]
    for rank in (0, 1, 0, 1):
        assert [images.tolist() for images, _ in batches.shard(rank, 2)] == expected[rank::2]


def test_targets_that_do_not_follow():
    model = make_causal_lm()
    for targets in (TOKENS, torch.ones_like(TOKENS)):
        with pytest.raises(ValueError, match="the targets of a language model are the tokens that follow"):
            facts.compress(model, [(TOKENS, targets)])


def test_the_column_label_of_many_data_sets():
    ((inputs, labels),) = as_batches([{"pixel_values": TOKENS, "label": TOKENS[:, 0]}], nn.Identity())
    assert (list(inputs), labels.tolist()) == (["pixel_values"], [0, 8, 16])


def test_an_encoder_and_a_decoder():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    result = facts.compress(model, [{"input_ids": TOKENS, "labels": TOKENS}], ratio=0.7)
    assert any(name.startswith("decoder") for name in result.plan)
    assert any(name.startswith("encoder") for name in result.plan)
    assert "lm_head" in result.skipped


@pytest.mark.parametrize("shape", [(4, 1), (4, 10, 6, 6), (4,)])
def test_labels_are_drawn_from_class_logits_alone(shape):
    """Not from the width of a map, nor from one number."""
    with pytest.raises(ValueError, match="labels can only be drawn from class logits"):
        SampledLabels(summed_cross_entropy)(torch.randn(shape), None)


def test_a_network_without_a_classifier_draws_no_labels():
    model = timm.create_model("test_vit", num_classes=0)
    with pytest.raises(ValueError, match="VisionTransformer has no classifier to draw labels from: give targets"):
        facts.compress(model, [torch.randn(2, 3, 160, 160)])


@pytest.mark.parametrize("search", ["cors", "cors_fisher", "comcat"])
def test_inputs_that_ask_for_gradients_get_none(search):
    batches = [(images.requires_grad_(), labels) for images, labels in image_batches([8, 8])]
    result = facts.compress(make_model(), batches, search=search, ratio=0.5)
    facts.recover(result, batches, epochs=1, batch_size=4, views=False)
    assert all(images.grad is None and images.requires_grad for images, _ in batches)
