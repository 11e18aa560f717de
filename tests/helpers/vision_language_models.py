"""Tiny random vision-language models of transformers' families, and what passes through them computed without a probe.

Every reference calls the model's own parts one by one, as its family is described, for two samples with one picture.
"""

from dataclasses import dataclass

import torch
import transformers
from tiny_models import make

from llava.analysis.probe import Batch

IMAGE = 300
TEXT = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2} | {
    "image_size": 16,
    "patch_size": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
GRID = torch.tensor([[1, 4, 4], [1, 4, 2]])


@dataclass
class Case:
    """A model, the inputs of its forward, and the reference: encoder tokens [N, E] and visual tokens [N, D]."""

    model: torch.nn.Module
    inputs: dict
    features: torch.Tensor
    projected: torch.Tensor
    inserted: torch.Tensor  # what the LLM finds at visual positions
    scale: float = 1.0  # of the text embeddings on their way into the LLM


def batch_of(**inputs) -> Batch:
    """A batch of inputs that are already what the model's forward takes."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return Batch(inputs, ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())


def ids_for(counts: list[int]) -> dict:
    """Two samples: text, `counts[i]` visual positions, text; the second is shorter and padded."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index, count in enumerate(counts):
        text = torch.randint(3, 290, (9 - 3 * index,), generator=generator)
        rows.append(torch.cat([text[:3], torch.full((count,), IMAGE), text[3:]]))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def build(prefix: str, config) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()


def rows(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.flatten(0, -2)


def llava(text=None) -> Case:
    """LLaVA, with any language model of transformers by its config."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=text or transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )
    model = build("Llava", config)
    images = pixels(2, 3, 16, 16)
    features = model.model.vision_tower(images, output_hidden_states=True).hidden_states[-2][:, 1:]
    projected = rows(model.model.multi_modal_projector(features))
    return Case(model, ids_for([16, 16]) | {"pixel_values": images}, rows(features), projected, projected)


def qwen3_vl() -> Case:
    vision = {"depth": 3, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = TEXT | {"head_dim": 8, "rope_parameters": MROPE}
    ids = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
    model = build("Qwen3VL", transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    images = pixels(int(GRID.prod(1).sum()), 3 * 2 * 4 * 4)
    inputs = ids_for((GRID.prod(1) // 4).tolist()) | {"pixel_values": images, "image_grid_thw": GRID}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    visual = model.model.visual
    seen = visual(images, grid_thw=GRID)
    return Case(model, inputs, seen.last_hidden_state, visual.merger(seen.last_hidden_state), seen.pooler_output)


def gemma3() -> Case:
    config = transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "sliding_window": 64},
        vision_config=VISION | {"vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    model = build("Gemma3", config)
    images = pixels(2, 3, 16, 16)
    features = model.model.vision_tower(images).last_hidden_state
    projected = rows(model.model.multi_modal_projector(features))
    inputs = ids_for([4, 4])
    inputs |= {"pixel_values": images, "token_type_ids": (inputs["input_ids"] == IMAGE).long()}
    return Case(model, inputs, rows(features), projected, projected, scale=32**0.5)


def mllama() -> Case:
    """Pictures enter by cross-attention: the one position of each holds its token's own embedding."""
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_output_dim": 72}
    vision |= {"intermediate_layers_indices": [0, 1], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    text = TEXT | {"cross_attention_layers": [1]}
    model = build("Mllama", transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE))
    inputs = ids_for([1, 1])
    ones = torch.ones(2, 1, 1, dtype=torch.long)
    inputs |= {"pixel_values": pixels(2, 1, 1, 3, 16, 16), "aspect_ratio_ids": ones[..., 0], "aspect_ratio_mask": ones}
    inputs["cross_attention_mask"] = torch.ones(*inputs["input_ids"].shape, 1, 1, dtype=torch.long)
    nothing = torch.zeros(0)
    return Case(model, inputs, nothing, nothing, nothing)


CASES = (llava, qwen3_vl, gemma3)


def our_checkpoint(tiny, folder, norm: str = "none", language_model: str = "llama", tower: str = "siglip") -> str:
    """A folder with an untrained model of this tree, complete with tokenizer and image processor."""
    from llava.mm_utils import load_tokenizer

    model = make(tiny, language_model, tower, norm)
    model.config.mm_conv_version = "chatml"
    model.save_pretrained(folder)
    load_tokenizer(str(tiny / language_model)).save_pretrained(folder)
    model.get_vision_tower().default_image_processor().save_pretrained(folder)
    return str(folder)
