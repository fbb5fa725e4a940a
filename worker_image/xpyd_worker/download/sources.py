"""Where checkpoints come from: an S3 bucket by botocore, a repository of the Hugging Face hub.

Both list their files with sizes and checksums, and read a range of one. What fails for good is a
DownloadError with the fix; what another attempt may mend is a Broken. The libraries are imported
only when an address asks for them.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import urlsplit

from xpyd_core.errors import UserError
from xpyd_worker.download.plan import (
    MOST_FILES,
    Checksum,
    DownloadError,
    RemoteFile,
    is_wanted,
    parse_source,
    s3_checksum,
)

_CHUNK = 1 << 18
_CONNECT_S = 10
_READ_S = 30
"""A source that sends nothing for so long is asked again."""
_OF_KEYS = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch")
"""S3's codes for credentials that are wrong or too old, some of them with status 400."""
_MOST_LISTED = 10 * MOST_FILES


class Broken(Exception):
    """An attempt failed; another one may succeed."""


class RemoteFolder(Protocol):
    """A checkpoint at its source.

    `files` is called first. `read` yields bytes `begin` to `end` of a file, at most; fewer where
    the connection ends early. Both raise DownloadError and Broken.
    """

    @property
    def label(self) -> str:
        """The address, for messages."""
        ...

    @property
    def commit(self) -> str:
        """What the revision meant; "" where the source has no revisions."""
        ...

    def files(self) -> list[RemoteFile]:
        """What is there, at most some thousands of files."""
        ...

    def read(self, file: RemoteFile, begin: int, end: int) -> Generator[bytes]:
        """A range of one file."""
        ...


def open_source(
    uri: str, *, revision: str = "", endpoint: str = "", connections: int = 8
) -> RemoteFolder:
    """The source of an address. UserError where the address or the endpoint is none."""
    source = parse_source(uri)
    if source.kind == "hub":
        if endpoint:
            raise UserError("--endpoint-url: only s3:// has one; of a hub set HF_ENDPOINT")
        return HubFolder(source.place, revision)
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise UserError(f"--endpoint-url: {endpoint} is no URL such as https://minio.example:9000")
    return S3Folder(source.place, source.prefix, endpoint, connections)


