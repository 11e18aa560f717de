"""Training: arguments, checks before the start, optimizer, trainer, telemetry and checkpoints."""
