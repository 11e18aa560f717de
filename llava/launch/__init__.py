"""What the training scripts call: from variables and flags to a running job. Standard library only."""
