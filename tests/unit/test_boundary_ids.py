"""The id that ends documents stands at their ends alone, whatever the tokenizer and the text."""

import base64
import io
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.tools.text.documents import TextFiles
from spare_megatron.tools.text.tokenization import tokenize
from spare_megatron.tools.text.tokenizer import TokenizerSource, build

END = "<|end|>"
OTHER = "<|pad|>"
PIECES = ("ab", "ba", "a", " ", "  ", "\n", END, END, END[:-1], END[1:], END.upper(), "STOP", OTHER, "\uff5c", "\u00e9")
NUM_TOKENIZERS, TEXTS_EACH = 160, 10
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHARACTERS = sorted({*"".join(PIECES), *END.lower(), "\u2581", "S", "T", "O", "P"})
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def drawn_text(random: Random) -> str:
    return "".join(random.choices(PIECES, k=random.randrange(1, 9)))


# ------------------------------------------------------------------------------------------------------- Hugging Face


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def bpe(alphabet: list[str], **more: Any) -> models.BPE:
    """Merges that build the token which ends documents, one character after another, and the one behind it."""
    ends = [END[:length] for length in range(2, len(END) + 1)]
    merges = [(end[:-1], end[-1]) for end in ends]
    if "a" in alphabet:
        merges.append((END, "a"))
    vocabulary = numbered([*alphabet, *ends, *(["".join(merges[-1])])])
    return models.BPE(vocab=vocabulary, merges=merges, **more)


MODELS: dict[str, Callable[[], Any]] = {
    "bpe": lambda: models.BPE(vocab=numbered([*ALPHABET, END]), merges=[]),
    "bpe that merges to it": lambda: bpe(ALPHABET),
    "bpe without merges of whole words": lambda: models.BPE(
        vocab=numbered([*ALPHABET, END]), merges=[], ignore_merges=True
    ),
    "bpe of characters": lambda: bpe([*CHARACTERS, *BYTES], byte_fallback=True),
    "bpe whose unknown token it is": lambda: models.BPE(vocab=numbered(["a", "b", END]), merges=[], unk_token=END),
    "word piece": lambda: models.WordPiece(
        vocab=numbered(["?", END, *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]), unk_token="?"
    ),
    "word level": lambda: models.WordLevel(vocab=numbered(["?", "ab", "ba", "a", END]), unk_token="?"),
    "word level whose unknown token it is": lambda: models.WordLevel(vocab=numbered(["ab", END]), unk_token=END),
    "unigram": lambda: models.Unigram(
        [("?", -99.0), (END, -1.0), (f"\u2581{END}", -1.0), *((character, -5.0) for character in CHARACTERS)], unk_id=0
    ),
    "unigram with bytes": lambda: models.Unigram(
        [("?", -99.0), (END, -1.0), ("a", -5.0), *((byte, -9.0) for byte in BYTES)], unk_id=0, byte_fallback=True
    ),
}
"""Each with a token that text can become, beside what it is built of."""

NORMALIZERS: tuple[Callable[[], Any], ...] = (
    normalizers.Lowercase,
    normalizers.NFKC,
    lambda: normalizers.Replace("STOP", END),
)


def drawn_hf(random: Random, name: str) -> Tokenizer:
    tokenizer = Tokenizer(MODELS[name]())
    is_byte_level = name.startswith("bpe") and not name.endswith(("characters", "it is"))
    if is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=random.random() < 0.5)
        tokenizer.decoder = decoders.ByteLevel()
    elif random.random() < 0.7:
        tokenizer.pre_tokenizer = random.choice(
            (pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace())
        )
    if name == "word piece":
        tokenizer.decoder = decoders.WordPiece()
    elif "bytes" in name or "characters" in name:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    if random.random() < 0.5:
        tokenizer.normalizer = random.choice(NORMALIZERS)()
    flags = {flag: random.random() < 0.3 for flag in ("lstrip", "rstrip", "single_word", "normalized")}
    match random.randrange(3):
        case 0:
            tokenizer.add_special_tokens([AddedToken(END, **flags)])
        case 1:
            tokenizer.add_tokens([AddedToken(END, **flags)])
    tokenizer.add_tokens([AddedToken(OTHER, special=random.random() < 0.5)])
    return tokenizer


