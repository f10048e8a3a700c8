"""The corpus: windows, truncation, what is left out, the vocabulary, and the cache."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from megatrain_ray.data import rows as rows_module
from megatrain_ray.data import tokens as tokens_module
from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.corpus import ranges
from megatrain_ray.errors import DataError
from tests.data.makers import byte_tokenizer, chat, load, make_config, shared_tokenizer, write_jsonl


def texts(data: Any) -> list[str]:
    return [data.tokenizer.decode(data.corpus[index][0]) for index in range(len(data.corpus))]


@pytest.fixture
def tokenizer() -> Any:
    return shared_tokenizer()


def test_text_is_joined_and_cut_into_windows(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdef"}, {"text": ""}, {"text": "ghi"}, {"text": "jklm"}])
    data = load(path, tokenizer, data={"max_length": 6})
    assert texts(data) == ["abcdef", "<|im_end|>ghi<|im_end|>j", "klm<|im_end|>"]
    assert data.corpus.samples.tolist() == [0, 1, 2]
    assert data.corpus.lengths().tolist() == [6, 6, 4]
    assert data.corpus.num_targets == 5 + 5 + 3
    assert [(str(one.reason), one.rows.tolist()) for one in data.corpus.dropped] == [("empty text", [1])]
    ids, labels = data.corpus[1]
    assert ids.dtype == labels.dtype == np.int64
    assert (ids == labels).all()


@pytest.mark.parametrize("length", [1, 5, 6, 7, 11, 12, 13])
def test_a_window_of_one_token_is_no_window(tmp_path: Path, tokenizer: Any, length: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * length}])
    lengths = load(path, tokenizer, data={"max_length": 6}).corpus.lengths().tolist()
    total = length + 1
    expected = [6] * (total // 6) + ([total % 6] if total % 6 > 1 else [])
    assert lengths == expected


def test_with_packing_documents_stay_apart(tmp_path: Path, tokenizer: Any) -> None:
    documents = ["ab", "", "cdefghijklm", "n", "<|im_end|>"]  # the last one ends itself: one token
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    data = load(path, tokenizer, data={"max_length": 6, "packing": True})
    assert texts(data) == ["ab<|im_end|>", "cdefgh", "ijklm<|im_end|>", "n<|im_end|>"]
    assert data.corpus.samples.tolist() == [0, 2, 2, 3]
    assert data.corpus.num_targets == 2 + 5 + 5 + 1
    assert [(one.reason, one.rows.tolist()) for one in data.corpus.dropped] == [("empty text", [1]), ("no target", [4])]


def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {number}\n" for number in range(50))
    (tmp_path / "a.txt").write_text(text)
    whole = load(tmp_path / "a.txt", byte_tokenizer(adds_bos=True), data={"max_length": 1000})
    monkeypatch.setattr(rows_module, "TXT_PIECE_CHARS", 32)
    (tmp_path / "b.txt").write_text(text)
    pieces = load(tmp_path / "b.txt", byte_tokenizer(adds_bos=True), data={"max_length": 1000})
    assert pieces.corpus.table.starts.size == 10
    assert pieces.corpus.num_rows == whole.corpus.num_rows == 1
    assert pieces.corpus.full_lengths().tolist() == whole.corpus.full_lengths().tolist() == [len(text) + 2]
    assert texts(pieces) == texts(whole) == ["<s>" + text + "<|im_end|>"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved"])
def test_tokens_need_no_tokenizer(tmp_path: Path, kind: str) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": None}, {"input_ids": [1, 2], "labels": [-100, 9]}, {"input_ids": [3, 4]}]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    corpus = load(path).corpus
    assert [(ids.tolist(), labels.tolist()) for ids, labels in map(corpus.__getitem__, range(3))] == [
        ([5, 6, 7], [5, 6, 7]), ([1, 2], [-100, 9]), ([3, 4], [3, 4]),
    ]  # fmt: skip
    assert corpus.num_targets == 2 + 1 + 1


def test_rows_without_targets_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2], "labels": [1, -100]},  # nothing before position 0 predicts it
        {"input_ids": [1]},
        {"input_ids": []},
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, -100, -100, 5]},
    ]
    corpus = load(write_jsonl(tmp_path / "a.jsonl", rows), data={"max_length": 3}).corpus
    assert corpus.samples.tolist() == [1, 5]
    assert corpus.truncated.tolist() == [5]
    assert corpus.num_targets == 2 + 1
    assert {one.reason: one.rows.tolist() for one in corpus.dropped} == {
        "no target": [2, 3, 4],
        "no target within max_length 3": [0],
    }
    assert str(corpus.dropped[1]) == f"1 x no target within max_length 3 ({tmp_path / 'a.jsonl'}:1)"
    assert corpus.without_targets == 4
    assert corpus[1][1].tolist() == [-100, 2, -100]


def test_truncation_of_all_samples_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("a long question", "b")}] * 3)
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, data={"max_length": 20})
    assert str(caught.value) == (
        f"{path}: none of the 3 rows has a target: 3 x no target within max_length 20 ({path}:1, {path}:2, {path}:3)"
    )


def test_what_happens_to_odd_conversations(tmp_path: Path, tokenizer: Any) -> None:
    good = chat("a", "b")
    conversations = [good, [], chat("a"), [{"role": "narrator", "content": "x"}, *good], [{"content": "x"}, *good],
                     [good[1]], [good[0], *good], [], good]  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in conversations])
    corpus = load(path, tokenizer).corpus
    assert corpus.num_rows == 9
    assert corpus.samples.tolist() == [0, 5, 6, 8]
    assert {one.reason: one.rows.tolist() for one in corpus.dropped} == {
        "no messages": [1, 7],
        "no assistant turn": [2],
        'unknown role "narrator"': [3],
        "messages[0] has no role": [4],
    }
    assert corpus.dropped[0].places == (f"{path}:2", f"{path}:8")


HALF = "\ud83d"
"""Of a character pair: JSON can say it, and no text holds it."""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": HALF}, "half of a character pair, which is no text"),
        ({"messages": chat("a", HALF)}, "half of a character pair, which is no text"),
        ({"messages": chat("a", "b"), "tools": json.dumps([{"name": "x", "description": HALF}])},
         "half of a character pair, which is no text"),
        ({"conversations": [{"from": "human", "value": "a"},
                            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"q": HALF}})}]},
         "half of a character pair, which is no text"),
        ({"messages": [*chat("a", "b"), {"role": HALF, "content": "c"}]}, 'unknown role "\\ud83d"'),
    ],
)  # fmt: skip
def test_half_of_a_character_pair_leaves_a_row_out(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], reason: str
) -> None:
    good = {"text": "b"} if "text" in row else {"messages": chat("a", "b")}
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    corpus = load(path, tokenizer).corpus
    assert [str(one) for one in corpus.dropped] == [f"1 x {reason} ({path}:2)"]
    assert (corpus.num_rows, len(corpus)) == (2, 1)


def test_a_tool_that_is_no_json_leaves_a_row_out(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"messages": chat("a", "b"), "tools": tools} for tools in ([], [{"name": "x", "since": date(2026, 1, 1)}])]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    (dropped,) = load(tmp_path / "a.parquet", tokenizer).corpus.dropped
    assert dropped.rows.tolist() == [1]
    assert dropped.reason.startswith("a tool or call that cannot be put as JSON: Object of type date")


def test_only_odd_conversations_are_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}, {"messages": chat("a")}])
    with pytest.raises(DataError, match=r"none of the 2 rows has a target: 1 x no messages .*; 1 x no assistant turn"):
        load(path, tokenizer)


@pytest.mark.parametrize(("name", "contents"), [("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.json", ""), ("a.txt", "")])
def test_an_empty_file_is_an_error(tmp_path: Path, tokenizer: Any, name: str, contents: str) -> None:
    (tmp_path / name).write_text(contents)
    with pytest.raises(DataError, match=f"{name}: no rows; nothing to train on"):
        load(tmp_path / name, tokenizer)


@pytest.mark.parametrize("field", ["input_ids", "labels"])
def test_an_id_beyond_the_embedding_is_named(tmp_path: Path, field: str) -> None:
    rows = [{"input_ids": [1, 511], "labels": [1, 511]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    rows[1][field][1] = 512
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2: token id 512 is outside of the model's embedding.* 512 rows"):
        load(path, rows=512)
    assert len(load(path, rows=513).corpus) == 2


def test_a_tokenizer_larger_than_the_embedding_is_found(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}])
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: token id \d+ is outside of the model's embedding, which has 20 rows"
    ):
        load(path, tokenizer, rows=20)


def test_formats_may_differ_by_file_but_not_in_kind(tmp_path: Path, tokenizer: Any) -> None:
    alpaca = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "output": "b"}] * 2)
    messages = write_jsonl(tmp_path / "b.jsonl", [{"messages": chat("c", "d")}])
    text = write_jsonl(tmp_path / "c.jsonl", [{"text": "e"}])
    nothing = write_jsonl(tmp_path / "d.jsonl", [])
    corpus = load([alpaca, nothing, messages], tokenizer).corpus
    assert corpus.samples.tolist() == [0, 1, 2]
    assert corpus.table.place(2) == f"{messages}:1"
    with pytest.raises(DataError, match="chats, running text and token ids cannot be one data set"):
        load([alpaca, text], tokenizer)


def test_a_given_format_wins(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc", "messages": chat("a", "b")}])
    assert texts(load(path, tokenizer, data={"format": "text"})) == ["abc<|im_end|>"]
    with pytest.raises(DataError, match=r"a\.jsonl:1: field 'input_ids' must be a list of whole numbers, got null"):
        load(path, tokenizer, data={"format": "tokens"})
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match=r"a\.txt: a \.txt file holds running text; data\.format alpaca needs named"):
        load(tmp_path / "a.txt", tokenizer, data={"format": "alpaca"})
    with pytest.raises(DataError, match="running text, which needs a tokenizer"):
        load(tmp_path / "a.txt")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of data that were tokenized, not found in the cache."""
    kinds: list[str] = []
    build = tokens_module._build

    def counted(*arguments: Any, **options: Any) -> None:
        kinds.append(arguments[3])
        build(*arguments, **options)

    monkeypatch.setattr(tokens_module, "_build", counted)
    return kinds


