"""Token names and indices that scripts, checkpoints and evaluation clients of the LLaVA family share."""

IGNORE_INDEX = -100
"""Label of a position that the loss ignores."""

IMAGE_TOKEN_INDEX = -200
"""Id of an image's placeholder in `input_ids`, which the model replaces by visual tokens."""

DEFAULT_IMAGE_TOKEN = "<image>"
DEFAULT_IMAGE_PATCH_TOKEN = "<im_patch>"
DEFAULT_IM_START_TOKEN = "<im_start>"
DEFAULT_IM_END_TOKEN = "<im_end>"
IMAGE_PLACEHOLDER = "<image-placeholder>"

MAX_ASPECT_RATIO, MAX_SIDE = 100.0, 16384
"""Longer side over shorter side of a picture, and pixels of a side. A few bytes can name a picture of one pixel by
millions, and resizing its shorter side to a tower's, or padding it to a square, would take all memory."""
