"""Errors of predicted latencies of layers: between measured ranks, and for layers of sizes that were held out."""

import argparse
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pandas as pd
from sklearn.ensemble import GradientBoostingRegressor

from experiments.benchmark.results import write_results
from experiments.benchmark.setting import MODELS, Setting, add_setting
from facts.calibration.execution import Execution
from facts.calibration.prepare import prepare
from facts.cost.latency import Shape, Times, between
from facts.cost.predicted import LinearModel
from facts.modules.forms import FORMS, Form

Network = dict[Shape, Times]


class Boosting(LinearModel):
    """Gradient boosting in its place, from the logarithms of sizes, rank and work to that of seconds."""

    def __init__(self, form: Form, times: Network):
        self.form = form
        given = [(shape, rank, seconds) for shape, known in times.items() for rank, seconds in known.items()]
        self.model = GradientBoostingRegressor(n_estimators=300, max_depth=4, learning_rate=0.05, random_state=0)
        self.model.fit(
            [self._features(shape, rank) for shape, rank, _ in given], np.log([seconds for *_, seconds in given])
        )

    def seconds(self, shape: Shape, rank: int | None) -> float:
        return float(np.exp(self.model.predict([self._features(shape, rank)])[0]))

    def _features(self, shape: Shape, rank: int | None) -> list[float]:
        work, *_ = self._work(shape, rank)
        smaller = min(shape.d_in, shape.d_out)
        return [*np.log([shape.d_in, shape.d_out, shape.rows, rank or smaller, work]), rank is None]


MODELS_OF_TIME = {"linear in work and traffic": LinearModel, "gradient boosting": Boosting}


def add_arguments(command: argparse.ArgumentParser) -> None:
    networks = ["deit_s", "swin_s", "swin_b", "convnext_s", "mambavision_s"]
    command.add_argument("--models", nargs="+", default=networks, choices=MODELS)
    command.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS)
    add_setting(command)


def run(args: argparse.Namespace) -> None:
    rows = []
    for name in args.forms:
        form = FORMS[name]
        pairs = [measured_twice(Setting.of(model, args), args.repeats, form) for model in args.models]
        first, again = [one for one, _ in pairs], [two for _, two in pairs]
        found = [
            ("measured again", "", again),
            ("ranks between", "interpolation", [between_others(form, own) for own in first]),
        ]
        for title, model in MODELS_OF_TIME.items():
            same = [{shape: model(form, without(own, [shape])).times(shape) for shape in own} for own in first]
            pool = {shape: times for own in first for shape, times in own.items()}
            known = [model(form, without(pool, own)) for own in first]
            other = [{shape: each.times(shape) for shape in own} for own, each in zip(first, known, strict=True)]
            found += [("a size, from this network's others", title, same), ("a network, from others", title, other)]
        for what, by, predicted in found:
            errors = relative_errors(first, predicted)
            rows.append(
                {
                    "form": name,
                    "predicted": what,
                    "by": by,
                    "median error [%]": 100 * np.median(errors),
                    "nine of ten below [%]": 100 * np.quantile(errors, 0.9),
                    "times": len(errors),
                }
            )
    write_results("device_times", pd.DataFrame(rows), text(args), args)


def measured_twice(setting: Setting, repeats: int, form: Form) -> tuple[Network, Network]:
    """Times of a network's layers by shape, measured two times, one after the other."""
    model, (images, _) = setting.build()
    prepared = prepare(model, input_shape=tuple(images.shape[1:]), execution=Execution(setting.dtype))
    prepared = replace(prepared, first_inputs=images)
    one, two = (dict(prepared.latency_table(repeats, form).times) for _ in range(2))
    return one, two


def relative_errors(measured: list[Network], predicted: list[Network]) -> np.ndarray:
    """Relative errors of all that was predicted."""
    return np.array(
        [
            abs(seconds / own[shape][rank] - 1)
            for own, found in zip(measured, predicted, strict=True)
            for shape, times in found.items()
            for rank, seconds in times.items()
        ]
    )


def without(network: Network, shapes: Collection[Shape]) -> Network:
    return {shape: times for shape, times in network.items() if shape not in shapes}


def between_others(form: Form, network: Network) -> Network:
    """The second and fourth measured rank of each layer, from the first, third and fifth."""
    found: Network = {}
    for shape, times in network.items():
        ranks = sorted(rank for rank in times if rank is not None)
        known: Times = {rank: times[rank] for rank in ranks[::2]}
        found[shape] = {rank: between(form, shape, known, rank) for rank in ranks[1::2]}
    return found


def text(args: argparse.Namespace) -> str:
    return (
        f"Random weights and images; layers of {', '.join(args.models)}, by size, dense and at five ranks, within the "
        f"running network: medians of {args.repeats} turns. Errors are relative, of single layers. Measured again is "
        "the whole measurement a second time, at once: the scatter of what is predicted. Ranks between are the second "
        "and fourth of the five, from the first, third and fifth. Sizes are held out with all their ranks. The linear "
        "model has coefficients that are not negative, for work and traffic, and the least squares of relative errors; "
        "gradient boosting is scikit-learn's, of logarithms. `facts.compress(device_times=)` interpolates between the "
        "ranks of measured sizes and takes the linear model for others.\n\n"
        "Written by `python -m experiments.benchmark device_times`."
    )
