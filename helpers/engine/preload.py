"""What the server that runs are forked from imports, once. Nothing here may touch CUDA or start a thread."""

from helpers.engine import patches, worker  # noqa: F401

patches.import_flexgen()
