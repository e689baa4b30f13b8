"""One client's connection to an etcd cluster: JSON over HTTP, as served by etcd's own gRPC gateway (etcd 3.4 on).

The gateway needs no generated stubs, no particular protobuf version and no background threads, which a process that
forks cannot have. Requests must be idempotent: one whose answer is lost is repeated at the next endpoint.
"""

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from spare_megatron.formats.quantities import format_binary_bytes
from spare_megatron.formats.store_space import FULL, REMEDY, StoreSpace
from spare_megatron.machine.network import address_towards, hosts_of, is_loopback
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.spec import EtcdStoreSpec

_FIRST_TRY_S = 0.5
"""First tries are short: a write sent to a dead leader is never answered, and the next leader takes the repetition."""

_NUM_SHORT_TRIES, _NUM_DOUBLINGS = 3, 4
"""An election takes at most this many short tries. Further tries that time out double the next, up to _NUM_DOUBLINGS
times, so that repetitions do not flood a cluster that is merely slow.
"""

_LINEARIZABLE = "/v3/kv/"
"""Requests whose answers are never older than earlier ones, from whichever member; a status may be."""

_PAUSE_S = 0.02

_SILENCE_S = 600.0
"""A stream without messages for this long is reopened."""


_INVALID, _MISSING, _DENIED, _EXHAUSTED, _FAILED, _UNAUTHENTICATED = 3, 5, 7, 8, 9, 16
"""gRPC codes that concern the request itself; any other may come from a stopping member or a leaderless cluster."""


_OLD_TOKEN = re.compile("revision (in header|of auth store) is old")
"""Error text for a token from before the last change of users or roles; until etcd 3.4 and since."""


_NO_SPACE, _NO_SPACE_ALARM = "database space exceeded", "NOSPACE"
"""Error text of a write to a database over its quota, and the alarm in a member's status until it is disarmed."""


EtcdMessage = dict[str, Any]


class StoreRefused(StoreLost):
    """etcd answers but rejects the request, the certificate or the credentials."""


class StoreLacks(StoreLost):
    """etcd does not have the lease that the request names; it has expired."""


class StoreFull(StoreLost):
    """etcd's database has reached its quota and takes no writes until an operator makes room."""


@dataclass(slots=True)
class Session:
    """Shared by a client's connections: TLS context, token (etcd takes some 100 ms to check a password), the cluster
    that answers, and its newest revision.
    """

    tls: ssl.SSLContext | None
    token: str = ""
    cluster: str = ""
    revision: int = 0


