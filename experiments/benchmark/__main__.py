"""Speed and memory, in one run each: `python -m experiments.benchmark data_pass`, or another command.

Variants take turns, A B C A B C, and medians are compared, so that a busy machine slows all of them alike.
"""

import argparse
from collections.abc import Sequence

from experiments.benchmark import data_pass, latency, throughput


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for module in (data_pass, throughput, latency):
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=module.__doc__)
        command.add_argument("--repeats", type=int, default=3, help="turns of each variant, after an untimed one")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
