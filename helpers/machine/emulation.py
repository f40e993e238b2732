"""The machine being emulated: a Colab T4 in slow motion."""

from __future__ import annotations

from helpers.machine.profiles import T4_COLAB, MachineProfile

_PACED = "the emulated machine's pace"
_NOT_PACED = "measured on two EPYC cores: the emulation does not pace it"

# opt-mini has 6 layers (OPT-1.3B: 50) and 4.5 MB of weights. These rates give its passes the proportions of OPT-1.3B's
# on the hand-in's T4: 30 ms on the GPU (T4: 61 ms), 4.5 times that to bring every weight over PCIe (T4: 4.5), and 32
# times as long again from disk (T4: 40). A CPU core computes a pass in a third of its time, so it keeps up under load.
_SLOW_MOTION = {
    "gpu_mem_gb_s": (0.68, f"{_PACED}: reading the weights takes 18 % of a decode pass, as on a T4"),
    "gpu_fp16_tflop_s": (0.0076, f"{_PACED}: a prefill of 64 tokens computes for 31 ms (T4: 512 tokens, 63 ms)"),
    "dequantize_gb_s": (0.0585, f"{_PACED}: 4-bit weights make a GPU pass 2.7 times longer, as on a T4"),
    "layer_overhead_us": (5000.0, f"{_PACED}: launching opt-mini's 6 layers takes 30 ms"),
    "h2d_gb_s": (0.0336, _PACED),
    "d2h_gb_s": (0.0336, _PACED),
    "cache_store_gb_s": (0.0336, f"{_PACED}, that of PCIe"),
    "cpu_attention_gb_s": (0.0025, f"{_PACED}: 1/13.5 of PCIe, as on a T4 host with two cores"),
    "disk_gb_s": (0.00105, _PACED),
    "direct_disk_gb_s": (0.00105, _PACED),
    "disk_write_gb_s": (0.00105, _PACED),
    "prefill_kernel_loading_s": (0.0, "no kernels to load"),
    "decode_kernel_loading_s": (0.0, "no kernels to load"),
    "cache_overhead_us": (1000.0, f"{_PACED}: two copies to launch"),
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
