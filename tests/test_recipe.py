"""The recipe around the step, through the actors, against plain PyTorch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig, get_scheduler

from megatrain_ray.checkpoint.resume import export
from megatrain_ray.config import SCHEDULERS
from megatrain_ray.errors import ConfigError, DataError, ModelError
from megatrain_ray.learning_rate import learning_rate_schedule
from megatrain_ray.trainer import Trainer
from tests.conftest import write_tokens
from tests.data.makers import CHATML, byte_tokenizer, chat, write_jsonl
from tests.models import TINY, plain_model
from tests.reference import plain_loss, plain_training, saved_weights, token_rows
from tests.runs import digest, trace

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]
Ran = tuple[list[dict[str, Any]], dict[str, Tensor]]

VOCABULARY = 97


def ran(config: Any) -> Ran:
    """Trains; records and the weights of the last checkpoint."""
    with Trainer(config) as trainer:
        records = list(trainer.steps())
        return records, saved_weights(trainer.run.path / f"checkpoint-{trainer.total_steps}")


def assert_same(got: Ran, expected: tuple[Sequence[dict[str, Any]], dict[str, Tensor]]) -> None:
    """Losses, norms and final weights are equal within 1e-5."""
    for record, reference in zip(got[0], expected[0], strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert record[key] == pytest.approx(reference[key], rel=1e-5), (record["step"], key)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(got[1][name], tensor, rtol=1e-5, atol=1e-5 * float(tensor.abs().max()), msg=name)


def test_evaluation_is_plain_pytorchs_and_changes_nothing(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    held_out = write_tokens(tmp_path / "eval.jsonl", [9, 2, 23, 5, 14], VOCABULARY, seed=5)
    options = {"training__max_steps": 4, "training__save_steps": 2, "training__save_total_limit": 3}
    with Trainer(make_config(model_dir("llama"), training__output_dir=str(tmp_path / "plain"), **options)) as trainer:
        expected = trace(trainer.steps())
    options |= {"training__eval_steps": 2, "data__eval_path": str(held_out)}
    with Trainer(make_config(model_dir("llama"), **options)) as trainer:
        records = list(trainer.steps())
        directory = trainer.run.path
    assert trace(records) == expected
    assert digest(directory / "checkpoint-4") == digest(tmp_path / "plain" / "checkpoint-4")
    assert ["eval_loss" in record for record in records] == [False, True, False, True]
    for record in (records[1], records[3]):
        loss = plain_loss(directory / f"checkpoint-{record['step']}", token_rows(held_out))
        assert record["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert record["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_evaluation_needs_held_out_data(model_dir: ModelDir, make_config: MakeConfig) -> None:
    with (
        Trainer(make_config(model_dir("llama"))) as trainer,
        pytest.raises(ConfigError, match=r"data\.eval_path is not set"),
    ):
        trainer.evaluate()


def test_what_held_out_data_leave_out_is_told(model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path) -> None:
    held_out = write_tokens(tmp_path / "eval.jsonl", [9, *[1] * 6], VOCABULARY)
    told: list[str] = []
    Trainer(make_config(model_dir("llama"), data__eval_path=str(held_out)), tell=told.append).shutdown()
    places = ", ".join(f"{held_out}:{line}" for line in range(2, 7))
    assert (
        f"left out of the held-out data: 6 x no target ({places} and 1 more); `megatrain-ray data` lists them" in told
    )


def test_strong_weight_decay_and_label_smoothing_are_torchs(model_dir: ModelDir, make_config: MakeConfig) -> None:
    """Decay takes 1 % a step, far more than the gradients move; GPT-2 has norms, biases and learned positions."""
    config = make_config(
        model_dir("gpt2"),
        training__learning_rate=1e-5,
        training__weight_decay=1e3,
        training__label_smoothing_factor=0.1,
        training__lr_scheduler_type="constant",
        training__warmup_steps=0,
        training__max_steps=10,
    )
    with Trainer(config) as trainer:
        records = list(trainer.steps())
        expected, weights = plain_training(config, trainer._data, 10)
        saved = saved_weights(trainer.run.path / "checkpoint-10")
    # Softmax does not depend on the keys' part of this bias: its gradient is rounding noise, which Adam scales up.
    noisy = [name for name in weights if name.endswith("c_attn.bias")]
    assert_same((records, saved), (expected, {name: weights[name] for name in weights.keys() - noisy}))
    start = saved_weights(model_dir("gpt2"))
    for name in weights:
        shrunk = float((saved[name] * start[name]).sum() / start[name].square().sum())
        decays = name.endswith("weight") and "ln_" not in name
        assert shrunk == pytest.approx(0.99**10 if decays else 1, abs=0.01), name


def test_uneven_micro_batches_count_by_their_targets(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Micro-batches of 3 and 61 targets give the loss, norm and weights of one batch of both.

    Batches of other shapes round otherwise: with the usual epsilon, Adam would scale the rounding of a gradient that is
    almost zero up to the learning rate.
    """
    data = write_tokens(tmp_path / "uneven.jsonl", [4, 62] * 5, VOCABULARY, partial_labels=False)
    runs = [
        ran(
            make_config(
                model_dir("llama"),
                data__path=str(data),
                training__output_dir=str(tmp_path / name),
                training__shuffle=False,
                training__per_device_train_batch_size=rows,
                training__gradient_accumulation_steps=accumulation,
                training__max_steps=5,
                training__adam_epsilon=1e-5,
            )
        )
        for name, rows, accumulation in (("micro", 1, 2), ("one", 2, 1))
    ]
    micro, one = runs
    assert [record["target_tokens"] for record in micro[0]] == [64] * 5
    assert [record["samples"] for record in micro[0]] == [record["samples"] for record in one[0]]
    assert_same(micro, one)


