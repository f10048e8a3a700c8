"""The preview tells what will be trained on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain_ray.data.preview import TARGET_STYLE, describe, print_preview, segments_of
from megatrain_ray.data.sampler import TrainingData
from tests.data.makers import chat, load, shared_tokenizer, write_jsonl

ROWS: list[dict[str, Any]] = [
    {"messages": chat("[bold]hi[/bold]", "hello")},
    {"messages": []},
    {"messages": chat("a", "b", "c", "d" * 90)},
    {"messages": chat("a long question" * 9, "b")},
]


def make(tmp_path: Path, **options: Any) -> TrainingData:
    options = {"data": {"max_length": 100}, "per_device_train_batch_size": 1, "num_train_epochs": 3, **options}
    return load(write_jsonl(tmp_path / "chats.jsonl", ROWS), shared_tokenizer(), **options)


def printed(data: TrainingData, **options: Any) -> str:
    stream = io.StringIO()
    print_preview(data, Console(file=stream, width=1000, **options.pop("console", {})), **options)
    return stream.getvalue()


def test_facts(tmp_path: Path) -> None:
    facts = describe(make(tmp_path))
    assert (facts.form, facts.num_rows, facts.num_samples, facts.truncated) == ("chat", 4, 2, (2,))
    assert {one.reason: one.rows.tolist() for one in facts.dropped} == {
        "no messages": [1],
        "no target within max_length 100": [3],
    }
    assert (facts.steps_per_epoch, facts.total_steps) == (1, 3)
    first, second = (make(tmp_path).corpus[index] for index in (0, 1))
    assert facts.tokens_per_epoch == len(first[0]) + len(second[0])
    assert facts.targets_per_epoch == len("hello") + 1 + len("b") + 1 + 57
    assert sum(count for _, _, count in facts.histogram) == 2
    assert facts.histogram[-1][1] > 100, "lengths before truncation"


def test_segments_alternate_between_context_and_targets(tmp_path: Path) -> None:
    data = make(tmp_path)
    segments = segments_of(data.corpus, 0, data.tokenizer)
    assert [(segment.text, segment.target) for segment in segments] == [
        ("<|im_start|>user\n[bold]hi[/bold]<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello<|im_end|>", True),
        ("\n", False),
    ]


def test_data_cannot_steer_the_terminal(tmp_path: Path) -> None:
    data = load(write_jsonl(tmp_path / "a.jsonl", [{"text": "a\x1b[2J\tb\nc\x07"}]), shared_tokenizer())
    assert [one.text for one in segments_of(data.corpus, 0, data.tokenizer)] == ["a", "\\x1b[2J\tb\nc\\x07<|im_end|>"]


def test_the_print_names_rows_and_colours_targets(tmp_path: Path) -> None:
    data = make(tmp_path)
    text = printed(data)
    for expected in (
        "4 read, 2 samples kept",
        "truncated         1 to 100 tokens (rows 2)",
        f"left out: 1 x no messages ({tmp_path / 'chats.jsonl'}:2)",
        f"left out: 1 x no target within max_length 100 ({tmp_path / 'chats.jsonl'}:4)",
        "1 an epoch, 3 in all",
        "--- row 0:",
        "<|im_start|>user\n[bold]hi[/bold]<|im_end|>",
        "--- row 2: 100 tokens",
    ):
        assert expected in text
    coloured = printed(data, samples=1, console={"force_terminal": True, "color_system": "standard"})
    assert TARGET_STYLE == "bold green"
    assert "\x1b[1;32mhello<|im_end|>\x1b[0m" in coloured
    assert "--- row 2" not in coloured


def test_every_row_that_is_left_out_or_cut_is_named_and_so_is_its_set(tmp_path: Path) -> None:
    whole, cut, empty = ({"messages": messages} for messages in (chat("a", "b"), chat("a", "d" * 90), []))
    path = write_jsonl(tmp_path / "a.jsonl", [whole, *[cut] * 9, *[empty] * 6, whole, empty])
    held_out = write_jsonl(tmp_path / "b.jsonl", [whole, *[empty] * 2, cut])
    training, evaluation = (load(one, shared_tokenizer(), data={"max_length": 100}) for one in (path, held_out))
    text = printed(training, evaluation=evaluation.corpus)
    places = ", ".join(f"{path}:{line}" for line in range(11, 16))
    for expected in (
        "9 to 100 tokens (rows 1-9)",
        f"left out: 7 x no messages ({places} and 2 more); rows 10-15, 17",
        f"2 samples, {evaluation.corpus.lengths().sum()} tokens; 2 of 4 rows left out",
        "; truncated: 1 to 100 tokens (rows 3)",
        f"left out of the held-out data: 2 x no messages ({held_out}:2, {held_out}:3)",
    ):
        assert expected in text


def test_packing_says_what_it_saves_and_running_text_is_shown_in_windows(tmp_path: Path) -> None:
    packed = printed(make(tmp_path, data={"max_length": 100, "packing": True}, per_device_train_batch_size=2))
    assert "without packing)" in packed
    (tmp_path / "a.txt").write_text("x" * 9000)
    text = load(tmp_path / "a.txt", shared_tokenizer(), data={"max_length": 5000})
    shown = printed(text, evaluation=text.corpus)
    assert "1 read, 2 windows kept" in shown
    assert "held out          2 samples, 9,001 tokens" in shown
    assert "\n[...]\n" in shown


def test_without_a_tokenizer_numbers_are_shown(tmp_path: Path) -> None:
    data = load(write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}]))
    assert [(one.text, one.target) for one in segments_of(data.corpus, 0, None)] == [("5 6 ", False), ("7 ", True)]
    assert "5 6 7" in printed(data)
