"""Text in, records out, batches out: readers, tokenizer, packing, record files, and the loader that training reads."""
