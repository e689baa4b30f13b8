"""Preloaded last in the fork server: computes the digest of the imported code, which all its children inherit."""

from spare_megatron.config.own_code import code_digest

code_digest()
