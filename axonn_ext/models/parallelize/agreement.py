"""Checks before a model is split that all ranks have equal calls, modules and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import nn

from axonn_ext.models.parallelize.same import text_of
from axonn_ext.ranks import meeting

Named = Sequence[tuple[str, nn.Parameter]]


def agree_on_parameters(parameters: Named, *, what: str) -> None:
    """Raises RuntimeError, on every rank, unless all ranks have equal parameters, by name.

    what: the caller, for messages. Values of tensors on the meta device are not compared.

    Raises ValueError for a parameter of a lazy module, which has no shape yet.
    """
    try:
        with agreement(what=what) as facts:
            facts |= {name: text_of(what, name, parameter) for name, parameter in parameters}
    except meeting.RanksDiffer as error:
        raise RuntimeError(
            f"{error}\nevery rank must make the same model: call torch.manual_seed with the same "
            "number on every rank before"
        ) from None


@contextmanager
def agreement(*, what: str) -> Iterator[dict[str, str]]:
    """Yields a dict; raises RuntimeError at the end of the block unless it is equal on all ranks.

    The block adds the values that must be equal. If it raises on one rank, all others raise, too.
    Collectives: none; a digest is exchanged through the c10d store.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception:
        report_failure(what=what)
        raise
    meeting.same_in_world(facts, what=what)


def report_failure(*, what: str) -> None:
    """Makes the other ranks raise, which wait in this caller's comparison."""
    with suppress(Exception):  # this rank's own error matters more
        meeting.same_in_world(None, what=what)
