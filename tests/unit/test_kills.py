"""Whether the kernel has counted a kill for lack of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbx_llmtrain.worker import kills


def write(root: Path, path: str, text: str) -> str:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return str(file)


def test_the_counters_of_this_process_and_the_machine(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,memory:/a/b\n0::/c\n1:name=systemd:/\n")
    version_1 = "sys/fs/cgroup/memory/a/b/memory.oom_control"
    expected = {
        write(tmp_path, version_1, "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"): 3,
        write(tmp_path, "sys/fs/cgroup/c/memory.events", "low 0\noom 2\noom_kill 2\n"): 2,
        write(tmp_path, "proc/vmstat", "nr_free_pages 9\noom_kill 5\n"): 5,
    }
    write(tmp_path, "sys/fs/cgroup/memory.events", "oom 1\n")  # an old kernel does not count
    assert kills.counts(tmp_path) == expected
    assert kills.counts(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"a": 1, "b": 0}, {"a": 1, "b": 1}, True),
        ({"a": 1}, {"a": 1, "b": 7}, False),
        ({}, {"b": 7}, None),
        ({"a": 1}, {}, None),
    ],
)
def test_what_was_counted(
    before: dict[str, int], after: dict[str, int], found: bool | None
) -> None:
    assert kills.counted(before, after) is found


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 64 MiB, where this machine lets us make one."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    mine = [line.split(":", 2) for line in lines]
    (place,) = [path for _, kind, path in mine if kind == "memory"] or ["/"]
    group = Path("/sys/fs/cgroup/memory", place.lstrip("/"), f"dbx_llmtrain-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield group
    group.rmdir()


def test_a_real_kill_is_counted(small_group: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import os\n"
        "from dbx_llmtrain.worker import kills\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "before = kills.counts()\n"
        "child = os.fork()\n"
        "if child == 0: bytearray(256 << 20); os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "print(os.waitstatus_to_exitcode(status), kills.counted(before, kills.counts()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_group)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "-9 True\n"
