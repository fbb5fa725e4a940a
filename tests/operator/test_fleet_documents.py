"""The InferenceFleet document: what is taken, and the words with which the rest is refused."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operator.fleets import changed, cpu_pool, document
from xpyd_core.errors import UserError
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet, parse_fleet, parse_object, read_object

EXAMPLES = Path(__file__).parents[2] / "examples"
GPUS = {"resources": {"gpus": 0}}
BASE = document(
    "chat", pools=[cpu_pool("prefill", "Prefill"), cpu_pool("decode", "Decode", replicas=3)]
)

_TEN = [b"x0: &x0 [1]"] + [
    b"x%d: &x%d [%s]" % (n, n, b", ".join([b"*x%d" % (n - 1)] * 10)) for n in range(1, 9)
]
BOMB = b"\n".join(_TEN)
"""Each list is ten times the one before."""


def parse(document: Any) -> InferenceFleet:
    return parse_fleet(yaml.safe_dump(document).encode(), source="f.yaml")


def complaints(document: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse(document)
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"f.yaml: {len(lines)} mistake{'s' if len(lines) > 1 else ''}"
    return lines


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_good_document(file):
    assert load_fleet(file).spec.pools


def test_defaults_are_those_of_the_api():
    spec = parse(BASE).spec
    kv = spec.kv_transfer
    assert (kv.mode, kv.transport, kv.port, kv.on_failure) == (
        "PutAsync",
        "Auto",
        21001,
        "Recompute",
    )
    assert (kv.buffer_size, kv.host_pool_size) == ("10%", None)
    assert (kv.lease_seconds, kv.wait_seconds) == (30, 10)
    assert (spec.heartbeat.interval_milliseconds, spec.heartbeat.missed_beats) == (3000, 3)
    assert (spec.drain.timeout_seconds, spec.router.policy) == (300, "LeastLoaded")
    assert [pool.replicas for pool in spec.pools] == [None, 3]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.model.uri", "file://../demo-model"),
        ("spec.model.servedNames", ["a", "b"]),
        ("spec.engine.args", ["--max-model-len=1024"]),
        ("spec.engine.env", [{"name": "A", "value": "b=c"}, {"name": "B"}]),
        ("spec.pools.0.replicas", 0),
        ("spec.pools", [{"name": "all", "role": "Aggregated", **GPUS}]),
        ("spec.kvTransfer.transport", "TCP"),
        ("spec.kvTransfer.onFailure", "Fail"),
        ("spec.kvTransfer.bufferSize", 0),
        ("spec.kvTransfer.bufferSize", "5%"),
        ("metadata.labels", {"app.kubernetes.io/part-of": "chat"}),
        ("metadata.namespace", "serving"),
        ("metadata.namespace", "1st"),
        ("metadata.uid", "1"),
        ("spec.pools.0.resources", {}),
        ("spec.pools.0.replicas", None),
        ("spec.kvTransfer", None),
        ("status", {"endpoint": "x"}),
    ],
)
def test_good_values_are_taken(path, value):
    parse(changed(BASE, {path: value}))


@pytest.mark.parametrize("transport", ["UDS", "SharedMemory"])
def test_in_local_mode_there_is_always_a_folder_for_sockets(transport):
    text = json.dumps(changed(BASE, {"spec.kvTransfer.transport": transport})).encode()
    assert parse_fleet(text, source="f", local=True).spec.kv_transfer.transport == transport
    with pytest.raises(UserError, match="sameHostPath: Required value: in a cluster"):
        parse_fleet(text, source="f")
    wrong = json.dumps(changed(BASE, {"spec.kvTransfer.sameHostPath": "relative"})).encode()
    with pytest.raises(UserError, match="must be an absolute path"):
        parse_fleet(wrong, source="f", local=True)


@pytest.mark.parametrize(
    ("written", "size"),
    [("8e9", "8e9"), ("8.0e+9", "8000000000"), ("1073741824", "1073741824"), ("4Gi", "4Gi"),
     ("'10'", "10"), ("1.5G", "1.5G")],
)  # fmt: skip
def test_sizes_are_taken_in_every_spelling_that_yaml_reads_differently(written, size):
    text = yaml.safe_dump(BASE) + f"  kvTransfer: {{hostPoolSize: {written}}}\n"
    assert parse_fleet(text.encode(), source="f").spec.kv_transfer.host_pool_size == size


def test_all_mistakes_are_reported_at_once():
    document = changed(BASE, {"spec.pools.0.role": "Decode"})
    document["metadata"]["name"] = "A"
    document["spec"]["model"]["uri"] = "x"
    document["spec"]["kvTransfer"] = {"transport": "NIXL"}
    document["spec"]["router"] = {"color": "red"}
    document["spec"]["pools"][1] |= {"scaling": {"minReplicas": -1}, "restartPolicy": "Always"}
    lines = complaints(document)
    assert [line.partition(": ")[0] for line in lines] == [
        "metadata.name",
        "spec.model.uri",
        "spec.pools[1].scaling.minReplicas",
        'unknown field "spec.pools[1].restartPolicy"; not supported by this version',
        "spec.pools",
        "spec.kvTransfer.transport",
        'unknown field "spec.router.color"; spec.router has replicas, processes, policy, '
        "prefillPolicy, decodePolicy, slo, localPrefillTokens, onNoPrefill, onNoDecode, limits, "
        "queue, discoveryPort, service, auth, tls, ingress, httpRoute, args, adminKeySecretRef, "
        "template",
    ]
    assert lines[-2].endswith("; NIXL is not supported by this version")


@pytest.mark.parametrize(
    "value", [["s3cret"], {"s3cret": 1}, {"name": "A", "value": {"s3cret": 1}}, {"value": "s3cret"}]
)
def test_a_variable_that_is_wrong_is_not_shown(value):
    lines = complaints(changed(BASE, {"spec.engine.env": [value]}))
    assert lines
    shown = [line for line in lines if "s3cret" in line]
    # A misspelt field's name is shown: whoever writes a value there sees where it is.
    assert all(line.startswith("unknown field") for line in shown)


def test_an_object_of_the_api_is_read_without_the_servers_bookkeeping():
    stored = copy.deepcopy(BASE)
    stored["metadata"] |= {
        "uid": "1",
        "generation": 2,
        "managedFields": [{"manager": "kubectl"}],
        "labels": {f"label-{index}": "x" for index in range(100)},
    }
    stored["status"] = {"conditions": []}
    fleet = parse_object(stored)
    assert fleet.spec == parse(BASE).spec
    assert (fleet.name, fleet.namespace) == ("chat", "default")


def test_an_object_of_other_rules_is_refused_with_all_mistakes():
    stored = changed(BASE, {"spec.canary": {}})
    stored["spec"]["pools"][1]["replicas"] = 5000
    with pytest.raises(UserError, match=r"(?s)chat: 2 mistakes.*5000.*spec\.canary.*left out"):
        parse_object(stored)


def test_an_object_of_newer_crds_is_read_without_what_they_added():
    stored = changed(BASE, {"spec.fades": {"deep": [1]}, "spec.rollout": {"fadePercent": 5}})
    stored["spec"]["pools"][1] |= {"placement": None, "scaling": {"minReplicas": 1, "step": 2}}
    stored["scope"] = "Cluster"
    before = copy.deepcopy(stored)
    fleet, unknown = read_object(stored)
    assert stored == before
    known = changed(BASE, {"spec.rollout": {}})
    known["spec"]["pools"][1]["scaling"] = {"minReplicas": 1}
    assert fleet == parse_object(known) == parse(known)
    assert sorted(unknown) == [
        *("scope", "spec.fades", "spec.pools[1].placement", "spec.pools[1].scaling.step"),
        "spec.rollout.fadePercent",
    ]
    assert read_object(known).unknown == ()
    assert len(complaints(stored)) == len(unknown), "a file with them is refused"


@pytest.mark.parametrize(
    ("field", "value"),
    [("spec.rollout.maxSurgePercent", 101), ("spec.kvTransfer.mode", "Later"), ("spec.pools", [])],
)
def test_what_is_known_is_checked_beside_what_is_not(field: str, value: Any):
    stored = changed(BASE, {field: value, "spec.fades": True})
    with pytest.raises(UserError) as caught:
        read_object(stored)
    head, mistake, left_out = str(caught.value).split("\n  ")
    assert head == "chat: 2 mistakes"
    assert mistake.startswith(f"{field}: ")
    assert (
        left_out == 'unknown field "spec.fades"; left out, as the CRDs are newer than this version'
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "f: no document; one file holds one InferenceFleet"),
        (b"a: 1\n---\nb: 2", "f: 2 documents; one file holds one InferenceFleet"),
        (b"[1]", "f: expected a map with apiVersion, kind, metadata and spec"),
        (b"kind: Pod", "f: kind: given 'Pod'; supported values: InferenceFleet"),
        (b"apiVersion: v1", "f: apiVersion: given 'v1'; supported values: xpyd.dev/v1alpha1"),
        (b"a: {b: 1, b: 2}", "f, line 1, column 11: key 'b' is there twice"),
        (b"a: &x {c: 1}\nb: {<<: *x}", "f, line 2, column 5: merge keys (<<) are not supported"),
        (b"a: *b", "f, line 1, column 4: found undefined alias 'b'"),
        (b"\xff\xfe", "f: not UTF-8 text (byte 0)"),
        (b"[" * 2000, "f: nested too deeply"),
        (b"a: !!int x", "f: invalid literal for int()"),
        (b"a: !!timestamp 2020-99-99", "f: month must be in 1..12"),
        (b"a: \x01", "f: unacceptable character #x0001: special characters are not allowed"),
        (b"x" * (1 << 21), "f: more than 1048576 bytes"),
        (b"a: &x {b: *x}", "f: deeper than 100 levels"),
        (BOMB, "f: more than 200000 values; has it many aliases?"),
    ],
)
def test_a_file_that_is_no_document_is_refused_with_the_place(content, complaint):
    with pytest.raises(UserError) as caught:
        parse_fleet(content, source="f")
    assert str(caught.value).startswith(complaint)


def test_text_that_is_no_unicode_is_a_mistake_like_others():
    content = json.dumps({**BASE, "spec": {**BASE["spec"], "engine": {"args": ["@"]}}})
    with pytest.raises(
        UserError, match=r"spec\.engine\.args\[0\]: Invalid value: not Unicode text"
    ):
        parse_fleet(content.replace("@", "\\uD800").encode(), source="f")


def test_aliases_are_taken_as_kubectl_takes_them():
    content = json.dumps(BASE).encode()[:-1] + b', "status": [&a {x: 1}, *a, *a]}'
    assert parse_fleet(content, source="f").metadata.name == BASE["metadata"]["name"]


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        load_fleet(Path("nowhere.yaml"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
PATHS = [
    "apiVersion", "kind", "metadata", "metadata.name", "spec", "spec.model", "spec.model.uri",
    "spec.model.servedNames", "spec.engine", "spec.engine.args", "spec.engine.env", "spec.pools",
    "spec.pools.0", "spec.pools.0.role", "spec.pools.0.resources", "spec.kvTransfer",
    "spec.kvTransfer.bufferSize", "spec.router", "spec.heartbeat", "spec.drain", "spec.x",
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(path=st.sampled_from(PATHS), value=VALUES)
def test_any_junk_in_any_field_gives_a_user_error_or_a_fleet(path, value):
    text = yaml.safe_dump(changed(BASE, {path: value}), allow_unicode=True)
    with contextlib.suppress(UserError):
        parse_fleet(text.encode("utf-8", "surrogatepass"), source="f")
