"""Draw tables and figures of experiments: cells that are done never run again, and several processes share the work.

As in experiments/run.py, PyTorch is loaded once the configuration is known to exist.
"""

from omegaconf import DictConfig

from experiments.compose import announce_loading, command


@command("reproduce")
def main(config: DictConfig) -> None:
    announce_loading()
    from experiments.reproduction import reproduce
    from experiments.runner import started

    with started():
        reproduce(config)


if __name__ == "__main__":
    main()
