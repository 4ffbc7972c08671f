"""Faults during a run: hangs, non-finite steps, loss spikes."""
