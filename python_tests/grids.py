"""Grids for tests, and how close to a reference is close enough, as `axonn-ext verify` has them."""

from __future__ import annotations

from axonn_ext.verify.accuracy import bound, relative_error
from axonn_ext.verify.linears import factorisations, grid_of

__all__ = ["bound", "factorisations", "grid_of", "relative_error"]
