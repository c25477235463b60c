"""What a machine tells of itself and tries: its interface, its GPUs' users, the shared folder."""

from __future__ import annotations

import os
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dbx_llmtrain import tracking_trial
from dbx_llmtrain.reports import NodeReport
from dbx_llmtrain.worker import facts, gpus, network, shared_folder
from tests.spark import spark_env

MIB = 1024 * 1024
TABLE = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
+-----------------------------------------------------------------------------------------+
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The listing of a fake ``nvidia-smi`` that is found first."""
    listing = tmp_path / "gpus.csv"
    text = spark_env.FAKE_SMI.format(listing=listing)
    script = spark_env.write_script(tmp_path / "bin" / "nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return listing


def other_address() -> str:
    """An address of this machine that is not its loopback's; ``skip`` where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


# Interfaces -----------------------------------------------------------------------------------


def test_the_interface_toward_an_address() -> None:
    names = [name for _, name in socket.if_nameindex()]
    own = other_address()
    found = network.interface_toward(own)
    assert found in names
    assert found != "lo"
    assert network.interface_toward("127.0.0.1") == ""
    assert network.interface_toward("no.such.host.invalid") == ""


def test_what_gloo_and_nccl_are_told() -> None:
    own = other_address()
    name = network.interface_toward(own)
    assert network.variables({"MASTER_ADDR": own}) == {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
    }
    assert network.variables({"MASTER_ADDR": "127.0.0.1"}) == {}
    assert network.variables({}) == {}


def test_what_the_user_has_set_stays() -> None:
    own = other_address()
    environ = {"MASTER_ADDR": own, "GLOO_SOCKET_IFNAME": "ib0"}
    assert set(network.variables(environ)) == {"NCCL_SOCKET_IFNAME"}
    assert network.variables(environ | {"NCCL_SOCKET_IFNAME": "ib"}) == {}


# GPUs -----------------------------------------------------------------------------------------


def test_who_holds_memory_of_the_gpus(smi: Path) -> None:
    own = os.getpid()
    lines = f"{own}, 4096, GPU-1\n99999999, [N/A], GPU-2\nNo running processes found\n"
    smi.with_name("gpus.csv.apps").write_text(lines)
    first, second = gpus.read_processes()
    assert (first["pid"], first["memory"], first["gpu"]) == (own, 4096 * MIB, "GPU-1")
    assert first["name"].startswith(("python", "pytest"))
    assert second == {"pid": 99999999, "memory": 0, "gpu": "GPU-2", "name": ""}


@pytest.mark.parametrize("text", ["", spark_env.gpu_lines(["GPU-1"]), "Field is not valid\n"])
def test_an_answer_of_another_kind_names_nobody(text: str) -> None:
    assert gpus.parse_processes(text) == []


def test_an_nvidia_smi_that_does_not_know_the_question(smi: Path, tmp_path: Path) -> None:
    refuses = '#!/bin/sh\necho "Field \\"gpu_uuid\\" is not a valid field to query."; exit 2\n'
    spark_env.write_script(tmp_path / "bin" / "nvidia-smi", refuses)
    assert gpus.read_processes() == []
    assert gpus.read_cuda() == ""


def test_the_cuda_of_the_driver(smi: Path) -> None:
    assert gpus.read_cuda() == ""
    smi.with_name("gpus.csv.head").write_text(TABLE)
    assert gpus.read_cuda() == "12.4"


def test_a_report_has_it_all(smi: Path, tmp_path: Path) -> None:
    smi.write_text(spark_env.gpu_lines(["GPU-1"]))
    smi.with_name("gpus.csv.head").write_text(TABLE)
    smi.with_name("gpus.csv.apps").write_text("1, 12, GPU-1\n")
    found = facts.report(str(tmp_path / "local"), other_address())
    report = NodeReport.model_validate(found)
    assert report.cuda == "12.4"
    assert [process.gpu for process in report.gpu_processes] == ["GPU-1"]
    assert report.interface
    assert report.tried == {}
    smi.unlink()
    report = NodeReport.model_validate(facts.report(str(tmp_path / "local")))
    assert (report.cuda, report.gpu_processes, report.interface) == ("", (), "")


# The shared folder ----------------------------------------------------------------------------


def test_a_folder_that_all_can_use(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert shared_folder.exercise(folder, shared_folder.DRIVER) == ""
    for node in ("node-a", "10.0.0.2:b"):
        assert shared_folder.exercise(folder, node) == ""
    assert shared_folder.see(folder, [shared_folder.DRIVER, "node-a", "10.0.0.2:b"]) == ""
    assert len(list(tmp_path.iterdir())) == 3


def test_a_node_does_not_make_the_folder_that_it_does_not_see(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    problem = shared_folder.exercise(str(folder), "node-a")
    assert "which the driver has written, cannot be read (No such file or directory)" in problem
    assert not folder.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert shared_folder.exercise(str(tmp_path), shared_folder.DRIVER) == ""
    (tmp_path / "node-a.txt").mkdir()  # in the way, also of a root whom no mode keeps out
    problem = shared_folder.exercise(str(tmp_path), "node-a")
    assert problem.startswith(f"{tmp_path / 'node-a.txt'} cannot be written (")


def test_a_file_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    problem = shared_folder.exercise(str(tmp_path), shared_folder.DRIVER)
    assert "cannot be replaced" in problem
    assert "No space left on device" in problem


def test_a_file_of_old_content_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_APPEARS_S", 0.0)
    (tmp_path / "node-a.txt").write_text("first")
    problem = shared_folder.see(str(tmp_path), ["node-a"])
    assert problem.endswith("node-a.txt does not have what node-a has written")


# MLflow ---------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers MLflow's search for experiments to whoever has the right token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer right-token-0123456789"
        body = b'{"experiments": []}' if allowed else b'{"error_code": "PERMISSION_DENIED"}'
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        return


@pytest.mark.slow
def test_mlflow_is_asked_with_the_secrets_and_forgets_them() -> None:
    server = Server()
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        right = {"MLFLOW_TRACKING_TOKEN": "right-token-0123456789"}
        wrong = {"MLFLOW_TRACKING_TOKEN": "wrong-token-0123456789"}
        tried = [
            facts.report(tracking=(server.uri, secrets))["tried"]["MLflow"]
            for secrets in (right, wrong)
        ]
    finally:
        server.shutdown()
        server.server_close()
    assert tried[0] == ""
    assert "403" in tried[1] or "PERMISSION_DENIED" in tried[1]
    assert "wrong-token" not in tried[1]
    assert "MLFLOW_TRACKING_TOKEN" not in os.environ


def test_which_mlflow_the_nodes_are_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    try:
        mlflow.set_tracking_uri("http://tracking:5000")
        assert tracking_trial.uri_for_workers({}) == "http://tracking:5000"
        mlflow.set_tracking_uri("sqlite:///a.db")
        assert tracking_trial.uri_for_workers({}) == ""
    finally:
        mlflow.set_tracking_uri(before)


def test_a_python_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert "cannot be asked" in facts.report(tracking=("http://t", {}))["tried"]["MLflow"]
