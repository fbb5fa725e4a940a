"""XpydConnector with a defect, which a vLLM of `vllm_kit` loads in place of the product's.

A P says that K does not lie transposed in its cache, where it does: the first contact must catch
it. A D puts zeros in place of the KV that has come: its answers must change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xpyd_core.compat import HEAD_TOKEN_KV
from xpyd_kv.vllm import worker
from xpyd_kv.vllm.connector import XpydConnector as Sound
from xpyd_kv.vllm.engine_api import KVConnectorMetadata
from xpyd_kv.vllm.options import role_of

if TYPE_CHECKING:
    from xpyd_kv.vllm.engine_api import Tensor


class XpydConnector(Sound):
    """See above."""

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """P: take the caches under the layout of our own engine."""
        self._caches = kv_caches
        if role_of(self._vllm_config) == "P":
            worker._layout_name = lambda *_, **__: HEAD_TOKEN_KV  # pyright: ignore[reportPrivateUsage]
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """D: forget what has landed, before the step that runs its request."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, worker.StepMetadata)
        for loaded in connector_metadata.landed:
            for cache in self._caches.values():
                cache[list(loaded.blocks)] = 0
