"""What people look at: tables for the terminal. Light: rich, imported when a table is drawn."""
