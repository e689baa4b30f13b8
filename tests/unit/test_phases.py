"""What a training goes on from: runs, weights, other lengths and corpora, and places that it leaves out."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from spare_megatron.cli.resuming import Resumption, resume
from spare_megatron.cli.running import warn_of_no_checkpoints
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.loader import ConfigError, dump_run_config
from spare_megatron.config.schema import AuditConfig, RunConfig, TrainConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.config.training.read_samples import (
    SkippedPlaces,
    left_over,
    phases_in,
    skip_differences,
    tokens_read,
)
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import changes_of, differences, phases_after, terms_of
from spare_megatron.journal.run_record import FirstTerms, digest_of_terms
from spare_megatron.machine.lock import locked
from spare_megatron.state.checkpoint.checkpoint_folder import WEIGHTS_ALONE, checkpoint_path, publish
from spare_megatron.state.checkpoint.start_checkpoint import check_weights, resolve_load
from spare_megatron.state.checkpoint.verification import mark_refused, read_manifest
from tests.unit.configured import CPU, configured
from tests.unit.test_checkpoints import CONFIG, cut_short, save

ROPE = "model.position_embedding=rope"
SHORT = configured(ROPE, "model.seq_length=64")


def going_on(*overrides: str) -> RunConfig:
    return configured(ROPE, *overrides)


# ------------------------------------------------------------------------------------------------------ changes


@pytest.mark.parametrize(
    ("name", "override", "shown"),
    [
        ("model.seq_length", "model.seq_length=128", "model.seq_length = 128, and the checkpoint was trained with 64"),
        ("model.precision", "model.precision=bf16", "model.precision = bf16, and the checkpoint was trained with fp32"),
        ("train.seed", "train.seed=7", "train.seed = 7, and the checkpoint was trained with 1234"),
        ("model.rope_base", "model.rope_base=5e5", "model.rope_base = 500000.0, and the checkpoint was trained with"),
        ("model.sliding_window", "model.sliding_window=9", "model.sliding_window = [8, 0], and the checkpoint was"),
        ("megatron.softmax_scale", "megatron.softmax_scale=0.5", "megatron.softmax_scale = 0.5, and the checkpoint"),
        ("corpus", "data.identity=b, 3 tokens", "data.corpus = c (b, 3 tokens), and the checkpoint was trained with"),
        ("program", "program.sha256=ab", "program.file = none (SHA-256 ab), and the checkpoint was trained with no"),
    ],
)
def test_a_change_is_refused_until_it_is_named_and_then_recorded(name: str, override: str, shown: str) -> None:
    before = terms_of(going_on("data.identity=a, 3 tokens"))
    ours = ["data.identity=a, 3 tokens", override]
    (reason,) = differences(before, going_on(*ours))
    assert reason.startswith(shown)
    assert reason.endswith(f', or set checkpoint.allow_changes=["{name}"] to go on with this one')
    allowed = going_on(*ours, f'checkpoint.allow_changes=["{name}"]')
    assert differences(before, allowed) == []
    assert list(changes_of(before, allowed)) == [name]
    other = going_on(*ours, "model.norm_eps=0.1", f'checkpoint.allow_changes=["{name}"]')
    (reason,) = differences(before, other)
    assert f'set checkpoint.allow_changes=["{name}", "model.norm_eps"]' in reason or name == "model.norm_eps"


@pytest.mark.parametrize(
    "override",
    ["model.hidden_size=128", "model.num_layers=8", "model.vocab_size=300", "model.tie_embeddings=false",
     "model.num_query_groups=2", "model.activation=swiglu", "model.normalization=rmsnorm", "model.linear_bias=false",
     "megatron.layernorm_zero_centered_gamma=true", "model.position_embedding=learned_absolute"],
)  # fmt: skip
def test_what_shapes_the_state_cannot_change(override: str) -> None:
    key, _, value = override.partition("=")
    reasons = differences(terms_of(SHORT), going_on(override))
    assert any(reason.endswith("set it to that") for reason in reasons), reasons
    with pytest.raises(ConfigError, match=r"allow_changes\[0\]='.*' must be one of corpus, program, train.seed, model"):
        configured(f'checkpoint.allow_changes=["{key}{"" if key != "model.activation" else value}"]')


def test_learned_positions_are_state_of_one_length() -> None:
    longer = configured("model.seq_length=128", 'checkpoint.allow_changes=["model.seq_length"]')
    (reason,) = differences(terms_of(configured()), longer)
    assert reason.startswith(
        "model.seq_length = 128, and the checkpoint was trained with 64; set it to that, as model."
    )
    assert reason.endswith("position_embedding=learned_absolute has parameters for each position")


@pytest.mark.parametrize("name", ["corpus", "program"])
def test_the_settings_that_this_one_replaces_are_read_and_say_so(name: str) -> None:
    old = f"checkpoint.allow_other_{name}"
    assert configured(f"{old}=false") == configured()
    with pytest.raises(ConfigError, match=rf'{old}=True can only be False .*checkpoint.allow_changes=\["{name}"\]'):
        configured(f"{old}=true")


def test_context_parallelism_and_fp8_are_no_terms() -> None:
    wider = going_on("layout.context_parallel=2", "megatron.fp8=e4m3", "megatron.fp8_recipe=tensorwise")
    assert changes_of(terms_of(SHORT), wider) == {}
    longer = replace(wider, model=replace(wider.model, seq_length=128))
    assert list(changes_of(terms_of(SHORT), longer)) == ["model.seq_length"]


# ------------------------------------------------------------------------------------------------------- phases


def test_a_change_of_length_corpus_or_seed_ends_a_phase_and_no_other_change_does() -> None:
    terms = terms_of(going_on("data.identity=a, 3 tokens"))

    def after(*overrides: str, of: dict[str, object] | None = None, number: int = 24) -> tuple[str, ...]:
        return phases_after(of or terms, going_on("data.identity=a, 3 tokens", *overrides), number)  # type: ignore[arg-type]

    assert after("model.precision=bf16", "model.rope_base=5e5") == ()
    assert after("model.seq_length=128") == ("64:24",)
    assert after("model.seq_length=128", number=0) == ()
    assert after("data.identity=b, 3 tokens") == after("train.seed=2") == ("64:24:other",)
    assert after("data.identity=b, 3 tokens", "model.seq_length=128") == ("64:24:other",)
    second = {**terms_of(going_on("model.seq_length=128")), "data.phases": "64:24", "data.identity": ""}
    assert after("model.seq_length=128", of=second, number=30) == ("64:24",)
    assert after(of=second, number=30) == ("64:24", "128:30")


def test_sites_go_on_in_one_order_of_samples_alone() -> None:
    """Phases were refused where they are set, and not where a change that is allowed makes one: text was read twice."""
    of_a_site = ["sites.endpoints=['tcp://a:1']", "optimizer.sharding=replicated"]
    terms = terms_of(going_on(*of_a_site))
    assert differences(terms, going_on(*of_a_site), 24) == []
    longer = going_on(*of_a_site, "model.seq_length=128", 'checkpoint.allow_changes=["model.seq_length"]')
    (reason,) = differences(terms, longer, 24)
    assert reason.startswith("sites read one order of samples, and this training would have several, data.phases=64:24")


def test_phases_are_terms_of_the_run_and_tokens_are_counted_by_them() -> None:
    later = going_on('data.phases=["64:24","128:30:other"]')
    assert terms_of(later)["data.phases"] == "64:24,128:30:other"
    assert "data.phases" not in terms_of(SHORT), "checkpoints are what they were"
    run = terms_of_run(later)
    assert run["phases"] == "64:24,128:30:other"
    assert digest_of_terms({**run, "phases": ""}) != digest_of_terms(run)
    assert [phase.is_of_other for phase in phases_in(later.data.phases)] == [False, True]
    assert tokens_read(later.data.phases, 16, 100) == 24 * 64 + 6 * 128 + 70 * 16
    assert tokens_read((), 16, 100) == 1600


@pytest.mark.parametrize("text", ["", "64", "64:0", "0:64", "64:2:more", "a:b", "64:9:other:"])
def test_what_is_no_phase_is_refused(text: str) -> None:
    (problem,) = [found for found in problems(configured(f'data.phases=["{text}"]'), CPU) if "data.phases" in found]
    assert problem.startswith(f"data.phases: {text!r} is no SEQ_LENGTH:SEQUENCES")
    with pytest.raises(ValueError, match="is no SEQ_LENGTH"):
        phases_in((text,))


def test_places_of_an_order_that_ends_are_not_taken_for_those_of_the_next() -> None:
    terms = terms_of(going_on('data.skip=["3","40-41"]'))
    change = ("model.seq_length=128", 'checkpoint.allow_changes=["model.seq_length"]')
    assert differences(terms, going_on('data.skip=["3"]', *change), 24) == []
    assert differences(terms, going_on('data.skip=["3","30"]', *change), 24) == []
    assert differences(terms, going_on('data.skip=["3","40-41"]', *change), 24) == [
        "data.skip: 40-41 are places in the order of the checkpoint, which ends; remove them"
    ]
    earlier = {**terms, "data.phases": "32:8:other"}
    assert len(differences(earlier, going_on('data.skip=["3","40-41"]', *change), 24)) == 1
    (reason,) = differences(terms, going_on(*change), 24)
    assert "leaves out other places below 24" in reason


@pytest.mark.parametrize("seed", range(200))
def test_what_is_left_is_what_counting_token_by_token_leaves(seed: int) -> None:
    random = Random(seed)
    text = [token for token in range(random.randrange(1, 120)) if random.random() < random.choice([0.3, 0.95])]
    starts = [token for token in text if token - 1 not in text]
    rows = [[start, next(n for n in range(1, 200) if start + n not in text)] for start in starts]
    runs = np.array(rows, np.int64).reshape(-1, 2)
    length = random.randrange(1, 9)
    samples = random.sample(range(len(text) // length), random.randrange(len(text) // length + 1))
    left = [token for place, token in enumerate(text) if place // length not in samples]
    found = left_over(runs, length, np.array(samples, np.int64))
    assert [first + more for first, number in found for more in range(number)] == left
    assert (found[:, 1] > 0).all()


def drawn(random: Random) -> list[str]:
    """Some places and intervals below 30, which may touch, overlap or be the same, in any order."""
    texts = []
    for _ in range(random.randrange(5)):
        first = random.randrange(30)
        last = first + random.randrange(5)
        texts.append(str(first) if first == last else f"{first}-{last}")
    return texts


def read_by_hand(texts: list[str], number: int) -> list[int]:
    """The first places that are read."""
    skipped = {place for text in texts for place in range(int(text.split("-")[0]), int(text.split("-")[-1]) + 1)}
    return [place for place in range(number + len(skipped)) if place not in skipped][:number]


@pytest.mark.parametrize("seed", range(300))
def test_places_and_what_may_change_are_those_that_counting_gives(seed: int) -> None:
    random = Random(seed)
    texts, others = drawn(random), drawn(random)
    places = SkippedPlaces(texts)
    assert [places.place(number) for number in range(40)] == read_by_hand(texts, 40)
    again = SkippedPlaces(str(places).split(",") if texts else [])
    assert again.intervals == places.intervals
    assert all(first > last + 1 for (_, last), (first, _) in zip(places.intervals, places.intervals[1:], strict=False))
    for number in range(40):
        is_alike = read_by_hand(texts, number) == read_by_hand(others, number)
        assert (skip_differences(str(places), tuple(others), number) == []) == is_alike


def test_a_list_of_other_places_is_refused_with_the_last_that_was_read() -> None:
    assert skip_differences("2-3", ("2-3", "9"), 7) == [], "place 9 comes after seven samples"
    (text,) = skip_differences("2-3", ("2-3", "8"), 8)
    assert text == (
        "data.skip = 2-3,8 leaves out other places below 9, the last that the checkpoint has read, than its training "
        "did (2-3); keep those, and add higher ones"
    )
    (text,) = skip_differences("", ("0",), 8)
    assert "below 7" in text
    assert "(none)" in text
    (text,) = skip_differences("4", (), 8)
    assert text.startswith("data.skip = empty leaves out")


@pytest.mark.parametrize("text", ["", "-1", "5-3", "a", "1-2-3", "1 - 2", "9" * 16])
def test_what_is_no_place_is_refused(text: str) -> None:
    (problem,) = [found for found in problems(configured(f'data.skip=["{text}"]'), CPU) if "data.skip" in found]
    assert problem.startswith(f"data.skip: {text!r} is no place in the order of samples, as in 4096")
    with pytest.raises(ValueError, match="is no place"):
        SkippedPlaces([text])


def test_the_list_is_a_term_of_the_run_and_of_its_checkpoints() -> None:
    plain, skipping = configured(), configured('data.skip=["7","8-9"]')
    assert "data.skip" not in terms_of(plain), "checkpoints are what they were"
    assert terms_of(skipping)["data.skip"] == "7-9"
    assert (terms_of_run(plain)["skip"], terms_of_run(skipping)["skip"]) == ("", "7-9")
    assert differences(terms_of(plain), skipping, 7) == []
    assert len(differences(terms_of(plain), skipping, 8)) == 1
    assert len(differences(terms_of(plain), skipping)) == 1, "by all steps of the run"
    assert differences(terms_of(skipping), replace(skipping, train=replace(skipping.train, steps=999))) == []


Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Makes the directory of a run that has saved after these steps."""

    def run(name: str, *steps: int, config: RunConfig = CONFIG) -> Path:
        run_dir = tmp_path / name
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "config.toml").write_text(dump_run_config(config))
        for step in steps:
            save(run_dir / "checkpoints", step)
        return run_dir

    return run


