"""Whether an etcd answers: asked for a short time before anything is started that would wait for it for long."""

import contextlib
from dataclasses import replace

from spare_megatron.control.etcd_gateway import EtcdGateway, StoreRefused, encoded
from spare_megatron.control.spec import EtcdStoreSpec
from spare_megatron.control.store import StoreLost

ANSWER_S = 5.0
"""An election takes less."""


def silence_of(spec: EtcdStoreSpec) -> str:
    """Why no member with a quorum answers within some seconds; empty if one does, and be it that it refuses."""
    with contextlib.closing(EtcdGateway(replace(spec, timeout_s=ANSWER_S))) as gateway:
        try:
            gateway.call("/v3/kv/range", {"key": encoded(spec.prefix)})
        except StoreRefused:  # told where that which is refused is wanted
            return ""
        except StoreLost as lost:
            return str(lost.__cause__)
    return ""
