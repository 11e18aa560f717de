"""Models whose code is in their repositories: how they are built and filled, and what is refused."""

import shutil

import own_code_models as own
import pytest
import torch
from analysis_commands import arguments
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llava.analysis import models as loading
from llava.analysis.commands import NamedModel
from llava.analysis.remote_code import load_remote


@pytest.fixture(scope="module")
def ovis(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code") / "ovis"
    return folder, own.write_ovis2_5(folder)


def test_every_weight_is_the_files_and_buffers_that_no_file_holds_are_kept(ovis):
    folder, written = ovis
    model = load_remote(str(folder), AutoModelForCausalLM, "cpu", "auto")
    assert not model.training
    assert all(torch.equal(tensor, written.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert model.indicator_token_indices.tolist() == [36, 37, 38, 39]
    rotary = model.llm.model.rotary_emb.inv_freq
    assert torch.equal(rotary, written.llm.model.rotary_emb.inv_freq) and rotary[0] == 1


def test_a_tied_head_is_filled_by_either_name(ovis, tmp_path):
    folder = shutil.copytree(ovis[0], tmp_path / "tied")
    config = (folder / "config.json").read_text()
    tied = config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    assert tied != config
    (folder / "config.json").write_text(tied)
    weights = load_file(folder / "model.safetensors")
    del weights["llm.lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    llm = load_remote(str(folder), AutoModelForCausalLM, "cpu", "float32").llm
    assert torch.equal(llm.lm_head.weight, weights["llm.model.embed_tokens.weight"])


def test_weights_that_do_not_fit_the_code_are_refused(ovis, tmp_path):
    folder = shutil.copytree(ovis[0], tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    for tensor, message in (
        (torch.zeros(41, 32), r"vte.weight has the shape \(41, 32\)"),
        (None, "lack 1 .*vte.weight"),
    ):
        changed = {name: t for name, t in (weights | {"vte.weight": tensor}).items() if t is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_remote(str(folder), AutoModelForCausalLM, "cpu", "auto")


def test_code_does_not_run_unless_it_is_trusted(ovis):
    with pytest.raises(ValueError, match=r"needs its own code \(.*ovis2_5.py.*--trust-remote-code"):
        loading.load(NamedModel("ovis", str(ovis[0])), arguments("update-rates"))
