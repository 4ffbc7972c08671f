"""Checkpoints of Megatron and of Megatron-DeepSpeed, read into this program's tensors.

    deepspeed.py, megatron.py   which files there are, and which parameter is in which of them
    zero.py                     the optimizer's state in ZeRO's shards
    names.py                    their names of parameters, and ours
    merge.py                    tensor-parallel parts into whole tensors, in our order of rows
    architecture.py             their arguments as our settings
    convert.py                  all of it together: find, check, write
    unpickle.py                 pickles without running anything that is in them
"""
