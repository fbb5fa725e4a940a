"""A connector that names its cache's layout wrongly: of K that lies transposed it says that it does
not. A vLLM of `vllm_kit` loads it in place of XpydConnector; the first contact must catch it."""

from __future__ import annotations

from typing import Any

from xpyd_core.compat import HEAD_TOKEN_KV
from xpyd_kv.vllm import worker
from xpyd_kv.vllm.connector import XpydConnector as Honest


class XpydConnector(Honest):
    """See above."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Take the caches under the layout of our own engine."""
        worker._layout_name = lambda *_, **__: HEAD_TOKEN_KV  # pyright: ignore[reportPrivateUsage]
        super().register_kv_caches(kv_caches)
