"""Where the programs of Slurm come from, and whether nodes can be made here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.debian import fetch_with_dependencies

_PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "munged", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
_NODE = ("unshare", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount", "--mount-proc", "hostname", "localhost")


def skip_where_no_node_can_be() -> None:
    """Nodes are namespaces, whose end is a loss of power."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for nodes of Slurm in namespaces of their own")
    missing = [program for program in ("unshare", "hostname", "setsid") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, for nodes of Slurm in namespaces of their own")
    done = subprocess.run(_NODE, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"needs namespaces, for nodes of Slurm: {done.stderr.strip()}")


def find_slurm(cache: Path) -> dict[str, str]:
    """The environment in which programs of Slurm are found: this machine's, or Debian's in the cache."""
    if all(shutil.which(program) for program in _PROGRAMS):
        return {}
    fetch_with_dependencies(cache, cache / "usr/sbin/slurmctld-wlm", "slurmctld", "slurmd", "slurm-client", "munge")
    for program in ("slurmctld", "slurmd", "slurmstepd"):  # an installation makes these links
        link = cache / "usr/sbin" / program
        if not link.exists():
            link.symlink_to(f"{program}-wlm")
    (plugins,) = cache.glob("usr/lib/*/slurm-wlm")
    libraries = [plugins, *cache.glob("usr/lib/*-linux-gnu"), *cache.glob("lib/*-linux-gnu")]
    found = {"PATH": (cache / "usr/sbin", cache / "usr/bin"), "LD_LIBRARY_PATH": libraries}
    before = {name: os.environ[name].split(":") for name in found if os.environ.get(name)}
    paths = {name: ":".join(map(str, (*folders, *before.get(name, ())))) for name, folders in found.items()}
    return {**paths, "PLUGINS": str(plugins)}
