"""Commands of the documents: those that a CPU can run are run, those for GPUs have flags that are taken.

The comment above a block says how: ``run`` (everything in it, in order, page by page, in one scratch folder), ``gpu``
(its flags are parsed and checked for the number of ranks), ``ci`` (.ci/run runs it) or ``shown: why``. ``shrink``
appends flags that make a model tiny. ``needs=NAME`` runs a command of `_NEEDED` before. ``continues`` makes one
script of a Python block and those above it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config
from tests.docs.documents import PAGES, ROOT, Block, blocks, commands, name_of
from tests.harness.forked import run_forked, run_python

_LANGUAGES = ("bash", "python")
_BLOCKS = [block for page in PAGES for language in _LANGUAGES for block in blocks(page, language)]
_FOR_GPUS = [block for block in _BLOCKS if (block.tag or "").startswith("gpu")]
_PAGES_TO_RUN = sorted({block.page for block in _BLOCKS if block.tag and block.tag.startswith("run")})

#: What the tools are called as subcommands of fp8-megatron.
_SUBCOMMANDS = {"pretrain_gpt.py": "train", "train_tokenizer.py": "tokenize", "preprocess_data.py": "preprocess"}
#: Appended to commands of blocks that say ``shrink``: a tiny model, a small text and tokenizer.
_SHRINK = {
    "train": "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --vocab-size 512"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 1"
    " --log-interval 1 --num-workers 0 --no-tensorboard",
    "demo": "--train-iters 20",
    "tokenize": "--vocab-size 512",
    "preprocess": "--workers 2",
    "build_quickstart_corpus.py": "--max-mb 1",
    "tools.gradient_snr": "--train-iters 6",
}
_TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 128 --mock-data"
_RUN = f"--train-iters 3 --lr 1e-3 --eval-interval 0 --micro-batch-size 2 {_TINY}"
_CORPUS = "python tools/build_quickstart_corpus.py --max-mb 1 --output"
_QUICKSTART = "runs/quickstart/data"
#: What blocks that say ``needs`` find.
_NEEDED = {
    "text": f"{_CORPUS} text.jsonl",
    "quickstart-data": "mkdir -p runs/quickstart/data\n"
    f"{_CORPUS} {_QUICKSTART}/corpus.jsonl\n"
    f"python tools/train_tokenizer.py --input {_QUICKSTART}/corpus.jsonl --vocab-size 4096"
    f" --output {_QUICKSTART}/tokenizer.model\n"
    f"python tools/preprocess_data.py --input {_QUICKSTART}/corpus.jsonl --workers 2 --append-eod"
    f" --tokenizer-model {_QUICKSTART}/tokenizer.model --output-prefix {_QUICKSTART}/corpus",
    "two-runs": f"python pretrain_gpt.py --precision bf16 --output-dir runs/bf16 {_RUN}\n"
    f"python pretrain_gpt.py --output-dir runs/fp8 {_RUN}",
    "chat-model": "python -c \"from tests.harness.chat_tokenizer import save_chat_model; save_chat_model('runs/sft')\"",
    # Widths that FP8 blocks of 128 × 128 divide.
    "llama": 'python -c "from transformers import LlamaConfig, LlamaForCausalLM; LlamaForCausalLM(LlamaConfig('
    "vocab_size=203, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,"
    " num_key_value_heads=4, max_position_embeddings=64)).save_pretrained('runs/conversion/llama')\"",
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_how_it_is_tested(page: Path) -> None:
    assert [block.id for block in _BLOCKS if block.page == page and block.tag is None] == []


@pytest.mark.parametrize("block", _FOR_GPUS, ids=lambda b: b.id)
def test_flags_for_gpus_are_taken(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(block.text):
        words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
        if words[0] == "fp8-megatron":
            flags, ranks = _without_placement(words[2:])
        else:
            module = words[words.index("-m") + 1].replace(".", "/") + ".py" if "-m" in words else None
            script = module or next(word for word in words if word.endswith(".py"))
            assert (ROOT / script).exists(), f"no file {script}"
            if script != "pretrain_gpt.py":
                continue
            flags = words[words.index(script) + 1 :]
            ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        check_config(parse_config(flags), ranks)


def _without_placement(words: list[str]) -> tuple[list[str], int]:
    """Flags of ``fp8-megatron train`` without those that say where it runs, and the number of ranks."""
    flags, ranks = list(words), 1
    for name in ("--gpus", "--nnodes", "--node-rank", "--master-addr"):
        if name in flags:
            index = flags.index(name)
            if name in ("--gpus", "--nnodes"):
                ranks *= int(flags[index + 1])
            del flags[index : index + 2]
    return flags, ranks


def test_ci_runs_the_two_commands() -> None:
    stages = (ROOT / ".ci" / "run").read_text()
    for block in _BLOCKS:
        if block.tag == "ci":
            for command in commands(block.text):
                assert f"stage {command.removeprefix('make ')}" in stages


@pytest.mark.slow
@pytest.mark.parametrize("page", _PAGES_TO_RUN, ids=name_of)
def test_commands_run(page: Path, tmp_path: Path, forks: Executor) -> None:
    """All ``run`` blocks of a page, one after the other, as a reader would. Python is forked: it starts in no time."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", ".venv", "data"):
            (tmp_path / path.name).symlink_to(path)
    done: set[str] = set()
    for language, block in _joined(_in_order(page)):
        for need in re.findall(r"needs=([\w-]+)", block.tag or ""):
            if need in ("llama", "chat-model"):
                pytest.importorskip("transformers")
            if need not in done:
                _run_all(_NEEDED[need], tmp_path, forks, shrink=False)
                done.add(need)
        if language == "python":
            _run([sys.executable, "-c", block.text], tmp_path, forks)
        else:
            _run_all(block.text, tmp_path, forks, shrink="shrink" in (block.tag or ""))


