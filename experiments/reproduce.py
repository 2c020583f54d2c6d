"""Draw tables and figures of experiments: cells that are done never run again, and several processes share the work.

As in experiments/run.py, PyTorch is loaded once the configuration is known to exist.
"""

from omegaconf import DictConfig

from experiments.compose import command, say_what_takes_seconds


@command("reproduce")
def main(config: DictConfig) -> None:
    say_what_takes_seconds()
    from experiments.reproduction import reproduce
    from experiments.runner import started

    with started():
        reproduce(config)


if __name__ == "__main__":
    main()
