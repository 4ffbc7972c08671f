"""Before node-hours are spent: what can be known on a login node (check), and what an allocation is worth (measure)."""
