"""The two files of a corpus, tokens and Megatron index: checks them and caches their facts. Loads without torch.

The cache is valid only while size and modification time of both files match.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from spare_megatron.config.foreign_fields import require_kinds
from spare_megatron.config.limits import NonNegativeInt, PositiveInt
from spare_megatron.config.schema_sections import DataConfig, ValidationCorpus
from spare_megatron.formats.output import whole_file
from spare_megatron.formats.quantities import format_binary_bytes

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
"""Megatron index header: magic, version, token type code, number of sequences, number of documents."""
_VERSION = 1
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_TYPES = (6, 7)
_CHUNK = 1 << 22
_LONG_BYTES = 1 << 28
"""Reading more than this takes a second or longer."""
_DIGEST_DIGITS = 16
_MOST_NOTE_BYTES = 1 << 16
_STATE = "checked"
"""Under another name where a check was added: what earlier versions noted is then read again."""
_NOTED: Mapping[str, Any] = {"tokenizer": str, "vocab_size": PositiveInt, "end_of_document": NonNegativeInt | None}
_FIGURES = ("digest", "num_tokens", "least_token", "largest_token")
_AND = " + "
_PART = re.compile(r"(?:(\d[\d.e-]*) of )?[0-9a-f]*, (\d+ tokens[^,]*)(?:, tokenizer .*)?")
"""A part of an identity: its share of a blend, and its size, with the split."""

HELD_OUT = "validation"
"""Name of the validation set that `data.split` holds out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """Contents of a corpus."""

    digest: str
    """First digits of the SHA-256 over both files."""
    num_tokens: int
    least_token: int
    largest_token: int
    tokenizer: str = ""
    """Tokenizer named in the note beside the corpus; empty if there is none."""
    vocab_size: int | None = None
    """Vocabulary named in the note."""
    end_of_document: int | None = None
    """Token id that ends each document, by the note."""
    split: str = ""
    """`data.split` in shares that add up to 1; empty if all is trained on. The figures are those of the whole."""
    parts: tuple[tuple[float, "CorpusFacts"], ...] = ()
    """Share and facts of each corpus of a blend; the figures are then those of all."""
    validation: tuple["CorpusFacts", ...] = ()
    """Facts of the corpora of `data.validation`."""

    @property
    def identity(self) -> str:
        """Identifies the corpus, or blend, independently of its path."""
        if self.parts:
            return _AND.join(f"{share!r} of {facts.identity}" for share, facts in self.parts)
        known = f"{self.digest}, {self.num_tokens} tokens{self.split and f' split {self.split}'}"
        return f"{known}, tokenizer {self.tokenizer}" if self.tokenizer else known


def is_same_corpus(one: str, other: str) -> bool:
    """Whether two identities may denote one corpus; parts that either lacks are not compared.

    >>> is_same_corpus("9f86d081884c7d65, 300 tokens", "9f86d081884c7d65, 300 tokens, tokenizer byte")
    True
    >>> is_same_corpus("9f86d081884c7d65, 300 tokens", "60303ae22b998861, 300 tokens")
    False
    """
    if not one or not other:
        return True
    ours, theirs = one.split(_AND), other.split(_AND)
    return len(ours) == len(theirs) and all(
        a == b
        for our, their in zip(ours, theirs, strict=True)
        for a, b in zip(our.split(", ", 2), their.split(", ", 2), strict=False)
    )


def described_corpora(one: str, other: str) -> tuple[str, str]:
    """Two identities for a message. If one is a blend, both have rounded shares and sizes in the place of digests.

    >>> described_corpora("0.7 of 9f86, 300 tokens + 0.30000000000000004 of 6030, 20 tokens", "9f86, 300 tokens")
    ('70% of 300 tokens + 30% of 20 tokens', '300 tokens')
    >>> described_corpora("0.5 of 9f, 3 tokens + 0.5 of 60, 2 tokens", "0.5 of 9f, 3 tokens + 0.5 of 12, 2 tokens")
    ('50% of 3 tokens + 50% of 2 tokens', '50% of 3 tokens + 50% of 2 tokens, of other text or by another tokenizer')
    """
    if _AND not in one + other:
        return one, other
    ours, theirs = (_AND.join(map(_described_part, identity.split(_AND))) for identity in (one, other))
    return ours, theirs if theirs != ours else f"{theirs}, of other text or by another tokenizer"


def _described_part(identity: str) -> str:
    found = _PART.fullmatch(identity)
    if found is None:
        return identity  # of a configuration that was written by hand
    size = re.sub(r"\d+\.\d+", lambda share: f"{float(share[0]):.3g}", found[2])
    return f"{100 * float(found[1]):.3g}% of {size}" if found[1] else size


