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
from facts.utils.cache import PACKAGE, code_of, content_key, shared_code, statements
from tests.networks import UNIFORM, EveryShape, compress_on_all, image_batches, make_model


def sum_of_outputs(outputs, targets):
    return outputs.sum()


class Counting(EveryShape):
    """Counts the forward passes that compute something, not those that only count cost."""

    calls = 0

    def forward(self, images):
        type(self).calls += not images.is_meta
        return super().forward(images)


pytestmark = pytest.mark.usefixtures("no_comparison")


@pytest.fixture
def model():
    torch.manual_seed(0)
    Counting.calls = 0
    return Counting()


@pytest.fixture
def batches():
    return image_batches([3, 3, 1], dtype=torch.float32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def passes(model, batches, cache=None, **options):
    """Batches that went through the model during `compress`."""
    Counting.calls = 0
    result = compress_on_all(model, batches, execution=facts.Execution(cache=cache), **options, **UNIFORM)
    return result, Counting.calls


def keys(folder):
    return sorted(path.name for path in folder.iterdir())


def values_of(path):
    return {name: tensor.tolist() for name, tensor in load_file(path).items()}


def weights(result):
    return torch.cat([parameter.flatten() for parameter in result.model.parameters()])


class TestCompress:
    @pytest.mark.parametrize("name", ["facts", "gfwsvd"])
    def test_second_call_needs_no_pass(self, model, batches, folder, name):
        first, num_first = passes(model, batches, estimator=name, cache=folder)
        second, num_second = passes(model, batches, estimator=name, cache=folder, ratio=0.5)
        assert (num_first, num_second) == (4 + 3, 4)  # of which four are looks at one or two samples
        plain, _ = passes(model, batches, estimator=name)
        assert weights(first).equal(weights(second)) and weights(first).equal(weights(plain))
        assert first.summary.method.repaired == second.summary.method.repaired

    def test_other_content_is_another_key(self, model, batches, folder, monkeypatch):
        def num_keys(changed_model=model, data=batches, precision=torch.float32, **options):
            execution = facts.Execution(precision, cache=folder)
            facts.compress(changed_model, data, estimator="svd_llm", execution=execution, **options, **UNIFORM)
            return len(keys(folder))

        assert num_keys() == 1
        assert num_keys() == 1
        assert num_keys(data=image_batches([3, 3, 1], dtype=torch.float32, seed=2)) == 2
        assert num_keys(data=image_batches([4, 3], dtype=torch.float32)) == 3
        assert num_keys(data=[(images, labels.roll(1)) for images, labels in batches]) == 4
        assert num_keys(layers=["tokens", "rows"]) == 5
        assert num_keys(precision=torch.bfloat16) == 6
        assert num_keys(loss=sum_of_outputs) == 7
        with monkeypatch.context() as patch:
            patch.setattr("facts.calibration.calibration.shared_code", lambda: "other code")
            assert num_keys() == 8
            patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
            assert num_keys() == 9
        changed = make_model(torch.float32)
        assert num_keys(changed_model=changed) == 10  # another class
        changed.tokens.weight.data[0, 0] += 1e-6
        assert num_keys(changed_model=changed) == 11


@pytest.mark.attack
class TestDamage:
    @pytest.mark.parametrize("damage", ["values", "a name", "no checksum", "cut", "empty"])
    def test_damaged_tensors_are_computed_again(self, model, batches, folder, caplog, damage):
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
        assert weights(first).equal(weights(second))
        assert f"{path} is damaged" in caplog.text
        assert values_of(path) == values


class TestKeys:
    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (torch.zeros(2, 3), torch.zeros(3, 2)),
            ([[1], [2]], [[1, 2]]),
            ([torch.zeros(2), torch.zeros(2)], [torch.zeros(4)]),
            (FACTS(), FACTS(grad_clip=1.0)),
        ],
    )
    def test_different_content_has_different_keys(self, left, right):
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
    keys = {InputGram().key}
    for number in range(2):
        path = tmp_path / f"mine_{number}.py"
        path.write_text(spec.format(number))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
        sys.modules[path.stem] = module
        module.__spec__.loader.exec_module(module)
        keys.add(module.InputGram().key)
        del sys.modules[path.stem]
    assert len(keys) == 3 and all(key.startswith("InputGram-") for key in keys)


def test_each_method_has_its_own_hash_and_no_part_in_the_shared_one(monkeypatch):
    assert code_of(FACTS) != code_of(GFWSVD)
    read = []
    monkeypatch.setattr("facts.utils.cache.statements", lambda path: read.append(path.relative_to(PACKAGE)) or "")
    shared_code.__wrapped__()
    assert len(read) > 30
    assert not [path for path in read if "methods" in path.parts or path.parts[0] in ("cli", "saving")]
