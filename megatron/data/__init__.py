"""Token files, samples drawn from them, tokenizers, and the micro-batches that training reads."""
