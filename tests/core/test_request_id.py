"""Request ids: article facts 2 and 4, and what must not parse."""

import pytest

from xpyd_core.errors import UserError
from xpyd_core.request_id import (
    Address,
    PairId,
    TransferKey,
    is_dialable,
    is_uuid,
    parse_address,
    parse_pair_id,
)

UUID = "93923d63113b4b338973f24d19d4bf11"
PREFILL, DECODE = Address("10.0.1.2", 21001), Address("10.0.1.3", 22001)
ARTICLE_ID = f"cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{UUID}-0"


def test_an_id_gives_both_addresses_the_uuid_and_the_index() -> None:
    assert parse_pair_id(ARTICLE_ID) == PairId(PREFILL, DECODE, UUID, 0)


def test_formatting_and_parsing_are_inverse() -> None:
    for decode in (DECODE, Address("::1", 21001), Address("fe80::1:2", 65535)):
        pair = PairId(PREFILL, decode, UUID)
        assert parse_pair_id(str(pair)) == pair


@pytest.mark.parametrize(
    ("text", "index"),
    [
        (ARTICLE_ID.removesuffix("-0"), 0),
        (ARTICLE_ID.removesuffix("-0").removeprefix("cmpl-"), 0),
        (ARTICLE_ID.replace("cmpl-", "chatcmpl-").replace("-0", ""), 0),
        (ARTICLE_ID.removesuffix("0") + "17", 17),
        (ARTICLE_ID + "-Ab3dE6gh", 0),
        # As vLLM's connectors see them: 8 random hex digits are appended.
        (ARTICLE_ID + "-1a2b3c4d", 0),
        (ARTICLE_ID.removesuffix("0") + "17-12345678", 17),
        (ARTICLE_ID.replace("cmpl-", "chatcmpl-").replace("-0", "-1a2b3c4d"), 0),
        (ARTICLE_ID.replace("cmpl-", "chatcmpl-").replace("-0", "-12345678"), 0),
    ],
)
def test_prefix_and_suffix_belong_to_the_engine(text: str, index: int) -> None:
    assert parse_pair_id(text) == PairId(PREFILL, DECODE, UUID, index)


@pytest.mark.parametrize(
    "text",
    [
        "",
        UUID,
        "client-chosen id",
        ARTICLE_ID.replace(UUID, UUID[:-1]),
        ARTICLE_ID.replace(UUID, UUID.upper()),
        ARTICLE_ID.replace("21001", "0"),
        ARTICLE_ID.replace("21001", "70000"),
        ARTICLE_ID.replace(":22001", ""),
        ARTICLE_ID.replace("___decode", "__decode"),
        ARTICLE_ID + "\n",
        ARTICLE_ID.removesuffix("-0") + "-1a2b3c4",
        ARTICLE_ID.removesuffix("-0") + "-1a2b3c4d5",
        "x" * 10_000,
        "___prefill_addr_" + "1" * 5000 + ":21001___decode_addr_10.0.1.3:22001_" + UUID,
    ],
)
def test_any_other_id_means_alone(text: str) -> None:
    assert parse_pair_id(text) is None


@pytest.mark.parametrize(
    "text", ["10.0.0.1", "10.0.0.1:", ":21001", "::1:21001", "h:99999", "h:-1", "h:٣"]
)
def test_a_bad_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match="address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("address", "dialable"),
    [
        (Address("10.0.0.1", 1024), True),
        (Address("::1", 21001), True),
        (Address("10.0.0.1", 1023), False),  # no engine listens there: somebody else's service
        (Address("metadata.internal", 8080), False),
    ],
)
def test_only_literal_addresses_on_high_ports_are_dialled(address: Address, dialable: bool) -> None:
    assert is_dialable(address) is dialable


def test_bare_uuids_are_recognised() -> None:
    assert is_uuid(UUID)
    assert not is_uuid(UUID + "0")
    assert not is_uuid("z" * 32)


def test_the_key_of_a_transfer_is_the_uuid_and_the_prompts_index() -> None:
    assert TransferKey(UUID, 0) != TransferKey(UUID, 1)
    assert str(TransferKey(UUID, 3)) == f"{UUID}/3"
