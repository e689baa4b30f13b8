"""What is wrong with the corpus that a configuration names."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.sizes import gib
from spare_megatron.config.terms import global_batch

INDEX_BYTES_PER_SAMPLE = 12
"""Of Megatron's sample index at the least: a document and an offset, and a place in the shuffled order."""
MOST_SEED = 2**32 - 1
"""Megatron shuffles with NumPy's RandomState, which takes no larger one."""


def data_problems(
    config: RunConfig, *, has_corpus: bool, corpus_vocab_size: int | None, memory_bytes: int | None
) -> Iterator[str]:
    """Every reason why no samples could be read.

    Args:
        config: The configuration.
        has_corpus: Both files of `data.corpus` exist.
        corpus_vocab_size: The vocabulary it was written with, where that is known.
        memory_bytes: What the process that builds the sample index may take at the most, where that is known.
    """
    corpus, seed = config.data.corpus, config.train.seed
    prefix = corpus.removesuffix(".bin").removesuffix(".idx")
    if seed > MOST_SEED:
        yield f"train.seed={seed} exceeds {MOST_SEED}, beyond which no order of the samples can be drawn; lower it"
    num_samples = config.train.steps * global_batch(config)
    index_bytes = INDEX_BYTES_PER_SAMPLE * num_samples
    if memory_bytes is not None and index_bytes > memory_bytes:
        yield (
            f"train.steps={config.train.steps} of {global_batch(config)} sequences each need a sample index of "
            f"{gib(index_bytes)}, and this machine has {gib(memory_bytes)} of memory for it; lower it: where "
            f"train.max_minutes ends the run, as many steps as it can come to are enough"
        )
    if not corpus:
        yield "data.corpus is empty; set it to the path prefix that `spare preprocess` wrote"
    elif not has_corpus and prefix != corpus:
        yield f"data.corpus={corpus} is a file, and the prefix of its two files is meant; set it to {prefix}"
    elif not has_corpus:
        yield (
            f"data.corpus={corpus}: {corpus}.bin or {corpus}.idx is missing; write them with "
            f"`spare preprocess --input DIR --output-prefix {corpus} --tokenizer byte` or change data.corpus"
        )
    elif corpus_vocab_size is not None and corpus_vocab_size > config.model.vocab_size:
        yield (
            f"model.vocab_size={config.model.vocab_size} is below the {corpus_vocab_size} tokens that "
            f"data.corpus={corpus} was written with; raise it"
        )
