"""Puts models that others wrote on a grid, in place."""

from axonn_ext.placement.auto import auto_parallelize
from axonn_ext.placement.in_place import parallelize
from axonn_ext.placement.mean import global_mean
from axonn_ext.placement.plan import Placement, Plan
from axonn_ext.placement.same import check_same_on_all_ranks

__all__ = [
    "Placement",
    "Plan",
    "auto_parallelize",
    "check_same_on_all_ranks",
    "global_mean",
    "parallelize",
]
