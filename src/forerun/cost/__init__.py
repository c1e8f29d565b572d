"""Program op -> nanoseconds."""
