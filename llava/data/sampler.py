"""The order of training samples, which depends on seed and epoch alone, and how a step's samples go to ranks."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler


class Order(Sampler[int]):
    """Every sample once, in an order that depends on seed and epoch alone."""

    def __init__(self, num_samples: int, seed: int = 0):
        self.num_samples, self.seed, self.epoch = num_samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples


class RandomOrder(Order):
    """A new permutation in every epoch."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(self.num_samples, generator=generator).tolist()


class ModalityLengthGroupedSampler(Order):
    """Every global batch holds one modality, and neighbours inside it have similar lengths.

    Global batches are drawn at random. Inside one, samples go from long to short, so that the micro-batches that ranks
    compute at the same time, which are neighbours, have little padding and take equally long. The last global batch of
    each modality may be short; these remainders come together at the end, so that no other batch mixes modalities.

    Args:
        lengths: length of every sample, negative for text-only ones.
        global_batch_size: samples per optimizer step over all ranks.
        seed: all ranks must use the same.
        window: the samples of this many global batches, drawn at random, are paired, the longest with the shortest;
            pairs with similar sums share a batch, so that ranks with two or more samples of a batch can be equally
            busy. 1, as in LLaVA, leaves each batch a random sample of its modality.

    Raises:
        ValueError: a sample has length 0.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, global_batch_size: int, seed: int = 0, window: int = 1):
        super().__init__(len(lengths), seed)
        self.lengths = torch.from_numpy(np.array(lengths, np.int64))
        if len(empty := (self.lengths == 0).nonzero()):
            raise ValueError(f"sample {int(empty[0])} has length 0; lengths are positive, or negative for text only")
        self.global_batch_size, self.window = global_batch_size, window

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        full_batches, remainder = [], []
        for members in ((self.lengths > 0).nonzero().flatten(), (self.lengths < 0).nonzero().flatten()):
            shuffled = members[torch.randperm(len(members), generator=generator)]
            whole = len(shuffled) - len(shuffled) % self.global_batch_size
            in_windows = whole - whole % (self.window * self.global_batch_size)
            windows = shuffled[:in_windows].view(-1, self.window * self.global_batch_size)
            full_batches += [self._by_pairs(windows), self._by_pairs(shuffled[None, in_windows:whole])]
            remainder.append(shuffled[whole:])
        full = self._long_to_short(torch.cat([batches.view(-1, self.global_batch_size) for batches in full_batches]))
        for batch in full[torch.randperm(len(full), generator=generator)]:
            yield from batch.tolist()
        for batch in torch.cat(remainder).split(self.global_batch_size):
            yield from self._long_to_short(batch[None])[0].tolist()

    def _by_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row of samples [W, N] as pairs of a long and a short sample; pairs with the largest sums come first."""
        rows, half = self._long_to_short(rows), rows.shape[1] // 2
        pairs = torch.stack([rows[:, :half], rows.flip(1)[:, :half]], dim=2)
        heaviest = self.lengths[pairs].abs().sum(2).argsort(dim=1, descending=True, stable=True)
        pairs = pairs.gather(1, heaviest[:, :, None].expand(-1, -1, 2))
        return torch.cat([pairs.flatten(1), rows[:, half : rows.shape[1] - half]], dim=1)

    def _long_to_short(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row of samples sorted from long to short; all rows at once, since separate sorts take seconds."""
        return rows.gather(1, self.lengths[rows].abs().argsort(dim=1, descending=True, stable=True))


class StepSampler(Sampler[list[list[int]]]):
    """One rank's optimizer steps, each a list of micro-batches; every rank has the same number of steps.

    A step takes exactly the `step_size` samples that `order` gives it; `assign` only decides which rank computes them
    and when: it gives the micro-batches of every rank. An epoch's last step may have fewer samples, or is dropped.
    """

    def __init__(
        self,
        order: Order | SequentialSampler,
        step_size: int,
        assign: Callable[[list[int]], list[list[list[int]]]],
        rank: int,
        drop_last: bool = False,
    ):
        self.order, self.step_size, self.assign, self.rank, self.drop_last = order, step_size, assign, rank, drop_last

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def __len__(self) -> int:
        steps, rest = divmod(len(self.order), self.step_size)
        return steps + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[list[int]]]:
        samples = iter(self.order)
        for _ in range(len(self)):
            yield self.assign(list(islice(samples, self.step_size)))[self.rank]


def assigned_by_length(
    samples: list[int],
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    micro_batches: int,
    max_tokens: int | None = None,
) -> list[list[list[int]]]:
    """The micro-batches of every rank, all with nearly the same number of tokens.

    Ranks wait for each other after every micro-batch, so those that they compute at the same time are neighbours in
    size. If a step has too few samples for all ranks, one is repeated without its targets, as the index `~index`.

    Args:
        samples: indices of the samples of one step.
        lengths: tokens of every sample of the data set; the sign is ignored.
        ranks: number of ranks.
        micro_batches: number of micro-batches per rank; fewer where some would be empty.
        max_tokens: as many more micro-batches as are needed, so that only a single longer sample exceeds it.
    """
    tokens = np.abs(np.asarray(lengths)[samples]).tolist()
    most = -(-len(samples) // ranks)
    fewest = micro_batches if max_tokens is None else max(micro_batches, -(-sum(tokens) // (ranks * max_tokens)))
    shortest = tokens.index(min(tokens))
    missing = ranks * most - len(samples)
    for count in range(min(fewest, most), most + 1):
        if count == most:
            samples, tokens = samples + [~samples[shortest]] * missing, tokens + [tokens[shortest]] * missing
        groups = balanced_groups(tokens, ranks * count, max_tokens)
        if max_tokens is None or all(len(g) == 1 or sum(tokens[i] for i in g) <= max_tokens for g in groups):
            break
    groups.sort(key=lambda group: -sum(tokens[i] for i in group))
    return [[[samples[i] for i in group] for group in groups[rank::ranks]] for rank in range(ranks)]


def assigned_in_order(samples: list[int], ranks: int, batch_size: int, repeats: bool = False) -> list[list[list[int]]]:
    """The micro-batches of every rank as in LLaVA: slices of a step's samples, assigned to the ranks in turn.

    An epoch's last samples are sliced evenly if a rank would get none, and filled up as in `assigned_by_length`, or by
    the last sample again where `repeats`: the mean over micro-batches would count one without targets as 0.
    """
    slices = ranks * -(-len(samples) // (ranks * batch_size))
    samples = samples + [samples[-1] if repeats else ~samples[-1]] * (slices - len(samples))
    if len(samples) > (slices - 1) * batch_size:
        batches = [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]
    else:
        batches = [part.tolist() for part in np.array_split(samples, slices)]
    return [batches[rank::ranks] for rank in range(ranks)]


def balanced_groups(lengths: Sequence[int], num_groups: int, limit: int | None = None) -> list[list[int]]:
    """Positions of `lengths` in `num_groups` non-empty groups of nearly equal sums (longest processing time first).

    There are at most as many groups as lengths; a group whose sum exceeds `limit` passes samples on to others as long
    as that helps. The result depends on the arguments alone.
    """
    heap = [(0, 0, group) for group in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, count, group = heapq.heappop(heap)
        groups[group].append(position)
        heapq.heappush(heap, (total + lengths[position], count + 1, group))
    if limit is not None:
        _relieve(groups, lengths, limit)
    return groups


def _relieve(groups: list[list[int]], lengths: Sequence[int], limit: int) -> None:
    """Lets the fullest group above `limit` give a sample away, or swap it for a shorter one, as long as that helps."""
    sums = [sum(lengths[i] for i in group) for group in groups]
    while True:
        full = max((g for g, group in enumerate(groups) if len(group) > 1), key=sums.__getitem__, default=None)
        if full is None or sums[full] <= limit:
            return
        best, exchange = sums[full], None
        for other, group in enumerate(groups):
            if sums[other] < best:
                for sent, taken in product(groups[full], (None, *group)):
                    moved = lengths[sent] - (0 if taken is None else lengths[taken])
                    if (larger := max(sums[full] - moved, sums[other] + moved)) < best:
                        best, exchange = larger, (other, sent, taken, moved)
        if exchange is None:
            return
        other, sent, taken, moved = exchange
        groups[full].remove(sent)
        groups[other].append(sent)
        if taken is not None:
            groups[other].remove(taken)
            groups[full].append(taken)
        sums[full], sums[other] = sums[full] - moved, sums[other] + moved
