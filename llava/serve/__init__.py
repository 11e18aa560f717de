"""Talking to a checkpoint."""
