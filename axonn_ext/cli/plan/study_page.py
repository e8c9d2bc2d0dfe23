"""Writes the tables and the chart of docs/published.md.

`python -m axonn_ext.cli.plan.study_page docs/published.md` predicts all studies again and replaces
the text between the page's marks, and images/weak_scaling.png next to the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from axonn_ext.cli.plan.plot import plot_study
from axonn_ext.cli.plan.study_tables import markdown
from axonn_ext.planner.published.retold import retell
from axonn_ext.planner.published.runs import between_marks, held_out_error
from axonn_ext.planner.published.study import load_study, study_names


def with_study(document: str, name: str, section: str) -> str:
    """Returns the document with a study's section between its marks."""
    begin, end = (f"<!-- study {name}: {edge} -->" for edge in ("begin", "end"))
    return between_marks(document, section, begin, end)


def _main(page: Path) -> None:
    document = page.read_text()
    for name in study_names():
        study = load_study(name)
        told = retell(study)
        document = with_study(document, name, markdown(study, told))
        if study.series:
            picture = page.parent / "images" / "weak_scaling.png"
            plot_study(study, told, picture, error=held_out_error())
    page.write_text(document)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
