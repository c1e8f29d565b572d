"""What slow workers cost a real job: its recorded operations, replayed as they were and as they would be alike."""
