"""Asks a checkpoint about pictures, for chat, web page, single questions, batch answers and scoring.

Shapes: B conversations, S longest prompt.
"""

import argparse
import http.client
import io
import logging
import math
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image, UnidentifiedImageError
from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase

from llava.anyres import Picture, Size
from llava.constants import DEFAULT_IMAGE_TOKEN, IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import Conversation, SeparatorStyle, answer_end, conv_templates, get_template
from llava.data.checks import ImagePlace
from llava.data.images import LARGEST_FILE, decoded, picture_header
from llava.data.preprocess import generation_ids, preprocess
from llava.data.turns import image_first, moves_pictures, parse_turns
from llava.mm_utils import KeywordsStoppingCriteria, process_prompt_images
from llava.model.builder import load_pretrained_model
from llava.model.context import context_length
from llava.model.llava_arch import LlavaMetaForCausalLM

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A question: turns as `Assistant.prompt_ids` takes them, and where the pictures of their placeholders are."""

    turns: list[dict[str, str]]
    pictures: Sequence[ImagePlace]


class Assistant(NamedTuple):
    """A loaded checkpoint with the template of its conversations."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    model: LlavaMetaForCausalLM
    image_processor: BaseImageProcessor | None
    template: Conversation

    @property
    def end(self) -> str:
        """The text that closes an answer."""
        return answer_end(self.template)

    def prompt_ids(self, turns: list[dict[str, str]], pictures: Sequence[Image.Image] = ()) -> torch.Tensor:
        """`input_ids` [S] that ask for the next answer.

        Args:
            turns: LLaVA's list of `{"from": "human" | "gpt", "value": str}`, a human turn last.
            pictures: the pictures of the turns; the length may depend on their sizes.

        Raises:
            ValueError: malformed turns, or more tokens than the model's context.
        """
        self.prompt_length(turns, [picture.size for picture in pictures])
        return self._ids(turns)

    def prompt_length(self, turns: list[dict[str, str]], sizes: Sequence[Size] = ()) -> int:
        """Length of the prompt of `prompt_ids`, with visual tokens of pictures of these sizes."""
        ids = self._ids(turns)
        num_images, visual_tokens = int((ids == IMAGE_TOKEN_INDEX).sum()), 1
        if self.model.get_vision_tower() is not None:
            rules, alone = self.model.crop_rules(), len(sizes) == num_images == 1
            # `anyres` cuts a picture only where it is the prompt's only one.
            visual_tokens = rules.visual_tokens(rules.picture(sizes[0]) if alone else Picture())
        length = len(ids) + num_images * (visual_tokens - 1)
        if length > (limit := context_length(self.model.config)):
            raise ValueError(
                f"the conversation has {length} tokens with its pictures, more than the {limit} of "
                f"{self.name}; start a new one"
            )
        return length

    def _ids(self, turns: list[dict[str, str]]) -> torch.Tensor:
        return generation_ids(self._placed(turns), self.tokenizer, self.template)

    def _placed(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        """The turns with their pictures where training put them."""
        if not moves_pictures(self.model.config):
            return turns
        return [{"from": speaker, "value": image_first(text)} for speaker, text in parse_turns(turns)]

    def prompt_text(self, turns: list[dict[str, str]]) -> str:
        """The prompt as text."""
        ids = self.prompt_ids(turns)
        chunks = ids.tensor_split((ids == IMAGE_TOKEN_INDEX).nonzero()[:, 0])
        texts = [str(self.tokenizer.decode(chunk[chunk != IMAGE_TOKEN_INDEX])) for chunk in chunks]
        return DEFAULT_IMAGE_TOKEN.join(texts)

    @torch.no_grad()  # not inference mode: a model in training needs what it keeps from here in its next step
    def answer(
        self,
        conversations: list[list[dict[str, str]]],
        pictures: Sequence[Image.Image],
        stopping_criteria: Sequence[Callable] = (),
        **options: Any,
    ) -> list[str]:
        """The next answer of each conversation.

        Args:
            conversations: see `prompt_ids`.
            pictures: those of all conversations, in reading order; one for every `<image>`.
            stopping_criteria: of `generate`, beside the text that closes an answer.
            options: other options of `generate`.

        Raises:
            ValueError: see `prompt_ids`; pictures for a text-only checkpoint; too few or too many pictures.
        """
        counts = [int((self._ids(turns) == IMAGE_TOKEN_INDEX).sum()) for turns in conversations]
        shown, images = self._pixels(pictures, counts)
        prompts = [self.prompt_ids(turns, own) for turns, own in zip(conversations, shown, strict=True)]
        rows = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        input_ids, mask = rows(prompts), rows([torch.ones_like(ids) for ids in prompts])
        input_ids = input_ids.to(self.model.device)
        pad = self.tokenizer.pad_token_id
        output = self.model.generate(
            input_ids,
            attention_mask=mask.to(self.model.device),
            images=images or None,
            image_sizes=[picture.size for picture in pictures] or None,
            pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
            stopping_criteria=[KeywordsStoppingCriteria([self.end], self.tokenizer, input_ids), *stopping_criteria],
            **options,
        )
        texts = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        return [text.split(self.end)[0].strip() for text in texts]

    @torch.no_grad()
    def log_probabilities(
        self, conversations: list[list[dict[str, str]]], pictures: Sequence[Image.Image]
    ) -> list[float]:
        """The log-probability, in nats, of each conversation's last turn, an answer, with the marker that closes it.

        It is minus the model's own loss, summed over the answer's tokens.

        Args:
            conversations: as `prompt_ids` takes them, followed by the answer as a `gpt` turn; no other answers.
            pictures: see `answer`.

        Raises:
            ValueError: see `answer`; more or fewer answers than one.
        """
        samples, device = [], self.model.device
        for turns in conversations:
            if [turn["from"] for turn in turns].count("gpt") != 1 or turns[-1]["from"] != "gpt":
                raise ValueError(f"{self.name}: expected one answer, at the end, found {turns}")
            shows = any(DEFAULT_IMAGE_TOKEN in turn["value"] for turn in turns)
            samples.append(preprocess(self._placed(turns), self.tokenizer, self.template, has_image=shows))
        counts = [int((sample.input_ids == IMAGE_TOKEN_INDEX).sum()) for sample in samples]
        _, images = self._pixels(pictures, counts)
        sides = [[getattr(sample, name) for sample in samples] for name in ("input_ids", "labels")]
        ids, labels = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=IGNORE_INDEX) for x in sides)
        sizes = [picture.size for picture in pictures]
        mask = ids != IGNORE_INDEX
        layout, crops = self.model.lay_out(ids.to(device), mask, labels, images or None, sizes or None, "right")
        hidden_states = self.model.get_model()(
            inputs_embeds=self.model.splice(layout, crops),
            attention_mask=layout.attention_mask,
            position_ids=layout.position_ids,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)  # [B * S', D]
        logits = self.model.lm_head(hidden_states[layout.predicting]).float()  # [R, C]
        each = logits.log_softmax(-1).gather(1, layout.targets[:, None])[:, 0]
        values = [float(own.sum()) for own in each.split((labels[:, 1:] != IGNORE_INDEX).sum(1).tolist())]
        if not all(map(math.isfinite, values)):
            raise ValueError(f"{self.name}: an answer's loss is not finite; the checkpoint is damaged")
        return values

    def _pixels(
        self, pictures: Sequence[Image.Image], counts: list[int]
    ) -> tuple[list[list[Image.Image]], list[torch.Tensor]]:
        """The pictures of each conversation (by `counts`), and the pixels of all."""
        if pictures and self.image_processor is None:
            raise ValueError(f"{self.name} has no vision tower: it is a language model and cannot see pictures")
        shown, images = pictures_of_each(pictures, counts), []
        if self.image_processor is not None:
            for own in filter(None, shown):
                images += process_prompt_images(own, self.image_processor, self.model.config)
        return shown, images


