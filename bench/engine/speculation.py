"""What drafts bring and cost: each engine with `--speculative-config` beside itself without.

Servers take turns as in `rounds`; those that drafted say in /metrics what became of it. Answers
that drafts fit are one case of each model, answers that no draft fits the other.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.engine.contender import ContenderFailed, Recipe, Server, own_recipe, served
from bench.engine.models import model
from bench.engine.peer import peer_recipe
from bench.engine.rounds import OWN, Found, Plan, Say, take_turns
from bench.engine.shape import COPYING, MODELS, Case
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL
from xpyd_tools.bench.summary import Sample

NGRAM = "n-gram"


@dataclass(frozen=True)
class Subject:
    """A model; of what drafts for it, the JSON of `--speculative-config` by the row's name."""

    name: str
    methods: Mapping[str, Mapping[str, Any]]
    cases: Sequence[Case]

    def folder(self) -> Path:
        """Its checkpoint, made where it is not there."""
        shapes = MODELS | COPYING
        return model(self.name, shapes=shapes).folder if self.name in shapes else DEMO_MODEL


def _drafting(method: str, folder: str) -> dict[str, Any]:
    where = str(DEMO_MODEL.parent / folder)
    return {"method": method, "model": where, "num_speculative_tokens": 3}


DEMO_DRAFTS = {
    "draft model": _drafting("draft_model", "demo-model"),
    "EAGLE-3": _drafting("eagle3", "demo-eagle3"),
    "Medusa": _drafting("medusa", "demo-medusa"),
}
_NGRAMS = {
    NGRAM: {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
}
SUBJECTS = (
    Subject("medium-copying", _NGRAMS, (Case("copying", 512, 128, 1, 3),)),
    Subject("medium", _NGRAMS, (Case("random", 512, 128, 1, 3, temperature=1.0),)),
    Subject(
        "demo-model",
        DEMO_DRAFTS,
        (
            Case("text", 512, 128, 1, 8, text=True),
            Case("no text", 512, 128, 1, 8, temperature=1.0),
            # Drafts rest for most of it.
            Case("no text, long", 512, 1400, 1, 2, temperature=1.0),
        ),
    ),
)
SHORT = tuple(
    replace(one, name=name, cases=[replace(case, requests=1) for case in one.cases])
    for one, name in zip(SUBJECTS, ("tiny-copying", "tiny", "demo-model"), strict=True)
)
"""Of `--quick`."""
WANTED = {"copying": 1.5, "random": 0.97, "no text": 0.97, "no text, long": 0.97}
"""By case: tokens/s with drafts of ours to those without, at least."""


def without_drafts(name: str) -> str:
    """The row that this one is compared with: itself where it does not draft."""
    return name.partition(", ")[0]


class CountingServer:
    """A server, and what became of its drafts, by case."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.drafts: dict[str, Counter[str]] = {}

    def run(self, case: Case, seed: int, rate: float = 0.0) -> list[Sample]:
        """See Contender."""
        before = draft_counts(self._server.metrics())
        samples = self._server.run(case, seed, rate)
        counts = draft_counts(self._server.metrics())
        counts.subtract(before)
        self.drafts.setdefault(case.name, Counter()).update(counts)
        return samples

    def pss_gib(self) -> float:
        """See Contender."""
        return self._server.pss_gib()

    def stop(self) -> None:
        """See Contender."""
        self._server.stop()

    def go_on(self) -> None:
        """See Contender."""
        self._server.go_on()


def measure_drafts(
    subject: Subject, plan: Plan, folder: Path, absent: dict[str, str], say: Say
) -> Found:
    """Let all take turns. A peer that refuses goes into `absent`. ContenderFailed.

    Servers start anew in each round, in turned order: of two large ones the second gets memory that
    is slower by up to 20 %.
    """
    found = Found()
    recipes = list(_recipes(subject, plan))
    for number in range(plan.rounds):
        with ExitStack() as stack:
            servers: dict[str, CountingServer] = {}
            for recipe in recipes[::-1] if number % 2 else recipes:
                say(f"{subject.name}, {recipe.name}: starting")
                log = folder / f"{subject.name}, {recipe.name}, {number}.log"
                try:
                    servers[recipe.name] = _started(recipe, subject, plan, log, stack)
                except ContenderFailed as error:
                    if without_drafts(recipe.name) == OWN:
                        raise
                    absent[recipe.name] = fault(f"{log.read_text(errors='replace')}\n{error}")
                    say(f"{recipe.name} is left out: {absent[recipe.name]}")
            # Rounds before one that fails would have nothing beside them.
            recipes = [recipe for recipe in recipes if recipe.name in servers]
            names = [recipe.name for recipe in recipes]
            found.turns = {key: turns for key, turns in found.turns.items() if key[0] in names}
            for case in subject.cases:
                take_turns({name: servers[name] for name in names}, case, number, found, say)
            for name, server in servers.items():
                for case, drafts in server.drafts.items():
                    found.drafts.setdefault((name, case), Counter()).update(drafts)
    found.drafts = {key: drafts for key, drafts in found.drafts.items() if key in found.turns}
    return found


def _recipes(subject: Subject, plan: Plan) -> Iterator[Recipe]:
    """Ours without drafts and with each method; vLLM's where it has one of them."""
    folder = subject.folder()
    own = own_recipe(folder, plan.threads, plan.own_args, plan.dtype)
    yield own
    for name, config in subject.methods.items():
        yield _with_drafts(own, name, config)
    if plan.peer is not None and NGRAM in subject.methods:
        peer = peer_recipe(plan.peer, folder, plan.threads, plan.dtype)
        yield peer
        yield _with_drafts(peer, NGRAM, subject.methods[NGRAM])


def _with_drafts(recipe: Recipe, name: str, config: Mapping[str, Any]) -> Recipe:
    argv = [*recipe.argv, "--speculative-config", json.dumps(config)]
    return replace(recipe, name=f"{recipe.name}, {name}", argv=argv)


def _started(
    recipe: Recipe, subject: Subject, plan: Plan, log: Path, stack: ExitStack
) -> CountingServer:
    """The server, stopped, behind one request of the first case: what it compiles at its first
    draft is behind it, and one that fails there ends here. ContenderFailed."""
    with ExitStack() as own:
        server = CountingServer(own.enter_context(served(recipe, log, plan.cores)))
        server.run(replace(subject.cases[0], name="warm-up", requests=1), seed=0)
        server.stop()
        stack.enter_context(own.pop_all())
        return server


_COUNTER = re.compile(
    r"^[\w:]+spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total"
    r"(?:\{([^}]*)\})? (\S+)$",
    re.MULTILINE,
)
# None that is only spoken of: vLLM warns of a low limit of files with the error it could lead to.
_ERROR = re.compile(r"(?<!`)\b\w*(?:Error|Exception): .+")
_POSITION = re.compile(r'position="(\d+)"')


def draft_counts(metrics: str) -> Counter[str]:
    """`drafts`, `draft_tokens`, `accepted_tokens`, and of these those at each place, "0" on, as
    /metrics of either engine has them; nothing where it counts none."""
    counts: Counter[str] = Counter()
    for name, labels, value in _COUNTER.findall(metrics):
        place = _POSITION.search(labels)
        counts[place[1] if place else name] += int(float(value))
    return counts


def fault(said: str) -> str:
    """Of all that a server said, the first error: those behind it are its consequences."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = (found[0] for line in lines if (found := _ERROR.search(line)))
    return next(errors, lines[-1] if lines else "it said nothing")[:200]
