"""How much memory tensors take, on a CPU too."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within the block, `peak` is the largest sum of bytes of tensors that were made there and lived at one time."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = StorageWeakRef(tensor.untyped_storage())
                self.made[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.made = {place: made for place, made in self.made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.made.values()))
        return result
