"""The request id that pairs one P with one D: pure text <-> values.

    ___prefill_addr_{ip:port}___decode_addr_{ip:port}_{32 hex}

The router makes it and sends it to both engines as X-Request-Id; each reads the other's KV
address from it. Engines may put a prefix (`cmpl-`) before it and an index (`-0`) behind it; vLLM
puts 8 random hex digits behind the index, or behind the id of a chat, which has none. The 32
hex digits are 128 random bits from the router; with a prompt's index they key one KV transfer.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple

from xpyd_core.errors import UserError

UUID_HEX_DIGITS = 32
MIN_DIAL_PORT = 1024
_UUID = re.compile(r"[0-9a-f]{32}")
# An address has no underscore, so three of them end it; an IPv6 host has brackets.
_PAIR = re.compile(
    r"(?:[A-Za-z]+-)?___prefill_addr_(?P<prefill>[^_\s]{3,260})___decode_addr_(?P<decode>[^_\s]{3,260})"
    r"_(?P<uuid>[0-9a-f]{32})(?:-(?P<index>\d{1,5})(?:-[0-9a-zA-Z]{1,32})?|-[0-9a-f]{8})?"
)


class Address(NamedTuple):
    """A host (literal ip or name) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TlsAddress(Address):
    """The address of a port that speaks TLS. It equals the same address without."""

    __slots__ = ()


class TransferKey(NamedTuple):
    """Key of the KV of one prompt on its way from P to D: the id's uuid and the prompt's index."""

    uuid: str
    prompt_index: int

    def __str__(self) -> str:
        return f"{self.uuid}/{self.prompt_index}"


class PairId(NamedTuple):
    """A parsed pair id. `suffix_index` is the engine's own suffix, 0 where there is none."""

    prefill: Address
    decode: Address
    uuid: str
    suffix_index: int = 0

    def __str__(self) -> str:
        return pair_id_text(str(self.prefill), str(self.decode), self.uuid)


def pair_id_text(prefill: str, decode: str, uuid: str) -> str:
    """The id of a pair whose addresses are texts already, as a router sends it."""
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{uuid}"


def parse_address(text: str) -> Address:
    """`10.0.0.1:21001`, `[::1]:21001` or `name:21001` as an Address; else UserError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UserError(f"address {text!r}: write an IPv6 host in brackets, [host]:port")
    if not colon or not host or not (port.isascii() and port.isdigit()) or len(port) > 5:
        raise UserError(f"address {text!r}: expected host:port")
    if not 0 < int(port) < 65536:
        raise UserError(f"address {text!r}: port must be 1 to 65535")
    return Address(host, int(port))


@lru_cache(maxsize=4096)
def is_dialable(address: Address) -> bool:
    """Whether an engine may dial an address it read in a request id: a literal ip, port >= 1024."""
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return False
    return address.port >= MIN_DIAL_PORT


def is_uuid(text: str) -> bool:
    """Whether `text` is a bare id: 32 lower-case hex digits."""
    return _UUID.fullmatch(text) is not None


def parse_pair_id(text: str) -> PairId | None:
    """The pair id in `text`, or None: then the request runs alone on its instance."""
    match = _PAIR.fullmatch(text)
    if match is None:
        return None
    try:
        prefill, decode = parse_address(match["prefill"]), parse_address(match["decode"])
    except UserError:
        return None
    return PairId(prefill, decode, match["uuid"], int(match["index"] or 0))
