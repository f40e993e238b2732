"""The process of one repeat: FlexGen's own benchmark, measured as in `run_flexgen` and reported as data.

The launcher forks it from a server that has imported torch and FlexGen but not touched CUDA. It reports over a pipe, in
tuples: ("phase", name, moment), ("repeat", {...}), ("done", {...}), ("failed", {...}).
One process measures one generation. A second generation would start with warm kernels and allocator pools, which
FlexGen's own command starts without, and run up to 40 % faster.
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from helpers.engine import compressed_weights, core_speed, patches
from helpers.engine.direct_reader import DirectReader, PartQueue
from helpers.engine.page_cache import ColdReads, drop, write_back
from helpers.machine.profiles import MachineProfile
from helpers.models import OptModel
from helpers.predict.host_memory import copy_buffer_elements
from helpers.results import Failure, FailureKind
from helpers.sampling import disk_counter, own_read_bytes
from helpers.settings import RunSettings

if TYPE_CHECKING:
    from helpers.engine.emulated_gpu import EmulatedGpu

WARM_UP_PROMPT_LEN = 32  # run_flexgen's warm-up: this prompt, one token
PR_SET_PDEATHSIG = 1
import_error: Exception | None = None  # why the server could not import torch or FlexGen


@dataclass(frozen=True)
class Job:
    """Everything a worker needs."""

    settings_json: str
    environment: dict[str, str]  # the launcher's environment, which may have changed since the server started
    model: OptModel
    weights_path: Path
    prompt_ids: tuple[int, ...]
    offload_dir: Path
    log_path: Path
    disk_device: str | None
    emulation: MachineProfile | None
    origin_s: float  # of time.monotonic(): zero on the run's clock


def main(job: Job, pipe: Connection) -> None:
    """Run the job, report, and exit at once: FlexGen's copy threads would keep the process alive."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.setsid()  # its own process group, so that the launcher can end all of it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the server
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    try:
        log = os.open(job.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except FileNotFoundError:  # the launcher was interrupted and has cleaned up
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told = threading.Lock()

    def tell_failure(error: BaseException) -> None:
        if not told.acquire(blocking=False):
            threading.Event().wait()  # only the first error counts; reporting it ends all threads
        try:
            with suppress(OSError):  # the log may be on the disk that is full
                traceback.print_exception(error)
            mapped_bytes = psutil.Process().memory_info().vms
            pipe.send(("failed", {"kind": kind_of(error), "message": one_line(error)}, mapped_bytes))
        finally:
            os._exit(1)

    # FlexGen's copy threads die silently, and the run would wait for them forever.
    threading.excepthook = lambda thread: tell_failure(thread.exc_value or SystemExit())
    try:
        _run(job, pipe)
    except BaseException as error:
        tell_failure(error)
    os._exit(0)


def _end_with_the_launcher() -> None:
    """The server outlives the launcher as long as this process runs, so watch the launcher itself."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def failure_of(error: BaseException) -> Failure:
    """The error as stored in a record: its kind, the error in one line, and its traceback."""
    where = "".join(traceback.format_exception(error))
    return Failure(kind=kind_of(error), message=one_line(error), log_tail=where.rstrip())


def kind_of(error: BaseException) -> FailureKind:
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        return "gpu_oom"
    if "CUDA error: out of memory" in text:  # cudaHostAlloc; torch's allocator writes "CUDA out of memory"
        return "host_pin_oom"
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if no_memory or "can't allocate memory" in text or "failed to map segment" in text:  # torch's, the loader's
        return "host_oom"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return "error"


def one_line(error: BaseException) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _run(job: Job, pipe: Connection) -> None:
    if import_error:
        raise import_error
    settings = RunSettings.model_validate_json(job.settings_json)
    flex_opt = patches.import_flexgen()
    patches.mend()
    # tqdm's own lock is a named semaphore, which a process that exits at once would leave behind.
    flex_opt.tqdm.set_lock(threading.RLock())
    emulated = _emulated_gpu(job.emulation, flex_opt) if job.emulation else None
    with emulated.on_this_thread() if emulated else nullcontext():
        copy_threads = _prepare_copy_threads(settings, flex_opt, emulated)
        _benchmark(job, settings, flex_opt, copy_threads, emulated, pipe)


def _emulated_gpu(profile: MachineProfile, flex_opt: Any) -> EmulatedGpu:
    import torch
    from flexgen import compression, pytorch_backend

    from helpers.engine.emulated_gpu import EmulatedGpu, install, pace_flexgen

    torch.set_num_threads(1)  # steadier than threads that compete with other processes
    gpu = EmulatedGpu(profile)
    install(gpu)
    pace_flexgen(gpu, flex_opt, pytorch_backend, compression)
    return gpu


@dataclass(frozen=True)
class _CopyThreads:
    """FlexGen's copy threads as this run changes them; each releases `ready` once its buffer is pinned."""

    ready: threading.Semaphore
    reader: DirectReader | None


def _prepare_copy_threads(settings: RunSettings, flex_opt: Any, emulated: EmulatedGpu | None) -> _CopyThreads:
    """Make FlexGen's copy threads read the disk, and drop what they read, as the settings say."""
    from flexgen import pytorch_backend

    original_worker = pytorch_backend.copy_worker_func
    ready = threading.Semaphore(0)
    reader = DirectReader() if settings.disk_reader == "direct" else None
    cold = ColdReads() if settings.page_cache == "cold" else None
    largest_copy = copy_buffer_elements(settings)
    if settings.copy_buffer == "fit" or not largest_copy:  # pinning 8 GiB that nothing uses would take seconds
        pytorch_backend.GB = largest_copy  # a copy thread's buffer has `1 * GB` values of fp16
    if cold:
        cold.watch_memory_maps()
    if reader and emulated:
        reader.after_read = emulated.pacer.use_disk

    def on_thread() -> AbstractContextManager:
        return emulated.on_this_thread() if emulated else nullcontext()

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
    return _CopyThreads(ready, reader)


def _benchmark(
    job: Job,
    settings: RunSettings,
    flex_opt: Any,
    copy_threads: _CopyThreads,
    emulated: EmulatedGpu | None,
    pipe: Connection,
) -> None:
    """FlexGen's `run_flexgen`: the same devices, policy, warm-up, measured window and peak statistic."""
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
    disk.synchronize()  # the copy threads have written everything
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
    fastest_loop_s = None if emulated else core_speed.keep_busy()

    phase("measured")
    timers("generate").reset()
    if emulated:
        emulated.pacer.begin(makes_up=settings.debug_mode is None)
    read_before = disk_counter(job.disk_device), own_read_bytes()
    started_s = time.monotonic() - job.origin_s
    output_ids = lm.generate(inputs, max_new_tokens=work.gen_len, debug_mode=settings.debug_mode)
    ended_s = time.monotonic() - job.origin_s
    read_after = disk_counter(job.disk_device), own_read_bytes()
    if emulated:
        emulated.pacer.end()
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
                "core_speed": min(1.0, fastest_loop_s / core_speed.loop_s()) if fastest_loop_s else None,
                "paced_s": emulated.pacer.seconds_by_term() if emulated else {},
                "passes_behind": emulated.pacer.passes_behind if emulated else 0,
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
    """FlexGen's policy, with the same fields as in `run_flexgen`."""
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
    """FlexGen's benchmark input: one sentence, left-padded (OPT's padding token is 1), for each sequence."""
    padded = [1] * (prompt_len - len(prompt_ids)) + list(prompt_ids)
    return [padded] * count


def _weight_tensors(lm: Any) -> Iterator[Any]:
    """FlexGen's tensors of the weights, each on one device; a compressed weight has two: values and scales."""
    for home in lm.weight_home:
        for tensor in home.val:
            if tensor.device.device_type.name == "COMPRESSED":
                yield from tensor.data[:2]
            else:
                yield tensor


def _bytes_by_tier(lm: Any) -> dict[str, int]:
    """Bytes of weights on each tier, as FlexGen placed them."""
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
