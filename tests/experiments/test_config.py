"""Every file of `conf/` composes, and what it names can be built."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from safetensors.torch import save_file

from experiments.cell import Cell
from experiments.config import CONF
from experiments.instantiation import instantiate
from experiments.methods import method_of
from experiments.output.figures import DRAWINGS
from experiments.paper import FOLDER, paper_values
from facts import compress
from facts.analysis import Analysis
from facts.calibration.selection import select_layers
from facts.cost.timing import TimingPolicy
from facts.estimators import ESTIMATORS
from facts.finetuning import Finetuning, Recovery
from facts.models import CausalLM, OpenMMLabModel
from facts.moments.memory import MemoryPolicy
from facts.refit import REFITS
from facts.search import SEARCHES

ROOT = Path(CONF).parent


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (Path(CONF) / group).glob("*.yaml") if not path.stem.startswith("_"))


def test_every_estimator_and_search_has_a_file_and_a_name():
    for group, known in (("estimator", ESTIMATORS), ("search", SEARCHES), ("refit", REFITS)):
        assert set(known) ^ set(options(group)) - {"none"} == set(), (
            f"files in conf/{group}, or methods, without the other"
        )


def test_every_method_is_among_the_rivals(cell_config):
    """Estimators with uniform ranks and with CoRS, searches and refits at least once."""
    rows = [set(overrides) for overrides in cell_config("experiment=rivals").experiment.rows.values()]
    facts = {"estimator=facts"}
    estimators = [row | facts if not any("estimator" in each for each in row) else row for row in rows]
    wanted = [{f"estimator={name}", *search} for name in ESTIMATORS for search in ((), ("search=cors",))]
    assert [row for row in wanted if row not in estimators] == [], "rows that conf/experiment/_rivals.yaml lacks"
    for group, known in (("search", set(SEARCHES) - {"uniform"}), ("refit", set(REFITS))):
        assert {f"{group}={name}" for name in known} - set().union(*rows) == set(), "no row of _rivals.yaml has these"


@pytest.mark.parametrize(("group", "known"), [("estimator", ESTIMATORS), ("search", SEARCHES), ("refit", REFITS)])
def test_the_files_say_the_defaults_of_the_classes(cell_config, group, known):
    for name, cls in known.items():
        assert instantiate(cell_config(f"{group}={name}")[group]) == cls()


@pytest.mark.parametrize("name", [name for name in options("estimator") if name != "none"])
def test_every_estimator_file_compresses_a_network(cell_config, name):
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.GELU(), torch.nn.Linear(16, 10))
    batches = [(torch.randn(8, 12), torch.randint(0, 10, (8,))) for _ in range(2)]
    result = compress(model, batches, estimator=instantiate(cell_config(f"estimator={name}").estimator))
    assert result.model(batches[0][0]).isfinite().all()
    assert result.summary.after.params < result.summary.before.params


PUBLISHED = {
    "convnext_b": "timm/convnext_base.fb_in22k_ft_in1k",
    "convnext_l": "timm/convnext_large.fb_in22k_ft_in1k",
    "convnext_s": "timm/convnext_small.fb_in22k_ft_in1k",
    "deit_b": "timm/deit_base_distilled_patch16_224.fb_in1k",
    "deit_b_plain": "timm/deit_base_patch16_224.fb_in1k",
    "deit_iii_l": "timm/deit3_large_patch16_224.fb_in22k_ft_in1k",
    "deit_s": "timm/deit_small_patch16_224.fb_in1k",
    "mambavision_b": "nvidia/MambaVision-B-1K",
    "mambavision_l": "nvidia/MambaVision-L-1K",
    "mambavision_s": "nvidia/MambaVision-S-1K",
    "swin_b": "timm/swin_base_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_l": "timm/swin_large_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_s": "timm/swin_small_patch4_window7_224.ms_in22k_ft_in1k",
}


def test_every_other_model_is_one_that_tests_elsewhere_build(cell_config):
    others = {name: type(instantiate(cell_config(f"model={name}").model.paper)) for name in options("model")}
    assert {name: kind for name, kind in others.items() if name not in PUBLISHED} == {
        "mask_rcnn_swin_b": OpenMMLabModel,  # tests/detection
        "qwen3_1_7b": CausalLM,  # tests/language
        "upernet_deit_b": OpenMMLabModel,
        "upernet_swin_b": OpenMMLabModel,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_classifier_has_a_mini_that_runs_and_a_paper_recipe_that_builds(cell_config, name):
    config = cell_config(f"model={name}").model
    mini = instantiate(config.mini).build()
    assert mini(torch.zeros(2, *mini.pretrained_cfg["input_size"])).shape == (2, 100)
    published = instantiate(config.paper)
    assert (published.weights, published.repository) == ("pretrained", PUBLISHED[name])
    with torch.device("meta"):
        paper = instantiate(OmegaConf.merge(config.paper, {"weights": "random"})).build()
        assert paper(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_a_folder_gives_the_checkpoints_of_the_paper(cell_config, tmp_path):
    recipe = instantiate(cell_config("model=deit_s", f"checkpoints={tmp_path}").model.paper)
    with torch.device("meta"):
        tensors = recipe.architecture().state_dict()
    tensors = {
        name: torch.full_like(tensor, 0.5, dtype=torch.float16, device="cpu") for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "deit_small_patch16_224.fb_in1k.safetensors")
    loaded = recipe.build().state_dict()
    assert loaded.keys() == tensors.keys() and all((tensor == 0.5).all() for tensor in loaded.values())


@pytest.mark.parametrize("name", [name for name in options("experiment") if name != "all"])
def test_every_experiment_names_its_rows_and_columns_as_the_paper_does(cell_config, name):
    experiment = cell_config(f"experiment={name}").experiment
    assert experiment.name == name
    published = dict.fromkeys((row, column) for row, column, _ in paper_values(name))
    rows = dict.fromkeys(row for row, _ in published)
    assert list(published) == [
        (row, column)
        for row in (rows if experiment.by_device else experiment.rows)
        for column in experiment.columns
        if row in rows and column not in experiment.not_applicable.get(row, {})
    ]
    assert {metric for *_, metric in paper_values(name)} <= set(experiment.metrics)
    assert {*experiment.unranked, *experiment.not_applicable} <= set(experiment.rows)
    assert experiment.figure or experiment.metrics
    assert not experiment.figure or experiment.figure in DRAWINGS


def test_every_file_of_the_papers_numbers_belongs_to_an_experiment_and_has_each_once():
    for path in FOLDER.glob("*.csv"):
        assert path.stem in options("experiment")
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "row,column,metric,paper" and len(paper_values(path.stem)) == len(lines) - 1
    assert paper_values("my_table") == {}


@pytest.mark.parametrize("name", ["motivation", "motivation_architectures", "motivation_layers"])
def test_every_layer_of_the_figures_is_one_of_its_network(cell_config, name):
    experiment = cell_config(f"experiment={name}").experiment
    row = next(iter(experiment.rows.values()))
    for column in experiment.columns.values():
        config = cell_config(*experiment.overrides, *row, *column)
        with torch.device("meta"):
            paper = instantiate(OmegaConf.merge(config.model.paper, {"weights": "random"})).build()
        for profile, model in (("paper", paper), ("mini", instantiate(config.model.mini).build())):
            assert config.analysis[profile].layer in select_layers(model).layers


@pytest.mark.parametrize("profile", ["paper", "mini"])
def test_every_analysis_can_be_built(cell_config, profile):
    for name in options("analysis"):
        assert isinstance(instantiate(cell_config(f"analysis={name}").analysis[profile]), Analysis)


def test_the_shared_files_say_every_field_with_the_default_of_the_library():
    hardware, finetuning = (OmegaConf.load(f"{CONF}/{group}/_base.yaml") for group in ("hardware", "finetuning"))
    assert hardware.memory == asdict(MemoryPolicy())
    assert hardware.timing == asdict(TimingPolicy())
    chosen = {"_target_": "facts.finetuning.Finetuning", "learning_rate": "???", "seed": "${seed}", "decay_epochs": []}
    assert OmegaConf.to_container(finetuning.paper) == {**asdict(Finetuning()), **chosen}


def test_the_recovery_says_every_field(cell_config):
    config = cell_config("finetuning=recovery").finetuning
    on_images, on_digits = (instantiate(config[profile]) for profile in ("paper", "mini"))
    assert config.paper.keys() - {"_target_"} == asdict(Recovery()).keys()
    assert on_images == Recovery(epochs=10, precision="bfloat16")
    assert on_digits == Recovery(epochs=2, learning_rate=3e-4, views=False, precision="float32")


@pytest.mark.parametrize("group", ["finetuning", "hardware", "profile", "task", "tracking"])
def test_every_other_choice_composes_and_resolves(cell_config, group):
    for name in options(group):
        assert OmegaConf.to_container(cell_config(f"{group}={name}"), resolve=True)


@pytest.mark.parametrize("name", ["mask_rcnn_swin_b", "upernet_deit_b", "upernet_swin_b"])
def test_stages_end_with_the_training_that_belongs_to_the_network(cell_config, name):
    stages = cell_config(f"model={name}", "stages=pela").stages
    assert stages.training.name == f"train_{name}"
    for part in (stages.retraining, stages.training):
        assert all(isinstance(instantiate(part[profile]), Finetuning) for profile in ("paper", "mini"))


@pytest.mark.parametrize(
    "override", ["estimator.alpha_R=0.5", "ratoi=0.5", "hardware.devise=cpu", "model=deit", "ratio=half"]
)
def test_an_unknown_option_is_refused_before_any_work(override):
    with initialize_config_dir(CONF, version_base="1.3"), pytest.raises(ConfigCompositionException):
        compose("config", overrides=[override])


def test_the_command_line_prints_a_resolved_configuration_and_completes():
    printed = subprocess.run(
        [sys.executable, "-m", "experiments.run", "--cfg", "job", "--resolve", "estimator=flar", "ratio=0.25"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    config = OmegaConf.create(printed)
    assert config.estimator["_target_"] == "facts.estimators.FLAR" and config.ratio == 0.25
    completed = subprocess.run(
        [sys.executable, "-m", "experiments.run", "-sc", "query=bash"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"COMP_LINE": "facts-run estimator=f", "COMP_POINT": "21", "PATH": ""},
    ).stdout
    assert {"estimator=facts", "estimator=flar", "estimator=fwsvd"} == set(completed.split())


def test_stages_want_a_compression(cell_config):
    with pytest.raises(ValueError, match="stages begin with a compression: choose an estimator"):
        method_of(cell_config("model=mask_rcnn_swin_b", "task=coco", "stages=pela", "estimator=none"))
    with pytest.raises(ValueError, match="stages train the compressed layers anew: choose refit=null with them"):
        method_of(cell_config("model=mask_rcnn_swin_b", "task=coco", "stages=pela", "refit=mpifa"))


@pytest.mark.attack
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["search=asvd", "search.ratios=[]"], "search.ratios=[]: tuple should have at least 1 item"),
        (["search=comcat", "search.ratios=[2]"], "search.ratios.0=2: input should be less than 1"),
        (["search=memvit", "search.decay=0"], "search.decay=0: input should be greater than 0"),
        (["estimator.shrinkage_row=2"], "estimator.shrinkage_row=2: input should be less than or equal to 1"),
        (["task.mini.batch_size=0"], "task.mini.batch_size=0: input should be greater than or equal to 1"),
        (["finetuning=recovery", "finetuning.mini.epochs=0"], "finetuning.mini.epochs=0: input should be greater"),
        (["hardware.memory.layers_at_once=0"], "hardware.memory.layers_at_once=0: input should be greater"),
        (["hardware.memory.moments=gpu"], "hardware.memory.moments=gpu: input should be 'auto', 'device' or 'host'"),
        (["hardware.timing.num_turns=0"], "hardware.timing.num_turns=0: input should be greater than or equal to 2"),
        (["hardware.precision=int8"], "hardware.precision must be one of float32, bfloat16, got 'int8'"),
        (["hardware.num_threads=-3"], "hardware.num_threads must be at least 1, got -3"),
        (["hardware.device=tpu"], "hardware.device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["seed=-1"], "seed must be at least 0, got -1"),
        (["ratio=nan"], "ratio is the fraction that remains and must lie in (0, 1], got nan for flops"),
        (["bounds.flops=0.6"], "flops is bounded twice"),
        (["analysis=cross_moments", "fit_bias=true"], "an analysis compares factors of the inputs alone"),
        (["refit=mpifa", "fit_bias=true"], "MPIFA leaves biases as they are"),
    ],
)
def test_values_out_of_range_are_named_before_any_work(cell_config, overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Cell.of(cell_config(*overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["bounds.params=0.6", "bounds={params:0.6}"])
def test_further_bounds(cell_config, override):
    assert Cell.of(cell_config(override)).method.budget.ratios == {"params": 0.6, "flops": 0.5}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["search=cors", "ratio=0.4"], "deit_b · facts · cors · 0.4"),
        (["form=pivoted", "finetuning=recovery"], "deit_b · facts · uniform · 0.5 · pivoted · recovery"),
        (["estimator=none", "pruning=isomorphic", "finetuning=pruned"], "deit_b · isomorphic · 0.5 · pruned"),
        (["estimator=none", "analysis=throughput"], "deit_b · dense · throughput"),
        (["model=swin_b", "estimator=pela", "analysis=cross_moments"], "swin_b · pela · uniform · 0.5 · cross_moments"),
    ],
)
def test_a_cell_has_a_name_in_words(cell_config, overrides, words):
    assert Cell.of(cell_config(*overrides)).words == words


@pytest.mark.parametrize("target", ["facts.nothing", "math.pi", None])
def test_a_target_that_does_not_exist_is_an_error_of_one_line(cell_config, target):
    config = cell_config()
    config.search._target_ = target
    with pytest.raises(ValueError, match=r"^search\._target_: .+$"):
        instantiate(config.search)


def test_a_value_in_place_of_a_group_is_an_error_of_one_line(cell_config):
    with pytest.raises(ValueError, match="'deit' stands in place of a group of fields"):
        instantiate("deit")
    with pytest.raises(ValueError, match=r"1\.0 stands in place of a group of fields: set its fields"):
        Cell.of(cell_config("hardware.timing=${ratio}", "ratio=1.0"))


def test_an_error_of_what_is_built_is_raised_as_it_is(tmp_path):
    node = OmegaConf.create({"_target_": "os.listdir", "path": str(tmp_path / "missing")})
    with pytest.raises(FileNotFoundError, match="missing"):
        instantiate(node)
