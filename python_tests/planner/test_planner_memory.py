"""The planner's memory of a rank, against the memory of the real modules.

States, and tensors kept by autograd, are checked on fake tensors and ranks, so for grids of any
size. Peaks are checked on real tensors. If the grid has several ranks, one of them runs here, and
its peers do not exist: collectives move nothing, but all buffers around them are real.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

from axonn_ext import Grid, clip_grad_norm_, models, overlap, sync_gradients
from axonn_ext.bench.loss import peak_bytes
from axonn_ext.models import Transformer
from axonn_ext.nn import DeferredWeightGradients
from axonn_ext.optim import AdamW
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.job import Job, Options, violations
from axonn_ext.planner.memory.activations import deferred_bytes_of, kept_of
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.memory.states import states_of
from axonn_ext.planner.step.parameters import parameters_by_axes, parameters_of_rank
from axonn_ext.planner.step.rank import Rank
from axonn_ext.spec.family import FAMILIES, find_family
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap, ParallelConfig
from fake_ranks import fake_ranks
from memory import peaks_beside_threads

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POLICIES = ("none", "attention", "every:2", "every:3", "every:3/4", "full")
MEGA = 10**6
# The workspace from torch's allocator on Hopper; on older GPUs it is 8 MiB.
# Source: PyTorch, aten/src/ATen/cuda/CUDABlas.cpp, the default of CUBLAS_WORKSPACE_CONFIG.
CUBLAS_WORKSPACE_BYTES = 32 << 20


@contextmanager
def absent_peers(num_ranks: int) -> Iterator[None]:
    """Makes this process one rank of a world without peers."""
    rank = num_ranks // 3
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(job: Job) -> Transformer:
    o = job.options
    parallel = ParallelConfig(
        layout=o.layout, heads_over_y=o.heads_over_y, save_gathered=o.save_gathered,
        reshard_after_forward=o.reshard_after_forward, recompute=o.recompute,
        algorithm="sequential",
    )  # fmt: skip
    return models.build(job.model, Grid(**job.grid.as_dict()), parallel, dtype=DTYPES[o.dtype])


def token_ids(job: Job) -> torch.Tensor:
    """The token ids of a (data, z) group's micro-batch; also used as labels."""
    return torch.zeros(job.rows, dtype=torch.long).view(-1, job.model.sequence_length)


CAPS = ("attention_softcap", "logits_softcap")


