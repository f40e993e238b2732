"""Check that Python imports the FlexGen release that the patches are written for."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

RELEASE = "0.1.8"
RELEASE_SHA256 = "5b87034a2503b41b5151e505572dcd3708b595b27fbde14e21ca86c3cccdd2de"


@functools.cache
def other_flexgen() -> str | None:
    """The first digits of the SHA-256 of FlexGen's source files, with their folder, if they aren't the release's."""
    found = importlib.util.find_spec("flexgen")
    if not found or not found.submodule_search_locations:
        return None
    folder = Path(next(iter(found.submodule_search_locations)))
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return None if digest.hexdigest() == RELEASE_SHA256 else f"sha256 {digest.hexdigest()[:16]} in {folder}"