PACKED = {"data__packing": True, "training__per_device_train_batch_size": 2}
SIXTEEN = {"training__per_device_train_batch_size": 1, "training__gradient_accumulation_steps": 16}
AT_ONCE = {"training__per_device_train_batch_size": 16, "training__gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("family", "ways"), [("llama", [PACKED, SIXTEEN]), ("gpt_oss", [PACKED])], ids=["llama", "gpt_oss"]
)
def test_how_an_epoch_is_cut_changes_nothing(
    family: str, ways: list[dict[str, Any]], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Sixteen micro-batches, or packed rows, train as one batch of sixteen: an epoch is one step."""
    lengths = [4, 62, 3, 17, 2, 30, 9, 12, 5, 21, 40, 8, 33, 2, 26, 64]
    data = write_tokens(tmp_path / "sixteen.jsonl", lengths, VOCABULARY)
    runs = []
    for number, way in enumerate([AT_ONCE, *ways]):
        options: dict[str, Any] = {
            "data__path": str(data),
            "training__output_dir": str(tmp_path / str(number)),
            "training__max_steps": None,
            "training__num_train_epochs": 5,
            "training__gradient_accumulation_steps": 8,
            **way,
        }
        runs.append(ran(make_config(model_dir(family), **options)))
    whole, *others = runs
    for cut in others:
        for record, reference in zip(cut[0], whole[0], strict=True):
            assert sorted(record["samples"]) == sorted(reference["samples"]) == list(range(16))
            for key in ("tokens", "target_tokens"):
                assert record[key] == reference[key]
        assert_same(cut, whole)
    assert len({record["grad_norm"] for record in whole[0]}) == 5


def test_windows_of_an_epoch_and_samples_that_truncation_empties(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Ten samples, one a micro-batch, four a step: three steps, the last over two. Two more lose all targets."""
    lengths = [5, 17, 9, 30, 2, 12, 40, 21, 8, 26, 3, 14]
    data = write_tokens(tmp_path / "rows.jsonl", lengths, VOCABULARY, partial_labels=False)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in (rows[3], rows[6]):
        row["labels"] = [-100] * 24 + row["input_ids"][24:]
    write_jsonl(data, rows)
    kept = [number for number in range(12) if number not in (3, 6)]
    told: list[str] = []
    config = make_config(
        model_dir("llama"),
        data__path=str(data),
        data__max_length=24,
        training__shuffle=False,
        training__max_steps=None,
        training__num_train_epochs=1,
        training__per_device_train_batch_size=1,
        training__gradient_accumulation_steps=4,
        training__warmup_steps=1,
    )
    with Trainer(config, tell=told.append) as trainer:
        records = list(trainer.steps())
        expected, weights = plain_training(config, trainer._data, 3)
        saved = saved_weights(trainer.run.path / "checkpoint-3")
    windows = [kept[:4], kept[4:8], kept[8:]]
    assert [record["samples"] for record in records] == windows
    assert [record["epoch"] for record in records] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [record["learning_rate"] for record in records] == pytest.approx([0, 1e-3, 5e-4])
    cut = token_rows(data, 24)
    assert [record["target_tokens"] for record in records] == [
        sum(len(cut[number][0]) - 1 for number in window) for window in windows
    ]
    loss = plain_loss(model_dir("llama"), [cut[number] for number in windows[0]])
    assert records[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same((records, saved), (expected, weights))
    assert f"left out: 2 x no target within max_length 24 ({data}:4, {data}:7)" in told


def test_a_batch_of_very_different_lengths_is_the_mean_of_its_rows(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Lengths 2, 7 and 64 in a batch with room for eight: one step, weighted by tokens."""
    data = write_tokens(tmp_path / "three.jsonl", [2, 7, 64], VOCABULARY, partial_labels=False)
    config = make_config(
        model_dir("llama"),
        data__path=str(data),
        training__max_steps=None,
        training__num_train_epochs=1,
        training__per_device_train_batch_size=8,
        training__warmup_steps=0,
    )
    (record,), weights = ran(config)
    rows = token_rows(data)
    alone = [plain_loss(model_dir("llama"), [row]) for row in rows]
    assert record["loss"] == pytest.approx((alone[0] + 6 * alone[1] + 63 * alone[2]) / 70, rel=1e-5)
    assert (sorted(record["samples"]), record["tokens"], record["target_tokens"]) == ([0, 1, 2], 73, 70)
    model: Any = AutoModelForCausalLM.from_pretrained(str(model_dir("llama")), dtype=torch.float32)
    for ids, _ in rows:
        share = (len(ids) - 1) / 70
        (share * model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_length_groups_train_on_the_same_samples_with_less_padding(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    padding, samples = {}, {}
    for grouped in (False, True):
        config = make_config(
            model_dir("llama"),
            training__group_by_length=grouped,
            training__output_dir=str(tmp_path / f"run-{grouped}"),
            training__max_steps=None,
            training__num_train_epochs=1,
            training__per_device_train_batch_size=4,
            training__gradient_accumulation_steps=1,
        )
        with Trainer(config) as trainer:
            batches = [trainer.step_batch(step) for step in range(1, trainer.total_steps + 1)]
            if grouped:
                assert [record["samples"] for record in trainer.steps()] == [list(b.samples) for b in batches]
        cells = sum(micro.input_ids.size for batch in batches for micro in batch.micro_batches)
        padding[grouped] = cells - sum(batch.tokens for batch in batches)
        samples[grouped] = sorted(sample for batch in batches for sample in batch.samples)
    assert samples[True] == samples[False] == list(range(14))
    assert padding[True] < padding[False]


SCHEDULER_KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 3},
    "cosine_with_min_lr": {"min_lr": 2e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.05},
    "inverse_sqrt": {"timescale": 5},
    "polynomial": {"power": 2, "lr_end": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 4, "decay_type": "cosine"},
}


def test_every_scheduler_is_transformers(model_dir: ModelDir, make_config: MakeConfig) -> None:
    base = make_config(model_dir("llama"), training__max_steps=12, training__warmup_steps=0.25)
    for kind in SCHEDULERS:
        kwargs = SCHEDULER_KWARGS.get(kind, {})
        chosen = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs}
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=base.training.learning_rate)
        scheduler: Any = get_scheduler(kind, optimizer, 3, 12, scheduler_specific_kwargs=kwargs)
        expected = []
        for _ in range(12):
            expected.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        learning_rate = learning_rate_schedule(base.training.model_copy(update=chosen), 12)
        assert [learning_rate(step) for step in range(1, 13)] == pytest.approx(expected, rel=1e-12), kind
        assert len(set(expected)) > (0 if kind == "constant" else 3)


@pytest.mark.parametrize(
    ("kind", "kwargs", "rate"),
    [("polynomial", {}, 1e-8), ("cosine_with_min_lr", {"min_lr": 1e-5}, 0), ("inverse_sqrt", {"timescale": 0}, 1e-3)],
)
def test_a_scheduler_that_cannot_be_is_refused(
    kind: str, kwargs: dict[str, Any], rate: float, model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"training\.lr_scheduler_type: {kind} with learning_rate {rate:g}"):
        Trainer(
            make_config(
                model_dir("llama"),
                training__lr_scheduler_type=kind,
                training__lr_scheduler_kwargs=kwargs,
                training__learning_rate=rate,
                training__warmup_steps=0,
            )
        )
    assert not (tmp_path / "run").exists()


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A model with more rows in its embedding than its tokenizer has tokens, and no chat template."""
    directory = tmp_path / "model"
    plain: Any = plain_model(LlamaConfig(**{**TINY, "vocab_size": 300}), seed=3, spread=0.02)
    plain.save_pretrained(directory)
    byte_tokenizer(None).save_pretrained(directory)
    return directory


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    random.seed(0)
    words = ["yes", "no", "maybe so"]
    return write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat(random.choice(words), word)} for word in words])


