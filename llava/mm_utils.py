"""Pictures to pixels and prompts to token ids, under the names that LLaVA's scripts and evaluation clients import.

Shapes: B batch, S sequence, N images, H and W the image processor's output size.
"""

import base64
import io
import json
import os
import shutil
import stat
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import (
    AutoTokenizer,
    BaseImageProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from llava.anyres import Pinpoints, best_grid, check_modes, fitted_size, is_anyres, parse_pinpoints
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.utils.pixels import to_rgb

# --- pictures ---------------------------------------------------------------------------------------------------------


def load_image_from_base64(image: str | bytes) -> Image.Image:
    """The picture whose file is written in base64, in its own mode."""
    return Image.open(io.BytesIO(base64.b64decode(image)))


def expand2square(pil_img: Image.Image, background_color: tuple[int, ...] | int) -> Image.Image:
    """The picture centred on a square of its longer side, filled with `background_color` (one value per band)."""
    width, height = pil_img.size
    if width == height:
        return pil_img
    side = max(width, height)
    square = Image.new(pil_img.mode, (side, side), background_color)
    if pil_img.mode == "P":
        square.putpalette(pil_img.getpalette() or [])
    square.paste(pil_img, ((side - width) // 2, (side - height) // 2))
    return square


def process_images(
    images: list[Image.Image], image_processor: BaseImageProcessor, model_cfg: object
) -> torch.Tensor | list[torch.Tensor]:
    """Pixels of `images`, pictures in any mode, in the processor's range.

    Args:
        model_cfg: any object, whose `image_aspect_ratio` is read: `pad` pads to a square with the processor's mean
            colour; None or `square` leaves the shape to the processor; `anyres` gives each picture several crops by
            `image_grid_pinpoints`, see `llava.anyres`.

    Returns:
        [N, 3, H, W], or a list of [3, H, W] if the processor gives different sizes; with `anyres` [N, n, 3, H, W] for n
        crops per picture, or a list of [n, 3, H, W] if their numbers differ.
    """
    mode = getattr(model_cfg, "image_aspect_ratio", None)
    check_modes(mode)
    if not images:
        raise ValueError("process_images: expected at least one picture, found none")
    if is_anyres(mode):
        grids = getattr(model_cfg, "image_grid_pinpoints", "")
        pixels = [process_anyres_image(image, image_processor, grids) for image in images]
    else:
        pixels = [_pixels(to_rgb(image), image_processor, pad=mode == "pad") for image in images]
    if len(pixels) == 1:
        return pixels[0][None]
    same_size = all(image.shape == pixels[0].shape for image in pixels)
    return torch.stack(pixels) if same_size else pixels


def process_prompt_images(
    images: list[Image.Image], image_processor: BaseImageProcessor, model_cfg: object, in_prompt: int = 1
) -> list[torch.Tensor]:
    """Pixels [n, 3, H, W] of each picture of one prompt; n is 1 without `anyres`.

    With `anyres` several pictures of one prompt are not cut but padded, one crop each, as LLaVA-NeXT trains them.

    Args:
        in_prompt: number of pictures in the whole prompt, if truncation has dropped some from `images`.
    """
    if max(len(images), in_prompt) > 1 and is_anyres(getattr(model_cfg, "image_aspect_ratio", None)):
        return [_pixels(to_rgb(image), image_processor, pad=True)[None] for image in images]
    pixels = process_images(images, image_processor, model_cfg)
    return [image if image.ndim == 4 else image[None] for image in pixels]


def _pixels(image: Image.Image, image_processor: Any, pad: bool) -> torch.Tensor:
    """The processor's values [3, H, W]."""
    if pad:
        image = expand2square(image, tuple(int(255 * mean) for mean in image_processor.image_mean))
    # The format is given, because the processor would take a picture of 1 or 3 rows for one with channels first.
    return image_processor.preprocess(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0]


def process_anyres_image(image: Image.Image, processor: Any, grid_pinpoints: Pinpoints) -> torch.Tensor:
    """Pixels of a picture's crops [n, 3, H, W]: the whole picture, squeezed, and the parts of its grid row by row."""
    # The side of the processor's crop where it crops, else what it resizes to.
    cropped = processor.crop_size if getattr(processor, "do_center_crop", False) else None
    image, side = to_rgb(image), (cropped or processor.size)["height"]
    grid = best_grid(image.size, parse_pinpoints(grid_pinpoints, side))
    fitted = image.resize(fitted_size(image.size, grid))
    black = Image.new("RGB", grid)
    black.paste(fitted, ((grid[0] - fitted.width) // 2, (grid[1] - fitted.height) // 2))
    corners = [(left, top) for top in range(0, grid[1], side) for left in range(0, grid[0], side)]
    crops = [image.resize((side, side)), *(black.crop((x, y, x + side, y + side)) for x, y in corners)]
    return torch.stack([_pixels(crop, processor, pad=False) for crop in crops])


# --- prompts ----------------------------------------------------------------------------------------------------------


def tokenizer_image_token(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    image_token_index: int = IMAGE_TOKEN_INDEX,
    return_tensors: str | None = None,
) -> list[int] | torch.Tensor:
    """Token ids of `prompt`, with `image_token_index` for every `<image>`: a list, or with "pt" a LongTensor [S]."""
    if return_tensors not in (None, "pt"):
        raise ValueError(f"return_tensors {return_tensors!r}: expected None or 'pt'")
    ids = leading_ids(prompt, tokenizer)
    for index, chunk in enumerate(prompt.split(DEFAULT_IMAGE_TOKEN)):
        ids += ([image_token_index] if index else []) + encode_chunk(chunk, tokenizer)[0]
    return torch.tensor(ids, dtype=torch.long) if return_tensors == "pt" else ids


def leading_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS id if the tokenizer puts one before texts; none if `text` writes its own, as Llama-3 prompts do."""
    bos = tokenizer.bos_token
    if bos is None or text.startswith(bos):
        return []
    backend = _backend(tokenizer)
    ids = tokenizer("")["input_ids"] if backend is None else backend.encode("").ids
    return [tokenizer.bos_token_id] if ids[:1] == [tokenizer.bos_token_id] else []


def encode_chunk(chunk: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], np.ndarray | None]:
    """Ids of text between images, without BOS, and the characters [S, 2] of `chunk` at which they start and end.

    SentencePiece puts a space before every text. Fast tokenizers leave it out where the text begins with one, which
    gives other ids than those LLaVA's checkpoints were trained on; here it is always there. The characters are None for
    slow tokenizers, which do not know them.
    """
    shift = 1 if chunk.startswith(" ") and adds_space(tokenizer) else 0
    backend = _backend(tokenizer)
    if backend is None:
        return list(tokenizer(" " * shift + chunk, add_special_tokens=False)["input_ids"]), None
    encoding = backend.encode(" " * shift + chunk, add_special_tokens=False)
    ids = encoding.ids
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids)).reshape(-1, 2)
    return ids, np.maximum(offsets - shift, 0) if shift else offsets


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer, set up as a plain call of `tokenizer` sets it up; None for slow tokenizers.

    It is used directly, because the other work of such a call takes longer than encoding a short text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before every text, as SentencePiece does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pre_tokenizer = getattr(backend, "pre_tokenizer", None)
    return isinstance(pre_tokenizer, Metaspace) and pre_tokenizer.prepend_scheme != "never"


ADDED_BY_EXPORT = "added_by_export"
"""Setting of a tokenizer: tokens that `python -m llava.export hf` has added, which this tree does not use."""


def load_tokenizer(path: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained`, with SentencePiece's order of merges where it was lost.

    Tokens that an export has added are removed: `<image>` is not a token here.
    """
    try:
        code = PretrainedConfig.get_config_dict(path, cache_dir=kwargs.get("cache_dir"))[0].get("auto_map") or {}
    except (OSError, ValueError):
        code = {}
    if "AutoConfig" in code and "AutoTokenizer" not in code:
        kwargs.setdefault("config", PretrainedConfig())  # else transformers wants trust_remote_code, needlessly
    loaded = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path, **kwargs))
    tokenizer = _without_added(restore_merge_order(loaded))
    if _sentencepiece_file(tokenizer):
        tokenizer.init_kwargs["legacy"] = False  # is saved; without it transformers 4 falls back to its old behaviour
    # Transformers 4's name, by which LLaVA-NeXT's programs find a Qwen tokenizer's markers.
    tokenizer.__dict__["additional_special_tokens_ids"] = tokenizer.extra_special_tokens_ids
    return tokenizer


def _without_added(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    added = tokenizer.init_kwargs.pop(ADDED_BY_EXPORT, None)
    if added:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in added]
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """`tokenizer.save_pretrained`, and beside it the files that the slow tokenizers of transformers 4 read.

    LLaVA and LLaVA-NeXT load checkpoints with those tokenizers, and save the same files themselves.
    """
    folder = Path(folder)
    tokenizer.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps(tokenizer.special_tokens_map, indent=2) + "\n")
    source = _sentencepiece_file(tokenizer)
    if source is not None:
        if source.parent.resolve() != folder.resolve():
            shutil.copyfile(source, folder / source.name)
    elif "merges_file" in tokenizer.vocab_files_names:
        tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json and merges.txt
        (folder / "added_tokens.json").write_text(json.dumps(tokenizer.get_added_vocab(), indent=2) + "\n")


def restore_merge_order(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Gives a tokenizer converted from a SentencePiece `tokenizer.model` the merge order of that file's scores.

    transformers 5 orders the merges by token id. In the Llama-2 and Vicuna vocabulary runs of spaces have low ids but
    the worst scores, so that without this every double space gives other ids than LLaVA's training had. Changes and
    returns `tokenizer`; others stay as they are.
    """
    source = _sentencepiece_file(tokenizer)
    if source is None or source.with_name("tokenizer.json").exists():
        return tokenizer
    from sentencepiece import SentencePieceProcessor
    from tokenizers.models import BPE

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        return tokenizer
    pieces = SentencePieceProcessor(str(source))
    scores = {pieces.id_to_piece(index): pieces.get_score(index) for index in range(pieces.get_piece_size())}
    merges = sorted((tuple(pair) for pair in model["merges"]), key=lambda pair: -scores["".join(pair)])
    tokenizer.backend_tokenizer.model = BPE(
        vocab=model["vocab"],
        merges=merges,
        unk_token=model["unk_token"],
        fuse_unk=model["fuse_unk"],
        byte_fallback=model["byte_fallback"],
    )
    return tokenizer


def _sentencepiece_file(tokenizer: PreTrainedTokenizerBase) -> Path | None:
    source = Path(str(getattr(tokenizer, "init_kwargs", {}).get("vocab_file") or ""))
    return source if source.suffix == ".model" and source.is_file() else None


# --- files ------------------------------------------------------------------------------------------------------------


def from_anywhere(path_or_id: str) -> str:
    """A folder's absolute path, which other working directories can use; a hub id as it is."""
    return os.path.abspath(path_or_id) if os.path.exists(path_or_id) else path_or_id


def follow_umask(folder: str | Path) -> None:
    """Gives the weight files in `folder` the mode of any new file; safetensors lets only their owner read them."""
    probe = Path(folder, f".mode-{os.getpid()}")  # the mask itself cannot be read without changing it
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in Path(folder).glob("*.safetensors"):
        if file.stat().st_mode != mode:
            file.chmod(stat.S_IMODE(mode))


# --- generation -------------------------------------------------------------------------------------------------------


def get_model_name_from_path(model_path: str) -> str:
    """The name of a checkpoint folder; of `run/checkpoint-100` it is `run_checkpoint-100`."""
    parents, _, name = model_path.strip("/").rpartition("/")
    return f"{parents.rpartition('/')[2]}_{name}" if name.startswith("checkpoint-") and parents else name


class KeywordsStoppingCriteria(StoppingCriteria):
    """Stops a sequence as soon as its generated text contains one of `keywords`.

    Args:
        keywords: the texts to stop at.
        tokenizer: decodes what was generated.
        input_ids: prompt [B, S]; not searched where the generated ids repeat it.
    """

    def __init__(self, keywords: list[str], tokenizer: PreTrainedTokenizerBase, input_ids: torch.Tensor):
        self.keywords = keywords
        self.tokenizer = tokenizer
        self.prompt = input_ids
        # A token holds at least one byte, so no keyword spreads over more tokens than it has bytes.
        self.window = max((len(keyword.encode()) for keyword in keywords), default=0) + 1

    def __call__(
        self, output_ids: torch.LongTensor, scores: torch.FloatTensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Whether each sequence is finished, bool [B]; `output_ids` [B, S] with or without the prompt."""
        generated = output_ids[:, self._prompt_length(output_ids) :][:, -self.window :]
        texts = self.tokenizer.batch_decode(generated, skip_special_tokens=False)
        done = [any(keyword in text for keyword in self.keywords) for text in texts]
        return torch.tensor(done, dtype=torch.bool, device=output_ids.device)

    def _prompt_length(self, output_ids: torch.Tensor) -> int:
        length = self.prompt.shape[1]
        head = output_ids[:, :length]
        beams = max(1, len(head) // len(self.prompt))  # rows of each prompt
        prompt = self.prompt.to(head.device).repeat_interleave(beams, 0)
        return length if head.shape == prompt.shape and bool((head == prompt).all()) else 0
