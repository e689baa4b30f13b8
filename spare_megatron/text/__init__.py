"""Text and its tokens: input files, tokenizers, and the processes that tokenize. Optional packages are imported by the
one module that needs them, when it needs them.
"""
