"""`results.md`: the scores of finished runs, and open rows with the commands that fill them, from `results.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llava.compare import paper, report_tables
from llava.compare.report import markdown_text, render
from llava.compare.report_tables import TITLES
from llava.compare.results_folders import entry_of
from llava.compare.results_record import (
    RECIPES,
    STUDY,
    Entry,
    check_study,
    fills_rows,
    read_entries,
    row_commands,
    with_entries,
    write_entries,
)
from llava.compare.study_page import DOCS_PAGE, write_docs
from llava.compare.study_record import FILE as STUDY_FILE
from llava.compare.study_record import read_record
from llava.eval.paired import MEAN
from llava.launch.devices import count_of
from llava.utils.files import write_text

PAGE = "results.md"
OPEN = "open"
MANY = 6  # arms of a result; of more, the page shows the paper's
DIFFERENCE = "minus none, points (interval)"


def publish(folders: Sequence[Path], docs: Path) -> list[Path]:
    """Adds the results of finished run folders to the pages in `docs`, or replaces them; returns the written files.

    Nothing is written unless every folder has a result that may be added.

    Raises:
        ValueError: a result is missing, doubled or edited.
    """
    if twice := [str(folder) for folder in dict.fromkeys(folders) if folders.count(folder) > 1]:
        raise ValueError(f"{', '.join(twice)}: named twice; name each folder once")
    new = {folder: entry_of(folder) for folder in folders}
    entries = with_entries(read_entries(docs), new)
    for entry in entries:
        if entry["kind"] == STUDY and entry not in new.values():
            check_study(entry, docs / STUDY_FILE)
    studies = [read_record(folder) for folder, entry in new.items() if entry["kind"] == STUDY]
    written = [path for study in studies for path in write_docs(study, docs)]
    page = docs / PAGE
    write_text(page, page_text(entries))
    return [*written, write_entries(entries, docs), page]


def page_text(entries: Sequence[Entry]) -> str:
    """The page."""
    text = render(
        "results.md.jinja",
        small=[row for entry in entries if not fills_rows(entry) for row in small_rows(entry)],
        left_out=[sentence for entry in entries if (sentence := left_out(entry))],
        recipes=[recipe(preset, entries) for preset in RECIPES],
        made=[made(entry) for entry in entries],
    )
    return text.strip() + "\n"


# --- rows -------------------------------------------------------------------------------------------------------------


def name_of(entry: Entry) -> str:
    """What an entry is called on the page; with its seeds."""
    seeds = ", ".join(map(str, entry["seeds"]))
    on = f"{entry['preset']}, {', '.join(entry['arms'])}" if fills_rows(entry) else ", ".join(entry["data"])
    return f"{entry['kind']} on {on}; seed{'s' if len(entry['seeds']) > 1 else ''} {seeds}"


def shown_arms(entry: Entry) -> list[str]:
    """All arms, or of many the paper's."""
    return [arm for arm in entry["arms"] if len(entry["arms"]) <= MANY or arm in paper.ARMS]


def small_rows(entry: Entry) -> report_tables.Rows:
    """A row for each shown arm, with the score over all tasks."""
    overall, rows = entry["overall"], []
    for arm in shown_arms(entry):
        row = {"result": name_of(entry), "arm": arm, "right, % (95 % interval)": score(entry["scores"][arm][overall])}
        row |= {"chance": f"{chance(entry):.1f}", DIFFERENCE: difference(entry, arm)}
        norms = entry["norms"][arm]
        rows.append(row | {f"{kind} token norm": f"{norms[kind]:.3g}" for kind in norms if norms[kind] is not None})
    return rows


def left_out(entry: Entry) -> str:
    """What the table leaves out of an entry with many arms; nothing for others."""
    count = len(entry["arms"]) - len(shown_arms(entry))
    if not count:
        return ""
    where = f"[{DOCS_PAGE}]({DOCS_PAGE}) has" if entry["kind"] == STUDY else "its own page has"
    together = "; all its intervals hold together" if entry["kind"] == STUDY else ""
    return Markup(f"{markdown_text(name_of(entry))}: {where} {count_of(count, 'more arm')}{together}.")


