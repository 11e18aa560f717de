"""The commands of `python -m llava.export`.

A command is the module of its name, with `add_arguments(parser)` and `run(args)`.
"""

import importlib
from types import ModuleType

COMMANDS = {
    "hf": "a checkpoint as a folder of Hugging Face's LLaVA classes",
    "llava": "such a folder, or a published one of LLaVA 1.5, as a checkpoint of this tree",
    "card": "the model's README.md: recipe, norms, results, how to load it",
    "push": "the folder to the hub; without --execute it says what would be sent",
    "gguf": "a checkpoint as the two files of llama.cpp, language model and mmproj",
}


def module_of(command: str) -> ModuleType:
    """A command's module."""
    return importlib.import_module("llava.export." + command.replace("-", "_"))
