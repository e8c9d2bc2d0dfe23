"""Puts third-party models on a grid, in place. All ranks must make these calls alike."""

from axonn_ext.models.parallelize.auto import auto_parallelize
from axonn_ext.models.parallelize.in_place import parallelize
from axonn_ext.models.parallelize.mean import global_mean
from axonn_ext.models.parallelize.plan import Placement, Plan, plan_of
from axonn_ext.models.parallelize.same import check_same_on_all_ranks

__all__ = [
    "Placement",
    "Plan",
    "auto_parallelize",
    "check_same_on_all_ranks",
    "global_mean",
    "parallelize",
    "plan_of",
]
