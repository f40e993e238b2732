"""An emulated GPU: runs FlexGen's CUDA code unchanged on a CPU, with CUDA's memory statistics and paced rates.

A tensor on the emulated GPU reports `cuda:0` as its device and carries a CPU tensor inside. Each operation runs on the
inner tensor, so results are real. The pacer makes every matrix product and copy take as long as on the
emulated machine, and the allocator counts memory as CUDA's does. Stand-ins for the parts of `torch.cuda` that FlexGen
uses (streams, events, synchronization, memory statistics) complete it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helpers.engine.caching_allocator import CachingAllocator
from helpers.engine.pacing import Pacer
from helpers.machine.profiles import MachineProfile
from helpers.units import GIB

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")


class EmulatedGpu:
    """The one emulated GPU of a process."""

    def __init__(self, profile: MachineProfile) -> None:
        self.memory = CachingAllocator(profile.gpu_mem_gib * GIB)
        self.pacer = Pacer(profile)
        self._here = threading.local()

    @property
    def stream(self) -> object:
        """This thread's current stream; None is the default one."""
        return getattr(self._here, "stream", None)

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        before = self.stream
        self._here.stream = stream
        try:
            with self.pacer.side_stream():
                yield
        finally:
            self._here.stream = before

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Let this thread run code that uses CUDA."""
        with torch.inference_mode(), CudaFactories(self):
            yield

    def hold(self, inner: torch.Tensor) -> EmulatedCudaTensor:
        self.memory.add(inner.untyped_storage(), self.stream)
        return EmulatedCudaTensor(inner, self)

    def to_device(self, host: torch.Tensor) -> EmulatedCudaTensor:
        self.pacer.copy_to_device(host.nbytes, blocking=True)
        return self.hold(host.clone())

    def to_host(self, tensor: EmulatedCudaTensor) -> torch.Tensor:
        self.pacer.copy_to_host(tensor.held.nbytes, blocking=True)
        return tensor.held.clone()


class EmulatedCudaTensor(torch.Tensor):
    """A tensor whose device is `cuda:0` and whose data is `inner`, on the CPU.

    It has no storage of its own: an operation that bypasses `__torch_function__` fails.
    """

    gpu: EmulatedGpu

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: EmulatedGpu) -> EmulatedCudaTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=CUDA)

    def __init__(self, inner: torch.Tensor, gpu: EmulatedGpu) -> None:
        self.held = inner
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
        on_gpu = _first_emulated((*args, *kwargs.values()))
        unwrap = _unwrap_index if func is torch.Tensor.__getitem__ else _unwrap
        inner_args = [unwrap(argument) for argument in args]
        inner_kwargs = {name: unwrap(argument) for name, argument in kwargs.items()}
        if "device" in inner_kwargs:
            inner_kwargs["device"] = CPU
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PRODUCTS:
                out = _PRODUCTS[func](on_gpu.gpu.pacer, *inner_args, **inner_kwargs)
            else:
                out = func(*inner_args, **inner_kwargs)
        if isinstance(out, torch.Tensor):
            return on_gpu if out is on_gpu.held else on_gpu.gpu.hold(out)  # in-place operations return their tensor
        if isinstance(out, torch.Size):
            return out
        if isinstance(out, tuple | list):
            return type(out)([on_gpu.gpu.hold(part) if isinstance(part, torch.Tensor) else part for part in out])
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"the emulated GPU does not know {func}")


_WHERE_IT_IS = {torch.Tensor.device.__get__: CUDA, torch.Tensor.is_cuda.__get__: True}  # type: ignore[attr-defined]


def _first_emulated(values: Any) -> EmulatedCudaTensor:
    for value in values:
        if isinstance(value, EmulatedCudaTensor):
            return value
        if isinstance(value, tuple | list) and (found := _first_emulated(value)) is not None:
            return found
    return None  # type: ignore[return-value]


def _unwrap(value: Any) -> Any:
    if isinstance(value, EmulatedCudaTensor):
        return value.held
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        raise RuntimeError("expected all tensors on cuda:0, found one on cpu")
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_unwrap(part) for part in value)
    return value


def _unwrap_index(value: Any) -> Any:
    """Like `_unwrap`, but accepts index tensors on the host, as CUDA does."""
    if isinstance(value, tuple | list):
        return type(value)(_inner(part) for part in value)
    return _inner(value)


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, EmulatedCudaTensor) else value


def _linear(pacer: Pacer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = F.linear(_wide(x), _wide(weight), None if bias is None else _wide(bias)).to(x.dtype)
    pacer.multiply(2.0 * x.numel() * weight.shape[0], x.nbytes + weight.nbytes + out.nbytes)
    return out


def _bmm(pacer: Pacer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.bmm(_wide(a), _wide(b)).to(a.dtype)
    pacer.multiply(2.0 * a.numel() * b.shape[-1], a.nbytes + b.nbytes + out.nbytes)
    return out


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """fp16 as fp32: GPUs accumulate products of fp16 in fp32, and CPUs without fp16 units are faster so."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


