"""Writes a run's findings to the stamp after every group of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonn_ext.kernels import host, verified
from axonn_ext.kernels.verified import Key, Stamp, Verdict
from axonn_ext.spec import settings
from axonn_ext.verify.groups import Group
from axonn_ext.verify.run import NOT_RUN, PASSED, Outcome, verdicts_of


@dataclass(frozen=True)
class Kept:
    """Where the verdicts of this and earlier runs are kept; `why_not` if they are not.

    known: all verdicts that the stamp now has
    """

    path: Path | None = None
    known: Mapping[str, Verdict] | None = None
    why_not: str = ""


class Record:
    """The outcomes of a run, whose verdicts go into the stamp as soon as they are known.

    A kernel is correct once all of its groups have passed on one GPU, and wrong once a group has
    failed. A group that has not run counts as not passed, whatever the reason: a run that is cut
    short, or limited to a few groups, unlocks only kernels that were fully checked.

    key         the key of the stamp; None: it is not kept
    all_groups  the groups of a whole run on this machine
    """

    def __init__(self, key: Key | None, all_groups: Sequence[Group]) -> None:
        self._key, self._all = key, tuple(all_groups)
        self.outcomes: list[Outcome] = []
        self.verdicts: dict[str, Verdict] = {}
        self.kept = Kept(why_not="no kernel was checked as a whole")

    def add(self, outcome: Outcome) -> None:
        """Takes the outcome of a group, and writes the stamp if a verdict or its end is new."""
        self.outcomes.append(outcome)
        found = {outcome.group.name for outcome in self.outcomes}
        missing = [group for group in self._all if group.name not in found]
        verdicts = verdicts_of([*self.outcomes, *(Outcome(g, NOT_RUN) for g in missing)])
        if verdicts != self.verdicts or not missing:
            self.verdicts = verdicts
            self.kept = self._keep(complete=not missing)

    def _keep(self, *, complete: bool) -> Kept:
        cache_dir = settings.load().cache_dir
        if self._key is None:
            why = f"{host.DRIVER} does not give this GPU's model, which identifies the stamp"
            return Kept(why_not=why)
        if not cache_dir:
            return Kept(why_not="AXONN_CACHE_DIR is empty")
        old = verified.find(cache_dir, self._key) or Stamp(self._key, {}, complete=False)
        passed = {o.group.name for o in self.outcomes if o.status == PASSED}
        known = verified.merged(old.verdicts, self.verdicts, passed=passed)
        try:
            stamp = Stamp(self._key, known, complete or old.complete)
            return Kept(verified.keep(cache_dir, stamp), known)
        except OSError as error:
            return Kept(why_not=f"{error.filename or cache_dir}: {error.strerror}")
