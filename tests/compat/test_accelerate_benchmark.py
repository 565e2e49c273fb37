"""Accelerate's own comparison of raw MS-AMP with its integration, unchanged, with a local model and data."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WORDS = [f"word{number}" for number in range(200)]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmarks/fp8/ms_amp beside what its scripts load from the hub. ACCELERATE_REPOSITORY names a clone."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    clone = os.environ.get("ACCELERATE_REPOSITORY", "https://github.com/huggingface/accelerate")
    folder, scripts = tmp_path_factory.mktemp("clone") / "accelerate", tmp_path_factory.mktemp("scripts")
    command = ["git", "clone", "--quiet", "--depth", "1", clone, str(folder)]
    try:
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    except (subprocess.SubprocessError, OSError):
        pytest.skip(f"cannot clone {clone}; ACCELERATE_REPOSITORY names another place")
    shutil.copytree(folder / "benchmarks" / "fp8" / "ms_amp", scripts, dirs_exist_ok=True)
    write_model(scripts / "bert-base-cased")
    write_data(scripts / "nyu-mll" / "glue")
    return scripts


def write_model(folder: Path) -> None:
    """A tiny BERT under the name that the scripts load, with a vocabulary of words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "odd", "even", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def write_data(folder: Path) -> None:
    """MRPC's columns; the label is which of two words the first sentence begins with."""
    draw = random.Random(0)
    (folder / "mrpc").mkdir(parents=True)
    for split, count in (("train", 2400), ("validation", 128)):
        with (folder / "mrpc" / f"{split}.jsonl").open("w") as file:
            for number in range(count):
                label = draw.randrange(2)
                first, second = (" ".join(draw.choices(WORDS, k=draw.randint(3, 10))) for _ in range(2))
                row = {"sentence1": f"{('odd', 'even')[label]} {first}", "sentence2": second}
                file.write(json.dumps(row | {"label": label, "idx": number}) + "\n")
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in ("train", "validation"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["non_distributed.py", "ddp.py"])
def test_raw_and_integrated_runs_agree(comparison: Path, script_environment: dict[str, str], script: str) -> None:
    """The script itself compares accuracy and F1, before and after training, at O1 and O2."""
    command = [sys.executable, "-m"]
    if script == "ddp.py":
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**script_environment, "HF_HUB_OFFLINE": "1", "HF_HOME": str(comparison / "hub")}
    done = subprocess.run(
        [*command, "run_comparison", script],
        cwd=comparison,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
