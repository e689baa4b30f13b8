"""Imported in the fork server alone, after all else: what it forks has the digest of the code that it has imported."""

from spare_megatron.config.own_code import code_digest

code_digest()