def test_a_run_goes_on_from_the_one_that_is_named_in_a_directory_beside_it(
    run: Callable[..., Path], capsys: Output
) -> None:
    first = run("mine", 5, 10)
    before = sorted(first.rglob("*"))
    found = resume(CONFIG, first)
    second = first.with_name("mine-2")
    assert (found.run_dir, found.config.checkpoint.load) == (second, str(first / "checkpoints"))
    assert str(second) in capsys.readouterr().err
    assert sorted(first.rglob("*")) == before
    assert not second.exists(), "it is made when the run begins"


def test_the_same_command_goes_on_each_time(run: Callable[..., Path]) -> None:
    """A loop that repeats it would train the same steps again and again."""
    first, second = run("mine", 5), run("mine-2", 10)
    third = run("mine-3")  # ended before it saved
    found = resume(CONFIG, first)
    assert (found.run_dir, found.config.checkpoint.load) == (first.with_name("mine-4"), str(second / "checkpoints"))
    assert third.exists()


def test_the_newest_run_with_a_checkpoint_that_can_be_used_counts(run: Callable[..., Path]) -> None:
    """What a later one had left, refused or unfinished, was in the way of the earlier one's for good."""
    first, second = run("mine", 5), run("mine-2", 10)
    mark_refused(second / "checkpoints/step-00000010", "wrong state")
    assert resume(CONFIG, first).config.checkpoint.load == str(first / "checkpoints")
    mark_refused(first / "checkpoints/step-00000005", "wrong state")
    assert resume(CONFIG, first).config.checkpoint.load == str(second / "checkpoints")


