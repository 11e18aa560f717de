"""Compiled layers and Liger's kernels compute what the plain layers compute."""

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import IMG, batch, loss_and_gradients
from decoder_families import NAMES, write_families
from pairwise import pairwise
from paths import ROOT
from tiny_models import STAGE_1, STAGE_2, trained
from torch.nn import functional as F
from training import flags
from transformers import modeling_flash_attention_utils as flash
from triton_interpreter import let_triton_interpret
from varlen_stubs import VARLENS, attend, use_varlen

from llava.model import attention
from llava.model.attention import SEGMENTS, packed_attention
from llava.model.language_model.families import DECODERS
from llava.train import kernels
from llava.train import train as train_module
from llava.train.kernels import _FORWARD_CHECKPOINTS, compile_layers

CPU = torch.device("cpu")
ROWS = {
    "image and text": [[5, IMG, 6, 7], [8, 9, 10, 11]],
    "one sample": [[5, IMG, 6, 7]],
    "three samples, two images": [[1, 2, 3], [5, 6, 7, 8, 9], [IMG, 5, IMG, 6]],
    "text alone": [[5, 6, 7]],
    "long": [[7] * 40, [IMG, IMG, IMG, 5, 5, 5]],
}


def results(model, names=ROWS, backend: str = "sdpa") -> list:
    return [loss_and_gradients(model, True, backend, **batch(ROWS[name])) for name in names]


def assert_same(results, expected, atol=1e-5):
    for (loss, gradients), (expected_loss, expected_gradients) in zip(results, expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=atol)
        assert gradients.keys() == expected_gradients.keys()
        for name in gradients:
            torch.testing.assert_close(gradients[name], expected_gradients[name], rtol=0, atol=atol, msg=name)


def layers_of(model) -> list[torch.nn.Module]:
    return [*model.get_model().layers, *model.get_vision_tower().layers]


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones_with_few_compilations(tiny):
    """Whatever the lengths, images and samples; and with either kind of recomputation."""
    model = trained(tiny, STAGE_2)
    expected = results(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(layers_of(model), backend="eager")
    assert_same(results(model), expected)
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 4  # decoder: one or several samples; tower: one or several images
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    for use_reentrant in (True, False):
        enable({"use_reentrant": use_reentrant})
        assert_same(results(model), expected)
    # Reentrant recomputation runs the layers without gradients first.
    assert stats["unique_graphs"] == (8 if _FORWARD_CHECKPOINTS else 10)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_inductor_equals_eager_within_bf16_tolerance(tiny):
    model = trained(tiny, STAGE_1)
    model.get_vision_tower().num_layers_used = 0  # compiling its layers as well would take as long again
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = results(model, ["image and text"])
        torch._dynamo.reset()
        compile_layers(layers_of(model))
        assert_same(results(model, ["image and text"]), expected, atol=2e-2)


def test_compiled_layers_take_a_backend_that_is_compiled_once():
    assert packed_attention(None, CPU, torch.float32, compiled=True) == "sdpa"
    assert packed_attention(None, CPU, torch.float32) == SEGMENTS


def test_a_cpu_attends_over_packed_samples_in_fp32_also_under_autocast():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    parts = [x.float().split([5, 7], dim=2) for x in (query, key, value)]
    samples = zip(*parts, strict=True)
    expected = [F.scaled_dot_product_attention(*sample, is_causal=True, enable_gqa=True) for sample in samples]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attention.segments_attention(None, query, key, value, None, segment_lengths=[5, 7])
    assert torch.equal(output, torch.cat(expected, dim=2).transpose(1, 2).bfloat16())


# --- what kernels that need a GPU are given --------------------------------------------------------------------------


def flash_attention_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Stands for flash_attn 2.8's `flash_attn_varlen_func`."""
    assert causal and dropout_p == 0 and window_size == (-1, -1)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


def flash_attention_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """Stands for flash_attn_interface's of FlashAttention 3, which knows no dropout."""
    assert causal and window_size == (-1, -1)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


def flash_attention_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, return_lse=False,
):  # fmt: skip
    """Stands for that of flash-attn-4 4.0.0b36, which knows no dropout and has `qv` in the fourth place."""
    assert causal and window_size == (None, None) and qv is None
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


