"""Special tokens and chats: the same rule for prompts, texts and messages."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path

import pytest

from axonn_ext.data import ByteVocabulary, Prompts, load_examples, open_vocabulary
from axonn_ext.data.chat import Chat, ChatTemplates
from axonn_ext.data.tokenizer_files import TokenizerFiles
from chat_cases import CALLS, KINDS, MESSAGES, SYSTEM, TOOLS, cases, write_tokenizer

pytest.importorskip("tokenizers")


def prompts_of(folder: Path) -> Prompts:
    return Prompts(open_vocabulary(str(folder / "tokenizer.json")), model=folder)


def shown(prompts: Prompts, ids: list[int]) -> list[str]:
    """The tokens as written in the tokenizer's file."""
    named = json.loads((prompts.vocabulary.path).read_text())["model"]["vocab"]
    names = {number: name for name, number in named.items()}
    return [names[token] for token in ids]


@pytest.fixture(params=["", "</s>"])
def ending(tmp_path: Path, request: pytest.FixtureRequest) -> Prompts:
    """A tokenizer that puts <s> before each text and, for one parameter, </s> after it."""
    return prompts_of(write_tokenizer(tmp_path / "ending", "mistral", back=request.param))


def test_a_prompt_goes_on_and_a_text_ends(ending) -> None:
    begin, *own = shown(ending, ending.prompt("Five"))
    assert (begin, "".join(own)) == ("<s>", "\u2581Five")
    assert ending.text("Five") == [*ending.prompt("Five"), ending.end_id]
    assert ending.prompt("") == ending.prompt("Five")[:1]


def test_a_prompt_keeps_the_special_tokens_that_it_has(ending) -> None:
    plain = ending.prompt("Five")
    assert ending.prompt("<s>Five") == plain, "a second BOS"
    assert ending.prompt("Five</s>") == [*plain, ending.end_id]
    assert ending.text("Five</s>") == ending.text("Five"), "a second EOS"
    ids, num_given = ending.completed("Five</s>", "six")
    assert ids[:num_given] == ending.prompt("Five</s>"), "the EOS of the prompt would be learned"
    assert ids[-1] == ending.end_id


