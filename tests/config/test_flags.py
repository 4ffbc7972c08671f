"""Flags of existing GPT launch scripts.

Each is a setting, accepted with a notice, or refused with a reason.
"""

import re

import pytest

from megatron.config import parse_args
from megatron.errors import ConfigError

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 100 --lr 0.001 --vocab-size 100 --mock-data --save out "
    "--load in"
)
WORLD_SIZE = 4

# A flag, its words, and the setting of the same name with the same value, unless `=> name value`
# says otherwise.
SETTINGS = """
--num-layers 4
--hidden-size 128
--ffn-hidden-size 100
--num-attention-heads 8
--kv-channels 12
--num-key-value-heads 2
--num-query-groups 2 --group-query-attention => num_key_value_heads 2
--seq-length 32
--max-position-embeddings 128
--make-vocab-size-divisible-by 64
--layernorm-epsilon 1e-06
--normalization rmsnorm
--normalization RMSNorm => normalization rmsnorm
--normalization LayerNorm => normalization layernorm
--apply-layernorm-1p
--swiglu
--geglu
--squared-relu
--exact-gelu
--openai-gelu
--norm-position both
--embed-layernorm => embedding_layernorm True
--qk-layernorm
--qk-layernorm-over all
--qk-l2-norm
--attention-output-gate
--softmax-type off-by-one
--multi-latent-attention
--q-lora-rank 24
--kv-lora-rank 16
--qk-head-dim 96
--qk-pos-emb-head-dim 16
--v-head-dim 32
--softmax-type learnable
--add-qkv-bias
--add-qkv-bias-linear => add_qkv_bias True
--parallel-residual two_norms
--final-logit-softcapping 30.0
--logit-z-loss 0.0001
--decoupled-lr 0.1
--decoupled-min-lr 0.0001
--goldfish-loss
--goldfish-k 20
--goldfish-h 10
--ademamix-alpha 5.0
--ademamix-beta3 0.99
--ademamix-alpha-warmup 1000
--ademamix-beta3-warmup 1000
--mtp-num-layers 1
--mtp-loss-scaling-factor 0.3
--z-loss-strength 0.0001 => logit_z_loss 0.0001
--embedding-scale 8.0
--input-embeddings-multiplier 8.0 => embedding_scale 8.0
--rotary-interleaved
--rotary-local-base 20000.0
--no-rope-freq 4 => no_rope_freq (4,)
--no-rope-freq [0,1]*4 => no_rope_freq (0,1,0,1,0,1,0,1)
--rope-scaling linear
--use-rope-scaling => rope_scaling llama3
--rope-scaling-factor 4.0
--rotary-scaling-factor 4.0 => rope_scaling_factor 4.0
--rope-original-positions 4096
--original-max-position-embeddings 4096 => rope_original_positions 4096
--rope-low-freq-factor 2.0
--rope-high-freq-factor 8.0
--yarn-beta-fast 16.0
--yarn-beta-slow 2.0
--yarn-attention-factor 1.5
--mscale 0.7 => yarn_mscale 0.7
--yarn-mscale 0.7
--mscale-all-dim 0.5 => yarn_mscale_all_dim 0.5
--yarn-mscale-all-dim 0.5
--no-yarn-correction-range-round-to-int => yarn_truncate False
--clip-qkv 8.0
--residual-multiplier 0.25
--logits-scaling 8.0
--attention-bias qkv
--disable-bias-linear => add_bias_linear False
--untie-embeddings-and-output-weights
--use-rotary-position-embeddings => position_embedding_type rope
--position-embedding-type alibi
--position-embedding-type rope
--position-embedding-type none
--position-embedding-type learned_absolute
--rotary-percent 0.5
--rotary-position-embeddings-theta 500000 => rotary_base 500000.0
--rotary-base 500000 => rotary_base 500000.0
--no-position-embedding => position_embedding_type none
--apply-residual-connection-post-layernorm
--no-query-key-layer-scaling => apply_query_key_layer_scaling False
--attention-softmax-in-fp32
--fp32-residual-connection
--attention-dropout 0.25
--hidden-dropout 0.0
--init-method-std 0.006
--init-method-xavier-uniform
--use-mup
--mup => use_mup True
--mup-base-hidden-size 32
--mup-base-num-layers 2
--mup-base-ffn-hidden-size 96
--mup-base-head-dim 8
--mup-base-num-attention-heads 3
--mup-base-num-key-value-heads 2
--mup-base-num-query-groups 2 => mup_base_num_key_value_heads 2
--mup-embedding-mult 10.0
--mup-output-mult 0.5
--mup-attn-scale-power 0.5
--tensor-model-parallel-size 2
--pipeline-model-parallel-size 2
--num-layers-per-virtual-pipeline-stage 2
--context-parallel-size 2
--ds-sequence-parallel-size 2 => context_parallel_size 2
--ds-sequence-parallel-size 4 => cp_comm_type a2a
--cp-comm-type a2a
--hierarchical-context-parallel-sizes 2 2 => hierarchical_context_parallel_sizes (2,2)
--expert-model-parallel-size 1
--moe-expert-parallel-size 1 => expert_model_parallel_size 1
--expert-tensor-parallel-size 1
--num-experts 8
--moe-layer-freq 2 => moe_layer_freq (2,)
--moe-layer-freq ([0]+[1]*3)*2 => moe_layer_freq (0,1,1,1,0,1,1,1)
--moe-ffn-hidden-size 64
--moe-shared-expert-intermediate-size 64
--moe-shared-expert-gate
--moe-shared-expert-overlap
--moe-router-topk 3
--topk 1 => moe_router_topk 1
--moe-router-score-function sigmoid
--moe-router-pre-softmax
--moe-router-topk-scaling-factor 2.5
--moe-router-num-groups 4
--moe-router-group-topk 2
--moe-router-group-top-scores 1
--moe-router-load-balancing-type aux_loss seq_aux_loss => moe_router_load_balancing_type (aux_loss,seq_aux_loss)
--moe-aux-loss-coeff 0.01 => moe_aux_loss_coeff (0.01,)
--moe-loss-coeff 0.1 => moe_aux_loss_coeff (0.1,)
--moe-z-loss-coeff 0.001
--moe-router-enable-expert-bias
--moe-router-bias-update-rate 0.01
--moe-input-jitter-eps 0.1
--moe-expert-capacity-factor 1.5
--moe-train-capacity-factor 1.25 => moe_expert_capacity_factor 1.25
--moe-eval-capacity-factor 2.0
--moe-token-drop-policy position
--moe-per-layer-logging
--sequence-parallel
--enable-zbh1-pipeline => pipeline_schedule zb-h1
--pipeline-schedule v-half
--pipeline-parallel-schedule DualPipeV => pipeline_schedule dualpipev
--distributed-backend gloo
--distributed-backend nccl
--distributed-timeout-minutes 30 => distributed_timeout_minutes 30.0
--local_rank 3
--local-rank 3
--no-async-tensor-model-parallel-allreduce => async_tensor_model_parallel_allreduce False
--tp-comm-overlap
--tp-comm-overlap-chunks 8
--master-addr 10.0.0.1
--rank-order pp-dp-tp
--use-tp-pp-dp-mapping => rank_order tp-pp-dp
--device-order 1,0 => device_order (1,0)
--cluster frontier
--use-distributed-optimizer => zero_stage 1
--overlap-grad-reduce
--no-overlap-grad-reduce => overlap_grad_reduce False
--overlap-param-gather
--no-overlap-param-gather => overlap_param_gather False
--deepspeed
--zero-stage 0
--zero-stage 1.0 => zero_stage 1
--zero-stage 3
--zero-shard-size 1
--zero-state-shard-size 1
--use-torch-fsdp2 => zero_stage 3
--zero-reduce-bucket-size 500000000
--zero-allgather-bucket-size 1000000
--checkpoint-activations => recompute_granularity full
--checkpoint-num-layers 2 => recompute_num_layers 2
--recompute-activations => recompute_granularity selective
--recompute-granularity full
--recompute-method block
--recompute-num-layers 2
--micro-batch-size 2
--global-batch-size 32
--rampup-batch-size 4 4 100 => rampup_batch_size (4,4,100)
--train-iters 7
--train-samples 700
--train-tokens 70000
--exit-interval 5
--exit-duration-in-mins 110 => exit_duration_in_mins 110.0
--exit-signal-handler
--log-interval 1
--seed 4321
--check-weight-hash-across-dp-replicas-interval 20
--skip-train
--kill-switch-file stop
--kill-switch-path stop => kill_switch_file stop
--skip-train-iteration-range 3-4 => skip_train_iteration_range ('3-4',)
--iterations-to-skip 3 => skip_train_iteration_range ('3',)
--train-iters-to-skip 3 4 => skip_train_iteration_range ('3','4')
--encoder-seq-length 32 => seq_length 32
--max-absolute-position-embeddings 128 => max_position_embeddings 128
--position-embedding-type absolute => position_embedding_type learned_absolute
--position-embedding-type rotary => position_embedding_type rope
--tokenizer-name-or-path t => tokenizer_model t
--override-lr-scheduler => override_opt_param_scheduler True
--use-checkpoint-lr-scheduler => use_checkpoint_opt_param_scheduler True
--calculate-per-token-loss
--optimizer sgd
--optimizer adamw => optimizer adam
--lr 0.0003
--min-lr 0.0001
--lr-warmup-init 0.0001
--lr-decay-style constant
--lr-decay-style inverse-square-root
--lr-decay-style cosine
--lr-decay-iters 50
--lr-decay-samples 500
--lr-decay-tokens 50000
--lr-warmup-fraction 0.01
--lr-warmup-iters 10
--lr-warmup-samples 10
--lr-warmup-tokens 100
--lr-wsd-decay-style minus_sqrt
--lr-wsd-decay-style 1-sqrt => lr_wsd_decay_style minus_sqrt
--lr-wsd-decay-iters 10
--lr-wsd-decay-samples 10
--weight-decay 0.1
--start-weight-decay 0.0
--end-weight-decay 0.5
--weight-decay-incr-style linear
--clip-grad 0.0
--adam-beta1 0.8
--adam-beta2 0.95
--adam-eps 1e-06
--sgd-momentum 0.5
--override-opt_param-scheduler
--override-opt-param-scheduler => override_opt_param_scheduler True
--use-checkpoint-opt_param-scheduler
--fp16
--bf16
--loss-scale 128 => loss_scale 128.0
--initial-loss-scale 4096 => initial_loss_scale 4096.0
--min-loss-scale 2 => min_loss_scale 2.0
--loss-scale-window 500
--hysteresis 4
--fp16-lm-cross-entropy
--accumulate-allreduce-grads-in-fp32 => main_grads_dtype fp32
--use-flash-attn
--use-flash-attn-v2 => use_flash_attn True
--use-flash-attn-triton => use_flash_attn True
--attention-backend unfused
--no-masked-softmax-fusion => masked_softmax_fusion False
--no-bias-gelu-fusion => bias_gelu_fusion False
--no-bias-swiglu-fusion => bias_gelu_fusion False
--no-bias-dropout-fusion => bias_dropout_fusion False
--no-gradient-accumulation-fusion => gradient_accumulation_fusion False
--no-persist-layer-norm => persist_layer_norm False
--no-rope-fusion => rope_fusion False
--cross-entropy-loss-fusion
--no-cross-entropy-loss-fusion => cross_entropy_loss_fusion False
--cross-entropy-chunk-tokens 256
--norm-implementation apex
--optimizer-implementation torch
--cpu-offload
--cpu-optimizer => cpu_offload True
--optimizer-cpu-offload => cpu_offload True
--data-path corpus => data_path ('corpus',)
--data-path 0.3 a 0.7 b => data_path ('0.3','a','0.7','b')
--split 90,10,0
--train-data-path a => train_data_path ('a',)
--valid-data-path a => valid_data_path ('a',)
--test-data-path a => test_data_path ('a',)
--blend-schedule 0:a,2K:b
--data-order megatron
--max-epochs 4.5
--allow-data-changes seed files => allow_data_changes ('seed','files')
--data-cache-path cache
--data-file-list files.txt
--num-workers 0
--dataloader-type cyclic
--no-data-sharding => data_sharding False
--reset-position-ids
--reset-attention-mask
--eod-mask-loss
--no-mmap-bin-files => mmap_bin_files False
--train-data-exact-num-epochs 2 => train_data_exact_num_epochs 2
--stage-data-to /mnt/bb/$USER
--data-packing best-fit
--mock-data
--vocab-size 50257
--vocab-file vocab.json
--merge-file merges.txt
--tokenizer-type NullTokenizer
--tokenizer-model t.model
--tiktoken-pattern v2
--tiktoken-num-special-tokens 1000
--tiktoken-special-tokens <unk> <s> </s> => tiktoken_special_tokens (<unk>,<s>,</s>)
--vocab-extra-ids 10
--save somewhere
--save-interval 10
--no-save-optim
--no-save-rng
--load elsewhere
--load-tag global_step5
--no-load-optim
--no-load-rng
--finetune
--reset-iteration
--use-checkpoint-args
--exit-on-missing-checkpoint
--ckpt-format torch_dist
--eval-iters 0
--eval-interval 10
--tensorboard-dir tb
--tensorboard-log-interval 5
--tensorboard-queue-size 5
--log-params-norm
--log-num-zeros-in-grad
--timing-log-level 2
--timing-log-option all
--wandb-project p
--wandb-exp-name e
--wandb-save-dir d
--wandb-entity e
--wandb-name n => wandb_exp_name n
--wandb-project-name p => wandb_project p
--mlflow-tracking-uri sqlite:///m.db
--mlflow-experiment-name e
--mlflow-run-name r
--callback one:A two:B => callback ('one:A','two:B')
--profile pt-full
--profile => profile pt
--profile-step-start 3
--profile-step-end 20
--profile-ranks 0 1 => profile_ranks (0,1)
--trace-dir traces
--path-for-traces traces => trace_dir traces
--eval-first => eval_at_start True
--record-memory-history
--memory-snapshot-path s.pickle
--timeline-interval 50
--manual-gc
--manual-gc-interval 5
--metrics-file m.jsonl
--pipeline-layout 3,5
--encoder-num-layers 4 => num_layers 4
--rope-theta 500000 => rotary_base 500000.0
--rotary-theta 500000 => rotary_base 500000.0
--use-alibi-position-embeddings => position_embedding_type alibi
--activations-checkpoint-granularity selective => recompute_granularity selective
--activations-checkpoint-method block => recompute_method block
--activations-checkpoint-method uniform => recompute_granularity full
--activations-checkpoint-num-layers 2 => recompute_num_layers 2
--persistent-save-interval 10 => save_interval 10
--save-retain-interval 100 => keep_last 1
--load-iteration 100 => load_tag 100
--dist-ckpt-format torch_dist => ckpt_format torch_dist
--ckpt-format zarr => ckpt_format torch_dist
--tokenizer-file t.json => tokenizer_model t.json
--hf_tokenizer_path t => tokenizer_model t
--tokenizer-special-tokens <unk> <s> => tiktoken_special_tokens (<unk>,<s>)
--min-scale 2 => min_loss_scale 2.0
--ddp-bucket-size 40000000 => zero_reduce_bucket_size 40000000
--dataloader-inter-document-masking => reset_attention_mask True
--no-scaled-masked-softmax-fusion => masked_softmax_fusion False
--disable-te-fused-rope => rope_fusion False
--disable-async-tensor-model-parallel-allreduce => async_tensor_model_parallel_allreduce False
"""
# Accepted with a notice, at these values.
ACCEPTED = """
--mup-width-mult 2.0
--log-timers-to-tensorboard
--log-batch-size-to-tensorboard
--log-validation-ppl-to-tensorboard
--log-optimizer-states-to-tensorboard
--no-log-learnig-rate-to-tensorboard
--no-log-loss-scale-to-tensorboard
--disable-log-loss-scale-to-tensorboard
--log-memory-to-tensorboard
--log-world-size-to-tensorboard
--num-experts 1
--expert-interval 2
--mlp-type standard
--moe-min-capacity 4
--create-moe-param-group
--disable-moe-token-dropping
--no-pipeline-parallel
--enable-zbh1-exact-semantics
--DDP-impl local
--no-scatter-gather-tensors-in-pipeline
--overlap-p2p-communication
--use-cpu-initialization
--empty-unused-memory-level 2
--deepspeed
--zero-reduce-scatter
--zero-contigious-gradients
--remote-device none
--use-pin-memory
--cpu_torch_adam
--deepspeed-activation-checkpointing
--partition-activations
--contigious-checkpointing
--checkpoint-in-cpu
--synchronize-each-layer
--profile-backward
--distribute-checkpointed-activations
--distribute-saved-activations
--transformer-impl local
--transformer-impl transformer_engine
--data-impl mmap
--data-impl infer
--mmap-warmup
--return-data-index
--repeated-dataloader
--use-dataset-only False
--no-initialization
--no-barrier-with-level-1-timing
--kd-beta-ce 1
--kd-beta-ce 1.0
--group-query-attention
--use-mcore-models
--use-dist-ckpt
--universal-checkpoint
--pad-vocab-size-to 250880
--abort-on-unmet-fused-kernel-constraints
--sync-tp-duplicated-parameters
--use-mpi
--deepspeed_mpi
--use-contiguous-parameters-in-local-ddp
--valid-num-workers 0
--resume-dataloader
--log-level info
--log-level-replica error
--codecarbon-dir d
--use-pytorch-profiler
--check-for-nan-in-loss-and-grad
--no-check-for-nan-in-loss-and-grad
--pp-partition-method type:transformer
--log-throughput
--no-create-attention-mask-in-dataloader
--moe-grouped-gemm
--moe-token-dispatcher-type alltoall
--cross-entropy-fusion-impl te
--rotary-seq-len-interpolation-factor 1
--use-precision-aware-optimizer
--word-embedding-init-std 0.02
--fp8-margin 0
--fp8-interval 1
--fp8-amax-history-len 1024
--fp8-amax-compute-algo max
--ckpt-fully-parallel-save
--dist-ckpt-strictness log_all
--use-persistent-ckpt-worker
--otel-enabled
--no-one-logger
--vision-pretraining false
--num-classes 1000
--use_turbo_attention true
--spec none
"""
# Refused flags, and the word that the message must contain.
REFUSED = """
--num-experts 1 8 => one value
--mlp-type residual => standard
--cp-comm-type allgather => p2p
--DDP-impl FSDP => --zero-stage
--distributed-backend ccl => gloo
--distributed-backend hccl => gloo
--remote-device cpu => --zero-stage
--remote-device nvme => none
--data-parallel-random-init => remove
--embedding-weights-in-fp32 => fp32
--data-impl lazy => mmap
--tokenizer-type BertWordPieceLowerCase => HFTokenizer
--tokenizer-type BertWordPieceCase => HFTokenizer
--tokenizer-type MultimodalTokenizer => HFTokenizer
--train-doc-idx-path p => --data-cache-path
--train-sample-idx-path p => --data-cache-path
--train-shuffle-idx-path p => --data-cache-path
--use-dataset-only True => --skip-train
--no-load-lr-state => --override-opt_param-scheduler
--data-efficiency-curriculum-learning => remove
--random-ltd => remove
--mos => remove
--kd => remove
--load-teacher p => remove
--num-layers-teacher 2 => remove
--hidden-size-teacher 2 => remove
--num-attention-heads-teacher 2 => remove
--kd-beta-ce 0.5 => remove
--inference => trains
--ds-inference => trains
--use-tutel => remove
--batch-size 4 => --micro-batch-size
--warmup 0.01 => --lr-warmup-fraction
--model-parallel-size 2 => --tensor-model-parallel-size
--num-stages 2 => --pipeline-model-parallel-size
--pipe-parallel-size 2 => --pipeline-model-parallel-size
--train-data webtext => --data-path
--lazy-loader => --data-path
--cache-dir cache => --data-cache-path
--use-bnb-optimizer => adam
--fp8-format hybrid => --bf16
--use-z-loss => --logit-z-loss
--apply-wd-to-qk-layernorm => remove
--ds-sequence-parallel-fpdt => --context-parallel-size
--ds-sequence-parallel-fpdt-chunk-size 4096 => --context-parallel-size
--ds-sequence-parallel-fpdt-offloading => --context-parallel-size
--train-weighted-split-paths p => WEIGHT
--valid-weighted-split-paths p q => WEIGHT
--test-weighted-split-paths p q => --test-data-path
--train-weighted-split-paths-path no-file => no-file
--valid-weighted-split-paths-path no-file => no-file
--test-weighted-split-paths-path no-file => no-file
--data-args-path no-file => no-file
--per-split-data-args-path no-file => no-file
--norm-target-loss => remove
--loss-on-targets-only => remove
--reset-progress => --reset-iteration
--curriculum-learning => --rampup-batch-size
--eval-only true => --skip-train
--o-lora-rank 7 => --multi-latent-attention
--mtp-layer-type 2 => remove
--attention-head-type multigroup => --num-query-groups
--main-params-dtype fp16 => fp32
--muon-tp-mode blockwise => whole
--embedding-init-method-std 0.1 => --init-method-std
--full-validation => --eval-iters
--multiple-validation-sets => --valid-data-path
--cpu-offloading-num-layers 2 => --cpu-offload
--pretrained-checkpoint p => --finetune
--retro-add-retriever => remove
--perform-rl-step => remove
--bert-load p => remove
--mamba-head-dim 32 => remove
--spec a b => remove
--logits-load-dir p => remove
--inprocess-restart => --requeue
--use_turbo_attention maybe => value
--shuffle-sample-in-corpus => --data-path
--blend-sample-in-corpus => --data-path
--adjust-word-embedding-init => --init-method-std
--word-embedding-init-std 0.1 => --init-method-std
--lr_constant_plus_cooldown => WSD
--lr_constant_plus_cooldown_frac 0.2 => WSD
--use-mics => --zero-shard-size
--optimizer sophiag => adam
"""
# Flags of the upstream frameworks, 215 in all. Each must be in one of the lists above.
DOCUMENTED = """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-key-value-heads seq-length
max-position-embeddings make-vocab-size-divisible-by layernorm-epsilon normalization apply-layernorm-1p swiglu
squared-relu openai-gelu disable-bias-linear untie-embeddings-and-output-weights use-rotary-position-embeddings
rotary-percent rotary-position-embeddings-theta no-position-embedding apply-residual-connection-post-layernorm
no-query-key-layer-scaling attention-softmax-in-fp32 fp32-residual-connection attention-dropout hidden-dropout
init-method-std init-method-xavier-uniform num-experts expert-interval topk mlp-type moe-train-capacity-factor
moe-eval-capacity-factor moe-min-capacity moe-loss-coeff moe-expert-parallel-size create-moe-param-group
disable-moe-token-dropping
tensor-model-parallel-size pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage no-pipeline-parallel
sequence-parallel ds-sequence-parallel-size enable-zbh1-pipeline enable-zbh1-exact-semantics distributed-backend
distributed-timeout-minutes DDP-impl local_rank no-async-tensor-model-parallel-allreduce
no-scatter-gather-tensors-in-pipeline use-distributed-optimizer overlap-p2p-communication use-cpu-initialization
empty-unused-memory-level
deepspeed deepspeed_config zero-stage zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size
zero-allgather-bucket-size remote-device use-pin-memory cpu-optimizer cpu_torch_adam
deepspeed-activation-checkpointing partition-activations contigious-checkpointing checkpoint-in-cpu
synchronize-each-layer profile-backward universal-checkpoint
checkpoint-activations checkpoint-num-layers distribute-checkpointed-activations recompute-activations
recompute-granularity recompute-method recompute-num-layers distribute-saved-activations
micro-batch-size global-batch-size rampup-batch-size train-iters train-samples train-tokens exit-interval
exit-duration-in-mins exit-signal-handler log-interval seed data-parallel-random-init skip-train kill-switch-file
optimizer lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-decay-tokens lr-warmup-fraction lr-warmup-iters
lr-warmup-samples lr-warmup-tokens weight-decay start-weight-decay end-weight-decay weight-decay-incr-style clip-grad
adam-beta1 adam-beta2 adam-eps sgd-momentum override-opt_param-scheduler use-checkpoint-opt_param-scheduler
fp16 bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis fp16-lm-cross-entropy
accumulate-allreduce-grads-in-fp32 embedding-weights-in-fp32
use-flash-attn use-flash-attn-v2 use-flash-attn-triton no-masked-softmax-fusion no-bias-gelu-fusion
no-bias-dropout-fusion no-gradient-accumulation-fusion no-persist-layer-norm transformer-impl
data-path split train-data-path valid-data-path test-data-path data-cache-path data-impl mmap-warmup num-workers
dataloader-type no-data-sharding reset-position-ids reset-attention-mask eod-mask-loss vocab-size vocab-file merge-file
tokenizer-type tokenizer-model vocab-extra-ids train-data-exact-num-epochs return-data-index train-doc-idx-path
train-sample-idx-path train-shuffle-idx-path repeated-dataloader use-dataset-only
save save-interval no-save-optim no-save-rng load load-tag no-load-optim no-load-rng no-load-lr-state finetune
reset-iteration use-checkpoint-args exit-on-missing-checkpoint no-initialization
eval-iters eval-interval tensorboard-dir tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard
log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-optimizer-states-to-tensorboard
no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard log-memory-to-tensorboard
log-world-size-to-tensorboard log-params-norm log-num-zeros-in-grad timing-log-level timing-log-option
no-barrier-with-level-1-timing wandb-project wandb-exp-name wandb-save-dir profile
data-efficiency-curriculum-learning random-ltd mos kd load-teacher num-layers-teacher hidden-size-teacher
num-attention-heads-teacher kd-beta-ce inference ds-inference use-tutel batch-size
"""
# Names from Megatron-LM, from ports, and very old ones.
OTHER_NAMES = """
local-rank num-query-groups group-query-attention context-parallel-size expert-model-parallel-size
position-embedding-type rotary-base attention-backend use-mcore-models ckpt-format use-dist-ckpt overlap-grad-reduce
overlap-param-gather log-throughput manual-gc manual-gc-interval mock-data no-rope-fusion
no-create-attention-mask-in-dataloader no-mmap-bin-files calculate-per-token-loss cross-entropy-loss-fusion
moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff moe-grouped-gemm moe-token-dispatcher-type
decoupled-lr decoupled-min-lr lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples profile-step-start
profile-step-end master-addr data-file-list shuffle-sample-in-corpus blend-sample-in-corpus
adjust-word-embedding-init word-embedding-init-std train-iters-to-skip lr_constant_plus_cooldown
lr_constant_plus_cooldown_frac profile-ranks trace-dir use-mics activations-checkpoint-method warmup
model-parallel-size tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens
"""

