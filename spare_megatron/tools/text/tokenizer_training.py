"""Trains a byte-level BPE tokenizer, as that of GPT-2: any text has tokens, and none is unknown."""

import json
import os
import threading
from collections.abc import Iterable

from spare_megatron.tools.text.tokenizer import library_errors, package

END_OF_TEXT = "<|endoftext|>"
LEAST_VOCAB_SIZE = 257
"""All bytes, and the token that ends a document."""


def train_bpe(texts: Iterable[str], vocab_size: int, num_workers: int) -> tuple[str, int]:
    """The tokenizer.json, and the size of its vocabulary: smaller than asked for if there are too few pairs to merge.

    Merges are by frequency, with ties by id, so the result does not depend on `num_workers`, the threads that count.
    The library runs in a thread of its own, so that a signal can end the process meanwhile. Raises as `texts` does.
    """
    # The library reads both when it starts its threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_workers > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(num_workers)
    tokenizers = package("tokenizers", "train")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    failures: list[Exception] = []

    def train() -> None:
        try:
            with library_errors("the tokenizer cannot be trained"):
                tokenizer.train_from_iterator(texts, trainer)
        except (ValueError, MemoryError) as error:
            failures.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return tokenizer.to_str(pretty=True) + "\n", tokenizer.get_vocab_size()


def tokenizer_config() -> str:
    """The tokenizer_config.json beside it, by which transformers load the folder."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    return json.dumps({**config, "clean_up_tokenization_spaces": False}, indent=2) + "\n"
