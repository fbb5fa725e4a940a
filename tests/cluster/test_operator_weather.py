"""Operators before a real API server on a bad day, and operators that are killed behind a write.

The proxy of tests/operator/kube_proxy.py refuses, cuts and delays calls, and its watches lose,
repeat and swap events. A fleet is applied, scaled, rolled to another revision and deleted; its pods
run on fake nodes. After each edit the objects are those of a fine day, the writes are not many
more, and none follows when all is done. tests/operator/test_controller_weather.py and
test_controller_crashes.py play more of it, before an API server in memory.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.cluster.fleetkit import FleetClient, Obj, delete_fleets, fake_fleet, find
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.operator_process import OperatorProcess, running_operator
from tests.operator.kube_objects import differing, plain
from tests.operator.kube_proxy import FaultProxy, Weather, served
from xpyd_operator.controller.client import Login
from xpyd_operator.controller.decision.kinds import ALWAYS, SECRET

FINE = Weather()
BAD = Weather(calls=1 / 3, late_s=0.02, events=1 / 3)
KINDS = ",".join(kind.plural for kind in (*ALWAYS, SECRET))
RESYNC_S = 10
PATIENCE_S = 180.0
LOOK_S = 1.0
"""Between two looks at all objects, each of which is a list of every kind."""
RELEASE = "xpyd"
SELF_MADE = ("default", "kube-root-ca.crt")
"""Names of what each namespace has by itself."""

_OF_THE_PLAY = ("xpyd.dev/applied", "xpyd.dev/operator")
"""Annotations: a digest of names as well, and who reconciles the fleet."""
_KEY = re.compile(r"chat-kv-[0-9a-f]{8}")
"""The Secret of the fleet's key, which is drawn by lot."""
Picture = dict[str, Obj]


