"""Tokenizers of a few hundred tokens with chat templates, and chats to try them on.

The templates are written for these tests. For such messages they produce the same text as those of
Llama 3, Qwen2.5, Mistral 7B v0.3 and SmolLM2 (except for the default system message), with the same
special tokens. They also have the same peculiarities: a template that writes the BOS token although
the tokenizer adds it, too; tools; and a system message that becomes part of the last user turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# tagged() replaces these comments by {% generation %} and {% endgeneration %}.
BEGIN, END = "{#- begin -#}", "{#- end -#}"
TAGS = {BEGIN: "{%- generation -%}", END: "{%- endgeneration -%}"}

LLAMA_3 = r"""
{%- for message in messages -%}
    {%- if loop.first %}{{ bos_token }}{% endif -%}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' -}}
    {%- if message.role == 'assistant' -%}
        {#- begin -#}{{ message.content | trim ~ '<|eot_id|>' }}{#- end -#}
    {%- else -%}
        {{- message.content | trim ~ '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""
QWEN_2_5 = r"""
{%- set first = messages[0] -%}
{{- '<|im_start|>system\n' -}}
{{- first.content if first.role == 'system' else 'You answer briefly.' -}}
{%- if tools -%}
    {{- '\n\n# Tools\n<tools>' -}}
    {%- for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor -%}
    {{- '\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {#- begin -#}
        {{- message.content -}}
        {%- for call in message.tool_calls or () -%}
            {%- set call = call.function -%}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' -}}
            {{- call.arguments | tojson ~ '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
        {#- end -#}
    {%- else -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
MISTRAL = r"""
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system, turns = messages[0].content, messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('expected user and assistant in turn') -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' -}}
        {%- if loop.last and system is defined %}{{ system ~ '\n\n' }}{% endif -%}
        {{- message.content ~ '[/INST]' -}}
    {%- else -%}
        {#- begin -#}{{ ' ' ~ message.content | trim ~ eos_token }}{#- end -#}
    {%- endif -%}
{%- endfor -%}
"""
SMOLLM_2 = r"""
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\nYou answer briefly.<|im_end|>\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' -}}
    {%- if message.role == 'assistant' -%}
        {#- begin -#}{{ message.content ~ '<|im_end|>\n' }}{#- end -#}
    {%- else -%}
        {{- message.content ~ '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""


@dataclass(frozen=True)
class Kind:
    """A tokenizer with a chat template.

    front      the token that it puts before each text
    ends       the tokens that end a text according to the model's generation config
    metaspace  whether it marks spaces as sentencepiece does, not as bytes
    """

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    ends: tuple[str, ...]
    front: str = ""
    metaspace: bool = False


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KINDS = {
    "llama-3": Kind(
        LLAMA_3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>"),
        "<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"),
        front="<|begin_of_text|>",
    ),
    "qwen-2.5": Kind(QWEN_2_5, _IM, None, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    "mistral": Kind(
        MISTRAL, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", ("</s>",),
        front="<s>", metaspace=True,
    ),
    "smollm-2": Kind(SMOLLM_2, _IM, "<|im_start|>", "<|im_end|>", ("<|im_end|>",)),
}  # fmt: skip

TEXT = "user assistant system tool You answer briefly. What is the sum of two and three? Five, six!"
MESSAGES = [
    {"role": "user", "content": "What is the sum of 2 and 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "<b>And</b> of  caf\u00e9s \U0001f600?\n\n"},
    {"role": "assistant", "content": "  Many \U0001f600\u00e9\n"},
]
SYSTEM = {"role": "system", "content": "Speak \u00fc and \u00df & <i>."}
TOOLS = [
    {"type": "function", "function": {"name": "sum", "description": "a < b & '\u00fc'"}}
]  # fmt: skip
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"\u00fc": 2}}}
CALLS = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": "5 or 6"},
]


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Kinds, with chats whose text only grows with each turn of the assistant.

    Mistral's template moves a leading system message to the last user turn, which changes earlier
    text.
    """
    lines = [(kind, {"messages": MESSAGES}) for kind in KINDS]
    lines += [(kind, {"messages": [SYSTEM, *MESSAGES]}) for kind in KINDS if kind != "mistral"]
    lines += [(kind, {"messages": [SYSTEM, *MESSAGES[:2]]}) for kind in KINDS if kind != "mistral"]
    return [*lines, ("qwen-2.5", {"messages": CALLS, "tools": TOOLS})]


def tagged(template: str) -> str:
    """The template with the generation tag around the assistant's words."""
    for comment, tag in TAGS.items():
        template = template.replace(comment, tag)
    return template


def write_tokenizer(folder: Path, name: str, *, tag: bool = False, back: str = "") -> Path:
    """Writes a kind's tokenizer, and the config with the ids that end a text; returns the folder.

    back: a special token that the tokenizer puts after each text.
    """
    from tokenizers import processors

    kind = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _trained(kind)
    around = [token for token in (kind.front, back) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, (kind.front, "$A", back))),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": kind.eos,
        "bos_token": kind.bos,
        "chat_template": tagged(kind.template) if tag else kind.template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(token) for token in kind.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def _trained(kind: Kind) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    if kind.metaspace:  # like Llama 2 and Mistral, whose tokenizers come from sentencepiece
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = BpeTrainer(
            vocab_size=360, special_tokens=[*kind.special, *alphabet], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=300, special_tokens=[*kind.special], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] in kind.special]
    return Tokenizer.from_str(json.dumps(made))
