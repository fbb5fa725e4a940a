"""`xpyd rollout` and `kubectl xpyd rollout`: looks at a fleet's rollout and steers it.

Every verb reads the fleet by kubectl, as the user whom kubectl knows, and writes nothing but the
fleet's document: the operator does the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

from xpyd_core.cli import Command
from xpyd_core.errors import UserError

Json = dict[str, Any]

_TRIES = 5
"""Of a write that meets the operator's."""
_KUBECTL_S = 60.0
LOOK_S = 2.0
"""Between two looks of `status --wait`."""
_FLEET = "inferencefleet.xpyd.dev"
EXITS = {"Complete": 0, "Failed": 1, "Progressing": 3, "Paused": 4}
"""The exit status of `xpyd rollout status`; 2 is for wrong input."""
_EPILOG = """examples:
  xpyd rollout plan -f fleet.yaml                what this edit would do; nothing is written
  xpyd rollout status chat -n llm --wait         until it is done: exit status 0; 1 failed,
                                                 3 still under way, 4 paused
  xpyd rollout history chat
  xpyd rollout undo chat                         back to the revision before; --to 3: to that one
  xpyd rollout pause chat
  xpyd rollout resume chat
  xpyd rollout promote chat                      a canary's analysis ends, the rest follows
  xpyd rollout restart chat                      all pods anew, as the document says
  kubectl xpyd rollout status chat               the same, as a plugin of kubectl"""


class Kubectl:
    """kubectl with the user's namespace and context."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._place = [f"--namespace={args.namespace}"] if args.namespace else []
        self._place += [f"--context={args.context}"] if args.context else []

    def argv(self, *words: str) -> list[str]:
        """The command line."""
        return ["kubectl", *self._place, *words]

    def run(self, *words: str, stdin: str = "") -> str:
        """What kubectl says. UserError where it fails."""
        argv = self.argv(*words)
        try:
            done = subprocess.run(
                argv, input=stdin, capture_output=True, text=True, timeout=_KUBECTL_S, check=False
            )
        except FileNotFoundError as error:
            raise UserError("kubectl is not in PATH: install it, or add its folder") from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"kubectl did not answer within {_KUBECTL_S:g} s") from error
        if done.returncode != 0:
            raise UserError(f"kubectl: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def read(self, *words: str, stdin: str = "") -> Json:
        """The object that kubectl answers with; empty where it says nothing."""
        said = self.run(*words, "--output=json", stdin=stdin)
        try:
            return json.loads(said) if said.strip() else {}
        except ValueError as error:
            raise UserError(f"kubectl {words[0]}: its answer is no JSON object") from error

    def items(self, *words: str) -> list[Json]:
        """The objects of the list that kubectl answers with, or the one object."""
        found = self.read(*words)
        return (found.get("items") or []) if "items" in found or not found else [found]

    def fleet(self, name: str) -> Json:
        """The fleet as it is stored."""
        return self.read("get", f"{_FLEET}/{name}")

    def records(self, name: str) -> list[Json]:
        """The ControllerRevisions with the fleet's label."""
        found = self.read("get", "controllerrevisions.apps", f"--selector=xpyd.dev/fleet={name}")
        return found.get("items") or []

    def write(self, name: str, patch: Json) -> None:
        """Merge a patch into the fleet's document."""
        words = ("patch", f"{_FLEET}/{name}", "--type=merge", "--patch-file=/dev/stdin")
        self.run(*words, stdin=json.dumps(patch))

    def write_over(self, fleet: Json, patch: Json) -> None:
        """Merge a patch into `fleet`'s document unless somebody has edited it meanwhile, or other
        images came. A status that the operator writes is another version of the object too, and no
        edit."""
        seen, name = fleet, fleet["metadata"]["name"]
        for tries_left in reversed(range(_TRIES)):
            try:
                version = {"resourceVersion": seen["metadata"]["resourceVersion"]}
                metadata = {**patch.get("metadata", {}), **version}
                return self.write(name, {**patch, "metadata": metadata})
            except UserError as error:
                seen = self.fleet(name)
                is_edited = _made_of(seen) != _made_of(fleet)
                if "(Conflict)" not in str(error) or is_edited or not tries_left:
                    raise


