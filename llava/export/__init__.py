"""A trained model in the formats that others read: Hugging Face's both ways, and what goes with it."""
