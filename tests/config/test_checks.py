"""Each configuration that cannot work is refused with one line: what, the values, the fix."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_command_line, parse_config
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig

MOCK = ["--mock-data", "--vocab-size", "512"]


def parse(flags: str, *, data: str | None = None) -> Config:
    return parse_config([*(MOCK if data is None else data.split()), *flags.split()])


def problems(config: Config, world_size: int) -> list[str]:
    try:
        check_config(config, world_size)
    except ConfigError as error:
        return str(error).splitlines()
    return []


EVALUATES = "--eval-interval 5"
TOKENS = "--no-mock-data --data-path a --tokenizer-type NullTokenizer"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"
FP8_ATTENTION = "--fp8-dot-product-attention --attention-dropout 0 --fp8-recipe delayed --kv-channels 128 "
VIRTUAL4 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 8 "


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ""),
        (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --tp-transport copy_engine"),
        (4, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3 --global-batch-size 16"),
        (2, "--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 2"),
        (1, "--num-query-groups 16"),
        (1, "--bf16 --main-params-dtype fp32 --main-grads-dtype fp32 --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32"),
        (1, "--bf16 --hidden-size 100 --num-attention-heads 10 --seq-length 7 --micro-batch-size 1"),
        (3, "--bf16 --hidden-size 768 --num-attention-heads 12 --tensor-model-parallel-size 3"),
        (1, "--main-params-dtype fp32"),
        (1, "--main-params-dtype fp8"),
        (1, "--exp-avg-sq-dtype fp8"),
        (1, "--exp-avg-dtype int8 --exp-avg-sq-dtype uint8"),
        (1, "--opt-level O2 --exp-avg-sq-dtype uint8"),
        (1, "--opt-level O2"),
        (1, "--lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-warmup-iters 900"),
        (1, "--lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-warmup-fraction 0.9"),
        (1, "--lr-decay-style WSD --lr-wsd-decay-iters 0"),
        (1, "--exit-interval 0 --exit-duration-in-mins 0"),
        (1, "--lr-warmup-iters 1000"),
        (1, "--train-iters 1 --lr-warmup-iters 5"),
        (1, "--train-iters 1_000 --iterations-to-skip 1_000"),
        (1, "--lr-decay-iters 2000 --lr-warmup-iters 1500"),
        (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 24"),
        (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 5"),
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 24"),
        (2, VIRTUAL4 + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
        (2, VIRTUAL4 + "--recompute-granularity full --recompute-method block --recompute-num-layers 4"),
        (1, "--recompute-granularity selective"),
        (1, "--cpu-offloading-num-layers 24"),
        (2, VIRTUAL4 + "--cpu-offloading-num-layers 4"),
        (
            1,
            "--cpu-offloading-num-layers 8 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 4",
        ),
        (1, "--loss-chunk-size 16 --fp8-lm-head"),
        (2, "--bf16 --loss-chunk-size 32 --tensor-model-parallel-size 2 --sequence-parallel"),
        (1, "--recompute-activations --recompute-modules mlp --mlp-chunks-for-training 64"),
        (
            1,
            "--bf16 --mlp-chunks-for-training 5 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
        ),
        (1, "--recompute-activations --recompute-modules mlp core_attn layernorm"),
        (1, "--recompute-activations --recompute-modules mlp --cuda-graph-impl local"),
        (1, "--position-embedding-type rope --rotary-percent 0.5"),
        (1, f"{YARN} --yarn-original-max-position-embeddings 256 --mscale 0.7 --mscale-all-dim 0.7 --rotary-base 5"),
        (1, "--hidden-size 384 --num-attention-heads 10 --kv-channels 32"),
        (1, "--squared-relu --position-embedding-type none"),
        (1, "--quick-geglu --openai-gelu --no-position-embedding --use-rotary-position-embeddings"),
        (1, "--no-position-embedding --position-embedding-type=rope"),
        (1, "--eval-interval 0 --save here --save-interval 5 --keep-last 1 --load here --finetune"),
        (1, "--save here --save-interval 5 --async-save --save-retain-interval 50 --ckpt-format torch_dist"),
        (1, "--load here --ckpt-step 5 --no-load-optim --no-load-rng"),
        (1, "--train-iters 5 --profile --profile-step-start 4 --profile-step-end 6 --profile-ranks 0 1"),
        (1, "--first-last-layers-bf16 --num-layers-at-start-in-bf16 20 --num-layers-at-end-in-bf16 4"),
        (2, "--fp8-lm-head --fp8-recipe delayed --tensor-model-parallel-size 2"),
        (1, "--fp8-lm-head --make-vocab-size-divisible-by 1"),  # of 512 tokens
        (1, FP8_ATTENTION + "--first-last-layers-bf16 --recompute-granularity selective --recompute-modules mlp"),
        (2, "--check-weight-hash-across-dp-replicas-interval 10 --tensor-model-parallel-size 2"),
        (1, "--optimizer sgd --sgd-momentum 0.8 --optimizer-options nesterov=true --adam-beta1 0.8"),
        (1, "--optimizer lion --lion-beta1 0.9 --lion-beta2 0.99 --sgd-momentum 0.9"),
    ],
)
def test_what_works_passes(world_size: int, flags: str) -> None:
    assert problems(parse(flags), world_size) == []


TP2 = "--tensor-model-parallel-size 2 "
PP2 = "--pipeline-model-parallel-size 2 "
GQA = "--group-query-attention "
WSD = "--lr-decay-style WSD "
FULL = "--recompute-granularity full "


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (1, "--swiglu --squared-relu", "swiglu and squared_relu are different activations of one MLP; give one of"),
        (
            1,
            "--quick-geglu --glu-linear-offset 1",
            "and activation_func_clamp_value(None): gpt-oss's MLP alone has them",
        ),
        (
            1,
            "--swiglu --glu-linear-offset 1 --activation-func-clamp-value 7",
            "activation_func_clamp_value(7.0): gpt-oss's MLP alone has them",
        ),
        (1, "--quick-geglu --squared-relu", "squared_relu and quick_geglu are different activations"),
        (1, "--recompute-activations --recompute-modules mla_up_proj", "there is no multi-latent attention"),
        (1, "--recompute-activations --recompute-modules mlps", "recompute_modules(mlps): there is no such module;"),
        (1, "--recompute-activations --recompute-modules layernorm", "has no effect alone: FP8 layers recompute norms"),
        (1, "--bf16 --recompute-activations --recompute-modules layernorm mlp", "layers of precision(bf16) keep the"),
        (1, "--recompute-activations --cuda-graph-impl local", "cannot record recompute_granularity(selective), which"),
        (
            1,
            "--recompute-activations --recompute-modules mlp --cuda-graph-impl local --first-last-layers-bf16",
            "cannot record recompute_granularity(selective), which saves the state of random generators (FP8 layers",
        ),
        # ranges
        (1, "--num-layers 0", "num_layers(0) is out of range; give --num-layers a whole number of at least 1"),
        (1, "--ffn-hidden-size -16", "ffn_hidden_size(-16) is out of range; give --ffn-hidden-size a whole"),
        (1, "--vocab-size 0", "vocab_size(0) is out of range"),
        (1, "--lr 0", "lr(0.0) is out of range; give --lr a finite number of at least 1e-30 and"),
        (1, "--lr 1e-320", "lr(1e-320) is out of range; give --lr a finite number of at least 1e-30 and"),
        (1, "--lr nan", "lr(nan) is out of range; give --lr a finite number of at least 1e-30 and"),
        (1, "--adam-beta2 1", "adam_beta2(1.0) is out of range; give --adam-beta2 a finite number of at least 0 and"),
        (1, "--rotary-percent 1.5", "give --rotary-percent a finite number above 0 and up to 1"),
        (1, "--eval-iters -1", "eval_iters(-1) is out of range; give --eval-iters a whole number of at least 0"),
        (1, "--save here --keep-last 0", "keep_last(0) is out of range"),
        # layout
        (
            2,
            "--check-weight-hash-across-dp-replicas-interval 10 --pipeline-model-parallel-size 2",
            "check_weight_hash_across_dp_replicas_interval(10) compares ranks that hold the same weights, but",
        ),
        (48, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4", "tensor_model_parallel_size(8) ×"),
        (2, TP2 + "--sequence-parallel --seq-length 1023 --micro-batch-size 16", "seq_length(1023) % tensor_model_pa"),
        (2, PP2 + "--num-layers 5", "num_layers(5) % pipeline_model_parallel_size(2) = 1"),
        (4, "--micro-batch-size 4 --global-batch-size 24", "global_batch_size(24) is not a multiple of"),
        (4, "--global-batch-size 8", "global_batch_size(8) is not a multiple of micro_batch_size(4)"),
        (1, "--num-layers-per-virtual-pipeline-stage 2", "pipeline_model_parallel_size(1) has one"),
        (2, PP2 + "--num-layers-per-virtual-pipeline-stage 5 --global-batch-size 8", "stage(5) does not divide"),
        (2, PP2 + "--num-layers-per-virtual-pipeline-stage 12 --global-batch-size 8", "choose a smaller divisor of 12"),
        (2, PP2 + "--num-layers-per-virtual-pipeline-stage 3 --global-batch-size 12", "in groups of pipeline_model_p"),
        # reduction
        (2, "--ddp-bucket-size 0", "ddp_bucket_size(0) is out of range; give --ddp-bucket-size a whole"),
        (2, "--bf16 --fp8-grad-reduce hierarchical", "fp8_grad_reduce(hierarchical) reduces FP8 gradients, but"),
        (2, "--main-grads-dtype bf16 --fp8-grad-reduce nccl", "fp8_grad_reduce(nccl) reduces FP8 gradients, but"),
        (2, "--fp8-wire-intra fp8", "fp8_wire_intra(fp8) has no effect under fp8_grad_reduce(all_to_all); drop it"),
        (1, "--loss-scale 8", "loss_scale(8.0) has no effect under precision(fp8)"),
        (1, "--fp16 --loss-scale 0", "loss_scale(0.0) is out of range"),
        (1, "--main-params-dtype split --opt-level O2", "main_params_dtype(split) is half of an FP8 weight"),
        (1, "--main-params-dtype split --adam-beta2 0.8", "adam_beta1(0.9)² ≥ adam_beta2(0.8) has not; raise"),
        # heads
        (1, "--num-attention-heads 24 --bf16", "hidden_size(1024) % num_attention_heads(24) = 16; choose"),
        (3, "--bf16 --ffn-hidden-size 3072 --tensor-model-parallel-size 3", "num_attention_heads(16) % tensor_model_"),
        (
            3,
            "--bf16 --swiglu --hidden-size 768 --num-attention-heads 12 --tensor-model-parallel-size 3",
            "ffn_hidden_size(2048) % tensor_model_parallel_size(3) = 2; choose ffn_hidden_size = 2046 or 2049, or "
            "another tensor_model_parallel_size",
        ),
        (2, "--fp16 --ffn-hidden-size 4097 " + TP2, "ffn_hidden_size(4097) % tensor_model_parallel_size(2) = 1"),
        (1, GQA + "--num-query-groups 3", "num_attention_heads(16) % num_query_groups(3) = 1"),
        (2, GQA + TP2 + "--num-query-groups 1", "num_query_groups(1) % tensor_model_parallel_size(2) = 1"),
        (2, TP2 + "--tp-transport copy_engine", "precision is fp8 and sequence_parallel False; pass"),
        (1, "--tp-transport nccl", "tp_transport(nccl) serves FP8 layers under sequence parallelism, but precision"),
        (2, TP2 + "--sequence-parallel --bf16 --tp-transport copy_engine", "precision is bf16 and sequence_parallel"),
        (1, "--position-embedding-type rope --kv-channels 33 --bf16", "head width(33) × rotary_percent(1.0) = 33 is"),
        (1, "--position-embedding-type yarn", "rotary_scaling_factor(1.0) scales nothing; give"),
        (1, f"{YARN} --rotary-base 1", "position_embedding_type(yarn) needs a rotary_base above 1"),
        (1, f"{YARN} --yarn-beta-fast 2 --yarn-beta-slow 2", "yarn_beta_fast(2.0) is not above yarn_beta_slow(2.0);"),
        (1, f"{YARN} --kv-channels 33 --bf16", "head width(33)"),
        (1, "--max-position-embeddings 512", "max_position_embeddings(512) < seq_length(1024); choose at least 1024"),
        # sizes of FP8 GEMMs
        (1, "--fp8-recipe blockwise --ffn-hidden-size 4000", "FP8 GEMM: ffn_hidden_size(4000) is not a multiple of"),
        (
            1,
            "--fp8-fallback-recipe blockwise --fp8-fallback-iter 9 --ffn-hidden-size 4000",
            "not a multiple of 128; choose one (3968 or 4096), or --fp8-fallback-recipe tensorwise",
        ),
        (1, "--fp8-recipe mxfp8 --ffn-hidden-size 4016", "FP8 GEMM: ffn_hidden_size(4016) is not a multiple of 32;"),
        (
            4,
            "--fp8-recipe blockwise --tensor-model-parallel-size 4 --sequence-parallel --seq-length 256 "
            "--micro-batch-size 3",
            "256) × micro_batch_size(3) = 768 tokens is not a multiple of 128 × tensor_model_parallel_size(4) = 512",
        ),
        (1, "--hidden-size 1000 --kv-channels 64", "hidden_size(1000) is not a multiple of 16; choose one (992 or"),
        (2, TP2 + "--ffn-hidden-size 4112", "size(4112) is not a multiple of 16 × tensor_model_parallel_size(2) ="),
        (1, GQA + "--num-attention-heads 16 --kv-channels 5 --num-query-groups 1", "(heads(16) + 2 × groups(1)) ×"),
        (1, GQA + "--num-attention-heads 2 --kv-channels 4 --num-query-groups 1", "heads(2) × head width(4) = 8 is"),
        (1, "--seq-length 10 --micro-batch-size 4", "seq_length(10) × micro_batch_size(4) = 40 tokens"),
        # recomputation
        (1, FULL + "--recompute-method uniform", "recompute_granularity(full) needs recompute_num_layers;"),
        (1, FULL, "recompute_granularity(full) needs recompute_method and recompute_num_layers;"),
        (2, PP2 + FULL + "--recompute-method block --recompute-num-layers 13", "recompute_num_layers(13) > 12"),
        (1, FULL + "--recompute-method uniform --recompute-num-layers 5", "recompute_method(uniform) with"),
        (1, FULL + "--recompute-method uniform --recompute-num-layers 48", "recompute_num_layers(48) does not"),
        (2, PP2 + FULL + "--recompute-method uniform --recompute-num-layers 8", "recompute_num_layers(8) does not"),
        (2, VIRTUAL4 + FULL + "--recompute-method uniform --recompute-num-layers 3", "recompute_num_layers(3) does"),
        (2, VIRTUAL4 + FULL + "--recompute-method block --recompute-num-layers 5", "recompute_num_layers(5) > 4"),
        (1, "--recompute-granularity selective --recompute-num-layers 2", "recompute_num_layers(2) belong to"),
        # what leaves the device, and the loss over chunks
        (1, "--cpu-offloading-num-layers 25", "cpu_offloading_num_layers(25) > 24 layers of a pipeline stage;"),
        (2, VIRTUAL4 + "--cpu-offloading-num-layers 5", "cpu_offloading_num_layers(5) > 4 layers of a virtual"),
        (
            1,
            FULL + "--recompute-method uniform --recompute-num-layers 4 --cpu-offloading-num-layers 10",
            "cpu_offloading_num_layers(10) % recompute_num_layers(4) = 2: recomputed chunks are offloaded whole",
        ),
        (1, "--cpu-offloading-num-layers 2 --cuda-graph-impl local", "does not record copies to the host,"),
        (
            1,
            "--loss-chunk-size 1024",
            "is not below seq_length(1024); choose at most 1008, or drop",
        ),
        (
            2,
            "--loss-chunk-size 512 --context-parallel-size 2 --attention-dropout 0",
            "context_parallel_size(2); choose at most 496, or drop",
        ),
        (1, "--loss-chunk-size 8 --seq-length 16", "loss_chunk_size(8) is not a multiple of 16; drop it"),
        (1, "--loss-chunk-size 100", "loss_chunk_size(100) is not a multiple of 16; choose 96"),
        (2, "--loss-chunk-size 16 --tensor-model-parallel-size 2 --sequence-parallel", "loss_chunk_size(16) is not"),
        (1, "--mlp-chunks-for-training 4 --recompute-activations", "mlp_chunks_for_training(4): backward recomputes"),
        (
            2,
            FULL + "--recompute-method uniform --recompute-num-layers 1 --mlp-chunks-for-training 64 "
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "mlp_chunks_for_training(64) × 16 > 512 positions of a rank, and a chunk has a multiple of 16; choose at "
            "most 32",
        ),
        (1, "--loss-chunk-size 16 --cuda-graph-impl local", "does not record the backward inside loss_chunk_size(16)"),
        # precision
        (2, "--bf16 --fp8-pipeline-communication --pipeline-model-parallel-size 2", "fp8_pipeline_communication is"),
        (1, "--bf16 --fp8-lm-head", "fp8_lm_head runs this project's FP8 GEMMs, which precision(bf16) does not use"),
        (
            2,
            "--fp8-lm-head --make-vocab-size-divisible-by 20 --tensor-model-parallel-size 2",
            "fp8_lm_head: vocab_size(512) padded by make_vocab_size_divisible_by(20) does not guarantee each of "
            "tensor_model_parallel_size(2) ranks a multiple of 16 rows; choose make_vocab_size_divisible_by = "
            "16 or 32",
        ),
        (1, FP8_ATTENTION.replace("delayed", "tensorwise"), "needs scales before its kernels run"),
        (1, FP8_ATTENTION.replace("--fp8-recipe delayed", "--bf16"), "which precision(bf16) does not use; drop it"),
        (1, FP8_ATTENTION.replace("--attention-dropout 0", ""), "has no dropout, attention_dropout is 0.1"),
        (1, FP8_ATTENTION + "--attention-backend flash", "has a kernel of its own, not attention_backend(flash)"),
        (1, FP8_ATTENTION + "--window-size 8,0", "does not support windows; drop it or window_size(8,0)"),
        (
            1,
            f"{FP8_ATTENTION} {TOKENS} --reset-attention-mask",
            "cannot keep documents apart; drop it or reset_attention_mask",
        ),
        (1, FP8_ATTENTION + "--recompute-granularity selective", "keeps no scores to recompute"),
        (1, FP8_ATTENTION + "--kv-channels 64", "takes heads of 128 columns, not 64"),
        (
            1,
            "--optimizer sgd --optimizer-options momentum=0.8",
            "optimizer_options(momentum=0.8) is none of optimizer(sgd), which has --sgd-momentum, --optimizer-options",
        ),
        (
            1,
            "--optimizer-options eps=0.1",
            "(eps=0.1) is none of optimizer(adam), which has --adam-beta1, --adam-beta2, --adam-eps",
        ),
        (1, "--bf16 --params-dtype fp8", "params_dtype(fp8) has no effect under precision(bf16)"),
        (1, "--bf16 --exp-avg-sq-dtype fp16", "exp_avg_sq_dtype(fp16) has no effect under precision(bf16)"),
        (1, "--params-dtype fp16", "a master in fp16 (main_params_dtype or opt_level O3) holds no more than the"),
        (1, "--params-dtype fp32 --main-params-dtype bf16", "weight in params_dtype(fp32)"),
        (1, "--bf16 --main-grads-dtype bf16", "main_grads_dtype(bf16) has no effect under precision(bf16)"),
        (1, "--bf16 --exp-avg-dtype int8", "exp_avg_dtype(int8) has no effect under precision(bf16)"),
        (
            1,
            "--first-last-layers-bf16 --num-layers-at-start-in-bf16 20 --num-layers-at-end-in-bf16 5",
            "num_layers_at_start_in_bf16(20) + num_layers_at_end_in_bf16(5) = 25 > num_layers(24)",
        ),
        # schedule
        (1, "--lr-warmup-fraction 1", "lr_warmup_fraction(1.0) is out of range"),
        (1, "--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "lr_warmup_fraction(0.1) and lr_warmup_iters(5) both"),
        (1, WSD + "--lr-wsd-decay-iters 2 --lr-warmup-iters 2000", "> train_iters(1000) - 999 steps of warm-up"),
        (1, "--lr-warmup-iters 50 --lr-decay-iters 50", "lr_warmup_iters(50) ≥ lr_decay_iters(50)"),
        (1, "--lr 1e-4 --min-lr 2e-4", "min_lr(0.0002) > lr(0.0001); choose at most 0.0001"),
        (1, "--lr 1e-4 --lr-warmup-init 1 --lr-warmup-iters 9", "lr_warmup_init(1.0) > lr(0.0001)"),
        (1, WSD, "lr_decay_style(WSD) needs lr_wsd_decay_iters"),
        (1, WSD + "--lr-wsd-decay-iters 1001", "lr_wsd_decay_iters(1001) > train_iters(1000)"),
        (1, "--rollback-on-loss-spike", "rollback_on_loss_spike needs checkpoints to go back to"),
        (
            1,
            "--rollback-on-loss-spike --loss-spike-threshold 0 --save x --save-interval 5",
            "rollback_on_loss_spike has no effect with loss_spike_threshold(0)",
        ),
        (1, "--bf16 --fp8-health-interval 5", "fp8_health_interval(5) has no effect under precision(bf16)"),
        # checkpoints
        (1, "--keep-last 2", "keep_last(2) has no effect without save; drop it or give --save"),
        (1, "--ckpt-state-dtype fp32", "ckpt_state_dtype(fp32) has no effect without save; drop it or give --save"),
        (1, "--save here --save-retain-interval 5", "save_retain_interval(5) chooses among the checkpoints of"),
        # weight gradients with a delayed scale
        (1, "--fp8-weight-grad-scaling delayed --fp8-recipe tensorwise", "takes scales from the amax history of"),
        (1, "--fp8-weight-grad-scaling delayed --precision bf16", "fp8_weight_grad_scaling(delayed) is for FP8's"),
        (
            1,
            "--fp8-weight-grad-scaling delayed --fp8-recipe delayed --main-grads-dtype bf16",
            "fp8_weight_grad_scaling(delayed) is for gradients in fp8, main_grads_dtype is bf16; drop one",
        ),
        # another recipe in mid-run
        (1, "--fp8-fallback-recipe blockwise", "fp8_fallback_recipe(blockwise) is never taken; give"),
        (1, "--fp8-fallback-recipe tensorwise --fp8-fallback-iter 9 --fp8-recipe blockwise", "is left delayed scaling"),
        (
            1,
            "--fp8-fallback-recipe tensorwise --fp8-fallback-underflow 0.1 --fp8-health-interval 0",
            "fp8_fallback_underflow(0.1) is measured every fp8_health_interval steps, which is 0",
        ),
        # steps as CUDA graphs
        (1, "--cuda-graph-impl local --recompute-granularity selective", "cuda_graph_impl(local) cannot record"),
        (1, "--cuda-graph-impl local --release-gradients --clip-grad 0", "cuda_graph_impl(local) would repeat the"),
        (1, "--cuda-graph-impl local --cuda-graph-warmup-steps 1", "cuda_graph_warmup_steps(1): the first step with"),
        # transposes kept between micro-batches
        (1, "--keep-fp8-transpose-cache 4 --micro-batch-size 2 --global-batch-size 2", "keep_fp8_transpose_cache(4)"),
        (1, "--keep-fp8-transpose-cache 4 --precision bf16", "keep_fp8_transpose_cache(4) is for FP8's weights,"),
        # gradients released during backward
        (1, "--release-gradients", "release_gradients updates weights during backward, before the norm that"),
        (
            1,
            "--release-gradients --clip-grad 0 --micro-batch-size 2 --global-batch-size 8",
            "but a step has 4 micro-batches to add up; choose global_batch_size = micro_batch_size(2), or drop it",
        ),
        (4, "--release-gradients --clip-grad 0", "but 4 data-parallel ranks have gradients to reduce first; drop it"),
        (1, "--release-gradients --clip-grad 0 --precision bf16", "release_gradients is for FP8's linear weights,"),
        (1, "--release-gradients --clip-grad 0 --precision fp16", "before an overflow of the loss scale can be"),
        # profiles
        (
            1,
            "--train-iters 5 --fp8-recipe delayed --fp8-fallback-recipe blockwise --fp8-fallback-iter 6",
            "fp8_fallback_iter(6) > train_iters(5): the run ends before; lower it",
        ),
        (1, "--train-iters 5 --profile", "profile_step_start(10) and profile_step_end(12) are not a range of steps"),
        (1, "--profile --profile-step-start 4 --profile-step-end 4", "profile_step_start(4) and profile_step_end(4)"),
        (1, "--nccl-communicator-config-path nowhere.yaml", "nccl_communicator_config_path(nowhere.yaml) is not a"),
        (
            1,
            "--profile --profile-step-start 4 --profile-step-end 6 --iterations-to-skip 4 5",
            "profile_step_start(4) and profile_step_end(6): iterations_to_skip leaves out all of these steps; profile "
            "others",
        ),
        (2, "--profile --profile-ranks 2 8", "profile_ranks(2 8): WORLD_SIZE(2) has none of these ranks; give ranks"),
        (1, "--profile --profile-ranks 0 x", "profile_ranks(x) are not ranks; give numbers, e.g. --profile-ranks 0 1"),
        (1, "--ckpt-step 5", "ckpt_step(5) names a checkpoint of load, which is not given; give --load"),
        (1, "--load here --ckpt-step 0", "ckpt_step(0) is out of range"),
        (1, "--finetune", "finetune takes weights from load, which is not given; give --load"),
        (
            1,
            "--finetune --pretrained-checkpoint x",
            "drop it: from pretrained_checkpoint(x) the run takes the weights alone",
        ),
        (
            *(2, f"{EVALUATES} --micro-batch-size 4 --eval-global-batch-size 12"),
            "eval_global_batch_size(12) is not a multiple of micro_batch_size(4) × data-parallel size(2) = 8; choose 8",
        ),
        (
            *(2, f"{EVALUATES} {VIRTUAL4} --micro-batch-size 1 --eval-global-batch-size 3"),
            "with eval_global_batch_size(3) the interleaved schedule",
        ),
        (1, f"{TOKENS} --vocab-size 512 --fim-data", "fim_data cuts text, and tokenizer_type(NullTokenizer) has none"),
        (
            *(1, "--no-mock-data --data-path a --tokenizer-model m --fim-data --fim-split-sample x"),
            "fim_split_sample(x) needs fim_fragment_rate; give --fim-fragment-rate 0.5",
        ),
        # the tokens' split
        (1, "--split 0,2", "split(0,2,0) is not three weights"),
        (1, "--split a,b,c", "split(a,b,c) is not three weights"),
    ],
)
def test_what_cannot_work_is_one_line_with_its_values(world_size: int, flags: str, message: str) -> None:
    (problem,) = problems(parse(flags), world_size)
    assert message in problem


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("--tokenizer-model t", "exactly one of data_path, train_data_path and mock_data says where tokens come"),
        ("--data-path a --mock-data --vocab-size 9", "but 2 are given: data_path and mock_data; give one"),
        ("--data-path a", "tokenizer_type(SentencePieceTokenizer) needs tokenizer_model; give --tokenizer-model"),
        ("--data-path a --tokenizer-type HuggingFaceTokenizer", "tokenizer_type(HuggingFaceTokenizer) needs"),
        ("--data-path a --tokenizer-type NullTokenizer", "tokenizer_type(NullTokenizer) needs vocab_size"),
        ("--mock-data", "mock_data needs vocab_size"),
        ("--tokenizer-model t --train-data-path a --eval-interval 100", "eval_interval(100) with train_data_path"),
        ("--tokenizer-model t --train-data-path a --valid-data-path b --split 9,1,0", "split(9,1,0) cuts data_path"),
        ("--tokenizer-model t --data-path a --valid-data-path b", "valid_data_path(b) and test_data_path() go with"),
        ("--tokenizer-model t --data-path a --split 1,0,0 --eval-interval 100", "split(1,0,0) leaves nothing to"),
        (
            "--tokenizer-model t --data-path a --split 1,0,0 --eval-interval 100 --eval-iters 0 --full-validation",
            "split(1,0,0) leaves nothing to validate on every eval_interval(100)",
        ),
    ],
)
def test_data_that_cannot_work(data: str, message: str) -> None:
    (problem,) = problems(parse("", data=data), 1)
    assert message in problem


@pytest.mark.parametrize(
    "data",
    [
        "--tokenizer-model t --data-path 0.3 a 0.7 b",
        "--tokenizer-model t --train-data-path a --valid-data-path b",
        "--tokenizer-model t --train-data-path a --eval-interval 0",
        "--tokenizer-type NullTokenizer --vocab-size 9 --data-path a",
        "--tokenizer-model t --data-path a --split 1,0,0 --eval-interval 0",
        "--tokenizer-model t --data-path a --split 1,0,0 --eval-interval 100 --eval-iters 0",
        "--tokenizer-model t --train-data-path a --eval-interval 100 --eval-iters 0",
    ],
)
def test_data_that_works(data: str) -> None:
    assert problems(parse("", data=data), 1) == []


@pytest.mark.parametrize("installed", [False, True])
def test_te_needs_transformer_engine(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    found = problems(parse("--precision te"), 1)
    if installed:
        assert found == []
        assert (
            "params_dtype(fp8) has no effect under precision(te)"
            in problems(parse("--precision te --params-dtype fp8"), 1)[0]
        )
        kept = "--precision te --fp8-recipe tensorwise --first-last-layers-bf16"
        assert problems(parse(kept), 1) == []
        (problem,) = problems(parse("--precision te --first-last-layers-bf16"), 1)
        assert "precision(te) with fp8_recipe(delayed) has no first_last_layers_bf16; drop it" in problem
        two_stages = f"{kept} --pipeline-model-parallel-size 2 --num-layers-at-end-in-bf16"
        assert problems(parse(f"{two_stages} 12"), 2) == []
        (problem,) = problems(parse(f"{two_stages} 13"), 2)
        assert "num_layers_at_end_in_bf16(13) > 12 layers of a pipeline stage" in problem
    else:
        (problem,) = found
        assert "pip install --no-build-isolation transformer_engine[pytorch]" in problem


def test_all_problems_come_at_once() -> None:
    config = parse("--finetune --lr-decay-style WSD --split a")
    assert len(problems(config, 1)) == 3


def test_sizes_are_those_of_one_rank() -> None:
    """96 = 2 · 48 = 4 · 24 columns: 48 is a multiple of 16, 24 is not."""
    flags = "--ffn-hidden-size 96 --tensor-model-parallel-size "
    assert problems(parse(flags + "2"), 2) == []
    assert len(problems(parse(flags + "4"), 4)) == 1


@pytest.mark.parametrize("impl", ["auto", "none"])
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, f"{PP2} --recompute-granularity selective"),
        (1, "--recompute-granularity selective"),
        (1, "--release-gradients --clip-grad 0"),
        (1, "--cuda-graph-warmup-steps 1"),
    ],
)
def test_what_cannot_be_recorded_is_refused_only_where_recording_is_asked_for(
    world_size: int, flags: str, impl: str
) -> None:
    assert problems(parse(flags), world_size) == []
    assert problems(parse(f"{flags} --cuda-graph-impl {impl}"), world_size) == []
    assert problems(parse(f"{flags} --cuda-graph-impl local"), world_size)


def test_transformer_engines_layers_are_not_recorded() -> None:
    found = problems(parse("--cuda-graph-impl local --precision te"), 1)
    assert any("cuda_graph_impl(local) cannot record Transformer Engine's layers" in problem for problem in found)


IGNORED = [
    ("fp8_pipeline_communication", "--fp8-pipeline-communication", "under pipeline_model_parallel_size(1); drop it"),
    ("fp8_context_communication", "--fp8-context-communication", "under context_parallel_size(1); drop it or raise"),
    ("opt_level", "--bf16 --opt-level O2", "under precision(bf16); drop it or choose --precision fp8"),
    ("fp8_power_of_two_scales", "--bf16 --fp8-power-of-two-scales", "under precision(bf16)"),
    ("fp8_weight_grad_scaling", "--bf16 --fp8-weight-grad-scaling block", "under precision(bf16)"),
    ("fp8_fallback_iter", "--fp8-fallback-iter 5", "without fp8_fallback_recipe; drop it or give"),
    ("grad_accumulation", "--bf16 --grad-accumulation local", "under precision(bf16); drop it or choose --precision"),
    ("grad_accumulation_dtype", "--bf16 --grad-accumulation-dtype bf16", "under precision(bf16)"),
    ("profile_trace", "--profile-trace", "without profile; drop it or give --profile"),
    ("tensorboard_dir", "--no-tensorboard --tensorboard-dir a", "without tensorboard; drop it or give --tensorboard"),
]
#: Megatron does not read them either.
UNREAD = [
    ("rotary_base", "--rotary-base 5", "under position_embedding_type(learned_absolute)"),
    ("rotary_percent", "--rotary-percent 0.5", "under position_embedding_type(learned_absolute)"),
    ("rotary_interleaved", "--rotary-interleaved", "under position_embedding_type(learned_absolute)"),
    ("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor 2", "under position_embedding_typ"),
    ("use_rope_scaling", "--use-rope-scaling", "under position_embedding_type(learned_absolute)"),
    ("rope_scaling_factor", "--rope-scaling-factor 4", "under position_embedding_type(learned_absolute)"),
    ("rope_scaling_factor", "--position-embedding-type rope --rope-scaling-factor 4", "without use_rope_scaling"),
    ("rotary_percent", f"{YARN} --rotary-percent 0.5", "under position_embedding_type(yarn); drop it or give"),
    ("rotary_interleaved", f"{YARN} --rotary-interleaved", "under position_embedding_type(yarn)"),
    (
        "rotary_seq_len_interpolation_factor",
        f"{YARN} --rotary-seq-len-interpolation-factor 2",
        "under position_embedding_type(yarn)",
    ),
    ("use_rope_scaling", f"{YARN} --use-rope-scaling", "under position_embedding_type(yarn)"),
    (
        "rotary_scaling_factor",
        "--position-embedding-type rope --rotary-scaling-factor 2",
        "under position_embedding_type(rope)",
    ),
    ("yarn_beta_slow", "--yarn-beta-slow 2", "under position_embedding_type(learned_absolute); drop it or give --pos"),
    (
        "yarn_correction_range_round_to_int",
        "--position-embedding-type rope --no-yarn-correction-range-round-to-int",
        "under position_embedding_type(rope); drop it or give --position-embedding-type yarn",
    ),
    ("first_last_layers_bf16", "--fp16 --first-last-layers-bf16", "under precision(fp16)"),
    ("fp8_amax_history_len", "--fp8-recipe tensorwise --fp8-amax-history-len 4", "under fp8_recipe(tensorwise);"),
    ("fp8_margin", "--fp8-recipe tensorwise --fp8-margin 1", "under fp8_recipe(tensorwise); drop it or choose"),
    ("fp8_amax_compute_algo", "--fp8-recipe blockwise --fp8-amax-compute-algo most_recent", "under fp8_recipe(block"),
    ("loss_scale_window", "--fp16 --loss-scale 8 --loss-scale-window 5", "with loss_scale(8.0)"),
    ("min_lr", "--lr-decay-style constant --min-lr 1e-5", "under lr_decay_style(constant)"),
    (
        "decoupled_min_lr",
        "--lr-decay-style constant --decoupled-lr 1e-3 --decoupled-min-lr 1e-5",
        "under lr_decay_style(constant)",
    ),
    ("lr_decay_iters", "--lr-decay-style constant --lr-decay-iters 50", "under lr_decay_style(constant) without a"),
    (
        "use_checkpoint_opt_param_scheduler",
        "--load . --finetune --use-checkpoint-opt_param-scheduler",
        "with finetune; drop it or drop --finetune",
    ),
    ("account_for_loss_in_pipeline_split", "--account-for-loss-in-pipeline-split", "under pipeline_model_parallel_si"),
    ("lr_wsd_decay_style", "--lr-wsd-decay-style linear", "under lr_decay_style(linear)"),
    ("eod_mask_loss", "--eod-mask-loss", "with mock_data"),
    ("reset_attention_mask", "--reset-attention-mask", "with mock_data"),
    ("merge_file", "--merge-file a", "with mock_data and no tokenizer; drop it or give --vocab-file"),
    (
        "tokenizer_special_tokens",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-special-tokens a",
        "with mock_data and no tokenizer; drop it or give --tokenizer-model",
    ),
]


@pytest.mark.parametrize(("name", "flags", "mode"), IGNORED)
def test_a_setting_that_its_mode_does_not_read_is_refused(name: str, flags: str, mode: str) -> None:
    (problem,) = problems(parse(flags), 1)
    assert problem.startswith(f"{name}(") and f") has no effect {mode}" in problem


@pytest.mark.parametrize(("name", "flags", "mode"), UNREAD)
def test_a_setting_that_megatron_does_not_read_either_is_a_note(name: str, flags: str, mode: str) -> None:
    """The run is that without the flag."""
    line = parse_command_line([*MOCK, *flags.split()])
    (note,) = [note for note in line.notes if note.startswith(f"{name}(")]
    assert f") has no effect {mode}" in note
    assert line.config.settings[name] == Config().settings[name]
    assert problems(line.config, 1) == []


def test_a_files_recipe_is_refused_beside_bf16() -> None:
    config = parse("")
    (problem,) = problems(replace(config, precision=PrecisionConfig(precision="bf16", fp8_recipe="blockwise")), 1)
    assert problem.startswith("fp8_recipe(blockwise) has no effect under precision(bf16)")


def test_sequence_parallelism_needs_ranks() -> None:
    """A command line turns it off instead."""
    config = parse("")
    (problem,) = problems(replace(config, parallel=ParallelConfig(sequence_parallel=True)), 1)
    assert "tensor_model_parallel_size(1) has one rank; raise it or pass --no-sequence-parallel" in problem


def test_a_tokenizers_model_is_not_read_by_the_null_tokenizer() -> None:
    data = "--data-path a --vocab-size 512 --tokenizer-type NullTokenizer --tokenizer-model here"
    line = parse_command_line(data.split())
    assert line.notes[0].startswith("tokenizer_model(here) has no effect under tokenizer_type(NullTokenizer)")
    assert line.config.data.tokenizer_model is None and problems(line.config, 1) == []


def test_a_blend_in_quotes_is_told() -> None:
    config = parse_config(["--tokenizer-model", "t", "--data-path", "0.3 a 0.7 b"])
    assert problems(config, 1) == ["data_path(0.3 a 0.7 b) is one word with spaces; drop the quotes around the blend"]
    assert problems(parse_config(["--tokenizer-model", "t", "--data-path", "a folder/b"]), 1) == []


@pytest.mark.parametrize("words", ["nan a 1 b", "0 a 0 b", "inf a 1 b", "1 a 2", "-1 a 2 b", "1e308 a 1e308 b"])
def test_a_blend_has_finite_weights(words: str) -> None:
    (problem,) = problems(parse("", data=f"--data-path {words} --vocab-size 64 --tokenizer-type NullTokenizer"), 1)
    assert problem.startswith(f"data_path({words}) is not a blend; give weight prefix weight prefix …, with finite")


@pytest.mark.parametrize("split", ["nan,1,1", "inf,1,0", "1e308,1e308,0", "\uff11,1,0", "1_0,1,0", "9,1,0,0", "9,-1,0"])
def test_a_split_has_finite_weights(split: str) -> None:
    (problem,) = problems(parse(f"--split {split}"), 1)
    assert problem.startswith(f"split({split}) is not three weights")


def test_transformer_engines_layers_stay_whole() -> None:
    found = problems(
        parse("--precision te --cpu-offloading-num-layers 2 --loss-chunk-size 16 --mlp-chunks-for-training 2"), 1
    )
    for setting in ("cpu_offloading_num_layers(2)", "loss_chunk_size(16)", "mlp_chunks_for_training(2)"):
        assert any(line.startswith(setting) and "choose precision fp8 or bf16" in line for line in found)
