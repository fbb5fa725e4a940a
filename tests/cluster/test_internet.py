"""docs/internet.md, run as written on a real node, and what strangers get from such a fleet.

One fleet for all tests, in this order: the page's commands make it, replace its keys and its
certificate under load, and at the end its certificate has expired. A cloud's load balancer is an
address in the Service's status, which the node's kube-proxy serves; the network's other addresses
are the node's own, from which the page's commands come, and the pods', from which clients come.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from tests.cluster.fleetkit import (
    IMAGE_VALUES,
    ROOT,
    SYSTEM,
    FleetClient,
    client_pod,
    load_images,
    small_cases,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import ENVIRONMENT_PATH, worker_test_template
from tests.docs.test_docs import Block, blocks_of, not_printed

PAGE = ROOT / "docs/internet.md"
NAMESPACE = "llm"
HOST = "chat.example.com"
BALANCER = "203.0.113.10"
CLIENTS = ["10.244.0.0/24", "172.31.255.0/24"]
"""In place of the page's sourceRanges."""
KEY_FILE, AUTHORITY = "/tmp/load-key", "/authority/ca.crt"
"""In the client's pod."""
REGISTRY = "--set images.registry=registry.example.com/llm"
LOAD_PER_S = 3.0
TAKEN_S = 120
"""A changed Secret is read by routers within so much: the kubelet's minute and then some."""
BLOCK_S = 240
_MARK = "needs a cluster; tests/cluster/test_internet.py runs it"
_HEADERS = {
    *("connection", "content-length", "content-type", "date", "retry-after", "transfer-encoding"),
    *("www-authenticate", "x-request-id", "request-id", "allow"),
}
"""What a refusal may have, besides the limits of who has a key."""
_KEY = ("-H", "@private/team-a.header")
_ASKS = ("-H", "Access-Control-Request-Method: POST")
_INNER = re.compile(
    r"Traceback|\.py\b|/(usr|opt|etc|home|root|tmp|var|models|run)/|\b10\.(96|244)\.\d|chat-(pre|de|ro)|"
    r"\bllm\b|sha256|uvicorn|uvloop|httptools|quart|aiohttp|msgspec|openssl|python",
    re.IGNORECASE,
)
"""What a refusal may not have: places, addresses, objects and libraries."""


@dataclass(frozen=True)
class Answer:
    """What curl got."""

    status: int
    headers: dict[str, str]
    body: str
    error: str


