"""The trainer: configuration, the processes of a job, the loop, and what a run leaves behind."""