class EtcdGateway:
    """A connection to one member at a time; serves one thread."""

    def __init__(self, spec: EtcdStoreSpec, session: Session | None = None) -> None:
        self._spec = spec
        self._session = session or Session(tls=tls_context(spec))
        self._endpoints = [urlsplit(endpoint) for endpoint in spec.endpoints]
        self._turn = os.getpid() % len(self._endpoints)  # clients spread over the members
        self._connection: http.client.HTTPConnection | None = None
        self._host = ""
        """Local address of the last connection."""
        self._is_broken_off = False
        self._num_timeouts = 0
        """Tries that timed out, minus answers since: a cluster that was slow recently is still assumed to be."""

    def another(self) -> "EtcdGateway":
        """A separate connection in the same session, for another thread; callable from that thread."""
        return EtcdGateway(self._spec, self._session)

    def call(self, path: str, body: Mapping[str, Any]) -> EtcdMessage:
        """Sends a request; returns the answer of the first member that gives one. Raises StoreRefused (credentials),
        StoreLacks (a lease that does not exist), StoreFull, or StoreLost if none answered in time, or one from an older
        state.
        """
        began_s, revision = time.monotonic(), self._session.revision
        while True:
            if self._is_broken_off:
                raise StoreLost("the connection to etcd is broken off")
            try_s = try_timeout_s(self._num_timeouts)
            try:
                self._authenticate(try_s)
                answer = self._send(path, body, try_s)
                self._num_timeouts = max(0, self._num_timeouts - 1)
                if path.startswith(_LINEARIZABLE) and "header" in answer:
                    self._require_history(answer["header"], revision)
                return answer
            except _Again as again:
                self._num_timeouts += isinstance(again.__cause__, TimeoutError)
                self.close()
                if time.monotonic() - began_s >= self._spec.timeout_s:
                    raise StoreLost(
                        f"etcd at {', '.join(self._spec.endpoints)} did not answer within "
                        f"control.store_timeout_s={self._spec.timeout_s:g}: {again}"
                    ) from again
                time.sleep(_PAUSE_S)

    def read(self, start: str, end: str = "") -> EtcdMessage:
        """The keys from `start` to before `end`; `start` alone without it."""
        return self.call("/v3/kv/range", key_range(start, end or start + "\0"))

    def break_off(self) -> None:
        """Ends the try under way; `call` raises StoreLost from now on. Callable from any thread."""
        self._is_broken_off = True
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of ssl would break a read under way

    @contextlib.contextmanager
    def stream(
        self, path: str, body: Mapping[str, Any], try_s: float
    ) -> Iterator[tuple[socket.socket, Iterator[EtcdMessage]]]:
        """Opens a stream to one member within `try_s`; yields its socket, whose shutdown ends the iteration, and its
        messages. OSError, http.client.HTTPException: the member does not answer. StoreRefused: insufficient
        credentials.
        """
        try:
            self._authenticate(try_s)
            connection = self._connect(try_s)
            connection.request("POST", path, json.dumps(body), self._headers())
            sock = connection.sock
            response = connection.getresponse()
            if response.status == http.HTTPStatus.UNAUTHORIZED:
                self._session.token = ""
            if response.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(f"etcd answered a stream with {response.status}")
            sock.settimeout(_SILENCE_S)
            yield sock, (_result(json.loads(line)) for line in iter(response.readline, b""))
        except _Again as again:
            raise http.client.HTTPException(str(again)) from None
        finally:
            self.close()

    def local_host(self) -> str:
        """This machine's address on the route to etcd, at which other clients of etcd reach it."""
        self.call("/v3/maintenance/status", {})
        if is_loopback(self._host):  # e.g. the endpoint is this machine's own name
            return address_towards([self._host, *hosts_of(self._spec.endpoints)])
        return self._host

    def check_space(self) -> None:
        """Raises StoreFull if one member knows that etcd takes no writes: a pure reader would wait for one in vain."""
        status = self.call("/v3/maintenance/status", {})
        if is_full(status):
            raise _full(status)

    def metrics(self) -> str:
        """Metrics of the connected member, in Prometheus text format; empty if this endpoint does not serve them."""
        try:
            connection = self._connect(_FIRST_TRY_S)
            connection.request("GET", "/metrics", headers=self._headers())
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            return text if response.status == http.HTTPStatus.OK else ""
        except (OSError, http.client.HTTPException):
            self.close()
            return ""

    def close(self) -> None:
        """Closes the connection; the next one goes to the next member."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._turn += 1

    # ---------------------------------------------------------------------------------------------------- one try

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is not None and self._connection.sock is None:
            self._connection = None  # the member, or a proxy, closed it after its last answer
        if self._connection is None:
            url = self._endpoints[self._turn % len(self._endpoints)]
            self._connection = _connection_to(url, self._session.tls)
            self._connection.timeout = timeout_s
            self._connection.connect()
            # Waiting to fill a packet would cost 40 ms for each of the small messages.
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._host = str(self._connection.sock.getsockname()[0])
        self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _send(self, path: str, body: Mapping[str, Any], timeout_s: float) -> EtcdMessage:
        try:
            connection = self._connect(timeout_s)
            connection.request("POST", path, json.dumps(body), self._headers())
            response = connection.getresponse()
            answer = json.loads(response.read())
        except ssl.SSLCertVerificationError as error:
            raise StoreRefused(f"etcd's certificate is not one that control.ca_file vouches for: {error}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            if isinstance(error, ssl.SSLError) and "CERTIFICATE" in str(error.reason):
                raise StoreRefused(f"etcd refuses the certificate in control.cert_file: {error.reason}") from error
            raise _Again(f"{type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise _Again(f"etcd answered {response.status} with {answer!r}")
        if response.status == http.HTTPStatus.OK and "error" not in answer:
            return answer
        return self._refused(*_error_in(answer), timeout_s)

    def _refused(self, code: int, text: str, timeout_s: float) -> EtcdMessage:
        if code == _UNAUTHENTICATED or _OLD_TOKEN.search(text):
            self._session.token = ""  # it has expired, or users or roles have changed
        elif code == _EXHAUSTED and _NO_SPACE in text:
            raise _full(self._send("/v3/maintenance/status", {}, timeout_s))
        elif code == _MISSING:
            raise StoreLacks(f"etcd does not have what is asked for: {text}")
        elif code in (_INVALID, _DENIED, _FAILED):
            user = "" if self._spec.credentials is None else f" user {self._spec.credentials.user}"
            raise StoreRefused(f"etcd refuses{user}: {text}")
        raise _Again(text)

    def _require_history(self, header: Mapping[str, str], known: int) -> None:
        """Raises StoreLost if the answer is from another cluster, or older than one from before the request."""
        session, cluster, revision = self._session, header.get("cluster_id", ""), int(header.get("revision", 0))
        session.cluster = session.cluster or cluster
        if cluster != session.cluster or revision < known:
            what = "is another cluster than before" if cluster != session.cluster else "has gone back in time"
            raise StoreLost(
                f"etcd at {', '.join(self._spec.endpoints)} {what} (revision {revision}, before {known}): what it had "
                f"confirmed is lost; it was emptied, replaced, or restored from a backup"
            )
        session.revision = max(session.revision, revision)

    def _authenticate(self, timeout_s: float) -> None:
        if self._spec.credentials is not None and not self._session.token:
            body = {"name": self._spec.credentials.user, "password": self._spec.credentials.password}
            self._session.token = str(self._send("/v3/auth/authenticate", body, timeout_s)["token"])

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": self._session.token} if self._session.token else headers


class _Again(Exception):
    """This try failed; another may succeed."""


def try_timeout_s(num_timeouts: int) -> float:
    return float(_FIRST_TRY_S * 2 ** min(max(num_timeouts - _NUM_SHORT_TRIES, 0), _NUM_DOUBLINGS))


def is_full(status: EtcdMessage) -> bool:
    return any(_NO_SPACE_ALARM in error for error in status.get("errors", ()))


def _full(status: EtcdMessage) -> StoreFull:
    return StoreFull(f"{FULL}: its database has {format_binary_bytes(int(status['dbSize']))}, its quota; {REMEDY}")


def _error_in(answer: EtcdMessage) -> tuple[int, str]:
    """The gRPC code (-1 if absent) and text. A stream wraps them once more, and gateways name fields differently."""
    error = answer.get("error")
    found = error if isinstance(error, dict) else answer
    code = found["grpc_code"] if "grpc_code" in found else found.get("code", -1)
    return int(code), str(found.get("message", error or answer))


def _result(message: EtcdMessage) -> EtcdMessage:
    """Payload of a stream's message; raises HTTPException for the error that ends a stream."""
    if "result" not in message:
        raise http.client.HTTPException(f"etcd ended a stream: {message}")
    return dict(message["result"])


