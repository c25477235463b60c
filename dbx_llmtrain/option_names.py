"""What other trainers call our options, and what they have that we do not offer, with the reason.

One table, read by the error for an unknown key, by the importer of other tools' configurations and
by the documentation. A line reads ``their name(s) -> our dotted path ; how the value differs`` or
``their name(s) -- why there is none``. Nested names are written with as many of their parts as it
takes to tell them apart (``zero_optimization.stage``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

HF, TRL, ACCELERATE, DEEPSPEED, NEMO, PEFT = (
    "Hugging Face",
    "TRL",
    "Accelerate",
    "DeepSpeed",
    "NeMo",
    "PEFT",
)

_HUGGING_FACE = """
num_train_epochs -> train.epochs
max_steps -> train.max_steps ; unset instead of -1
per_device_train_batch_size, per_gpu_train_batch_size -> train.micro_batch_size
gradient_accumulation_steps -> train.gradient_accumulation_steps
auto_find_batch_size -> train.micro_batch_size ; auto
per_device_eval_batch_size, per_gpu_eval_batch_size -> train.eval_micro_batch_size
learning_rate -> train.learning_rate
lr_scheduler_type -> train.schedule ; cosine, linear or constant
lr_scheduler_kwargs -> train.min_learning_rate ; the only knob of a schedule
warmup_steps -> train.warmup ; whole steps
warmup_ratio -> train.warmup ; a share of the run when below 1
optim, adafactor -> train.optimizer ; adamw
optim_args, optim_target_modules -- AdamW with train.betas and train.weight_decay is used
weight_decay -> train.weight_decay
adam_beta1, adam_beta2 -> train.betas ; both in one list
adam_epsilon -- it is AdamW's usual 1e-8
max_grad_norm -> train.max_grad_norm
label_smoothing_factor -- the loss is plain cross-entropy
neftune_noise_alpha -- embeddings get no noise
average_tokens_across_devices -- it is always so: every trained token weighs the same
bf16, fp16, fp16_opt_level, half_precision_backend, fp16_backend -> train.precision ; bf16 or fp32
tf32 -- set torch.backends in the cluster's init script; weights and sums are fp32
bf16_full_eval, fp16_full_eval -- held-out rows are evaluated in train.precision
gradient_checkpointing, activation_checkpointing -> model.gradient_checkpointing
gradient_checkpointing_kwargs, activation_checkpointing_kwargs -> model.gradient_checkpointing
torch_compile, torch_compile_backend, torch_compile_mode, torchdynamo -> model.compile
use_liger_kernel, liger_kernel_config -- the loss never holds all logits as it is
use_cache -- it is off in training
torch_empty_cache_steps -- the allocator's cache is kept
output_dir -> checkpoint.dir ; parent of the run folder
overwrite_output_dir -> checkpoint.resume ; never
logging_dir -> tracking.tensorboard ; logs and event files are in the run folder
logging_steps, logging_strategy, logging_first_step -> train.log_every
logging_nan_inf_filter -- a loss that is not finite is shown as it is
log_level, log_level_replica, log_on_each_node -> tracking.log_level ; of driver and ranks
disable_tqdm -> tracking.progress ; bar, lines or none
report_to -> tracking.tensorboard ; metrics always go to MLflow, and with true to TensorBoard
project, trackio_space_id, trackio_static_space_id, trackio_bucket_id -> tracking.experiment
run_name -> tracking.run_name
include_num_input_tokens_seen, include_tokens_per_second -- both are always reported
eval_strategy, evaluation_strategy, eval_steps -> train.eval_every ; steps
eval_delay, eval_on_start, do_eval -- it is evaluated before the first and after the last step
eval_accumulation_steps, prediction_loss_only, eval_do_concat_batches -- only the loss is kept
include_for_metrics, include_inputs_for_metrics, batch_eval_metrics -- only the loss is kept
eval_use_gather_object -- only sums travel between ranks
do_train, do_predict -- train() trains; generate from the exported folder
save_strategy, save_steps -> checkpoint.every ; steps, or never
save_total_limit -> checkpoint.keep_last
save_only_model, save_on_each_node, save_safetensors -- a checkpoint is whole and shared
load_best_model_at_end -> checkpoint.keep_best
metric_for_best_model -> checkpoint.metric
greater_is_better -> checkpoint.metric_mode
resume_from_checkpoint -> checkpoint.resume
ignore_data_skip, restore_callback_states_from_checkpoint -- a resumed run goes on where it was
enable_jit_checkpoint -> checkpoint.every
push_to_hub, push_to_hub_model_id, push_to_hub_organization, push_to_hub_token -- \
the exported folder can be uploaded with huggingface_hub
hub_token, hub_model_id, hub_strategy, hub_private_repo, hub_always_push, hub_revision -- \
the exported folder can be uploaded with huggingface_hub
seed, data_seed -> train.seed
full_determinism -- the order of rows is; set torch's switches in the cluster's init script
use_cpu, no_cuda, use_mps_device -> cluster.use_gpu
tpu_num_cores, tpu_metrics_debug -- TPUs are not supported
use_ipex, jit_mode_eval, past_index, mp_parameters, use_legacy_prediction_loop -- \
not used by language models of today
tp_size, parallelism_config -- tensor, pipeline and context parallelism are not supported
accelerator_config, dispatch_batches, split_batches -- every rank reads its own rows
dataloader_drop_last -- the last step of an epoch is short, no row is left out
dataloader_num_workers, dataloader_prefetch_factor, dataloader_persistent_workers -- \
prepared rows are mapped into memory
dataloader_pin_memory, dataloader_multiprocessing_context, dataloader_in_order -- \
prepared rows are mapped into memory
remove_unused_columns, label_names -> data.columns ; {our name: theirs}
group_by_length, length_column_name, train_sampling_strategy -> data.group_by_length
ddp_find_unused_parameters, ddp_bucket_cap_mb, ddp_broadcast_buffers, ddp_static_graph -- \
DDP needs no tuning for these models
ddp_backend -- nccl on GPUs, gloo on CPU
ddp_timeout -> cluster.stall_timeout
fsdp, fsdp_config, fsdp_min_num_params, fsdp_transformer_layer_cls_to_wrap -> parallel.kind ; fsdp
deepspeed -> parallel.config ; with parallel.kind=deepspeed
debug -> cluster.debug
skip_memory_metrics -- peak memory is always reported
local_rank, ray_scope -- ranks are numbered by the launcher
device_map -- every rank has one device; parallel.kind shards a model
max_memory, offload_folder -- every rank has one device; parallel.kind shards a model
_n_gpu -- DataParallel is not offered: every GPU has a rank of its own (parallel.kind)
attn_implementation -> model.attention
torch_dtype, dtype -> train.precision
pretrained_model_name_or_path, model_id, base_model -> model.source
early_stopping_patience, early_stopping_threshold -> train.early_stopping
max_train_samples, max_eval_samples -> data.train ; {path, max_rows}
train_file, validation_file -> data.train ; validation_file is data.eval
block_size -> data.max_length
"""

_TRL = """
model_name_or_path -> model.source
model_revision -> model.revision
trust_remote_code -> model.trust_remote_code
model_init_kwargs -> model.config
use_peft -> model.lora
lora_r -> model.lora.r
lora_alpha -> model.lora.alpha
lora_dropout -> model.lora.dropout
lora_target_modules -> model.lora.target_modules
lora_modules_to_save, lora_target_parameters, lora_task_type, use_rslora, use_dora -> model.lora
load_in_4bit -> model.load_in_4bit
load_in_8bit -- 4 bits (model.load_in_4bit) or full precision
bnb_4bit_quant_type, bnb_4bit_compute_dtype, use_bnb_nested_quant, bnb_4bit_quant_storage -- \
model.load_in_4bit uses nf4 with nested constants
dataset_name -> data.train
dataset_config, dataset_train_split, datasets -> data.train ; {path, name, split}
dataset_test_split -> data.eval
dataset_streaming -- rows are prepared once, by Spark
dataset_text_field -> data.columns ; {text: their name}
dataset_num_proc, dataset_batch_size, dataset_kwargs, chars_per_token -- Spark prepares the data
max_length, max_seq_length -> data.max_length
packing, packing_strategy, padding_free, eval_packing -> data.packing
pad_to_multiple_of, pad_token -- a batch is padded to its longest row, and pads weigh nothing
eos_token -- the template's own end of a turn is trained
completion_only_loss -> data.train_on ; completion
assistant_only_loss -> data.train_on ; assistant
chat_template_path -> data.chat_template
shuffle_dataset -> data.shuffle
formatting_func -> data.formatter
loss_type -- cross-entropy, the mean of trained tokens
activation_offloading -- activations stay on the device
gradient_checkpointing_use_reentrant -> model.gradient_checkpointing
ignore_bias_buffers -- DDP needs no tuning for these models
"""

_ACCELERATE = """
num_processes -> cluster.processes ; auto is one for every GPU
num_machines, machine_rank, main_process_ip, main_process_port -- Spark places the ranks
same_network, rdzv_backend, rdzv_conf, main_training_function, compute_environment -- \
Spark places the ranks
gpu_ids, enable_cpu_affinity -- Spark gives every rank its GPU
distributed_type -> parallel.kind ; NO: single, MULTI_GPU: ddp, FSDP: fsdp; later DEEPSPEED
multi_gpu, use_fsdp, use_deepspeed -> parallel.kind ; ddp or fsdp; later deepspeed
mixed_precision -> train.precision
downcast_bf16, tpu_env, tpu_use_cluster, tpu_use_sudo, tpu_name, tpu_zone -- TPUs are not supported
mpirun_config, mpirun_hostfile -- MPI is not used: Spark starts the ranks
megatron_lm_config -- tensor, pipeline and sequence parallelism are not supported
fp8_config, fp8_backend, fp8_format -- fp8 is not supported: train.precision
dynamo_config, dynamo_backend -> model.compile
deepspeed_config, deepspeed_config_file -> parallel.config
deepspeed_multinode_launcher, deepspeed_hostfile -- Spark starts the ranks
zero_stage -> parallel.stage
zero3_init_flag, zero3_save_16bit_model -- the export is always a whole Hugging Face folder
offload_optimizer_device -> parallel.offload_optimizer
offload_param_device -> parallel.offload_params
offload_optimizer_nvme_path, offload_param_nvme_path -> parallel.nvme_dir
gradient_clipping -> train.max_grad_norm
fsdp_version -- FSDP 2 (fully_shard)
fsdp_sharding_strategy, sharding_strategy, fsdp_reshard_after_forward, reshard_after_forward -> \
parallel.shard ; FULL_SHARD: full; later SHARD_GRAD_OP: grad_op, HYBRID_SHARD: hybrid
fsdp_offload_params, fsdp_cpu_offload, cpu_offload -> parallel.cpu_offload
fsdp_auto_wrap_policy, fsdp_min_num_params, auto_wrap_policy -- every block is sharded
fsdp_transformer_layer_cls_to_wrap -- every block is sharded
fsdp_activation_checkpointing -> model.gradient_checkpointing
fsdp_state_dict_type, state_dict_type -- checkpoints are sharded, the export is whole
fsdp_use_orig_params, fsdp_sync_module_states, fsdp_cpu_ram_efficient_loading -- it is always so
fsdp_backward_prefetch, fsdp_backward_prefetch_policy, fsdp_forward_prefetch -- FSDP 2 decides
fsdp_limit_all_gathers, limit_all_gathers -- FSDP 2 decides
even_batches, use_seedable_sampler -- the rows of a step depend on train.seed alone
log_with -- metrics go to MLflow
"""

_DEEPSPEED = """
train_batch_size -> train.global_batch_size
train_micro_batch_size_per_gpu -> train.micro_batch_size
gradient_accumulation_steps -> train.gradient_accumulation_steps
gradient_clipping -> train.max_grad_norm
bf16, fp16, bf16.enabled, fp16.enabled, torch_autocast -> train.precision
loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale -- \
bf16 needs no loss scale
data_types.grad_accum_dtype, communication_data_type -- gradients are summed in fp32
zero_optimization.stage -> parallel.stage
zero_optimization.offload_optimizer, offload_optimizer.device -> parallel.offload_optimizer
zero_optimization.offload_param, offload_param.device -> parallel.offload_params
offload_optimizer.nvme_path, offload_param.nvme_path -> parallel.nvme_dir
zero_optimization, overlap_comm, contiguous_gradients, reduce_bucket_size, reduce_scatter -> \
parallel.config
allgather_bucket_size, allgather_partitions, stage3_prefetch_bucket_size -> parallel.config
stage3_max_live_parameters, stage3_max_reuse_distance, sub_group_size -> parallel.config
stage3_param_persistence_threshold, zero_hpz_partition_size, aio -> parallel.config
stage3_gather_16bit_weights_on_model_save -- the export is always a whole Hugging Face folder
optimizer.type, optimizer -> train.optimizer
optimizer.params.lr -> train.learning_rate
optimizer.params.betas -> train.betas
optimizer.params.weight_decay -> train.weight_decay
optimizer.params.eps -- it is AdamW's usual 1e-8
scheduler.type, scheduler -> train.schedule
scheduler.params.warmup_num_steps -> train.warmup
scheduler.params.warmup_max_lr -> train.learning_rate
scheduler.params.warmup_min_lr -- the warm-up starts from zero
scheduler.params.total_num_steps -> train.max_steps
steps_per_print -> train.log_every
activation_checkpointing.partition_activations, cpu_checkpointing -> model.gradient_checkpointing
wall_clock_breakdown, flops_profiler, comms_logger -> train.profile
tensorboard -> tracking.tensorboard
wandb, comet, csv_monitor -- metrics go to MLflow
pipeline, tensor_parallel, autotp_size, sequence_parallel_size -- \
tensor, pipeline and sequence parallelism are not supported
curriculum_learning, data_efficiency -- rows come in the order of train.seed
progressive_layer_drop, sparse_attention, compression_training, eigenvalue, moe -- \
the model is trained as it is
elasticity -- the number of ranks is fixed during a run
autotuning -> train.micro_batch_size ; auto
zero_allow_untested_optimizer, zero_force_ds_cpu_optimizer -> parallel.config
"""

_NEMO = """
micro_batch_size -> train.micro_batch_size
global_batch_size -> train.global_batch_size
rampup_batch_size -- the batch size is the same in every step
max_epochs -> train.epochs
max_time -> train.max_time
val_check_interval, eval_interval -> train.eval_every
limit_val_batches, eval_iters -> train.eval_max_rows
log_every_n_steps, log_interval -> train.log_every
accumulate_grad_batches -> train.gradient_accumulation_steps
gradient_clip_val, clip_grad -> train.max_grad_norm
devices -> cluster.processes
num_nodes -- Spark's workers are the nodes
accelerator -> cluster.use_gpu
precision, params_dtype -> train.precision
strategy -> parallel.kind
tensor_model_parallel_size, tensor_parallel_size -- tensor parallelism is not supported: \
parallel.kind=fsdp shards a model
pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, pipeline_dtype -- \
pipeline parallelism is not supported: parallel.kind=fsdp shards a model
context_parallel_size, sequence_parallel -- sequence and context parallelism are not supported
expert_model_parallel_size, expert_tensor_parallel_size -- expert parallelism is not supported
use_distributed_optimizer, distributed_optimizer -> parallel.kind ; fsdp
optim.name -> train.optimizer
optim.lr, optim.max_lr -> train.learning_rate
optim.min_lr, sched.min_lr -> train.min_learning_rate
optim.betas, adam_beta -> train.betas
optim.sched.name, lr_decay_style -> train.schedule
sched.warmup_steps, lr_warmup_iters, lr_warmup_fraction, warmup_iters -> train.warmup
sched.constant_steps, lr_decay_iters, lr_wsd_decay_iters -> train.decay_steps
train_iters -> train.max_steps
seq_length, encoder_seq_length, max_position_embeddings -> data.max_length
train_ds.file_names, train_data_path, data_prefix, data_path -> data.train
validation_ds.file_names, validation_data_path -> data.eval
packed_sequence, packed_sequence_size, packed_sequence_specs -> data.packing
answer_only_loss -> data.train_on ; completion
prompt_template -> data.chat_template
truncation_field, truncation_method -> data.overflow
restore_from_path, hf_model_path, checkpoint_path -> model.source
tokenizer.library, tokenizer_name -> model.tokenizer
activations_checkpoint_granularity, activations_checkpoint_method, recompute_granularity -> \
model.gradient_checkpointing
fp8, fp8_margin, fp8_recipe, transformer_engine -- fp8 is not supported: train.precision
exp_dir, explicit_log_dir, save_dir -> checkpoint.dir
every_n_train_steps, save_interval -> checkpoint.every
save_top_k -> checkpoint.keep_best
monitor -> checkpoint.metric
resume_if_exists, load_dir -> checkpoint.resume
create_wandb_logger, wandb_logger_kwargs -- metrics go to MLflow
create_tensorboard_logger -> tracking.tensorboard
create_mlflow_logger, mlflow_logger_kwargs -> tracking.experiment
peft_scheme -> model.lora
nsys_profile -> train.profile
"""

_PEFT = """
r -> model.lora.r
lora_alpha -> model.lora.alpha
lora_dropout -> model.lora.dropout
target_modules -> model.lora.target_modules
modules_to_save, exclude_modules, layers_to_transform, layers_pattern, rank_pattern -> model.lora
alpha_pattern, init_lora_weights, use_rslora, use_dora, target_parameters, lora_bias -> model.lora
task_type, peft_type, inference_mode, fan_in_fan_out -- they follow from the model
"""


@dataclass(frozen=True)
class ForeignOption:
    """One option of another trainer.

    ``ours`` is the dotted path of our field, or ``None`` when there is none; ``note`` then says
    why, and otherwise how the value differs.
    """

    name: str
    source: str
    ours: str | None
    note: str = ""


def _read(source: str, table: str) -> list[ForeignOption]:
    options = []
    for line in table.strip().splitlines():
        names, arrow, ours = line.partition(" -> ")
        path, _, note = ours.partition(" ; ")
        if not arrow:
            names, _, note = line.partition(" -- ")
        for name in names.split(","):
            options.append(ForeignOption(name.strip(), source, path.strip() or None, note.strip()))
    return options


OPTIONS: tuple[ForeignOption, ...] = (
    *_read(HF, _HUGGING_FACE),
    *_read(TRL, _TRL),
    *_read(ACCELERATE, _ACCELERATE),
    *_read(DEEPSPEED, _DEEPSPEED),
    *_read(NEMO, _NEMO),
    *_read(PEFT, _PEFT),
)


def find(name: str) -> list[ForeignOption]:
    """The entries for ``name``, whatever the case and the separators: one for every trainer that
    has it.

    All parts of an entry's name have to be the last ones of ``name``, as many as possible; failing
    that, its last part alone, except where that says nothing. Within ``fsdp_config`` the prefix
    ``fsdp_`` may be left out.
    """
    wanted = _canonical(name)
    fitting = [(o, _canonical(o.name)) for o in OPTIONS]
    whole = [(o, parts) for o, parts in fitting if wanted[-len(parts) :] == parts]
    if whole:
        longest = max(len(parts) for _, parts in whole)
        return [o for o, parts in whole if len(parts) == longest]
    if "fsdpconfig" in wanted[:-1] and not wanted[-1].startswith("fsdp"):
        return find(f"fsdp_{name.rpartition('.')[2]}")
    if wanted[-1] in ("enabled", "type", "name", "device", "library", "filenames"):
        return []
    return [o for o, parts in fitting if parts[-1] == wanted[-1]]


def has_inner(name: str) -> bool:
    """Whether ``name`` is a mapping of options of another trainer, such as ``fsdp_config``."""
    last = _canonical(name)[-1]
    return any(last in _canonical(option.name) for option in OPTIONS)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The name of ``valid`` (dotted paths) that ``name`` most likely stands for."""
    choices = list(valid)
    leaves = {choice.rsplit(".", 1)[-1]: choice for choice in choices}
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaf = name.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def _canonical(name: str) -> list[str]:
    return name.replace("-", "").replace("_", "").lower().split(".")
