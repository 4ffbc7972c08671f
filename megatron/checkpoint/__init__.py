"""Checkpoints that load on any layout: every rank writes the fragments it holds, under global names and places.

    DIRECTORY/latest_checkpointed_iteration.txt     the last complete checkpoint
    DIRECTORY/iter_0000100/.metadata                which file holds which box of which tensor; for thousands of ranks
                           boxes.json               it is listed in pieces (boxes.py)
                           __R_0.distcp             the tensors that rank R wrote
                           state.json               counters of the training loop and of the optimizer
                           config.json              the whole configuration

A folder gets its final name only when all of it is written: under that name there is no incomplete checkpoint.
"""
