"""What other trainers call our options, and what they have that we do not offer, with the reason.

A line reads ``their name(s) -> our dotted path ; how the value differs`` or
``their name(s) -- why there is none``. Nested names are written with as many of their parts as it
takes to tell them apart (``zero_optimization.stage``). NeMo's are Lightning's too. Of Axolotl those
that are not Hugging Face's.
"""

from __future__ import annotations

HF, TRL, ACCELERATE, DEEPSPEED, NEMO, PEFT, AXOLOTL = (
    "Hugging Face",
    "TRL",
    "Accelerate",
    "DeepSpeed",
    "NeMo",
    "PEFT",
    "Axolotl",
)

_HUGGING_FACE = """
num_train_epochs -> train.epochs
max_steps -> train.max_steps ; unset instead of -1
per_device_train_batch_size, per_gpu_train_batch_size -> train.micro_batch_size
gradient_accumulation_steps -> train.gradient_accumulation_steps
auto_find_batch_size -> train.micro_batch_size ; auto
per_device_eval_batch_size, per_gpu_eval_batch_size -> train.eval_micro_batch_size
learning_rate -> train.learning_rate
lr_scheduler_type -> train.schedule ; cosine, linear, constant, or wsd for warmup_stable_decay
lr_scheduler_kwargs -> train.decay_steps ; num_decay_steps, and min_lr is train.min_learning_rate
warmup_steps -> train.warmup ; whole steps
warmup_ratio -> train.warmup ; a share of the run when below 1
optim, adafactor -> train.optimizer ; adamw, adamw_8bit, sgd or adafactor
optim_args -> train.optimizer ; {name: sgd, momentum: 0.9}
optim_target_modules -- every trained weight has the same optimizer
weight_decay -> train.weight_decay
adam_beta1, adam_beta2 -> train.betas ; both in one list
adam_epsilon -> train.optimizer ; {name: adamw, eps: 1.0e-8}
max_grad_norm -> train.max_grad_norm
label_smoothing_factor -- the loss is plain cross-entropy
neftune_noise_alpha -- embeddings get no noise
average_tokens_across_devices -- it is always so: every trained token weighs the same
bf16, fp16, fp16_opt_level, half_precision_backend, fp16_backend -> \
train.precision ; bf16, fp16 or fp32
tf32 -- it is on where the GPU has it; weights and sums are fp32
bf16_full_eval, fp16_full_eval -- held-out rows are evaluated in train.precision
gradient_checkpointing, activation_checkpointing -> model.gradient_checkpointing ; full, not true
gradient_checkpointing_kwargs, activation_checkpointing_kwargs -> \
model.gradient_checkpointing ; never reentrant
torch_compile, torch_compile_backend, torch_compile_mode, torchdynamo -> model.compile ; true
use_liger_kernel, liger_kernel_config -> model.use_liger_kernel ; true, false or auto
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
eval_strategy, evaluation_strategy, eval_steps -> train.eval_every ; steps, or epoch
eval_delay, eval_on_start, do_eval -- it is evaluated before the first and after the last step
eval_accumulation_steps, prediction_loss_only, eval_do_concat_batches -- only the loss is kept
include_for_metrics, include_inputs_for_metrics, batch_eval_metrics -- \
logits are not gathered; train(cfg, metrics=...) gets the model itself
eval_use_gather_object -- only sums travel between ranks
do_train, do_predict -- train() trains, generate() answers
save_strategy, save_steps -> checkpoint.every ; steps, epoch or never; best is keep_best
save_total_limit -> checkpoint.keep_last ; the best are kept besides
save_only_model, save_on_each_node, save_safetensors -- a checkpoint is whole and shared
load_best_model_at_end -> checkpoint.keep_best ; 1: the best model is exported beside the last
metric_for_best_model -> checkpoint.metric ; with eval_ in front
greater_is_better -> checkpoint.metric_mode ; max or min
resume_from_checkpoint -> checkpoint.resume ; auto is the newest of the run folder
ignore_data_skip, restore_callback_states_from_checkpoint -- a resumed run goes on where it was
enable_jit_checkpoint -- a run that is told to end writes a checkpoint
push_to_hub, push_to_hub_model_id, push_to_hub_organization, push_to_hub_token -- \
export(..., push_to_hub="org/name") uploads, with HF_TOKEN of the environment
hub_token, hub_model_id, hub_strategy, hub_private_repo, hub_always_push, hub_revision -- \
export(..., push_to_hub="org/name") uploads, with HF_TOKEN of the environment
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
fsdp -> parallel.kind ; fsdp, with parallel.shard and parallel.cpu_offload
fsdp_config, fsdp_min_num_params, fsdp_transformer_layer_cls_to_wrap -> parallel.kind ; fsdp
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
config_name, config_overrides, model_type -> model.config ; {field of the configuration: value}
tokenizer_name -> model.tokenizer
add_tokens, additional_special_tokens, extra_special_tokens, special_tokens -> model.new_tokens
resize_token_embeddings, new_num_tokens -> model.new_tokens ; the embedding grows with them
resize_token_embeddings_to_32x -> model.tokenizer ; {pad_vocab_to_multiple_of: 32}
low_cpu_mem_usage -- every rank reads its own part of the weights
use_fast_tokenizer -- the tokenizer is the model's own
early_stopping_patience, early_stopping_threshold -> \
train.early_stopping ; {patience: evaluations, min_delta: threshold}
max_train_samples -> data.train ; {path, max_rows}
max_eval_samples -> train.eval_max_rows ; the whole set at the end; {path, max_rows} for less
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
lora_modules_to_save, lora_target_parameters -> model.lora ; by PEFT's name, without lora_
use_rslora -> model.lora ; {use_rslora: true}
use_dora -> model.lora ; {use_dora: true}
lora_task_type -- it follows from the model
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
distributed_type -> parallel.kind ; NO: single, MULTI_GPU: ddp, FSDP: fsdp, DEEPSPEED: deepspeed
multi_gpu, use_fsdp, use_deepspeed -> parallel.kind ; ddp, fsdp or deepspeed
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
parallel.shard ; FULL_SHARD (true): full, SHARD_GRAD_OP (false): grad_op, HYBRID_SHARD: hybrid
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
the scale of the loss is found by itself with fp16, and bf16 needs none (train.precision)
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
optimizer.params.eps -> train.optimizer ; {name: adamw, eps: 1.0e-8}
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
val_check_interval, eval_interval -> train.eval_every ; steps
check_val_every_n_epoch -> train.eval_every ; epoch
num_sanity_val_steps -- it is evaluated before the first and after the last step
limit_val_batches, eval_iters -> train.eval_max_rows ; examples, not batches
limit_test_batches -> data.test ; {path, max_rows}
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
optim.eps, adam_eps -> train.optimizer ; {name: adamw, eps: 1.0e-8}
optim.sched.name, lr_decay_style, lr_wsd_decay_style -> train.schedule
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
make_vocab_size_divisible_by -> model.tokenizer ; {pad_vocab_to_multiple_of: 128}
activations_checkpoint_granularity, activations_checkpoint_method, recompute_granularity -> \
model.gradient_checkpointing
fp8, fp8_margin, fp8_recipe, transformer_engine -- fp8 is not supported: train.precision
exp_dir, explicit_log_dir, save_dir, default_root_dir -> checkpoint.dir
every_n_train_steps, save_interval -> checkpoint.every ; steps
every_n_epochs, save_on_train_epoch_end -> checkpoint.every ; epoch
train_time_interval -> checkpoint.every_minutes
save_top_k -> checkpoint.keep_best
save_last, async_save, save_weights_only -- one is always written at the end, whole, and while \
training goes on
always_save_nemo, save_nemo_on_train_end -> checkpoint.export
monitor -> checkpoint.metric
patience, min_delta -> train.early_stopping ; {patience: evaluations, min_delta: by how much}
resume_if_exists, load_dir -> checkpoint.resume
resume_ignore_no_checkpoint -- checkpoint.resume=auto starts anew where there is none
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
trainable_token_indices, layer_replication -> model.lora
task_type, peft_type, inference_mode, fan_in_fan_out -- it follows from the model
"""

