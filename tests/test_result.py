"""A result describes itself when it is printed."""

import torch

import facts
from facts.cost.count import Cost
from facts.result import CompressionResult, Summary
from tests.networks import make_model


def test_what_is_printed():
    summary = Summary(
        before=Cost(2_156_000_000, 5_526_000),
        after=Cost(1_103_000_000, 2_854_000),
        repaired={},
        seconds={"decomposition": 11.71, "search": 0.04},
        estimator="PELA()",
        search="Uniform(rank_multiple=1)",
        bounds={"flops": 0.5, "params": 0.7, "latency": 2 / 3},
        spent={"flops": 0.99e9},
        budget={"flops": 1e9},
        latency={"dense": 0.03, "allowed": 0.02, "predicted": 0.019, "measured": 0.018},
    )
    skipped = {f"blocks.{i}.norm": "its name holds `norm`" for i in range(5)} | {"fc": "it is the output layer"}
    plan = {"a": 96, "b": 24, "c": None}
    lines = repr(CompressionResult(torch.nn.Identity(), plan, summary, skipped)).splitlines()
    assert [line.rstrip() for line in lines] == [
        "Identity: 2 layers low-rank (ranks 24 to 96), 1 left dense",
        "",
        "              original    compressed    remaining",
        "----------  ----------  ------------  -----------",
        "FLOPs          2.156 G       1.103 G        51.2%",
        "parameters     5.526 M       2.854 M        51.6%",
        "latency          30 ms         18 ms        60.0%",
        "",
        "method: PELA(), Uniform(rank_multiple=1)",
        "the compressed layers keep 49.5% of their flops, of 50.0% allowed",
        "allowed 70.0% of the params",
        "allowed 66.7% of the latency",
        "took: decomposition 11.7 s",
        "left dense: blocks.0.norm, blocks.1.norm, blocks.2.norm and 2 more (its name holds `norm`)",
        "left dense: fc (it is the output layer)",
    ]
    result = facts.compress(make_model(), estimator="pela", ratio=1)
    lines = repr(result).splitlines()
    assert lines[0] == "EveryShape: 0 layers low-rank, 6 left dense"
    assert not any(line.startswith(("FLOPs", "latency")) for line in lines)  # without data
