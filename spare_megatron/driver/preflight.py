"""Checks and prepares, before any rank starts, what needs Megatron."""

import contextlib
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.machine.interrupts import Deferral, deferred
from spare_megatron.process import processes
from spare_megatron.version import PACKAGE, code_digest, code_mismatch

_END_TIMEOUT_S = 10.0


def preflight(config: RunConfig) -> Mapping[str, str]:
    """Checks the configuration with Megatron and builds the sample index, in a child process. Returns the kernels of
    ranks here. ValueError: the run cannot start, or the check was killed or exceeded `control.startup_timeout_s`.
    """
    # The fork server forks only after all its imports, and a signal must not wait for that.
    with deferred(processes.end_fork_server) as interrupts:
        context = processes.fork_server()
        interrupts.check()
        try:
            child = processes.start_child(context, "preflight", _check_and_prepare, config, code_digest(), PACKAGE)
        except (OSError, EOFError) as error:
            interrupts.check()
            text = "the server from which all processes of a run are forked has ended; its last line says why"
            raise ValueError(text) from error
        try:
            return _await_kernels(child, config.data.named, config.control.startup_timeout_s, interrupts)
        finally:
            processes.end_child(child)


def _await_kernels(child: processes.Child, corpus: str, limit_s: float, interrupts: Deferral) -> Mapping[str, str]:
    """The check's answer. ValueError: the problem that it has found, or it was killed or too slow."""
    answer: Mapping[str, str] | str | None = None
    if not interrupts.wait([child.reports, child.process.sentinel], limit_s):
        raise ValueError(
            f"the sample index of {corpus} was not built within control.startup_timeout_s="
            f"{limit_s:g}; raise it, or check whether the storage hangs"
        )
    if child.reports.poll():
        with contextlib.suppress(EOFError):
            answer = child.reports.recv()
    child.process.join(_END_TIMEOUT_S)
    if isinstance(answer, str):
        raise ValueError(answer)
    if answer is None:
        raise ValueError(_why_ended(corpus, child.process.exitcode))
    return answer


def _why_ended(corpus: str, code: int | None) -> str:
    script = getattr(sys.modules["__main__"], "__file__", "the script")
    if code == processes.NO_MAIN_GUARD:
        return (
            f"{script} starts a run whenever it is imported, and every process of the run imports it: put what it does "
            f'under `if __name__ == "__main__":`'
        )
    ended = f"the process that builds the sample index of {corpus} has ended with {processes.describe_exit(code)}"
    if code is None or code < 0:
        return f"{ended}; SIGKILL usually means too little memory for the sample index"
    return f"{ended}; its output says why. Like every process of the run, it imports {script}"


def _check_and_prepare(config: RunConfig, code: str, package: Path, reports: Connection) -> None:
    if mismatch := code_mismatch(code):
        reports.send(
            f"{mismatch} from {package}: start it with `spare`, which imports nothing from the working directory, or "
            f"set PYTHONPATH to the folder of the intended package"
        )
        return
    try:
        import torch

        from spare_megatron.comm.nccl import check_nccl
        from spare_megatron.devices import gpu
        from spare_megatron.machine.gpus import name_in_torch
        from spare_megatron.mcore.model.model import kernels_of, layer_spec
        from spare_megatron.mcore.model.program import program_of
        from spare_megatron.mcore.model.training_samples import prepare_index
        from spare_megatron.mcore.model.transformer import transformer_config
        from spare_megatron.mcore.optimizer.optimizer import optimizer_config
        from spare_megatron.mcore.program_check import check_program

        device = torch.device(name_in_torch(config.cluster.device))
        if device.type != "cpu" and gpu.platform()[1]:  # else there is no NCCL either
            check_nccl()
        layer_spec(config, transformer_config(config, device), device)
        optimizer_config(config)
        kernels = kernels_of(config, device)
        prepare_index(config)
        if config.program.file:
            check_program(config, program_of(config))  # last, as it installs what ranks on CPUs need
        reports.send(kernels)
    except (ValueError, OSError, ImportError) as error:
        reports.send(str(error))
    except Exception:  # noqa: BLE001  (any error is reported to the user)
        reports.send(traceback.format_exc())
