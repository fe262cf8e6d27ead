"""CacheStore: an L3 storage backend for SGLang HiCache."""
