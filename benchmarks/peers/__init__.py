"""One training run of each other tool, described by a job file; run by `python -m benchmarks.vs_peers`."""
