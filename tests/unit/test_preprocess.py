"""`spare preprocess`, called as users call it."""

import errno
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spare_megatron.commands import app
from spare_megatron.tools.text.documents import find_files
from spare_megatron.tools.text.preprocess import TextProgress


def spare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["preprocess", *map(str, arguments)])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "sub" / "vendored").mkdir(parents=True)
    (folder / "b.py").write_bytes(b"bb")
    (folder / "sub" / "a.rst").write_bytes("a\u00e9".encode())
    (folder / "sub" / "vendored" / "c.py").write_bytes(b"c")
    (folder / "sub" / "d.bin").write_bytes(b"a\0b")
    (folder / "sub" / "e.bin").write_bytes(b"\xff\xfe")
    (folder / "sub" / "f.bin").write_bytes(b"")
    return folder


def documents_of(prefix: Path) -> list[bytes]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [bytes(tokens.tolist()) for tokens in IndexedDataset(str(prefix))]


def test_each_text_file_becomes_a_document_of_its_bytes(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "corpus"
    done = spare("--input", texts, "--output-prefix", prefix, "--tokenizer", "byte", "--json")
    assert done.exit_code == 0, done.output
    counts = {"documents": 3, "tokens": 9, "bytes": 6, "skipped_files": 3, "skipped_documents": 0}
    assert json.loads(done.stdout) == {**counts, "tokenizer": "byte", "vocab_size": 256}
    assert documents_of(prefix) == [b"bb\0", b"a\xc3\xa9\0", b"c\0"]


def test_it_needs_no_torch(texts: Path, tmp_path: Path) -> None:
    """Whose import, and Megatron's, took longer than the rest of the command for a small corpus."""
    arguments = ["preprocess", "--input", str(texts), "--output-prefix", str(tmp_path / "corpus")]
    code = f"import sys; sys.modules |= dict.fromkeys(['torch', 'megatron']); sys.argv = ['spare', *{arguments!r}]\n"
    code += "from spare_megatron.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert documents_of(tmp_path / "corpus")


def test_suffixes_and_excluded_folders_choose_the_files(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    choice = ["--suffix", ".py", "--suffix", ".bin", "--exclude", "vendored"]
    done = spare("--input", texts, "--output-prefix", prefix, *choice)
    assert done.exit_code == 0, done.output
    assert "1 documents, 3 tokens, 2 bytes" in done.stdout
    assert "skipped 3 files: 1 empty, 1 not UTF-8, 1 with byte 0" in done.stdout


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_what_is_read_is_never_written_over(tmp_path: Path, overwrite: list[str]) -> None:
    """The note beside the dataset took the place of corpus.json, the text that it was made of."""
    text = tmp_path / "corpus.json"
    text.write_text("a document")
    done = spare("--input", text, "--output-prefix", tmp_path / "corpus", *overwrite)
    assert done.exit_code == 2
    assert f"{text}" in done.output
    assert text.read_text() == "a document"
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.json"]


def test_a_folder_is_no_prefix(texts: Path, tmp_path: Path) -> None:
    done = spare("--input", texts, "--output-prefix", f"{texts}/")
    assert done.exit_code == 2
    assert f"--output-prefix {texts} is a folder; name the files in it, as in {texts}/corpus" in done.output
    assert not list(tmp_path.glob("texts.*"))


def test_a_file_named_twice_is_read_once(texts: Path) -> None:
    assert find_files([texts / "b.py", texts / "b.py", texts], suffixes=[".py"]) == [
        texts / "b.py",
        texts / "sub" / "vendored" / "c.py",
    ]


def test_links_to_folders_are_followed_and_each_folder_is_read_once(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "g.py").write_bytes(b"g")
    (texts / "a").symlink_to(tmp_path / "elsewhere")
    (texts / "again").symlink_to(texts / "a")
    (texts / "sub" / "circle").symlink_to(texts)
    found = find_files([texts], suffixes=[".py"])
    assert found == [texts / "a" / "g.py", texts / "b.py", texts / "sub" / "vendored" / "c.py"]


def test_a_folder_that_cannot_be_listed_is_refused(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents were left out, with exit code 0."""

    def denied(path: str) -> object:
        if Path(path).name == "vendored":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    real = os.scandir
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ValueError, match=rf"^--input {texts}/sub/vendored cannot be read: Permission denied$"):
        find_files([texts])


def test_a_link_that_leads_nowhere_is_refused(texts: Path) -> None:
    (texts / "gone.py").symlink_to(texts / "none.py")
    with pytest.raises(ValueError, match=rf"^--input {texts}/gone.py cannot be read: No such file or directory$"):
        find_files([texts], suffixes=[".py"])


def test_progress_comes_in_lines_where_there_is_no_terminal(texts: Path, tmp_path: Path) -> None:
    done = spare("--input", texts, "--output-prefix", tmp_path / "corpus")
    assert re.search(r"^read 11 B of 11 B, \S+ tokens/s, 0 s left$", done.stderr, re.MULTILINE)


def test_a_terminal_shows_a_bar_with_the_rate_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "a").write_bytes(bytes(100))
    with TextProgress([tmp_path / "a"]) as progress:
        progress.advance(100, 7)
    assert re.search(r"100%.*\d:\d\d:\d\d.*\d tokens/s", terminal.getvalue())


@pytest.mark.parametrize(
    "name", ["docs.jsonl", "docs.JSONL", "docs.ndjson", "docs.jsonl.gz", "docs.ndjson.zst", "docs.json"]
)
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "in a folder"])
def test_json_lines_without_a_key_are_refused_and_named(texts: Path, tmp_path: Path, name: str, is_named: bool) -> None:
    """A file of 1000 documents was taken for one, with exit code 0."""
    file = texts / name
    file.write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(1000)))
    done = spare("--input", file if is_named else texts, "--output-prefix", tmp_path / "corpus")
    assert done.exit_code == 2
    assert f"{file}: each line is a document, but the key of its text is not given; give it" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize("text", ['{\n  "name": "package"\n}\n', '{"name": "package"}\n', "[1]\n[2]\n", "{}\ntext"])
def test_json_that_is_one_document_is_one(texts: Path, tmp_path: Path, text: str) -> None:
    (texts / "package.json").write_text(text)
    done = spare("--input", texts / "package.json", "--output-prefix", tmp_path / "corpus")
    assert done.exit_code == 0, done.output
    assert documents_of(tmp_path / "corpus") == [text.encode() + b"\0"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b"text", mtime=0), "is not UTF-8, as compressed and binary files are not"),
        (b"a\0b", "holds byte 0, as binary files do"),
    ],
)
def test_a_named_file_that_is_no_text_is_not_skipped(texts: Path, tmp_path: Path, content: bytes, reason: str) -> None:
    named = texts / "sub" / "named.txt.gz"
    named.write_bytes(content)
    done = spare("--input", texts, "--input", named, "--output-prefix", tmp_path / "corpus")
    assert done.exit_code == 2
    assert f"--input {named} {reason}; give files of UTF-8 text" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    assert spare("--input", texts, "--output-prefix", tmp_path / "corpus").exit_code == 0, "in a folder it is skipped"


def test_an_existing_dataset_is_kept_unless_overwrite_is_given(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    assert spare("--input", texts / "b.py", "--output-prefix", prefix).exit_code == 0
    before = Path(f"{prefix}.bin").read_bytes()
    refused = spare("--input", texts, "--output-prefix", prefix)
    assert refused.exit_code == 2
    assert "corpus.bin exists; choose another --output-prefix or give --overwrite" in refused.stderr
    assert Path(f"{prefix}.bin").read_bytes() == before
    assert spare("--input", texts, "--output-prefix", prefix, "--overwrite").exit_code == 0
    assert Path(f"{prefix}.bin").read_bytes() != before


def test_an_input_without_text_is_refused_and_leaves_nothing(texts: Path, tmp_path: Path) -> None:
    done = spare("--input", texts, "--output-prefix", tmp_path / "corpus", "--suffix", ".bin")
    assert done.exit_code == 2
    assert "no document" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--suffix", ".md"], "holds no files with suffix .md"),
        (
            ["--tokenizer", "bpe"],
            "--tokenizer bpe is unknown; choose byte, hf:PATH, sentencepiece:FILE or tiktoken:FILE",
        ),
        (["--input", "nowhere"], "--input nowhere is neither a file nor a folder"),
    ],
)
def test_what_cannot_be_done_is_explained(texts: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    done = spare("--input", texts, "--output-prefix", tmp_path / "corpus", *arguments)
    assert done.exit_code == 2
    assert expected in done.stderr
    assert "Traceback" not in done.output


def test_a_folder_that_cannot_be_made_is_explained(texts: Path) -> None:
    done = spare("--input", texts, "--output-prefix", texts / "b.py" / "corpus")
    assert done.exit_code == 2
    assert "cannot be made" in done.stderr


def test_a_folder_that_cannot_be_written_is_explained(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere, so the answer of the system is put in its mouth.
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    done = spare("--input", texts, "--output-prefix", tmp_path / "corpus")
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


def test_the_version_can_be_asked_for() -> None:
    from spare_megatron.version import __version__

    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"spare_megatron {__version__}\n")


def test_no_arguments_show_the_help() -> None:
    done = CliRunner().invoke(app, [])
    assert "Usage" in done.output
    assert "preprocess" in done.output
