"""Stands in for NVML: GPUs in trouble, and GPUs that others use, on a machine without any."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

GIB = 2**30


def error(number: int) -> pynvml.NVMLError:
    return pynvml.NVMLError(number)


class Gpu:
    """A GPU of 16 GiB. `broken`: the error that it answers with; `processes`: GiB that each holds, by its id."""

    def __init__(self, name: str = "Tesla T4", processes: dict[int, float] | None = None) -> None:
        self.name, self.processes = name, processes or {}
        self.used_gib = 1.0
        self.broken: int | None = None
        self.memory_error: int | None = None
        self.process_error: int | None = None


class FakeDriver:
    """NVML with these GPUs, named GPU-a, GPU-b, ... ; `init_error` is what its start answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, init_error: int | None = None) -> None:
        self.gpus = {f"GPU-{letter}": gpu for letter, gpu in zip("abcdef", gpus)}
        self.init_error = init_error
        self.open = 0
        for name in (
            "nvmlInit",
            "nvmlShutdown",
            "nvmlDeviceGetCount",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetHandleByUUID",
            "nvmlDeviceGetUUID",
            "nvmlDeviceGetName",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            monkeypatch.setattr(pynvml, name, getattr(self, name))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is restored, whoever sets it
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise error(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self._healthy(list(self.gpus)[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return self._healthy(uuid)

    def nvmlDeviceGetUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, uuid: str) -> str:
        return self.gpus[uuid].name

    def nvmlDeviceGetMemoryInfo(self, uuid: str) -> SimpleNamespace:
        gpu = self.gpus[self._healthy(uuid)]
        if gpu.memory_error is not None:
            raise error(gpu.memory_error)
        used = int(gpu.used_gib * GIB)
        return SimpleNamespace(total=16 * GIB, used=used, free=16 * GIB - used)

    def nvmlDeviceGetComputeRunningProcesses(self, uuid: str) -> list[SimpleNamespace]:
        if (number := self.gpus[uuid].process_error) is not None:
            raise error(number)
        held = self.gpus[uuid].processes.items()
        return [SimpleNamespace(pid=pid, usedGpuMemory=int(gib * GIB)) for pid, gib in held]

    def nvmlDeviceGetGraphicsRunningProcesses(self, uuid: str) -> list[SimpleNamespace]:
        raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _healthy(self, uuid: str) -> str:
        if (number := self.gpus[uuid].broken) is not None:
            raise error(number)
        return uuid
