"""`kubectl xpyd status|why|drain|trace`, and the same words of `xpyd`.

Every verb asks kubectl, as the user whom kubectl knows. `xpyd status` and `xpyd trace` are about
the fleets of this machine, unless a namespace or a context is named. See docs/adr/0109.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from xpyd_core import cli
from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_operator.rollout.command import Kubectl
from xpyd_operator.rollout.command import command as rollout
from xpyd_operator.up import commands as local

Json = dict[str, Any]

LOOK_S = 2.0
"""Between two looks of `--watch` and of `drain --wait`."""
_FLEET = "inferencefleet.xpyd.dev"
_POOL = "inferencefleetpool.xpyd.dev"
_GROUPS = "leaderworkersets.leaderworkerset.x-k8s.io"
_LABEL = "xpyd.dev/fleet"
_MOST_LOG_BYTES = 32 << 20
_MOST_LOG_LINES = 50_000


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# status


def _status(args: argparse.Namespace) -> int:
    from xpyd_operator.cluster.drain import say
    from xpyd_operator.cluster.page import page_json, pages_text, pods_of

    kubectl, said = Kubectl(args), ""
    everywhere = ("--all-namespaces",) if args.all_namespaces else ()
    what = f"{_FLEET}/{args.fleet}" if args.fleet else _FLEET
    selector = f"--selector={_LABEL}" + (f"={args.fleet}" if args.fleet else "")
    where = f"in namespace {args.namespace}" if args.namespace else "in kubectl's namespace"
    where = "in any namespace" if args.all_namespaces else where
    while True:
        fleets = kubectl.items("get", what, *everywhere)
        pods = kubectl.items("get", "pods", selector, *everywhere)
        text = pages_text(fleets, pods, _now(), where=where)
        if text != said:
            said = text
            clear = "\x1b[H\x1b[2J" if args.watch and sys.stdout.isatty() else ""
            found = [page_json(one, pods_of(one, pods)) for one in fleets]
            say(args, clear + text, found)
        if not args.watch:
            return 0
        time.sleep(LOOK_S)


# why


def _why(args: argparse.Namespace) -> int:
    from xpyd_operator.cluster.drain import say
    from xpyd_operator.cluster.why import why_json, why_text
    from xpyd_operator.status.children import Children

    kubectl = Kubectl(args)
    fleet = kubectl.fleet(args.fleet)
    about = f"involvedObject.kind=InferenceFleet,involvedObject.name={args.fleet}"
    events = kubectl.items("get", "events", f"--field-selector={about}")
    selector = f"--selector={_LABEL}={args.fleet}"

    def listed(kind: str) -> tuple[Json, ...]:
        return tuple(kubectl.items("get", kind, selector))

    children = Children(
        deployments=listed("deployments.apps"),
        leader_worker_sets=_optional(lambda: listed(_GROUPS)),
        pods=listed("pods"),
        pools=listed(_POOL),
    )
    now = _now()
    say(
        args,
        why_text(fleet, events, children, now),
        why_json(fleet, events, children, now),
    )
    return 0


def _optional(read: Callable[[], tuple[Json, ...]]) -> tuple[Json, ...]:
    """What `read` finds; none where the cluster does not have the kind."""
    try:
        return read()
    except UserError as error:
        if "the server doesn't have a resource type" in str(error):
            return ()
        raise


# drain and trace


def _drain(args: argparse.Namespace) -> int:
    from xpyd_operator.cluster.drain import run_drain

    return run_drain(args)


def _trace(args: argparse.Namespace) -> int:
    from xpyd_operator.up.logs import parse_span

    parse_span(args.since)
    kubectl = Kubectl(args)
    selector = f"--selector={_LABEL}" + (f"={args.fleet}" if args.fleet else "")
    pods = kubectl.items("get", "pods", selector)
    roles = {
        pod["metadata"]["name"]: pod["metadata"]["labels"].get("xpyd.dev/role") for pod in pods
    }

    def lines_of(pod: str) -> list[str]:
        container = "router" if roles[pod] == "router" else "engine"
        bounds = (f"--since={args.since}", f"--tail={_MOST_LOG_LINES}")
        try:
            return kubectl.run(
                *("logs", f"pod/{pod}", f"--container={container}"),
                *(*bounds, f"--limit-bytes={_MOST_LOG_BYTES}"),
            ).splitlines()
        except UserError as error:
            sys.stderr.write(f"{pod}: {error}\n")  # it may just be gone
            return []

    routers = [name for name, role in roles.items() if role == "router"]
    engines = [name for name in roles if name not in routers]
    return _show_trace(args, routers, engines, lines_of)


def _trace_local(args: argparse.Namespace) -> int:
    from xpyd_operator.up.folder import FleetFolder, find_fleet, state_root
    from xpyd_operator.up.logs import lines_since, parse_span

    root = state_root()
    state = FleetFolder(root / args.fleet) if args.fleet else find_fleet(root, None)
    if not state.logs.is_dir():
        raise UserError(f"fleet {args.fleet!r} has no logs in {state.logs}")
    since = datetime.now(UTC) - parse_span(args.since)
    files = {path.name.removesuffix(".log"): path for path in sorted(state.logs.glob("*.log"))}
    routers = [name for name in files if "-router-" in name]
    engines = [name for name in files if name not in routers]
    return _show_trace(args, routers, engines, lambda pod: lines_since(files[pod], since))


def _show_trace(
    args: argparse.Namespace,
    routers: list[str],
    engines: list[str],
    lines_of: Callable[[str], Any],
) -> int:
    from xpyd_operator.cluster.drain import say
    from xpyd_operator.cluster.waterfall import (
        LEAST_ID,
        read_records,
        requests_of,
        waterfall_json,
        waterfall_of,
        waterfall_text,
    )

    wanted: str = args.request
    if len(wanted) < LEAST_ID:
        raise UserError(f"REQUEST-ID {wanted!r}: expected at least {LEAST_ID} characters")
    said = [one for pod in routers for one in read_records(pod, lines_of(pod), wanted)]
    found = requests_of(said, wanted)
    router = found[-1] if found else None
    # The engines that the router names, where they are pods of those names.
    names = (
        {router.fields.get(side, "") for side in ("prefill", "decode")} if router else set[str]()
    )
    request = router.fields.get("request", wanted) if router else wanted
    asked = [pod for pod in engines if pod in names] or engines
    lines = [one for pod in asked for one in read_records(pod, lines_of(pod), request)]
    lines = [one for one in lines if one.fields.get("request") == request]
    waterfall = waterfall_of(router, lines, wanted)
    if waterfall is None:
        sys.stderr.write(
            f"xpyd: no line of {wanted!r} in the logs of {len(routers)} routers and {len(engines)}"
            f" engines since {args.since}: --since looks further back\n"
        )
        return 1
    if len(found) > 1:
        sys.stderr.write(f"{len(found)} requests have this id: this is the last\n")
    say(args, waterfall_text(waterfall), waterfall_json(waterfall))
    return 0


# flags


def _add_place(
    parser: argparse.ArgumentParser, *, formats: tuple[str, ...] = ("text", "json")
) -> None:
    parser.add_argument("--namespace", "-n", metavar="NAME", help="default: kubectl's own")
    parser.add_argument("--context", metavar="NAME", help="kubectl's context")
    if formats:
        parser.add_argument("--output", "-o", choices=formats, default=formats[0])


def _configure_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fleet", nargs="?", metavar="FLEET", help="default: all of the namespace")
    _add_place(parser)
    _add_watch(parser)


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all-namespaces", "-A", action="store_true", help="of a cluster")
    parser.add_argument("--watch", "-w", action="store_true", help="again and again, until Ctrl-C")


def _configure_both(parser: argparse.ArgumentParser) -> None:
    """`xpyd status`: of this machine, or of a cluster where one is meant."""
    local.status.configure(parser)
    _add_place(parser, formats=())
    _add_watch(parser)


def _is_of_cluster(args: argparse.Namespace) -> bool:
    return bool(args.namespace or args.context or getattr(args, "all_namespaces", False))


def _status_of_either(args: argparse.Namespace) -> int:
    if _is_of_cluster(args):
        return _status(args)
    while True:
        code = local.status.run(args)
        if not args.watch:
            return code
        time.sleep(LOOK_S)


def _trace_of_either(args: argparse.Namespace) -> int:
    return _trace(args) if _is_of_cluster(args) else _trace_local(args)


def _configure_why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fleet", metavar="FLEET", help="an InferenceFleet")
    _add_place(parser)


def _configure_drain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pod", metavar="POD", help="the instance: the name of its pod")
    add("--wait", action="store_true", help="until it is gone and, unless --no-replace, replaced")
    add("--timeout", type=float, default=900.0, metavar="SECONDS", help="of --wait")
    add("--no-replace", action="store_true", help="scale the pool down by this instance")
    add("--force", action="store_true", help="also where a PodDisruptionBudget refuses it")
    _add_place(parser)


def _configure_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "the id in the answer, the client's X-Request-Id, or request= of a log line"
    add("request", metavar="REQUEST-ID", help=words)
    add("--fleet", metavar="FLEET", help="only its logs")
    add("--since", default="1h", metavar="SPAN", help="how far back: 30s, 5m, 2h")
    _add_place(parser)


_STATUS_EPILOG = """examples:
  kubectl xpyd status                            all fleets of kubectl's namespace
  kubectl xpyd status chat -n llm --watch        one fleet, again every 2 s
  kubectl xpyd status -A -o json                 all that the user may see"""
_TRACE_EPILOG = """examples:
  kubectl xpyd trace cmpl-8f3a... -n llm         from the logs of the fleet's pods
  kubectl xpyd trace my-id --fleet chat --since 2h
  xpyd trace cmpl-8f3a...                        a local fleet; with -n or --context in a cluster

