"""Called by each notebook's first cell: install missing packages, then check the machine.

Imports nothing but the standard library until that is done.
"""

from __future__ import annotations

from pathlib import Path

from helpers import paths
from helpers.errors import Refused
from helpers.setup import packages

DRIVE = Path("/content/drive")


def set_up() -> None:
    """Set up this machine and print one line per check. Raises Refused if a package can't be installed."""
    packages.install_missing(paths.ROOT / "requirements.txt")
    if packages.on_colab():
        packages.install_iostat()
    from helpers.setup import doctor

    print(*doctor.check(), sep="\n")


def mount_drive(folder: Path) -> None:
    """Mount Google Drive if a folder is on it and it is not mounted yet: Colab then asks for permission.

    Raises Refused outside Colab, and without permission.
    """
    if not folder.is_relative_to(DRIVE) or (DRIVE / "MyDrive").is_dir():
        return
    try:
        from google.colab import drive  # type: ignore[import-not-found]

        drive.mount(str(DRIVE))
    except ImportError:
        raise Refused(f"output_dir {folder}: Google Drive is there in Colab only; choose a folder here") from None
    except Exception as error:  # Colab's own, none of them documented
        raise Refused(f"output_dir {folder}: Google Drive was not mounted ({error}); run this cell again") from error
