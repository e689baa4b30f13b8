"""Problems of corpus, memory, metrics and optimizer."""

import importlib.util
from collections import Counter
from collections.abc import Iterator

from spare_megatron.config.checks.requirements import ID, TOKENS, broken
from spare_megatron.config.schema import MetricsConfig, RunConfig
from spare_megatron.config.training.corpus import (
    HELD_OUT,
    CorpusFacts,
    described_corpora,
    is_same_corpus,
    named_corpora,
    named_set,
    validation_names,
)
from spare_megatron.config.training.read_samples import phase_problems, skip_problems
from spare_megatron.config.training.run_sizes import memory_by_length, ranks_per_machine
from spare_megatron.config.training.terms import how_to_allow
from spare_megatron.formats.quantities import format_binary_bytes

INDEX_BYTES_PER_SAMPLE = 12
"""Least size of a sample in Megatron's index: document, offset, and place in the shuffled order."""


def data_problems(
    config: RunConfig,
    *,
    has_corpus: bool,
    corpus_failure: str,
    corpus: CorpusFacts | None,
    program: frozenset[str],
    memory_bytes: int | None,
) -> Iterator[str]:
    """Every reason why no samples could be read; the facts are those of `Machine`."""
    data = config.data
    yield from skip_problems(data.skip)
    yield from phase_problems(data.phases)
    if data.blend and data.corpus:
        yield f"data.corpus={data.corpus} and {data.named} are both set; clear one of them"
    elif not data.corpora:
        if "datasets_provider" not in program:
            yield "data.corpus is empty; set it to the path prefix that `spare preprocess` wrote"
        elif data.fim_rate:
            yield f"data.fim_rate={data.fim_rate:g} is for corpora, and datasets_provider makes the samples; remove it"
        elif data.split or data.validation:
            yield "data.split and data.validation divide corpora, and data.corpus is empty; set it, or remove them"
        elif data.reset_attention_mask and data.end_of_document is None:
            yield (
                "data.reset_attention_mask=true needs the token that ends a document, and there is no note of a corpus "
                "that names it; set data.end_of_document to the id of that token"
            )
    elif corpus_failure:
        yield corpus_failure
    elif not has_corpus:
        yield _missing(data.corpus)
    elif corpus is not None:
        trained_on = [facts for _, facts in corpus.parts] or [corpus]
        for facts, (name, prefix) in zip(trained_on, named_corpora(data), strict=False):  # validation sets come last
            yield from _unfit(config, name, prefix, facts, memory_bytes)
        yield from _ends(config, corpus)
        yield from broken(TOKENS, config)
        yield from _validation(config, corpus)
        if "corpus" not in config.checkpoint.allow_changes and not is_same_corpus(data.identity, corpus.identity):
            ours, theirs = described_corpora(corpus.identity, data.identity)
            yield (
                f"{data.named} is {ours!r}, not data.identity={theirs!r}; use that corpus, "
                f"clear data.identity, or {how_to_allow('corpus', config)} to continue with this one"
            )


def _missing(corpus: str) -> str:
    prefix = corpus.removesuffix(".bin").removesuffix(".idx")
    if prefix != corpus:
        return f"data.corpus={corpus} is a file; set it to the common prefix of the two files, {prefix}"
    return (
        f"data.corpus={corpus}: {corpus}.bin or {corpus}.idx is missing; write them with "
        f"`spare preprocess --input DIR --output-prefix {corpus} --tokenizer byte` or change data.corpus"
    )


def _unfit(
    config: RunConfig, name: str, prefix: str, corpus: CorpusFacts, memory_bytes: int | None = None
) -> Iterator[str]:
    vocab_size = config.model.vocab_size
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        yield (f"model.vocab_size={vocab_size} is below the vocabulary of {name}, {corpus.vocab_size} tokens; raise it")
    elif corpus.largest_token >= vocab_size:
        yield (
            f"{name}: {prefix}.bin has token ids up to {corpus.largest_token}, but "
            f"model.vocab_size={vocab_size}; raise that to at least {corpus.largest_token + 1}"
        )
    if corpus.least_token < 0:
        yield f"{name}: {prefix}.bin has negative token ids, down to {corpus.least_token}; rewrite it with ids from 0"
    num_samples = corpus.num_tokens // config.model.seq_length
    index_bytes = INDEX_BYTES_PER_SAMPLE * num_samples
    if memory_bytes is not None and index_bytes > memory_bytes:
        yield (
            f"{name} has {num_samples} sequences in an epoch, whose sample index takes "
            f"{format_binary_bytes(index_bytes)} to build, but this machine has {format_binary_bytes(memory_bytes)} of "
            f"memory for it; start from a larger one, or cut the corpus"
        )


def _ends(config: RunConfig, corpus: CorpusFacts) -> Iterator[str]:
    data, given, noted = config.data, config.data.end_of_document, corpus.end_of_document
    if not data.document_settings:
        return
    if given is None and noted is None:
        yield (
            f"data.{data.document_settings[0]} needs the token that ends a document, and no note of "
            f"`spare preprocess` names one for all of {data.named}; write it anew, or set data.end_of_document to the "
            f"id of that token"
        )
    elif given is not None and noted not in (None, given):
        yield (
            f"data.end_of_document={given}, but by its note {data.named} ends documents with token {noted}; clear the "
            f"setting"
        )
    elif given is not None and given >= config.model.vocab_size:
        yield f"data.end_of_document={given} is not below model.vocab_size={config.model.vocab_size}; change one"