def _in_order(page: Path) -> list[tuple[str, Block]]:
    text = page.read_text()
    found = [(block.language, block) for block in _BLOCKS if block.page == page and (block.tag or "").startswith("run")]
    return sorted(found, key=lambda item: text.index(item[1].text))


def _joined(found: list[tuple[str, Block]]) -> list[tuple[str, Block]]:
    """The blocks, with those that continue a script in one with it."""
    joined: list[tuple[str, Block]] = []
    for language, block in found:
        if "continues" in (block.tag or ""):
            _, first = joined.pop()
            block = replace(first, text=f"{first.text}\n\n{block.text}")
        joined.append((language, block))
    return joined


def _run_all(script: str, folder: Path, forks: Executor, *, shrink: bool) -> None:
    for command in commands(script):
        words = shlex.split(command)
        if words[0] == "pip":
            continue
        if shrink:
            names = (
                [words[1]]
                if words[0] == "fp8-megatron"
                else [_SUBCOMMANDS.get(Path(w).name, Path(w).name) for w in words]
            )
            words += next((_SHRINK[name] for name in names if name in _SHRINK), "").split()
        if words[0] == "torchrun":
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
        elif words[0] == "python":
            words[0] = sys.executable
        elif words[0] == "fp8-megatron":
            words = [sys.executable, "-m", "fp8_megatron.cli", *words[1:]]
        _run(words, folder, forks)


def _run(words: list[str], folder: Path, forks: Executor) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    if words[0] == sys.executable and words[1:3] != ["-m", "torch.distributed.run"]:
        program, limits = partial(run_python, words[1:], environment), {"seconds": 300.0, "address_bytes": 1 << 40}
        ending = forks.submit(run_forked, program, folder=folder, **limits).result()
        status, output, errors = ending.status, ending.output, ending.errors
    else:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        status, output, errors = done.returncode, done.stdout, done.stderr
    assert status == 0, f"{shlex.join(words)}\n{output[-3000:]}\n{errors[-3000:]}"
