#!/usr/bin/env bash
# A public corpus, in any of its usual forms, as token files.
#
#   scripts/prepare_data.sh --output FOLDER [flags] INPUT… [-- flags of fp8-megatron preprocess]
#
# INPUT: files, folders (all files of these kinds below them) or https:// addresses, of JSON lines (.jsonl, .json,
# .ndjson), text (.txt, .text, .md), both plain or compressed (.gz, .xz, .bz2, .zst), and Parquet. Examples:
#
#   scripts/prepare_data.sh --output data/c4 c4-train.00000-of-01024.json.gz
#   scripts/prepare_data.sh --output data/fineweb --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2/ sample/10BT/
#
#   --output FOLDER          FOLDER/corpus_text_document.bin and .idx, and FOLDER/tokenizer.model if it is trained
#   --tokenizer-model FILE   default: train one on the text (SentencePiece)
#   --tokenizer-type TYPE    default: SentencePieceTokenizer
#   --vocab-size N           of a tokenizer that is trained (32000)
#   --json-keys KEY          key or column of the text (text)
#   --workers N              processes (all cores)
# For example, after --: --split-on-blank-lines, or --vocab-file FILE --merge-file FILE of a GPT2BPETokenizer.
# Environment: PY (default .venv/bin/python of this repository, else python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() {
  echo "error: $*" >&2
  exit 2
}
say() { printf '[%d s] %s\n' "$SECONDS" "$*"; }

output='' tokenizer='' type=SentencePieceTokenizer vocab='' key=text
workers=$(nproc)
inputs=() others=()
while [ $# -gt 0 ]; do
  case $1 in
    --output | --tokenizer-model | --tokenizer-type | --vocab-size | --json-keys | --workers)
      [ $# -gt 1 ] || fail "$1 has no value; give one after it, or drop it"
      case $1 in
        --output) output=$2 ;;
        --tokenizer-model) tokenizer=$2 ;;
        --tokenizer-type) type=$2 ;;
        --vocab-size) vocab=$2 ;;
        --json-keys) key=$2 ;;
        --workers) workers=$2 ;;
      esac
      shift
      ;;
    --)
      shift
      others=("$@")
      break
      ;;
    --*) fail "unknown flag $1; flags of fp8-megatron preprocess come after the inputs and --" ;;
    *) inputs+=("$1") ;;
  esac
  shift
done
[ -n "$output" ] || fail "give --output FOLDER"
[ ${#inputs[@]} -gt 0 ] || fail "give at least one file, folder or https:// address"
if [ -n "$vocab" ] && { [ -n "$tokenizer" ] || [ "$type" != SentencePieceTokenizer ]; }; then
  fail "--vocab-size $vocab is of a tokenizer that is trained, and none is; leave it out (a NullTokenizer's comes after --)"
fi

python=${PY:-$root/.venv/bin/python}
if [ -z "${PY:-}" ] && ! [ -x "$python" ]; then python=python3; fi
mkdir -p "$output"
run() { "$python" "$root/tools/$1.py" "${@:2}"; }

is_text() { [[ $1 =~ \.(jsonl|json|ndjson|txt|text|md)(\.(gz|xz|bz2|zst))?$ ]]; }
texts=() tables=()
take() {
  case $1 in
    *.parquet) tables+=("$1") ;;
    *) texts+=("$1") ;;
  esac
}
for input in "${inputs[@]}"; do
  case $input in
    http://* | https://*)
      # Two addresses may end alike.
      file=$output/$(printf %s "$input" | sha256sum | cut -c1-8)-$(basename "${input%%\?*}")
      if ! [ -f "$file" ]; then
        say "downloading $input"
        curl --fail --location --retry 5 --continue-at - --output "$file.partial" "$input" || fail "no download of $input"
        mv "$file.partial" "$file"
      fi
      take "$file"
      ;;
    *)
      if [ -d "$input" ]; then
        found=0
        while IFS= read -r -d '' file; do
          if is_text "$file" || [[ $file == *.parquet ]]; then
            take "$file"
            found=1
          fi
        done < <(find -L "$input" -type f -print0 | LC_ALL=C sort -z)
        [ "$found" = 1 ] || fail "$input holds no .jsonl, .json, .ndjson, .txt, .text, .md or .parquet file"
      elif [ -f "$input" ]; then
        take "$input"
      else
        fail "input $input does not exist"
      fi
      ;;
  esac
done

if [ ${#tables[@]} -gt 0 ]; then
  say "${#tables[@]} Parquet files as JSON lines"
  lines=$output/parquet.jsonl.gz
  run parquet_to_jsonl --input "${tables[@]}" --output "$lines" --json-keys "$key"
  texts+=("$lines")
fi
if [ -z "$tokenizer" ] && [ "$type" = SentencePieceTokenizer ]; then
  tokenizer=$output/tokenizer.model
  if [ -f "$tokenizer" ]; then
    count='import sys, sentencepiece; print(sentencepiece.SentencePieceProcessor(model_file=sys.argv[1]).vocab_size())'
    if [ -n "$vocab" ]; then
      found=$("$python" -c "$count" "$tokenizer") || fail "$tokenizer cannot be read; remove it, or give another --output"
      [ "$found" = "$vocab" ] || fail "$tokenizer has $found pieces, not --vocab-size $vocab; remove one of the two"
    fi
    say "tokenizer: $tokenizer is there"
  else
    vocab=${vocab:-32000}
    say "tokenizer: $vocab pieces"
    run train_tokenizer --input "${texts[@]}" --json-keys "$key" --vocab-size "$vocab" --output "$tokenizer"
  fi
fi
say "token files"
tokens=(--tokenizer-type "$type")
if [ -n "$tokenizer" ]; then tokens+=(--tokenizer-model "$tokenizer"); fi
run preprocess_data --input "${texts[@]}" --json-keys "$key" "${tokens[@]}" \
  --output-prefix "$output/corpus" --append-eod --workers "$workers" "${others[@]}"
if [ ${#tables[@]} -gt 0 ]; then rm "$lines"; fi
say "done; train with --data-path $output/corpus_${key}_document ${tokens[*]}"
