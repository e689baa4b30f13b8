"""etcd with TLS, client certificates and users, also a job's own: who may come in, and what never shows."""

import dataclasses
import os
import ssl
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from spare_megatron.config.schema import ControlConfig, LayoutConfig
from spare_megatron.driver.slurm import etcd
from spare_megatron.store.etcd_gateway import EtcdGateway, StoreRefused, encoded
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.open_store import etcd_spec
from spare_megatron.store.spec import Credentials, EtcdStoreSpec
from tests.integration.etcd_cluster import EtcdCluster, ServerTls, ask, ports_for_members, running_cluster
from tests.integration.whole_run import assert_masked, complete_run, kill, tiny_config

USER, PASSWORD, OTHER_PASSWORD = "trainer", "correct-horse-battery", "wrong-horse-battery"
ROOT = Credentials(user="root", password="root-of-the-test")
LONG_S = 60.0
"""A wait of this length is a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureCluster:
    """A cluster that wants a certificate and a user, and what a client that may use it has."""

    cluster: EtcdCluster
    control: ControlConfig
    spec: EtcdStoreSpec
    folder: Path


@pytest.fixture(scope="module")
def secure(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    folder = tmp_path_factory.mktemp("secure-etcd")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    write_certificate(authority.issue_cert("127.0.0.1"), folder, "server")
    write_certificate(authority.issue_cert("trainer.test"), folder, "client")
    write_certificate(trustme.CA().issue_cert("trainer.test"), folder, "stranger")
    write_secret(folder / "credentials", f"{USER}:{PASSWORD}\n")
    tls = ServerTls(ca_file=folder / "ca.pem", cert_file=folder / "server.pem", key_file=folder / "server.key")
    with running_cluster(etcd_binary, folder, tls) as cluster:
        control = ControlConfig(
            store="etcd",
            endpoints=cluster.endpoints,
            ca_file=str(folder / "ca.pem"),
            cert_file=str(folder / "client.pem"),
            key_file=str(folder / "client.key"),
            credentials_file=str(folder / "credentials"),
            store_timeout_s=20.0,
        )
        spec = etcd_spec(control, "test", {})
        add_user(dataclasses.replace(spec, credentials=None))
        yield SecureCluster(cluster=cluster, control=control, spec=spec, folder=folder)


def add_user(spec: EtcdStoreSpec) -> None:
    """Turns users on: root, and one that may read and write the keys of runs alone."""
    EtcdGateway(spec).call("/v3/kv/range", {"key": "AA=="})  # there is a leader
    tls = ssl.create_default_context(cafile=spec.ca_file)
    tls.load_cert_chain(spec.cert_file, spec.key_file)

    def manage(path: str, body: dict[str, object]) -> None:
        ask(spec.endpoints[0], f"/v3/auth/{path}", body, tls)

    for user, password, role in ((ROOT.user, ROOT.password, "root"), (USER, PASSWORD, "training")):
        manage("user/add", {"name": user, "password": password})
        manage("role/add", {"name": role})
        manage("user/grant", {"user": user, "role": role})
    permission = {"permType": "READWRITE", "key": encoded("/spare/"), "range_end": encoded("/spare0")}
    manage("role/grant", {"name": "training", "perm": permission})
    manage("enable", {})


def write_certificate(certificate: trustme.LeafCert, folder: Path, name: str) -> None:
    certificate.private_key_pem.write_to_path(folder / f"{name}.key")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(folder / f"{name}.pem", append=True)


def write_secret(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.timeout(120)
def test_a_client_with_certificate_and_password_reads_writes_and_waits(secure: SecureCluster) -> None:
    store = EtcdControlStore(secure.spec)
    assert not store.exists("log/0")
    assert store.put_if_absent("log/0", "entry") == "entry"
    assert store.wait("log/0", LONG_S) == "entry"
    assert store.put_counted("vote/0/0", "ok", "votes/0") == 1
    store.beat("beat/0", "alive", ttl_s=60)
    assert store.get(["beat/0"]) == ["alive"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cert_file": "", "key_file": ""}, "certificate"),
        ({"cert_file": "stranger.pem", "key_file": "stranger.key"}, "certificate"),
        ({"ca_file": ""}, "control.ca_file"),
        ({"credentials": None}, "permission denied"),
        ({"credentials": Credentials(user=USER, password=OTHER_PASSWORD)}, "authentication failed"),
        ({"credentials": Credentials(user="nobody", password=PASSWORD)}, "authentication failed"),
        ({"prefix": "/elsewhere/run"}, "permission denied"),
    ],
    ids=[
        "no certificate",
        "another's certificate",
        "unknown server",
        "no user",
        "wrong password",
        "no such user",
        "prefix",
    ],
)
def test_a_stranger_can_neither_read_nor_write(secure: SecureCluster, change: dict[str, object], reason: str) -> None:
    EtcdControlStore(secure.spec).put("secret", "value")
    files = {key: str(secure.folder / value) for key, value in change.items() if key.endswith("_file") and value}
    store = EtcdControlStore(dataclasses.replace(secure.spec, **{**change, **files}))
    for attempt in (
        lambda: store.get(["secret"]),
        lambda: store.put("secret", "falsified"),
        lambda: store.put_if_absent("log/7", "falsified"),
        lambda: store.wait("secret", LONG_S),
        store.clear,
    ):
        with pytest.raises(StoreRefused, match=reason) as refusal:
            attempt()
        assert PASSWORD not in str(refusal.value)
        assert OTHER_PASSWORD not in str(refusal.value)
    assert EtcdControlStore(secure.spec).get(["secret", "log/7"]) == ["value", None]


@pytest.mark.timeout(120)
def test_without_tls_no_client_is_answered(secure: SecureCluster) -> None:
    plain = tuple(endpoint.replace("https", "http") for endpoint in secure.cluster.endpoints)
    spec = dataclasses.replace(secure.spec, endpoints=plain, credentials=None, timeout_s=1.0)
    with pytest.raises(StoreLost, match="did not answer"):
        EtcdControlStore(spec).get(["secret"])


@pytest.mark.timeout(120)
def test_a_client_goes_on_when_its_token_is_no_longer_valid(secure: SecureCluster) -> None:
    store = EtcdControlStore(secure.spec)
    store.put("key", "value")
    store._gateway._session.token += "x"
    assert store.get(["key"]) == ["value"]
    assert not store.exists("log/9")


@pytest.mark.timeout(120)
def test_a_run_with_users_and_tls_shows_no_password_anywhere(
    secure: SecureCluster, text_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), faults=[kill("backward", 1, 2)])
    control = dataclasses.replace(config.control, **_store_settings(secure.control))
    assert_masked(complete_run(dataclasses.replace(config, control=control), tmp_path / "run"))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert PASSWORD.encode() not in path.read_bytes(), path
    shown = capfd.readouterr()
    assert PASSWORD not in shown.out + shown.err


def _store_settings(control: ControlConfig) -> dict[str, object]:
    names = ("store", "endpoints", "ca_file", "cert_file", "key_file", "credentials_file", "store_timeout_s")
    return {name: getattr(control, name) for name in names}


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


@pytest.mark.timeout(120)
@pytest.mark.alone
def test_its_own_processes_read_and_write_through_every_member(of_the_job: tuple[EtcdStoreSpec, Path]) -> None:
    spec, _ = of_the_job
    assert len(spec.endpoints) == 3
    for i, endpoint in enumerate(spec.endpoints):
        store = EtcdControlStore(dataclasses.replace(spec, endpoints=(endpoint,)))
        assert store.put_if_absent(f"log/{i}", "entry") == "entry"
        assert store.get([f"log/{i}"]) == ["entry"]


@pytest.mark.timeout(120)
@pytest.mark.alone
@pytest.mark.parametrize("who", ["no user", "stranger", "in the clear"])
def test_a_stranger_to_the_job_can_neither_read_nor_write(
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


@pytest.mark.timeout(120)
@pytest.mark.alone
def test_only_the_owner_can_read_the_keys_and_no_one_can_sign_more(of_the_job: tuple[EtcdStoreSpec, Path]) -> None:
    _, folder = of_the_job
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = sorted(path for path in folder.iterdir() if b"PRIVATE KEY" in path.read_bytes())
    assert [path.name for path in keys] == ["client.key", "member.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
