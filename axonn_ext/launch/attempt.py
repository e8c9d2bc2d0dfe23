"""A name for this start of a job, which all its ranks know and no earlier start had.

When torchrun starts a job again, its store still has the keys that the ranks of the last start have
set. So the ranks agree on a prefix for theirs before they set any.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed import Store

from axonn_ext.launch.place import Process

_NAMES = "names"  # rank 0's name for the start, and the tokens of the ranks that it is meant for
_POLL_SECONDS = 0.02


def name_of_start(store: Store, process: Process, timeout_s: float) -> str:
    """Returns the name, which rank 0 chooses, on every rank.

    Each other rank shows a token that is new. Rank 0 publishes its name with the tokens of those
    that have not confirmed it, and again when one changes. A rank confirms the name when it sees
    its own token there: so it was not written for the ranks of another start.

    Raises TimeoutError, which says which ranks did not come.
    """
    deadline = time.monotonic() + timeout_s
    keys = [f"token/{rank}" for rank in range(process.world_size)]
    if process.rank == 0:
        return _name_for_all(store, keys[1:], uuid.uuid4().hex, deadline)
    token = uuid.uuid4().hex
    store.set(keys[process.rank], token)
    while time.monotonic() < deadline:
        if store.check([_NAMES]):
            found = json.loads(store.get(_NAMES))
            if found["tokens"].get(keys[process.rank]) == token:
                store.set(_confirmed(found["name"], keys[process.rank]), "")
                return str(found["name"])
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("no word of rank 0")


def _name_for_all(store: Store, waiting: list[str], name: str, deadline: float) -> str:
    published: dict[str, str] = {}
    while waiting and time.monotonic() < deadline:
        there = {key: store.get(key).decode() for key in waiting if store.check([key])}
        if there != published:
            store.set(_NAMES, json.dumps({"name": name, "tokens": there}))
            published = there
        waiting = [key for key in waiting if not store.check([_confirmed(name, key)])]
        time.sleep(_POLL_SECONDS if waiting else 0)
    if waiting:
        late = ", ".join(key.partition("/")[2] for key in waiting)
        raise TimeoutError(f"no word of rank {late}")
    return name


def _confirmed(name: str, key: str) -> str:
    return f"confirmed/{name}/{key}"
