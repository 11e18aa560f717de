"""The study's pages, HTML and Markdown, generated from `study.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare.figures import Picture, data_uri, figures
from llava.compare.plan import POWER, points_in_words
from llava.compare.report import render
from llava.compare.report_tables import Rows, in_digits
from llava.compare.study_record import COLUMNS, Study, has_intervals, write_record
from llava.eval.paired import MEAN
from llava.launch.devices import count_of

PAGE, FIGURE = "study.md", "study-{}.svg"
DOCS_PAGE = "study-pilot.md"
"""The page in `docs`: the study without a written plan that is kept there was the pilot of the one in `study.md`."""
SCORES = "Scores"
"""The title of the one table that the page has; the others are on the page of numbers."""
# Parts of a run, in their order.
WHEN = {"start": "before training", "pretrain": "after stage 1", "finetune": "after stage 2"}
ACROSS = ("interface-norms", "update-rates", "theory-model", "interventions")
"""Long tables with a row per value of their second column (`COLUMNS`); the pages have a column per value."""
START, END = "<!-- generated: python -m llava.compare page STUDY_JSON --docs -->", "<!-- end of the generated part -->"
"""Between these lines `DOCS_PAGE` is generated from `docs/study.json`; the rest is written by hand."""


def write_page(study: Study, folder: Path) -> list[Path]:
    """Writes `study.html`, which stands alone, and the Markdown pages with their figures; returns their paths."""
    drawn = figures(study)
    page = folder / "study.html"
    pictures = [{**picture._asdict(), "uri": data_uri(picture.svg, "svg+xml")} for picture in drawn.values()]
    text = render("page.html.jinja", title=title_of(study), notes=notes(study), numbers=tables(study), figures=pictures)
    page.write_text(text, encoding="utf-8")
    return [page, *write_markdown(study, folder / PAGE, folder / "figures", drawn)]


def write_docs(study: Study, docs: Path) -> list[Path]:
    """Writes into `docs` `study.json`, the figures, the page of numbers, and what is generated of `DOCS_PAGE`."""
    page = docs / DOCS_PAGE
    return [write_record(study, docs), *write_markdown(study, page, docs / "figures", figures(study), by_hand(page))]


def write_markdown(
    study: Study, page: Path, folder: Path, drawn: Mapping[str, Picture], around: tuple[str, str] = ("", "")
) -> list[Path]:
    """Writes the figures into `folder`, the page within the text `around` it, and the page of numbers next to it."""
    folder.mkdir(exist_ok=True)
    numbers, pictures = page.with_stem(f"{page.stem}-numbers"), []
    written = [page, numbers]
    for name, picture in drawn.items():
        written.append(folder / FIGURE.format(name))
        written[-1].write_bytes(picture.svg)
        pictures.append({**picture._asdict(), "uri": written[-1].relative_to(page.parent).as_posix()})
    shown, title = tables(study), title_of(study)
    scores = {SCORES: shown.pop(SCORES)}
    text = render("page.md.jinja", notes=notes(study), numbers=scores, figures=pictures).strip()
    before, after = around if any(around) else (f"# {title}\n\n", "\n")
    text += f"\n\nAll other tables: [{numbers.name}]({numbers.name})."
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    text = render("page.md.jinja", numbers=shown).strip()
    numbers.write_text(
        f"# {title}, numbers\n\nGenerated with [{page.name}]({page.name}).\n\n{text}\n", encoding="utf-8"
    )
    return written


def by_hand(page: Path, start: str = START) -> tuple[str, str]:
    """What a page has before and after its generated part, which begins with the line `start`.

    Raises:
        ValueError: it has no generated part, or several.
    """
    text = page.read_text(encoding="utf-8")
    if text.count(start) != 1 or text.count(END) != 1:
        raise ValueError(f"{page}: expected the lines {start!r} and {END!r}, each once")
    return text[: text.index(start)], text[text.index(END) + len(END) :]


def title_of(study: Study) -> str:
    return f"Study: {len(study['arms'])} arms, {count_of(len(study['seeds']), 'seed')}: {study['plan']['preset']}"


def notes(study: Study) -> dict[str, list[str]]:
    """What the pages say in words, by heading."""
    return {"What was done": done(study), "Limits": limits(study), "Power": power(study)}


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(study: Study) -> dict[str, Rows]:
    """Tables by title, without those that have no rows."""
    by_title = {
        SCORES: scores(study),
        "Differences from the baseline": differences(study["results"]),
        "Differences of arms from each other": differences(study["contrasts"]),
        "Samples of stage 2 to reach an accuracy": reached(study),
        "With the picture taken away": controls(study),
        "Norms and gradients while training, first seed": logged(study),
    }
    by_title |= measurements(study)
    return {title: rows for title, rows in by_title.items() if rows}


def scores(study: Study) -> Rows:
    """Percent of every arm, mean over the seeds, per task, with chance."""
    tasks = study["tasks"]
    chance = {"arm": "chance"} | {task: facts["chance"] and round(facts["chance"], 1) for task, facts in tasks.items()}
    rows = [
        {"arm": arm} | {task: round(float(np.mean(by_task[task])), 1) for task in [*tasks, MEAN]}
        for arm, by_task in study["scores"].items()
    ]
    return [*rows, chance]


def differences(results: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Points with interval, verdict and questions won and lost, the mean of all tasks first."""
    rows = []
    for name, by_task in results.items():
        for task in sorted(by_task, key=lambda task: task != MEAN):
            result = by_task[task]
            rows.append({"difference": name, "task": task, "points": round(result["delta"], 1)})
            rows[-1] |= {"low": round(result["low"], 1), "high": round(result["high"], 1), "verdict": result["verdict"]}
            rows[-1] |= {"won": result["won"], "lost": result["lost"]}
    return rows


