"""Which candidate is tried next: a pure function of what has been seen."""
