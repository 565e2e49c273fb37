"""Text from a checkpoint of the tiny run, on one CPU rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.io import config_text, parse_config
from fp8_megatron.config.schema import Config
from fp8_megatron.training import generate
from fp8_megatron.training.trainer import Trainer
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.harness.runs import tiny_flags


@pytest.mark.parametrize("max_position_embeddings", [None, 28])
def test_padding_past_the_position_table_changes_no_logits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    max_position_embeddings: int | None,
) -> None:
    """Contexts of 5 to 24 tokens are padded to 16 or 32, more than the table's rows; the model sees them unpadded."""
    flags = {
        "precision": "bf16",
        "seq_length": 24,
        "max_position_embeddings": max_position_embeddings,
        "init_method_std": 0.2,
        "train_iters": 2,
        "save": tmp_path / "saved",
    }
    Trainer(parse_config(tiny_flags(tmp_path, **flags))).fit()
    prompts = [[3 * token % 63 for token in range(length)] for length in (5, 20, 24, 30)]
    contexts = iter([prompt[-24:] for prompt in prompts])
    draw = generate._Sampler._draw

    def compare_and_draw(sampler: generate._Sampler, logits: Tensor) -> int:
        tokens = torch.tensor([next(contexts)])
        expected = sampler.model(tokens, torch.arange(tokens.numel())[None], None)[0, -1].float()
        # A GEMM of other rows may round elsewhere: two units of BF16 of the largest.
        torch.testing.assert_close(logits, expected, atol=float(2**-7 * expected.abs().max()), rtol=0)
        return draw(sampler, logits)

    monkeypatch.setattr(generate._Sampler, "_draw", compare_and_draw)
    texts = generate.generate_text(
        tmp_path / "saved" / "iter_0000002",
        [" ".join(map(str, prompt)) for prompt in prompts],
        num_tokens=1,
        temperature=0.0,
        top_k=1,
        seed=1,
    )
    assert [len(text.split()) for text in texts] == [6, 21, 25, 31]
    assert next(contexts, None) is None
    (warning,) = [record.getMessage() for record in caplog.records if "seq_length" in record.getMessage()]
    assert "30 tokens, and the model sees the last seq_length(24)" in warning


def end_texts_with_eos(folder: Path) -> str:
    """A tokenizer that puts <|endoftext|> behind each text; its folder."""
    from tokenizers import Tokenizer, processors

    path = Path(save_chat_tokenizer(folder)) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    end = "<|endoftext|>"
    ends = [(end, tokenizer.token_to_id(end))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=ends)
    tokenizer.save(str(path))
    return str(folder)


def test_a_prompt_goes_on_where_the_tokenizer_ends_texts(tmp_path: Path) -> None:
    """Behind the end token of a document the model would begin another one."""
    pytest.importorskip("transformers")
    own = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": end_texts_with_eos(tmp_path / "tokenizer")}
    flags = {**own, "vocab_size": 272, "train_iters": 1, "save": tmp_path / "saved", "precision": "bf16"}
    Trainer(parse_config(tiny_flags(tmp_path, **flags))).fit()
    prompts = ["a b", "a", "", "a<|endoftext|>"]
    texts = generate.generate_text(tmp_path / "saved", prompts, num_tokens=0, temperature=0.0, top_k=1, seed=1)
    assert texts == ["a b", "a", "<|endoftext|>", "a<|endoftext|>"]


@pytest.mark.parametrize(
    ("tensor_parallel", "changes", "message"),
    [
        (2, {}, r"tensor_model_parallel_size\(2\), this run 1 ranks; start it with torchrun --nproc-per-node 2"),
        (1, {"top_k": 0}, r"top_k\(0\) must be 1 or more"),
        (1, {"temperature": -1.0}, r"temperature\(-1.0\) 0 or more"),
        (1, {"prompts": ["1 2", "hello"]}, "prompt 'hello': NullTokenizer reads token ids"),
        (1, {"prompts": ["64"]}, "prompt '64': token id 64 is outside"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel: int, changes: dict, message: str
) -> None:
    """Before any process group or device is touched."""
    config: Config = parse_config(tiny_flags(tmp_path, tensor_model_parallel_size=tensor_parallel))
    (tmp_path / "config.yaml").write_text(config_text(config))
    monkeypatch.setattr(generate, "candidates", lambda root, iteration: [1])
    monkeypatch.setattr(generate, "iteration_folder", lambda root, iteration: root)
    monkeypatch.setattr(generate, "check_files", lambda folder, names: None)
    monkeypatch.setattr(generate, "initialized", None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    arguments = {"prompts": ["1 2"], "num_tokens": 1, "temperature": 0.0, "top_k": 1, "seed": 1} | changes
    with pytest.raises(ConfigError, match=message):
        generate.generate_text(tmp_path, **arguments)
