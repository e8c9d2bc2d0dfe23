"""schedule.py, which restates parts of csrc/core for Triton, against the compiled csrc/core."""

from __future__ import annotations

import importlib
import itertools
import subprocess
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from limits import HANG_SECONDS
from triton_interpreter import Interpreter

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cut:
    """Shards of `rows` rows on `world` ranks, with their chunks and tiles."""

    world: int
    rows: int
    chunks: int
    chunk_tile: int
    block: int
    tiles_across: int
    rank: int


CUTS = [
    Cut(world, rows, chunks, chunk_tile, block, across, rank)
    for (world, rank), (rows, chunks, chunk_tile, block), across in itertools.product(
        [(1, 0), (2, 1), (3, 0), (4, 2)],
        [
            (1, 1, 1, 1),
            (37, 3, 16, 16),
            (64, 4, 16, 8),
            (5, 4, 4, 2),
            (48, 2, 32, 16),
            (7, 3, 3, 3),
        ],
        [1, 3],
    )
]

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>

#include "core/symmetric/signal_layout.h"
#include "core/schedule/tile_schedule.h"

using namespace axonn;

int main(int argc, char** argv) {
  for (int i = 1; i + 6 < argc; i += 7) {
    const auto arg = [&](int at) { return std::atoll(argv[i + at]); };
    const auto world = arg(0), rows = arg(1), chunks = arg(2), across = arg(5), rank = arg(6);
    const auto block = arg(4);
    const comm::ChunkPlan plan{world * rows, world, chunks, arg(3)};
    const kernels::GatherTiles gather{plan, rank, block, across};
    for (int64_t t = 0; t < gather.num_tiles(); ++t) {
      const auto tile = gather.tile(t);
      const auto needed = gather.needed(t);
      std::printf("gather %lld %lld %lld %lld\n", (long long)tile.m, (long long)tile.n,
                  (long long)needed.first, (long long)needed.last);
    }
    const kernels::ScatterTiles scatter{plan, rank, block, across};
    const auto layout = comm::SignalLayout::of(plan, 1);
    for (int64_t t = 0; t < scatter.num_tiles(); ++t) {
      const auto place = scatter.place(t);
      const auto chunk = scatter.chunk(t);
      const auto flag = layout.flag(0, {rank, chunk.chunk});  // written from outside: the source
      std::printf("scatter %lld %lld %lld %lld %lld %lld\n", (long long)place.shard,
                  (long long)scatter.positions(t).begin, (long long)scatter.tile(t).n,
                  (long long)chunk.shard, (long long)comm::signal_offset_bytes(flag),
                  (long long)scatter.tiles_in(chunk));
    }
    for (int64_t c = 0; c < chunks; ++c) {
      const auto range = plan.chunk({rank, c});
      std::printf("chunk %lld %lld\n", (long long)(range.begin - rank * rows),
                  (long long)(range.end - rank * rows));
    }
  }
  for (const uint32_t value : {0u, 1u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu}) {
    for (const uint32_t target : {0u, 1u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu}) {
      std::printf("epoch %d\n", int{comm::epoch_reached(value, target)});
    }
  }
}
"""
EPOCHS = [0, 1, 0x7FFFFFFF, -0x80000000, -1]  # the same words, as Triton's int32


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The output of the C++ program."""
    folder = tmp_path_factory.mktemp("schedule")
    source, program = folder / "schedule.cpp", folder / "schedule"
    source.write_text(PROGRAM)
    compile_it = ["g++", "-std=c++20", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    subprocess.run(compile_it, check=True, timeout=HANG_SECONDS)
    numbers = [str(number) for cut in CUTS for number in astuple(cut)]
    output = subprocess.run([program, *numbers], check=True, capture_output=True, text=True)
    return [line.split() for line in output.stdout.splitlines()]


@pytest.fixture(scope="module")
def found(interpreter: Interpreter) -> list[list[str]]:
    """The results of the Triton functions, in the same order."""
    return interpreter.run(_run_schedule)


def _run_schedule() -> list[list[str]]:
    return importlib.import_module("triton_schedule_kernels").tables(CUTS, EPOCHS)


@pytest.mark.parametrize("kind", ["gather", "scatter", "chunk", "epoch"])
def test_the_schedule_is_that_of_the_core(expected, found, kind):
    want, got = ([line for line in lines if line[0] == kind] for lines in (expected, found))
    assert len(want) > 20
    assert got == want
