"""`spare preprocess` and `spare tokenizer`: input files, tokenizers, and the processes that tokenize."""
