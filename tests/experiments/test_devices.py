"""What was timed on other machines stands beside what was timed here."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import paper
from experiments.config import CONF
from experiments.grid import GridCell
from experiments.output.figures import draw_figure
from experiments.output.tables import entries_of, kept_records, rows_of_other_devices, wide_table
from experiments.record import write_record, write_records
from tests.records import demo, make_record

HERE = {"processor": "AMD EPYC", "gpu": "none", "threads": "2"}
H100 = {"processor": "AMD EPYC", "gpu": "NVIDIA H100 80GB HBM3", "threads": "16"}


def timed(name, speedup, machine=HERE, device="cpu", results=2, model="deit_b", **fields):
    identity = {"results": results, "model": model, "machine": machine, "num_threads": int(machine["threads"])}
    metrics = {"dense_throughput": 100.0, "compressed_throughput": 100.0 * speedup, "speedup": speedup}
    config = {"hardware": {"device": device}}
    return make_record(name, metrics=metrics, identity=identity, machine=machine, config=config, **fields)


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "FOLDER", tmp_path / "paper")
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "demo.csv").write_text("row,column,metric,paper\nV100,Net,speedup,1.6\n")
    ranked = {"metrics": {"compressed_throughput": "Low rank", "speedup": "Speed-up"}, "ranked_by": "speedup"}
    return demo(figure="throughput", **ranked, by_device=True, rows={"This device": []})


def test_rows_of_other_devices(experiment, tmp_path):
    own = timed("here", 1.2)
    others = [
        timed("first", 2.0, H100, "cuda", results=1, time="2026-01-01"),
        timed("later", 2.5, H100, "cuda", results=3, time="2026-01-02"),
        timed("another_network", 9.0, H100, "cuda", model="swin_b"),
        timed("here_again", 9.0, results=1),
        timed("failed_there", 9.0, {**H100, "gpu": "A100"}, "cuda", status="failed"),
    ]
    for record in (own, *others[1:]):
        write_record(record, tmp_path / "records")
    (tmp_path / "tables").mkdir()
    write_records(others[:1], tmp_path / "tables" / "demo.jsonl")  # as another machine has committed it
    with (tmp_path / "tables" / "demo.jsonl").open("a") as file:
        file.write(json.dumps({**asdict(others[0]), "metrics": None}) + "\n")
    grid = [GridCell("demo", "This device", "Net", None, "done", own)]
    grid += rows_of_other_devices(experiment, grid, tmp_path)
    table = wide_table(experiment, entries_of(experiment, grid, False), {})
    assert table.to_numpy().tolist() == [
        ["This device", "120.0", "1.2", ""],
        ["NVIDIA H100 80GB HBM3", "250.0", "2.5", ""],
        ["V100", "", "", "1.6"],
    ]
    elsewhere = timed("another_setting", 2.0, H100, "cuda", model="swin_b")
    write_records([own, others[0], elsewhere], tmp_path / "tables" / "demo.jsonl")
    kept = kept_records(experiment, [GridCell("demo", "This device", "Net", None, "done", own)], tmp_path)
    assert [record.fingerprint for record in kept] == ["first", "another_setting", "here"]
    draw_figure(experiment, grid, tmp_path)
    drawn = (tmp_path / "demo.csv").read_text()
    assert drawn.count("This device") == drawn.count("NVIDIA H100") == 2 and "V100" not in drawn


def test_records_for_readers_elsewhere_do_not_say_where_the_results_lay(tmp_path):
    config = {"results": str(tmp_path), "task": {"crops": f"{tmp_path}/crops", "names": ["deit", f"{tmp_path}_other"]}}
    record, path = make_record(config=config), tmp_path / "demo.jsonl"
    write_records([record, record], path)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["config"] == {
        "results": "results",
        "task": {"crops": "results/crops", "names": ["deit", f"{tmp_path}_other"]},
    }
    published = [each for each in (Path(CONF).parent / "results").rglob("*.jsonl")]
    lines = [line for each in published for line in each.read_text().splitlines()]
    assert len(lines) > 300 and [line[:80] for line in lines if re.search(r'"/[^"]', line)] == []


def test_whole_records_come_before_published_ones_and_a_gpu_that_stood_by_did_no_work(experiment, tmp_path):
    own, other = timed("here", 1.2), timed("there", 2.0, H100, "cuda", analysis={"missing": {"residual": "no"}})
    write_record(other, tmp_path / "records")
    write_record(timed("stood_by", 1.1, H100), tmp_path / "records")
    (tmp_path / "tables").mkdir()
    write_records([other, replace(other, status="failed", metrics={})], tmp_path / "tables" / "demo.jsonl")
    rows = rows_of_other_devices(experiment, [GridCell("demo", "This device", "Net", None, "done", own)], tmp_path)
    assert [cell.row for cell in rows] == ["AMD EPYC, 16 threads", "NVIDIA H100 80GB HBM3", "V100"]
    assert rows[1].record.analysis == other.analysis
