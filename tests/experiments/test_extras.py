"""Optional packages, and what is left out without them."""

import sys

import pytest

from experiments.grid import possible
from experiments.mini.train import mini_recipe


def test_experiments_without_their_packages_are_left_out_and_named(cell_config, without_module, caplog):
    without_module("mmcv._ext")
    experiments = [cell_config(f"experiment={name}").experiment for name in ("detection", "model_sizes")]
    assert [experiment.name for experiment in possible(experiments)] == ["model_sizes"]
    assert "detection is left out, since mmcv._ext are missing: make reproduce-all" in caplog.text


def test_a_network_of_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmdet.models", None)
    with pytest.raises(ImportError, match=r"mmdet cannot be imported .* make install-detection"):
        mini_recipe("mask_rcnn_swin_b", weights="random").build()
