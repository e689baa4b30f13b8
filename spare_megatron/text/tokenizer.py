"""Tokenizers: bytes, a tokenizer.json of Hugging Face, a model of SentencePiece, and ranks of tiktoken.

`read_tokenizer` reads the files once; what it returns can be sent to other processes, each of which builds its
`Tokenizer` from it, so all of them use the same one. Text never becomes a special token.
"""

import base64
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BYTE = "byte"
TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_CHOICES = "byte, hf:PATH, sentencepiece:FILE or tiktoken:FILE"
_DIGEST_DIGITS = 16
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """What a tokenizer is made of.

    Attributes:
        name: As the user gave it, for messages.
        paths: The files that were read.
        content: Of the file with the vocabulary.
        end_of_document: The text of the token that ends a document; empty if only the vocabulary can say.
        split_pattern: Regular expression that splits text before merges, for tiktoken.
        special_tokens: Beside the ranks of tiktoken.
    """

    kind: str
    name: str
    paths: tuple[Path, ...] = ()
    content: bytes = b""
    end_of_document: str = ""
    split_pattern: str = ""
    special_tokens: tuple[tuple[str, int], ...] = ()

    @property
    def identity(self) -> str:
        """Kind and digest of everything that determines the ids of a text, wherever the files lie."""
        if self.kind == BYTE:
            return BYTE
        digest = hashlib.sha256(self.content)
        if self.kind == "tiktoken":
            digest.update(json.dumps([self.split_pattern, sorted(self.special_tokens)]).encode())
        return f"{self.kind}:{digest.hexdigest()[:_DIGEST_DIGITS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer at work. `encode` returns the ids of each text, without those that begin or end it.

    Attributes:
        vocab_size: Largest id there is, added and special tokens included, and one.
        end_of_document: Id that is appended to each document.
        is_byte_0_text: Whether text may contain byte 0.
    """

    vocab_size: int
    end_of_document: int
    encode: Callable[[list[str]], Sequence[Sequence[int] | np.ndarray[Any, Any]]]
    is_byte_0_text: bool = True


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
    return TokenizerSource(
        kind=kind,
        name=name,
        paths=source.paths,
        content=source.content,
        end_of_document=end_of_document,
        split_pattern=split_pattern,
        special_tokens=tuple(map(_special_token, special_tokens)),
    )


def _read_hf(name: str, path: Path, end_of_document: str) -> TokenizerSource:
    """A tokenizer.json or its folder, where its configuration names the token that ends a text."""
    if path.is_dir():
        path = path / TOKENIZER_JSON
    config = path.with_name(TOKENIZER_CONFIG)
    if not end_of_document and path.name == TOKENIZER_JSON and config.is_file():
        try:
            found = json.loads(_content(name, config)).get("eos_token") or ""
        except (ValueError, AttributeError) as error:
            raise ValueError(f"--tokenizer {name}: {config} is no JSON object; copy it anew") from error
        end_of_document = found if isinstance(found, str) else str(found.get("content", ""))
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
    if not text or not number.isdecimal():
        raise ValueError(f"--special-token {given} is not TEXT=ID, as in '<|endoftext|>=100257'")
    return text, int(number)


# ---------------------------------------------------------------------------------------------------------- building


def build(source: TokenizerSource) -> Tokenizer:
    """ValueError: the package is not installed, the file is not of this kind, or nothing ends a document."""
    if source.kind == BYTE:
        return Tokenizer(vocab_size=256, end_of_document=0, encode=_bytes_of, is_byte_0_text=False)
    return _LOADERS[source.kind](source)


def _bytes_of(texts: list[str]) -> list[np.ndarray[Any, Any]]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def _build_hf(source: TokenizerSource) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process is one thread
    try:
        tokenizer = package("tokenizers", source.name).Tokenizer.from_buffer(source.content)
    except ValueError as error:
        raise _not_a("tokenizer.json", source, error) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # as text
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = tokenizer.get_vocab(with_added_tokens=True)

    def encode(texts: list[str]) -> list[Sequence[int]]:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(
        vocab_size=max(ids.values()) + 1, end_of_document=_end_of_document(source, special, ids), encode=encode
    )


def _build_sentencepiece(source: TokenizerSource) -> Tokenizer:
    processor = package("sentencepiece", source.name).SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(source.content)
    except RuntimeError as error:
        raise _not_a("model of SentencePiece", source, error) from error
    ids = {processor.IdToPiece(number): number for number in range(processor.GetPieceSize())}
    end = processor.eos_id()
    special = {processor.IdToPiece(end): end} if end >= 0 else {}

    def encode(texts: list[str]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = processor.Encode(texts, out_type=int, num_threads=1)
        return found

    return Tokenizer(vocab_size=len(ids), end_of_document=_end_of_document(source, special, ids), encode=encode)


def _build_tiktoken(source: TokenizerSource) -> Tokenizer:
    special = dict(source.special_tokens)
    ranks = _ranks(source)
    taken = sorted(set(special.values()) & set(ranks.values()))
    if taken or len(set(special.values())) < len(source.special_tokens):
        raise ValueError(
            f"--special-token: each needs an id of its own, and the ranks of --tokenizer {source.name} are those from "
            f"{min(ranks.values())} to {max(ranks.values())}"
        )
    try:
        encoding = package("tiktoken", source.name).Encoding(
            "spare", pat_str=source.split_pattern, mergeable_ranks=ranks, special_tokens=special
        )
    except ValueError as error:
        if isinstance(error, PackageMissing):
            raise
        raise ValueError(f"--split-pattern {source.split_pattern} is no regular expression: {error}") from error

    def encode(texts: list[str]) -> list[Sequence[int]]:
        return [encoding.encode_ordinary(text) for text in texts]

    return Tokenizer(
        vocab_size=encoding.n_vocab, end_of_document=_end_of_document(source, special, special), encode=encode
    )


def _ranks(source: TokenizerSource) -> dict[bytes, int]:
    """The ranks of a .tiktoken file: a token in base64 and its rank on each line. tiktoken's own reader would keep a
    copy under the name of the file, and read that when the file has changed.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in source.content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise _not_a(".tiktoken file, with a token in base64 and its rank on each line", source, error) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) < len(ranks):
        what = f"byte {missing[0]} has no rank" if missing else "tokens share a rank"
        raise _not_a("complete .tiktoken file", source, ValueError(what))
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


def _not_a(what: str, source: TokenizerSource, error: Exception) -> ValueError:
    if isinstance(error, PackageMissing):
        return error
    return ValueError(f"--tokenizer {source.name}: {source.paths[0]} is no {what}: {error}")


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
