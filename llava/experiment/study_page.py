"""The study's page, HTML and Markdown, written from `study.json`: no number on it is typed by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava.eval.paired import IMPROVED, MEAN, UNCHANGED, WORSE
from llava.experiment.plan import POWER, points_in_words
from llava.experiment.report import render
from llava.experiment.report_figures import data_uri
from llava.experiment.report_tables import Rows
from llava.experiment.study_figures import figures
from llava.experiment.study_record import DOSED, KEPT, Study, has_intervals, in_digits, write_record
from llava.launch.devices import count_of
from llava.utils.paths import ROOT

PAPER_ARMS = ("layernorm", "gwc_layernorm")
LEVEL_ARMS = ("scale-fixed", "scale", "clip")  # they set the norm's level and normalise nothing
FIGURE = "study-{}.svg"
# Parts of a run, in their order.
WHEN = {"start": "before training", "pretrain": "after stage 1", "finetune": "after stage 2"}
ACROSS = ("interface-norms", "update-rates", "theory-model", "interventions")
"""Long tables, of a row for each value of their second column (`KEPT`): here these values are columns."""
CLAIMS: Rows = [
    {
        "who": "The paper (arXiv 2512.08374)",
        "claim": "Visual tokens of large norm turn slowly in a Pre-Norm model and lose information; a LayerNorm after "
        "the projector, aligned with the text norm, mends it, with or without compensation of its gradient.",
        "here": "Arms none, layernorm and gwc_layernorm, which it trained once each, without intervals.",
    },
    {
        "who": "A rebuttal (bkal01/vlm-norms, May 2026)",
        "claim": "Norm discrepancies are fine: rescaling visual tokens breaks trained models.",
        "here": "It trains nothing. Its curves are drawn for every trained arm, beside scale, scale-fixed and clip.",
    },
    {
        "who": "Beyond Semantics (Qi et al.)",
        "claim": "Large visual norms drown the order of the tokens; an RMSNorm with a fixed scale gives it back.",
        "here": "Arm rmsnorm (its gain is learnt), and answers with visual tokens in another order.",
    },
    {
        "who": "MIR and MoCa",
        "claim": "The gap between modalities is to be calibrated in every layer, not once at the input.",
        "here": "Not trained. Norms and update rates of every layer are measured after each stage.",
    },
]


def write_page(study: Study, folder: Path) -> list[Path]:
    """Writes `study.html`, which stands alone, and `study.md` with its figures; returns their paths."""
    drawn = figures(study)
    page = folder / "study.html"
    shown = [{"title": title, "uri": data_uri(svg, "svg+xml")} for title, svg in drawn.values()]
    page.write_text(render("study.html.jinja", **context(study), pictures=shown), encoding="utf-8")
    return [page, *write_markdown(study, folder / "study.md", folder / "figures", drawn)]


def write_docs(study: Study) -> list[Path]:
    """Writes `docs/study.json`, `docs/study.md` and its figures."""
    docs = ROOT / "docs"
    written = write_markdown(study, docs / "study.md", docs / "figures", figures(study))
    return [write_record(study, docs), *written]


def write_markdown(study: Study, page: Path, folder: Path, drawn: Mapping[str, tuple[str, bytes]]) -> list[Path]:
    """Writes the Markdown page, and its figures into `folder` beside it."""
    folder.mkdir(exist_ok=True)
    written = [page]
    shown = []
    for name, (title, svg) in drawn.items():
        written.append(folder / FIGURE.format(name))
        written[-1].write_bytes(svg)
        shown.append({"title": title, "uri": written[-1].relative_to(page.parent).as_posix()})
    text = render("study.md.jinja", **context(study), pictures=shown)
    page.write_text(f"{text.rstrip()}\n", encoding="utf-8")
    return written


def context(study: Study) -> dict[str, Any]:
    """What both templates show."""
    return {
        "study": study,
        "title": f"{len(study['arms'])} arms, {count_of(len(study['seeds']), 'seed')}: {study['plan']['preset']}",
        "claims": CLAIMS,
        "done": done(study),
        "conclusions": conclusions(study),
        "limits": limits(study),
        "power": power(study),
        "tables": tables(study),
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(study: Study) -> dict[str, Rows]:
    """Tables by title, without those that have no rows."""
    found = {
        "Scores": scores(study),
        "Differences from the baseline": differences(study["results"]),
        "Differences of arms from each other": differences(study["contrasts"]),
        "Samples of stage 2 to reach an accuracy": reached(study),
        "With the picture taken away": controls(study),
        "Norms and gradients while training, first seed": logged(study),
    }
    found |= measurements(study)
    return {title: rows for title, rows in found.items() if rows}


def scores(study: Study) -> Rows:
    """Percent of every arm, mean over the seeds, per task, with chance."""
    tasks = study["tasks"]
    chance = {"arm": "chance"} | {task: one["chance"] and round(one["chance"], 1) for task, one in tasks.items()}
    rows = [
        {"arm": arm} | {task: round(float(np.mean(found[task])), 1) for task in [*tasks, MEAN]}
        for arm, found in study["scores"].items()
    ]
    return [*rows, chance]


def differences(results: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Points with interval, verdict and questions won and lost, the mean of all tasks first."""
    rows = []
    for name, found in results.items():
        for task in sorted(found, key=lambda task: task != MEAN):
            one = found[task]
            rows.append({"difference": name, "task": task, "points": round(one["delta"], 1)})
            rows[-1] |= {"low": round(one["low"], 1), "high": round(one["high"], 1), "verdict": one["verdict"]}
            rows[-1] |= {"won": one["won"], "lost": one["lost"]}
    return rows


