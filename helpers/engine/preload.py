"""The imports of the server that runs are forked from. Nothing here may touch CUDA or start a thread."""

from helpers.engine import patches, worker

try:
    patches.import_flexgen()
except Exception as error:  # not only ImportError: a missing library is an OSError, another NumPy's ABI a ValueError
    worker.import_error = error  # each run reports it; raised here, it would end the server silently
