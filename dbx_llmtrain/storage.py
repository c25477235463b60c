"""The only writer to shared storage.

Unity Catalog volumes allow no append and no seek-and-write. So everything is written on local disk
first and reaches shared storage as one sequential copy; what has to be complete to count is named
by a manifest that is written last. Importing this module needs the standard library only, because
the tasks that run once per node use it too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbx_llmtrain.records import FileEntry

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
_BLOCK = 1024 * 1024
"""Large enough for one request of network storage, small enough for a processor's cache."""
_OWN_HASH = "sha256"
"""Key of a manifest's hash of its other keys."""


def local_path(path: str | Path) -> Path:
    """The path that the file system knows: ``dbfs:/Volumes/x`` is ``/Volumes/x``, other ``dbfs:/y``
    is ``/dbfs/y``; ``~`` is expanded."""
    text = str(path)
    if text.startswith("dbfs:/"):
        rest = "/" + text.removeprefix("dbfs:").lstrip("/")
        text = rest if rest.startswith("/Volumes/") else "/dbfs" + rest
    return Path(text).expanduser()


def hash_file(path: Path) -> str:
    """SHA-256 of a file, read once in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def list_files(folder: Path) -> list[Path]:
    """Every regular file below ``folder``, sorted by relative path."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def entries(folder: Path, files: Iterable[Path] | None = None) -> tuple[FileEntry, ...]:
    """Size and hash of every file below ``folder`` (or of ``files`` in it)."""
    from dbx_llmtrain.records import FileEntry

    return tuple(
        FileEntry(
            path=path.relative_to(folder).as_posix(),
            size=path.stat().st_size,
            sha256=hash_file(path),
        )
        for path in (list_files(folder) if files is None else files)
    )


def copy_file(
    source: Path,
    target: Path,
    *,
    sync: bool = True,
    check: Callable[[], None] = lambda: None,
) -> str:
    """One sequential copy; returns the SHA-256 of what was read. The target's folder is made.

    Without ``sync`` what was written may not be on the disk yet. ``check`` is called before every
    block: what it raises ends the copy.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while size := reader.readinto(block):
            check()
            digest.update(block[:size])
            _write_all(writer, block[:size])
        if sync:
            os.fsync(writer.fileno())
    return digest.hexdigest()


def _write_all(writer: io.FileIO, data: memoryview) -> None:
    """A write may take a part of it only, as before a disk is full."""
    while data:
        data = data[writer.write(data) :]


def publish_folder(source: Path, target: Path) -> tuple[FileEntry, ...]:
    """Copy every file of a local folder to shared storage; returns their sizes and hashes."""
    from dbx_llmtrain.records import FileEntry

    found = []
    for path in list_files(source):
        name = path.relative_to(source).as_posix()
        digest = copy_file(path, target / name)
        found.append(FileEntry(path=name, size=path.stat().st_size, sha256=digest))
    return tuple(found)


def write_text(target: Path, text: str) -> None:
    """Write a small file whole: a temporary sibling first, then a rename over the target.

    On a volume the rename is a copy, and a reader may see a part of it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        _write(temporary, text)
        if not _rename(temporary, target):
            _write(target, text)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as writer:
        writer.write(text)
        writer.flush()
        os.fsync(writer.fileno())


