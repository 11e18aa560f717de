"""The paper's statements (sections 3 and B) checked numerically; exit status 1 if one is refuted.

With `--model` it also measures how far their assumptions hold in a real model.
"""

import argparse
from collections.abc import Callable

import numpy as np

from llava.analysis import inputs, loading, resume, theory_model
from llava.analysis import theory_checks as turning
from llava.analysis import theory_formulas as formulas
from llava.analysis import theory_spectrum as attention
from llava.analysis.commands import Needs
from llava.analysis.models import required_models
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.theory_checks import Check
from llava.utils.commands import whole
from llava.utils.presentation import COLOURS
from llava.utils.progress import progress

NEEDS = Needs()

CHECKS: tuple[Callable[[np.random.Generator, int], Check], ...] = (
    turning.update_ignores_norm,
    turning.angular_velocity,
    turning.slower_with_norm,
    turning.theorem_1,
    turning.lemma_1,
    turning.lag_angle,
    attention.damped_spectrum,
    attention.spectral_bound,
    attention.snr_and_entropy,
)
"""Each takes a random stream and the number of draws."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draws", type=whole(1), default=40_000, help="random vectors per Monte Carlo comparison")
    parser.add_argument(
        "--norm-ratios", type=float, nargs="+", default=[2, 5, 15, 40], help="visual over text norm, in the figure"
    )
    parser.add_argument("--layers", type=whole(1), default=28, help="layers in the figure")
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=40)
    resume.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints and writes every statement's verdict; 1 where one is refuted."""
    if args.draws < 1000:
        raise ValueError(f"--draws {args.draws}: expected at least 1000; fewer leave the bounds too wide to refute")
    if not min(args.norm_ratios) >= 1:
        raise ValueError("--norm-ratios: expected numbers of at least 1")
    checks = run_checks(args.seed, args.draws)
    write_result(args, [table_row(check) for check in checks], {"checks": [check._asdict() for check in checks]})
    for check in checks:
        print(f"\n{check.statement} ({check.equation}): {verdict(check)}\n  found: {check.example}")
        if check.condition:
            print(f"  holds where: {check.condition}")
    draw(args)
    if args.models:
        measure_models(args)
    refuted = [check.statement for check in checks if not check.confirmed]
    print(
        f"\n{len(checks) - len(refuted)} of {len(checks)} statements confirmed"
        + "".join(f"; REFUTED: {s}" for s in refuted)
    )
    return 1 if refuted else 0


def run_checks(seed: int, draws: int) -> list[Check]:
    """Every check, each with a random stream of its own, so that none depends on the others."""
    streams = np.random.default_rng(seed).spawn(len(CHECKS))
    pairs = zip(CHECKS, streams, strict=True)
    return [check(random, draws) for check, random in progress(pairs, "checking", "statements", total=len(CHECKS))]


def verdict(check: Check) -> str:
    if not check.confirmed:
        return "REFUTED"
    return "confirmed, under a condition" if check.condition else "confirmed"


def measure_models(args: argparse.Namespace) -> None:
    """Prints and writes how far the assumptions hold in every model (`theory-model`), with a figure over its layers."""
    samples, rows = inputs.choose(args), []
    for model in required_models(args.models):
        rows += theory_model.measure_assumptions(model, samples, args)
    by_model = [[row for row in rows if row["model"] == model.name] for model in args.models]
    summary = [line for own_rows in by_model for line in theory_model.summary(own_rows)]
    write_result(args, summary, rows, name="theory-model")
    theory_model.draw(args, args.models, rows)


def table_row(check: Check) -> TableRow:
    return {
        "statement": check.statement,
        "equation": check.equation,
        "verdict": verdict(check),
        "comparisons": check.cases,
        "worst deviation": float(check.deviation),
        "allowed": float(check.allowed),
        "unit": check.unit,
    }


def draw(args: argparse.Namespace) -> None:
    """Left: angular velocity over the norm. Right: lag angle over layers, against Lemma 1's balance and alignment."""
    with figure(args, 1, 2, figsize=(11, 4)) as (_, (left, right)):
        norms = np.geomspace(0.5, 200, 200)
        for phi, colour in zip((60, 90, 120), COLOURS, strict=False):
            w = np.degrees(formulas.angular_velocity(norms, 1.0, np.radians(phi)))
            left.loglog(norms, w, color=colour, label=f"phi = {phi} degrees")
        left.set(
            xlabel="norm of the hidden state, in update lengths (|h| / C)", ylabel="angle turned per layer (degrees)"
        )
        left.set_title("A large norm turns slowly (eq. 8)")
        left.legend()
        layers = np.arange(args.layers + 1)
        settings = {"update": 0.25, "phi": np.pi / 2, "theta": 0.3, "layers": args.layers}
        aligned = formulas.angles_over_layers(1.0, 1.0, **settings)[0]
        for ratio, colour in zip(args.norm_ratios, COLOURS * len(args.norm_ratios), strict=False):
            imbalanced, balanced = formulas.angles_over_layers(ratio, 1.0, **settings)
            right.plot(layers, np.degrees(imbalanced - balanced), color=colour, label=f"norm ratio {ratio:g}")
            right.plot(layers, np.degrees(imbalanced - aligned), color=colour, linestyle="--", linewidth=1.2)
        right.axhline(0, color="black", linewidth=0.8)
        right.set(xlabel="layer", ylabel="extra angle between the tokens (degrees)")
        right.set_title("Lag (eq. 17): solid against equal product of tangents,\ndashed against both at the text norm")
        right.legend()
