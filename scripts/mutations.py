# ruff: noqa: E501
"""The breaks that scripts/mutate.py makes: name, file, text, broken text, tests that should notice.

The text must stand exactly once in the file. Keep breaks small: a bound, a sign, an order, an end.
"""

DATA = "nmt/data/"

# fmt: off
MUTATIONS: list[tuple[str, str, str, str, str]] = [
    # --- nmt/data/batch.py
    ("bucket-bound", DATA + "batch.py", 'max_tokens, side="right"', 'max_tokens, side="left"', "batching"),
    ("bucket-sort-target", DATA + "batch.py", "np.lexsort((src, tgt, longest))", "np.lexsort((tgt, src, longest))", "batching"),
    ("bucket-width", DATA + "batch.py", "longest[start : start + most]", "longest[start]", "batching"),
    ("batch-cost-side", DATA + "batch.py", "len(lengths) * int(lengths.max())", "len(lengths) * int(lengths[:, 0].max())", "batching"),
    ("padding-share", DATA + "batch.py", "return 1 - real / padded", "return real / padded", "batching"),
    ("pad-eos", DATA + "batch.py", "table[i, end] = eos", "table[i, end - 1] = eos", "search_text scoring"),
    ("pad-lengths", DATA + "batch.py", "[len(row) + 1 for row in rows]", "[len(row) for row in rows]", "constraints search_text"),
    # --- nmt/data/batching.py
    ("pool-seed", DATA + "batching.py", "(self.seed, epoch, pool)", "(self.seed, epoch)", "pools"),
    ("epoch-seed", DATA + "batching.py", "(self.seed, epoch, pool)", "(self.seed, 0, pool)", "batching"),
    ("batches-unshuffled", DATA + "batching.py", "for i in generator.permutation(len(batches))]", "for i in range(len(batches))]", "batching"),
    ("update-middle", DATA + "batching.py", "ends - tokens / 2", "ends", "batching"),
    ("sliver-start", DATA + "batching.py", "if offset < share / 8:", "if offset < 0:", "batching"),
    ("sliver-end", DATA + "batching.py", "return batch + 1, 0", "return batch, 0", "batching"),
    ("rank-end", DATA + "batching.py", "(self.rank, self.rank + 1)", "(self.rank, self.world_size)", "batching"),
    ("longest-refused", DATA + "batching.py", "if self.longest > max_tokens:", "if self.longest > max_tokens + 1:", "batching"),
    ("smaller-batches", DATA + "batching.py", "max(self.longest, tokens_per_update))", "max_tokens)", "batching"),
    ("source-tokens", DATA + "batching.py", "num_src_tokens=int(tokens[start:end, 0]", "num_src_tokens=int(tokens[start:end, 1]", "batching"),
    ("pool-kept", DATA + "batching.py", "lru_cache(maxsize=2)", "lru_cache(maxsize=1)", "pools"),
    ("pool-starts", DATA + "batching.py", "num_updates * pool // num_pools for", "num_updates * pool // num_pools + (pool > 0) for", "pools"),
    ("tried-rows", DATA + "batching.py", "np.concatenate([rows, self._longest_rows])", "rows", "pools"),
    # --- nmt/data/mixing.py
    ("share-cut", DATA + "mixing.py", "round((epoch + 1) * self.drawn)", "round((epoch + 1) * self.drawn + 0.4)", "mixing"),
    ("temperature", DATA + "mixing.py", "w * size ** (1 / temperature)", "w * size ** (1 / (temperature + 0.1))", "mixing"),
    ("weight-in-heat", DATA + "mixing.py", "[w * size **", "[size **", "mixing"),
    ("last-block", DATA + "mixing.py", "places[places >= end_of_short] += missing", "places[places > end_of_short] += missing", "mixing"),
    ("pass-key", DATA + "mixing.py", "spawn_key=(corpus, number)", "spawn_key=(corpus, 0)", "mixing"),
    ("mix-start", DATA + "mixing.py", "pieces.append(rows + share.corpus.start)", "pieces.append(rows)", "mixing"),
    # --- nmt/data/arrow.py, binary.py
    ("uint16-bound", DATA + "arrow.py", "n <= 1 << 16 else pa.int32()", "n <= (1 << 16) + 1 else pa.int32()", "binary"),
    ("length-bound", DATA + "arrow.py", "longest < 1 << 16 else", "longest <= 1 << 16 else", "binary"),
    ("lengths-eos", DATA + "arrow.py", "np.diff(offsets) + 1", "np.diff(offsets)", "binary"),
    ("shard-longest", DATA + "arrow.py", "int(lengths.max()) + 1)", "int(lengths.max()))", "binary"),
    ("cut-stream", DATA + "arrow.py", "if source.read_at(len(_END), last) != _END:", "if False:", "binary"),
    ("batch-rows", DATA + "arrow.py", "_ROWS_A_BATCH = 50_000", "_ROWS_A_BATCH = 49_999", "reference"),
    ("size-check", DATA + "binary.py", "!= shard.bytes:", "< shard.bytes - 64:", "binary"),
    ("pairs-check", DATA + "binary.py", "if len(shard) != expected:", "if len(shard) > expected:", "binary"),
    ("shard-start", DATA + "binary.py", "bisect_right(self._starts, index) - 1", "max(bisect_right(self._starts, index - 1) - 1, 0)", "binary"),
    ("newer-folder", DATA + "binary.py", "if version > FORMAT_VERSION:", "if version > FORMAT_VERSION + 1:", "binary"),
    ("digest-order", DATA + "binary.py", "in sorted(index.items()):", "in index.items():", "reference"),
    # --- nmt/data/text.py
    ("line-break", DATA + "text.py", "\\x1e\\x85", "\\x1e", "corpus"),
    ("carriage-return", DATA + "text.py", '.removesuffix("\\r"))', ")", "corpus"),
    ("bad-byte", DATA + "text.py", "byte {error.start + 1}", "byte {error.start}", "corpus"),
    ("unequal", DATA + "text.py", "num_tgt = num_pairs + (target is not None)", "num_tgt = num_pairs", "corpus"),
    ("last-line", DATA + "text.py", "if self._start else [])", "if False else [])", "translate_command"),
    ("copy-length", DATA + "text.py", "draw.randint(8, 12)", "draw.randint(7, 12)", "bundled"),
    ("held-out-numbers", DATA + "text.py", "(10_000, 10_300, 10_800)", "(10_000, 10_300, 10_799)", "bundled"),
    # --- nmt/data/tokenizer.py, vocabulary.py
    ("decoded-break", DATA + "tokenizer.py", '.replace("\\r", " ")', "", "tokenizer"),
    ("tokenizer-sum", DATA + "tokenizer.py", "if sha256 not in (None, tokenizers.sha256):", "if False:", "separate_vocabularies checkpoints"),
    ("lacking-symbol", DATA + "tokenizer.py", "tokenizer.eos_id) < 0:", "tokenizer.eos_id) < -1:", "existing_tokenizers"),
    ("user-symbol", DATA + "vocabulary.py", "if symbol not in added and not _is_symbol(model, symbol):", "if False:", "existing_tokenizers"),
    ("control-id", DATA + "vocabulary.py", "processor.vocab_size() + len(added)", "processor.vocab_size() + len(added) - 1", "existing_tokenizers"),
    ("threads-of-model", DATA + "vocabulary.py", "_NUM_THREADS = 16", "_NUM_THREADS = 15", "reference"),
    ("long-sentences", DATA + "vocabulary.py", '> _MAX_SENTENCE_BYTES\n', '>= _MAX_SENTENCE_BYTES\n', "tokenizer"),
    # --- nmt/files.py, progress.py
    ("foreign-folder", "nmt/files.py", "or is_foreign(folder, marker):", "or False:", "files"),
    ("sorted-json", "nmt/files.py", "sort_keys=True", "sort_keys=False", "files"),
    ("new-parents", "nmt/files.py", "for parent in new_parents:", "for parent in ():", "files"),
    ("put-back", "nmt/files.py", "if not place.exists():", "if False:", "files checkpoints"),
    ("shared-mode", "nmt/files.py", "path.chmod(mode)", "pass", "files"),
    ("speed-of-resumed", "nmt/progress.py", "(self.done - self._first) / self._seconds()", "self.done / self._seconds()", "progress"),
    ("remaining", "nmt/progress.py", "pace * (self._total - self.done)", "pace * self._total", "progress"),
    ("log-interval", "nmt/progress.py", ">= LOG_SECONDS:", "> LOG_SECONDS:", "progress"),
]
# fmt: on