def test_the_template_of_the_configuration_is_exported_and_spare_rows_are_kept(
    chat_model: Path, chats: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        chat_model, data__path=str(chats), data__max_length=128, data__chat_template=CHATML, training__max_steps=2
    )
    records, weights = ran(config)
    assert records[0]["target_tokens"] == sum(len(word) + 1 for word in ("yes", "no", "maybe so"))
    exported = Path(export(str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "out"), None))
    for directory in (exported, tmp_path / "run" / "checkpoint-2"):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        assert len(tokenizer) < 300
        assert tokenizer.apply_chat_template(chat("a"), tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights[name].shape[0] == saved_weights(exported)[name].shape[0] == 300


def test_tokens_need_no_tokenizer_whatever_the_template(model_dir: ModelDir, make_config: MakeConfig) -> None:
    with Trainer(make_config(model_dir("llama"), data__chat_template=CHATML)) as trainer:
        assert trainer.total_steps == 8


def test_packing_is_refused_where_attention_cannot_do_it(make_config: MakeConfig, tmp_path: Path) -> None:
    """BLOOM's attention knows no positions: nothing tells packed samples apart."""
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    plain: Any = plain_model(config, attn="eager")
    plain.save_pretrained(tmp_path / "bloom")
    Trainer(make_config(tmp_path / "bloom")).shutdown()
    with pytest.raises(ModelError, match=r"Bloom.* lets packed samples see each other.*set data\.packing: false"):
        Trainer(make_config(tmp_path / "bloom", data__packing=True, training__output_dir=str(tmp_path / "packed")))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "the tokenizer has no chat template, and the data are chats; set data.chat_template"),
        (
            {"data__chat_template": CHATML, "data__max_length": 20},
            "none of the 3 rows has a target: 3 x no target within max_length 20",
        ),
        ({"data__chat_template": CHATML, "data__path": "empty.jsonl"}, "no rows; nothing to train on"),
        ({"data__chat_template": CHATML, "data__path": "large.jsonl"}, "token id 300 is outside of the model's emb"),
    ],
    ids=["no template", "all cut", "empty", "id too large"],
)
def test_data_that_cannot_train_are_refused_before_an_actor_starts(
    changes: dict[str, Any], cause: str, chat_model: Path, chats: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "empty.jsonl", [])
    write_jsonl(tmp_path / "large.jsonl", [{"input_ids": [5, 300]}])
    options = {"data__path": str(chats), "data__max_length": 128, **changes}
    options["data__path"] = str(tmp_path / options["data__path"])
    with pytest.raises(DataError) as caught:
        Trainer(make_config(chat_model, **options))
    assert cause in str(caught.value)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