def chance(entry: Entry) -> float:
    """Percent that guessing reaches over all tasks: over their questions, or over tasks where the score is a mean."""
    tasks = entry["tasks"].values()
    weights = [1 if entry["overall"] == MEAN else task["questions"] for task in tasks]
    return sum(w * (task["chance"] or 0.0) for w, task in zip(weights, tasks, strict=True)) / sum(weights)


def score(values: Sequence[float | None]) -> str:
    """Percent with the interval where there is one."""
    percent, low, high = values
    return f"{percent:.1f}" if low is None else f"{percent:.1f} ({low:.0f} to {high:.0f})"


def difference(entry: Entry, arm: str) -> str:
    """Points over all tasks against the baseline, with verdict; nothing for the baseline."""
    if arm not in entry["differences"]:
        return ""
    points, low, high, verdict = entry["differences"][arm][entry["overall"]]
    return f"{points:+.1f} ({low:+.1f} to {high:+.1f}), {verdict}"


def made(entry: Entry) -> dict[str, Any]:
    """How, where and when an entry was made."""
    row: dict[str, Any] = {"result": name_of(entry)}
    row["commands"] = Markup("<br>".join(f"`{line}`" for line in entry["command"]))
    row["steps"] = " + ".join(map(str, entry["steps"].values()))
    if entry["changed"]:
        row["other flags than the preset's"] = "; ".join(
            f"{stage}: {flag} {now}, not {usual}"
            for stage, flags in entry["changed"].items()
            for flag, (usual, now) in flags.items()
        )
    row["machine"] = entry["machine"]
    row["commit"] = ", ".join(commit[:7] + "+changes" * ("+" in commit) for commit in entry["commit"].split(" and "))
    return row | {"date": entry["date"], "digest": entry["digest"][:12]}


# --- recipes ----------------------------------------------------------------------------------------------------------


def recipe(preset: str, entries: Sequence[Entry]) -> Mapping[str, Any]:
    """The rows of a preset with the paper's numbers, and the commands of open rows."""
    wanted, llm = RECIPES[preset], paper.language_model_of(preset)
    own = [entry for entry in entries if fills_rows(entry) and entry["preset"] == preset]
    arms = dict.fromkeys([*wanted.arms, *(arm for entry in own for arm in entry["arms"])])
    tasks = wanted.tasks if own or llm else ()  # without any number the columns would be empty
    table: report_tables.Rows = []
    commands = []
    for arm in arms:
        filled = [filled_row(entry, arm) for entry in own if arm in entry["arms"]]
        table += filled or [{"arm": arm} | dict.fromkeys(map(title, tasks), "") | {MEAN: OPEN}]
        commands += [] if filled else ["\n".join(row_commands(preset, arm))]
    if llm:
        table += [paper_row(llm, arm, wanted.tasks) for arm in wanted.arms]
    return {"preset": preset, "about": Markup(wanted.about), "table": table, "commands": Markup("\n\n".join(commands))}


def title(task: str) -> str:
    return TITLES.get(task, task)


def filled_row(entry: Entry, arm: str) -> dict[str, str]:
    """An arm's scores."""
    seeds = ", ".join(map(str, entry["seeds"]))
    row = {"arm": f"{arm}, seed{'s' if len(entry['seeds']) > 1 else ''} {seeds}"}
    row |= {title(task): score(entry["scores"][arm][task]) for task in [*RECIPES[entry["preset"]].tasks, MEAN]}
    return row | {DIFFERENCE: difference(entry, arm)}


def paper_row(llm: str, arm: str, tasks: Sequence[str]) -> dict[str, str]:
    """The paper's numbers for the same language model."""
    row = {"arm": f"paper: {paper.ARMS[arm]}"}
    row |= {title(task): f"{report_tables.paper_score(llm, arm, task):.2f}" for task in [*tasks, MEAN]}
    delta = report_tables.paper_delta(llm, arm, next(iter(paper.ARMS)), MEAN)
    return row | {DIFFERENCE: "" if delta is None else f"{delta:+.2f}"}
