"""Training libraries -> their training steps inside `with ooc.step():`.

`hugging_face` has a `Trainer` and a mixin for other trainers, `lightning` a callback. Accelerate,
DistributedDataParallel and FSDP2 leave the loop to the user and need nothing of ours:
`ooc = outcore.limit(accelerator.unwrap_model(model), ...)`.
"""
