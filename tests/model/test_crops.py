"""Pictures cut into crops, through data, training, checkpoints and answers."""

import json
import logging
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from anyres_data import ANYRES, GRIDS, write_shapes
from batches import assert_layouts_agree, trained_on
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import V
from training import build, flags, load, run

from llava.analysis.attention import picture_grid
from llava.analysis.models import our_batch
from llava.anyres import Picture
from llava.asking import load_assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.model.builder import load_pretrained_model
from llava.train import train as train_module

NEWLINE = "model.image_newline"
MODES = [
    ("anyres", "flat"), ("anyres", "spatial_unpad"), ("anyres_max_1", "spatial_unpad"), ("pad", "spatial_unpad"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes") / "data")


def options(aspect_ratio: str, merge_type: str) -> dict:
    grids = {"image_grid_pinpoints": GRIDS} if aspect_ratio.startswith("anyres") else {}
    return {"image_aspect_ratio": aspect_ratio, "mm_patch_merge_type": merge_type} | grids


def built(tiny, tmp_path, shapes, mode, **more):
    """(model, trainer) before the first step, with everything trained."""
    return build(flags(tiny, tmp_path / "run", 2, **shapes, **options(*mode), **more))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "max_length"), [(MODES[0], 40), (MODES[1], 40), (MODES[2], 4096), (MODES[3], 4096)], ids=str
)
def test_measured_lengths_are_those_of_the_rows_laid_out(tiny, tmp_path, shapes, mode, max_length):
    _, trainer = built(tiny, tmp_path, shapes, mode, model_max_length=max_length)
    data = trainer.train_dataset
    items = [data[index] for index in range(len(data))]
    assert trainer.data_collator(items)["layout"].lengths == np.abs(data.modality_lengths()).tolist()
    assert [("images" in item) * 2 - 1 for item in items] == np.sign(data.modality_lengths()).tolist()


def test_a_cut_that_leaves_one_of_two_pictures_leaves_it_whole_and_padded(tiny, tmp_path, shapes):
    """The picture that is left stays padded, as its length was counted; a record of it alone would be in crops."""
    _, trainer = built(tiny, tmp_path, shapes, MODES[1])
    data, left = trainer.train_dataset, []
    for data.model_max_length in range(8, 100):
        item = data[2]
        left.append(int((item["input_ids"] == IMAGE_TOKEN_INDEX).sum()))
        assert len(item["images"]) == len(item["pictures"]) == left[-1] if left[-1] else "images" not in item
    assert set(left) >= {1, 2}


@pytest.mark.slow
def test_packed_padded_and_one_by_one_give_the_same_loss_and_gradients(tiny, tmp_path, shapes):
    model, trainer = built(tiny, tmp_path, shapes, MODES[2])
    data = trainer.train_dataset
    items = [data[index] for index in range(len(data))]
    alone = trained_on(model, trainer, [[item] for item in items], False, "eager")
    assert NEWLINE in alone[1]
    assert_layouts_agree(alone, partial(trained_on, model, trainer, [items]))


def test_a_text_only_micro_batch_gives_the_newline_a_gradient_of_zero(tiny, tmp_path, shapes):
    model, trainer = built(tiny, tmp_path, shapes, ("anyres", "spatial_unpad"))
    text = next(item for item in map(trainer.train_dataset.__getitem__, range(10)) if "images" not in item)
    batch = trainer.data_collator([text])
    model.train()(**{k: v for k, v in batch.items() if k != "indices"}).loss.backward()
    assert torch.equal(model.get_model().image_newline.grad, torch.zeros(32))
    assert all(p.grad is not None for p in model.get_model().mm_projector.parameters())


# --- both stages ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stage_1(tiny, shapes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("anyres") / "s1"
    captions = {"data_path": shapes["data_path"].with_name("pretrain.json"), "image_folder": shapes["image_folder"]}
    train_module.train(flags(tiny, folder, 1, **captions, **ANYRES, save_strategy="steps", save_steps=1))
    return folder


def test_stage_1_trains_and_saves_the_newline_with_the_projector(tiny, stage_1):
    weights, adapter = load_file(stage_1 / "model.safetensors"), torch.load(stage_1 / "mm_projector.bin")
    assert sorted(adapter) == sorted(k for k in weights if "mm_projector" in k or k == NEWLINE)
    assert all(torch.equal(adapter[k], weights[k]) for k in adapter)
    first = torch.load(stage_1 / "checkpoint-1/mm_projector.bin")
    assert not torch.equal(first[NEWLINE], adapter[NEWLINE])
    config = json.loads((stage_1 / "config.json").read_text())
    fields = {name: config[name] for name in ANYRES}
    assert fields == ANYRES | {"image_grid_pinpoints": json.loads(GRIDS)}


