"""What a fleet document says of its router reaches the router: from the document to its config."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tests.operator.fleets import cpu_pool, document, parsed
from tests.operator.object_samples import SETTINGS, placement_of, pod_templates
from xpyd_core.errors import UserError
from xpyd_operator.controller.decision.state import read
from xpyd_operator.manifests import names
from xpyd_operator.manifests.entry import client_service, routes
from xpyd_operator.manifests.refusals import router_args_problems
from xpyd_operator.manifests.router_flags import FLAGS
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import ROUTER
from xpyd_operator.up.checks import check_local
from xpyd_router.admission import AdmissionLimits
from xpyd_router.command import command, read_config
from xpyd_router.config import RouterConfig
from xpyd_router.policy.base import Slo


def args_of(router: dict[str, Any], **spec: Any) -> list[str]:
    """The router's arguments by a document with these settings."""
    pools = [cpu_pool("a", "Aggregated")]
    spec = {"kvTransfer": {"insecure": True}, **spec}
    fleet = parsed(pools=pools, router=router, **spec)
    (found,) = [pool for pool in fleet_want(fleet, model="/m").pools if pool.name == ROUTER]
    return list(found.template.args)


def config_of(router: dict[str, Any], **spec: Any) -> RouterConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.configure(parser)
    return read_config(parser.parse_args(args_of(router, **spec)))


def test_limits_queue_and_an_empty_side_reach_the_router() -> None:
    found = config_of(
        {
            "onNoPrefill": "PrefillOnDecode",
            "limits": {"requests": 7, "tokens": 8000},
            "queue": {"size": 9, "memory": "2Mi", "timeoutSeconds": 11},
        }
    )
    assert found.on_no_prefill == "PrefillOnDecode"
    assert found.limits == AdmissionLimits(
        requests=7, tokens=8000, queue_entries=9, queue_bytes=2 << 20, queue_timeout_s=11.0
    )
    assert found.pair_wait_s == 11.0


def test_policies_and_objectives_reach_the_router() -> None:
    found = config_of(
        {"policy": "SloAware", "slo": {"ttftMilliseconds": 800, "itlMilliseconds": 40}}
    )
    assert found.policy == "SloAware"
    assert found.slo == Slo(ttft_s=0.8, itl_s=0.04)
    assert config_of({"slo": {"itlMilliseconds": 40}}).slo == Slo(ttft_s=None, itl_s=0.04)


@pytest.mark.parametrize("processes", [1, 2, 64])
def test_its_processes_reach_the_router(processes: int) -> None:
    assert config_of({"processes": processes}).processes == processes


def test_how_long_a_prompt_stays_on_d_reaches_the_router() -> None:
    assert config_of({"localPrefillTokens": 300}).local_prefill_tokens == 300


@pytest.mark.parametrize("word", ["Queue", "PrefillOnDecode", "Reject"])
def test_the_router_knows_each_word_of_the_document(word: str) -> None:
    assert config_of({"onNoPrefill": word}).on_no_prefill == word


@pytest.mark.parametrize("word", ["Queue", "DecodeOnPrefill", "Reject", None])
def test_what_happens_without_a_d_reaches_the_router(word: str | None) -> None:
    assert config_of({"onNoDecode": word}).on_no_decode == word


@pytest.mark.parametrize("word", ["SameRevision", "Compatible"])
def test_who_may_be_a_pair_reaches_the_router(word: str) -> None:
    assert config_of({}, rollout={"pairing": word}).pairing == word
    assert config_of({}).pairing == "SameRevision"


@pytest.mark.parametrize("word", ["Strict", "Report"])
def test_whether_pairs_are_verified_first_reaches_the_router(word: str) -> None:
    assert config_of({}, kvTransfer={"insecure": True, "verify": word}).kv_verify == word.lower()
    assert config_of({}).kv_verify == "report"


def test_the_documents_defaults_are_the_routers() -> None:
    said = config_of({"limits": {}, "queue": {}, "slo": {}})
    assert said == config_of({}) == RouterConfig(kv_insecure=True)


def test_what_is_the_routers_default_is_not_said() -> None:
    queue = {"size": 1024, "memory": "256Mi", "timeoutSeconds": 60}
    plain = args_of({})
    said = {
        "processes": 1,
        "onNoPrefill": "Queue",
        "localPrefillTokens": 0,
        "limits": {},
        "queue": queue,
    }
    assert args_of(said) == plain
    unsaid = ("queue", "max-", "local", "processes")
    assert not [arg for arg in plain if any(word in arg for word in unsaid)]