def _validation(config: RunConfig, corpus: CorpusFacts) -> Iterator[str]:
    data = config.data
    if repeated := [name for name, count in Counter(validation_names(data)).items() if count > 1]:
        yield (
            f"data.validation: name={repeated[0]} is the name of two validation sets"
            f"{', one of them that of data.split' if repeated[0] == HELD_OUT else ''}; rename one"
        )
    end = corpus.end_of_document if data.end_of_document is None else data.end_of_document
    tokenizers = {facts.tokenizer for facts in [corpus, *(facts for _, facts in corpus.parts)]} - {""}
    for one, facts in zip(data.validation, corpus.validation, strict=True):
        name = named_set(one)
        if not ID.fullmatch(one.name):
            yield f"{name}: use at most 64 letters, digits, hyphens and underscores for the name"
        yield from _unfit(config, name, one.corpus, facts)
        if facts.num_tokens <= config.model.seq_length:
            yield (
                f"{name} has {facts.num_tokens} tokens, a window needs model.seq_length + 1 = "
                f"{config.model.seq_length + 1}; use a larger corpus or shorter sequences"
            )
        if facts.tokenizer and tokenizers and facts.tokenizer not in tokenizers:
            yield (
                f"{name} was written with tokenizer {facts.tokenizer}, and {data.named} with "
                f"{', '.join(sorted(tokenizers))}; write both with one"
            )
        ends = {facts.end_of_document, end} - {None}
        if data.document_settings and len(ends) > 1:
            yield f"{name} ends documents with token {facts.end_of_document}, {data.named} with {end}; write both alike"
        if not is_same_corpus(one.identity, facts.identity):
            yield (
                f"{name} is {facts.identity!r}, not identity={one.identity!r}; use that corpus, or clear its identity"
            )


def memory_problems(config: RunConfig, device_bytes: int | None) -> Iterator[str]:
    """Whether ranks of an otherwise valid configuration exceed the memory of a machine or, if they are on GPUs, of one
    of these; activations left out. None: it is not known.
    """
    layout, sharing, is_gpu = config.layout, config.cluster.ranks_per_gpu, config.cluster.device == "gpu"
    where, first = f"machine (layout.num_groups={layout.num_groups})", "lower layout.num_groups"
    if is_gpu:
        where, first = f"GPU (cluster.ranks_per_gpu={sharing})", "raise layout.tensor_parallel"
    remedy = f"{first}, choose a smaller model, or set optimizer.sharding=stacked"
    for stages, memory in memory_by_length(config).items():
        num_ranks = sharing if is_gpu else ranks_per_machine(config, stages)
        needed = num_ranks * (memory.total_bytes - memory.activations_bytes)
        if device_bytes is None or needed <= device_bytes:
            continue
        if stages < layout.pipeline_parallel:
            where += f" in groups of {stages} stages"
            remedy = f"raise layout.least_pipeline_parallel={layout.least_pipeline_parallel}, or remove it"
        yield (
            f"{num_ranks} {'ranks' if num_ranks > 1 else 'rank'} on one {where} need "
            f"{format_binary_bytes(needed)} for parameters, gradients, buckets and optimizer state, but it has "
            f"{format_binary_bytes(device_bytes)} of memory; {remedy}"
        )
        return


def metrics_problems(metrics: MetricsConfig, *, can_serve: bool = True) -> Iterator[str]:
    """`can_serve`: this machine can listen where Prometheus is to read."""
    port = metrics.prometheus_port
    wanted = {
        "metrics.tensorboard": (metrics.tensorboard, "tensorboard"),
        "metrics.wandb_project": (metrics.wandb_project, "wandb"),
        "metrics.prometheus_port": (port, "prometheus_client"),
    }
    for name, (value, package) in wanted.items():
        if value and importlib.util.find_spec(package) is None:
            yield (
                f"{name}={value} needs the package {package}, which is not installed: "
                "pip install 'spare_megatron[metrics]', or remove the setting"
            )
    if port is not None and not 1 <= port <= 65535:
        yield f"metrics.prometheus_port={port} lies outside 1 to 65535; change it"
    elif port is not None and not can_serve:
        yield (
            f"metrics.prometheus_port={port}: this machine cannot listen there at metrics.prometheus_address="
            f"{metrics.prometheus_address!r}; choose a port that nothing uses, and one of its addresses"
        )


def lane_problems(config: RunConfig) -> Iterator[str]:
    """Why the lanes of a group cannot share its work."""
    spare, num_lanes = config.spare, config.layout.data_parallel
    if num_lanes == config.row_size == 1 or config.row_size < 1:
        return
    lanes = f"layout.data_parallel={num_lanes}"
    sharing = lanes if config.layout.expert_parallel is None else f"layout.expert_parallel={config.row_size}"
    settings = [("microbatches_per_shard", spare.microbatches_per_shard)]
    if spare.ramp_start is not None:
        settings += [("ramp_start", spare.ramp_start), ("ramp_increment", spare.ramp_increment)]
    for name, value in settings:
        if value % config.row_size:
            yield (
                f"spare.{name}={value} is no multiple of {sharing}: so many lanes share the experts, and compute as "
                f"many microbatches of a shard together; set it to {-(-value // config.row_size) * config.row_size}"
            )
        elif value < num_lanes and name != "ramp_increment":
            yield (
                f"spare.{name}={value} is below {lanes}, and some lanes would have nothing to compute; raise the "
                f"former or lower the latter"
            )
