"""The sets of pictures, and the settings that are flags of `python -m playground`."""

PICTURES = ("scenes", "probes")
"""Each a module of this package; the first is the default."""
FLAGS = {
    "scenes": {
        "num_train": "training pictures of one or two shapes: each gives a caption and a record of questions",
        "num_crowded": "training pictures of one to four shapes, only for the vision tower",
        "num_heldout": "held-out pictures: each gives one question",
    },
    "probes": {
        "num_more": "more training pictures, none with the content of a held-out one",
        "num_validation": "questions like the held-out ones, about other pictures, in validation.json",
    },
    "tower": {
        "data": "prepared picture set to train on",
        "patch_size": "side of a patch in pixels, which is one visual token; 0: 32, for probes 24",
        "steps": "training steps; 0: 240, for probes 600",
    },
}
"""By command and setting, the meaning."""
