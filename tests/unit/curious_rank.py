"""The main function of a rank that reports what was visible, and what was imported, when its module was imported."""

import os
import sys
from multiprocessing.connection import Connection

from spare_megatron.process.specs import RankSpec

SEEN = os.environ.get("CUDA_VISIBLE_DEVICES")
IMPORTED = sorted(sys.modules.keys() & {"torch", "megatron", "transformer_engine"})


def report_seen(spec: RankSpec, reports: Connection) -> None:
    reports.send((spec.gpu, spec.device, SEEN, IMPORTED))
    reports.recv()  # until it is killed