_AXOLOTL = """
num_epochs -> train.epochs
lr_scheduler -> train.schedule
sequence_len -> data.max_length
sample_packing, eval_sample_packing, pad_to_sequence_len -> data.packing
val_set_size -> data.eval ; a share, such as 0.02
test_datasets -> data.eval
train_on_inputs -> data.train_on ; all
roles_to_train, train_on_eos -> data.train_on ; assistant, with the end of its turns
dataset_prepared_path -> data.cache_dir
eval_batch_size -> train.eval_micro_batch_size
evals_per_epoch -> train.eval_every ; steps, or epoch
saves_per_epoch -> checkpoint.every ; steps, or epoch
auto_resume_from_checkpoints -> checkpoint.resume ; auto
do_causal_lm_eval, eval_causal_lm_metrics -- train(cfg, metrics=...) gets the model itself
eval_table_size, eval_max_new_tokens -> train.sample_prompts
adapter -> model.lora
lora_target_linear -> model.lora.target_modules ; all-linear
merge_lora -- a run exports the merged model and the adapter
flash_attention, sdp_attention, eager_attention, xformers_attention -> model.attention
mlflow_experiment_name -> tracking.experiment
mlflow_run_name -> tracking.run_name
mlflow_tracking_uri -- the environment's MLFLOW_TRACKING_URI
hf_mlflow_log_artifacts -> tracking.log_model
"""

TABLES: tuple[tuple[str, str], ...] = (
    (HF, _HUGGING_FACE),
    (TRL, _TRL),
    (ACCELERATE, _ACCELERATE),
    (DEEPSPEED, _DEEPSPEED),
    (NEMO, _NEMO),
    (PEFT, _PEFT),
    (AXOLOTL, _AXOLOTL),
)
"""Whose options, and the lines."""
