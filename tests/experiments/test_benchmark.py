"""The benchmarks run and write their tables; how fast anything is, is not tested."""

import pandas as pd
import pytest

from experiments.benchmark.__main__ import main


@pytest.fixture
def benchmark(tmp_path):
    """A function from a command, on the small networks, to the table that it writes."""

    def run(command, *arguments, table=None):
        common = ["--profile", "mini", "--device", "cpu", "--repeats", "2", "--batch-size", "4"]
        main([command, *common, "--results", str(tmp_path / "results"), *map(str, arguments)])
        (path,) = tmp_path.glob(f"results/benchmarks/*/{table or command}.csv")
        assert "device: " in path.with_suffix(".md").read_text()
        return pd.read_csv(path)

    return run


@pytest.mark.system
def test_data_pass_and_throughput(benchmark):
    table = benchmark("data_pass", "--models", "deit_b")
    passes = ["of FACTS", "of FACTS, units", "of all ten estimators"]
    assert list(table["pass"]) == ["forward + backward", *(f"data pass {name}" for name in passes)]
    assert (table["seconds per 1,000 images"] > 0).all() and (table["peak memory [GiB]"] > 0).all()
    assert (table.batch_size == 4).all()
    table = benchmark("throughput", "--models", "deit_b", "--runtimes", "PyTorch, float32", "PyTorch, bfloat16")
    assert len(table) == 12 and table["speed-up"][0] == table["speed-up"][6] == 1
    assert (table["images per second"] > 0).all()


def test_latency(benchmark):
    """The small networks have no latency to save: next to nothing is asked for."""
    table = benchmark("latency", "--models", "deit_b", "--ratios", 0.999, "--search", "uniform")
    shares = table[["predicted [%]", "measured [%]", "measured again [%]"]]
    assert table["allowed [%]"][0] == 99.9 and (shares > 0).all(axis=None)
