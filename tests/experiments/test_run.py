"""One cell: its record, its fingerprint, what happens when it fails."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import experiments.methods
import experiments.runner
from experiments.mini import CHECKPOINTS
from experiments.record import read_record, read_records, write_record
from experiments.runner import open_cell, run_cell, subject_of
from facts.moments.losses import SampledLabels
from tests.disk import room_for
from tests.records import make_record, make_summary


def record_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "results/mini/records").glob("*.json"))


@pytest.mark.system
def test_a_cell_leaves_a_record_of_what_was_run_and_what_came_out(cell_config, tmp_path):
    record = run_cell(open_cell(cell_config("model=deit_b", "estimator=facts", "ratio=0.5")))
    assert record.status == "done"
    assert 10 < record.metrics["top1"] <= 100
    assert record.metrics["gflops"] > 0 and record.metrics["mparams"] > 0
    assert all(rank >= 1 for rank in record.plan.values()) and record.plan
    assert {"torch", "timm", "facts"} <= set(record.versions)
    digest = hashlib.sha256((CHECKPOINTS / "mini_deit.safetensors").read_bytes()).hexdigest()
    assert record.weights == {"source": "mini_deit.safetensors", "sha256": digest}
    assert record.config["estimator"]["_target_"] == "facts.estimators.FACTS"
    assert set(record.seconds) == {"reading", "calibration", "decomposition", "search", "evaluation"}
    (path,) = record_files(tmp_path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(record)))


@pytest.mark.system
def test_the_dense_network_is_a_cell_and_scores_more(cell_config):
    dense = run_cell(open_cell(cell_config("estimator=none")))
    small = run_cell(open_cell(cell_config("estimator=pela", "ratio=0.3")))
    assert dense.metrics["top1"] > small.metrics["top1"]
    assert dense.metrics["gflops"] > small.metrics["gflops"]
    assert dense.plan == {}


def test_a_finished_cell_is_not_run_again(cell_config, monkeypatch):
    first = run_cell(open_cell(cell_config("estimator=pela")))
    monkeypatch.setattr(experiments.runner, "measure", lambda cell: pytest.fail("measured twice"))
    assert run_cell(open_cell(cell_config("estimator=pela"))) == first


@pytest.mark.system
def test_the_fingerprint_follows_what_a_result_depends_on_and_nothing_else(cell_config, tmp_path):
    base = open_cell(cell_config()).fingerprint
    weights = shutil.copy(CHECKPOINTS / "mini_deit.safetensors", tmp_path / "copy.safetensors")
    same = ["hardware.num_threads=1", "tracking=offline", f"results={tmp_path / 'elsewhere'}"]
    same += [f"checkpoints={tmp_path}", f"model.mini.weights={weights}"]
    other = [
        "ratio=0.4",
        "estimator=svd_llm",
        "estimator.shrinkage_row=0.5",
        "cost=params",
        "model=swin_b",
        "task.mini.num_calibration=512",
        "hardware.precision=bfloat16",
        "model.mini.weights=random",
        "labels=sampled",
        "analysis=cross_moments",
    ]
    assert {open_cell(cell_config(override)).fingerprint for override in same} == {base}
    assert len({base, *(open_cell(cell_config(override)).fingerprint for override in other)}) == 1 + len(other)


def test_the_dense_cell_is_one_cell_at_every_ratio(cell_config):
    cells = [open_cell(cell_config("estimator=none", f"ratio={ratio}")) for ratio in (0.4, 0.6)]
    assert cells[0].fingerprint == cells[1].fingerprint


def test_a_failing_cell_is_recorded_raised_and_tried_again(cell_config, monkeypatch):
    config = cell_config("estimator=pela")
    with monkeypatch.context() as patch:
        patch.setattr(experiments.methods, "compress_prepared", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_cell(open_cell(config))
    failed = open_cell(config).earlier_record()
    assert failed.status == "failed" and "ZeroDivisionError" in failed.error
    again = run_cell(open_cell(config))
    assert again.status == "done" and again.attempt == 2


@pytest.mark.system
def test_a_cell_on_a_full_disk_says_so_in_its_record_and_goes_on_where_it_was(cell_config, caplog):
    caplog.set_level("INFO")
    config = cell_config("estimator=facts")
    with room_for(2_200_000), pytest.raises(OSError, match=r"no room for .*InputWeightedGradGram"):
        run_cell(open_cell(config))
    assert "free some" in open_cell(config).earlier_record().error
    assert run_cell(open_cell(config)).status == "done"
    assert "data pass for 3 moments" in caplog.text and "data pass for 1 moments" in caplog.text


DAMAGES = {
    "cut short": lambda text: text[:50],
    "empty": lambda text: "",
    "no UTF-8": lambda text: text.encode("utf-16"),
    "a field is missing": lambda text: text.replace('"data_hash"', '"data"'),
    "a number is a text": lambda text: text.replace('"attempt": 1', '"attempt": "one"'),
    "no metrics": lambda text: json.dumps({**json.loads(text), "metrics": {}}),
    "of another cell": lambda text: json.dumps({**json.loads(text), "fingerprint": "0" * 16}),
    "a list": lambda text: "[]",
}


@pytest.mark.attack
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_set_aside(tmp_path, caplog, damage):
    record = make_record(metrics={"top1": 1.0}, summary=make_summary())
    write_record(record, tmp_path)
    (path,) = tmp_path.iterdir()
    damaged = DAMAGES[damage](path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    assert read_record("f", tmp_path) is None and list(read_records(tmp_path)) == []
    assert "is damaged (" in caplog.text
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("f.damaged-")
    write_record(record, tmp_path)
    assert read_record("f", tmp_path) == record


def test_a_folder_in_the_place_of_a_record_is_set_aside(tmp_path):
    (tmp_path / "f.json" / "something").mkdir(parents=True)
    assert read_record("f", tmp_path) is None
    (aside,) = tmp_path.iterdir()
    assert aside.is_dir() and (aside / "something").exists()


def test_a_cell_with_a_damaged_record_is_run_again(cell_config, tmp_path, caplog):
    first = run_cell(open_cell(cell_config("estimator=pela")))
    (path,) = record_files(tmp_path)
    path.write_text(path.read_text()[:50])
    again = run_cell(open_cell(cell_config("estimator=pela")))
    assert again.metrics == first.metrics
    assert "damaged" in caplog.text


def test_records_survive_a_write_that_fails(tmp_path, monkeypatch):
    record = make_record(metrics={"top1": 1.0}, summary=make_summary(profile={"layer": [[8, 0.5, 0.1]]}))
    write_record(record, tmp_path)
    monkeypatch.setattr("experiments.record.json.dumps", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_record(record, tmp_path)
    assert read_record("f", tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ratio=0"], r"ratio .* \(0, 1\], got 0"),
        (["ratio=1.5"], r"ratio .* got 1.5"),
        (["ratio=nan"], r"ratio .* got nan"),
        (["cost=energy"], "cost must be one of flops, params, latency"),
        (["hardware.precision=float16"], "hardware.precision must be one of float32, bfloat16"),
        (["hardware.matmul_precision=low"], "hardware.matmul_precision must be one of"),
        (["estimator.shrinkage_row=1.5"], "shrinkage_row"),
        (["estimator=gfwsvd", "estimator.store=tape"], "store"),
        (["estimator.normalize=yes"], "normalize"),
        (["task.mini.num_calibration=20000"], "num_calibration"),
        (["model.mini.weights=nowhere.safetensors"], "no checkpoint 'nowhere.safetensors'"),
        (["profile=paper", "model.paper.weights=random", "task.paper.root=nowhere"], "no ImageNet at nowhere"),
        (["profile=paper", "model=mambavision_b", "checkpoints=nowhere"], "no checkpoint 'nowhere'"),
        (["profile=paper", "model.paper.tag=deit_base.other"], "timm publishes no weights of 'deit_base.other'"),
    ],
)
def test_bad_values_are_refused_with_the_name_of_the_field(cell_config, overrides, message):
    with pytest.raises((ValueError, OSError), match=message):
        run_cell(open_cell(cell_config(*overrides)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named(cell_config):
    with pytest.raises(ValueError, match="torch sees no GPU"):
        open_cell(cell_config("hardware=cuda"))


def test_a_results_folder_that_cannot_be_written_is_one_clear_error(cell_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to the folder .*file"):
        run_cell(open_cell(cell_config(f"results={tmp_path / 'file'}")))


@pytest.mark.system
def test_cells_of_another_ratio_share_the_moments(cell_config, monkeypatch):
    run_cell(open_cell(cell_config("ratio=0.5")))
    monkeypatch.setattr("facts.moments.collect.MomentPass.run", lambda *args: pytest.fail("a second data pass"))
    assert run_cell(open_cell(cell_config("ratio=0.4"))).status == "done"


@pytest.mark.system
def test_an_analysis_adds_its_metrics_and_values_to_the_record(cell_config):
    few = "task.mini.num_calibration=64"
    plain = run_cell(open_cell(cell_config("estimator=facts", few)))
    cell = open_cell(cell_config("estimator=facts", few, "analysis=fisher_similarity", "analysis.mini.num_probes=8"))
    record = run_cell(cell)
    assert record.metrics.items() > plain.metrics.items()
    assert -1 <= record.metrics["cosine"] <= 1 and record.metrics["cosine_error"] > 0
    assert set(record.analysis) == set(record.plan)
    assert record.seconds["analysis"] > 0
    assert read_record(record.fingerprint, cell.records) == record


@pytest.mark.system
def test_an_analysis_compares_disjoint_parts_of_the_evaluation_images(cell_config):
    cell = open_cell(cell_config("estimator=facts", "analysis=cross_moments"))
    subject = subject_of(cell, cell.model)
    factors, held_out, every = (
        {tuple(image.flatten().tolist()) for images, _ in batches for image in images}
        for batches in (subject.calibration.data, subject.held_out.data, cell.task.evaluation(cell.model))
    )
    assert (len(factors), len(held_out)) == (1600, 800)
    assert not factors & held_out and factors | held_out <= every


@pytest.mark.system
def test_sampled_labels_change_the_plan_of_nothing_but_the_factors(cell_config):
    few = "task.mini.num_calibration=64"
    given, sampled = (open_cell(cell_config(f"labels={labels}", few)) for labels in ("given", "sampled"))
    assert run_cell(given).metrics["gflops"] == run_cell(sampled).metrics["gflops"]
    assert isinstance(sampled.loss, SampledLabels) and not isinstance(given.loss, SampledLabels)
    with pytest.raises(ValueError, match="labels must be one of given, sampled, got 'hard'"):
        open_cell(cell_config("labels=hard"))


@pytest.mark.system
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["estimator=none", "analysis=fisher_similarity"], "choose one, or leave the analysis out"),
        (
            ["model=swin_b", "analysis=token_coupling"],
            "no linear layer or 1x1 convolution is called blocks.4.mlp.fc2; SwinTransformer has layers",
        ),
    ],
)
def test_an_analysis_that_cannot_be_made_is_refused_before_any_work(cell_config, overrides, says):
    with pytest.raises(ValueError, match=says):
        open_cell(cell_config(*overrides))
