"""Control characters for a terminal, in file names and file contents."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from torch import nn

from axonn_ext import checkpoint
from axonn_ext.cli import generate, main, streams
from axonn_ext.spec.files.errors import printable
from axonn_ext.terminal.console import Console, plain_table, print_table, say

EVIL = "\x1b]0;owned\x07\x1b[2J \r\x08\x9b1m\u202e\x7f"
SHOWN = r"\x1b]0;owned\x07\x1b[2J \r\x08\x9b1m\u202e\x7f"


def test_every_control_character_is_shown_as_its_number() -> None:
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        direction = unicodedata.bidirectional(char)
        controls = unicodedata.category(char) in ("Cc", "Zl", "Zp") or direction in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"
        )  # fmt: skip
        if controls and char not in "\t\n":
            assert printable(f"a{char}b").isascii() and printable(f"a{char}b").isprintable(), code
    assert printable("caf\xe9 \u4e16\u754c\t\U0001f600\n") == "caf\xe9 \u4e16\u754c\t\U0001f600\n"


def test_lines_cells_and_errors(capsys) -> None:
    say(Console(), EVIL)
    table = plain_table()
    table.add_column(EVIL)
    table.add_row(EVIL)
    print_table(Console(), table)
    streams.say(EVIL)
    captured = capsys.readouterr()
    assert captured.out.count(SHOWN) == 3 and captured.err == SHOWN
    assert (captured.out + captured.err).replace("\n", "").isprintable()


def test_names_of_tensors_and_of_files(tmp_path, capsys) -> None:
    """They may be in listings, in messages about damage, and in errors."""
    model = nn.ModuleDict({EVIL.replace(".", ""): nn.Linear(2, 2)})
    folder = tmp_path / f"run {EVIL}" / "step-00000001"
    checkpoint.save(folder, model=model, extra={EVIL: 1})
    assert main(["checkpoint", "inspect", str(folder), "--tensors"]) == 0
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert main(["checkpoint", "reshard", str(folder), str(tmp_path / "out")]) == 2
    (folder / "manifest.json").write_text("{}")
    assert main(["checkpoint", "list", str(folder.parent)]) == 0
    captured = capsys.readouterr()
    assert SHOWN in captured.out and SHOWN in captured.err
    assert (captured.out + captured.err).replace("\n", "").isprintable()


def test_a_configuration_that_makes_no_sense(tmp_path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": EVIL, EVIL: 1}))
    assert main(["generate", "--model", str(tmp_path), "--prompt", "a"]) == 2
    assert capsys.readouterr().err.replace("\n", "").isprintable()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_says_is_as_it_is_unless_a_terminal_reads_it(
    capsys, monkeypatch, is_terminal
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    generate._write(EVIL)
    assert capsys.readouterr().out == (SHOWN if is_terminal else EVIL)
