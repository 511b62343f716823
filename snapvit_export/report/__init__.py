"""Presentation of a family: tables for the terminal, and the report as a page, plots, Markdown or JSON.

Light: rich, jinja2 and vl-convert are imported when something is drawn.
"""
