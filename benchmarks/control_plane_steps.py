"""What steps leave in the control store: in its memory, and in etcd's database before and after it is compacted."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from spare_megatron.core.log.entries import Commit, encode_entry
from spare_megatron.core.log.votes import Vote
from spare_megatron.formats.codec import encode, set_fields
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.etcd_gateway import etcd_space
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import EtcdStoreSpec, StoreSpec
from tests.integration.etcd_cluster import ask

NUM_GROUPS = 4
_VOTE = encode(set_fields(Vote(is_complete=True, plan_digest="a" * 64, params_digest="b" * 64, num_complete=(1,))))


def measure_steps(spec: StoreSpec, num_steps: int, servers: Sequence[int]) -> dict[str, object]:
    """Steps of a few groups that vote directly, and forget their votes as real ones do. The second half is counted."""
    logs = [DecisionLog(open_store(spec)) for _ in range(NUM_GROUPS)]

    def commit_step(step: int) -> None:
        def cast(group: int) -> None:
            member = Member(GroupId(group))
            logs[group].cast(step, member, {member: _VOTE}, forget=[step - 2])

        list(pool.map(cast, range(NUM_GROUPS)))
        logs[0].append(step, encode_entry(Commit(step=step, attempt=step, at_s=float(step))))

    half = num_steps // 2
    with ThreadPoolExecutor(NUM_GROUPS) as pool:
        for step in range(half):
            commit_step(step)
        before, used_before = _memory_bytes(servers), _database_bytes(spec)
        for step in range(half, num_steps):
            commit_step(step)
    counted = num_steps - half
    found: dict[str, object] = {
        "steps": num_steps,
        "groups": NUM_GROUPS,
        "server_bytes_per_step": (_memory_bytes(servers) - before) / len(servers) / counted,
    }
    if isinstance(spec, EtcdStoreSpec):
        found["database_bytes_per_step"] = (_database_bytes(spec) - used_before) / counted
        found["compacted_bytes_per_step"] = _compacted_bytes(spec) / num_steps
    return found


def _memory_bytes(servers: Sequence[int]) -> int:
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in servers)


def _database_bytes(spec: StoreSpec) -> int:
    return etcd_space(spec).used_bytes if isinstance(spec, EtcdStoreSpec) else 0


def _compacted_bytes(spec: EtcdStoreSpec) -> int:
    """One member's database, once nothing but the newest versions are left and its pages are filled anew."""
    member = spec.endpoints[0]
    revision = ask(member, "/v3/kv/range", {"key": "AA=="})["header"]["revision"]
    ask(member, "/v3/kv/compaction", {"revision": revision, "physical": True})
    ask(member, "/v3/maintenance/defragment", {})
    return _database_bytes(replace(spec, endpoints=(member,)))
