"""A tiny Kimi-VL: module names and the way it is called are its repository's; the decoder is transformers' DeepSeek-V3.

Like the published code it imports a name that transformers 5 has no more, has a `tie_weights` without arguments, and
asks its language model whether it has fused attention. Its projector takes a list, not a tensor.
"""

import torch
from torch import nn
from transformers import DeepseekV3ForCausalLM
from transformers.activations import GELUActivation
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llava.modeling_llava import LlavaCausalLMOutputWithPast
from transformers.utils.import_utils import is_torch_fx_available

from .configuration_kimi_vl import KimiVLConfig
from .modeling_moonvit import MoonVitPretrainedModel

if is_torch_fx_available():
    import torch.fx


class KimiVLMultiModalProjector(nn.Module):
    def __init__(self, config: KimiVLConfig):
        super().__init__()
        vision = config.vision_config
        self.hidden_size = vision.hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
        self.pre_norm = nn.LayerNorm(vision.hidden_size)
        self.linear_1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.act = GELUActivation()
        self.linear_2 = nn.Linear(self.hidden_size, config.text_config.hidden_size)

    def forward(self, image_features: list[torch.Tensor]) -> torch.Tensor:
        """From a tensor [G, 4, E] for each picture to the visual tokens [N, D] of all."""
        rows = self.pre_norm(torch.cat(image_features)).view(-1, self.hidden_size)
        return self.linear_2(self.act(self.linear_1(rows)))


class KimiVLPreTrainedModel(PreTrainedModel, GenerationMixin):
    config_class = KimiVLConfig
    base_model_prefix = "model"
    _skip_keys_device_placement = "past_key_values"

    @property
    def _supports_sdpa(self):
        return self.language_model._supports_sdpa


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel):
    def __init__(self, config: KimiVLConfig):
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def tie_weights(self):
        return self.language_model.tie_weights()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        pixel_values=None,
        image_grid_hws=None,
    ):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None and len(pixel_values):
            visual = self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))
            inputs_embeds = inputs_embeds.clone()
            inputs_embeds[input_ids == self.config.media_placeholder_token_id] = visual.to(inputs_embeds.dtype)
        outputs = self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        return LlavaCausalLMOutputWithPast(
            logits=outputs.logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
