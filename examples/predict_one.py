"""Predict one plan: Llama-3.1-8B on 8 H100s with FSDP, as torchtitan trains it."""

import forerun

plan = forerun.Plan(seq_len=8192, micro_batch=1, dp_shard=8, activation_checkpointing="selective")
prediction = forerun.predict("llama-3.1-8b", plan, "h100-sxm")

print(f"step time    {prediction.step_time_s:.2f} s")
print(f"tokens/s/GPU {prediction.tokens_per_s_per_gpu:,.0f}")
print(f"MFU          {prediction.mfu:.1%}")
print(f"memory       {prediction.peak_reserved_gib:.1f} of {prediction.memory_limit_gib:.1f} GiB")
for cause, seconds in sorted(prediction.breakdown.items(), key=lambda item: -item[1]):
    print(f"  {cause:26} {seconds / prediction.step_time_s:6.1%}")
