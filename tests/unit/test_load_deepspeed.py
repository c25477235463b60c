"""A node whose DeepSpeed cannot be used says so before anything is trained."""

from __future__ import annotations

import sys

import pytest

from dbx_llmtrain import compat, zero_config
from dbx_llmtrain.errors import ClusterError
from dbx_llmtrain.worker.parallel.deepspeed import load_deepspeed


def test_a_version_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_config, "MINIMUM", "99.0")
    with pytest.raises(ClusterError, match=r"it is \d.*, 99\.0 is needed: install"):
        load_deepspeed("cpu", "warning")


def test_one_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ClusterError, match=r"cannot be imported .*parallel\.kind=fsdp"):
        load_deepspeed("cpu", "warning")


def test_the_pins_have_the_minimum() -> None:
    assert compat.at_least("deepspeed", zero_config.MINIMUM)
