"""Tokens per second of `spare preprocess` beside the loop of Megatron's preprocess_data.py, in alternating pairs.

Megatron's script imports packages that its wheel lacks, so a stand-in does what its loop does over the same library: a
pool of processes takes 32 lines at a time, decodes and encodes each alone, and sends lists of ids back, which the one
process writes with Megatron's builder. Both are timed as commands, imports included, and write the same tokens. The
stand-in imports megatron-core as we do, in half the time: 6 s instead of 12 on two cores.
"""

import argparse
import filecmp
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin

_LINES_AT_ONCE = 32
_SPARE = ("-c", "from spare_megatron.__main__ import main; main()")


class Encoder:
    """The state of a process of the stand-in's pool."""

    tokenizer: Any
    end: int

    @classmethod
    def start(cls, tokenizer: str) -> None:
        import tokenizers

        cls.tokenizer = tokenizers.Tokenizer.from_file(tokenizer)
        cls.end = cls.tokenizer.token_to_id("<|endoftext|>")

    @classmethod
    def encode(cls, line: str) -> list[int]:
        ids: list[int] = cls.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        return [*ids, cls.end] if ids else ids


def stand_in(lines: str, tokenizer: str, prefix: str, num_workers: int) -> None:
    import multiprocessing

    import tokenizers

    import spare_megatron.mcore  # noqa: F401 before megatron-core, which may need an adaptation to be imported

    # isort: split
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = tokenizers.Tokenizer.from_file(tokenizer).get_vocab_size()
    context = multiprocessing.get_context("fork")
    with open(lines, encoding="utf-8") as file, context.Pool(num_workers, Encoder.start, (tokenizer,)) as pool:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
        for ids in pool.imap(Encoder.encode, file, _LINES_AT_ONCE):
            if ids:
                builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")


def write_lines(path: Path, num_bytes: int) -> None:
    """Sources and documentation of Python and its packages, a file to a line, again from the start if too few."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*") if path.suffix in (".py", ".txt", ".rst", ".md", ".html"))
    with path.open("w") as file:
        for source in itertools.cycle(paths):
            try:
                file.write(json.dumps({"name": source.name, "text": source.read_text(encoding="utf-8")}) + "\n")
            except (OSError, UnicodeDecodeError):
                continue
            if file.tell() >= num_bytes:
                return


def timed(*words: str) -> tuple[float, float]:
    """Seconds that the command takes, and those of all its processors."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began_s, processor_s


def pairs(folder: Path, num_pairs: int, num_workers: int) -> Iterator[dict[str, tuple[float, float]]]:
    lines, tokenizer = str(folder / "docs.jsonl"), str(folder / "tokenizer" / "tokenizer.json")
    ours = ["preprocess", "--input", lines, "--json-key", "text", "--tokenizer", f"hf:{tokenizer}", "--overwrite"]
    commands = {
        "ours": (*_SPARE, *ours, "--output-prefix", str(folder / "ours"), "--workers", str(num_workers)),
        "stand_in": (__file__, "--stand-in", lines, tokenizer, str(folder / "theirs"), "--workers", str(num_workers)),
    }
    for number in range(num_pairs):
        yield {name: timed(*commands[name]) for name in sorted(commands, reverse=bool(number % 2))}
        if not all(
            filecmp.cmp(folder / f"ours{end}", folder / f"theirs{end}", shallow=False) for end in (".bin", ".idx")
        ):
            raise RuntimeError("the two corpora differ")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_lines(folder / "docs.jsonl", options.megabytes * 1_000_000)
    write_lines(folder / "sample.jsonl", min(options.megabytes, 8) * 1_000_000)
    train = ["tokenizer", "train", "--input", str(folder / "sample.jsonl"), "--json-key", "text"]
    timed(*_SPARE, *train, "--vocab-size", str(options.vocab_size), "--output", str(folder / "tokenizer"))
    found = list(pairs(folder, options.pairs, options.workers))
    num_tokens = json.loads((folder / "ours.json").read_text())["num_tokens"]
    ratios = [pair["stand_in"][0] / pair["ours"][0] for pair in found]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "processor_ratio": statistics.median(pair["stand_in"][1] / pair["ours"][1] for pair in found),
        "tokens_per_s": {name: statistics.median(num_tokens / pair[name][0] for pair in found) for name in found[0]},
        "num_tokens": num_tokens,
        "workers": options.workers,
        "load_average": os.getloadavg()[0],
        **origin(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="JSON lines")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=2, help="processes that tokenize, of both")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stand-in", nargs=3, metavar=("LINES", "TOKENIZER", "PREFIX"), help="run only that, once")
    options = parser.parse_args()
    if options.stand_in:
        lines, tokenizer, prefix = options.stand_in
        stand_in(lines, tokenizer, prefix, options.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['num_tokens']} tokens, {options.workers} workers, load average {result['load_average']:.1f}")
    for name, rate in result["tokens_per_s"].items():
        print(f"{name:>10} {rate:10.0f} tokens/s")
    print(f"ratio of tokens/s {result['ratio']:.3f} ({', '.join(f'{ratio:.3f}' for ratio in result['ratios'])})")
    print(f"ratio of processor time {result['processor_ratio']:.3f}")


if __name__ == "__main__":
    main()