# Flags, and what they need beside them to make sense; "-" takes one out of the base.
BESIDE = """
--qk-layernorm-over => --qk-layernorm
--data-packing --data-order --max-epochs => --mock-data - --data-path a
--blend-schedule => --mock-data -
--moe-layer-freq --moe-ffn-hidden-size --moe-aux-loss-coeff --moe-loss-coeff --moe-z-loss-coeff \
    --moe-input-jitter-eps --moe-expert-capacity-factor --moe-train-capacity-factor --moe-eval-capacity-factor \
    --moe-router-topk --moe-router-topk-scaling-factor --moe-router-pre-softmax --moe-router-score-function \
    --moe-router-bias-update-rate --moe-token-drop-policy --moe-per-layer-logging => --num-experts 8
--goldfish-k --goldfish-h => --goldfish-loss
--ademamix-alpha --ademamix-beta3 --ademamix-alpha-warmup --ademamix-beta3-warmup => --optimizer ademamix
--mtp-loss-scaling-factor => --mtp-num-layers 1 --position-embedding-type rope
--topk => --num-experts 8 --moe-router-pre-softmax
--moe-shared-expert-intermediate-size => --num-experts 8 --disable-bias-linear
--moe-shared-expert-gate --moe-shared-expert-overlap => --num-experts 8 --moe-shared-expert-intermediate-size \
    64 --disable-bias-linear
--moe-router-num-groups => --num-experts 8 --moe-router-group-topk 1
--moe-router-group-top-scores => --num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1
--moe-router-group-topk => --num-experts 8 --moe-router-num-groups 4
--moe-router-load-balancing-type => --num-experts 8 --moe-aux-loss-coeff 0.1 0.2
--moe-router-enable-expert-bias => --num-experts 8 --moe-router-score-function sigmoid
--mup-base-hidden-size --mup-base-num-layers --mup-base-ffn-hidden-size --mup-base-head-dim \
    --mup-base-num-attention-heads --mup-base-num-key-value-heads --mup-base-num-query-groups \
    --mup-embedding-mult --mup-output-mult --mup-attn-scale-power => --use-mup
--rotary-interleaved --rope-scaling --use-rope-scaling --no-rope-freq --mtp-num-layers => \
    --position-embedding-type rope
--rotary-local-base => --position-embedding-type rope --window-size 5
--rope-scaling-factor --rotary-scaling-factor => --position-embedding-type rope --rope-scaling linear
--rope-original-positions --yarn-beta-fast --yarn-beta-slow --yarn-attention-factor --mscale --yarn-mscale \
    --mscale-all-dim --yarn-mscale-all-dim --no-yarn-correction-range-round-to-int => --position-embedding-type \
    rope --rope-scaling yarn
--original-max-position-embeddings --rope-low-freq-factor --rope-high-freq-factor => --position-embedding-type \
    rope --rope-scaling llama3
--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim => --multi-latent-attention
--sequence-parallel --tp-comm-overlap => --tensor-model-parallel-size 2
--context-parallel-size --ds-sequence-parallel-size => --attention-dropout 0
--hierarchical-context-parallel-sizes => --attention-dropout 0 --context-parallel-size 4 --cp-comm-type a2a+p2p
--tp-comm-overlap-chunks => --tensor-model-parallel-size 2 --tp-comm-overlap
--enable-zbh1-pipeline --pipeline-schedule --pipeline-parallel-schedule --num-layers-per-virtual-pipeline-stage \
    --pipeline-layout => --pipeline-model-parallel-size 2
--encoder-seq-length => --seq-length -
--encoder-num-layers => --num-layers -
--activations-checkpoint-num-layers --recompute-method => --recompute-granularity full
--train-samples => --train-iters -
--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-samples => --train-iters - --train-samples 1000
--end-weight-decay --start-weight-decay => --weight-decay-incr-style cosine
--data-path --train-data-path --valid-data-path --test-data-path --data-file-list => --mock-data -
"""


