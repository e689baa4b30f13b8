"""Where any group may be given any shard: whether it reads what the others read, before it takes part."""

from spare_megatron.control.store import ControlStore
from spare_megatron.core.topology import GroupId
from spare_megatron.mcore.data import Corpus

_KEY = "data-digest"


def check_shared_data(corpus: Corpus, group: GroupId, store: ControlStore) -> None:
    """Reads samples of every shard and compares them with those of whoever looked first.

    Raises:
        ValueError: A sample cannot be read, or is another one.
    """
    try:
        digest = corpus.digest()
    except ValueError as error:
        text = f"data.access=shared needs every group to read all data, and in group {group} {error}; set it to stacked"
        raise ValueError(text) from error
    if store.put_if_absent(_KEY, digest) != digest:
        raise ValueError(
            f"data.access=shared needs every group to read the same data, and group {group} reads other samples than "
            f"the one that looked first; have data.corpus name the same files everywhere, or set data.access=stacked"
        )
