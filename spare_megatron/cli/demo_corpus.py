"""The corpus of the demo and of other small presets, which is made when it is first trained on."""

import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

from spare_megatron.cli.printing import message
from spare_megatron.machine.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from spare_megatron.config.schema_data import DataConfig

DEMO_CORPUS = "data/demo/corpus"
"""`data.corpus` of these presets. Like every corpus, it lies below the working directory."""

_SUFFIXES = (".py", ".txt", ".rst", ".html")
_EXCLUDED = ("site-packages", "dist-packages")


def is_to_be_made(data: "DataConfig") -> bool:
    """Whether `make_demo_corpus` has yet to write this corpus."""
    from spare_megatron.config.training.corpus import corpus_files

    return data.corpus == DEMO_CORPUS and not all(file.exists() for file in corpus_files(DEMO_CORPUS))


def make_demo_corpus(command: str) -> None:
    """Makes it of the text files of Python's standard library. ValueError: `spare preprocess` fails, and says why."""
    text = sysconfig.get_paths()["stdlib"]
    message(command, f"making the demo's corpus, {DEMO_CORPUS}, of the text files in {text} (about 60 MiB, once)")
    options = [word for suffix in _SUFFIXES for word in ("--suffix", suffix)]
    options += [word for name in _EXCLUDED for word in ("--exclude", name)]
    preprocess = ("-m", "spare_megatron", "preprocess", "--input", text, "--output-prefix", DEMO_CORPUS)
    done = subprocess.run(
        # --overwrite: one of its files may be there.
        [sys.executable, "-P", *preprocess, "--tokenizer", "byte", "--overwrite", *options],
        stdin=subprocess.DEVNULL,
        stdout=2,
        check=False,
    )
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise ValueError(f"data.corpus={DEMO_CORPUS} could not be made, see above; set data.corpus to one of yours")
