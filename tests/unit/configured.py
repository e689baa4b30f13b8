"""Configurations for validation, and a machine with room for them."""

from spare_megatron.config.checks.validate import MachineResources
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig

CPU = MachineResources(num_gpus=0, num_cores=64, has_corpus=True)
GOLOMB = ("layout.num_groups=7", "spare.redundancy=3")


def configured(*overrides: str) -> RunConfig:
    return load_run_config(None, ["data.corpus=c", *overrides]).config
