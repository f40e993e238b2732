"""Figures from files: one module per format, `collect` for any mix of them."""

from helpers.analysis.readers.collect import About, Collected, collect, read, read_csv, read_jsonl

__all__ = ["About", "Collected", "collect", "read", "read_csv", "read_jsonl"]
