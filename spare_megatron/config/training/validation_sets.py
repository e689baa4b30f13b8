"""What an evaluation reads by the configuration: its validation sets, and their division into units of work."""

from collections.abc import Iterator

from spare_megatron.config.batch_size import sequences_per_microbatch
from spare_megatron.config.program_file import judge_program
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import validation_names
from spare_megatron.config.training.terms import global_batch


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
    if settings.sequences is not None and settings.sequences % per_index:
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
