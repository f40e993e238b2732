"""The process of one run: FlexGen's own benchmark, measured as `run_flexgen` measures it, told as structure.

The launcher forks it from a server that has imported torch and FlexGen and has not touched CUDA. It speaks to the
launcher over a pipe, in tuples: ("phase", name, moment), ("repeat", {...}), ("core", seconds), ("done", {...}),
("failed", {...}).
One process measures one generation: a second one in it would find warm what FlexGen's own command finds cold
(kernels, the allocator's pools) and come out up to 40 % faster.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.engine import compressed_weights, patches
from helpers.engine.core_speed import Core
from helpers.engine.direct_reader import DirectReader, PartQueue
from helpers.engine.page_cache import ColdReads, drop, write_back
from helpers.machine.profiles import MachineProfile
from helpers.models import OptModel
from helpers.predict.host_memory import copy_buffer_elements
from helpers.results import Failure
from helpers.sampling import disk_counter, own_read_bytes
from helpers.settings import RunSettings

WARM_UP_PROMPT_LEN = 32  # run_flexgen's warm-up: this prompt, one token
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a worker needs to know."""

    settings_json: str
    environment: dict[str, str]  # who asks for the run may have changed it since the server started
    model: OptModel
    weights_path: Path
    prompt_ids: tuple[int, ...]
    offload_dir: Path
    log_path: Path
    disk_device: str | None
    emulation: MachineProfile | None
    fastest_loop_s: float | None  # a Core's, of the runs before
    origin_s: float  # of time.monotonic(); zero on the run's clock


def main(job: Job, pipe: Connection) -> None:
    """Run the job, tell the launcher, and end at once: FlexGen's copy threads would keep the process alive."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.setsid()  # a process group of its own: the launcher ends all of it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the server gone, nobody would end this process
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    try:
        log = os.open(job.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except FileNotFoundError:  # the launcher was interrupted, and has cleared up
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told = threading.Lock()

    def tell_failure(error: BaseException) -> None:
        if not told.acquire(blocking=False):
            threading.Event().wait()  # the first error is the cause, those after it are its noise: it ends all threads
        try:
            with suppress(OSError):  # the log may lie on the disk that is full
                traceback.print_exception(error)
            pipe.send(("failed", {"kind": kind_of(error), "message": one_line(error)}))
        finally:
            os._exit(1)

    # FlexGen's copy threads die silently, and the run then waits for them for ever.
    threading.excepthook = lambda thread: tell_failure(thread.exc_value or SystemExit())
    try:
        _run(job, pipe)
    except BaseException as error:
        tell_failure(error)
    os._exit(0)


def _end_with_the_launcher() -> None:
    """The server does not end before its children do: who started this run is to be watched for itself."""
    multiprocessing.parent_process().join()
    os._exit(1)


def failure_of(error: BaseException) -> Failure:
    """An error as a record tells it: its kind, itself in one line, and where it came from."""
    where = "".join(traceback.format_exception(error))
    return Failure(kind=kind_of(error), message=one_line(error), log_tail=where.rstrip())


def kind_of(error: BaseException) -> str:
    """The failure's kind: torch's allocator, pinned host memory, the disk, or anything else."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        return "gpu_oom"
    if "CUDA error: out of memory" in text:  # cudaHostAlloc: the GPU's own allocator speaks of "CUDA out of memory"
        return "host_pin_oom"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:  # torch's CPU allocator
        return "host_oom"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return "error"


def one_line(error: BaseException) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _run(job: Job, pipe: Connection) -> None:
    settings = RunSettings.model_validate_json(job.settings_json)
    flex_opt = patches.import_flexgen()
    patches.mend()
    # tqdm's own lock is a semaphore with a name, which a process that ends at once leaves behind.
    flex_opt.tqdm.set_lock(threading.RLock())
    with ExitStack() as thread:
        copy_threads = _prepare_disk_tier_and_gpu(job, settings, flex_opt, thread)
        _benchmark(job, settings, flex_opt, copy_threads, pipe)


@dataclass(frozen=True)
class _CopyThreads:
    """What this run changes of FlexGen's copy threads; `ready` is released by each once its buffer is pinned."""

    ready: threading.Semaphore
    reader: DirectReader | None


