#!/usr/bin/env bash
# Build the peers for a GPU machine that reaches no registry: te_site.tar.xz and extra_site.tar.xz, to be unpacked into
# one folder that PYTHONPATH names there. Needs PyPI, GitHub, Python 3.12 with its headers, a C++ compiler and 12 GB of
# disk, no GPU; an hour of two cores.
# Usage: benchmarks/peers/build_sites.sh FOLDER
#   Other versions by the environment: PYTHON, TORCH, CUDA (that of this PyTorch), TE, MEGATRON, TORCHAO, EMERGING,
#   ARCH.
set -euo pipefail
cuda=${CUDA:-13.0} te=${TE:-2.20.2}
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$1" && cd "$1"
"${PYTHON:-python3.12}" -m venv venv
pip=(venv/bin/python -m pip)
target=("${pip[@]}" install -q --no-compile --upgrade --target)
"${pip[@]}" install -q "torch==${TORCH:-2.11.0}" setuptools wheel ninja packaging pybind11 \
  "nvidia-cuda-nvcc==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"

# The PyTorch part has no kernels of its own: C++ against the headers of torch and of NVIDIA's wheels.
nvidia=$(venv/bin/python -c 'import nvidia; print(list(nvidia.__path__)[0])')
export CUDA_HOME=$nvidia/cu${cuda%%.*} NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0
export CPATH=$CUDA_HOME/include:$nvidia/cudnn/include:$nvidia/nccl/include
"${pip[@]}" wheel -q --no-deps --no-build-isolation -w wheels "transformer-engine-torch==$te"
"${target[@]}" te_site --no-deps wheels/*.whl "transformer-engine==$te" "transformer-engine-cu${cuda%%.*}==$te"
"${target[@]}" te_site pydantic einops importlib-metadata
rm -rf te_site/transformer_engine/jax te_site/transformer_engine/wheel_lib/*nccl_ep*
(cd "$project" && "$OLDPWD/venv/bin/python" -m benchmarks.peers.keep_arch \
  "$OLDPWD/te_site/transformer_engine/wheel_lib/libtransformer_engine.so" "${ARCH:-90}")

"${target[@]}" extra_site --no-deps "megatron-core==${MEGATRON:-0.19.2}" "torchao==${TORCHAO:-0.18.0}" \
  absl-py "git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v${EMERGING:-0.3.1}"
rm -rf extra_site/test  # torchao's, which hides Python's
for site in te_site extra_site; do
  find "$site" -name __pycache__ -prune -exec rm -rf {} +
  tar --sort=name --owner=0 --group=0 -C "$site" -cf - . | xz --x86 --lzma2=preset=9e >"$site.tar.xz"
done
ls -l ./*.tar.xz
