"""Where the sample indices of a corpus are, and which of them stay. Loads without torch.

An index is a folder of its own beside those of other settings and other runs. A run holds a lease on its index, a file
beside it, which its ranks renew and its driver removes at the end. An index without a lease goes once newer ones are
as many as are kept.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from spare_megatron.config.corpus import cache_folder, corpus_files
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import global_batch

NUM_KEPT = 8
"""Indices that no run uses: those that were used last."""
LEASE_S = 7 * 24 * 3600.0
"""A lease that has not been renewed for so long is that of a run that was killed."""
RENEWAL_S = 3600.0
_PREFIX, _LEASE = "samples-", ".lease-"


def num_samples(config: RunConfig) -> int:
    """Samples that the run reads."""
    return config.train.steps * global_batch(config)


def index_folder(config: RunConfig) -> Path:
    """Where the index of this run's samples belongs.

    The name holds all that the index depends on, the state of the corpus included, which Megatron leaves out:
    a corpus that was written anew gets a new index.

    Raises:
        ValueError: The corpus is missing.
    """
    prefix = Path(config.data.corpus).absolute()
    files = corpus_files(prefix)
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"data.corpus={config.data.corpus}: {' and '.join(missing)} missing; "
            f"write it with `spare preprocess` or change the path"
        )
    states = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    identity = [str(prefix), states, config.train.seed, config.model.seq_length, config.model.vocab_size]
    name = blake2b(json.dumps([*identity, num_samples(config)]).encode(), digest_size=8).hexdigest()
    return cache_folder(config.data) / f"{_PREFIX}{name}"


@contextmanager
def leased(config: RunConfig) -> Iterator[None]:
    """Keeps the index of this run from being removed, from before it is built to the end of the run.

    Raises:
        ValueError: The corpus is missing.
    """
    folder = index_folder(config)
    lease = folder.with_name(f"{folder.name}{_LEASE}{secrets.token_hex(8)}")
    with suppress(OSError):  # where nothing can be written nothing is removed either, or the index cannot be built
        lease.parent.mkdir(parents=True, exist_ok=True)
        lease.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            lease.unlink()


def renew(folder: Path) -> None:
    """The index is in use: it counts as used now, and so do all leases on it."""
    for path in (folder, *_leases(folder)):
        with suppress(OSError):  # that of another user
            os.utime(path)


def remove_unused(folder: Path) -> None:
    """Removes the indices beside this one that no run uses, but for those that were used last.

    Args:
        folder: An index in use, which has just been renewed: its time is now by the clock of the storage.
    """
    now_s = _used_at_s(folder)
    for lease in folder.parent.glob(f"{_PREFIX}*{_LEASE}*"):
        if now_s - _used_at_s(lease) > LEASE_S:
            with suppress(OSError):
                lease.unlink()
    for aside in folder.parent.glob(f".{_PREFIX}*"):
        if now_s - _used_at_s(aside) > LEASE_S:  # who built or removed it was killed
            shutil.rmtree(aside, ignore_errors=True)
    others = [path for path in folder.parent.glob(f"{_PREFIX}*") if path.is_dir() and path != folder]
    unused = sorted((path for path in others if not any(_leases(path))), key=_used_at_s, reverse=True)
    for path in unused[NUM_KEPT:]:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            path.rename(aside)
            if any(_leases(path)):  # of a run that has begun meanwhile
                aside.rename(path)
        shutil.rmtree(aside, ignore_errors=True)


def _leases(folder: Path) -> Iterator[Path]:
    return folder.parent.glob(f"{folder.name}{_LEASE}*")


def _used_at_s(path: Path) -> float:
    """When it was last renewed; at the beginning of time if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