def _prepare_disk_tier_and_gpu(job: Job, settings: RunSettings, flex_opt: Any, thread: ExitStack) -> _CopyThreads:
    """Make FlexGen's copy threads read and drop as the settings ask, and pace its links where the GPU is emulated."""
    import torch
    from flexgen import pytorch_backend

    original_worker = pytorch_backend.copy_worker_func
    ready = threading.Semaphore(0)
    reader = DirectReader() if settings.disk_reader == "direct" else None
    cold = ColdReads() if settings.page_cache == "cold" else None
    emulated = None
    largest_copy = copy_buffer_elements(settings)
    if settings.copy_buffer == "fit" or not largest_copy:  # FlexGen pins 8 GiB unused too, which takes seconds
        pytorch_backend.GB = largest_copy  # a copy thread's buffer is `1 * GB` values of fp16
    if cold:
        cold.watch_memory_maps()
    if job.emulation:
        from helpers.engine import emulated_gpu

        torch.set_num_threads(1)  # the emulated GPU is one CPU core: steadier than two that others also want
        emulated = emulated_gpu.EmulatedGpu(job.emulation.h2d_gb_s * 1e9, job.emulation.gpu_mem_gib * 2**30)
        emulated_gpu.install(emulated)
        link = emulated_gpu.Link(job.emulation.disk_gb_s * 1e9)
        _pace_disk(pytorch_backend, link.wait_for)
        if reader:
            reader.after_read = link.wait_for

    def on_thread() -> AbstractContextManager:
        return emulated_gpu.on_this_thread(emulated) if emulated else nullcontext()

    def copy_worker_func(queue: Any, cuda_id: int) -> None:
        with on_thread(), ExitStack() as pinning:
            if not emulated:
                pinning.enter_context(patches.pinned_side_by_side())

            def is_pinned() -> None:
                pinning.close()
                ready.release()

            if reader:
                queue = PartQueue(queue, reader)
            after_copy = {"after_copy": cold.drop_opened} if cold else {}
            original_worker(patches.CopyQueue(queue, is_pinned, **after_copy), cuda_id)

    pytorch_backend.copy_worker_func = copy_worker_func
    compressed_weights.keep(pytorch_backend)
    patches.load_weights_side_by_side(pytorch_backend, flex_opt, on_thread)
    thread.enter_context(on_thread())
    return _CopyThreads(ready, reader)


def _pace_disk(pytorch_backend: Any, wait_for: Callable[[int], None]) -> None:
    """Let each read and write of the disk tier take the time that the emulated disk takes."""
    original = pytorch_backend.map_to_torch_tensor

    def map_to_torch_tensor(tensor: Any, indices: Any) -> Any:
        data = original(tensor, indices)
        if tensor.device.device_type == pytorch_backend.DeviceType.DISK:
            wait_for(data.nbytes)
        return data

    pytorch_backend.map_to_torch_tensor = map_to_torch_tensor


