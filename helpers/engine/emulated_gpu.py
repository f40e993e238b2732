"""An emulated GPU: FlexGen's CUDA code, unchanged, on a CPU, with a memory count and paced links.

A tensor on the emulated GPU says that its device is `cuda:0` and carries a CPU tensor inside. Each
operation on it runs on the inner tensor, so results are real; each copy between it and host memory
takes the time that the profile's host link takes; each storage behind it is counted, rounded up to
512 bytes as CUDA's caching allocator does. What `torch.cuda` offers FlexGen (streams, synchronise,
memory statistics) is stood in for; nothing of FlexGen has to know.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

MIB, GIB = 2**20, 2**30
ALLOCATION_ROUNDING = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")


class Link:
    """A link that moves one thing at a time at a fixed rate, whoever asks."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """Queue a transfer; returns the moment (time.perf_counter) at which it will have ended."""
        with self._lock:
            self.free_at = max(self.free_at, time.perf_counter()) + nbytes / self.bytes_per_s
            return self.free_at

    def wait_for(self, nbytes: int) -> None:
        """Transfer something and wait until it is over."""
        wait_until(self.reserve(nbytes))

    def drain(self) -> None:
        """Wait until everything queued so far has ended."""
        wait_until(self.free_at)


def wait_until(moment: float) -> None:
    """Sleep until `moment` on time.perf_counter's clock."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class MemoryCount:
    """Bytes of all storages alive on the emulated GPU, and their peak; no more than `capacity_bytes`."""

    def __init__(self, capacity_bytes: float = math.inf) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = 0
        self.peak = 0
        self._alive: set[int] = set()
        # Reentrant: a release can run inside an allocation, from the garbage collector.
        self._lock = threading.RLock()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now until nothing holds it; a storage counted already is left alone.

        Raises torch.OutOfMemoryError, in CUDA's words, for one that the GPU has no room for.
        """
        identity = storage._cdata
        with self._lock:
            if identity in self._alive:
                return
            nbytes = -(-storage.nbytes() // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
            if self.allocated + nbytes > self.capacity_bytes:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB. GPU 0 has a total capacity of "
                    f"{self.capacity_bytes / GIB:.2f} GiB of which "
                    f"{(self.capacity_bytes - self.allocated) / MIB:.2f} MiB is free."
                )
            self._alive.add(identity)
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._release, identity, nbytes)

    def _release(self, identity: int, nbytes: int) -> None:
        with self._lock:
            self._alive.discard(identity)
            self.allocated -= nbytes


class EmulatedGpu:
    """The one emulated GPU of a process: its memory count and its link to the host."""

    def __init__(self, host_link_bytes_per_s: float, capacity_bytes: float = math.inf) -> None:
        self.memory = MemoryCount(capacity_bytes)
        self.host_link = Link(host_link_bytes_per_s)

    def hold(self, inner: torch.Tensor) -> EmulatedCudaTensor:
        self.memory.add(inner.untyped_storage())
        return EmulatedCudaTensor(inner, self)

    def to_device(self, host: torch.Tensor) -> EmulatedCudaTensor:
        self.host_link.reserve(host.nbytes)
        return self.hold(host.clone())

    def to_host(self, tensor: EmulatedCudaTensor) -> torch.Tensor:
        """A host copy; the caller has it when the link has moved it, as a copy to host memory blocks."""
        self.host_link.wait_for(tensor.inner.nbytes)
        return tensor.inner.clone()


class EmulatedCudaTensor(torch.Tensor):
    """A tensor whose device is `cuda:0` and whose data is `inner`, on the CPU.

    It has no storage of its own: an operation that got past `__torch_function__` would fail, loudly.
    """

    inner: torch.Tensor
    gpu: EmulatedGpu

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: EmulatedGpu) -> EmulatedCudaTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=CUDA)

    def __init__(self, inner: torch.Tensor, gpu: EmulatedGpu) -> None:
        self.inner = inner
        self.gpu = gpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WHERE_IT_IS:
            return _WHERE_IT_IS[func]
        if func is torch.Tensor.copy_:
            return _copy(*args, **kwargs)
        if func is torch.Tensor.__setitem__:
            return _set_item(*args)
        if func is torch.Tensor.cpu:
            return args[0].gpu.to_host(args[0])
        if func is torch.Tensor.cuda:
            return args[0]
        emulated: list[EmulatedCudaTensor] = []

        def unwrap(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, EmulatedCudaTensor):
                emulated.append(tensor)
                return tensor.inner
            if tensor.dim() > 0 and func is not torch.Tensor.__getitem__:
                raise RuntimeError(f"{func.__name__}: expected all tensors on cuda:0, found one on cpu")
            return tensor

        inner_args, inner_kwargs = tree_map_only(torch.Tensor, unwrap, (args, kwargs))
        if "device" in inner_kwargs:
            inner_kwargs["device"] = CPU
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*inner_args, **inner_kwargs)
        if emulated and out is emulated[0].inner:  # an operation in place gives its tensor back
            return emulated[0]
        if isinstance(out, torch.Size):  # tree_map would make a plain tuple of it
            return out
        return tree_map_only(torch.Tensor, emulated[0].gpu.hold, out)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"the emulated GPU does not know {func}")


_WHERE_IT_IS = {torch.Tensor.device.__get__: CUDA, torch.Tensor.is_cuda.__get__: True}  # type: ignore[attr-defined]


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, EmulatedCudaTensor) else value


def _copy(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`dst.copy_(src)`, over the host link where the two are on different sides of it.

    The data is there at once; the time is on the link's clock, which `torch.cuda.synchronize` waits for.
    The link carries the destination's type: CUDA converts on the source's side first.
    """
    if isinstance(dst, EmulatedCudaTensor) != isinstance(src, EmulatedCudaTensor):
        gpu = dst.gpu if isinstance(dst, EmulatedCudaTensor) else src.gpu
        ended = gpu.host_link.reserve(_inner(dst).nbytes)
        if not non_blocking:
            wait_until(ended)
    _inner(dst).copy_(_inner(src))
    return dst


