"""A folder with the rules of a Unity Catalog volume, for processes that are started with it.

The rules are in ``volumes.c``, a library that goes between a process and its calls to the file
system, whatever language makes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NO_COMPILER = "gcc, which builds the rules of a volume, is not installed"


@dataclass(frozen=True)
class Volume:
    """``folder`` has the rules, in processes with ``environment``; what is refused is in ``log``.
    While the file ``full`` is there no byte can be written, while ``gate`` is there no file can
    be opened to be written, while ``fixed`` is there none can be renamed."""

    folder: Path
    library: Path

    @property
    def log(self) -> Path:
        return self.library.with_name("refused")

    @property
    def full(self) -> Path:
        return self.library.with_name("full")

    @property
    def gate(self) -> Path:
        return self.library.with_name("gate")

    @property
    def fixed(self) -> Path:
        return self.library.with_name("fixed")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self.library),
            "VOLUME": str(self.folder),
            "VOLUME_LOG": str(self.log),
            "VOLUME_FULL": str(self.full),
            "VOLUME_GATE": str(self.gate),
            "VOLUME_FIXED": str(self.fixed),
        }

    def refused(self) -> list[str]:
        """What was refused so far, as ``what path``."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def make(parent: Path) -> Volume | None:
    """A volume in a folder of ours; ``None`` where there is no compiler."""
    if shutil.which("gcc") is None:
        return None
    parent.mkdir(parents=True, exist_ok=True)
    library = parent / "volumes.so"
    source = Path(__file__).with_suffix(".c")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    folder = parent / "volume"
    folder.mkdir()
    return Volume(folder, library)


def current() -> Volume | None:
    """The volume of this process, where it was started with one."""
    if "VOLUME" not in os.environ:
        return None
    return Volume(Path(os.environ["VOLUME"]), Path(os.environ["LD_PRELOAD"]))
