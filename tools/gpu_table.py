"""What gpu_check.py found, as people read it: a table on the terminal and in a file."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Line = tuple[str, str, str]  # what was run, how it went, the numbers


def table_of(content: Json) -> list[Line]:
    """Every line, the stages first."""
    return [
        *_stages(content["stages"]),
        *_summary(content),
        *(_link(row) for row in content["link"]),
        *(_gemm(row) for row in content["gemm"]),
        *(_tuned(row) for row in content["tune"]),
        *(_timed(row) for row in (*content["rows"], *content["published"])),
        *((item["what"], "not run", item["reason"]) for item in content["not_run"]),
    ]


def _stages(stages: Json) -> Iterator[Line]:
    for stage, found in stages.items():
        failed = found.get("failed")
        nothing = failed is None or (failed == 0 and found.get("passed") == 0)
        state = "not run" if nothing else f"{failed} failed" if failed else "passed"
        detail = f"{found['passed']} tests passed, " if "passed" in found else ""
        detail += "".join(f"{name}, " for name in found.get("failures", ()))
        yield stage, state, f"{detail}{found['seconds']} s"
        for run in found.get("runs", ()):
            detail = (
                f"loss {run['first_loss']:.3f} -> {run['last_loss']:.3f}, "
                f"{run['tokens_per_s']:,.0f} tokens/s, {run['tflops']:.1f} Tflop/s"
            )
            yield f"training, {run['grid']}", "measured", detail


def _summary(content: Json) -> Iterator[Line]:
    """The worst and the mean over all published shapes."""
    speedups = [row["speedup"] for row in content["tune"] if row["speedup"] is not None]
    if speedups:
        yield "tuned products", "measured", _range(speedups, "the library's call")
    timed: dict[tuple[str, str], dict[str, float]] = {}
    for row in content["published"]:
        if row["median_us"] is not None:
            case = f"{row['grid']} {row['shape']} {row['dtype']}"
            timed.setdefault((row["op"], case), {})[row["algorithm"]] = row["median_us"]
    for op in dict.fromkeys(op for op, _ in timed):
        for other in ("sequential", "torch-symm-mem"):
            speedups = [
                us[other] / us["auto"]
                for (name, _), us in timed.items()
                if name == op and "auto" in us and other in us
            ]
            if speedups:
                yield f"{op}, auto", "measured", _range(speedups, other)


def _range(speedups: list[float], other: str) -> str:
    return (
        f"{min(speedups):.3f} x as fast as {other} in the worst of {len(speedups)}, "
        f"{statistics.geometric_mean(speedups):.3f} x in the geometric mean"
    )


def _link(row: Json) -> Line:
    detail = (
        f"overlap {row['overlap_efficiency']:.0%} at {row['link_gbps']:.0f} GB/s, emulated link"
    )
    n = row["shape"]["N"]
    return f"link-overlap N={n} {row['algorithm']} {row['chunks']} chunks", "measured", detail


def _gemm(row: Json) -> Line:
    what = f"gemm {','.join(map(str, row['shape'].values()))} {row['dtype']} {row['layout']}"
    detail = (
        f"{row['fused_us']:,.0f} us, {row['fused_over_torch']:.3f} x torch.mm, "
        f"waiting {row['waiting_over_fused']:.3f} x"
    )
    return what, "measured", detail


def _tuned(row: Json) -> Line:
    what = f"{row['product_pass']} {row['m']},{row['n']},{row['k']} {row['layout']}"
    if row["speedup"] is None:
        return what, "not run", "too small to be asked about"
    detail = f"{row['winner']}, {row['winner_us']:,.0f} us, direct {row['direct_us']:,.0f} us"
    return what, "measured", f"{detail}, {row['speedup']:.3f} x as fast"


def _timed(row: Json) -> Line:
    what = f"{row['op']} {','.join(map(str, row['shape'].values()))} {row['dtype']} " + (
        f"x={row['grid']['x']} {row['algorithm']}"
    )
    time_us = "-" if row["median_us"] is None else f"{row['median_us']:,.0f} us"
    ratio = "" if row["ratio_to_floor"] is None else f", {row['ratio_to_floor']:.2f} x floor"
    return what, "right" if row["correct"] else "WRONG", time_us + ratio


def markdown_of(content: Json) -> str:
    """The table as a page, with what it was found on."""
    machine = ", ".join(f"{key} {value}" for key, value in content["machine"].items())
    lines = [f"# {content['machine']['gpu']}", "", machine, "", "| what | result | detail |",
             "|---|---|---|"]  # fmt: skip
    for line in table_of(content):
        cells = " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line)
        lines.append(f"| {cells} |")
    return "\n".join(lines) + "\n"


def show(content: Json) -> None:
    """The table on the terminal, with rich where it is installed."""
    lines = table_of(content)
    if importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table("what", "result", "detail", title=content["machine"]["gpu"], box=None)
        for line in lines:
            table.add_row(*line)
        Console().print(table, markup=False)
        return
    print(content["machine"]["gpu"])
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    for what, state, detail in lines:
        print(f"{what:<{widths[0]}}  {state:<{widths[1]}}  {detail}")
