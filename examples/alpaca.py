"""Instruction tuning of a real model, from Python, with held-out rows.

    make alpaca                or            python examples/alpaca.py

Fetches SmolLM2-135M-Instruct (as the quickstart does) and LLaMA-Factory's `alpaca_en_demo.json`, trains `alpaca.yaml`,
and shows the loss on held-out rows and answers before and after. The file's licence is its own: it stays in the cache.
"""

from __future__ import annotations

import os
import sys

from identity import answers, fetch_rows, show, write_rows
from quickstart import CACHE, MODEL, ROOT, prepare_model

from megatrain_ray import Trainer, load_config

HELD_OUT = 12
"""Rows, from the end of the file."""
LONGEST_ROW = 800
"""Characters, so that rows fit into `data.max_length`."""


def main() -> None:
    os.chdir(ROOT)  # paths in alpaca.yaml count from here
    CACHE.mkdir(parents=True, exist_ok=True)
    prepare_model()
    rows = [row for row in fetch_rows("alpaca_en_demo.json") if sum(map(len, row.values())) <= LONGEST_ROW]
    write_rows(CACHE / "alpaca-train.json", rows[:-HELD_OUT])
    write_rows(CACHE / "alpaca-heldout.json", rows[-HELD_OUT:])
    questions = tuple(row["instruction"] for row in rows[-HELD_OUT:] if not row["input"])[:2]
    with Trainer(load_config("examples/alpaca.yaml"), overwrite=True, tell=print) as trainer:
        before = trainer.evaluate()
        print(
            f"before: held-out loss {before['eval_loss']:.4f}, perplexity {before['eval_perplexity']:.2f}", flush=True
        )
        for record in trainer.steps():
            held_out = f"  held-out loss {record['eval_loss']:.4f}" if "eval_loss" in record else ""
            print(f"step {record['step']}: loss {record['loss']:.4f}{held_out}", flush=True)
        exported = trainer.save_pretrained(trainer.run.path / "export")
    show(questions, answers(MODEL, questions), answers(exported, questions))
    print(f"\nheld-out loss: {before['eval_loss']:.4f} before, {record['eval_loss']:.4f} after\nexport  {exported}")
    if not record["eval_loss"] < before["eval_loss"]:
        sys.exit("error: the loss on held-out rows did not fall")


if __name__ == "__main__":
    main()
