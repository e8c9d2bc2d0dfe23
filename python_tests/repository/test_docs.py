"""What the documentation says runs, and is what the code does."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from axonn_ext import CommunicationRecord, GridShape, ops, settings
from axonn_ext.ops.spec import OpSpec
from axonn_ext.ops.specs import SPECS
from axonn_ext.overlap import Overlap
from axonn_ext.train.metrics import EvaluationMetrics, StepMetrics
from limits import HANG_SECONDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *DOCS.glob("*.md"),
)
INTERFACES = (DOCS / "interfaces.md").read_text()
ARCHITECTURE = (DOCS / "architecture.md").read_text()
GLOSSARY = (DOCS / "glossary.md").read_text()
RUN = README + "".join(
    (DOCS / f"{page}.md").read_text()
    for page in ("checkpoints", "hugging_face", "parallelize", "pipeline", "memory")
)
BLOCKS = re.findall(r"```python\n(.*?)```", RUN, re.DOTALL)


@pytest.mark.parametrize(
    "block", [0, 1, 2, *(pytest.param(block, marks=pytest.mark.slow) for block in range(3, 9))]
)
def test_python_of_the_pages_runs_on_two_ranks(tmp_path: Path, block: int):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[block])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--standalone", "--local-addr=127.0.0.1", str(script)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == (2, 3, 3, 1, 2, 7, 4, 1, 3)[block], run.stdout


def test_ten_lines_are_ten():
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 10


def test_the_pipeline_of_the_readme_is_the_example():
    example = (ROOT / "examples" / "pipeline.py").read_text()
    assert example.partition('"""\n\n')[2] == BLOCKS[2]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
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
    """A name without its ending stands for a file or a folder."""
    folders = "csrc|axonn_ext|cpp_tests|python_tests|tools|examples"
    missing = []
    for page in PAGES:
        for name in re.findall(rf"(?<![\w/])(?:{folders})/[\w./*-]+", page.read_text()):
            path = name.rstrip("./*")
            found = any(ROOT.glob(path)) or any(ROOT.glob(f"{path}.*")) or any(ROOT.glob(name))
            if not found:
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_glossary_is_sorted_and_has_each_term_once():
    terms = re.findall(r"^\* \*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)
    order = [re.sub(r"[^a-z0-9 ]", "", term.lower()) for term in terms]
    assert order == sorted(set(order))
    known = {term for entry in re.findall(r"\*\*(.+?)\*\*", GLOSSARY) for term in entry.split(", ")}
    entries = GLOSSARY.partition("\n* ")[2]
    assert set(re.findall(r"(?<!\*)\*([a-z][a-z -]*)\*(?!\*)", entries)) <= known


def test_overview_is_short_and_has_the_layers():
    assert len(ARCHITECTURE.splitlines()) <= 150
    source = (Path(__file__).parent / "test_repository.py").read_text()
    [layers] = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    ]
    exist = {path.name.partition(".")[0] for path in (ROOT / "axonn_ext").iterdir()}
    expected = [{part for part in layer if part in exist} for layer in layers]
    section = ARCHITECTURE.partition("## The layers of the package")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == [row for row in expected if row]


def test_python_of_the_planner_runs(capsys: pytest.CaptureFixture[str]):
    page = (DOCS / "planner.md").read_text()
    block = re.search(r"^    from axonn_ext import planner\n(?:    .*\n|\n)*", page, re.MULTILINE)
    assert block is not None
    exec(textwrap.dedent(block[0]), {})
    assert capsys.readouterr().out.count(" ") == 2


def row_of_op(spec: OpSpec) -> str:
    """With its signature, if it has a function in axonn_ext.ops."""
    signature = ""
    if spec.name in ops.__all__:
        parameters = inspect.signature(getattr(ops, spec.name)).parameters.values()
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        signature = str(inspect.Signature(bare))
    return f"| `{spec.name}{signature}` | {spec.traffic} | {spec.backward} |"


def test_tables_of_the_ops():
    """All that send something; those of axonn_ext.ops first."""
    section = INTERFACES.partition("## Ops")[2].partition("\n### ")[0]
    specs = [spec for spec in SPECS.values() if spec.traffic]
    specs.sort(key=lambda spec: spec.name not in ops.__all__)
    assert re.findall(r"^\| `.*", section, re.MULTILINE) == [row_of_op(spec) for spec in specs]


def test_grid_grammar():
    examples = re.findall(r"`--grid ([^`]+)`|`(\d+x\d+x\d+)`", INTERFACES)
    assert len(examples) == 2
    for example in examples:
        GridShape.parse("".join(example))


def test_fields_of_a_communication_record():
    section = INTERFACES.partition("## Communication trace")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert documented == [f.name for f in dataclasses.fields(CommunicationRecord)]


def test_keys_of_the_metrics():
    section = INTERFACES.partition("## Trainer files")[2].partition("\n## ")[0]
    step, _, evaluation = section.partition("evaluation\nlines carry")
    keys = lambda text: set(re.findall(r"`(\w+)`", text))  # noqa: E731
    assert keys(step) == {f.name for f in dataclasses.fields(StepMetrics)}
    evaluation = evaluation.partition(".")[0]
    assert keys(evaluation) == {f.name for f in dataclasses.fields(EvaluationMetrics)}


def test_options_of_overlap():
    section = INTERFACES.partition("## Overlap")[2].partition("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))
    assert documented == {f.name: str(f.default) for f in dataclasses.fields(Overlap)}


def test_environment_variables():
    documented = dict(re.findall(r"^\| `(AXONN_\w+)` \| (\d+) \|", INTERFACES, re.MULTILINE))
    defaults = settings.Settings()
    assert documented == {
        "AXONN_TIMEOUT_SECONDS": f"{defaults.timeout_seconds:.0f}",
        "AXONN_SYMMETRIC_MEMORY_BYTES": str(defaults.symmetric_memory_bytes),
        "AXONN_FUSED_NCCL_SMS": str(defaults.fused_nccl_sms),
        "AXONN_DEBUG_COLLECTIVES": str(int(defaults.debug_collectives)),
        "AXONN_DEBUG_TOKEN_IDS": str(int(defaults.debug_token_ids)),
    }
    assert all(name in (settings.__doc__ or "") for name in documented)
