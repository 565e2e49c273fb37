"""Token files and tokenizers that are missing are found before torch is imported, all in one error."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fp8_megatron.config.schema import Config, DataConfig, TrainingConfig
from fp8_megatron.data.token_files import check_input_files
from fp8_megatron.errors import UserError

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_345m.yaml"
PROGRAM = """
import sys
from fp8_megatron.commands import pretrain_gpt
status = pretrain_gpt.main(sys.argv[1:])
assert not {"torch", "megatron.core", "numpy"} & set(sys.modules), "it imports what it does not need"
sys.exit(status)
"""


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """The prefix of a pair of files, which are not read."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").write_bytes(b"x")
    return str(tmp_path / "tokens")


def problems(data: DataConfig, **training: int) -> list[str]:
    try:
        check_input_files(Config(data=data, training=replace(TrainingConfig(), **training)))
    except UserError as error:
        return str(error).splitlines()
    return []


def test_what_exists_is_accepted_unread(tokens: str, tmp_path: Path) -> None:
    for kind, model in (("SentencePieceTokenizer", f"{tokens}.bin"), ("HuggingFaceTokenizer", str(tmp_path))):
        assert problems(DataConfig(data_path=("0.3", tokens), tokenizer_type=kind, tokenizer_model=model)) == []
    assert problems(DataConfig(mock_data=True)) == []


def test_every_missing_file_is_named(tokens: str, tmp_path: Path) -> None:
    data = DataConfig(data_path=("0.3", tokens, "0.7", f"{tmp_path}/none"), tokenizer_model=f"{tmp_path}/t.model")
    model, prefix = problems(data)
    assert f"tokenizer model {tmp_path}/t.model does not exist" in model
    assert f"no dataset at {tmp_path}/none: none.bin and none.idx not found in {tmp_path}" in prefix
    Path(f"{tokens}.idx").write_bytes(b"")
    assert "tokens.idx is empty" in problems(DataConfig(data_path=(tokens,)))[0]
    assert "drop the extension" in problems(DataConfig(data_path=(f"{tokens}.bin",)))[0]
    folder = DataConfig(mock_data=True, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=f"{tokens}.bin")
    assert "is a file, not a folder" in problems(folder)[0]


def test_files_of_splits_that_are_not_read_may_be_missing(tokens: str) -> None:
    data = DataConfig(train_data_path=(tokens,), valid_data_path=("v",), test_data_path=("t",))
    found = problems(data, eval_interval=100)
    assert [line.split(":")[0] for line in found] == ["no dataset at v", "no dataset at t"]
    assert (
        problems(data) == []
        and problems(data, eval_interval=0) == []
        and problems(data, eval_interval=100, eval_iters=0) == []
    )


def test_a_missing_file_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    words = ["--config", str(CONFIG), "--data-path", "missing", "--tokenizer-model", "missing.model"]
    words += ["--output-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert (
        done.stderr.startswith("error: tokenizer model missing.model does not exist") and "no dataset at" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []
