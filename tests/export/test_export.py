"""An exported folder computes what the checkpoint does, by transformers alone, and comes back bit for bit."""

import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from decoder_families import NAMES, write_families
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import make
from training import flags
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    SiglipVisionConfig,
    pipeline,
)

from llava.asking import load_assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.export import hf
from llava.export.__main__ import main
from llava.export.hf import export, file_name, new_folder
from llava.mm_utils import load_tokenizer, process_images, tokenizer_image_token
from llava.model.builder import load_language_model, load_pretrained_model, read_config
from llava.model.hf_folder import CARRIED, WITH_NORM, hf_names
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.multimodal_encoder.towers import TOWERS
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.train.train import train

VERSION = "chatml_direct"
TEXT = [5, 6, IMAGE_TOKEN_INDEX, 7, 8, IMAGE_TOKEN_INDEX, 9]
"""A prompt with two pictures."""


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    """`tiny` with every family's language model and every tower."""
    write_families(tiny)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
    for name, own in (("siglip2_vision_model", {"num_patches": 4}), ("dinov2", {"image_size": 16})):
        torch.manual_seed(0)
        tower = TOWERS[name]
        tower.model_class(tower.config_class(**sizes, intermediate_size=32, **own)).save_pretrained(tiny / name)
    return tiny


def save(parts, folder, language_model="llama", version=VERSION, aspect="pad", spare_rows=False, grids=None, **options):
    """A checkpoint with noise on every parameter, so that no two are alike and the norm is not where it began.

    Its embedding has as many rows as there are tokens, or spare ones.
    """
    model = make(parts, language_model, **options)
    tokenizer = load_tokenizer(str(parts / language_model))
    if not spare_rows:
        model.resize_token_embeddings(len(tokenizer))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.config.mm_conv_version, model.config.image_aspect_ratio = version, aspect
    if grids:
        model.config.image_grid_pinpoints = grids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.get_vision_tower().default_image_processor().save_pretrained(folder)
    return load_language_model(str(folder)).eval()


def saved_and_exported(parts, root, **options):
    """(checkpoint, exported folder) of a model with these settings."""
    save(parts, root / "ours", **options)
    export(str(root / "ours"), root / "hf")
    return root / "ours", root / "hf"


def load_exported(folder):
    trust = json.loads((folder / "config.json").read_text())["model_type"] == WITH_NORM
    theirs, info = AutoModelForImageTextToText.from_pretrained(
        folder, trust_remote_code=trust, output_loading_info=True
    )
    assert not any(info.values())
    return theirs.eval()


def expanded(ids, theirs, visual_tokens):
    """The prompt as the processor writes it."""
    image = theirs.config.image_token_id
    return torch.tensor([[x for i in ids for x in ([image] * visual_tokens if i == IMAGE_TOKEN_INDEX else [i])]])


def pixels(n=2):
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def check_equal(ours, theirs):
    """Checks that both give the same logits and greedy answers."""
    rows, images = ours.config.vocab_size, pixels()
    prompt = expanded(TEXT, theirs, ours.get_vision_tower().num_tokens)
    expected = ours(input_ids=torch.tensor([TEXT]), images=images).logits
    found = theirs(input_ids=prompt, pixel_values=images).logits
    torch.testing.assert_close(found[..., :rows], expected, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = theirs.generate(input_ids=prompt, pixel_values=images, **options)[:, prompt.shape[1] :]
    assert answer.tolist() == ours.generate(torch.tensor([TEXT]), images=images, **options).tolist()


def exported(parts, root, *model, **options):
    """Both models, loaded from a checkpoint with these settings and from its exported folder."""
    ours = save(parts, root / "ours", *model, **options)
    export(str(root / "ours"), root / "hf")
    return ours, load_exported(root / "hf")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "family"), enumerate(NAMES))
