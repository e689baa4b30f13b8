"""Tokenizers: bytes, a tokenizer.json of Hugging Face, a model of SentencePiece, and ranks of tiktoken.

`read_tokenizer` reads the files once; what it returns can be sent to other processes, each of which builds its
`Tokenizer` from it, so all of them use the same one. Text never becomes the token that ends documents.
"""

import base64
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

BYTE = "byte"
TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_CHOICES = "byte, hf:PATH, sentencepiece:FILE or tiktoken:FILE"
_DIGEST_DIGITS = 16
_MOST_NAMED = 8
_MOST_IDS = 1 << 31
"""A corpus holds int32."""
_LONG_PIECE = 1 << 18
"""Characters; tiktoken's regular expressions overflow their stack, a million entries, in longer matches."""
_UNREACHABLE = "\0end of document\0"
"""In place of a token that text is not to become."""
_PIECE = 0x0A
"""Tag of a piece in a model of SentencePiece."""
Ids = Sequence[int] | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    kind: str
    name: str
    """As the user gave it, for messages."""
    paths: tuple[Path, ...] = ()
    """The files that were read."""
    content: bytes = b""
    """Of the file with the vocabulary."""
    end_of_document: str = ""
    """The text of the token that ends a document; empty if only the vocabulary can say."""
    split_pattern: str = ""
    """Regular expression that splits text before merges, for tiktoken."""
    special_tokens: tuple[tuple[str, int], ...] = ()
    """Beside the ranks of tiktoken."""

    @property
    def identity(self) -> str:
        """Kind and digest of everything that determines the ids of a text, wherever the files lie."""
        if self.kind == BYTE:
            return BYTE
        digest = hashlib.sha256(self.content)
        if self.kind == "tiktoken":
            digest.update(json.dumps([self.split_pattern, sorted(self.special_tokens)]).encode())
        return f"{self.kind}:{digest.hexdigest()[:_DIGEST_DIGITS]}"


def _no_other_tokens(text: str) -> Sequence[int]:
    raise ValueError("no other tokens are known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    name: str
    """The options that chose it, for messages."""
    vocab_size: int
    """Largest id there is, added and special tokens included, and one."""
    end_of_document: int
    """Id that is appended to each document."""
    encode: Callable[[list[str]], Sequence[Ids]]
    """Returns the ids of each text, without those that begin or end it."""
    decode: Callable[[Sequence[int]], str]
    """The text of ids, which may begin and end within a character."""
    encode_without: Callable[[str], Sequence[int]] = _no_other_tokens
    """Returns the ids of a text by a tokenizer that lacks the token `end_of_document`. ValueError: there is none."""
    is_byte_0_text: bool = True
    """Whether text may contain byte 0."""

    def spell_out(self, text: str) -> Sequence[int]:
        """The ids of a text without `end_of_document` if `encode` has it. ValueError: others do not say the same."""
        ids = self.encode_without(text)
        if self.end_of_document in ids or self.decode(ids) != self.decode(list(self.encode([text])[0])):
            raise ValueError("other tokens do not spell it out")
        return ids

    def shown(self, ids: Iterable[int]) -> str:
        """The text of ids, with the number of each that it has no token for, such as those of `data.fim_tokens`."""
        parts = groupby(ids, lambda one: one < self.vocab_size)
        texts = (self.decode([*part]) if is_text else "".join(map("<{}>".format, part)) for is_text, part in parts)
        return "".join(texts)


# ----------------------------------------------------------------------------------------------------------- reading


def read_tokenizer(
    name: str, *, end_of_document: str = "", split_pattern: str = "", special_tokens: Sequence[str] = ()
) -> TokenizerSource:
    """Reads the files of the tokenizer that `--tokenizer` names. ValueError: it is unknown, a file is missing, or what
    the kind of tokenizer needs or does not take.
    """
    kind, _, given = name.partition(":")
    if kind != "tiktoken" and (split_pattern or special_tokens):
        raise ValueError(f"--split-pattern and --special-token are for tiktoken:FILE, not for --tokenizer {name}")
    if name == BYTE:
        if end_of_document:
            raise ValueError("--tokenizer byte ends documents with byte 0; leave out --end-of-document")
        return TokenizerSource(kind=BYTE, name=name)
    if kind not in _LOADERS or not given:
        raise ValueError(f"--tokenizer {name} is unknown; choose {_CHOICES}")
    if kind == "hf":
        return _read_hf(name, Path(given), end_of_document)
    source = TokenizerSource(
        kind=kind, name=name, paths=(Path(given),), content=_content(name, Path(given)), end_of_document=end_of_document
    )
    if kind == "sentencepiece":
        return source
    if not split_pattern or not special_tokens:
        raise ValueError(
            f"--tokenizer {name}: a file of ranks has neither the pattern that splits text nor the special tokens; "
            f"give --split-pattern REGEX (or @FILE) and --special-token TEXT=ID"
        )
    if split_pattern.startswith("@"):
        split_pattern = _content("--split-pattern", Path(split_pattern[1:])).decode("utf-8").rstrip("\r\n")
    return replace(source, split_pattern=split_pattern, special_tokens=tuple(map(_special_token, special_tokens)))


def _read_hf(name: str, path: Path, end_of_document: str) -> TokenizerSource:
    """A tokenizer.json or its folder, where its configuration names the token that ends a text."""
    if path.is_dir():
        path = path / TOKENIZER_JSON
    config = path.with_name(TOKENIZER_CONFIG)
    if not end_of_document and path.name == TOKENIZER_JSON and config.is_file():
        try:
            found = json.loads(_content(name, config)).get("eos_token") or ""
            end_of_document = found if isinstance(found, str) else str(found.get("content", ""))
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"--tokenizer {name}: {config} is not a JSON object with the text of eos_token; repair it, or name the "
                f"token with --end-of-document"
            ) from error
    paths = (path, config) if config.is_file() else (path,)
    content = _content(name, path)
    return TokenizerSource(kind="hf", name=name, paths=paths, content=content, end_of_document=end_of_document)


