"""The projector from vision features to LLM embeddings, and the norm that may end it."""
