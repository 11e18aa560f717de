"""Placeholder."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--output-dir", required=True)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    raise NotImplementedError("not written yet")
