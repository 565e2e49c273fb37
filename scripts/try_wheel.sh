#!/usr/bin/env bash
# Try the wheel of dist/ in environments without anything else of this project: one has the packages that the wheel asks
# for, the other one torch alone. Packages are linked from the environment of PY. Called by `make test-wheel`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PY:-.venv/bin/python}
wheels=(dist/fp8_megatron-*.whl)
wheel=$(realpath "${wheels[-1]}")
unset PYTHONPATH
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

# environment NAME REQUIREMENT...: build/NAME, with links to what these and their requirements are.
environment() {
  "$python" -m venv --clear --without-pip "build/$1"
  "$python" - "build/$1"/lib/python3*/site-packages "${@:2}" <<'END'
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

site, missing, done = Path(sys.argv[1]), [Requirement(text) for text in sys.argv[2:]], set()
while missing:
    need = missing.pop()
    key = (need.name.lower(), *sorted(need.extras))
    if key in done or (need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in ("", *need.extras))):
        continue
    done.add(key)
    found = distribution(need.name)
    for name in {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}:
        if not (site / name).exists():
            (site / name).symlink_to(found.locate_file(name))
    for text in found.requires or []:
        inner = Requirement(text)
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *need.extras)):
            inner.marker = None
            missing.append(inner)
END
}

install() {
  "$python" -m pip --python "build/$1/bin/python" install --quiet --disable-pip-version-check --no-index "${@:2}" "$wheel"
}

# What the wheel's metadata asks for, without extras.
readarray -t needs < <("$python" -c '
import email, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
needs = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
print(*(need for need in needs if "extra ==" not in need), sep="\n")' "$wheel")

say "the wheel with the packages that it asks for: $(basename "$wheel")"
environment venv-wheel "${needs[@]}"
install venv-wheel # fails where a requirement is not met
bin=$PWD/build/venv-wheel/bin

say "the wheel beside torch alone"
environment venv-torch-alone torch
install venv-torch-alone --no-deps
torch_alone=$PWD/build/venv-torch-alone/bin/python

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

version=$("$bin/fp8-megatron" --version)
[[ $wheel == *"/fp8_megatron-$version-"* ]] || { echo "fp8-megatron --version says $version" >&2; exit 1; }

say "fp8-megatron train: a file of the wheel's configs, FP8, five steps"
"$bin/fp8-megatron" train --config configs/gpt_125m.yaml configs/fast.yaml --mock-data --num-layers 2 --hidden-size 64 \
  --num-attention-heads 2 --seq-length 64 --vocab-size 512 --micro-batch-size 2 --global-batch-size 2 --train-iters 5 \
  --lr-warmup-iters 1 --lr-decay-iters 5 --eval-interval 0 --log-interval 1 --num-workers 0 --output-dir run | tail -5
test -s run/loss.png

say "fp8_megatron.initialize, beside torch alone"
"$torch_alone" - <<'END'
import sys
from time import perf_counter

import torch

started = perf_counter()
import fp8_megatron

imported = perf_counter() - started
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
x = torch.randn(128, 64)
losses = []
for _ in range(20):
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
assert sys.prefix in fp8_megatron.__file__, fp8_megatron.__file__
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; import fp8_megatron took {1000 * imported:.1f} ms")
END

say "fp8_megatron.initialize, imported five times beside torch (seconds)"
for _ in 1 2 3 4 5; do
  "$torch_alone" -c '
import time, torch
started = time.perf_counter()
from fp8_megatron import initialize
print(f"{time.perf_counter() - started:.3f}")'
done | sort -n | tr '\n' ' '
echo
say "done"
