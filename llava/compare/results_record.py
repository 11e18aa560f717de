"""The results that the pages state: `results.json`, with an entry for each run folder whose scores were read.

    kind                    quickstart, comparison, evaluation (of one checkpoint) or study
    preset, arms, seeds     what was trained, on which `data`, for how many `steps`; `changed` lists flags that differ
                            from the preset's
    scores                  per arm and task [percent, low, high]; `overall` names the one over all `tasks`
    differences             per arm and task [points, low, high, verdict] against the baseline
    norms                   per arm, mean norms of visual and of text tokens at the end, first seed
    command, machine, commit, date    how, where and when it was made
    files                   SHA-256 of the records and scores that the entry was read from, by run
    digest                  SHA-256 of all of the above

A result that is missing or doubled, and an entry or a score that was edited, are refused.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from llava.compare.arms import BASELINE, parse_arm, parse_seeds
from llava.compare.paper import ARMS
from llava.compare.runs import ABSENT
from llava.compare.study_record import FILE as STUDY_FILE
from llava.eval.tasks import GROUPS
from llava.launch.recipe import STAGES
from llava.model.multimodal_projector.norm import ProjectorNormArguments
from llava.utils.digests import bytes_digest
from llava.utils.files import write_text

FILE, FORMAT = "results.json", 1
QUICKSTART, COMPARISON, EVALUATION, STUDY = "quickstart", "comparison", "evaluation", "study"
PAPER = "paper"  # the group of tasks that evaluate.sh takes by default
SEED = parse_seeds("1")[0]  # the recipes'
ALIGNED = ProjectorNormArguments.mm_projector_norm_init  # what an arm without @ starts from
PARTS = (
    "kind", "preset", "arms", "seeds", "data", "steps", "changed", "tasks", "overall", "scores", "differences", "norms",
    "command", "machine", "commit", "date", "files",
)  # fmt: skip
"""What an entry has besides its digest."""
Entry = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What fills the rows of a recipe.

    Attributes:
        arms: a row for each.
        group: the tasks, a name of `GROUPS`.
        flags: of both stages, besides the preset's.
        about: a sentence in Markdown.
    """

    arms: tuple[str, ...] = tuple(ARMS)
    group: str = PAPER
    flags: tuple[str, ...] = ()
    about: str = "For [one card](recipe.md#one-card), or more."

    @property
    def tasks(self) -> tuple[str, ...]:
        return GROUPS[self.group]

    @property
    def evaluate(self) -> str:
        """The command that scores a checkpoint on all of the tasks, without the checkpoint."""
        return f"{'' if self.group == PAPER else f'TASKS={self.group} '}bash scripts/evaluate.sh"


RECIPES = {
    "llama-3.2-3b": Rows(about="The paper's recipe and its Table 4."),
    "qwen2.5-7b": Rows(about="The paper's recipe and its Table 4."),
    "llava-1.5-7b": Rows(
        (BASELINE,),
        "llava-1.5",
        ("--loss_reduction", "micro_batch_mean"),
        "LLaVA's recipe; [recipe.md](recipe.md#llava-15) has its published scores.",
    ),
    "nano": Rows(),
    "0.5b": Rows(),
    "1.5b": Rows(),
    "3b-qwen": Rows(),
}
"""The presets whose results have rows of their own, filled or open."""


def row_commands(preset: str, arm: str, seed: int = SEED) -> list[str]:
    """The commands that fill the row of an arm: both stages, the evaluation, the page."""
    rows, parsed = RECIPES[preset], parse_arm(arm)
    name = f"checkpoints/{preset}-{parsed.norm}-finetune"
    settings = {"PRESET": preset} | parsed.settings | {"SEED": str(seed) if seed != SEED else ""}
    if parsed.init == ALIGNED:
        settings["NORM_INIT"] = ""
    variables = " ".join(f"{variable}={value}" for variable, value in settings.items() if value)
    trained = [" ".join([variables, f"bash scripts/{stage}.sh", *rows.flags]) for stage in STAGES]
    return [*trained, f"{rows.evaluate} {name}", f"python -m llava.compare page --docs outputs/eval/{name}"]


# --- the file ---------------------------------------------------------------------------------------------------------


