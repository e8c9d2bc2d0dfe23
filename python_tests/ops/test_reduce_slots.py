"""The sum of slots, on the CPU: in the order of the slots, and what is refused."""

from __future__ import annotations

import pytest
import torch

from slot_cases import DTYPES, SHAPES, make_slots, sums_in_order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_are_added_in_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    slots = make_slots(shape, dtype)
    got = torch.ops.axonn._reduce_slots(slots)
    assert got.dtype == dtype and got.shape == shape[1:]
    assert torch.equal(got, sums_in_order(slots))


def test_what_has_no_sum_is_refused() -> None:
    for slots, error, message in (
        (torch.tensor(1.0), ValueError, "shape [W, ..], got []"),
        (torch.ones(0, 4), ValueError, "there must be 1 to"),
        (torch.ones(4, 8).t(), ValueError, "slots must be contiguous"),
        (torch.ones(4, 8, dtype=torch.int32), TypeError, "slots has dtype Int"),
    ):
        with pytest.raises(error) as raised:
            torch.ops.axonn._reduce_slots(slots)
        assert "_reduce_slots: " in str(raised.value) and message in str(raised.value)
