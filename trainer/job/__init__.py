"""The job of this process: init and shutdown, process sets, and the submission of operations to the engine."""
