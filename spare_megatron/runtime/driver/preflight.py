"""What can be found wrong with a run, and prepared for it, only with Megatron at hand. Before any rank starts."""

import traceback
from multiprocessing.connection import Connection

from spare_megatron.config.schema import RunConfig
from spare_megatron.runtime.process.processes import end_child, fork_server, run_to_end, start_child


def preflight(config: RunConfig) -> None:
    """Checks what Megatron makes of the configuration, and builds the sample index that all ranks read.

    Raises:
        ValueError: The run cannot start; the text says why.
            Also if the check was killed, or did not end within `control.startup_timeout_s`.
    """
    child = start_child(fork_server(), "preflight", _check_and_prepare, config)
    try:
        error = run_to_end(child, config.control.startup_timeout_s)
    finally:
        end_child(child)
    if error is not None:
        raise ValueError(error)


def _check_and_prepare(config: RunConfig, reports: Connection) -> None:
    try:
        import torch

        from spare_megatron.mcore.data import prepare_index
        from spare_megatron.mcore.model import layer_spec
        from spare_megatron.mcore.transformer import transformer_config
        from spare_megatron.runtime.reduce.nccl import check_nccl

        device = torch.device("cuda" if config.cluster.device == "gpu" else "cpu")
        if device.type == "cuda" and torch.version.cuda is not None:  # else there is no NCCL either
            check_nccl()
        layer_spec(config, transformer_config(config, device), device)
        prepare_index(config)
    except (ValueError, OSError, ImportError) as error:
        reports.send(str(error))
    except Exception:  # noqa: BLE001  (whatever it is, the user is told)
        reports.send(traceback.format_exc())
