"""LLaVA's causal LMs, one module per decoder family."""
