"""The machine that the emulated GPU plays: a Colab T4 in slow motion."""

from __future__ import annotations

from helpers.machine.profiles import T4_COLAB, MachineProfile

_PACED = "the emulated machine's pace"
_NOT_PACED = "measured on two EPYC cores: the emulation does not pace it"

# opt-mini has 1/338 of OPT-1.3B's weights and a fifth of its layers. The rates below make its passes stand to each
# other as OPT-1.3B's do on the hand-in's T4: a pass takes 30 ms on the GPU (T4: 61 ms), 4.5 times that over PCIe with
# every weight on the CPU (T4: 4.5), and 33 times as long again with every weight on disk (T4: 40).
_SLOW_MOTION = {
    "gpu_mem_gb_s": (1.4, f"{_PACED}: reading the weights takes 18 % of a decode pass, as on a T4"),
    "gpu_fp16_tflop_s": (0.03, f"{_PACED}: a prefill of 128 tokens computes for 31 ms (T4: 512 tokens, 63 ms)"),
    "dequantize_gb_s": (0.108, f"{_PACED}: 4-bit weights make a GPU pass 2.7 times longer, as on a T4"),
    "layer_overhead_us": (3000.0, f"{_PACED}: launching opt-mini's 10 layers takes 30 ms"),
    "h2d_gb_s": (0.2, _PACED),
    "d2h_gb_s": (0.2, _PACED),
    "cache_store_gb_s": (0.2, f"{_PACED}, that of PCIe"),
    "cpu_attention_gb_s": (0.0046, f"{_PACED}: 1/13.5 of PCIe, as on a T4 host with two cores"),
    "disk_gb_s": (0.03, _PACED),
    "direct_disk_gb_s": (0.03, _PACED),
    "disk_write_gb_s": (0.03, _PACED),
    "prefill_kernel_loading_s": (0.0, "no kernels to load"),
    "decode_kernel_loading_s": (0.0, "no kernels to load"),
    "cache_overhead_us": (600.0, f"{_PACED}: two copies to launch"),
    "file_overhead_us": (0.0, "included in disk_gb_s"),
    "host_copy_gb_s": (4.0, _NOT_PACED),
    "page_cache_gb_s": (4.0, _NOT_PACED),
    "relay_gb_s": (1.0, _NOT_PACED),
    "gpu_overhead_gib": (0.0, "no CUDA context"),
    "cublas_workspace_mib": (0.0, "no cuBLAS"),
    "host_overhead_gib": (0.5, "a process with torch, without CUDA"),
    # Reads of the disk tier keep their pace wherever the data comes from, as if there were no page cache.
    "mapped_files_gib": (T4_COLAB.host_ram_gib, "the emulated disk has no page cache"),
}

EMULATED_T4 = MachineProfile.model_validate(
    T4_COLAB.model_dump()
    | {"name": "slow-motion T4"}
    | {field: value for field, (value, _) in _SLOW_MOTION.items()}
    | {"sources": T4_COLAB.sources | {field: source for field, (_, source) in _SLOW_MOTION.items()}}
)
