"""What is downloaded, in which parts, and what makes the bytes right: values in, values out.

A source lists what it has as RemoteFiles; `wanted` keeps what serving reads and refuses what cannot
be a checkpoint. Each file is fetched in parts, so that a cut connection or a killed program costs
one part. A checksum is over the whole file, or, as stores have it for objects that were uploaded in
parts, over the checksums of those parts (COMPOSITE, and the ETag of a multipart upload).
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import msgspec

from xpyd_core.errors import UserError

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""What serving reads: weights, configuration, tokenizer, chat template. No pickles: they run code
when they are read."""
MANIFEST = ".xpyd-model.json"
"""In a finished folder: what it holds. Hidden, since loaders read `*.json`."""
MOST_FILES = 1000
MOST_BYTES = 1 << 43
"""8 TiB: a larger sum is a mistake in the address."""
PART_BYTES = 32 << 20

Reason = Literal[
    "NotFound", "AccessDenied", "VolumeFull", "ChecksumMismatch", "InvalidModel", "DownloadFailed"
]
"""Why a download ended; the operator's condition ModelReady has the same words."""


class DownloadError(UserError):
    """A download that ended without its files; the message names the fix."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


Algorithm = Literal["md5", "sha1", "sha256", "crc32", "crc32c", "crc64nvme", "git"]
"""`git`: the name of a blob in git."""


class Checksum(msgspec.Struct, frozen=True):
    """What a file's bytes must give. `value`: hex digits. `part_bytes`: the checksum is over those
    of parts of this size; 0: over the file."""

    algorithm: Algorithm
    value: str
    part_bytes: int = 0


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a source. `tag`: another tag is another content. `checksum` None: the source has
    none that can be computed here."""

    name: str
    size: int
    tag: str
    checksum: Checksum | None = None


