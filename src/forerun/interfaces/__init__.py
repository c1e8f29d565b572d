"""The interfaces of Forerun: Python, the command line, the planner in the browser, reports and pictures."""
