"""An embedding whose table stays on the host; only the rows of a batch are copied to the device.

The lookup and its gradient run on the host with torch's own kernels, bitwise the same. Only the requested rows, and in
the backward their gradients, are copied.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from outcore.errors import TilingError
from outcore.tiling.host_weight import HostWeight


class TiledEmbedding(HostWeight):
    """`nn.Embedding` whose table and gradient stay in host memory; the result is on the device of the indices.

    Takes the options of `nn.Embedding`. `sparse=True` keeps gradients only of the rows that were used, which is
    recommended for a table of many gigabytes.

    ```python
    import outcore
    import torch

    table = outcore.TiledEmbedding(10_000, 64, sparse=True)
    out = table(torch.tensor([[1, 2, 3], [4, 5, 6]]))  # (2, 3, 64)
    out.sum().backward()
    ```
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding) -> TiledEmbedding:
        """Returns a tiled layer that shares the table; a table on a device is moved to the host."""
        layer = cls(1, 1)
        for name in _SETTINGS:
            setattr(layer, name, getattr(embedding, name))
        layer.register_parameter("weight", cast(nn.Parameter, embedding.weight))
        layer.bring_home()
        return layer

    def to_embedding(self) -> nn.Embedding:
        """Returns torch's layer, which shares the table; the table is still on the host."""
        embedding = nn.Embedding(1, 1)
        for name in _SETTINGS:
            setattr(embedding, name, getattr(self, name))
        embedding.register_parameter("weight", self.weight)
        return embedding

    def reset_parameters(self) -> None:
        """Initializes like `nn.Embedding`: the same seed gives the same numbers."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        self.check_on_host()
        if indices.is_floating_point():
            raise TilingError(
                f"indices are {indices.dtype}; an embedding takes whole numbers: convert them with .long()"
            )
        rows = F.embedding(
            indices.to("cpu"),
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        return rows.to(indices.device)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


_SETTINGS: tuple[str, ...] = (
    "num_embeddings",
    "embedding_dim",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
