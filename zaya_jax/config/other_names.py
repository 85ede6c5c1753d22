"""Names of settings in other libraries (transformers, TRL, torchtitan, Megatron-LM, MaxText, axolotl), and ours."""

from collections.abc import Mapping
from typing import Any

from zaya_jax.config.data import DataConfig
from zaya_jax.config.phases import BatchConfig, PhaseConfig

_SAME = {
    "model.expert_size": "intermediate_size moe_intermediate_size ffn_hidden_size moe_ffn_hidden_size n_inner",
    "model.hidden_size": "n_embd d_model dim emb_dim base_emb_dim",
    "model.init_std": "initializer_range init_method_std",
    "model.max_positions": "max_position_embeddings n_positions",
    "model.norm_eps": "rms_norm_eps layer_norm_eps norm_epsilon",
    "model.num_experts": "num_local_experts n_routed_experts num_moe_experts moe_num_experts",
    "model.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads base_num_kv_heads",
    "model.num_layers": "num_hidden_layers n_layer n_layers base_num_decoder_layers",
    "model.num_query_heads": "num_attention_heads num_heads n_head n_heads base_num_query_heads",
    "model.rope_base": "rope_theta rotary_base rope_max_timescale",
    "data.context": "seq_len seq_length sequence_length max_seq_length max_seq_len max_length block_size cutoff_len "
    "context_length max_target_length sequence_len",
    "optimizer.muon.learning_rate for matrices (of attention, router and experts), optimizer.adamw.learning_rate for "
    "the rest (embedding, norms, convolutions) and for adapters": "lr learning_rate max_lr",
    "optimizer.muon.weight_decay for matrices, optimizer.adamw.weight_decay for the rest": "weight_decay wd",
    "optimizer.adamw.b1": "beta1 adam_beta1 adam_b1",
    "optimizer.adamw.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.adamw.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.clip_norm": "max_grad_norm grad_clip clip_grad max_norm gradient_clip_val gradient_clipping_threshold",
    "phases.NAME.schedule.shape": "lr_scheduler_type lr_scheduler lr_decay_style decay_type",
    "phases.NAME.schedule.final, as a fraction of the peak": "min_lr min_lr_ratio lr_min_ratio end_lr final_lr",
    "train.batch.micro_batch": "micro_batch_size per_device_train_batch_size local_batch_size device_batch_size",
    "train.compute_dtype (bfloat16 or float32)": "bf16 fp16 dtype torch_dtype precision mixed_precision",
    "train.remat (dots or full)": "gradient_checkpointing activation_checkpointing activation_checkpoint remat_policy",
    "train.log_every": "logging_steps log_interval log_freq log_period",
    "train.sinks": "report_to enable_wandb use_wandb wandb logger enable_tensorboard",
    "checkpoint.every": "save_steps save_interval checkpoint_interval checkpoint_period save_every",
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep",
    "evaluation.patience, in evaluations": "early_stopping early_stopping_patience patience",
    "checkpoint.keep_best, by the held-out loss": "metric_for_best_model load_best_model_at_end save_best",
    "evaluation.every": "eval_steps eval_interval eval_every",
    "evaluation.batches": "eval_iters max_eval_steps",
    "evaluation.batch_size": "per_device_eval_batch_size eval_batch_size",
    "parallel.fsdp": "fsdp_size data_parallel_shard_degree ici_fsdp_parallelism zero_stage sharding_strategy",
    "parallel.data": "data_parallel_size data_parallel_replicate_degree dp_size ici_data_parallelism",
    "parallel.expert": "expert_parallel_size expert_model_parallel_size ep_size ici_expert_parallelism",
    "parallel.context": "context_parallel_size cp_size context_parallel_degree sequence_parallel_size",
    "run_dir": "output_dir save out_dir output_path base_output_directory logging_dir run_name job_name save_dir",
    "data.sources.NAME.path": "dataset dataset_name dataset_path data_path train_file train_data datasets",
    "init_from": "model_name_or_path pretrained_model_name_or_path base_model load",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
}
_IN_TOKENS = {  # sizes that other libraries count in steps or sequences
    "phases.NAME.tokens": "max_steps num_train_steps train_iters num_steps total_steps steps max_iters training_steps",
    "phases.NAME.schedule.warmup_tokens": "warmup_steps num_warmup_steps lr_warmup_iters warmup_iters lr_warmup_steps",
    "phases.NAME.schedule.decay_tokens": "decay_steps lr_decay_iters lr_decay_steps wsd_decay_steps",
    "train.batch.tokens": "batch_size global_batch_size train_batch_size total_batch_size",
}
_SENTENCES = {
    "A step accumulates as many micro-batches as fill train.batch.tokens: set train.batch.micro_batch, the sequences "
    "of each on a device.": "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "Set phases.NAME.schedule.warmup_tokens to that share of the phase's tokens.": "warmup_ratio warmup_fraction",
    "Set phases.NAME.tokens to the tokens of all epochs (`python -m zaya_jax.data describe CONFIG` counts a source); "
    "data.sources.NAME.max_epochs is a limit.": "num_train_epochs num_epochs epochs max_epochs",
    "ZAYA1 has no dropout. evaluation.patience ends a run that overfits.": "dropout lora_dropout "
    "attention_dropout hidden_dropout attn_dropout resid_pdrop embd_pdrop",
    "With lora.rank, all matrices of attention and experts have adapters.": "target_modules "
    "lora_target_modules lora_target",
    "ZAYA1 routes each token to one expert.": "num_experts_per_tok moe_router_topk top_k experts_per_token",
    "Rerunning a command resumes from the newest checkpoint in run_dir.": "resume_from_checkpoint resume",
    "The axes of a layout are parallel.data, parallel.fsdp, parallel.expert and parallel.context.": "tp_size pp_size "
    "tensor_parallel_size tensor_model_parallel_size pipeline_parallel_size pipeline_model_parallel_size",
    "The tokenizer is that of the prepared data: `python -m zaya_jax.data prepare --tokenizer`.": "tokenizer "
    "tokenizer_name tokenizer_path vocab_file",
}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in table.items() for name in names.split()}


TRANSLATED = (
    {name: f"Here it is {key}, in tokens." for name, key in _by_name(_IN_TOKENS).items()}
    | {name: f"Here it is {key}." for name, key in _by_name(_SAME).items()}
    | _by_name(_SENTENCES)
)


def example(name: str, value: Any, tree: Mapping[str, Any]) -> str:
    """Return our override for a value that another library counts in steps or sequences, '' for other names.

    Sizes are taken from `tree`, a configuration of plain values.
    """
    key = _by_name(_IN_TOKENS).get(name)
    if key is None or type(value) is not int or value <= 0:
        return ""
    if key.startswith("train."):
        tokens, unit = _number(tree, "data", "context") or DataConfig.context, "sequences"
    else:
        tokens, unit = _number(tree, "train", "batch", "tokens") or BatchConfig.tokens, "steps"
    phases = tree.get("phases")
    first = phases[0] if isinstance(phases, list) and phases and isinstance(phases[0], dict) else {}
    key = key.replace("NAME", str(first.get("name", PhaseConfig.name)))
    return f" For {value:,} {unit} of {tokens:,} tokens: {key}={value * tokens:_}."


def _number(tree: Any, *keys: str) -> int | None:
    """Return the whole number at nested keys; None if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if type(tree) is int and tree > 0 else None
