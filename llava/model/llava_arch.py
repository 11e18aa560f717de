"""What turns a Hugging Face causal LM into a LLaVA: vision tower, projector with norm, and multimodal forward.

Shapes: B batch, S sequence, N images, V visual tokens per image, E vision hidden size, D LLM hidden size.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from llava.anyres import CropRules, Picture, has_newline
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.layout import Layout, lay_out, pad_layout, predicting_rows
from llava.mm_utils import follow_umask, from_anywhere
from llava.model.attention import packed_attention_arguments
from llava.model.context import check_fits
from llava.model.decoding import HUB_OPTIONS, other_settings, read_generation_config, token_ids_alone
from llava.model.loss import LMHead, supervised_loss
from llava.model.multimodal_encoder.builder import build_vision_tower, read_vision_config
from llava.model.multimodal_encoder.towers import VisionTower
from llava.model.multimodal_projector.adapter import check_finite, load_adapter
from llava.model.multimodal_projector.builder import build_vision_projector, token_grid
from llava.model.multimodal_projector.norm import ProjectorNorm, norm_differences, projector_norm, record_norm
from llava.model.pictures import Images, Sizes, line_up, match_crops, match_images, refuse_video
from llava.model.rotary import KeepsRotary
from llava.model.zero3 import gathered

logger = logging.getLogger(__name__)

# Flags that become config fields of the same name, besides the norm's.
PROJECTOR_FIELDS = ("mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature")

# The classes that the mixins are mixed into; at run time the mixins must not inherit from them.
if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel
    from transformers import PretrainedConfig as ConfigBase

    class ModelBase(PreTrainedModel, GenerationMixin):
        pass

else:
    ConfigBase = ModelBase = object


class LlavaMetaConfig(ConfigBase):
    """Mixin for the config: transformers 4, which LLaVA's own trees need, can also read what it writes."""

    def to_diff_dict(self) -> dict[str, Any]:
        fields = super().to_diff_dict()
        fields["torch_dtype"] = fields.get("dtype")
        rope = dict(self.rope_parameters)
        if "rope_theta" not in rope:  # one theta per kind of layer (Gemma 3); LLaVA's own trees have no such decoder
            return fields
        # transformers 4 would silently take its default theta if it did not find theta under its own name.
        fields["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            fields["rope_scaling"] = rope | {"type": rope["rope_type"]}
        return fields


class LlavaMetaModel(KeepsRotary, ModelBase):
    """Mixin for the decoder: holds `vision_tower`, `mm_projector`, `image_newline` where the config has them."""

    vision_tower: VisionTower
    mm_projector: nn.Module
    image_newline: nn.Parameter | None
    embed_tokens: nn.Embedding
    layers: nn.ModuleList

    def __init__(self, config):
        super().__init__(config)
        self.register_parameter("image_newline", None)
        if getattr(config, "mm_vision_tower", None) or getattr(config, "mm_vision_config", None):
            self.build_vision_modules()

    def build_vision_modules(self, tower: VisionTower | None = None) -> None:
        """Builds tower, projector and newline, untrained, from the config, which is completed to rebuild them alone."""
        self.vision_tower = tower or build_vision_tower(self.config)
        self.config.mm_hidden_size = self.vision_tower.hidden_size
        self.mm_projector = build_vision_projector(self.config)
        self.add_newline()

    def add_newline(self) -> None:
        """Gives the model an untrained `image_newline` if its `mm_patch_merge_type` needs one and it has none yet."""
        if self.image_newline is None and has_newline(getattr(self.config, "mm_patch_merge_type", None)):
            width = self.config.hidden_size
            self.image_newline = nn.Parameter(torch.randn(width) / width**0.5)

    def initialize_vision_modules(self, model_args: Any, dtype: torch.dtype | None = None) -> None:
        """Gives a plain language model its tower and projector, or checks that a LLaVA checkpoint's fit the flags.

        Args:
            model_args: the flags `vision_tower`, `pretrain_mm_mlp_adapter`, `mm_patch_merge_type`, those
                of `PROJECTOR_FIELDS` and of `ProjectorNormArguments`.
            dtype: type of the tower's weights.
        """
        if self.get_vision_tower() is None:
            self._add_vision_modules(model_args, dtype)
        else:
            check_flags_against_config(model_args, self.config)
            norm = projector_norm(self.mm_projector)
            if norm is not None:  # stages may differ in whether it is trained
                norm.learnable = self.config.mm_projector_norm_learnable = model_args.mm_projector_norm_learnable
        self.config.mm_patch_merge_type = model_args.mm_patch_merge_type
        self.add_newline()
        if model_args.pretrain_mm_mlp_adapter:
            load_adapter(self.mm_projector, model_args.pretrain_mm_mlp_adapter, self.config, self.image_newline)
            logger.info("projector loaded from %s", model_args.pretrain_mm_mlp_adapter)

    def _add_vision_modules(self, model_args: Any, dtype: torch.dtype | None) -> None:
        config = self.config
        assert model_args.vision_tower is not None  # training refuses to start without one
        config.mm_vision_tower = from_anywhere(model_args.vision_tower)
        config.mm_vision_config = read_vision_config(config.mm_vision_tower)
        config.use_mm_proj = True
        for field in PROJECTOR_FIELDS:
            setattr(config, field, getattr(model_args, field))
        record_norm(config, model_args, self.embed_tokens)
        with torch.device("meta"):
            tower = build_vision_tower(config)
        token_grid(config, tower)  # refuses a projector that does not fit before weights are read
        tower.load_pretrained(model_args.vision_tower, dtype=dtype)
        self.build_vision_modules(tower)

    def get_vision_tower(self) -> VisionTower | None:
        return getattr(self, "vision_tower", None)


def check_flags_against_config(model_args: Any, config: ConfigBase) -> None:
    """Raises ValueError where the projector's flags contradict the checkpoint that already has a projector."""
    settings = [(field, getattr(config, field, None), getattr(model_args, field)) for field in PROJECTOR_FIELDS]
    settings = [row for row in settings if row[1] != row[2]] + norm_differences(config, model_args)
    merge = getattr(config, "mm_patch_merge_type", None)
    if has_newline(merge) and not has_newline(model_args.mm_patch_merge_type):  # it would lose image_newline
        settings.append(("mm_patch_merge_type", merge, model_args.mm_patch_merge_type))
    differences = [f"{field}: checkpoint {theirs!r}, flags {ours!r}" for field, theirs, ours in settings]
    if differences:
        raise ValueError(
            "the checkpoint in --model_name_or_path already has a projector that the flags contradict:\n  "
            + "\n  ".join(differences)
            + "\nPass the checkpoint's values."
        )


def check_same_projector(folder: str, config: ConfigBase, base: ConfigBase) -> None:
    """Raises ValueError where a stage-1 or LoRA folder was trained with another projector or norm than its base has."""
    fields = [(field, getattr(config, field, None), getattr(base, field, None)) for field in PROJECTOR_FIELDS]
    rows = [row for row in fields if None not in row and row[1] != row[2]] + norm_differences(config, base)
    if differences := [f"{field}: {theirs!r}, its base {ours!r}" for field, theirs, ours in rows]:
        raise ValueError(f"{folder} was trained on another base:\n  " + "\n  ".join(differences))


class LlavaMetaForCausalLM(KeepsRotary, ModelBase):
    """Mixin for the causal LM: encodes images, splices them into the text, and computes the loss."""

    config_class: type[ConfigBase]
    model: LlavaMetaModel
    lm_head: LMHead
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    padding_free = False  # True runs training batches as one row without padding, by a backend of llava.model.attention
    file_decoding: Mapping[str, Any] = MappingProxyType({})  # the checkpoint's `other_settings`

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Takes the weight of a head of another size, as `resize_token_embeddings` makes one, into this `LMHead`."""
        self.lm_head.weight, self.lm_head.out_features = new_embeddings.weight, new_embeddings.out_features

    def get_adapter_state_dict(self, adapter_name: str | None = None, state_dict: dict | None = None) -> dict:
        # To decide about the embedding PEFT would read the base's config as ours; no recipe adapts or resizes it.
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self, state_dict, adapter_name or "default", save_embedding_layers=False)

    @classmethod
    # pyrefly: ignore[bad-override]  # the library's other arguments pass through
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs) -> Any:
        """Loads a LLaVA checkpoint, or a plain language model of the same family.

        A checkpoint without tower weights (upstream's full fine-tunes of LLaVA-1.5) takes them from
        `config.mm_vision_tower`. Of generation_config.json the model keeps the token ids; `file_decoding` has the rest.

        Raises:
            ValueError: the weights lack what the config announces, or have more of a projector, or one with NaN.
        """
        hub_options = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        fields = read_generation_config(pretrained_model_name_or_path, **hub_options)
        requested = kwargs.pop("generation_config", None)
        kwargs["generation_config"] = GenerationConfig()  # the library would read the file, and refuse some
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        model.generation_config = requested or token_ids_alone(fields, model.config)
        model.file_decoding = other_settings(fields)
        # Keys are LLaVA's already. When it saves under ZeRO-3, the library would undo renamings that never took place,
        # and double the encoder's prefix.
        model._weight_conversions = []
        if extra := sorted(k for k in info["unexpected_keys"] if "_projector." in k or k.endswith("image_newline")):
            raise ValueError(
                f"{pretrained_model_name_or_path}: config.json does not announce {', '.join(extra)}, which the weights "
                f"have; its mm_projector_norm is {getattr(model.config, 'mm_projector_norm', None)!r}: restore the "
                "config that was saved with them"
            )
        missing = set(info["missing_keys"])
        tower, of_tower = model.get_vision_tower(), {k for k in missing if ".vision_tower." in k}
        without_tower = bool(of_tower) and len(of_tower) == len(tower.state_dict())
        if lost := sorted(missing - of_tower if without_tower else missing):
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            raise ValueError(
                f"{pretrained_model_name_or_path}: the weights lack {', '.join(lost[:5])}{more}, which config.json "
                "announces; for a stage-1 folder pass the language model as the base and the folder as the adapter"
            )
        if without_tower:
            tower.load_pretrained(model.config.mm_vision_tower)
        projector = {k: p for k, p in model.named_parameters() if ".mm_projector." in k or k.endswith("image_newline")}
        with gathered(list(projector.values())):
            check_finite(projector, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Writes the model, or its adapters, as the library does; the files' permissions follow the umask."""
        super().save_pretrained(save_directory, *args, **kwargs)
        follow_umask(save_directory)

    def get_model(self) -> LlavaMetaModel:
        return self.model

    def get_vision_tower(self) -> VisionTower | None:
        return self.get_model().get_vision_tower()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ProjectorNorm):
            module.reset_parameters()  # the library would set every gain to 1
        else:
            super()._init_weights(module)

    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        """Visual tokens [N, V, D] of `images` [N, 3, H, W]; the tower records no graph while it is frozen."""
        tower, projector = self.get_model().vision_tower, self.get_model().mm_projector
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters())):
            features = tower(images)  # [N, patches, E]
        weight = next(projector.parameters(), None)
        return projector(features if weight is None else features.to(weight.dtype))  # [N, V, D]

    def prepare_inputs_labels_for_multimodal(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        labels: torch.Tensor | None,
        images: Images = None,
        modalities: Sequence[str] | None = None,
        image_sizes: Sizes = None,
        padding_side: str | None = None,
    ) -> tuple:
        """Replaces image placeholders by visual tokens; signature and result order are LLaVA's.

        Args:
            input_ids: [B, S] with IMAGE_TOKEN_INDEX placeholders.
            images: a tensor [N, 3, H, W], a list of [3, H, W] or [1, 3, H, W] per image, or a list of [n, 3, H, W] (or
                of lists) per sample; text-only samples may carry one unused image. With anyres see `match_crops`.
            image_sizes: width and height of each image; needed if an image has several crops.
            modalities: has no effect, except that a video is refused.
            padding_side: `left` or `right`; None takes `config.tokenizer_padding_side`.

        Returns:
            (None, position_ids, attention_mask, past_key_values, inputs_embeds [B, S', D], labels [B, S']), None where
            the caller passed None; unchanged inputs without a vision tower or when decoding further tokens.

        Raises:
            ValueError: images and placeholders do not match, or a prompt is longer than the context.
            NotImplementedError: `modalities` names a video.
        """
        refuse_video(modalities)
        tower = self.get_vision_tower()
        if tower is None or (past_key_values is not None and input_ids.shape[1] == 1):
            if tower is None and (images is not None or bool((input_ids == IMAGE_TOKEN_INDEX).any())):
                raise ValueError("images were given to a model without a vision tower (no config.mm_vision_tower)")
            answering = past_key_values is not None and past_key_values.get_seq_length() > 0
            if tower is None and not answering and (labels is None or not self.training):
                check_fits(text_lengths(input_ids, attention_mask), self.config)
            return input_ids, position_ids, attention_mask, past_key_values, None, labels

        side = padding_side or getattr(self.config, "tokenizer_padding_side", None) or "right"
        layout, pixels = self.lay_out(input_ids, attention_mask, labels, images, image_sizes, side)
        mask = layout.attention_mask
        return (
            None,
            None if position_ids is None else layout.position_ids,
            None if attention_mask is None or mask is None else mask.to(attention_mask.dtype),
            past_key_values,
            self.splice(layout, pixels),
            None if labels is None else layout.labels,
        )

    def crop_rules(self) -> CropRules:
        """The rules that say how many crops and visual tokens a picture has."""
        tower = self.get_model().vision_tower
        return CropRules.of(self.config, *token_grid(self.config, tower), tower.image_size)

    def lay_out(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        images: Images = None,
        image_sizes: Sizes = None,
        padding_side: str | None = None,
    ) -> tuple[Layout, torch.Tensor | None]:
        """The layout of a batch [B, S], and the crops of its pictures [K, 3, H, W]; waits for the device.

        Arguments are those of `prepare_inputs_labels_for_multimodal`, but `padding_side` None packs the samples into
        one row without padding. Training cuts samples to `config.tokenizer_model_max_length`, inference does not.
        """
        # Harnesses compute likelihoods with labels in evaluation mode; a cut would take the labels away.
        ids, cuts = input_ids.cpu(), self.training and labels is not None
        mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool().cpu()
        labels = torch.full_like(ids, IGNORE_INDEX) if labels is None else labels.cpu()
        placeholders = ((ids == IMAGE_TOKEN_INDEX) & mask).sum(dim=1).tolist()
        pixels, pictures, visual_tokens = None, [], []
        if self.get_vision_tower() is not None:
            rules = self.crop_rules()
            if rules.is_anyres:
                pixels, pictures = match_crops(images, image_sizes, placeholders)
            else:
                pixels, pictures = match_images(images, placeholders), [Picture()] * sum(placeholders)
            visual_tokens = [rules.visual_tokens(picture) for picture in pictures]
        max_length = getattr(self.config, "tokenizer_model_max_length", None) if cuts else None
        layout = lay_out(ids, mask, labels, visual_tokens, max_length, pictures)
        if not cuts:
            check_fits(layout.lengths, self.config)
        layout = pad_layout(layout, padding_side) if padding_side else layout
        return layout.to(input_ids.device), pixels

    def splice(self, layout: Layout, crops: torch.Tensor | None) -> torch.Tensor:
        """The decoder's input [rows, D] of a layout and its pictures' crops [K, 3, H, W], None without pictures.

        Visual tokens that were cut off get a gradient of zero. ValueError where crops and layout differ in number.
        """
        pictures = layout.pictures
        if (num_crops := 0 if crops is None else len(crops)) != (expected := sum(p.crops for p in pictures)):
            raise ValueError(f"the batch's layout has {expected} crops of {len(pictures)} pictures, found {num_crops}")
        # Every rank must run tower and projector in every training step, or the ranks' collectives (ZeRO-3, DDP) never
        # meet.
        if not pictures and self.training and torch.is_grad_enabled():
            side, pictures = self.get_model().vision_tower.image_size, [Picture()]
            crops = torch.zeros(1, 3, side, side, device=layout.source.device)
        text = self.get_model().embed_tokens(layout.text_ids)  # [text tokens, D]
        parts = [text.new_zeros(1, text.shape[-1]), text]
        if pictures and crops is not None:
            visual, newline = self.encode_images(crops), self.get_model().image_newline  # [K, V, D], [D]
            parts.append(line_up(visual, pictures, self.crop_rules(), newline).to(text.dtype))  # [visual tokens, D]
        return torch.cat(parts).index_select(0, layout.source.flatten()).view(*layout.source.shape, -1)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        images: Images = None,
        image_sizes: Sizes = None,
        modalities: Sequence[str] | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        layout: Layout | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        loss_only: bool = False,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Runs the LLM on spliced inputs.

        With `labels` in training mode, or with `loss_only`, only supervised positions reach the LM head and `logits` is
        None (and with `padding_free` the samples form one row); otherwise logits [B, S', C] are returned.
        `num_items_in_batch` normalises the loss (None: mean over this batch's targets). `layout` is the batch's layout,
        which the collator makes; without one it is made here, which waits for the device.
        """
        training_loss = labels is not None and (self.training or loss_only)
        crops: Any = images  # with the collator's layout, these are the crops of its pictures
        if layout is None and inputs_embeds is None and training_loss and self.padding_free and input_ids is not None:
            refuse_video(modalities)
            layout, crops = self.lay_out(input_ids, attention_mask, labels, images, image_sizes)
        if layout is not None:
            input_ids, position_ids, inputs_embeds = None, layout.position_ids, self.splice(layout, crops)
            attention_mask = layout.attention_mask
            if attention_mask is None:
                kwargs |= packed_attention_arguments(layout, str(self.config._attn_implementation))
                attention_mask = kwargs.pop("attention_mask")
        elif inputs_embeds is None and input_ids is not None:
            input_ids, position_ids, attention_mask, past_key_values, inputs_embeds, labels = (
                self.prepare_inputs_labels_for_multimodal(
                    input_ids, position_ids, attention_mask, past_key_values, labels, images, modalities, image_sizes
                )
            )
        outputs = self.get_model()(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False if training_loss or layout is not None else use_cache,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state  # [1, T, D] or [B, S', D]
        loss = logits = None
        if labels is not None:
            if layout is None:
                rows, targets = (x.to(labels.device) for x in predicting_rows(labels.cpu()))
            else:
                rows, targets = layout.predicting, layout.targets
            loss = supervised_loss(hidden_states, rows, targets, self.lm_head, num_items_in_batch)
        if not training_loss:
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, positions])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            past_key_values=outputs.past_key_values,
        )

    @torch.no_grad()
    # pyrefly: ignore[bad-override]  # the library's other arguments pass through
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        images: Images = None,
        image_sizes: Sizes = None,
        modalities: Sequence[str] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Generates from prompts [B, S] with image placeholders; returns only the new tokens [B, new tokens].

        Prompts of different length are padded on either side, with `attention_mask` 0 there; a 0 between tokens hides
        nothing, see `without_holes`. Pictures are those of `prepare_inputs_labels_for_multimodal`, all other arguments
        those of the library's `generate`.
        """
        inputs = kwargs.pop("input_ids", None) if inputs is None else inputs
        if inputs is None:
            raise ValueError("generate: pass the prompt as `input_ids` [B, S] (inputs_embeds are made from it)")
        attention_mask = kwargs.pop("attention_mask", None)
        attention_mask = torch.ones_like(inputs) if attention_mask is None else without_holes(attention_mask)
        kwargs.pop("position_ids", None)
        parent: Any = super()  # the library's mixin wants a type that has no name here
        if self.get_vision_tower() is None:
            check_fits(text_lengths(inputs, attention_mask), self.config)
            masks, rows = attention_mask.bool(), partial(pad_sequence, batch_first=True, padding_side="left")
            inputs = rows([row[mask] for row, mask in zip(inputs, masks, strict=True)])
            attention_mask = rows([mask[mask] for mask in masks])
            return parent.generate(inputs, attention_mask=attention_mask, **kwargs)[:, inputs.shape[1] :]
        newline = self.get_model().image_newline
        with gathered([] if newline is None else newline):  # ZeRO-3 gathers in a module's forward, and this is none
            _, _, attention_mask, _, inputs_embeds, _ = self.prepare_inputs_labels_for_multimodal(
                inputs, None, attention_mask, None, None, images, modalities, image_sizes, padding_side="left"
            )
        return parent.generate(inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)


def text_lengths(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Tokens of each row of `input_ids` [B, S]."""
    return [input_ids.shape[1]] if attention_mask is None else attention_mask.sum(1).tolist()


def without_holes(attention_mask: torch.Tensor) -> torch.Tensor:
    """The mask [B, S] with every position between a row's first and last token set, so that only its ends are padding.

    Harnesses mask every token that equals the padding id. If that is the end-of-turn token, as with Llama-3, the
    prompt's own end-of-turn tokens would be lost.
    """
    seen = attention_mask.cumsum(dim=1) > 0
    seen_from_the_right = attention_mask.flip(1).cumsum(dim=1).flip(1) > 0
    return (seen & seen_from_the_right).to(attention_mask.dtype)
