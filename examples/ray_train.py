"""Runs axonn-ext train on the workers of Ray Train, on CPUs if the cluster has no GPUs.

    python examples/ray_train.py 16 --config /shared/my.toml --grid auto --out /shared/run

The number of ranks comes first; the rest goes to axonn-ext train. Its paths must be absolute, since
each worker has a folder of its own. If a worker fails, Ray starts all again, and the run resumes
from its last checkpoint. No cluster has run this yet; a test runs it on one machine.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RESUMES = ["--resume", "auto", "--checkpoint.interval", "500"]


def train(config: dict[str, list[str]]) -> None:
    # Ray's worker has a process group, so the rank is a process of its own. It meets the others in
    # that group's store, which rank 0's worker serves at MASTER_ADDR as torchrun's agent would.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [sys.executable, "-m", "axonn_ext", "train", *RESUMES, *config["arguments"]]
    subprocess.run(command, env=os.environ | agent, check=True)


if __name__ == "__main__":
    ray.init()
    has_gpus = "GPU" in ray.cluster_resources()
    TorchTrainer(
        train,
        train_loop_config={"arguments": sys.argv[2:]},
        torch_config=TorchConfig(backend="gloo"),  # the ranks have communicators of their own
        scaling_config=ScalingConfig(num_workers=int(sys.argv[1]), use_gpu=has_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ).fit()
