"""Rewrite the report from existing results: `python -m experiments.report [profile=mini|paper] [results=FOLDER]`."""

from pathlib import Path

import hydra

from experiments.config import CONF, Config
from experiments.output.results import report_on_all


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: Config) -> None:
    folder = Path(config.results) / config.profile.name
    if not folder.is_dir():
        raise SystemExit(
            f"there is no folder {folder}: choose another with results=, or run experiments.reproduce first"
        )
    report_on_all(folder)
    print(folder / "report.html")


if __name__ == "__main__":
    main()
