"""The job of this process: init and shutdown, process sets, submission of operations to the engine."""