def random_jobs(count: int, seed: int | str, **chosen: object) -> list[Job]:
    """Legal jobs on up to a few hundred ranks, with random options except overlap and `chosen`."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < count:
        layout = draw.choice(["sharded", "replicated"])
        family = draw.choice(FAMILIES)
        traits, layers = find_family(family), draw.choice([1, 3])
        grouped, theirs = traits.grouped_query, traits.hugging_face
        window = draw.choice([24, 64] + [None] * (not traits.rotates_windows))
        model = ModelConfig(
            vocab_size=draw.choice([1024, 8191]), hidden_size=draw.choice([256, 1024]),
            num_layers=layers, num_heads=draw.choice([8, 16]),
            sequence_length=draw.choice([32, 128]), family=family,
            num_kv_heads=draw.choice([None, 4, 8]) if grouped else None,
            head_size=draw.choice([None, 128]) if grouped and theirs.has_head_dim else None,
            tie_embeddings=draw.random() < 0.5, window=window if theirs.window_key else None,
            window_layers=tuple(range(layers)) if theirs.full_layers else None,
            **{name: 5.0 for name in CAPS if name in theirs.keys and draw.random() < 0.6},
        )  # fmt: skip
        grid = GridShape(*(draw.choice([1, 2, 4]) for _ in range(3)), draw.choice([1, 4, 16]))
        options = Options(
            layout=layout, heads_over_y=layout == "sharded" and draw.random() < 0.3,
            save_gathered=draw.random() < 0.3, reshard_after_forward=draw.random() < 0.6,
            recompute=draw.choice(["none", "none", "attention", "every:2", "full"]),
            dtype=draw.choice(list(DTYPES)), overlap=None,
        )  # fmt: skip
        options = dataclasses.replace(options, **chosen)  # type: ignore[arg-type]
        job = Job(model, grid, options, 256)
        if not list(violations(job)):
            jobs.append(job)
    return jobs


MANY_RANKS = Job(
    ModelConfig(51200, 8192, 4, 64, 2048), GridShape(4, 4, 8, 4), Options(overlap=None), 256
)  # fmt: skip


def name_of(job: Job) -> str:
    options, defaults = dataclasses.asdict(job.options), dataclasses.asdict(Options())
    changed = [f"{k}={v}" for k, v in options.items() if v != defaults[k] and k != "overlap"]
    overlap = [] if job.options.overlap is None else ["overlap"]
    return " ".join([job.model.family, job.grid.short(), *changed, *overlap])


# --- What is exact -------------------------------------------------------------------------------


def num_bytes(tensors: object) -> int:
    return sum(t.nbytes for t in torch.utils._pytree.tree_leaves(tensors) if torch.is_tensor(t))


@pytest.mark.parametrize("job", [*random_jobs(8, seed=1), MANY_RANKS], ids=name_of)
def test_states_are_those_of_the_real_model_and_optimizer(job):
    with absent_peers(job.grid.size), FakeTensorMode():
        model, ids = build(job), token_ids(job)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        model.loss(ids, ids, 1.0).backward()
        optimizer.step()
        want = states_of(job)
        assert num_bytes(list(model.parameters())) == want.parameters
        assert num_bytes([p.grad for p in model.parameters()]) == want.gradients
        assert num_bytes(optimizer.state_dict()) == want.optimizer
    assert parameters_of_rank(job) * job.options.width == want.parameters


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_states_of_parts_of_random_jobs(zero: int, offload: str) -> None:
    """Masters and moments take memory for whole parts of buckets, including gaps."""
    for job in random_jobs(5, f"{zero} {offload}"):
        chosen = OptimizerOptions(zero, offload, max(1, parameters_of_rank(job) // 3))
        job = dataclasses.replace(job, options=dataclasses.replace(job.options, optimizer=chosen))
        if not job.updates_in_buckets:
            continue
        # Rank 0 has elements of every bucket; a later rank's part may be only padding.
        with fake_ranks(0, job.grid.size), FakeTensorMode():
            optimizer = adamw_of(job, build(job))
            kept = [t for p in optimizer.pieces for t in (p.master, p.exp_avg, p.exp_avg_sq)]
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
            optimizer.close()
        counts = 4 * sum(1 for _ in parameters_by_axes(Rank(job)))
        want = states_of(job, device="cpu")
        assert sum(storages.values()) == want.optimizer - counts, job
        assert states_of(job).optimizer == (0 if offload == "cpu" else want.optimizer)
        on_disk = dataclasses.replace(chosen, offload="disk")
        files = dataclasses.replace(job.options, optimizer=on_disk)
        files = dataclasses.replace(job, options=files)
        assert states_of(files, device="cpu").optimizer == counts


def saved_bytes(job: Job) -> int:
    """The bytes that autograd's nodes save in a forward pass, without parameters."""
    with absent_peers(job.grid.size), FakeTensorMode():
        model, ids = build(job), token_ids(job)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        storages = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                storages[storage._cdata] = storage  # kept alive, so that no address is reused
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.loss(ids, ids, 1.0)
        assert loss.requires_grad
        return sum(storage.nbytes() for storage in storages.values())


def jobs_of_each_policy() -> list[Job]:
    """Jobs of a family with everything that a policy may keep or recompute: rotary, head norms."""
    model = ModelConfig(1024, 256, 5, 8, 64, family="qwen3", num_kv_heads=4)
    policies = ("none", "attention", "every:2", "every:3", "every:3/4", "full")
    cube = GridShape(2, 2, 2)
    options = {"overlap": None, "reshard_after_forward": False}
    return [
        Job(model, grid, Options(recompute=policy, save_gathered=gathered, **options), 32)
        for policy in policies
        for grid, gathered in ((GridShape(), False), (cube, False), (cube, True))
    ]


@pytest.mark.parametrize(
    "chosen", [{"dtype": "fp16"}, *({"recompute": policy} for policy in POLICIES)], ids=str
)
def test_activations_of_random_jobs_with_each_option(chosen: dict[str, Any]) -> None:
    for job in random_jobs(5, str(chosen), **chosen):
        check_activations(job)


@pytest.mark.parametrize(
    "job", [*random_jobs(10, seed=2), *jobs_of_each_policy(), MANY_RANKS], ids=name_of
)
def test_activations_are_what_saved_tensor_hooks_count(job):
    check_activations(job)


