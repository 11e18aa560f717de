"""The vision towers: SigLIP and CLIP."""
