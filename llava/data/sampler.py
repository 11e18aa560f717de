"""The order of training samples, decided by seed and epoch alone, and how a step's samples are dealt to ranks."""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler


class RandomOrder(Sampler[int]):
    """A new permutation in every epoch."""

    def __init__(self, num_samples: int, seed: int = 0):
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(self.num_samples, generator=generator).tolist()


class ModalityLengthGroupedSampler(Sampler[int]):
    """Every global batch holds one modality, and neighbours inside it have similar lengths.

    Global batches are drawn at random; inside one, samples go from long to short, so that the ranks' simultaneous
    micro-batches, which are neighbours, pad little and take equally long. The last global batch of each modality may be
    short; those remainders come together at the end, so that none of the others mixes modalities.

    Args:
        lengths: length of every sample, negative for text-only ones.
        global_batch_size: samples per optimizer step over all ranks.
        seed: with the epoch decides the order; all ranks must use the same.
        window: so many global batches' samples, drawn at random, are sorted together, so that each batch holds similar
            lengths. 1 (as LLaVA) leaves each batch a random sample of its modality.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, global_batch_size: int, seed: int = 0, window: int = 1):
        self.lengths = torch.from_numpy(np.array(lengths, np.int64))
        if len(empty := (self.lengths == 0).nonzero()):
            raise ValueError(f"sample {int(empty[0])} has length 0; lengths are positive, or negative for text only")
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.window = window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        full_batches, remainder = [], []
        for members in ((self.lengths > 0).nonzero().flatten(), (self.lengths < 0).nonzero().flatten()):
            shuffled = members[torch.randperm(len(members), generator=generator)]
            kept = len(shuffled) - len(shuffled) % self.global_batch_size
            in_windows = kept - kept % (self.window * self.global_batch_size)
            windows = shuffled[:in_windows].view(-1, self.window * self.global_batch_size)
            full_batches += [self._long_to_short(windows), self._long_to_short(shuffled[None, in_windows:kept])]
            remainder.append(shuffled[kept:])
        full = torch.cat([batches.reshape(-1, self.global_batch_size) for batches in full_batches])
        for batch in full[torch.randperm(len(full), generator=generator)]:
            yield from batch.tolist()
        for batch in torch.cat(remainder).split(self.global_batch_size):
            yield from self._long_to_short(batch[None])[0].tolist()

    def _long_to_short(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row of samples sorted, all at once: one by one a large data set takes seconds."""
        return rows.gather(1, self.lengths[rows].abs().argsort(dim=1, descending=True, stable=True))


class BalancedBatchSampler(Sampler[list[int]]):
    """One rank's micro-batches, so that all micro-batches of an optimizer step hold nearly the same number of tokens.

    A step takes exactly the samples that `order` gives it; only who computes them, and when, is decided here. The last
    step of an epoch may have fewer. If it has too few to go round, a rank repeats one without its targets: the index
    comes as `~index`.

    Args:
        order: every sample once; its `set_epoch` is called where it has one.
        lengths: tokens of every sample, the sign is ignored.
        ranks, micro_batches, batch_size: a step has `ranks * micro_batches * batch_size` samples.
        rank: whose micro-batches are yielded.
    """

    def __init__(
        self,
        order: Sampler[int],
        lengths: Sequence[int] | np.ndarray,
        ranks: int,
        micro_batches: int,
        batch_size: int,
        rank: int,
    ):
        self.order = order
        self.lengths = np.abs(np.asarray(lengths))
        self.ranks, self.micro_batches, self.rank = ranks, micro_batches, rank
        self.step_size = ranks * micro_batches * batch_size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def __len__(self) -> int:
        steps, rest = divmod(len(self.order), self.step_size)
        return steps * self.micro_batches + self._micro_batches_of(rest)

    def _micro_batches_of(self, num_samples: int) -> int:
        """Micro-batches per rank of a step with `num_samples` samples: all of them, unless some would be empty."""
        return min(self.micro_batches, -(-num_samples // self.ranks))

    def __iter__(self) -> Iterator[list[int]]:
        step: list[int] = []
        for index in self.order:
            step.append(index)
            if len(step) == self.step_size:
                yield from self._own_micro_batches(step)
                step = []
        if step:
            yield from self._own_micro_batches(step)

    def _own_micro_batches(self, samples: list[int]) -> list[list[int]]:
        return self.dealt(samples)[self.rank]

    def dealt(self, samples: list[int]) -> list[list[list[int]]]:
        """The micro-batches of every rank, for one step's samples."""
        micro_batches = self._micro_batches_of(len(samples))
        lengths = self.lengths[samples].tolist()
        missing = max(0, self.ranks * micro_batches - len(samples))
        shortest = lengths.index(min(lengths))
        samples = samples + [~samples[shortest]] * missing
        lengths += [lengths[shortest]] * missing
        groups = balanced_groups(lengths, self.ranks * micro_batches)
        # Groups of the same micro-step are neighbours in size: ranks wait for each other there.
        groups.sort(key=lambda group: -sum(lengths[i] for i in group))
        groups = [[samples[i] for i in group] for group in groups]
        return [groups[rank :: self.ranks] for rank in range(self.ranks)]


def balanced_groups(lengths: Sequence[int], num_groups: int) -> list[list[int]]:
    """Positions of `lengths` in `num_groups` non-empty groups of nearly equal sums (longest processing time first).

    Groups and their members are in no particular order; the result depends on the arguments alone.
    """
    heap = [(0, 0, group) for group in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, count, group = heapq.heappop(heap)
        groups[group].append(position)
        heapq.heappush(heap, (total + lengths[position], count + 1, group))
    return groups


def micro_batches_for(tokens_per_step: Sequence[int], ranks: int, samples_per_rank: int, max_tokens: int) -> int:
    """The fewest micro-batches per step and rank, out of the divisors of `samples_per_rank`, that hold `max_tokens`.

    Args:
        tokens_per_step: of every step of an epoch; the largest decides.
        samples_per_rank: of one step.
        max_tokens: cap of a micro-batch, up to what one long sample may add to a balanced group.
    """
    needed = -(-max(tokens_per_step) // (ranks * max_tokens))
    divisors = [n for n in range(1, samples_per_rank + 1) if samples_per_rank % n == 0]
    return next((n for n in divisors if n >= needed), samples_per_rank)
