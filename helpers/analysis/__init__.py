"""Ratios, bottlenecks, classes and the worded answers, from points alone: nothing here starts a run."""

from helpers.analysis.batch_size import q2
from helpers.analysis.disk_io import q4
from helpers.analysis.disk_readers import disk_readers
from helpers.analysis.disk_reads import disk_reads, disk_reads_markdown
from helpers.analysis.offload_sweep import q1
from helpers.analysis.weight_compression import q3

__all__ = ["disk_readers", "disk_reads", "disk_reads_markdown", "q1", "q2", "q3", "q4"]
