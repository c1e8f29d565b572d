"""Finds what slow workers cost a real job: it replays recorded operations as they were and as if all were alike."""
