"""Numbers on the command line."""

from __future__ import annotations

import argparse

import pytest

from axonn_ext.spec.files.keys import Key
from axonn_ext.terminal.arguments import type_of

SEED = type_of(Key("seed", int, minimum=0, maximum=2**64 - 1))


@pytest.mark.parametrize("value", [0, 2**53 + 1, 123456789012345678, 2**64 - 1])
def test_whole_numbers_are_exact(value: int) -> None:
    assert SEED(str(value)) == SEED(f" +{value}") == value


def test_whole_numbers_in_another_form() -> None:
    assert SEED("4e6") == 4_000_000 and type(SEED("4e6")) is int


@pytest.mark.parametrize("text", ["-1", "1.5", "2e19", str(2**64), "9" * 5000, "inf", "nan", "x"])
def test_what_is_not_such_a_number_is_an_error(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^expected a whole number .*, got "):
        SEED(text)
