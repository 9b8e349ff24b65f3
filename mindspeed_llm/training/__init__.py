"""The training loop and what surrounds it: optimizer, schedule, loss, checkpoints, metrics, evaluation, report."""
