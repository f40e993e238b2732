"""What the server that runs are forked from imports, once. Nothing here may touch CUDA or start a thread."""

from helpers.engine import mends, worker  # noqa: F401

mends.import_flexgen()