def reached(study: Study) -> Rows:
    """Samples with the interval; `not reached` is more than were seen."""
    rows = []
    for one in study["training"]["reached"]:
        ends = {name: "not reached" if one[name] is None else round(one[name]) for name in ("samples", "low", "high")}
        rows.append({"accuracy, %": round(100 * one["accuracy"], 1), "arm": one["arm"]} | ends)
    return rows


def controls(study: Study) -> Rows:
    """Percent of right answers under each control, with the 95 % interval where the record has it."""
    shown = "{score:.1f} ({low:.1f} to {high:.1f})" if has_intervals(study) else "{score:.1f}"
    return [
        {"arm": arm} | {control: shown.format(**found[arm]) for control, found in study["controls"].items()}
        for arm in study["arms"]
    ]


def logged(study: Study) -> Rows:
    """Norms and gradients at the start, and at the end of each stage."""
    rows = []
    for arm, found in study["logged"].items():
        points = [{"arm": arm, "when": when} for when in WHEN.values()]
        for name, values in found.items():
            for point, value in zip(points, values, strict=True):
                point[name] = in_digits(value, 3)
        rows += points
    return rows


def measurements(study: Study) -> dict[str, Rows]:
    """What was measured inside the models: an arm's rows follow each other, before training and after each stage."""
    found: dict[str, Rows] = {}
    for part, when in WHEN.items():
        for name, rows in study["measured"].get(part, {}).items():
            titled = {name: rows}
            if name in ACROSS:
                _, column, *values = KEPT[name]
                titled = {f"{name}, {value}": spread(rows, column, value) for value in values}
            for title, lines in titled.items():
                own = [{name: in_digits(value, 3) for name, value in line.items()} for line in lines]
                found.setdefault(title, []).extend({"model": line["model"], "when": when} | line for line in own)
    place = {arm: index for index, arm in enumerate(study["arms"])}
    return {title: sorted(rows, key=lambda row: place.get(row["model"], len(place))) for title, rows in found.items()}


