"""Which errors are a lack of memory."""

from __future__ import annotations

import pytest
import torch

from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.worker.failures import CONFIGURATION, OUT_OF_MEMORY, cause_of_error, cause_of_text


def allocated() -> Exception:
    """torch's own error of a CPU that has not so much memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        allocated(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_a_lack_of_memory(error: Exception) -> None:
    assert cause_of_error(error) == OUT_OF_MEMORY
    assert cause_of_text(f"{type(error).__name__}: {error}") == OUT_OF_MEMORY
    wrapped = RuntimeError("the backward pass failed")
    wrapped.__cause__ = error
    assert cause_of_error(wrapped) == OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error", [ValueError("bad row"), RuntimeError("the gradient is not finite"), KeyError("memory")]
)
def test_other_errors(error: Exception) -> None:
    assert cause_of_error(error) == ""
    wrapped = torch.OutOfMemoryError("CUDA out of memory")
    error.__context__ = wrapped  # only happened before
    assert cause_of_error(error) == ""


def test_a_wrong_configuration() -> None:
    error = ConfigError([Problem("model.lora", "no layer of the model has the name x")])
    assert cause_of_error(error) == CONFIGURATION
    wrapped = RuntimeError("the model cannot be built")
    wrapped.__cause__ = error
    assert cause_of_error(wrapped) == ""
