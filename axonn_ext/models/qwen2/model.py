"""Qwen2 on a grid. Its public names, Hugging Face's, are those of Llama."""

from __future__ import annotations

from axonn_ext.models.llama.model import Llama


class Qwen2(Llama):
    """A Llama as family.py describes it: the difference is that qkv has a bias."""


MODEL = Qwen2
