"""The experiment file: from sections to a Request, every key checked; and back."""
