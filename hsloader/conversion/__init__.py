"""Plan, run, resume and prove a conversion; export back to producers' files."""
