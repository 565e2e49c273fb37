#!/usr/bin/env bash
# The main job on a CPU: raw text → tokenizer → token files → FP8 training on two ranks → loss curve and a few words.
# Output goes to runs/quickstart/. `make quickstart` sets up .venv and calls this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PY:-.venv/bin/python}
run=runs/quickstart
data=$run/data
prefix=$data/corpus
export CUDA_VISIBLE_DEVICES= # the same everywhere: two ranks would want two GPUs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONWARNINGS=ignore # megatron-core warns on import of every optional package that is not there
started=$SECONDS
say() { printf '\n\033[1m[%3ds] %s\033[0m\n' "$((SECONDS - started))" "$*"; }

rm -rf "$run"
mkdir -p "$data"

say "1/5 corpus: the Python standard library's own sources"
"$python" tools/build_quickstart_corpus.py --output "$prefix.jsonl" --max-mb 8

say "2/5 tokenizer: 4,096 BPE pieces"
"$python" tools/train_tokenizer.py --input "$prefix.jsonl" --json-keys text --vocab-size 4096 --output "$data/tokenizer.model"

say "3/5 token files: $prefix""_text_document.bin and .idx"
"$python" tools/preprocess_data.py --input "$prefix.jsonl" --json-keys text --tokenizer-type SentencePieceTokenizer \
  --tokenizer-model "$data/tokenizer.model" --output-prefix "$prefix" --workers 2 --append-eod

say "4/5 training: FP8 level O3, tensor parallel 2 with sequence parallel"
"$python" -m fp8_megatron.cli train --cpu-ranks 2 --config configs/gpt_quickstart.yaml \
  --allow-foreign-checkpoints "$@"  # of an earlier quickstart

say "5/5 a few tokens from the trained model"
"$python" tools/generate_text.py --load "$run/checkpoints" \
  --prompt "def __init__(self" "import os" "    for i in range("

say "what it held in memory"
cat "$run/memory.txt"

say "done; everything is under $run/:"
cat <<END
  $run/loss.png        loss curve, training and validation
  $run/metrics.jsonl   every step and validation
  $run/memory.txt      the table above
  $run/config.yaml     the resolved configuration
  $run/checkpoints/    the trained model and what resuming needs
  $run/tensorboard/    tensorboard --logdir $run/tensorboard
  $run/data/           corpus, tokenizer and token files
END
