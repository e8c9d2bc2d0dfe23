"""A name for this start of a job, common to its ranks and different from earlier starts.

When torchrun restarts a job, its store still has the keys set by the ranks of the last start. So
the ranks agree on a prefix for their keys before they set any.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.meeting import name_missing
from axonn_ext.ranks.stores import comes, read

_COME, _AGREED = "come", "agreed"  # two rounds
_OVER = "over"


def name_of_start(store: Store, process: Process, timeout_s: float) -> str:
    """Returns the name on every rank: a number that counts starts of this many ranks.

    The processes of an earlier start must have ended, possibly while agreeing on the last number.
    A rank whose earlier process has used that number opens the next one, and sends the ranks that
    wait there on to it. If none has, all ranks come in one round and confirm it in a second: a
    process that has ended cannot confirm, so all that confirm belong to this start. The number of
    store operations per rank does not depend on the number of ranks.

    Raises TimeoutError, which names the ranks that did not come.
    """
    deadline = time.monotonic() + timeout_s
    here = PrefixStore(f"start/{process.world_size}", store)
    while True:
        number = here.compare_set("number", "", "0").decode()
        start = PrefixStore(number, here)
        if start.add(f"{_COME}/{process.rank}", 1) == 1:
            if _all_say(start, _COME, process, deadline) and (
                start.add(f"{_AGREED}/{process.rank}", 1) == 1
                and _all_say(start, _AGREED, process, deadline)
            ):
                return f"{process.world_size}-{number}"
        else:
            for word in (_COME, _AGREED):
                start.compare_set(word, "", _OVER)
            here.compare_set("number", number, str(int(number) + 1))


def _all_say(store: Store, word: str, process: Process, deadline: float) -> bool:
    """Returns True once all ranks have said the word, False if the start turns out to be over."""
    if store.add(f"{word}/all", 1) == process.world_size:
        store.compare_set(word, "", word)
    left = max(0.001, deadline - time.monotonic())  # c10d waits for ever for 0 s
    if not comes(store, [word], timedelta(seconds=left)):
        here, members = PrefixStore(word, store), range(process.world_size)
        raise TimeoutError(f"no word of {name_missing(here, process.rank, members)}")
    return read(store, word).decode() == word
