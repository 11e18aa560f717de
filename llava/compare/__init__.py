"""Comparisons of arms: what is trained, scored and measured, in which order. Standard library only."""
