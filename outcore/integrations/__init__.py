"""Integrations with training libraries, which run their training steps inside `with ooc.step():`.

`hugging_face` has a `Trainer` and a mixin for other trainers, `lightning` a callback. Accelerate,
DistributedDataParallel and FSDP2 leave the training loop to the user and need no integration:
`ooc = outcore.limit(accelerator.unwrap_model(model), ...)`.
"""
