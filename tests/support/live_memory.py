"""How much memory tensors take while something runs."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """The most bytes alive at a time of tensors made in this context, and the largest tensor's."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result
