"""The engine: negotiation of operations by name, fusion, and execution in one background thread.

Pure modules: requests, messages, request_cache, agreement, negotiation, fusion, stall, autotune. Modules with state
or I/O: handles, buffers, transport, streams, execution, engine, tuning.
"""
