# What csrc/ops/cuda/bindings.cpp defines, where the CUDA parts are built.

from collections.abc import Sequence, Set

import torch

def build_info() -> dict[str, str]: ...
def gemm_candidates_sm90() -> list[tuple[tuple[int, int, int], tuple[int, int], int]]: ...
def release_workspaces() -> None: ...
def symmetric_workspace_bytes() -> int: ...
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    wait_chunks: int = 0,
    pad: torch.Tensor | None = None,
    tile: str = "",
) -> torch.Tensor: ...
def gemm_tiles(a: torch.Tensor, b: torch.Tensor) -> list[tuple[str, float]]: ...

PAD_BYTES: int

class CommunicatorWork:
    def wait(self) -> None: ...

class Communicator:
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> CommunicatorWork: ...
    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> CommunicatorWork: ...
    def all_reduce(self, output: torch.Tensor, input: torch.Tensor) -> CommunicatorWork: ...

class CommunicatorGrid:
    def __init__(
        self,
        group_name: str,
        axes: Sequence[tuple[str, Sequence[int]]],
        *,
        device: int,
        max_ctas: int,
        compare_calls: bool,
        timeout_seconds: float,
    ) -> None: ...
    def axis(self, name: str) -> Communicator: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

class VirtualRanks:
    def __init__(
        self,
        num_ranks: int,
        *,
        workspace_bytes: int,
        timeout_seconds: float = 10.0,
        device: int = 0,
    ) -> None: ...
    def all_gather_matmul(
        self,
        shards: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        *,
        arriving: str = "rows",
        absent: Set[int] = ...,
    ) -> list[torch.Tensor]: ...
    def matmul_sum(
        self,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        *,
        everywhere: bool = False,
        sum_broadcast: str = "auto",
        absent: Set[int] = ...,
    ) -> list[torch.Tensor]: ...
    def run_apart(self, *, max_delay_cycles: int = 0, seed: int = 0) -> None: ...
    def join(self) -> None: ...
    def failure(self) -> tuple[int, int, int, int, int] | None: ...

class EmulatedLink:
    def __init__(
        self,
        num_ranks: int,
        *,
        workspace_bytes: int,
        timeout_seconds: float = 10.0,
        device: int = 0,
    ) -> None: ...
    def all_gather_matmul(
        self, shards: Sequence[torch.Tensor], b: torch.Tensor
    ) -> torch.Tensor: ...
