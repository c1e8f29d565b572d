"""The page: HTML, styles and scripts, which the server sends as they are."""
