"""HiCache's host-to-device load-back, enqueued on a thread of its own (docs/async-load.md).

SGLang's ``HiCacheController.start_loading`` enqueues a whole load-back burst, layer by layer, on
the scheduler thread: hundreds of milliseconds with many layers, and every copy has landed before
the forward starts. With ``SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE=1`` the scheduler thread only hands the
burst out; one loader thread enqueues it while the forward runs. Start with ``controller.py``.

Three threads of control meet here:

- the scheduler thread hands bursts out, runs the forwards that wait for their layers, and reaps
  acks;
- the loader thread (``hicache-load-enqueue``) takes bursts in the order in which they were handed
  out, and is the only one that puts load-back copies on the host-to-device stream and acks on
  ``ack_load_queue``;
- the device runs streams; it is never waited for here but where SGLang does so itself.

The modules hold the methods that SGLang's classes get, as they would be written there, and
``install.py`` sets them. Nothing here knows of storage: it works with any backend, and with none.
"""
