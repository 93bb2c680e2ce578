from types import SimpleNamespace

import pytest
import torch

from benchmarks.small_gpu import GIB, shrink


@pytest.mark.parametrize(("free", "seen"), [(3 * GIB, 3 * GIB), (70 * GIB, 8 * GIB)])
def test_the_engine_sees_a_gpu_of_the_size_that_it_is_told(monkeypatch, free, seen):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 80 * GIB))
    large = SimpleNamespace(name="large", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: large)
    shrink(8 * GIB)
    assert torch.cuda.mem_get_info("cuda:0") == (seen, 8 * GIB)
    properties = torch.cuda.get_device_properties("cuda:0")
    assert (properties.name, properties.total_memory) == ("large", 8 * GIB)
