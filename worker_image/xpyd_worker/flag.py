"""One flag of an engine: what a row of the tables in flags.py and parallel_flags.py is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Program = Literal["bench", "LLM"]


@dataclass(frozen=True)
class Flag:
    """One flag of `xpyd worker`. `options` are argparse's; `programs` take the flag, too: the
    bench's offline benchmarks as a flag, LLM() as an argument."""

    names: tuple[str, ...]
    options: Mapping[str, Any]
    programs: frozenset[Program]

    @property
    def argument(self) -> str:
        """The flag's name as an argument of LLM()."""
        return self.names[0].removeprefix("--").replace("-", "_")


BOTH = frozenset[Program]({"bench", "LLM"})
LLM_ONLY = frozenset[Program]({"LLM"})


def flag(
    *names: str,
    programs: frozenset[Program] = frozenset(),
    **options: Any,  # noqa: ANN401 - what argparse takes
) -> Flag:
    """A row of a table."""
    return Flag(names, options, programs)


def count(*names: str, **options: Any) -> Flag:  # noqa: ANN401 - see flag
    """A flag of a whole number."""
    return flag(*names, type=int, metavar="N", **options)
