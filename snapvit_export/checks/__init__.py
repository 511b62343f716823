"""Checks that a file must pass: gates between forms of one model, and the measurements behind them. Light."""
