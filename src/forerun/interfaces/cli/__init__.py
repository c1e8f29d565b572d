"""The console command: one file a subcommand, no logic."""
