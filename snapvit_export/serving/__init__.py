"""Elastic inference: one process, all variants of a family, and each request answered before its deadline. Light."""
