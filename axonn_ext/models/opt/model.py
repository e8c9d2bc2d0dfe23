"""OPT on a grid: GPT-2's layers with ReLU, and a table of positions that begins with unused rows.

Its public state has the names and layouts of Hugging Face's OPTForCausalLM.
"""

from __future__ import annotations

from axonn_ext.models.gpt2.model import GPT2
from axonn_ext.models.stored import Stored, separate_qkv
from axonn_ext.models.transformer import StateNames


class OPT(GPT2):
    names = StateNames(
        body="model.decoder",
        blocks="layers",
        norm="final_layer_norm",
        table="embed_tokens",
        positions="embed_positions",
        block={
            "norm_1.": "self_attn_layer_norm.",
            "norm_2.": "final_layer_norm.",
            "attention.out.": "self_attn.out_proj.",
            "mlp.up.": "fc1.",
            "mlp.down.": "fc2.",
        },
    )

    def arranged(self, name: str, public: str, rows: int) -> Stored:
        if ".attention.qkv." in name:
            return separate_qkv(public, self.config)
        return Stored(((public, rows),))


MODEL = OPT
