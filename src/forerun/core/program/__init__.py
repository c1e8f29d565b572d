"""The intermediate representation of one optimizer step."""