class HeldFile(msgspec.Struct, frozen=True):
    """A file as a finished folder has it."""

    name: str
    size: int
    tag: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a finished folder holds. `commit`: what the revision meant at the source."""

    uri: str
    revision: str
    endpoint: str
    commit: str
    files: tuple[HeldFile, ...]
    version: int = 1


def read_manifest(text: bytes) -> Manifest | None:
    """The manifest of a folder; None where it is none that this version can read."""
    try:
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError:
        return None


def is_wanted(name: str) -> bool:
    """Whether serving reads a file of this name. Folders below hold other formats."""
    return not name.startswith(".") and "/" not in name and _matches(name)


def _matches(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in PATTERNS)


def wanted(files: Iterable[RemoteFile], *, source: str) -> tuple[RemoteFile, ...]:
    """The files that serving reads, configuration first. DownloadError where they are none."""
    found: list[RemoteFile] = []
    for file in files:
        parts = file.name.split("/")
        if any(part in ("", ".", "..") for part in parts) or not file.name.isprintable():
            raise DownloadError(
                "InvalidModel", f"{source}: {file.name!r} cannot be a file's name: remove it there"
            )
        found += [file] if is_wanted(file.name) else []
    if not any(file.name == "config.json" for file in found):
        raise DownloadError(
            "NotFound",
            f"{source}: no config.json in it: name the folder that holds the checkpoint's files",
        )
    if not any(file.name.endswith(".safetensors") for file in found):
        raise DownloadError(
            "InvalidModel", f"{source}: no *.safetensors in it: convert the weights to safetensors"
        )
    total = sum(file.size for file in found)
    if len(found) > MOST_FILES or total > MOST_BYTES:
        raise DownloadError(
            "InvalidModel",
            f"{source}: {len(found)} files of {size_text(total)}; at most {MOST_FILES} files of"
            f" {size_text(MOST_BYTES)} are one checkpoint",
        )
    # What may show that weights are missing comes before the weights.
    return tuple(sorted(found, key=lambda f: (f.name.endswith(".safetensors"), f.name)))


def missing_shards(index: bytes, names: Iterable[str]) -> list[str]:
    """The files that an index of weights names and the source does not have."""
    try:
        found: Any = msgspec.json.decode(index)
        shards = {str(name) for name in found["weight_map"].values()}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return []  # the engine says what is wrong with it
    return sorted(shards - set(names))


class Part(msgspec.Struct, frozen=True):
    """Bytes `begin` to `end` (without it) of the file `name` with this tag."""

    name: str
    tag: str
    begin: int
    end: int


def parts_of(file: RemoteFile, have: Iterable[Part], part_bytes: int) -> list[Part]:
    """The parts of a file that are not there yet. `have`: what an earlier run wrote, which may have
    cut its parts otherwise."""
    mine = sorted(
        (part.begin, part.end) for part in have if (part.name, part.tag) == (file.name, file.tag)
    )
    found: list[Part] = []
    at = 0
    for begin, end in [*mine, (file.size, file.size)]:
        found += (
            Part(file.name, file.tag, cut, min(cut + part_bytes, begin))
            for cut in range(at, begin, part_bytes)
        )
        at = max(at, end)
    return found


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def _new(algorithm: str, size: int) -> _Digest:
    if algorithm == "crc32":
        return _Crc32()
    if algorithm in ("crc32c", "crc64nvme"):
        from xpyd_worker.download import crc  # numpy takes time to load, and most need none of it

        return crc.crc32c() if algorithm == "crc32c" else crc.crc64nvme()
    if algorithm == "git":
        # A blob's name: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(algorithm, usedforsecurity=False)


class Digester:
    """Sha-256 of a file, and the checksum that its source has, in one reading."""

    def __init__(self, file: RemoteFile) -> None:
        self._sha256 = hashlib.sha256()
        self._expected = file.checksum
        self._size = file.size
        self._whole = None if self._expected is None else _new(self._expected.algorithm, file.size)
        self._part: _Digest | None = None
        self._left = 0

    def update(self, data: bytes) -> None:
        """The next bytes of the file."""
        self._sha256.update(data)
        expected = self._expected
        if expected is None or self._whole is None:
            return
        if not expected.part_bytes:
            self._whole.update(data)
            return
        view = memoryview(data)
        while len(view):
            if self._part is None:
                self._part, self._left = _new(expected.algorithm, 0), expected.part_bytes
            self._part.update(bytes(view[: self._left]))
            took = min(self._left, len(view))
            view, self._left = view[took:], self._left - took
            if not self._left:
                self._end_part()

    def _end_part(self) -> None:
        if self._part is not None and self._whole is not None:
            self._whole.update(self._part.digest())
        self._part = None

    @property
    def sha256(self) -> str:
        """Hex digits over all bytes so far."""
        return self._sha256.hexdigest()

    def mismatch(self) -> str:
        """What is wrong with the bytes; "" where the checksum is right or there is none."""
        self._end_part()
        if self._expected is None or self._whole is None:
            return ""
        got = self._whole.digest().hex()
        if got == self._expected.value:
            return ""
        return f"{self._expected.algorithm} is {got}, the source says {self._expected.value}"


_S3_CHECKSUMS: tuple[tuple[str, Algorithm], ...] = (
    ("ChecksumSHA256", "sha256"),
    ("ChecksumSHA1", "sha1"),
    ("ChecksumCRC64NVME", "crc64nvme"),
    ("ChecksumCRC32C", "crc32c"),
    ("ChecksumCRC32", "crc32"),
)


def s3_checksum(head: Mapping[str, Any], *, part_bytes: int) -> Checksum | None:
    """The checksum of an S3 object from the answer of HeadObject.

    `part_bytes`: the size of its parts where it was uploaded in parts of one size, else 0. An ETag
    is an MD5 only of what is not encrypted by a key of the customer's.
    """
    for field, algorithm in _S3_CHECKSUMS:
        if field in head:
            value, _, parts = str(head[field]).partition("-")
            if parts and not part_bytes:
                continue
            digest = base64.b64decode(value).hex()
            return Checksum(algorithm, digest, part_bytes if parts else 0)
    value, _, parts = str(head.get("ETag", "")).strip('"').partition("-")
    is_md5 = len(value) == 32 and not value.strip("0123456789abcdef")
    if not is_md5 or head.get("ServerSideEncryption", "AES256") != "AES256":
        return None
    if head.get("SSECustomerAlgorithm") or (parts and not part_bytes):
        return None
    return Checksum("md5", value, part_bytes if parts else 0)


@dataclass(frozen=True)
class Source:
    """An address in its parts. `kind` s3: bucket and prefix; hub: `place` is organisation/name."""

    kind: Literal["s3", "hub"]
    place: str
    prefix: str = ""


def parse_source(uri: str) -> Source:
    """The address of a model that can be downloaded. UserError with the forms that there are."""
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":
        if rest.count("/") != 1 or not all(rest.split("/")):
            raise UserError(f"model: {uri}: the form is hf://organisation/name")
        return Source("hub", rest)
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if not bucket or not prefix:
            raise UserError(f"model: {uri}: the form is s3://bucket/folder")
        return Source("s3", bucket, prefix + "/")
    raise UserError(f"model: {uri}: supported are s3://bucket/folder and hf://organisation/name")


def size_text(size: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def full_text(folder: str, *, needs: int, has: int) -> str:
    """What a full volume's error says."""
    return (
        f"{folder}: the volume is full: it needs {size_text(needs)} more and has {size_text(has)}:"
        " enlarge it, or remove folders of older models"
    )


def is_held(manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    """The files of a finished folder that are not there or have another size."""
    return [file.name for file in manifest.files if sizes.get(file.name) != file.size]


def backoffs() -> Iterator[float]:
    """Seconds between attempts of one part, without end: a deadline ends them."""
    wait_s = 0.5
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, 20.0)


def deadline_s(size: int, base_s: float, least_bytes_per_s: int) -> float:
    """How long one file may take: `base_s`, and what its bytes take at the slowest rate that is
    worth waiting for."""
    return base_s + size / least_bytes_per_s