def check_activations(job: Job) -> None:
    kept = kept_of(job).total(job.model.num_layers, job.options.recomputation)
    # torch's LayerNorm may keep the statistics of 16-bit rows in either dtype. The loss: 4 bytes.
    torchs = job.model.traits.norm.centred and job.grid.y == 1 and job.options.width == 2
    assert kept == pytest.approx(saved_bytes(job), rel=0.005 if torchs else 0, abs=4)


WAITING = ModelConfig(64, 32, 2, 4, 8, family="qwen3", num_kv_heads=2)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        (GridShape(), {"dtype": "bf16"}),
        (GridShape(2, 2, 2), {"dtype": "fp32"}),
        (GridShape(2, 2), {"save_gathered": True}),
        (GridShape(2, 2), {"layout": "replicated"}),
    ],
    ids=str,
)
def test_deferred_weight_gradients_wait_with_as_many_bytes(
    grid: GridShape, options: dict[str, Any]
) -> None:
    job = Job(WAITING, grid, Options(overlap=None, **options), 8)
    with absent_peers(grid.size):
        model, ids = build(job), token_ids(job)
        with DeferredWeightGradients(model).collecting() as later:
            loss = model.loss(ids, ids, 1.0)
        loss.backward()
        assert later.num_bytes == deferred_bytes_of(job, 0)


# --- Peaks ---------------------------------------------------------------------------------------


def adamw_of(job: Job, model: Transformer) -> AdamW:
    chosen = job.options.optimizer
    return AdamW(
        model, lr=1e-3, zero=chosen.zero, offload=chosen.offload,
        bucket_elements=chosen.bucket_elements,
    )  # fmt: skip


def run_steps(job: Job, model: Transformer, *, num_steps: int, has_peers: bool) -> int:
    """Returns the bytes of mapped files. Before the last step, the optimizer takes a step, so that
    its whole state exists. Without peers, gradients are not summed: the sums share memory with
    peers, or compare what they issue."""
    ids = token_ids(job).to(next(model.parameters()).device)
    orchestrator = None
    if job.options.overlap is not None:
        orchestrator = overlap.Orchestrator(model, job.options.overlap)
    optimizer = adamw_of(job, model)
    for index in range(num_steps):
        if index == num_steps - 1 and not job.updates_in_buckets:  # buckets exist from the start
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        optimizer.zero_grad()
        for part in range(job.options.micro_batches):
            more = part < job.options.micro_batches - 1
            with orchestrator.no_sync() if orchestrator and more else nullcontext():
                model.loss(ids, ids, 1.0).backward()
        if has_peers:
            orchestrator.sync_gradients() if orchestrator else sync_gradients(model)
            clip_grad_norm_(model, 1.0)
        elif orchestrator:
            orchestrator.end_step()
        optimizer.step()
    if orchestrator:
        orchestrator.close()
    optimizer.close()
    return mapped_bytes(optimizer)


def mapped_bytes(optimizer: AdamW) -> int:
    """The bytes of files with AdamW's state, which torch's profile counts although not memory."""
    kept = [t for p in optimizer.pieces for t in (p.master, p.exp_avg, p.exp_avg_sq)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept}
    return sum(s.nbytes() for s in storages.values() if s.filename is not None)


def peak_on_cpu(job: Job, *, has_peers: bool) -> tuple[int, int]:
    """Lower and upper bounds on the peak of building a model and training it, from torch's profile
    of its allocator.

    The bounds differ with peers, as the profiler does not see memory that gloo's threads free."""
    gc.collect()  # so that nothing of an earlier model is freed meanwhile
    # With overlap, the first step learns the order of weights, and keeps more of them.
    num_steps = 1 if job.options.overlap is None else 2
    mapped = 0

    def train() -> None:
        nonlocal mapped
        mapped = run_steps(job, build(job), num_steps=num_steps, has_peers=has_peers)

    least, most = peaks_beside_threads(train) if has_peers else (peak_bytes(train, "cpu"),) * 2
    return least - mapped, most - mapped  # mapped from the optimizer's creation to the end


BLOCKS = ModelConfig(1024, 256, 16, 8, 64)  # 13 M parameters: 204 MB of states in fp32
HEAD = ModelConfig(32768, 384, 1, 8, 16)
LLAMA_HEAD = ModelConfig(
    32768, 768, 1, 8, 16, family="llama", num_kv_heads=4, tie_embeddings=False
)  # fmt: skip
ALONE = Options(dtype="fp32", overlap=None)


