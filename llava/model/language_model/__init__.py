"""LLaVA's causal LMs: a table of decoder families, and LLaVA's import paths."""
