"""The choices of `facts.compress` if nothing is named: the best known, and those of the paper in no experiment."""

import pytest
import torch
from hydra import compose, initialize_config_dir

import facts
from experiments.config import CONF
from facts.moments.losses import SampledLabels, summed_cross_entropy
from tests.networks import image_batches, make_model


def made(*data, dtype=torch.float32, **options):
    return facts.compress(make_model(dtype), *data, ratio=0.6, **options).summary


def test_facts_cors_fisher_and_pivoted_layers():
    summary = made(image_batches([8], dtype=torch.float32))
    assert summary.estimator.startswith("FACTS(") and summary.form == "pivoted"
    assert summary.search.startswith("CoRSFisher(") and "labels='sampled'" in summary.search


def test_without_data_uniform_ranks():
    assert made(estimator="pela").search.startswith("Uniform(")


def own(outputs, targets):
    return outputs.square().sum()


@pytest.mark.parametrize(("loss", "labels"), [(own, "given"), (SampledLabels(summed_cross_entropy), "sampled")])
def test_labels_are_drawn_from_class_logits_alone(loss, labels):
    images = [images for images, _ in image_batches([8], dtype=torch.float32)]
    assert f"labels='{labels}'" in made(images, loss=loss).search


def test_plain_layers_in_half_precision():
    assert made(image_batches([8], dtype=torch.bfloat16), dtype=torch.bfloat16).form == "plain"
    assert made(image_batches([8], dtype=torch.float32), precision=torch.bfloat16).form == "plain"


def test_experiments_name_the_paper_s_choices():
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("config")
    assert (config.form, config.search["_target_"]) == ("plain", "facts.search.Uniform")