def spread(rows: Rows, column: str, value: str) -> Rows:
    """A row for each model, with `value` in columns that are called by what `column` holds."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["model"], {"model": row["model"]})[row[column]] = row[value]
    return list(found.values())


def done(study: Study) -> list[str]:
    """What was trained and asked, in numbers."""
    plan, training = study["plan"], study["training"]
    questions = sum(one["questions"] for one in study["tasks"].values())
    samples = " and ".join(f"{count} samples in {stage}" for stage, count in study["samples"].items())
    models = ", ".join(Path(str(name)).name for name in study["model"].values())
    found = [
        f"Command: {command(plan)}.",
        f"Arms: {', '.join(study['arms'])}. Seeds: {', '.join(map(str, study['seeds']))}. Each with the same data, "
        "order, initial weights and budget, as the runs recorded; runs that differ in more than the arm are refused.",
        f"Every run: {samples}, on {study['devices']} ({models}); {study['hours']:.2g} hours of training in all.",
        f"Every run answered {questions} questions of {len(study['tasks'])} tasks; also with a blank picture, visual "
        f"tokens in another order, and no picture. During stage 2 {training['questions']} questions were asked "
        f"{len(training['samples'])} times.",
        f"Trained at commit {study['trained_at']}, written at {study['commit']}, {study['created']}.",
    ]
    if "measured_in" in study:
        again = study["measured_in"]
        apart = f"differ from those above by at most {again['apart']:.1f} points" if again["apart"] else "are the same"
        found.append(
            f"Measured inside models of seed {study['seeds'][0]} that were trained again, at commit "
            f"{again['trained_at']}; their scores on every task {apart}."
        )
    if plan["hours"] is not None:
        found.append(f"Steps and seeds were planned from a pilot for {plan['hours']:g} hours.")
    return found


def command(plan: Mapping[str, Any]) -> str:
    """The call that the study's plan came from; the arms stand beside it on the page."""
    hours = f" --hours {plan['hours']:g}" if plan["hours"] is not None else ""
    quick = " --quick" if plan["questions"] else ""
    seeds = ",".join(map(str, plan["seeds"]))
    return f"python -m llava.compare study --preset {plan['preset']}{hours} --seeds {seeds}{quick}"


# --- what the intervals allow to say ----------------------------------------------------------------------------------


def conclusions(study: Study) -> list[str]:
    """The answers to what was claimed, composed from the intervals."""
    found = [headline(study), about_arms("The paper's layer", PAPER_ARMS, study)]
    found += [about_arms("A level without a norm layer", LEVEL_ARMS, study)]
    rest = [arm for arm in study["results"] if arm not in (*PAPER_ARMS, *LEVEL_ARMS, *study["dose"])]
    found += [about_arms("Other norms", rest, study)]
    found += [about_dose(study), about_pairs(study), about_speed(study), about_pictures(study)]
    found += [about_turning(study), about_rescaling(study)]
    return [text for text in found if text]


def headline(study: Study) -> str:
    """How many arms differ from the baseline over all tasks."""
    named = {verdict: [] for verdict in (IMPROVED, WORSE, UNCHANGED)}
    for arm, found in study["results"].items():
        named[found[MEAN]["verdict"]].append(arm)
    parts = [f"{len(arms)} {verdict}" + (f" ({', '.join(arms)})" if arms else "") for verdict, arms in named.items()]
    text = f"Over all tasks, against {study['arms'][0]}: {', '.join(parts)}. Unchanged: no difference is shown."
    if len(study["seeds"]) > 1:
        return text
    return f"{text} With one seed this is about these training runs on other questions, not about other training runs."


def about_speed(study: Study) -> str:
    """Arms whose interval of samples to an accuracy does not overlap the baseline's; `not reached` is infinity."""

    def ends(one: Mapping[str, Any]) -> tuple[float, float]:
        low, high = (float("inf") if one[end] is None else one[end] for end in ("low", "high"))
        return low, high

    parts = []
    for accuracy in dict.fromkeys(one["accuracy"] for one in study["training"]["reached"]):
        by_arm = {one["arm"]: ends(one) for one in study["training"]["reached"] if one["accuracy"] == accuracy}
        low, high = by_arm[study["arms"][0]]
        fewer = [arm for arm, (_, its_high) in by_arm.items() if its_high < low]
        more = [arm for arm, (its_low, _) in by_arm.items() if its_low > high]
        said = [f"{', '.join(arms)} with {word}" for arms, word in ((fewer, "fewer samples"), (more, "more")) if arms]
        parts.append(f"{100 * accuracy:.0f} % right is reached by {' and by '.join(said) or 'no arm sooner or later'}")
    return f"In stage 2, beside the baseline: {'; '.join(parts)} (intervals that do not meet)." if parts else ""