def _connection_to(url: SplitResult, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    assert url.hostname is not None, "validated with the configuration"
    if tls is not None:
        return http.client.HTTPSConnection(url.hostname, url.port, context=tls)
    return http.client.HTTPConnection(url.hostname, url.port)


def tls_context(spec: EtcdStoreSpec) -> ssl.SSLContext | None:
    """The TLS context for the members; None over http. Raises StoreRefused if a file cannot be used."""
    if urlsplit(spec.endpoints[0]).scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=spec.ca_file or None)
        if spec.cert_file:
            context.load_cert_chain(spec.cert_file, spec.key_file)
    except OSError as error:
        files = [file for file in (spec.ca_file, spec.cert_file, spec.key_file) if file]
        raise StoreRefused(f"cannot use control.ca_file, cert_file, key_file = {files}: {error}") from error
    return context


def encoded(text: str) -> str:
    """Base64 of the text, as etcd's JSON has keys and values."""
    return base64.b64encode(text.encode()).decode()


def key_range(start: str, end: str) -> EtcdMessage:
    """The part of a request that names the keys from `start` to before `end`."""
    return {"key": encoded(start), "range_end": encoded(end)}


def decoded(text: str) -> str:
    return base64.b64decode(text).decode()


ANSWER_S = 5.0
"""Longest wait of `silence_of`; an election takes less."""


def silence_of(spec: EtcdStoreSpec, *, refusal_counts: bool = False) -> str:
    """Why no member with a quorum answers within ANSWER_S seconds; empty if one answers, with a refusal, too, unless
    `refusal_counts` as silence.
    """
    with contextlib.closing(EtcdGateway(replace(spec, timeout_s=ANSWER_S))) as gateway:
        try:
            gateway.read(spec.prefix)
        except StoreRefused as refused:  # reported where the refused request is needed
            return str(refused) if refusal_counts else ""
        except StoreLost as lost:
            return str(lost.__cause__)
    return ""


_QUOTA = re.compile(r"^etcd_server_quota_backend_bytes (\S+)$", re.MULTILINE)


def etcd_space(spec: EtcdStoreSpec) -> StoreSpace:
    """Size and quota of one member's database; those of the others are nearly the same. Raises StoreLost."""
    with contextlib.closing(EtcdGateway(spec)) as gateway:
        status = gateway.call("/v3/maintenance/status", {})
        return StoreSpace(
            used_bytes=int(status.get("dbSizeInUse", 0)),
            limit_bytes=_quota(status, gateway),
            is_full=is_full(status),
        )


def _quota(status: EtcdMessage, gateway: EtcdGateway) -> int | None:
    """The quota from the status (etcd 3.6 and later), else from the metrics; None if neither has it."""
    if "dbSizeQuota" in status:
        return int(status["dbSizeQuota"])
    found = _QUOTA.search(gateway.metrics())
    return None if found is None else int(float(found[1]))