def reached(study: Study) -> Rows:
    """Samples with the interval; `not reached` is more than were seen."""
    rows = []
    for row in study["training"]["reached"]:
        ends = {name: "not reached" if row[name] is None else round(row[name]) for name in ("samples", "low", "high")}
        rows.append({"accuracy, %": round(100 * row["accuracy"], 1), "arm": row["arm"]} | ends)
    return rows


def controls(study: Study) -> Rows:
    """Percent of right answers under each control, with the 95 % interval where the record has it."""
    shown = "{score:.1f} ({low:.1f} to {high:.1f})" if has_intervals(study) else "{score:.1f}"
    return [
        {"arm": arm} | {control: shown.format(**by_arm[arm]) for control, by_arm in study["controls"].items()}
        for arm in study["arms"]
    ]


def logged(study: Study) -> Rows:
    """Norms and gradients at the start, and at the end of each stage."""
    rows = []
    for arm, by_name in study["logged"].items():
        points = [{"arm": arm, "when": when} for when in WHEN.values()]
        for name, values in by_name.items():
            for point, value in zip(points, values, strict=True):
                point[name] = in_digits(value, 3)
        rows += points
    return rows


def measurements(study: Study) -> dict[str, Rows]:
    """What was measured inside the models: an arm's rows follow each other, before training and after each stage."""
    shown: dict[str, Rows] = {}
    for part, when in WHEN.items():
        for name, rows in study["measured"].get(part, {}).items():
            titled = {name: rows}
            if name in ACROSS:
                _, column, *values = COLUMNS[name]
                titled = {f"{name}, {value}": spread(rows, column, value) for value in values}
            for title, lines in titled.items():
                own = [{name: in_digits(value, 3) for name, value in line.items()} for line in lines]
                shown.setdefault(title, []).extend({"model": line["model"], "when": when} | line for line in own)
    place = {arm: index for index, arm in enumerate(study["arms"])}
    return {title: sorted(rows, key=lambda row: place.get(row["model"], len(place))) for title, rows in shown.items()}


def spread(rows: Rows, column: str, value: str) -> Rows:
    """A row for each model, with `value` in columns that are called by what `column` holds."""
    by_model: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_model.setdefault(row["model"], {"model": row["model"]})[row[column]] = row[value]
    return list(by_model.values())