def about_arms(what: str, arms: Sequence[str], study: Study) -> str:
    """Each arm's verdict over all tasks, and the tasks on which it has one."""
    parts = []
    for arm in arms:
        if arm in study["results"]:
            found = study["results"][arm]
            single = [
                f"{one['verdict']} on {t}" for t, one in found.items() if t != MEAN and one["verdict"] != UNCHANGED
            ]
            parts.append(f"{arm} {phrase(found[MEAN])}" + (f"; {', '.join(single)}" if single else ""))
    return f"{what}, against the baseline: {'. '.join(parts)}." if parts else ""


def phrase(one: Mapping[str, Any]) -> str:
    """A verdict with its interval; for `unchanged` also the differences that it does not exclude."""
    text = f"is {one['verdict']} ({one['delta']:+.1f} points, {one['low']:+.1f} to {one['high']:+.1f})"
    if one["verdict"] != UNCHANGED:
        return text
    return f"{text}, so neither {-one['low']:.1f} points less nor {one['high']:.1f} more are excluded"


def about_dose(study: Study) -> str:
    """Whether the multiple of the initial norm makes a difference: the text norm itself against each other dose."""
    pairs = {f"{factor:g}x": study["contrasts"].get(f"{DOSED} minus {arm}") for arm, factor in study["dose"].items()}
    known = {name: one[MEAN] for name, one in pairs.items() if one}
    if not known:
        return ""
    said = {IMPROVED: "better than", WORSE: "worse than", UNCHANGED: "not shown to differ from"}
    parts = [f"{said[one['verdict']]} {name} ({one['delta']:+.1f}, {one['low']:+.1f} to {one['high']:+.1f})"
             for name, one in known.items()]  # fmt: skip
    return f"Dose: {DOSED} that starts at the text norm is {'; '.join(parts)}."


def about_pairs(study: Study) -> str:
    """Arms that differ from each other."""
    decided = [
        f"{name}: {phrase(found[MEAN])}"
        for name, found in study["contrasts"].items()
        if found[MEAN]["verdict"] != UNCHANGED and not name.startswith(f"{DOSED} minus {DOSED}@")
    ]
    if not study["contrasts"]:
        return ""
    return "Arms against each other: " + ("; ".join(decided) if decided else "no difference is shown") + "."


def about_pictures(study: Study) -> str:
    """Which arms answer better with their picture than with a blank one, by intervals that do not overlap."""
    whole, blank = study["controls"]["untouched"], study["controls"]["blank"]
    if not has_intervals(study):
        points = [whole[arm]["score"] - blank[arm]["score"] for arm in study["arms"]]
        return f"With a blank picture arms lose {min(points):.1f} to {max(points):.1f} points, without intervals."
    sees = [arm for arm in study["arms"] if whole[arm]["low"] > blank[arm]["high"]]
    others = [arm for arm in study["arms"] if arm not in sees]
    text = f"With a blank picture {len(sees)} of {len(study['arms'])} arms answer worse"
    return text + (f"; not shown for {', '.join(others)}." if others else ".")


def about_turning(study: Study) -> str:
    """How large a layer's update is beside the state that it turns, for visual tokens and for the text after them."""
    rows = study["measured"].get("finetune", {}).get("update-rates", [])
    by_arm = {row["model"]: row for row in spread(rows, "tokens", "update mean")}
    parts = [
        f"{arm} {by_arm[arm]['visual']:.2f} ({by_arm[arm]['text after']:.2f})"
        for arm in study["arms"]
        if {"visual", "text after"} <= by_arm.get(arm, {}).keys()
    ]
    if not parts:
        return ""
    return (
        "After stage 2, a layer's update over the token's norm, mean of all layers, for visual tokens (for text after "
        f"the picture): {', '.join(parts)}. First seed, without intervals."
    )


