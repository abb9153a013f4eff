"""The model and what surrounds one forward: loading, paged KV, batches, sampling, text.

Here: loader, transformers adapter, KV pool, step plans, sampler, stop rules, tokenizer. Not here: rooms, links,
queues of requests, Ray.
"""
