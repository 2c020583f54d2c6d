"""Tables in `results/benchmarks/<device>/`, with the conditions they were measured under."""

import argparse
import datetime
import re
from pathlib import Path

import pandas as pd
import torch

from facts.utils.files import replacing
from facts.utils.processors import device_name


def write_results(name: str, table: pd.DataFrame, text: str, args: argparse.Namespace) -> None:
    """Write `<name>.csv`, with the conditions as columns, and print and write `<name>.md`, with conditions and text."""
    device = device_name(torch.device(args.device))
    conditions = {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch_size": args.batch_size,
        "precision": args.precision,
        "matmul_precision": args.matmul_precision,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    title, command = f"# Benchmark `{name}`", name.replace("_predicted", " --predicted")
    text = f"{text}\n\nWritten by `python -m experiments.benchmark {command}`."
    header = ", ".join(f"{field.replace('_', ' ')}: {value}" for field, value in conditions.items())
    contents = {
        "csv": table.assign(**conditions).to_csv(index=False),
        "md": f"{title}\n\n{header}\n\n{table.to_markdown(index=False, floatfmt='.2f')}\n\n{text}\n",
    }
    folder = Path(args.results, "benchmarks", re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_"))
    for suffix, content in contents.items():
        with replacing(folder / f"{name}.{suffix}") as path:
            path.write_text(content)
    print(contents["md"])
