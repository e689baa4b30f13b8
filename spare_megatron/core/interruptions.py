"""What interrupted a published training, by cause."""

from collections.abc import Mapping
from types import MappingProxyType

LLAMA3_INTERRUPTIONS: Mapping[str, int] = MappingProxyType(
    {
        "gpu": 148,
        "hbm": 72,
        "software": 54,
        "switch_or_cable": 35,
        "host_maintenance": 32,
        "sram": 19,
        "system_processor": 17,
        "nic": 7,
        "nccl_watchdog": 7,
        "silent_data_corruption": 6,
        "thermal": 6,
        "ssd": 3,
        "psu": 3,
        "cpu": 2,
        "chassis": 2,
        "io_board": 2,
        "dependency": 2,
        "memory": 2,
    }
)
"""Cause -> unplanned interruptions of Llama 3 405B in 54 days on 16,384 GPUs (arXiv 2407.21783)."""
