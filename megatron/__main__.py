"""`python -m megatron`: train, as pretrain_gpt.py and megatron-train do."""

from megatron.program import main

if __name__ == "__main__":
    main()
