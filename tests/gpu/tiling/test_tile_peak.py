from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
PRODUCT = """
import torch
from outcore.tiling.product import Job
a, b = (torch.randn(8192, 8192).to(getattr(torch, "{dtype}")).pin_memory() for _ in range(2))
x = torch.ones(64, 64, device="cuda")
x @ x
job = Job(a, b, memory="{memory_mib}MiB", devices=["cuda:0"])
job.run()
print(torch.cuda.max_memory_allocated())
assert torch.allclose(job.out[:4].cuda().float(), a[:4].cuda().float() @ b.cuda().float(), rtol=0.02, atol=1.0)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory_mib", [256, 700])
def test_everything_a_fresh_process_allocates_stays_within_the_budget(dtype: str, memory_mib: int) -> None:
    """cuBLAS's workspaces, the measuring of the rates and the slots together, nothing subtracted."""
    code = PRODUCT.format(dtype=dtype, memory_mib=memory_mib)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory_mib * 1024**2
