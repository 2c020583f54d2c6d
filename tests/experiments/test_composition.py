"""Choices that do not exist, and files that would not be read, end a command before any work."""

import sys

import pytest

from experiments.reproduce import main


@pytest.fixture
def reproduce(monkeypatch, tmp_path):
    def call(*overrides, folder=()):
        given = ["experiment=contributions", "plan=true", *overrides, "tracking=off", f"results={tmp_path / 'results'}"]
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        monkeypatch.setattr(sys, "argv", ["command", *folder, *given, *quiet])
        main()

    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return call


def test_a_row_with_a_misspelt_method_is_named_with_the_choices(reproduce):
    with pytest.raises(SystemExit, match=r"^error: contributions, Mine, .+: estimator/fact is none of aafm, .*facts, "):
        reproduce('+experiment.rows.Mine=["estimator=fact"]')


def test_a_file_of_the_users_that_the_package_has_too_is_named(reproduce, tmp_path):
    own = tmp_path / "conf" / "estimator"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("_target_: facts.estimators.PELA\n")
    folder = ("--config-dir", str(own.parent))
    reproduce('+experiment.rows.Mine=["estimator=mine"]', folder=folder)
    (own / "asvd.yaml").write_text("_target_: facts.estimators.PELA\n")
    with pytest.raises(SystemExit, match=r"conf/estimator/asvd.yaml would not be read: the package has estimator/asvd"):
        reproduce(folder=folder)
