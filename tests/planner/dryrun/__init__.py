"""Tests of megatron.planner.dryrun."""
