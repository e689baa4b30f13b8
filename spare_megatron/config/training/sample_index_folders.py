"""The order of samples; locates its indices and removes unused ones. Loads without torch.

An index is a folder named by all it depends on, with one folder per epoch; a run's lease on it is a file beside it. Of
the indices without a lease the `NUM_KEPT` last used ones stay.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import cache_folder, corpus_files, split_shares
from spare_megatron.config.training.read_samples import skipped_places
from spare_megatron.config.training.terms import ORDER, sequences_before

NUM_KEPT = 8
LEASE_S = 7 * 24 * 3600.0
"""A lease not renewed for this long belongs to a run that was killed."""
RENEWAL_S = 3600.0
_PREFIX, _LEASE = "samples-", ".lease-"


def num_samples(config: RunConfig) -> int:
    """Samples that the order has up to the last one that the run reads, with those that it leaves out."""
    number = config.sites.read_of_order(sequences_before(config, config.train.steps))
    return skipped_places(config.data.skip).place(number - 1) + 1


def epoch_seed(seed: int, place: int, epoch: int) -> int:
    """Seed of Megatron's shuffle of an epoch of the corpus at a place in the blend; 32 bits, as RandomState takes."""
    return int.from_bytes(blake2b(f"epoch:{seed},{place},{epoch}".encode(), digest_size=4).digest(), "big")


def epoch_folder(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}"


def index_folder(config: RunConfig, place: int = 0) -> Path:
    """Folder for the index of the corpus at a place in the run's blend, named by its state; ValueError if missing."""
    data = config.data
    prefix = Path(data.corpora[place].corpus).absolute()
    files = corpus_files(prefix)
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{data.named}: {' and '.join(missing)} missing; write it with `spare preprocess` or change the path"
        )
    states = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    identity = [str(prefix), states, config.train.seed, config.model.seq_length, config.model.vocab_size]
    name = blake2b(json.dumps([*identity, ORDER, place, split_shares(data.split)]).encode(), digest_size=8).hexdigest()
    return cache_folder(data) / f"{_PREFIX}{name}"


@contextmanager
def leased(config: RunConfig) -> Iterator[None]:
    """Holds leases on the run's indices; enter before building them. Raises ValueError if a corpus is missing."""
    folders = [index_folder(config, place) for place in range(len(config.data.corpora))]
    leases = [folder.with_name(f"{folder.name}{_LEASE}{secrets.token_hex(8)}") for folder in folders]
    with suppress(OSError):  # on read-only storage nothing is removed either, or building the index fails
        for lease in leases:
            lease.parent.mkdir(parents=True, exist_ok=True)
            lease.touch()
    try:
        yield
    finally:
        for lease in leases:
            with suppress(OSError):
                lease.unlink()


def renew(folder: Path) -> None:
    for path in (folder, *_leases(folder)):
        with suppress(OSError):  # owned by another user
            os.utime(path)


def remove_unused(folder: Path) -> None:
    """Removes expired leases, abandoned folders, and all but the `NUM_KEPT` last used indices without a lease.

    `folder` is an index just renewed: its time is now by the clock of the storage.
    """
    now_s = _used_at_s(folder)
    for lease in folder.parent.glob(f"{_PREFIX}*{_LEASE}*"):
        if now_s - _used_at_s(lease) > LEASE_S:
            with suppress(OSError):
                lease.unlink()
    for aside in folder.parent.glob(f".{_PREFIX}*"):
        if now_s - _used_at_s(aside) > LEASE_S:  # its process was killed while it built or removed the index
            shutil.rmtree(aside, ignore_errors=True)
    others = [path for path in folder.parent.glob(f"{_PREFIX}*") if path.is_dir() and path != folder]
    unused = sorted((path for path in others if not any(_leases(path))), key=_used_at_s, reverse=True)
    for path in unused[NUM_KEPT:]:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            path.rename(aside)
            if any(_leases(path)):  # a run took a lease meanwhile
                aside.rename(path)
        shutil.rmtree(aside, ignore_errors=True)


def _leases(folder: Path) -> Iterator[Path]:
    return folder.parent.glob(f"{folder.name}{_LEASE}*")


def _used_at_s(path: Path) -> float:
    """When the path was last renewed; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