def digest_of(entry: Mapping[str, Any]) -> str:
    """SHA-256 of an entry without its digest."""
    content = {name: value for name, value in entry.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def title_of(entry: Entry) -> str:
    """What an entry is called in tables and messages."""
    on = " and ".join(entry["data"])
    return f"{entry['kind']}, {entry['preset']}{f' on {on}' if on else ''}: {', '.join(entry['arms'])}"


def read_entries(docs: Path) -> list[Entry]:
    """The entries of `results.json` in the folder `docs`; none without the file.

    Raises:
        ValueError: not such a file; an entry was edited, or a result is doubled.
    """
    path = docs / FILE
    restore = f"restore {path} from the repository, or add the run folder again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content["results"] if content["format"] == FORMAT else None
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of results ({error!r}); {restore}") from error
    if entries is None:
        raise ValueError(f"{path}: format {content['format']!r}, expected {FORMAT}; {restore}")
    for entry in entries:
        if entry.get("digest") != (now := digest_of(entry)):
            name = title_of(entry) if entry.keys() >= {"kind", "preset", "data", "arms"} else "an entry"
            raise ValueError(f"{path}: {name} was edited: digest {entry.get('digest')}, content {now}; {restore}")
    for first, second in combinations(entries, 2):
        if shared := shared_runs(first, second):
            raise ValueError(f"{path}: {listed(shared)} is in {title_of(first)} and in {title_of(second)}; {restore}")
    return entries


def check_study(entry: Entry, study: Path) -> None:
    """Raises ValueError unless the study next to the results is the one that the entry was read from."""
    recorded = entry["files"][STUDY][STUDY_FILE]
    now = bytes_digest(study) if study.is_file() else ABSENT
    if now != recorded:
        raise ValueError(
            f"{study}: digest {now}, but the result {title_of(entry)} was read from {recorded}; restore it from the "
            "repository, or pass the study's folder"
        )


def write_entries(entries: Sequence[Entry], docs: Path) -> Path:
    """Writes `results.json`, a line for each part of an entry; returns its path."""
    dense = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    parts = (",\n".join(f"{dense(name)}: {dense(part)}" for name, part in entry.items()) for entry in entries)
    results = ",\n".join(f"{{\n{part}\n}}" for part in parts)
    path = docs / FILE
    write_text(path, f'{{"format": {FORMAT}, "results": [\n{results}\n]}}\n')
    return path


def with_entries(entries: Sequence[Entry], new: Mapping[Path, Entry]) -> list[Entry]:
    """The entries, in which those of new folders replace entries of the same runs, or of some of them.

    Raises:
        ValueError: two folders, or a folder and an entry that has other runs too, have the same run.
    """
    for (first, one), (second, other) in combinations(new.items(), 2):
        if shared := shared_runs(one, other):
            raise ValueError(
                f"{first} and {second} have the same result: {listed(shared)}; name one of the two folders"
            )
    merged = list(entries)
    for folder, entry in new.items():
        for old in entries:
            shared = shared_runs(old, entry)
            if shared and not results_in(old) <= results_in(entry):
                raise ValueError(
                    f"{folder}: {listed(shared)} is already in the result {title_of(old)}, which has others too; name "
                    f"the folder that has all of them, or remove that entry from {FILE}"
                )
        kept = [old for old in merged if not shared_runs(old, entry)]
        place = next((i for i, old in enumerate(merged) if shared_runs(old, entry)), len(kept))
        merged = [*kept[:place], entry, *kept[place:]]
    return merged


def results_in(entry: Entry) -> set[str]:
    """The results that an entry states: one for each arm and seed, and the page's only study."""
    if entry["kind"] == STUDY:
        return {STUDY}
    kind = COMPARISON if entry["kind"] == EVALUATION else entry["kind"]
    where = f"{kind}, {entry['preset']}"
    if not fills_rows(entry):  # elsewhere data and steps are the caller's choice
        where += f" on {' and '.join(entry['data'])}, {' + '.join(map(str, entry['steps'].values()))} steps"
    return {f"{where}, {arm}, seed {seed}" for arm in entry["arms"] for seed in entry["seeds"]}


def shared_runs(first: Entry, second: Entry) -> set[str]:
    """The results that two entries state both, or the files that both were read from."""
    one, other = (
        {digest: f"{run}/{name}" for run, files in entry["files"].items() for name, digest in files.items()}
        for entry in (first, second)
    )
    return (results_in(first) & results_in(second)) or {one[digest] for digest in one.keys() & other.keys()}


def fills_rows(entry: Entry) -> bool:
    """Whether the entry belongs to the rows of a recipe."""
    return entry["kind"] in (COMPARISON, EVALUATION) and entry["preset"] in RECIPES


def listed(names: set[str]) -> str:
    return "; ".join(sorted(names))
