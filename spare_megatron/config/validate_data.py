"""What is wrong with the corpus that a configuration names."""

from collections.abc import Iterator

from spare_megatron.config.corpus import CorpusFacts, is_same_corpus
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.sizes import gib
from spare_megatron.config.terms import global_batch

INDEX_BYTES_PER_SAMPLE = 12
"""Of Megatron's sample index at the least: a document and an offset, and a place in the shuffled order."""
MOST_SEED = 2**32 - 1
"""Megatron shuffles with NumPy's RandomState, which takes no larger one."""


def data_problems(
    config: RunConfig,
    *,
    has_corpus: bool,
    corpus_failure: str,
    corpus: CorpusFacts | None,
    memory_bytes: int | None,
) -> Iterator[str]:
    """Every reason why no samples could be read.

    Args:
        config: The configuration.
        has_corpus: Both files of `data.corpus` exist.
        corpus_failure: Why they cannot be used, empty if they can.
        corpus: What is in them, where that is known.
        memory_bytes: What the process that builds the sample index may take at the most, where that is known.
    """
    seed = config.train.seed
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
    if not config.data.corpus:
        yield "data.corpus is empty; set it to the path prefix that `spare preprocess` wrote"
    elif corpus_failure:
        yield corpus_failure
    elif not has_corpus:
        yield _missing(config.data.corpus)
    elif corpus is not None:
        yield from _unfit(config, corpus)


def _missing(corpus: str) -> str:
    prefix = corpus.removesuffix(".bin").removesuffix(".idx")
    if prefix != corpus:
        return f"data.corpus={corpus} is a file, and the prefix of its two files is meant; set it to {prefix}"
    return (
        f"data.corpus={corpus}: {corpus}.bin or {corpus}.idx is missing; write them with "
        f"`spare preprocess --input DIR --output-prefix {corpus} --tokenizer byte` or change data.corpus"
    )


def _unfit(config: RunConfig, corpus: CorpusFacts) -> Iterator[str]:
    """Why the model cannot be trained on it."""
    data, vocab_size = config.data, config.model.vocab_size
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        yield (
            f"model.vocab_size={vocab_size} is below the {corpus.vocab_size} tokens that data.corpus={data.corpus} was "
            f"written with; raise it"
        )
    elif corpus.largest_token >= vocab_size:
        yield (
            f"data.corpus={data.corpus}: {data.corpus}.bin has token ids up to {corpus.largest_token}, which "
            f"model.vocab_size={vocab_size} does not have; raise that to at least {corpus.largest_token + 1}"
        )
    if corpus.least_token < 0:
        yield (
            f"data.corpus={data.corpus}: {data.corpus}.bin has negative token ids, down to {corpus.least_token}; write "
            f"it anew, with ids from 0"
        )
    if not config.checkpoint.allow_other_corpus and not is_same_corpus(data.identity, corpus.identity):
        yield (
            f"data.corpus={data.corpus} is {corpus.identity!r}, and not data.identity={data.identity!r}; choose that "
            f"corpus, set data.identity to nothing, or checkpoint.allow_other_corpus=true where a checkpoint is of it"
        )