def batch_answers(
    assistant: Assistant,
    questions: Sequence[Asked],
    open_picture: Callable[[ImagePlace], Image.Image],
    batch_size: int,
    **options: Any,
) -> Iterator[dict[int, str]]:
    """Yields the answers of one batch after another, keyed by the index of their question; see `Assistant.answer`.

    Questions of similar length share a batch, so that it has little padding. The longest come first, so that a batch
    that does not fit into memory fails at once.
    """
    lengths = [assistant.prompt_length(question.turns) for question in questions]
    order = sorted(range(len(questions)), key=lambda i: -lengths[i])
    for start in range(0, len(order), batch_size):
        batch = [questions[i] for i in order[start : start + batch_size]]
        pictures = [open_picture(place) for question in batch for place in question.pictures]
        answers = assistant.answer([question.turns for question in batch], pictures, **options)
        yield dict(zip(order[start : start + batch_size], answers, strict=True))


def pictures_of_each(pictures: Sequence[Image.Image], counts: list[int]) -> list[list[Image.Image]]:
    """The pictures of each conversation; the last conversation also gets the rest."""
    ends = [*accumulate(counts[:-1]), len(pictures)]
    return [list(pictures[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def load_assistant(
    model_path: str, model_base: str | None = None, conv_mode: str | None = None, **options: Any
) -> Assistant:
    """A checkpoint with its template; ValueError where there is none, or its config names no template."""
    if not sys.stderr.isatty():  # a bar that redraws itself makes a log unreadable
        transformers.utils.logging.disable_progress_bar()
    tokenizer, model, image_processor, _ = load_pretrained_model(model_path, model_base, "", **options)
    template = choose_template(model.config, model_path, conv_mode)
    return Assistant(model_path, tokenizer, model, image_processor, template)


def chosen_assistant(args: argparse.Namespace) -> Assistant:
    """The checkpoint that `add_model_arguments` and `add_loading_arguments` choose; ValueError as `load_assistant`."""
    assistant = load_assistant(
        args.model_path,
        args.model_base,
        args.conv_mode,
        device=args.device,
        torch_dtype=args.dtype,
        load_8bit=args.load_8bit,
        load_4bit=args.load_4bit,
    )
    if args.image_aspect_ratio and assistant.image_processor is not None:
        assistant.model.config.image_aspect_ratio = args.image_aspect_ratio
        assistant.model.crop_rules()
    return assistant


def choose_template(config: PretrainedConfig, model_path: str, conv_mode: str | None = None) -> Conversation:
    """The template called `conv_mode`, or else the one that training wrote into the checkpoint's config.

    LLaVA's checkpoints do not name theirs, and a wrong guess would go unnoticed: ValueError without either.
    """
    trained = getattr(config, "mm_conv_version", None)
    name = conv_mode or trained
    if trained not in (None, name):
        logger.warning("%s: asked in the template %s, but it was trained in %s", model_path, name, trained)
    if name is None:
        raise ValueError(
            f"{model_path}: config.json has no mm_conv_version, so the template it was trained with is unknown; "
            f"name it by --conv-mode or --conv-template (LLaVA-1.5: v1). Templates: {', '.join(conv_templates)}"
        )
    return get_template(name)


def is_captioner(template: Conversation) -> bool:
    """Whether the template has no questions (`plain`, stage 1): the model writes a caption whatever the question."""
    return template.sep_style is SeparatorStyle.PLAIN


def load_picture(source: str, called: str = "--image-file") -> Image.Image:
    """The picture at a path or http(s) address, which messages call `called`; ValueError where it cannot be read."""
    called = f"{called} {source}"
    if not source.startswith(("http://", "https://")):
        return read_picture(source, called)
    # Some servers refuse the library's own name.
    request = urllib.request.Request(source, headers={"User-Agent": "Mozilla/5.0 (llava)"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            content = io.BytesIO(response.read(LARGEST_FILE))  # a longer one is a picture that is cut off
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{called}: cannot be downloaded ({error})") from error
    return read_picture(content, called)


def read_picture(file: str | Path | io.BytesIO, called: str) -> Image.Image:
    """The picture in a file or its bytes, checked as in training; ValueError where it is missing or no picture."""
    try:
        with picture_header(file) as image:
            return decoded(image)
    except FileNotFoundError:
        raise ValueError(f"{called}: no such file") from None
    except UnidentifiedImageError:
        raise ValueError(f"{called}: not a picture in a format that Pillow reads") from None
    except Exception as error:  # Pillow's decoders raise whatever damaged bytes lead them to
        raise ValueError(f"{called}: cannot be read ({str(error) or type(error).__name__:.300})") from error
