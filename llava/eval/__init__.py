"""Asking trained checkpoints."""