def _set_item(dst: torch.Tensor, index: Any, value: Any) -> None:
    """`dst[index] = value`, as a copy into the part that `index` selects."""
    if isinstance(value, torch.Tensor):
        part = _inner(dst)[index]
        _copy(dst.gpu.hold(part) if isinstance(dst, EmulatedCudaTensor) else part, value)
    else:
        _inner(dst)[index] = value


class CudaFactories(TorchFunctionMode):
    """Sends to the emulated GPU what names CUDA without holding a tensor on it: factories with
    `device=cuda`, `.cuda()` of a host tensor, pinning.

    A mode belongs to a thread: each thread that runs FlexGen's code enters one.
    """

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if EmulatedCudaTensor in types:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return self.gpu.to_device(args[0])
        if func is torch.Tensor.is_pinned:
            return getattr(args[0], "emulated_pin", False)
        if func is torch.Tensor.pin_memory:
            return _pinned(args[0].clone())
        pin = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
            return self.gpu.hold(func(*args, **kwargs))
        made = func(*args, **kwargs)
        return _pinned(made) if pin else made


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark host memory as pinned: the emulated GPU needs no real pinning, FlexGen asks which it is."""
    tensor.emulated_pin = True  # type: ignore[attr-defined]
    return tensor


class _Stream:
    """torch.cuda.Stream's stand-in: one queue is enough, the links keep the time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Event:
    """torch.cuda.Event's stand-in: what the host link had queued when it was recorded."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self._moment = self._gpu.host_link.free_at

    def synchronize(self) -> None:
        wait_until(self._moment)


def install(gpu: EmulatedGpu) -> None:
    """Make this process's `torch.cuda` the emulated GPU, for good; for a worker process only."""
    torch.cuda.Stream = _Stream
    torch.cuda.Event = lambda: _Event(gpu)
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: gpu.host_link.drain()
    torch.cuda.memory_allocated = lambda device=None: gpu.memory.allocated
    torch.cuda.max_memory_allocated = lambda device=None: gpu.memory.peak
    torch.cuda.max_memory_reserved = lambda device=None: gpu.memory.peak


@contextmanager
def on_this_thread(gpu: EmulatedGpu) -> Iterator[None]:
    """Let this thread run code that speaks of CUDA."""
    with torch.inference_mode(), CudaFactories(gpu):
        yield
