"""The name under which `llava.experiment` is called: `python -m llava.compare`."""
