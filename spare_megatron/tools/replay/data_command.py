"""`spare data`: the samples that a step of a run reads, with their text, and how a later run leaves them out."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.command import option, with_options
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.output import printable

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig

_SHOWN = 100
"""Characters of a text that a step's table has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Options of `spare data` as the user wrote them; None where absent."""

    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]
    step: Annotated[int, typer.Argument(help="A step of it.")]
    microbatch: str | None = option(
        "One microbatch as spare audit names it, a row of them where lanes divide experts, with all of its text. "
        "[default: all of them, with the first characters]",
        metavar="SHARD.INDEX",
    )
    tokenizer: str | None = option(
        "Tokenizer of the text, as for spare preprocess: byte, hf:FOLDER or sentencepiece:FILE. [default: byte where "
        "the corpus was written so, else numbers of tokens]"
    )
    as_json: bool = option("Print one JSON object.", "--json", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sequence of a microbatch. `place`: in the order of samples, as `data.skip` counts; `address`: its corpus, epoch
    and place there; `documents`: those of the corpus that it has text of.
    """

    microbatch: str
    place: int
    address: str
    documents: list[int]
    text: str


@with_options(DataOptions)
def data(given: DataOptions) -> None:
    """Show the samples of a step: corpus, documents and text.

    Reads the corpora of the run, and builds the index of their samples where it is gone. Prints also the places that
    leave the step out of a later run, or of one that goes on from an earlier checkpoint (data.skip).

    Example: `spare data runs/gpt 1200 --microbatch 3.0`

    Exit code 2: the run has no such step or microbatch, or its corpus cannot be read.
    """
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.config.training.read_samples import SkippedPlaces

    config = load_run_config(given.run_dir / "config.toml").config
    samples = list(samples_of(config, given.step, given.microbatch, given.tokenizer))
    places = [str(sample.place) for sample in samples]  # those between them may be of other sites
    skip = str(SkippedPlaces([*config.data.skip, *places])).split(",")
    if given.as_json:
        say_json({"step": given.step, "samples": [asdict(sample) for sample in samples], "skip": skip})
        return
    for sample in samples:
        documents = ", ".join(map(str, sample.documents))
        say(f"{sample.microbatch}  place {sample.place}: {sample.address}, documents {documents}")
        text = sample.text if given.microbatch else f"{sample.text[:_SHOWN]}{'...' if sample.text[_SHOWN:] else ''}"
        say(f"  {printable(text)}")
    say(f"to leave these out of a run that has not read them: --set 'data.skip={json.dumps(skip)}'")


def samples_of(config: "RunConfig", step: int, microbatch: str | None, tokenizer: str | None) -> Iterator[Sample]:
    """ValueError: there is no such step or microbatch, or a sample cannot be read."""
    from spare_megatron.config.training.sample_index_folders import leased
    from spare_megatron.config.training.terms import numbers_of, step_of
    from spare_megatron.mcore.model.training_samples import Corpus, corpus_dataset, prepare_index
    from spare_megatron.tools.text.tokenizer import BYTE, build, read_tokenizer

    if not config.data.corpora:
        raise ValueError(f"the samples of this run come from its program, {config.program.file}: they are in no corpus")
    load = config.checkpoint.load
    first = step_of(Path(load)) if load else 0
    if not first <= step < config.train.steps:
        earlier = f"; steps before these are of the run that saved checkpoint.load={load}: name its directory"
        raise ValueError(
            f"step {step}: the run has the steps {first} to {config.train.steps - 1} (train.steps)"
            f"{earlier if 0 <= step < first else ''}"
        )
    shards, indices = range(config.layout.num_groups), range(config.unit_ramp.at(step))
    units = {f"{shard}.{index}": (shard, index) for shard in shards for index in indices}
    if microbatch not in (None, *units):
        raise ValueError(f"--microbatch {microbatch}: step {step} has 0.0 to {shards[-1]}.{indices[-1]}")
    if tokenizer is None and config.data.identity.endswith(f"tokenizer {BYTE}"):
        tokenizer = BYTE
    decode = str if tokenizer is None else build(read_tokenizer(tokenizer)).shown
    with leased(config):
        prepare_index(config)
        dataset = corpus_dataset(config)
        corpus = Corpus(config, dataset)
        for unit in units if microbatch is None else [microbatch]:
            for number in numbers_of(config, step, units[unit]):
                ids_of = corpus.microbatch(step, number)["tokens"].tolist()
                for place, ids in zip(corpus.places(step, number), ids_of, strict=True):
                    yield Sample(
                        microbatch=unit,
                        place=place,
                        address=dataset.address(place),
                        documents=dataset.documents(place),
                        text=decode(ids),
                    )
