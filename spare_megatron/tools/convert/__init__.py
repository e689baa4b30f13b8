"""`spare convert`: the arguments of a launch of Megatron-LM's `pretrain_gpt.py`, as a preset."""
