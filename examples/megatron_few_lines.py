"""A GPT under megatron-core, in BF16 and in FP8: the trainer from Python, in a few lines.

python examples/megatron_few_lines.py                       random tokens; a CPU takes seconds
torchrun --nproc-per-node 4 examples/megatron_few_lines.py --num-layers 32 --hidden-size 4096 \\
    --num-attention-heads 32 --seq-length 2048 --micro-batch-size 4 --global-batch-size 64 --train-iters 20 \\
    --data-path data/corpus_text_document --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json \\
    --merge-file gpt2-merges.txt                             GPT-7B on token files

Any flag of pretrain_gpt.py may follow.
"""

import os
import sys
from pathlib import Path
from statistics import median

import torch

from fp8_megatron.any_model.meter import Bytes, Row, table
from fp8_megatron.config.io import parse_config
from fp8_megatron.planning.memory import padded_vocab_size, predict_memory
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 --micro-batch-size 4 "
    "--train-iters 12 --mock-data --num-workers 0"
)
PRECISIONS = {"BF16": "--bf16", "O1": "--opt-level O1", "O2": "--opt-level O2", "O3": "--opt-level O3"}


def train(name: str, flags: list[str], folder: Path) -> Row | None:
    config = parse_config([*flags, *PRECISIONS[name].split(), "--output-dir", str(folder)])
    Trainer(config).fit()

    if os.environ.get("RANK", "0") != "0":
        return None
    steps = [record for record in read_rows(folder / METRICS_FILE) if record["kind"] == "train"]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    memory = predict_memory(config, padded_vocab_size(config), world_size=world_size)
    held = memory.linear + memory.rest
    state = held.master_weights + sum(held.states.values()) + held.scales
    seconds = median(step["step_seconds"] for step in steps[3:])
    peak = int(steps[-1]["peak_memory_gib"] * 2**30) if torch.cuda.is_available() else None
    return Row(name, Bytes(held.weights, held.gradients, state), peak, seconds, steps[-1]["loss"])


def main() -> None:
    flags = [*(sys.argv[1:] or SMALL.split()), "--lr", "1e-3", "--eval-interval", "0"]
    # One folder for all ranks of a node: torchrun started them all.
    folder = Path("runs") / f"few_lines-{os.getppid() if 'RANK' in os.environ else os.getpid()}"
    rows = [train(name, flags, folder / name) for name in PRECISIONS]
    if all(rows):
        print(table([row for row in rows if row is not None]))


if __name__ == "__main__":
    main()
