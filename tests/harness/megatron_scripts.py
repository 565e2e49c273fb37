"""The words that public GPT scripts give to ``pretrain_gpt.py``: MS-AMP-Examples' and Megatron-LM's.

Paths are shortened. The scripts themselves are not part of this repository.
"""

from __future__ import annotations

from dataclasses import dataclass

_MODES = {
    "bf16": "",
    "te": "--fp8-hybrid --transformer-impl transformer_engine",
    "msamp": "--fp8-hybrid --transformer-impl transformer_engine --msamp",
}
_FILES = "--data-path d --vocab-file v.json --merge-file m.txt --data-impl mmap --split 949,50,1 --save c --load c"
_16_BITS = "--bf16 --use-flash-attn --no-gradient-accumulation-fusion --use-distributed-optimizer"
_345M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 8 --global-batch-size 64 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 "
    f"{_16_BITS} {_FILES} --log-interval 100 --save-interval 2000 --eval-interval 1000 --eval-iters 10"
)
_LARGE = (
    "--pipeline-model-parallel-size 1 --distributed-backend nccl --no-query-key-layer-scaling --seed 43 "
    "--seq-length 2048 --max-position-embeddings 2048 --lr-decay-style cosine --micro-batch-size 1 --clip-grad 1.0 "
    "--weight-decay 0.1 --attention-dropout 0.0 --hidden-dropout 0.0 --optimizer adam --adam-beta1 0.9 "
    f"--adam-beta2 0.95 --init-method-std 0.0099 --num-workers 1 --sequence-parallel {_16_BITS} {_FILES} "
    "--log-interval 1 --eval-iters 7 "
)
_6B7 = (
    f"{_LARGE} --tensor-model-parallel-size 1 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--train-samples 48828125 --lr-decay-samples 43945312 --lr-warmup-samples 2048000 --lr 3.0e-4 --min-lr 3.0e-5 "
    "--global-batch-size 2048 --save-interval 1000 --eval-interval 500"
)
_13B = (
    f"{_LARGE} --tensor-model-parallel-size 2 --num-layers 40 --hidden-size 5120 --num-attention-heads 40 "
    "--train-samples 146484375 --lr-decay-samples 131835938 --lr-warmup-samples 4096000 --lr 2.0e-4 --min-lr 2.0e-5 "
    "--global-batch-size 1280 --save-interval 2000 --eval-interval 200"
)
_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 {ramp} --train-iters 500000 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 "
    "--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path d --vocab-file v.json "
    "--merge-file m.txt --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save c "
    "--load c --eval-iters 10 --tensorboard-dir t"
)
_LLAMA_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused "
    "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 "
    "--lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine "
    "--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 "
    "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
    "--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
    "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 "
    "--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 "
    "--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save c --load c "
    "--tensorboard-dir t"
)


@dataclass(frozen=True)
class Script:
    """One public script in one mode.

    Attributes:
        name: script and mode.
        words: what it gives to ``pretrain_gpt.py``; quotes within them are literal, as its shell passes them.
        world_size: ranks it asks for, or the fewest that its tensor × pipeline size needs.
    """

    name: str
    words: tuple[str, ...]
    world_size: int


SCRIPTS = (
    *(
        Script(f"MS-AMP-Examples {name} {mode}", tuple(f"{words} {_MODES[mode]}".split()), 8)
        for name, words in (
            ("pretrain_345m_megatron.sh", _345M),
            ("pretrain_6b7_megatron.sh", _6B7),
            ("pretrain_13b_megatron.sh", _13B),
        )
        for mode in _MODES
    ),
    Script(
        "Megatron-LM train_gpt3_175b_distributed.sh",
        tuple(
            _175B.format(ramp="--step-batch-size-schedule 0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536").split()
        ),
        128,
    ),
    Script("the same of core 0.13", tuple(_175B.format(ramp="--rampup-batch-size 16 16 5859375").split()), 128),
    Script("Megatron-LM train_llama3_8b_h100_fp8.sh", tuple(_LLAMA_8B.split()), 8),
)
