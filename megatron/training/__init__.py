"""The run: set-up, loop, evaluation, batch ramp-up, metrics and logs, text generation."""