class Site:
    """A namespace with a fleet `chat`, and its operators, one after the other, behind a proxy."""

    def __init__(self, fleet: FleetClient, proxy: FaultProxy, folder: Path, release: str) -> None:
        self.fleet = fleet
        self.proxy = proxy
        self._folder = folder
        self._numbers = count(1)
        self.mark = [f"--release={fleet.namespace}/{release}"] if release else []
        places = (f"--namespace={fleet.namespace}", f"--resync-seconds={RESYNC_S}")
        self._args = ["operator", *places, *self.mark]
        self._kubeconfig = folder / "kubeconfig"
        self._kubeconfig.write_text(kubeconfig_of(proxy.url))
        self.operator = self._start()

    def _start(self) -> OperatorProcess:
        environment = self.fleet.cluster.client_environment()
        environment["KUBECONFIG"] = str(self._kubeconfig)
        log = self._folder / f"operator-{next(self._numbers)}.log"
        return OperatorProcess(self._args, environment, log)

    def keep(self) -> None:
        """Start the operator again where it ended by itself, as a kubelet does."""
        if self.operator.process.poll() is not None:
            self.operator = self._start()

    def replace(self) -> None:
        """SIGKILL, and the next operator."""
        self.operator.kill()
        self.proxy.revive()
        self.operator = self._start()

    def picture(self) -> Picture:
        """Every object, without what differs from one namespace and play to another, and how many
        pods there are."""
        found = self._objects()
        text = json.dumps({name: shown(one) for name, one in found.items() if one["kind"] != "Pod"})
        text = _KEY.sub("chat-kv-KEY", text.replace(self.fleet.namespace, "NAMESPACE"))
        pods = Counter(
            f"pods of {one['metadata']['labels']['xpyd.dev/pool']}"
            for one in found.values()
            if one["kind"] == "Pod" and "deletionTimestamp" not in one["metadata"]
        )
        return {**json.loads(text), **{pool: {"count": number} for pool, number in pods.items()}}

    def _objects(self) -> Picture:
        found = find(self.fleet.cluster, self.fleet.namespace, KINDS)
        return {
            f"{one['kind']}/{one['metadata']['name']}": one
            for one in found
            if one["metadata"]["name"] not in SELF_MADE
        }

    def uids(self) -> dict[str, str]:
        """Which objects there are."""
        return {name: one["metadata"]["uid"] for name, one in self._objects().items()}

    def is_done(self) -> bool:
        """Whether all statuses say that the last edit was obeyed."""
        self.keep()
        document = self.fleet.document()
        status = document.get("status", {})
        conditions = {one["type"]: one for one in status.get("conditions", ())}
        pools = {one["metadata"]["name"]: one for one in self.fleet.find("inferencefleetpools")}
        return (
            status.get("observedGeneration") == document["metadata"]["generation"]
            and conditions["Ready"]["status"] == "True"
            and conditions["Progressing"]["reason"] == "Settled"
            and all(
                one["spec"]["replicas"] == one.get("status", {}).get("readyReplicas")
                for one in pools.values()
            )
            and all(
                row[number] == pools[f"chat-{row['name']}"].get("status", {}).get(number)
                for row in status["pools"]
                if row["name"] != "router"
                for number in ("replicas", "readyReplicas", "updatedReplicas", "drainingReplicas")
            )
        )

    def reach(self, wanted: Picture, *, even_if: Callable[[], bool] = lambda: False) -> None:
        """Wait for these objects, or until `even_if`."""

        def differences() -> str:
            logs = sorted(self._folder.glob("*.log"))
            words = [log.read_text()[-4000:] for log in logs[-2:]]
            return "\n".join([*differing("", self.picture(), wanted), *words])

        def is_there() -> bool:
            self.keep()
            return even_if() or self.picture() == wanted

        what = "the objects of a fine day"
        wait_for(is_there, PATIENCE_S, what, interval_s=LOOK_S, explain=differences)

    def turns(self, number: int) -> None:
        """Wait for so many more of one operator."""
        counted, wanted = None, 0

        def are_over() -> bool:
            nonlocal counted, wanted
            self.keep()
            try:
                if counted is not self.operator:
                    counted = self.operator
                    counted.wait_until_ready()
                    wanted = counted.turns() + number
                return counted.turns() >= wanted
            except (OSError, RuntimeError):
                # It has ended.
                return False

        wait_for(are_over, PATIENCE_S, f"{number} turns", interval_s=0.5)

    def settle(self) -> None:
        """Wait until a turn writes nothing."""

        def is_still() -> bool:
            before = self.proxy.writes
            self.turns(1)
            return self.proxy.writes == before

        wait_for(is_still, PATIENCE_S, "no more writes")


def kubeconfig_of(url: str) -> str:
    """One that needs no user."""
    named: Obj = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Config", **named, "current-context": "x"})


def shown(obj: Obj) -> Obj:
    """What of an object must be as on a fine day: all that the operator writes."""
    kept = plain(obj, is_secret=obj["kind"] == "Secret")
    metadata = kept["metadata"]
    metadata.pop("managedFields", None)
    for name in _OF_THE_PLAY:
        metadata.get("annotations", {}).pop(name, None)
    for owner in metadata.get("ownerReferences", ()):
        del owner["uid"]
    if obj["kind"] == "Service":
        kept["spec"] = {k: v for k, v in kept["spec"].items() if not k.startswith("clusterIP")}
    if "xpyd.dev" not in obj["apiVersion"]:
        kept.pop("status", None)
    return kept


@contextmanager
def site(
    cluster: Cluster,
    namespace: str,
    folder: Path,
    *,
    weather: Weather = FINE,
    seed: int = 0,
    release: str = "",
) -> Iterator[Site]:
    """An operator of the namespace at work; afterwards no fleet is left in it."""
    login = Login(cluster.api_url, cluster.plane.administrator())
    folder.mkdir()
    with served(login, weather=weather, seed=seed) as proxy:
        made = Site(FleetClient(cluster, namespace), proxy, folder, release)
        try:
            yield made
        finally:
            made.operator.kill()
            if find(cluster, namespace, "inferencefleets"):
                with running_operator(cluster, namespace, flags=made.mark):
                    delete_fleets(cluster, namespace)


