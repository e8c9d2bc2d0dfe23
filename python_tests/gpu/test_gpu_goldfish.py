"""The labels of Goldfish loss on GPUs: those of the CPU, without a wait of the host."""

from __future__ import annotations

import pytest
import torch

from axonn_ext.nn import goldfish_labels
from axonn_ext.spec.goldfish import Goldfish

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", ["before", "target"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_labels_equal_those_of_the_cpu(k: int, window: str) -> None:
    generator = torch.Generator().manual_seed(k)
    # The last one has more targets than all threads of a launch, of which some loop.
    many = (3, 1_000_001)
    for shape in ((1,), (0, 5), (7, 2), (3, 40), (2, 3, 257), many):
        tokens = torch.randint(50, shape, generator=generator)
        documents = (torch.randint(30, shape, generator=generator) == 0).cumsum(-1)
        for h in (13,) if shape == many else (1, 13, 40):
            for numbers in (documents,) if shape == many else (None, documents):
                goldfish = Goldfish(k, h, window)
                want = goldfish_labels(tokens, goldfish, documents=numbers)
                own = tokens.cuda(), None if numbers is None else numbers.cuda()
                before = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    got = goldfish_labels(own[0], goldfish, documents=own[1])
                finally:
                    torch.cuda.set_sync_debug_mode(before)
                assert torch.equal(got.cpu(), want), (shape, h)