def _content(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--tokenizer {name}: {path} cannot be read: {error.strerror}") from error


def _special_token(given: str) -> tuple[str, int]:
    text, _, number = given.rpartition("=")
    if not text or not number.isdecimal() or len(number) > len(str(_MOST_IDS)) or int(number) >= _MOST_IDS:
        raise ValueError(
            f"--special-token {given} is not TEXT=ID, as in '<|endoftext|>=100257', with an ID below {_MOST_IDS}"
        )
    return text, int(number)


# ---------------------------------------------------------------------------------------------------------- building


def build(source: TokenizerSource) -> Tokenizer:
    """ValueError: the package is not installed, the file is not of this kind, or nothing ends a document."""
    if source.kind == BYTE:
        name = f"--tokenizer {source.name}"
        return Tokenizer(
            name=name,
            vocab_size=256,
            end_of_document=0,
            encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
            decode=lambda ids: bytes(ids).decode(errors="backslashreplace"),
            is_byte_0_text=False,
        )
    found = _LOADERS[source.kind](source)
    if found.vocab_size > _MOST_IDS:
        raise ValueError(
            f"--tokenizer {source.name} has token {found.vocab_size - 1}; a corpus has ids below {_MOST_IDS}"
        )
    return found


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns errors of a tokenizer's library into a ValueError of one line. A panic of Rust is not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, PackageMissing):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from error


def _reading(source: TokenizerSource, what: str) -> AbstractContextManager[None]:
    return library_errors(f"--tokenizer {source.name}: {source.paths[0]} cannot be read as {what}")


# ------------------------------------------------------------------------------------------------------ Hugging Face


def _build_hf(source: TokenizerSource) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process is one thread
    with _reading(source, "tokenizer.json"):
        tokenizer = _load_hf(source, source.content)
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = tokenizer.get_vocab(with_added_tokens=True)
    end = _end_of_document(source, special, ids)
    tokenizer.add_special_tokens([tokenizer.id_to_token(end)])  # what is special is read as text
    without_end = cache(lambda: _load_hf(source, _without_token(source.content, end)))

    def decode(found: Sequence[int]) -> str:
        if tokenizer.decoder is None:
            return "".join(map(tokenizer.id_to_token, found))
        return str(tokenizer.decode(found, skip_special_tokens=False))

    return Tokenizer(
        name=f"--tokenizer {source.name}",
        vocab_size=max(ids.values()) + 1,
        end_of_document=end,
        encode=lambda texts: [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)],
        encode_without=lambda text: without_end().encode(text, add_special_tokens=False).ids,
        decode=decode,
    )


def _load_hf(source: TokenizerSource, content: bytes) -> Any:
    """A tokenizer that neither pads nor cuts, and reads special tokens as text."""
    tokenizer = package("tokenizers", source.name).Tokenizer.from_buffer(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_token(content: bytes, number: int) -> bytes:
    """A tokenizer.json in which no text becomes this token: it has another name, and nothing merges to it."""
    tokenizer = json.loads(content)
    for token in tokenizer.get("added_tokens", ()):
        if token["id"] == number:
            token.update(content=_UNREACHABLE, special=True)
    model = tokenizer["model"]
    if isinstance(model["vocab"], list):
        pieces = [model["vocab"][number][0]] if number < len(model["vocab"]) else []
        model["vocab"] = [[_UNREACHABLE if piece in pieces else piece, score] for piece, score in model["vocab"]]
    else:
        pieces = [piece for piece, other in model["vocab"].items() if other == number]
        model["vocab"] = {_UNREACHABLE if piece in pieces else piece: other for piece, other in model["vocab"].items()}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)}.intersection(pieces)]
    return json.dumps(tokenizer).encode()


# ----------------------------------------------------------------------------------------------------- SentencePiece


