"""Finds, from the reports of all ranks, the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from axonn_ext.train.watchdog.report import Report, Waiting, name_ranks, with_ranks

Reports = Mapping[int, Report | None]  # by rank; None: the rank gave none
LEAST_SECONDS = 1.0  # shorter waits are ignored


def diagnose(reports: Reports, *, stuck: bool = True, unheard: Collection[int] = ()) -> str:
    """Returns one sentence about why the job is stuck, as far as the reports tell.

    It starts from the rank that has waited longest, and follows the waits from rank to rank until
    one does not wait.

    stuck: whether the job is known to be stuck, so that a rank with fewer calls is named.
    unheard: ranks whose report is not due yet; none of them is blamed.
    """
    first = _longest(reports)
    if first is None:
        return _without_waits(reports, stuck=stuck, unheard=unheard)
    path: list[tuple[int, Waiting]] = [first]
    while True:
        rank, wait = path[-1]
        blamed = _blamed(reports, wait, unheard)
        if blamed is None:
            return _nobody_to_blame(rank, wait)
        if blamed in unheard:
            return f"{_waits(rank, wait)}; {name_ranks([blamed])} has not been heard yet"
        report = reports.get(blamed)
        if report is None:
            return (
                f"{_holds_up(blamed, rank, wait)} It has given no report: it may have been "
                "stopped, its network may be down, or it runs native code that keeps Python's lock"
            )
        following = report.longest
        if following is None:
            return f"{_holds_up(blamed, rank, wait)} It is at {report.place}"
        path.append((blamed, following))
        begins = next((i for i, (seen, _) in enumerate(path[:-1]) if seen == blamed), None)
        if begins is not None:
            return _circle(path[begins:-1])


def _longest(reports: Reports) -> tuple[int, Waiting] | None:
    waits = [
        (report.rank, wait)
        for report in reports.values()
        if report is not None
        for wait in report.waits
        if wait.seconds >= LEAST_SECONDS
    ]
    return max(waits, key=lambda found: found[1].seconds, default=None)


def _blamed(reports: Reports, wait: Waiting, unheard: Collection[int]) -> int | None:
    """Returns the most likely peer that the wait is for; None if every peer does its part.

    An unheard peer is returned only if there is no other.
    """
    if len(wait.peers) == 1:  # the wait itself names the peer
        return wait.peers[0]
    suspects = [peer for peer in wait.peers if not _does_its_part(reports.get(peer), wait)]
    heard = [peer for peer in suspects if peer not in unheard]
    return min(
        heard or suspects,
        key=lambda peer: _rank_of_suspect(reports.get(peer), wait),
        default=None,
    )


def _does_its_part(report: Report | None, wait: Waiting) -> bool:
    """Whether the rank waits in the same call, or has issued it if that is enough."""
    if report is None:
        return False
    if any(other.is_same_call(wait) for other in report.waits):
        return True
    return wait.in_background and _is_behind(report, wait) is False


def _is_behind(report: Report, wait: Waiting) -> bool | None:
    """Whether the rank has yet to begin the call; None if unknown."""
    for progress in report.progress:
        if progress.group == wait.group:
            return progress.num_calls < wait.number
    return None


def _rank_of_suspect(report: Report | None, wait: Waiting) -> tuple[int, int]:
    """Returns a sort key, smaller for a rank that is more likely to blame."""
    if report is None:
        return (0, 0)
    return (1 if _is_behind(report, wait) else 2, len(report.waits))


def _holds_up(blamed: int, rank: int, wait: Waiting) -> str:
    return (
        f"rank {blamed} holds the job up: rank {rank} has waited for it for {wait.seconds:.1f} s "
        f"in {wait.where}."
    )


def _circle(path: Iterable[tuple[int, Waiting]]) -> str:
    waits = [f"rank {rank} in {wait.where}" for rank, wait in path]
    return f"ranks wait for each other in a circle: {'; '.join(waits)}"


def _waits(rank: int, wait: Waiting) -> str:
    return f"rank {rank} has waited for {wait.seconds:.1f} s in {wait.where}"


def _nobody_to_blame(rank: int, wait: Waiting) -> str:
    said = _waits(rank, wait)
    if not wait.peers:
        return f"{said}, a group that has been destroyed"
    return f"{said}, and all other ranks of it have come to this call: is their network down?"


def _without_waits(reports: Reports, *, stuck: bool, unheard: Collection[int]) -> str:
    """Names silent ranks, or else the rank that is furthest behind in a group."""
    nobody = f"no rank has waited for another for {LEAST_SECONDS:g} s"
    silent = [rank for rank, report in reports.items() if report is None]
    if silent:
        return f"{name_ranks(silent)} gave no report; {nobody}"
    if unheard:
        return f"{nobody}; not heard yet: {name_ranks(sorted(unheard))}"
    groups: dict[str, list[tuple[int, int, str]]] = {}
    for report in filter(None, reports.values()):
        for progress in report.progress:
            where = with_ranks(progress.label, progress.ranks)
            groups.setdefault(progress.group, []).append((progress.num_calls, report.rank, where))
    gaps = [(max(found)[0] - min(found)[0], min(found), max(found)) for found in groups.values()]
    gap, (calls, behind, where), (most, ahead, _) = max(gaps, default=(0, (0, 0, ""), (0, 0, "")))
    if gap == 0 or not stuck:
        return nobody
    return f"{nobody}; in {where}, rank {behind} has made {calls:,} calls, rank {ahead} {most:,}"
