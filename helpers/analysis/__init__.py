"""Ratios, bottlenecks, classes and worded answers from figures alone: nothing here starts a run."""

from helpers.analysis import batch_size, disk_io, disk_readers, disk_reads, offload_sweep, weight_compression

__all__ = ["batch_size", "disk_io", "disk_readers", "disk_reads", "offload_sweep", "weight_compression"]

BY_QUESTION = {"q1": offload_sweep, "q2": batch_size, "q3": weight_compression, "q4": disk_io}
