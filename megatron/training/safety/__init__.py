"""Protection of a run: watchdog and hangs, non-finite steps, loss spikes."""