@pytest.mark.parametrize("named", [".", "checkpoints/..", "../mine", "./"])
def test_a_run_may_be_named_from_within(run: Callable[..., Path], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("mine", 5)
    monkeypatch.chdir(first)
    found = resume(CONFIG, Path(named)).run_dir
    assert found is not None
    assert found.resolve() == first.with_name("mine-2")


def test_a_run_that_does_not_exist_begins_there(tmp_path: Path, capsys: Output) -> None:
    assert resume(CONFIG, tmp_path / "mine") == Resumption(config=CONFIG, run_dir=tmp_path / "mine")
    assert "holds no checkpoint, training starts from the beginning" in capsys.readouterr().err


def test_a_run_without_checkpoints_is_begun_again_beside_it(run: Callable[..., Path], capsys: Output) -> None:
    first = run("mine")
    assert resume(CONFIG, first) == Resumption(config=CONFIG, run_dir=first.with_name("mine-2"))
    assert "holds no checkpoint, training starts from the beginning" in capsys.readouterr().err


def test_a_training_that_is_finished_is_found_in_the_newest_run(run: Callable[..., Path]) -> None:
    first, second = run("mine", 5), run("mine-2", CONFIG.train.steps)
    found = resume(CONFIG, first)
    assert found.finished == second / "checkpoints" / f"step-{CONFIG.train.steps:08d}"


def test_what_cannot_be_gone_on_from_is_named(run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the earlier run by --run-dir"):
        resume(CONFIG, None)
    elsewhere = replace(CONFIG, checkpoint=CheckpointConfig(folder="/kept"))
    with pytest.raises(ValueError, match=r"has saved in .*=/kept; set that"):
        resume(CONFIG, run("elsewhere", config=elsewhere))
    busy = run("busy", 5)
    with locked(busy), pytest.raises(ValueError, match="is in use by a run that goes on"):
        resume(CONFIG, busy)


def test_a_folder_that_is_set_is_the_one_that_counts(run: Callable[..., Path], tmp_path: Path) -> None:
    first = run("mine", 5)
    save(tmp_path / "kept", 10)
    config = replace(CONFIG, checkpoint=CheckpointConfig(folder=str(tmp_path / "kept")))
    found = resume(config, first)
    assert (found.run_dir, found.config.checkpoint.load) == (first, str(tmp_path / "kept"))


@pytest.mark.parametrize(
    ("steps", "checkpoint", "is_warned"),
    [
        (1001, CheckpointConfig(), True),
        (1000, CheckpointConfig(), False),
        (5000, CheckpointConfig(interval_steps=100), False),
        (5000, CheckpointConfig(cadence="optimal"), False),
        (5000, CheckpointConfig(folder="/kept"), True),
    ],
)
def test_a_long_run_that_takes_no_checkpoint_says_so(
    capsys: Output, steps: int, checkpoint: CheckpointConfig, *, is_warned: bool
) -> None:
    warn_of_no_checkpoints("train", RunConfig(train=TrainConfig(steps=steps), checkpoint=checkpoint))
    assert (f"no checkpoint is taken in these {steps} steps" in capsys.readouterr().err) == is_warned


def beginning_with(weights: Path | str, identity: str = "", load: Path | str = "") -> RunConfig:
    checkpoint = CheckpointConfig(load_weights=str(weights), weights_identity=identity, load=str(load))
    return replace(CONFIG, checkpoint=checkpoint)


def resolved(config: RunConfig, folder: Path) -> RunConfig:
    return resolve_load(config, folder / "new", pytest.fail)


def test_the_newest_weights_are_found_and_identified_by_their_content(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path / "checkpoints", step)
    found = resolved(beginning_with(tmp_path), tmp_path).checkpoint
    assert found.load_weights == str(checkpoint_path(tmp_path / "checkpoints", 10))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    moved = resolved(beginning_with(tmp_path / "copy", found.weights_identity), tmp_path).checkpoint
    assert moved.weights_identity == found.weights_identity
    older = resolved(beginning_with(checkpoint_path(tmp_path / "copy", 5)), tmp_path).checkpoint
    assert older.weights_identity != found.weights_identity
    with pytest.raises(ValueError, match=f"is {older.weights_identity}, not checkpoint.weights_identity=0123; load"):
        resolved(beginning_with(checkpoint_path(tmp_path, 5).parent / "copy" / "step-00000005", "0123"), tmp_path)


def test_weights_fit_other_sequences_precision_and_data_but_no_other_model(tmp_path: Path) -> None:
    save(tmp_path, 10)
    config = beginning_with(tmp_path)
    other = replace(config, model=replace(config.model, seq_length=32, precision="bf16"))
    other = replace(other, train=replace(other.train, seed=7, steps=3))
    assert resolved(other, tmp_path).checkpoint.weights_identity
    wide = replace(config, model=replace(config.model, hidden_size=128, rope_base=500.0))
    with pytest.raises(ValueError, match=r"has weights of another model:\n  - model.hidden_size = 128, and") as error:
        resolved(wide, tmp_path)
    assert "rotary_base=500.0" in str(error.value)


def test_weights_that_change_after_the_start_are_refused_by_ranks(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    found = resolved(beginning_with(path), tmp_path).checkpoint
    check_weights(found)
    check_weights(CheckpointConfig())
    save(tmp_path, 10, config=replace(CONFIG, train=replace(CONFIG.train, seed=9)))
    with pytest.raises(ValueError, match=f"is no longer {found.weights_identity}"):
        check_weights(found)
    cut_short(path / "0.distcp")
    with pytest.raises(ValueError, match=r"cannot be used: step-00000010: 0\.distcp has 1999 bytes"):
        check_weights(found)


def test_a_checkpoint_of_the_training_precedes_the_weights_that_it_began_with(tmp_path: Path) -> None:
    save(tmp_path / "weights", 3)
    begun = resolved(beginning_with(tmp_path / "weights"), tmp_path)
    save(tmp_path / "run", 4, config=begun)
    shutil.rmtree(tmp_path / "weights")
    went_on = resolved(beginning_with(tmp_path / "weights", load=tmp_path / "run"), tmp_path).checkpoint
    assert (went_on.load_weights, went_on.weights_identity) == ("", begun.checkpoint.weights_identity)
    with pytest.raises(ValueError, match=r"another training:\n  - checkpoint.weights_identity = 0123, and the checkp"):
        resolved(beginning_with("", "0123", load=tmp_path / "run"), tmp_path)


def test_weights_alone_are_no_state_to_go_on_from(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    manifest = replace(read_manifest(path), optimizer={"sharding": WEIGHTS_ALONE})
    path = publish(path.rename(tmp_path / "step-00000002.import.tmp"), manifest, lambda _: None).path
    with pytest.raises(ValueError, match=r"has weights alone; set checkpoint\.load_weights to it"):
        resolved(beginning_with("", load=path), tmp_path)
    assert resolved(beginning_with(path), tmp_path).checkpoint.weights_identity


def test_terms_have_the_weights_and_those_of_earlier_versions_stay_as_they_were() -> None:
    terms = dict(terms_of(CONFIG))
    del terms["checkpoint.weights_identity"]
    assert differences(terms, CONFIG) == []
    assert len(differences(terms, beginning_with("", "0123"))) == 1
    # Without what later versions do unless it is switched off.
    as_before = replace(CONFIG, spare=replace(CONFIG.spare, deal_by_pace=False), audit=AuditConfig(every_steps=0))
    of_run = terms_of_run(as_before)
    values = [*(of_run[one.name] for one in fields(FirstTerms)), {"order": of_run["order"]}]
    text = json.dumps(values, separators=(",", ":"))
    assert digest_of_terms(of_run) == hashlib.sha256(text.encode()).hexdigest()
    assert digest_of_terms(of_run) != digest_of_terms(terms_of_run(beginning_with("", "0123")))
