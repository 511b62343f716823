"""The Elastic folder: a model in rank order that gives the weights of any Plan, corrected or not. Light."""
