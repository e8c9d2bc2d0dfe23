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

    Each rank shows a token that is new. Rank 0 publishes its name with the tokens that it sees, and
    again when one changes, until each rank has confirmed that name. A rank confirms it when it sees
    its own token there: so it was not written for the ranks of another start.

    Raises TimeoutError, which says which ranks did not come.
    """
    deadline = time.monotonic() + timeout_s
    token = uuid.uuid4().hex
    keys = [f"token/{rank}" for rank in range(process.world_size)]
    store.set(keys[process.rank], token)
    if process.rank == 0:
        return _name_for_all(store, keys, uuid.uuid4().hex, deadline)
    while time.monotonic() < deadline:
        if store.check([_NAMES]):
            found = json.loads(store.get(_NAMES))
            if found["tokens"].get(keys[process.rank]) == token:
                store.set(_confirmed(found["name"], keys[process.rank]), "")
                return str(found["name"])
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("no word of rank 0")


def _name_for_all(store: Store, keys: list[str], name: str, deadline: float) -> str:
    published: dict[str, str] = {}
    waiting = list(keys[1:])
    while waiting and time.monotonic() < deadline:
        there = {key: store.get(key).decode() for key in keys if store.check([key])}
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
