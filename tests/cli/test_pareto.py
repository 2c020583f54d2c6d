"""`facts pareto`: a table and a picture of several methods, taken up again where it was."""

import pandas as pd
import pytest
from PIL import Image

from facts.cli import choices
from facts.modules import forms
from tests.cli.conftest import VIT

SOME = ("--estimators", "svd_llm,pela", "--ratios", "0.4,0.6")


def test_table_and_picture(run, photos, tmp_path):
    result = run("pareto", *VIT, "--data", photos, *SOME, "--out", tmp_path)
    points = pd.read_csv(tmp_path / "pareto.csv")
    assert list(points.estimator) == ["original", "svd_llm", "svd_llm", "pela", "pela"]
    assert points.flops[1] < points.flops[2] < points.flops[0]
    assert points.top1.between(0, 100).all()
    with Image.open(tmp_path / "pareto.png") as picture:
        assert picture.size == (1200, 800)
    assert "svd_llm, cors_fisher" in (tmp_path / "pareto.svg").read_text()
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == list(points.estimator)
    assert any(line.rstrip().endswith("*") for line in lines)


def test_forms_are_those_of_the_library():
    assert list(choices.FORMS) == list(forms.FORMS)


def test_both_forms_are_told_apart(run, photos, tmp_path):
    forms = ("--estimators", "pela", "--ratios", "0.4,0.6", "--forms", "plain,pivoted")
    result = run("pareto", *VIT, "--data", photos, *forms, "--out", tmp_path)
    points = pd.read_csv(tmp_path / "pareto.csv")
    assert list(points.form) == ["original", "plain", "plain", "pivoted", "pivoted"]
    assert [line.split()[2] for line in result.stdout.splitlines()[1:6]] == list(points.form)
    assert all(f"pela, cors_fisher, {form}" in (tmp_path / "pareto.svg").read_text() for form in ("plain", "pivoted"))


def test_a_second_start_computes_only_what_is_missing(run, photos, tmp_path, caplog):
    run("pareto", *VIT, "--data", photos, *SOME, "--out", tmp_path)
    before = pd.read_csv(tmp_path / "pareto.csv")
    caplog.clear()
    run("pareto", *VIT, "--data", photos, "--estimators", "svd_llm,pela,asvd", "--ratios", "0.4,0.6", "--out", tmp_path)
    after = pd.read_csv(tmp_path / "pareto.csv")
    pd.testing.assert_frame_equal(after[: len(before)], before)
    assert list(after.estimator[len(before) :]) == ["asvd", "asvd"]
    done = [message for message in caplog.messages if "top1" in message]
    assert [message.split(":")[0] for message in done] == [
        f"asvd, cors_fisher, pivoted, {ratio}" for ratio in (0.4, 0.6)
    ]


def test_points_of_mixed_images_are_others(run, photos, tmp_path):
    arguments = ("pareto", *VIT, "--data", photos, "--estimators", "svd_llm", "--ratios", "0.4", "--out", tmp_path)
    tables = []
    for option in ((), ("--cutmix",)):
        run(*arguments, *option)
        tables.append(pd.read_csv(tmp_path / "pareto.csv"))
    before, after = tables
    pd.testing.assert_frame_equal(after[: len(before)], before)
    assert len(before) == 2 and len(after) == 4  # the original beside each


def test_labels_are_needed(run, photos, tmp_path):
    network = ("timm/test_vit", "--weights", "random", "--num-workers", 0)
    result = run("pareto", *network, "--data", photos, "--out", tmp_path / "out", code=1)
    assert "there is nothing to compare by: the 3 classes" in result.output


def test_no_method_succeeds(run, photos, tmp_path):
    options = ("--estimators", "pela", "--searches", "cors", "--ratios", "0.000001")
    result = run("pareto", *VIT, "--data", photos, *options, "--out", tmp_path / "out", code=1)
    assert "no method got as far as a compressed network" in result.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--estimators", "facts,fact"), 2, "'fact' is none of aafm, asvd, facts"),
        (("--searches", "core"), 2, "'core' is none of asvd, comcat"),
        (("--ratios", "0.3,half"), 2, "could not convert string to float: 'half'"),
        (("--ratios", "0.3,2"), 1, "must lie in (0, 1], got 2"),
        (("--cost", "joules"), 2, "'joules' is not one of"),
    ],
)
def test_wrong_choices(run, photos, tmp_path, options, code, message):
    result = run("pareto", *VIT, "--data", photos, *options, "--out", tmp_path / "out", code=code)
    assert message in result.output
