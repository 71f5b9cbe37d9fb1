"""Many workers, few messages, none indispensable: elastic averaging over torch.distributed.

`join` is the front door; `METHODS` lists what it can do. Follows arXiv 1708.02983 (You, Buluc, Demmel, SC17) and arXiv
1412.6651 (Zhang, Choromanska, LeCun); see docs/design/005-elastic.md for where it differs.
"""

from __future__ import annotations

from outcore.elastic.methods import METHODS, Method
from outcore.elastic.worker import Settings, Stats, Worker, join

__all__ = ["METHODS", "Method", "Settings", "Stats", "Worker", "join"]
