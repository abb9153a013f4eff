"""The data plane: bytes from registered memory here to registered memory there, one-sided.

Here: the contract, the plan (which bytes go where; pure), the backends. Not here: rooms, requests, Ray, HTTP;
a backend knows addresses and lengths, never "KV".
"""
