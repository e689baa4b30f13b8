"""An etcd that is full: it refuses writes and answers all else, and a run ends with all that it has committed."""

import dataclasses
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.driver import driver
from spare_megatron.process.reports import RunEvent, StepCommitted, StoreMeasured
from spare_megatron.state.checkpoint.start_checkpoint import resumed
from spare_megatron.store.etcd_gateway import StoreFull, encoded, etcd_space
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.spec import EtcdStoreSpec
from tests.integration.etcd_cluster import EtcdCluster, ask, running_cluster
from tests.integration.whole_run import REPLICATED, alert_config, complete_run

pytestmark = pytest.mark.timeout(180)

DEMO = Path(__file__).parents[2] / "configs/run/demo_cpu.toml"
QUOTA_BYTES, FILLING_BYTES = 4 << 20, 1 << 19
NUM_STEPS = 60
"""Of a run whose store is full long before its last: when ten are done, and each takes writes of its own."""
SOON_S = 30.0
"""Far less than any timeout of the runs here: a caller that gets the error does not wait for one."""


@pytest.fixture
def small_cluster(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_cluster(etcd_binary, tmp_path, options=[f"--quota-backend-bytes={QUOTA_BYTES}"]) as cluster:
        yield cluster


def spec_of(cluster: EtcdCluster, prefix: str = "/spare/test") -> EtcdStoreSpec:
    return EtcdStoreSpec(endpoints=cluster.endpoints, prefix=prefix, timeout_s=60.0)


def fill(cluster: EtcdCluster) -> int:
    """As another user might, until etcd takes nothing any more; returns the bytes that it has taken."""
    with closing(EtcdControlStore(spec_of(cluster, "/other"))) as store:
        for number in range(QUOTA_BYTES // FILLING_BYTES + 1):
            try:
                store.put(f"filling/{number}", "x" * FILLING_BYTES)
            except StoreFull:
                return number * FILLING_BYTES
    raise AssertionError("etcd takes more than its quota")


def relieve(cluster: EtcdCluster) -> None:
    """What the operator of etcd does, as the error says: what filled it goes, and the alarm with it."""
    (only, *others) = cluster.endpoints
    gone = ask(only, "/v3/kv/deleterange", {"key": encoded("/other/"), "range_end": encoded("/other0")})
    ask(only, "/v3/kv/compaction", {"revision": gone["header"]["revision"], "physical": True})
    for endpoint in (only, *others):
        defragment(endpoint)
    for alarm in ask(only, "/v3/maintenance/alarm", {"action": "GET"})["alarms"]:
        ask(only, "/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})


def defragment(endpoint: str) -> None:
    """Until it has an effect: only the member that was asked has answered after its compaction."""
    end_s = time.monotonic() + SOON_S
    while True:
        ask(endpoint, "/v3/maintenance/defragment", {})
        if int(ask(endpoint, "/v3/maintenance/status", {})["dbSize"]) < QUOTA_BYTES / 10:
            return
        assert time.monotonic() < end_s, "the compaction has not come to this member"


def test_writes_are_refused_at_once_with_the_size_and_what_to_do_and_reads_go_on(small_cluster: EtcdCluster) -> None:
    with closing(EtcdControlStore(spec_of(small_cluster))) as store:
        store.put("before", "value")
        store.beat("beat/0", "1", 60)
        fill(small_cluster)
        began_s = time.monotonic()
        writes: list[Any] = [
            lambda: store.put("key", "value"),
            lambda: store.put_if_absent("log/0", "entry"),
            lambda: store.put_counted("vote", "ok", "votes"),
            lambda: store.beat("beat/0", "2", 60),
            lambda: store.beat("beat/1", "1", 60),
        ]
        for write in writes:
            with pytest.raises(StoreFull, match=r"its database has \S+ MiB, its quota; remove the keys of runs"):
                write()
        assert time.monotonic() - began_s < SOON_S
        assert store.get(["before", "key", "log/0", "vote"]) == ["value", None, None, None]
        store.delete(["before"])
        assert store.get(["before"]) == [None]


def test_a_wait_for_a_key_that_cannot_be_written_raises_the_reason(small_cluster: EtcdCluster) -> None:
    """Reads go on, so that it would wait for its timeout, and longer than a supervisor lets ranks save their state."""
    with closing(EtcdControlStore(spec_of(small_cluster))) as waiting, ThreadPoolExecutor(1) as pool:
        assert not waiting.exists("log/0")
        entry = pool.submit(waiting.wait, "log/0", 600.0)
        fill(small_cluster)
        with pytest.raises(StoreFull):
            entry.result(SOON_S)


def test_its_size_and_quota_are_known_before_and_that_it_is_full(small_cluster: EtcdCluster) -> None:
    spec = spec_of(small_cluster)
    before = etcd_space(spec)
    assert before.limit_bytes == QUOTA_BYTES
    assert before.used_bytes < QUOTA_BYTES / 10
    assert not before.is_full
    filling_bytes = fill(small_cluster)
    alone = [dataclasses.replace(small_cluster, endpoints=(endpoint,)) for endpoint in small_cluster.endpoints]
    spaces = [etcd_space(spec_of(member)) for member in alone]
    used_bytes = max(space.used_bytes for space in spaces)
    # Members may lack what others have acknowledged. The quota is of the file, which has free pages too; a write that
    # is sent again takes its room twice.
    assert QUOTA_BYTES / 4 <= filling_bytes < used_bytes < QUOTA_BYTES * 3
    assert any(space.is_full for space in spaces)
    relieve(small_cluster)
    with closing(EtcdControlStore(spec)) as store:
        store.put("key", "value")
    assert not etcd_space(spec).is_full


def test_the_doctor_finds_it_full(small_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path) -> None:
    settings = (f"data.corpus={text_corpus}", "control.store=etcd", f"control.endpoints={[*small_cluster.endpoints]}")
    words = ["doctor", "--json", "--config", str(DEMO), "--folder", str(tmp_path / "doctor")]
    words += [word for setting in settings for word in ("--set", setting)]
    for code, found in ((0, []), (1, ["etcd is full and refuses all writes"])):
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == code, answer.output
        problems = json.loads(answer.stdout)["problems"]
        assert [problem["text"].partition(",")[0] for problem in problems if problem["check"] == "store"] == found
        if not found:
            fill(small_cluster)


def with_etcd(config: RunConfig, cluster: EtcdCluster, **control: Any) -> RunConfig:
    return dataclasses.replace(
        config, control=dataclasses.replace(config.control, store="etcd", endpoints=cluster.endpoints, **control)
    )


@pytest.mark.parametrize(
    "optimizer", [REPLICATED, OptimizerConfig(sharding="stacked", redundancy=2)], ids=["replicated", "stacked"]
)
def test_a_run_ends_with_its_last_step_and_goes_on_from_there_when_there_is_room_again(
    small_cluster: EtcdCluster,
    text_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: OptimizerConfig,
) -> None:
    config = alert_config(text_corpus, LayoutConfig(num_groups=3), steps=NUM_STEPS, optimizer=optimizer)
    # Longer than a supervisor waits for ranks that save their state: none may wait for an entry for so long.
    config = with_etcd(config, small_cluster, decision_timeout_s=600.0)
    saving = dataclasses.replace(config.checkpoint, interval_steps=NUM_STEPS // 2, folder=str(tmp_path / "shared"))
    config = dataclasses.replace(config, checkpoint=saving)
    filled_at_s: list[float] = []

    def fill_it(event: RunEvent) -> None:
        if isinstance(event, StepCommitted) and event.step == 2 and not filled_at_s:
            fill(small_cluster)
            filled_at_s.append(time.monotonic())

    with monkeypatch.context() as often:
        often.setattr(driver, "_STORE_POLL_S", 0.05)
        run = complete_run(config, tmp_path / "full", on_event=fill_it)
    assert time.monotonic() - filled_at_s[0] < SOON_S
    assert run.summary.outcome == "failed"
    assert "the control store is gone: etcd is full and refuses all writes" in run.summary.outcome_reason
    assert f"the state is in {tmp_path / 'shared'}" in run.summary.outcome_reason
    assert run.summary.groups_lost == 0
    measured = [event for event in run.events if isinstance(event, StoreMeasured)]
    assert measured[0].shortage == ""
    assert "etcd" in measured[-1].shortage

    left = {"key": encoded("/spare/"), "range_end": encoded("/spare0"), "count_only": True}
    assert "count" not in ask(small_cluster.endpoints[0], "/v3/kv/range", left)
    relieve(small_cluster)
    ended = complete_run(resumed(config, tmp_path / "shared"), tmp_path / "again")
    assert (ended.summary.outcome, ended.summary.verdict) == ("finished", "valid"), ended.summary
    assert ended.summary.steps_committed == NUM_STEPS - run.summary.steps_committed
