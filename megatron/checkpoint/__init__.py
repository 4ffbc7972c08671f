"""Checkpoints that can be loaded on any layout.

Ranks write shards of tensors under global names and offsets, each element once.

    DIRECTORY/latest_checkpointed_iteration.txt   iteration of the last complete checkpoint
    DIRECTORY/iter_0000100/
        manifest.json      size and digest of every other small file, and the manifest's own digest
        boxes.json         which pieces list each tensor's shards (shards.py)
        boxes_00017.json   a piece: which file holds which shard of which tensor, with digests
        .metadata          all shards in torch's format, for torch's tools; only up to 4096 ranks
        __R_0.distcp       the shards that rank R wrote; in a converted checkpoint, data file R
        state.json         counters of the training loop and of the optimizer
        config.json        the whole configuration
        passport.json      provenance: versions, layout, data and command line of the run

A folder gets its final name only when everything in it has been written, checked for completeness
and synced to disk: a folder with a final name is never incomplete. Every byte is covered by a
digest, so that damage is found before the data is used. Nothing in a checkpoint is executed: the
only pickles that are read are those of the tensors in data files, under torch's own allow-list.
"""
