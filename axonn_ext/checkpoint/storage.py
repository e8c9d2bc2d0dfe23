"""How torch.distributed.checkpoint writes and reads our files.

Its own storage pickles the metadata, so that a checkpoint could run code when it is loaded. This
one has safetensors and JSON. It raises nothing while ranks plan together: each rank keeps its error
for the caller, who compares them, so that no rank waits for one that has failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import MappedFile, remove, write_tensors
from axonn_ext.checkpoint.manifest import DTYPES, Block, Manifest, StoredFile, StoredTensor
from axonn_ext.checkpoint.shards import Shard


class ShardSavePlanner(DefaultSavePlanner):
    """Plans who writes which block. A block that several ranks have is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Returns the block with this name."""
        return _tensor_of(self.state_dict, index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans which parts of which blocks of a checkpoint each rank reads."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keeps the blocks, of which the default would keep none: it knows tensors alone."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the block with this name."""
        return _tensor_of(self.state_dict, index)


def _tensor_of(shards: Mapping[str, Any], index: MetadataIndex) -> Tensor:
    shard = shards[index.fqn]
    assert isinstance(shard, Shard) and index.offset is not None
    return shard.blocks[tuple(index.offset)]


@dataclass(frozen=True)
class _Place:
    """Where a rank has written a block."""

    file_name: str
    file: StoredFile
    start: int


class FolderWriter(StorageWriter):
    """Writes one file for each rank that has something to write.

    folder  is made anew by rank 0
    error   what has failed on this rank; None: nothing
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._file_name = folder, f"rank-{rank:05d}.safetensors"
        self.error: str | None = None
        self.tensors: Mapping[str, StoredTensor] = {}  # of all ranks; on rank 0
        self.files: Mapping[str, StoredFile] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder, on rank 0, before any rank writes."""
        try:
            remove(self._folder)  # what an earlier job left half written
            self._folder.mkdir(parents=True)
        except OSError as error:
            self.error = f"cannot make {self._folder}: {error.strerror}"
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the blocks of this rank's plan."""
        results: list[WriteResult] = []
        if plan.items and self.error is None:
            try:
                results = self._write(plan, planner)
            except OSError as error:
                self.error = f"cannot write {self._folder / self._file_name}: {error}"
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[_key(item.index)] = tensor
        file, starts = write_tensors(self._folder / self._file_name, tensors)
        return [
            WriteResult(item.index, 0, _Place(self._file_name, file, starts[_key(item.index)]))
            for item in plan.items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collects, on rank 0, what all ranks have written."""
        places: dict[MetadataIndex, _Place] = {
            result.index: result.storage_data for rank in results for result in rank
        }
        files = {place.file_name: place.file for place in places.values()}
        self.files = dict(sorted(files.items()))
        tensors = {}
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            blocks = []
            for chunk in stored.chunks:
                place = places.get(MetadataIndex(name, chunk.offsets))
                if place is not None:  # None where its rank has an error
                    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                    blocks.append(Block(offsets, sizes, place.file_name, place.start))
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = StoredTensor(dtype, tuple(stored.size), tuple(blocks))
        self.tensors = tensors

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Returns False: this storage must be asked for."""
        return False


def _key(index: MetadataIndex) -> str:
    """Returns the name of a block inside a file."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


class FolderReader(StorageReader):
    """Reads the blocks of a checkpoint.

    error  what has failed on this rank; None: nothing
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self.error: str | None = None

    def read_metadata(self, *args: Any) -> Metadata:
        """Returns the manifest as the library has it."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[stored.dtype]),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                        for c in stored.blocks
                    ],
                )
                for name, stored in self._manifest.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what this rank needs from the files."""
        try:
            self._read(plan, planner)
        except CheckpointError as error:
            self.error = str(error)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: defaultdict[str, list[tuple[ReadItem, Block]]] = defaultdict(list)
        for item in plan.items:
            assert item.storage_index.index is not None
            name = item.storage_index.fqn
            block = self._manifest.tensors[name].blocks[item.storage_index.index]
            by_file[block.file].append((item, block))
        for file_name, wanted in by_file.items():
            file = MappedFile(self._folder, file_name, self._manifest)
            for item, block in wanted:
                offsets, lengths = list(item.storage_offsets), list(item.lengths)
                # Whole rows are contiguous in the file; of each, the columns are taken.
                rows = (offsets[0], offsets[0] + lengths[0]) if offsets else (0, 1)
                source = file.block(item.storage_index.fqn, block, rows)
                for dim in range(1, len(offsets)):
                    source = source.narrow(dim, offsets[dim], lengths[dim])
                target = planner.resolve_tensor(item)
                target.detach().copy_(source)
                planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: a reader reads one checkpoint."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Returns False: this storage must be asked for."""
        return False
