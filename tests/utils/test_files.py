"""Locks, and files that refer to others: never to those of another. Results are kept, and not trusted when damaged."""

import copy
import errno
import fcntl
import importlib.util
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import facts
from facts.estimators import FACTS, GFWSVD
from facts.moments import InputGram
from facts.utils.cache import PACKAGE, code_of, content_key, file_name, shared_code, statements
from facts.utils.files import HeldElsewhere, locked, replacing, writable_folder
from tests.networks import UNIFORM, EveryShape, Runs, compress_on_all, image_batches, same_weights

pytestmark = pytest.mark.usefixtures("no_comparison")
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_keeps_others_out_and_falls_with_a_killed_holder(tmp_path):
    path = tmp_path / "cell.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(HeldElsewhere, match=r"cell\.lock is held by another process"), locked(path, wait=False):
            pytest.fail("two holders")
        holder.kill()
    with locked(path, wait=False):
        assert path.exists()


def test_a_file_system_without_locks_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with pytest.raises(OSError, match="on a file system with flock"), locked(tmp_path / "lock"):
        pytest.fail("no lock, and yet inside")


def test_a_folder_is_tried_without_leaving_one(tmp_path):
    assert writable_folder(tmp_path / "a" / "b", keep=False) == tmp_path / "a" / "b" and not any(tmp_path.iterdir())
    writable_folder(tmp_path / "a")
    writable_folder(tmp_path / "a" / "b", keep=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_a_folder_may_be_called_like_the_home_of_a_user_who_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert writable_folder(Path("~nobody-at-all/a")).is_dir() and (tmp_path / "~nobody-at-all" / "a").is_dir()


def write(path, text):
    """A file, and another one that it refers to, where `replacing` says."""
    with replacing(path) as staged:
        staged.write_text(text)
        staged.with_suffix(".data").write_text(text)


def contents(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_staged_files_move_together_or_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    for text in ("first", "second"):
        write(folder / "a.onnx", text)
        assert contents(folder) == {"a.onnx": text, "a.data": text}
    with pytest.raises(ZeroDivisionError), replacing(folder / "a.onnx") as staged:
        staged.write_text("third")
        1 / 0  # noqa: B018
    assert contents(folder) == {"a.onnx": "second", "a.data": "second"}
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new" / "folder" / "a.onnx"):
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_move_that_ends_in_between_mixes_no_files(tmp_path, monkeypatch):
    write(tmp_path / "a.onnx", "first")
    move = Path.replace

    def moves_only_data(file, to):
        if file.suffix == ".onnx":
            raise KeyboardInterrupt
        return move(file, to)

    monkeypatch.setattr(Path, "replace", moves_only_data)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.onnx", "second")
    assert contents(tmp_path) == {"a.data": "second"}


def sum_of_outputs(outputs, targets):
    return outputs.sum()


class Other(EveryShape):
    """Another class, which computes the same with this scale."""

    scale = 1.0

    def forward(self, images):
        return super().forward(self.scale * images)


def passes(model, batches, cache=None, **options):
    """The result of `compress`, and the number of batches that went through the model."""
    runs = Runs(model)
    return compress_on_all(model, batches, execution=facts.Execution(cache=cache), **options, **UNIFORM), runs.number


def values_of(path):
    return {name: tensor.tolist() for name, tensor in load_file(path).items()}


class TestCompress:
    @pytest.mark.parametrize("name", ["facts", "gfwsvd"])
    def test_second_call_needs_no_pass(self, model, batches, tmp_path, name):
        first, num_first = passes(model, batches, estimator=name, cache=tmp_path)
        second, num_second = passes(model, batches, estimator=name, cache=tmp_path, ratio=0.5)
        assert (num_first, num_second) == (2 + 3, 2)  # of which two are looks at one sample or a few
        plain, _ = passes(model, batches, estimator=name)
        assert same_weights(first.model, second.model) and same_weights(first.model, plain.model)
        assert first.summary.repaired == second.summary.repaired

    def test_other_content_is_another_key(self, model, batches, tmp_path, monkeypatch):
        def num_keys(changed_model=model, data=batches, precision=torch.float32, **options):
            execution = facts.Execution(precision, cache=tmp_path)
            facts.compress(changed_model, data, estimator="svd_llm", execution=execution, **options, **UNIFORM)
            return len([*tmp_path.iterdir()])

        assert num_keys() == 1
        assert num_keys() == 1
        assert num_keys(data=image_batches([3, 3, 1], seed=2)) == 2
        assert num_keys(data=image_batches([4, 3])) == 3
        assert num_keys(data=[(images, labels.roll(1)) for images, labels in batches]) == 4
        assert num_keys(layers=["tokens", "rows"]) == 5
        assert num_keys(precision=torch.bfloat16) == 6
        assert num_keys(loss=sum_of_outputs) == 7
        assert num_keys(loss=facts.SampledLabels(sum_of_outputs)) == 8
        assert num_keys(loss=facts.SampledLabels(sum_of_outputs, seed=1)) == 9
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
def test_damaged_tensors_are_computed_again(model, batches, tmp_path, caplog, damage):
    """Some of these files have the right form, but other content."""
    first, _ = passes(model, batches, cache=tmp_path)
    (path,) = tmp_path.rglob("FACTS-*.safetensors")
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
    second, _ = passes(model, batches, cache=tmp_path)
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
    assert content_key(left) != content_key(right) and content_key(left) == content_key(copy.deepcopy(left))


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