def _made_of(fleet: Json) -> tuple[object, object]:
    """What says whether two looks at a fleet are of the same document and the same images."""
    status: Json = fleet.get("status") or {}
    return fleet["metadata"]["generation"], status.get("defaults")


def _say(args: argparse.Namespace, words: str, found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n" if args.output == "json" else words)


def _plan(args: argparse.Namespace) -> int:
    from xpyd_operator.rollout.edit import edit_json, edit_of, edit_text

    kubectl = Kubectl(args)
    # The API server merges the file as `kubectl apply` will, fills in defaults, and keeps nothing.
    after = kubectl.read("apply", "--dry-run=server", f"--filename={args.filename}")
    if after.get("kind") != "InferenceFleet":
        raise UserError(f"{args.filename}: expected one InferenceFleet")
    name, namespace = after["metadata"]["name"], after["metadata"].get("namespace")
    place = [f"--namespace={namespace}"] if namespace and not args.namespace else []
    before = kubectl.read("get", f"{_FLEET}/{name}", "--ignore-not-found", *place)
    edit = edit_of(before or None, after)
    _say(args, edit_text(edit), edit_json(edit))
    return 0


def _status(args: argparse.Namespace) -> int:
    from xpyd_operator.rollout.view import outcome_of, status_json, status_text

    kubectl, until, said = Kubectl(args), time.monotonic() + args.timeout, ""
    while True:
        fleet = kubectl.fleet(args.fleet)
        outcome = outcome_of(fleet)
        is_late = time.monotonic() >= until
        if not args.wait or outcome.word != "Progressing" or is_late:
            break
        if outcome.message != said:
            said = outcome.message
            sys.stderr.write(f"{outcome.word}: {said}\n")
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
    _say(args, status_text(fleet), status_json(fleet))
    is_failed = args.wait and is_late and outcome.is_degraded and outcome.word == "Progressing"
    return EXITS["Failed" if is_failed else outcome.word]


def _history(args: argparse.Namespace) -> int:
    from xpyd_operator.rollout.view import history_of, history_text

    kubectl = Kubectl(args)
    found = history_of(kubectl.fleet(args.fleet), kubectl.records(args.fleet))
    shown = [
        {
            "revision": r.number,
            "created": r.created,
            "current": r.current,
            "images": dict(zip(("engines", "routers"), r.images, strict=True)),
            "spec": r.record,
        }
        for r in found
    ]
    _say(args, history_text(found, _now()), shown)
    return 0


def _undo(args: argparse.Namespace) -> int:
    from xpyd_operator.controller.decision.kinds import merge_patch
    from xpyd_operator.manifests.names import ANNOTATION_UNDO
    from xpyd_operator.plan.revisions import restored
    from xpyd_operator.rollout.view import history_of, target_of, undo_of

    kubectl = Kubectl(args)
    fleet = kubectl.fleet(args.fleet)
    to = target_of(history_of(fleet, kubectl.records(args.fleet)), args.to)
    patch: Json = {"spec": merge_patch(fleet["spec"], restored(fleet["spec"], to.record))}
    images, what = dict(zip(("engines", "routers"), to.images, strict=True)), ""
    if undo := undo_of(fleet, to):
        patch["metadata"] = {"annotations": {ANNOTATION_UNDO: undo.annotation}}
        what = f" and its images: engines {to.images[0]}, routers {to.images[1]}"
    elif to.defaults is None:
        what = "; the operator's images of then are not recorded, those of now stay"
    kubectl.write_over(fleet, patch)
    found = {"revision": to.number, "images": images}
    _say(args, _begun(args, fleet, f"back to revision {to.number}{what}"), found)
    return 0


def _pause(args: argparse.Namespace) -> int:
    Kubectl(args).write(args.fleet, {"spec": {"rollout": {"paused": True}}})
    words = f"{args.fleet}: paused; `xpyd rollout resume {args.fleet}` goes on\n"
    _say(args, words, {"paused": True})
    return 0


def _resume(args: argparse.Namespace) -> int:
    # None removes the field: false is its default.
    Kubectl(args).write(args.fleet, {"spec": {"rollout": {"paused": None}}})
    _say(args, _begun(args, {}, "goes on"), {"paused": False})
    return 0


def _restart(args: argparse.Namespace) -> int:
    from xpyd_operator.rollout.view import next_restart

    kubectl = Kubectl(args)
    fleet = kubectl.fleet(args.fleet)
    at = next_restart(fleet, _now())
    kubectl.write(args.fleet, {"spec": {"rollout": {"restartedAt": at}}})
    _say(args, _begun(args, fleet, "all pods are made anew"), {"restartedAt": at})
    return 0


def _promote(args: argparse.Namespace) -> int:
    from xpyd_operator.manifests.names import ANNOTATION_PROMOTE
    from xpyd_operator.rollout.view import revision_on_trial

    kubectl = Kubectl(args)
    fleet = kubectl.fleet(args.fleet)
    revision = revision_on_trial(fleet)
    # Another text each time: the same pods may be on trial again, and be promoted again.
    asked = f"{revision}@{_now()}"
    kubectl.write(args.fleet, {"metadata": {"annotations": {ANNOTATION_PROMOTE: asked}}})
    _say(args, _begun(args, fleet, f"{revision} is promoted"), {"promoted": revision})
    return 0


def _begun(args: argparse.Namespace, fleet: Json, what: str) -> str:
    spec: Json = fleet.get("spec") or {}
    rollout: Json = spec.get("rollout") or {}
    is_paused = rollout.get("paused") is True
    place = f" -n {args.namespace}" if args.namespace else ""
    words = f"xpyd rollout {'resume' if is_paused else 'status'} {args.fleet}{place}"
    rest = f"rollouts are paused, it begins with `{words}`" if is_paused else f"`{words} --wait`"
    return f"{args.fleet}: {what}; {rest}\n"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_VERBS = {
    "plan": (_plan, "say what an edit would do, and write nothing"),
    "status": (_status, "say how far each pool is and what it waits for"),
    "history": (_history, "list the revisions that can be taken back"),
    "undo": (_undo, "write an earlier revision into the document; sizes stay"),
    "pause": (_pause, "stop the rollout where it is, and let none begin"),
    "resume": (_resume, "go on, to the document as it is now"),
    "promote": (_promote, "end the analysis of a canary: the rest follows"),
    "restart": (_restart, "replace all pods by new ones"),
}


def _configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    for name, (act, words) in _VERBS.items():
        verb = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        verb.set_defaults(act=act)
        if name == "plan":
            verb.add_argument(
                "--filename", "-f", required=True, metavar="FILE", help="the edited document"
            )
        else:
            verb.add_argument("fleet", metavar="FLEET", help="an InferenceFleet")
        verb.add_argument("--namespace", "-n", metavar="NAME", help="default: kubectl's own")
        verb.add_argument("--context", metavar="NAME", help="kubectl's context")
        verb.add_argument("--output", "-o", choices=("text", "json"), default="text")
        if name == "undo":
            verb.add_argument("--to", type=int, metavar="N", help="default: the one before")
        if name == "status":
            verb.add_argument("--wait", action="store_true", help="until it is done")
            verb.add_argument(
                "--timeout", type=_seconds, default=3600.0, metavar="SECONDS", help="of --wait"
            )


def _seconds(text: str) -> float:
    if not text.isdecimal() or len(text) > 7:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole seconds, such as 600")
    return float(text)


def _run(args: argparse.Namespace) -> int:
    status: int = args.act(args)
    return status


command = Command(
    help="look at a rollout of a fleet in a cluster, pause it, take it back",
    configure=_configure,
    run=_run,
    epilog=_EPILOG,
)
