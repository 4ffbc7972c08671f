"""Conversion of checkpoints from Megatron, Megatron-DeepSpeed and Hugging Face, and to the latter.

deepspeed.py, megatron.py, torch_dist.py
                            readers: the files, and the parameters in them
source.py                   the result of a reader; Megatron's arguments as our settings
names.py                    names of parameters; tensor-parallel shards merged into full tensors
unpickle.py                 pickles, without executing anything in them
convert.py                  from Megatron and Megatron-DeepSpeed: find, check, write
huggingface.py              from and to Hugging Face
write.py                    writer of our checkpoints that needs no model
"""
