"""Where the user and the password for etcd come from, and that they do not show."""

import dataclasses
from pathlib import Path

import pytest

from spare_megatron.config.schema import ControlConfig
from spare_megatron.store.open_store import etcd_spec
from spare_megatron.store.spec import Credentials

ETCD = ControlConfig(store="etcd", endpoints=("http://127.0.0.1:1",))
VARIABLES = {"SPARE_ETCD_USER": "trainer", "SPARE_ETCD_PASSWORD": "from-the-environment"}


def with_file(path: Path, text: str, mode: int) -> ControlConfig:
    path.write_text(text)
    path.chmod(mode)
    return dataclasses.replace(ETCD, credentials_file=str(path))


def test_no_credentials_are_no_user() -> None:
    assert etcd_spec(ETCD, "run", {}).credentials is None


def test_the_environment_names_a_user() -> None:
    expected = Credentials(user="trainer", password="from-the-environment")
    assert etcd_spec(ETCD, "run", VARIABLES).credentials == expected


def test_a_file_comes_before_the_environment(tmp_path: Path) -> None:
    control = with_file(tmp_path / "secret", "someone:pass:word\n", 0o600)
    assert etcd_spec(control, "run", VARIABLES).credentials == Credentials(user="someone", password="pass:word")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    control = with_file(tmp_path / "secret", "someone:hidden-word", mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600") as refusal:
        etcd_spec(control, "run", {})
    assert "hidden-word" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "hidden-word", ":hidden-word", "someone:"])
def test_a_file_without_user_and_password_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="must hold one line, user:password") as refusal:
        etcd_spec(with_file(tmp_path / "secret", text, 0o600), "run", {})
    assert "hidden-word" not in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"control\.credentials_file=.*absent cannot be read: FileNotFoundError"):
        etcd_spec(dataclasses.replace(ETCD, credentials_file=str(tmp_path / "absent")), "run", {})


@pytest.mark.parametrize("variable", VARIABLES)
def test_half_of_the_credentials_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match="set both SPARE_ETCD_USER and SPARE_ETCD_PASSWORD") as refusal:
        etcd_spec(ETCD, "run", {variable: VARIABLES[variable]})
    assert "from-the-environment" not in str(refusal.value)


def test_a_password_does_not_show() -> None:
    spec = etcd_spec(ETCD, "run", VARIABLES)
    assert "trainer" in repr(spec)
    assert "from-the-environment" not in repr(spec) + str(spec)


def test_no_two_runs_have_one_prefix() -> None:
    prefixes = {etcd_spec(ETCD, "run", {}).prefix for _ in range(100)}
    assert len(prefixes) == 100
    assert all(prefix.startswith("/spare/run-") for prefix in prefixes)
