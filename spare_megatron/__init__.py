"""spare_megatron: GPT pretraining on megatron-core that masks the loss of data-parallel groups."""

__version__ = "0.1.0"
