"""The tables of mutants fit the code, and tools/emulate_mutants.py reads test output correctly.

tools/emulate_mutants.py and `make mutants` themselves check that tests notice each mutant.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from loading import load, load_all

modules = load_all("tools/emulate_mutants.py")
tool, table = modules["emulate_mutants"], modules["mutant_table"]


PTX = """
.version 9.0
.file 1 "/somewhere/kernels.cu"
.visible .entry first_kernel()
{ bar.sync 0; st.release.sys.u32 [a], 1; }
.visible .entry second_kernel()
{ bar.sync 0; add.s32 %r1, %r2, 1; bar.sync 1; }
\0"""


def test_host_mutants_change_texts_that_occur() -> None:
    changes = [change for change in table.load_table() if change.part.is_host]
    assert changes
    for mutant in (m for change in changes for m in change.mutants()):
        assert tool.edited_source(mutant) != (table.ROOT / mutant.change.part.source).read_text()


def test_mistakes_have_a_place_and_tests() -> None:
    tool = load("tools/mutants.py")
    mutants = tool.load_table()
    assert len({m.name for m in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.edited(tool.ROOT) != (tool.ROOT / mutant.source).read_text()
        tests = [*mutant.tests.split(), *mutant.noticed_by.split()]
        for path, _, name in (test.partition("::") for test in tests):
            file = tool.ROOT / "python_tests" / path
            assert mutant.is_core or file.exists(), mutant.tests
            assert not name or f"def {name.partition('[')[0]}(" in file.read_text(), mutant.tests


def test_the_test_that_notices_is_recorded(tmp_path, monkeypatch) -> None:
    tool = load("tools/mutants.py")
    rows = """[[part]]
source = "a.py"
tests = "x"

[[part.change]]
what = "one"
old = "1"
new = "2"

[[part.change]]
what = "two"
noticed_by = "t.py::old"
old = "3"
new = "4"
"""
    path = tmp_path / "table.toml"
    path.write_text(rows)
    monkeypatch.setattr(tool, "TABLE", path)
    for mutant in tool.load_table(path):
        tool.record(mutant, f"t.py::test_{mutant.what}")
    recorded = rows.replace('what = "one"\n', 'what = "one"\nnoticed_by = "t.py::test_one"\n')
    assert path.read_text() == recorded.replace("t.py::old", "t.py::test_two")


def test_docs_have_the_table() -> None:
    docs = table.DOCS.read_text()
    assert table.with_table(docs, table.load_table()) == docs, (
        "run python3 tools/emulate_mutants.py --write-docs"
    )


def change_of(**fields: object) -> object:
    part = table.Part("part", "Tests.*", source="kernels.cu", kernel="second")
    made = table.Change(part, "what", r"bar\.sync \d;", "", ("race",), places=2)
    return replace(made, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"errors": ("noise",)}, "errors must be of"),
        ({"survive": (2,), "because": "so"}, "survive must be of 0 to 1, got \\(2,\\)"),
        ({"survive": (1,)}, "what survives needs `because`"),
        ({"because": "so"}, "what survives needs `because`"),
        ({"errors": ()}, "errors must be there"),
        ({"survive": (0, 1), "because": "so"}, "errors must be there"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(
    fields: dict[str, object], message: str
) -> None:
    table.check(change_of())
    with pytest.raises(table.TableError, match=message):
        table.check(change_of(**fields))


def test_ptx_is_changed_in_one_place_and_moves_nothing() -> None:
    first, second = change_of().mutants()
    all_places = change_of(together=True).mutants()
    assert len(all_places) == 1
    data = PTX.encode() + b"\x00\x01 behind"
    for mutant, kept in ((first, b"bar.sync 1;"), (second, b"bar.sync 0;"), (all_places[0], b"")):
        edited = tool.edited_ptx(data, mutant)
        assert len(edited) == len(data) and edited.endswith(b"\x01 behind")
        begin = edited.index(b"second_kernel")
        assert edited[:begin] == data[: data.index(b"second_kernel")]
        assert edited.count(b"bar.sync", begin) == (1 if kept else 0)
        assert kept in edited[begin:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"places": 3}, "expected 3 times"),
        ({"new": "bar.sync 0; bar.sync 1; bar.sync 2; bar.sync 3; "}, "is longer"),
    ],
)
def test_ptx_that_does_not_fit_the_table_is_an_error(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(table.TableError, match=message):
        tool.edited_ptx(PTX.encode(), change_of(**fields).mutants()[0])


def test_a_change_may_be_of_several_kernels() -> None:
    part = table.Part("part", "Tests.*", source="kernels.cu", kernel="(first|second)", kernels=2)
    change = change_of(part=part, places=3, new="nop.sync 0;")
    data = PTX.encode()
    for number, mutant in enumerate(change.mutants()):
        edited = tool.edited_ptx(data, mutant)
        places = [m.start() for m in re.finditer(rb"bar\.sync", data)]
        assert len(edited) == len(data)
        assert [edited[at : at + 8] == b"bar.sync" for at in places] == [
            place != number for place in range(3)
        ]
    (together,) = change_of(part=part, places=3, together=True).mutants()
    assert b"bar.sync" not in tool.edited_ptx(data, together)


def test_kernels_must_be_named_without_doubt() -> None:
    part = table.Part("part", "Tests.*", source="kernels.cu", kernel="kernel")
    for one in (part, replace(part, kernel="third"), replace(part, source="others.cu")):
        with pytest.raises(table.TableError, match=r"expected 1 kernel\(s\)"):
            tool.kernel_ranges(PTX.encode(), one)
    assert len(tool.kernel_ranges(PTX.encode(), replace(part, kernels=2))) == 2


FAILED = "[  FAILED  ] Tests.First (3 ms)\n"


@pytest.mark.parametrize(
    ("output", "status", "verdict"),
    [
        ("[  PASSED  ] 3 tests.\n", 0, "survives"),
        ("[  PASSED  ] 0 tests.\n", 0, "no test ran"),
        (f"C++ exception: nothing orders this [race]\n{FAILED}", 1, "race"),
        (f"deadlock: nobody can go on\n  rank 0: waits [deadlock]\n{FAILED}", 1, "deadlock"),
        (f"a.cpp:3: Failure\nExpected equality\n{FAILED}", 1, "result"),
        (
            f"unknown file: Failure\nPTX line 7: expected a name\n{FAILED}",
            1,
            "the mutant is no PTX",
        ),
        ("Segmentation fault\n", -11, "the tests ended with status -11"),
    ],
)
def test_the_tests_output_is_read(output: str, status: int, verdict: str) -> None:
    found = tool.read_output(change_of().mutants()[0], output, status)
    assert found.verdict == verdict
    assert found.is_as_expected == (verdict == "race")
    assert found.test == ("Tests.First" if FAILED in output else "")
