"""CacheStore side by side with SGLang's `file` backend, and with the raw limits of the machine.

Run with ``make bench``, or ``python -m benchmarks --help`` from the repository's root. It moves
pages between SGLang's own host pools, the cache and files, through the calls that SGLang makes,
and prints how fast each subject was: nothing of that is a simulation of either side. Request
traces are replayed through the real cache, beside a plain LRU.
"""
