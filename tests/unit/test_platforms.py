"""The recipes for platforms: images, a Job of Kubernetes, and what its pods run, with a stand-in for `spare`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import kubernetes_validate
import pytest
import typer.main
import yaml

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import MachineResources, problems, warnings
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.journal.records import EXIT_CODES

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
DOCKERFILE, POD = LAUNCH / "Dockerfile", LAUNCH / "pod"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KUBERNETES = "1.33"
"""The oldest version that the recipe is for."""
INVALID_CONFIGURATION = 2
FIRST_OF_SIGNALS = 128
TIMEOUT_S = 60.0
SPARE = """#!/bin/sh
echo "$@" >>calls
[ -z "$HANGS" ] || { trap 'echo ended >>calls; exit 0' USR1; touch ready; while :; do sleep 0.02; done; }
exit $CODE
"""

Object = dict[str, Any]


def linted(path: Path, linter: str = "hadolint") -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name(linter), path]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def objects() -> dict[str, Object]:
    """Everything in the manifests, by kind."""
    files = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
    return {found["kind"]: found for file in files for found in yaml.safe_load_all(file.read_text())}


def container() -> Object:
    (only,) = objects()["Job"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def preset(tmp_path: Path) -> RunConfig:
    """That of the ConfigMap."""
    (tmp_path / "run.toml").write_text(objects()["ConfigMap"]["data"]["run.toml"])
    return load_run_config(tmp_path / "run.toml").config


def test_the_images_have_no_findings_of_hadolint(tmp_path: Path) -> None:
    assert (linted(DOCKERFILE).stdout, linted(DOCKERFILE).returncode) == ("", 0)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.read_text().replace("USER 1000", "USER root"))
    assert "DL3002" in linted(tmp_path / "Dockerfile").stdout, "it looks"


def test_what_pods_run_has_no_findings_of_shellcheck() -> None:
    assert (linted(POD, "shellcheck").stdout, linted(POD, "shellcheck").returncode) == ("", 0)


def test_the_images_have_what_the_launchers_install() -> None:
    text = DOCKERFILE.read_text()
    (torch,) = re.findall(r'^torch_version="(.*)"$', (LAUNCH / "environment.sh").read_text(), re.MULTILINE)
    assert re.findall(r"torch==(\S+)", text) == [f"{torch}+cpu", torch]
    assert re.findall(r"FROM (.*) AS (.*)", text)[1:] == [("base", "cpu"), ("base", "gpu")]
    assert re.findall(r"FROM python:([0-9.]+)-slim", text) == ["3.11"]
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert all(set(names.split(",")) <= extras for names in re.findall(r'"\.\[(.*)\]"', text))


def test_the_images_get_every_file_that_the_package_is_built_from() -> None:
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)).split()
    assert [name for name in copied if not (ROOT / name).exists()] == []
    build = PROJECT["tool"]["hatch"]
    needed = {
        "pyproject.toml",
        build["version"]["path"],
        *build["build"]["targets"]["wheel"]["packages"],
        *PROJECT["project"]["license-files"],
    }
    assert {name.partition("/")[0] for name in needed} <= set(copied)


@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "Job"])
def test_manifests_have_the_schema_of_kubernetes(kind: str) -> None:
    found = objects()[kind]
    kubernetes_validate.validate(found, KUBERNETES, strict=True)
    other = {**found, "metadata": {**found["metadata"], "named": "x"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(other, KUBERNETES, strict=True)


def test_the_job_has_a_pod_for_each_node_of_its_preset_and_a_gpu_for_each_rank(tmp_path: Path) -> None:
    config, spec = preset(tmp_path), objects()["Job"]["spec"]
    machine = MachineResources(num_gpus=config.parallel.num_ranks, num_cores=256, has_corpus=True)
    assert (problems(config, machine), warnings(config, machine)) == ([], [])
    assert config.cluster.launcher == "hand"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == config.cluster.num_nodes
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == config.parallel.ranks_per_node
    template = spec["template"]
    service = objects()["Service"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", template["spec"]["subdomain"])


def test_files_of_the_preset_are_where_the_job_mounts_them(tmp_path: Path) -> None:
    config, found = preset(tmp_path), container()
    mounts = {mount["mountPath"]: mount for mount in found["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in objects()["Job"]["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    _, preset_path, run_dir, *_ = found["args"]
    assert mounts[preset_path]["subPath"] in objects()["ConfigMap"]["data"]
    assert volumes["preset"]["configMap"]["name"] == objects()["ConfigMap"]["metadata"]["name"]
    for path in (run_dir, config.data.corpus, config.checkpoint.folder):
        assert path.startswith("/shared/") and volumes[mounts["/shared"]["name"]]["persistentVolumeClaim"]  # noqa: PT018
    folder, _, name = config.control.ca_file.rpartition("/")
    assert name in [item["path"] for item in volumes[mounts[folder]["name"]]["secret"]["items"]]


def test_variables_of_the_job_are_those_that_are_read() -> None:
    source = "".join(file.read_text() for file in (ROOT / "spare_megatron").rglob("*.py"))
    names = [variable["name"] for variable in container()["env"]]
    assert [name for name in names if name.startswith("SPARE_") and f'"{name}"' not in source] == []
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container()["args"])))
    assert used <= set(names)
    assert set(re.findall(r"\$\{?([A-Z_]+)", POD.read_text())) == {"JOB_COMPLETION_INDEX", "TMPDIR"}


def test_pods_call_commands_and_options_that_there_are() -> None:
    commands: Any = typer.main.get_command(app)
    calls = re.findall(r"^ *run spare (\w+) (.*)$", POD.read_text(), re.MULTILINE)
    assert [name for name, _ in calls] == ["supervise", "train"]
    calls += [("train", " ".join(container()["args"][3:]))]
    for name, words in calls:
        options = {option for parameter in commands.commands[name].params for option in parameter.opts}
        given = re.findall(r"--[\w-]+", words)
        assert given, (name, words)
        assert set(given) <= options
    assert container()["args"][0] in re.findall(r"COPY launch/pod /usr/local/bin/(.*)", DOCKERFILE.read_text())


def test_the_job_fails_by_the_codes_of_a_run_that_is_over() -> None:
    rules = {rule["action"]: rule for rule in objects()["Job"]["spec"]["podFailurePolicy"]["rules"]}
    codes = {code for code in EXIT_CODES.values() if 0 < code < FIRST_OF_SIGNALS} | {INVALID_CONFIGURATION}
    assert rules["FailJob"]["onExitCodes"]["values"] == sorted(10 + code for code in codes)
    assert rules["FailIndex"]["onExitCodes"]["values"] == [INVALID_CONFIGURATION]
    assert {rule["onExitCodes"]["containerName"] for rule in rules.values() if "onExitCodes" in rule} == {"spare"}


# ------------------------------------------------------------------------------------------------- what a pod runs


class StartPod(Protocol):
    def __call__(self, index: int, code: int = 0, *, hangs: bool = False) -> subprocess.Popen[str]: ...


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[StartPod]:
    """Starts pods whose `spare` ends with `code`, or only on SIGUSR1. None outlives the test."""
    (tmp_path / "spare").write_text(SPARE)
    (tmp_path / "spare").chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(index: int, code: int = 0, *, hangs: bool = False) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(index),
            "CODE": str(code),
            "HANGS": "yes" if hangs else "",
            "TMPDIR": str(tmp_path),
        }
        command = [POD, "run.toml", "run", "--resume"]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(file: Path) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def calls_in(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


@pytest.mark.parametrize(("code", "expected"), [(0, 0), *((code, 10 + code) for code in range(1, 6)), (137, 137)])
def test_the_first_pod_drives_the_run_and_distinguishes_an_end_from_a_loss(
    pod: StartPod, tmp_path: Path, code: int, expected: int
) -> None:
    assert pod(0, code).wait(TIMEOUT_S) == expected
    assert calls_in(tmp_path) == ["train --config run.toml --run-dir run --resume"]


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_every_other_pod_supervises_its_node(pod: StartPod, tmp_path: Path, code: int) -> None:
    assert pod(3, code).wait(TIMEOUT_S) == code
    assert calls_in(tmp_path) == ["supervise run --node 3 --wait-s 1800"]


def test_a_pod_that_replaces_a_lost_driver_waits_for_the_end_and_says_how_it_was(pod: StartPod, tmp_path: Path) -> None:
    (tmp_path / "run/journal").mkdir(parents=True)
    (tmp_path / "run/config.toml").touch()
    (tmp_path / "sleep").write_text(f"#!/bin/sh\ntouch waits\nexec {shutil.which('sleep')} 0.02\n")
    (tmp_path / "sleep").chmod(0o755)
    replacement = pod(0)
    wait_for(tmp_path / "waits")
    assert replacement.poll() is None
    summary = {"outcome": "finished", "verdict": "valid", "steps_left": 0}
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    assert replacement.wait(TIMEOUT_S) == 0
    for other in ({"outcome": "wipe_out"}, {"verdict": "unknown"}, {"steps_left": 3}):
        (tmp_path / "run/summary.json").write_text(json.dumps({**summary, **other}))
        assert pod(0).wait(TIMEOUT_S) == 11
    assert pod(2, code=1).wait(TIMEOUT_S) == 0, "the run is over, and needs no node"
    assert calls_in(tmp_path) == []


def test_a_run_that_all_have_left_is_not_waited_for(pod: StartPod, tmp_path: Path) -> None:
    (tmp_path / "run/journal").mkdir(parents=True)
    (tmp_path / "run/config.toml").touch()
    long_ago_s = time.time() - 3600.0
    os.utime(tmp_path / "run/journal", (long_ago_s, long_ago_s))
    replacement = pod(0)
    _, text = replacement.communicate(timeout=TIMEOUT_S)
    assert (replacement.returncode, text) == (11, "spare-pod: no node has written to run/journal for 15 minutes\n")


def test_a_pod_passes_the_request_to_end_on(pod: StartPod, tmp_path: Path) -> None:
    process = pod(1, hangs=True)
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT_S) == 0
    assert calls_in(tmp_path)[1:] == ["ended"]


PLANT = """
plant() { [[ $1 == "$BEFORE"* && -e ready && ! -e planted ]] && touch planted && kill -USR1 $$; return 0; }
set -T
trap 'plant "$BASH_COMMAND"' DEBUG
"""


@pytest.mark.parametrize("before", ['kill -0 "$child"', '[ -n "$is_asked" ]', 'is_asked=""', "sleep", "wait $!"])
def test_a_request_to_end_is_passed_on_between_which_commands_it_comes(
    pod: StartPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Bash runs a trap between two commands; the second request may come while the first is passed on."""
    (tmp_path / "plant").write_text(PLANT)
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "plant"))
    monkeypatch.setenv("BEFORE", before)
    process = pod(1, hangs=True)
    wait_for(tmp_path / "ready")
    if before == 'is_asked=""' and not (tmp_path / "planted").exists():  # which is run after a request alone
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        if not (tmp_path / "planted").exists():
            process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "planted").exists()
    assert "ended" in calls_in(tmp_path)


