# SPDX-License-Identifier: Apache-2.0
"""LLaVA-NeXT whose projector may end in a norm, with every way in which training cuts pictures and orders their crops.

What differs from `LlavaNormForConditionalGeneration`: a picture is several crops [n, 3, H, W], as transformers' image
processor of LLaVA-NeXT cuts them, and its visual tokens are counted and ordered by the training tree's own `CropRules`
and `line_up`. Pictures that are not cut may be followed by `image_newline`. Everything else is that class's.
"""

from typing import Any

import torch
from torch import nn
from transformers import BatchFeature, GenerationMixin, LlavaNextProcessor
from transformers import initialization as init
from transformers.utils.generic import can_return_tuple

from llava.anyres import CropRules, Picture
from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration, LlavaNormModel
from llava.model.crops import line_up


class LlavaNextNormConfig(LlavaNormConfig):
    """`LlavaNormConfig` and how pictures are cut.

    Attributes:
        crop_rules: the fields of `CropRules`; `grids` are widths and heights.
    """

    model_type = "llava_next_norm"

    crop_rules: dict | None = None


def rules_of(fields: dict[str, Any]) -> CropRules:
    """The rules of these fields, which JSON holds with lists for tuples."""
    return CropRules(**fields | {"grids": tuple(map(tuple, fields["grids"]))})


class LlavaNextNormModel(LlavaNormModel):
    """`LlavaNormModel` for pictures in crops."""

    config: LlavaNextNormConfig
    config_class = LlavaNextNormConfig

    def __init__(self, config: LlavaNextNormConfig):
        super().__init__(config)
        self.rules = rules_of(config.crop_rules)
        width = config.text_config.hidden_size
        newline = nn.Parameter(torch.randn(width) / width**0.5) if self.rules.has_newline else None
        self.register_parameter("image_newline", newline)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        newline = getattr(module, "image_newline", None)
        if newline is not None:
            init.normal_(newline, std=len(newline) ** -0.5)

    @can_return_tuple
    def get_image_features(self, pixel_values: torch.Tensor, *args, image_sizes: torch.Tensor | None = None, **kwargs):
        """As the library's; each picture's visual tokens [V, D] in their order.

        Args:
            pixel_values: [N, K, 3, H, W], where zeros follow the crops of a picture that has fewer than K; of a model
                that does not cut pictures [N, 3, H, W].
            image_sizes: height and width of every picture before it was cut [N, 2].

        Raises:
            ValueError: pictures are cut and `image_sizes` is missing.
        """
        if not self.rules.is_anyres:
            pictures = [Picture()] * len(pixel_values)
        elif image_sizes is None:
            raise ValueError("image_sizes is missing: pass what the processor gives with pixel_values")
        else:
            sizes = torch.as_tensor(image_sizes).tolist()
            pictures = [self.rules.picture((width, height)) for height, width in sizes]
            own = zip(pixel_values, pictures, strict=True)
            pixel_values = torch.cat([crops[: picture.crops] for crops, picture in own])
        outputs = super().get_image_features(pixel_values, *args, return_dict=True, **kwargs)
        tokens = line_up(torch.stack(list(outputs.pooler_output)), pictures, self.rules, self.image_newline)
        outputs.pooler_output = tokens.split([self.rules.visual_tokens(picture) for picture in pictures])
        return outputs


class LlavaNextNormForConditionalGeneration(LlavaNormForConditionalGeneration, GenerationMixin):
    """`LlavaNormForConditionalGeneration` on `LlavaNextNormModel`."""

    config: LlavaNextNormConfig
    config_class = LlavaNextNormConfig
    model_class = LlavaNextNormModel


class LlavaNextNormProcessor(LlavaNextProcessor):
    """`LlavaNextProcessor` that counts a picture's visual tokens by `crop_rules`, as in the config.

    Raises:
        ValueError: a prompt has several pictures, which training does not cut.
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        crop_rules: dict[str, Any] | None = None,
        chat_template: str | None = None,
        image_token: str = "<image>",
        **kwargs,
    ):
        self.crop_rules = crop_rules
        super().__init__(image_processor, tokenizer, chat_template=chat_template, image_token=image_token)

    def __call__(self, images=None, text: str | list[str] | None = None, **kwargs) -> BatchFeature:
        for prompt in [text] if isinstance(text, str) else text or ():
            if (number := prompt.count(self.image_token)) > 1:
                raise ValueError(f"a prompt has {number} pictures; expected one, since training does not cut several")
        return super().__call__(images, text, **kwargs)

    def _get_number_of_features(self, orig_height: int, orig_width: int, height: int, width: int) -> int:
        rules = rules_of(self.crop_rules)
        return rules.visual_tokens(rules.picture((orig_width, orig_height)))