def apply(fleet: FleetClient) -> None:
    fleet.apply(fake_fleet())


def scale(fleet: FleetClient) -> None:
    fleet.scale("decode", 3)


def roll(fleet: FleetClient) -> None:
    fleet.apply(fake_fleet(engine={"args": ["--dtype=float32"]}))


def delete(fleet: FleetClient) -> None:
    fleet.kubectl("delete", "fleet/chat", "--wait=false")


EDITS = (apply, scale, roll)


@dataclass
class Played:
    """What there was behind each edit, and the writes that it took; the last is the deletion."""

    pictures: list[Picture] = field(default_factory=list[Picture])
    writes: list[int] = field(default_factory=list[int])


@pytest.fixture(scope="module")
def fine_day(plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """An operator behind the proxy when it does nothing."""
    namespace, played = "fine-day", Played()
    plane.kubectl("create", "namespace", namespace)
    folder = tmp_path_factory.mktemp("fine")
    with site(plane, namespace, folder / "logs", release=RELEASE) as fine:
        for edit in EDITS:
            before = fine.proxy.writes
            edit(fine.fleet)
            wait_for(fine.is_done, PATIENCE_S, edit.__name__, explain=fine.fleet.explain)
            played.pictures.append(fine.picture())
            played.writes.append(fine.proxy.writes - before)
        before = fine.proxy.writes
        delete(fine.fleet)
        fine.reach({})
        played.pictures.append({})
        played.writes.append(fine.proxy.writes - before)
    plane.kubectl("delete", "namespace", namespace, "--wait=false")
    return played


CLIMATES = (1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12)))
"""Seeds; the long form has ten more."""


@pytest.mark.parametrize("seed", CLIMATES)
@pytest.mark.long
def test_the_objects_of_a_bad_day_are_those_of_a_fine_one_and_then_nothing_is_written(
    plane: Cluster, namespace: str, fine_day: Played, tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "logs"
    with site(plane, namespace, folder, weather=BAD, seed=seed, release=RELEASE) as bad:
        for edit, picture in zip(EDITS, fine_day.pictures, strict=False):
            edit(bad.fleet)
            bad.reach(picture)
        bad.settle()
        before = bad.proxy.writes
        bad.turns(2)
        assert bad.proxy.writes == before
        delete(bad.fleet)
        bad.reach({})
        told = f"seed {seed}: {bad.proxy.writes} writes, on a fine day {sum(fine_day.writes)}"
        sys.stdout.write(f"{told}\n")
        assert bad.proxy.writes < 2 * sum(fine_day.writes), told


@pytest.mark.parametrize("seed", CLIMATES)
@pytest.mark.long
def test_an_operator_that_is_killed_behind_a_write_is_followed_by_one_that_finishes(
    plane: Cluster, namespace: str, fine_day: Played, tmp_path: Path, seed: int
) -> None:
    """Once for each edit, behind any of the writes that it takes."""
    rng, kills = random.Random(seed), list[int]()
    with site(plane, namespace, tmp_path / "logs") as killed:
        for edit, picture, writes in zip(
            (*EDITS, delete), fine_day.pictures, fine_day.writes, strict=True
        ):
            number = rng.randint(1, writes)
            killed.proxy.crash_after = killed.proxy.writes + number
            edit(killed.fleet)
            # Fewer writes may do: a status that is due soon goes with the next one.
            killed.reach(picture, even_if=killed.proxy.crashed.is_set)
            if killed.proxy.crashed.is_set():
                kills.append(number)
            before = killed.uids()
            killed.replace()
            killed.reach(picture)
            after = killed.uids()
            assert {name: after[name] for name in before.keys() & after.keys()} == {
                name: before[name] for name in before.keys() & after.keys()
            }, "an object was made anew"
        told = f"seed {seed}: {killed.proxy.writes} writes, on a fine day {sum(fine_day.writes)}"
        sys.stdout.write(f"{told}, kills behind {kills}\n")
        assert len(kills) >= 2
        assert killed.proxy.writes < 2 * sum(fine_day.writes), told
