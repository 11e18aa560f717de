"""A memory allocator that keeps what the system once gave it, for runs on the CPU.

A training step allocates gigabytes and frees them. glibc returns large pieces to the system, which then has to clear
every page again: one page fault for each 4 KiB that a step uses.
"""

from collections.abc import Mapping
from ctypes.util import find_library

# The library's name, and the variables that make it keep its memory; the first library that is installed is taken.
ALLOCATORS: dict[str, dict[str, str]] = {
    "tcmalloc_minimal": {},
    "tcmalloc": {},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}


def keeping_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that put an installed allocator in glibc's place; empty without one, or where the user chose."""
    if "LD_PRELOAD" in environment:
        return {}
    for name, variables in ALLOCATORS.items():
        if library := find_library(name):
            return {"LD_PRELOAD": library} | {k: v for k, v in variables.items() if k not in environment}
    return {}