def done(study: Study) -> list[str]:
    """What was trained and asked, in numbers."""
    plan, training = study["plan"], study["training"]
    questions = sum(task["questions"] for task in study["tasks"].values())
    samples = " and ".join(f"{count} samples in {stage}" for stage, count in study["samples"].items())
    models = ", ".join(Path(str(name)).name for name in study["model"].values())
    facts = [
        f"Command: {command(plan)}.",
        f"Arms: {', '.join(study['arms'])}. Seeds: {', '.join(map(str, study['seeds']))}. Each with the same data, "
        "order, initial weights and budget, as the runs recorded; runs that differ in more than the arm are refused.",
        f"Every run: {samples}, on {study['devices']} ({models}); {study['hours']:.2g} hours of training in total.",
        f"Every run answered {questions} questions of {len(study['tasks'])} tasks; also with a blank picture, visual "
        f"tokens in another order, and no picture. During stage 2, {training['questions']} questions were evaluated "
        f"{len(training['samples'])} times.",
        f"Trained at commit {study['trained_at']}, written at {study['commit']}, {study['created']}.",
    ]
    if "measured_in" in study:
        again = study["measured_in"]
        apart = f"differ from those above by at most {again['apart']:.1f} points" if again["apart"] else "are the same"
        facts.append(
            f"Measured inside models of seed {study['seeds'][0]} that were retrained at commit "
            f"{again['trained_at']}; their scores on every task {apart}."
        )
    if plan["hours"] is not None:
        facts.append(f"Steps and seeds were planned from a pilot for {plan['hours']:g} hours.")
    return facts


def command(plan: Mapping[str, Any]) -> str:
    """The command of the study's plan, without its arms."""
    hours = f" --hours {plan['hours']:g}" if plan["hours"] is not None else ""
    quick = " --quick" if plan["questions"] else ""
    seeds = ",".join(map(str, plan["seeds"]))
    return f"python -m llava.compare study --preset {plan['preset']}{hours} --seeds {seeds}{quick}"


# --- power and limits -------------------------------------------------------------------------------------------------


def power(study: Study) -> list[str]:
    """The differences that plan and intervals would show."""
    facts = []
    plan = study["plan"]
    if plan["smallest"]:
        single = [f"{task} {points_in_words(points)}" for task, points in plan["smallest"].items() if task != MEAN]
        facts.append(
            f"Planned from a pilot: over all tasks a difference of {plan['smallest'][MEAN]:.1f} points would be shown "
            f"with {100 * POWER:.0f} % probability; on single tasks {', '.join(single)}."
        )
    points = list(study["resolved"].values())
    facts.append(
        f"By the resulting intervals, differences of {min(points):.1f} to {max(points):.1f} points over all tasks, "
        f"depending on the arm, would be shown with {100 * POWER:.0f} % probability. Smaller ones may exist."
    )
    return facts


def limits(study: Study) -> list[str]:
    """What the verdicts do not cover."""
    seeds = len(study["seeds"])
    caveats = [
        "All intervals of a family together cover at 95 % (Bonferroni), and each family spends its own 5 %: "
        f"{count_of(len(study['results']), 'arm')} over all tasks, these arms on {len(study['tasks'])} single tasks, "
        "and both for pairs of arms. One study of five may have an interval that excludes the true value.",
        "With the picture taken away each interval covers at 95 %, over other questions and other seeds; it is not "
        "corrected for the number of arms."
        if has_intervals(study)
        else "With the picture taken away there are no intervals: answers by question and seed were not kept.",
        "Training runs of all arms are assumed to vary equally, and tasks are treated as fixed.",
        "Measurements inside the models are of the first seed and have no intervals over seeds.",
    ]
    if missing := len(study["plan"]["seeds"]) - seeds:
        caveats.insert(
            0, f"{count_of(missing, 'seed')} of {seeds + missing} not trained yet: the result is preliminary."
        )
    if seeds < 3:
        caveats.insert(
            0, f"{seeds} seed{'s' if seeds > 1 else ''}: the variance between training runs is hardly known."
        )
    if study["plan"]["questions"]:
        caveats.insert(0, f"Only {study['plan']['questions']} questions were asked: a trial run, not a result.")
    return caveats