def test_tokens_are_cached_by_what_they_depend_on(tmp_path: Path, tokenizer: Any, built: list[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("", "b")}])
    first = load(path, tokenizer)
    again = load(path, byte_tokenizer(), data={"max_length": 20}, seed=3)
    assert len(built) == 1
    assert first.corpus[0][0].tolist() == load(path, tokenizer).corpus[0][0].tolist()
    assert again.corpus.lengths().tolist() == [20]
    load(path, byte_tokenizer(adds_bos=True))
    load(path, byte_tokenizer(eos="</s>"))
    load(path, tokenizer, data={"assistant_only_loss": False})
    assert len(built) == 4
    write_jsonl(path, [{"messages": chat("a", "c")}])
    os.utime(path, ns=(0, 0))
    assert "c" in texts(load(path, tokenizer))[0]
    assert len(built) == 5
    assert not [entry for entry in (tmp_path / "cache").iterdir() if "partial" in entry.name]


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: field 'text' must be text, got null"):
        load(path, tokenizer)
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


SLOW_BUILD = """
import sys, time
from megatrain_ray.data import tokens
from tests.data.makers import load, shared_tokenizer

read = tokens._raw_rows
tokens._raw_rows = lambda *arguments: (time.sleep(0.1) or row for row in read(*arguments))
load(sys.argv[1], shared_tokenizer())
"""


