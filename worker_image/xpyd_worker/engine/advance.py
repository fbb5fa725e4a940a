"""What a step's samples do to its sequences: tokens appended, choices ended, trunks forked. Pure.

The scheduler calls this after each step, and forks a trunk here when it adopts a whole prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from xpyd_worker.engine.request import ChoiceOutput, EngineRequest, SampledToken
from xpyd_worker.engine.sequence import RequestState, Sequence
from xpyd_worker.engine.stopping import StopRules
from xpyd_worker.engine.tables import BlockTables


@dataclass(frozen=True)
class Forked:
    """Children of a trunk: those that hold what it computed, and those that found no room and
    begin again from the queue."""

    running: tuple[Sequence, ...] = ()
    parked: tuple[Sequence, ...] = ()


class Advance:
    """Makes sequences, gives them their tokens, and ends choices by the stop rules."""

    def __init__(self, tables: BlockTables, rules: StopRules) -> None:
        self._tables = tables
        self._rules = rules
        self._ids = itertools.count()

    def begin(self, request: EngineRequest) -> RequestState:
        """A request's state and first sequence. Choices that ended in the ids they came with are
        ended in it; it has no sequence when there is nothing to compute."""
        state = RequestState(request, open=[])
        for choice in range(request.n):
            end = self._rules.end_within(
                state.known_output(choice),
                prompt_tokens=state.prompt_tokens,
                sampling=request.sampling,
            )
            if end is None:
                state.open.append(choice)
            else:
                state.reasons[choice] = end.reason
                state.held.append(ChoiceOutput(choice, (), end.reason, end.stop_token_id))
        if request.sampling.prompt_logprobs is not None:
            state.prompt_logprobs = [None]
        if state.open or state.scores_prompt:
            choice = state.open[0] if len(state.open) == 1 else None
            self._sequence(state, choice)
        return state

    def take(self, sequence: Sequence, samples: Mapping[int, SampledToken], room: int) -> Forked:
        """All known tokens of `sequence` are computed: give its choices what was drawn.

        Outputs are put into the state's `gained`. At most `room` children may run.
        """
        state = sequence.state
        position = len(sequence.tokens) - state.prompt_tokens
        drawn: dict[int, int] = {}
        for choice, sample in samples.items():
            end = self._rules.end_at(
                sample.token_id,
                position=position,
                prompt_tokens=state.prompt_tokens,
                sampling=state.request.sampling,
            )
            if end is None:
                drawn[choice] = sample.token_id
                state.gained.append(ChoiceOutput(choice, (sample,)))
            else:
                output = ChoiceOutput(choice, (sample,), end.reason, end.stop_token_id)
                state.end_choice(choice, end.reason)
                state.gained.append(output)
        if sequence.is_trunk:
            return self.fork(sequence, drawn, room)
        if drawn:
            sequence.tokens.extend(drawn.values())
        else:
            self._tables.drop(sequence)
        return Forked()

    def fork(self, trunk: Sequence, drawn: dict[int, int], room: int) -> Forked:
        """The prompt is computed: one sequence for each open choice, the trunk becomes the first.

        Each goes on with the ids its choice came with, or with the token drawn for it.
        """
        state = trunk.state
        running: list[Sequence] = []
        parked: list[Sequence] = []
        for choice in state.open[1:]:
            child = self._sequence(state, choice)
            child.tokens.extend(() if choice not in drawn else (drawn[choice],))
            shared = len(running) < room and self._tables.fork(trunk, child)
            (running if shared else parked).append(child)
        if state.open:
            trunk.choice = state.open[0]
            trunk.tokens.extend(state.known_output(trunk.choice) or (drawn[trunk.choice],))
        else:
            self._tables.drop(trunk)
        return Forked(tuple(running), tuple(parked))

    def _sequence(self, state: RequestState, choice: int | None) -> Sequence:
        known = () if choice is None else state.known_output(choice)
        tokens = [*state.request.prompt, *known]
        sequence = Sequence(next(self._ids), state, choice, tokens)
        state.sequences.append(sequence)
        return sequence
