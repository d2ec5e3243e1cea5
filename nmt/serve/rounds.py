"""Sentences that are searched together: a round, and the engine in this process that computes it.

An engine gets a round's first parts, and those that join it meanwhile, and delivers what was found
for each. The one of nmt.serve.workers has processes of its own for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from nmt.config import SearchConfig
from nmt.data.languages import Tags
from nmt.translate.batch_search import BatchSearch, SearchResult, Segment
from nmt.translate.engines.native import NativeBackend
from nmt.translate.lines import LineOptions
from nmt.translate.translator import Translator

T = TypeVar("T")
Found = Sequence[tuple[int, SearchResult]]
"""Parts of a round that are done, by their number in it."""

_JOIN_SHARE = 4  # sentences join when they are a quarter of those that are searched,
_JOIN_STEPS = 4  # or after so many steps: the encoder has a cost for each time


@dataclass(frozen=True)
class Options:
    """What sentences have in common that are searched in one batch."""

    translator: Translator
    search: SearchConfig
    lines: LineOptions
    tags: Tags = field(default=Tags(), compare=False)  # of the direction: neighbors may have others

    @property
    def can_join(self) -> bool:
        """Whether sentences with these options may join a search that goes on."""
        backend, tokenizer = self.translator.backend, self.translator.tokenizer
        forced = self.tags.tgt or tokenizer.tgt.prefix
        return isinstance(backend, NativeBackend) and not forced and backend.can_join(self.search)

    def batches(self) -> BatchSearch:
        """Return what searches with these options."""
        search, n_best, backend = self.search, self.lines.n_best, self.translator.backend
        if search.sampling:  # draws do not depend on their number; more would go to waste
            search = replace(search, beam_size=n_best)
        return BatchSearch(backend, search, n_best, backend.max_tokens, self.lines.with_scores)


class Round:
    """Parts that go through an engine together; those that join have the numbers after them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.batches = options.batches()
        self.can_join = options.can_join
        self.num_parts = 0  # all that were added
        self.arrived: deque[Segment] = deque()  # the last of them, which no engine has seen
        self.on_arrival: Callable[[], None] = lambda: None  # set by an engine that wants to know

    def add(self, part: Segment) -> int:
        """Add a part; return its number."""
        self.arrived.append(part)
        self.num_parts += 1
        return self.num_parts - 1

    def take(self) -> list[Segment]:
        """Return what has arrived, once."""
        return [self.arrived.popleft() for _ in range(len(self.arrived))]


class JoinRule:
    """When sentences that arrived join a search."""

    def __init__(self) -> None:
        self._num_asked = 0  # with sentences that wait

    def __call__(self, num_arrived: int, num_live: int) -> bool:
        """Say whether they join now; asked before each step of the search."""
        self._num_asked = self._num_asked + 1 if num_arrived else 0
        if not num_arrived or (
            num_arrived * _JOIN_SHARE < num_live and self._num_asked <= _JOIN_STEPS
        ):
            return False
        self._num_asked = 0
        return True


class RoundEngine(Protocol):
    """Computes rounds, several at a time."""

    num_rounds: int  # at a time

    async def search(
        self,
        slot: int,
        work: Round,
        deliver: Callable[[Found], None],
        observe: Callable[[int], None],
    ) -> None:
        """Search what has arrived in a round and, where they may join, what arrives meanwhile;
        return when nothing is left. `slot` is one of `num_rounds`, each used by one round.

        Calls, in the event loop, `deliver` with parts that are done and `observe` with the number
        of sentences searched whenever some are added. Raises what fails every part that is left.
        """

    async def call(self, function: Callable[..., T], translator: Translator, *args: Any) -> T:
        """Return what `function(translator, *args)` returns, where the model is."""


class LocalEngine:
    """Computes in threads of this process."""

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds
        self._threads = ThreadPoolExecutor(num_rounds, thread_name_prefix="engine")

    async def search(
        self,
        slot: int,
        work: Round,
        deliver: Callable[[Found], None],
        observe: Callable[[int], None],
    ) -> None:
        """See `RoundEngine.search`."""
        loop = asyncio.get_running_loop()
        while work.arrived:
            if work.can_join:
                await loop.run_in_executor(
                    self._threads, _search_arriving, work, loop, deliver, observe
                )
            else:
                first, parts = work.num_parts - len(work.arrived), work.take()
                observe(len(parts))
                translate = work.batches.translate
                outcomes = await loop.run_in_executor(self._threads, translate, parts)
                deliver(list(enumerate(outcomes, start=first)))

    async def call(self, function: Callable[..., T], translator: Translator, *args: Any) -> T:
        """See `RoundEngine.call`; after the rounds that are there."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, translator, *args)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _search_arriving(
    work: Round,
    loop: asyncio.AbstractEventLoop,
    deliver: Callable[[Found], None],
    observe: Callable[[int], None],
) -> None:
    """Search the parts of a round, and what joins it meanwhile, in an engine's thread."""
    rule, first = JoinRule(), work.num_parts - len(work.arrived)

    def take(num_live: int) -> list[Segment]:
        parts = work.take() if rule(len(work.arrived), num_live) else []
        if parts:
            loop.call_soon_threadsafe(observe, num_live + len(parts))
        return parts

    def give(found: Found) -> None:
        numbered = [(first + number, outcome) for number, outcome in found]
        loop.call_soon_threadsafe(deliver, numbered)

    work.batches.translate_arriving(take(0), take, give)
