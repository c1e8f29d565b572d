"""STAGE's transformers, of both generations, straight into the columns of traces."""