def check(source: TokenizerSource, texts: list[str], folder: Path, encode: Callable[[str], list[int]]) -> Counter[str]:
    """Counts the texts that are encoded as by the library, otherwise, or refused; the last two only where they must."""
    tokenizer = build(source)
    end = tokenizer.end_of_document
    found: Counter[str] = Counter()
    for number, text in enumerate(texts):
        path = folder / f"{number}.txt"
        path.write_bytes(text.encode())
        expected = encode(text)
        batch = TextFiles(paths=(path,), named=frozenset([path]), num_input_bytes=1)
        refusal = ""
        try:
            ids = tokenize(batch, tokenizer).tokens.tolist()
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert end in expected, (source.name, text)
            assert refusal.startswith(f"{path} has text that --tokenizer {source.name} encodes as token {end}, ")
            assert "\n" not in refusal
            found["refused"] += 1
        elif end not in expected:
            assert ids == ([*expected, end] if expected else []), (source.name, text)
            found["as the library"] += 1
        else:
            assert ids.index(end) == len(ids) - 1, (source.name, text, ids)
            found["otherwise"] += 1
    return found


def ids_of(library: Tokenizer, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


def test_no_text_becomes_the_id_that_ends_documents_with_any_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    random = Random(39)
    found: dict[str, Counter[str]] = {name: Counter() for name in MODELS}
    for number in range(NUM_TOKENIZERS):
        name = list(MODELS)[number % len(MODELS)]
        content = drawn_hf(random, name).to_str().encode()
        library = Tokenizer.from_str(content.decode())
        library.encode_special_tokens = True
        source = TokenizerSource(
            kind="hf", name=name, paths=(tmp_path / "tokenizer.json",), content=content, end_of_document=END
        )
        texts = [drawn_text(random) for _ in range(TEXTS_EACH)]
        found[name] += check(source, texts, tmp_path, partial(ids_of, library))
    for name, counts in found.items():
        assert counts["as the library"], name
        lossy = name.startswith("word level") or name.endswith("unknown token it is")
        assert bool(counts["refused"]) == lossy, (name, counts)
        assert lossy or counts["otherwise"], name


def test_text_that_spells_out_the_end_is_kept_to_the_byte(tmp_path: Path) -> None:
    """White space around it, too, which an added token with `lstrip` would include."""
    random = Random(40)
    for name in [name for name in MODELS if name.startswith("bpe") and not name.endswith(("characters", "it is"))]:
        tokenizer = Tokenizer(MODELS[name]())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(END, lstrip=True, rstrip=True)])
        content = tokenizer.to_str().encode()
        source = TokenizerSource(kind="hf", name=name, paths=(tmp_path,), content=content, end_of_document=END)
        for _ in range(20):
            path = tmp_path / "text"
            path.write_bytes(drawn_text(random).encode() + b"  " + END.encode() + b" \n")
            found = tokenize(TextFiles(paths=(path,), named=frozenset(), num_input_bytes=1), build(source)).tokens
            assert found.tolist().index(tokenizer.token_to_id(END)) == len(found) - 1
            assert tokenizer.decode(found[:-1].tolist(), skip_special_tokens=False) == path.read_text()


# ------------------------------------------------------------------------------------------- SentencePiece, tiktoken


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
@pytest.mark.parametrize("is_symbol", [True, False], ids=["symbol", "piece"])
@pytest.mark.parametrize("byte_fallback", [True, False], ids=["bytes", "no bytes"])
def test_no_text_becomes_the_id_that_ends_documents_with_any_model_of_sentencepiece(
    tmp_path: Path, kind: str, is_symbol: bool, byte_fallback: bool
) -> None:
    """Named as a user-defined symbol, or a piece that the model has learnt."""
    random = Random(41)
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba", "ab ab", "".join(CHARACTERS).replace("\n", "")] * 9),
        model_writer=file,
        vocab_size=340 if byte_fallback else 60,
        model_type=kind,
        byte_fallback=byte_fallback,
        user_defined_symbols=[END] if is_symbol else [],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    library = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    end = END if is_symbol else library.IdToPiece(max(library.Encode("ab ba")))
    source = TokenizerSource(
        kind="sentencepiece", name=kind, paths=(tmp_path / "m",), content=file.getvalue(), end_of_document=end
    )
    found = check(source, [drawn_text(random) for _ in range(60)], tmp_path, library.Encode)
    assert found["as the library"]
    if kind != "word":  # which splits at white space alone
        assert found["refused"] + found["otherwise"]
    if byte_fallback and is_symbol:
        assert not found["refused"], found


