"""Text side of a request: tokenizer, chat encoding, incremental detokeniser; no torch."""
