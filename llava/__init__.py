"""A LLaVA training tree whose projector may end in a norm layer aligned with the text embeddings."""
