"""Checkpoints that load on any layout.

Every rank writes the shards it holds, under global names and offsets.

    DIRECTORY/latest_checkpointed_iteration.txt   the last complete checkpoint
    DIRECTORY/iter_0000100/
        manifest.json      size and digest of every other small file, and of itself
        boxes.json         the pieces that list each tensor (shards.py)
        boxes_00017.json   a piece: which file holds which shard of which tensor, with digests
        .metadata          up to 4096 ranks: the same in torch's format, for its tools
        __R_0.distcp       the tensors that rank R wrote; of a converted checkpoint, tensor R
        state.json         counters of the training loop and of the optimizer
        config.json        the whole configuration
        passport.json      provenance: versions, layout, data and command line of the run

A folder gets its final name only when all of it is written, checked to be complete, and on disk: no
folder with such a name is incomplete. Every byte is covered by a digest, so that damage is found
before the data is used. Nothing in a checkpoint is executed: the only pickles that are read are the
tensors in data files, with torch's own allow-list.
"""