def test_a_pod_that_is_to_end_has_its_groups_leave_and_its_replacement_has_them_back(
    pod: StartPod, tmp_path: Path
) -> None:
    """As the first process of a container it ignored SIGTERM: the machine was lost, or the whole Job unsaved."""
    (tmp_path / "run").mkdir()
    process = pod(1, hangs=True)
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "spare-notice-1")
    assert process.poll() is None, "its groups have time to leave"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(TIMEOUT_S)
    assert pod(1).wait(TIMEOUT_S) == 0
    assert calls_in(tmp_path)[1:] == ["grow run node:1", "supervise run --node 1 --wait-s 1800"]
    assert not (tmp_path / "spare-notice-1").exists()
    assert pod(1).wait(TIMEOUT_S) == 0
    assert calls_in(tmp_path)[3:] == ["supervise run --node 1 --wait-s 1800"]


def test_supervisors_look_for_the_notice_that_a_pod_makes(tmp_path: Path) -> None:
    (notice,) = re.findall(r'notice="\$\{TMPDIR:-([^}]*)\}/(.*?)"', POD.read_text())
    assert preset(tmp_path).cluster.notice_file == "/".join(notice).replace("$index", "{node}")


def test_a_pod_of_another_kind_of_job_is_refused(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "JOB_COMPLETION_INDEX"}
    done = subprocess.run([POD, "a", "b"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "JOB_COMPLETION_INDEX: is set by Kubernetes" in done.stderr
