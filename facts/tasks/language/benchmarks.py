"""Multiple-choice benchmarks with lm-eval."""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from facts.utils.extras import needing
from facts.utils.silence import silence

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

Accuracy = Literal["acc", "acc_norm"]


def accuracies(
    model: nn.Module,
    tokenizer: Any,
    benchmarks: Sequence[str | Mapping[str, Any]],
    batch_size: int,
    *,
    accuracy: Accuracy = "acc",
    benchmark_folder: str | None = None,
    num_questions: int | None = None,
    precision: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Zero-shot accuracy in percent by benchmark, each given by name or as an lm-eval task configuration.

    `accuracy` compares the likelihoods of the choices (`acc`), or divides them by the choices' lengths (`acc_norm`);
    benchmarks without `acc_norm` (winogrande) keep `acc`. Names come from YAML files in `benchmark_folder` or lm-eval.
    Raises `ImportError` without lm-eval, `ConnectionError` if questions cannot be fetched, `ValueError` for a benchmark
    that is unknown or has no accuracy.
    """
    manager = find_benchmarks(benchmarks, benchmark_folder)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    names = [task if isinstance(task, str) else task["task"] for task in benchmarks]
    with silence():
        network = HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval would give it a padding token
            backend="causal",
            batch_size=batch_size,
            mixed_precision_dtype=None if precision == torch.float32 else precision,
        )
        found = simple_evaluate(
            network,
            tasks=list(benchmarks),
            task_manager=manager,
            limit=num_questions,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )["results"]
    if without := [name for name in names if "acc,none" not in found[name]]:
        raise ValueError(f"lm-eval reports no accuracy for {', '.join(without)}: name multiple-choice benchmarks")
    return {name: 100 * found[name].get(f"{accuracy},none", found[name]["acc,none"]) for name in names}


def find_benchmarks(benchmarks: Sequence[str | Mapping[str, Any]], folder: str | None = None) -> "TaskManager":
    """Task manager for these benchmarks. Raises `ImportError` without lm-eval, `ValueError` if one is unknown."""
    names = [task for task in benchmarks if isinstance(task, str)]
    with needing("llm", f"the benchmark {', '.join(names) or 'of questions'}"):
        from lm_eval.tasks import TaskManager
    with silence():
        manager = TaskManager(include_path=folder, include_defaults=bool(names) and folder is None)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known]:
        where = f"in {folder}, which describes {', '.join(sorted(known)) or 'none'}" if folder else "in lm-eval"
        raise ValueError(f"no benchmark is called {', '.join(unknown)} {where}")
    return manager
