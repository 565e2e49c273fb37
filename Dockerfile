# fp8_megatron in a container: docker build -t fp8_megatron .
# docs/clusters.md has the commands for Docker, pyxis and Apptainer. BASE: an image with Python 3.11 to 3.13. A torch that
# it brings stays; NVIDIA's nvcr.io/nvidia/pytorch has Transformer Engine and NCCL's EFA plugin besides.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}
ARG TORCH=torch==2.13.0

# gcc: Triton builds its launchers with it. The verbs libraries: NCCL loads them for InfiniBand and RoCE.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 curl \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fp8_megatron
COPY pyproject.toml README.md LICENSE pretrain_gpt.py ./
COPY csrc csrc
COPY fp8_megatron fp8_megatron
COPY configs configs
COPY scripts scripts
COPY tools tools

# The constraint keeps the torch that is there: pip would take another build of it. pyproject.toml has the versions.
# hadolint ignore=DL3013
RUN if ! python3 -c "import torch"; then python3 -m pip install --no-cache-dir "${TORCH}"; fi \
    && python3 -c "import torch; print(f'torch=={torch.__version__}')" > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt --editable '.[corpora,fp8-attention,hf,tokenizers]' \
    && rm /tmp/constraints.txt

# The recipes' Python. This folder has no .venv.
ENV PY=python3
