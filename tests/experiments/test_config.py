"""Every file of `conf/` and every command of the pages composes, and what a file names can be built."""

import re
import shlex
from dataclasses import asdict
from functools import cache
from itertools import product, zip_longest
from pathlib import Path

import pytest
import torch
from hydra import compose
from hydra.utils import get_class
from omegaconf import OmegaConf, open_dict

import experiments.baselines
from experiments.cell import cells_of, check_values
from experiments.compose import CONF, composed, jobs_of, read_experiment
from experiments.config import instantiate
from experiments.grid import chosen_experiments, completed
from experiments.output.results import DRAWINGS
from experiments.paper import FOLDER, paper_values
from facts.analysis import Analysis
from facts.cost.timing import TimingPolicy
from facts.estimators import ESTIMATORS
from facts.finetuning import Finetuning
from facts.models import CausalLM, OpenMMLabModel
from facts.moments.collect import MemoryPolicy
from facts.parts.layers import select_layers
from facts.search import SEARCHES
from tests.docs.pages import PAGES, ROOT
from tests.refusals import refused, refuses


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (Path(CONF) / group).glob("*.yaml") if not path.stem.startswith("_"))


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
FILES = {"run": "run", "reproduce": "reproduce", "doctor": "reproduce", "train_dense": "train_dense"}
OF_PHOTOS = ("encoders", "int8", "unit_defaults")  # alone
TABLES = sorted({*options("experiment")} - {"ablation", "all", "imagenet", "main", "paper", *OF_PHOTOS})


def test_every_estimator_and_search_has_a_file_and_a_name():
    for group, known in (("estimator", ESTIMATORS), ("search", SEARCHES)):
        assert {*known} == {*options(group)} - {"none"}, f"files in conf/{group}, or methods, without the other"


def test_the_files_say_the_defaults_of_the_classes(cell_config):
    """Those of baselines too, which are rows of the ranking, or of units. A class as the choice gives the same."""
    known, config = {"estimator": ESTIMATORS, "search": SEARCHES}, cell_config()
    own, baselines = Path(CONF), [*Path(experiments.baselines.__file__).parent.glob("*/*.yaml")]
    assert len(baselines) > 3 and {path.parent.name for path in baselines} == {"search"}
    for path in (*own.glob("estimator/*.yaml"), *own.glob("search/*.yaml"), *baselines):
        group = path.parent.name
        config[group] = OmegaConf.load(path)
        if target := config[group]["_target_"]:
            cls = known[group].get(path.stem) or get_class(target)
            of_class = cell_config(f"{group}={cls.__module__}.{cls.__name__}")[group]
            assert instantiate(config[group]) == instantiate(of_class) == cls(), path.stem
    tables = [cell_config(f"experiment={table}").experiment for table in ("baselines", "units")]
    rows = {setting for table in tables for row in table.rows.values() for setting in row}
    assert {f"search={path.stem}" for path in baselines} <= rows