Pods' logs go back as far as their nodes keep them."""

cluster_status = Command(
    help="show fleets in a cluster: pools, revisions, what is waited for and what is wrong",
    configure=_configure_status,
    run=_status,
    epilog=_STATUS_EPILOG,
)
status = Command(
    help="show a local fleet, or with -n, -A or --context those in a cluster",
    configure=_configure_both,
    run=_status_of_either,
    epilog="""examples:
  xpyd status
  xpyd status demo --output json
  xpyd status chat -n llm                        a fleet in a cluster: with -n, -A or --context""",
)
why = Command(
    help="say what the operator decided last for a fleet, and what it waits for",
    configure=_configure_why,
    run=_why,
    epilog="""examples:
  kubectl xpyd why chat -n llm                   Events, then the bounds and pods that hold it up
  xpyd why chat -o json""",
)
drain = Command(
    help="take one instance out of a fleet in a cluster, with proof that nothing was lost",
    configure=_configure_drain,
    run=_drain,
    epilog="""examples:
  kubectl xpyd drain chat-decode-5d9c7-x2k --wait
  kubectl xpyd drain chat-decode-5d9c7-x2k --wait --no-replace    one replica less

exit status: 0 drained, or begun without --wait; 1 requests were cut, or nothing proves that none
was; 2 wrong input; 3 --timeout came first; 4 a PodDisruptionBudget refuses it.""",
)
cluster_trace = Command(
    help="show where the time of one request went, from the fleet's logs",
    configure=_configure_trace,
    run=_trace,
    epilog=_TRACE_EPILOG,
)
trace = replace(cluster_trace, run=_trace_of_either)


def kubectl_main() -> int:
    """`kubectl xpyd ...`: kubectl runs the program kubectl-xpyd that it finds in PATH."""
    offered = {
        "rollout": rollout,
        "status": cluster_status,
        "why": why,
        "drain": drain,
        "trace": cluster_trace,
    }
    return cli.main(prog="kubectl xpyd", offered=offered)
