"""From a record to tensors: tokens, labels and pixels of one sample, a batch of them; and the lengths of all samples.

Lengths need every record tokenised once, by all cores; the counts stay on disk beside the data.

Shapes: S tokens of the sample (an image placeholder counts as one), n images of the sample, N samples. In a batch:
B samples, S the longest one, N images.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

import numpy as np
import tokenizers
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

import llava
from llava.anyres import CropRules, Picture
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import get_template
from llava.data.cache import made_once
from llava.data.checks import ImagePlace, placeholder_problem, record_images
from llava.data.images import ImageError, ImageStore
from llava.data.parallel import in_processes
from llava.data.preprocess import TokenizedSample, preprocess
from llava.data.records import RecordTable
from llava.data.turns import LabelMasking
from llava.layout import Layout, lay_out, pad_layout
from llava.mm_utils import process_prompt_images
from llava.utils.progress import progress

logger = logging.getLogger(__name__)

_PIECE = 256  # records that a process counts at a time
_WORTH_PROCESSES = 4096  # records
_DATA_CODE = ("checks", "messages", "parquet_files", "preprocess", "turns")
_CODE = ("conversation", "mm_utils", *(f"data/{name}" for name in _DATA_CODE))


class Sample(TypedDict, total=False):
    """A record as training gets it; it has `images` and `pictures` only where the record has pictures."""

    input_ids: torch.Tensor  # [S]
    labels: torch.Tensor  # [S]
    index: int  # of the record; `~index` without targets
    images: torch.Tensor  # [n, 3, H, W]
    pictures: list[Picture]


class LazySupervisedDataset(Dataset):
    """Tokenises and decodes each sample when it is needed.

    Args:
        records: checked records.
        tokenizer: a fast one.
        version: name of the conversation template.
        image_processor: the vision tower's; None for text-only data.
        image_folder: a folder, a zip file, or a store of images.
        image_aspect_ratio: `pad` or `square` (plain resize), as `--image_aspect_ratio`.
        num_visual_tokens: V, the tokens that one placeholder expands to.
        model_max_length: length at which samples are cut, counted after expansion.
        label_masking: `assistant` or `upstream`.
        show_progress: of measuring all lengths.
        pixel_dtype: type of `images`: the tower's, so that batches are no larger than it needs.
        crop_rules: the model's; where they are `anyres`, they replace `image_aspect_ratio` and `num_visual_tokens`.
        leaves_out: train without a sample whose picture turns out to be damaged, as `--on_bad_record skip` asks.
    """

    def __init__(
        self,
        records: RecordTable,
        tokenizer: PreTrainedTokenizerBase,
        version: str,
        image_processor: BaseImageProcessor | None,
        image_folder: str | ImageStore | None,
        image_aspect_ratio: str,
        num_visual_tokens: int,
        model_max_length: int,
        label_masking: LabelMasking = "assistant",
        show_progress: bool = True,
        pixel_dtype: torch.dtype = torch.float32,
        crop_rules: CropRules | None = None,
        leaves_out: bool = False,
    ):
        self.records = records
        self.tokenizer = tokenizer
        self.template = get_template(version)
        self.image_processor = image_processor
        self.images = image_folder if isinstance(image_folder, ImageStore) else ImageStore(image_folder)
        self.crop_rules = crop_rules if crop_rules is not None and crop_rules.is_anyres else None
        self.image_config = SimpleNamespace(
            image_aspect_ratio=self.crop_rules.aspect_ratio if self.crop_rules else image_aspect_ratio,
            image_grid_pinpoints=self.crop_rules.grids if self.crop_rules else None,
        )
        self.num_visual_tokens = num_visual_tokens
        self.model_max_length = model_max_length
        self.label_masking = label_masking
        self.show_progress, self.leaves_out = show_progress, leaves_out
        self.pixel_dtype = pixel_dtype
        self._lengths: np.ndarray | None = None
        self._truncation_reported = False

    def over(self, records: RecordTable, images: ImageStore) -> "LazySupervisedDataset":
        """A dataset of other records, with their own images, made into samples in the same way."""
        other = copy.copy(self)
        other.records, other.images, other._lengths = records, images, None
        return other

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_lengths": None}  # workers need no lengths: the order is decided elsewhere

    def __getitem__(self, index: int) -> Sample:
        """`input_ids` [S], `labels` [S], `index`, and, if the record has images, `images` [n, 3, H, W].

        With `anyres`, `images` holds the crops of all images, and `pictures` describes them. A negative index `~i`
        gives sample i without targets, for ranks that have no sample left; with `leaves_out`, a sample whose picture
        cannot be decoded, although its header can be read, is given so too, and a warning names it.

        Raises:
            ValueError, FileNotFoundError: the record cannot be turned into a sample; the message names it.
        """
        number = max(index, ~index)
        try:
            item = self._item(number, self.images.open)
        except ValueError as error:
            if not isinstance(error.__cause__, ImageError):
                raise
            if not self.leaves_out:
                raise ValueError(f"{error}; llava.data.preflight --full_decode finds all such pictures") from error
            logger.warning("%s; the sample is left out (--on_bad_record skip)", error)
            item, index = self._item(number, self._blank), ~number
        if index < 0:
            item["labels"], item["index"] = torch.full_like(item["labels"], IGNORE_INDEX), index
        return item

    def _blank(self, place: ImagePlace) -> Image.Image:
        """A black picture of the size that the picture's header gives, so that the sample keeps its length."""
        return Image.new("RGB", self.images.size(place))

    def _item(self, index: int, read: Callable[[ImagePlace], Image.Image]) -> Sample:
        sample, places = self.tokenized(index)
        images: list[Image.Image] = []
        pictures: list[Picture] = []
        visual_tokens = self.num_visual_tokens
        if self.crop_rules is not None and len(places) == 1:  # the sample's length depends on the picture's size
            images = [self._opened(read, places[0], index)]
            pictures = [self.crop_rules.picture(images[0].size)]
            visual_tokens = self.crop_rules.visual_tokens(pictures[0])
        sample = self._cut(sample, index, visual_tokens)
        item: Sample = {"input_ids": sample.input_ids, "labels": sample.labels, "index": index}
        # A cut may remove placeholders, and their images with them.
        num_images = int((sample.input_ids == IMAGE_TOKEN_INDEX).sum())
        if num_images:
            images = images or [self._opened(read, place, index) for place in places[:num_images]]
            if self.crop_rules is not None:
                item["pictures"] = pictures or [Picture()] * num_images
            assert self.image_processor is not None  # None goes with text-only data
            pixels = process_prompt_images(images, self.image_processor, self.image_config, len(places))
            item["images"] = (pixels[0] if len(pixels) == 1 else torch.cat(pixels)).to(self.pixel_dtype)
        return item

    def tokenized(self, index: int) -> tuple[TokenizedSample, list[ImagePlace]]:
        """Token ids and labels of one record, not yet cut, and where its images are."""
        record = self.records[index]
        places = record_images(record)
        try:
            if problem := placeholder_problem(record, places):
                raise ValueError(problem.message)
            options = {"label_masking": self.label_masking, "has_image": bool(places)}
            sample = preprocess(record["conversations"], self.tokenizer, self.template, **options)
            if (written := int((sample.input_ids == IMAGE_TOKEN_INDEX).sum())) != len(places):
                raise ValueError(f"{len(places)} images, but {written} places for them")
        except ValueError as error:
            raise ValueError(f"{self.records.named(index)}: {error}") from error
        return sample, places

    def _cut(self, sample: TokenizedSample, index: int, num_visual_tokens: int) -> TokenizedSample:
        widths = torch.where(sample.input_ids == IMAGE_TOKEN_INDEX, num_visual_tokens, 1)
        if (length := int(widths.sum())) <= self.model_max_length:
            return sample
        if not self._truncation_reported:
            self._truncation_reported = True
            logger.warning(
                "%s has %d tokens and is cut to --model_max_length %d; further cuts are not reported by this process",
                self.records.named(index), length, self.model_max_length,
            )  # fmt: skip
        starts_inside = widths.cumsum(0) - widths < self.model_max_length
        return TokenizedSample(sample.input_ids[starts_inside], sample.labels[starts_inside])

    def _opened(self, read: Callable[[ImagePlace], Image.Image], place: ImagePlace, index: int) -> Image.Image:
        try:
            return read(place)
        except ImageError as error:
            kind = FileNotFoundError if error.problem.kind == "image_missing" else ValueError
            raise kind(f"{self.records.named(index)}: {error}") from error

    def token_counts(self) -> np.ndarray:
        """Text tokens, images, and text tokens before the first image of every sample, int32 [N, 3].

        They are measured once, and then mapped from the cache. They give the length for any number of visual tokens and
        any maximum.
        """

        def write(target: Path) -> None:
            with target.open("wb") as file:
                np.save(file, self._measured_counts())

        name = f"{self.records.key[:16]}.{self._tokenization()[:16]}.counts.npy"
        return np.load(made_once(name, self.records.folders, write), mmap_mode="r")

    def _tokenization(self) -> str:
        """SHA-256 of what decides a record's token ids, besides the record: settings, and the code."""
        settings = [
            tokenizers.__version__,
            type(self.tokenizer).__name__,
            repr((self.tokenizer.bos_token, self.tokenizer.split_special_tokens)),
            self.tokenizer.backend_tokenizer.to_str(),
            repr(self.template),
            self.label_masking,
            *(Path(llava.__path__[0], f"{module}.py").read_text() for module in _CODE),
        ]
        return sha256("\0".join(settings).encode()).hexdigest()

    def _measured_counts(self) -> np.ndarray:
        pieces = [range(start, min(start + _PIECE, len(self))) for start in range(0, len(self), _PIECE)]
        parts = in_processes(_counts, self, pieces, worth=len(self) >= _WORTH_PROCESSES)
        shown = progress(parts, "measuring lengths", "pieces", total=len(pieces), hidden=not self.show_progress)
        return np.concatenate([np.zeros((0, 3), np.int32), *shown])

    def image_sizes(self) -> np.ndarray:
        """Width and height of every sample's only picture, int32 [N, 2], as the preflight found them; else zeros."""
        assert self.records.sizes is not None  # `usable_records` sets it
        with np.load(self.records.sizes) as manifest:
            return manifest["sizes"][self.records.used]

    def visual_tokens(self) -> int | np.ndarray:
        """Visual tokens of each image of a sample: one number for all samples, or one for every sample [N]."""
        return self._of_each_picture(self.num_visual_tokens, lambda rules, picture: rules.visual_tokens(picture))

    def crops_per_image(self) -> int | np.ndarray:
        """Squares that the tower sees of each image of a sample: one number for all, or one for every sample [N]."""
        return self._of_each_picture(1, lambda rules, picture: picture.crops)

    def _of_each_picture(self, usual: int, value: Callable[[CropRules, Picture], int]) -> int | np.ndarray:
        if self.crop_rules is None:
            return usual
        sizes, which = np.unique(self.image_sizes(), axis=0, return_inverse=True)
        rules = self.crop_rules
        values = [value(rules, rules.picture((w, h))) if w else usual for w, h in sizes.tolist()]
        return np.array(values, np.int64)[which.reshape(-1)]

    def whole_lengths(self) -> np.ndarray:
        """Length [N] of every sample after expansion, not cut."""
        text, images = self.token_counts()[:, :2].astype(np.int64).T
        return text + images * self.visual_tokens()

    def modality_lengths(self) -> np.ndarray:
        """Length [N] of every sample after expansion and cut; negative where no image is left (LLaVA's convention)."""
        if self._lengths is None:
            counts, whole, longest = self.token_counts(), self.whole_lengths(), self.model_max_length
            lengths = np.minimum(whole, longest)
            self._lengths = np.where((counts[:, 1] > 0) & (counts[:, 2] < longest), lengths, -lengths)
            if too_long := int((whole > longest).sum()):
                logger.info(
                    "%d of %d samples are cut to --model_max_length %d; the longest has %d tokens",
                    too_long, len(whole), longest, whole.max(),
                )  # fmt: skip
        return self._lengths


