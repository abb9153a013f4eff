"""Who owns which page: the pool's ledger, its proofs, slots and admission.

Here: page ledger, proofs, metadata slots, admission arithmetic. Not here: tensors, transports, time, asyncio.
"""