def test_what_a_killed_build_leaves_is_removed_by_the_next(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(1000)])
    cache = tmp_path / "cache"

    def partial() -> list[Path]:
        return list(cache.glob("*.partial-*"))

    builder = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(path)], cwd=Path(__file__).parents[2])
    give_up_s = time.monotonic() + 60
    while not partial() and time.monotonic() < give_up_s:
        time.sleep(0.05)
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": "another"}])
    load(other, tokenizer)
    assert len(partial()) == 1, "its builder lives"
    builder.kill()
    builder.wait()
    assert len(partial()) == 1
    assert load(path, tokenizer).corpus.num_rows == 1000
    assert partial() == []


@pytest.mark.parametrize(
    ("module", "name", "cause"),
    [(rows_module, "_parse", "a.jsonl: cannot be read: it is gone"), (tokens_module, "_write", "cannot write tokens")],
)
def test_reading_and_writing_fail_under_their_own_names(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, cause: str
) -> None:
    """The second line, when the build is under way."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    whole = getattr(module, name)

    def fails(*arguments: Any) -> Any:
        if name == "_parse" and '"a"' in arguments[0]:
            return whole(*arguments)
        raise OSError(errno.EIO, "it is gone")

    monkeypatch.setattr(module, name, fails)
    with pytest.raises(DataError, match=cause):
        load(path, tokenizer)


def test_a_cache_that_cannot_be_written(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot keep tokens there.*HF_DATASETS_CACHE"):
        load(path, tokenizer)


def test_a_damaged_cache_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a" * 5000}])
    load(path, tokenizer)
    (file,) = (tmp_path / "cache").glob("*/*.arrow")
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"the cached tokens cannot be read: .*; delete this directory"):
        load(path, tokenizer)


def test_several_processes_give_the_same_tokens(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": chat(f"question {index}", "x" * (index % 7))} for index in range(40)]
    rows[33] = {"messages": []}
    path, copy = (write_jsonl(tmp_path / f"{name}.jsonl", rows) for name in "ab")
    one = load(path, tokenizer).corpus
    monkeypatch.setattr(tokens_module, "_ROWS_PER_PROCESS", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    several = load(copy, tokenizer).corpus
    assert len(list((tmp_path / "cache").glob("*/*.arrow"))) == 1 + 3
    assert one.samples.tolist() == several.samples.tolist()
    assert [row.tolist() for index in range(39) for row in one[index]] == [
        row.tolist() for index in range(39) for row in several[index]
    ]
    assert [dropped.rows.tolist() for dropped in several.dropped] == [[33]]


def test_reading_in_small_batches_crosses_chunks(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": list(range(3, 3 + index))} for index in range(2, 30)])
    monkeypatch.setattr(tokens_module, "_BATCH_ROWS", 4)
    corpus = load(path).corpus
    assert [ids.tolist() for ids, _ in map(corpus.__getitem__, range(28))] == [
        list(range(3, 3 + index)) for index in range(2, 30)
    ]
    assert corpus.table.ids(1, 12).tolist() == [4, 3, 4, 5, 3, 4, 5, 6, 3, 4, 5]


def test_tokens_stay_on_disk(tmp_path: Path) -> None:
    import pyarrow as pa

    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [7] * 1000}] * 500)
    load(path)
    before = pa.total_allocated_bytes()
    corpus = load(path).corpus
    assert pa.total_allocated_bytes() - before < 100_000
    assert corpus.lengths().sum() == 500_000


def test_evaluation_data(tmp_path: Path, tokenizer: Any) -> None:
    from megatrain_ray.data.sampler import build_evaluation_corpus, evaluation_batches

    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("a", "b" * index)} for index in range(1, 6)])
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocabulary_rows": 512, "cache_dir": str(tmp_path / "cache")}
    assert build_evaluation_corpus(make_config(path), **options) is None
    corpus = build_evaluation_corpus(make_config(path, data={"eval_path": str(path)}), **options)
    assert corpus is not None
    batches = list(evaluation_batches(corpus, 2))
    assert [batch.samples for batch in batches] == [(0, 1), (2, 3), (4,)]
    assert sum(batch.target_tokens for batch in batches) == corpus.num_targets == sum(range(2, 7))
    assert (batches[0].micro_batches[0].labels[0] != IGNORED).sum() == 2


def test_rows_are_named_in_runs_up_to_a_number_of_them() -> None:
    assert ranges(np.array([1, 4, 5, 6, 9])) == "1, 4-6, 9"
    assert ranges(np.arange(0, 2000, 2), most=2) == "0, 2 and 998 more"