def about_rescaling(study: Study) -> str:
    """What setting trained arms to the text norm at inference does, beside a blank picture."""
    rows = study["measured"].get("finetune", {}).get("interventions", [])
    by_arm = {
        arm: {row["intervention"]: row["KL (nats)"] for row in rows if row["model"] == arm} for arm in study["arms"]
    }
    parts = [
        f"{arm} {found['text norm']:.3f} nats (blank picture {found['blank picture']:.3f})"
        for arm, found in by_arm.items()
        if {"text norm", "blank picture"} <= found.keys()
    ]
    if not parts:
        return ""
    return (
        f"Set to the text norm at inference only, outputs change by: {'; '.join(parts)}. First seed, without intervals."
    )


def power(study: Study) -> list[str]:
    """What the plan expected to show, and what the intervals could have."""
    found = []
    plan = study["plan"]
    if plan["smallest"]:
        single = [f"{task} {points_in_words(points)}" for task, points in plan["smallest"].items() if task != MEAN]
        found.append(
            f"Planned from a pilot: over all tasks a difference of {plan['smallest'][MEAN]:.1f} points would be shown "
            f"with {100 * POWER:.0f} % probability; on single tasks {', '.join(single)}."
        )
    points = list(study["resolved"].values())
    found.append(
        f"By the intervals that came out, differences of {min(points):.1f} to {max(points):.1f} points over all tasks "
        f"would be shown with {100 * POWER:.0f} % probability, by the arm. Smaller ones may be there and are not shown."
    )
    return found


UNLIKE = 3.0
"""Ratio of standard deviations over seeds from which an arm's runs are said to vary otherwise than the others'."""


def limits(study: Study) -> list[str]:
    """What the verdicts do not cover."""
    seeds = len(study["seeds"])
    found = [
        "Intervals of a family together cover at 95 % (Bonferroni), and each family spends its own 5 %: over all tasks "
        f"({count_of(len(study['results']), 'arm')}), on single tasks (arms times {len(study['tasks'])}), and both of "
        "arms against each other. All four together may leave out a true value in one study of five.",
        "With the picture taken away each interval covers at 95 %, over other questions and other seeds; it is not "
        "corrected for the number of arms."
        if has_intervals(study)
        else "With the picture taken away there are no intervals: answers by question and seed were not kept.",
        "Training runs of all arms are taken to vary alike, and the tasks as fixed.",
        "Measurements inside the models are of the first seed and have no intervals over seeds.",
    ]
    if seeds >= 3:
        found += unlike(study["results"])
    if missing := len(study["plan"]["seeds"]) - seeds:
        found.insert(
            0, f"{count_of(missing, 'seed')} of {seeds + missing} not trained yet: this is how it stands so far."
        )
    if seeds < 3:
        found.insert(0, f"{seeds} seed{'s' if seeds > 1 else ''}: how much training runs vary is hardly known.")
    if study["plan"]["questions"]:
        found.insert(0, f"Only {study['plan']['questions']} questions were asked: a trial of the whole, not a result.")
    return found


def unlike(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each arm whose seeds differ more than `UNLIKE` times as much as those of the other arms."""
    varies = {arm: float(np.var(found[MEAN]["by_seed"], ddof=1)) for arm, found in results.items()}
    found = []
    for arm, own in varies.items():
        others = [one for name, one in varies.items() if name != arm]
        if others and own > UNLIKE**2 * np.mean(others):
            found.append(
                f"The seeds of {arm} differ far more than those of the other arms: standard deviations of "
                f"{np.sqrt(own):.1f} and {np.sqrt(np.mean(others)):.1f} points. All arms share one estimate of how "
                "training runs vary, so this widens every interval."
            )
    return found