@pytest.mark.slow
def test_stage_2_starts_from_stage_1s_newline_and_loads_to_equal_logits(tiny, shapes, stage_1, tmp_path):
    weights, _ = run(tiny, tmp_path, 2, **shapes, **ANYRES, pretrain_mm_mlp_adapter=stage_1, learning_rate=0)
    assert torch.equal(weights[NEWLINE], torch.load(stage_1 / "mm_projector.bin")[NEWLINE])
    model = load(tmp_path, None)
    assert torch.equal(model.get_model().image_newline, weights[NEWLINE])
    assert torch.equal(load(stage_1, tiny / "llama").get_model().image_newline, weights[NEWLINE])


def test_an_adapter_without_newline_says_so_and_one_too_many_is_refused(tiny, shapes, stage_1, tmp_path, caplog):
    adapter = torch.load(stage_1 / "mm_projector.bin")
    torch.save({k: v for k, v in adapter.items() if k != NEWLINE}, tmp_path / "mm_projector.bin")
    argv = flags(tiny, tmp_path / "run", 2, **shapes, **ANYRES, pretrain_mm_mlp_adapter=tmp_path)
    with caplog.at_level(logging.WARNING, "llava"):
        model = train_module.build_model(*train_module.parse_arguments(argv))
    assert "mm_projector.bin has no image_newline: it keeps the value that it has now" in caplog.text
    assert model.get_model().image_newline.norm().item() == pytest.approx(1, rel=0.5)
    flat = flags(tiny, tmp_path / "run", 2, **shapes, pretrain_mm_mlp_adapter=stage_1)
    with pytest.raises(ValueError, match="trained with image_newline, which these flags do not have.*spatial_unpad"):
        train_module.build_model(*train_module.parse_arguments(flat))


def test_a_checkpoint_never_loses_its_newline(tiny, shapes, stage_1, tmp_path):
    with pytest.raises(ValueError, match="mm_patch_merge_type: checkpoint 'spatial_unpad', flags 'flat'"):
        run(tiny, tmp_path, 2, **shapes, model_name_or_path=stage_1, vision_tower=None)
    folder = shutil.copytree(stage_1, tmp_path / "without")
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if k != NEWLINE}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="the weights lack model.image_newline"):
        load(folder, None)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_one_picture_is_answered_in_crops_and_two_are_padded(tiny, stage_1, monkeypatch):
    assistant = load_assistant(str(stage_1), conv_mode="chatml", device="cpu")
    seen = []
    encode = assistant.model.encode_images
    monkeypatch.setattr(assistant.model, "encode_images", lambda images: seen.append(len(images)) or encode(images))
    wide, tall = Image.new("RGB", (64, 17)), Image.new("RGB", (17, 64))
    one = [{"from": "human", "value": "<image>\nWhat?"}]
    both = [{"from": "human", "value": "<image>\n<image>\nWhat?"}]
    short = {"do_sample": False, "max_new_tokens": 3}
    together = assistant.answer([one, both, one], [wide, wide, tall, tall], **short)
    assert seen == [4 + 2 + 3]
    alone = [
        assistant.answer([turns], pictures, **short)[0]
        for turns, pictures in ((one, [wide]), (both, [wide, tall]), (one, [tall]))
    ]
    assert together == alone
    rules = assistant.model.crop_rules()
    padded, cut = rules.visual_tokens(Picture()), rules.visual_tokens(rules.picture(wide.size))
    assert padded == V + 1
    words = assistant.prompt_ids(one, [wide]).numel() - 1
    assert assistant.prompt_length(one, [wide.size]) == words + cut


def test_an_analysis_knows_every_position_of_a_picture_in_crops(stage_1):
    _, model, processor, _ = load_pretrained_model(str(stage_1), None, "anything", device="cpu")
    ids = [torch.tensor([5, IMAGE_TOKEN_INDEX, 6, 7]), torch.tensor([IMAGE_TOKEN_INDEX, 8])]
    pictures = [Image.new("RGB", (64, 17)), Image.new("RGB", (17, 64))]
    batch = our_batch(model, ids, pictures, processor)
    assert model(**batch.inputs).logits.shape[:2] == batch.input_ids.shape
    rules = model.crop_rules()
    expected = [rules.visual_tokens(rules.picture(picture.size)) for picture in pictures]
    assert (batch.input_ids == IMAGE_TOKEN_INDEX).sum(dim=1).tolist() == expected
    one = our_batch(model, ids[:1], pictures[:1], processor)
    assert picture_grid(model, one.inputs, expected[0]) is None
