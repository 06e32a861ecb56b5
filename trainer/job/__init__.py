"""The membership of this process in a job: init, process sets, submission of operations."""