def test_every_decoder_computes_the_same(parts, tmp_path, place, family):
    norm = ("none", "gwc_layernorm")[place % 2]
    ours, theirs = exported(parts, tmp_path, f"families/{family}", tower=("clip", "siglip")[place // 2 % 2], norm=norm)
    assert (type(theirs) is LlavaForConditionalGeneration) == (norm == "none" and family != "Granite")
    check_equal(ours, theirs)


# --- norm arms --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def normed(parts, tmp_path_factory):
    """(checkpoint, exported folder) of `gwc_layernorm` on Llama and CLIP."""
    return saved_and_exported(parts, tmp_path_factory.mktemp("normed"), tower="clip")


def gradients(model, rows, **inputs):
    """Gradients of a loss on the tokens that both models have."""
    model.train().requires_grad_(True).zero_grad()
    model(**inputs).logits[..., :rows].log_softmax(-1)[..., 7].mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("norm", [name for name in NORM_TYPES if name != "none"])
def test_every_arm_is_loaded_bit_for_bit_and_trained_as_here(parts, tmp_path, norm):
    ours, theirs = exported(parts, tmp_path, tower="clip", norm=norm)
    names, found, rows = hf_names(ours.state_dict(), ours.config), theirs.state_dict(), ours.config.vocab_size
    for name, tensor in ours.state_dict().items():
        assert torch.equal(found[names[name]][: len(tensor)], tensor), name
    check_equal(ours, theirs)
    prompt, images = expanded(TEXT, theirs, ours.get_vision_tower().num_tokens), pixels()
    expected = gradients(ours, rows, input_ids=torch.tensor([TEXT]), images=images)
    found = gradients(theirs, rows, input_ids=prompt, pixel_values=images)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[names[name]][: len(gradient)], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_several_vision_layers_are_refused_by_the_folders_own_class(normed):
    config = AutoConfig.from_pretrained(normed[1], trust_remote_code=True)
    config.vision_feature_layer = [-2, -1]
    with pytest.raises(ValueError, match=r"vision_feature_layer=\[-2, -1\]: expected one layer, not several"):
        AutoModelForImageTextToText.from_config(config, trust_remote_code=True)


LOADERS = {
    "config": AutoConfig.from_pretrained,
    "auto": AutoModelForImageTextToText.from_pretrained,
    "causal": AutoModelForCausalLM.from_pretrained,
    "stock": LlavaForConditionalGeneration.from_pretrained,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_norm_is_never_dropped_where_its_code_is_not_trusted(normed, monkeypatch, loader):
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 0)  # nobody is there to be asked
    with pytest.raises((ValueError, KeyError), match="trust_remote_code=True"):
        LOADERS[loader](normed[1])


# --- tokenizer and processor ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("tower", "aspect"), [("clip", "square"), ("siglip", "pad"), ("siglip2_vision_model", "pad")])
def test_the_processor_gives_our_pixels_and_as_many_tokens_as_the_tower(parts, tmp_path, tower, aspect):
    ours, theirs = exported(parts, tmp_path, tower=tower, norm="none", aspect=aspect)
    processor = load_processor(tmp_path / "hf")
    image_processor = load_image_processor(str(tmp_path / "ours"), ours.get_vision_tower())
    for size in ((23, 40), (50, 16), (31, 31)):
        found = processor(images=drawn(size), text="<image>", return_tensors="pt")
        assert torch.equal(found["pixel_values"], process_images([drawn(size)], image_processor, ours.config))
        assert int((found["input_ids"] == processor.image_token_id).sum()) == ours.get_vision_tower().num_tokens
    assert processor.image_processor.crop_size["height"] == 16
    assert theirs.config.image_token_id == processor.image_token_id


@pytest.mark.parametrize("options", [{"norm": "gwc_layernorm"}, {"norm": "none"}, "crops"])
def test_a_pipeline_answers_a_chat_message_as_we_do(parts, tmp_path, options):
    options = CLIP_CROPS if options == "crops" else options | {"tower": "siglip"}
    ours, theirs = saved_and_exported(parts, tmp_path, **options)
    picture = drawn((23, 40))
    ask = pipeline("image-text-to-text", model=str(theirs), trust_remote_code=True)
    message = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Why?"}]}
    options = {"max_new_tokens": 6, "do_sample": False}
    found = ask(text=[message], return_full_text=False, generate_kwargs=options)[0]["generated_text"]
    assistant = load_assistant(str(ours), device="cpu")
    question = [{"from": "human", "value": "<image>\nWhy?"}]
    assert found.strip() == assistant.answer([question], [picture], **options)[0]


def test_generation_ends_where_the_template_ends_an_answer_and_pads_on_the_left(normed):
    settings = json.loads((normed[1] / "generation_config.json").read_text())
    tokenizer = load_processor(normed[1]).tokenizer
    assert settings["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert settings["pad_token_id"] == tokenizer.pad_token_id and tokenizer.padding_side == "left"


@pytest.mark.parametrize("language_model", ["llama", "llama_tied"])
def test_the_row_of_the_image_token_never_wins(parts, tmp_path, language_model):
    save(parts, tmp_path / "ours", language_model, tower="clip", norm="none")
    export(str(tmp_path / "ours"), tmp_path / "hf", dtype="bfloat16")
    files = load_file(tmp_path / "hf/model.safetensors")
    tied = "language_model.lm_head.weight" not in files
    assert tied == (language_model == "llama_tied") and {t.dtype for t in files.values()} == {torch.bfloat16}
    theirs = load_exported(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    image = theirs.config.image_token_id
    logits = theirs.float()(input_ids=torch.arange(image)[None]).logits
    assert logits.shape[-1] == image + 1 and (logits.argmax(-1) < image).all()
    assert logits.softmax(-1)[..., image].max() < 1 / image


# --- the way back -----------------------------------------------------------------------------------------------------


def equal_checkpoints(ours, back):
    expected, found = ours.state_dict(), back.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_projector_in_another_type_than_the_rest_stays_in_it_and_a_template_that_is_named(parts, tmp_path):
    ours = save(parts, tmp_path / "ours", "families/Llama", tower="clip", norm="none").to(torch.bfloat16)
    ours.model.mm_projector.to(torch.float32).apply(lambda module: [p.data.normal_() for p in module.parameters(False)])
    ours.config.dtype = torch.bfloat16
    ours.save_pretrained(tmp_path / "ours")
    export(str(tmp_path / "ours"), tmp_path / "hf", conv_mode="v1")
    assert json.loads((tmp_path / "hf/config.json").read_text())["mm_conv_version"] == "v1"
    assert main(["llava", "--model-path", str(tmp_path / "hf"), "--output-dir", str(tmp_path / "back")]) == 0
    expected, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "back"))
    theirs = load_file(tmp_path / "hf/model.safetensors")["multi_modal_projector.linear_1.weight"]
    assert torch.equal(theirs, expected["model.mm_projector.0.weight"]) and theirs.dtype is torch.float32
    assert {n: t.dtype for n, t in back.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_that_names_no_template_is_asked_with_the_picture_first_in_every_form(parts, tmp_path):
    save(parts, tmp_path / "ours", version=None, norm="none")
    export(str(tmp_path / "ours"), tmp_path / "hf", conv_mode="v1")
    assert main(["llava", "--model-path", str(tmp_path / "hf"), "--output-dir", str(tmp_path / "back")]) == 0
    asked = [{"from": "human", "value": "What is it?\n<image>"}]
    texts = {load_assistant(str(tmp_path / form), None, "v1").prompt_text(asked) for form in ("ours", "hf", "back")}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image"}]
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert len(texts) == 1 and all("USER: <image>\nWhat is it? ASSISTANT:" in text for text in (*texts, said))


def test_a_folder_that_the_library_saved_again_keeps_its_image_processor(parts, tmp_path):
    save(parts, tmp_path / "ours", tower="siglip", norm="none")
    export(str(tmp_path / "ours"), tmp_path / "hf")
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    processor.save_pretrained(tmp_path / "again")
    LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again/preprocessor_config.json").exists()
    model, image_processor = load_pretrained_model(str(tmp_path / "again"), None, "again", device="cpu")[1:3]
    assert list(image_processor.image_mean) == [0.1, 0.2, 0.3]
    equal_checkpoints(load_language_model(str(tmp_path / "ours")), model)


def fields_of(folder) -> dict:
    """A checkpoint's config without what says where it came from."""
    fields = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in fields.items() if key not in ("_name_or_path", "transformers_version")}


@pytest.mark.slow
@pytest.mark.parametrize(("language_model", "tower", "norm", "projector"), [
    ("families/Gemma3", "siglip", "none", "linear"),
    ("families/Qwen3", "dinov2", "gwc_layernorm", "mlp2x_gelu"),
    ("families/Granite", "clip", "clip", "mlp3x_gelu"),
    ("qwen_tied", "siglip2_vision_model", "gwc_rmsnorm", "linear"),
])  # fmt: skip
def test_every_tower_and_projector_goes_there_and_back(parts, tmp_path, language_model, tower, norm, projector):
    options = {"tower": tower, "norm": norm, "mm_projector_type": projector, "spare_rows": norm == "clip"}
    ours, theirs = exported(parts, tmp_path, language_model, **options)
    check_equal(ours, theirs)
    assert main(["llava", "--model-path", str(tmp_path / "hf"), "--output-dir", str(tmp_path / "back")]) == 0
    equal_checkpoints(ours, load_language_model(str(tmp_path / "hf")))
    equal_checkpoints(ours, load_language_model(str(tmp_path / "back")))
    assert fields_of(tmp_path / "ours") == fields_of(tmp_path / "back")
    ours, back = (load_tokenizer(str(tmp_path / folder)) for folder in ("ours", "back"))
    assert ours.get_vocab() == back.get_vocab()
    assert ours("Hi <image> there")["input_ids"] == back("Hi <image> there")["input_ids"]


def test_a_folder_that_lacks_some_weights_is_refused_and_not_filled_up(normed, tmp_path):
    shutil.copytree(normed[1], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    del tensors["model.vision_tower.vision_model.pre_layrnorm.weight"]
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the weights lack .*pre_layrnorm.weight"):
        load_language_model(str(tmp_path / "hf"))


@pytest.mark.slow
def test_a_published_folder_is_read_and_trained(parts, tmp_path):
    """A folder that no export of ours has written, with the names of transformers 4."""
    torch.manual_seed(0)
    text, vision = LlamaConfig.from_pretrained(parts / "llama"), CLIPVisionConfig.from_pretrained(parts / "clip")
    config = LlavaConfig(image_token_index=300, text_config=text, vision_config=vision)
    theirs = LlavaForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path / "hf")
    load_tokenizer(str(parts / "llama")).save_pretrained(tmp_path / "hf")
    tensors = {file_name(name, PUBLISHED): tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    ours = load_language_model(str(tmp_path / "hf")).eval()
    images = pixels()
    prompt = torch.tensor([[y for x in TEXT for y in ([300] * 4 if x == IMAGE_TOKEN_INDEX else [x])]])
    with torch.no_grad():
        found = ours(input_ids=torch.tensor([TEXT]), images=images).logits
        expected = theirs.eval()(input_ids=prompt, pixel_values=images).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    train(flags(parts, tmp_path / "run", 2, model_name_or_path=tmp_path / "hf", tower="clip", norm="none"))
    assert load_language_model(str(tmp_path / "run")).config.model_type == "llava_llama"


def test_a_published_folder_whose_visual_tokens_lack_a_patch_is_refused(tmp_path):
    vision = SiglipVisionConfig()
    LlavaConfig(vision_config=vision, vision_feature_select_strategy="full").save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).mm_vision_select_feature == "patch"
    LlavaConfig(vision_config=vision).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vision_feature_select_strategy='default'.*expected 'full'"):
        read_config(str(tmp_path))


PUBLISHED = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}


# --- pictures in crops ------------------------------------------------------------------------------------------------

SIZES = ((64, 17), (100, 100), (15, 13))
GRIDS = [[16, 32], [32, 16], [32, 32], [48, 16]]
CROPS = {"aspect": "anyres", "mm_patch_merge_type": "spatial_unpad", "grids": GRIDS}
CLIP_CROPS = CROPS | {"tower": "clip", "norm": "none"}


@pytest.fixture(scope="module")
def cropped(parts, tmp_path_factory):
    """(checkpoint, exported folder) of an arm that sees pictures in crops."""
    return saved_and_exported(parts, tmp_path_factory.mktemp("cropped"), **CLIP_CROPS)


def drawn(size):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def load_processor(folder):
    return AutoProcessor.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
def test_crops_give_the_same_pixels_ids_logits_and_answers(cropped, size):
    _, ours, image_processor, _ = load_pretrained_model(str(cropped[0]), None, "ours", device="cpu")
    theirs, processor, rules = load_exported(cropped[1]), load_processor(cropped[1]), ours.crop_rules()
    assert type(theirs) is LlavaNextForConditionalGeneration
    ids = tokenizer_image_token("Hi <image> there", load_tokenizer(str(cropped[0])), return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    images = process_images([drawn(size)], image_processor, ours.config)
    inputs = processor(images=drawn(size), text="Hi <image> there", return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], images)
    visual_tokens = rules.visual_tokens(rules.picture(size))
    assert torch.equal(inputs["input_ids"], expanded(ids.tolist(), theirs, visual_tokens))
    expected = ours(input_ids=ids[None], images=images, image_sizes=[size]).logits
    found = theirs(**inputs).logits[..., : expected.shape[-1]]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    answer = theirs.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    assert answer.tolist() == ours.generate(ids[None], images=images, image_sizes=[size], **options).tolist()


def test_the_way_back_from_crops_gives_the_checkpoint(cropped, tmp_path):
    assert main(["llava", "--model-path", str(cropped[1]), "--output-dir", str(tmp_path / "back")]) == 0
    ours, back = load_language_model(str(cropped[0])), load_language_model(str(tmp_path / "back"))
    equal_checkpoints(ours, back)
    equal_checkpoints(ours, load_language_model(str(cropped[1])))
    assert fields_of(cropped[0]) == fields_of(tmp_path / "back")
    processors = [load_image_processor(str(f), ours.get_vision_tower()) for f in (cropped[0], tmp_path / "back")]
    assert torch.equal(*(process_images([drawn(SIZES[0])], processor, ours.config) for processor in processors))
    # A published folder of LLaVA-NeXT has no fields of ours.
    shutil.copytree(cropped[1], tmp_path / "hf")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    published = {k: v for k, v in fields.items() if k == "image_grid_pinpoints" or not k.startswith(CARRIED)}
    (tmp_path / "hf/config.json").write_text(json.dumps(published))
    back = load_language_model(str(tmp_path / "hf"))
    equal_checkpoints(ours, back)
    assert back.crop_rules() == ours.crop_rules()


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(capsys, *argv):
    assert main([*argv]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    return said[-1]


def test_what_is_not_a_whole_checkpoint_is_refused_by_name(parts, tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out")]
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    assert "merge_lora" in refusal(capsys, "hf", "--model-path", str(tmp_path / "lora"), *out)
    assert "without a vision tower" in refusal(capsys, "hf", "--model-path", str(parts / "llama"), *out)
    assert "no config.json found" in refusal(capsys, "hf", "--model-path", str(tmp_path / "none"), *out)
    stage_1 = tmp_path / "stage1"
    stage_1.mkdir()
    (stage_1 / "config.json").write_text((parts / "llama/config.json").read_text())
    (stage_1 / "mm_projector.bin").write_bytes(b"")
    assert "stage-1 folder" in refusal(capsys, "hf", "--model-path", str(stage_1), *out)
    assert "LLaVA's layout already" in refusal(capsys, "llava", "--model-path", str(parts / "llama"), *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mm_projector_type": "pixel_shuffle_2x_mlp2x_gelu"}, "which the exported classes do not have"),
        (CROPS | {"norm": "gwc_layernorm"}, "mm_projector_norm=gwc_layernorm: crops are exported as"),
        (CROPS | {"norm": "none", "aspect": "anyres_max_1"}, "image_aspect_ratio=anyres_max_1, mm_patch_merge_type"),
        (CROPS | {"norm": "none"}, "crops to 16"),
        ({"version": "plain"}, "of stage 1 (template plain)"),
    ],
)
def test_what_the_format_cannot_say_is_refused_by_name(parts, tmp_path, capsys, options, message):
    save(parts, tmp_path / "ours", tower="clip", **options)
    if message == "crops to 16":
        file = tmp_path / "ours/preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"size": {"shortest_edge": 20}}))
    where = ["--model-path", str(tmp_path / "ours"), "--output-dir", str(tmp_path / "out")]
    assert message in refusal(capsys, "hf", *where)
    assert message in refusal(capsys, "hf", *where, "--conv-mode", "v1")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_whole_or_absent_and_nothing_is_replaced(normed, tmp_path, capsys, monkeypatch):
    ours, out = str(normed[0]), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("")
    assert "give another one" in refusal(capsys, "hf", "--model-path", ours, "--output-dir", str(out))
    (out / "mine.txt").unlink()
    (tmp_path / ".out.partial").mkdir()
    assert "left by an export that was killed" in refusal(capsys, "hf", "--model-path", ours, "--output-dir", str(out))
    (tmp_path / ".out.partial").rmdir()
    assert main(["hf", "--model-path", ours, "--output-dir", str(out)]) == 0 and (out / "model.safetensors").is_file()

    monkeypatch.setattr(hf, "write_model", Mock(side_effect=KeyboardInterrupt()))
    assert main(["hf", "--model-path", ours, "--output-dir", str(tmp_path / "other")]) == 130
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("part", "shift", "message"), [("with_rows", 1.01, "its logits differ"), ("process_images", 1.001, "other pixels")]
)
def test_what_was_written_is_loaded_and_compared(normed, tmp_path, monkeypatch, part, shift, message):
    real = getattr(hf, part)
    monkeypatch.setattr(hf, part, lambda *arguments: real(*arguments) * shift)
    with pytest.raises(RuntimeError, match=message):
        export(str(normed[0]), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    with pytest.raises(OSError, match=f"--output-dir {tmp_path}/out: its disk is full"), new_folder(tmp_path / "out"):
        (tmp_path / ".out.partial/model.safetensors").write_bytes(b"half")
        raise SafetensorError("No space left on device")
    assert not list(tmp_path.iterdir())
