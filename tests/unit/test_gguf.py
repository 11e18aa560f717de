"""llama.cpp's files: read back by other readers they hold the same model; what its graph lacks is refused by name."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from training import flags
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from llava.conversation import get_template
from llava.export.__main__ import main
from llava.export.chat_template import chat_template
from llava.export.gguf_language import pre_tokenizer
from llava.export.gguf_vision import projector_tensors
from llava.model.builder import load_pretrained_model
from llava.model.multimodal_projector.builder import build_vision_projector
from llava.train.train import train


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """A function from a decoder and flags to a trained checkpoint's folder."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(model="llama", norm="none", **options):
        folder = root / "-".join([model, norm, *map(str, options.values())])
        if not folder.exists():
            train(flags(tiny, folder, 2, model=model, norm=norm, max_steps=1, **options))
        return folder

    return make


@pytest.fixture
def export(checkpoint, tmp_path):
    """A function from flags to the readers of the two files and the model that they were written from."""

    def run(model="llama", dtype="f32", **options):
        folder = checkpoint(model, **options)
        assert main(["gguf", "--model-path", str(folder), "--output-dir", str(tmp_path), "--dtype", dtype]) == 0
        readers = [gguf.GGUFReader(tmp_path / f"{name}-{dtype}.gguf") for name in ("model", "mmproj")]
        return *readers, load_pretrained_model(str(folder), None, "llava", device="cpu")[1]

    return run


def value(reader, name):
    return reader.fields[name].contents()


def tensor(reader, name):
    stored = next(t for t in reader.tensors if t.name == name)
    return torch.from_numpy(np.array(stored.data)).reshape(list(reversed(stored.shape.tolist())))


