"""Commands of `llava.analysis`, parsed and run in this process."""

import json

from llava.analysis.__main__ import main, parser


def arguments(command, *flags):
    args = parser(command).parse_args([command, "--device", "cpu", *map(str, flags)])
    args.argv = [command]
    return args


def run(folder, *flags) -> dict:
    """What the command writes into `<folder>/<command>.json`."""
    assert main([*map(str, flags), "--device", "cpu", "--output-dir", str(folder)]) == 0
    return json.loads((folder / f"{flags[0]}.json").read_text())
