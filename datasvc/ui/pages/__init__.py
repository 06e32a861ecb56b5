"""The pages: a module for each subject. Its functions read values; they are called in threads."""
