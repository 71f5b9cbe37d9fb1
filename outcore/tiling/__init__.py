"""Matrix products larger than a device, over unequal devices, and training on them.

In the order of data flow: `tiles` plans (without torch), `tasks` distributes the work, `slots` caches blocks, `streams`
and `operands` are the two sides of a copy, `pipeline` runs one device's share, `product` has the public function
(`outcore.matmul`), `linear` and `embedding` are layers on it, `model` puts them into a model (`outcore.tile`), `adamw`
trains them, `cli` is `outcore matmul`.
"""