BAD = {
    "--drain-second=3": (
        "'--drain-second=3' is no flag of the router; did you mean --drain-seconds?"
    ),
    "--wholly-unknown": (
        "'--wholly-unknown' is no flag of the router; docs/router.md has all flags"
    ),
    "--max-tries": "--max-tries needs a value",
    "--max-tries=many": "--max-tries: expected a whole number, got 'many'",
    "--probe-timeout=soon": "--probe-timeout: expected a number, got 'soon'",
    "--max-body-bytes=lots": (
        "--max-body-bytes: 'lots' is not a size; write bytes like 1073741824, 8e9, 4Gi or 500M"
    ),
    "--on-no-prefill=Wait": (
        "--on-no-prefill: expected Queue, PrefillOnDecode, Reject, got 'Wait'"
    ),
    "--no-access-log=1": "--no-access-log takes no value",
    "--port=1": "--port is set by xpyd; use spec.router.service.port",
    "--admin-port=1": "--admin-port is set by xpyd; leave it out",
    "--admin-key-file=/k": "--admin-key-file is set by xpyd; use spec.router.adminKeySecretRef",
    "--ssl-certfile=/c": "--ssl-certfile is set by xpyd; use spec.router.tls",
    "--ssl-keyfile=/k": "--ssl-keyfile is set by xpyd; use spec.router.tls",
    "--ssl-ca-certs=/a": "--ssl-ca-certs is set by xpyd; use spec.router.tls.clientCaSecretName",
    "--processes=2": "--processes is set by xpyd; use spec.router.processes",
    "--kv-verify=strict": "--kv-verify is set by xpyd; use spec.kvTransfer.verify",
}


@pytest.mark.parametrize(("arg", "line"), BAD.items())
def test_a_bad_flag_is_refused_by_the_operator_and_locally(arg: str, line: str) -> None:
    """Before anything starts: a router would end at its start, again and again."""
    router = {"args": ["--drain-seconds=9", arg]}
    bad, fleet = document(router=router), parsed(router=router)
    assert router_args_problems(fleet) == (f"spec.router.args[1]: {line}",)
    bad["metadata"] |= {"uid": "u", "namespace": "ns"}
    assert read(bad, SETTINGS).mistakes == router_args_problems(fleet)
    with pytest.raises(UserError, match=r"1 mistake\n  spec\.router\.args\[1\]: "):
        check_local(fleet, source="fleet.yaml")


def test_arguments_reach_the_router_and_win_over_fields() -> None:
    args = ["--policy=LeastLoaded", "--forward-header=X-Team", "--drain-seconds", "9"]
    found = config_of({"policy": "Random", "args": args})
    assert (found.policy, found.forward_headers, found.drain_s) == ("LeastLoaded", ("X-Team",), 9)


def test_the_operator_knows_the_routers_flags() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    command.configure(parser)
    assert set(FLAGS) == {name for one in parser._actions for name in one.option_strings}


def test_a_router_with_tls_mounts_its_secret_and_is_probed_by_https() -> None:
    fleet = parsed("chat", router={"tls": {"secretName": "certificate"}})
    [deployment] = pod_templates(fleet)["router"]
    template = deployment["template"]["spec"]
    [container] = template["containers"]
    args = [arg for arg in container["args"] if arg.startswith("--ssl-")]
    assert args == [
        "--ssl-certfile=/run/xpyd/tls/tls.crt",
        "--ssl-keyfile=/run/xpyd/tls/tls.key",
    ]
    [volume] = [one for one in template["volumes"] if one["name"] == "xpyd-tls"]
    assert volume["secret"]["secretName"] == "certificate"
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "xpyd-tls"]
    assert "subPath" not in mount
    assert probed(container) == [("http", "HTTPS")] * 3
    url = names.endpoint("chat", "team", 443, is_tls=True)
    assert url.startswith("https://")


