"""Small real inputs for trying the training tree: a language model, pictures with known answers, a vision tower."""