def corpus_files(prefix: str | Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def input_files(data: DataConfig) -> tuple[Path, ...]:
    """The files of all corpora that a run reads, those of validation sets last."""
    return tuple(file for _, prefix in named_corpora(data) for file in corpus_files(prefix))


def cache_folder(data: DataConfig) -> Path:
    return (Path(data.cache) if data.cache else Path(data.corpora[0].corpus).absolute().parent / "cache").absolute()


def judge_corpus(data: DataConfig, on_read: Callable[[str], None] = lambda _: None) -> tuple[CorpusFacts | None, str]:
    """Facts of all corpora, or why one cannot be used; neither if there is none to train on or a file of it is missing.

    `on_read` announces long reads.
    """
    found: list[CorpusFacts] = []
    try:
        split = ":".join(map(repr, split_shares(data.split)[: 3 if data.split else 0]))
    except ValueError as error:
        return None, str(error)
    for name, prefix in named_corpora(data):
        try:
            found.append(_known_facts(prefix, cache_folder(data), on_read))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            is_one_of_several = bool(data.blend or found)
            return None, f"{name}: its .bin or .idx is missing; write them with `spare preprocess`" * is_one_of_several
        except OSError as error:
            return None, (
                f"{name}: {error.filename or 'a file of it'} cannot be read: {error.strerror or error}; "
                f"let the user that trains read it"
            )
        except ValueError as error:
            return None, f"{name}: {error}"
    if not data.corpora:
        return None, ""
    trained_on = [replace(facts, split=split) for facts in found[: len(data.corpora)]]
    whole, failure = _blended(data, trained_on) if data.blend else (trained_on[0], "")
    return whole and replace(whole, validation=tuple(found[len(data.corpora) :])), failure


def named_corpora(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Each corpus as messages name it, and its path prefix."""
    for part in data.corpora:
        yield f"{'data.blend: ' if data.blend else 'data.'}corpus={part.corpus}", part.corpus
    for one in data.validation:
        yield named_set(one), one.corpus


def named_set(one: ValidationCorpus) -> str:
    """A validation set as messages name it."""
    return f"data.validation: name={one.name}, corpus={one.corpus}"


def validation_names(data: DataConfig) -> tuple[str, ...]:
    """The validation sets, that of `data.split` first; ValueError if the split is none."""
    return (*[HELD_OUT][: split_shares(data.split)[1] > 0], *(one.name for one in data.validation))


def split_shares(split: str) -> tuple[float, ...]:
    """`data.split` as shares that add up to 1, of training, validation and test; ValueError if it is none.

    >>> split_shares("3,1"), split_shares("")
    ((0.75, 0.25, 0.0), (1.0, 0.0, 0.0))
    """
    refusal = f"data.split={split} must be one to three numbers, separated by commas, the first above 0, as in 99,1"
    try:
        numbers = [float(number) for number in (split or "1").split(",")]
    except ValueError as error:
        raise ValueError(refusal) from error
    if len(numbers) > 3 or not numbers[0] > 0 or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(refusal)
    return tuple(number / sum(numbers) for number in [*numbers, 0.0, 0.0][:3])


def documents_of(split: str, part: int, num_documents: int) -> range:
    """Documents of training (0), validation (1) or test (2); cut as Megatron cuts them."""
    shares = split_shares(split)
    begin, end = (sum(shares[:number]) for number in (part, part + 1))
    return range(round(begin * num_documents), round(end * num_documents))


def _blended(data: DataConfig, found: list[CorpusFacts]) -> tuple[CorpusFacts | None, str]:
    """Facts of a blend of corpora, or why they do not fit together."""
    for part in data.blend:
        if not 0 < part.weight < math.inf:
            return None, f"data.blend: corpus={part.corpus} has weight={part.weight}; set it to a number above 0"
    tokenizers = {
        facts.tokenizer: part.corpus for part, facts in zip(data.blend, found, strict=True) if facts.tokenizer
    }
    if len(tokenizers) > 1:
        written = ", ".join(f"{prefix} with {tokenizer}" for tokenizer, prefix in tokenizers.items())
        return None, f"data.blend: its corpora were written with different tokenizers, {written}; write all with one"
    total = sum(part.weight for part in data.blend)
    ends = {facts.end_of_document for facts in found}
    return CorpusFacts(
        digest="",
        end_of_document=ends.pop() if len(ends) == 1 else None,
        num_tokens=sum(facts.num_tokens for facts in found),
        least_token=min(facts.least_token for facts in found),
        largest_token=max(facts.largest_token for facts in found),
        parts=tuple((part.weight / total, facts) for part, facts in zip(data.blend, found, strict=True)),
    ), ""


def _known_facts(prefix: str, cache: Path, on_read: Callable[[str], None]) -> CorpusFacts:
    """Facts from the cache, else from a full read. Raises ValueError if damaged, OSError if unreadable."""
    files = corpus_files(prefix)
    state = _state_of(files)
    note = _note_beside(prefix)
    kept = _kept_facts(prefix, cache)
    facts = _facts_in(note, state) or _facts_in(_json_in(kept), state)
    if facts is None:
        facts = read_corpus(prefix, on_read)
        _keep(kept, {**_figures(facts), _STATE: state})
    if note.get("digest", facts.digest) != facts.digest:  # the note describes an earlier corpus at this path
        return facts
    tokenizer = str(note.get("tokenizer", ""))
    end = note.get("end_of_document", 0 if tokenizer == "byte" else None)  # earlier notes lack it
    return replace(facts, tokenizer=tokenizer, vocab_size=note.get("vocab_size"), end_of_document=end)


def note_of(facts: CorpusFacts) -> str:
    """The note that `spare preprocess` writes beside a corpus: the same for the same text and tokenizer."""
    note = {"tokenizer": facts.tokenizer, "vocab_size": facts.vocab_size, "end_of_document": facts.end_of_document}
    return json.dumps({**note, **_figures(facts)}) + "\n"


def keep_facts(prefix: str | Path, facts: CorpusFacts) -> None:
    """Caches the facts of a corpus that was just written, so that it is not read again."""
    state = _state_of(corpus_files(prefix))
    _keep(_kept_facts(prefix, cache_folder(DataConfig(corpus=str(prefix)))), {**_figures(facts), _STATE: state})


def read_corpus(prefix: str | Path, on_read: Callable[[str], None] = lambda _: None) -> CorpusFacts:
    """Reads both files completely; raises ValueError if they are damaged, OSError if unreadable."""
    tokens, index = corpus_files(prefix)
    num_bytes = tokens.stat().st_size
    dtype, expected_bytes = _check_index(index)
    if num_bytes != expected_bytes:
        raise ValueError(
            f"{tokens} has {num_bytes} bytes, and by its index {index} there are {expected_bytes}: it is cut short or "
            f"of another corpus; copy or write both files anew"
        )
    if num_bytes == 0:
        raise ValueError(f"{tokens} is empty; write the corpus anew, from text")
    if num_bytes >= _LONG_BYTES:
        on_read(f"reading {tokens}, all {format_binary_bytes(num_bytes)} of it, which is done once")
    digest = hashlib.sha256()
    with index.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    least, largest = _token_range(tokens, dtype, digest.update)
    return CorpusFacts(
        digest=digest.hexdigest()[:_DIGEST_DIGITS],
        num_tokens=num_bytes // dtype.itemsize,
        least_token=least,
        largest_token=largest,
    )


# ------------------------------------------------------------------------------------------------------------- files


def _check_index(path: Path) -> tuple[np.dtype[Any], int]:
    """Checks the index for consistency; returns the token type and the size of all tokens in bytes."""
    with path.open("rb") as file:
        dtype, num_sequences, num_documents = _read_header(path, file)
        num_bytes = _check_sequences(path, file, num_sequences, dtype.itemsize)
        _check_documents(path, file, num_sequences, num_documents)
    return dtype, num_bytes


def write_index(path: Path, dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> None:
    """Writes the index of tokens in documents of these lengths, each of one sequence."""
    code = next(code for code, name in _TOKEN_TYPES.items() if np.dtype(name) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def _read_header(path: Path, file: BinaryIO) -> tuple[np.dtype[Any], int, int]:
    head, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    if size == 0:
        raise _damaged(path, "is empty")
    if not _MAGIC.startswith(head[: len(_MAGIC)]):
        raise _damaged(path, "is no index of Megatron's: it does not begin with MMIDIDX")
    if len(head) < _HEADER.size:
        raise _damaged(path, f"has {size} bytes, and its header alone takes {_HEADER.size}: it is cut short")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(head)
    if version != _VERSION:
        raise ValueError(f"{path} is an index of version {version}, and only {_VERSION} is known; write it anew")
    if code in _FLOAT_TYPES:
        raise ValueError(f"{path} is the index of floating-point numbers, not of token ids; choose another corpus")
    if code not in _TOKEN_TYPES:
        raise _damaged(path, f"names a type of tokens that does not exist ({code})")
    # The index of a multimodal corpus has one more byte per sequence, which is not read.
    needed = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if size not in (needed, needed + num_sequences):
        what = "cut short or damaged" if size < needed else "damaged"
        raise _damaged(path, f"has {size} bytes, and by its header {needed}: it is {what}")
    return np.dtype(_TOKEN_TYPES[code]), num_sequences, num_documents


def _check_sequences(path: Path, file: BinaryIO, count: int, itemsize: int) -> int:
    """Checks that each sequence begins where the one before it ends; returns the bytes of all tokens."""
    end = 0
    for first in range(0, count, _CHUNK):
        num = min(_CHUNK, count - first)
        lengths = _integers(path, file, "<i4", _HEADER.size + 4 * first, num).astype(np.int64)
        begins = _integers(path, file, "<i8", _HEADER.size + 4 * count + 8 * first, num)
        if lengths.min() < 0:
            raise _damaged(path, f"has a sequence of {lengths.min()} tokens")
        ends = end + np.cumsum(lengths) * itemsize
        wrong = np.flatnonzero(begins != ends - lengths * itemsize)
        if wrong.size:
            where = f"sequence {first + wrong[0]} at byte {begins[wrong[0]]}"
            raise _damaged(path, f"has {where}, which is not where the sequence before it ends")
        end = int(ends[-1])
    return end


def _check_documents(path: Path, file: BinaryIO, num_sequences: int, count: int) -> None:
    """Checks that the documents cover all sequences, in order. The list has where each begins, and where the last ends.

    Megatron asserts the end alone, and would train on sequences before the first document, too.
    """
    has = f"has {num_sequences} sequences, and"
    last, offset = 0, _HEADER.size + 12 * num_sequences
    for first in range(0, count, _CHUNK):
        begins = _integers(path, file, "<i8", offset + 8 * first, min(_CHUNK, count - first))
        if first == 0 and begins[0] > 0:
            raise _damaged(path, f"{has} its first document begins at sequence {begins[0]}")
        wrong = np.flatnonzero(np.diff(begins, prepend=last) < 0)
        if wrong.size:
            number = int(wrong[0])
            where = f"document {first + number} begins at sequence {begins[number]}"
            raise _damaged(path, f"has documents that are out of order: {where}")
        last = int(begins[-1])
    if not count:
        raise _damaged(path, f"{has} no documents")
    if last != num_sequences:
        raise _damaged(path, f"{has} its documents end at sequence {last}")


def _integers(path: Path, file: BinaryIO, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    file.seek(offset)
    numbers = np.fromfile(file, dtype=dtype, count=count)
    if numbers.size < count:
        raise _damaged(path, "is being cut short")
    return numbers


def _token_range(path: Path, dtype: np.dtype[Any], update: Callable[[Any], None]) -> tuple[int, int]:
    """The smallest and the largest token id; passes all bytes to `update`."""
    chunks = list(_ranges(path, dtype, update))
    return min(least for least, _ in chunks), max(largest for _, largest in chunks)


def _ranges(path: Path, dtype: np.dtype[Any], update: Callable[[Any], None]) -> Iterator[tuple[int, int]]:
    with path.open("rb") as file:
        while (tokens := np.fromfile(file, dtype=dtype, count=_CHUNK)).size:
            update(tokens.data)
            yield int(tokens.min()), int(tokens.max())


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}; copy or write the corpus anew")


# ------------------------------------------------------------------------------------------------------------- notes


def _state_of(files: tuple[Path, Path]) -> list[list[int]]:
    """Size and modification time of each file; opens them to make sure that they can be read."""
    state = []
    for file in files:
        with file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            state.append([found.st_size, found.st_mtime_ns])
    return state


def _kept_facts(prefix: str | Path, cache: Path) -> Path:
    name = hashlib.blake2b(str(Path(prefix).absolute()).encode(), digest_size=8).hexdigest()
    return cache / f"corpus-{name}.json"


def _figures(facts: CorpusFacts) -> dict[str, Any]:
    return {name: value for name, value in asdict(facts).items() if name in _FIGURES}


def _facts_in(note: Mapping[str, Any], state: list[list[int]]) -> CorpusFacts | None:
    """The facts in a note if it describes files in this state, else None."""
    counts: dict[str, Any] = {name: note.get(name) for name in ("num_tokens", "least_token", "largest_token")}
    if note.get(_STATE) != state or not all(isinstance(count, int) for count in counts.values()):
        return None
    return CorpusFacts(digest=str(note.get("digest")), **counts)


def _note_beside(prefix: str) -> Mapping[str, Any]:
    """The note of `spare preprocess`; empty without one. Raises ValueError for one that lacks the vocabulary size."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return {}
    note = _json_in(path)
    if not isinstance(note.get("vocab_size"), int):
        raise ValueError(
            f"{path} does not say with which vocabulary the corpus was written, as `spare preprocess` notes it there: "
            f"write the corpus anew, or move that file away"
        )
    require_kinds(_NOTED, note, f"{path}: ")
    return note


def _json_in(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            note = json.loads(file.read(_MOST_NOTE_BYTES))  # Megatron's own tools use this name for files of text
        if isinstance(note, dict):
            return note
    return {}


def _keep(path: Path, note: Mapping[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file("data.cache", path) as aside:
            aside.write_text(json.dumps(note) + "\n")
