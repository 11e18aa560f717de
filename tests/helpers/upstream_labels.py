"""Upstream's recorded conversations, and which of their labels this tree decides otherwise."""

import json

from paths import GOLDEN

CONVERSATIONS = {
    record["id"]: record for record in json.loads((GOLDEN / "text/conversations.json").read_text(encoding="utf-8"))
}
# Golden cases that this tree decides otherwise; docs/upstream.md says why.
SEVERAL_IMAGES = {"two_images_one_turn", "two_images_adjacent"}
DEVIATIONS = {
    ("orig", "plain"): SEVERAL_IMAGES,
    ("next", "plain"): SEVERAL_IMAGES,
    ("orig", "v1"): SEVERAL_IMAGES | {"noisy_tag", "system_first"},
    ("orig", "llama_2"): SEVERAL_IMAGES | {"noisy_tag", "system_first", "empty_question_text"},
    ("next", "v1"): {"system_first"},
    ("next", "qwen_1_5"): {"function_role", "system_first"},
    ("next", "llava_llama_3"): {"function_role", "system_first"},
    ("next", "mpt"): {"multi3_img_first", "multi3_no_image", "empty_question_text", "ends_with_human", "system_first"}
    | {"special_tokens_in_text"},
}
