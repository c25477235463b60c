"""What a probe asks of a machine, once: what it has, and whether it can do what a run needs.

Standard library and our pure modules only, as ``node``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dbx_llmtrain
from dbx_llmtrain import credentials
from dbx_llmtrain.worker import gpus, network, node, shared_folder

FOLDER, TRACKING = "run folder", "MLflow"
_ASK_S = 25.0
"""For a tracking server to be asked, with the start of Python and MLflow."""


def report(
    setting: str | None = None,
    driver_host: str | None = None,
    folder: str | None = None,
    tracking: tuple[str, dict[str, str]] | None = None,
    who: str | None = None,
) -> dict[str, Any]:
    """The fields of a ``NodeReport``. What cannot be read is said in ``problem``, never raised.

    ``setting`` is ``cluster.local_dir``, ``driver_host`` the driver's address. ``folder`` is one of
    the shared storage that has the driver's file in it, ``tracking`` the URI of an MLflow server
    and the secrets for it: what comes of trying them is in ``tried`` (empty: it works). ``who`` is
    this machine's name in the folder.
    """
    found = node.report(setting, driver_host)
    with_gpus = bool(found["gpus"])
    tried: dict[str, str] = {}
    if folder is not None:
        tried[FOLDER] = shared_folder.exercise(folder, who or node.node_id())
    if tracking is not None:
        tried[TRACKING] = _ask_tracking(*tracking)
    return found | {
        "interface": network.interface_toward(driver_host) if driver_host else "",
        "cuda": gpus.read_cuda() if with_gpus else "",
        "gpu_processes": gpus.read_processes() if with_gpus else [],
        "tried": tried,
    }


def _ask_tracking(uri: str, secrets: dict[str, str]) -> str:
    """Ask a tracking server something cheap, as a rank would; what went wrong, or nothing. In a
    process of its own: Spark's Python is used again, and is not to keep the secrets."""
    code = str(Path(str(dbx_llmtrain.__file__)).parent.parent)
    paths = [code, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = os.environ | secrets | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", "dbx_llmtrain.tracking_trial", uri],
            env=environ, capture_output=True, timeout=_ASK_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_ASK_S:.0f} s"
    except OSError as error:
        return f"cannot be asked ({error})"
    if done.returncode == 0:
        return ""
    said = (done.stdout + done.stderr).decode("utf-8", errors="replace").strip()
    last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
    return credentials.redact(last[:500], secrets)
