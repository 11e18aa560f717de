"""What would stop the host until a GPU has caught up, seen on a CPU."""

from collections import Counter

from benchmarks.host_syncs import Reads


class Waits(Reads):
    """Counts the operations that would stop the host until a GPU has reached them."""

    def __init__(self):
        self.seen = Counter()
        super().__init__(lambda name: self.seen.update([name]))