def test_ranks_of_tiktoken_that_spell_out_a_special_token_stay_ranks(tmp_path: Path) -> None:
    ranks = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), b"<|", END.encode()])}
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    special = {END: 300, OTHER: 301}
    pattern = r"<\|end\|>|\w+|\s+|[^\w\s]+"
    source = TokenizerSource(
        kind="tiktoken",
        name="x",
        paths=(tmp_path,),
        content="".join(lines).encode(),
        end_of_document=END,
        split_pattern=pattern,
        special_tokens=tuple(special.items()),
    )
    library = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    random = Random(42)
    found = check(source, [drawn_text(random) for _ in range(100)], tmp_path, library.encode_ordinary)
    assert found == {"as the library": 100}


# -------------------------------------------------------------------------------------------------- on the command line


def test_a_text_that_cannot_be_spelled_otherwise_is_refused_with_its_line_and_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(MODELS["word level"]())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = tmp_path / "docs.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab ba", f"ab {END} ba", "ba")))
    words = ["--input", lines, "--json-key", "text", "--tokenizer", f"hf:{tmp_path}", "--end-of-document", END]
    errors = []
    for workers in (1, 2):
        command = [*words, "--output-prefix", tmp_path / "out" / "corpus", "--workers", workers]
        done = CliRunner().invoke(app, ["preprocess", *map(str, command)])
        assert done.exit_code == 2, done.output
        errors.append(done.stderr)
    expected = (
        f"spare preprocess: {lines}, line 2 has text that --tokenizer hf:{tmp_path} encodes as token 4, which ends "
        f"documents; name another with --end-of-document, or change the text: other tokens do not spell it out\n"
    )
    assert errors == [expected, expected]
    assert not list((tmp_path / "out").iterdir())


def test_ids_that_no_corpus_holds_are_refused_before_a_text_is_read(tmp_path: Path) -> None:
    """An id from 2**31 was an OverflowError, with a traceback."""
    text = Tokenizer(models.BPE(vocab={"a": 7, END: 1}, merges=[])).to_str()
    # Not by the library: it saves a vocabulary by going through all numbers up to the greatest id.
    (tmp_path / "tokenizer.json").write_text(text.replace('"a":7', f'"a":{2**31}'))
    (tmp_path / "ranks").write_text(
        "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    )
    (tmp_path / "a.txt").write_text("a")
    of_ranks = ["--tokenizer", f"tiktoken:{tmp_path}/ranks", "--split-pattern", ".", "--special-token"]
    for options, reason in {
        (
            "--tokenizer",
            f"hf:{tmp_path}",
            "--end-of-document",
            END,
        ): f"hf:{tmp_path} has token 2147483648; a corpus has",
        (*of_ranks, f"{END}={2**31}"): f"{END}=2147483648 is not TEXT=ID",
        (*of_ranks, f"{END}={'9' * 5000}"): "9 is not TEXT=ID",
    }.items():
        words = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "out" / "corpus", *options]
        done = CliRunner().invoke(app, ["preprocess", *map(str, words)])
        assert done.exit_code == 2, done.output
        assert reason in done.stderr


def test_a_tokenizer_trained_on_the_end_that_is_spelled_out_reads_it_as_text(tmp_path: Path) -> None:
    end = "<|endoftext|>"
    lines = tmp_path / "docs.jsonl"
    lines.write_text("".join(json.dumps({"text": f"{end}{end} {number} {end}" * 9}) + "\n" for number in range(50)))
    words = ["--input", str(lines), "--json-key", "text"]
    trained = ["tokenizer", "train", *words, "--vocab-size", "400", "--output", str(tmp_path / "tokenizer")]
    assert CliRunner().invoke(app, trained).exit_code == 0
    output = ["--tokenizer", f"hf:{tmp_path / 'tokenizer'}", "--output-prefix", str(tmp_path / "corpus")]
    assert CliRunner().invoke(app, ["preprocess", *words, *output]).exit_code == 0
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    library = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    documents = [tokens.tolist() for tokens in IndexedDataset(str(tmp_path / "corpus"))]
    assert {ids.index(library.token_to_id(end)) - len(ids) for ids in documents} == {-1}
    assert library.decode(documents[7], skip_special_tokens=False) == f"{end}{end} 7 {end}" * 9 + end
