"""A DeepSpeed ZeRO-3 engine that trains through zcompile. The profiler's engines know DeepSpeed, too.

`takeover.py` is where to begin. Its notes say what zcompile takes over from DeepSpeed, and what stays DeepSpeed's.

| file | job |
|---|---|
| flag.py | sees an engine being made whose config has the block |
| config.py | the "zcompile" block of a DeepSpeed config; what else in a config is refused |
| takeover.py | takes an engine over and gives it back; `attach` |
| engine_methods.py | what stands in for the engine's compile, forward, backward, step and destroy |
| fallback.py | what may fail, and what happens then; running a forward again |
| leaf_modules.py | DeepSpeed's leaf modules, which are units |
| hooks.py | DeepSpeed's module and gradient hooks: removed, restored; what runs around a forward |
| partitions.py | one ZeRO-3 parameter as a sharded parameter |
| optimizer_step.py | the optimizer's step without copies of gradients and main parameters |
| gradients.py | where gradients lie between backward and step, and their squares |
| sub_groups.py | one flat main parameter, updated parameter by parameter |

[Note: what is used of DeepSpeed]
DeepSpeed has no public way to replace gathers and reduces. These are all the private attributes that this folder reads,
calls, sets or replaces. They are there in DeepSpeed 0.17 to 0.19. Tests ran on 0.17.0, 0.17.6, 0.18.9 and 0.19.8.

| of | attribute | used in | for |
|---|---|---|---|
| engine | `_forward_prologue`, `_forward_epilogue` | hooks | timers, casts and profilers, which its forward hooks run |
| engine | `_create_module_forward_pre_hook`, `_create_module_forward_post_hook` | hooks | registering them again |
| engine | `_is_compiled`, `_compile_kwargs` | takeover | `engine.is_compiled` |
| engine | `_is_gradient_accumulation_boundary` | engine_methods | whether the program marks the last microbatch |
| engine | `_stop_timers` | engine_methods | ending a backward that failed |
| engine | `_config._param_dict` | takeover, flag | the config as it was written |
| optimizer | `_partition_all_parameters` | hooks | leaving no parameter unsharded |
| optimizer | `_grad_acc_hooks`, `_leaf_module_hooks` | hooks | removing gradient hooks |
| optimizer | `parameter_offload._remove_module_hooks` | hooks | removing module hooks |
| optimizer | `_coalesce_grad_reduction` (not in all) | takeover | refusing coalesced reduction |
| optimizer | `_epilogue_ran_this_backward` (since 0.18) | optimizer_step | whether the step has its list of gradients |
| optimizer | `__param_id_to_grad_partition` (name-mangled) | gradients | where DeepSpeed looks for gradients |
| optimizer | `_get_norm_groups`, `_prepare_fp32_grad_for_sub_group`, `_optimizer_step` | optimizer_step | replaced |
| `module._parameters` | `_in_forward` | hooks | ZeRO's dictionaries gather while it is set |

These names are public, but DeepSpeed does not document them:

| of | attribute | used in |
|---|---|---|
| parameter | `ds_id`, `ds_tensor`, `ds_numel`, `ds_shape`, `ds_process_group`, `ds_persist` | everywhere |
| parameter | `partition_numel` | everywhere |
| engine | `module_forward_pre_hook`, `module_forward_post_hook` | hooks |
| engine | `tput_timer.config`, `engine_timers` | takeover, engine_methods |
| engine | `micro_steps`, `global_steps` | engine_methods |
| optimizer | `fp16_groups` | takeover, optimizer_step, gradients, sub_groups |
| optimizer | `fp16_partitioned_groups_flat`, `fp32_partitioned_groups_flat` | optimizer_step, sub_groups |
| optimizer | `averaged_gradients`, `micro_step_id`, `gradient_accumulation_dtype` | engine_methods, optimizer_step |
| optimizer | `grad_partitions_flat_buffer`, `ipg_buckets` (since 0.17.1) | gradients |
| optimizer | `partition_grads`, `reduce_and_partition_stream` | partitions |
| optimizer | `persistent_parameters`, `parameter_offload.forward_hooks`, `.backward_hooks` | hooks |
| optimizer | `parameter_offload.setup_zero_stage3_hooks`, `create_reduce_and_remove_grad_hooks` | hooks |
| optimizer | `exit_backward` (since 0.18) | engine_methods |
| optimizer | `dp_process_group` | takeover, optimizer_step |
| optimizer | `model_parallel_group`, `offload_optimizer` | optimizer_step |
| optimizer | `use_muon` | fallback |
| optimizer | `sub_group_to_group_id`, `loss_scale`, `clip_grad` | optimizer_step |
| optimizer | `torch_autocast_gradscaler` | sub_groups |
| optimizer | the other methods in `LeanStep.REPLACED` | optimizer_step |
| `zero.partition_parameters` | `InsertPostInitMethodToModuleSubClasses.linear_bk` | hooks |
| `utils` | `z3_leaf_module` | leaf_modules |
| `runtime.zero.config` | `DeepSpeedZeroConfig.__init__`, which takes no unknown settings | flag |
"""