def test_prompts_and_completions_are_learned_alike(ending, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [" six", " six</s>"]
    lines = [*({"prompt": "Five</s>", "completion": text} for text in texts), {"text": "Five"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pair, ended, text = load_examples(str(path), ending, sequence_length=64, held_out=0).train
    assert pair.tokens.tolist() == ended.tokens.tolist(), "a second EOS"
    given = ending.prompt("Five</s>")
    assert pair.tokens.tolist()[: len(given)] == given
    assert pair.learned.tolist() == [False] * len(given) + [True] * (len(pair.tokens) - len(given))
    assert text.tokens.tolist() == ending.text("Five")


@pytest.mark.parametrize(("name", "end"), [(name, kind.eos) for name, kind in KINDS.items()])
def test_texts_end_with_the_eos_token_of_the_tokenizer(name, end, tmp_path) -> None:
    prompts = prompts_of(write_tokenizer(tmp_path, name))
    assert shown(prompts, [prompts.end_id]) == [end]
    assert set(shown(prompts, sorted(prompts.stop_ids))) == set(KINDS[name].ends)


@pytest.mark.parametrize(
    ("model_ends", "end", "stops"),
    [([1], 1, {1}), ([4, 1], 4, {1, 4}), ([1, 4], 4, {1, 4}), (7, 7, {7}), (None, 4, {4})],
)
def test_the_model_decides_what_ends_a_text(model_ends, end, stops, tmp_path) -> None:
    """The tokenizer's eos_token, id 4, ends texts if it is among the model's or they are unset."""
    write_tokenizer(tmp_path, "llama-3")
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": model_ends}))
    prompts = prompts_of(tmp_path)
    assert (prompts.end_id, prompts.stop_ids) == (end, stops)


def test_bytes_have_no_special_tokens_and_no_chats(tmp_path) -> None:
    prompts = Prompts(ByteVocabulary(), model=tmp_path)
    assert prompts.prompt("a") == prompts.text("a") == [97]
    with pytest.raises(ValueError, match="messages need a chat template: expected chat_template"):
        prompts.chat({"messages": MESSAGES})


@pytest.mark.parametrize("tag", [False, True])
@pytest.mark.parametrize(("name", "line"), cases())
def test_what_the_assistant_says_is_learned(name, line, tag, tmp_path) -> None:
    prompts = prompts_of(write_tokenizer(tmp_path, name, tag=tag))
    ids, learned = prompts.chat(line)
    tokens = shown(prompts, ids)
    assert tokens.count(KINDS[name].front) <= 1, "a second BOS"
    turns, open_turn = [], []
    for token, is_learned in zip(ids, learned.tolist(), strict=True):
        if is_learned:
            open_turn.append(token)
        elif open_turn:
            turns.append(open_turn)
            open_turn = []
    turns += [open_turn] if open_turn else []
    said = [message for message in line["messages"] if message["role"] == "assistant"]
    assert len(turns) == len(said)
    for message, turn in zip(said, turns, strict=True):
        assert prompts.end_id in turn[-2:], "a turn ends with the token that ends it"
        text = prompts.vocabulary.decode(turn).strip()
        assert text.startswith(message["content"].strip())
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in text and '{"\u00fc": 2}' in text
    # Generation starts where the learned part of the last turn starts.
    text, opening = prompts.chat_prompt(line)
    assert ids[: len(opening)] == opening
    assert learned[len(opening) :].all() and not learned[: len(opening)][-1:].any()


def rendered(
    template: str, *, special: dict[str, str] | None = None, today: date | None = None,
    **line: object,
) -> str:  # fmt: skip
    templates = ChatTemplates(TokenizerFiles(special or {}, {"default": template}), today)
    return templates.text(Chat.of({"messages": MESSAGES} | line))


def test_a_template_is_told_what_a_line_has() -> None:
    line = {"tools": json.dumps(TOOLS), "documents": ["d"], "chat_template_kwargs": {"own": 1}}
    text = rendered("{{ tools[0].function.name }}{{ documents }}{{ own }}{{ bos_token }}|", **line)
    assert text == "sum['d']1|"
    assert rendered("{{ tools is none }} {{ bos_token }}", special={"bos_token": "<s>"}) == (
        "True <s>"
    )
    year = str(datetime.now().year)
    assert rendered("{{ strftime_now('%Y') }}") in (year, str(int(year) + 1))
    assert rendered("{{ strftime_now('%d %b %Y') }}", today=date(2020, 2, 3)) == "03 Feb 2020"
    assert rendered("{{ messages[0] | tojson }}", messages=[SYSTEM]) == json.dumps(
        SYSTEM, ensure_ascii=False
    )
    blocks = "{% for m in messages %}\n  {% if loop.last %}\nx\n  {% endif %}\n{% endfor %}"
    assert rendered(blocks) == "x\n", "lines with only a block leave nothing"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('users first') }}", "refuses these messages: users first"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses these messages: access to attribute 'append'"),
        ("{{ messages[0].content + none }}", "refuses these messages: can only concatenate str"),
        ("{{ messages | length }}", r"put {% generation %} and {% endgeneration %} around it"),
        (
            "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}",
            "changes the text in {% generation %}",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_named(template, message) -> None:
    templates = ChatTemplates(TokenizerFiles({}, {"default": template}))
    with pytest.raises(ValueError, match="the chat template") as error:
        templates.learned(Chat.of({"messages": MESSAGES}))
    assert message in str(error.value)


def test_a_template_that_is_not_one_is_named() -> None:
    with pytest.raises(ValueError, match="the chat template is not Jinja: unexpected '}'"):
        ChatTemplates(TokenizerFiles({}, {"default": "{{ a } }}"}))


def test_a_system_message_of_the_last_turn_cannot_be_told_apart(tmp_path) -> None:
    prompts = prompts_of(write_tokenizer(tmp_path, "mistral"))
    with pytest.raises(ValueError, match="writes the first 3 messages differently when"):
        prompts.chat({"messages": [SYSTEM, *MESSAGES]})
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [*MESSAGES, MESSAGES[1]]}) + "\n")
    expected = "line 1: the chat template refuses these messages: expected user and assistant in"
    with pytest.raises(ValueError, match=expected):
        load_examples(str(path), prompts, sequence_length=64)


def test_the_files_of_a_folder(tmp_path) -> None:
    def templates(config: object) -> dict[str, str]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
        return dict(TokenizerFiles.of(tmp_path).templates)

    assert templates("a") == {"default": "a"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert templates(named) == {"default": "a", "tool_use": "b"}
    assert templates(None) == templates(3) == {}
    chosen = ChatTemplates(TokenizerFiles.of(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert templates("a") == {"default": "c", "tool_use": "d"}
    chosen = ChatTemplates(TokenizerFiles.of(tmp_path))
    assert chosen.text(Chat.of({"messages": MESSAGES})) == "c"
    assert chosen.text(Chat.of({"messages": CALLS, "tools": TOOLS})) == "d"
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    config = {"eos_token": "</s>", "pad_token": None, "additional_special_tokens": ["<a>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<a>"]}
    assert TokenizerFiles.of(tmp_path).special == special
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: expected an object, got list"):
        TokenizerFiles.of(tmp_path)


def test_a_chat_that_does_not_fit_a_sequence(tmp_path) -> None:
    prompts = prompts_of(write_tokenizer(tmp_path, "llama-3"))
    path = tmp_path / "a.jsonl"
    lines = [{"messages": MESSAGES}, {"messages": MESSAGES[:1]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids, learned = prompts.chat(lines[0])
    first = int(learned.argmax())
    cut = load_examples(str(path), prompts, sequence_length=first, held_out=0)
    assert cut.train[0].tokens.tolist() == ids[: first + 1]
    assert cut.train[0].num_labels == cut.num_cut == 1
    assert [each.reason for each in cut.skipped] == ["nothing to learn"]
    with pytest.raises(ValueError, match=r"got none; 1 have no room for learned tokens"):
        load_examples(str(path), prompts, sequence_length=first - 1)
