"""The labels of Goldfish loss on GPUs: those of the CPU, without a wait of the host."""

from __future__ import annotations

import itertools

import pytest
import torch

from axonn_ext.nn import goldfish_labels
from axonn_ext.spec.goldfish import Goldfish

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", ["before", "target"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_labels_equal_those_of_the_cpu(k: int, window: str) -> None:
    generator = torch.Generator().manual_seed(k)
    small = ((1,), (0, 5), (7, 2), (3, 40), (2, 3, 257))
    cases = list(itertools.product(small, (1, 13, 40), (False, True)))
    # More targets than all threads of a launch, of which some loop. These are many for a GPU in
    # software, so each k and window has one such case, and some have documents.
    cases.append(((3, 700_001), 13, (k + (window == "target")) % 2 == 0))
    for shape, h, has_documents in cases:
        tokens = torch.randint(50, shape, generator=generator)
        documents = None
        if has_documents:
            documents = (torch.randint(30, shape, generator=generator) == 0).cumsum(-1)
        goldfish = Goldfish(k, h, window)
        want = goldfish_labels(tokens, goldfish, documents=documents)
        own = tokens.cuda(), None if documents is None else documents.cuda()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = goldfish_labels(own[0], goldfish, documents=own[1])
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert torch.equal(got.cpu(), want), (shape, h, has_documents)
