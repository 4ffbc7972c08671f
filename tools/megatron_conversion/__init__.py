"""Checkpoints of Megatron and of Megatron-DeepSpeed, read into this program's tensors.

deepspeed.py, megatron.py   which files there are, and which parameter is in which of them
source.py                   what a reader returns; Megatron's arguments as settings of ours
names.py                    names of parameters, and tensor-parallel parts joined into whole tensors
unpickle.py                 pickles, without running anything that is in them
convert.py                  all of it together: find, check, write
"""
