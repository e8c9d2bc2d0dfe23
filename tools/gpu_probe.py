"""Describes this machine's GPUs and this checkout's compiled modules, in a JSON file.

    gpu_probe.py FILE

It runs as a separate process, so a hanging driver or a crashing module takes nothing else down.
`problem` says why nothing can run here, `extension` why the compiled modules cannot be used; both
are empty if all is well. Exit status: 0 with a GPU, 2 without one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Commands whose output helps people explain the measured times; it goes to the log.
SURROUNDINGS = (
    "nvidia-smi", "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE", "nvidia-smi topo -m", "lscpu",
    "free -g", "df -h . /tmp /dev/shm", "nvcc --version", "c++ --version",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """The GPUs and the software, but not the package, which may not be built yet."""
    if not importlib.util.find_spec("torch"):
        return {"problem": f"{sys.executable} has no torch"}
    import torch

    if torch.version.hip is not None:
        text = f"torch {torch.__version__} is built for ROCm, and these are NVIDIA's GPUs' checks"
        return {"problem": text}
    if not torch.cuda.is_available():
        cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return {"problem": f"torch {torch.__version__} ({cuda}) sees no GPU on this machine"}
    count = torch.cuda.device_count()
    versions = {torch.cuda.get_device_capability(device) for device in range(count)}
    torch.ones(8, device="cuda").sum().item()  # raises if the GPU does not work
    return {
        "problem": "",
        "gpu": torch.cuda.get_device_name(),
        "gpus": count,
        "architectures": [f"{major}.{minor}" for major, minor in sorted(versions)],
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "python": sys.version.split()[0],
    }


def why_no_extension(architectures: list[str]) -> str:
    """Why the compiled modules of this checkout cannot be used on GPUs of these versions."""
    try:
        from axonn_ext.kernels import extension
    except ImportError as error:
        return str(error)
    for name, module in (("_cuda", extension.cuda), ("_cuda_sm90", extension.cuda_sm90)):
        if module is None and (name == "_cuda" or "9.0" in architectures):
            why = extension.left_out().get(name, "its file is missing")
            return f"axonn_ext.{name} is not built: {why}"
    assert extension.cuda is not None
    built = str(extension.cuda.build_info()["architectures"])
    names = {f"sm_{version.replace('.', '')}" for version in architectures}
    if not names <= {name.rstrip("af") for name in built.split(",")}:
        return f"axonn_ext._cuda is built for {built}, and these GPUs are {', '.join(names)}"
    return ""


def has_fused() -> bool:
    """Whether the algorithm "fused" runs on these GPUs."""
    import torch

    import axonn_ext.ops  # noqa: F401  registers torch.ops.axonn

    device = torch.device("cuda", torch.cuda.current_device())
    return not torch.ops.axonn._why_no_fused_here(device, torch.bfloat16, 1, False)


def write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")


def main(path: Path) -> int:
    write(path, {"problem": "torch did not find out in time what GPUs there are"})
    found = describe()
    if found["problem"]:
        write(path, found)
        return 2
    write(path, {**found, "extension": "loading it did not end, or ended the process"})
    found["extension"] = why_no_extension(found["architectures"])
    if not found["extension"]:
        found["fused"] = has_fused()
    write(path, found)
    for command in SURROUNDINGS:
        print("$", command, flush=True)
        subprocess.run(command, shell=True, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
