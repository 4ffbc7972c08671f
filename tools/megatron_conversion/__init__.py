"""Conversion of checkpoints of Megatron and of Megatron-DeepSpeed.

deepspeed.py, megatron.py, torch_dist.py
                            readers: the files, and the parameters in them
source.py                   the result of a reader; Megatron's arguments as our settings
names.py                    names of parameters; tensor-parallel shards merged into full tensors
unpickle.py                 pickles, without executing anything in them
convert.py                  the conversion: find, check, write
"""