class Page:
    """The page's commands, by its headings, and requests from where they run."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self._cluster = cluster
        config = folder / "kubeconfig"
        config.write_text(cluster.kubeconfig.read_text())
        environment = {**cluster.client_environment(), "KUBECONFIG": str(config)}
        tools = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self._environment = {**environment, "PATH": tools}
        (folder / "helm").symlink_to(ROOT / "helm")
        (folder / "fleet.yaml").write_text(yaml.safe_dump(self._document()))

    def _document(self) -> dict[str, Any]:
        """The page's fleet, as this node can run it."""
        (block,) = [b for b in self.blocks("The fleet") if b.language == "yaml"]
        document: dict[str, Any] = yaml.safe_load(block.code)
        for pool in document["spec"]["pools"]:
            pool["template"] = worker_test_template()
        assert document["spec"]["router"]["service"]["sourceRanges"]
        document["spec"]["router"]["service"]["sourceRanges"] = CLIENTS
        document["spec"]["drain"] = {"timeoutSeconds": 5}
        return document

    def blocks(self, heading: str) -> list[Block]:
        """The blocks below that heading."""
        (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
        section = self.folder / "section.md"
        section.write_text(text)
        return blocks_of(section)

    def run(self, heading: str, *, number: int | None = None) -> str:
        """Run the commands below the heading, or one block of them; what they print."""
        blocks = [b for b in self.blocks(heading) if b.language == "sh"]
        assert blocks
        assert all(_MARK in b.note for b in blocks)
        chosen = blocks if number is None else [blocks[number]]
        script = "\n".join(["set -euo pipefail", *(block.code for block in chosen)])
        images = " ".join(f"--set {value}" for value in IMAGE_VALUES)
        done = self.bash(script.replace(REGISTRY, images))
        told = self._cluster.explain(NAMESPACE) if done.returncode else ""
        assert not done.returncode, f"{script}\n{done.stdout}\n{done.stderr}\n{told}"
        return done.stdout

    def bash(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run it where the page's commands run."""
        return subprocess.run(
            self._cluster.client_argv(["bash", "-c", script]),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=BLOCK_S,
        )

    def key(self, name: str) -> str:
        """The client key in private/NAME.header."""
        return (self.folder / f"private/{name}.header").read_text().strip().rpartition(" ")[2]

    def ask(self, *argv: str, to: str = BALANCER, port: int = 443) -> Answer:
        """curl: `argv` ends in a path or an URL. `to`: the balancer, or a router's address."""
        *options, url = argv
        url = url if url.startswith("http") else f"https://{HOST}{url}"
        place = f"{HOST}:443:{to}:{port}"
        fixed = ["curl", "-sSi", "--path-as-is", "--max-time", "20", "--cacert", "private/ca.crt"]
        done = subprocess.run(
            self._cluster.client_argv([*fixed, "--connect-to", place, *options, url]),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        head, _, body = done.stdout.partition("\n\n")
        first, *lines = head.splitlines() or [""]
        named = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in named}
        status = int(first.split()[1]) if first else 0
        return Answer(status, headers, body, done.stderr)


@pytest.fixture(scope="module")
def page(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Generator[Page]:
    """The chart, and the page's fleet, ready; both gone afterwards."""
    load_images(node_cluster)
    page = Page(node_cluster, tmp_path_factory.mktemp("internet"))
    try:
        for heading in ("Install", "Who may use it", "Its certificate"):
            page.run(heading)
        _start_client(node_cluster, page.folder)
        shown = page.run("The fleet")
        assert HOST in shown
        patch = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": BALANCER}]}}})
        argv = ("patch", "service", "chat-router", "--subresource=status", "--type=merge")
        node_cluster.kubectl("-n", NAMESPACE, *argv, "-p", patch)
        wait_for(lambda: page.ask("/health").status == 200, 20, "the balancer's address serves")
        yield page
    finally:
        argv = ("uninstall", "xpyd", "-n", SYSTEM, "--wait", "--timeout=4m")
        node_cluster.helm(*argv, check=False, timeout_s=250)
        argv = ("namespace", NAMESPACE, "--wait=false", "--ignore-not-found")
        node_cluster.kubectl("delete", *argv)


def _start_client(cluster: Cluster, folder: Path) -> None:
    """The client's pod, with the machine's Python libraries, the authority and the host's name."""
    argv = ("create", "configmap", "authority", f"--from-file={folder}/private/ca.crt")
    cluster.kubectl("-n", NAMESPACE, *argv)
    pod = client_pod()
    template = worker_test_template()["spec"]
    container = pod["spec"]["containers"][0]
    mount = {"name": "authority", "mountPath": str(Path(AUTHORITY).parent)}
    container["volumeMounts"] = [*template["containers"][0]["volumeMounts"], mount]
    container["env"] = [
        {"name": "PYTHONPATH", "value": ENVIRONMENT_PATH},
        {"name": "SSL_CERT_FILE", "value": AUTHORITY},
    ]
    pod["spec"]["volumes"] = [
        *template["volumes"],
        {"name": "authority", "configMap": {"name": "authority"}},
    ]
    pod["spec"]["hostAliases"] = [{"ip": BALANCER, "hostnames": [HOST]}]
    cluster.kubectl("-n", NAMESPACE, "apply", "-f", "-", input=json.dumps(pod))


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster, page: Page) -> FleetClient:
    return FleetClient(node_cluster, NAMESPACE, url=f"https://{HOST}", key_file=KEY_FILE)


def routers(fleet: FleetClient) -> list[str]:
    """The addresses of the two router pods."""
    found = [pod["status"]["podIP"] for pod in fleet.pods("router")]
    assert len(found) == 2
    return found


def statuses(page: Page, fleet: FleetClient, key: str) -> set[int]:
    """What each router says to this key."""
    bearer = f"Authorization: Bearer {key}"
    return {
        page.ask("-H", bearer, "/v1/models", to=router, port=10001).status
        for router in routers(fleet)
    }


def test_clients_with_a_key_are_served_over_tls(page: Page, fleet: FleetClient) -> None:
    printed = page.run("Ask")
    shown = [b for b in page.blocks("Ask") if b.language == "console"]
    assert not not_printed([Block("console", "", b.code) for b in shown], printed), printed
    (client,) = [b.code for b in page.blocks("Ask") if b.language == "python"]
    fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=60s", timeout_s=70)
    argv = ("exec", "client", "--", "env", f"KEY={page.key('team-a')}", "python3", "-c", client)
    assert "city on the coast" in fleet.kubectl(*argv)


def test_helm_test_asks_a_fleet_with_keys_and_tls_whether_it_serves(page: Page) -> None:
    assert re.search(r"^Phase: +Succeeded$", page.run("Watch"), re.M)


def test_the_service_has_the_port_of_clients_alone_and_the_ingress_leads_to_it(
    page: Page, fleet: FleetClient
) -> None:
    service = fleet.read("services", "chat-router")["spec"]
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(443, "http")]
    assert service["loadBalancerSourceRanges"] == CLIENTS
    ingress = json.loads(fleet.kubectl("get", "ingress", "chat-router", "-o", "json"))
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    (port,) = service["ports"]
    assert (rule["host"], path["path"]) == (HOST, "/v1")
    backend = {"name": "chat-router", "port": {"name": port["name"]}}
    assert path["backend"]["service"] == backend
    assert ingress["spec"]["tls"] == [{"hosts": [HOST], "secretName": "chat-tls"}]
    marks = ingress["metadata"]["annotations"]
    assert marks["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    assert fleet.document()["status"]["hosts"] == [HOST]


def test_strangers_get_the_status_that_the_page_shows(page: Page) -> None:
    (shown,) = [b.code for b in page.blocks("What strangers get") if b.language == "console"]
    assert page.run("What strangers get").split() == shown.split()


@pytest.mark.parametrize(
    ("status", "argv"),
    [
        (401, ["/v1/models"]),
        (401, ["-H", "Authorization: Bearer xpyd-guess", "/v1/models"]),
        (401, ["-H", "Authorization: Basic YTpi", "-d", "{}", "/v1/chat/completions"]),
        (401, ["-H", "x-api-key: xpyd-guess", "-d", "{}", "/v1/messages"]),
        (401, ["/v1/../../../etc/passwd"]),
        (401, ["-H", "X-Forwarded-For: 127.0.0.1", "-H", "X-Original-URL: /metrics", "/v1"]),
        (401, ["-H", "Origin: https://evil.example", "/v1/models"]),
        (404, ["/metrics"]),
        (404, ["/admin/instances"]),
        (404, [*_KEY, "/instances"]),
        (404, [*_KEY, "/no/such/path"]),
        (404, [*_KEY, "-d", '{"model": "gpt", "prompt": "a"}', "/v1/completions"]),
        (400, [*_KEY, "-d", "{no json", "/v1/completions"]),
        (400, [*_KEY, "-d", '{"model": "demo", "prompt": {"a": [1]}}', "/v1/completions"]),
        (405, [*_KEY, "-X", "DELETE", "/v1/models"]),
        (403, [*_KEY, "-H", "Host: evil.example", "/v1/models"]),
        (403, ["-X", "OPTIONS", "-H", "Origin: https://evil.example", *_ASKS, "/v1/completions"]),
        (400, [f"http://{HOST}:443/v1/models"]),
    ],
    ids=lambda value: " ".join(value)[-50:] if isinstance(value, list) else str(value),
)
def test_a_refusal_has_the_right_status_and_says_nothing_of_the_inside(
    page: Page, status: int, argv: list[str]
) -> None:
    answer = page.ask(*argv)
    assert answer.status == status, answer
    named = {name for name in answer.headers if not name.startswith("x-ratelimit-")}
    assert not named - _HEADERS, answer
    said = f"{answer.headers} {answer.body}"
    assert _INNER.search(said) is None, said
    assert page.key("team-a") not in said


def test_pages_of_the_named_site_are_let_in_and_others_cannot_read_answers(page: Page) -> None:
    for origin, shown in (("https://app.example.com", True), ("https://evil.example", False)):
        answer = page.ask(*_KEY, "-H", f"Origin: {origin}", "/v1/models")
        assert answer.status == 200
        assert ("access-control-allow-origin" in answer.headers) == shown, answer


def served_certificates(page: Page, fleet: FleetClient) -> set[str]:
    """The certificates that the routers show now, in PEM."""
    script = (
        "import ssl, sys; [print(ssl.get_server_certificate((a, 10001))) for a in sys.argv[1:]]"
    )
    done = page.bash(f"'{sys.executable}' -c '{script}' {' '.join(routers(fleet))}")
    found = re.findall(r"-----BEGIN.*?END CERTIFICATE-----\n", done.stdout, re.S)
    assert len(found) == 2, done
    return set(found)


def test_no_request_fails_while_a_clients_key_and_the_certificate_are_replaced(
    page: Page, fleet: FleetClient
) -> None:
    """Each request has a connection of its own, and so a handshake."""
    before = page.key("team-a")
    (first,) = served_certificates(page, fleet)

    def give(name: str) -> None:
        argv = ("exec", "-i", "client", "--", "sh", "-c", f"cat > {KEY_FILE}.new")
        fleet.kubectl(*argv, input=page.key(name))
        fleet.kubectl("exec", "client", "--", "mv", f"{KEY_FILE}.new", KEY_FILE)

    give("team-a")

    def renewed() -> bool:
        return first not in served_certificates(page, fleet)

    with fleet.under_load(small_cases(), rate=LOAD_PER_S) as report:
        page.run("Renew the certificate")
        page.run("Replace a client's key", number=0)
        wait_for(
            renewed,
            TAKEN_S,
            "routers have the new certificate",
            interval_s=1.0,
            explain=fleet.explain,
        )
        assert statuses(page, fleet, before) == statuses(page, fleet, page.key("team-a-2")) == {200}
        give("team-a-2")
        page.run("Replace a client's key", number=1)

        def refused() -> bool:
            return statuses(page, fleet, before) == {401}

        wait_for(refused, TAKEN_S, "the old key is refused", interval_s=1.0, explain=fleet.explain)
    assert report["failed"] == 0, report
    assert report["requests"] > 10, report
    assert statuses(page, fleet, page.key("team-a-2")) == {200}
    small = ("-d", '{"model": "demo", "prompt": "a", "max_tokens": 1}', "/v1/completions")
    limited = page.ask("-H", "@private/team-a-2.header", *small)
    assert limited.headers["x-ratelimit-limit-requests"] == "16", limited


def test_a_revoked_key_is_refused_and_others_are_not(page: Page, fleet: FleetClient) -> None:
    batch, team = page.key("batch"), page.key("team-a-2")
    assert statuses(page, fleet, batch) == {200}
    page.run("Revoke a client's key")

    def revoked() -> bool:
        return statuses(page, fleet, batch) == {401}

    wait_for(revoked, TAKEN_S, "the revoked key is refused", interval_s=1.0, explain=fleet.explain)
    assert statuses(page, fleet, team) == {200}


def test_an_expired_certificate_is_refused_by_clients_and_said_by_routers(
    page: Page, fleet: FleetClient
) -> None:
    private = page.folder / "private"
    authority = trustme.CA.from_pem(
        (private / "ca.crt").read_bytes(), (private / "ca.key").read_bytes()
    )
    begin = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    old = authority.issue_cert(HOST, not_before=begin, not_after=begin + datetime.timedelta(days=1))
    data = {
        "tls.crt": old.cert_chain_pems[0].bytes(),
        "tls.key": old.private_key_pem.bytes(),
    }
    coded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    patch = json.dumps({"data": coded})
    fleet.kubectl("patch", "secret", "chat-tls", "--type=merge", "-p", patch)

    def refused() -> bool:
        said = [page.ask("/health", to=router, port=10001) for router in routers(fleet)]
        return all("certificate has expired" in answer.error for answer in said)

    wait_for(
        refused, TAKEN_S, "clients refuse the certificate", interval_s=1.0, explain=fleet.explain
    )
    for pod in fleet.pods("router"):
        assert "the certificate EXPIRED" in fleet.kubectl("logs", pod["metadata"]["name"])
        metrics = f"http://{pod['status']['podIP']}:10002/metrics"
        found = page.bash(f"curl -sSf {metrics}").stdout
        (until,) = re.findall(
            r'^xpyd_router_tls_not_after_seconds\{use="server"\} (\S+)', found, re.M
        )
        assert float(until) < time.time()
    # Probes and the operator do not mind: nothing is restarted for it.
    assert fleet.condition("Available")["status"] == "True"


def test_no_log_has_a_key(page: Page, fleet: FleetClient) -> None:
    secret = fleet.read("secrets", fleet.document()["status"]["kvKeySecret"])
    keys = [page.key(name) for name in ("team-a", "team-a-2", "batch")]
    keys += [base64.b64decode(value).decode() for value in secret["data"].values()]
    keys += (page.folder / "private/tls.key").read_text().splitlines()[1:-1]
    places = [(NAMESPACE, pod["metadata"]["name"]) for pod in fleet.find("pods")]
    (operator,) = fleet.cluster.kubectl("-n", SYSTEM, "get", "pods", "-o", "name").split()
    said = ""
    for namespace, name in [*places, (SYSTEM, operator)]:
        said += fleet.cluster.kubectl("-n", namespace, "logs", name, "--all-containers")
    for told in ("refused 401", "key=team-a", "unknown key", "revoked key of batch"):
        assert told in said
    assert not [key for key in keys if key in said]
    assert "sha256:" not in said
