"""Places that a training leaves out, by counting them one by one."""

from dataclasses import replace
from random import Random

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.training.read_samples import SkippedPlaces, skip_differences
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import differences, terms_of
from tests.unit.configured import CPU, configured


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