class S3Folder:
    """Objects of a bucket below a prefix.

    Credentials are found as AWS's own tools find them: AWS_* variables, a web identity, profiles,
    the instance's or container's role; without any, requests are anonymous.
    """

    commit = ""

    def __init__(self, bucket: str, prefix: str, endpoint: str, connections: int) -> None:
        self.label = f"s3://{bucket}/{prefix.rstrip('/')}"
        self._bucket, self._prefix = bucket, prefix
        self._errors = import_module("botocore.exceptions")
        session: Any = import_module("botocore.session").get_session()
        settings: dict[str, Any] = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _READ_S,
            "max_pool_connections": connections,
            # Attempts are counted here, where it is known whether bytes came.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            # Parts carry no checksum of their own; the whole file is verified.
            "response_checksum_validation": "when_required",
        }
        if endpoint:
            # Few stores but AWS answer to a bucket's own host name.
            settings["s3"] = {"addressing_style": "path"}
        try:
            if session.get_credentials() is None:
                settings["signature_version"] = import_module("botocore").UNSIGNED
            self._client: Any = session.create_client(
                "s3",
                endpoint_url=endpoint or None,
                region_name=session.get_config_variable("region") or "us-east-1",
                config=import_module("botocore.config").Config(**settings),
            )
        except (self._errors.BotoCoreError, ValueError) as error:
            raise UserError(f"{self.label}: {error}") from error

    def files(self) -> list[RemoteFile]:
        """The objects right below the prefix, with what HeadObject says of their checksums."""
        found: list[dict[str, Any]] = []
        token: dict[str, str] = {}
        while True:
            page = self._call(
                "list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, Delimiter="/", **token
            )
            found += page.get("Contents", [])
            if not page.get("IsTruncated") or len(found) > _MOST_LISTED:
                break
            token = {"ContinuationToken": page["NextContinuationToken"]}
        if not found:
            raise DownloadError(
                "NotFound",
                f"{self.label}: no object below it: correct the path (it is a folder's, with the"
                " bucket first)",
            )
        with ThreadPoolExecutor(8) as pool:
            described = pool.map(self._describe, found[:_MOST_LISTED])
            return [file for file in described if file is not None]

    def _describe(self, listed: dict[str, Any]) -> RemoteFile | None:
        key = str(listed["Key"])
        if not key.startswith(self._prefix):
            return RemoteFile(f"../{key}", 0, "")  # refused by `wanted`
        name = key.removeprefix(self._prefix)
        if not name:
            return None  # the folder itself, as some programs make it
        if not is_wanted(name):
            return RemoteFile(name, int(listed["Size"]), str(listed["ETag"]))
        place = {"Bucket": self._bucket, "Key": key}
        head = self._call("head_object", **place, ChecksumMode="ENABLED")
        tag, size = str(head["ETag"]), int(head["ContentLength"])
        texts = [tag, *(str(text) for field, text in head.items() if "Checksum" in field)]
        counts = [text.strip('"').rpartition("-")[2] for text in texts if "-" in text]
        part_bytes = self._part_bytes(place, size, counts[0]) if counts else 0
        return RemoteFile(name, size, tag, s3_checksum(head, part_bytes=part_bytes))

    def _part_bytes(self, place: dict[str, str], size: int, count: str) -> int:
        """The size of an object's parts but the last, by its first and its last one; 0: they are of
        several sizes, so that the checksum of their checksums is none that can be made again."""
        if not count.isdecimal() or count == "0":
            return 0
        first, last = (
            int(self._call("head_object", **place, PartNumber=number)["ContentLength"])
            for number in (1, int(count))
        )
        return first if first * (int(count) - 1) + last == size else 0

    def read(self, file: RemoteFile, begin: int, end: int) -> Generator[bytes]:
        """A range of an object that did not change since it was listed."""
        answer = self._call(
            "get_object",
            Bucket=self._bucket,
            Key=self._prefix + file.name,
            Range=f"bytes={begin}-{end - 1}",
            IfMatch=file.tag,
        )
        if not str(answer.get("ContentRange", "")).startswith(f"bytes {begin}-"):
            raise DownloadError(
                "DownloadFailed", f"{self.label}: the store answers no ranges of an object"
            )
        body = answer["Body"]
        try:
            yield from body.iter_chunks(_CHUNK)
        except (self._errors.BotoCoreError, OSError) as error:
            raise Broken(str(error)) from error
        finally:
            body.close()

    def _call(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - botocore has no types
        try:
            return getattr(self._client, name)(**arguments)
        except self._errors.ClientError as error:
            raise self._explained(error.response, str(arguments.get("Key", ""))) from error
        except self._errors.NoCredentialsError as error:
            raise DownloadError("AccessDenied", self._denied(str(error))) from error
        except (self._errors.BotoCoreError, OSError) as error:
            raise Broken(str(error)) from error

    def _explained(self, answer: dict[str, Any], key: str) -> Exception:
        said: dict[str, Any] = answer.get("Error", {})
        code, status = str(said.get("Code", "")), answer["ResponseMetadata"]["HTTPStatusCode"]
        what = f"{code}: {said.get('Message', '')}".strip(": ")
        if code == "NoSuchBucket":
            text = f"{self.label}: no bucket {self._bucket}: correct the address or the endpoint"
            return DownloadError("NotFound", text)
        if status == 404:
            gone = key or self._prefix
            return DownloadError("NotFound", f"{self.label}: no object {gone}: correct the address")
        if code == "InvalidObjectState":
            text = f"{self.label}: {key} is in an archive's storage class: restore it first"
            return DownloadError("DownloadFailed", text)
        if status in (401, 403) or code in _OF_KEYS:
            return DownloadError("AccessDenied", self._denied(what))
        if status == 412:
            text = f"{self.label}: {key} changed while it was downloaded: download it again"
            return DownloadError("DownloadFailed", text)
        if status in (301, 307, 400):
            text = f"{self.label}: {what}: set AWS_REGION to the bucket's region"
            return DownloadError("DownloadFailed", text)
        return Broken(f"{self.label}: {what} (status {status})")

    def _denied(self, what: str) -> str:
        return (
            f"{self.label}: access denied ({what}): give the key s3:ListBucket of the bucket and"
            " s3:GetObject below the path (and kms:Decrypt, where a key of KMS encrypts it), or"
            " correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def hub_failures() -> tuple[type[Exception], ...]:
    """What the hub's library raises where the hub, or the way to it, does not work."""
    from huggingface_hub import errors

    library: Any = errors  # its HTTPError is that of requests or httpx, by its version
    return OSError, ValueError, errors.HfHubHTTPError, library.HTTPError


class HubFolder:
    """A model repository of the Hugging Face hub, at one commit. HF_TOKEN and HF_ENDPOINT hold."""

    def __init__(self, name: str, revision: str) -> None:
        self.label = f"hf://{name}"
        self.commit = ""
        self._name, self._revision = name, revision or None

    def files(self) -> list[RemoteFile]:
        """The repository's files; git's names of small ones are their checksums."""
        import huggingface_hub
        from huggingface_hub import errors

        api: Any = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        try:
            info = api.model_info(
                self._name, revision=self._revision, files_metadata=True, timeout=_READ_S
            )
        except errors.GatedRepoError as error:
            text = f"{self.label}: access must be granted on its page, and HF_TOKEN be its reader's"
            raise DownloadError("AccessDenied", text) from error
        except errors.RevisionNotFoundError as error:
            text = f"{self.label}: no revision {self._revision}: name a branch, tag or commit"
            raise DownloadError("NotFound", text) from error
        except errors.RepositoryNotFoundError as error:
            text = f"{self.label}: no such repository: correct the name, or set HF_TOKEN where it"
            raise DownloadError("NotFound", f"{text} is private") from error
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            raise self._refused(status, _first_line(error)) from error
        except hub_failures() as error:
            raise Broken(_first_line(error)) from error
        self.commit = str(info.sha)
        return [self._file(sibling) for sibling in info.siblings[:_MOST_LISTED]]

    def _file(self, sibling: Any) -> RemoteFile:  # noqa: ANN401 - the hub's library is half typed
        blob, digest = str(sibling.blob_id or ""), str(getattr(sibling.lfs, "sha256", ""))
        checksum = Checksum("sha256", digest) if digest else Checksum("git", blob) if blob else None
        return RemoteFile(str(sibling.rfilename), int(sibling.size or 0), digest or blob, checksum)

    def read(self, file: RemoteFile, begin: int, end: int) -> Generator[bytes]:
        """A range of a file of the commit that was listed."""
        import huggingface_hub

        hub: Any = huggingface_hub
        endpoint = os.environ.get("HF_ENDPOINT") or None
        url = hub.hf_hub_url(self._name, file.name, revision=self.commit, endpoint=endpoint)
        request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-{end - 1}"})
        for name, value in hub.utils.build_hf_headers().items():
            # The store that the hub sends us to must not see the token.
            request.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=_READ_S) as answer:
                whole = answer.status == 200 and begin == 0 and end == file.size
                if answer.status != 206 and not whole:
                    raise DownloadError(
                        "DownloadFailed", f"{self.label}: the hub answers no ranges of a file"
                    )
                while chunk := answer.read(_CHUNK):
                    yield chunk
        except urllib.error.HTTPError as error:
            raise self._refused(error.code, f"{file.name}: status {error.code}") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise Broken(str(error)) from error

    def _refused(self, status: int, what: str) -> Exception:
        if status in (401, 403):
            text = f"{self.label}: access denied ({what}): correct HF_TOKEN"
            return DownloadError("AccessDenied", text)
        if status == 404:
            return DownloadError("NotFound", f"{self.label}: not found ({what}): correct the name")
        return Broken(f"{self.label}: {what}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
