"""This process as a rank of a job: init and shutdown, process sets, submission of operations."""
