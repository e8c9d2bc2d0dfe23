"""The labels of Goldfish loss on GPUs: the same as on the CPU, without making the host wait."""

from __future__ import annotations

import pytest
import torch

from axonn_ext.nn import goldfish_labels
from axonn_ext.spec.goldfish import Goldfish

pytestmark = pytest.mark.gpu


def test_labels_equal_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, 257), generator=generator)
    documents = (torch.randint(30, (2, 257), generator=generator) == 0).cumsum(-1)
    want = goldfish_labels(tokens, Goldfish(), documents=documents)
    own = tokens.cuda(), documents.cuda()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = goldfish_labels(own[0], Goldfish(), documents=own[1])
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(got.cpu(), want)
