"""The vision towers: SigLIP, SigLIP 2, CLIP and DINOv2."""
