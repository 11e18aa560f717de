"""Checkpoints that LLaVA and LLaVA-NeXT wrote load here and compute what they compute there (tests/golden/model)."""

import json
import shutil
from functools import cache

import pytest
import torch
from paths import GOLDEN, ROOT
from safetensors.torch import load_file, save_file

from llava.model.builder import load_language_model, load_pretrained_model
from llava.model.llava_arch import LlavaMetaForCausalLM

RESULTS = {up: json.loads((GOLDEN / f"model/{up}/results.json").read_text()) for up in ("orig", "next")}
NEXT_PAD = 597  # LLaVA-NeXT's collator takes the mask from the padding id

# Computed by the same checkpoint with `image_newline`; a case's own overrides come after these.
ANYRES = {
    "mm_patch_merge_type": "spatial_unpad",
    "image_aspect_ratio": "anyres",
    "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
}
ANYRES_CASES = ("anyres_unpad_wide", "anyres_max_1_unpad_square", "unpad_single_patch_image")

# Golden cases that this tree decides otherwise; docs/upstream.md says why.
REFUSED = {
    ("orig", "images_5d_flat"): "sample 0 of the batch has 1 image placeholders but 2 images",
    ("orig", "too_few_images"): r"3 image placeholders \(\[2, 1\] per sample\) but 2 images; sample 1 is the first",
    ("orig", "image_token_but_images_None"): "1 image placeholders .* but 0 images; sample 0",
    ("next", "too_few_images_reuses_last"): "sample 0 of the batch has 2 image placeholders but 1 images",
}
NO_TARGETS = {("orig", "truncated_mml12_image_cut"), ("orig", "all_labels_ignored")}
WHOLE_BATCH = {("next", "modalities_default_drops_batch")}
BATCHES = [
    (up, name)
    for up, results in RESULTS.items()
    for name, result in results.items()
    if "logits_shape" in result and (up, name) not in REFUSED
]
TRAINING_BATCHES = [
    (up, name) for up, name in BATCHES if RESULTS[up][name]["loss"] is not None and (up, name) not in WHOLE_BATCH
]


def assert_close(ours: torch.Tensor, upstreams: torch.Tensor) -> None:
    torch.testing.assert_close(ours, upstreams, rtol=0, atol=1e-5)


