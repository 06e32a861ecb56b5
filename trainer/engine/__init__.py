"""The engine: negotiates operations by name, fuses them, and runs them from one background thread.

Pure parts: requests, messages, request_cache, agreement, negotiation, fusion, stall. Parts with state or I/O:
handles, buffers, transport, streams, execution, engine. No part reads the environment.
"""
