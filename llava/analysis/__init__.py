"""Measures the paper's quantities in our checkpoints and in any vision-language model of transformers."""
