"""Train one tiny GPT in BF16 and in FP8 on the same tokens, side by side, and show both losses and their memory.

    fp8-megatron demo

The text is the running Python's standard library. Both runs begin with the same weights, on one GPU or on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..errors import UserError
from ..outputs import writing_to
from ..reporting.metrics_file import METRICS_FILE, read_rows
from .arguments import Parser, output_folder, whole
from .environment import run_environment, training_command
from .parity_runs import LOG_FILE
from .program import exit_status, share_import_path, told_error
from .run_settings import LEVELS

#: Name in the figure → level.
_RUNS = {"BF16": "bf16", "FP8": "default"}
_MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 8 "
    "--attention-dropout 0 --hidden-dropout 0 --adam-beta2 0.95 --weight-decay 0.1 --split 100,0,0 --num-workers 0 "
    "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --no-tensorboard --progress off"
)
_VOCAB_SIZE = 1024
_CORPUS_BYTES = 1_000_000
_LINE_EVERY = 10
_POLL_SECONDS = 0.2
#: Seconds in which a run ends after SIGTERM.
_END_SECONDS = 20.0


def main(words: Sequence[str] | None = None, prog: str = "fp8-megatron demo") -> int:
    """Exit status: 0, or 2 after an error."""
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-iters", type=whole(least=2, most=100_000), default=150, help="steps of each run (150)")
    parser.add_argument("--output-dir", type=output_folder, help="a new folder (default: runs/demo-TIME)")
    return exit_status(partial(_run, parser.parse_args(words)), OSError, ValueError)


def _run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.output_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--output-dir {folder} is not empty; give a new folder")
    with writing_to(folder, "--output-dir"):
        (folder / "data").mkdir(parents=True, exist_ok=True)
    share_import_path()
    if status := _make_data(folder / "data"):
        return status
    print("\nthe same model and tokens in BF16 and in FP8; both runs start, which takes some seconds\n", flush=True)
    with _training(folder, arguments.train_iters) as runs:
        _show_losses({name: folder / name for name in runs}, runs, arguments.train_iters)
    _show_end(folder)
    return 0


def _make_data(folder: Path) -> int:
    """Text, tokenizer and token files; the status of a program that has failed."""
    from ..data.library_corpus import build
    from . import preprocess_data, train_tokenizer

    text, tokenizer = str(folder / "text.jsonl"), str(folder / "tokenizer.model")
    build(Path(sysconfig.get_paths()["stdlib"]), folder / "text.jsonl", _CORPUS_BYTES, seed=1)
    learn = ["--input", text, "--vocab-size", str(_VOCAB_SIZE), "--output", tokenizer]
    encode = ["--input", text, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer]
    encode += ["--append-eod", "--workers", "1", "--output-prefix", str(folder / "text")]
    return train_tokenizer.main(learn) or preprocess_data.main(encode)


@contextmanager
def _training(folder: Path, train_iters: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start a run of each level, in a process of its own; what has not ended is ended."""
    threads = str(max(1, (os.cpu_count() or 1) // len(_RUNS)))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore", **run_environment()}
    files = folder / "data"
    data = ["--data-path", str(files / "text_text_document"), "--tokenizer-model", str(files / "tokenizer.model")]
    runs = {}
    try:
        for name, level in _RUNS.items():
            own = folder / name
            own.mkdir()
            places = ["--output-dir", str(own), "--save", str(own / "checkpoints"), "--train-iters", str(train_iters)]
            flags = [*_MODEL.split(), *data, *places, *LEVELS[level]]
            with (own / LOG_FILE).open("wb") as log:
                command = training_command(flags, 1, on_gpus=False)
                runs[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        yield runs
    finally:
        for run in runs.values():
            run.terminate()
        for run in runs.values():
            try:
                run.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                run.kill()


def _show_losses(folders: dict[str, Path], runs: dict[str, subprocess.Popen[bytes]], train_iters: int) -> None:
    """Print a line every few steps as soon as all runs have them, until all have ended.

    Raises:
        UserError: a run has failed.
    """
    print(f"{'step':>6}" + "".join(f"{f'{name} loss':>12}" for name in runs) + f"{'difference':>12}", flush=True)
    due = _LINE_EVERY
    while True:
        all_ended = all(run.poll() is not None for run in runs.values())
        for name, run in runs.items():
            if run.poll():
                told = told_error((folders[name] / LOG_FILE).read_text(errors="replace"))
                raise UserError(f"the run in {name}: {told.removeprefix('error: ')}")
        losses = [_losses(folder / METRICS_FILE) for folder in folders.values()]
        while due <= train_iters and all(due in own for own in losses):
            first, second = (own[due] for own in losses)
            print(f"{due:>6}{first:>12.4f}{second:>12.4f}{100 * (second / first - 1):>+11.2f}%", flush=True)
            due += _LINE_EVERY
        if all_ended:
            return
        time.sleep(_POLL_SECONDS)


def _losses(metrics: Path) -> dict[int, float]:
    if not metrics.exists():
        return {}
    rows = [row for row in read_rows(metrics) if row["kind"] == "train" and row["loss"] is not None]
    return {row["iteration"]: row["loss"] for row in rows}


def _show_end(folder: Path) -> None:
    from ..reporting.plot import compare_losses

    compare_losses({name: folder / name / METRICS_FILE for name in _RUNS}, folder / "loss.png", title="BF16 and FP8")
    print(f"\n{(folder / 'FP8' / 'memory.txt').read_text()}")
    print(f"the picture of both losses: {folder / 'loss.png'}; logs, metrics and checkpoints: {folder}/\n")
    print("next:")
    print(f'  fp8-megatron generate --load {folder}/FP8/checkpoints --prompt "import os"')
    print("  fp8-megatron train --config configs/gpt_345m.yaml --mock-data --train-iters 20   on a GPU")
    print("  model, optimizer = fp8_megatron.initialize(model, optimizer)                      in your own loop")