_PRODUCTS: dict[Any, Any] = {F.linear: _linear, torch.bmm: _bmm}


def _copy(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`dst.copy_(src)`, over PCIe if only one of them is on the GPU.

    The data arrives at once; the pacer keeps the time. PCIe carries the destination's type: CUDA converts first.
    """
    if isinstance(dst, EmulatedCudaTensor):
        if not isinstance(src, EmulatedCudaTensor):
            dst.gpu.pacer.copy_to_device(dst.held.nbytes, not non_blocking)
    elif isinstance(src, EmulatedCudaTensor):
        src.gpu.pacer.copy_to_host(dst.nbytes, not non_blocking)
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
    """Sends calls that name CUDA without holding a tensor on it to the emulated GPU: factories with `device=cuda`,
    `.cuda()` of a host tensor, pinning.

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
    """Mark host memory as pinned: FlexGen asks for it, the emulated GPU doesn't need it."""
    tensor.emulated_pin = True  # type: ignore[attr-defined]
    return tensor


class _Stream:
    """torch.cuda.Stream's stand-in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Event:
    """torch.cuda.Event's stand-in, for copies to the GPU."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def record(self) -> None:
        self._moment_s = self._pacer.pcie_done_s()

    def synchronize(self) -> None:
        self._pacer.wait_until(self._moment_s)


def install(gpu: EmulatedGpu) -> None:
    """Replace this process's `torch.cuda` with the emulated GPU, permanently; for worker processes only."""
    stand_ins = {
        "Stream": _Stream,
        "Event": lambda: _Event(gpu.pacer),
        "stream": gpu.on_stream,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu.pacer.synchronize(),
        "memory_allocated": lambda device=None: gpu.memory.allocated,
        "max_memory_allocated": lambda device=None: gpu.memory.peak,
        "max_memory_reserved": lambda device=None: gpu.memory.peak_reserved,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def pace_flexgen(gpu: EmulatedGpu, flex_opt: Any, pytorch_backend: Any, compression: Any) -> None:
    """Pace FlexGen's steps that aren't tensor operations; for worker processes only."""
    pacer = gpu.pacer

    def before(owner: Any, name: str, tell: Any) -> None:
        original = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            tell(*args)
            return original(*args, **kwargs)

        setattr(owner, name, told)

    def new_pass(lm: Any, i: int, k: int) -> None:
        if k == 0:
            pacer.next_pass()

    def dequantise(device: Any, tensor: Any) -> None:
        if device.base_device.dev == CUDA:
            pacer.dequantise(2 * math.prod(tensor.shape))

    def attend(device: Any, q: Any, k: Any, *others: Any) -> None:
        if not k.is_cuda:
            pacer.attend_on_cpu(2 * 2 * k.numel())  # keys and values as fp16

    before(flex_opt.OptLM, "update_attention_mask", new_pass)
    before(flex_opt.OptLM, "compute_layer", lambda *step: pacer.launch_layer())
    before(compression.TorchCompressedDevice, "decompress", dequantise)
    before(pytorch_backend.TorchDevice, "_attention_value", attend)

    map_to_torch_tensor, synchronize = pytorch_backend.map_to_torch_tensor, pytorch_backend.TorchDisk.synchronize

    def map_paced(tensor: Any, indices: Any) -> Any:
        data = map_to_torch_tensor(tensor, indices)
        if tensor.device.device_type == pytorch_backend.DeviceType.DISK:
            pacer.use_disk(data.nbytes)
        return data

    def synchronize_paced(disk: Any) -> None:
        synchronize(disk)
        pacer.synchronize()

    pytorch_backend.map_to_torch_tensor = map_paced
    pytorch_backend.TorchDisk.synchronize = synchronize_paced
