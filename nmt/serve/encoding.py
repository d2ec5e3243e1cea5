"""Encode texts as token ids. Long texts are encoded in separate processes.

SentencePiece holds Python's global lock while it encodes, for up to 0.1 s for a sentence of 1 MB.
In a thread of the server, it would delay all other requests.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from weakref import WeakKeyDictionary, WeakSet

from nmt.data.tokenizer import Tokenizers
from nmt.runtime.executor import CHECK_SECONDS, CrashSafeExecutor
from nmt.serve.file_process import FORK_CONTEXT, prepare_forked_process
from nmt.serve.queues import BatchOptions
from nmt.translate.options import LineOptions
from nmt.translate.translator import Translator
from nmt.translate.windows import EncodedWindow, Window, encode_window

_INLINE_CHARACTERS = 4000  # shorter texts are encoded in the event loop


class TextEncoder:
    """Encodes lines as segments of token ids.

    Each model has one process for long texts. The process starts at the first long text, and ends
    when it is idle.
    """

    def __init__(self) -> None:
        self._executors: WeakKeyDictionary[Translator, CrashSafeExecutor] = WeakKeyDictionary()
        # the models whose processes were used since the last call of `end_idle_processes`
        self._recently_used: WeakSet[Translator] = WeakSet()
        self._num_running = 0  # number of texts that processes encode

    async def encode(
        self, options: BatchOptions, lines: list[str], prefixes: list[str] | None = None
    ) -> EncodedWindow:
        """Encode the lines of a request. If they are long, the process of the model encodes them.

        `prefixes` are the texts with which the translations of the lines begin.
        """
        window = Window(first_line=0, lines=lines, prefixes=prefixes)
        translator = options.translator
        line_options = options.encoding_options
        if sum(map(len, lines)) <= _INLINE_CHARACTERS:
            return encode_window(window, translator.tokenizer, line_options)
        executor = self._executors.get(translator)
        if executor is None:
            executor = CrashSafeExecutor(
                1,
                mp_context=FORK_CONTEXT,
                initializer=_initialize_process,
                initargs=(translator.tokenizer,),
            )
            self._executors[translator] = executor
        self._recently_used.add(translator)
        self._num_running += 1
        try:
            # in a thread, since the first call of `submit` starts the process
            future = await asyncio.to_thread(executor.submit, _encode, window, line_options)
            return await _wait_for_result(executor, future)
        except BrokenProcessPool:  # the process was killed
            self._executors.pop(translator, None)
            return await asyncio.to_thread(
                encode_window, window, translator.tokenizer, line_options
            )
        finally:
            self._num_running -= 1

    def end_idle_processes(self) -> None:
        """End the processes that were not used since the previous call."""
        if self._num_running:
            return
        idle_translators = [key for key in self._executors if key not in self._recently_used]
        for translator in idle_translators:
            self._executors.pop(translator).shutdown(wait=False)
        self._recently_used.clear()

    def close(self) -> None:
        """Let the processes end. Does not wait for them."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)


async def _wait_for_result(
    executor: CrashSafeExecutor, future: Future[EncodedWindow]
) -> EncodedWindow:
    """Return the result of a future. If the call is canceled, cancels the future."""
    result = asyncio.wrap_future(future)
    try:
        while not result.done():
            executor.fail_if_process_lost()
            await asyncio.wait([result], timeout=CHECK_SECONDS)
        return result.result()
    finally:
        result.cancel()


_tokenizers: list[Tokenizers] = []
"""In a process of `TextEncoder`, the tokenizers of its model. Empty in the server process."""


def _initialize_process(tokenizers: Tokenizers) -> None:
    """Store the tokenizers of the model in this process."""
    prepare_forked_process()
    _tokenizers.append(tokenizers)


def _encode(window: Window, line_options: LineOptions) -> EncodedWindow:
    """Encode lines with the tokenizers of this process."""
    return encode_window(window, _tokenizers[0], line_options)
