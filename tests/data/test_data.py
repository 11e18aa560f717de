"""Records, samples, batches and their order."""

import json
import shutil

import pytest
import torch
from data_files import turns
from training import flags
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.dataset import DataCollatorForSupervisedDataset, LazySupervisedDataset
from llava.data.errors import DataError
from llava.data.records import load_records
from llava.data.sampler import ModalityLengthGroupedSampler
from llava.train.train import train

V = 4


@pytest.fixture
def dataset(tiny, tokenizer, tmp_path):
    """A function that makes a data set of records."""

    def made(records, model_max_length=512, image_folder=tiny / "data/images"):
        (tmp_path / "dataset.json").write_text(json.dumps(records))
        table = load_records(str(tmp_path / "dataset.json"), check=False)
        processor = SiglipImageProcessorPil(size={"height": 16, "width": 16})
        return LazySupervisedDataset(
            table, tokenizer, "chatml", processor, str(image_folder), "square", V, model_max_length
        )

    return made


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", "holds no records"),
        ("a.json", '[\n {"id": 1},\n]', "line 3, column 1: not valid JSON: Expecting value"),
        ("a.json", '{\n "data": [\n {"id": 1}]}', "line 1, column 2: .*expected a list of records"),
        ("a.csv", "question,answer", "expected a file that ends in .*docs/data.md, Other forms"),
        ("a.jsonl", "{\"a\": 1}\n  {'a': 1}", "line 2, column 4: not valid JSON: Expecting property name"),
    ],
)
def test_unreadable_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"(?s){name}.*{message}"):
        load_records(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_list_and_lines_are_told_by_content_with_or_without_a_bom(tmp_path, name):
    records = [{"id": i, "image": "é.png", "conversations": turns("<image>é", "yes")} for i in range(3)]
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    for text, encoding in ((lines, "utf-8-sig"), (json.dumps(records, indent=1), "utf-8")):
        (tmp_path / name).write_text(text, encoding=encoding, newline="")
        assert list(load_records(str(tmp_path / name))) == records


def test_a_folder_stands_for_every_file_below_it_and_nothing_there_is_passed_over(tmp_path):
    def write(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(json.dumps({"id": name, "conversations": turns("?", "yes")}) + "\n")

    write("b.jsonl", "a/2.jsonl", "a/1.jsonl", "c/d/e.jsonl", ".hidden.json", ".hidden/x.json", "dataset_info.json")
    (tmp_path / "c/up").symlink_to(tmp_path)
    (tmp_path / "e").symlink_to("a")
    (tmp_path / "a.png").write_bytes(b"")
    named = ["a/1.jsonl", "a/2.jsonl", "b.jsonl", "c/d/e.jsonl"]
    for _ in range(2):  # with our own files there the second time
        assert [record["id"] for record in load_records(str(tmp_path), str(tmp_path / "cache"))] == named
    assert [record["id"] for record in load_records(f"{tmp_path}/a/**")] == named[:2]
    (tmp_path / "e").unlink()
    for name, message in (
        ("b.parquet", "1 Parquet files and 4 of JSON, which may be"),
        ("b.csv", "b.csv would not"),
    ):
        write(name)
        with pytest.raises(DataError, match=f"^{tmp_path}: .*{message}"):
            load_records(str(tmp_path))
        (tmp_path / name).unlink()


def test_cut_counts_after_expansion_and_drops_the_images_after_it(dataset, caplog):
    record = {"id": "x", "image": ["0.png", "1.png"], "conversations": turns("<image> and <image>?", "yes")}
    whole = dataset([record])[0]
    first, second = (whole["input_ids"] == IMAGE_TOKEN_INDEX).nonzero().flatten().tolist()
    for limit, images in ((first, 0), (first + 1, 1), (first + V + 1, 1), (second + V, 2)):
        data = dataset([record], model_max_length=limit)
        sample = data[0]
        assert sample.get("images", torch.empty(0)).shape[0] == images
        assert torch.equal(sample["input_ids"], whole["input_ids"][: len(sample["input_ids"])])
        assert data.modality_lengths() == [limit if images else -limit]
    assert "id 'x'" in caplog.text and "--model_max_length" in caplog.text


def test_a_truncated_picture_is_named_and_its_sample_is_left_out_where_the_user_asks(tiny, dataset, tmp_path, caplog):
    """Its header is whole, so that nothing but decoding it shows the damage."""
    images = shutil.copytree(tiny / "data/images", tmp_path / "images")
    for name in ("2.png", "3.png", "4.png"):
        (images / name).write_bytes((images / name).read_bytes()[:-40])
    record = {"id": "cut", "image": "3.png", "conversations": turns("<image>", "yes")}
    data = dataset([record], image_folder=images)
    with pytest.raises(ValueError, match="id 'cut'.*3.png cannot be decoded.*--full_decode"):
        data[0]
    data.leaves_out = True
    sample, whole = data[0], dataset([record])[0]
    assert torch.equal(sample["input_ids"], whole["input_ids"]) and sample["images"].shape == whole["images"].shape
    assert sample["index"] == ~0 and (sample["labels"] == IGNORE_INDEX).all() and len(sample["images"].unique()) == 1
    assert "id 'cut'" in caplog.text and "left out" in caplog.text
    options = {"image_folder": images, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(ValueError, match="png cannot be decoded"):
        train(flags(tiny, tmp_path / "run", 1, **options))
    caplog.clear()
    train(flags(tiny, tmp_path / "run", 1, **options, on_bad_record="skip"))
    assert "left out" in caplog.text
    assert (tmp_path / "run/complete.json").exists()


def test_collator_masks_by_length_even_where_ids_equal_the_padding_id():
    samples = [
        {"input_ids": torch.tensor([0, 5, 0]), "labels": torch.tensor([0, 5, 0]), "images": torch.ones(2, 3, 4, 4)},
        {"input_ids": torch.tensor([7]), "labels": torch.tensor([7])},
    ]
    batch = DataCollatorForSupervisedDataset(pad_token_id=0)(samples)
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["labels"].tolist() == [[0, 5, 0], [7, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch["images"].shape == (2, 3, 4, 4)
    assert "images" not in DataCollatorForSupervisedDataset(0)(samples[1:])


@pytest.mark.parametrize(("size", "window"), [(15, 1), (16, 3)])
def test_sampler_keeps_modalities_apart_and_is_reproducible(size, window):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 500, (203,), generator=generator)
    lengths[torch.rand(203, generator=generator) < 0.3] *= -1
    lengths = lengths.tolist()
    sampler = ModalityLengthGroupedSampler(lengths, global_batch_size=size, seed=3, window=window)
    order = list(sampler)
    assert sorted(order) == list(range(203))
    assert order == list(ModalityLengthGroupedSampler(lengths, size, seed=3, window=window))
    assert order != list(ModalityLengthGroupedSampler(lengths, size, seed=4, window=window))
    sampler.set_epoch(1)
    assert order != list(sampler)
    batches = [order[i : i + size] for i in range(0, 203, size)]
    mixed = [len({lengths[i] > 0 for i in batch}) == 2 for batch in batches]
    images = sum(length > 0 for length in lengths)
    full = images // size + (203 - images) // size
    assert not any(mixed[:full])
    for batch in batches:
        sizes = [abs(lengths[i]) for i in batch]
        assert sizes == sorted(sizes, reverse=True)
