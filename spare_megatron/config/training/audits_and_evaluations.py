"""When a run audits, and what its evaluations read."""

from collections.abc import Iterator

from spare_megatron.config.batch_size import sequences_per_microbatch
from spare_megatron.config.program_file import judge_program
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import validation_names
from spare_megatron.config.training.terms import global_batch
from spare_megatron.core.audits.audits import AuditPolicy, default_every_steps


def audit_policy(config: RunConfig) -> AuditPolicy | None:
    """The audits of a run whose device is resolved; None if it has none."""
    every_steps = config.audit.every_steps
    if every_steps is None:
        is_safe = next(obstacles(config), None) is None and not _may_add_differently(config)
        at_once = config.layout.data_parallel * config.rounds.multiple
        every_steps = default_every_steps(config.spare.microbatches_per_shard, at_once) if is_safe else 0
    if not every_steps:
        return None
    return AuditPolicy(every_steps=every_steps, seed=config.train.seed, rounds=config.rounds)


def _may_add_differently(config: RunConfig) -> bool:
    """Whether sums inside groups may depend on how the GPUs of their nodes are connected: a sum of two does not."""
    return config.cluster.device == "gpu" and config.layout.tensor_parallel * config.layout.context_parallel > 2


def audit_problems(config: RunConfig) -> Iterator[str]:
    every_steps = config.audit.every_steps
    if every_steps is not None and every_steps < 0:
        return  # a violation of its own
    for obstacle in obstacles(config) if every_steps else ():
        yield f"audit.every_steps={every_steps}, but {obstacle}; set that, or audit.every_steps=0"


def obstacles(config: RunConfig) -> Iterator[str]:
    """Settings with which no other group computes the same microbatch to the same bits."""
    if config.layout.num_groups == 1:
        yield "layout.num_groups=1 leaves no other group"
    elif config.spare.redundancy == 1 and config.data.access != "shared":
        yield "spare.redundancy=1 gives every shard one host, and an audit needs another one"
    if config.cluster.device == "gpu" and config.reduce.mode != "reproducible":
        yield (
            f"reduce.mode={config.reduce.mode} lets GPUs choose kernels whose results differ from time to time, and "
            f"audits need reproducible"
        )
    if config.megatron.get("gradient_accumulation_fusion"):
        yield "megatron.gradient_accumulation_fusion hides the gradient of a single microbatch"


def sequences_per_set(config: RunConfig) -> int:
    """The most sequences that an evaluation reads of each validation set."""
    return config.eval.sequences or global_batch(config)


def units_per_shard(config: RunConfig) -> int:
    """Units of work of a shard in an evaluation, those of all sets together; 0 if the run has none."""
    if not config.eval.every_steps:
        return 0
    return len(validation_names(config.data)) * units_per_set(config)


def units_per_set(config: RunConfig) -> int:
    return sequences_per_set(config) // _sequences_per_unit(config)


def _sequences_per_unit(config: RunConfig) -> int:
    return sequences_per_microbatch(config) * config.row_size


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    settings = config.eval
    if not settings.every_steps:
        return
    if "datasets_provider" in judge_program(config.program)[0]:
        yield (
            f"eval.every_steps={settings.every_steps} evaluates on the validation sets of [data], and "
            f"program.file={config.program.file} defines datasets_provider, which has none; set it to 0"
        )
    lanes = "layout.data_parallel" if config.layout.expert_parallel is None else "layout.expert_parallel"
    per_index, rows = _sequences_per_unit(config), "" if config.row_size == 1 else f"{lanes} x "
    if settings.sequences is not None and per_index and settings.sequences % per_index:
        yield (
            f"eval.sequences={settings.sequences} is no multiple of layout.num_groups x {rows}train.micro_batch_size="
            f"{per_index}; set it to {-(-settings.sequences // per_index) * per_index}"
        )
    try:
        has_sets = bool(validation_names(config.data))
    except ValueError:
        return  # reported with the corpus
    if not has_sets:
        yield (
            f"eval.every_steps={settings.every_steps} needs a validation set, and data.split="
            f"{config.data.split or 'empty'} holds no text out; set it as in 99,1, or name a corpus in data.validation"
        )
