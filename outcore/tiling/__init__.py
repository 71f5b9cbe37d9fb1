"""Matrix products larger than a device, over unequal devices, and training on them.

In data order: `tiles` plans (no torch), `tasks` shares the work out, `slots` caches blocks, `streams` and `operands`
are the two sides of a copy, `pipeline` carries one device's share, `product` is the front door (`outcore.matmul`),
`linear` and `embedding` are layers on it, `model` puts them into a model (`outcore.tile`), `adamw` trains them, `cli`
prints it (`outcore matmul`).
"""
