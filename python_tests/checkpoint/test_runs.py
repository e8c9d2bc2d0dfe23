"""Runs of a tensor's elements as blocks, compared with numpy."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from axonn_ext.checkpoint.runs import blocks_of_run


@pytest.mark.parametrize("dims", range(5))
def test_blocks_hold_each_element_of_the_run_once(dims: int) -> None:
    chosen = random.Random(dims)
    for shape in itertools.product((0, 1, 2, 3, 5), repeat=dims):
        numel = math.prod(shape)
        whole = np.arange(numel).reshape(shape)
        for _ in range(8):
            start = chosen.randint(0, numel)
            stop = chosen.randint(start, numel)
            flat = torch.arange(start, stop)
            found = np.full(shape, -1)
            blocks = list(blocks_of_run(shape, start, flat))
            for offsets, block in blocks:
                place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
                assert found[place].shape == block.shape
                found[place] = block
                assert block.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            expected = np.where((whole >= start) & (whole < stop), whole, -1)
            np.testing.assert_array_equal(found, expected, err_msg=f"{shape} {start} {stop}")
            assert sum(block.numel() for _, block in blocks) == stop - start
            assert len({offsets for offsets, _ in blocks}) == len(blocks) <= max(1, 2 * dims - 1)