@cache
def recorded(up: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"model/{up}/tensors.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Upstream's folders as they are, except that the tower's path, which was relative, is absolute."""
    root = tmp_path_factory.mktemp("upstream")
    for up, tower in (("orig", "clip"), ("next", "siglip")):
        shutil.copytree(GOLDEN / f"model/{up}/checkpoint", root / up)
        config = json.loads((root / up / "config.json").read_text())
        config["mm_vision_tower"] = str(GOLDEN / "train/inputs" / tower)
        (root / up / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def models(folders):
    return {up: load_language_model(str(folders / up), attn_implementation="eager") for up in RESULTS}


@pytest.fixture(scope="module")
def anyres_folder(folders):
    """LLaVA-NeXT's folder with `image_newline`, and the config that its anyres cases were computed with."""
    folder = folders / "anyres"
    shutil.copytree(folders / "next", folder)
    newline = {"model.image_newline": recorded("next")["unpad_model/image_newline"].clone()}
    save_file(load_file(folder / "model.safetensors") | newline, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | ANYRES))
    return folder


@pytest.fixture(scope="module")
def anyres_model(anyres_folder):
    return load_language_model(str(anyres_folder), attn_implementation="eager")


@pytest.fixture
def model(models, request):
    """The model of the test's parameters `up` and `name`, without gradients."""
    name = request.getfixturevalue("name") if "name" in request.fixturenames else None
    model = models[request.getfixturevalue("up")]
    if name in ANYRES_CASES:
        model = request.getfixturevalue("anyres_model")
        vars(model.config).update(ANYRES)
    model.eval().zero_grad()
    yield model
    model.config.tokenizer_model_max_length = 2048
    model.config.tokenizer_padding_side = "right"


def batch_inputs(up: str, name: str) -> dict:
    """The recorded batch as arguments of forward."""
    result = RESULTS[up][name]
    arguments = {key: torch.tensor(result[key]) for key in ("input_ids", "labels", "attention_mask") if key in result}
    if up == "orig":
        if "images_shape" in result:
            arguments["images"] = pool_images(up, result["images_from_pool"]).view(result["images_shape"])
        elif name == "too_few_images":
            arguments["images"] = pool_images(up, [0, 1])
    else:
        arguments["attention_mask"] = arguments["input_ids"] != NEXT_PAD
        arguments["images"] = [pool_images(up, images) for images in result["images"]]
        arguments["image_sizes"] = result["image_sizes"]
        if result["modalities"] != "(default)":
            arguments["modalities"] = result["modalities"]
    return arguments


def pool_images(up: str, indices: list) -> torch.Tensor:
    pool = recorded(up)["image_pool"]
    return torch.stack([torch.zeros_like(pool[0]) if i == "zeros" else pool[i] for i in indices])


def override_config(model: LlavaMetaForCausalLM, up: str, name: str) -> None:
    for field, value in RESULTS[up][name]["config_overrides"].items():
        setattr(model.config, field, value)


@pytest.mark.parametrize("up", RESULTS)
def test_keys_and_values_survive_loading_and_saving(up, folders, model, tmp_path):
    upstreams = load_file(folders / up / "model.safetensors")
    model.save_pretrained(tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    assert ours.keys() == upstreams.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in upstreams.items())
    config = json.loads((folders / up / "config.json").read_text())
    saved = json.loads((tmp_path / "config.json").read_text())
    lost = {f for f in config if f.startswith(("mm_", "image_", "tokenizer_")) and saved.get(f) != config[f]}
    assert not lost


@pytest.mark.numeric
@pytest.mark.parametrize("up", RESULTS)
def test_visual_tokens_equal_upstreams(up, model):
    images = pool_images(up, [0, 1])
    suffix = {"orig": "two_images", "next": "pool01"}[up]
    assert_close(model.get_vision_tower()(images), recorded(up)[f"tower_features_{suffix}"])
    assert_close(model.encode_images(images), recorded(up)[f"projected_{suffix}"])


@pytest.mark.numeric
@pytest.mark.parametrize(("up", "name"), BATCHES)
def test_prepared_inputs_loss_and_logits_equal_upstreams(up, name, model):
    override_config(model, up, name)
    arguments = batch_inputs(up, name)
    result = RESULTS[up]["two_images" if (up, name) in WHOLE_BATCH else name]
    cut = "tokenizer_model_max_length" in RESULTS[up][name]["config_overrides"]
    model.training = cut  # upstream cuts always, this tree in training alone; the modules inside stay as they are
    _, positions, mask, _, embeddings, labels = model.prepare_inputs_labels_for_multimodal(
        arguments["input_ids"],
        None,
        arguments.get("attention_mask"),
        None,
        arguments.get("labels"),
        arguments.get("images"),
        arguments.get("modalities"),
        arguments.get("image_sizes"),
    )
    prepared = result["prepared"]
    assert positions is None
    if "images" in arguments:  # without images upstream leaves the embedding to the decoder
        assert list(embeddings.shape) == prepared["inputs_embeds_shape"]
    assert (None if labels is None else labels.tolist()) == prepared["labels"]
    assert (None if mask is None else mask.int().tolist()) == prepared["attention_mask"]

    model.training = False
    if cut:
        arguments = {"inputs_embeds": embeddings, "attention_mask": mask, "labels": labels}
    output = model(**arguments)
    name = "two_images" if (up, name) in WHOLE_BATCH else name
    real = torch.ones(output.logits.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    if f"{name}/logits" in recorded(up):
        assert_close(output.logits[real], recorded(up)[f"{name}/logits"][real])
    else:
        assert_close(output.logits[real][:, ::8], recorded(up)[f"{name}/logits_every8th_vocab"][real])
    if result["loss"] is None:
        assert output.loss is None
    else:
        assert output.loss.item() == pytest.approx(0 if (up, name) in NO_TARGETS else result["loss"], abs=1e-5)


@pytest.mark.numeric
@pytest.mark.parametrize(("up", "name"), TRAINING_BATCHES)
def test_training_gradients_equal_upstreams(up, name, model):
    override_config(model, up, name)
    norms = RESULTS[up][name]["grad_norms"]
    model.train().requires_grad_(True)
    model.get_vision_tower().requires_grad_(up == "next")  # trained with mm_tunable_parts, frozen in LLaVA
    model(**batch_inputs(up, name)).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert gradients.keys() == {name for name, norm in norms.items() if norm}
    ours = {name: grad.norm().item() for name, grad in gradients.items()}
    assert ours == pytest.approx({name: norm for name, norm in norms.items() if norm}, rel=1e-4, abs=1e-5)
    for key, gradient in recorded(up).items():
        if key.startswith(f"{name}/grad/"):
            assert_close(gradients[key.removeprefix(f"{name}/grad/")], gradient)


@pytest.mark.parametrize(("up", "name"), REFUSED)
def test_images_that_do_not_match_the_placeholders_are_refused(up, name, model):
    with pytest.raises(ValueError, match=REFUSED[up, name]):
        model(**batch_inputs(up, name))


def upstreams_new_tokens(case: str) -> list[list[int]]:
    outputs = RESULTS["orig"]["generate_greedy_12"][case]
    return [row[1:] for row in (outputs["out"] if case == "text_only" else outputs)]  # after a BOS as a placeholder


@pytest.mark.numeric
@pytest.mark.parametrize("up", RESULTS)
def test_greedy_answers_equal_upstreams(up, model):
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    images = pool_images(up, [0])
    if up == "next":
        prompt = torch.tensor(RESULTS[up]["two_images"]["input_ids"][:1])
        assert model.generate(prompt, images=images, **options).tolist() == RESULTS[up]["generate_greedy_12"]
        return
    prompt = torch.tensor(RESULTS[up]["no_labels_no_mask"]["input_ids"])
    assert model.generate(prompt, images=images, **options).tolist() == upstreams_new_tokens("no_labels_no_mask")
    text = torch.tensor([RESULTS[up]["generate_greedy_12"]["text_only"]["input_ids"]])
    assert model.generate(text, **options).tolist() == upstreams_new_tokens("text_only")


@pytest.mark.parametrize("up", ["orig"])
def test_batched_answers_equal_single_ones_whatever_side_the_config_pads(up, model):
    rows = torch.tensor(RESULTS[up]["two_images_right_pad"]["input_ids"])
    mask = torch.tensor(RESULTS[up]["two_images_right_pad"]["attention_mask"])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    batched = model.generate(rows, attention_mask=mask, images=pool_images(up, [0, 1]), **options)
    single = [
        model.generate(row[None, m.bool()], images=pool_images(up, [i]), **options)
        for i, (row, m) in enumerate(zip(rows, mask, strict=True))
    ]
    assert torch.equal(batched, torch.cat(single))
    assert batched[0].tolist() == upstreams_new_tokens("left_padded_input_batch_config_left")[0]


def test_layout_of_the_published_llava_1_5_loads(tmp_path, monkeypatch):
    """liuhaotian/llava-v1.5-7b: .bin shards without the tower, its hub id in the config, SentencePiece."""
    folder = tmp_path / "llava-v1.5-7b"
    folder.mkdir()
    weights = load_file(GOLDEN / "model/orig/checkpoint/model.safetensors")
    weights = {name: tensor.half() for name, tensor in weights.items() if ".vision_tower." not in name}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # what older releases of the library saved
    shards = [dict(list(weights.items())[part::2]) for part in range(2)]
    files = [f"pytorch_model-0000{part + 1}-of-00002.bin" for part in range(2)]
    for file, shard in zip(files, shards, strict=True):
        torch.save(shard, folder / file)
    index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((GOLDEN / "model/orig/checkpoint/config.json").read_text())
    tower = "openai/clip-vit-large-patch14-336"
    config |= {"model_type": "llava", "mm_vision_tower": tower, "torch_dtype": "float16", "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "train/inputs/llama" / file, folder)
    shutil.copytree(GOLDEN / "train/inputs/clip", tmp_path / tower)
    monkeypatch.chdir(tmp_path)  # where the hub id is a folder

    tokenizer, model, image_processor, context_len = load_pretrained_model(
        str(folder), None, "llava-v1.5-7b", device="cpu", attn_implementation="eager"
    )
    assert (len(tokenizer), context_len, image_processor.crop_size["height"]) == (600, 2048, 56)
    with torch.no_grad():
        logits = model(**batch_inputs("orig", "two_images_right_pad")).logits
    expected = recorded("orig")["two_images_right_pad/logits"]
    real = torch.tensor(RESULTS["orig"]["two_images_right_pad"]["prepared"]["attention_mask"]).bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=0, atol=5e-3)  # its weights are fp16


def test_every_deviation_is_in_the_documentation():
    text = (ROOT / "docs/upstream.md").read_text()
    cases = {name for _, name in [*REFUSED, *NO_TARGETS, *WHOLE_BATCH]}
    assert {name for name in cases if f"`{name}`" not in text} == set()
