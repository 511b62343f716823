"""What people look at: tables for the terminal, and the report: one page, plots, Markdown, JSON.

Light: rich, jinja2 and what draws are imported when something is drawn.
"""
