"""pretrain_gpt.py, but rank 1 raises while it builds its model."""
import os
import sys

sys.path.insert(0, os.getcwd())

import pretrain_gpt

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        import megatron.model.gpt as gpt

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a fault of this rank alone")

        gpt.build_chunks = broken
        gpt.GPTChunk.__init__ = broken
    pretrain_gpt.leave(pretrain_gpt.main(sys.argv[1:]))
