"""Reports of a run: events, log, metrics file, trackers, timers, slow ranks."""
