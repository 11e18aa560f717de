"""What would stop the host until a GPU has caught up, seen on a CPU."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts the operations that would stop the host until a GPU has reached them."""

    NAMES = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_consecutive"}

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith(("index", "_index", "_unsafe_index")) and isinstance(args[1], list | tuple)
        if by_mask and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            self.seen[f"{name} by a mask"] += 1
        if name in self.NAMES or function is torch.ops.aten.repeat_interleave.Tensor:
            self.seen[name] += 1
        return function(*args, **kwargs or {})