def job_of(model: ModelConfig, grid: GridShape, rows: int, **options: object) -> Job:
    chosen = dataclasses.replace(ALONE, **options)
    sequences = rows * grid.data * grid.z * chosen.micro_batches // model.sequence_length
    return Job(model, grid, chosen, sequences)


QUICK = [
    job_of(BLOCKS, GridShape(), 192),
    job_of(HEAD, GridShape(), 128, recompute="full", micro_batches=2),
    job_of(LLAMA_HEAD, GridShape(x=2, y=2), 64),
]
DEEP = dataclasses.replace(BLOCKS, num_layers=64)
LARGE_BUCKETS, SMALL_BUCKETS = 16 << 20, 1 << 20  # elements
WIDE = dataclasses.replace(HEAD, hidden_size=1536)
THOROUGH = [
    job_of(BLOCKS, GridShape(), 512, dtype="bf16"),
    job_of(dataclasses.replace(BLOCKS, family="llama"), GridShape(), 512, recompute="full"),
    job_of(WIDE, GridShape(y=4), 256, recompute="full"),
    # Mostly activations. Of 16 blocks, every:3 recomputes the last one, other policies do not.
    *(job_of(dataclasses.replace(BLOCKS, family="qwen3"), GridShape(), 1024, recompute=policy)
      for policy in ("attention", "every:2", "every:3", "every:3/4")),
    job_of(DEEP, GridShape(x=2, z=2), 512, recompute="every:3", reshard_after_forward=False),
    job_of(DEEP, GridShape(x=2, z=2), 256, recompute="every:2", overlap=Overlap()),
    job_of(WIDE, GridShape(z=2, y=2), 256),
    job_of(LLAMA_HEAD, GridShape(x=2, z=2), 256, layout="replicated", dtype="bf16"),
    job_of(DEEP, GridShape(x=2, z=2), 512, save_gathered=True, reshard_after_forward=False),
    job_of(dataclasses.replace(LLAMA_HEAD, hidden_size=1536), GridShape(z=4, data=2), 64,
           overlap=Overlap(gathered_bytes=8 << 20), micro_batches=2),
    job_of(DEEP, GridShape(x=2, z=2), 256, overlap=Overlap()),
    # Mapped files are not memory of torch's allocator, nor private memory.
    *(job_of(DEEP, GridShape(), 256, dtype=dtype, optimizer=OptimizerOptions(0, offload))
      for dtype in ("bf16", "fp32") for offload in ("cpu", "disk")),
]  # fmt: skip


def zero_jobs() -> list[Job]:
    """Buckets larger and smaller than the parameters, one micro-batch and more."""
    jobs = []
    for zero, parts, elements, dtype, carried, offload in (
        (1, 1, LARGE_BUCKETS, "fp32", None, "none"),
        (1, 2, SMALL_BUCKETS, "bf16", None, "none"),
        (1, 1, SMALL_BUCKETS, "fp32", Overlap(), "none"),
        (1, 2, SMALL_BUCKETS, "bf16", Overlap(), "disk"),
        (2, 2, SMALL_BUCKETS, "fp32", None, "none"),
        (2, 1, LARGE_BUCKETS, "bf16", Overlap(), "none"),
        (2, 2, SMALL_BUCKETS, "fp32", Overlap(), "disk"),
        (2, 2, SMALL_BUCKETS, "bf16", Overlap(), "cpu"),
    ):
        chosen = OptimizerOptions(zero, offload, elements)
        jobs += [
            job_of(model, GridShape(data=2), 64, dtype=dtype, micro_batches=parts,
                   overlap=carried, optimizer=chosen)
            for model in (DEEP, WIDE)
        ]  # fmt: skip
    return jobs


# Without sums of products over gloo, whose threads would free memory unseen by the profile.
WITH_PEERS = [
    job_of(BLOCKS, GridShape(data=2), 64),
    job_of(HEAD, GridShape(data=2), 64, dtype="bf16", overlap=Overlap(bucket_bytes=4 << 20)),
    job_of(DEEP, GridShape(z=2, data=2), 64, overlap=Overlap()),
    *zero_jobs(),
]


def check_peak(job: Job, want: tuple[int, int]) -> None:
    least, most = want
    assert least >= 200 * MEGA
    got = memory_of(job, device="cpu").total
    off = [f"{got / peak - 1:+.1%} of {peak / MEGA:.0f} MB" for peak in want]
    print(f"{name_of(job)}: {' to '.join(off)}")
    assert 0.9 * least <= got <= 1.1 * most


