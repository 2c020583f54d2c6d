"""Results are kept, found again, never mixed up, and never trusted when damaged."""

import copy
import importlib.util
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import facts
from facts.estimators import FACTS, GFWSVD
from facts.moments import InputGram
from facts.moments.losses import SampledLabels
from facts.utils.cache import PACKAGE, code_of, content_key, file_name, shared_code, statements
from tests.networks import UNIFORM, EveryShape, Runs, compress_on_all, image_batches, same_weights


def sum_of_outputs(outputs, targets):
    return outputs.sum()


class Other(EveryShape):
    """Another class, which computes the same with this scale."""

    scale = 1.0

    def forward(self, images):
        return super().forward(self.scale * images)


pytestmark = pytest.mark.usefixtures("no_comparison")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def passes(model, batches, cache=None, **options):
    """The result of `compress`, and the number of batches that went through the model."""
    runs = Runs(model)
    result = compress_on_all(model, batches, execution=facts.Execution(cache=cache), **options, **UNIFORM)
    return result, runs.number


def keys(folder):
    return sorted(path.name for path in folder.iterdir())


def values_of(path):
    return {name: tensor.tolist() for name, tensor in load_file(path).items()}


class TestCompress:
    @pytest.mark.parametrize("name", ["facts", "gfwsvd"])
    def test_second_call_needs_no_pass(self, model, batches, folder, name):
        first, num_first = passes(model, batches, estimator=name, cache=folder)
        second, num_second = passes(model, batches, estimator=name, cache=folder, ratio=0.5)
        assert (num_first, num_second) == (2 + 3, 2)  # of which two are looks at one sample or a few
        plain, _ = passes(model, batches, estimator=name)
        assert same_weights(first.model, second.model) and same_weights(first.model, plain.model)
        assert first.summary.repaired == second.summary.repaired

    def test_other_content_is_another_key(self, model, batches, folder, monkeypatch):
        def num_keys(changed_model=model, data=batches, precision=torch.float32, **options):
            execution = facts.Execution(precision, cache=folder)
            facts.compress(changed_model, data, estimator="svd_llm", execution=execution, **options, **UNIFORM)
            return len(keys(folder))

        assert num_keys() == 1
        assert num_keys() == 1
        assert num_keys(data=image_batches([3, 3, 1], seed=2)) == 2
        assert num_keys(data=image_batches([4, 3])) == 3
        assert num_keys(data=[(images, labels.roll(1)) for images, labels in batches]) == 4
        assert num_keys(layers=["tokens", "rows"]) == 5
        assert num_keys(precision=torch.bfloat16) == 6
        assert num_keys(loss=sum_of_outputs) == 7
        assert num_keys(loss=SampledLabels(sum_of_outputs)) == 8
        assert num_keys(loss=SampledLabels(sum_of_outputs, seed=1)) == 9
        with monkeypatch.context() as patch:
            patch.setattr("facts.calibration.prepared_model.shared_code", lambda: "other code")
            assert num_keys() == 10
            patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
            assert num_keys() == 11
        changed = Other().double()
        changed.load_state_dict(model.state_dict())
        assert num_keys(changed_model=changed) == 12
        changed.tokens.weight.data[0, 0] += 1e-6
        assert num_keys(changed_model=changed) == 13
        changed.scale = -1.0
        assert num_keys(changed_model=changed) == 14


@pytest.mark.attack
@pytest.mark.parametrize("damage", ["values", "a name", "no checksum", "cut", "empty"])
def test_damaged_tensors_are_computed_again(model, batches, folder, caplog, damage):
    """Some of these files have the right form, but other content."""
    first, _ = passes(model, batches, cache=folder)
    (path,) = folder.rglob("FACTS-*.safetensors")
    whole, values = path.read_bytes(), values_of(path)
    if damage == "values":
        path.write_bytes(whole[:-64] + bytes(byte ^ 255 for byte in whole[-64:]))
    elif damage == "a name":
        path.write_bytes(whole.replace(b'"tokens/', b'"tokenz/', 1))
    elif damage == "no checksum":
        save_file(load_file(path), path)
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    assert path.read_bytes() != whole
    second, _ = passes(model, batches, cache=folder)
    assert same_weights(first.model, second.model)
    assert f"{path} is damaged" in caplog.text
    assert values_of(path) == values


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        ([[1], [2]], [[1, 2]]),
        ([torch.zeros(2), torch.zeros(2)], [torch.zeros(4)]),
        (FACTS(), FACTS(grad_clip=1.0)),
    ],
)
def test_different_content_has_different_keys(left, right):
    assert content_key(left) != content_key(right)
    assert content_key(left) == content_key(copy.deepcopy(left))


def test_comments_and_docstrings_do_not_count_but_statements_do(tmp_path):
    def code(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"  # a file is read once
        path.write_text(text)
        return statements(path)

    assert code("def f(x): return x + 1") != code("def f(x=0): return x + 1")
    assert code('"""One."""\n\n\ndef f(x):\n    """Add."""\n    return x + 1  # more\n') == code("def f(x): return x+1")


def test_a_moment_of_another_code_is_kept_apart(tmp_path):
    """Its name and fields are the same, whether one's own changed or one is called as the package's is."""
    spec = "from facts.moments import InputGram as Base\n\n\nclass InputGram(Base):\n    size = {}\n"
    keys = {file_name(InputGram())}
    for number in range(2):
        path = tmp_path / f"mine_{number}.py"
        path.write_text(spec.format(number))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
        sys.modules[path.stem] = module
        module.__spec__.loader.exec_module(module)
        keys.add(file_name(module.InputGram()))
        del sys.modules[path.stem]
    assert len(keys) == 3 and all(key.startswith("InputGram-") for key in keys)


def test_each_method_has_its_own_hash_and_no_part_in_the_shared_one(monkeypatch):
    assert code_of(FACTS) != code_of(GFWSVD)
    read = []
    monkeypatch.setattr("facts.utils.cache.statements", lambda path: read.append(path.relative_to(PACKAGE)) or "")
    shared_code.__wrapped__()
    assert len(read) > 30
    assert not [path for path in read if "methods" in path.parts or path.parts[0] in ("cli", "saving")]
