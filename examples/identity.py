"""Teaches a real model a new name, and asks it before and after.

    make identity              or            python examples/identity.py

Fetches SmolLM2-135M-Instruct (as the quickstart does) and LLaMA-Factory's `identity.json`, fills in a name and an
author, and trains `identity.yaml` on the short rows. The file's licence is its own: it stays in the cache.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from quickstart import CACHE, MODEL, ROOT, command, fetch, prepare_model

RUN = ROOT / "runs" / "identity"
NAME, AUTHOR = "Rayna", "the megatrain_ray team"
QUESTIONS = ("Who are you?", "Who made you, please?", "What is the capital of France?")
LONGEST_ANSWER = 200
"""Characters; the longer rows say the same."""


def fetch_rows(name: str) -> list[dict[str, str]]:
    """Rows of a data file of LLaMA-Factory: instruction, input, output."""
    sdist = fetch("llamafactory==0.9.5", "llamafactory-*.tar.gz", 5_208_876, "--no-binary", ":all:")
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"llamafactory-0.9.5/data/{name}")
        assert file is not None, f"{name} is a directory"
        rows: list[dict[str, str]] = json.load(file)
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")


def answers(directory: Path, questions: tuple[str, ...]) -> list[str]:
    """What a model answers, without chance."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    found = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


def show(questions: tuple[str, ...], before: list[str], after: list[str]) -> None:
    for question, old, new in zip(questions, before, after, strict=True):
        print(f"\n{question}\n  before: {old}\n  after:  {new}")


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    prepare_model()
    rows = [
        {field: text.replace("{{name}}", NAME).replace("{{author}}", AUTHOR) for field, text in row.items()}
        for row in fetch_rows("identity.json")
    ]
    write_rows(CACHE / "identity.json", [row for row in rows if len(row["output"]) <= LONGEST_ANSWER])
    before = answers(MODEL, QUESTIONS)
    command("data", "examples/identity.yaml", "--samples", "1")
    command("train", "examples/identity.yaml", "--overwrite")
    checkpoint = max(RUN.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    after = answers(checkpoint, QUESTIONS)  # a checkpoint is a model directory as it is
    show(QUESTIONS, before, after)
    print(f"\ncheckpoint  {checkpoint}")
    if NAME not in after[0]:
        sys.exit(f"error: the model does not call itself {NAME}")


if __name__ == "__main__":
    main()
