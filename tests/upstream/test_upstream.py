"""LLaVA 1.2.2.post1 from PyPI, in an environment of its own, against this tree: same losses, norms and checkpoints."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from upstream_package import unpacked_package
from warm_python import warm_python

INPUTS = ROOT / "tests/golden/train/inputs"
VENV = Path(os.environ.get("UPSTREAM_VENV", ROOT / ".venv-upstream"))
ARMS, STAGES = ["none", "layernorm", "gwc_layernorm"], ["pretrain", "finetune"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.slow


def run(command, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT, env=ENV | env, timeout=3000
    )


def upstream(*words) -> subprocess.CompletedProcess:
    """Runs a Python file in upstream's environment, on the patched tree."""
    return run([VENV / "bin/python", *words], PYTHONPATH=str(VENV / "patched"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def apply(tree: Path, *options: str) -> subprocess.CompletedProcess:
    return run([sys.executable, "patches/apply.py", tree, *options])


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The unpacked package as PyPI has it."""
    return unpacked_package(tmp_path_factory.mktemp("package") / "tree")


@pytest.fixture(scope="module")
def baseline(package, tmp_path_factory):
    """What `scripts/upstream_baseline.sh` printed, and the folder with its numbers and checkpoints."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        pytest.skip("upstream's tokenizers 0.15.1 has wheels for Python 3.10 to 3.12 only")
    folder = tmp_path_factory.mktemp("baseline")
    python = {"LLAVA_PYTHON": str(warm_python()), "PYTHON": sys.executable}
    done = run(["bash", "scripts/upstream_baseline.sh"], OUTPUT_DIR=str(folder), **python)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout, folder


@pytest.fixture(scope="module")
def numbers(baseline):
    return json.loads((baseline[1] / "comparison.json").read_text())


def tree_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def test_the_package_is_recognised_patched_and_reversed_to_the_byte(package):
    before = tree_hash(package)
    assert "not applied" in apply(package, "--check").stdout
    assert apply(package).returncode == 0
    assert tree_hash(package) != before
    assert apply(package, "--check").returncode == 0
    assert apply(package, "--reverse").returncode == 0
    assert tree_hash(package) == before


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arm", ARMS)
def test_losses_follow_upstreams(numbers, arm, stage):
    result = numbers["arms"][arm][stage]
    assert len(result["ours"]) == 20
    assert result["ours"] == pytest.approx(result["upstream"], abs=1e-4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arm", ["layernorm", "gwc_layernorm"])
def test_final_norm_and_measured_target_equal_upstreams(numbers, arm, stage):
    result = numbers["arms"][arm][stage]
    assert result["largest_norm_difference"].keys() == {"weight", "bias"}
    assert max(result["largest_norm_difference"].values()) < 1e-6 < result["largest_norm_value"]["bias"]
    assert result["norm_target"][0] == pytest.approx(result["norm_target"][1], rel=1e-6)


def test_the_arms_differ_by_more_than_the_tolerance(numbers):
    """Otherwise equal losses would not show that both trees have the norm, or the compensation."""
    last = [numbers["arms"][arm]["pretrain"]["upstream"][-1] for arm in ARMS]
    assert min(abs(a - b) for a, b in [last[:2], last[1:], last[::2]]) > 1e-3


def test_unpatched_and_patched_none_are_equal_to_the_bit(numbers):
    assert numbers["unpatched_equals_patched_none"] is True


def test_both_columns_and_the_largest_difference_are_printed(baseline, numbers):
    for arm in ARMS:
        for stage in STAGES:
            result = numbers["arms"][arm][stage]
            block = baseline[0].split(f"\n{arm}, {stage}\n")[1]
            first = block.splitlines()[1].split()
            assert [float(x) for x in first[1:3]] == pytest.approx([result["upstream"][0], result["ours"][0]], abs=1e-6)
            assert f"largest difference {result['largest_loss_difference']:.1e}" in block


LOAD = """
import sys, torch
from pathlib import Path
from llava.model.builder import load_pretrained_model
result, *paths = sys.argv[1:]
loaded = {}
for path in paths:
    tokenizer, model, _, _ = load_pretrained_model(path, None, "llava", device="cpu", device_map="cpu")
    model.float().get_vision_tower().float()
    images = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 5, 9, -200, 44, 60, 7]]), images=images).logits
    ids = tokenizer("USER: hi  there ASSISTANT: a cat</s>USER: ").input_ids
    loaded[path] = {"logits": logits, "ids": ids, "projector": model.get_model().mm_projector.state_dict()}
torch.save(loaded, result)
"""
CHECKPOINTS = [f"{writer}/{arm}/finetune" for writer in ("patched", "ours") for arm in ("none", "gwc_layernorm")]


@pytest.fixture(scope="module")
def loaded(baseline, tmp_path_factory):
    """What each tree's `load_pretrained_model` makes of the checkpoints of both."""
    folder = tmp_path_factory.mktemp("loaded")
    script, paths = write(folder / "load.py", LOAD), [baseline[1] / name for name in CHECKPOINTS]
    for done in (
        upstream(script, folder / "upstream.pt", *paths),
        run([warm_python(), script, folder / "ours.pt", *paths], PYTHONPATH=str(ROOT)),
    ):
        assert done.returncode == 0, done.stderr[-3000:]
    return [list(torch.load(folder / name).values()) for name in ("upstream.pt", "ours.pt")]


@pytest.mark.parametrize("index", range(len(CHECKPOINTS)), ids=CHECKPOINTS)
def test_both_trees_load_the_others_checkpoints(loaded, index):
    theirs, mine = (reader[index] for reader in loaded)
    assert theirs["ids"] == mine["ids"]
    torch.testing.assert_close(theirs["logits"], mine["logits"], rtol=0, atol=5e-3)  # upstream loads in fp16
    assert theirs["projector"].keys() == mine["projector"].keys()
    assert ("3.weight" in mine["projector"]) == ("gwc" in CHECKPOINTS[index])
    for name, tensor in mine["projector"].items():
        assert torch.equal(theirs["projector"][name], tensor.half().float()), name


def pretrain_flags(output: Path, **flags) -> list[str]:
    values = {"output_dir": output, "model_name_or_path": INPUTS / "llama", "vision_tower": INPUTS / "clip"}
    values |= {"data_path": INPUTS / "stage1.json", "image_folder": INPUTS / "img", "version": "plain", "max_steps": 2}
    values |= {"mm_projector_type": "mlp2x_gelu", "mm_vision_select_layer": -2, "mm_use_im_patch_token": False}
    values |= {"tune_mm_mlp_adapter": True, "learning_rate": 1e-2, "report_to": "none", "lazy_preprocess": True}
    return [word for key, value in (values | flags).items() for word in (f"--{key}", str(value))]


def train_upstream(tmp_path: Path, *runs: list[str]) -> subprocess.CompletedProcess:
    (tmp_path / "runs.json").write_text(json.dumps([{"argv": argv, "record": str(tmp_path)} for argv in runs]))
    return upstream("patches/baseline/record.py", tmp_path / "runs.json")


def test_a_norm_that_is_not_learnable_stays_as_it_was(baseline, tmp_path):
    flags = {"mm_projector_norm": "layernorm", "mm_projector_norm_learnable": False, "mm_projector_norm_init": 1.5}
    done = train_upstream(tmp_path, pretrain_flags(tmp_path / "run", **flags))
    assert done.returncode == 0, done.stderr[-3000:]
    initial = torch.load(tmp_path / "initial/mm_projector.bin")
    final = torch.load(tmp_path / "run/mm_projector.bin")
    assert torch.equal(final["model.mm_projector.3.weight"], torch.full((64,), 1.5 / 64**0.5))
    assert not torch.equal(final["model.mm_projector.2.weight"], initial["model.mm_projector.2.weight"])


def test_patched_upstream_refuses_an_adapter_with_another_norm(baseline, tmp_path):
    adapter = baseline[1] / "ours/gwc_layernorm/pretrain/mm_projector.bin"
    flags = {"mm_projector_norm": "layernorm", "pretrain_mm_mlp_adapter": adapter}
    done = train_upstream(tmp_path, pretrain_flags(tmp_path / "run", **flags))
    assert done.returncode and "adapter 'gwc_layernorm' (its config.json), flags 'layernorm'" in done.stderr


def test_patched_upstream_refuses_a_norm_for_a_model_with_a_projector(baseline, tmp_path):
    flags = {"mm_projector_norm": "layernorm", "model_name_or_path": baseline[1] / "patched/none/finetune"}
    done = train_upstream(tmp_path, pretrain_flags(tmp_path / "run", **flags))
    assert done.returncode and "has mm_projector_norm=none" in done.stderr


DECAYED = """
from types import SimpleNamespace
from transformers.trainer import ALL_LAYERNORM_LAYERS, get_parameter_names
from llava.model.multimodal_projector.builder import build_vision_projector
for norm in ("layernorm", "gwc_layernorm", "rmsnorm", "gwc_rmsnorm"):
    config = SimpleNamespace(mm_projector_type="mlp2x_gelu", mm_hidden_size=4, hidden_size=6,
                             mm_projector_norm=norm, mm_projector_norm_target=3.0)
    names = get_parameter_names(build_vision_projector(config), ALL_LAYERNORM_LAYERS)
    print(sorted(name for name in names if "bias" not in name))
"""


def test_weight_decay_leaves_the_norms_gain_alone_in_patched_upstream(baseline, tmp_path):
    done = upstream(write(tmp_path / "decayed.py", DECAYED))
    assert done.stdout.splitlines() == ["['0.weight', '2.weight']"] * 4, done.stderr[-2000:]
