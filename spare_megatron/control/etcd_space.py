"""How large an etcd is."""

import contextlib
import re

from spare_megatron.config.store_space import StoreSpace
from spare_megatron.control.etcd_gateway import EtcdGateway, Message, is_full
from spare_megatron.control.spec import EtcdStoreSpec

_QUOTA = re.compile(r"^etcd_server_quota_backend_bytes (\S+)$", re.MULTILINE)


def etcd_space(spec: EtcdStoreSpec) -> StoreSpace:
    """How large the database of one of the members is, as it tells; those of the others are much the same.

    Raises:
        StoreLost: None answers.
    """
    with contextlib.closing(EtcdGateway(spec)) as gateway:
        status = gateway.call("/v3/maintenance/status", {})
        return StoreSpace(
            used_bytes=int(status.get("dbSizeInUse", 0)),
            limit_bytes=_quota(status, gateway),
            is_full=is_full(status),
        )


def _quota(status: Message, gateway: EtcdGateway) -> int | None:
    """From etcd 3.6 on a member's status has it, before that only its metrics."""
    if "dbSizeQuota" in status:
        return int(status["dbSizeQuota"])
    found = _QUOTA.search(gateway.metrics())
    return None if found is None else int(float(found[1]))