def _rename(source: Path, target: Path) -> bool:
    """Whether the storage can: mounts of object storage need not."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV):
            return False
        raise
    return True


def write_manifest(folder: Path, content: dict[str, object]) -> None:
    """Declare a folder complete. Call it after everything else has been written."""
    plain = json.loads(json.dumps(content))
    write_text(folder / MANIFEST, _json(plain | {_OWN_HASH: _own_hash(plain)}))


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=1, sort_keys=True)


def _own_hash(content: dict[str, object]) -> str:
    return hashlib.sha256(_json(content).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, object] | None:
    """The manifest of a complete folder; ``None`` when the folder does not count as one.

    Every file that the manifest names has to be there in its size. Hashes are checked by whoever
    reads the files; its own is checked here.
    """
    from dbx_llmtrain.records import FileEntry

    try:
        content: dict[str, object] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        own = content.pop(_OWN_HASH, None)  # older ones have none
        files = [FileEntry.model_validate(entry) for entry in content["files"]]  # type: ignore[attr-defined]
        whole = all(place(folder, entry).stat().st_size == entry.size for entry in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if whole and own in (None, _own_hash(content)) else None


def verify(folder: Path) -> list[str]:
    """What is wrong with a folder that has a manifest: every file is hashed. Empty: nothing."""
    from dbx_llmtrain.records import FileEntry

    manifest: Any = read_manifest(folder)
    if manifest is None:
        return ["incomplete: no valid manifest.json, or a file is missing"]
    return [
        f"{entry.path} is damaged: its hash is not the manifest's"
        for entry in map(FileEntry.model_validate, manifest["files"])
        if hash_file(place(folder, entry)) != entry.sha256
    ]


def place(folder: Path, entry: FileEntry) -> Path:
    """Where a file of a folder is: in it, or at its origin."""
    return folder / (entry.origin or entry.path)


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a run folder: ``checkpoints/step-00000200``."""
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint by its folder's name; ``None`` for any other name."""
    prefix, _, number = folder.name.partition("-")
    return int(number) if prefix == "step" and number.isdecimal() else None


def _step_folders(run_dir: Path) -> list[Path]:
    """Everything that has the name of a checkpoint, the newest first."""
    try:
        found = {path: step_of(path) for path in (run_dir / CHECKPOINTS).iterdir()}
    except OSError:
        return []
    steps = [(step, path) for path, step in found.items() if step is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run folder, the newest first.

    A folder without a valid manifest, which is what a killed writer leaves, does not count.
    """
    return [path for path in _step_folders(run_dir) if read_manifest(path) is not None]


def torn(run_dir: Path) -> list[Path]:
    """The other ones, the newest first: incomplete, or with a manifest that is damaged."""
    return [path for path in _step_folders(run_dir) if read_manifest(path) is None]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run folder; ``None`` when there is none."""
    found = _step_folders(run_dir)
    return next((path for path in found if read_manifest(path) is not None), None)


def free_space(path: Path) -> int | None:
    """Free bytes where ``path`` is or will be; ``None`` where the storage does not say (object
    storage that is mounted as a folder has no size)."""
    try:
        usage = shutil.disk_usage(_existing(path))
    except OSError:
        return None
    return usage.free if usage.total else None


def device(path: Path) -> int:
    """The number of the file system where ``path`` is or will be."""
    return _existing(path).stat().st_dev


def _existing(path: Path) -> Path:
    """``path``, or the folder nearest to it that there is."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def remove(folder: Path) -> None:
    """Delete a folder and what is in it; nothing happens where there is none."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_empty(folder: Path) -> None:
    """Delete a folder that has nothing but empty folders in it."""
    for inner, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            Path(inner).rmdir()


class GrowingFile:
    """A log that grows on local disk and is republished whole to shared storage now and then."""

    def __init__(self, local: Path, shared: Path, *, every: float = 30.0) -> None:
        self._local = local
        self._shared = shared
        self._every = every
        self._published = -math.inf
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        local.parent.mkdir(parents=True, exist_ok=True)
        self._file = local.open("ab")

    def write(self, data: bytes) -> None:
        """Append bytes; they are on shared storage within ``every`` seconds of a later write."""
        with self._lock:
            self._file.write(data)
            self._file.flush()
        if time.monotonic() - self._published >= self._every:
            self.publish()

    def publish(self) -> None:
        """Copy the file as it is now to shared storage. Never raises: a log is not worth a run.

        Writers of the log go on meanwhile, however slow the storage is.
        """
        with self._publishing:
            self._published = time.monotonic()
            temporary = self._shared.with_name(f".{self._shared.name}.{os.getpid()}")
            with contextlib.suppress(OSError):
                copy_file(self._local, temporary)
                if not _rename(temporary, self._shared):
                    copy_file(self._local, self._shared)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def tail(self, size: int = 4000) -> str:
        """The last ``size`` bytes as text; bytes that are not UTF-8 become ``U+FFFD``."""
        with self._local.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", errors="replace")

    def close(self) -> None:
        """Publish once more and close."""
        self.publish()
        self._file.close()
