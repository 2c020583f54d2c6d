"""`facts push`."""

from typing import Annotated

import typer

from facts.cli import options


def push(
    folder: options.Folder,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Created if necessary.")],
    private: Annotated[bool, typer.Option("--private", help="Create a repository that only you can see.")] = False,
    architecture: options.Architecture = None,
) -> None:
    """Upload a compressed network to Hugging Face, with a model card, after `hf auth login`.

    [bold]Examples[/]

        facts push deit_half me/deit-half
        facts push deit_half me/deit-half --private

    The card is rewritten, unless the one in the repository was edited. `facts.load_compressed("OWNER/NAME")` loads
    the network from there.
    """
    from pathlib import Path

    import facts
    from facts.saving.manifest import ELASTIC, Manifest

    if (Path(folder) / ELASTIC).exists():
        raise ValueError(f"{folder} serves every budget: push a cut of it, or all of it with `hf upload`")
    result = facts.load_compressed(folder, architecture=architecture)
    metrics = Manifest.read(Path(folder)).metrics
    print(f"pushed to {facts.push_to_hub(result, repository, metrics=metrics, private=private)}")
