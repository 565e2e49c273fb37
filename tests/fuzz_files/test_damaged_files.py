"""Every kind of file that the programs read, damaged at random by seed: one line or a sensible result.

No traceback, no hang, no memory beyond a bound, and no success with a file whose checksum is wrong.
"""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fp8_megatron.commands import (
    convert_checkpoint,
    generate_text,
    inspect_checkpoint,
    plot_losses,
    preprocess_data,
    train_tokenizer,
)
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data.datasets import build_datasets
from fp8_megatron.data.tokenizer_settings import build_tokenizer
from tests.harness.file_damage import damaged
from tests.harness.forked import Ending, run_forked

SECONDS = 120.0
ADDRESS_BYTES = 3 << 30
MORE_BYTES = 1 << 30
NUM_DAMAGES = 31

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Reader:
    """A program that reads files.

    Attributes:
        run: called with the folder of all inputs; returns the exit status.
        files: patterns of what is damaged, below that folder.
        folders: what has to be copied for a run.
        verifies: whether the program compares all files with their checksums.
    """

    run: Callable[[Path], int | None]
    files: tuple[str, ...]
    folders: tuple[str, ...]
    verifies: bool = False


def _preprocess(name: str, root: Path) -> int:
    words = ["--input", str(root / name), "--output-prefix", str(root / "out" / "x"), "--workers", "1"]
    return preprocess_data.main([*words, "--tokenizer-model", str(root / "tokenizer.model"), "--append-eod"])


def _preprocess_with_hugging_face(root: Path) -> int:
    words = ["--input", str(root / "text.jsonl"), "--output-prefix", str(root / "out" / "x"), "--workers", "1"]
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(root / "hf")]
    return preprocess_data.main([*words, *flags])


def _tokenize(root: Path) -> int:
    words = ["--input", str(root / "text.jsonl"), "--output", str(root / "out.model"), "--vocab-size", "400"]
    return train_tokenizer.main(words)


def _read_samples(root: Path) -> int:
    def read() -> int:
        tokenizer = build_tokenizer("SentencePieceTokenizer", str(root / "tokenizer.model"))
        data = DataConfig(data_path=(str(root / "tokens_text_document"),), split="1")
        sizes = {"num_train_samples": 20, "num_valid_samples": 0, "num_test_samples": 0}
        train = build_datasets(data, seq_length=16, seed=1, tokenizer=tokenizer, **sizes).train
        assert train is not None
        return 0 if all(int(train[i]["tokens"].min()) >= 0 for i in range(20)) else 1

    return exit_status(read, ValueError)  # as the trainer does: a ValueError of the data is the user's


def _convert(source: str, to: str, root: Path) -> int:
    flags = ["--config", str(root / "run.yaml")] if source == "mcore" else []
    words = ["--input", str(root / source), "--output", str(root / "out"), "--to", to, "--no-verify"]
    return convert_checkpoint.main([*words, *flags])


def _inspect(source: str, flags: tuple[str, ...], root: Path) -> int:
    return inspect_checkpoint.main([str(root / source), *flags])


def _generate(root: Path) -> int:
    return generate_text.main(["--load", str(root / "ours"), "--prompt", "def ", "--num-tokens", "1"])


def _plot(root: Path) -> int:
    return plot_losses.main([str(root / "metrics.jsonl"), "--output", str(root / "out.png")])


OURS = ("ours/iter_*/*", "ours/iter_*/.metadata", "ours/latest_checkpointed_iteration.txt")
MCORE = ("mcore/iter_*/*", "mcore/iter_*/.metadata", "mcore/latest_checkpointed_iteration.txt")
READERS = {
    "text": Reader(partial(_preprocess, "text.jsonl"), ("text.jsonl", "tokenizer.model"), ("text.jsonl",)),
    **{
        f"text.{kind}": Reader(
            partial(_preprocess, f"text.jsonl.{kind}"), (f"text.jsonl.{kind}",), (f"text.jsonl.{kind}",)
        )
        for kind in ("gz", "xz", "bz2")
    },
    "tokenize": Reader(_tokenize, ("text.jsonl",), ("text.jsonl",)),
    "hf tokenizer": Reader(
        _preprocess_with_hugging_face, ("hf/tokenizer.json", "hf/tokenizer_config.json"), ("text.jsonl", "hf")
    ),
    "tokens": Reader(
        _read_samples,
        ("tokens_text_document.idx", "tokens_text_document.bin"),
        ("tokens_text_document.idx", "tokens_text_document.bin"),
    ),
    "plot": Reader(_plot, ("metrics.jsonl",), ("metrics.jsonl",)),
    "inspect ours": Reader(partial(_inspect, "ours", ("--values",)), OURS, ("ours",)),
    "verify ours": Reader(partial(_inspect, "ours", ("--verify",)), OURS, ("ours",), verifies=True),
    "convert ours": Reader(partial(_convert, "ours", "hf"), OURS, ("ours",), verifies=True),
    "rewrite ours": Reader(partial(_convert, "ours", "ours"), OURS, ("ours",), verifies=True),
    "generate": Reader(_generate, OURS, ("ours",), verifies=True),
    "inspect mcore": Reader(partial(_inspect, "mcore", ("--values",)), MCORE, ("mcore",)),
    "convert mcore": Reader(partial(_convert, "mcore", "ours"), (*MCORE, "run.yaml"), ("mcore", "run.yaml")),
    "inspect hf": Reader(partial(_inspect, "hf", ("--values",)), ("hf/*",), ("hf",)),
    "convert hf": Reader(partial(_convert, "hf", "ours"), ("hf/*",), ("hf",)),
}


