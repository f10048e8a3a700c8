"""Rows as token ids on disk: read once, tokenized in parallel by `datasets`, cached, and memory-mapped afterwards.

A cache entry is a directory of Arrow files named by everything that its contents depend on; it appears by one rename.
Nothing in it depends on ``max_length``, the batch or the seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from megatrain_ray.data.chat import ChatTemplate
from megatrain_ray.data.encode import ChatEncoder, TextEncoder, entry_of
from megatrain_ray.data.formats import (
    CHAT_FORMATS,
    Conversation,
    Unusable,
    conversation,
    detect_format,
    text_of,
    token_row,
)
from megatrain_ray.data.rows import Row, Source
from megatrain_ray.errors import DataError

__all__ = ["TokenTable", "load_tokens"]

_VERSION = 2
"""Changes whenever the same rows become other tokens."""

_BATCH_ROWS = 1000
_BATCH_CHARS = 8 << 20
"""Limits of what is read before it is written."""

_ROWS_PER_PROCESS = 1000
_BYTES_PER_PROCESS = 32 << 20
"""Fewer rows and fewer bytes are not worth another process."""

_QUIET_BYTES = 4 << 20
"""Smaller data show no progress bar: they are there at once."""

Ints = NDArray[np.int64]


class TokenTable:
    """The tokens of all rows, memory-mapped.

    Attributes:
        sources: What was read, in order.
        form: ``text``, ``chat`` or ``tokens``.
        row: Row index in file order over all sources, from 0, of each entry; pieces of a long text share one.
        lengths: Tokens of each entry.
        starts: Where each entry starts in the stream of all tokens.
        targets: How many of its tokens are targets (position 0 never is).
        first_target: Position of the first target; 0 when there is none.
        largest_id: Largest token id of each entry, -1 when it is empty.
    """

    def __init__(self, table: Any, sources: tuple[Source, ...], form: str) -> None:
        self.sources = sources
        self.form = form
        self._table = table
        self._ids = _FlatColumn(table.column("input_ids"))
        self._labels = _FlatColumn(table.column("labels"))
        self.starts = self._ids.offsets[:-1]
        self.lengths = np.diff(self._ids.offsets)
        self.row, self.targets, self.first_target, self.largest_id = (
            table.column(name).to_numpy() for name in ("row", "targets", "first_target", "largest_id")
        )

    @property
    def num_rows(self) -> int:
        """Rows of the sources; a long text counts once."""
        return int(self.row[-1]) + 1 if len(self.row) else 0

    def ids(self, start: int, stop: int) -> Ints:
        """Part of the stream of all tokens."""
        return self._ids[start:stop]

    def labels(self, entry: int, length: int) -> Ints:
        """The first labels of an entry; its ids where everything is a target."""
        start, stop = self._labels.offsets[entry : entry + 2]
        if start == stop:
            return self._ids[self.starts[entry] : self.starts[entry] + length]
        return self._labels[start : min(stop, start + length)]

    @cached_property
    def checksum(self) -> str:
        """xxh3_64 of all tokens, labels and lengths, wherever the files lie."""
        digest = xxhash.xxh3_64()
        for column in (self._ids, self._labels):
            column.add_to(digest)
        return digest.hexdigest()

    def place(self, entry: int) -> str:
        """Where an entry stands, for messages."""
        source: Source = self.sources[self._table.column("source")[entry].as_py()]
        return source.place(self._table.column("number")[entry].as_py())

    def problems(self) -> dict[str, Ints]:
        """Entries that were left out, by reason."""
        column = self._table.column("problem")
        entries = np.flatnonzero(np.concatenate([np.empty(0), *(_text_lengths(chunk) for chunk in column.chunks)]))
        reasons: dict[str, list[int]] = {}
        for entry in entries:
            reasons.setdefault(column[int(entry)].as_py(), []).append(int(entry))
        return {reason: np.array(found, np.int64) for reason, found in reasons.items()}


class _FlatColumn:
    """A column of lists as one stream of numbers, without a copy."""

    def __init__(self, column: Any) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [chunk.flatten().to_numpy() for chunk in chunks]
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks]
        self.offsets: Ints = np.concatenate([[0], np.cumsum(np.concatenate([[0], *lengths]).astype(np.int64))[1:]])
        self._chunk_starts = np.cumsum([0, *map(len, self._values)])

    def add_to(self, digest: Any) -> None:
        """Adds lengths and numbers to a checksum."""
        digest.update(self.offsets)
        for values in self._values:
            digest.update(values)

    def __getitem__(self, part: slice) -> Ints:
        start, stop = int(part.start), int(part.stop)
        pieces = []
        chunk = int(np.searchsorted(self._chunk_starts, start, side="right")) - 1
        while start < stop:
            offset = int(self._chunk_starts[chunk])
            piece = self._values[chunk][start - offset : stop - offset]
            pieces.append(piece)
            start += len(piece)
            chunk += 1
        joined = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int32), *pieces])
        return joined.astype(np.int64)


def _text_lengths(chunk: Any) -> NDArray[np.int32]:
    """Bytes of each text of an Arrow array, without looking at the texts."""
    offsets = np.frombuffer(chunk.buffers()[1], np.int32)
    return np.diff(offsets[chunk.offset : chunk.offset + len(chunk) + 1])


def load_tokens(
    sources: tuple[Source, ...], form: str, tokenizer: Any, *, assistant_only: bool, cache_dir: str | None = None
) -> TokenTable:
    """The tokens of a data set, from the cache where they are in it.

    Args:
        sources: At least one.
        form: A format of INTERFACE; ``auto``: each source's first row decides.
        tokenizer: Of the model, with its chat template; ``tokens`` needs none.
        assistant_only: Targets of chats are assistant turns alone.
        cache_dir: Default: ``megatrain_ray`` in the cache directory of `datasets`.

    Raises:
        DataError: A row that cannot be used.
    """
    forms = [_form_of(source, form) for source in sources]
    present = [kind for kind in forms if kind is not None]
    if not present:
        raise DataError(f"{', '.join(source.name for source in sources)}: no rows; nothing to train on")
    kinds = {"chat" if kind in CHAT_FORMATS else kind for kind in present}
    if len(kinds) > 1:
        raise DataError(
            f"{', '.join(f'{source.name} is {kind}' for source, kind in zip(sources, forms, strict=True) if kind)}: "
            "chats, running text and token ids cannot be one data set"
        )
    (kind,) = kinds
    if kind != "tokens" and tokenizer is None:
        what = "chats, which need" if kind == "chat" else "running text, which needs"
        raise DataError(f"the data are {what} a tokenizer, and the model directory has none")
    encode = (
        ChatEncoder(ChatTemplate(tokenizer, assistant_only=assistant_only), tokenizer)
        if kind == "chat"
        else TextEncoder(tokenizer)
    )
    identity = [source.identity() for source in sources]
    depends_on = [_VERSION, identity, forms]
    if kind != "tokens":
        depends_on += [_tokenizer_identity(tokenizer), assistant_only and kind == "chat"]
    key = hashlib.sha256(json.dumps(depends_on, default=str).encode()).hexdigest()[:32]
    entry = _cache_root(cache_dir) / key
    if not entry.is_dir():
        _build(entry, sources, forms, kind, encode, quiet=_size(sources) < _QUIET_BYTES)
    return TokenTable(_open_tables(entry), sources, kind)


def _form_of(source: Source, form: str) -> str | None:
    """The format of a source; None when it holds no rows."""
    first = next(source.rows(), None)
    if first is None:
        return None
    detected = form if form != "auto" else detect_format(first)
    if source.kind == "txt" and detected != "text":
        raise DataError(f"{source.name}: a .txt file holds running text; data.format {form} needs named fields")
    return detected


def _cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    from huggingface_hub.constants import HF_HOME

    # As `datasets` has it, which takes long to import when everything is in the cache.
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser() / "megatrain_ray"


def _size(sources: Sequence[Source]) -> int:
    return sum(
        source.dataset.data.nbytes if source.dataset is not None else Path(source.name).stat().st_size
        for source in sources
    )


def _tokenizer_identity(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [type(tokenizer).__name__, vocabulary, tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


# --- building a cache entry -------------------------------------------------------------------------------------------


def _build(
    entry: Path, sources: tuple[Source, ...], forms: list[str | None], kind: str, encode: Any, *, quiet: bool
) -> None:
    partial, lock = _partial_directory(entry)
    try:
        if kind == "tokens":
            _write(partial / "tokens.arrow", _token_rows(sources), quiet)
        else:
            raw = partial / "rows.raw"
            _write(raw, _raw_rows(sources, forms, kind), quiet)
            with _progress(quiet):
                _tokenize(raw, partial / "tokens.arrow", encode)
            raw.unlink()
        # Another process may have been faster: its entry is the same.
        with contextlib.suppress(OSError):
            partial.rename(entry)
    except OSError as error:
        raise DataError(f"{partial}: cannot write tokens: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _partial_directory(entry: Path) -> tuple[Path, int]:
    """A new directory to build an entry in, and the lock that says that it is in use; what dead builders left goes."""
    root = entry.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / "lock", "w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)  # nobody sees a new directory before its own lock is held
            for left in root.glob("*.partial-*"):
                _remove_unless_in_use(left)
            partial = Path(tempfile.mkdtemp(prefix=f"{entry.name}.partial-", dir=root))
            lock = os.open(partial, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return partial, lock
    except OSError as error:
        raise DataError(
            f"{root}: cannot keep tokens there: {error}; set HF_DATASETS_CACHE to a writable directory"
        ) from error


def _remove_unless_in_use(partial: Path) -> None:
    with contextlib.suppress(OSError):  # in use, or gone
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial)
        finally:
            os.close(lock)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[None]:
    import datasets

    if not quiet or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _raw_rows(sources: tuple[Source, ...], forms: list[str | None], kind: str) -> Iterator[dict[str, Any]]:
    """Validated rows before tokenizing: text, or a conversation as JSON (Arrow has no type for what templates take)."""
    for place, row, form in _numbered(sources, forms):
        text, problem = "", ""
        try:
            text = text_of(row) if kind == "text" else _as_json(conversation(row, form))
            text.encode()
        except Unusable as error:
            problem = str(error)
        except UnicodeEncodeError:
            text, problem = "", "half of a character pair, which is no text"
        yield {**place, "text": text, "first": row.first, "last": row.last, "problem": problem}


def _as_json(chat: Conversation) -> str:
    try:
        return json.dumps({"messages": chat.messages, "tools": chat.tools}, ensure_ascii=False)
    except TypeError as error:  # Parquet has dates and bytes
        raise Unusable(f"a tool or call that cannot be put as JSON: {error}") from error


def _numbered(sources: tuple[Source, ...], forms: list[str | None]) -> Iterator[tuple[dict[str, int], Row, str]]:
    index = -1
    for source_index, (source, form) in enumerate(zip(sources, forms, strict=True)):
        for row in source.rows():
            index += row.first
            yield {"row": index, "source": source_index, "number": row.number}, row, form or ""


def _token_rows(sources: tuple[Source, ...]) -> Iterator[dict[str, Any]]:
    for place, row, _ in _numbered(sources, ["tokens"] * len(sources)):
        ids, labels = token_row(row)
        yield {**place, **entry_of(np.array(ids, np.int64), None if labels is None else np.array(labels, np.int64))}


def _schema(names: Sequence[str]) -> Any:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    types = {
        "row": pa.int64(), "source": pa.int32(), "number": pa.int64(), "text": pa.large_string(), "first": pa.bool_(),
        "last": pa.bool_(), "problem": pa.string(), "input_ids": ids, "labels": ids, "targets": pa.int32(),
        "first_target": pa.int32(), "largest_id": pa.int32(),
    }  # fmt: skip
    return pa.schema([(name, types[name]) for name in names])


_TOKEN_COLUMNS = (
    "row", "source", "number", "problem", "input_ids", "labels", "targets", "first_target", "largest_id",
)  # fmt: skip
_RAW_COLUMNS = ("row", "source", "number", "text", "first", "last", "problem")


def _write(path: Path, rows: Iterator[dict[str, Any]], quiet: bool) -> None:
    """Streams rows into an Arrow file; memory holds one batch."""
    import pyarrow as pa

    schema = _schema(_RAW_COLUMNS if path.suffix == ".raw" else _TOKEN_COLUMNS)
    batch: list[dict[str, Any]] = []
    size = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:

        def flush() -> None:
            columns = [pa.array([row[field.name] for row in batch], field.type) for field in schema]
            writer.write_batch(pa.record_batch(columns, schema=schema))

        for row in track(rows, "Reading rows", console=Console(stderr=True), disable=quiet):
            batch.append(row)
            size += len(row["text"]) if "text" in row else 8 * len(row["input_ids"])
            if len(batch) == _BATCH_ROWS or size > _BATCH_CHARS:
                flush()
                batch, size = [], 0
        if batch:
            flush()


def _open_tables(entry: Path) -> Any:
    import pyarrow as pa

    files = sorted(entry.glob("*.arrow"))
    try:
        return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{entry}: the cached tokens cannot be read: {error}; delete this directory") from error


def _tokenize(raw: Path, out: Path, encode: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_file(str(raw))
    worth = max(len(rows) // _ROWS_PER_PROCESS, min(len(rows), rows.data.nbytes // _BYTES_PER_PROCESS))
    processes = min(len(os.sched_getaffinity(0)), worth)
    parallel = processes > 1
    try:
        rows.map(
            encode,
            batched=True,
            batch_size=max(1, min(100, _BATCH_CHARS * len(rows) // (8 * rows.data.nbytes))),
            remove_columns=["text", "first", "last"],
            features=datasets.Features.from_arrow_schema(_schema(_TOKEN_COLUMNS)),
            cache_file_name=str(out),
            num_proc=processes if parallel else None,
            fn_kwargs={"parallel": parallel},
            new_fingerprint=out.parent.name.partition(".")[0],
            load_from_cache_file=False,
            desc="Tokenizing",
        )
    except DataError:
        raise
    except Exception as error:  # from a worker process, maybe wrapped
        cause = error.__cause__ or error
        raise (cause if isinstance(cause, DataError) else error) from None
