"""`python -m snapvit_export.cli`."""

from .app import main

main()
