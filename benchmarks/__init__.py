"""CacheStore side by side with SGLang's `file` backend and with the raw limit of the machine.

Run with ``make bench``, or ``python -m benchmarks --help`` from the repository's root. It moves
pages between SGLang's own host pools and files, through the calls that SGLang makes, and prints
how fast each subject was; nothing here is a simulation of either side.
"""