def _benchmark(job: Job, settings: RunSettings, flex_opt: Any, copy_threads: _CopyThreads, pipe: Connection) -> None:
    """FlexGen's `run_flexgen`: the same devices, policy, warm-up, window and peak statistic."""
    import torch
    from flexgen.opt_config import OptConfig
    from flexgen.timer import timers

    work = settings.workload

    def phase(name: str) -> None:
        pipe.send(("phase", name, time.monotonic() - job.origin_s))

    phase("context")
    torch.cuda.synchronize()

    phase("pinning")
    gpu = flex_opt.TorchDevice("cuda:0")
    cpu = flex_opt.TorchDevice("cpu")
    disk = flex_opt.TorchDisk(str(job.offload_dir))
    mixed = flex_opt.TorchMixedDevice([gpu, cpu, disk])
    env = flex_opt.ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=mixed)
    for _ in disk.copy_threads:
        copy_threads.ready.acquire()

    phase("weights")
    lm = flex_opt.OptLM(_opt_config(job.model, OptConfig), env, str(job.weights_path), _policy(settings, flex_opt))
    disk.synchronize()  # what copy threads still write is there, and whole
    stored = _bytes_by_tier(lm)
    on_disk = [tensor for tensor in _weight_tensors(lm) if tensor.device is disk]
    if settings.page_cache == "cold":
        for tensor in on_disk:
            write_back(tensor.data)
            drop(tensor.data)
    if copy_threads.reader:
        copy_threads.reader.take_over(disk, on_disk)

    phase("warm-up")
    lm.generate(_prompts(job.prompt_ids, WARM_UP_PROMPT_LEN, work.effective_batch), max_new_tokens=1)

    inputs = _prompts(job.prompt_ids, work.prompt_len, work.effective_batch)
    core = Core(job.fastest_loop_s)
    if settings.device == "cuda":
        core.wait_for_full_speed()

    phase("measured")
    timers("generate").reset()
    core.look()
    read_before = disk_counter(job.disk_device), own_read_bytes()
    started_s = time.monotonic() - job.origin_s
    output_ids = lm.generate(inputs, max_new_tokens=work.gen_len, debug_mode=settings.debug_mode)
    ended_s = time.monotonic() - job.origin_s
    read_after = disk_counter(job.disk_device), own_read_bytes()
    core.look()
    pipe.send(("core", core.fastest_loop_s))
    pipe.send(
        (
            "repeat",
            {
                "started_s": started_s,
                "ended_s": ended_s,
                "pass_latencies_s": [float(cost) for cost in timers("generate").costs],
                "peak_gpu_mem_gib": gpu.mem_stats()[1] / 2**30,
                "disk_read_bytes": _difference(read_before[0], read_after[0]),
                "own_read_bytes": _difference(read_before[1], read_after[1]),
                "timers_s": _breakdown(timers) if settings.debug_mode == "breakdown" else {},
                "core_speed": core.speed,
            },
        )
    )
    phase("end")
    pipe.send(
        (
            "done",
            {
                "generated_tokens": [] if settings.debug_mode else output_ids[:, work.prompt_len :].tolist(),
                "bytes_by_tier": stored,
                "peak_gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
                "notes": copy_threads.reader.notes if copy_threads.reader else [],
            },
        )
    )


def _opt_config(model: OptModel, config_type: Any) -> Any:
    return config_type(
        name=model.name,
        num_hidden_layers=model.num_layers,
        max_seq_len=model.max_positions,
        hidden_size=model.hidden_size,
        input_dim=model.hidden_size,
        n_head=model.num_heads,
        ffn_embed_dim=4 * model.hidden_size,
        vocab_size=model.vocab_size,
    )


def _policy(settings: RunSettings, flex_opt: Any) -> Any:
    """FlexGen's policy, field by field as `run_flexgen` makes it."""
    four_bits = {"num_bits": 4, "group_size": 64, "symmetric": False}
    return flex_opt.Policy(
        settings.workload.gpu_batch_size,
        settings.workload.num_gpu_batches,
        *settings.split.percent,
        overlap=settings.overlap,
        sep_layer=True,
        pin_weight=settings.pin_weight,
        cpu_cache_compute=settings.cpu_cache_compute,
        attn_sparsity=settings.attn_sparsity,
        compress_weight=settings.compress_weight,
        comp_weight_config=flex_opt.CompressionConfig(group_dim=0, **four_bits),
        compress_cache=settings.compress_cache,
        comp_cache_config=flex_opt.CompressionConfig(group_dim=2, **four_bits),
    )


def _prompts(prompt_ids: tuple[int, ...], prompt_len: int, count: int) -> list[list[int]]:
    """FlexGen's benchmark input: one sentence, padded on the left (OPT's padding is 1), once per sequence."""
    padded = [1] * (prompt_len - len(prompt_ids)) + list(prompt_ids)
    return [padded] * count


def _weight_tensors(lm: Any) -> Iterator[Any]:
    """FlexGen's own tensors of the weights, each on one device; a compressed one is its values and its scales."""
    for home in lm.weight_home:
        for tensor in home.val:
            if tensor.device.device_type.name == "COMPRESSED":
                yield from tensor.data[:2]
            else:
                yield tensor


def _bytes_by_tier(lm: Any) -> dict[str, int]:
    """Bytes of the weights where FlexGen has put them."""
    totals = {"gpu": 0, "cpu": 0, "disk": 0}
    tier_of = {"CUDA": "gpu", "CPU": "cpu", "DISK": "disk"}
    for tensor in _weight_tensors(lm):
        totals[tier_of[tensor.device.device_type.name]] += int(tensor.bytes)
    return totals


def _breakdown(timers: Any) -> dict[str, list[float]]:
    names = ["load_weight"]
    for stage in ("prefill", "decoding"):
        names += [f"{what}_{stage}" for what in ("load_cache", "store_cache", "compute_layer")]
    return {name: [float(cost) for cost in timers(name).costs] for name in names}


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
