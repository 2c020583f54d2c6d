"""`save_pretrained` and `push_to_hub` of a compressed network, as Hugging Face's libraries call them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from facts.modules.linear_calls import copy_with
from facts.result import CompressionResult


@dataclass(frozen=True)
class HubMethods:
    """The two methods of a result's network, which write the folder of `facts.save_compressed`.

    They replace those of transformers, which leave out the ranks: `from_pretrained` would fill what they wrote with
    random weights. They are attributes of the network, so its class stays the same, and a copy or an unpickled network
    has its own.
    """

    result: CompressionResult

    def save_pretrained(
        self,
        save_directory: Path | str,
        *,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the folder that `facts.save_compressed` writes, on the main process.

        `state_dict` holds other values for the network's tensors, such as those that a trainer has gathered.
        """
        from facts.saving.folder import save_compressed  # which is built on results

        result = self.result
        if state_dict is not None:
            result = replace(result, model=copy_with(result.model))
            result.model.load_state_dict(state_dict)
        if is_main_process:
            save_compressed(result, save_directory)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload that folder to a repository, by `facts.push_to_hub` with its options, and return its address."""
        from facts.saving.push import push_to_hub

        return push_to_hub(self.result, repo_id, **options)


def with_hub_methods(result: CompressionResult) -> CompressionResult:
    """Give the methods to a result's network, as it is handed over.

    From then on the network and its methods refer to each other, so Python frees them when it next looks for circles.
    """
    methods = HubMethods(replace(result, original=None, output_error=None))
    for method in (methods.save_pretrained, methods.push_to_hub):
        setattr(result.model, method.__name__, method)
    return result