@pytest.mark.system
@pytest.mark.parametrize("name", [name for name in options("model") if name not in ("deit_tiny", "vit_tiny")])
def test_every_model_has_a_mini_and_a_paper_recipe_that_builds(cell_config, name):
    """Detectors, segmenters and language models are built in tests/detection and tests/language."""
    config = cell_config(f"model={name}").model
    published = instantiate(config.paper)
    if isinstance(published, CausalLM | OpenMMLabModel):
        return
    mini = instantiate(config.mini).build()
    assert mini(torch.zeros(2, *mini.pretrained_cfg["input_size"])).shape == (2, 100)
    assert published.weights == "pretrained" and published.repository.partition("/")[0] in ("timm", "nvidia")
    with torch.device("meta"):
        paper = instantiate(OmegaConf.merge(config.paper, {"weights": "random"})).build()
        assert paper(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.system
@pytest.mark.parametrize("name", TABLES)
def test_every_experiment_composes_and_names_its_rows_and_columns_as_the_paper_does(cell_config, composing, name):
    experiment = cell_config(f"experiment={name}").experiment
    with composing():
        assert read_experiment(name) == experiment
    experiment = completed(experiment)
    column = [*experiment.overrides, *next(iter(experiment.columns.values())), *experiment.mini]
    for row in experiment.rows.values():
        assert cell_config(f"task={experiment.task}", *column, *row)
    published = dict.fromkeys((row, column) for row, column, _ in paper_values(name))
    rows = dict.fromkeys(row for row, _ in published)
    assert list(published) == [
        (row, column)
        for row in (experiment.rows if {*rows} & {*experiment.rows} else rows)
        for column in experiment.columns
        if row in rows and column not in experiment.not_applicable.get(row, {})
    ]
    assert {metric for *_, metric in paper_values(name)} <= set(experiment.metrics)
    assert {*experiment.unranked, *experiment.not_applicable} <= set(experiment.rows)
    assert not experiment.figure or experiment.figure in DRAWINGS


def test_every_file_of_the_papers_numbers_belongs_to_an_experiment_and_has_each_once():
    for path in FOLDER.glob("*.csv"):
        assert path.stem in options("experiment")
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "row,column,metric,paper" and len(paper_values(path.stem)) == len(lines) - 1
    assert paper_values("my_table") == {}


@pytest.mark.system
def test_every_layer_of_the_figures_is_one_of_its_network(cell_config):
    @cache
    def layers_of(model, profile):
        recipe = cell_config(model).model[profile]
        with torch.device("meta"):
            return select_layers(instantiate(OmegaConf.merge(recipe, {"weights": "random"})).build()).layers

    for name in ("motivation", "motivation_architectures", "motivation_layers"):
        experiment = cell_config(f"experiment={name}").experiment
        for column, profile in product(experiment.columns.values(), ("paper", "mini")):
            config = cell_config(*experiment.overrides, *next(iter(experiment.rows.values())), *column)
            assert config.analysis[profile].layer in layers_of(f"model={config.model.name}", profile)


def test_the_shared_files_say_every_field_with_the_default_of_the_library():
    hardware, finetuning = (OmegaConf.load(f"{CONF}/{group}/_base.yaml") for group in ("hardware", "finetuning"))
    assert (hardware.memory, hardware.timing) == (asdict(MemoryPolicy()), asdict(TimingPolicy()))
    chosen = {"_target_": "facts.finetuning.Finetuning", "learning_rate": "???", "seed": "${seed}", "decay_epochs": []}
    assert OmegaConf.to_container(finetuning.paper) == {**asdict(Finetuning()), **chosen}


@pytest.mark.system
def test_every_other_choice_composes_and_resolves(cell_config):
    groups = ("analysis", "finetuning", "hardware", "profile", "task", "tracking")
    for names in zip_longest(*map(options, groups)):
        config = cell_config(*(f"{group}={name}" for group, name in zip(groups, names, strict=True) if name))
        assert OmegaConf.to_container(config, resolve=True)
        for profile in ("paper", "mini") if config.get("analysis") else ():
            assert isinstance(instantiate(config.analysis[profile]), Analysis)


@pytest.mark.parametrize(
    "overrides",
    [
        ["ratio=0.3", "model=swin_b", "estimator.shrinkage_row=0.5", "search=cors", "hardware.timing.num_turns=3"],
        ["search=flora", "parts=units", "form=plain", "~finetuning", "bounds={params: 0.6}", "ratio=${seed}"],
        ["experiment=baselines", "+experiment.rows.Mine=['ratio=0.5']", "~experiment.rows.ASVD", "finetuning=recovery"],
        ["experiment=segmentation", "task=ade20k", "model=upernet_deit_b", "estimator=pela", "stages=pela"],
        ["experiment=imagenet", "hardware=cuda", "profile=paper", "pruning=nvit", "finetuning=pruned"],
        ["experiment=tokens", "profile=photos", "model=deit_tiny", "finetuning=recovery", "finetuning=[]"],
        ["experiment=throughput_precisions", "task=digits", "analysis=device", "analysis=throughput", "seed=3"],
        ["estimator=facts.estimators.FACTS", "estimator.grad_clip=null", "search=facts.search.CoRS", "task=coco"],
    ],
)
def test_cells_are_composed_to_what_hydra_gives(composing, overrides):
    """Most of their choices are read apart from Hydra, which takes its time."""
    with composing():
        first, second, expected = composed(*overrides), composed(*overrides), compose("run", overrides)
    for found in (first, second):
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
        assert OmegaConf.to_yaml(found, resolve=True) == OmegaConf.to_yaml(expected, resolve=True)
        assert OmegaConf.is_struct(found) and found.model is not expected.model
        assert all(OmegaConf.get_type(found, key) == OmegaConf.get_type(expected, key) for key in expected)


def test_most_choices_do_not_need_hydra(composing, monkeypatch):
    with composing():
        composed("model=deit_b")
        monkeypatch.setattr("experiments.compose.hydra.compose", lambda *_: pytest.fail("composed"))
        composed("experiment=contributions", "model=swin_l", "estimator=asvd", "search=asvd", "ratio=0.1", "task=coco")


def check(overrides, make_cell):
    make_cell(*overrides).check()


def test_a_choice_without_its_packages_says_how_to_install_them(make_cell, without_module):
    without_module("mmdet")
    message, given = r"^task=coco needs mmdet: make install-detection$", ["model=mask_rcnn_swin_b", "task=coco"]
    refuses(message, check, given, make_cell, raised=ImportError)


test_no_gpu = WITHOUT_GPU(refused((["hardware=cuda"], "torch sees no GPU here; choose hardware=cpu"), by=check))
test_values_out_of_range_are_named_before_any_work = pytest.mark.attack(
    refused(
        (["estimator.shrinkage_row=2"], r"estimator\.shrinkage_row=2: input should be less than or equal to 1"),
        (["hardware.timing=${ratio}", "ratio=1.0"], r"got 1\.0 where a group of fields is expected: set its fields"),
        (["seed=4294967296"], "seed must be an integer from 0 to 4294967295, got 4294967296"),
        (["hardware.precision=int8"], r"hardware\.precision must be one of float32, bfloat16, got 'int8'"),
        (["hardware.device=tpu"], r"hardware\.device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["analysis=cross_moments", "parts=units"], "this analysis covers only layers and their inputs"),
        (["model=qwen3_1_7b"], "task=classification does not suit model=qwen3_1_7b: choose task=language"),
        (["model=deit_tiny"], "model=deit_tiny has no settings for profile=mini, only for photos"),
        (["search._target_=os.getcwd"], r"search: posix\.getcwd\(\) takes no keyword arguments"),
        (["search._target_=facts.nothing"], r"^search\._target_: .+$"),
        (["search._target_=math.pi"], r"^search\._target_: .+$"),
        (["search._target_=null"], r"^search\._target_: .+$"),
        (["estimator=pela", "estimator._target_=collections.Counter"], r"estimator\._target_: Counter is no Estimator"),
        (["model.mini={_target_:builtins.dict}"], r"model\.mini\._target_: dict is no Recipe: choose a subclass of it"),
        (["pruning=isomorphic"], "pruning replaces the estimator: choose estimator=none, and no bounds, with it"),
        by=check,
    )
)


def documented() -> list[tuple[str, ...]]:
    """Commands and overrides, each once, but those of docs/extending.md, which are run."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES).replace("\\\n", " ")
    lines = re.findall(rf"-m experiments\.({'|'.join(FILES)})\b([^`\n]*)", text)
    commands = [(FILES[name], *shlex.split(options, comments=True)) for name, options in lines]
    apart = ("NAME", "...", "--", "plan=", "my_methods.")
    return sorted({each for each in commands if each[1:] and not any(word in " ".join(each) for word in apart)})


@pytest.mark.system
@pytest.mark.parametrize("command", documented(), ids=" ".join)
def test_a_documented_command_composes(command, configured, without_module):
    """And the cells of its tables."""
    without_module("none")
    name, *overrides = command
    given = [each for each in overrides if each != "-m"]
    for job in jobs_of(given) if "-m" in overrides else [given]:
        config = configured(name, *job, "hardware.device=cpu")
        with open_dict(config):
            del config["hydra"]
        check_values(config)
        for experiment in chosen_experiments(config) if name == "reproduce" else ():
            assert cells_of(experiment)
