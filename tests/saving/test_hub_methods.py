"""A compressed network's own `save_pretrained` and `push_to_hub`, and the way back by `AutoCompressed`."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import facts
from facts.models import TimmModel
from facts.modules.networks import run
from facts.saving.manifest import MANIFEST, WEIGHTS
from tests.fake_hub import TOKEN
from tests.networks import make_image_classifier
from tests.saving.test_push import NAME, VIT, hub  # noqa: F401

IMAGES = torch.randn(2, 3, 32, 32)


def make_timm():
    torch.manual_seed(0)
    return TimmModel(tag="vit_tiny_patch16_224", arguments=VIT, weights="random").build()


MAKE = {"timm": make_timm, "transformers": make_image_classifier}


@pytest.fixture(params=MAKE)
def result(request):
    return facts.compress(facts.prepare(MAKE[request.param](), input_shape=(3, 32, 32)), estimator="pela")


@torch.no_grad()
def outputs(model):
    return run(model.eval(), IMAGES)


class TestRoundTrip:
    def test_a_folder(self, result, tmp_path):
        result.model.save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS, MANIFEST, "README.md"}
        loaded = facts.AutoCompressed.from_pretrained(tmp_path)
        assert outputs(loaded).equal(outputs(result.model))
        assert facts.load_compressed(tmp_path).summary == result.summary

    def test_a_repository(self, hub, result):  # noqa: F811
        address = result.model.push_to_hub(NAME, token=TOKEN, revision="half", metrics={"top1": {"compressed": 70.3}})
        assert address == f"{hub.address}/{NAME}"
        assert b"70.3" in hub.files(NAME, "half")["README.md"]
        assert "config.json" not in hub.files(NAME, "half")  # from which transformers would make random weights
        loaded = facts.AutoCompressed.from_pretrained(NAME, revision="half")
        assert outputs(loaded).equal(outputs(result.model))

    def test_a_network_that_was_loaded_has_them_too(self, result, tmp_path):
        result.model.save_pretrained(tmp_path / "first")
        facts.AutoCompressed.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
        assert outputs(facts.AutoCompressed.from_pretrained(tmp_path / "second")).equal(outputs(result.model))

    def test_a_dense_network_is_left_alone(self):
        dense = make_timm()
        facts.compress(facts.prepare(dense, input_shape=(3, 32, 32)), estimator="pela")
        assert not hasattr(dense, "push_to_hub")

    def test_the_course_of_a_recovery_is_saved(self, tmp_path):
        result = facts.compress(make_timm(), [IMAGES], estimator="pela")
        recovered = facts.recover(result, [torch.randn(8, 3, 32, 32)], epochs=1, batch_size=2)
        recovered.model.save_pretrained(tmp_path)
        assert facts.load_compressed(tmp_path).summary.recovery is not None

    def test_without_a_recipe_the_dense_network_is_given(self, tmp_path):
        dense = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        result = facts.compress(facts.prepare(dense, layers=["0"], input_shape=(8,)), estimator="pela")
        result.model.save_pretrained(tmp_path)
        loaded = facts.AutoCompressed.from_pretrained(tmp_path, model=copy.deepcopy(dense))
        assert torch.equal(loaded(torch.ones(1, 8)), result.model(torch.ones(1, 8)))


class TestTheNetworkIsAsBefore:
    def test_a_copy_saves_itself(self, result, tmp_path):
        changed = copy.deepcopy(result.model)
        with torch.no_grad():
            next(changed.parameters()).add_(1)
        changed.save_pretrained(tmp_path)
        loaded = facts.AutoCompressed.from_pretrained(tmp_path)
        assert outputs(loaded).equal(outputs(changed)) and not outputs(loaded).equal(outputs(result.model))

    def test_it_can_be_pickled(self, result, tmp_path):
        unpickled = pickle.loads(pickle.dumps(result.model))
        expected = outputs(result.model)
        del result
        unpickled.save_pretrained(tmp_path)
        assert outputs(facts.AutoCompressed.from_pretrained(tmp_path)).equal(expected)

    def test_class_tensors_and_modules_are_the_same(self, result):
        bare = copy.deepcopy(result.model)
        del bare.save_pretrained, bare.push_to_hub
        assert type(bare) is type(result.model) and repr(bare) == repr(result.model)
        assert list(bare.state_dict()) == list(result.model.state_dict())
        assert [name for name, _ in bare.named_modules()] == [name for name, _ in result.model.named_modules()]

    def test_it_can_be_exported(self, result):
        program = torch.export.export(result.model, (IMAGES,))
        found = program.module()(IMAGES)
        assert torch.allclose(found if isinstance(found, torch.Tensor) else found.logits, outputs(result.model))

    def test_its_memory_is_freed(self):
        result = facts.compress(facts.prepare(make_timm(), input_shape=(3, 32, 32)), estimator="pela")
        watched = weakref.ref(result.model)
        del result
        gc.collect()
        assert watched() is None


class TestTrainers:
    def test_other_values_and_other_processes(self, result, tmp_path):
        tensors = {name: tensor + 1 for name, tensor in result.model.state_dict().items()}
        result.model.save_pretrained(tmp_path / "none", is_main_process=False, state_dict=tensors)
        assert not (tmp_path / "none").exists()
        before = outputs(result.model)
        result.model.save_pretrained(tmp_path, state_dict=tensors)
        assert outputs(result.model).equal(before)
        loaded = facts.AutoCompressed.from_pretrained(tmp_path).state_dict()
        floating = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        assert floating and all(loaded[name].equal(tensors[name]) for name in floating)

    def test_the_trainer_trains_saves_and_continues(self, tmp_path):
        pytest.importorskip("accelerate", reason="the extra `llm` is not installed: make install-llm")
        from transformers import Trainer, TrainingArguments

        samples = [{"pixel_values": torch.randn(3, 32, 32), "labels": index % 5} for index in range(8)]
        result = facts.compress(facts.prepare(make_image_classifier(), input_shape=(3, 32, 32)), estimator="pela")
        before = [parameter.clone() for parameter in result.model.parameters()]

        def train(model, steps, **options):
            settings = TrainingArguments(
                tmp_path, max_steps=steps, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
            )
            trainer = Trainer(model, settings, train_dataset=samples)
            trainer.train(**options)
            return trainer

        trainer = train(result.model, 1)
        assert all(not old.equal(new) for old, new in zip(before, result.model.parameters(), strict=True))
        trainer.save_model(tmp_path / "final")
        (tmp_path / "final" / "training_args.bin").unlink()  # a pickle
        assert outputs(facts.AutoCompressed.from_pretrained(tmp_path / "final")).equal(outputs(result.model))

        continued = copy.deepcopy(result.model)
        with torch.no_grad():
            next(continued.parameters()).zero_()
        train(continued, 1, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert outputs(continued).equal(outputs(result.model))
