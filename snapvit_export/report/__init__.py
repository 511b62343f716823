"""What people look at: tables for the terminal, and the report: one page, plots, Markdown, numbers.

Light: rich, jinja2 and what draws are imported when something is drawn.
"""
