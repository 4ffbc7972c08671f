"""Token files, samples from them, tokenizers, and the micro-batches that training reads."""