def _counts(dataset: LazySupervisedDataset, indices: range) -> np.ndarray:
    counts = []
    for index in indices:
        is_image = dataset.tokenized(index)[0].input_ids.numpy() == IMAGE_TOKEN_INDEX
        images = int(is_image.sum())
        counts.append((len(is_image) - images, images, int(is_image.argmax())))  # argmax is 0 without images
    return np.array(counts, np.int32)


class Batch(TypedDict, total=False):
    """What a model receives; `layout` if the collator makes it, `images` and `indices` if the samples have them."""

    input_ids: torch.Tensor  # [B, S]
    labels: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor  # [B, S]
    images: torch.Tensor  # [N, 3, H, W], or the crops of all images
    layout: Layout
    indices: torch.Tensor  # [B]


class DataCollatorForSupervisedDataset:
    """Pads token ids and labels on the right, concatenates the images, and lays out the decoder's input.

    The mask comes from the lengths, never from comparing ids with the padding id, which may be a real token.

    Args:
        pad_token_id: fills `input_ids`; masked out everywhere.
        num_visual_tokens: V, the tokens that one placeholder expands to; None leaves the layout to the model.
        max_length: length at which samples are cut, counted after expansion.
        padding_free, crop_rules: the model's.
    """

    def __init__(
        self,
        pad_token_id: int,
        num_visual_tokens: int | None = None,
        max_length: int | None = None,
        padding_free: bool = True,
        crop_rules: CropRules | None = None,
    ):
        self.pad_token_id, self.num_visual_tokens, self.max_length = pad_token_id, num_visual_tokens, max_length
        self.padding_free, self.crop_rules = padding_free, crop_rules

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """The batch of `samples`."""
        ids, labels = [s["input_ids"] for s in samples], [s["labels"] for s in samples]
        lengths = torch.tensor([len(row) for row in ids])
        batch: Batch = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
            "attention_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        }
        if images := [sample["images"] for sample in samples if "images" in sample]:
            batch["images"] = torch.cat(images)
        if self.num_visual_tokens is not None:
            batch["layout"] = self._layout(samples, self.num_visual_tokens, batch)
        if "index" in samples[0]:
            batch["indices"] = torch.tensor([sample["index"] for sample in samples])
        return batch

    def _layout(self, samples: Sequence[Sample], num_visual_tokens: int, batch: Batch) -> Layout:
        pictures = [picture for sample in samples for picture in sample.get("pictures", ())]
        visual_tokens = [num_visual_tokens] * len(batch.get("images", ()))
        if pictures and self.crop_rules is not None:
            visual_tokens = [self.crop_rules.visual_tokens(picture) for picture in pictures]
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        layout = lay_out(ids, mask, labels, visual_tokens, self.max_length, pictures or None)
        return layout if self.padding_free else pad_layout(layout)
