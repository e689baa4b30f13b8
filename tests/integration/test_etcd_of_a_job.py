"""The etcd that a job brings up: its own processes use it, and no others."""

import dataclasses
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme

from spare_megatron.config.schema import ControlConfig
from spare_megatron.driver.slurm import etcd
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.open_store import etcd_spec
from spare_megatron.store.spec import EtcdStoreSpec
from tests.integration.etcd_cluster import ports_for_members
from tests.integration.test_etcd_security import write_certificate

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]


@pytest.fixture(scope="module")
def of_the_job(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdStoreSpec, Path]]:
    """Its three members are processes of this machine instead of steps on three nodes."""
    folder = tmp_path_factory.mktemp("job") / "etcd"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{etcd_binary.parent}:{os.environ['PATH']}")
        patch.setattr(etcd, "address_of", lambda _: "127.0.0.1")
        patch.setattr(etcd, "step_command", lambda _name, _node, command: command)
        patch.setattr(etcd, "_END_S", 0.2)  # members without a step around them do not end when they are asked to
        with etcd.etcd_of_the_job(
            ["n1", "n2", "n3"], ControlConfig(store="etcd"), ports_for_members(), "token", folder
        ) as control:
            yield etcd_spec(control, "run", {}), folder


def test_its_own_processes_read_and_write_through_every_member(of_the_job: tuple[EtcdStoreSpec, Path]) -> None:
    spec, _ = of_the_job
    assert len(spec.endpoints) == 3
    for i, endpoint in enumerate(spec.endpoints):
        store = EtcdControlStore(dataclasses.replace(spec, endpoints=(endpoint,)))
        assert store.put_if_absent(f"log/{i}", "entry") == "entry"
        assert store.get([f"log/{i}"]) == ["entry"]


@pytest.mark.parametrize("who", ["no user", "stranger", "in the clear"])
def test_a_stranger_can_neither_read_nor_write(
    of_the_job: tuple[EtcdStoreSpec, Path], tmp_path: Path, who: str
) -> None:
    spec, _ = of_the_job
    EtcdControlStore(spec).put("secret", "value")
    store = EtcdControlStore(dataclasses.replace(spec, timeout_s=1.0, **_means_of(who, spec.endpoints, tmp_path)))
    for attempt in (lambda: store.get(["secret"]), lambda: store.put("secret", "falsified")):
        with pytest.raises(StoreLost):
            attempt()
    assert EtcdControlStore(spec).get(["secret"]) == ["value"]


def _means_of(who: str, endpoints: Sequence[str], folder: Path) -> dict[str, object]:
    if who == "stranger":
        write_certificate(trustme.CA().issue_cert("trainer.test"), folder, "stranger")
        return {"cert_file": str(folder / "stranger.pem"), "key_file": str(folder / "stranger.key")}
    if who == "no user":
        return {"cert_file": "", "key_file": ""}
    return {"endpoints": tuple(endpoint.replace("https", "http") for endpoint in endpoints)}


def test_only_the_owner_can_read_the_keys_and_no_one_can_sign_more(of_the_job: tuple[EtcdStoreSpec, Path]) -> None:
    _, folder = of_the_job
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = sorted(path for path in folder.iterdir() if b"PRIVATE KEY" in path.read_bytes())
    assert [path.name for path in keys] == ["client.key", "member.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
