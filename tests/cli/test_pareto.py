"""`facts pareto`: a table and a plot of several methods."""

import pandas as pd
from PIL import Image

from tests.cli.conftest import VIT


def test_table_and_plot(run, photos, tmp_path):
    some = ("--estimators", "pela", "--searches", "cors_fisher,uniform", "--ratios", "0.4,0.6")
    result = run("pareto", *VIT, "--data", photos, *some, "--out", tmp_path)
    points = pd.read_csv(tmp_path / "pareto.csv")
    assert list(points.search) == ["original", "cors_fisher", "cors_fisher", "uniform", "uniform"]
    assert points.flops[1] < points.flops[2] < points.flops[0] and points.top1.between(0, 100).all()
    with Image.open(tmp_path / "pareto.png") as picture:
        assert picture.width > 800
    assert [line.split()[1] for line in result.stdout.splitlines()[1:6]] == list(points.search)


def test_nothing_to_compare(run, photos, tmp_path):
    network = ("timm/test_vit", "--weights", "random", "--num-workers", 0)
    result = run("pareto", *network, "--data", photos, "--out", tmp_path / "out", code=1)
    assert "there is nothing to compare by: the 3 classes" in result.output
    options = ("--estimators", "pela", "--searches", "cors", "--ratios", "0.000001")
    result = run("pareto", *VIT, "--data", photos, *options, "--out", tmp_path / "out", code=1)
    assert "no method produced a compressed network" in result.output
