"""A training of a compiled model that is started again: nothing is compiled, and its second step is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAINING = """
import json, sys, threading
import torch
from torch import nn
from torch._dynamo.utils import counters
from outcore.limit import limit

torch.manual_seed(0)
torch.set_num_threads(1)
class Net(nn.Module):  # of its own: PyTorch compiles no model that is made of its own code only
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)

model = Net()
model.compile()
ooc = limit(model, "500KiB", cache=sys.argv[1])
losses = []
for step in range(3):
    with ooc.step():
        loss = model(torch.ones(256, 32)).square().mean()
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    losses.append(loss.item())
names = [op.name for op in ooc.trace.ops]
plan = ooc.plan.to_json()
stats = {name: ooc.stats()[name] for name in ("recorded", "planned", "left", "unplanned")}
restored = any(kind.is_remembered for kind in ooc.kinds.values())
ooc.close()
for thread in threading.enumerate():
    if thread.name == "outcore-cache":
        thread.join()
told = {"losses": losses, "names": names, "plan": plan, "stats": stats, "restored": restored}
print(json.dumps({**told, "inductor": dict(counters["inductor"]), "aot": dict(counters["aot_autograd"])}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_restart_compiles_nothing_and_plans_its_second_step(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }

    def run() -> dict[str, Any]:
        command = [sys.executable, "-W", "ignore", "-c", TRAINING, str(tmp_path / "steps")]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
        assert found.returncode == 0, found.stderr[-3000:]
        told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        return told

    first, second = run(), run()
    assert any(name.startswith("cpp_fused") for name in first["names"])
    assert first["aot"].get("autograd_cache_miss", 0) > 0
    assert second["aot"].get("autograd_cache_miss", 0) == 0
    assert second["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert second["aot"].get("autograd_cache_hit", 0) + second["inductor"].get("fxgraph_cache_hit", 0) > 0
    assert second["restored"]
    assert second["stats"] == {"recorded": 1, "planned": 2, "left": 0, "unplanned": 0}
    for key in ("losses", "names", "plan"):
        assert first[key] == second[key]
