"""The console command: one file for each subcommand, without logic of its own."""
