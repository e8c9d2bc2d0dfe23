"""The documentation's code runs, its links work, and its tables match the code."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import axonn_ext
from axonn_ext import GridShape
from axonn_ext.spec import settings
from limits import HANG_SECONDS
from loading import load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (*(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING", "CHANGELOG")), *DOCS.glob("*.md"))
# The pages whose Python examples run by themselves on two ranks.
RUN = ("README", *(f"docs/{n}" for n in ("checkpoints", "hugging_face", "parallelize")),
       "docs/pipeline", "docs/memory")  # fmt: skip
BLOCKS = [
    pytest.param(
        block, id=f"{name}-{number}", marks=pytest.mark.long if name == RUN[0] else pytest.mark.slow
    )
    for name in RUN
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / f"{name}.md").read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_of_the_pages_runs_on_two_ranks(tmp_path: Path, block: str):
    script = tmp_path / "example.py"
    script.write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--standalone", "--local-addr=127.0.0.1", str(script)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout, "an example shows something"


def test_python_of_the_planner_runs(capsys: pytest.CaptureFixture[str]):
    page = (DOCS / "planner.md").read_text()
    block = re.search(r"^    from axonn_ext import planner\n(?:    .*\n|\n)*", page, re.MULTILINE)
    assert block is not None
    exec(textwrap.dedent(block[0]), {})
    assert capsys.readouterr().out


def test_the_pipeline_of_the_readme_is_the_example():
    """The README says so."""
    example = (ROOT / "examples" / "pipeline.py").read_text().partition('"""\n\n')[2]
    assert example in (ROOT / "README.md").read_text()


def test_grids_of_the_pages_are_of_the_grammar():
    found = [
        grid
        for page in PAGES
        for grid in re.findall(r"--grid[= ]((?:[a-z]+=\d+,?)+|\d+x[\dx]+)", page.read_text())
    ]
    assert found
    for grid in found:
        GridShape.parse(grid.rstrip(","))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_every_file_that_is_named_exists():
    """A name without an extension stands for a file or a folder."""
    folders = "csrc|axonn_ext|cpp_tests|python_tests|tools|examples"
    missing = []
    for page in PAGES:
        for name in re.findall(rf"(?<![\w/])(?:{folders})/[\w./*-]+", page.read_text()):
            path = name.rstrip("./*")
            found = any(ROOT.glob(path)) or any(ROOT.glob(f"{path}.*")) or any(ROOT.glob(name))
            if not found:
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_words_that_the_glossary_refers_to_are_in_it():
    glossary = (DOCS / "glossary.md").read_text()
    known = {term for entry in re.findall(r"\*\*(.+?)\*\*", glossary) for term in entry.split(", ")}
    entries = glossary.partition("\n* ")[2]
    assert set(re.findall(r"(?<!\*)\*([a-z][a-z -]*)\*(?!\*)", entries)) <= known


docs_tables = load("tools/docs_tables.py")


@pytest.mark.parametrize("name", docs_tables.PAGES)
def test_tables_are_those_of_the_code(name: str):
    text = (DOCS / name).read_text()
    assert docs_tables.with_tables(text, docs_tables.PAGES[name]) == text, "run `make docs`"


def test_every_public_module_has_a_section_of_the_api():
    modules = {n for n in axonn_ext.__all__ if inspect.ismodule(getattr(axonn_ext, n))}
    assert modules
    assert {f"axonn_ext.{name}" for name in modules} <= set(docs_tables.MODULES)


def test_signatures_of_the_api():
    class Named:
        def method(self, a: int, *, b: object = Path, c: str = "") -> None: ...

    assert docs_tables.signature("f", Named.method, bound=True) == "f(a, *, b=..., c='')"
    assert docs_tables.signature("E", KeyError) == "E"
    assert docs_tables.signature("p", None) == "p"


def test_what_a_docstring_says_of_names():
    text = """Of these.

    a       the first, which
            goes on
    b, c_d  two
    e
            on a line of its own

    Raises: nothing, of
    b with c_d.
    """
    assert docs_tables.described(text, ["a", "b", "c_d", "e"]) == {
        ("a",): "the first, which goes on", ("b", "c_d"): "two", ("e",): "on a line of its own",
    }  # fmt: skip
    with pytest.raises(ValueError, match="does not describe f"):
        docs_tables.described(text, ["a", "f"])


def test_pages_without_marks_are_refused():
    with pytest.raises(ValueError, match="must have one <!-- ops: begin -->"):
        docs_tables.with_tables("# Page\n", {"ops": str})


def test_defaults_of_the_variables_are_those_of_the_settings():
    defaults = {name: text for name, text in settings.Settings().shared().items() if text.isdigit()}
    told = docs_tables.described(settings.__doc__, [*defaults])
    assert defaults
    for name, default in defaults.items():
        assert re.search(rf"default {default}\b", told[name,]), name
