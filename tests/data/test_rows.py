"""Reading: every kind of file gives the same rows, and an error says where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatrain_ray.data import rows as rows_module
from megatrain_ray.data.rows import open_sources
from megatrain_ray.errors import DataError

ROWS = [{"text": "one\u2028line"}, {"text": "zwei, \u00e4 \U0001f600"}, {"text": ""}]


def read(*paths: Path | str) -> list[dict[str, Any]]:
    return [row.values for source in open_sources([str(path) for path in paths]) for row in source.rows()]


def fails(path: Path, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        read(path)
    assert expected in str(caught.value)
    assert path.name in str(caught.value)


def write(path: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_every_kind_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    assert read(write(tmp_path, kind, ROWS)) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == ROWS


def test_json_may_hold_one_object_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", ROWS).rename(tmp_path / "data.json")
    assert read(path) == ROWS
    path.write_text('{"text": "a"}\n{"text": ', encoding="utf-8")
    fails(path, "data.json:2: not valid JSON")


def test_txt_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\nsecond")
    (row,) = open_sources([str(path)])[0].rows()
    assert (row.values, row.first, row.last) == ({"text": "first\n\nsecond"}, True, True)


def test_a_long_txt_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "TXT_PIECE_CHARS", 10)
    text = "".join(f"line {number}\n" for number in range(9))
    (tmp_path / "a.txt").write_text(text)
    pieces = list(open_sources([str(tmp_path / "a.txt")])[0].rows())
    assert "".join(piece.values["text"] for piece in pieces) == text
    assert all(piece.values["text"].endswith("\n") for piece in pieces)
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_blank_lines_are_no_rows_and_lines_count_from_the_file_start(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('\n{"text": "a"}\n   \n\n{"text": "b"}\n', encoding="utf-8")
    rows = list(open_sources([str(path)])[0].rows())
    assert [row.number for row in rows] == [2, 5]
    assert rows[1].place == f"{path}:5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"text": "a"}\n\n{"text": "b', "data.jsonl:3: not valid JSON"),
        ('{"text": "a"}\n[]\n', "data.jsonl:2: expected an object with named fields, got []"),
        ('{"text": "a"}\n7\n', "data.jsonl:2: expected an object with named fields, got 7"),
        ("[" * 100_000, "data.jsonl:1: not valid JSON"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    fails(tmp_path / "data.jsonl", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[\n{"text": "a"},\n{"text": "b', "row 1 (line 3): not valid JSON"),
        ('[\n{"text": "a"},\n\n[]\n]', "row 1 (line 4): expected an object with named fields, got []"),
        ('[{"text": "a"}\n{"text": "b"}]', "row 0 (line 1): not valid JSON: expected ',' or ']'"),
        ('[{"text": "a"}', "row 0 (line 1): not valid JSON: expected ',' or ']'"),
        ('[{"text": "a"}] more', "text after the list of rows"),
    ],
)
def test_a_bad_json_row_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "data.json").write_text(text, encoding="utf-8")
    fails(tmp_path / "data.json", expected)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.txt"])
def test_bytes_that_are_no_text_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "a"}\n' * 5000 + b'{"text": "\xff"}\n')
    fails(tmp_path / name, "not UTF-8 text")
    fails(tmp_path / name, ":5001")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "txt"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    path.symlink_to("/proc/self/mem")  # opens, and has nothing mapped at its start
    fails(path, "cannot be read")


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    fails(path, "cannot be read as Parquet")


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    fails(tmp_path / "missing.jsonl", "no such data file")
    (tmp_path / "data.csv").write_text("a,b\n")
    fails(tmp_path / "data.csv", "unknown kind of file; expected one of .jsonl, .json, .parquet, .txt")
    fails(tmp_path / f"{'x' * 300}.jsonl", "cannot be read: File name too long")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "neither saved by `datasets` nor holding")


def test_several_files_are_one_set_in_the_given_order(tmp_path: Path) -> None:
    first, second = write(tmp_path, "parquet", ROWS[:2]), write(tmp_path, "jsonl", ROWS[2:])
    assert read(second, first) == [*ROWS[2:], *ROWS[:2]]


def test_directories(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(str(tmp_path / "split"))
    datasets.DatasetDict({"test": saved}).save_to_disk(str(tmp_path / "no_train"))
    (tmp_path / "files").mkdir()
    write(tmp_path / "files", "jsonl", ROWS).rename(tmp_path / "files" / "DATA.JSONL")
    (tmp_path / "files" / "notes.md").write_text("no data")
    assert read(tmp_path / "plain") == read(tmp_path / "split") == read(tmp_path / "files") == ROWS
    fails(tmp_path / "no_train", "has the splits test and no 'train'")


def test_a_hub_id_goes_through_load_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "jsonl", ROWS)
    loaded = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"))
    asked: list[str] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: (asked.append(name), loaded)[1])
    assert read("someone/something") == ROWS
    assert asked == ["someone/something"]


def test_a_hub_id_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        DataError, match=r"someone/nothing: no such file, and the hub gives no such data set.*no network$"
    ):
        read("someone/nothing")


def test_nulls_that_arrow_adds_to_nested_objects_are_not_data(tmp_path: Path) -> None:
    rows = [{"a": [{"x": 1}, {"y": {"z": 2}}], "b": None}, {"a": [], "b": "late"}]
    assert read(write(tmp_path, "parquet", rows)) == rows
