"""Checkpoints come from S3 whole and right, or the error says why: cuts, wrong bytes, kills, two
at once."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import small_disk
from tests.worker.s3_kit import (
    KEYS,
    Hub,
    Road,
    Store,
    answering,
    checkpoint,
    environ,
    files_in,
    left_beside,
    running_store,
    under,
)
from xpyd_core.errors import UserError
from xpyd_worker.download.command import served
from xpyd_worker.download.crc import crc32c, crc64nvme
from xpyd_worker.download.folder import FolderLock
from xpyd_worker.download.plan import MANIFEST, DownloadError, read_manifest
from xpyd_worker.download.transfer import Limits, Progress, Want, download

QUICK = Limits(parallel=4, part_bytes=1 << 18, retry_s=3.0, wait_s=20.0, lease_s=1.0)
SERVED = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with running_store() as found:
        yield found


@pytest.fixture(autouse=True)
def _reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "XPYD_POD_IP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    return f"b{hashlib.sha256(request.node.name.encode()).hexdigest()[:20]}"


@pytest.fixture
def road(store: Store) -> Iterator[Road]:
    found = Road(store)
    yield found
    found.close()


def want(store: Store | Road, bucket: str, folder: Path, **more: object) -> Want:
    """A download of the bucket's folder `m`."""
    found = Want(f"s3://{bucket}/m", folder, endpoint=store.url, limits=QUICK)
    return replace(found, **more)  # pyright: ignore[reportArgumentType]


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes of which no two places are alike."""
    return random.Random(seed).randbytes(size)


def test_a_checkpoint_of_a_bucket_becomes_a_folder_with_what_serving_reads(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    files = checkpoint(weights=noise(1_000_000))
    store.put(bucket, under("m", files))
    done = download(want(store, bucket, tmp_path / "models" / "m"))
    assert files_in(done.folder) == {name: files[name] for name in SERVED}
    assert not list(left_beside(done.folder))
    manifest = read_manifest((done.folder / MANIFEST).read_bytes())
    assert manifest == done.manifest
    digests = {file.name: file.sha256 for file in done.manifest.files}
    assert digests == {n: hashlib.sha256(files[n]).hexdigest() for n in SERVED}


def test_a_whole_folder_is_not_downloaded_again_and_asks_the_store_nothing(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    store.put(bucket, under("m", checkpoint()))
    first = download(want(road, bucket, tmp_path / "m"))
    asked, progress = road.connections, Progress()
    again = download(want(road, bucket, tmp_path / "m"), progress)
    assert (first.fetched_bytes > 0, again.fetched_bytes) == (True, 0)
    assert road.connections == asked
    assert (progress.phase, progress.done_bytes) == ("Complete", progress.total_bytes)


def test_cut_connections_cost_only_what_was_not_there_yet(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    files = checkpoint(weights=noise(3_000_000))
    store.put(bucket, under("m", files))
    road.cuts = [70_000, 1, 100_000, 5000, 200_000, 9000, 130_000]
    done = download(want(road, bucket, tmp_path / "m"))
    assert not road.cuts
    assert files_in(done.folder) == {name: files[name] for name in SERVED}
    # Heads and lists are some kilobytes each; what was read twice would be far more.
    assert road.bytes < 3_000_000 + 200_000


def test_a_store_that_cannot_be_reached_is_said_after_the_time_for_it(tmp_path: Path) -> None:
    nowhere = Want(
        "s3://bucket/m",
        tmp_path / "m",
        endpoint="http://127.0.0.1:9",
        limits=replace(QUICK, retry_s=0.0),
    )
    with pytest.raises(DownloadError, match="look whether the source can be reached") as caught:
        download(nowhere)
    assert caught.value.reason == "DownloadFailed"


def test_bytes_that_change_on_their_way_are_a_mismatch_and_no_folder_appears(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    weights = b"w" * 50_000 + b"TRUTH" + b"w" * 50_000
    store.put(bucket, under("m", checkpoint(weights=weights)))
    road.forgery = (b"TRUTH", b"LIE!!")
    with pytest.raises(DownloadError, match=r"model\.safetensors: md5 is .* twice: upload") as no:
        download(want(road, bucket, tmp_path / "m"))
    assert no.value.reason == "ChecksumMismatch"
    assert not (tmp_path / "m").exists()
    road.forgery = None  # what was right is kept, what was wrong is not
    done = download(want(road, bucket, tmp_path / "m"))
    assert (done.folder / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("algorithm", ["SHA256", "SHA1", "CRC32"])
def test_the_checksum_that_an_object_was_uploaded_with_is_the_one_that_counts(
    store: Store, bucket: str, tmp_path: Path, road: Road, algorithm: str
) -> None:
    weights = b"w" * 50_000 + b"TRUTH" + b"w" * 50_000
    store.put(bucket, under("m", checkpoint(weights=weights)), ChecksumAlgorithm=algorithm)
    road.forgery = (b"TRUTH", b"LIE!!")
    with pytest.raises(DownloadError, match=f": {algorithm.lower()} is ") as caught:
        download(want(road, bucket, tmp_path / "m"))
    assert caught.value.reason == "ChecksumMismatch"
    assert download(want(store, bucket, tmp_path / "m")).fetched_bytes


@pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32C"])
def test_an_object_under_a_key_of_kms_is_verified_by_the_crc_that_it_has(
    store: Store, bucket: str, tmp_path: Path, road: Road, algorithm: str
) -> None:
    weights = b"w" * 50_000 + b"TRUTH" + b"w" * 50_000
    crc = crc64nvme() if algorithm == "CRC64NVME" else crc32c()
    crc.update(weights)
    sums = {f"Checksum{algorithm}": base64.b64encode(crc.digest()).decode()}
    store.put(bucket, under("m", checkpoint()))
    kind = {"ChecksumAlgorithm": algorithm, "ServerSideEncryption": "aws:kms"}
    store.put(bucket, {"m/model.safetensors": weights}, **sums, **kind)
    road.forgery = (b"TRUTH", b"LIE!!")
    with pytest.raises(DownloadError, match=f": {algorithm.lower()} is ") as caught:
        download(want(road, bucket, tmp_path / "m"))
    assert caught.value.reason == "ChecksumMismatch"
    assert download(want(store, bucket, tmp_path / "m")).fetched_bytes


def test_an_object_whose_parts_have_several_sizes_is_none_with_wrong_bytes(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    weights = [noise((5 << 20) + 8), noise(5 << 20, 2), noise((5 << 20) + 8, 3)]
    store.put(bucket, under("m", checkpoint()))
    store.put_in_parts(bucket, "m/model.safetensors", weights)
    done = download(want(store, bucket, tmp_path / "m"))
    assert (done.folder / "model.safetensors").read_bytes() == b"".join(weights)


def test_an_object_of_several_uploads_is_verified_by_the_tag_of_its_parts(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    weights = [noise(5 << 20) + b"TRUTH", noise(700_000, 2)]
    store.put(bucket, under("m", checkpoint()))
    store.put_in_parts(bucket, "m/model.safetensors", weights)
    road.forgery = (b"TRUTH", b"LIE!!")
    with pytest.raises(DownloadError, match=": md5 is ") as caught:
        download(want(road, bucket, tmp_path / "m"))
    assert caught.value.reason == "ChecksumMismatch"
    done = download(want(store, bucket, tmp_path / "m"))
    assert (done.folder / "model.safetensors").read_bytes() == b"".join(weights)


def command(store: Store | Road, bucket: str, folder: Path, *more: str) -> list[str]:
    """The download as a Job runs it."""
    return [
        *(sys.executable, "-m", "xpyd_core", "model", "download", f"s3://{bucket}/m"),
        *(f"--to={folder}", f"--endpoint-url={store.url}", "--output=json", "--parallel=2", *more),
    ]


def parts_written(journal: Path) -> int:
    """The bytes of the parts that a journal says are on the disk; its last line may be cut."""
    entries: list[dict[str, Any]] = []
    for line in journal.read_bytes().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    parts = [entry["part"] for entry in entries if "sha256" not in entry]
    return sum(part["end"] - part["begin"] for part in parts)


@pytest.mark.slow  # programs start
def test_a_killed_download_is_taken_over_and_goes_on_where_it_was(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    files = checkpoint()
    shards = {f"model-{i}.safetensors": noise(2_000_000, i) for i in range(4)}
    del files["model.safetensors"]
    store.put(bucket, under("m", {**files, **shards}))
    road.slow_s = 0.01
    with subprocess.Popen(command(road, bucket, tmp_path / "m"), env=environ()) as process:
        journal = tmp_path / ".m.download" / ".journal"
        until = time.monotonic() + 30
        while time.monotonic() < until and not (
            journal.exists() and b"model-0" in journal.read_bytes()
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "m").exists()
    written = parts_written(journal)
    assert written >= 1 << 18
    road.slow_s = 0.0
    done = download(want(road, bucket, tmp_path / "m"))
    all_of_it = {"config.json": files["config.json"], "tokenizer.json": b"{}"} | shards
    assert files_in(done.folder) == all_of_it
    assert done.fetched_bytes == sum(map(len, all_of_it.values())) - written


@pytest.mark.slow  # programs start
def test_two_downloads_at_once_fetch_the_bytes_once(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    weights = noise(3_000_000)
    store.put(bucket, under("m", checkpoint(weights=weights)))
    road.slow_s = 0.005
    programs = [
        subprocess.Popen(
            command(road, bucket, tmp_path / "m"), env=environ(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [program.communicate(timeout=60)[0].splitlines()[-1] for program in programs]
    assert [json.loads(line)["phase"] for line in said] == ["Complete", "Complete"]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == weights
    assert road.bytes < 3_000_000 + 200_000


def test_who_waited_for_a_download_takes_its_folder_as_it_is(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    store.put(bucket, under("m", checkpoint()))
    other = download(want(store, bucket, tmp_path / "other")).folder
    folder, progress, done = tmp_path / "m", Progress(), []
    late = threading.Thread(
        target=lambda: done.append(download(want(store, bucket, folder), progress))
    )
    with FolderLock(folder, "first").held(wait_s=1, waits=print):
        late.start()
        until = time.monotonic() + 20
        while progress.phase != "Waiting" and time.monotonic() < until:
            time.sleep(0.01)
        assert progress.message == "first"
        other.rename(folder)
        before = (folder / MANIFEST).stat().st_mtime_ns
    late.join()
    assert done[0].fetched_bytes == 0
    # Readers of the folder saw it all the time.
    assert (folder / MANIFEST).stat().st_mtime_ns == before


def test_a_full_volume_is_said_with_what_is_needed_and_what_there_is(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    store.put(bucket, under("m", checkpoint(weights=noise(2_000_000))))
    with small_disk.mounted(tmp_path / "disk", "1m") as disk:
        with pytest.raises(DownloadError, match=r"full: it needs 1\.9 MiB more and has") as caught:
            download(want(store, bucket, disk / "m"))
        assert caught.value.reason == "VolumeFull"
        # Said before any byte came.
        assert not list((disk / ".m.download").glob("*.part"))
        assert not (disk / ".m.download" / "config.json").exists()


def test_a_volume_that_fills_up_meanwhile_is_a_full_volume_too(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    store.put(bucket, under("m", checkpoint(weights=noise(2_000_000))))
    with small_disk.mounted(tmp_path / "disk", "3m") as disk:
        road.slow_s = 0.02
        filled = threading.Timer(0.3, lambda: small_disk.fill(disk))
        filled.start()
        with pytest.raises(DownloadError, match="the volume is full") as caught:
            download(want(road, bucket, disk / "m", limits=replace(QUICK, parallel=1)))
        filled.join()
        assert caught.value.reason == "VolumeFull"


@pytest.mark.parametrize(
    ("uri", "reason", "words"),
    [
        ("s3://no-such-bucket/m", "NotFound", "no bucket no-such-bucket"),
        ("s3://BUCKET/none", "NotFound", "no object below it: correct the path"),
        ("s3://BUCKET/m/original", "NotFound", "no config.json in it"),
        ("s3://BUCKET/pickles", "InvalidModel", "convert the weights to safetensors"),
        ("s3://BUCKET/half", "NotFound", "names 1 files that are not there (b.safetensors)"),
    ],
)
def test_an_address_without_a_checkpoint_is_said_with_the_fix(
    store: Store, bucket: str, tmp_path: Path, uri: str, reason: str, words: str
) -> None:
    store.put(bucket, under("m", checkpoint()))
    store.put(bucket, {"pickles/config.json": b"{}", "pickles/model.bin": b"..."})
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode()
    half = {"config.json": b"{}", "a.safetensors": b"a", "model.safetensors.index.json": index}
    store.put(bucket, under("half", half))
    with pytest.raises(DownloadError) as caught:
        download(want(store, bucket, tmp_path / "m", uri=uri.replace("BUCKET", bucket)))
    assert caught.value.reason == reason
    assert words in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_a_key_that_would_leave_the_folder_is_refused(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    store.put(bucket, under("m", {**checkpoint(), "..x.json": b"{}"}))
    road.forgery = (b"m/..x.json", b"m/../x.jso")  # as a store could say that is not a friend
    with pytest.raises(DownloadError, match="cannot be a file's name"):
        download(want(road, bucket, tmp_path / "m"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.download", ".m.lock"]


def test_a_file_that_was_lost_from_a_whole_folder_comes_back_alone(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    files = checkpoint(weights=noise(500_000))
    store.put(bucket, under("m", files))
    done = download(want(store, bucket, tmp_path / "m"))
    (done.folder / "tokenizer.json").unlink()
    again = download(want(store, bucket, tmp_path / "m"))
    assert again.fetched_bytes == len(files["tokenizer.json"])
    assert files_in(done.folder) == {name: files[name] for name in SERVED}


def test_verify_reads_all_bytes_and_mends_what_changed(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    files = checkpoint(weights=noise(500_000))
    store.put(bucket, under("m", files))
    done = download(want(store, bucket, tmp_path / "m"))
    (done.folder / "model.safetensors").write_bytes(noise(500_000, seed=9))
    assert download(want(store, bucket, tmp_path / "m")).fetched_bytes == 0
    assert download(want(store, bucket, tmp_path / "m", verify=True)).fetched_bytes == 500_000
    assert files_in(done.folder) == {name: files[name] for name in SERVED}


def test_a_folder_of_another_is_left_alone(store: Store, bucket: str, tmp_path: Path) -> None:
    store.put(bucket, under("m", checkpoint()))
    (mine := tmp_path / "mine").mkdir()
    with pytest.raises(DownloadError, match="it exists and is no download's: name another folder"):
        download(want(store, bucket, mine))
    download(want(store, bucket, tmp_path / "m"))
    for other in ({"revision": "2"}, {"endpoint": "http://127.0.0.1:9"}):
        with pytest.raises(DownloadError, match=f"it holds s3://{bucket}/m http.*: name another"):
            download(want(store, bucket, tmp_path / "m", **other))


@pytest.mark.slow  # programs start
def test_a_job_says_how_far_it_is_and_how_it_ended(
    store: Store, bucket: str, tmp_path: Path, road: Road
) -> None:
    store.put(bucket, under("m", checkpoint(weights=noise(2_000_000))))
    road.slow_s = 0.05
    arguments = command(road, bucket, tmp_path / "m", "--progress-port=18099")
    address = environ(XPYD_POD_IP="127.9.9.1")
    with subprocess.Popen(arguments, env=address, stdout=subprocess.PIPE, text=True) as process:
        found: dict[str, object] = {}
        until = time.monotonic() + 30
        while time.monotonic() < until and not 0 < int(str(found.get("doneBytes", 0))) < 2_000_029:
            try:
                with urllib.request.urlopen("http://127.9.9.1:18099/progress") as answer:
                    found = json.load(answer)
            except OSError:
                time.sleep(0.01)
        assert (found["phase"], found["totalBytes"]) == ("Downloading", 2_000_029)
        said, _ = process.communicate(timeout=30)
    assert json.loads(said.splitlines()[-1])["folder"] == str(tmp_path / "m")


def test_the_last_line_of_a_failed_job_says_why_for_its_pods_termination_message(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        command(store, bucket, tmp_path / "m"),
        env=environ(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["phase"], last["reason"]) == (2, "Failed", "NotFound")
    assert f"no bucket {bucket}" in last["message"]


def test_denied_access_names_the_rights_that_are_missing(tmp_path: Path) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with answering(lambda *_: (403, body)) as url:
        denied = Want("s3://bucket/m", tmp_path / "m", endpoint=url, limits=QUICK)
        with pytest.raises(DownloadError, match="give the key s3:ListBucket") as caught:
            download(denied)
    assert caught.value.reason == "AccessDenied"
    body = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
    with answering(lambda *_: (400, body)) as url, pytest.raises(DownloadError) as caught:
        download(Want("s3://bucket/m", tmp_path / "m", endpoint=url, limits=QUICK))
    assert caught.value.reason == "AccessDenied"
    assert "ExpiredToken: The token has expired." in str(caught.value)
    body = b"<Error><Code>InvalidObjectState</Code></Error>"
    with answering(lambda *_: (403, body)) as url, pytest.raises(DownloadError, match="restore"):
        download(Want("s3://bucket/m", tmp_path / "m", endpoint=url, limits=QUICK))


def test_progress_is_answered_in_a_pod_with_an_ip_of_six(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPYD_POD_IP", "::1")
    with served(Progress(phase="Waiting", message="other"), 0) as port:
        with urllib.request.urlopen(f"http://[::1]:{port}/progress") as answer:
            assert json.load(answer)["message"] == "other"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://[::1]:{port}/")


def test_addresses_that_are_none_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    for uri, words in (
        ("s3://bucket", "s3://bucket/folder"),
        ("hf://only-a-name", "hf://organisation/name"),
        ("ftp://x/y", "supported are s3://bucket/folder and hf://organisation/name"),
    ):
        with pytest.raises(UserError, match=words):
            download(Want(uri, tmp_path / "m"))
    with pytest.raises(UserError, match="--endpoint-url: minio:9000 is no URL"):
        download(Want("s3://bucket/m", tmp_path / "m", endpoint="minio:9000"))


def test_a_repository_of_the_hub_is_downloaded_at_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint(weights=noise(600_000))
    with answering(Hub(files, lfs=("model.safetensors",))) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        hub = Want("hf://org/model", tmp_path / "m", revision="v1", limits=QUICK)
        done = download(hub)
        with pytest.raises(DownloadError, match=r"not found \(.*correct the name") as caught:
            download(replace(hub, uri="hf://org/none", folder=tmp_path / "n"))
    assert files_in(done.folder) == {name: files[name] for name in SERVED}
    assert done.manifest.commit == Hub.commit
    assert caught.value.reason == "NotFound"


@pytest.mark.parametrize(
    ("name", "algorithm"), [("model.safetensors", "sha256"), ("config.json", "git")]
)
def test_wrong_bytes_of_the_hub_are_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, algorithm: str
) -> None:
    class Liar(Hub):
        def sent(self, name: str) -> bytes:
            data = super().sent(name)
            return data[:-1] + b"!" if name == wrong else data

    wrong = name
    with answering(Liar(checkpoint(), lfs=("model.safetensors",))) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(DownloadError, match=f"{name}: {algorithm} is .* twice") as caught:
            download(Want("hf://org/model", tmp_path / "m", limits=QUICK))
    assert caught.value.reason == "ChecksumMismatch"
