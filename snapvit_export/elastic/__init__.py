"""The Elastic folder: a model in rank order that gives any Plan's weights, corrected or not, without torch. Light."""