def _judged(ending: Ending, root: Path, *, must_fail: bool) -> str | None:
    """What is wrong with an ending, or None."""
    lines = [line for line in ending.errors.splitlines() if line.startswith(("error: ", "internal error"))]
    if ending.status is None:
        return "it hangs"
    if ending.status not in (0, 1, 2):
        return f"status {ending.status}"
    if "Traceback" in ending.errors or any(line.startswith("internal") for line in lines):
        return "a traceback"
    if ending.more_bytes > MORE_BYTES:
        return f"{ending.more_bytes / 1e9:.1f} GB of memory"
    if ending.status == 2 and (len(lines) != 1 or not lines[0].removeprefix("error: ").strip()):
        return f"{len(lines)} error lines"
    if ending.status == 2 and str(root) not in lines[0]:
        return "the error names no file"
    if ending.status == 0 and must_fail:
        return "success with a damaged file"
    return None


def _fuzz(name: str, inputs: Path, folder: Path, seed: int) -> str | None:
    """Damage one file and run its reader; what is wrong with the ending, or None."""
    reader, draw = READERS[name], random.Random(zlib.crc32(name.encode()) + seed)
    root = folder / "in"
    shutil.rmtree(folder, ignore_errors=True)
    root.mkdir(parents=True)
    for part in dict.fromkeys(("tokenizer.model", *reader.folders)):
        source = inputs / part
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, root / part)
    found = sorted({file for pattern in reader.files for file in root.glob(pattern) if file.is_file()})
    target = draw.choice(found)
    others = [(inputs / other).read_bytes() for other in ("tokenizer.model", "run.yaml", "text.jsonl", "metrics.jsonl")]
    how, content = damaged(target.read_bytes(), draw, others)
    target.write_bytes(content)
    must_fail = reader.verifies and "iter_" in str(target) and target.name != "manifest.json"
    before = {path for path in root.rglob("*") if path.is_file()}
    ending = run_forked(partial(reader.run, root), folder=folder, seconds=SECONDS, address_bytes=ADDRESS_BYTES)
    wrong = _judged(ending, folder, must_fail=must_fail)
    left = {path for path in root.rglob("*") if path.is_file()} - before
    if wrong is None and ending.status == 2 and (left := {path for path in left if "cache" not in path.parts}):
        wrong = f"it left {sorted(left)}"
    if wrong is None:
        return None
    said = f"{ending.errors[-1500:]}{ending.output[-300:]}"
    return f"{name}, seed {seed}, {target.relative_to(root)}: {how}: {wrong}\n{said}"


@pytest.mark.parametrize("name", READERS)
def test_the_undamaged_files_are_read(name: str, inputs: Path, tmp_path: Path) -> None:
    ending = run_forked(
        partial(READERS[name].run, Path(shutil.copytree(inputs, tmp_path / "in"))),
        folder=tmp_path,
        seconds=SECONDS,
        address_bytes=ADDRESS_BYTES,
    )
    assert ending.status == 0 and ending.more_bytes < MORE_BYTES, ending


@pytest.mark.parametrize("name", READERS)
def test_many_damages(name: str, inputs: Path, tmp_path: Path) -> None:
    problems = [_fuzz(name, inputs, tmp_path / "fuzz", seed) for seed in range(NUM_DAMAGES)]
    assert not any(problems), "\n".join(filter(None, problems))
