"""The config of a tiny vision encoder of every family."""

LAYERS, SIDE, PATCH, E = 4, 24, 6, 32
SIZES = {"hidden_size": E, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "patch_size": PATCH}
WITH_IMAGE_SIZE = SIZES | {"image_size": SIDE}
MLP = {"intermediate_size": 48}
CONFIGS = {
    "siglip_vision_model": WITH_IMAGE_SIZE | MLP,
    "siglip2_vision_model": SIZES | MLP | {"num_patches": (SIDE // PATCH) ** 2},
    "clip_vision_model": WITH_IMAGE_SIZE | MLP,
    "dinov2": WITH_IMAGE_SIZE,
}
