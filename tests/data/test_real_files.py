"""Files that people really train on, of every format; fetched once into .cache from where the environment came from."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megatrain_ray.data.preview import describe
from tests.data.makers import load, shared_tokenizer

_PACKAGE = "llamafactory==0.9.5"


@pytest.fixture(scope="module")
def real_files() -> Path:
    cache = Path(__file__).parents[2] / ".cache" / "real-files"
    data = cache / _PACKAGE.replace("==", "-") / "data"
    if not data.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llamafactory"]
        done = subprocess.run([*command, "--dest", str(cache), _PACKAGE], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with tarfile.open(next(cache.glob("llamafactory-*.tar.gz"))) as archive:
            # Python 3.11 has the filter from 3.11.4 on.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(cache)
    return data


@pytest.mark.parametrize(
    ("name", "form", "rows"),
    [
        ("alpaca_en_demo.json", "chat", 999),
        ("identity.json", "chat", 91),
        ("glaive_toolcall_en_demo.json", "chat", 300),
        ("v1_sft_demo.jsonl", "chat", 500),
        ("reason_tool_use_demo_50.jsonl", "chat", 50),
        ("c4_demo.jsonl", "text", 300),
        ("wiki_demo.txt", "text", 1),
    ],
)
def test_every_row_is_kept(real_files: Path, tmp_path: Path, name: str, form: str, rows: int) -> None:
    (tmp_path / name).symlink_to(real_files / name)
    facts = describe(load(tmp_path / name, shared_tokenizer(), data={"max_length": 100_000}))
    assert (facts.form, facts.num_rows, facts.dropped, facts.truncated) == (form, rows, (), ())
    if form == "chat":
        assert facts.num_samples == rows
        assert 0 < facts.targets_per_epoch < facts.tokens_per_epoch
    else:
        assert facts.targets_per_epoch == facts.tokens_per_epoch - facts.num_samples


def test_chat_files_of_three_formats_are_one_set(real_files: Path, tmp_path: Path) -> None:
    paths = [real_files / name for name in ("alpaca_en_demo.json", "glaive_toolcall_en_demo.json", "v1_sft_demo.jsonl")]
    links = [tmp_path / path.name for path in paths]
    for link, path in zip(links, paths, strict=True):
        link.symlink_to(path)
    data = load(links, shared_tokenizer(), data={"max_length": 8192, "packing": True}, group_by_length=True)
    assert data.corpus.samples.tolist() == list(range(999 + 300 + 500))
    assert data.padding_share() < 0.01 < data.plain_padding_share()
