"""`facts pareto`: a table and a picture of several methods, continued where it stopped."""

import pandas as pd
from PIL import Image

from tests.cli.conftest import VIT

SOME = ("--estimators", "pela", "--ratios", "0.4,0.6", "--forms", "plain,pivoted")


def test_table_and_picture_are_continued(run, photos, tmp_path, caplog):
    result = run("pareto", *VIT, "--data", photos, *SOME, "--out", tmp_path)
    points = pd.read_csv(tmp_path / "pareto.csv")
    assert list(points.form) == ["original", "plain", "plain", "pivoted", "pivoted"]
    assert points.flops[1] < points.flops[2] < points.flops[0]
    assert points.top1.between(0, 100).all()
    with Image.open(tmp_path / "pareto.png") as picture:
        assert picture.size == (1200, 800)
    assert all(f"pela, cors_fisher, {form}" in (tmp_path / "pareto.svg").read_text() for form in ("plain", "pivoted"))
    lines = result.stdout.splitlines()
    assert [line.split()[2] for line in lines[1:6]] == list(points.form)
    assert any(line.rstrip().endswith("*") for line in lines)
    caplog.clear()
    run("pareto", *VIT, "--data", photos, *SOME, "--estimators", "pela,asvd", "--forms", "plain", "--out", tmp_path)
    after = pd.read_csv(tmp_path / "pareto.csv")
    pd.testing.assert_frame_equal(after[: len(points)], points)
    assert list(after.estimator[len(points) :]) == 2 * ["asvd"]
    done = [message.split(":")[0] for message in caplog.messages if "top1" in message]
    assert done == [f"asvd, cors_fisher, plain, {ratio}" for ratio in (0.4, 0.6)]


def test_nothing_to_compare(run, photos, tmp_path):
    network = ("timm/test_vit", "--weights", "random", "--num-workers", 0)
    result = run("pareto", *network, "--data", photos, "--out", tmp_path / "out", code=1)
    assert "there is nothing to compare by: the 3 classes" in result.output
    options = ("--estimators", "pela", "--searches", "cors", "--ratios", "0.000001")
    result = run("pareto", *VIT, "--data", photos, *options, "--out", tmp_path / "out", code=1)
    assert "no method produced a compressed network" in result.output
