"""Importing Megatron leaves out what is not needed to train, and hides nothing afterwards."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from spare_megatron.mcore import compile_when_called

LOOK = """
import json, sys, torch
before = torch.compile
import spare_megatron.rank.rank
names = ["megatron.core", "torch._dynamo", "torch._inductor.compile_fx", "wandb", "tensorboard"]
print(json.dumps([[name in sys.modules for name in names], torch.compile is before]))
"""


@pytest.mark.slow
def test_a_rank_loads_neither_the_compiler_nor_wandb_nor_tensorboard_and_finds_all_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [[True, True, False, False, False], True]


class Compiler:
    """Stands for `torch.compile`: notes what it is given."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Callable[..., Any], dict[str, Any]]] = []

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        self.compiled.append((function, options))
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))


def add(one: int, *, other: int) -> int:
    """A sum."""
    return one + other


def test_a_function_is_compiled_once_when_it_is_first_called() -> None:
    compiler = Compiler()
    function = compile_when_called(compiler, add)
    assert (compiler.compiled, function.__name__, function.__doc__) == ([], "add", "A sum.")
    assert [function(1, other=2), function(3, other=4)] == [("compiled", 3), ("compiled", 7)]
    assert compiler.compiled == [(add, {})]


def test_a_decorator_with_options_hands_them_on() -> None:
    compiler = Compiler()
    function = compile_when_called(compiler, dynamic=True)(add)
    assert compiler.compiled == []
    assert function(1, other=1) == ("compiled", 2)
    assert compiler.compiled == [(add, {"dynamic": True})]
