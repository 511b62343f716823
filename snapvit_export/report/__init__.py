"""What people look at: tables for the terminal, and the report: one page, plots, Markdown, numbers. Light: rich and what
draws are imported when something is drawn."""
