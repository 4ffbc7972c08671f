"""The families of tokenizers behind megatron.data.tokenizer. Each library is imported when its family is built."""
