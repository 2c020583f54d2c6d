"""Setting of a benchmark: one of the paper's networks with random weights, a batch and a device; and its table."""

import argparse
import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from experiments.cell import MATMUL_PRECISIONS, PRECISIONS
from experiments.config import CONF
from experiments.instantiation import instantiate
from facts.utils.files import replacing
from facts.utils.processors import device_name

MODELS = sorted(path.stem for path in Path(CONF, "model").glob("*.yaml"))


@dataclass(frozen=True)
class Setting:
    """A file in `conf/model`, and the options of `add_setting`; it can be sent to another process."""

    model: str
    options: argparse.Namespace

    @property
    def config(self) -> Any:
        return OmegaConf.load(Path(CONF, "model", f"{self.model}.yaml"))

    @property
    def title(self) -> str:
        return self.config.title if self.options.profile == "paper" else f"{self.config.title}, small"

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.options.precision]

    def build(self) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Build the network and a batch `(images, labels)`, the same in every call."""
        device, size = self.options.device, self.options.batch_size
        torch.manual_seed(0)
        torch.set_float32_matmul_precision(self.options.matmul_precision)
        recipe = OmegaConf.merge(self.config[self.options.profile], {"weights": "random"})
        model = instantiate(recipe).build().to(device)
        images = torch.randn(size, *model.pretrained_cfg["input_size"], device=device)
        return model, (images, torch.randint(0, model.num_classes, (size,), device=device))


def add_setting(command: argparse.ArgumentParser, models: Sequence[str]) -> None:
    """Add options for the fields of a setting, with these models by default, and for the folder of its tables."""
    cuda = torch.cuda.is_available()
    command.add_argument("--models", nargs="+", default=models, choices=MODELS)
    command.add_argument("--profile", default="paper", choices=["paper", "mini"], help="full size, or its stand-in")
    command.add_argument("--device", default="cuda" if cuda else "cpu")
    command.add_argument("--batch-size", type=int, default=64 if cuda else 16)
    command.add_argument("--matmul-precision", default="high" if cuda else "highest", choices=MATMUL_PRECISIONS)
    command.add_argument("--results", default="results", help="the tables go to benchmarks/<device> in this folder")


def add_precision(command: argparse.ArgumentParser) -> None:
    command.add_argument("--precision", default="float32", choices=PRECISIONS, help="autocast type of the passes")


def write_results(name: str, table: pd.DataFrame, text: str, args: argparse.Namespace) -> None:
    """Write `<name>.csv`, with the conditions as columns, and print and write `<name>.md`, with conditions and text."""
    device = device_name(torch.device(args.device))
    conditions = {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in ("batch_size", "precision", "matmul_precision") if name in args},
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