def probed(container: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    asked = [container[kind]["httpGet"] for kind in kinds]
    return [(one["port"], one.get("scheme", "HTTP")) for one in asked]


def test_routers_that_ask_for_certificates_are_probed_at_the_admin_port() -> None:
    tls = {"secretName": "certificate", "clientCaSecretName": "clients"}
    [deployment] = pod_templates(parsed("chat", router={"tls": tls}))["router"]
    template = deployment["template"]["spec"]
    [container] = template["containers"]
    assert "--ssl-ca-certs=/run/xpyd/client-ca/ca.crt" in container["args"]
    assert secrets_of(template)["xpyd-client-ca"] == ("clients", ["ca.crt"])
    assert probed(container) == [("admin", "HTTP")] * 3


def secrets_of(template: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Volume -> the Secret's name, and the keys of it that the pod gets; [] for all of them."""
    secrets = {one["name"]: one["secret"] for one in template["volumes"] if "secret" in one}
    return {
        name: (one["secretName"], [item["key"] for item in one.get("items", ())])
        for name, one in secrets.items()
    }


def tls_pods(**tls: str) -> dict[str, dict[str, Any]]:
    """The pods of a fleet whose engines have TLS, by pool."""
    pools = [cpu_pool("a", "Aggregated")]
    found = pod_templates(parsed("chat", pools=pools, engine={"tls": {"secretName": "e", **tls}}))
    return {pool: found[pool][0]["template"] for pool in ("router", "a")}


def flags_of(pod: dict[str, Any], *starts: str) -> list[str]:
    return [arg for arg in pod["spec"]["containers"][0]["args"] if arg.startswith(starts)]


def test_engines_with_tls_show_their_certificate_and_routers_verify_it() -> None:
    pods = tls_pods()
    engine, router = pods["a"], pods["router"]
    assert flags_of(engine, "--ssl-") == [
        "--ssl-certfile=/run/xpyd/tls/tls.crt",
        "--ssl-keyfile=/run/xpyd/tls/tls.key",
    ]
    assert secrets_of(engine["spec"])["xpyd-tls"] == ("e", [])
    assert probed(engine["spec"]["containers"][0]) == [("http", "HTTPS")] * 3
    assert engine["metadata"]["annotations"]["xpyd.dev/scheme"] == "https"
    namespace = placement_of(parsed("chat")).namespace
    assert flags_of(router, "--ssl-", "--engine-") == [
        "--engine-ca-file=/run/xpyd/engine-ca/ca.crt",
        f"--engine-server-name=chat-engines.{namespace}.svc",
    ]
    # Not the engines' key: with it a router could pass for an engine.
    assert secrets_of(router["spec"])["xpyd-engine-ca"] == ("e", ["ca.crt"])
    assert probed(router["spec"]["containers"][0]) == [("http", "HTTP")] * 3


def test_routers_show_engines_a_certificate_that_probes_need_not_have() -> None:
    pods = tls_pods(routerSecretName="r", serverName="engines.example")
    assert flags_of(pods["router"], "--engine-")[1:] == [
        "--engine-server-name=engines.example",
        "--engine-certfile=/run/xpyd/router-tls/tls.crt",
        "--engine-keyfile=/run/xpyd/router-tls/tls.key",
    ]
    assert secrets_of(pods["router"]["spec"])["xpyd-router-tls"] == ("r", [])
    assert flags_of(pods["a"], "--ssl-")[2:] == [
        "--ssl-ca-certs=/run/xpyd/router-ca/ca.crt",
        "--ssl-open-probes",
    ]
    assert secrets_of(pods["a"]["spec"])["xpyd-router-ca"] == ("r", ["ca.crt"])
    for pod in pods.values():
        mounts = {one["mountPath"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
        used = {arg.partition("=")[2] for arg in flags_of(pod, "--ssl-", "--engine-")}
        assert {path.rpartition("/")[0] for path in used if "/" in path} <= mounts


ENGINE_TLS = {
    "--engine-ca-file=/c": "use spec.engine.tls.secretName",
    "--engine-server-name=a": "use spec.engine.tls.serverName",
    "--engine-certfile=/c": "use spec.engine.tls.routerSecretName",
    "--engine-keyfile=/k": "use spec.engine.tls.routerSecretName",
}


@pytest.mark.parametrize("arg", ENGINE_TLS)
def test_engines_of_elsewhere_are_verified_by_flags_where_the_document_says_nothing(
    arg: str,
) -> None:
    assert router_args_problems(parsed(router={"args": [arg]})) == ()
    fleet = parsed(router={"args": [arg]}, engine={"tls": {"secretName": "e"}})
    [problem] = router_args_problems(fleet)
    assert problem.endswith(ENGINE_TLS[arg])


def test_what_leads_to_routers_with_tls_speaks_it() -> None:
    ingress = {"host": "chat.example.com", "className": "nginx"}
    fleet = parsed("chat", router={"tls": {"secretName": "certificate"}, "ingress": ingress})
    placement = placement_of(fleet)
    [port] = client_service(fleet, placement)["spec"]["ports"]
    assert port["appProtocol"] == "https"
    [made] = routes(fleet, placement)
    key = "nginx.ingress.kubernetes.io/backend-protocol"
    assert made["metadata"]["annotations"][key] == "HTTPS"