def backend_of(kernel, monkeypatch, calls: list[str]) -> str:
    """The backend that a GPU with this kernel gets; each call goes to the kernel's stub, and its name into `calls`."""

    @functools.wraps(kernel)
    def counted(*args, **kwargs):
        calls.append(kernel.__name__)
        return kernel(*args, **kwargs)

    if kernel in VARLENS:
        use_varlen(monkeypatch, counted)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: (None, counted, None, None, None))
    for name in ("_loaded_implementation", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash, name, None)
    monkeypatch.setattr(attention, "installed_flash", lambda: None if kernel in VARLENS else kernel.__name__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    return packed_attention(None, torch.device("cuda"), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language_model", "autocast", "kernel"),
    pairwise(("llama", "qwen"), (False, True), (*VARLENS, flash_attention_2, flash_attention_3, flash_attention_4)),
)
def test_a_gpus_kernel_is_called_with_one_half_precision_and_arguments_that_it_has(
    tiny, monkeypatch, kernel, autocast, language_model
):
    """Also under autocast, where rotary positions make queries and keys fp32; results are plain attention's."""
    calls = []
    backend = backend_of(kernel, monkeypatch, calls)
    model = trained(tiny, STAGE_2, language_model=language_model)
    if not autocast:
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = results(model, backend=SEGMENTS)
        assert_same(results(model, backend=backend), expected, atol=2e-2)
    assert calls == [kernel.__name__] * 2 * len(ROWS)  # and no attention with a mask over all pairs of tokens


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), "234", "flash_attention_4"),
        ((10, 0), "234", "flash_attention_4"),
        ((9, 0), "23", "flash_attention_3"),
        ((10, 0), "23", "flash_attention_2"),
        ((12, 0), "34", None),
        ((8, 6), "234", "flash_attention_2"),
        ((7, 5), "234", None),
    ],
)
def test_only_a_flash_attention_with_kernels_for_the_gpu_is_chosen(monkeypatch, capability, installed, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for version in "234":
        monkeypatch.setattr(
            attention, f"is_flash_attn_{version}_available", lambda version=version: version in installed
        )
    assert attention.installed_flash() == chosen


# --- Liger ------------------------------------------------------------------------------------------------------------


def test_liger_without_gpu_or_package_is_refused(tiny, tmp_path, monkeypatch):
    needed = "--use_liger_kernel True needs an NVIDIA GPU, liger-kernel "
    with pytest.raises(ValueError, match=needed):
        train_module.train(flags(tiny, tmp_path, 1, use_liger_kernel=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "has_liger", lambda: False)
    with pytest.raises(ValueError, match=needed):
        kernels.check_kernels(SimpleNamespace(use_liger_kernel=True, compile_layers="auto"))


@pytest.mark.parametrize(
    ("gpu", "installed", "known", "runs"),
    [(False, True, True, False), (True, False, True, False), (True, True, False, False), (True, True, True, True)],
)
def test_auto_takes_liger_where_it_runs(tiny, monkeypatch, gpu, installed, known, runs):
    applied = []
    fake = SimpleNamespace(**({"apply_liger_kernel_to_llama": print} if known else {}))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=fake))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(kernels, "has_liger", lambda: installed)
    monkeypatch.setattr(kernels, "has_compiler", lambda: True)
    monkeypatch.setattr(kernels, "apply_liger", applied.append)
    model = trained(tiny, STAGE_1)
    args = SimpleNamespace(use_liger_kernel="auto", compile_layers=False)
    kernels.set_up_kernels(model, args)
    assert args.use_liger_kernel is runs and applied == [model] * runs


@pytest.mark.parametrize("name", NAMES)
def test_liger_is_applied_to_the_decoder_of_every_family(tiny, monkeypatch, name):
    calls = {}

    def function(plain_type):
        def swiglu(*, model, rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy):
            calls.update(vars(), type=plain_type)

        def geglu(*, model, rope, rms_norm, geglu, cross_entropy, fused_linear_cross_entropy):
            calls.update(vars(), type=plain_type)

        return geglu if plain_type.startswith("gemma") else swiglu

    types = [family.config.model_type for family in DECODERS]
    fake = SimpleNamespace(**{f"apply_liger_kernel_to_{plain_type}": function(plain_type) for plain_type in types})
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=fake))
    model = trained(write_families(tiny), STAGE_1, language_model=f"families/{name}")
    kernels.apply_liger(model)
    assert calls["model"] is model.get_model()
    assert calls["type"] == types[NAMES.index(name)]
    assert calls["rope"] == (name != "Phi3")  # the tiny Phi-3 rotates half of each head, which Liger does not know
    assert calls["rms_norm"] and (calls.get("swiglu") or calls.get("geglu"))
    assert not calls["cross_entropy"] and not calls["fused_linear_cross_entropy"]
    delattr(fake, f"apply_liger_kernel_to_{calls['type']}")
    with pytest.raises(ValueError, match=f"--use_liger_kernel: Liger has no kernels for {calls['type']} decoders"):
        kernels.apply_liger(model)


def compare_liger(folder: str) -> None:
    """Runs in a process of its own, where Triton interprets its kernels on the CPU."""
    let_triton_interpret()
    tiny = write_families(Path(folder))
    for name in NAMES:
        for parts in (STAGE_1, STAGE_2) if name == NAMES[0] else (STAGE_2,):
            model = trained(tiny, parts, language_model=f"families/{name}")
            expected = results(model, ["image and text"], SEGMENTS)
            kernels.apply_liger(model)
            layers = repr(model.get_model().layers)
            assert "LigerRMSNorm" in layers and re.search("Liger(Phi3SwiGLU|SwiGLU|GEGLU)MLP", layers)
            assert_same(results(model, ["image and text"], SEGMENTS), expected)
            nothing = batch([[5, 6, 7]])
            nothing["labels"].fill_(-100)
            assert loss_and_gradients(model, True, SEGMENTS, **nothing)[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("liger_kernel") or not find_spec("triton"), reason="needs liger-kernel and triton")
def test_ligers_kernels_equal_the_plain_layers(tiny):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}"}
    command = [sys.executable, __file__, str(tiny)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_liger(sys.argv[1])
