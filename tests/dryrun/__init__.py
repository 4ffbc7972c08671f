"""Tests of megatron.dryrun."""