def check_peak_of_one(job: Job) -> None:
    with absent_peers(job.grid.size):
        check_peak(job, peak_on_cpu(job, has_peers=job.grid.size == 1))


@pytest.mark.parametrize("job", QUICK, ids=name_of)
def test_peak_is_that_of_the_allocator(job):
    check_peak_of_one(job)


@pytest.mark.slow
@pytest.mark.parametrize("job", THOROUGH, ids=name_of)
def test_peak_is_that_of_the_allocator_thoroughly(job):
    check_peak_of_one(job)


def peak_among_peers(job: Job) -> tuple[int, int]:
    return peak_on_cpu(job, has_peers=True)


@pytest.mark.slow
@pytest.mark.parametrize("job", WITH_PEERS, ids=name_of)
def test_peak_is_that_of_ranks_with_peers(pool, job):
    for want in pool(job.grid.size).run(peak_among_peers, job):
        check_peak(job, want)


def peak_on_gpu(job: Job) -> int:
    gc.collect()
    model = build(job).cuda()
    torch.cuda.reset_peak_memory_stats()
    run_steps(job, model, num_steps=2, has_peers=True)
    return torch.cuda.max_memory_allocated()


GPU_MODEL = ModelConfig(32768, 1024, 12, 16, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("recompute", ["none", "attention", "every:2", "full"])
def test_peak_is_that_of_a_gpu(gpu_pool, dtype, recompute):
    job = job_of(GPU_MODEL, GridShape(), 8192, dtype=dtype, recompute=recompute)
    (want,) = gpu_pool(1).run(peak_on_gpu, job)
    assert memory_of(job).total + CUBLAS_WORKSPACE_BYTES == pytest.approx(want, rel=0.1)


# --- How it hangs together -----------------------------------------------------------------------

LARGE = ModelConfig(51200, 8192, 48, 64, 2048)


def large(**options: object) -> Job:
    return Job(LARGE, GridShape(4, 2, 8, 4), Options(**options), 512)


def test_items_add_up_and_the_largest_is_named():
    memory = memory_of(large())
    assert memory.total == sum(memory)
    assert getattr(memory, memory.largest) == max(memory)


def test_what_saves_memory_saves_memory():
    base = memory_of(large()).total
    policies = ("full", "every:3/4", "every:2", "every:4", "none")
    totals = [memory_of(large(recompute=policy)).total for policy in policies]
    assert totals == sorted(totals) and len(set(totals)) == len(totals)
    assert memory_of(large(recompute="attention")).total < base
    assert memory_of(large(micro_batches=4)).total < base
    assert memory_of(large(save_gathered=True)).total > base
    assert memory_of(large(layout="replicated")).total > base
    assert memory_of(large(overlap=Overlap(gathered_bytes=8 << 30))).total > base


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_only_the_cpu_sums_low_precision_in_copies_of_fp32(dtype):
    # The peak is in the MLP's first Linear, whose product [m, up / Gx] is reduce-scattered over y.
    job = large(recompute="full", micro_batches=4, dtype=dtype)
    product = job.rows * LARGE.up_size // job.grid.x
    copies = 4 * (product + product // job.grid.y)
    assert memory_of(job, device="cpu").total == memory_of(job).total + copies
    alone = Job(LARGE, GridShape(), Options(), 1)  # sums nothing
    for same in (large(dtype="fp32"), alone):
        assert memory_of(same, device="cpu") == memory_of(same)
    with pytest.raises(PlannerError, match="device must be one of cuda, cpu, got 'gpu'"):
        memory_of(alone, device="gpu")


def test_gathered_weights_stay_within_their_budget():
    budget = 600 << 20
    held = memory_of(large(overlap=Overlap(gathered_bytes=budget))).gathered_weights
    assert 0 < held <= budget
    kept = memory_of(large(overlap=None, reshard_after_forward=False)).gathered_weights
    whole = LARGE.num_parameters() * 2 / (4 * 2)
    assert math.isclose(kept, whole, rel_tol=0.01)


def test_micro_batches_add_no_activations():
    parts = {n: memory_of(dataclasses.replace(large(micro_batches=n), batch_size=512 * n))
             for n in (1, 2, 4)}  # fmt: skip
    assert parts[1].activations == parts[2].activations == parts[4].activations
    assert parts[1].gradients == 0
    assert parts[2].gradients == states_of(large()).gradients
