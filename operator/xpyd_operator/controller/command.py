"""`xpyd operator`: its flags. Imports nothing heavy; the operator itself is in `main`."""

from __future__ import annotations

import argparse

from xpyd_core import __version__
from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.logs import add_logging_arguments, set_up_logging

_EPILOG = """examples:
  xpyd operator                                  all namespaces of the cluster in KUBECONFIG
  xpyd operator --namespace team-a --namespace team-b
  curl http://127.0.0.1:8080/readyz              has it read all that is there?"""

_PULL_POLICIES = ("Always", "IfNotPresent", "Never")


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="serve fleets of this namespace only; may be repeated (default: all namespaces)",
    )
    add(
        "--worker-image",
        default=f"xpyd-worker:{__version__}",
        metavar="IMAGE",
        help="image of engines whose fleet names none (default: %(default)s)",
    )
    add(
        "--router-image",
        default=f"xpyd-router:{__version__}",
        metavar="IMAGE",
        help="image of routers (default: %(default)s)",
    )
    add(
        "--image-pull-policy",
        choices=_PULL_POLICIES,
        default="IfNotPresent",
        help="of the fleets' pods (default: %(default)s)",
    )
    add(
        "--image-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Secret with registry credentials in each fleet's namespace; may be repeated",
    )
    add(
        "--admin-namespace",
        action="append",
        default=[],
        metavar="NS",
        help="namespace whose pods may reach the routers' admin port (NetworkPolicy): the "
        "operator's own, which reads metrics there; may be repeated (default: only the fleet's "
        "own, and those labelled xpyd.dev/scrape=true)",
    )
    add(
        "--release",
        metavar="NAMESPACE/NAME",
        help="the Lease by which one replica leads and the others stand by; also the mark of the "
        "fleets that this release reconciles (default: no election, no mark)",
    )
    add(
        "--lease-seconds",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="how long after its last sign of life a leader is replaced (default: %(default)s)",
    )
    add(
        "--upgrade-fleets",
        type=int,
        default=0,
        metavar="N",
        help="fleets at a time that take changed images and settings of this operator without "
        "being asked; 0: none does before `xpyd rollout restart` (default: %(default)s)",
    )
    add(
        "--read-nodes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="list the cordoned nodes, so that a pool's only instance is replaced before it leaves "
        "one; --no-read-nodes where the operator has no right to (default: %(default)s)",
    )
    add("--workers", type=int, default=8, help="fleets worked on at once (default: %(default)s)")
    add("--http-host", default="0.0.0.0", help="address of the HTTP port (default: %(default)s)")
    add(
        "--http-port",
        type=int,
        default=8080,
        help="/healthz, /readyz and /metrics; 0 = any free one (default: %(default)s)",
    )
    add(
        "--resync-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how often everything is listed and looked at again (default: %(default)s)",
    )
    add_logging_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    checks = {
        "--workers: expected 1 to 64": 1 <= args.workers <= 64,
        "--http-port: expected 0 to 65535": 0 <= args.http_port < 65536,
        "--resync-seconds: expected 10 or more": args.resync_seconds >= 10,
        "--lease-seconds: expected 5 to 300": 5 <= args.lease_seconds <= 300,
        "--upgrade-fleets: expected 0 or more": args.upgrade_fleets >= 0,
        "--release: expected NAMESPACE/NAME": (args.release or "a/b").count("/") == 1,
        "--worker-image: expected an image": bool(args.worker_image),
        "--router-image: expected an image": bool(args.router_image),
    }
    for complaint, holds in checks.items():
        if not holds:
            raise UserError(complaint)
    set_up_logging(args.log_level, args.log_format)
    from xpyd_operator.controller.main import OperatorConfig, run_operator
    from xpyd_operator.manifests.names import Settings

    settings = Settings(
        worker_image=args.worker_image,
        router_image=args.router_image,
        image_pull_policy=args.image_pull_policy,
        image_pull_secrets=tuple(args.image_pull_secret),
        admin_namespaces=tuple(dict.fromkeys(args.admin_namespace)),
    )
    config = OperatorConfig(
        settings=settings,
        namespaces=tuple(dict.fromkeys(args.namespace)),
        workers=args.workers,
        http_host=args.http_host,
        http_port=args.http_port,
        resync_s=args.resync_seconds,
        release=args.release or "",
        lease_s=args.lease_seconds,
        upgrade_fleets=args.upgrade_fleets,
        reads_nodes=args.read_nodes,
    )
    return run_operator(config)


command = Command(
    help="run the Kubernetes operator: fleets in, Deployments and Services out",
    configure=_configure,
    run=_run,
    epilog=_EPILOG,
)
