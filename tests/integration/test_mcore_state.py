"""The whole state of a rank, taken over by another in pieces."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import mcore_state_group as group
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)


STAGES, LANES = LayoutConfig(num_groups=2, pipeline_parallel=2), LayoutConfig(num_groups=2, data_parallel=2)
STATES = pytest.mark.parametrize(("precision", "layout"), [("fp32", STAGES), ("bf16", STAGES), ("bf16", LANES)])


@STATES
def test_a_state_in_pieces_is_the_same_state(text_corpus: Path, precision: str, layout: LayoutConfig) -> None:
    """Bit for bit, with moments and schedule: two steps later both are still alike."""
    config = tiny_config(text_corpus, layout, steps=8, hidden_dropout=0.1, precision=precision)
    prepare_index(config)
    for rank in run_group(group.take_over, config, 2):
        before, donor, newcomer, later_donor, later_newcomer = rank.params
        assert before == donor == newcomer
        assert later_donor == later_newcomer != donor
        assert rank.later[0] == rank.later[1]
        assert rank.states[0] == rank.states[1]


@STATES
def test_a_digest_covers_what_the_state_has_beside_parameters(
    text_corpus: Path, precision: str, layout: LayoutConfig
) -> None:
    """A trainer that has taken the state over, and one that has computed the same, has the same digest."""
    config = tiny_config(text_corpus, layout, steps=8, precision=precision)
    prepare_index(config)
    for rests, params in run_group(group.rests, config, 2):
        assert len(set(params)) == 1
        assert rests[0] == rests[1] == rests[2]
        assert len(set(rests)) == 3


def test_expert_biases_are_taken_over_and_their_digest_is_that_of_the_parameters(text_corpus: Path) -> None:
    """In fp32, as they are in a model in bf16 from its first pass on."""
    mixture = {"linear_bias": False, "num_experts": 4, "precision": "bf16"}
    config = tiny_config(text_corpus, STAGES, **mixture)
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = replace(config, megatron=fields)
    prepare_index(config)
    for (before, new, taken_over, changed), biases in run_group(group.biases_taken_over, config):
        assert before == taken_over
        assert len({before, new, changed}) == 3
        assert all(one.dtype == np.float32 and one.any() for one in biases)


def test_a_fused_adam_and_torchs_go_on_from_each_others_state(text_corpus: Path) -> None:
    """Without its count of updates Adam would correct its moments as if they were new."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    prepare_index(config)
    (found,) = run_group(group.updates_counted, config, 3)
    assert found == [*[{3.0}] * 3, *[{0.0}, {3.0}] * 2]


def test_groups_of_the_peers_in_benchmarks_hand_their_state_on(text_corpus: Path, tmp_path: Path) -> None:
    """Where that fails, torchft tries again for ever: the benchmark would hold it against torchft."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    prepare_index(config)
    ((donor, before, after),) = run_group(group.peers_hand_over, config, tmp_path)
    assert before != donor == after


def test_the_state_of_another_model_is_refused(text_corpus: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    prepare_index(config)
    (message,) = run_group(group.refusal_of_another_model, config)
    assert "other names, shapes or formats" in message


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=6),
    st.data(),
)
def test_the_bytes_of_tensors_are_read_and_written_in_place(
    shapes: list[tuple[int, torch.dtype]], data: st.DataObject
) -> None:
    tensors = [torch.arange(100, 100 + size).to(dtype) for size, dtype in shapes]
    tensors.append(torch.tensor(7.0))  # of no dimension, as Adam's steps
    whole = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    content = TensorBytes(tensors)
    assert content.num_bytes == len(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    piece = Piece(start, data.draw(st.integers(start + 1, len(whole))))
    assert content.read(piece) == whole[piece.start : piece.stop]

    written = bytes(255 - byte for byte in whole[piece.start : piece.stop])
    with content.writing() as writer:
        writer.room(piece.size)[:] = written
        writer.write(piece)
    expected = whole[: piece.start] + written + whole[piece.stop :]
    assert b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors) == expected


def test_tensors_that_are_not_contiguous_are_refused() -> None:
    """A copy would be written in their place."""
    with pytest.raises(RuntimeError):
        TensorBytes([torch.zeros(4, 4).t()])