def _build_sentencepiece(source: TokenizerSource) -> Tokenizer:
    with _reading(source, "a model of SentencePiece"):
        processor = _load_sentencepiece(source, source.content)
    ids = {processor.IdToPiece(number): number for number in range(processor.GetPieceSize())}
    eos = processor.eos_id()
    end = _end_of_document(source, {processor.IdToPiece(eos): eos} if eos >= 0 else {}, ids)
    without_end = cache(lambda: _load_sentencepiece(source, _with_control_symbol(source.content, end)))

    return Tokenizer(
        name=f"--tokenizer {source.name}",
        vocab_size=len(ids),
        end_of_document=end,
        encode=lambda texts: processor.Encode(texts, out_type=int, num_threads=1),
        encode_without=lambda text: without_end().Encode(text, out_type=int),
        decode=processor.Decode,
    )


def _load_sentencepiece(source: TokenizerSource, content: bytes) -> Any:
    processor = package("sentencepiece", source.name).SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    return processor


def _with_control_symbol(model: bytes, number: int) -> bytes:
    """The model with a piece as a control symbol, which no text becomes.

    A model is a message of protobuf whose fields all have a length in front; those of tag `_PIECE` are the pieces. The
    last field 3 of a piece is its type, and type 3 is that of control symbols.
    """
    position = found = 0
    while position < len(model):
        field, begin = _varint(model, position)
        size, begin = _varint(model, begin)
        if field == _PIECE:
            if found == number:
                piece = model[begin : begin + size] + b"\x18\x03"
                return model[:position] + bytes([_PIECE]) + _as_varint(len(piece)) + piece + model[begin + size :]
            found += 1
        position = begin + size
    raise ValueError(f"the model of SentencePiece has {found} pieces, and no number {number}")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position behind it."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


def _as_varint(number: int) -> bytes:
    digits = [number & 0x7F]
    while number := number >> 7:
        digits[-1] |= 0x80
        digits.append(number & 0x7F)
    return bytes(digits)


# ---------------------------------------------------------------------------------------------------------- tiktoken


def _build_tiktoken(source: TokenizerSource) -> Tokenizer:
    special = dict(source.special_tokens)
    with _reading(source, "a .tiktoken file, with a token in base64 and its rank on each line"):
        ranks = _ranks(source)
    taken = sorted(set(special.values()) & set(ranks.values()))
    if taken or len(set(special.values())) < len(source.special_tokens):
        raise ValueError(
            f"--special-token: each needs an id of its own, and the ranks of --tokenizer {source.name} are those from "
            f"{min(ranks.values())} to {max(ranks.values())}"
        )
    library = package("tiktoken", source.name)
    with library_errors(f"--split-pattern {source.split_pattern} is not a regular expression"):
        encoding = library.Encoding(
            "spare", pat_str=source.split_pattern, mergeable_ranks=ranks, special_tokens=special
        )
    of_pieces = cache(lambda: library.Encoding("piece", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={}))

    def encode_text(text: str) -> Sequence[int]:
        pieces = _pieces(text, source) if len(text) >= _LONG_PIECE else []
        if max(map(len, pieces), default=0) < _LONG_PIECE:
            return list(encoding.encode_ordinary(text))
        return [number for piece in pieces for number in of_pieces().encode_ordinary(piece)]

    return Tokenizer(
        name=f"--tokenizer {source.name} with --split-pattern {source.split_pattern!r}",
        vocab_size=encoding.n_vocab,
        end_of_document=_end_of_document(source, special, special),
        encode=lambda texts: [encode_text(text) for text in texts],
        decode=lambda ids: encoding.decode(list(ids), errors="backslashreplace"),
    )


def _pieces(text: str, source: TokenizerSource) -> list[str]:
    """What tiktoken would split the text into; nothing if the pattern is one of Rust's alone."""
    regex = package("regex", source.name)
    with suppress(regex.error):
        return [found[0] for found in regex.finditer(source.split_pattern, text)]
    return []


def _ranks(source: TokenizerSource) -> dict[bytes, int]:
    """The ranks of a .tiktoken file: a token in base64 and its rank on each line. tiktoken's own reader would keep a
    copy under the name of the file, and read that when the file has changed.
    """
    ranks: dict[bytes, int] = {}
    for line in source.content.splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) < len(ranks):
        raise ValueError(f"byte {missing[0]} has no rank" if missing else "tokens share a rank")
    return ranks


_LOADERS = {"hf": _build_hf, "sentencepiece": _build_sentencepiece, "tiktoken": _build_tiktoken}


def _end_of_document(source: TokenizerSource, special: Mapping[str, int], ids: Mapping[str, int]) -> int:
    """The id of the token that was named, else of the only special one."""
    if source.end_of_document:
        if source.end_of_document not in ids:
            raise ValueError(
                f"--tokenizer {source.name} has no token {source.end_of_document!r} to end a document with; name "
                f"another with --end-of-document"
            )
        return ids[source.end_of_document]
    if len(special) != 1:
        some = f", such as {', '.join(list(special)[:_MOST_NAMED])}" if special else ""
        raise ValueError(
            f"--tokenizer {source.name} does not say which token ends a document; name it with --end-of-document{some}"
        )
    return next(iter(special.values()))


class PackageMissing(ValueError):
    """An optional package is not installed."""


def package(module: str, name: str) -> Any:
    """The module of an optional package that tokenizer `name` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackageMissing(
            f"--tokenizer {name} needs the package {module}, which is not installed: pip install 'spare_megatron[text]'"
        ) from error