@pytest.mark.parametrize("model", ["llama", "llama_tied", "qwen"])
def test_transformers_reads_the_same_language_model_from_the_file(export, tmp_path, model):
    language, _, ours = export(model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model-f32.gguf", dtype=torch.float32).eval()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    assert ("output.weight" in [t.name for t in language.tensors]) == (model != "llama_tied")


def test_the_vocabulary_keeps_its_order_and_says_which_tokens_are_special(export):
    language, _, ours = export()
    tokenizer = byte_tokenizer()
    words, kinds = value(language, "tokenizer.ggml.tokens"), value(language, "tokenizer.ggml.token_type")
    assert len(words) == len(kinds) == ours.config.vocab_size
    assert all(words[index] == word for word, index in tokenizer.get_vocab().items())
    special = [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    assert special == sorted({tokenizer.bos_token_id, tokenizer.eos_token_id})
    assert set(kinds[len(tokenizer) :]) == {gguf.TokenType.UNUSED}
    assert value(language, "tokenizer.ggml.eot_token_id") == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert value(language, "tokenizer.ggml.add_bos_token") is False
    expected = chat_template(get_template("chatml"), tokenizer, marks_answers=False)
    assert value(language, "tokenizer.chat_template") == expected


def test_the_tower_ends_at_the_selected_layer_and_the_projector_is_whole(export):
    _, vision, ours = export()
    tower, linear = ours.get_vision_tower(), ours.get_model().mm_projector
    assert value(vision, "clip.vision.block_count") == len(tower.layers) == 2
    assert value(vision, "clip.vision.feature_layer") == [2]
    names = {t.name for t in vision.tensors}
    assert not any(name.startswith(("v.blk.2.", "v.post_ln")) for name in names)
    for place in (0, 2):
        for part in ("weight", "bias"):
            assert torch.equal(tensor(vision, f"mm.{place}.{part}"), getattr(linear[place], part))
    embeddings = tower.vision_model.embeddings
    assert torch.equal(tensor(vision, "v.patch_embd.weight"), embeddings.patch_embedding.weight)
    assert torch.equal(tensor(vision, "v.position_embd.weight"), embeddings.position_embedding.weight)
    fc1 = tower.layers[1].mlp.fc1
    assert torch.equal(tensor(vision, "v.blk.1.ffn_up.weight"), fc1.weight)
    assert value(vision, "clip.vision.image_mean") == pytest.approx([0.5] * 3)
    assert value(vision, "clip.use_gelu") is True


@pytest.mark.parametrize(("dtype", "kind"), [("f16", "F16"), ("bf16", "BF16")])
def test_matrices_have_the_requested_type_and_vectors_stay_float32(export, dtype, kind):
    for reader in export(dtype=dtype)[:2]:
        for stored in reader.tensors:
            assert stored.tensor_type.name == (kind if len(stored.shape) > 1 else "F32"), stored.name


def test_a_rotary_embedding_with_scaled_frequencies_comes_with_its_factors(export, checkpoint):
    folder = checkpoint("llama", seed=7)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    language, _, ours = export("llama", seed=7)
    torch.testing.assert_close(tensor(language, "rope_freqs.weight"), torch.full((4,), 4.0))


def yi_graph(features, weights, eps):
    """llama.cpp's projector with two norms, in float32, with the exact GELU."""

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    hidden = norm(features @ weights["mm.0.weight"].T + weights["mm.0.bias"], "mm.1")
    return norm(torch.nn.functional.gelu(hidden) @ weights["mm.3.weight"].T + weights["mm.3.bias"], "mm.4")


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_the_graph_with_two_norms_computes_our_layernorm_at_any_scale(size):
    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=64, mm_hidden_size=24, mm_projector_type="mlp2x_gelu")
    config.mm_projector_norm, config.mm_projector_norm_target = "gwc_layernorm", 2.0
    projector, features = build_vision_projector(config), size * torch.randn(10, 24)
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        weights = projector_tensors(projector, features[:3], eps=1e-6)
        ours = projector(features)
        assert ((yi_graph(features, weights, 1e-6) - ours).norm() / ours.norm()).item() < 5e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "gwc_rmsnorm"}, "the projector ends in gwc_rmsnorm, and llama.cpp's LLaVA graph in a linear layer"),
        ({"tower": "clip"}, "the vision tower is a clip_vision_model"),
        ({"mm_projector_type": "linear"}, "--mm_projector_type linear"),
        ({"image_aspect_ratio": "anyres", "image_grid_pinpoints": "[[16,32]]"}, "image_aspect_ratio=anyres"),
        ({"mm_patch_merge_type": "spatial_unpad"}, "mm_patch_merge_type=spatial_unpad (image_newline"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(checkpoint, tmp_path, capsys, options, message):
    folder = checkpoint(**options)
    assert main(["gguf", "--model-path", str(folder), "--output-dir", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("llava.export gguf: ") and message in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mode", "note"), [("square", "trained on squashed ones"), ("pad", "did with (127, 127, 127)")]
)
def test_what_happens_to_pictures_that_are_not_square_is_reported(checkpoint, tmp_path, capsys, mode, note):
    folder = checkpoint(image_aspect_ratio=mode)
    assert main(["gguf", "--model-path", str(folder), "--output-dir", str(tmp_path)]) == 0
    assert "note: llama.cpp pads pictures to squares" in (printed := capsys.readouterr().out) and note in printed


def test_files_that_are_there_stay_unless_they_may_be_replaced(checkpoint, tmp_path, capsys):
    command = ["gguf", "--model-path", str(checkpoint()), "--output-dir", str(tmp_path), "--dtype", "f32"]
    (tmp_path / "mmproj-f32.gguf").write_text("mine")
    assert main(command) == 2 and "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "mmproj-f32.gguf").read_text() == "mine" and not (tmp_path / "model-f32.gguf").exists()
    assert main([*command, "--overwrite"]) == 0


def test_a_value_that_f16_cannot_hold_is_refused_and_leaves_no_file(checkpoint, tmp_path, capsys, monkeypatch):
    from llava.export import gguf_vision

    taken = gguf_vision.tensors
    monkeypatch.setattr(gguf_vision, "tensors", lambda model: taken(model) | {"mm.0.weight": torch.full((2, 2), 1e6)})
    assert main(["gguf", "--model-path", str(checkpoint()), "--output-dir", str(tmp_path)]) == 2
    assert "mm.0.weight: its largest value, 1e+06, does not fit f16; pass --dtype" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failure_in_the_second_file_leaves_neither(checkpoint, tmp_path, capsys, monkeypatch):
    from llava.export import gguf_language

    monkeypatch.setattr(gguf_language, "tensors", lambda model: {"output.weight": torch.full((2, 2), 1e6)})
    assert main(["gguf", "--model-path", str(checkpoint()), "--output-dir", str(tmp_path)]) == 2
    assert "does not fit f16" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [[], ["--conv-mode", "chatml"]])
def test_stage_1_is_refused_whatever_template_is_given(checkpoint, tmp_path, capsys, flags):
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text()) | {"mm_conv_version": "plain"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["gguf", "--model-path", str(folder), "--output-dir", str(tmp_path), *flags]) == 2
    assert "of stage 1 (template plain), which answers no questions" in capsys.readouterr().err


def test_a_checkpoint_without_a_template_is_exported_with_conv_mode(checkpoint, tmp_path, capsys):
    folder, out = checkpoint("llama", seed=8), tmp_path / "out"
    config = json.loads((folder / "config.json").read_text()) | {"mm_use_im_start_end": True}
    config |= {"image_aspect_ratio": None, "mm_conv_version": None}
    (folder / "config.json").write_text(json.dumps(config))
    command = ["gguf", "--model-path", str(folder), "--output-dir", str(out)]
    assert main(command) == 2 and "name it by --conv-mode" in capsys.readouterr().err
    assert main([*command, "--conv-mode", "chatml"]) == 0
    written = value(gguf.GGUFReader(out / "model-f16.gguf"), "tokenizer.chat_template")
    template = get_template("chatml")
    assert written == chat_template(template, byte_tokenizer(), mm_use_im_start_end=True, marks_answers=False)


def with_steps(*steps, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], **model))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_tokenizer_is_known_by_how_it_cuts_text():
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert pre_tokenizer(byte_tokenizer()) == "gpt-2"
    assert pre_tokenizer(with_steps(pre_tokenizers.Digits(individual_digits=True), words)) == "smollm"
    for step in (pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=True)):
        with pytest.raises(ValueError, match="none of those that were compared with llama.cpp: smollm, gpt-2"):
            pre_tokenizer(with_steps(step))
    for options in ({"ignore_merges": True}, {"normalizer": normalizers.Lowercase()}):
        with pytest.raises(ValueError, match="none of those"):
            pre_tokenizer(with_steps(words, **options))
