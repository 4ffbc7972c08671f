"""`python -m megatron`: train, like pretrain_gpt.py and megatron-train."""

from megatron.program import main

if __name__ == "__main__":
    main()
