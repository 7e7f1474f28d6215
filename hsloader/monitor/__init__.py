"""What is happening: counters, log lines, stall reports, and the examination of any running process."""
