"""Whether a value fits a field of Megatron's, by the type that Megatron declares: it seldom looks by itself."""

from collections.abc import Callable
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a declared type. Of kinds that no file can hold nothing is known.

    >>> from typing import Optional
    >>> fits(1, Optional[float]), fits(True, int), fits([1, "a"], list[int]), fits("x", Literal["x", "y"])
    (True, False, False, True)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if list in (origin, kind):
        return isinstance(value, list) and all(fits(item, one) for item in value for one in inner)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is Callable or kind is Callable:
        return callable(value)
    if kind in (int, bool, str):
        return type(value) is kind
    if kind is float:
        return type(value) in (int, float)
    return not isinstance(kind, type) or isinstance(value, kind)


def in_words(kind: Any) -> str:
    """What is to be given, for people.

    >>> from typing import Optional, Union
    >>> in_words(Optional[Union[int, list[int]]])
    'a whole number or a list (each a whole number)'
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in inner if one is not NoneType))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if list in (origin, kind):
        return f"a list (each {in_words(inner[0])})" if inner else "a list"
    if origin is tuple:
        return f"a list of {len(inner)} ({', '.join(map(in_words, inner))})"
    if origin is Callable or kind is Callable:
        return "a function"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
