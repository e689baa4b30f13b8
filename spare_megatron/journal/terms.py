"""The terms of a run record that its settings fix, and their digest."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

TERMS = (
    "name",
    "num_groups",
    "ranks_per_group",
    "ranks_per_stage",
    "pipeline_fill",
    "redundancy",
    "microbatches_per_shard",
    "placement",
    "groups_per_domain",
    "granularity",
    "last_resort",
    "slice_redundancy",
    "reduce_mode",
    "num_steps",
    "params_check_every_steps",
    "loaded",
    "tokens_per_step",
    "flops_per_step",
    "peak_tflops",
    "max_minutes",
    "corpus",
)
"""Fields of the run record that its settings fix: every group knows them by itself."""


def digest_of_terms(terms: Mapping[str, Any]) -> str:
    """SHA-256 in hex of the values that `TERMS` names."""
    text = json.dumps([terms[name] for name in TERMS], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
