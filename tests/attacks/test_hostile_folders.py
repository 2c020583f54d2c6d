"""Each hostile folder is refused, within a second of a processor and 100 MiB, measured in a process of its own."""

import shutil

import pytest

from tests.attacks.hostile_folders import ATTACKS, RAN

pytestmark = [pytest.mark.attack, pytest.mark.system]

SECONDS, MEBIBYTES = 1, 100


def test_an_unchanged_folder_is_loaded(original, loader):
    assert loader.load(original)["outcome"] == "loaded"


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused_at_once(attack, original, loader, tmp_path):
    (tmp_path / "secret").write_text("mine")
    folder = shutil.copytree(original, tmp_path / "saved")
    ATTACKS[attack](folder)
    result = loader.load(folder)
    assert result["outcome"].startswith("refused: ") and "\n" not in result["outcome"], result["outcome"][:500]
    assert not (original.parent / RAN).exists()
    assert result["seconds"] < SECONDS and result["mebibytes"] < MEBIBYTES, result
