"""The number of SMs that fused GEMMs leave free for concurrent collectives."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import _C
from axonn_ext.overlap.busy_sms import BusySms

DEVICE = torch.device("cuda", 7)  # no other test counts for this device
SMS = 8


class Event:
    """An event of a GPU's stream."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def free() -> int:
    return _C.free_sms_on(7)


def test_each_lane_counts_once_while_anything_of_it_runs():
    busy = BusySms(DEVICE, sms=SMS)
    first, second, other = Event(), Event(), Event()
    assert free() == 0
    busy.started("z", first, is_captured=False)
    busy.started("z", second, is_captured=False)
    assert free() == SMS  # a lane runs its collectives one after the other
    busy.started("data", other, is_captured=False)
    assert free() == 2 * SMS
    first.passed = True
    busy.look()
    assert free() == 2 * SMS
    second.passed = True
    busy.look()
    assert free() == SMS
    busy.awaited("data", other)  # later work of the current stream runs after it
    assert free() == 0
    busy.awaited("data", other)
    assert free() == 0


def test_a_wait_covers_all_that_the_lane_has_started_before():
    busy = BusySms(DEVICE, sms=SMS)
    events = [Event() for _ in range(3)]
    for event in events:
        busy.started("z", event, is_captured=False)
    busy.awaited("z", events[1])
    assert free() == SMS
    busy.awaited("z", events[2])
    assert free() == 0
    busy.awaited("z", events[0])
    assert free() == 0


def test_what_a_graph_has_captured_is_not_asked():
    busy = BusySms(DEVICE, sms=SMS)
    captured = Event()
    busy.started("z", captured, is_captured=True)
    assert free() == SMS  # for the next GEMMs in the graph
    del captured.passed  # a query would raise
    busy.look()
    assert free() == 0


@pytest.mark.parametrize("several", [1, 3])
def test_what_is_dropped_frees_its_sms(several: int):
    busy = [BusySms(DEVICE, sms=SMS) for _ in range(several)]
    for one in busy:
        one.started("z", Event(), is_captured=False)
    assert free() == several * SMS
    del busy, one
    assert free() == 0
