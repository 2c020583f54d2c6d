"""What is installed besides the base packages, and what is left out without it."""

import sys

import pytest

from experiments.extras import MODULES, how_to_install, missing_packages
from experiments.grid import possible
from experiments.mini.train import mini_recipe
from experiments.preflight import extras, of_cells


@pytest.fixture
def without_operators(without_module):
    """As after a plain installation: mmcv is there, and its operators are not."""
    without_module("mmcv._ext")


def test_a_module_without_its_package_is_missing(monkeypatch):
    monkeypatch.setitem(MODULES, "mine", ("no_such_package.part", "torch.nn", "torch.no_such_part"))
    assert missing_packages("mine") == ["no_such_package.part", "torch.no_such_part"]
    assert missing_packages(None) == []


def test_mmcv_without_operators_is_noticed(cell_config, without_operators):
    assert missing_packages("detection") == ["mmcv's operators"]
    (finding,) = extras([cell_config("task=coco", "model=mask_rcnn_swin_b")])
    assert (finding.level, finding.detail) == ("problem", "mmcv's operators missing")
    assert finding.advice == how_to_install("detection") == "make install-detection"


def test_experiments_without_their_packages_are_left_out_and_named(cell_config, without_operators, caplog):
    experiments = [cell_config(f"experiment={name}").experiment for name in ("detection", "model_sizes")]
    assert [experiment.name for experiment in possible(experiments)] == ["model_sizes"]
    assert "detection is left out, since mmcv's operators are missing: make reproduce-all" in caplog.text


def test_what_cannot_be_built_is_not_looked_at(cell_config, without_operators):
    columns = [[cell_config("task=coco", "model=mask_rcnn_swin_b")], [cell_config("model=swin_b")]]
    findings = {finding.what: finding.level for finding in of_cells(columns)}
    assert findings["weights of swin_b"] == "fine"
    assert "weights of mask_rcnn_swin_b" not in findings
    assert [finding.level for finding in of_cells(columns[:1])] == ["problem"]


def test_a_network_of_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmdet.models", None)
    with pytest.raises(ImportError, match=r"mmdet cannot be imported .* make install-detection"):
        mini_recipe("mask_rcnn_swin_b", weights="random").build()
