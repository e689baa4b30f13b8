"""The only importer of megatron-core: model, data, gradients, optimizer, adaptations.

Imports `stacking`, `core` and `config`.
Start with `trainer`; `versions` says which packages it was checked against.
"""
