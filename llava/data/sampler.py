"""The order of training samples: grouped by modality and length, reproducible from seed and epoch alone."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class ModalityLengthGroupedSampler(Sampler[int]):
    """Every global batch holds one modality, and neighbours inside it have similar lengths.

    Global batches are drawn at random; inside one, samples go from long to short, so that the ranks' simultaneous
    micro-batches, which are neighbours, pad little and take equally long. The last global batch of each modality may be
    short; those remainders come together at the end, so that none of the others mixes modalities.

    Args:
        lengths: length of every sample, negative for text-only ones.
        global_batch_size: samples per optimizer step over all ranks.
        seed: with the epoch decides the order; all ranks must use the same.
    """

    def __init__(self, lengths: list[int], global_batch_size: int, seed: int = 0):
        if 0 in lengths:
            raise ValueError(f"sample {lengths.index(0)} has length 0; lengths are positive, or negative for text only")
        self.lengths = torch.tensor(lengths)
        self.global_batch_size = global_batch_size
        self.seed = seed
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
            batches = list(shuffled.split(self.global_batch_size))
            if batches and len(batches[-1]) < self.global_batch_size:
                remainder.append(batches.pop())
            full_batches += batches
        order = torch.randperm(len(full_batches), generator=generator).tolist()
        batches = [full_batches[i] for i in order]
        batches += list(torch.cat(remainder).split(self.global_batch_size)) if remainder else []
        for batch in batches:
            yield from batch[self.lengths[batch].abs().argsort(descending=True, stable=True)].tolist()
