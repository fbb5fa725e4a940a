"""The test cluster for a person: python -m tests.cluster.harness up|down|status|load|build|shell.

`make cluster-up` and its like call this. Exit status: 0 done, 1 it failed or the cluster is not
as asked, 2 the machine cannot have one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness import availability, build
from tests.cluster.harness.cluster import Cluster, attach, take_down, up
from tests.cluster.harness.components import ClusterError
from tests.cluster.harness.runs import Run, base_folder, runs, sweep
from tests.cluster.harness.tools import cache_folder

_NAME_VARIABLE = "XPYD_CLUSTER"
"""Names the cluster for a person who has several at once."""


def main(argv: list[str]) -> int:
    """Run one command."""
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except (ClusterError, build.BuildFailed) as error:
        _say(f"error: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.harness")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("up", help="start a cluster that stays until `down`")
    one.add_argument("--node", action="store_true", help="with a node that runs containers")
    one.set_defaults(command=_up)
    two = commands.add_parser("down", help="end it, and remove what dead clusters left")
    two.add_argument("--all", action="store_true", help="every cluster, those of tests too")
    two.set_defaults(command=_down)
    three = commands.add_parser("status", help="what is running, and how to use it")
    three.add_argument("--output", choices=["text", "json"], default="text")
    three.set_defaults(command=_status)
    four = commands.add_parser("shell", help="a shell, or a command, in the cluster's network")
    four.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    four.set_defaults(command=_shell)
    five = commands.add_parser("build", help="build all programs into the cache")
    five.set_defaults(command=_build)
    six = commands.add_parser("load", help="xpyd's images onto the node; values and a fleet to try")
    six.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="for the two files")
    six.set_defaults(command=_load)
    for command in (one, two, three, four, six):
        command.add_argument(
            "--name", default=os.environ.get(_NAME_VARIABLE, "person"), help="the cluster's name"
        )
    return parser


def _up(options: argparse.Namespace) -> int:
    reason = availability.why_no_node() if options.node else availability.why_no_control_plane()
    if reason is not None:
        _say(f"no cluster can run here: {reason}")
        return 2
    _print_text(_describe(up(options.name, node=options.node, stay=True)))
    return 0


def _down(options: argparse.Namespace) -> int:
    swept = sweep()
    for name in swept:
        _say(f"removed what {name} left")
    wanted = [run for run in runs() if options.all or run.name == options.name]
    for run in wanted:
        take_down(run)
        _say(f"{run.name} is down")
    if not swept and not wanted:
        _say("no cluster is up")
    return 0


def _status(options: argparse.Namespace) -> int:
    if not Run(base_folder() / options.name).alive:
        if options.output == "json":
            sys.stdout.write(json.dumps({"name": options.name, "running": False}) + "\n")
        else:
            sys.stdout.write(f"{options.name}: no such cluster is running\n")
        return 1
    found = _describe(attach(options.name))
    if options.output == "json":
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        _print_text(found)
    return 0


def _shell(options: argparse.Namespace) -> int:
    cluster = attach(options.name)
    argv = options.argv or [os.environ.get("SHELL", "/bin/bash")]
    command = cluster.client_argv(argv)
    os.execvpe(command[0], command, cluster.client_environment())


def _load(options: argparse.Namespace) -> int:
    cluster = attach(options.name)
    if not cluster.has_node:
        _say(f"{cluster.name} has no node to load images onto: `cluster-up NODE=1`")
        return 1
    # Only this command needs what builds images.
    from tests.cluster import fleetkit
    from tests.cluster.images.store import ImagesUnavailable

    _say("building what is not in the cache: minutes at first")
    try:
        fleetkit.load_images(cluster)
    except ImagesUnavailable as error:
        _say(str(error))
        return 2
    folder: Path = options.to
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "values.yaml").write_text(fleetkit.values_text())
    (folder / "fleet.yaml").write_text(yaml.safe_dump(fleetkit.fleet_document(), sort_keys=False))
    sys.stdout.write(
        f"helm install xpyd helm/xpyd --namespace {fleetkit.SYSTEM} --create-namespace "
        f"--values {folder / 'values.yaml'}\nkubectl apply -f {folder / 'fleet.yaml'}\n"
    )
    return 0


def _build(options: argparse.Namespace) -> int:
    del options
    reason = build.missing_for_build()
    if reason is not None:
        _say(reason)
        return 2
    for program in build.PROGRAMS:
        _say(f"{program.name} {program.version}: {build.binary(program)}")
    return 0


def _describe(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "running": True,
        "node": cluster.has_node,
        "apiUrl": cluster.api_url,
        "kubeconfig": str(cluster.kubeconfig),
        "tools": str(cache_folder()),
        "prefix": cluster.client_argv([]),
        "logs": str(cluster.components.logs),
        "processes": cluster.process_memory(),
    }


def _print_text(found: dict[str, Any]) -> None:
    kind = "with a real node" if found["node"] else "control plane only"
    lines = [
        f"cluster {found['name']} ({kind}) at {found['apiUrl']}",
        *(f"  {name:<26}{mib:>5} MiB" for name, mib in found["processes"].items()),
        "",
        f"  export KUBECONFIG={found['kubeconfig']} PATH={found['tools']}:$PATH",
        "  kubectl get nodes             # from any shell with these",
        "",
        "To reach Services and pods, run a program in the cluster's network:",
        f"  {' '.join(found['prefix'])} COMMAND",
        f"Logs of its programs: {found['logs']}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(f"cluster: {line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
