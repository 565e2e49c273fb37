"""A folder with a file of every kind that the programs read."""

from __future__ import annotations

import bz2
import gc
import gzip
import inspect
import json
import json.decoder
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8_megatron.commands import convert_checkpoint, preprocess_data
from fp8_megatron.commands.train_tokenizer import train
from fp8_megatron.config.io import config_text, parse_config
from fp8_megatron.reporting.metrics_file import json_line
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags

VOCAB_SIZE = 400


@pytest.fixture(scope="session")
def inputs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, tokenizers, token files, metrics, and one small model in every format of checkpoint."""
    root = tmp_path_factory.mktemp("inputs")
    _write_text(root)
    (root / "tokenizer.model").write_bytes(
        train([inspect.getsource(json.decoder)], vocab_size=VOCAB_SIZE, model_type="bpe", num_threads=1)
    )
    words = ["--input", str(root / "text.jsonl"), "--output-prefix", str(root / "tokens"), "--workers", "1"]
    assert preprocess_data.main([*words, "--tokenizer-model", str(root / "tokenizer.model"), "--append-eod"]) == 0
    steps = [{"kind": "train", "iteration": i, "loss": 4.0 / i, "consumed_tokens": 64 * i} for i in range(1, 21)]
    steps.append({"kind": "eval", "iteration": 20, "split": "valid", "loss": 1.0})
    (root / "metrics.jsonl").write_text("".join(map(json_line, steps)))
    tokenizer = {"vocab_size": VOCAB_SIZE, "tokenizer_model": root / "tokenizer.model"}
    flags = tiny_flags(root / "log", **LLAMA_STYLE_FLAGS, **tokenizer, train_iters=2, save=root / "ours")
    (root / "run.yaml").write_text(config_text(parse_config(flags)))
    ranks.run(_train_on_a_rank, flags, num_ranks=1)
    for to, flags in (("mcore", ()), ("hf", ("--dtype", "fp32", "--max-shard-gb", "0.0002"))):
        words = ["--input", str(root / "ours"), "--output", str(root / to), "--to", to, "--no-verify", *flags]
        assert convert_checkpoint.main(words) == 0
    (root / "hf" / "generation_config.json").write_text('{"eos_token_id": 1, "do_sample": true}\n')
    return root


def _train_on_a_rank(flags: list[str]) -> None:
    Trainer(parse_config(flags)).fit()


def _write_text(root: Path) -> None:
    lines = [
        json.dumps({"text": line, "id": i}) for i, line in enumerate(inspect.getsource(json.decoder).split("\n\n"))
    ]
    text = "\n".join(lines).encode() + b"\n"
    (root / "text.jsonl").write_bytes(text)
    for suffix, compress in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)):
        (root / f"text.jsonl.{suffix}").write_bytes(compress(text))


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported() -> Iterator[None]:
    """Forks of this process start with what programs import late. Threads of torch would not survive a fork. The
    collection before each fork leaves out what is there already: with these modules it takes half a second."""
    import matplotlib.pyplot  # noqa: F401
    import PIL.Image
    from transformers import PreTrainedModel, PreTrainedTokenizerFast  # noqa: F401

    import fp8_megatron.training.generate  # noqa: F401

    PIL.Image.init()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
