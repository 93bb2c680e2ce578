"""Kernels run on a GPU where there is one (`-m gpu`), else in Triton's interpreter at tiny sizes."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob: list[str] = []
try:
    import triton  # noqa: F401
except ModuleNotFoundError:
    if os.environ.get("CI"):
        raise
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is chosen when Triton is imported; here it compiles for the GPU")
    return torch.device("cpu")
