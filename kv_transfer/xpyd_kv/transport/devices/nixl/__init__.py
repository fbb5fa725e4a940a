"""The data path `nixl`: D reads P's registered memory itself (NIXL over UCX). An optional extra."""
