"""Measures an allocation before a training runs in it: every device, every node, and the links between neighbours."""
