"""Training runs in the test's own process."""

from __future__ import annotations

from pathlib import Path

import torch

from axonn_ext.ranks.launch.place import Process
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.metrics import RunMetrics, read_metrics
from axonn_ext.train.worker import run_worker
from commands import SMALL


def train_here(
    folder: Path, *, grid: str = "x=1", profile: bool = False, **overrides: object
) -> RunMetrics:
    """Trains a small model in this process; returns the metrics. None leaves a key out."""
    pairs = {key.replace("__", "."): value for key, value in overrides.items()}
    texts = [
        Override(key, str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in (SMALL | pairs).items()
        if value is not None
    ]
    threads = torch.get_num_threads()
    try:
        config = load_config(None, grid=grid, overrides=tuple(texts))
        run_worker(config, Process(), folder=folder, overwrite=False, profile=profile)
    finally:
        torch.set_num_threads(threads)
    return read_metrics(folder)
