"""Stamp the repository in Open-in-Colab badges and set-up cells: `python -m helpers.setup.badges [OWNER/NAME]`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from helpers import paths
from helpers.errors import Refused

# GitHub account names can't contain an underscore, so an unstamped badge points to nobody's code.
UNSTAMPED = "YOUR_NAME/offload-lab"
REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+"

LINK = re.compile(r"(https://colab\.research\.google\.com/github/)([^/\s)\"]+/[^/\s)\"]+)(/blob/main/)([^\s)\"\\]+)")
# In the first cell, a string within the notebook's JSON.
CELL = re.compile(r"(repository = \\\")([^\"\\]*)(\\\")")


def badge(repository: str, path: str) -> str:
    """The Markdown of a badge that opens a notebook, by its path in the repository, in Colab."""
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![Open in Colab]({image})](https://colab.research.google.com/github/{repository}/blob/main/{path})"


def stamp(repository: str, root: Path = paths.ROOT) -> list[Path]:
    """Have every badge and first cell point to `repository`; returns the files that changed.

    Raises Refused unless it is an `owner/name` on GitHub.
    """
    if not re.fullmatch(REPOSITORY, repository):
        raise Refused(f"repository {repository!r}: not OWNER/NAME as GitHub has it")
    changed = []
    for path in (root / "README.md", *sorted((root / "notebooks").glob("*.ipynb"))):
        before = path.read_text(encoding="utf-8")
        text = LINK.sub(rf"\g<1>{repository}\g<3>\g<4>", before)
        text = CELL.sub(rf"\g<1>{repository}\g<3>", text)
        if text != before:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def from_remote(root: Path = paths.ROOT) -> str:
    """The repository on GitHub that the clone's `origin` is. Raises Refused if there is none."""
    git = subprocess.run(["git", "-C", str(root), "remote", "get-url", "origin"], capture_output=True, text=True)
    found = re.search(rf"github\.com[:/]({REPOSITORY}?)(?:\.git)?/?\s*$", git.stdout)
    if not found:
        where = git.stdout.strip() or "there is no remote 'origin'"
        raise Refused(f"no repository on GitHub ({where}); name it: make badges REPO=owner/name")
    return found[1]


def main(arguments: list[str]) -> int:
    try:
        repository = arguments[0] if arguments else from_remote()
        changed = stamp(repository)
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{repository}: {len(changed)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