def rows(text):
    """Return (flag, its words, the text after '=>') of each line."""
    out = []
    for line in text.strip().splitlines():
        left, _, rest = line.partition("=>")
        flag, *words = left.split()
        out.append((flag, words, rest.strip()))
    return out


def flags_of(text):
    options = re.split(r"\s+(?=--)", text.strip())
    return {flag: words for flag, *words in map(str.split, options)}


NEEDS = {
    flag: flags_of(needs)
    for flags, _, needs in (line.partition("=>") for line in BESIDE.strip().splitlines())
    for flag in flags.split()
}


def command(flag, words):
    beside = {**flags_of(BASE), **NEEDS.get(flag, {}), flag: words}
    return [w for k, v in beside.items() if v != ["-"] for w in (k, *v)]


def test_settings():
    for flag, words, meaning in rows(SETTINGS):
        config = parse_args(command(flag, words), WORLD_SIZE)
        notices = list(config.notices)
        name, _, text = meaning.partition(" ")
        name = name or flag.removeprefix("--").replace("-", "_")
        expected = (text or " ".join(words) or "True").replace("'", "").replace(" ", "")
        value = config.get(name)
        actual = str(value)
        if isinstance(value, tuple):
            actual = f"({','.join(map(str, value))}{',' if len(value) == 1 else ''})"
        assert actual == expected, (flag, words)
        assert config.origin(name) == "command line"
        assert not [
            n for n in notices if flag in n and "no effect" not in n and flag != "--deepspeed"
        ]


def test_accepted_with_one_line_that_says_why():
    plain = parse_args(command("--save", ["out"]), WORLD_SIZE)
    for flag, words, _ in rows(ACCEPTED):
        config = parse_args(command(flag, words), WORLD_SIZE)
        notices = list(config.notices)
        (notice,) = [n for n in notices if n.startswith(flag)]
        assert "\n" not in notice and len(notice.partition(":")[2]) > 10
        assert config.replace(deepspeed=None) == plain, (flag, words)


def test_refused_with_what_to_use_instead():
    for flag, words, instead in rows(REFUSED):
        with pytest.raises(ConfigError) as raised:
            parse_args(command(flag, words), WORLD_SIZE)
        text = str(raised.value)
        assert "1 problem:" in text and instead in text.partition(flag)[2], text


def test_every_documented_flag_is_tested_above():
    documented = DOCUMENTED.split()
    assert len(documented) == len(set(documented)) == 215
    tested = {flag for text in (SETTINGS, ACCEPTED, REFUSED) for flag, *_ in rows(text)}
    tested.add("--deepspeed_config")
    assert {f"--{name}" for name in (*documented, *OTHER_NAMES.split())} - tested == set()
