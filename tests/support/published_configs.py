"""Example configs of other trainers, written anew with the keys that their published examples have.

NAME -> (project, file name, text). Names of models and data are those that the examples use; nothing is downloaded.
"""

from __future__ import annotations

_LLAMA_FACTORY = {
    "llama3_lora_sft": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
""",
    "llama3_lora_dpo": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
pref_loss: sigmoid
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
output_dir: saves/llama3-8b/lora/dpo
logging_steps: 10
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
""",
    "llama3_lora_orpo": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
finetuning_type: lora
lora_target: all
pref_beta: 0.1
pref_loss: orpo
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/orpo
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
bf16: true
""",
    "llama3_lora_kto": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: kto
finetuning_type: lora
lora_target: all
pref_beta: 0.1
kto_chosen_weight: 1.5
dataset: kto_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/kto
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
""",
    "llama3_lora_pretrain": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: pt
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: c4_demo
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/pretrain
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
""",
    "llama3_full_reward": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: rm
finetuning_type: full
deepspeed: examples/deepspeed/ds_z2_config.json
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/full/reward
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-5
num_train_epochs: 3.0
bf16: true
""",
    "llama3_full_sft": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
flash_attn: fa2
enable_liger_kernel: true
packing: true
neat_packing: true
output_dir: saves/llama3-8b/full/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
report_to: [wandb, swanlab]
run_name: llama3-full
""",
    "llama3_qlora_sft": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
quantization_bit: 4
quantization_method: bnb
double_quantization: false
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: identity
template: llama3
cutoff_len: 1024
output_dir: saves/llama3-8b/qlora/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
""",
}
_AXOLOTL = {
    "lora_8b": """
base_model: NousResearch/Meta-Llama-3-8B
hub_model_id: username/custom_model_name
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
""",
    "qlora_8b": """
base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: true
strict: false
datasets:
  - path: aaditya/alpaca_subset_1
    type: alpaca
val_set_size: 0
output_dir: ./outputs/qlora-out
adapter: qlora
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: false
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
logging_steps: 1
sdp_attention: true
warmup_steps: 10
weight_decay: 0.0
""",
    "fft_8b": """
base_model: NousResearch/Meta-Llama-3.1-8B
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
strict: false
chat_template: llama3
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
dataset_prepared_path: last_run_prepared
val_set_size: 0.02
output_dir: ./outputs/out
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
logging_steps: 1
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
deepspeed: deepspeed_configs/zero2.json
weight_decay: 0.0
""",
    "dpo_8b": """
base_model: meta-llama/Meta-Llama-3-8B-Instruct
chat_template: llama3
rl: dpo
dpo_beta: 0.2
datasets:
  - path: fozziethebeat/alpaca_messages_2k_dpo_test
    type: chat_template.default
    field_messages: conversation
    field_chosen: chosen
    field_rejected: rejected
val_set_size: 0.05
output_dir: ./outputs/dpo-out
sequence_len: 4096
sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
logging_steps: 1
warmup_ratio: 0.1
""",
    "kto_8b": """
base_model: meta-llama/Llama-3.2-1B
rl: kto
rl_beta: 0.5
kto_desirable_weight: 0.2
datasets:
  - path: argilla/ultrafeedback-binarized-preferences-cleaned-kto
    type: llama3.ultra
    split: train
val_set_size: 0.0
output_dir: ./outputs/kto
remove_unused_columns: false
adapter: qlora
load_in_4bit: true
sequence_len: 2048
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 1
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_ratio: 0.1
""",
    "pretrain_8b": """
base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: data/docs.jsonl
    type: completion
    field: body
val_set_size: 100
output_dir: ./outputs/pretrain
sequence_len: 8192
sample_packing: true
gradient_accumulation_steps: 8
micro_batch_size: 1
max_steps: 500
optimizer: adamw_torch_fused
adam_beta2: 0.95
lr_scheduler: constant_with_warmup
learning_rate: 0.00003
bf16: true
gradient_checkpointing: true
eval_steps: 100
save_steps: 100
save_total_limit: 2
warmup_steps: 50
wandb_project: pretraining
wandb_name: docs
wandb_mode: offline
""",
    "tp_8b": """
base_model: meta-llama/Llama-3.1-8B
datasets:
  - path: data/chats.jsonl
    type: chat_template
output_dir: ./outputs/tp
tensor_parallel_size: 2
context_parallel_size: 2
sequence_len: 8192
sample_packing: false
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
bf16: true
gradient_checkpointing: true
""",
}
_TRL = {
    "sft_full": """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-5
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eos_token: <|im_end|>
eval_strategy: steps
eval_steps: 100
logging_steps: 25
output_dir: Qwen2-0.5B-SFT
push_to_hub: true
""",
    "sft_lora": """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eval_strategy: "no"
use_peft: true
lora_r: 32
lora_alpha: 16
output_dir: Qwen2-0.5B-SFT
""",
    "dpo_full": """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
learning_rate: 5.0e-7
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 1024
max_prompt_length: 512
beta: 0.1
loss_type: sigmoid
eval_strategy: steps
eval_steps: 50
output_dir: Qwen2-0.5B-DPO
""",
    "kto": """
model_name_or_path: trl-lib/qwen1.5-1.8b-sft
dataset_name: trl-lib/kto-mix-14k
per_device_train_batch_size: 16
gradient_accumulation_steps: 1
num_train_epochs: 1
learning_rate: 5.0e-7
lr_scheduler_type: cosine
desirable_weight: 1.0
undesirable_weight: 1.2
beta: 0.1
warmup_ratio: 0.1
bf16: true
logging_steps: 10
output_dir: kto-aligned-model
report_to: [trackio]
""",
    "reward": """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
output_dir: Qwen2-0.5B-Reward
per_device_train_batch_size: 8
num_train_epochs: 1
gradient_checkpointing: true
learning_rate: 1.0e-5
center_rewards_coefficient: 0.01
max_length: 2048
""",
    "cpo_simpo.sh": """
trl cpo --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dataset_name trl-lib/ultrafeedback_binarized \\
    --loss_type simpo --cpo_alpha 0.5 --beta 2.0 --simpo_gamma 0.5 --learning_rate 8e-6 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_steps 1000 --bf16 \\
    --output_dir simpo --use_peft --lora_r 16 --lora_alpha 16
""",
}
_MS_SWIFT = {
    "lora_sft.sh": """
# 22GB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --train_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
              'AI-ModelScope/alpaca-gpt4-data-en#500' \\
              'swift/self-cognition#500' \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 1 \\
    --per_device_eval_batch_size 1 \\
    --learning_rate 1e-4 \\
    --lora_rank 8 \\
    --lora_alpha 32 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps 16 \\
    --eval_steps 50 \\
    --save_steps 50 \\
    --save_total_limit 2 \\
    --logging_steps 5 \\
    --max_length 2048 \\
    --output_dir output \\
    --system 'You are a helpful assistant.' \\
    --warmup_ratio 0.05 \\
    --dataloader_num_workers 4 \\
    --model_author swift \\
    --model_name swift-robot
""",
    "full_sft.sh": """
NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct --train_type full --dataset swift/self-cognition#1000 --torch_dtype bfloat16 \\
    --num_train_epochs 1 --per_device_train_batch_size 1 --learning_rate 1e-5 --gradient_accumulation_steps 16 \\
    --split_dataset_ratio 0.01 --eval_steps 100 --save_steps 100 --save_total_limit 2 --max_length 2048 \\
    --output_dir output --warmup_ratio 0.05 --deepspeed zero3 --attn_impl flash_attn --packing true \\
    --use_liger_kernel true
""",
    "qlora.yaml": """
model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
dataset: [AI-ModelScope/alpaca-gpt4-data-en#500]
quant_bits: 4
bnb_4bit_compute_dtype: bfloat16
bnb_4bit_quant_type: nf4
quant_method: bnb
torch_dtype: bfloat16
per_device_train_batch_size: 1
learning_rate: 1e-4
lora_rank: 8
lora_alpha: 32
target_modules: all-linear
gradient_accumulation_steps: 16
max_length: 2048
output_dir: output
""",
    "dpo.sh": """
swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --train_type lora \\
    --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji --torch_dtype bfloat16 --num_train_epochs 1 \\
    --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear \\
    --gradient_accumulation_steps 16 --max_length 2048 --output_dir output --warmup_ratio 0.05 --rpo_alpha 0.1 \\
    --beta 0.1 --deepspeed zero2
""",
    "pretrain.sh": """
swift pt --model Qwen/Qwen2.5-7B --train_type full --dataset data/wiki.jsonl --torch_dtype bfloat16 --max_steps 1000 \\
    --per_device_train_batch_size 1 --learning_rate 1e-5 --gradient_accumulation_steps 8 --max_length 8192 \\
    --packing true --deepspeed zero3_offload --output_dir output
""",
    "kto.sh": """
swift rlhf --rlhf_type kto --model Qwen/Qwen2.5-7B-Instruct --train_type full --dataset data/kto.jsonl#10000 \\
    --torch_dtype bfloat16 --learning_rate 5e-7 --beta 0.1 --desirable_weight 1.0 --undesirable_weight 1.0 \\
    --gradient_accumulation_steps 4 --max_length 4096 --output_dir output --save_only_model true
""",
}
_PADDLENLP = {
    "sft_argument.json": """
{"model_name_or_path": "meta-llama/Meta-Llama-3-8B", "dataset_name_or_path": "./data",
 "output_dir": "./checkpoints/sft_ckpts", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
 "per_device_eval_batch_size": 8, "eval_accumulation_steps": 16, "num_train_epochs": 3, "learning_rate": 3e-05,
 "warmup_steps": 30, "logging_steps": 1, "evaluation_strategy": "epoch", "save_strategy": "epoch", "src_length": 1024,
 "max_length": 2048, "bf16": true, "fp16_opt_level": "O2", "do_train": true, "do_eval": true, "disable_tqdm": true,
 "load_best_model_at_end": true, "eval_with_do_generation": false, "metric_for_best_model": "accuracy",
 "recompute": false, "save_total_limit": 1, "tensor_parallel_degree": 4, "pipeline_parallel_degree": 2,
 "pipeline_parallel_config": "disable_p2p_cache_shape", "sharding": "stage1", "zero_padding": false,
 "unified_checkpoint": true, "use_flash_attention": true}
""",
    "lora_argument.json": """
{"model_name_or_path": "meta-llama/Meta-Llama-3-8B", "dataset_name_or_path": "./data",
 "output_dir": "./checkpoints/lora_ckpts", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
 "num_train_epochs": 3, "learning_rate": 3e-04, "warmup_steps": 30, "logging_steps": 1,
 "evaluation_strategy": "epoch", "save_strategy": "epoch", "src_length": 1024, "max_length": 2048, "bf16": true,
 "fp16_opt_level": "O2", "do_train": true, "do_eval": true, "recompute": true, "save_total_limit": 1,
 "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "lora": true, "lora_rank": 8, "zero_padding": true,
 "unified_checkpoint": true, "use_flash_attention": true}
""",
    "dpo_argument.json": """
{"model_name_or_path": "meta-llama/Meta-Llama-3-8B", "train_dataset_path": "./data/train.jsonl",
 "dev_dataset_path": "./data/dev.jsonl", "output_dir": "./checkpoints/dpo_ckpts", "per_device_train_batch_size": 1,
 "gradient_accumulation_steps": 8, "num_train_epochs": 1, "max_steps": 100, "learning_rate": 1e-06,
 "warmup_steps": 10, "logging_steps": 1, "evaluation_strategy": "steps", "save_strategy": "steps", "eval_steps": 100,
 "save_steps": 500, "bf16": true, "fp16_opt_level": "O2", "do_train": true, "do_eval": true, "recompute": true,
 "tensor_parallel_degree": 4, "sharding_parallel_degree": 1, "sharding": "stage1", "use_flash_attention": true,
 "max_seq_len": 2048, "beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0, "unified_checkpoint": true}
""",
    "pretrain_argument.json": """
{"model_name_or_path": "meta-llama/Meta-Llama-3-8B", "input_dir": "./data/corpus",
 "output_dir": "./checkpoints/pretrain",
 "per_device_train_batch_size": 1, "gradient_accumulation_steps": 32, "tensor_parallel_degree": 2,
 "pipeline_parallel_degree": 4, "sharding": "stage1", "max_seq_length": 4096, "learning_rate": 3e-05,
 "min_learning_rate": 3e-06, "warmup_steps": 30, "logging_steps": 1, "max_steps": 10000, "save_steps": 5000,
 "weight_decay": 0.01, "bf16": true, "fp16_opt_level": "O2", "warmup_ratio": 0.01, "max_grad_norm": 1.0,
 "sequence_parallel": true, "use_flash_attention": true, "use_fused_rms_norm": true, "recompute": true,
 "recompute_granularity": "full", "save_total_limit": 2, "do_train": true, "do_eval": false,
 "optim": "adamw_16bit_moment"}
""",
}


def _name(configs: dict[str, str], project: str) -> dict[str, tuple[str, str, str]]:
    return {
        f"{project}/{name}": (project, name if "." in name else f"{name}.yaml", text) for name, text in configs.items()
    }


CONFIGS = (
    _name(_LLAMA_FACTORY, "llama-factory") | _name(_AXOLOTL, "axolotl") | _name(_TRL, "trl")
    | _name(_MS_SWIFT, "ms-swift") | _name(_PADDLENLP, "paddlenlp")
)  # fmt: skip
