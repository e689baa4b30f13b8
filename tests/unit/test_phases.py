"""What may change when a training goes on, and what a change of the sequence length leaves of an epoch."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.loader import ConfigError
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.read_samples import left_over, phases_in, tokens_read
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import changes_of, differences, phases_after, terms_of
from spare_megatron.journal.run_record import digest_of_terms
from tests.unit.configured import CPU, configured

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
