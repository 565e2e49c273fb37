"""The training loop: model set-up, data, steps, validation, checkpoints, logs and signals."""
