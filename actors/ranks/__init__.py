"""What holds the ranks of one instance together: joining, forwards on all of them, and that they end as one.

Here: the leader's record of its followers, the followers' common half, the end. Not here: what a rank writes or takes
in (actors/prefill, actors/decode), which ranks meet (transfer.ranks).
"""
