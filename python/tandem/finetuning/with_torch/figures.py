"""Figures of steps and runs by PyTorch, as the program's own runs have them. Imports torch."""
from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from .model import TorchModel, transformers_package

_LANES = {"compute": "compute", "host_to_device": "host to device", "device_to_host": "device to host", "cpu": "CPU"}


class StepFigures:
    """Times and bytes of a step, which begins when this is made."""

    def __init__(self, model: TorchModel) -> None:
        self._model, self._begin = model, time.monotonic()
        self._before = model.optimizer.engine.counters

    def metrics(self, targets: int) -> dict[str, Any]:
        """Keys of a line of metrics.jsonl."""
        seconds, before, now = time.monotonic() - self._begin, self._before, self._model.optimizer.engine.counters
        busy = {name: getattr(now.busy, lane) - getattr(before.busy, lane) for lane, name in _LANES.items()}
        busy["file"] = now.busy.file_read - before.busy.file_read + now.busy.file_write - before.busy.file_write
        h2d, d2h = now.bytes_host_to_device - before.bytes_host_to_device, now.bytes_device_to_host - before.bytes_device_to_host
        return {"step_seconds": seconds, "tokens_per_second": targets / seconds, "bound_by": max(busy, key=lambda name: busy[name]),
                "h2d_bytes": h2d, "d2h_bytes": d2h, "file_read_bytes": now.bytes_from_file - before.bytes_from_file,
                "file_write_bytes": now.bytes_to_file - before.bytes_to_file, "h2d_bytes_per_second": _rate(h2d, busy["host to device"]),
                "d2h_bytes_per_second": _rate(d2h, busy["device to host"]),
                "dram_bytes_per_second": (now.dram_bytes - before.dram_bytes) / seconds, "device_bytes": self._model.device.allocated_bytes}


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def summary_of(model: TorchModel) -> dict[str, Any]:
    """Keys of summary.json that are of model, machine and plan."""
    transformers = transformers_package("summary")
    engine, plan, device = model.optimizer.engine, model.optimizer.plan, model.device
    counters = engine.counters
    own = device.peak_bytes if device.info.kind == "host" else 0
    return {"model": type(model.module).__name__, "engine": "torch", "parameters": model.parameters, "device": device.info.name, "ranks": 1,
            "policy": plan.policy, "planned_device_bytes": plan.device_bytes, "peak_device_bytes": device.peak_bytes,
            "planned_host_bytes": plan.host_bytes, "peak_host_bytes": max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - own),
            "planned_file_bytes": plan.file_bytes,
            "updated_parameters": {"cpu": counters.parameters_updated_cpu, "gpu_streamed": counters.parameters_updated_streamed,
                                   "gpu_resident": counters.parameters_updated_resident},
            "bytes": {"h2d": counters.bytes_host_to_device, "d2h": counters.bytes_device_to_host, "file_read": counters.bytes_from_file,
                      "file_write": counters.bytes_to_file},
            "compute_key": f"{device.info.compute_key}; torch {torch.__version__}, {torch.get_num_threads()} threads; transformers "
                           f"{transformers.__version__}; python {sys.version.split()[0]}"}
